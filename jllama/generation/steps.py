"""The compiled programs of generation: a chunk of a prompt, a row's entrance, and a block of decoding steps.

Prompts are computed in a cache beside the batch, and copied from there into their rows. Every setting of a row is data:
what compiles is a cache length, a batch size, a chunk's length, and the length of drafts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.generation.decode_batch import DecodeBatch, append_token
from jllama.generation.prompt_lookup import lookup_step
from jllama.generation.requests import MOST_TOP
from jllama.model import KeysValues, KVCache, Llama, build_model
from jllama.sharding import batch_shardings

STEPS = 16
"""Decoding steps at most between two looks by the host."""
_COPIED_TOKENS = 128  # at once, from one cache into another
Chunk = tuple[KeysValues, ...]
"""Keys and values of a chunk of one row's tokens, a pair a layer."""


class Block(NamedTuple):
    """What a block of decoding steps gave each row: its new tokens in their order, -1 behind them."""

    tokens: Int[Array, "batch new"]
    log_probs: Float[Array, "batch new"]  # by the raw logits, in nats
    drafted: Int[Array, "batch"]  # tokens that prompt lookup guessed since the row came in
    accepted: Int[Array, "batch"]  # those of them that were right
    top: tuple[
        Int[Array, "steps batch top"], Float[Array, "steps batch top"]
    ]  # of each step; zeros if none was asked


@functools.partial(jax.jit, static_argnames=("config", "begins"), donate_argnames="cache")
def prefill_chunk(
    params: DecodeParams, config: LlamaConfig, cache: KVCache, tokens: Any, count: Any, begins: bool
) -> tuple[Float[Array, "1 seq embed"], KVCache]:
    """Final activations of the first ``count`` tokens of ``[1, seq]`` behind those in the cache, and it with them."""
    return build_model(config, params).decode(
        jnp.asarray(tokens), cache, jnp.asarray(count), begins=begins
    )


@functools.partial(jax.jit, static_argnames="config")
def prefill_short(params: DecodeParams, config: LlamaConfig, tokens: Any, counts: Any) -> KVCache:
    """Keys and values of the first ``counts`` tokens of several prompts ``[batch, seq]``, in a cache of their own."""
    rows, seq = tokens.shape
    cache = KVCache.zeros(config, rows, seq, params.dtype)
    return build_model(config, params).decode(
        jnp.asarray(tokens), cache, jnp.asarray(counts), begins=True
    )[1]


@functools.partial(jax.jit, static_argnames="size")
def read_chunk(cache: KVCache, start: Any, size: int) -> Chunk:
    """Keys and values of ``size`` tokens of a cache of one row."""
    part = functools.partial(
        jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=2
    )
    return tuple(zip(map(part, cache.keys), map(part, cache.values), strict=True))


@functools.partial(jax.jit, donate_argnames="cache")
def write_chunk(cache: KVCache, chunk: Chunk, start: Any) -> KVCache:
    """Put a chunk that was kept behind the first ``start`` tokens of a cache of one row."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=2)
    keys, values = zip(*chunk, strict=True)
    lengths = jnp.full_like(cache.lengths, start + keys[0].shape[2])
    return KVCache(
        tuple(map(put, cache.keys, keys)), tuple(map(put, cache.values, values)), lengths
    )


@functools.partial(jax.jit, static_argnames="config")
def score_chunk(
    params: DecodeParams, config: LlamaConfig, hidden: Float[Array, "1 seq embed"], targets: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Log-probabilities of a chunk's next tokens ``[seq]``, and the likeliest ones with theirs."""
    logits = build_model(config, params).logits(hidden)[0]
    log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(log_probs, jnp.asarray(targets)[:, None], axis=1)[:, 0], _likeliest(
        log_probs
    )


@functools.partial(jax.jit, donate_argnames="batch")
def join(batch: DecodeBatch, one: DecodeBatch, computed_row: Any, row: Any) -> DecodeBatch:
    """Put a batch of one row into a row of a larger batch; of its cache, what one of perhaps several rows holds."""

    def put(rows: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(rows, new, row, axis=0)

    def copy(index: Array, leaves: list[Array]) -> list[Array]:
        start = index * size
        zero = jnp.int32(0)  # of the others' type, in 64 bits, too
        parts = [
            jax.lax.dynamic_slice(
                leaf, (computed_row, zero, start, zero), (1, leaf.shape[1], size, leaf.shape[3])
            )
            for leaf in source
        ]
        return [
            jax.lax.dynamic_update_slice(leaf, part, (row, zero, start, zero))
            for leaf, part in zip(leaves, parts, strict=True)
        ]

    length = jax.lax.dynamic_slice_in_dim(one.cache.lengths, computed_row, 1)
    source, into = ([*each.cache.keys, *each.cache.values] for each in (one, batch))
    if source:
        max_len = source[0].shape[2]
        size = _COPIED_TOKENS if max_len % _COPIED_TOKENS == 0 else max_len
        into = jax.lax.fori_loop(0, -(-length[0] // size), copy, into)
    keys, values = into[: len(into) // 2], into[len(into) // 2 :]
    lengths = put(batch.cache.lengths, length)
    fields = {
        name: jax.tree.map(put, getattr(batch, name), getattr(one, name))
        for name in batch._fields[1:]
    }
    return _as_it_came(DecodeBatch(KVCache(tuple(keys), tuple(values), lengths), **fields))


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
    """Up to ``steps`` decoding steps (at most ``STEPS``), each of which gives every unfinished row a token or more.

    A loop on the device, which ends early when no row goes on. Each row takes at most ``quotas`` tokens, none where it
    is zero. With a ``draft_len`` each step guesses so many tokens (prompt lookup), which changes none. ``tops`` says
    whether any row wants the likeliest tokens, too, of which there are no drafts.
    """
    llama = build_model(config, params)
    first = batch.cache.lengths
    quotas = jnp.asarray(quotas)
    shape = STEPS, len(first), MOST_TOP
    top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    def takes(batch: DecodeBatch) -> Array:
        return ~batch.finished & (batch.cache.lengths - first < quotas)

    def goes_on(carry: tuple[Array, DecodeBatch, Any]) -> Array:
        return (carry[0] < steps) & jnp.any(takes(carry[1]))

    def step(carry: tuple[Array, DecodeBatch, Any]) -> tuple[Array, DecodeBatch, Any]:
        done, batch, top = carry
        if draft_len:
            return done + 1, lookup_step(llama, batch, takes(batch), draft_len), top
        batch, logits = decode_step(llama, batch, takes(batch))
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=done, axis=0)
        top = jax.lax.cond(
            tops, lambda: tuple(map(put, top, _likeliest(jax.nn.log_softmax(logits)))), lambda: top
        )
        return done + 1, batch, top

    _, batch, top = jax.lax.while_loop(goes_on, step, (jnp.int32(0), batch, top))
    # The new tokens stand behind those that each row had.
    slots = first[:, None] + 1 + jnp.arange(STEPS * (draft_len + 1), dtype=jnp.int32)
    is_new = slots <= batch.cache.lengths[:, None]
    slots = jnp.minimum(slots, batch.tokens.shape[1] - 1)
    tokens = jnp.where(is_new, jnp.take_along_axis(batch.tokens, slots, axis=1), -1)
    log_probs = jnp.take_along_axis(batch.log_probs, slots, axis=1)
    return _as_it_came(batch), Block(tokens, log_probs, batch.drafted, batch.accepted, top)


def decode_step(
    llama: Llama, batch: DecodeBatch, takes: Array
) -> tuple[DecodeBatch, Float[Array, "batch vocab"]]:
    """One token more for every row that takes one, and the logits that it was drawn by."""
    last = jnp.take_along_axis(batch.tokens, batch.cache.lengths[:, None], axis=1)
    hidden, cache = llama.decode(last, batch.cache, takes.astype(jnp.int32))
    logits = llama.logits(hidden)[:, 0]
    return append_token(batch._replace(cache=cache), logits, takes)[0], logits


@functools.partial(jax.jit, static_argnames="max_len")
def resized(batch: DecodeBatch, max_len: int) -> DecodeBatch:
    """The batch with room for ``max_len`` tokens a row."""

    def longer(leaf: Array, axis: int) -> Array:
        more = [(0, 0)] * leaf.ndim
        more[axis] = 0, max_len - leaf.shape[axis]
        return jnp.pad(leaf, more)

    cache = batch.cache
    keys, values = (
        tuple(longer(leaf, 2) for leaf in leaves) for leaves in (cache.keys, cache.values)
    )
    tokens, log_probs = longer(batch.tokens, 1), longer(batch.log_probs, 1)
    cache = KVCache(keys, values, cache.lengths)
    return _as_it_came(batch._replace(cache=cache, tokens=tokens, log_probs=log_probs))


def kv_bytes(config: LlamaConfig, dtype: Any, num_tokens: int) -> int:
    """What the keys and values of so many tokens take."""
    return (
        2
        * config.num_layers
        * config.num_kv_heads
        * config.head_dim
        * jnp.dtype(dtype).itemsize
        * num_tokens
    )


def _likeliest(
    log_probs: Float[Array, "batch vocab"],
) -> tuple[Int[Array, "batch top"], Float[Array, "batch top"]]:
    values, ids = jax.lax.top_k(log_probs, min(MOST_TOP, log_probs.shape[1]))
    more = ((0, 0), (0, MOST_TOP - ids.shape[1]))
    return jnp.pad(ids.astype(jnp.int32), more), jnp.pad(values.astype(jnp.float32), more)


def _as_it_came(batch: DecodeBatch) -> DecodeBatch:
    """The batch on the devices that it is kept on, or the next call would compile again."""
    mesh = jax.typeof(batch.finished).sharding.mesh
    return (
        batch
        if mesh.empty
        else jax.lax.with_sharding_constraint(batch, batch_shardings(mesh, batch))
    )
