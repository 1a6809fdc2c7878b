"""``python -m jllama doctor``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jllama import oracle
from jllama.checkpoints.formats import open_checkpoint
from jllama.commands.cli import parse
from jllama.config import LlamaConfig, RopeScaling
from jllama.errors import JllamaError
from jllama.model import initial_params, merge
from jllama.presets import preset
from jllama.summary import summary_table

TOLERANCE = 1e-5
_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "gguf",
    "numpy",
)
_CHECKED = LlamaConfig(
    vocab_size=512,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_seq_len=128,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", 8.0),
)


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Show versions, devices and room on disk, and check a small model on this device against the NumPy oracle.

    Args:
        checkpoint: a run or a model in any format, to print its parameters; without it, those of the checked model.
        preset: the name of a released Llama, such as llama3.1-8b, to print its parameters.
    """

    checkpoint: str = ""
    preset: str = ""


def main(argv: Sequence[str], prog: str) -> int:
    """Print what was found; the exit code is 1 if the device computes wrongly."""
    options = parse(DoctorOptions, argv, prog)
    if options.preset:
        config = preset(options.preset)
    else:
        config = open_checkpoint(options.checkpoint).config if options.checkpoint else _CHECKED
    console = Console(highlight=False)
    console.print(f"Python {platform.python_version()} on {platform.platform()}")
    console.print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES))
    for device in jax.devices():
        stats = device.memory_stats() or {}
        memory = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else ""
        console.print(f"device {device.id}: {device.platform} {device.device_kind}{memory}")
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    console.print(f"{free_bytes / 2**30:.1f} GiB free in {tempfile.gettempdir()}, terminal: {sys.stdout.isatty()}")
    console.print(summary_table(config))

    params = initial_params(jax.random.key(0), _CHECKED)
    tokens = np.random.default_rng(0).integers(0, _CHECKED.vocab_size, (1, 64))
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda params, tokens: merge(_CHECKED, params)(tokens))(params, jnp.asarray(tokens))
    expected = oracle.forward(jax.tree.map(np.asarray, params), tokens, _CHECKED)
    error = float(np.max(np.abs(np.asarray(logits) - expected)) / np.max(np.abs(expected)))
    console.print(f"logits against the float64 oracle: relative error {error:.1e}, tolerance {TOLERANCE:.0e}")
    if not error < TOLERANCE:
        raise JllamaError(f"this device computes a Llama wrongly: relative error {error:.1e} is over {TOLERANCE:.0e}")
    return 0
