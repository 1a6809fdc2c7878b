"""``jllama bench``: measure training, generation and start-up, beside limits and peers."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Column, Table

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions
from jllama.core import check_fields
from jllama.system.errors import unknown_name
from jllama.system.files import Json

PEERS = {
    "transformers": "transformers torch",
    "torch-compile": "transformers torch",
    "llama.cpp": "xllamacpp",
}
"""The other implementations that can be measured, and the packages to install for them."""
_COLUMNS = ("ms (least to most)", "tokens/s", "share of limit", "times as fast")
_COMMON = "against quantize preset batch_size repeats json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Measure the speed of training, generation and start-up, beside limits and other libraries.

    Examples:
        train --against transformers,torch-compile
        train quickstart --against transformers
        decode model.gguf --quantize int8 --against transformers
        prefill --preset llama3.2-1b

    Args:
        what: train measures a training step; prefill the processing of a prompt; decode the
            generation of one text, of four, of a batch, and after eight prompts of different
            lengths, and prefill; startup the time from a new process to its first character; load
            the time to a first token after all imports.
        checkpoint: a model in any format; for train a configuration, such as quickstart, or
            nothing.
        preset: a released Llama, as in jllama.PRESETS, whose shapes get random weights.
        model: the architecture for train without a configuration or a preset.
        seq_len: the tokens of a row for train.
        prompt_tokens: the length of the prompt for prefill and decode.
        new_tokens: the number of tokens to generate.
        batch_size: the rows of a batch for train, and the texts of a batch for decode.
        repeats: the number of measurements, of which the median counts; one more before them
            does not count.
        against: transformers, torch-compile (train) or llama.cpp, separated by commas. They take
            turns with jllama, on a GPU if all can use it, otherwise on the CPU.
        llama_python: the Python that has xllamacpp or llama-cpp-python.
        json: print the figures as JSON.
    """

    what: Literal["train", "prefill", "decode", "startup", "load"]
    checkpoint: str = ""
    preset: str = ""
    model: jllama.LlamaConfig = dataclasses.field(
        default_factory=lambda: jllama.LlamaConfig(4096, 8, 512, 8, 4, mlp_dim=1376)
    )
    seq_len: int = 256
    prompt_tokens: int = 512
    new_tokens: int = 128
    batch_size: int = 8
    repeats: int = 5
    against: list[str] = dataclasses.field(default_factory=list)
    llama_python: str = sys.executable
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()

        # 1) Split the names of the peers at commas.
        peers = [name for names in self.against for name in names.split(",")]
        vars(self)["against"] = peers
        trains = self.what == "train"

        # 2) Check that there is one model to measure.
        if self.checkpoint and self.preset:
            model = "configuration" if trains else "checkpoint"
            raise jllama.UsageError(f"give a {model} or a preset, not both")
        has_shapes = self.preset and self.what in ("prefill", "decode")
        if not (trains or self.checkpoint or has_shapes):
            raise jllama.UsageError(
                f"{self.what} needs a checkpoint; prefill and decode may take a preset instead"
            )

        # 3) Check the options: unused ones are not set, and counts are in range.
        unused = ""
        expected = "left out for train"
        if trains:
            unused = "adapter quantize dtype"
        elif not self.checkpoint:
            unused = "adapter against"
            expected = "left out without a checkpoint to load"
        check_fields(self, "", unused, lambda value: not value, expected)
        counts = "prompt_tokens batch_size seq_len repeats"
        check_fields(self, "", counts, lambda value: value >= 1, "at least 1")
        check_fields(self, "", "new_tokens", lambda value: value >= 2, "at least 2")

        # 4) Check that each peer can be measured.
        for name in self.against:
            if name not in PEERS:
                raise unknown_name("peer", name, PEERS)
            if trains and name == "llama.cpp":
                raise jllama.UsageError("llama.cpp does not train; leave it out")
            if not trains and name == "torch-compile":
                reason = "it would compile again for each length of a text"
                raise jllama.UsageError(f"torch-compile is for train: {reason}; leave it out")


def train_config(options: BenchOptions) -> "jllama.TrainConfig":
    """Return the training to measure: the sizes of a configuration, a preset or the options.

    The learning rate is constant.
    """
    from jllama.commands.train import read_options
    from jllama.tokenizers.base import BytesTokenizer

    if options.checkpoint:
        config = read_options([options.checkpoint], "bench")
    else:
        model = jllama.preset(options.preset) if options.preset else options.model
        model = dataclasses.replace(model, max_seq_len=max(model.max_seq_len, options.seq_len))
        loop = jllama.LoopConfig(options.batch_size, options.seq_len)
        config = jllama.TrainConfig(model, training=loop)
    expected = "left out: the benchmark trains from scratch"
    check_fields(config, "", "init_from", lambda path: not path, expected)
    is_bpe = config.data.tokenizer == "bpe"
    vocab_size = config.data.vocab_size if is_bpe else BytesTokenizer().vocab_size
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    seq_len = config.training.seq_len or model.max_seq_len
    training = dataclasses.replace(config.training, seq_len=seq_len, steps=1000, epochs=0.0)
    steady = jllama.OptimizerConfig(warmup_fraction=0.0, final_fraction=1.0)
    return dataclasses.replace(config, model=model, optimizer=steady, training=training)


def parse_options(argv: list[str], prog: str = "bench") -> BenchOptions:
    """Parse the options; jllama's own contestant calls this as well."""
    return parse(BenchOptions, argv, prog, ("what", "checkpoint"), _COMMON)


def main(argv: list[str], prog: str) -> int:
    """Measure, print the figures, and write the page."""
    options = parse_options(argv, prog)
    from jllama.rl.worker import import_file  # brings NumPy

    # In the wheel the contestants are part of the package.
    package = Path(__file__).parents[1]
    folder = package / "contestants"
    if not folder.exists():
        folder = package.parent / "benchmarks" / "contestants"
    turns = import_file(str(folder / "turns.py"))
    result = {"command": shlex.join([*prog.split(), *argv]), **turns.measure(options, argv)}
    facts = {name: value for name, value in result.items() if value and isinstance(value, str)}
    table = {}
    for title, rows in result["work"].items():
        table |= {f"{title}: {name}": _cells(row) for name, row in rows.items()}
    if options.json:
        print(json.dumps(result))
        return 0
    printed = Table("", *(Column(name, justify="right") for name in _COLUMNS), box=box.MARKDOWN)
    for title, cells in table.items():
        printed.add_row(title, *cells)
    print(*facts.values(), sep="\n")
    Console(width=max(Console().width, 160)).print(printed)
    return 0


def _cells(row: Json) -> list[str]:
    """Return a contestant's figures as text, in the order of ``_COLUMNS``."""
    numbers = [row["median_s"], min(row["seconds"]), max(row["seconds"])]
    median, low, high = (f"{1e3 * seconds:,.1f}" for seconds in numbers)
    forms = {"tokens_per_s": "{:,.1f}", "share_of_limit": "{:.0%}", "ratio": "{:.2f}"}
    others = [form.format(row[name]) if row[name] else "-" for name, form in forms.items()]
    return [f"{median} ({low} to {high})", *others]
