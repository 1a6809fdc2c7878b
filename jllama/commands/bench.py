"""``python -m jllama bench``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions, check_least
from jllama.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Measure how fast a model decodes here, beside what the memory's bandwidth allows.

    Examples:
        decode model.gguf --quantize int8
        decode --preset llama3.2-1b

    Args:
        what: what to measure; there is ``decode``: prefill, decoding one text, decoding a batch, and eight prompts of
            different lengths.
        checkpoint: a model in any format; without it random weights of --preset.
        preset: a released Llama's name, as in jllama.PRESETS, whose shapes to take with random weights.
        prompt_tokens: how long the prompt is that prefill reads.
        new_tokens: how many tokens to make.
        batch_size: how many texts the batch has.
        repeats: how often to take each figure; the median counts.
        first_token: measure also the time from the start of a process to its first token, with --checkpoint; twice, as
            the second finds everything compiled.
        json: print the figures as JSON.
    """

    what: str
    checkpoint: str = ""
    preset: str = ""
    prompt_tokens: int = 512
    new_tokens: int = 128
    batch_size: int = 8
    repeats: int = 5
    first_token: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.what != "decode":
            raise UsageError(f"there is no benchmark {self.what!r}; there is decode")
        if bool(self.checkpoint) == bool(self.preset):
            raise UsageError("give a checkpoint, or the --preset whose shapes to take")
        if self.first_token and not self.checkpoint:
            raise UsageError("first_token needs a checkpoint to load")
        check_least(self, 1, "prompt_tokens", "batch_size", "repeats")
        check_least(self, 2, "new_tokens")


def main(argv: Sequence[str], prog: str) -> int:
    """Measure and print."""
    options = parse(BenchOptions, argv, prog, positional=("what", "checkpoint"))
    import jax  # not at the top: a mistake in the command line need not wait for it
    import jax.numpy as jnp

    from jllama.commands import decode_benchmark as benchmark
    from jllama.decode_params import decode_layout

    if options.checkpoint:
        model = options.load_model(needs_tokenizer=False)
        config, params, name = model.config, model.decode_params, options.checkpoint
    else:
        config, name = jllama.preset(options.preset), options.preset
        dtype = jnp.dtype(options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
        make = jax.jit(lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), jllama.initial_params(key, config)))
        params = decode_layout(make(jax.random.key(0)), config, options.quantize)
    longest = max(options.prompt_tokens + 1, max(benchmark.RAGGED_TOKENS) + options.new_tokens)
    if longest > config.max_seq_len:
        raise UsageError(f"the benchmark needs {longest} tokens of context, and the model has {config.max_seq_len}")
    bandwidth = benchmark.memory_bandwidth(params.dtype)
    batch, new = options.batch_size, options.new_tokens
    speeds: dict[str, benchmark.Speed] = {}

    def measure(title: str, lengths: Sequence[int], new: int, **how: bool) -> None:
        print(f"measuring {title}", file=sys.stderr)
        speeds[title] = benchmark.speed(params, config, lengths, new, options.repeats, bandwidth, **how)

    measure(f"prefill, {options.prompt_tokens} tokens", [options.prompt_tokens], 1)
    measure("decode, 1 text", [benchmark.CONTEXT_TOKENS], new, prefill=False)
    measure(f"decode, {batch} texts", [benchmark.CONTEXT_TOKENS] * batch, new, prefill=False)
    measure(f"8 ragged prompts, {new} tokens each", benchmark.RAGGED_TOKENS, new)
    first = [benchmark.first_token_times_s(options.checkpoint) for _ in range(2)] if options.first_token else []
    device = jax.devices()[0].device_kind
    if options.json:
        found = {"model": name, "device": device, "bandwidth_bytes_per_s": bandwidth}
        found["speeds"] = {title: speed._asdict() for title, speed in speeds.items()}
        print(json.dumps(found | {"first_token_s": first}))
        return 0
    table = Table(title=f"{name} on {device}, {bandwidth / 1e9:.1f} GB/s of memory bandwidth")
    for column in ("", "tokens/s", "ms a step", "memory's limit", "share of it"):
        table.add_column(column, justify="left" if not column else "right")
    for title, speed in speeds.items():
        limit = speed.limit_tokens_per_s
        shares = (f"{limit:,.1f}", f"{speed.tokens_per_s / limit:.0%}") if limit else ("-", "-")
        table.add_row(title, f"{speed.tokens_per_s:,.1f}", f"{speed.ms_per_step:,.1f}", *shares)
    Console().print(table)
    for run, times in zip(("first", "second"), first, strict=False):
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in times.items())
        print(f"first token, {run} process: {parts}")
    return 0
