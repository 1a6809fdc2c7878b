"""Memory and seconds of the loss: all logits, checkpointed chunks, its own backward pass.

    python benchmarks/loss.py --vocab 128256 --embed 2048 --batch 4 --seq 2048

Seconds are the median of five, measured alternately; memory is what XLA plans for temporaries.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jllama import functional as F


def cross_entropy(logits: Array, targets: Array, mask: Array) -> Array:
    """Sum ``-log p(target)`` over counted targets."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    target_log_probs = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(mask, target_log_probs, 0.0))


def all_logits(hidden: Array, head: Array, targets: Array, mask: Array) -> Array:
    return cross_entropy(F.project(hidden, head), targets, mask)


def checkpointed(
    hidden: Array, head: Array, targets: Array, mask: Array, chunk_tokens: int
) -> Array:
    num_chunks = max(targets.size // chunk_tokens, 1)

    def add(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        hidden, targets, mask = part
        return total + cross_entropy(F.project(hidden, head), targets, mask), None

    def in_chunks(array: Array) -> Array:
        return array.reshape(array.shape[0], num_chunks, -1, *array.shape[2:]).swapaxes(0, 1)

    parts = in_chunks(hidden), in_chunks(targets), in_chunks(mask)
    return jax.lax.scan(jax.checkpoint(add), jnp.float32(0), parts)[0]


def own_backward(
    hidden: Array, head: Array, targets: Array, mask: Array, chunk_tokens: int
) -> Array:
    return F.linear_cross_entropy(hidden, head, targets, mask, 0.0, chunk_tokens)[0]


def main() -> None:
    """Print a line for each way and chunk size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"vocab": 2048, "embed": 128, "batch": 8, "seq": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (options.batch, options.seq)
    hidden = jax.random.normal(keys[0], (*shape, options.embed), options.dtype)
    head = jax.random.normal(keys[1], (options.embed, options.vocab), options.dtype)
    head = head / options.embed**0.5
    targets = jax.random.randint(keys[2], shape, 0, options.vocab)
    arrays = (hidden, head, targets, jnp.ones(shape, bool))
    ways: dict[str, Any] = {"all logits": all_logits}
    for way in (checkpointed, own_backward):
        for chunk_tokens in (512, 2048, 8192):
            name = f"{way.__name__}, {chunk_tokens} tokens"
            ways[name] = functools.partial(way, chunk_tokens=chunk_tokens)
    compiled = {
        name: jax.jit(jax.value_and_grad(way, (0, 1))).lower(*arrays).compile()
        for name, way in ways.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(6):
        for name, program in compiled.items():
            start_s = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            seconds[name].append(time.perf_counter() - start_s)
    for name, program in compiled.items():
        temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:28} {temporaries:9,.0f} MiB  {statistics.median(seconds[name][1:]):8.4f} s")


if __name__ == "__main__":
    main()
