"""The training loss, from the last activations and the head: never with all logits at once."""

import functools
import math
from typing import Any, NamedTuple

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
    """Sum the negative log-likelihood of the counted targets; return ``(total, count)``.

    In nats and float32, with ``logits = hidden @ head``, ``total`` is the sum over counted targets
    of ``logsumexp(logits) - logits[target] + z_loss * logsumexp(logits)**2``. The mean is
    ``total / count``; totals and counts of parts of a batch add up exactly. Source of the z-loss:
    Chowdhery et al. 2022, section 5 (arXiv:2204.02311).

    Gradients exist in reverse mode only, and of first order. They are computed in the forward
    pass, while the logits are there: products in the dtype of ``hidden``, sums in float32. The
    gradients of all logits are stored if they take at most half of the head's in float32.

    Args:
        hidden: activations.
        head: the matrix that makes logits.
        targets: the ids of the tokens *after* those of ``hidden``: the caller shifts them.
        mask: true where a target is counted. Other positions may hold anything.
        z_loss: the weight of the squared normalizer.
        chunk_tokens: logits are made for so many tokens at a time, up to the row with the most
            counted targets.

    >>> hidden, head = jnp.ones((1, 3, 8)), jnp.zeros((8, 50))
    >>> targets, mask = jnp.array([[4, 7, 0]]), jnp.array([[True, True, False]])
    >>> total, count = linear_cross_entropy(hidden, head, targets, mask)
    >>> print(f"{total / count:.4f}, {count}")  # ln 50
    3.9120, 2.0
    """
    wide = np.promote_types(hidden.dtype, np.float32)
    length = _chunk_length(targets.shape, chunk_tokens)
    return _loss(z_loss, length, hidden, head, targets, mask), jnp.sum(mask, dtype=wide)


@checked
def token_log_probs(
    hidden: Hidden, head: Head, targets: Ids, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Float[Array, "batch seq"], Flags]:
    """Compute ``log softmax(hidden @ head)[target]``, and whether a target is the likeliest token.

    Log-probabilities are float32. Logits are made in chunks as in ``linear_cross_entropy``; the
    backward pass makes each chunk's logits again.
    """
    batch, seq = targets.shape
    length = _chunk_length(targets.shape, chunk_tokens)

    def one_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, targets = chunk
        logits = project(hidden, head)
        log_prob, *_ = _log_softmax(logits, targets)
        return log_prob, jnp.argmax(logits, axis=-1) == targets

    if length == seq:
        return one_chunk((hidden, targets))
    chunks = _split(hidden, length), _split(targets, length)
    results = jax.lax.map(jax.checkpoint(one_chunk), chunks)
    return jax.tree.map(lambda parts: parts.swapaxes(0, 1).reshape(batch, -1)[:, :seq], results)


def _split(array: Array, length: int) -> Array:
    """Split ``[batch, seq, ...]`` in padded chunks ``[num_chunks, batch, length, ...]``."""
    batch, seq, *rest = array.shape
    padded = jnp.pad(array, [(0, 0), (0, -seq % length)] + [(0, 0)] * len(rest))
    return padded.reshape(batch, -1, length, *rest).swapaxes(0, 1)


def _chunk_length(shape: tuple[int, ...], chunk_tokens: int) -> int:
    """Return how many tokens of each row a chunk has.

    Rows are cut and not joined, so that devices keep their own.
    """
    seq = shape[1]
    if seq == 0:
        return 0
    num_chunks = math.ceil(math.prod(shape) / chunk_tokens)
    return math.ceil(seq / num_chunks)


# The loss over all chunks, without and with gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(
    z_loss: float, length: int, hidden: Array, head: Any, targets: Array, mask: Array
) -> Array:
    hidden = jnp.where(mask[..., None], hidden, 0)
    if length == targets.shape[1]:
        return _chunk_loss(z_loss, head, hidden, targets, mask)
    rows = _counted_first(hidden, targets, mask, length)

    def add_chunk(index: Array, total: Array) -> Array:
        return total + _chunk_loss(z_loss, head, *rows.chunk(index, length))

    zero = jnp.zeros((), np.promote_types(hidden.dtype, np.float32))
    return jax.lax.fori_loop(0, rows.num_chunks, add_chunk, zero)


def _loss_forward(
    z_loss: float, length: int, hidden: Array, head: Any, targets: Array, mask: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Compute the loss and, as residuals, the gradients of ``hidden`` and ``head``."""
    if isinstance(head, DecodeMatrix):
        raise ValueError(
            "linear_cross_entropy: head is laid out for decoding, which has no gradients; "
            "give an array"
        )
    hidden = jnp.where(mask[..., None], hidden, 0)
    if length == targets.shape[1]:
        total, d_hidden, d_logits = _chunk_gradients(z_loss, head, hidden, targets, mask)
        d_head = _head_gradient(hidden, d_logits)
        return total, (d_hidden, d_head.astype(head.dtype))

    rows = _counted_first(hidden, targets, mask, length)
    wide = np.promote_types(hidden.dtype, np.float32)
    embed, vocab = head.shape
    # The gradient of the head is the product of all activations with the gradients of all logits.
    # It is one product after the loop if the latter take at most half of its memory in float32.
    # Otherwise each chunk adds its product.
    stores_logits = 2 * rows.hidden.size * hidden.dtype.itemsize <= wide.itemsize * embed**2

    def add_chunk(index: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, d_hidden, d_logits_or_head = sums
        chunk = rows.chunk(index, length)
        loss, d_chunk, d_logits = _chunk_gradients(z_loss, head, *chunk)
        write = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=index * length, axis=1
        )
        if stores_logits:
            d_logits_or_head = write(d_logits_or_head, d_logits)
        else:
            d_logits_or_head += _head_gradient(chunk[0], d_logits)
        return total + loss, write(d_hidden, d_chunk), d_logits_or_head

    if stores_logits:
        d_logits_or_head = jnp.zeros((*rows.targets.shape, vocab), hidden.dtype)
    else:
        d_logits_or_head = jnp.zeros(head.shape, wide)
    zeros = (jnp.zeros((), wide), jnp.zeros_like(rows.hidden), d_logits_or_head)
    total, d_hidden, d_logits_or_head = jax.lax.fori_loop(0, rows.num_chunks, add_chunk, zeros)
    in_order = jnp.argsort(rows.order, axis=1)
    d_hidden = jnp.take_along_axis(d_hidden, in_order[..., None], axis=1)
    d_head = _head_gradient(rows.hidden, d_logits_or_head) if stores_logits else d_logits_or_head
    return total, (d_hidden, d_head.astype(head.dtype))


def _loss_backward(
    z_loss: float, length: int, gradients: tuple[Array, Array], scale: Array
) -> tuple[Array, Array, None, None]:
    d_hidden, d_head = (
        (gradient.astype(scale.dtype) * scale).astype(gradient.dtype) for gradient in gradients
    )
    return d_hidden, d_head, None, None


_loss.defvjp(_loss_forward, _loss_backward)


class _Rows(NamedTuple):
    """A batch whose counted tokens come first in each row, padded to whole chunks."""

    hidden: Array
    targets: Array
    mask: Array
    order: Array  # the index that each token had, without padding
    num_chunks: Array  # up to the last counted token of any row

    def chunk(self, index: Array, length: int) -> list[Array]:
        """Return hidden states, targets and mask of one chunk."""
        return [
            jax.lax.dynamic_slice_in_dim(array, index * length, length, axis=1)
            for array in (self.hidden, self.targets, self.mask)
        ]


def _counted_first(hidden: Array, targets: Array, mask: Array, length: int) -> _Rows:
    """Move counted tokens to the front of each row, in order, so that the last chunks are empty."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    counts = jnp.sum(mask, axis=1)
    padded = jnp.pad(order, ((0, 0), (0, -order.shape[1] % length)))
    hidden = jnp.take_along_axis(hidden, padded[..., None], axis=1)
    targets = jnp.take_along_axis(targets, padded, axis=1)
    is_counted = jnp.arange(padded.shape[1]) < counts[:, None]
    num_chunks = -(-jnp.max(counts) // length)
    return _Rows(hidden, targets, is_counted, order, num_chunks)


# One chunk


def _chunk_loss(z_loss: float, head: Any, hidden: Array, targets: Array, mask: Array) -> Array:
    hidden, targets, mask = _flatten(hidden, targets, mask)
    log_prob, _, _, log_normalizer = _log_softmax(project(hidden, head), targets)
    return _sum_losses(z_loss, log_prob, log_normalizer, mask)


def _chunk_gradients(
    z_loss: float, head: Array, hidden: Array, targets: Array, mask: Array
) -> tuple[Array, Array, Array]:
    """Compute the loss of a chunk, and the gradients of its activations and of its logits.

    The gradient of a counted token's logits is
    ``softmax(logits) * (1 + 2 * z_loss * logsumexp(logits)) - one_hot(target)``.
    """
    batch, length, _ = shape = hidden.shape
    dtype = hidden.dtype
    hidden, targets, mask = _flatten(hidden, targets, mask)
    log_prob, shifted, log_sum, log_normalizer = _log_softmax(project(hidden, head), targets)
    total = _sum_losses(z_loss, log_prob, log_normalizer, mask)

    d_logits = jnp.exp(shifted - log_sum[:, None])
    d_logits *= (1 + 2 * z_loss * log_normalizer)[:, None] if z_loss else 1.0
    is_target = jnp.arange(d_logits.shape[1]) == targets[:, None]
    d_logits = d_logits - is_target.astype(d_logits.dtype)
    d_logits = jnp.where(mask[:, None], d_logits, 0.0).astype(dtype)
    d_hidden = jnp.einsum("tv,ev->te", d_logits, head, preferred_element_type=shifted.dtype)
    return total, d_hidden.astype(dtype).reshape(shape), d_logits.reshape(batch, length, -1)


def _head_gradient(hidden: Array, d_logits: Array) -> Array:
    hidden, d_logits = _flatten(hidden, d_logits)
    wide = np.promote_types(hidden.dtype, np.float32)
    return jnp.einsum("te,tv->ev", hidden, d_logits, preferred_element_type=wide)


def _flatten(*arrays: Array) -> list[Array]:
    """Join the axes ``batch, seq`` of each array."""
    return [array.reshape(-1, *array.shape[2:]) for array in arrays]


def _sum_losses(z_loss: float, log_prob: Array, log_normalizer: Array, mask: Array) -> Array:
    losses = z_loss * jnp.square(log_normalizer) - log_prob if z_loss else -log_prob
    return jnp.sum(jnp.where(mask, losses, 0.0))


def _log_softmax(logits: Array, targets: Array) -> tuple[Array, Array, Array, Array]:
    """Return each target's log-probability, and the parts of the softmax.

    These are the logits minus their largest, ``logsumexp`` of those, and ``logsumexp(logits)``.
    """
    # Without the shift, a large offset common to all logits would take digits from the result.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    shifted = logits - largest[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    log_prob = _at_targets(shifted, targets) - log_sum
    return log_prob, shifted, log_sum, log_sum + largest


@jax.custom_vjp
def _at_targets(values: Array, targets: Array) -> Array:
    """Take each target's value.

    The gradient is put in its place by comparing ids, as a scatter has no fixed order on GPUs.
    """
    return jnp.take_along_axis(values, targets[..., None], axis=-1)[..., 0]


def _at_targets_forward(values: Array, targets: Array) -> tuple[Array, Any]:
    return _at_targets(values, targets), (targets, values.shape[-1])


def _at_targets_backward(residuals: Any, gradient: Array) -> tuple[Array, None]:
    targets, size = residuals
    is_target = jnp.arange(size) == targets[..., None]
    return jnp.where(is_target, gradient[..., None], 0), None


_at_targets.defvjp(_at_targets_forward, _at_targets_backward)
