"""Eight-bit integers for matrices of decoding: rounding, and products on CPUs.

A CPU multiplies integers several times faster by integers than by floats. So each of a few tokens
``x`` becomes two rows of integers, and ``x @ values.T`` two integer products::

    x = unit * (high + low / 254),  with integers high, low from -127 to 127
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from jllama.core.ops import sum_dtype

_MAX = 127


def int8_rows(rows: Any, numpy: Any = jnp) -> tuple[Any, Any]:
    """Round each row to eight bits; return ``(values, scale)``.

    ``rows`` is about ``values * scale[:, None]`` with ``scale = max(abs(row)) / 127``; the error is
    at most half a scale. NumPy and ``jax.numpy`` give the same bits: XLA multiplies by reciprocals
    where NumPy would divide, so reciprocals are written out. Source: Dettmers et al. 2022,
    section 2 (arXiv:2208.07339), vector-wise quantization of the weights.
    """
    scale = numpy.max(numpy.abs(rows.astype(numpy.float32)), axis=1) * np.float32(1 / _MAX)
    reciprocal = np.float32(1) / numpy.where(scale > 0, scale, np.float32(1))
    wide = rows.astype(sum_dtype(rows))
    values = numpy.round(wide * reciprocal[:, None].astype(wide.dtype))
    return values.astype(numpy.int8), scale.astype(rows.dtype)


def split_product(x: Float[Array, "tokens inputs"], values: Int8[Array, "outputs inputs"]) -> Array:
    """Compute ``x @ values.T`` by products of integers, in float32.

    The error of x is at most ``max(abs(x)) / 64516``, for each token.
    """
    num_tokens = len(x)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    unit = jnp.maximum(largest / _MAX, jnp.finfo(jnp.float32).tiny)
    high = jnp.round(wide / unit)
    low = jnp.round((wide / unit - high) * 2 * _MAX)
    parts = jnp.concatenate([high, low])
    if num_tokens == 1:
        sums = _product_of_two(parts, values, x)
    else:
        parts = parts.astype(jnp.int8)
        sums = jnp.einsum("ti,oi->to", parts, values, preferred_element_type=jnp.int32)
    high = sums[:num_tokens].astype(jnp.float32)
    low = sums[num_tokens:].astype(jnp.float32)
    return (high + low / (2 * _MAX)) * unit


def _product_of_two(
    parts: Float[Array, "2 inputs"], values: Int8[Array, "outputs inputs"], x: Array
) -> Array:
    """Multiply two rows of integers by ``values``: one loop, 1.4 times as fast as ``einsum``."""
    # XLA fuses what is elementwise into the loop that uses it: it would split x again for each
    # output. It never fuses a product. So the parts are multiplied by the identity, which changes
    # no value, and are computed once.
    parts = jnp.eye(2, dtype=jnp.int32) @ parts.astype(jnp.int32)
    products = [part.astype(jnp.int16) * widen_late(values, x).astype(jnp.int32) for part in parts]
    # One reduction gives both sums: XLA would cut a reduction of one array in pieces of 32.
    zeros = [np.int32(0)] * 2
    sums = jax.lax.reduce(products, zeros, functools.partial(jax.tree.map, jnp.add), [1])
    return jnp.stack(sums)


def widen_late(values: Int8[Array, "outputs inputs"], x: Array) -> Array:
    """Return ``values`` unchanged, but not before ``x`` is computed.

    Integers are widened before a product with floats. XLA would widen the matrices of all layers
    at the start of the program, into memory whose pages take as long to get as the products of 64
    tokens. So the values are xor-ed with a bit that depends on ``x``. The bit is always 0, as
    nothing is larger than infinity, but XLA does not know that and has to wait for ``x``.
    """
    is_larger = x[0, 0] > jnp.inf
    return values ^ is_larger.astype(jnp.int8)
