"""Prompt lookup: draft tokens from the text so far, verify them in one pass, keep the right ones.

Sources: Saxena 2023, prompt lookup decoding; Leviathan et al. 2023 (arXiv:2211.17192) for why the
distribution of the text does not change.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jllama.core.engine import DecodeBatch, append_token
from jllama.core.model import Llama
from jllama.generation.sampler import draw_tokens

_MIN_MATCH = 2
_MAX_MATCH = 3


def lookup_step(
    llama: Llama, batch: DecodeBatch, takes: Bool[Array, "batch"], draft_len: int
) -> DecodeBatch:
    """Append a token to every row that ``takes`` one, and more as long as its drafts are right."""
    drafts, has_match = draft_tokens(batch.tokens, batch.cache.lengths + 1, draft_len)
    # Where arithmetic is slow, a pass over several tokens costs more than a pass over one.
    updated = jax.lax.cond(
        jnp.any(has_match & takes),
        lambda: _verify_drafts(llama, batch, takes, jnp.where(has_match[:, None], drafts, -1)),
        lambda: _verify_drafts(llama, batch, takes, drafts[:, :0]),
    )
    # These are large and unchanged: nothing needs to be copied out of the branches.
    unchanged = {"seen": batch.sampling.seen, "settings": batch.sampling.settings}
    return updated._replace(sampling=updated.sampling._replace(**unchanged))


def _verify_drafts(
    llama: Llama,
    batch: DecodeBatch,
    takes: Bool[Array, "batch"],
    drafts: Int[Array, "batch draft_len"],
) -> DecodeBatch:
    """Feed each row its last token and its drafts (-1 for none); append while drafts are right."""
    lengths = batch.cache.lengths
    last = jnp.take_along_axis(batch.tokens, lengths[:, None], axis=1)
    inputs = jnp.maximum(jnp.concatenate([last, drafts], axis=1), 0)
    hidden, cache = llama.decode(inputs, batch.cache, takes.astype(jnp.int32) * inputs.shape[1])
    logits = llama.logits(hidden)
    drafted = jnp.sum((drafts >= 0) & takes[:, None], axis=1, dtype=jnp.int32)
    # At each position the token that was drawn is compared with the draft of the next one.
    next_drafts = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1)

    def append(
        carry: tuple[DecodeBatch, Array], position: Array
    ) -> tuple[tuple[DecodeBatch, Array], None]:
        """Append the token drawn at a position; a row goes on if its next draft is this token."""
        batch, takes = carry
        cache = batch.cache._replace(lengths=batch.cache.lengths + takes.astype(jnp.int32))
        batch = batch._replace(cache=cache)
        batch, token = append_token(batch, logits[:, position], takes, draw_tokens)
        is_right = takes & (next_drafts[:, position] == token)
        accepted = batch.sampling.accepted + is_right.astype(jnp.int32)
        batch = batch._replace(sampling=batch.sampling._replace(accepted=accepted))
        return (batch, is_right & ~batch.finished), None

    sampling = batch.sampling._replace(drafted=batch.sampling.drafted + drafted)
    batch = batch._replace(cache=cache._replace(lengths=lengths), sampling=sampling)
    (batch, _), _ = jax.lax.scan(append, (batch, takes), jnp.arange(inputs.shape[1]))
    return batch


def draft_tokens(
    tokens: Int[Array, "batch max_len"], lengths: Int[Array, "batch"], count: int
) -> tuple[Int[Array, "batch {count}"], Bool[Array, "batch"]]:
    """Return ``count`` tokens that followed an earlier match of each row's end, if there is one.

    The last three of a row's first ``lengths`` tokens (else the last two) are looked up in the
    tokens before them. The longest match counts, and of several the latest. A continuation that
    reaches the end of the text starts again at its first token.
    """
    batch, max_len = tokens.shape
    last = lengths[:, None] - 1
    slots = jnp.arange(max_len)
    rows = jnp.arange(batch)[:, None]
    # How many tokens up to each slot equal the last ones of the row.
    match_len = jnp.zeros((batch, max_len), jnp.int32)
    matches = slots < last
    for back in range(_MAX_MATCH):
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :max_len]
        matches = matches & (shifted == tokens[rows, jnp.maximum(last - back, 0)]) & (slots >= back)
        match_len = match_len + matches.astype(jnp.int32)
    is_match = match_len >= _MIN_MATCH
    score = jnp.where(is_match, match_len * max_len + slots, -1)
    best = jnp.argmax(score, axis=1)[:, None]
    period = jnp.maximum(last - best, 1)
    return tokens[rows, best + 1 + jnp.arange(count) % period], jnp.any(is_match, axis=1)
