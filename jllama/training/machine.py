"""What a run needs of the machine: its devices in words, accelerators that lie idle, memory."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from jllama.errors import UsageError
from jllama.parameters import count_parameters
from jllama.training.config import TrainConfig

_STATE_BYTES = 16  # a parameter, its gradient and Adam's two moments, in float32


def describe_devices(mesh: Mesh) -> str:
    """``one CPU``, ``8 x TPU v5 lite``."""
    kind = mesh.devices.flat[0].device_kind.replace("cpu", "CPU")
    return f"one {kind}" if mesh.size == 1 else f"{mesh.size} x {kind}"


def idle_accelerator(root: Path = Path("/")) -> str | None:
    """What to do about a GPU or TPU of this machine that JAX, being installed for the CPU alone, leaves idle."""
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return None
    if (root / "proc/driver/nvidia").exists() or (root / "dev/nvidia0").exists():
        kind, extra = "an NVIDIA GPU", "cuda"
    elif list((root / "dev").glob("accel*")) or "TPU_WORKER_ID" in os.environ:
        kind, extra = "a TPU", "tpu"
    else:
        return None
    return f"this machine has {kind} but JAX sees none: pip install 'jllama[{extra}]', or say JAX_PLATFORMS=cpu"


def check_memory(config: TrainConfig, mesh: Mesh, host_bytes: int | None = None) -> None:
    """Refuse what cannot fit: what is counted is the least that any program needs, before activations.

    ``16 bytes * parameters`` over the devices that split them, and each device's logits, float32, of one part of a
    batch.

    Raises:
        UsageError: a device (or a machine whose CPUs share its memory) has less, or a batch does not divide over them.
    """
    training, rows_ways = config.training, mesh.shape["data"] * mesh.shape["fsdp"]
    if training.batch_size % (rows_ways * training.accumulation):
        raise UsageError(
            f"training.batch_size {training.batch_size} does not divide into {training.accumulation} part(s) over "
            f"{rows_ways} device(s)"
        )
    state = _STATE_BYTES * count_parameters(config.model) / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    tokens = training.batch_size * training.seq_len / rows_ways / training.accumulation
    logits = 4 * tokens * config.model.vocab_size / mesh.shape["tensor"]
    device, sharing = mesh.devices.flat[0], 1
    have = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu" and hasattr(os, "sysconf"):  # not on Windows
        sharing, have = len(mesh.local_devices), host_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if have and sharing * (state + logits) > have:
        raise UsageError(
            f"the model and its optimizer take {_gib(sharing * state)} and the logits of a batch "
            f"{_gib(sharing * logits)}, which {describe_devices(mesh)} with {_gib(have)} cannot hold: take a smaller "
            f"model, training.batch_size or training.seq_len, or more devices"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
