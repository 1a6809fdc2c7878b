"""The slots on the device: a batch of rows that requests come into and leave, under programs that never change.

A row's bits depend on its own request alone: every program has one shape, prompts are computed in chunks that begin at
multiples of ``CHUNK``, and what a row does not see changes nothing (``functional.cached_attention``). ``forward`` only
reads the batch, and ``choose`` writes it: XLA would copy the cache where one program did both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.generation.decode_batch import DecodeBatch, append_token, make_batch
from jllama.generation.sampling_params import Prompt
from jllama.language_model import LanguageModel
from jllama.model import KeysValues, KVCache, build_model, write_slots
from jllama.serve.requests import MOST_TOP

CHUNK, CHUNK_SIZES = 256, (16, 32, 64, 128, 256)  # tokens; a prompt's last chunk is padded to one of these
STOPS = 16  # at most, of a request's stop ids
Chunk = tuple[KeysValues, ...]
"""Keys and values of a chunk of one row's tokens, a pair a layer."""


class Step(NamedTuple):
    """What one decoding step gave each row."""

    tokens: Int[Array, "batch"]  # -1 where the row took none
    log_probs: Float[Array, "batch"]
    top: tuple[Int[Array, "batch top"], Float[Array, "batch top"]]  # ids and log-probabilities; zeros if none was asked


def empty_batch(model: LanguageModel, slots: int, max_len: int) -> DecodeBatch:
    """Rows that no request has yet; ``max_len`` is a multiple of ``CHUNK``."""
    where = model.decode_params.weights["final_norm"].sharding
    zeros = jax.jit(KVCache.zeros, static_argnums=(0, 1, 2, 3), out_shardings=where)
    cache = zeros(model.config, slots, max_len, model.decode_params.dtype)
    batch = make_batch(model, [Prompt([0], max_new_tokens=0)] * slots, cache, max_len, STOPS)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where), batch)


@functools.partial(jax.jit, static_argnames="config")
def prefill_chunk(
    params: DecodeParams, config: LlamaConfig, cache: KVCache, tokens: Any, row: Any, start: Any
) -> tuple[Float[Array, "1 seq embed"], Chunk]:
    """The chunk ``[1, seq]`` of a row's tokens behind its first ``start``: final activations, and keys and values.

    These are padded to ``CHUNK`` tokens, so that one program writes them; what decodes writes over the padding.
    """
    llama, start = build_model(config, params), jnp.asarray(start, jnp.int32)
    hidden, chunk = llama.forward_behind_cache(jnp.asarray(tokens), cache, jnp.asarray(row, jnp.int32), start[None])
    more = ((0, 0), (0, 0), (0, CHUNK - tokens.shape[1]), (0, 0))
    return hidden, jax.tree.map(lambda leaf: jnp.pad(leaf, more), chunk)


@functools.partial(jax.jit, donate_argnames="batch")
def write_chunk(batch: DecodeBatch, chunk: Chunk, row: Any, start: Any) -> DecodeBatch:
    """Put a chunk, computed or kept, behind a row's first ``start`` tokens."""
    copy = functools.partial(jax.lax.dynamic_update_slice, start_indices=(row, 0, start, 0))
    return _written(batch, chunk, copy)


@functools.partial(jax.jit, static_argnames="config")
def score_chunk(
    params: DecodeParams, config: LlamaConfig, hidden: Float[Array, "1 seq embed"], targets: Any
) -> tuple[Array, tuple[Array, Array]]:
    """Log-probabilities of a chunk's next tokens ``[seq]``, and the likeliest ones with theirs."""
    logits = build_model(config, params).logits(hidden)[0]
    log_probs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.take_along_axis(log_probs, jnp.asarray(targets)[:, None], axis=1)[:, 0], _top(log_probs)


def join(batch: DecodeBatch, model: LanguageModel, prompt: Prompt, row: int) -> DecodeBatch:
    """Let a request take a row, whose keys and values of all its tokens but the last are there."""
    lengths: Any = np.array([len(prompt.ids) - 1], np.int32)
    return _join(batch, make_batch(model, [prompt], KVCache((), (), lengths), batch.tokens.shape[1], STOPS), row)


@functools.partial(jax.jit, static_argnames="config")
def forward(
    params: DecodeParams, config: LlamaConfig, batch: DecodeBatch, active: Any
) -> tuple[Float[Array, "batch vocab"], Chunk]:
    """Logits of the next token of each ``active`` row, and the keys and values of its last one."""
    llama, lengths = build_model(config, params), jnp.where(active, batch.cache.lengths, 0)
    last = jnp.take_along_axis(batch.tokens, batch.cache.lengths[:, None], axis=1)
    hidden, new = llama.forward_behind_cache(last, batch.cache, jnp.int32(0), lengths)
    return llama.logits(hidden)[:, 0], new


@functools.partial(jax.jit, donate_argnames="batch")
def choose(
    batch: DecodeBatch, new: Chunk, logits: Float[Array, "batch vocab"], active: Any, tops: Any
) -> tuple[DecodeBatch, Step]:
    """Write what ``forward`` gave and draw the next token of each ``active`` row that has not finished.

    ``tops`` says whether any row wants the likeliest tokens, too.
    """
    takes = active & ~batch.finished
    at = jnp.where(takes, batch.cache.lengths, batch.tokens.shape[1])[:, None]  # out of range, hence dropped
    batch = _written(batch, new, lambda old, more: write_slots(old, more, at))
    batch, tokens = append_token(batch, logits, takes)
    shape = (len(takes), MOST_TOP)
    top = jax.lax.cond(
        jnp.asarray(tops),
        lambda: _top(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)),
        lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
    )
    log_probs = jnp.take_along_axis(batch.log_probs, batch.cache.lengths[:, None], axis=1)[:, 0]
    return batch, Step(jnp.where(takes, tokens, -1), log_probs, top)


def _written(batch: DecodeBatch, new: Chunk, write: Callable[[Array, Array], Array]) -> DecodeBatch:
    """The batch with each layer's keys and values as ``write`` makes them of the old and the new ones."""
    keys, values = zip(*new, strict=True)
    keys, values = tuple(map(write, batch.cache.keys, keys)), tuple(map(write, batch.cache.values, values))
    return batch._replace(cache=batch.cache._replace(keys=keys, values=values))


def kv_bytes(model: LanguageModel, num_tokens: int) -> int:
    """What the keys and values of so many tokens take."""
    config, dtype = model.config, jnp.dtype(model.decode_params.dtype)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * num_tokens


def _top(log_probs: Float[Array, "batch vocab"]) -> tuple[Int[Array, "batch top"], Float[Array, "batch top"]]:
    values, ids = jax.lax.top_k(log_probs, MOST_TOP)
    return ids.astype(jnp.int32), values.astype(jnp.float32)


@functools.partial(jax.jit, donate_argnames="batch")
def _join(batch: DecodeBatch, one: DecodeBatch, row: Any) -> DecodeBatch:
    rest = batch._replace(cache=KVCache((), (), batch.cache.lengths))

    def put(all_rows: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(all_rows, new, (row, *[0] * (all_rows.ndim - 1)))

    joined = jax.tree.map(put, rest, one)
    return joined._replace(cache=batch.cache._replace(lengths=joined.cache.lengths))
