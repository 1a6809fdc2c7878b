"""Masks and attention. Masks are boolean, true where a query may look at a key; combine them with ``&``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jllama.functional.shapes import checked

_BLOCK = 128


@checked
def causal_mask(
    query_positions: Int[Array, "*batch seq"], key_positions: Int[Array, "*batch kv_seq"]
) -> Bool[Array, "*batch seq kv_seq"]:
    """A query sees the keys at its own position and before: ``key_position <= query_position``."""
    return key_positions[..., None, :] <= query_positions[..., :, None]


@checked
def padding_mask(lengths: Int[Array, "batch"], kv_seq: int) -> Bool[Array, "batch 1 kv_seq"]:
    """Only the first ``lengths[b]`` keys of row ``b`` are real."""
    return (jnp.arange(kv_seq) < lengths[:, None])[:, None, :]


@checked
def segment_mask(
    query_segments: Int[Array, "batch seq"], key_segments: Int[Array, "batch kv_seq"]
) -> Bool[Array, "batch seq kv_seq"]:
    """Tokens see only their own document, where several are packed in a row."""
    return query_segments[:, :, None] == key_segments[:, None, :]


@checked
def cache_mask(query_positions: Int[Array, "batch seq"], kv_seq: int) -> Bool[Array, "batch seq kv_seq"]:
    """A query sees the cache slots up to its own position, where slot ``i`` holds the key of position ``i``.

    Slots past a row's position, unused or stale, are never seen.
    """
    return causal_mask(query_positions, jnp.broadcast_to(jnp.arange(kv_seq), (query_positions.shape[0], kv_seq)))


@checked
def masked_softmax(
    scores: Float[Array, "*lead kv_seq"], mask: Bool[Array, "*#lead kv_seq"]
) -> Float[Array, "*lead kv_seq"]:
    """``exp(s_i) / sum_j exp(s_j)`` over the entries where ``mask`` is true, zero elsewhere.

    In float32 (float64 for float64 scores) whatever the dtype of ``scores``. A row with no true entry gives zeros,
    with zero gradients.
    """
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    wide = jnp.where(mask, wide, jnp.finfo(wide.dtype).min)
    return jnp.where(mask, jax.nn.softmax(wide, axis=-1), 0.0)


@checked
def grouped_query_attention(
    query: Float[Array, "batch heads seq head_dim"],
    key: Float[Array, "batch kv_heads kv_seq head_dim"],
    value: Float[Array, "batch kv_heads kv_seq head_dim"],
    mask: Bool[Array, "#batch #seq kv_seq"],
) -> Float[Array, "batch heads seq head_dim"]:
    """``softmax(q k^T / sqrt(head_dim)) v`` where each key-value head serves ``heads / kv_heads`` neighboring queries.

    Heads come before the sequence, as in PyTorch; ``jax.nn`` and Flax have ``[batch, seq, heads, head_dim]``. The mask
    is boolean, true where a query sees a key.

    ``kv_heads == heads`` is multi-head attention, ``kv_heads == 1`` multi-query. Query head ``n`` uses key-value head
    ``n // (heads / kv_heads)``. Scores and softmax are float32; the result has the dtype of ``query``. A query that
    may see no key gives zeros. Sources: Vaswani et al. 2017, eq. 1 (arXiv:1706.03762); Shazeer 2019
    (arXiv:1911.02150); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    batch, heads, seq, head_dim = query.shape
    kv_heads = key.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"grouped_query_attention: query has {heads} heads and key {kv_heads}; the first must be a multiple of "
            f"the second, in arrays of [batch, heads, seq, head_dim]"
        )
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)
    accumulator = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bkgth,bksh->bkgts", grouped, key, preferred_element_type=accumulator)
    weights = masked_softmax(scores * head_dim**-0.5, mask[:, None, None])
    mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(value.dtype), value, preferred_element_type=accumulator)
    return mixed.reshape(query.shape).astype(query.dtype)


@checked
def causal_attention(
    query: Float[Array, "batch heads seq head_dim"],
    key: Float[Array, "batch kv_heads seq head_dim"],
    value: Float[Array, "batch kv_heads seq head_dim"],
) -> Float[Array, "batch heads seq head_dim"]:
    """``grouped_query_attention`` of a sequence to itself, each token to those up to its own place.

    With ``heads == kv_heads``, arrays of ``[batch, seq, heads, head_dim]`` can't be told from right ones by shape.
    Queries are taken in blocks, each with no more keys than it sees: about half of the products, for a long sequence.
    """
    seq = query.shape[2]
    parts = []
    for first in range(0, seq, _BLOCK):
        end = min(first + _BLOCK, seq)
        mask = causal_mask(jnp.arange(first, end)[None], jnp.arange(end)[None])
        parts.append(grouped_query_attention(query[:, :, first:end], key[:, :, :end], value[:, :, :end], mask))
    return jnp.concatenate(parts, axis=2)
