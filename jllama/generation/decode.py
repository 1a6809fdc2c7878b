"""Decode: a loop on the device that gives each row of a batch token after token, many between two stops at the host.

Every setting is data, one value a row: what compiles is a cache length, a batch size, and the length of drafts. With
drafts (prompt lookup), a step guesses the next tokens from the text so far, verifies them in one pass and keeps those
that are right. Source: Saxena 2023, prompt lookup decoding; Leviathan et al. 2023 (arXiv:2211.17192) for why this
changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.generation.decode_batch import DecodeBatch, append_token
from jllama.generation.prefill import cache_len, resized
from jllama.model import Llama, build_model

STEPS = 16  # at most, between two synchronizations with the host
_SHORTEST_MATCH, _LONGEST_MATCH = 2, 3


def decode(
    params: DecodeParams,
    config: LlamaConfig,
    batch: DecodeBatch,
    steps: int = STEPS,
    stopped: Bool[np.ndarray, "batch"] | None = None,
    draft_len: int = 0,
) -> tuple[DecodeBatch, Int[np.ndarray, "batch new"], Float[np.ndarray, "batch new"]]:
    """Take up to ``steps`` decoding steps (at most ``STEPS``); each gives every unfinished row a token or more.

    The batch, of ``prefill`` or the last call, is consumed; rows that are ``stopped`` are finished from here on. With a
    ``draft_len`` each step guesses so many tokens (prompt lookup), which changes none. Returns the batch, each row's
    new tokens, -1 behind them (a stop id is a row's last), and their log-probabilities by the raw logits, in nats.
    """
    finished, lengths, limits = jax.device_get((batch.finished, batch.cache.lengths, batch.limits))
    running, steps = ~finished if stopped is None else ~(finished | stopped), min(steps, STEPS)
    longest = int(np.minimum(lengths + 1 + steps * (draft_len + 1), limits).max(where=running, initial=0))
    if longest > batch.tokens.shape[1]:
        batch = with_room(batch, longest, config)
    batch, *new = _decode(params, config, batch, running, np.int32(steps), draft_len)
    tokens, log_probs = jax.device_get(new)
    most = int((tokens >= 0).sum(axis=1).max())
    return batch, tokens[:, :most], log_probs[:, :most]


def with_room(batch: DecodeBatch, num_tokens: int, config: LlamaConfig) -> DecodeBatch:
    """The batch with room for at least so many tokens a row."""
    max_len = cache_len(num_tokens, config)
    more = ((0, 0), (0, max_len - batch.tokens.shape[1]))
    tokens, log_probs = jnp.pad(batch.tokens, more), jnp.pad(batch.log_probs, more)
    return batch._replace(cache=resized(batch.cache, max_len), tokens=tokens, log_probs=log_probs)


@functools.partial(jax.jit, static_argnames=("config", "draft_len"), donate_argnames="batch")
def _decode(
    params: DecodeParams, config: LlamaConfig, batch: DecodeBatch, running: Any, steps: Any, draft_len: int
) -> tuple[DecodeBatch, Int[Array, "batch new"], Float[Array, "batch new"]]:
    """The loop on the device; it ends early when every row has finished."""
    llama = build_model(config, params)
    batch, first = batch._replace(finished=~jnp.asarray(running)), batch.cache.lengths[:, None] + 1

    def step(carry: tuple[Array, DecodeBatch]) -> tuple[Array, DecodeBatch]:
        done, batch = carry
        plain = functools.partial(decode_step, llama, batch, batch.tokens[:, :0])
        if not draft_len:
            return done + 1, plain()
        drafts, matched = draft_tokens(batch.tokens, batch.cache.lengths + 1, draft_len)
        verify = functools.partial(decode_step, llama, batch, jnp.where(matched[:, None], drafts, -1))
        # A pass over several tokens costs more than over one, where arithmetic is dear.
        after = jax.lax.cond(jnp.any(matched & ~batch.finished), verify, plain)
        return done + 1, after._replace(seen=batch.seen, settings=batch.settings)  # not to be copied out of branches

    def unfinished(carry: tuple[Array, DecodeBatch]) -> Array:
        return (carry[0] < steps) & ~jnp.all(carry[1].finished)

    _, batch = jax.lax.while_loop(unfinished, step, (jnp.int32(0), batch))
    slots = first + jnp.arange(STEPS * (draft_len + 1), dtype=jnp.int32)  # where the new tokens may be
    is_new, slots = slots <= batch.cache.lengths[:, None], jnp.minimum(slots, batch.tokens.shape[1] - 1)
    tokens, log_probs = (jnp.take_along_axis(array, slots, axis=1) for array in (batch.tokens, batch.log_probs))
    return batch, jnp.where(is_new, tokens, -1), log_probs


def decode_step(llama: Llama, batch: DecodeBatch, drafts: Int[Array, "batch draft_len"]) -> DecodeBatch:
    """Feed each row its last token and its drafts (-1 for none); append a token, and more as long as drafts are right.

    Finished rows get none: their slots are not counted, and will be written again.
    """
    cache = batch.cache
    last = jnp.take_along_axis(batch.tokens, cache.lengths[:, None], axis=1)
    fed = jnp.maximum(jnp.concatenate([last, drafts], axis=1), 0)
    hidden, cache = llama.forward_with_cache(fed, cache, jnp.zeros_like(cache.lengths))
    logits = llama.logits(hidden)
    drafted = jnp.sum((drafts >= 0) & ~batch.finished[:, None], axis=1, dtype=jnp.int32)
    guesses = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)  # what each position's draw is held against

    def take(carry: tuple[DecodeBatch, Array], position: Array) -> tuple[tuple[DecodeBatch, Array], None]:
        batch, takes = carry
        batch, token = append_token(batch, logits[:, position], takes)
        right = takes & (guesses[:, position] == token)
        return (batch._replace(accepted=batch.accepted + right.astype(jnp.int32)), right & ~batch.finished), None

    batch = batch._replace(cache=cache, drafted=batch.drafted + drafted)
    (batch, _), _ = jax.lax.scan(take, (batch, ~batch.finished), jnp.arange(fed.shape[1]))
    return batch


def draft_tokens(
    tokens: Int[Array, "batch max_len"], lengths: Int[Array, "batch"], count: int
) -> tuple[Int[Array, "batch {count}"], Bool[Array, "batch"]]:
    """The ``count`` tokens that followed the last time the text went as it goes now, and whether there was one.

    The last three of each row's first ``lengths`` tokens (else the last two) are looked up in what comes before them;
    the latest match of the most tokens counts. A continuation that reaches the end of the text begins again.
    """
    (batch, max_len), last = tokens.shape, lengths[:, None] - 1
    slots, rows = jnp.arange(max_len), jnp.arange(batch)[:, None]
    matched = jnp.zeros((batch, max_len), jnp.int32)  # how many tokens up to each slot equal the last ones
    matches = slots < last
    for back in range(_LONGEST_MATCH):
        expected = tokens[rows, jnp.maximum(last - back, 0)]
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :max_len]
        matches = matches & (shifted == expected) & (slots >= back)
        matched = matched + matches.astype(jnp.int32)
    enough = matched >= _SHORTEST_MATCH
    best = jnp.argmax(jnp.where(enough, matched * max_len + slots, -1), axis=1)[:, None]
    period = jnp.maximum(last - best, 1)
    return tokens[rows, best + 1 + jnp.arange(count) % period], jnp.any(enough, axis=1)
