"""``jllama doctor``: show versions and devices, and run self-checks."""

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
from jllama.core import JllamaError
from jllama.system.files import cache_folder

_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint grain sentencepiece tiktoken tokenizers gguf numpy"
)
_PARAMETER_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "training (float32 and Adam)": 16}


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Print versions, devices and free space, and run a self-check on this device.

    The self-check compares a small model's logits with the NumPy reference.

    Examples:
        runs/quickstart
        --preset llama3.1-8b

    Args:
        checkpoint: a run or a model in any format, whose parameters are listed; by default those
            of the model of the self-check.
        preset: a released Llama, such as llama3.1-8b, whose parameters are listed.
    """

    checkpoint: str = ""
    preset: str = ""


def main(argv: list[str], prog: str) -> int:
    """Print versions, devices, sizes and the result of the self-check.

    Raises:
        JllamaError: if the self-check fails, which gives the exit code 1.
    """
    options = parse(DoctorOptions, argv, prog, ("checkpoint",))
    import jax

    from jllama import functional as F
    from jllama.core.parameters import count_parameters
    from jllama.formats.registry import open_checkpoint
    from jllama.lab.checks import TOLERANCE
    from jllama.lab.conformance import VARIANTS, cached_error, compiled_jllama, weights, whole_error
    from jllama.system.devices import device_memory_bytes, machine_memory_bytes

    checked = VARIANTS["Llama 3.2 tied"]
    config = open_checkpoint(options.checkpoint).config if options.checkpoint else checked
    if options.preset:
        config = jllama.preset(options.preset)
    # The machine
    console = Console(highlight=False)
    console.print(f"Python {platform.python_version()} on {platform.platform()}")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES.split()]
    console.print(", ".join(versions))
    for device in jax.devices():
        memory = decimal(device_memory_bytes(device) or 0)
        console.print(f"device {device.id}: {device.platform} {device.device_kind}, {memory}")
    folder = tempfile.gettempdir()
    memory = decimal(machine_memory_bytes() or 0)
    free = decimal(shutil.disk_usage(folder).free)
    console.print(f"{memory} of memory, {free} free in {folder}")
    console.print(f"cache: {cache_folder()}, which may be removed at any time")
    # The model
    length = config.max_seq_len
    kernel = F.choose_attention(length, length)
    print(f"attention over {length:,} tokens: training by {kernel}, decoding by cached")
    console.print(summary_table(config))
    count = count_parameters(config)
    if config.num_experts:
        print(f"{count_parameters(config, active=True):,} parameters for each token")
    sizes = [f"{name} {decimal(size * count)}" for name, size in _PARAMETER_BYTES.items()]
    print(", ".join(sizes), "at least")
    # The self-check
    with jax.default_matmul_precision("highest"):
        params = jax.tree.map(jax.numpy.asarray, weights(checked))
        decode_params = jllama.decode_layout(params, checked)
        error = max(
            whole_error(compiled_jllama(), checked, params, checked),
            cached_error(compiled_jllama(), checked, decode_params, checked),
        )
    result = f"relative error {error:.1e}, tolerance {TOLERANCE:.0e}"
    print(f"a small Llama's logits against the float64 oracle: {result}")
    if not error < TOLERANCE:
        raise JllamaError(f"the self-check failed on this device: {result}")
    return 0


def summary_table(config: "jllama.LlamaConfig") -> Table:
    """Make a table of every parameter with its axes, shape and count.

    Its footer has the totals, and the FLOPs of training on one token.
    """
    from jllama.core.parameters import count_parameters, parameter_table, shape_of
    from jllama.training.metrics import training_flops_per_token

    count = count_parameters(config)
    flops = training_flops_per_token(config, config.max_seq_len)
    table = Table(show_footer=True)
    table.add_column("parameter", "total")
    table.add_column("axes", f"{flops:.3g} FLOPs per training token")
    table.add_column("shape", f"{4 * count / 2**20:,.1f} MiB in float32", justify="right")
    table.add_column("count", f"{count:,}", justify="right")
    for path, row in parameter_table(config).items():
        shape = shape_of(row, config)
        axes = " ".join(row.axes)
        table.add_row(path, axes, " x ".join(map(str, shape)), f"{math.prod(shape):,}")
    return table
