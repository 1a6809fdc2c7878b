"""Prefill and decode, on token ids alone. Text and tokenizers are ``jllama.generation.text``'s concern.

All but the last token of each prompt go through the model first, in chunks padded to a few lengths (prefill). Then a
loop on the device feeds each row its last token, draws the next and goes on (decode), many steps between two looks of
the host. With drafts, each step feeds some guessed tokens behind the last one and keeps those that the model would have
drawn itself. Every setting is data, one value a row: what compiles is a chunk length, a cache length, a batch size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.errors import UsageError
from jllama.generation.prompt_lookup import draft_tokens
from jllama.generation.sampling_arrays import (
    Request,
    SamplingArrays,
    SamplingParams,
    check_requests,
    choose,
    sampling_arrays,
)
from jllama.model import KVCache, Llama, build_model

T = TypeVar("T")

__all__ = ["DecodeBatch", "GeneratedTokens", "PrefixCache", "Request", "SamplingParams", "advance", "start"]

STEPS = 16
"""The most decoding steps between two looks of the host."""
_PREFILL_TOKENS = 512
_SHORTEST_PREFILL = 16
_SHORTEST_CACHE = 128
_ROOM_TOKENS = 512


class DecodeState(NamedTuple):
    """What the device keeps between two chunks of steps.

    Args:
        cache: keys and values of all known tokens but the last.
        tokens: the known tokens of each row: the prompt and what was generated.
        seen: which tokens are in the prompt.
        counts: how often each token was generated.
        finished: rows that are done.
        drafted, accepted: how many tokens were guessed so far, and how many of them were right.
    """

    cache: KVCache
    tokens: Int[Array, "batch max_len"]
    seen: Bool[Array, "batch vocab"]
    counts: Int[Array, "batch vocab"]
    finished: Bool[Array, "batch"]
    drafted: Int[Array, "batch"]
    accepted: Int[Array, "batch"]


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """A batch in the making: its state on the device, and what the host knows of it.

    Args:
        settings, state: of the rows; the next call of ``advance`` consumes the state.
        lengths: known tokens of each row, prompt and new.
        limits: the lengths at which the rows end.
        finished: which rows are done.
        drafts: how many tokens each step guesses.
    """

    settings: SamplingArrays
    state: DecodeState
    lengths: Int[np.ndarray, "batch"]
    limits: Int[np.ndarray, "batch"]
    finished: Bool[np.ndarray, "batch"]
    drafts: int


class GeneratedTokens(NamedTuple):
    """What a chunk of steps made: each row's tokens in order, then -1; and the model's own log-probabilities of them.

    A stop id is the last token of its row. The log-probability is that of the raw logits, at temperature 1 and before
    any other setting, in nats.
    """

    tokens: Int[np.ndarray, "batch new"]
    log_probs: Float[np.ndarray, "batch new"]


@dataclasses.dataclass
class PrefixCache:
    """Keys and values kept from one call to the next, so that only what a longer prompt adds is prefilled.

    Args:
        ids: the tokens that the cache holds.
        cache: one row; None if there is nothing.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    cache: KVCache | None = None


def start(
    params: DecodeParams,
    config: LlamaConfig,
    requests: Sequence[Request],
    *,
    vocab_size: int | None = None,
    drafts: int = 0,
    prefix: PrefixCache | None = None,
) -> DecodeBatch:
    """Prefill the prompts; equal ones once.

    Args:
        params: in the layout for decoding.
        config: the model's.
        requests: the rows; they may differ in everything, and each comes out as it would alone (in 16-bit floats near
            ties may fall otherwise).
        vocab_size: the tokenizer's, where the model's is padded: higher ids are never drawn.
        drafts: how many tokens to guess at each step (prompt lookup); the result is the same with any number.
        prefix: for a single request: what is already computed; it is consumed.

    Raises:
        UsageError: a request cannot be met: no prompt, ids that do not exist, more tokens than the context holds.
    """
    vocab_size = config.vocab_size if vocab_size is None else vocab_size
    check_requests(requests, config.max_seq_len, vocab_size)
    if drafts < 0:
        raise UsageError(f"the number of drafts is {drafts}; it must not be negative")
    limits = np.array([request.limit(config.max_seq_len) for request in requests])
    lengths = np.array([len(request.ids) for request in requests])
    room = int(np.minimum(limits, lengths + _ROOM_TOKENS).max())
    cache = _prompt_caches(params, config, requests, room, prefix)
    max_len = cache.keys[0].shape[2]
    tokens = np.zeros((len(requests), max_len), np.int32)
    seen = np.zeros((len(requests), config.vocab_size), bool)
    for row, request in enumerate(requests):
        tokens[row, : len(request.ids)] = request.ids
        seen[row, list(request.ids)] = True
    finished = lengths >= limits
    state = DecodeState(
        cache,
        jnp.asarray(tokens),
        jnp.asarray(seen),
        jnp.zeros(seen.shape, jnp.int32),
        jnp.asarray(finished),
        jnp.zeros(len(requests), jnp.int32),
        jnp.zeros(len(requests), jnp.int32),
    )
    settings = sampling_arrays(requests, config.max_seq_len, config.vocab_size, vocab_size)
    state, settings = _beside(params, (state, settings))
    return DecodeBatch(settings, state, lengths, limits, finished, drafts)


def advance(
    params: DecodeParams,
    config: LlamaConfig,
    decoding: DecodeBatch,
    steps: int = STEPS,
    stopped: Bool[np.ndarray, "batch"] | None = None,
) -> tuple[DecodeBatch, GeneratedTokens]:
    """Up to ``steps`` more decoding steps, and at most ``STEPS``; each gives every unfinished row a token or more.

    ``stopped`` rows are finished from here on. Fewer steps are taken when every row has finished.
    """
    steps = min(steps, STEPS)
    state, settings = decoding.state, decoding.settings
    if stopped is not None:
        state = state._replace(finished=state.finished | jnp.asarray(stopped))
        decoding = dataclasses.replace(decoding, finished=decoding.finished | stopped)
    if decoding.finished.all():
        nothing = np.zeros((len(decoding.lengths), 0))
        return dataclasses.replace(decoding, state=state), GeneratedTokens(nothing.astype(np.int32), nothing)
    window = decoding.drafts + 1
    running = ~decoding.finished
    needed = np.minimum(decoding.lengths + steps * window, decoding.limits)[running].max()
    if needed > state.tokens.shape[1]:
        max_len = _cache_len(int(needed), config)
        tokens = jnp.pad(state.tokens, ((0, 0), (0, max_len - state.tokens.shape[1])))
        state = state._replace(cache=_resized(state.cache, max_len), tokens=tokens)
    state, tokens, log_probs = _decode(params, config, state, settings, jnp.int32(steps), window)
    tokens = np.asarray(tokens)
    counts = (tokens >= 0).sum(axis=1)
    widest = int(counts.max())
    new = GeneratedTokens(tokens[:, :widest], np.asarray(log_probs)[:, :widest])
    lengths = decoding.lengths + counts
    return dataclasses.replace(decoding, state=state, lengths=lengths, finished=np.array(state.finished)), new


def _prompt_caches(
    params: DecodeParams, config: LlamaConfig, requests: Sequence[Request], room: int, prefix: PrefixCache | None
) -> KVCache:
    """A cache with room for ``room`` tokens a row that holds each row's prompt but its last token."""
    max_len = _cache_len(room, config)
    if len(requests) == 1:
        return _extended(params, config, requests[0].ids[:-1], max_len, prefix or PrefixCache())
    batch = _empty_cache(params, config, len(requests), max_len)
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, request in enumerate(requests):
        rows.setdefault(tuple(request.ids[:-1]), []).append(row)
    for known, places in rows.items():
        if known:
            row_cache = _prefilled(params, config, known, _cache_len(len(known), config))
            for place in places:
                batch = _insert(batch, row_cache, place)
    return batch


def _extended(
    params: DecodeParams, config: LlamaConfig, ids: Sequence[int], max_len: int, prefix: PrefixCache
) -> KVCache:
    """The prefix's cache, cut to what it shares with ``ids`` and extended by the rest; a new one if that is nothing."""
    kept, prefix.cache = prefix.cache, None
    pairs = list(zip(prefix.ids, ids, strict=False))
    shared = next((place for place, (old, new) in enumerate(pairs) if old != new), len(pairs))
    if not shared or kept is None or kept.lengths.is_deleted():
        return _prefilled(params, config, ids, max_len)
    if kept.keys[0].shape[2] < max_len:
        kept = _resized(kept, max_len)
    kept = kept._replace(lengths=_beside(params, jnp.array([shared], jnp.int32)))
    return _prefilled(params, config, ids[shared:], max_len, kept)


def _empty_cache(params: DecodeParams, config: LlamaConfig, batch: int, max_len: int) -> KVCache:
    return _beside(params, _zeros(config, batch, max_len, params.dtype))


_zeros = jax.jit(KVCache.zeros, static_argnums=(0, 1, 2, 3))  # one program, not one for each layer's arrays


def _beside(params: DecodeParams, tree: T) -> T:
    """Arrays on the devices of the parameters, whole on each: where they are is part of what is compiled."""
    sharding = params.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(tree, sharding)


def _prefilled(
    params: DecodeParams, config: LlamaConfig, ids: Sequence[int], max_len: int, cache: KVCache | None = None
) -> KVCache:
    """The cache with these tokens behind those that it holds; a new one with room for ``max_len``, if there is none."""
    for first in range(0, len(ids), _PREFILL_TOKENS):
        chunk = ids[first : first + _PREFILL_TOKENS]
        padded = np.zeros((1, power_of_two_at_least(len(chunk), _SHORTEST_PREFILL)), np.int32)
        padded[0, : len(chunk)] = chunk
        extended = _prefill(params, config, cache, padded, np.array([len(chunk)], np.int32))
        cache = _resized(extended, max_len) if cache is None else extended
    return _empty_cache(params, config, 1, max_len) if cache is None else cache


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(
    params: DecodeParams,
    config: LlamaConfig,
    cache: KVCache | None,
    tokens: Int[Array | np.ndarray, "1 seq"],
    count: Int[Array | np.ndarray, "1"],
) -> KVCache:
    return build_model(config, params).forward_with_cache(jnp.asarray(tokens), cache, jnp.asarray(count))[1]


@functools.partial(jax.jit, donate_argnames="batch")
def _insert(batch: KVCache, row_cache: KVCache, place: Int[Array, ""] | int) -> KVCache:
    """Copy a row into its place in a batch whose rows have more room."""

    def put(into: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice(into, row, (place, 0, 0, 0))

    keys, values = (tuple(map(put, into, row)) for into, row in zip(batch[:2], row_cache[:2], strict=True))
    return KVCache(keys, values, batch.lengths.at[place].set(row_cache.lengths[0]))


@functools.partial(jax.jit, static_argnames="max_len")
def _resized(cache: KVCache, max_len: int) -> KVCache:
    """With room for ``max_len`` tokens a row; what is cut off, if anything, must be padding."""

    def resize(stored: Array) -> Array:
        more = max_len - stored.shape[2]
        return jax.lax.pad(stored, jnp.zeros((), stored.dtype), ((0, 0, 0), (0, 0, 0), (0, more, 0), (0, 0, 0)))

    return KVCache(tuple(map(resize, cache.keys)), tuple(map(resize, cache.values)), cache.lengths)


class _Step(NamedTuple):
    """The loop's state: how many steps were done, and what they made."""

    done: Int[Array, ""]
    state: DecodeState
    made: Int[Array, "batch"]
    tokens: Int[Array, "batch new"]
    log_probs: Float[Array, "batch new"]


@functools.partial(jax.jit, static_argnames=("config", "window"), donate_argnames=("state",))
def _decode(
    params: DecodeParams,
    config: LlamaConfig,
    state: DecodeState,
    settings: SamplingArrays,
    steps: Int[Array, ""],
    window: int,
) -> tuple[DecodeState, Int[Array, "batch new"], Float[Array, "batch new"]]:
    """Up to ``steps`` steps; ends early when every row has finished."""
    llama = build_model(config, params)
    batch = state.finished.shape[0]

    def step(carry: _Step) -> _Step:
        carry = carry._replace(done=carry.done + 1)
        if window == 1:
            return _step(llama, settings, carry, jnp.zeros((batch, 0), jnp.int32))
        drafts, found = draft_tokens(carry.state.tokens, carry.state.cache.lengths + 1, window - 1)
        return jax.lax.cond(  # a pass over several tokens costs more than over one, where arithmetic is dear
            jnp.any(found & ~carry.state.finished),
            lambda: _step(llama, settings, carry, jnp.where(found[:, None], drafts, -1)),
            lambda: _step(llama, settings, carry, drafts[:, :0]),
        )

    def unfinished(carry: _Step) -> Array:
        return (carry.done < steps) & ~jnp.all(carry.state.finished)

    shape = (batch, STEPS * window)
    begun = _Step(
        jnp.int32(0), state, jnp.zeros(batch, jnp.int32), jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    )
    ended = jax.lax.while_loop(unfinished, step, begun)
    return ended.state, ended.tokens, ended.log_probs


def _step(llama: Llama, settings: SamplingArrays, carry: _Step, drafts: Int[Array, "batch drafts"]) -> _Step:
    """Feed each row its last token and its drafts (-1 for none); draw, and go on as long as the drafts are right."""
    state = carry.state
    rows = jnp.arange(drafts.shape[0])
    last = state.tokens[rows, state.cache.lengths]
    fed = jnp.concatenate([last[:, None], drafts], axis=1)
    hidden, cache = llama.forward_with_cache(jnp.maximum(fed, 0), state.cache, jnp.zeros_like(state.cache.lengths))
    logits = llama.logits(hidden)
    drafted = jnp.sum((drafts >= 0) & ~state.finished[:, None], axis=1, dtype=jnp.int32)
    carry = carry._replace(state=state._replace(cache=cache, drafted=state.drafted + drafted))

    def draw(inner: tuple[_Step, Array], place: Array) -> tuple[tuple[_Step, Array], None]:
        """Of the rows whose drafts were right up to ``place``, take one more token."""
        carry, right = inner
        state, scores = carry.state, logits[:, place]
        known = state.cache.lengths + 1
        token = choose(scores, settings, known, state.seen, state.counts)
        log_prob = scores[rows, token] - jax.nn.logsumexp(scores, axis=-1)
        out = jnp.where(right, carry.made, carry.tokens.shape[1])  # nowhere, for the others
        stop = jnp.any(token[:, None] == settings.stop_ids, axis=1) | (known + 1 >= settings.limits)
        guess = jnp.append(drafts, jnp.full((len(rows), 1), -1), axis=1)[:, place]
        guessed = right & (guess == token)
        state = state._replace(
            cache=state.cache._replace(lengths=state.cache.lengths + right),
            tokens=state.tokens.at[rows, jnp.where(right, known, state.tokens.shape[1])].set(token, mode="drop"),
            counts=state.counts.at[rows, token].add(right.astype(jnp.int32)),
            finished=state.finished | (right & stop),
            accepted=state.accepted + guessed,
        )
        carry = _Step(
            carry.done,
            state,
            carry.made + right,
            carry.tokens.at[rows, out].set(token, mode="drop"),
            carry.log_probs.at[rows, out].set(log_prob.astype(jnp.float32), mode="drop"),
        )
        return (carry, guessed & ~stop), None

    (carry, _), _ = jax.lax.scan(draw, (carry, ~state.finished), jnp.arange(fed.shape[1]))
    return carry


def _cache_len(tokens: int, config: LlamaConfig) -> int:
    """The cache length for so many tokens: one of a few, so that few are compiled."""
    return min(power_of_two_at_least(tokens, _SHORTEST_CACHE), config.max_seq_len)


def power_of_two_at_least(number: int, least: int) -> int:
    """The lengths that arrays are padded to: few, so that few programs are compiled."""
    return max(least, 1 << (number - 1).bit_length())
