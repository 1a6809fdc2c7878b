"""Attention: who sees whom, the formula, and the table of implementations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.functional.shapes import checked

Queries = Float[Array, "batch heads seq head_dim"]
Keys = Float[Array, "batch kv_heads kv_seq head_dim"]
Scores = Float[Array, "*lead kv_seq"]

_BLOCK, _MAX_SPANS, _CACHE_BLOCK = 128, 8, 256


class Mask(NamedTuple):
    """Which keys a query sees: up to its own place in the row, of its own document, and real; ``Mask()`` is causal."""

    offset: Int[Array, "#batch"] | None = None  # query i stands at key offset + i, as behind so many tokens in a cache
    query_segments: Int[Array, "batch seq"] | None = None  # numbers that tell packed documents apart: both or neither
    key_segments: Int[Array, "batch kv_seq"] | None = None
    lengths: Int[Array, "#batch"] | None = None  # how many keys of a row are real; None: all

    def dense(self, seq: int, kv_seq: int, first: int | Int[Array, ""] = 0) -> Bool[Array, "#batch seq kv_seq"]:
        """True where a query sees a key, for ``seq`` queries from ``first`` on and the first ``kv_seq`` keys.

        >>> print(Mask().dense(2, 3).astype(int))
        [[[1 0 0]
          [1 1 0]]]
        """
        keys, queries = jnp.arange(kv_seq), first + jnp.arange(seq)
        places = queries[None] if self.offset is None else self.offset[:, None] + queries
        seen = keys <= places[..., None]
        if self.query_segments is not None and self.key_segments is not None:
            segments = jax.lax.dynamic_slice_in_dim(self.query_segments, first, seq, axis=1)
            seen &= segments[:, :, None] == self.key_segments[:, None, :kv_seq]
        if self.lengths is not None:
            seen &= (keys < self.lengths[:, None])[:, None]
        return seen


_CAUSAL = Mask()


@checked
def masked_softmax(scores: Scores, mask: Bool[Array, "*#lead kv_seq"]) -> Scores:
    """``exp(s_i) / sum_j exp(s_j)`` where ``mask`` is true, zero elsewhere, in float32 (float64 for float64 scores).

    A row with no true entry gives zeros, with zero gradients.
    """
    wide = scores.astype(np.promote_types(scores.dtype, np.float32))
    wide = jnp.where(mask, wide, jnp.finfo(wide.dtype).min)
    return jnp.where(mask, jax.nn.softmax(wide, axis=-1), 0.0)


@checked
def grouped_query_attention(query: Queries, key: Keys, value: Keys, mask: Bool[Array, "#batch #seq kv_seq"]) -> Queries:
    """``softmax(q k^T / sqrt(head_dim)) v`` where each key-value head serves ``heads / kv_heads`` neighboring queries.

    Heads come before the sequence, as in PyTorch; ``jax.nn`` and Flax have ``[batch, seq, heads, head_dim]``. The mask
    is boolean, true where a query sees a key; a query that sees none gives zeros. Query head ``n`` uses key-value head
    ``n // (heads / kv_heads)``. Scores and softmax are float32; the result has the dtype of ``query``. Sources: Vaswani
    et al. 2017, eq. 1 (arXiv:1706.03762); Shazeer 2019 (arXiv:1911.02150); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    (batch, heads, seq, head_dim), kv_heads = query.shape, key.shape[1]
    if heads % kv_heads:
        counts = f"query has {heads} heads and key {kv_heads}; the first must be a multiple of the second"
        raise ValueError(f"grouped_query_attention: {counts}, in arrays of [batch, heads, seq, head_dim]")
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)
    accumulator = np.promote_types(query.dtype, np.float32)
    scores = jnp.einsum("bkgth,bksh->bkgts", grouped, key, preferred_element_type=accumulator)
    weights = masked_softmax(scores * head_dim**-0.5, mask[:, None, None])
    mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(value.dtype), value, preferred_element_type=accumulator)
    return mixed.reshape(query.shape).astype(query.dtype)


def _reference(query: Array, key: Array, value: Array, mask: Mask, first: int | Array = 0) -> Array:
    return grouped_query_attention(query, key, value, mask.dense(query.shape[2], key.shape[2], first))


def _blocked(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Queries in blocks of at most 128, of which one's scores are there at once; the backward pass makes them again."""
    (batch, heads, seq, head_dim), kv_seq = query.shape, key.shape[2]
    num_blocks = -(-seq // _BLOCK)
    size = -(-seq // num_blocks)
    padding = num_blocks * size - seq
    blocks = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(batch, heads, num_blocks, size, head_dim)
    blocks = jnp.moveaxis(blocks, 2, 0)
    if mask.query_segments is not None:
        mask = mask._replace(query_segments=jnp.pad(mask.query_segments, ((0, 0), (0, padding))))
    # From the start of a row, a span takes no more keys than its last query sees: in all about half of the products.
    span = num_blocks if mask.offset is not None else -(-num_blocks // _MAX_SPANS)
    parts = []
    for start in range(0, num_blocks, span):
        end = min(start + span, num_blocks)
        seen = min(end * size, kv_seq) if mask.offset is None else kv_seq
        attend = functools.partial(_reference, key=key[:, :, :seen], value=value[:, :, :seen], mask=mask)
        run = jax.checkpoint(lambda block, attend=attend: attend(block[1], first=block[0]))
        parts.append(jax.lax.map(run, (size * jnp.arange(start, end), blocks[start:end])))
    return jnp.moveaxis(jnp.concatenate(parts), 0, 2).reshape(batch, heads, -1, head_dim)[:, :, :seq]


def _xla(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """``jax.nn``'s own; what it gives a query that sees no key is made zero."""
    dense, heads_last = mask.dense(query.shape[2], key.shape[2]), (each.swapaxes(1, 2) for each in (query, key, value))
    mixed = jax.nn.dot_product_attention(*heads_last, mask=dense[:, None], implementation="xla").swapaxes(1, 2)
    return jnp.where(dense.any(axis=-1)[:, None, :, None], mixed, 0)


class _Softmax(NamedTuple):
    """A softmax under way: the largest score, the sum of exponentials, and what these weigh; ``[..., seq, 1 or h]``."""

    largest: Array
    total: Array
    mixed: Array


def cached_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    cached: tuple[Array, Array],
    row: Int[Array, ""],
    lengths: Int[Array, "batch"],
) -> Queries:
    """``grouped_query_attention`` of new tokens over what their rows hold already, and causally over each other.

    ``cached`` are keys and values ``[rows, kv_heads, max_len, head_dim]``; the batch continues those from ``row`` on,
    the first ``lengths`` of each. They are read in blocks, as many as the longest row has, with a running softmax; what
    a row does not see leaves its result as it is, bit for bit: it depends on its own tokens and place alone, not on
    other rows, nor on how long they are. Source: Milakov and Gimelshein 2018, algorithm 3 (arXiv:1805.02867).
    """
    (batch, heads, seq, head_dim), kv_heads = query.shape, key.shape[1]
    accumulator = np.promote_types(query.dtype, np.float32)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)

    def attend(key: Array, value: Array, mask: Array) -> _Softmax:
        scores = jnp.einsum("bkgth,bksh->bkgts", grouped, key, preferred_element_type=accumulator) * head_dim**-0.5
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(accumulator).min)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.where(mask[:, None, None], jnp.exp(scores - largest), 0)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(value.dtype), value, preferred_element_type=accumulator)
        return _Softmax(largest, jnp.sum(weights, axis=-1, keepdims=True), mixed)

    def add(index: Array, so_far: _Softmax) -> _Softmax:
        start, size = (row, 0, index * block, 0), (batch, kv_heads, block, head_dim)
        seen = index * block + jnp.arange(block) < lengths[:, None]
        mask = jnp.broadcast_to(seen[:, None], (batch, seq, block))
        keys, values = (jax.lax.dynamic_slice(each, start, size) for each in cached)
        more = attend(keys, values, mask)
        largest = jnp.maximum(so_far.largest, more.largest)
        ours, theirs = jnp.exp(so_far.largest - largest), jnp.exp(more.largest - largest)
        both = _Softmax(largest, so_far.total * ours + more.total * theirs, so_far.mixed * ours + more.mixed * theirs)
        some = (index * block < lengths)[:, None, None, None, None]
        return jax.tree.map(functools.partial(jnp.where, some), both, so_far)

    block = min(_CACHE_BLOCK, cached[0].shape[2])
    itself = attend(key, value, jnp.broadcast_to(jnp.tri(seq, dtype=bool), (batch, seq, seq)))
    whole = jax.lax.fori_loop(0, -(-jnp.max(lengths) // block), add, itself)
    return (whole.mixed / whole.total).reshape(query.shape).astype(query.dtype)


class Refused(ValueError):
    """An implementation of attention cannot serve some arguments."""


class AttentionImplementation(NamedTuple):
    """One way to compute ``attention``: the function, and what of some arguments it cannot serve."""

    function: Callable[[Array, Array, Array, Mask], Array]
    refuses: Callable[[Array, Array, Mask], str | None] = lambda query, key, mask: None
    platform: str = ""  # the only one that has it; empty: all do


ATTENTION = {
    "reference": AttentionImplementation(_reference),
    "blocked": AttentionImplementation(_blocked),
    "xla": AttentionImplementation(_xla, lambda query, *_: "float64" if query.dtype == jnp.float64 else None),
}
"""The implementations of ``attention`` by name; one more is one more entry, as of ``jllama.kernels``."""


def choose_attention(
    seq: int, kv_seq: int, *, backward: bool = True, platform: str = "cpu", dtype: Any = "float32", packed: bool = True
) -> str:
    """The name that ``auto`` stands for: a kernel for whole sequences where the platform has one, else plain formulas.

    ``packed`` says whether documents must be kept apart, which cuDNN cannot; kernels for GPUs want 16-bit numbers.
    Blocks cost their scores twice backward: they are taken over 1,024 tokens, else over 128.
    """
    if seq == kv_seq and seq >= _BLOCK:
        if platform == "tpu":
            return "splash"
        if platform == "gpu" and jnp.dtype(dtype).itemsize == 2:
            return "triton" if packed else "cudnn"
    return "blocked" if seq == kv_seq and seq > (1024 if backward else _BLOCK) else "reference"


@checked
def attention(query: Queries, key: Keys, value: Keys, mask: Mask = _CAUSAL, implementation: str = "auto") -> Queries:
    """``grouped_query_attention`` under a ``Mask``, by one of ``ATTENTION``, or by the one that ``auto`` chooses.

    With ``heads == kv_heads``, arrays of ``[batch, seq, heads, head_dim]`` can't be told from right ones by shape.
    ``ValueError`` if there is no such implementation, or it cannot serve these arguments: none stands in for it.

    >>> x = jnp.ones((1, 2, 3, 8))
    >>> print(attention(x, x, x).shape)
    (1, 2, 3, 8)
    """
    if all(field is None for field in mask) and query.shape[2] > key.shape[2]:  # no sequence to itself
        said = f"attention: query is {list(query.shape)} and key {list(key.shape)}, for [batch, heads, seq, head_dim]"
        raise ValueError(f"{said}; it fits after swapaxes(1, 2), heads before seq")
    if implementation == "auto":
        implementation = choose_attention(query.shape[2], key.shape[2])
    if implementation not in ATTENTION:
        raise ValueError(f"there is no attention implementation {implementation!r}; there are {', '.join(ATTENTION)}")
    function, refuses, _ = ATTENTION[implementation]
    if reason := refuses(query, key, mask):
        raise Refused(f"the attention implementation {implementation!r} cannot serve {reason}")
    return function(query, key, value, mask)
