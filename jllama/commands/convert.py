"""``jllama convert``: convert a checkpoint to another format."""

import dataclasses
import shlex
import sys
import time

from rich.filesize import decimal

from jllama.commands.cli import parse
from jllama.system.places import as_place
from jllama.system.remote import list_files


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint to another format; the format of the source is recognized.

    Examples:
        Llama3.2-1B/ llama3.2-1b.gguf --dtype q8_0
        runs/quickstart mine/ --to hf
        smollm2/ smollm2-mine.gguf --adapter runs/mine
        runs/mine adapter/ --to peft

    Args:
        source: a training run, a Hugging Face or Meta folder, a GGUF or llama2.c file, or the id
            of a model on the Hugging Face hub.
        target: the folder to write; for GGUF, the file.
        to: the format: orbax (jllama's own), hf (Hugging Face's), gguf, llama2c or meta. peft and
            gguf-lora write the adapter alone. It may be left out for a target that ends in .gguf
            or .bin (llama2c, which writes a folder of that name).
        dtype: the data type of the matrices: float32, bfloat16, float16 or, in GGUF, q8_0, q5_1,
            q5_0, q4_1 and q4_0. By default every tensor keeps its own. For other types, such as
            Q4_K_M, run llama.cpp's llama-quantize on the GGUF file.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out: 8 for Llama 3.1
            and 3.3, 32 for 3.2. The default is that of the released Llama of the same shape.
        adapter: an adapter to merge into the source first: a run that trained one, a folder of
            PEFT, or a GGUF LoRA.
        overwrite: replace the file or the checkpoint at the target. A folder that holds anything
            else is never replaced.
    """

    source: str
    target: str
    to: str = ""
    dtype: str = ""
    rope_factor: float | None = None
    adapter: str | None = None
    overwrite: bool = False


def main(argv: list[str], prog: str) -> int:
    """Convert on the CPU, so that no accelerator's memory is used."""
    options = parse(ConvertOptions, argv, prog, positional=("source", "target"))
    # Imported here, so that a mistake in the options is reported without waiting for JAX.
    import jax

    from jllama.formats.registry import ADAPTER_FORMATS, FORMATS, convert
    from jllama.models.presets import summary

    # 1) Find the format, by the target's suffix if it is not set.
    jax.config.update("jax_platforms", "cpu")
    target = as_place(options.target)
    dtype = options.dtype or None
    suffixes = {format.suffix: name for name, format in FORMATS.items() if format.suffix}
    to = options.to or suffixes.get(target.suffix, "")

    # 2) Convert, and measure the time.
    start_s = time.perf_counter()
    checkpoint = convert(
        options.source,
        options.target,
        to,
        dtype,
        overwrite=options.overwrite,
        rope_factor=options.rope_factor,
        adapter=options.adapter,
    )
    seconds = time.perf_counter() - start_s

    # 3) Print what was written, and what to do next.
    size = decimal(sum(size for size, _ in list_files(target).values()))
    written = (FORMATS | ADAPTER_FORMATS)[to].stored_dtype(dtype)
    written = written or checkpoint.tensors["embed"].dtype.name
    content = summary(checkpoint.config, written, checkpoint.tokenizer)
    if to not in FORMATS:
        content = f"an adapter of rank {checkpoint.adapter.lora.rank} for {content}"
    print(f"{content} -> {target}, {size} in {seconds:.1f} s", file=sys.stderr)
    if to in FORMATS:
        command = f"{prog.removesuffix('convert')}verify {shlex.quote(str(target))}"
        print(f"check it: {command}", file=sys.stderr)
    elif to == "peft":
        print(
            f"its base is {checkpoint.adapter.base}: PEFT loads folders of Hugging Face and hub "
            "ids, so convert another base to hf and give that one to PEFT",
            file=sys.stderr,
        )
    return 0
