"""Forms of attention that hold fewer scores in memory than the formula.

Queries are ``[batch, heads, seq, head_dim]``. Inside, they are grouped by the key-value head that
serves them: ``[batch, kv_heads, group, seq, head_dim]``.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jllama.core.ops import (
    Index,
    Keys,
    Mask,
    Queries,
    attention_scores,
    group_queries,
    masked_softmax,
)

Arrays = tuple[Array, ...]

_BLOCK = 64  # queries
_MAX_SPANS = 8
_CACHE_BLOCK = 256  # keys
_CACHE_QUERIES = 128
ATTENDED = "attended"
"""The name, for ``jax.checkpoint``, of what the backward pass of attention in blocks needs."""


def attention_weights(
    query: Queries, key: Keys, mask: Bool[Array, "#batch #seq kv_seq"]
) -> Float[Array, "batch heads seq kv_seq"]:
    """Compute ``softmax(q k^T / sqrt(head_dim))``, the weights of the values, in float32."""
    weights = masked_softmax(attention_scores(group_queries(query, key), key), mask[:, None, None])
    return weights.reshape(*query.shape[:3], key.shape[2])


# Online softmax: over some keys at a time


class _Softmax(NamedTuple):
    """A softmax over some of the keys, before the division by its sum.

    Source: Milakov and Gimelshein 2018, algorithm 3 (arXiv:1805.02867).
    """

    largest: Array  # the largest score, [..., seq, 1]
    total: Array  # the sum of exp(score - largest), [..., seq, 1]
    weighted: Array  # the sum of exp(score - largest) * value, [..., seq, head_dim]

    def merge(self, other: "_Softmax") -> "_Softmax":
        """Return the softmax over the keys of both."""
        largest = jnp.maximum(self.largest, other.largest)
        share = jnp.exp(self.largest - largest)
        other_share = jnp.exp(other.largest - largest)
        total = self.total * share + other.total * other_share
        return _Softmax(largest, total, self.weighted * share + other.weighted * other_share)

    def divide(self, query: Array) -> Array:
        """Return the weighted mean of values, like the queries; zeros for those that see no key."""
        mean = self.weighted / jnp.where(self.total > 0, self.total, 1)
        return mean.reshape(query.shape).astype(query.dtype)


def _start_softmax(scores: Array, value: Array) -> _Softmax:
    """Start a softmax from scores, which are minus infinity where a key is not seen."""
    wide = scores.dtype
    largest = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(wide).min)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(value.dtype)
    weighted = jnp.einsum("...gts,...sh->...gth", weights, value, preferred_element_type=wide)
    return _Softmax(largest, total, weighted)


def _block_scores(
    query: Array, key: Array, mask: Mask, first: Index, first_key: Index = 0
) -> Array:
    """Compute scores of a block of queries over a block of keys, minus infinity where not seen."""
    # Without the barrier JAX would make the masks of all blocks before all layers.
    query, first = jax.lax.optimization_barrier((query, first))
    visible = mask.dense(query.shape[3], key.shape[2], first, first_key)
    return jnp.where(visible[:, None, None], attention_scores(query, key), -jnp.inf)


def _block(array: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, first, size, axis=3)


def _join(blocks: Array) -> Array:
    """Join blocks ``[num_blocks, batch, kv_heads, group, size, ...]`` along the sequence.

    The result is ``[batch, kv_heads, group, num_blocks * size, ...]``.
    """
    return jnp.moveaxis(blocks, 0, 3).reshape(*blocks.shape[1:4], -1, *blocks.shape[5:])


# FlashAttention: blocks of queries, with a backward pass


class _Span(NamedTuple):
    """Consecutive blocks of queries of one size, which are computed in one loop."""

    first: int  # query
    num_blocks: int
    size: int  # queries of a block
    num_keys: int  # that the last query may see; with a window, that any block may see
    slides: bool  # whether each block takes other keys, those in its window

    def starts(self) -> Array:
        """Return the first query of each block."""
        return self.first + self.size * jnp.arange(self.num_blocks)

    def first_key(self, first: Array) -> Index:
        """Return the first of the ``num_keys`` keys of the block that begins at ``first``."""
        return jnp.maximum(first + self.size - self.num_keys, 0) if self.slides else 0

    def keys(self, array: Array, first: Array) -> Array:
        """Cut out the keys, or values, of the block that begins at ``first``."""
        if not self.slides:
            return array
        start = self.first_key(first)
        return jax.lax.dynamic_slice_in_dim(array, start, self.num_keys, axis=2)

    def add(self, sums: Array, part: Array, first: Array) -> Array:
        """Add to the gradients of all keys those of the block that begins at ``first``.

        Here keys are the last axis.
        """
        if not self.slides:
            return sums + part
        start = self.first_key(first)
        part += jax.lax.dynamic_slice_in_dim(sums, start, self.num_keys, axis=3)
        return jax.lax.dynamic_update_slice_in_dim(sums, part, start, axis=3)


def _spans(seq: int, kv_seq: int, mask: Mask, max_size: int) -> Iterator[_Span]:
    """Cut the queries into at most nine spans of blocks.

    Without an offset, a span takes no keys after its last query, which saves about half of all
    products. With a window and no offset, all blocks of a size are one span.
    """
    slides = mask.window is not None and mask.offset is None and seq <= kv_seq
    size = math.ceil(seq / math.ceil(seq / max_size))
    total = seq // size
    max_blocks = max(math.ceil(total / _MAX_SPANS), min(2, total // 4))
    if mask.offset is not None or slides:  # with an offset at run time, any key may be seen
        max_blocks = total
    first = 0
    while first < seq:
        size = min(size, seq - first)  # the last block may be smaller
        num_blocks = min(max_blocks, (seq - first) // size)
        end = first + num_blocks * size
        num_keys = kv_seq if mask.offset is not None else min(end, kv_seq)
        if slides and mask.window is not None:
            num_keys = min(num_keys, mask.window - 1 + size)
        yield _Span(first, num_blocks, size, num_keys, slides)
        first = end


def blocked_attention(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute attention in blocks of queries: the scores of one block exist at a time.

    The backward pass computes them again. Source: Dao et al. 2022 (arXiv:2205.14135).
    """
    return _flash(group_queries(query, key), key, value, mask).reshape(query.shape)


@jax.custom_vjp
def _flash(q: Array, k: Array, v: Array, mask: Mask) -> Array:
    out, _ = _flash_forward(q, k, v, mask, 2 * _BLOCK)  # the faster size without a backward pass
    return out


def _flash_forward(
    q: Array, k: Array, v: Array, mask: Mask, max_size: int | None = None
) -> tuple[Array, tuple[Any, ...]]:
    """Return the output, and the residuals: arguments, output, and ``lse``.

    ``lse`` is ``logsumexp`` of each query's scores, plus infinity where it sees no key.
    """
    outs = []
    lses = []
    for span in _spans(q.shape[3], k.shape[2], mask, max_size or _BLOCK):
        end = k.shape[2] if span.slides else span.num_keys
        attend_block = functools.partial(_attend_block, q, k[:, :, :end], v[:, :, :end], mask, span)
        out, lse = jax.lax.map(attend_block, span.starts())
        outs.append(_join(out))
        lses.append(_join(lse))
    out = jnp.concatenate(outs, axis=3)
    lse = jnp.concatenate(lses, axis=3)
    q, k, v, out, lse = (checkpoint_name(array, ATTENDED) for array in (q, k, v, out, lse))
    return out, (q, k, v, mask, out, lse)


def _attend_block(q: Array, k: Array, v: Array, mask: Mask, span: _Span, first: Array) -> Arrays:
    """Return the output and ``lse`` of a block of queries."""
    q = _block(q, first, span.size)
    scores = _block_scores(q, span.keys(k, first), mask, first, span.first_key(first))
    softmax = _start_softmax(scores, span.keys(v, first))
    lse = jnp.where(softmax.total > 0, softmax.largest + jnp.log(softmax.total), jnp.inf)
    return softmax.divide(q), lse


def _flash_backward(residuals: tuple[Any, ...], d_out: Array) -> tuple[Array, Array, Array, None]:
    """Compute the gradients, with weights made again from ``lse``.

    Source: Dao et al. 2022, alg. 4 (arXiv:2205.14135). With ``s = q k^T / sqrt(head_dim)``::

        p = exp(s - lse)                      delta = sum(d_out * out)
        d_v = p^T d_out                       d_s = p * (d_out v^T - delta)
        d_q = d_s k / sqrt(head_dim)          d_k = d_s^T q / sqrt(head_dim)
    """
    q, k, v, mask, out, lse = residuals
    wide = lse.dtype
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
    d_queries = []
    d_k = jnp.zeros(k.mT.shape, wide)  # [batch, kv_heads, head_dim, kv_seq], as are their parts
    d_v = jnp.zeros(v.mT.shape, wide)
    for span in _spans(q.shape[3], k.shape[2], mask, _BLOCK):
        end = k.shape[2] if span.slides else span.num_keys
        arrays = (q, d_out, lse, delta)
        blocks, d_keys, d_values = _span_gradients(span, mask, arrays, k[:, :, :end], v[:, :, :end])
        d_queries.append(_join(blocks))
        d_k = d_k.at[..., :end].add(d_keys)
        d_v = d_v.at[..., :end].add(d_values)
    d_q = jnp.concatenate(d_queries, axis=3)
    return d_q.astype(q.dtype), d_k.mT.astype(k.dtype), d_v.mT.astype(v.dtype), None


_flash.defvjp(_flash_forward, _flash_backward)


def _span_gradients(span: _Span, mask: Mask, arrays: Arrays, k: Array, v: Array) -> Arrays:
    """Return the gradients of a span's queries, in blocks, and what it adds to those of keys.

    ``arrays`` are the queries, the gradient of the output, ``lse`` and ``delta``.
    """
    wide = arrays[2].dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)

    def add_block(sums: Arrays, first: Array) -> tuple[Arrays, Array]:
        d_k, d_v = sums
        q, d_out, lse, delta = (_block(array, first, span.size) for array in arrays)
        keys = span.keys(k, first)
        p = jnp.exp(_block_scores(q, keys, mask, first, span.first_key(first)) - lse)
        d_p = product("bkgth,bksh->bkgts", d_out, span.keys(v, first))
        d_s = (p * (d_p - delta) * q.shape[-1] ** -0.5).astype(q.dtype)
        # Channels come before keys, because XLA:CPU copies the first factor to transpose it, and
        # this one is smaller.
        d_k = span.add(d_k, product("bkgth,bkgts->bkhs", q, d_s), first)
        d_v = span.add(d_v, product("bkgth,bkgts->bkhs", d_out, p.astype(v.dtype)), first)
        return (d_k, d_v), product("bkgts,bksh->bkgth", d_s, keys)

    zeros = (jnp.zeros(k.mT.shape, wide), jnp.zeros(v.mT.shape, wide))
    (d_k, d_v), d_q = jax.lax.scan(add_block, zeros, span.starts())
    return d_q, d_k, d_v


# Over a cache: blocks of keys, without a backward pass


def cached_attention(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute attention over a cache in blocks of keys, and of many queries in blocks, too.

    Blocks of keys are read up to the longest row, with a window from the shortest row's on. A block
    that a row does not see leaves its result as it is, bit for bit. So the result depends on the
    row's own tokens and positions alone: not on other rows, nor on how long they or the cache (of
    whole blocks) are.
    """
    grouped = group_queries(query, key)
    seq = grouped.shape[3]
    if seq % _CACHE_QUERIES or seq == _CACHE_QUERIES:
        return _over_key_blocks(grouped, key, value, mask, 0).reshape(query.shape)

    def attend_block(first: Array) -> Array:
        queries = _block(grouped, first, _CACHE_QUERIES)
        return _over_key_blocks(queries, key, value, mask, first)

    blocks = jax.lax.map(attend_block, jnp.arange(0, seq, _CACHE_QUERIES))
    return _join(blocks).reshape(query.shape)


def _over_key_blocks(query: Array, key: Array, value: Array, mask: Mask, first: Index) -> Array:
    """Compute attention of a block of grouped queries from ``first`` on."""
    kv_seq = key.shape[2]
    size = _key_block(kv_seq)

    def over_block(start: Index) -> _Softmax:
        keys = jax.lax.dynamic_slice_in_dim(key, start, size, axis=2)
        values = jax.lax.dynamic_slice_in_dim(value, start, size, axis=2)
        return _start_softmax(_block_scores(query, keys, mask, first, start), values)

    def add_block(index: Array, softmax: _Softmax) -> _Softmax:
        return softmax.merge(over_block(index * size))

    num_visible = kv_seq
    if mask.offset is not None:
        num_visible = first + jnp.max(mask.offset) + query.shape[3]
    num_blocks = jnp.minimum(-(-num_visible // size), kv_seq // size)
    first_block = 0
    if mask.offset is not None and mask.window is not None:
        first_visible = first + jnp.min(mask.offset) - mask.window + 1
        first_block = jnp.clip(first_visible // size, 0, kv_seq // size - 1)
    start = over_block(first_block * size)
    return jax.lax.fori_loop(first_block + 1, num_blocks, add_block, start).divide(query)


def _key_block(kv_seq: int) -> int:
    return _CACHE_BLOCK if kv_seq % _CACHE_BLOCK == 0 else kv_seq


def split_attention(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute attention over all keys of a cache at once, without a loop.

    Each block of keys has a softmax of its own. These are merged in pairs, then the pairs in pairs,
    and so on. As in ``cached_attention``, a block that a row does not see changes no bit, so
    neither do other rows, nor a longer cache: its blocks are merged with each other first.
    """
    grouped = group_queries(query, key)
    batch, kv_heads, kv_seq, head_dim = key.shape
    seq = query.shape[2]
    size = _key_block(kv_seq)
    keys = key.reshape(batch, kv_heads, -1, size, head_dim)
    values = value.reshape(batch, kv_heads, -1, size, head_dim)
    # Each block gets the queries, so that no product has another shape in a longer cache.
    queries = jnp.broadcast_to(grouped[:, :, None], (*keys.shape[:3], *grouped.shape[2:]))
    visible = mask.dense(seq, kv_seq)
    visible = visible.reshape(len(visible), seq, -1, size).swapaxes(1, 2)[:, None, :, None]
    blocks = _start_softmax(jnp.where(visible, attention_scores(queries, keys), -jnp.inf), values)
    while blocks.total.shape[2] > 1:
        blocks = _merge_pairs(blocks)
    return blocks.divide(query)


def _merge_pairs(blocks: _Softmax) -> _Softmax:
    """Merge neighbors along the axis of blocks, after a block that no query sees if one is left."""
    padding = [(0, 0)] * 6
    padding[2] = (0, blocks.total.shape[2] % 2)
    unseen = (jnp.finfo(blocks.total.dtype).min, 0, 0)
    padded = [
        jnp.pad(array, padding, constant_values=fill)
        for array, fill in zip(blocks, unseen, strict=True)
    ]
    left = _Softmax(*(array[:, :, 0::2] for array in padded))
    right = _Softmax(*(array[:, :, 1::2] for array in padded))
    return left.merge(right)
