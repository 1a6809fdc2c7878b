"""The parts of a block besides attention: normalization, the feed-forward network, and RoPE.

Rotary position embedding turns channel pair ``i``, read as a complex number, by
``position * frequency[i]``, so that products of queries and keys depend on differences of positions
alone. Source: Su et al. 2021, section 3.2 (arXiv:2104.09864).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from jllama.functional.linear import AdaptedMatrix, DecodeMatrix
from jllama.functional.shapes import checked, sum_dtype

Stream = Float[Array, "*lead embed"]
Widening = Float[Array | DecodeMatrix | AdaptedMatrix, "embed mlp"]
Narrowing = Float[Array | DecodeMatrix | AdaptedMatrix, "mlp embed"]
Table = Float[Array, "*lead half"]
Heads = Float[Array, "batch heads seq head_dim"]
Turn = Float[Array, "#batch seq head_dim//2"]


@checked
def rms_norm(x: Stream, scale: Float[Array, "embed"], eps: float) -> Stream:
    """Divide by the root mean square: ``x / sqrt(mean(x**2) + eps) * scale``.

    The mean runs over the last axis, in float32 for any dtype of x; the result has x's dtype.
    A zero row gives zeros. Source: Zhang and Sennrich 2019, eq. 4 (arXiv:1910.07467).
    """
    wide = x.astype(sum_dtype(x))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normalized = wide * jax.lax.rsqrt(mean_square + eps)
    return (normalized * scale.astype(wide.dtype)).astype(x.dtype)


@checked
def swiglu(x: Stream, w_gate: Widening, w_up: Widening, w_down: Narrowing) -> Stream:
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


@checked
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


@checked
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
