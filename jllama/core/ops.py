"""The operations of a Llama, each as its formula, from the norm to the loss and sampling.

Pure functions of arrays, which work on one device and hold what they compute in memory at once.
``jllama.functional`` has the same functions with checks of shapes, and faster forms of some.

Rotary position embedding turns channel pair ``i``, read as a complex number, by
``position * frequency[i]``, so that products of queries and keys depend on differences of positions
alone. Source: Su et al. 2021, section 3.2 (arXiv:2104.09864).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float64, Int, Key

Stream = Float[Array, "*lead embed"]
Table = Float[Array, "*lead half"]
Heads = Float[Array, "batch heads seq head_dim"]
Turn = Float[Array, "#batch seq head_dim//2"]
Queries = Float[Array, "batch heads seq head_dim"]
Keys = Float[Array, "batch kv_heads kv_seq head_dim"]
Scores = Float[Array, "*lead kv_seq"]
Index = int | Int[Array, ""]

FEW_QUERIES = 16
"""Fewer queries than this are multiplied in another way, which XLA:CPU computes faster."""


def sum_dtype(array: Any) -> np.dtype:
    """Return the dtype that sums are computed in: float32, or float64 for float64."""
    return np.promote_types(array.dtype, np.float32)


# Norm, feed-forward network, RoPE


def rms_norm(x: Stream, scale: Float[Array, "embed"], eps: float) -> Stream:
    """Divide by the root mean square: ``x / sqrt(mean(x**2) + eps) * scale``.

    The mean runs over the last axis, in float32 for any dtype of x; the result has x's dtype.
    A zero row gives zeros. Source: Zhang and Sennrich 2019, eq. 4 (arXiv:1910.07467).
    """
    wide = x.astype(sum_dtype(x))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normalized = wide * jax.lax.rsqrt(mean_square + eps)
    return (normalized * scale.astype(wide.dtype)).astype(x.dtype)


def swiglu(
    x: Stream,
    w_gate: Float[Array, "embed mlp"],
    w_up: Float[Array, "embed mlp"],
    w_down: Float[Array, "mlp embed"],
) -> Stream:
    """Compute ``(silu(x w_gate) * (x w_up)) w_down``, in x's dtype.

    Here ``silu(z) = z / (1 + exp(-z))``. Source: Shazeer 2020, eq. 6 (arXiv:2002.05202).
    """
    # XLA:CPU computes the gradients of the weights 1.8 times faster from two axes.
    flat = x.reshape(-1, x.shape[-1])
    return (silu_gate(flat @ w_gate, flat @ w_up) @ w_down).reshape(x.shape)


def silu_gate(
    gate: Float[Array, "tokens mlp"], up: Float[Array, "tokens mlp"]
) -> Float[Array, "tokens mlp"]:
    """Compute ``silu(gate) * up``, which ``swiglu`` multiplies by ``w_down``."""
    return jax.nn.silu(gate) * up


def route(
    logits: Float[Array, "tokens experts"],
    count: int,
    normalize: bool,
    kind: str = "softmax",
    bias: Any = None,
) -> tuple[Float[Array, "tokens chosen"], Int[Array, "tokens chosen"]]:
    """Choose the ``count`` experts of each token with the largest ``softmax(logits)``.

    Of equal ones the first is chosen. Return their softmax, with ``normalize`` divided by its sum,
    and their indices. With ``kind`` "sigmoid" that stands in place of the softmax. ``bias``, one of
    each expert, counts in the choice alone. Sources: Jiang et al. 2024, section 2.1
    (arXiv:2401.04088); Wang et al. 2024 (arXiv:2408.15664).
    """
    if kind == "softmax":
        probs = scores = jax.nn.softmax(logits, axis=-1)
    else:
        probs = jax.nn.sigmoid(logits)
        scores = logits  # sigmoids of large ones are equal
    _, chosen = jax.lax.top_k(scores if bias is None else probs + bias, count)
    # Not the values of top_k, whose gradient is a scatter: GPUs add in no fixed order there. Nor a
    # product, which some devices round.
    is_chosen = jax.nn.one_hot(chosen, probs.shape[-1], dtype=probs.dtype)
    weights = (probs[:, None] * is_chosen).sum(axis=-1)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, chosen


def balanced_route(
    logits: Float[Array, "tokens experts"],
    count: int,
    normalize: bool,
    kind: str = "softmax",
    bias: Any = None,
    *,
    counted: Bool[Array, "tokens"],
    balance: float,
    z_loss: float,
    sum_devices: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[Float[Array, "tokens chosen"], Int[Array, "tokens chosen"]]:
    """Choose as ``route``, and add to the gradients those of two more losses of counted tokens.

    They are, for each token, ``balance * num_experts * sum(share * softmax(logits))``, where an
    expert's ``share`` is its part of all choices on all devices, and ``z_loss * logsumexp(logits)
    ** 2``. They are added to a sum of losses, as each of its tokens has them once. Sources: Fedus
    et al. 2021, equations 4 to 6 (arXiv:2101.03961); Zoph et al. 2022, equation 5
    (arXiv:2202.08906).
    """
    # The share of each expert in the choices, which has no gradient.
    num_experts = logits.shape[-1]
    weight = counted[:, None].astype(logits.dtype)
    _, chosen = route(logits, count, normalize, kind, bias)
    choices = jax.nn.one_hot(chosen, num_experts, dtype=logits.dtype).sum(axis=1)
    loads = sum_devices((weight * choices).sum(axis=0))
    share = loads / jnp.maximum(loads.sum(), 1)

    # The gradient of both losses, by the logits.
    probs = jax.nn.softmax(logits, axis=-1)
    push = balance * num_experts * (share - (probs * share).sum(axis=-1, keepdims=True))
    push += 2 * z_loss * jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logits = _add_gradient(logits, weight * probs * push)
    if bias is not None:
        # Optimizers that adapt to gradients move it by their rate against the share, so the size of
        # the gradient is free: 1e-4 adds nothing to the norm of all gradients. It comes in by a
        # product with zero.
        logits += 0 * _add_gradient(bias, 1e-4 * weight.sum() * (share - 1 / num_experts))
    return route(logits, count, normalize, kind, bias)


@jax.custom_vjp
def _add_gradient(x: Array, gradient: Array) -> Array:
    """Return ``x``, to whose gradient another one is added."""
    return x


_add_gradient.defvjp(
    lambda x, gradient: (x, gradient), lambda added, gradient: (gradient + added, None)
)


EXPERT_PRODUCT = "expert_product"
"""The name, for ``jax.checkpoint``, of the products with matrices of experts."""


def mix_experts(
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens chosen"],
    chosen: Int[Array, "tokens chosen"],
    gate: Any,
    up: Any,
    down: Any,
    *,
    grouped_product: Callable[[Array, Any, Array], Array] | None = None,
) -> Float[Array, "tokens embed"]:
    """Sum ``weight * swiglu(x)`` of each token's experts.

    ``gate`` and ``up`` are ``[experts, expert_mlp, embed]``, ``down`` is ``[experts, embed,
    expert_mlp]``; ``matrices[experts]`` looks up some of them. Tokens may choose an expert that is
    not among them, which adds nothing. The sum is that of Jiang et al. 2024, section 2.1
    (arXiv:2401.04088).
    """
    num_experts = gate.shape[0]
    experts = chosen.reshape(-1)
    is_here = (experts >= 0) & (experts < num_experts)
    is_few = len(experts) <= num_experts
    grouped_product = grouped_product or ragged_product

    # 1) A row for each token and each of its experts. Many are sorted by their experts, so that
    # each expert multiplies its own at once; for few only the experts that were chosen are read.
    experts = jnp.where(is_here, experts, num_experts)
    order = jnp.arange(len(experts)) if is_few else jnp.argsort(experts)
    sizes = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32).sum(axis=0)

    def multiply(rows: Array, matrices: Any) -> Array:
        if is_few:
            return jnp.einsum("ri,roi->ro", rows, matrices[experts])
        return checkpoint_name(grouped_product(rows, matrices[:], sizes), EXPERT_PRODUCT)

    # 2) SwiGLU, and back to the order of the tokens.
    back = jnp.argsort(order)
    rows = _permute(jnp.repeat(x, chosen.shape[1], axis=0), order, back)
    hidden = silu_gate(multiply(rows, gate), multiply(rows, up))
    outputs = _permute(multiply(hidden, down), back, order)
    outputs = jnp.where(is_here[:, None], outputs, 0).reshape(*chosen.shape, -1)
    return jnp.einsum("tk,tke->te", weights.astype(x.dtype), outputs)


@jax.custom_vjp
def _permute(rows: Array, order: Array, back: Array) -> Array:
    """Return ``rows[order]``; ``back`` is the inverse order, by which gradients go back."""
    return rows[order]


_permute.defvjp(
    lambda rows, order, back: (rows[order], (order, back)),
    lambda orders, gradient: (_permute(gradient, *orders[::-1]), None, None),
)


def ragged_product(
    x: Float[Array, "rows inputs"],
    matrices: Float[Array, "experts outputs inputs"],
    sizes: Int[Array, "experts"],
) -> Float[Array, "rows outputs"]:
    """Multiply the first ``sizes[0]`` rows by the first matrix, the next by the second, and on."""
    contracted = (((1,), (2,)), ((), ()))
    dims = jax.lax.RaggedDotDimensionNumbers(contracted, [0], [0])
    return jax.lax.ragged_dot_general(x, matrices, sizes, dims)


def rope_tables(
    positions: Int[Array, "*lead"], frequencies: Float64[np.ndarray, "half"]
) -> tuple[Table, Table]:
    """Compute ``cos`` and ``sin`` of ``position * frequency``, in float32.

    Positions may be any integers below 2**24. A float32 product would be off by 4e-3 radians at
    position 100,000. Therefore each of a position's three base-256 digits is looked up in a table
    made in float64, and the three turns are multiplied as complex numbers. The error is below 1e-6.
    """
    cos = jnp.float32(1.0)
    sin = jnp.float32(0.0)
    for shift in (0, 8, 16):
        angles = np.outer(np.arange(256) * float(1 << shift), frequencies)
        digit = (positions >> shift) & 255
        digit_cos = jnp.asarray(np.cos(angles), jnp.float32)[digit]
        digit_sin = jnp.asarray(np.sin(angles), jnp.float32)[digit]
        real = cos * digit_cos - sin * digit_sin
        sin = sin * digit_cos + cos * digit_sin
        cos = real
    return cos, sin


def apply_rope(x: Heads, cos: Turn, sin: Turn) -> Heads:
    """Turn each pair of channels: ``(a, b) -> (a cos - b sin, a sin + b cos)``.

    Pair ``i`` is channels ``i`` and ``i + head_dim/2`` (half-split, as in Hugging Face's files).
    Meta's files have the paper's interleaved pairs instead: channels ``2i`` and ``2i + 1``.
    ``cos`` and ``sin`` come from ``rope_tables``. The products are float32; the result has x's
    dtype.
    """
    wide = x.astype(sum_dtype(x))
    first, second = jnp.split(wide, 2, axis=-1)
    cos = cos[:, None]  # the same for all heads
    sin = sin[:, None]
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# Attention


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["offset", "query_segments", "key_segments", "lengths"],
    meta_fields=["window"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees: up to its own index, near enough, of its own document, and real.

    ``Mask()`` is causal attention of a row to itself. The types of arrays are ``Any`` because JAX
    also builds trees from leaves that are not arrays.

    Attributes:
        offset: Int[Array, "#batch"]; query ``i`` has index ``offset + i`` among the keys, as after
            ``offset`` cached tokens; None for 0.
        query_segments: Int[Array, "batch seq"], numbers that tell packed documents apart. Set both
            or neither.
        key_segments: Int[Array, "batch kv_seq"], the same for the keys.
        lengths: Int[Array, "#batch"], how many keys of a row are real; None for all.
        window: a sliding window: a query sees the key at its own index and ``window - 1`` before
            it; None for all before it.
    """

    offset: Any = None
    query_segments: Any = None
    key_segments: Any = None
    lengths: Any = None
    window: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether a row attends to itself as one document, from its start, perhaps in a window."""
        arrays = (self.offset, self.query_segments, self.key_segments, self.lengths)
        return all(array is None for array in arrays)

    def dense(
        self,
        seq: int,
        kv_seq: int,
        first: Index = 0,
        first_key: Index = 0,
    ) -> Bool[Array, "#batch seq kv_seq"]:
        """Return an array that is true where a query sees a key.

        It covers ``seq`` queries from ``first`` on, and ``kv_seq`` keys from ``first_key`` on.

        Examples:
            >>> print(Mask().dense(2, 3).astype(int))
            [[[1 0 0]
              [1 1 0]]]
        """
        keys = first_key + jnp.arange(kv_seq)
        queries = first + jnp.arange(seq)
        indices = queries[None] if self.offset is None else self.offset[:, None] + queries
        visible = keys <= indices[..., None]
        if self.window is not None:
            visible &= keys > indices[..., None] - self.window
        if self.query_segments is not None and self.key_segments is not None:
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
            query_segments = cut(self.query_segments, first, seq)
            key_segments = cut(self.key_segments, first_key, kv_seq)
            visible &= query_segments[:, :, None] == key_segments[:, None]
        if self.lengths is not None:
            visible &= (keys < self.lengths[:, None])[:, None]
        return visible


def document_positions(
    positions: Int[Array, "#batch seq"], segments: Int[Array, "batch seq"] | None
) -> Int[Array, "#batch seq"]:
    """Return positions counted from the first token of each packed document."""
    if segments is None:
        return positions
    is_first = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    starts = jax.lax.cummax(jnp.where(is_first, positions, positions[:, :1]), axis=1)
    return positions - starts


def within_chunks(
    mask: Mask, positions: Int[Array, "#batch seq"], chunk: int, batch: int, num_keys: int
) -> Mask:
    """Return a mask by which queries see keys of their own chunk alone.

    ``positions`` are those of queries in their documents, and of keys, too, unless the mask has an
    offset: then keys are at 0, 1, 2 and so on. Chunks are told apart as documents are.
    """
    if num_keys <= chunk:
        return mask
    queries = jnp.broadcast_to(positions // chunk, (batch, positions.shape[1]))
    if mask.query_segments is not None:
        queries += mask.query_segments * (num_keys // chunk + 1)
    keys = queries
    if mask.offset is not None:
        keys = jnp.broadcast_to(jnp.arange(num_keys) // chunk, (batch, num_keys))
    return dataclasses.replace(mask, query_segments=queries, key_segments=keys)


class UnsupportedAttention(ValueError):
    """A form of attention cannot serve some arguments."""


def masked_softmax(scores: Scores, mask: Bool[Array, "*#lead kv_seq"]) -> Scores:
    """Compute ``exp(s_i) / sum_j exp(s_j)`` where ``mask`` is true, zero elsewhere.

    The result is float32 (float64 for float64 scores). A row with no true entry gives zeros, with
    zero gradients.
    """
    wide = scores.astype(sum_dtype(scores))
    wide = jnp.where(mask, wide, jnp.finfo(wide.dtype).min)
    return jnp.where(mask, jax.nn.softmax(wide, axis=-1), 0.0)


def grouped_query_attention(
    query: Queries, key: Keys, value: Keys, mask: Bool[Array, "#batch #seq kv_seq"]
) -> Queries:
    """Compute ``softmax(q k^T / sqrt(head_dim)) v``, where query heads share key-value heads.

    Query head ``n`` uses key-value head ``n // (heads / kv_heads)``. Heads come before the
    sequence, as in PyTorch; ``jax.nn`` and Flax have ``[batch, seq, heads, head_dim]``. The mask is
    Boolean, true where a query sees a key; a query that sees none gives zeros. Scores and softmax
    are float32; the result has the dtype of ``query``. Sources: Vaswani et al. 2017, eq. 1
    (arXiv:1706.03762); Shazeer 2019 (arXiv:1911.02150); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    scores = attention_scores(group_queries(query, key), key)
    weights = masked_softmax(scores, mask[:, None, None]).astype(value.dtype)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, value, preferred_element_type=scores.dtype)
    return out.reshape(query.shape).astype(query.dtype)


def attention_scores(query: Array, key: Array) -> Array:
    """Compute ``q k^T / sqrt(head_dim)``.

    Queries are ``[..., group, seq, head_dim]``, keys ``[..., kv_seq, head_dim]``.
    """
    wide = sum_dtype(query)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    *_, seq, head_dim = query.shape
    if seq < FEW_QUERIES:
        # XLA:CPU multiplies faster with the keys on the left: eight rows of one query take a tenth
        # less.
        scores = jax.lax.optimization_barrier(product("...sh,...gth->...sgt", key, query))
        scores = jnp.moveaxis(scores, -3, -1)
    else:
        scores = product("...gth,...sh->...gts", query, key)
    return scores * head_dim**-0.5


def group_queries(query: Array, key: Array) -> Array:
    """Group queries ``[batch, heads, seq, head_dim]`` by the key-value heads."""
    batch, heads, seq, head_dim = query.shape
    kv_heads = key.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"grouped_query_attention: query has {heads} heads and key {kv_heads}; the first must "
            "be a multiple of the second, in arrays of [batch, heads, seq, head_dim]"
        )
    return query.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)


def attention(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute ``grouped_query_attention`` under a ``Mask``."""
    return grouped_query_attention(query, key, value, mask.dense(query.shape[2], key.shape[2]))


# The head and the loss


def embedding(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq embed"]:
    """Look up ``table[token]`` for each token."""
    return table[tokens]


def project(
    x: Float[Array, "*lead inputs"], matrix: Float[Array, "inputs outputs"]
) -> Float[Array, "*lead outputs"]:
    """Compute ``x @ matrix`` in float32 for any dtype of ``x`` (in float64 for float64)."""
    flat = x.reshape(-1, x.shape[-1])
    product = jnp.matmul(flat, matrix, preferred_element_type=sum_dtype(x))
    return product.reshape(*x.shape[:-1], matrix.shape[1])


def target_log_probs(
    logits: Float[Array, "*lead vocab"], targets: Int[Array, "*lead"]
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Compute ``log softmax(logits)[target]``, and the ``logsumexp(logits)`` that it needs."""
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    at_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return at_targets - normalizer, normalizer


def likelihood(
    logits: Float[Array, "*lead vocab"], targets: Int[Array, "*lead"]
) -> tuple[Float[Array, "*lead"], Bool[Array, "*lead"]]:
    """Compute each target's log-probability, and whether it is the likeliest token."""
    return target_log_probs(logits, targets)[0], jnp.argmax(logits, axis=-1) == targets


def score_tokens(
    score: Callable[[Array, Any], Any],
    hidden: Float[Array, "batch seq embed"],
    head: Float[Array, "embed vocab"],
    targets: Any,
) -> Any:
    """Compute ``score(logits, targets)``, arrays ``[batch, seq]``; ``targets`` are a tree."""
    return score(project(hidden, head), targets)


def cross_entropy(
    hidden: Float[Array, "batch seq embed"],
    head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the negative log-likelihood of the counted targets; return ``(total, count)``.

    In nats, with ``logits = hidden @ head``: the sum where ``mask`` is true of
    ``logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)**2``. Source of the z-loss:
    Chowdhery et al. 2022, section 5 (arXiv:2204.02311).
    """
    log_probs, normalizer = target_log_probs(project(hidden, head), targets)
    losses = z_loss * jnp.square(normalizer) - log_probs
    return jnp.sum(jnp.where(mask, losses, 0.0)), jnp.sum(mask, dtype=losses.dtype)


# Sampling


def tempered_logits(
    logits: Float[Array, "batch vocab"], temperature: Float[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """Compute ``(logits - max(logits)) / temperature`` in float32, which never overflows.

    A temperature of 0 stands for the smallest positive one. A row of minus infinities stays so.
    """
    bounds = jnp.finfo(jnp.float32)
    logits = jnp.minimum(logits.astype(jnp.float32), bounds.max)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    return logits / jnp.maximum(temperature, bounds.tiny)[:, None]


def sample(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, "batch"],
    temperature: Float[Array, "batch"],
    truncate: Callable[[Array], Array] = lambda tempered: tempered,
) -> Int[Array, "batch"]:
    """Draw one token a row from ``softmax(truncate(tempered_logits(logits, temperature)))``.

    Temperature 0 takes the first of the largest logits. Otherwise the draw is the largest of logits
    plus Gumbel noise. It depends on the row's own logits and key alone.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        noisy = truncate(tempered_logits(logits, temperature)) + noise
        # XLA would fuse argmax with the noise into one scalar loop, on a CPU three times slower
        # than top_k.
        return jnp.where(temperature > 0, jax.lax.top_k(noisy, 1)[1][:, 0], greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)
