"""The devices of this machine: their memory, and what to say of them."""

import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh


def machine_memory_bytes() -> int | None:
    """The memory of this machine; None where the system does not say (Windows)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def device_memory_bytes(device: Any) -> int | None:
    """What a device can hold, of a CPU what the machine has; None where nobody says."""
    if device.platform == "cpu":
        return machine_memory_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")


def describe_devices(mesh: Mesh) -> str:
    """``one CPU``, ``8 x TPU v5 lite``."""
    kind = mesh.devices.flat[0].device_kind.replace("cpu", "CPU")
    return f"one {kind}" if mesh.size == 1 else f"{mesh.size} x {kind}"


def idle_accelerator(root: Path = Path("/")) -> str | None:
    """What to do about a GPU or TPU of this machine that JAX, being installed for the CPU alone, leaves idle."""
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return None
    said = "this machine has {} but JAX sees none: pip install 'jllama[{}]', or say JAX_PLATFORMS=cpu"
    if (root / "proc/driver/nvidia").exists() or (root / "dev/nvidia0").exists():
        return said.format("an NVIDIA GPU", "cuda")
    if list((root / "dev").glob("accel*")) or "TPU_WORKER_ID" in os.environ:
        return said.format("a TPU", "tpu")
    return None
