"""Normalisation over the last axis."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jllama.functional.shapes import checked


@checked
def rms_norm(x: Float[Array, "*lead embed"], scale: Float[Array, "embed"], eps: float) -> Float[Array, "*lead embed"]:
    """Root-mean-square normalisation: ``x / sqrt(mean(x**2) + eps) * scale``.

    The mean runs over the last axis, in float32 whatever x's dtype; the result has x's dtype.
    A zero row gives zeros. Source: Zhang and Sennrich 2019, eq. 4 (arXiv:1910.07467).
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(wide.dtype)).astype(x.dtype)


@checked
def layer_norm(
    x: Float[Array, "*lead embed"], scale: Float[Array, "embed"], bias: Float[Array, "embed"], eps: float
) -> Float[Array, "*lead embed"]:
    """Layer normalisation: ``(x - mean(x)) / sqrt(var(x) + eps) * scale + bias``.

    Here for comparison: Llama uses ``rms_norm``, which drops the mean and the bias. Mean and (biased) variance run
    over the last axis, in float32 whatever x's dtype; the result has x's dtype.
    Source: Ba, Kiros and Hinton 2016, eq. 3 and 4 (arXiv:1607.06450).
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    scale, bias = scale.astype(wide.dtype), bias.astype(wide.dtype)
    return (centred * jax.lax.rsqrt(variance + eps) * scale + bias).astype(x.dtype)
