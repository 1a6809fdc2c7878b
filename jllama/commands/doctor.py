"""``python -m jllama doctor``."""

import dataclasses
import importlib.metadata
import math
import platform
import shutil
import tempfile

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

import jllama
from jllama.commands.cli import parse
from jllama.errors import JllamaError
from jllama.files import cache_folder

_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint grain sentencepiece tiktoken tokenizers gguf numpy"
)


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Print versions, devices and free space, and check a small model on this device against the NumPy oracle.

    Examples:
        runs/quickstart
        --preset llama3.1-8b

    Args:
        checkpoint: a run or a model in any format, to print its parameters; without it, those of the checked model.
        preset: the name of a released Llama, such as llama3.1-8b, to print its parameters.
    """

    checkpoint: str = ""
    preset: str = ""


def main(argv: list[str], prog: str) -> int:
    """Print versions, devices, sizes and the result of the self-check; the exit code is 1 if that fails."""
    options = parse(DoctorOptions, argv, prog, ("checkpoint",))
    import jax

    from jllama import functional as F
    from jllama.checkpoints.registry import open_checkpoint
    from jllama.devices import device_memory_bytes, machine_memory_bytes
    from jllama.parameters import count_parameters
    from jllama.verify.checks import TOLERANCE
    from jllama.verify.conformance import (
        VARIANTS,
        cached_error,
        jllama_itself,
        weights,
        whole_error,
    )

    checked = VARIANTS["Llama 3.2 tied"]
    config = open_checkpoint(options.checkpoint).config if options.checkpoint else checked
    config = jllama.preset(options.preset) if options.preset else config
    console, folder = Console(highlight=False), tempfile.gettempdir()
    console.print(f"Python {platform.python_version()} on {platform.platform()}")
    console.print(
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES.split())
    )
    for device in jax.devices():
        memory = decimal(device_memory_bytes(device) or 0)
        console.print(f"device {device.id}: {device.platform} {device.device_kind}, {memory}")
    memory, free = decimal(machine_memory_bytes() or 0), decimal(shutil.disk_usage(folder).free)
    console.print(f"{memory} of memory, {free} free in {folder}")
    console.print(f"cache: {cache_folder()}, which may be removed at any time")
    length = config.max_seq_len
    train = F.choose_attention(length, length)
    print(f"attention over {length:,} tokens: training by {train}, decoding by cached")
    console.print(summary_table(config))
    takes = {"float32": 4, "bfloat16": 2, "int8": 1, "training (float32 and Adam)": 16}
    print(
        ", ".join(
            f"{what} {decimal(size * count_parameters(config))}" for what, size in takes.items()
        ),
        "at least",
    )
    with jax.default_matmul_precision("highest"):
        params = jax.tree.map(jax.numpy.asarray, weights(checked))
        layouts = {whole_error: params, cached_error: jllama.decode_layout(params, checked)}
        error = max(
            compute(jllama_itself(), checked, layout, checked)
            for compute, layout in layouts.items()
        )
    print(
        f"a small Llama's logits against the float64 oracle: relative error {error:.1e}, tolerance {TOLERANCE:.0e}"
    )
    if not error < TOLERANCE:
        raise JllamaError(
            f"self-check failed on this device: relative error {error:.1e} is over {TOLERANCE:.0e}"
        )
    return 0


def summary_table(config: "jllama.LlamaConfig") -> Table:
    """Every parameter with its axes, shape and count; the totals and the training cost of a token below."""
    from jllama.parameters import (
        count_parameters,
        parameter_table,
        shape_of,
        training_flops_per_token,
    )

    count, flops = count_parameters(config), training_flops_per_token(config, config.max_seq_len)
    table = Table(show_footer=True)
    table.add_column("parameter", "total")
    table.add_column("axes", f"{flops:.3g} FLOPs per training token")
    table.add_column("shape", f"{4 * count / 2**20:,.1f} MiB in float32", justify="right")
    table.add_column("count", f"{count:,}", justify="right")
    for path, row in parameter_table(config).items():
        shape = shape_of(row, config)
        table.add_row(
            path, " ".join(row.axes), " x ".join(map(str, shape)), f"{math.prod(shape):,}"
        )
    return table
