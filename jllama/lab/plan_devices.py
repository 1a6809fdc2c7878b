"""Topologies of absent accelerators: devices that programs can be compiled for, but not run on."""

import functools
import importlib.metadata
import itertools
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jllama.core import UsageError
from jllama.system.devices import ACCELERATORS, Accelerator
from jllama.system.errors import unknown_name

# With these, planning needs no network and no driver, and several processes can plan at once.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # any type: the topology says which is planned for
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
_CORES = {8.0: (164, 64, 2048), 8.9: (100, 128, 1536), 9.0: (228, 128, 2048)}
"""KiB of shared memory, units and threads of a GPU's core, by its compute capability."""


class MeasuredShares(NamedTuple):
    """Measured rates of one device, as shares of its published rates.

    Attributes:
        products: of large matrices in bfloat16.
        bandwidth: of a long copy.
        attention: of each kernel, forward and in both passes. All pairs of query and key are
            counted, of which causal kernels leave out half, so a share can exceed 1.
    """

    products: float
    bandwidth: float
    attention: Mapping[str, tuple[float, float]]


_HOPPER = MeasuredShares(
    0.807, 0.895, {"tokamax": (1.24, 0.527), "triton": (0.428, 0.204), "cudnn": (0.704, 0.595)}
)
MEASURED = {"h100": _HOPPER, "h100-pcie": _HOPPER, "h200": _HOPPER}
"""Measured shares by the names that topologies begin with.

Source: docs/performance.md, one NVIDIA H100 80GB HBM3 with jax 0.11.2 and tokamax 0.0.17: 798e12
operations/s in a product of 8,192 x 8,192 matrices, 3.0e12 bytes/s in a copy, and attention of rows
of 4,096 tokens with eight documents each.
"""


@functools.cache
def topology_devices(topology: str) -> tuple[Accelerator, list[Any]]:
    """Return the kind of accelerator and the devices of a topology.

    Without the packages that compile for it, as many CPU devices take its place, and that is said.

    Args:
        topology: such as ``v5p:4x4x4``, a slice by its sides, or ``h100:512``, in nodes of eight.

    Raises:
        UsageError: there is no such topology.
    """
    from jax.experimental import topologies

    # 1) Parse the topology: the kind of accelerator, and its sides or its number of devices.
    kind, _, shape = usual_topology(topology).partition(":")
    if kind not in ACCELERATORS:
        raise unknown_name("accelerator", kind, ACCELERATORS)
    accelerator = ACCELERATORS[kind]
    node = accelerator.node
    is_tpu = accelerator.sides > 0
    sides = []
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        sides = [int(side) for side in shape.split("x")]
    count = math.prod(sides)
    has_part_of_node = not is_tpu and count > node and count % node
    if len(sides) != max(1, accelerator.sides) or has_part_of_node:
        shapes = f"the number of GPUs, to {node} or a multiple of {node}"
        if is_tpu:
            shapes = "the sides of the slice"
        example = "x".join(["4"] * accelerator.sides) or "8"
        raise UsageError(f"{topology} is no topology: give {shapes}, such as {kind}:{example}")

    # 2) If the packages that compile for it are missing, return CPU devices instead.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any]
    packages = ("GPUs", "cuda", "jax-cuda13-plugin", "jax-cuda12-plugin")
    if is_tpu:
        packages = ("TPUs", "plan-tpu", "libtpu")
    try:
        _check_packages(*packages)
    except UsageError as error:
        print(
            f"note: {error}; until then its memory is by formula, at least what is stored, and its "
            "speed unknown",
            file=sys.stderr,
        )
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has devices already
            raise error from None
        return accelerator._replace(kind=""), jax.devices("cpu")

    # 3) Describe the devices to the compiler.
    if is_tpu:
        options = {"platform": "tpu", "topology_name": f"{kind}:{shape}"}
        if kind == "v4":
            options["chip_config_name"] = "megacore"
        if count == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
    else:
        options = {
            "platform": "cuda",
            "topology": f"1x{max(1, count // node)}x{min(count, node)}",
            "target_config": _target_config(accelerator),
        }
    try:
        return accelerator, list(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # the compilers' libraries raise many types
        message = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{topology} cannot be planned for, so give another topology: {message}"
        ) from error


def usual_topology(topology: str) -> str:
    """Replace a number of TPU chips by the sides of the usual slice: ``v5e:16`` is ``v5e:4x4``.

    Each side is 1, 2 or a multiple of 4, and the longest is as short as possible. Any topology that
    has no such slice is returned unchanged.

    Examples:
        >>> usual_topology("v5p:32")
        'v5p:2x4x4'
    """
    kind, _, shape = topology.partition(":")
    if kind not in ACCELERATORS or not re.fullmatch(r"\d{1,5}", shape):
        return topology
    chips = int(shape)
    sides = [side for side in (1, 2, *range(4, chips + 1, 4)) if chips % side == 0]
    slices = itertools.combinations_with_replacement(reversed(sides), ACCELERATORS[kind].sides)
    usual = min((sizes for sizes in slices if math.prod(sizes) == chips), default=())
    # Sides of 1 come last, as the makers write them: 2x2x1, 2x4x4.
    ordered = sorted(usual, key=lambda side: (side == 1, side))
    return f"{kind}:{'x'.join(map(str, ordered)) or shape}"


def _check_packages(devices: str, extra: str, *names: str) -> None:
    """Raise ``UsageError`` unless one of the packages is installed in the version of this JAX."""
    installed = {
        package.name: package.version
        for package in importlib.metadata.distributions()
        if package.name in names
    }
    requirements = " ".join(importlib.metadata.requires("jax") or ())
    match = re.search(rf"{names[0]}\S*[=>]=([\d.*]+)", requirements)
    required = match[1] if match else ""
    if not any(version.startswith(required.rstrip("*")) for version in installed.values()):
        actual = " and ".join(map(" ".join, installed.items())) or "none"
        raise UsageError(
            f"planning for {devices} with jax {importlib.metadata.version('jax')} needs "
            f"{names[0]} {required}, found {actual}: pip install 'jllama[{extra}]'"
        )


def _target_config(accelerator: Accelerator) -> str:
    """Describe a GPU to XLA, as a protocol buffer's text."""
    capability, cores, clock, cache_mib = accelerator.chip
    shared_kib, units, threads = _CORES[min(capability, 9)]
    feature = "ACCELERATED_FEATURES" if capability >= 9 else "NONE"
    major, minor = divmod(round(10 * capability), 10)
    cache = int(cache_mib * 2**20)
    shared = shared_kib * 1024
    memory = int(accelerator.memory_bytes)
    bandwidth = int(accelerator.bandwidth)
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024}
      shared_memory_per_core: {shared}
      core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
      device_memory_size: {memory} memory_bandwidth: {bandwidth}
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
      runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
      driver_version: "13.0.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 }}
    device_description_str: "{accelerator.kind}"
    """


def interconnect_s(accelerator: Accelerator, group: int, near: int, received_bytes: float) -> float:
    """Compute the shortest time in which each device of a group can receive so many bytes.

    All bytes come over links if the group is in one node or on one TPU slice. Otherwise they come
    through the network cards of the ``near`` devices of the group in a node.
    """
    rate = accelerator.links
    if near < group and accelerator.sides == 0:
        rate = min(rate, near * accelerator.network)
    return received_bytes / rate
