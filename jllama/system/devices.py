"""Devices: memory and published rates of this machine's, and of other kinds."""

import os
from typing import Any, NamedTuple


class Accelerator(NamedTuple):
    """A kind of TPU or GPU; rates are per second, between devices those that one can receive.

    Args:
        kind: the start of ``jax.Device.device_kind``; empty if CPUs take its place in a plan.
        memory_bytes: memory for a program: for a TPU by its compiler, for a GPU as it reports.
        flops: dense bfloat16 operations, two for each multiply-add.
        bandwidth: bytes from its memory.
        links: bytes over all links of a TPU in one direction, or over NVLink or PCIe of a GPU.
        chip: a GPU's description for XLA: capability, cores, clock in GHz, MiB of second-level
            cache.
        network: bytes from outside a GPU's node, with the network cards of usual systems.
        sides: dimensions of a TPU's torus; 0 for GPUs.
        node: GPUs that links connect.
    """

    kind: str
    memory_bytes: float
    flops: float
    bandwidth: float
    links: float
    chip: tuple[float, ...] = ()
    network: float = 50e9
    sides: int = 0
    node: int = 8


_GIB = 2**30
_H100_BYTES = 84942979072
ACCELERATORS = {
    "v4": Accelerator("TPU v4", 30.75 * _GIB, 275e12, 1.2e12, 300e9, sides=3),
    "v5e": Accelerator("TPU v5 lite", 15.75 * _GIB, 197e12, 0.819e12, 200e9, sides=2),
    "v5p": Accelerator("TPU v5", 95.74 * _GIB, 459e12, 2.765e12, 600e9, sides=3),
    "v6e": Accelerator("TPU v6 lite", 31.25 * _GIB, 918e12, 1.638e12, 400e9, sides=2),
    "a100": Accelerator(
        "NVIDIA A100", 85100068864, 312e12, 2.039e12, 300e9, (8.0, 108, 1.41, 40), 25e9
    ),
    "h100-pcie": Accelerator(
        "NVIDIA H100 PCIe", _H100_BYTES, 756e12, 2.039e12, 64e9, (9.0, 114, 1.755, 50)
    ),
    "h100": Accelerator("NVIDIA H100", _H100_BYTES, 989e12, 3.352e12, 450e9, (9.0, 132, 1.98, 50)),
    "h200": Accelerator("NVIDIA H200", 151397597184, 989e12, 4.8e12, 450e9, (9.0, 132, 1.98, 50)),
    "b200": Accelerator(
        "NVIDIA B200", 191514411008, 2250e12, 7.672e12, 900e9, (10.0, 148, 1.965, 126.5)
    ),
    "gb200": Accelerator(
        "NVIDIA GB200", 197897748480, 2500e12, 7.928e12, 900e9, (10.0, 152, 2.062, 129.25), node=72
    ),
    "rtx4090": Accelerator(
        "NVIDIA GeForce RTX 4090", 23.5 * _GIB, 165e12, 1.008e12, 32e9, (8.9, 128, 2.52, 72), 12.5e9
    ),
    "l40s": Accelerator(
        "NVIDIA L40S", 44.4 * _GIB, 362e12, 0.864e12, 32e9, (8.9, 142, 2.52, 96), 12.5e9
    ),
    "l4": Accelerator("NVIDIA L4", 21.9 * _GIB, 121e12, 0.3e12, 32e9, (8.9, 58, 2.04, 48), 12.5e9),
}
"""Accelerators by the names that topologies begin with; a longer ``kind`` comes first.

Sources: Google's documentation of each TPU version, NVIDIA's data sheets, and what GPUs report (in
XLA's sources, under ``xla/backends/gpu/target_config/specs``).
"""


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Return the published numbers of a kind of device; None if it is unknown."""
    return next((row for row in ACCELERATORS.values() if device_kind.startswith(row.kind)), None)


def peak_flops(device_kind: str) -> float | None:
    """Return the published bfloat16 operations per second of a device; None if unknown."""
    accelerator = find_accelerator(device_kind)
    return accelerator.flops if accelerator else None


def loss_chunk_tokens(device: Any, vocab_size: int) -> int:
    """Return for how many tokens the loss computes logits at a time.

    Logits in float32 take up to 256 MiB, for at most 2,048 tokens. On a GPU they take up to 1/32 of
    its memory, for at most 4,096 tokens: each chunk adds to the gradient of the head, which is read
    and written whole.
    """
    chunk_bytes, max_tokens = 2**28, 2048
    accelerator = find_accelerator(device.device_kind)
    if device.platform == "gpu" and accelerator:
        chunk_bytes = int(accelerator.memory_bytes) // 32
        max_tokens = 4096
    return min(max_tokens, max(chunk_bytes // (4 * max(vocab_size, 1)), 1))


def num_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory_bytes() -> int | None:
    """Return the memory of this machine; None if the system does not report it (Windows)."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory_bytes(device: Any) -> int | None:
    """Return the memory of a device, for a CPU of the machine; None if it is not reported."""
    if device.platform == "cpu":
        return machine_memory_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")
