"""The devices of this machine and what is published of others: memory, rates, and what to say of them."""

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


class Accelerator(NamedTuple):
    """A kind of TPU or GPU; rates per second, those between devices as what one device can receive.

    ``chip`` is what XLA is told of a GPU: capability, cores, clock in GHz, MiB of second-level cache.
    """

    kind: str  # how ``jax.Device.device_kind`` begins
    memory_bytes: float  # what a program can have: of a TPU by its compiler, of a GPU as it reports
    flops: float  # dense bfloat16 operations, two for each multiply-add
    bandwidth: float  # bytes from its memory
    links: float  # bytes over all links of a TPU in one direction, over NVLink or PCIe of a GPU
    chip: tuple[float, ...] = ()
    network: float = (
        50e9  # bytes from outside of a GPU's node, by the network cards of usual systems
    )
    sides: int = 0  # of a TPU's torus; 0 for GPUs
    node: int = 8  # GPUs that links connect


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of <malloc.h>
_GIB, _H100_BYTES = 2**30, 84942979072
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
"""By the names that topologies begin with, a longer ``kind`` first.

Sources: Google's documentation of each TPU version, NVIDIA's data sheets, and what GPUs report (in XLA's sources, under
``xla/backends/gpu/target_config/specs``).
"""


def published(device_kind: str) -> Accelerator | None:
    """What is published of a device; None where nothing is known."""
    return next((row for row in ACCELERATORS.values() if device_kind.startswith(row.kind)), None)


def peak_flops(device_kind: str) -> float | None:
    """The published bfloat16 operations a second of a device; None where they are not known."""
    accelerator = published(device_kind)
    return accelerator.flops if accelerator else None


def loss_chunk_tokens(device: Any, vocab_size: int) -> int:
    """How many tokens' logits the loss makes at a time: 256 MiB of them in float32, and at most 2,048 tokens.

    Of a GPU 1/32 of its memory and at most 4,096: each chunk adds to the gradient of the head, which is read and
    written whole.
    """
    chunk_bytes, most = 2**28, 2048
    accelerator = published(device.device_kind)
    if device.platform == "gpu" and accelerator:
        chunk_bytes, most = int(accelerator.memory_bytes) // 32, 4096
    return min(most, max(chunk_bytes // (4 * vocab_size), 1))


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for the next step of a program on a CPU.

    Otherwise glibc gives each large temporary back to the system, which clears its pages anew for every step.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def device_bytes(tree: Any) -> int:
    """What one device holds of arrays, or of abstract ones."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = (
            leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) else leaf.shape
        )
        bits = 4 if leaf.dtype == jnp.uint4 else 8 * leaf.dtype.itemsize  # whose own is a byte
        total += math.prod(shape) * bits // 8
    return total


def program_bytes(compiled: Any) -> tuple[int, int]:
    """What a compiled program holds of one device: its arguments, and what it takes besides."""
    memory = compiled.memory_analysis()
    fresh = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes + fresh


def machine_memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not say (Windows)."""
    return (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    )


def device_memory_bytes(device: Any) -> int | None:
    """What a device can hold, of a CPU what the machine has; None where nobody says."""
    if device.platform == "cpu":
        return machine_memory_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")


def peak_bytes(devices: Iterable[Any]) -> int | None:
    """The most that any of the devices has held so far; None on CPUs, which do not say."""
    held = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((size for size in held if size), default=None)


def describe_devices(mesh: Mesh) -> str:
    """``one CPU``, ``8 x TPU v5 lite``."""
    kind = mesh.devices.flat[0].device_kind.replace("cpu", "CPU")
    return f"one {kind}" if mesh.size == 1 else f"{mesh.size} x {kind}"


def describe_driver(device: Any, root: Path = Path("/")) -> str:
    """What else has a say in the bits of a GPU: CUDA, the driver, and XLA's flags; nothing for other devices."""
    if device.platform != "gpu":
        return ""
    said = [" ".join(device.client.platform_version.split())]
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
        said += [f"driver {version}" for version in re.findall(r"\b\d{3,}\.\d+[.\d]*", text)[:1]]
    if flags := os.environ.get("XLA_FLAGS"):
        said.append(f"XLA_FLAGS {flags}")
    return ", ".join(said)


def idle_accelerator(root: Path = Path("/")) -> str | None:
    """What to do about a GPU or TPU of this machine that JAX, being installed for the CPU alone, leaves idle."""
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return None
    said = (
        "this machine has {} but JAX sees none: pip install 'jllama[{}]', or say JAX_PLATFORMS=cpu"
    )
    if (root / "proc/driver/nvidia").exists() or (root / "dev/nvidia0").exists():
        return said.format("an NVIDIA GPU", "cuda")
    if list((root / "dev").glob("accel*")) or "TPU_WORKER_ID" in os.environ:
        return said.format("a TPU", "tpu")
    return None
