"""The training objective."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jllama.functional.shapes import checked


@checked
def cross_entropy(
    logits: Float[Array, "*lead vocab"],
    targets: Int[Array, "*lead"],
    mask: Bool[Array, "*lead"],
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed negative log-likelihood of the unmasked targets, and how many there are: ``(total, count)``.

    ``total = sum over unmasked of (logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)**2)``, in nats and
    float32. It is a sum and not a mean so that parts of a batch (micro-batches, devices, windows of a text) add up
    exactly; the mean is ``total / count``. Masked positions count for nothing, whatever they hold. Targets are the
    tokens *after* the ones the logits were computed from: the caller shifts. Source of the z-loss: Chowdhery et al.
    2022, section 5 (arXiv:2204.02311).
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    wide = jnp.where(mask[..., None], wide, 0.0)
    peak = jax.lax.stop_gradient(jnp.max(wide, axis=-1))  # taken out first: large common offsets would eat digits
    shifted = wide - peak[..., None]
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    losses = log_total - jnp.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]
    if z_loss:
        losses = losses + z_loss * jnp.square(log_total + peak)
    return jnp.sum(jnp.where(mask, losses, 0.0)), jnp.sum(mask, dtype=wide.dtype)
