"""How fast a model prefills and decodes here, beside what the memory allows."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.generation.engine import Request, SamplingConfig, advance, start
from jllama.parameters import Params

GREEDY = SamplingConfig(temperature=0.0)
RAGGED_TOKENS = (10, 20, 37, 50, 64, 70, 100, 120)
"""Lengths of the eight prompts that are continued together."""
_BANDWIDTH_SHAPE = (1 << 15, 1 << 12)


class Speed(NamedTuple):
    """Of one kind of work, the median of several repeats.

    Args:
        tokens_per_s: tokens made (of prefill: read) in a second.
        ms_per_step: milliseconds of one pass through the model.
        limit_tokens_per_s: what the memory bandwidth alone would allow; None where arithmetic is the limit.
    """

    tokens_per_s: float
    ms_per_step: float
    limit_tokens_per_s: float | None = None


def prompts_of(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, the same each time."""
    draws = np.random.default_rng(0)
    return [draws.integers(0, vocab_size, length).tolist() for length in lengths]


def generate_s(params: Params, config: LlamaConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds to continue all prompts, together, by ``new_tokens`` tokens each, greedily and without a stop."""
    begun = time.perf_counter()
    decoding = start(params, config, [Request(prompt, GREEDY, new_tokens) for prompt in prompts])
    while not decoding.finished.all():
        decoding, _ = advance(params, config, decoding)
    return time.perf_counter() - begun


def median_of(measure: Callable[[], float], repeats: int) -> float:
    """The median of several repeats, after one that is not counted: it compiles."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def prefill_speed(params: Params, config: LlamaConfig, tokens: int, repeats: int) -> Speed:
    """From a prompt to its first new token."""
    prompts = prompts_of([tokens], config.vocab_size)
    seconds = median_of(lambda: generate_s(params, config, prompts, 1), repeats)
    return Speed(tokens / seconds, 1e3 * seconds)


def decode_speed(
    params: Params, config: LlamaConfig, batch: int, new_tokens: int, repeats: int, bandwidth: float, context: int = 32
) -> Speed:
    """One token after the other, the prefill of ``context`` tokens left out; ``bandwidth`` in bytes a second."""
    prompts = prompts_of([context] * batch, config.vocab_size)
    generate_s(params, config, prompts, 1)

    def measure() -> float:
        return generate_s(params, config, prompts, new_tokens) - generate_s(params, config, prompts, 1)

    seconds = median_of(measure, repeats) / (new_tokens - 1)
    limit = batch * bandwidth / bytes_per_step(params, config, batch, context + new_tokens // 2)
    return Speed(batch / seconds, 1e3 * seconds, limit)


def ragged_speed(params: Params, config: LlamaConfig, new_tokens: int, repeats: int, bandwidth: float) -> Speed:
    """Eight prompts of different lengths together, prefill included."""
    prompts = prompts_of(RAGGED_TOKENS, config.vocab_size)
    seconds = median_of(lambda: generate_s(params, config, prompts, new_tokens), repeats)
    context = sum(RAGGED_TOKENS) // len(RAGGED_TOKENS) + new_tokens // 2
    limit = len(prompts) * bandwidth / bytes_per_step(params, config, len(prompts), context)
    return Speed(len(prompts) * new_tokens / seconds, 1e3 * seconds / new_tokens, limit)


def bytes_per_step(params: Params, config: LlamaConfig, batch: int, context: int) -> int:
    """Bytes that a decoding step must read: every weight once, and the keys and values of ``context`` tokens a row.

    Of an embedding that is not also the head only ``batch`` rows are read.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params["embed"]))
    item = params["final_norm"].dtype.itemsize
    return weights + batch * context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * item


def memory_bandwidth(dtype: Any = jnp.float32, repeats: int = 7) -> float:
    """Bytes a second at which this device reads a matrix to multiply it with a vector: the best of some repeats."""
    matrix = jnp.ones(_BANDWIDTH_SHAPE, dtype)
    vector = jnp.ones(_BANDWIDTH_SHAPE[1], dtype)
    product = jax.jit(lambda matrix, vector: matrix @ vector)
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        product(matrix, vector).block_until_ready()
        times.append(time.perf_counter() - begun)
    return matrix.nbytes / min(times)


_FIRST_TOKEN = """
import json, sys, time
times = {"interpreter": time.time() - float(sys.argv[2])}
def lap(name, since=[time.perf_counter()]):
    times[name] = time.perf_counter() - since[0]
    since[0] = time.perf_counter()
from jllama.checkpoints.formats import load
from jllama.generation.settings import SamplingConfig
from jllama.generation.text import stream
import jax
jax.devices()
lap("imports")
model = load(sys.argv[1])
jax.block_until_ready(model.decoding_params)
lap("loading")
next(stream(model, "The capital of France is", SamplingConfig(temperature=0.0), max_new_tokens=64))
lap("compiling and first token")
print(json.dumps(times))
"""


def first_token_times_s(checkpoint: str) -> dict[str, float]:
    """Seconds from the start of a process to the first token of a short prompt, in parts, in a process of its own.

    A second call finds compiled programs in the cache (``jllama.load``).
    """
    command = [sys.executable, "-c", _FIRST_TOKEN, checkpoint, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JllamaError(f"the process that makes the first token failed: {done.stderr.strip().splitlines()[-1]}")
    times = json.loads(done.stdout.splitlines()[-1])
    return times | {"in all": sum(times.values())}
