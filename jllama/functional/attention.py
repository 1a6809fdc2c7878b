"""Attention: who sees whom, the formula, and the table of implementations."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jllama.functional.shapes import checked

Queries = Float[Array, "batch heads seq head_dim"]
Keys = Float[Array, "batch kv_heads kv_seq head_dim"]
Scores = Float[Array, "*lead kv_seq"]

_BLOCK, _MAX_SPANS, _SHORT, _FEW = 64, 8, 128, 16
_CACHE_BLOCK = 256  # keys
_CACHE_QUERIES = 128
ATTENDED = "attended"  # what the backward pass of blocks needs, for ``jax.checkpoint`` to keep


class Mask(NamedTuple):
    """Which keys a query sees: up to its own place in the row, of its own document, and real; ``Mask()`` is causal."""

    offset: Int[Array, "#batch"] | None = (
        None  # query i stands at key offset + i, as behind so many tokens in a cache
    )
    query_segments: Int[Array, "batch seq"] | None = (
        None  # numbers that tell packed documents apart: both or neither
    )
    key_segments: Int[Array, "batch kv_seq"] | None = None
    lengths: Int[Array, "#batch"] | None = None  # how many keys of a row are real; None: all

    def dense(
        self,
        seq: int,
        kv_seq: int,
        first: int | Int[Array, ""] = 0,
        first_key: int | Int[Array, ""] = 0,
    ) -> Bool[Array, "#batch seq kv_seq"]:
        """True where a query sees a key, for ``seq`` queries from ``first`` on and ``kv_seq`` keys from ``first_key``.

        >>> print(Mask().dense(2, 3).astype(int))
        [[[1 0 0]
          [1 1 0]]]
        """
        keys = first_key + jnp.arange(kv_seq)
        queries = first + jnp.arange(seq)
        places = queries[None] if self.offset is None else self.offset[:, None] + queries
        seen = keys <= places[..., None]
        if self.query_segments is not None and self.key_segments is not None:
            query_segments = jax.lax.dynamic_slice_in_dim(self.query_segments, first, seq, axis=1)
            key_segments = jax.lax.dynamic_slice_in_dim(
                self.key_segments, first_key, kv_seq, axis=1
            )
            seen &= query_segments[:, :, None] == key_segments[:, None]
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
def grouped_query_attention(
    query: Queries, key: Keys, value: Keys, mask: Bool[Array, "#batch #seq kv_seq"]
) -> Queries:
    """``softmax(q k^T / sqrt(head_dim)) v`` where each key-value head serves ``heads / kv_heads`` neighboring queries.

    Heads come before the sequence, as in PyTorch; ``jax.nn`` and Flax have ``[batch, seq, heads, head_dim]``. The mask
    is boolean, true where a query sees a key; a query that sees none gives zeros. Query head ``n`` uses key-value head
    ``n // (heads / kv_heads)``. Scores and softmax are float32; the result has the dtype of ``query``. Sources: Vaswani
    et al. 2017, eq. 1 (arXiv:1706.03762); Shazeer 2019 (arXiv:1911.02150); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    scores = _scores(_grouped(query, key), key)
    weights = masked_softmax(scores, mask[:, None, None]).astype(value.dtype)
    mixed = jnp.einsum("bkgts,bksh->bkgth", weights, value, preferred_element_type=scores.dtype)
    return mixed.reshape(query.shape).astype(query.dtype)


@checked
def attention_weights(
    query: Queries, key: Keys, mask: Bool[Array, "#batch #seq kv_seq"]
) -> Float[Array, "batch heads seq kv_seq"]:
    """``softmax(q k^T / sqrt(head_dim))``, with which ``grouped_query_attention`` weighs values; in float32."""
    weights = masked_softmax(_scores(_grouped(query, key), key), mask[:, None, None])
    return weights.reshape(*query.shape[:3], key.shape[2])


def _scores(query: Array, key: Array) -> Array:
    """``q k^T / sqrt(head_dim)`` of ``[..., group, seq, head_dim]`` and ``[..., kv_seq, head_dim]``."""
    product = functools.partial(
        jnp.einsum, preferred_element_type=np.promote_types(query.dtype, np.float32)
    )
    if (
        query.shape[-2] < _FEW
    ):  # XLA:CPU multiplies from the left faster: eight rows of one query take a tenth less
        scores = jnp.moveaxis(
            jax.lax.optimization_barrier(product("...sh,...gth->...sgt", key, query)), -3, -1
        )
    else:
        scores = product("...gth,...sh->...gts", query, key)
    return scores * query.shape[-1] ** -0.5


def _grouped(query: Array, key: Array) -> Array:
    """Queries ``[batch, heads, seq, head_dim]`` as ``[batch, kv_heads, group, seq, head_dim]``."""
    (batch, heads, *rest), kv_heads = query.shape, key.shape[1]
    if heads % kv_heads:
        counts = f"query has {heads} heads and key {kv_heads}; the first must be a multiple of the second"
        raise ValueError(
            f"grouped_query_attention: {counts}, in arrays of [batch, heads, seq, head_dim]"
        )
    return query.reshape(batch, kv_heads, heads // kv_heads, *rest)


def _reference(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    return grouped_query_attention(query, key, value, mask.dense(query.shape[2], key.shape[2]))


def _blocked(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Queries in blocks, of which one's scores are there at once; the backward pass makes them again."""
    return _in_blocks(_grouped(query, key), key, value, mask).reshape(query.shape)


@jax.custom_vjp
def _in_blocks(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Of queries ``[batch, kv_heads, group, seq, head_dim]``."""
    return _in_blocks_forward(query, key, value, mask, 2 * _BLOCK)[
        0
    ]  # with no backward pass the faster size


def _in_blocks_forward(
    query: Array, key: Array, value: Array, mask: Mask, most: int | None = None
) -> tuple[Array, tuple[Any, ...]]:
    """The result, and what the backward pass needs: it, the arguments, the logarithm of each sum of exponentials."""
    parts = []
    for first, count, size, kv_seq in _spans(query.shape[3], key.shape[2], mask, most or _BLOCK):
        keys, values = key[:, :, :kv_seq], value[:, :, :kv_seq]

        def attend(
            first: Array, size: int = size, keys: Array = keys, values: Array = values
        ) -> tuple[Array, Array]:
            scores = _block_scores(_block(query, first, size), keys, mask, first)
            largest, total, mixed = _partial_softmax(scores, values)
            log_total = jnp.where(
                total > 0, largest + jnp.log(total), jnp.inf
            )  # of no keys: all weights are zero
            return (mixed / jnp.where(total > 0, total, 1)).astype(query.dtype), log_total

        parts.append(
            jax.tree.map(_side_by_side, jax.lax.map(attend, first + size * jnp.arange(count)))
        )
    results = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=3), *parts)
    query, key, value, mixed, log_total = (
        checkpoint_name(each, ATTENDED) for each in (query, key, value, *results)
    )
    return mixed, (query, key, value, mask, mixed, log_total)


def _in_blocks_backward(kept: tuple[Any, ...], d_mixed: Array) -> tuple[Array, Array, Array, None]:
    """The gradients, by weights made again from the logarithms. Source: Dao et al. 2022, alg. 4 (arXiv:2205.14135)."""
    query, key, value, mask, mixed, log_total = kept
    wide, d_queries = log_total.dtype, []
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    mean = jnp.sum(
        d_mixed.astype(wide) * mixed.astype(wide), axis=-1, keepdims=True
    )  # of the weights' gradients
    d_key, d_value = (jnp.zeros(each.mT.shape, wide) for each in (key, value))
    for first, count, size, kv_seq in _spans(query.shape[3], key.shape[2], mask, _BLOCK):
        keys, values = key[:, :, :kv_seq], value[:, :, :kv_seq]

        def add(
            sums: tuple[Array, Array],
            first: Array,
            size: int = size,
            keys: Array = keys,
            values: Array = values,
        ) -> tuple[tuple[Array, Array], Array]:
            ours, d_ours, log_ours, mine = (
                _block(each, first, size) for each in (query, d_mixed, log_total, mean)
            )
            weights = jnp.exp(_block_scores(ours, keys, mask, first) - log_ours)
            d_scores = (
                weights
                * (product("bkgth,bksh->bkgts", d_ours, values) - mine)
                * query.shape[-1] ** -0.5
            )
            weights, d_scores = weights.astype(value.dtype), d_scores.astype(query.dtype)
            # Channels before keys: XLA:CPU copies the first factor to transpose it, and this is the smaller one.
            d_keys = product("bkgth,bkgts->bkhs", ours, d_scores)
            d_values = product("bkgth,bkgts->bkhs", d_ours, weights)
            return (sums[0] + d_keys, sums[1] + d_values), product(
                "bkgts,bksh->bkgth", d_scores, keys
            )

        zeros = jnp.zeros(keys.mT.shape, wide), jnp.zeros(values.mT.shape, wide)
        (d_keys, d_values), blocks = jax.lax.scan(add, zeros, first + size * jnp.arange(count))
        d_queries.append(_side_by_side(blocks))
        d_key, d_value = d_key.at[..., :kv_seq].add(d_keys), d_value.at[..., :kv_seq].add(d_values)
    d_query = jnp.concatenate(d_queries, axis=3)
    return (
        d_query.astype(query.dtype),
        d_key.mT.astype(key.dtype),
        d_value.mT.astype(value.dtype),
        None,
    )


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


def _spans(seq: int, kv_seq: int, mask: Mask, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Queries in at most nine spans: the first one, how many blocks of what size, and how many keys they may see.

    From the start of a row a span takes no more keys than its last query sees: in all about half of the products.
    """
    num_blocks = seq // (size := -(-seq // -(-seq // most)))
    span = (
        num_blocks
        if mask.offset is not None
        else max(-(-num_blocks // _MAX_SPANS), min(2, num_blocks // 4))
    )
    spans = [
        (start * size, min(span, num_blocks - start), size) for start in range(0, num_blocks, span)
    ]
    if seq % size:
        spans.append((num_blocks * size, 1, seq % size))
    for first, count, rows in spans:
        yield (
            first,
            count,
            rows,
            kv_seq if mask.offset is not None else min(first + count * rows, kv_seq),
        )


def _block(array: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, first, size, axis=3)


def _side_by_side(blocks: Array) -> Array:
    """Blocks ``[count, batch, kv_heads, group, size, ...]`` as ``[batch, kv_heads, group, count * size, ...]``."""
    return jnp.moveaxis(blocks, 0, 3).reshape(*blocks.shape[1:4], -1, *blocks.shape[5:])


def _block_scores(
    query: Array, key: Array, mask: Mask, first: Array | int, first_key: Array | int = 0
) -> Array:
    """The scores of a block of queries over a block of keys, minus infinity where a query does not see a key."""
    query, first = jax.lax.optimization_barrier(
        (query, first)
    )  # or JAX makes all blocks' masks before all layers
    seen = mask.dense(query.shape[3], key.shape[2], first, first_key)
    return jnp.where(seen[:, None, None], _scores(query, key), -jnp.inf)


class _Softmax(NamedTuple):
    """A softmax under way: the largest score, the sum of exponentials, and what these weigh; ``[..., seq, 1 or h]``."""

    largest: Array
    total: Array
    mixed: Array


def _partial_softmax(scores: Array, value: Array) -> _Softmax:
    """The softmax of some scores, minus infinity where a key is not seen, before it is divided by its sum."""
    largest = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum(
        "...gts,...sh->...gth",
        weights.astype(value.dtype),
        value,
        preferred_element_type=scores.dtype,
    )
    return _Softmax(largest, total, mixed)


def _xla(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """``jax.nn``'s own; what it gives a query that sees no key is made zero."""
    dense, heads_last = (
        mask.dense(query.shape[2], key.shape[2]),
        (each.swapaxes(1, 2) for each in (query, key, value)),
    )
    mixed = jax.nn.dot_product_attention(
        *heads_last, mask=dense[:, None], implementation="xla"
    ).swapaxes(1, 2)
    return jnp.where(dense.any(axis=-1)[:, None, :, None], mixed, 0)


def _merged(one: _Softmax, other: _Softmax) -> _Softmax:
    """The softmax over the keys of both. Source: Milakov and Gimelshein 2018, algorithm 3 (arXiv:1805.02867)."""
    largest = jnp.maximum(one.largest, other.largest)
    share = jnp.exp(one.largest - largest)
    other_share = jnp.exp(other.largest - largest)
    total = one.total * share + other.total * other_share
    return _Softmax(largest, total, one.mixed * share + other.mixed * other_share)


def _cached(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Keys of a cache in blocks, as many as the longest row has, with a running softmax; queries in blocks, too.

    A block that a row does not see leaves its result as it is, bit for bit: it depends on the row's own tokens and
    places alone, not on other rows, nor on how long they or the cache (of whole blocks) are.
    """
    grouped = _grouped(query, key)
    seq = grouped.shape[3]
    size = _CACHE_QUERIES if seq % _CACHE_QUERIES == 0 else seq
    if size == seq:
        return _over_key_blocks(grouped, key, value, mask, 0).reshape(query.shape)

    def of_block(first: Array) -> Array:
        return _over_key_blocks(_block(grouped, first, size), key, value, mask, first)

    blocks = jax.lax.map(of_block, jnp.arange(0, seq, size))
    return _side_by_side(blocks).reshape(query.shape)


def _over_key_blocks(
    query: Array, key: Array, value: Array, mask: Mask, first: Array | int
) -> Array:
    """Attention of a block of queries ``[batch, kv_heads, group, seq, head_dim]`` from ``first`` on."""
    kv_seq = key.shape[2]
    size = _key_block(kv_seq)

    def over(start: Array | int) -> _Softmax:
        keys = jax.lax.dynamic_slice_in_dim(key, start, size, axis=2)
        values = jax.lax.dynamic_slice_in_dim(value, start, size, axis=2)
        return _partial_softmax(_block_scores(query, keys, mask, first, start), values)

    def add(index: Array, so_far: _Softmax) -> _Softmax:
        return _merged(so_far, over(index * size))

    seen = kv_seq if mask.offset is None else first + jnp.max(mask.offset) + query.shape[3]
    num_blocks = jnp.minimum(-(-seen // size), kv_seq // size)
    whole = jax.lax.fori_loop(1, num_blocks, add, over(0))
    return _divided(whole, query)


def _key_block(kv_seq: int) -> int:
    return _CACHE_BLOCK if kv_seq % _CACHE_BLOCK == 0 else kv_seq


def _divided(whole: _Softmax, query: Array) -> Array:
    """What the softmax weighs, in the shape and dtype of the queries; zeros for those that see no key."""
    return (
        (whole.mixed / jnp.where(whole.total > 0, whole.total, 1))
        .reshape(query.shape)
        .astype(query.dtype)
    )


def _split(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """All keys of a cache at once, without a loop: a softmax of each block, merged in pairs, and these in pairs.

    As with ``cached``, a block that a row does not see changes no bit, so neither do other rows, nor a longer cache:
    its blocks are merged with each other first.
    """
    grouped, seq, kv_seq = _grouped(query, key), query.shape[2], key.shape[2]
    size = _key_block(kv_seq)
    keys, values = (each.reshape(*each.shape[:2], -1, size, each.shape[3]) for each in (key, value))
    # The queries for each block, so that no product has another shape in a longer cache.
    queries = jnp.broadcast_to(grouped[:, :, None], (*keys.shape[:3], *grouped.shape[2:]))
    seen = mask.dense(seq, kv_seq)
    seen = seen.reshape(len(seen), seq, -1, size).swapaxes(1, 2)[:, None, :, None]
    parts = _partial_softmax(jnp.where(seen, _scores(queries, keys), -jnp.inf), values)
    nobody = jnp.finfo(parts.total.dtype).min, 0, 0  # the softmax of a block that no query sees
    while (count := parts.total.shape[2]) > 1:
        behind = [(0, count % 2 * (axis == 2)) for axis in range(6)]
        even = [
            jnp.pad(part, behind, constant_values=fill)
            for part, fill in zip(parts, nobody, strict=True)
        ]
        parts = _merged(*(_Softmax(*(part[:, :, first::2] for part in even)) for first in (0, 1)))
    return _divided(parts, query)


class Refused(ValueError):
    """An implementation of attention cannot serve some arguments."""


class AttentionImplementation(NamedTuple):
    """One way to compute ``attention``: the function, and what of some arguments it cannot serve."""

    function: Callable[[Array, Array, Array, Mask], Array]
    refuses: Callable[[Any, Any, Mask], str | None] = lambda query, key, mask: None
    platform: str = ""  # the only one that has it; empty: all do
    backward: bool = True  # whether it can be differentiated


ATTENTION = {
    "reference": AttentionImplementation(_reference),
    "blocked": AttentionImplementation(_blocked),
    "cached": AttentionImplementation(_cached, backward=False),
    "xla": AttentionImplementation(
        _xla, lambda query, *_: "float64" if query.dtype == jnp.float64 else None
    ),
    "split": AttentionImplementation(_split, backward=False),
}
"""The implementations of ``attention`` by name; one more is one more entry, as of ``jllama.kernels``."""

CACHE_ATTENTION = {"gpu": ["split"], "tpu": ["split"]}
"""What ``auto`` takes by platform for a few tokens behind a cache: the first that serves them, else ``cached``."""


_MODULES = {"tokamax": "tokamax", "triton": "jax.experimental.pallas.ops.gpu.attention"}
"""The modules of kernels for GPUs that keep documents apart, the fastest first. JAX means to remove its own."""


def is_installed(name: str) -> bool:
    """Whether the module that an implementation of ``ATTENTION`` needs can be imported."""
    try:
        return name not in _MODULES or importlib.util.find_spec(_MODULES[name]) is not None
    except ModuleNotFoundError:  # a package that the module is in
        return False


def choose_attention(
    seq: int,
    kv_seq: int,
    *,
    backward: bool = True,
    platform: str = "cpu",
    dtype: Any = "float32",
    packed: bool = True,
) -> str:
    """The name that ``auto`` stands for: a kernel for whole sequences where the platform has one, else plain formulas.

    ``packed`` says whether documents must be kept apart, which cuDNN cannot; kernels for GPUs want 16-bit numbers, and
    the faster one for documents the package ``tokamax``.
    Without a ``backward`` pass, blocks are taken over 128 tokens.
    """
    if seq == kv_seq and seq >= _SHORT:
        if platform == "tpu":
            return "splash"
        if platform == "gpu" and jnp.dtype(dtype).itemsize == 2:
            return next(filter(is_installed, [*_MODULES, "blocked"])) if packed else "cudnn"
    return "blocked" if 0 < seq == kv_seq and (backward or seq > _SHORT) else "reference"


def choose_cache_attention(seq: int, key: Any, platform: str) -> str:
    """The name that ``auto`` stands for where so many tokens stand behind those in a cache with keys like these.

    A loop over keys costs a GPU a look by its host and many small launches in each layer.
    """
    query = jax.ShapeDtypeStruct((*key.shape[:2], seq, key.shape[3]), key.dtype)
    mask = Mask(offset=jnp.zeros(1, jnp.int32))
    names = CACHE_ATTENTION.get(platform, []) if seq < _FEW else []
    return next((name for name in names if not ATTENTION[name].refuses(query, key, mask)), "cached")


@checked
def attention(
    query: Queries, key: Keys, value: Keys, mask: Mask = _CAUSAL, implementation: str = "auto"
) -> Queries:
    """``grouped_query_attention`` under a ``Mask``, by one of ``ATTENTION``, or by the one that ``auto`` chooses.

    With ``heads == kv_heads``, arrays of ``[batch, seq, heads, head_dim]`` can't be told from right ones by shape.
    ``ValueError`` if there is no such implementation, or it cannot serve these arguments: none stands in for it.

    >>> x = jnp.ones((1, 2, 3, 8))
    >>> print(attention(x, x, x).shape)
    (1, 2, 3, 8)
    """
    if (
        all(field is None for field in mask) and query.shape[2] > key.shape[2]
    ):  # no sequence to itself
        said = f"attention: query is {list(query.shape)} and key {list(key.shape)}, for [batch, heads, seq, head_dim]"
        raise ValueError(f"{said}; it fits after swapaxes(1, 2), heads before seq")
    if implementation == "auto":
        implementation = choose_attention(query.shape[2], key.shape[2])
    if implementation not in ATTENTION:
        raise ValueError(
            f"there is no attention implementation {implementation!r}; there are {', '.join(ATTENTION)}"
        )
    function, refuses, *_ = ATTENTION[implementation]
    if reason := refuses(query, key, mask):
        raise Refused(f"the attention implementation {implementation!r} cannot serve {reason}")
    return function(query, key, value, mask)
