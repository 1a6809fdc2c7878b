"""Topologies of accelerators that are not there: devices that programs can be compiled for, not run on."""

import importlib.metadata
import itertools
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jllama.devices import ACCELERATORS, Accelerator
from jllama.errors import UsageError, unknown_name

_ENVIRONMENT = {  # nothing is asked of a network, no driver is needed, and several can plan at once
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # any will do: the topology says which
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
_CORES = {8.0: (164, 64, 2048), 8.9: (100, 128, 1536), 9.0: (228, 128, 2048)}
"""Of a GPU's core, by its capability: KiB of shared memory, units, threads."""


class MeasuredShares(NamedTuple):
    """What was measured on one device, as shares of its published rates."""

    products: float  # of large matrices in bfloat16
    bandwidth: float  # of a long copy
    attention: Mapping[
        str, tuple[float, float]
    ]  # of each kernel: forward, and both passes; all pairs are counted


_HOPPER = MeasuredShares(
    0.807, 0.895, {"tokamax": (1.24, 0.527), "triton": (0.428, 0.204), "cudnn": (0.704, 0.595)}
)
MEASURED = {"h100": _HOPPER, "h100-pcie": _HOPPER, "h200": _HOPPER}
"""By the names that topologies begin with.

Causal kernels leave out half of the pairs that are counted, so a share can exceed 1. Source: docs/performance.md, one
NVIDIA H100 80GB HBM3 with jax 0.11.2 and tokamax 0.0.17: 798e12 operations/s in a product of 8,192 x 8,192 matrices,
3.0e12 bytes/s in a copy, and attention of rows of 4,096 tokens with eight documents each.
"""


def topology_devices(topology: str) -> tuple[Accelerator, list[Any]]:
    """The kind of accelerator and the devices of a topology, such as ``v5p:4x4x4``, ``h100:512`` (in nodes of eight).

    ``UsageError`` for a topology that does not exist, or without the right packages to compile for it.
    """
    from jax.experimental import topologies

    kind, _, shape = usual_topology(topology).partition(":")
    if kind not in ACCELERATORS:
        raise unknown_name("accelerator", kind, ACCELERATORS)
    accelerator = ACCELERATORS[kind]
    is_tpu, node = accelerator.sides > 0, accelerator.node
    sides = (
        [int(side) for side in shape.split("x")]
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape)
        else []
    )
    count = math.prod(sides)
    if len(sides) != max(1, accelerator.sides) or (not is_tpu and count > node and count % node):
        what = (
            "the sides of the slice"
            if is_tpu
            else f"the number of GPUs, to {node} or a multiple of {node}"
        )
        example = "x".join(["4"] * accelerator.sides) or "8"
        raise UsageError(f"{topology} is no topology: give {what}, such as {kind}:{example}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any]
    if is_tpu:
        _check_packages("TPUs", "plan-tpu", "libtpu")
        options = {"platform": "tpu", "topology_name": f"{kind}:{shape}"}
        if kind == "v4":
            options["chip_config_name"] = "megacore"
        if count == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
    else:
        _check_packages("GPUs", "cuda", "jax-cuda13-plugin", "jax-cuda12-plugin")
        nodes = f"1x{max(1, count // node)}x{min(count, node)}"
        options = {
            "platform": "cuda",
            "topology": nodes,
            "target_config": _target_config(accelerator),
        }
    try:
        return accelerator, list(topologies.get_topology_desc(**options).devices)
    except (
        Exception
    ) as error:  # of many types: what the compiler's library says of names and versions
        said = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{topology} cannot be planned for, so give another topology: {said}"
        ) from error


def usual_topology(topology: str) -> str:
    """A topology with the sides of the usual slice where a number of TPU chips is given: ``v5e:16`` is ``v5e:4x4``.

    Each side is 1, 2 or a multiple of 4, and the longest is as short as can be. What has no such slice stays as it is.

    >>> usual_topology("v5p:32")
    'v5p:2x4x4'
    """
    kind, _, chips = topology.partition(":")
    if kind not in ACCELERATORS or not re.fullmatch(r"\d{1,5}", chips):
        return topology
    sides = [side for side in (1, 2, *range(4, int(chips) + 1, 4)) if int(chips) % side == 0]
    slices = itertools.combinations_with_replacement(reversed(sides), ACCELERATORS[kind].sides)
    usual = min((each for each in slices if math.prod(each) == int(chips)), default=())
    ordered = sorted(
        usual, key=lambda side: (side == 1, side)
    )  # 2x2x1, 2x4x4, as their makers write them
    return f"{kind}:{'x'.join(map(str, ordered)) or chips}"


def _check_packages(what: str, extra: str, *names: str) -> None:
    """Raise ``UsageError`` unless one of the packages is there, in the version that belongs to this JAX."""
    packages = {
        each.name: each.version for each in importlib.metadata.distributions() if each.name in names
    }
    wanted = re.search(
        rf"{names[0]}\S*[=>]=([\d.*]+)", " ".join(importlib.metadata.requires("jax") or ())
    )
    version = wanted[1] if wanted else ""
    if not any(each.startswith(version.rstrip("*")) for each in packages.values()):
        found = " and ".join(map(" ".join, packages.items())) or "none"
        needs = f"planning for {what} with jax {importlib.metadata.version('jax')} needs {names[0]} {version}"
        raise UsageError(f"{needs}, found {found}: pip install 'jllama[{extra}]'")


def _target_config(accelerator: Accelerator) -> str:
    capability, cores, clock, cache_mib = accelerator.chip
    shared_kib, units, threads = _CORES[min(capability, 9)]
    feature = "ACCELERATED_FEATURES" if capability >= 9 else "NONE"
    major, minor = divmod(round(10 * capability), 10)
    cache, shared = int(cache_mib * 2**20), shared_kib * 1024
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024} shared_memory_per_core: {shared}
      core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
      device_memory_size: {int(accelerator.memory_bytes)} memory_bandwidth: {int(accelerator.bandwidth)}
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
      runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" driver_version: "13.0.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 }}
    device_description_str: "{accelerator.kind}"
    """


def interconnect_s(accelerator: Accelerator, group: int, near: int, received_bytes: float) -> float:
    """The least time in which each device of a group receives this much.

    It comes over links, or where only ``near`` of the group are in one node, through the network cards of those.
    """
    alone = group == near or accelerator.sides > 0
    return received_bytes / (
        accelerator.links if alone else min(accelerator.links, near * accelerator.network)
    )
