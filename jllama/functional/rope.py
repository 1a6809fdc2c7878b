"""Rotary position embedding.

Pair ``i`` of a head's channels, read as the complex number ``a + jb``, is turned by the angle
``position * frequency[i]``. Dot products of queries and keys then depend on positions only through their difference.
Source: Su et al. 2021, section 3.2 (arXiv:2104.09864).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from jllama.functional.shapes import checked

Frequencies = Float64[np.ndarray, "half"]
Table = Float[Array, "*lead half"]

_DIGIT_BITS = 8
_NUM_DIGITS = 3  # positions up to 2**24


@checked
def rope_tables(positions: Int[Array, "*lead"], frequencies: Frequencies) -> tuple[Table, Table]:
    """``cos`` and ``sin`` of ``position * frequency`` for any positions below 2**24, in float32.

    A float32 product would be off by 4e-3 radians at position 100,000. So a position is read as three base-256
    digits: the angle of each digit is looked up in a small table made in float64, and the three turns are multiplied
    as complex numbers. The error stays below 1e-6 at every position.
    """
    base = 1 << _DIGIT_BITS
    cos, sin = jnp.float32(1.0), jnp.float32(0.0)
    for digit_index in range(_NUM_DIGITS):
        angles = np.outer(np.arange(base) * float(base**digit_index), frequencies)
        digit = (positions >> (_DIGIT_BITS * digit_index)) & (base - 1)
        digit_cos = jnp.asarray(np.cos(angles), jnp.float32)[digit]
        digit_sin = jnp.asarray(np.sin(angles), jnp.float32)[digit]
        cos, sin = cos * digit_cos - sin * digit_sin, sin * digit_cos + cos * digit_sin
    return cos, sin


@checked
def apply_rope(
    x: Float[Array, "batch heads seq head_dim"],
    cos: Float[Array, "#batch seq head_dim//2"],
    sin: Float[Array, "#batch seq head_dim//2"],
) -> Float[Array, "batch heads seq head_dim"]:
    """Turn every pair of channels; pair ``i`` is channels ``i`` and ``i + head_dim/2`` (half-split, as Hugging Face).

    ``(a, b) -> (a cos - b sin, a sin + b cos)``, in float32; the result has x's dtype. ``cos`` and ``sin`` come from
    ``rope_tables``. This is jllama's own layout.
    """
    first, second = jnp.split(x.astype(np.promote_types(x.dtype, np.float32)), 2, axis=-1)
    turned = _turn(first, second, cos, sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


@checked
def apply_rope_interleaved(
    x: Float[Array, "batch heads seq head_dim"],
    cos: Float[Array, "#batch seq head_dim//2"],
    sin: Float[Array, "#batch seq head_dim//2"],
) -> Float[Array, "batch heads seq head_dim"]:
    """As ``apply_rope``, but pair ``i`` is channels ``2i`` and ``2i + 1``: the layout of the paper and of Meta's files.

    Equal to ``apply_rope`` after ``half_split_from_interleaved`` of the channels.
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    turned = _turn(wide[..., 0::2], wide[..., 1::2], cos, sin)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def half_split_from_interleaved(x: Float[Array, "*lead head_dim"]) -> Float[Array, "*lead head_dim"]:
    """Reorder channels from interleaved pairs to half-split: all even channels, then all odd ones."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _turn(first: Array, second: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    cos, sin = cos[:, None], sin[:, None]  # the same for every head
    return first * cos - second * sin, first * sin + second * cos
