"""``python -m jllama convert``."""

import dataclasses
import shlex
import sys
import time
from pathlib import Path

from rich.filesize import decimal

from jllama.commands.cli import parse


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint of any format to another; its format is read off its files.

    Examples:
        Llama3.2-1B/ llama3.2-1b.gguf --dtype q8_0
        runs/quickstart mine/ --to hf
        smollm2/ smollm2-mine.gguf --adapter runs/mine
        runs/mine adapter/ --to peft

    Args:
        source: a training run, a Hugging Face or Meta folder, a GGUF or llama2c file, or a Hugging Face hub id.
        target: the folder to make; for GGUF, the file.
        to: orbax (jllama's own), hf (Hugging Face's), gguf, llama2c or meta; not needed for a target that ends in .gguf
            or .bin (llama2c: a folder of that name). With peft or gguf-lora the adapter alone is written.
        dtype: of the matrices: float32, bfloat16, float16 or, in GGUF, q8_0; without it every tensor keeps its own.
            For others, such as Q4_K_M, run llama.cpp's llama-quantize on the GGUF file.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out: 8 for Llama 3.1 and 3.3, 32 for 3.2;
            without it, that of the released Llama of the same shape.
        adapter: merge this into the source first: a run that trained it, PEFT's folder, or a GGUF LoRA.
        overwrite: replace the file or the checkpoint at the target; a folder that holds anything else is kept.
    """

    source: str
    target: str
    to: str = ""
    dtype: str = ""
    rope_factor: float | None = None
    adapter: str | None = None
    overwrite: bool = False


def main(argv: list[str], prog: str) -> int:
    """Convert, on the CPU: no accelerator's memory is taken."""
    options = parse(ConvertOptions, argv, prog, positional=("source", "target"))
    import jax  # not at the top: a mistake in the options need not wait for it

    from jllama.checkpoints.registry import ADAPTER_FORMATS, FORMATS, convert
    from jllama.language_model import summary

    jax.config.update("jax_platforms", "cpu")
    target, dtype = Path(options.target), options.dtype or None
    to = options.to or {
        format.suffix: name for name, format in FORMATS.items() if format.suffix
    }.get(target.suffix, "")
    start_s = time.perf_counter()
    others = {
        "overwrite": options.overwrite,
        "rope_factor": options.rope_factor,
        "adapter": options.adapter,
    }
    checkpoint = convert(options.source, target, to, dtype, **others)
    seconds = time.perf_counter() - start_s
    size_bytes = sum(
        file.stat().st_size for file in ([target] if target.is_file() else target.rglob("*"))
    )
    written = (FORMATS | ADAPTER_FORMATS)[to].stored_dtype(dtype) or checkpoint.tensors[
        "embed"
    ].dtype.name
    model = summary(checkpoint.config, written, checkpoint.tokenizer)
    what = (
        model if to in FORMATS else f"an adapter of rank {checkpoint.adapter.lora.rank} for {model}"
    )
    print(f"{what} -> {target}, {decimal(size_bytes)} in {seconds:.1f} s", file=sys.stderr)
    if to in FORMATS:
        print(
            f"check it: {prog.removesuffix('convert')}verify {shlex.quote(str(target))}",
            file=sys.stderr,
        )
    return 0
