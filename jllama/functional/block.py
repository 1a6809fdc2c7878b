"""What a block is made of besides attention: normalization, the feed-forward network, rotary position embedding.

The last one turns channel pair ``i``, as a complex number, by ``position * frequency[i]``: products of queries and keys
then depend on differences of positions. Source: Su et al. 2021, section 3.2 (arXiv:2104.09864).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from jllama.functional.linear import AdaptedMatrix, DecodeMatrix
from jllama.functional.shapes import checked

Stream = Float[Array, "*lead embed"]
Widening = Float[Array | DecodeMatrix | AdaptedMatrix, "embed mlp"]
Narrowing = Float[Array | DecodeMatrix | AdaptedMatrix, "mlp embed"]
Table = Float[Array, "*lead half"]
Heads = Float[Array, "batch heads seq head_dim"]
Turn = Float[Array, "#batch seq head_dim//2"]


@checked
def rms_norm(x: Stream, scale: Float[Array, "embed"], eps: float) -> Stream:
    """Root-mean-square normalization: ``x / sqrt(mean(x**2) + eps) * scale``.

    The mean runs over the last axis, in float32 whatever x's dtype; the result has x's dtype.
    A zero row gives zeros. Source: Zhang and Sennrich 2019, eq. 4 (arXiv:1910.07467).
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(wide.dtype)).astype(x.dtype)


@checked
def swiglu(x: Stream, w_gate: Widening, w_up: Widening, w_down: Narrowing) -> Stream:
    """``(silu(x w_gate) * (x w_up)) w_down`` with ``silu(z) = z / (1 + exp(-z))``, in x's dtype.

    Source: Shazeer 2020, eq. 6 (arXiv:2002.05202).
    """
    flat = x.reshape(
        -1, x.shape[-1]
    )  # XLA:CPU makes the weights' gradients 1.8 times faster from two axes
    return (gated(flat @ w_gate, flat @ w_up) @ w_down).reshape(x.shape)


def gated(
    gate: Float[Array, "tokens mlp"], up: Float[Array, "tokens mlp"]
) -> Float[Array, "tokens mlp"]:
    """What ``swiglu`` narrows again: ``silu(gate) * up``."""
    return jax.nn.silu(gate) * up


@checked
def rope_tables(
    positions: Int[Array, "*lead"], frequencies: Float64[np.ndarray, "half"]
) -> tuple[Table, Table]:
    """``cos`` and ``sin`` of ``position * frequency`` for any positions below 2**24, in float32.

    A float32 product would be off by 4e-3 radians at position 100,000. So each of a position's three base-256 digits is
    looked up in a table made in float64, and the turns are multiplied as complex numbers: the error is below 1e-6.
    """
    cos, sin = jnp.float32(1.0), jnp.float32(0.0)
    for shift in (0, 8, 16):
        angles = np.outer(np.arange(256) * float(1 << shift), frequencies)
        digit = (positions >> shift) & 255
        digit_cos, digit_sin = (
            jnp.asarray(wave, jnp.float32)[digit] for wave in (np.cos(angles), np.sin(angles))
        )
        cos, sin = cos * digit_cos - sin * digit_sin, sin * digit_cos + cos * digit_sin
    return cos, sin


@checked
def apply_rope(x: Heads, cos: Turn, sin: Turn) -> Heads:
    """Turn every pair of channels; pair ``i`` is channels ``i`` and ``i + head_dim/2`` (half-split, as Hugging Face).

    ``(a, b) -> (a cos - b sin, a sin + b cos)``, in float32; the result has x's dtype. ``cos`` and ``sin`` come from
    ``rope_tables``. Meta's files have the paper's interleaved pairs instead, channels ``2i`` and ``2i + 1``.
    """
    first, second = jnp.split(x.astype(np.promote_types(x.dtype, np.float32)), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]  # the same for every head
    return jnp.concatenate(
        [first * cos - second * sin, first * sin + second * cos], axis=-1
    ).astype(x.dtype)
