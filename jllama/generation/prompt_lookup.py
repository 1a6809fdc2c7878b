"""Prompt lookup: guess the next tokens from the text so far, verify the guesses in one pass, keep the right ones.

Source: Saxena 2023, prompt lookup decoding; Leviathan et al. 2023 (arXiv:2211.17192) for why this changes nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jllama.generation.decode_batch import DecodeBatch, append_token
from jllama.model import Llama

_SHORTEST_MATCH, _LONGEST_MATCH = 2, 3


def lookup_step(
    llama: Llama, batch: DecodeBatch, takes: Bool[Array, "batch"], draft_len: int
) -> DecodeBatch:
    """One token more for every row that takes one, or several, as long as its guesses are what is drawn."""
    drafts, matched = draft_tokens(batch.tokens, batch.cache.lengths + 1, draft_len)
    return jax.lax.cond(  # a pass over several tokens costs more than over one, where arithmetic is dear
        jnp.any(matched & takes),
        lambda: _verified(llama, batch, takes, jnp.where(matched[:, None], drafts, -1)),
        lambda: _verified(llama, batch, takes, drafts[:, :0]),
    )._replace(
        seen=batch.seen, settings=batch.settings
    )  # large and unchanged: nothing to copy out of the branches


def _verified(
    llama: Llama,
    batch: DecodeBatch,
    takes: Bool[Array, "batch"],
    drafts: Int[Array, "batch draft_len"],
) -> DecodeBatch:
    """Feed each row its last token and its drafts (-1 for none); append tokens as long as the drafts are right."""
    lengths = batch.cache.lengths
    last = jnp.take_along_axis(batch.tokens, lengths[:, None], axis=1)
    fed = jnp.maximum(jnp.concatenate([last, drafts], axis=1), 0)
    hidden, cache = llama.decode(fed, batch.cache, takes.astype(jnp.int32) * fed.shape[1])
    logits = llama.logits(hidden)
    drafted = jnp.sum((drafts >= 0) & takes[:, None], axis=1, dtype=jnp.int32)
    guesses = jnp.pad(
        drafts, ((0, 0), (0, 1)), constant_values=-1
    )  # what each position's draw is held against

    def take(
        carry: tuple[DecodeBatch, Array], position: Array
    ) -> tuple[tuple[DecodeBatch, Array], None]:
        batch, takes = carry
        longer = batch.cache._replace(lengths=batch.cache.lengths + takes.astype(jnp.int32))
        batch, token = append_token(batch._replace(cache=longer), logits[:, position], takes)
        right = takes & (guesses[:, position] == token)
        return (
            batch._replace(accepted=batch.accepted + right.astype(jnp.int32)),
            right & ~batch.finished,
        ), None

    batch = batch._replace(cache=cache._replace(lengths=lengths), drafted=batch.drafted + drafted)
    (batch, _), _ = jax.lax.scan(take, (batch, takes), jnp.arange(fed.shape[1]))
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
    matched = jnp.zeros(
        (batch, max_len), jnp.int32
    )  # how many tokens up to each slot equal the last ones
    matches = slots < last
    for back in range(_LONGEST_MATCH):
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :max_len]
        matches = matches & (shifted == tokens[rows, jnp.maximum(last - back, 0)]) & (slots >= back)
        matched = matched + matches.astype(jnp.int32)
    enough = matched >= _SHORTEST_MATCH
    best = jnp.argmax(jnp.where(enough, matched * max_len + slots, -1), axis=1)[:, None]
    period = jnp.maximum(last - best, 1)
    return tokens[rows, best + 1 + jnp.arange(count) % period], jnp.any(enough, axis=1)
