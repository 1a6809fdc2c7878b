"""How fast a model prefills and decodes here, beside what the memory allows."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jllama.checkpoints.registry import load
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.errors import JllamaError
from jllama.generation.decode import Request, SamplingParams, advance, start
from jllama.generation.text import stream

GREEDY = SamplingParams(temperature=0.0)
RAGGED_TOKENS = (10, 20, 37, 50, 64, 70, 100, 120)
"""Lengths of the eight prompts that are continued together."""
CONTEXT_TOKENS = 32
"""Length of the prompts whose prefill is left out."""
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


def generate_s(params: DecodeParams, config: LlamaConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds to continue all prompts, together, by ``new_tokens`` tokens each, greedily and without a stop."""
    begun = time.perf_counter()
    decoding = start(params, config, [Request(prompt, GREEDY, new_tokens) for prompt in prompts])
    while not decoding.finished.all():
        decoding, _ = advance(params, config, decoding)
    return time.perf_counter() - begun


def speed(
    params: DecodeParams,
    config: LlamaConfig,
    lengths: Sequence[int],
    new_tokens: int,
    repeats: int,
    bandwidth: float,
    *,
    prefill: bool = True,
) -> Speed:
    """Of prompts of these lengths, continued together; the median of the repeats, after one that compiles.

    One new token each is prefill alone, and its speed is of the tokens read. With ``prefill`` false, which takes two
    new tokens at least, its time is left out. ``bandwidth`` is the memory's, in bytes a second.
    """
    prompts = prompts_of(lengths, config.vocab_size)

    def measure() -> float:
        seconds = generate_s(params, config, prompts, new_tokens)
        return seconds if prefill else seconds - generate_s(params, config, prompts, 1)

    measure()
    seconds = statistics.median(measure() for _ in range(repeats))
    if new_tokens == 1:
        return Speed(sum(lengths) / seconds, 1e3 * seconds)
    step_s = seconds / (new_tokens if prefill else new_tokens - 1)
    context = sum(lengths) // len(lengths) + new_tokens // 2
    limit = len(lengths) * bandwidth / bytes_per_step(params, config, len(lengths), context)
    return Speed(len(lengths) / step_s, 1e3 * step_s, limit)


def bytes_per_step(params: DecodeParams, config: LlamaConfig, batch: int, context: int) -> int:
    """Bytes that a decoding step must read: every weight once, and the keys and values of ``context`` tokens a row.

    Of an embedding that is not also the head only ``batch`` rows are read.
    """
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights["embed"]))
    item = params.dtype.itemsize
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


def first_token_times_s(checkpoint: str) -> dict[str, float]:
    """Seconds from the start of a process to the first token of a short prompt, in parts, in a process of its own.

    A second call finds compiled programs in the cache (``jllama.load``).
    """
    code = "import sys, time; times = [float(sys.argv[2]), time.time()]; "
    code += "from jllama.commands import decode_benchmark; "
    command = [
        sys.executable,
        "-c",
        f"{code}decode_benchmark.first_token(sys.argv[1], times)",
        checkpoint,
        str(time.time()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JllamaError(f"the process that makes the first token failed: {done.stderr.strip().splitlines()[-1]}")
    times = json.loads(done.stdout.splitlines()[-1])
    return times | {"in all": sum(times.values())}


def first_token(checkpoint: str, times: list[float]) -> None:
    """What that process does: print its parts' seconds as JSON. ``times`` are when it was asked for and began."""
    jax.devices()
    times.append(time.time())
    model = load(checkpoint)
    jax.block_until_ready(model.params)
    times.append(time.time())
    next(stream(model, "The capital of France is", GREEDY, max_new_tokens=64))
    times.append(time.time())
    parts = ("interpreter", "imports", "loading", "compiling and first token")
    print(json.dumps({part: end - begun for part, (begun, end) in zip(parts, itertools.pairwise(times), strict=True)}))
