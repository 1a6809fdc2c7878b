"""Guessing the next tokens from the text so far, for speculative decoding."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_LONGEST_MATCH = 3
_SHORTEST_MATCH = 2


def draft_tokens(
    tokens: Int[Array, "batch max_len"], lengths: Int[Array, "batch"], count: int
) -> tuple[Int[Array, "batch {count}"], Bool[Array, "batch"]]:
    """What followed the last time that the text went as it goes now: prompt lookup.

    The last three tokens of each row (else the last two) are looked up in what comes before them; the ``count`` tokens
    behind the latest place with the most of them are the guess. Where they reach the end of the text they begin again,
    as in a text that repeats itself. Source: Saxena 2023, prompt lookup decoding; Leviathan et al. 2023
    (arXiv:2211.17192) for why verified guesses change nothing.

    Args:
        tokens: prompt and generated tokens, from the left.
        lengths: how many of each row are known; at least one.
        count: how many to guess.

    Returns:
        The guesses, and whether there is one: without a match they mean nothing.
    """
    batch, max_len = tokens.shape
    places = jnp.arange(max_len)
    rows = jnp.arange(batch)[:, None]
    last = lengths[:, None] - 1
    matched = jnp.zeros((batch, max_len), jnp.int32)
    so_far = places < last
    for back in range(_LONGEST_MATCH):
        wanted = tokens[rows, jnp.maximum(last - back, 0)]
        here = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :max_len]
        so_far = so_far & (here == wanted) & (places >= back)
        matched = matched + so_far
    best = jnp.argmax(jnp.where(matched >= _SHORTEST_MATCH, matched * max_len + places, -1), axis=1)[:, None]
    found = jnp.max(matched, axis=1) >= _SHORTEST_MATCH
    period = jnp.maximum(last - best, 1)
    return tokens[rows, best + 1 + jnp.arange(count) % period], found
