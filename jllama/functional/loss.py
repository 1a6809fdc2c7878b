"""The training objective, straight from the last activations and the head: never with all logits at once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.functional.linear import DecodeMatrix, project
from jllama.functional.shapes import checked

CHUNK_TOKENS = 2048

Hidden = Float[Array, "batch seq embed"]
Head = Float[Array | DecodeMatrix, "embed vocab"]
Ids = Int[Array, "batch seq"]
Flags = Bool[Array, "batch seq"]


@checked
def linear_cross_entropy(
    hidden: Hidden,
    head: Head,
    targets: Ids,
    mask: Flags,
    z_loss: float = 0.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed negative log-likelihood of the unmasked targets, and how many there are: ``(total, count)``.

    With ``logits = hidden @ head``, in nats and float32:
    ``total = sum over unmasked of (logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)**2)``.
    Sums of parts of a batch add up exactly; the mean is ``total / count``. Masked positions count for nothing, whatever
    they hold. Targets are the tokens *after* the ones of ``hidden``: the caller shifts. Logits are made for
    ``chunk_tokens`` tokens at a time, up to the row with the most unmasked ones, and gradients while they are there
    (those of the logits stay, if they take at most half of the head's in float32): products in the dtype of ``hidden``,
    sums in float32. Reverse mode only, and once. Source of the z-loss: Chowdhery et al. 2022, section 5
    (arXiv:2204.02311).

    >>> hidden, head = jnp.ones((1, 3, 8)), jnp.zeros((8, 50))
    >>> total, count = linear_cross_entropy(hidden, head, jnp.array([[4, 7, 0]]), jnp.array([[True, True, False]]))
    >>> print(f"{total / count:.4f}, {count}")  # ln 50
    3.9120, 2.0
    """
    wide = np.promote_types(hidden.dtype, np.float32)
    return _total(z_loss, chunk_tokens, hidden, head, targets, mask), jnp.sum(mask, dtype=wide)


@checked
def token_log_probs(
    hidden: Hidden, head: Head, targets: Ids, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Float[Array, "batch seq"], Flags]:
    """Each target's ``log softmax(hidden @ head)[target]``, in float32, and whether it is the likeliest token.

    In chunks as in ``linear_cross_entropy``; the backward pass makes each chunk's logits again.
    """

    def one_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = project(part[0], head)
        return _log_probs(logits, part[1])[0], jnp.argmax(logits, axis=-1) == part[1]

    (batch, seq), length = targets.shape, _chunk_length(targets.shape, chunk_tokens)
    if length == seq:
        return one_chunk((hidden, targets))

    def in_chunks(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, -seq % length)) + ((0, 0),) * (array.ndim - 2))
        return padded.reshape(batch, -1, length, *array.shape[2:]).swapaxes(0, 1)

    chunks = jax.lax.map(jax.checkpoint(one_chunk), (in_chunks(hidden), in_chunks(targets)))
    return jax.tree.map(lambda parts: parts.swapaxes(0, 1).reshape(batch, -1)[:, :seq], chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(
    z_loss: float, chunk_tokens: int, hidden: Array, head: Any, targets: Array, mask: Array
) -> Array:
    return _total_and_gradients(z_loss, chunk_tokens, hidden, head, targets, mask, gradients=False)[
        0
    ]


def _forward(z_loss: float, chunk_tokens: int, hidden: Array, head: Any, *others: Array) -> Any:
    if isinstance(head, DecodeMatrix):
        raise ValueError(
            "linear_cross_entropy: head is laid out for decoding, which has no gradients; give an array"
        )
    total, d_hidden, d_head = _total_and_gradients(
        z_loss, chunk_tokens, hidden, head, *others, gradients=True
    )
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(
    z_loss: float, chunk_tokens: int, gradients: tuple[Array, Array], scale: Array
) -> Any:
    return (
        *((gradient.astype(scale.dtype) * scale).astype(gradient.dtype) for gradient in gradients),
        None,
        None,
    )


_total.defvjp(_forward, _backward)


def _total_and_gradients(
    z_loss: float,
    chunk_tokens: int,
    hidden: Array,
    head: Any,
    targets: Array,
    mask: Array,
    *,
    gradients: bool,
) -> tuple[Array, ...]:
    """The total alone, or with the gradients of ``hidden`` and ``head``."""
    seq, length = targets.shape[1], _chunk_length(targets.shape, chunk_tokens)
    wide = np.promote_types(hidden.dtype, np.float32)

    def one_chunk(x: Array, targets: Array, mask: Array) -> tuple[Array, ...]:
        """The total, and with gradients that of ``x``, and those of the logits."""
        shape, x, targets, mask = (
            x.shape,
            x.reshape(-1, x.shape[2]),
            targets.reshape(-1),
            mask.reshape(-1),
        )
        log_prob, shifted, log_sum, log_normalizer = _log_probs(project(x, head), targets)
        losses = z_loss * jnp.square(log_normalizer) - log_prob if z_loss else -log_prob
        total = jnp.sum(jnp.where(mask, losses, 0.0))
        if not gradients:
            return (total,)
        slope = jnp.exp(shifted - log_sum[:, None])
        slope *= (1 + 2 * z_loss * log_normalizer)[:, None] if z_loss else 1.0
        is_target = jnp.arange(slope.shape[1]) == targets[:, None]
        slope = jnp.where(mask[:, None], slope - is_target.astype(wide), 0.0).astype(x.dtype)
        d_x = jnp.einsum("tv,ev->te", slope, head, preferred_element_type=wide).astype(x.dtype)
        return total, d_x.reshape(shape), slope.reshape(*shape[:2], -1)

    def head_gradient(x: Array, slope: Array) -> Array:
        x, slope = (each.reshape(-1, each.shape[2]) for each in (x, slope))
        return jnp.einsum("te,tv->ev", x, slope, preferred_element_type=wide)

    hidden = jnp.where(mask[..., None], hidden, 0)
    if length == seq:
        total, *slopes = one_chunk(hidden, targets, mask)
        return (total, slopes[0], head_gradient(hidden, slopes[1])) if gradients else (total,)

    # Counted tokens go to the front of each row, in their order, so that the last chunks need not be looked at.
    order, counts = jnp.argsort(~mask, axis=1, stable=True), jnp.sum(mask, axis=1)
    padded = jnp.pad(order, ((0, 0), (0, -seq % length)))
    x, y = (
        jnp.take_along_axis(hidden, padded[..., None], axis=1),
        jnp.take_along_axis(targets, padded, axis=1),
    )
    counted = jnp.arange(padded.shape[1]) < counts[:, None]
    # The logits' gradients are kept for one product at the end, where they take half of its sum in float32 or less.
    at_once = 2 * x.size * x.dtype.itemsize <= wide.itemsize * x.shape[2] ** 2

    def add_chunk(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        part = [
            jax.lax.dynamic_slice_in_dim(each, index * length, length, axis=1)
            for each in (x, y, counted)
        ]
        total, *slopes = one_chunk(*part)
        if not gradients:
            return (sums[0] + total,)
        write = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=index * length, axis=1
        )
        last = write(sums[2], slopes[1]) if at_once else sums[2] + head_gradient(part[0], slopes[1])
        return sums[0] + total, write(sums[1], slopes[0]), last

    last = jnp.zeros((*y.shape, head.shape[1]), x.dtype) if at_once else jnp.zeros(head.shape, wide)
    zeros = (jnp.zeros((), wide), jnp.zeros_like(x), last)[: 3 if gradients else 1]
    total, *slopes = jax.lax.fori_loop(0, -(-jnp.max(counts) // length), add_chunk, zeros)
    if gradients:
        slopes[0] = jnp.take_along_axis(slopes[0], jnp.argsort(order, axis=1)[..., None], axis=1)
        slopes[1] = head_gradient(x, slopes[1]) if at_once else slopes[1]
    return total, *slopes


def _chunk_length(shape: tuple[int, ...], chunk_tokens: int) -> int:
    """Tokens of each row in a chunk: rows are cut and not put together, so that devices keep their own."""
    return -(-shape[1] // -(-math.prod(shape) // chunk_tokens)) if shape[1] else 0


@jax.custom_vjp
def _at_targets(values: Array, targets: Array) -> Array:
    """Each target's value. The gradient is compared into its place: a scatter has no fixed order on GPUs."""
    return jnp.take_along_axis(values, targets[..., None], axis=-1)[..., 0]


def _at_targets_forward(values: Array, targets: Array) -> tuple[Array, Any]:
    return _at_targets(values, targets), (targets, values.shape[-1])


def _at_targets_backward(kept: Any, gradient: Array) -> tuple[Array, None]:
    targets, size = kept
    is_target = jnp.arange(size) == targets[..., None]
    return jnp.where(is_target, gradient[..., None], 0), None


_at_targets.defvjp(_at_targets_forward, _at_targets_backward)


def _log_probs(logits: Array, targets: Array) -> tuple[Array, Array, Array, Array]:
    """The targets', logits less their peak, the logarithm of the sum of their exponentials, that of the logits' own."""
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))  # large common offsets would eat digits
    shifted = logits - peak[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    log_prob = _at_targets(shifted, targets) - log_sum
    return log_prob, shifted, log_sum, log_sum + peak
