"""Prefill and decode, on token ids alone. Text and tokenizers are ``jllama.generation.text``'s concern.

A batch of prompts, padded on the right, goes through the model once (prefill); then a loop on the device draws a token
a row, writes it into the cache and goes on, ``CHUNK_TOKENS`` at a time, so the host waits once a chunk and not once a
token. Every sampling setting is data, one value a row: changing one compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.functional import sample
from jllama.model import KVCache, merge
from jllama.parameters import Params

CHUNK_TOKENS = 16
_CACHE_MULTIPLE = 128
_STOP_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How one row's tokens are chosen.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token, 1 draws from the model as it is.
        top_k: draw among the k likeliest tokens only; 0 is all of them.
        top_p: draw among the likeliest tokens that together reach this probability; 1 is all of them.
        seed: the same seed, prompt and settings give the same text, whatever else is in the batch.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (all tokens) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be over 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; it must be between 0 and 2**32 - 1")


class Rows(NamedTuple):
    """The settings of every row of a batch, as arrays, and how many ids the tokenizer has."""

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    keys: Key[Array, "batch"]
    vocab_size: Int[Array, ""]


class DecodeState(NamedTuple):
    """Between two chunks: the cache, the last token drawn in each row (not in the cache yet), who has finished."""

    cache: KVCache
    token: Int[Array, "batch"]
    finished: Bool[Array, "batch"]


def generate_tokens(
    params: Params,
    config: LlamaConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingConfig],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    vocab_size: int | None = None,
) -> Iterator[Int[np.ndarray, "batch new"]]:
    """Continue each prompt, yielding the new tokens of all rows a chunk at a time.

    Args:
        params: unstacked layers (``unstack_layers``).
        config: the model's.
        prompts: at least one token each; they may differ in length, and each row comes out as it would alone.
        sampling: one a prompt.
        max_new_tokens: the most tokens that any row gets.
        stop_ids: a row ends after one of these, which it still yields; from there on it yields -1.
        vocab_size: the tokenizer's, where the model's is padded: higher ids are never drawn.

    Raises:
        UsageError: there is no prompt, a prompt is empty, or it and the new tokens are longer than the model's context.
    """
    if not prompts or len(prompts) != len(sampling):
        raise UsageError(
            f"there are {len(prompts)} prompts and {len(sampling)} sampling settings: give one to each prompt"
        )
    lengths = np.array([len(prompt) for prompt in prompts])
    check_lengths(lengths, max_new_tokens, config.max_seq_len)
    if max_new_tokens == 0:
        return
    bucket = min(_power_of_two_at_least(int(lengths.max())), config.max_seq_len)
    max_len = min(_CACHE_MULTIPLE * -(-(bucket + max_new_tokens) // _CACHE_MULTIPLE), config.max_seq_len)
    padded = np.zeros((len(prompts), bucket), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    rows = Rows(
        jnp.array([row.temperature for row in sampling], jnp.float32),
        jnp.array([row.top_k for row in sampling], jnp.int32),
        jnp.array([row.top_p for row in sampling], jnp.float32),
        jax.vmap(jax.random.key)(jnp.array([row.seed for row in sampling], jnp.uint32)),
        jnp.array(config.vocab_size if vocab_size is None else vocab_size, jnp.int32),
    )
    stops = jnp.array([*stop_ids, *[-1] * (_STOP_MULTIPLE - len(stop_ids) % _STOP_MULTIPLE)], jnp.int32)
    state = _prefill(params, config, max_len, jnp.asarray(padded), jnp.asarray(lengths, jnp.int32), rows, stops)
    yield np.asarray(state.token)[:, None]
    made = 1
    while made < max_new_tokens and not bool(state.finished.all()):
        count = min(CHUNK_TOKENS, max_new_tokens - made)
        state, tokens = _decode(params, config, state, rows, stops, count)
        yield np.asarray(tokens)[:, :count]
        made += count


def check_lengths(prompt_tokens: Int[np.ndarray, "batch"], max_new_tokens: int, max_seq_len: int) -> None:
    """Raise ``UsageError`` unless every prompt has a token and fits the context together with the new tokens."""
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; it must not be negative")
    if prompt_tokens.min() < 1:
        raise UsageError("a prompt has no tokens: it needs at least the BOS token")
    longest = int(prompt_tokens.max())
    if longest + max_new_tokens > max_seq_len:
        raise UsageError(
            f"the prompt's {longest} tokens and {max_new_tokens} new ones exceed the model's context of {max_seq_len}: "
            f"shorten the prompt or lower --max_new_tokens to at most {max(max_seq_len - longest, 0)}"
        )


@functools.partial(jax.jit, static_argnames=("config", "max_len"))
def _prefill(
    params: Params,
    config: LlamaConfig,
    max_len: int,
    tokens: Int[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    rows: Rows,
    stops: Int[Array, "stops"],
) -> DecodeState:
    llama = merge(config, params)
    empty = KVCache.zeros(config, tokens.shape[0], max_len, params["embed"].dtype)
    hidden, cache = llama.extend(tokens, empty, lengths)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    token = _draw(llama.logits(last), rows, lengths)
    return DecodeState(cache, token, _is_stop(token, stops))


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def _decode(
    params: Params,
    config: LlamaConfig,
    state: DecodeState,
    rows: Rows,
    stops: Int[Array, "stops"],
    count: Int[Array, ""],
) -> tuple[DecodeState, Int[Array, "batch chunk"]]:
    """Up to ``count`` more tokens a row; ends early when every row has finished."""
    llama = merge(config, params)

    def step(carry: tuple[Array, DecodeState, Array]) -> tuple[Array, DecodeState, Array]:
        index, state, made = carry
        hidden, cache = llama.extend(state.token[:, None], state.cache, jnp.where(state.finished, 0, 1))
        drawn = _draw(llama.logits(hidden[:, 0]), rows, cache.lengths)
        token = jnp.where(state.finished, -1, drawn)
        made = jax.lax.dynamic_update_slice(made, token[:, None], (0, index))
        return index + 1, DecodeState(cache, jnp.maximum(token, 0), state.finished | _is_stop(token, stops)), made

    def unfinished(carry: tuple[Array, DecodeState, Array]) -> Array:
        index, state, _ = carry
        return (index < count) & ~jnp.all(state.finished)

    made = jnp.full((state.token.shape[0], CHUNK_TOKENS), -1, jnp.int32)
    _, state, made = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, made))
    return state, made


def _draw(logits: Float[Array, "batch vocab"], rows: Rows, lengths: Int[Array, "batch"]) -> Int[Array, "batch"]:
    """A draw's key depends on the row's seed and on how many tokens it has seen: never on other rows or on chunks."""
    keys = jax.vmap(jax.random.fold_in)(rows.keys, lengths)
    logits = jnp.where(jnp.arange(logits.shape[-1]) < rows.vocab_size, logits, -jnp.inf)
    return sample(logits, keys, rows.temperature, rows.top_k, rows.top_p)


def _is_stop(token: Int[Array, "batch"], stops: Int[Array, "stops"]) -> Bool[Array, "batch"]:
    return jnp.any(token[:, None] == stops, axis=1)


def _power_of_two_at_least(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())
