"""Decode: a loop on the device that gives each row of a batch token after token, many between two stops at the host.

Every setting is data, one value a row: what compiles is a cache length, a batch size, and the length of drafts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.generation import programs
from jllama.generation.decode_batch import DecodeBatch, append_token
from jllama.generation.prefill import cache_len, resized
from jllama.generation.prompt_lookup import lookup_step
from jllama.language_model import LanguageModel
from jllama.model import Llama, build_model
from jllama.sharding import batch_shardings

STEPS = 16  # at most, between two synchronizations with the host
Stopped = Bool[np.ndarray, "batch"] | bool


def decode(
    model: LanguageModel, batch: DecodeBatch, steps: int = STEPS, stopped: Stopped = False, draft_len: int = 0
) -> tuple[DecodeBatch, Int[np.ndarray, "batch new"], Float[np.ndarray, "batch new"]]:
    """Take up to ``steps`` decoding steps (at most ``STEPS``); each gives every unfinished row a token or more.

    The batch, of ``prefill`` or the last call, is consumed; rows that are ``stopped`` are finished from here on. With a
    ``draft_len`` each step guesses so many tokens (prompt lookup), which changes none. Returns the batch, each row's
    new tokens, -1 behind them (a stop id is a row's last), and their log-probabilities by the raw logits, in nats.
    """
    finished, lengths, limits = jax.device_get((batch.finished, batch.cache.lengths, batch.limits))
    running, steps = ~(finished | stopped), min(steps, STEPS)
    longest = int(np.minimum(lengths + 1 + steps * (draft_len + 1), limits).max(where=running, initial=0))
    if longest > batch.tokens.shape[1]:
        batch = with_room(batch, longest, model.config)
    batch, *new = programs.call(_decode, model.decode_params, model.config, batch, running, np.int32(steps), draft_len)
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
        return done + 1, lookup_step(llama, batch, draft_len) if draft_len else decode_step(llama, batch)

    def unfinished(carry: tuple[Array, DecodeBatch]) -> Array:
        return (carry[0] < steps) & ~jnp.all(carry[1].finished)

    _, batch = jax.lax.while_loop(unfinished, step, (jnp.int32(0), batch))
    if not (mesh := jax.typeof(batch.finished).sharding.mesh).empty:  # as it came, or the next call compiles again
        batch = jax.lax.with_sharding_constraint(batch, batch_shardings(mesh, batch))
    slots = first + jnp.arange(STEPS * (draft_len + 1), dtype=jnp.int32)  # where the new tokens may be
    is_new, slots = slots <= batch.cache.lengths[:, None], jnp.minimum(slots, batch.tokens.shape[1] - 1)
    tokens, log_probs = (jnp.take_along_axis(array, slots, axis=1) for array in (batch.tokens, batch.log_probs))
    return batch, jnp.where(is_new, tokens, -1), log_probs


def decode_step(llama: Llama, batch: DecodeBatch) -> DecodeBatch:
    """One token more for every unfinished row, whose new slot is then counted; the others will write theirs again."""
    last = jnp.take_along_axis(batch.tokens, batch.cache.lengths[:, None], axis=1)
    hidden, cache = llama.forward_with_cache(last, batch.cache, jnp.zeros_like(batch.cache.lengths))
    return append_token(batch._replace(cache=cache), llama.logits(hidden)[:, 0], ~batch.finished)[0]
