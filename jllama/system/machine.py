"""The machine: its devices and drivers in words, and what its memory allocator does."""

import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

_M_TRIM_THRESHOLD = -1  # of <malloc.h>
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for the next step of a program on a CPU.

    Otherwise glibc returns each large temporary to the system, which clears its pages for every
    step.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def describe_devices(mesh: Mesh) -> str:
    """Return a text such as ``one CPU`` or ``8 x TPU v5 lite``."""
    kind = mesh.devices.flat[0].device_kind.replace("cpu", "CPU")
    return f"one {kind}" if mesh.size == 1 else f"{mesh.size} x {kind}"


def describe_driver(device: Any, root: Path = Path("/")) -> str:
    """Describe what the bits of a GPU depend on: CUDA, driver, XLA's flags; empty for others."""
    if device.platform != "gpu":
        return ""
    parts = [" ".join(device.client.platform_version.split())]
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
        version = re.search(r"\b\d{3,}\.\d+[.\d]*", text)
        if version:
            parts.append(f"driver {version[0]}")
    if os.environ.get("XLA_FLAGS"):
        parts.append(f"XLA_FLAGS {os.environ['XLA_FLAGS']}")
    return ", ".join(parts)


def idle_accelerator(root: Path = Path("/")) -> str | None:
    """Return advice if JAX is installed for the CPU alone and this machine has a GPU or TPU."""
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return None
    advice = (
        "this machine has {} but JAX sees none: pip install 'jllama[{}]', or set JAX_PLATFORMS=cpu"
    )
    if (root / "proc/driver/nvidia").exists() or (root / "dev/nvidia0").exists():
        return advice.format("an NVIDIA GPU", "cuda")
    if list((root / "dev").glob("accel*")) or "TPU_WORKER_ID" in os.environ:
        return advice.format("a TPU", "tpu")
    return None
