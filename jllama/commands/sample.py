"""``python -m jllama sample``, also ``sample.py``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jllama.commands.cli import parse
from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.generation.engine import SamplingConfig, check_lengths
from jllama.generation.text import complete, prompt_ids, stream
from jllama.model import unstack_layers
from jllama.parameters import Params
from jllama.tokenizers import Tokenizer
from jllama.training.run_folder import load_run

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
        checkpoint: the folder of a run.
        prompt: the text to continue; empty lets the model begin.
        max_new_tokens: the most tokens to write; 0 fills what is left of the model's context.
        temperature: divides the logits; 0 always takes the likeliest token, 1 draws from the model as it is.
        top_k: draw among the k likeliest tokens only; 0 is all of them.
        top_p: draw among the likeliest tokens that together reach this probability; 1 is all of them.
        seed: the same seed, prompt and settings give the same text.
        step: which checkpoint; 0 takes the one with the lowest validation loss.
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
    config, stacked, tokenizer, step = load_run(options.checkpoint, options.step or None)
    params = unstack_layers(stacked)
    prompt_tokens = len(prompt_ids(tokenizer, options.prompt))
    count = options.max_new_tokens or max(config.max_seq_len - prompt_tokens, 1)
    check_lengths(np.array([prompt_tokens]), count, config.max_seq_len)  # before anything is written
    print(f"{options.checkpoint}, step {step}", file=sys.stderr)
    if options.compare:
        _compare(params, config, tokenizer, options, count)
        return 0
    pieces = stream(params, config, tokenizer, options.prompt, sampling, count)
    sys.stdout.write(options.prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _compare(params: Params, config: LlamaConfig, tokenizer: Tokenizer, options: SampleOptions, count: int) -> None:
    """All the settings as the rows of one batch, and of one table."""
    rows = [dataclasses.replace(sampling, seed=options.seed) for sampling in COMPARED.values()]
    completions = complete(params, config, tokenizer, [options.prompt] * len(rows), rows, count)
    table = Table(show_lines=True)
    table.add_column("setting", no_wrap=True)
    table.add_column("text")
    for name, completion in zip(COMPARED, completions, strict=True):
        table.add_row(name, Text(options.prompt, "bold") + Text(completion.text))
    Console().print(table)
