"""The compiled programs of generation: prefill, joining the batch, and blocks of decoding steps.

Prompts are computed in a cache beside the batch, and copied from there into their rows. Every
setting of a row is data: only a cache length, a batch size, a chunk's length and a draft length
compile anew.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jllama.core import engine as core
from jllama.core.config import LlamaConfig
from jllama.core.engine import STEPS, Block, DecodeBatch
from jllama.core.model import KVCache
from jllama.generation.requests import MAX_TOP
from jllama.generation.sampler import draw_tokens
from jllama.models.build import build_model
from jllama.models.decode_params import DecodeParams
from jllama.parallel.shards import batch_shardings

_COPIED_TOKENS = 128  # copied at a time from one cache into another
Chunk = tuple[tuple[Array, ...], tuple[Array, ...]]
"""Keys and values of a chunk of one row's tokens, an array for each layer."""


def call_directly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function as it is."""
    return function(*args)


call_program = call_directly
"""How the engine calls programs; commands replace it by ``jllama.system.programs.call``."""


class Record(NamedTuple):
    """What blocks of decoding steps give each row besides tokens."""

    drafted: Int[Array, "batch"]  # tokens that prompt lookup drafted since the row joined
    accepted: Int[Array, "batch"]  # those of them that were right
    # The most likely tokens of each step and their log-probabilities; zeros unless requested.
    top: tuple[Int[Array, "steps batch top"], Float[Array, "steps batch top"]]


@functools.partial(jax.jit, static_argnames=("config", "cache_is_empty"), donate_argnames="cache")
def prefill_chunk(
    params: DecodeParams,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Any,
    count: Any,
    cache_is_empty: bool,
) -> tuple[Float[Array, "1 seq embed"], KVCache]:
    """Append the first ``count`` tokens of ``[1, seq]`` to a cache.

    Return their final activations and the cache.
    """
    llama = build_model(config, params)
    return llama.decode(
        jnp.asarray(tokens), cache, jnp.asarray(count), cache_is_empty=cache_is_empty
    )


@functools.partial(jax.jit, static_argnames="config")
def prefill_short(params: DecodeParams, config: LlamaConfig, tokens: Any, counts: Any) -> KVCache:
    """Return a new cache with the first ``counts`` tokens of several prompts ``[batch, seq]``."""
    llama = build_model(config, params)
    return core.prefill(llama, jnp.asarray(tokens), jnp.asarray(counts))


@functools.partial(jax.jit, static_argnames="size")
def read_chunk(cache: KVCache, start: Any, size: int) -> Chunk:
    """Return keys and values of ``size`` tokens of a cache of one row."""
    part = functools.partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=2
    )
    return jax.tree.map(part, (cache.keys, cache.values))


@functools.partial(jax.jit, donate_argnames="cache")
def write_chunk(cache: KVCache, chunk: Chunk, start: Any) -> KVCache:
    """Put a stored chunk after the first ``start`` tokens of a cache of one row."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=2)
    keys, values = jax.tree.map(put, (cache.keys, cache.values), chunk)
    return KVCache(keys, values, jnp.full_like(cache.lengths, start + chunk[0][0].shape[2]))


@functools.partial(jax.jit, static_argnames="config")
def score_chunk(
    params: DecodeParams, config: LlamaConfig, hidden: Float[Array, "1 seq embed"], targets: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Return log-probabilities of the next tokens ``[seq]``, and the most likely with theirs."""
    logits = build_model(config, params).logits(hidden)[0]
    log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    scores = jnp.take_along_axis(log_probs, jnp.asarray(targets)[:, None], axis=1)[:, 0]
    return scores, _top_tokens(log_probs)


@functools.partial(jax.jit, donate_argnames="batch")
def join(batch: DecodeBatch, one: DecodeBatch, computed_row: Any, row: Any) -> DecodeBatch:
    """Put a batch of one row, with row ``computed_row`` of its cache, into ``row`` of another."""
    return _on_same_devices(core.join(batch, one, computed_row, row, _copy_row))


def _copy_row(source: KVCache, computed_row: Any, target: KVCache, row: Any) -> KVCache:
    """Copy the tokens that a row of one cache has into a row of another."""
    length = jax.lax.dynamic_slice_in_dim(source.lengths, computed_row, 1)
    keys = target.keys
    values = target.values
    if keys:
        max_len = source.keys[0].shape[2]
        size = _COPIED_TOKENS if max_len % _COPIED_TOKENS == 0 else max_len
        copy = functools.partial(_copy_tokens, source, computed_row, row, size)
        keys, values = jax.lax.fori_loop(0, -(-length[0] // size), copy, (keys, values))
    lengths = jax.lax.dynamic_update_slice_in_dim(target.lengths, length, row, axis=0)
    return KVCache(keys, values, lengths)


def _copy_tokens(
    source: KVCache, from_row: Any, to_row: Any, size: int, index: Array, target: Chunk
) -> Chunk:
    """Copy the ``index``-th ``size`` tokens from a row of one cache to a row of another."""
    start = index * size
    zero = jnp.int32(0)  # of the same type as the other indices, also with 64 bits

    def read(leaf: Array) -> Array:
        sizes = 1, leaf.shape[1], size, leaf.shape[3]
        return jax.lax.dynamic_slice(leaf, (from_row, zero, start, zero), sizes)

    def write(leaf: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice(leaf, part, (to_row, zero, start, zero))

    return jax.tree.map(write, target, jax.tree.map(read, (source.keys, source.values)))


@functools.partial(jax.jit, static_argnames=("config", "draft_len"), donate_argnames="batch")
def decode_block(
    params: DecodeParams,
    config: LlamaConfig,
    batch: DecodeBatch,
    quotas: Any,
    steps: Any,
    tops: Any,
    draft_len: int,
) -> tuple[DecodeBatch, Block]:
    """Take up to ``steps`` decoding steps, see ``core.decode_steps``.

    With a ``draft_len`` each step drafts that many tokens (prompt lookup), which changes no token.
    ``tops`` says whether any row wants the most likely tokens, which drafts do not have.
    """
    llama = build_model(config, params)
    shape = STEPS, len(batch.finished), MAX_TOP
    top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    def step(index: Array, batch: DecodeBatch, takes: Array, top: Any) -> tuple[DecodeBatch, Any]:
        if draft_len:
            from jllama.generation.prompt_lookup import lookup_step  # where texts are guessed

            return lookup_step(llama, batch, takes, draft_len), top
        batch, logits = core.decode_step(llama, batch, takes, draw_tokens)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        top = jax.lax.cond(
            tops, lambda: tuple(map(put, top, _top_tokens(jax.nn.log_softmax(logits)))), lambda: top
        )
        return batch, top

    max_new_tokens = STEPS * (draft_len + 1)
    quotas = jnp.asarray(quotas)
    batch, block = core.decode_steps(batch, quotas, steps, step, top, max_new_tokens)
    record = Record(batch.sampling.drafted, batch.sampling.accepted, block.record)
    return _on_same_devices(batch), block._replace(record=record)


@functools.partial(jax.jit, static_argnames="max_len")
def extend(arrays: Any, max_len: int) -> Any:
    """Pad arrays ``[batch, kv_heads, seq, head_dim]`` and ``[batch, seq]`` to ``max_len``."""

    def pad(leaf: Array) -> Array:
        padding = [(0, 0)] * leaf.ndim
        axis = 2 if leaf.ndim == 4 else 1
        padding[axis] = 0, max_len - leaf.shape[axis]
        return jnp.pad(leaf, padding)

    return _on_same_devices(jax.tree.map(pad, arrays))


def kv_bytes(config: LlamaConfig, dtype: Any, num_tokens: int) -> int:
    """Return the size of the keys and values of ``num_tokens`` tokens, in bytes."""
    num_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return num_values * jnp.dtype(dtype).itemsize * num_tokens


def _top_tokens(
    log_probs: Float[Array, "batch vocab"],
) -> tuple[Int[Array, "batch top"], Float[Array, "batch top"]]:
    """Return the ``MAX_TOP`` most likely tokens and their log-probabilities, padded with zeros."""
    values, ids = jax.lax.top_k(log_probs, min(MAX_TOP, log_probs.shape[1]))
    padding = ((0, 0), (0, MAX_TOP - ids.shape[1]))
    return jnp.pad(ids.astype(jnp.int32), padding), jnp.pad(values.astype(jnp.float32), padding)


def _on_same_devices(rows: Any) -> Any:
    """Constrain arrays of rows to their own sharding, or the next call would compile again."""
    mesh = jax.typeof(jax.tree.leaves(rows)[0]).sharding.mesh
    if mesh.empty:
        return rows
    return jax.lax.with_sharding_constraint(rows, batch_shardings(mesh, rows))
