"""``python -m jllama sample``, also ``sample.py``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jllama.checkpoints.formats import load
from jllama.commands.cli import parse
from jllama.config import LlamaConfig
from jllama.errors import JllamaError, UsageError
from jllama.generation.engine import SamplingConfig, check_lengths
from jllama.generation.text import complete, prompt_ids, stream
from jllama.model import unstack_layers
from jllama.parameters import Params
from jllama.tokenizers import Tokenizer

COMPARED = {
    "greedy": SamplingConfig(temperature=0.0),
    "random, T=1": SamplingConfig(),
    "random, T=0.7": SamplingConfig(temperature=0.7),
    "top-k 40, T=1": SamplingConfig(top_k=40),
    "top-k 40, T=0.7": SamplingConfig(temperature=0.7, top_k=40),
    "top-p 0.9, T=1": SamplingConfig(top_p=0.9),
    "top-p 0.9, T=0.7": SamplingConfig(temperature=0.7, top_p=0.9),
}
"""The settings that ``--compare`` sets side by side."""


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """Let a trained model continue a prompt; the text streams to stdout as it is made.

    Args:
        checkpoint: the folder of a run, or a model in any format: a Hugging Face or Meta folder, a GGUF or llama2.c
            file, a Hugging Face hub id.
        prompt: the text to continue; empty lets the model begin.
        max_new_tokens: the most tokens to write; 0 fills what is left of the model's context.
        temperature: divides the logits; 0 always takes the likeliest token, 1 draws from the model as it is.
        top_k: draw among the k likeliest tokens only; 0 is all of them.
        top_p: draw among the likeliest tokens that together reach this probability; 1 is all of them.
        seed: the same seed, prompt and settings give the same text.
        step: which checkpoint of a run; 0 takes the one with the lowest validation loss.
        dtype: of the parameters; without it float32 on a CPU, and elsewhere the files' own.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out.
        compare: write a table of seven settings (greedy, random, top-k 40 and top-p 0.9) instead.
    """

    checkpoint: str
    prompt: str = ""
    max_new_tokens: int = 0
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0
    step: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    rope_factor: float | None = None
    compare: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; it must not be negative")
        if self.step < 0:
            raise UsageError(f"step is {self.step}; it must be a saved step, or 0 for the best")


def main(argv: Sequence[str], prog: str) -> int:
    """Load a run and write."""
    options = parse(SampleOptions, argv, prog)
    sampling = SamplingConfig(options.temperature, options.top_k, options.top_p, options.seed)
    model = load(options.checkpoint, options.dtype, rope_factor=options.rope_factor, step=options.step or None)
    config, tokenizer, params = model.config, model.tokenizer, unstack_layers(model.params)
    if tokenizer is None:
        raise JllamaError(f"{options.checkpoint} has no tokenizer: put the one it was trained with beside its weights")
    prompt_tokens = len(prompt_ids(tokenizer, options.prompt))
    count = options.max_new_tokens or max(config.max_seq_len - prompt_tokens, 1)
    check_lengths(np.array([prompt_tokens]), count, config.max_seq_len)  # before anything is written
    print(options.checkpoint if model.step is None else f"{options.checkpoint}, step {model.step}", file=sys.stderr)
    if options.compare:
        _compare(params, config, tokenizer, model.stop_ids, options, count)
        return 0
    pieces = stream(params, config, tokenizer, options.prompt, sampling, count, model.stop_ids)
    sys.stdout.write(options.prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _compare(
    params: Params,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    options: SampleOptions,
    count: int,
) -> None:
    """All the settings as the rows of one batch, and of one table."""
    rows = [dataclasses.replace(sampling, seed=options.seed) for sampling in COMPARED.values()]
    completions = complete(params, config, tokenizer, [options.prompt] * len(rows), rows, count, stop_ids)
    table = Table(show_lines=True)
    table.add_column("setting", no_wrap=True)
    table.add_column("text")
    for name, completion in zip(COMPARED, completions, strict=True):
        table.add_row(name, Text(options.prompt, "bold") + Text(completion.text))
    Console().print(table)
