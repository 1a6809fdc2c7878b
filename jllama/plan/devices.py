"""The accelerators that can be planned for: their published rates, and topologies of them that need no hardware.

Sources: Google's documentation of each TPU version, NVIDIA's data sheets (dense bfloat16, without sparsity), and what
the GPUs themselves report to XLA (``GpuTargetConfigProto``).
"""

import importlib.util
import math
import os
from typing import Any, NamedTuple

from jllama.errors import UsageError, unknown_name

_GIB = 2**30


class Accelerator(NamedTuple):
    """One device: memory in bytes and rates per second, those between devices as what one device receives at most.

    Args:
        flops: bfloat16 operations, two for each multiply-add.
        links: bytes from its neighbors: all links of a TPU, NVLink of a GPU.
        network: bytes from outside its node of eight (GPUs).
        gpu: what XLA is told of a GPU: compute capability, cores, units a core, clock in GHz, second-level cache and
            shared memory of a core in bytes, and its name.
        dimensions: of a TPU's torus.
    """

    memory_bytes: int
    flops: float
    bandwidth: float
    links: float
    network: float = 0.0
    gpu: tuple[int, int, int, float, int, int, str] | None = None
    dimensions: int = 2


_HOPPER = (9, 132, 128, 1.98, 52428800, 233472)
ACCELERATORS = {
    "v4": Accelerator(int(30.75 * _GIB), 275e12, 1.228e12, 300e9, dimensions=3),
    "v5e": Accelerator(int(15.75 * _GIB), 197e12, 0.819e12, 200e9),
    "v5p": Accelerator(int(95.74 * _GIB), 459e12, 2.765e12, 600e9, dimensions=3),
    "v6e": Accelerator(int(31.25 * _GIB), 918e12, 1.640e12, 448e9),
    "a100": Accelerator(
        85100068864, 312e12, 2.039e12, 300e9, 25e9, (8, 108, 64, 1.41, 41943040, 167936, "NVIDIA A100-SXM4-80GB")
    ),
    "h100": Accelerator(84942979072, 989e12, 3.352e12, 450e9, 50e9, (*_HOPPER, "NVIDIA H100 80GB HBM3")),
    "h200": Accelerator(151397597184, 989e12, 4.8e12, 450e9, 50e9, (*_HOPPER, "NVIDIA H200 141GB HBM3e")),
    "b200": Accelerator(
        191514411008, 2250e12, 7.672e12, 900e9, 50e9, (10, 148, 128, 1.965, 132644864, 233472, "NVIDIA B200")
    ),
    "gb200": Accelerator(
        197897748480, 2500e12, 7.928e12, 900e9, 50e9, (10, 152, 128, 2.062, 135528448, 233472, "NVIDIA GB200")
    ),
}
"""By the name that a topology begins with. A TPU's memory is what its compiler gives to a program."""

_NODE = 8  # GPUs


def topology_devices(topology: str) -> tuple[Accelerator, list[Any]]:
    """The kind of accelerator and the devices of a topology, such as ``v5p:4x4x4``, ``h100:512`` (in nodes of eight).

    Programs can be compiled for them, not run. ``UsageError`` for a topology that does not exist, or without the
    package that compiles for it.
    """
    kind, _, shape = topology.partition(":")
    if kind not in ACCELERATORS:
        raise unknown_name("accelerator", kind, ACCELERATORS)
    accelerator = ACCELERATORS[kind]
    if accelerator.gpu is None:
        return accelerator, _tpu_devices(topology, shape, accelerator)
    return accelerator, _gpu_devices(topology, shape, accelerator)


def _tpu_devices(topology: str, shape: str, accelerator: Accelerator) -> list[Any]:
    sizes = [int(size) for size in shape.split("x") if size.isdecimal()]
    if len(sizes) != accelerator.dimensions or not math.prod(sizes):
        example = "x".join(["4"] * accelerator.dimensions)
        raise UsageError(
            f"{topology} is no topology: give the sides of the slice, such as {topology.split(':')[0]}:{example}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("planning for TPUs needs libtpu: pip install 'jllama[plan-tpu]'")
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")  # any will do: the topology says which
    return _describe(topology, platform="tpu", topology_name=topology)


def _gpu_devices(topology: str, shape: str, accelerator: Accelerator) -> list[Any]:
    count = int(shape) if shape.isdecimal() else 0
    if not count or (count > _NODE and count % _NODE):
        example = f"{topology.split(':')[0]}:8"
        raise UsageError(
            f"{topology} is no topology: give the number of GPUs, to 8 or a multiple of 8, such as {example}"
        )
    if importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise UsageError("planning for GPUs needs JAX's CUDA packages: pip install 'jllama[cuda]'")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    nodes = f"1x{max(1, count // _NODE)}x{min(count, _NODE)}"
    return _describe(topology, platform="cuda", topology=nodes, target_config=_target_config(accelerator))


def _describe(described: str, **options: Any) -> list[Any]:
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # of many types: what the compiler's library says of names and versions
        raise UsageError(f"{described} cannot be planned for: {' '.join(str(error).split())[:300]}") from error


def _target_config(accelerator: Accelerator) -> str:
    assert accelerator.gpu is not None
    capability, cores, units, clock, cache, shared, name = accelerator.gpu
    feature = "ACCELERATED_FEATURES" if capability >= 9 else "NONE"
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024} shared_memory_per_core: {shared}
      core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
      device_memory_size: {accelerator.memory_bytes} memory_bandwidth: {int(accelerator.bandwidth)}
      cuda_compute_capability {{ major: {capability} feature_extension: {feature} }}
      runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" driver_version: "13.0.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 }}
    device_description_str: "{name}"
    """


def interconnect_s(accelerator: Accelerator, group: int, received_bytes: float) -> float:
    """The least time of an exchange in groups of devices: over links, or the network where a group leaves its node."""
    leaves_node = accelerator.gpu is not None and group > _NODE
    return received_bytes / (accelerator.network if leaves_node else accelerator.links)
