"""``python -m jllama bench``: how fast a model prefills and decodes here, beside what the memory allows."""

import dataclasses
import json
import random
import statistics
import sys
import time
import timeit
from collections.abc import Sequence
from subprocess import PIPE, Popen
from typing import IO, Any, Literal, cast

from rich.console import Console
from rich.table import Column, Table

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions
from jllama.errors import JllamaError, UsageError, check_fields

RAGGED_TOKENS = (10, 20, 37, 50, 64, 70, 100, 120)  # lengths of the eight prompts that are continued together
CONTEXT_TOKENS = 32  # length of the prompts whose prefill is left out
_BANDWIDTH_SHAPE = (1 << 15, 1 << 12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Measure how fast a model decodes here, beside what the memory's bandwidth allows.

    Examples:
        decode model.gguf --quantize int8
        decode --preset llama3.2-1b

    Args:
        what: decode, for prefill, decoding one text, decoding a batch, and eight prompts of different lengths.
        checkpoint: a model in any format; without it random weights of a preset.
        preset: a released Llama's name, as in jllama.PRESETS, whose shapes to take with random weights.
        prompt_tokens: how long the prompt is that prefill reads.
        new_tokens: how many tokens to generate.
        batch_size: how many texts the batch has.
        repeats: how often to take each figure; the median counts.
        first_token: measure also the time from the start of a process to its first token, with a checkpoint; twice, as
            the second finds everything compiled.
        json: print the figures as JSON.
    """

    what: Literal["decode"]
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
        if bool(self.checkpoint) == bool(self.preset):
            raise UsageError("give a checkpoint, or the preset whose shapes to take")
        if self.preset and (self.adapter or self.first_token):
            raise UsageError(f"{'adapter' if self.adapter else 'first_token'} needs a checkpoint to load")
        check_fields(self, "", "prompt_tokens batch_size repeats", lambda value: value >= 1, "at least 1")
        check_fields(self, "", "new_tokens", lambda value: value >= 2, "at least 2")


def main(argv: list[str], prog: str) -> int:
    """Measure and print."""
    options = parse(BenchOptions, argv, prog, positional=("what", "checkpoint"))
    import jax  # not at the top: a mistake in the command line need not wait for it

    model = options.load_model(needs_tokenizer=False) if options.checkpoint else random_model(options)
    prompt, new, rows, context = options.prompt_tokens, options.new_tokens, options.batch_size, model.config.max_seq_len
    if (longest := max(prompt + 1, max(RAGGED_TOKENS) + new)) > context:
        raise UsageError(f"the benchmark needs {longest} tokens of context, and the model has {context}")
    devices = len(model.decode_params.weights["final_norm"].sharding.device_set)  # of the mesh, if there is one
    bandwidth = devices * memory_bandwidth(model.decode_params.dtype)
    device, speeds = jax.devices()[0].device_kind, {}
    figures = {"model": options.checkpoint or options.preset, "device": device, "bandwidth_bytes_per_s": bandwidth}
    columns = (Column(name, justify="right") for name in ("tokens/s", "ms a step", "memory's limit", "share of it"))
    table = Table("", *columns, title=f"{figures['model']} on {device}, {bandwidth / 1e9:.1f} GB/s of memory bandwidth")
    for title, lengths, new_tokens, prefill in (
        (f"prefill, {prompt} tokens", [prompt], 1, True),
        ("decode, 1 text", [CONTEXT_TOKENS], new, False),
        (f"decode, {rows} texts", [CONTEXT_TOKENS] * rows, new, False),
        (f"8 ragged prompts, {new} tokens each", RAGGED_TOKENS, new, True),
    ):
        print(f"measuring {title}", file=sys.stderr)
        batch, seconds = len(lengths), step_s(model, lengths, new_tokens, options.repeats, prefill=prefill)
        speed = (sum(lengths) if new_tokens == 1 else batch) / seconds
        step_bytes = bytes_per_step(model, batch, sum(lengths) // batch + new_tokens // 2)
        limit = batch * bandwidth / step_bytes if new_tokens > 1 else None  # prefill is limited by arithmetic
        speeds[title] = {"tokens_per_s": speed, "ms_per_step": 1e3 * seconds, "limit_tokens_per_s": limit}
        shares = (f"{limit:,.1f}", f"{speed / limit:.0%}") if limit else ("-", "-")
        table.add_row(title, f"{speed:,.1f}", f"{1e3 * seconds:,.1f}", *shares)
    firsts = [first_token_s(options) for _ in range(2 * options.first_token)]
    if options.json:
        print(json.dumps({**figures, "speeds": speeds, "first_token_s": firsts}))
        return 0
    Console().print(table)
    for number, seconds in enumerate(firsts, 1):
        print(f"first token of process {number}: {seconds:.1f} s")
    return 0


def random_model(options: BenchOptions) -> "jllama.LanguageModel":
    """A preset's model of random weights, by default in float32 on a CPU and in bfloat16 elsewhere."""
    import jax

    config = jllama.preset(options.preset)
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    make = jax.jit(lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), jllama.initial_params(key, config)))
    return jllama.LanguageModel(config, jllama.decode_layout(make(jax.random.key(0)), config, options.quantize))


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, the same each time."""
    draws = random.Random(0)
    return [draws.choices(range(vocab_size), k=length) for length in lengths]


def generate_s(model: "jllama.LanguageModel", prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds to continue all prompts, together, by ``new_tokens`` tokens each, greedily and without a stop."""
    from jllama.generation.decode import decode
    from jllama.generation.prefill import prefill

    greedy, start_s = jllama.SamplingParams(temperature=0.0), time.perf_counter()
    batch = prefill(model, [jllama.Prompt(prompt, greedy, new_tokens) for prompt in prompts])
    while not batch.finished.all():
        batch, *_ = decode(model, batch)
    return time.perf_counter() - start_s


def step_s(
    model: "jllama.LanguageModel", lengths: Sequence[int], new_tokens: int, repeats: int, *, prefill: bool
) -> float:
    """Seconds a step to continue prompts of these lengths together: the median, after a repeat that compiles.

    With ``prefill`` false, which takes at least two new tokens, its time is left out.
    """
    prompts, seconds = random_prompts(lengths, model.config.vocab_size), []
    for _ in range(1 + repeats):
        left_out_s = 0.0 if prefill else generate_s(model, prompts, 1)
        seconds.append(generate_s(model, prompts, new_tokens) - left_out_s)
    return statistics.median(seconds[1:]) / (new_tokens if prefill else new_tokens - 1)


def bytes_per_step(model: "jllama.LanguageModel", batch: int, context: int) -> int:
    """Bytes that a decoding step must read: every weight once, and the keys and values of ``context`` tokens a row; of
    an embedding that is not also the head only ``batch`` rows, which count for nothing.
    """
    import jax

    config, params = model.config, model.decode_params
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights["embed"]))
    cached_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context
    return weights + batch * cached_values * params.dtype.itemsize


def memory_bandwidth(dtype: Any = "float32", repeats: int = 7) -> float:
    """Bytes a second at which this device reads a matrix to multiply it with a vector: the best of some repeats."""
    import jax.numpy as jnp

    matrix, vector = jnp.ones(_BANDWIDTH_SHAPE, dtype), jnp.ones(_BANDWIDTH_SHAPE[1], dtype)
    times_s = timeit.repeat(lambda: (matrix @ vector).block_until_ready(), number=1, repeat=repeats + 1)
    return matrix.nbytes / min(times_s)


def first_token_s(options: ModelOptions) -> float:
    """Seconds from starting ``jllama sample`` with this model to the first character that it writes."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(ModelOptions)}
    given |= {f"mesh.{name}": size for name, size in vars(given.pop("mesh")).items() if name != "rules"}
    given |= {"prompt": "The capital of France is", "echo": "false", "temperature": 0, "max_new_tokens": 8}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    start_s = time.perf_counter()
    with Popen([sys.executable, "-m", "jllama", "sample", *flags], stdout=PIPE, stderr=PIPE) as process:
        cast(IO[bytes], process.stdout).read(1)
        seconds = time.perf_counter() - start_s
        problem = process.communicate()[1].decode().strip()
    if process.returncode:
        raise JllamaError(f"the process that generates the first token failed: {problem.splitlines()[-1]}")
    return seconds
