"""Normalization over the last axis."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jllama.functional.shapes import checked


@checked
def rms_norm(x: Float[Array, "*lead embed"], scale: Float[Array, "embed"], eps: float) -> Float[Array, "*lead embed"]:
    """Root-mean-square normalization: ``x / sqrt(mean(x**2) + eps) * scale``.

    The mean runs over the last axis, in float32 whatever x's dtype; the result has x's dtype.
    A zero row gives zeros. Source: Zhang and Sennrich 2019, eq. 4 (arXiv:1910.07467).
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(wide.dtype)).astype(x.dtype)
