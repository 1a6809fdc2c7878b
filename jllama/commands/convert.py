"""``python -m jllama convert``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jllama.checkpoints.formats import Dtype, Format, convert
from jllama.commands.cli import parse


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint of any format to another; its format is read off its files.

    Args:
        source: a training run, a Hugging Face or Meta folder, a GGUF or llama2.c file, or a Hugging Face hub id.
        target: the folder to make (for GGUF, the file).
        to: the format to write; ``orbax`` is jllama's own, and ``hf`` is Hugging Face's.
        dtype: of the matrices; without it every tensor keeps its own. ``q8_0`` is for GGUF.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out: 8 for Llama 3.1 and 3.3, 32 for 3.2.
        overwrite: replace what is at the target.
    """

    source: str
    target: str
    to: Format
    dtype: Dtype | None = None
    rope_factor: float | None = None
    overwrite: bool = False


def main(argv: Sequence[str], prog: str) -> int:
    """Convert, on the CPU: no accelerator's memory is taken."""
    jax.config.update("jax_platforms", "cpu")
    options = parse(ConvertOptions, argv, prog, positional=("source", "target"))
    began_s = time.perf_counter()
    convert(**vars(options))
    path = Path(options.target)
    size_bytes = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))
    seconds = time.perf_counter() - began_s
    print(f"{path}: {size_bytes / 1e6:,.1f} MB in {seconds:.1f} s", file=sys.stderr)
    return 0
