"""The training loss, from the last activations and the head: never with all logits at once."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jllama.core.ops import sum_dtype
from jllama.kernels.linear import DecodeMatrix, project
from jllama.kernels.shapes import checked

CHUNK_TOKENS = 2048

Hidden = Float[Array, "batch seq embed"]
Head = Float[Array | DecodeMatrix, "embed vocab"]
Ids = Int[Array, "batch seq"]
Flags = Bool[Array, "batch seq"]
Arrays = tuple[Array, ...]


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

    Examples:
        >>> hidden, head = jnp.ones((1, 3, 8)), jnp.zeros((8, 50))
        >>> targets, mask = jnp.array([[4, 7, 0]]), jnp.array([[True, True, False]])
        >>> total, count = linear_cross_entropy(hidden, head, targets, mask)
        >>> print(f"{total / count:.4f}, {count}")  # ln 50
        3.9120, 2.0
    """
    wide = sum_dtype(hidden)
    length = _chunk_length(targets.shape, chunk_tokens)
    tokens = _Tokens(hidden, targets, mask)
    return _loss(z_loss, length, head, tokens), jnp.sum(mask, dtype=wide)


@checked
def token_log_probs(
    hidden: Hidden, head: Head, targets: Ids, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[Float[Array, "batch seq"], Flags]:
    """Compute ``log softmax(hidden @ head)[target]``, and whether a target is the likeliest token.

    Log-probabilities are float32. Logits are made as by ``score_tokens``.
    """
    return score_tokens(likelihood, hidden, head, targets, chunk_tokens)


def score_tokens(
    score: Callable[[Array, Any], Any],
    hidden: Hidden,
    head: Head,
    targets: Any,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Any:
    """Compute ``score(logits, targets)``, arrays ``[batch, seq]``, with few logits at a time.

    ``targets`` is one array ``[batch, seq]`` or a tree of such. Logits are made in chunks as in
    ``linear_cross_entropy``; the backward pass makes each chunk's logits again.
    """
    batch, seq, _ = hidden.shape
    length = _chunk_length((batch, seq), chunk_tokens)

    def one_chunk(chunk: tuple[Array, Any]) -> Any:
        hidden, targets = chunk
        return score(project(hidden, head), targets)

    if length == seq:
        return one_chunk((hidden, targets))
    chunks = jax.tree.map(lambda array: _split(array, length), (hidden, targets))
    results = jax.lax.map(jax.checkpoint(one_chunk), chunks)
    return jax.tree.map(lambda parts: parts.swapaxes(0, 1).reshape(batch, -1)[:, :seq], results)


def likelihood(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Compute ``core.ops.likelihood``, with a gradient in a fixed order on GPUs."""
    log_prob, *_ = _log_softmax(logits, targets)
    return log_prob, jnp.argmax(logits, axis=-1) == targets


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


class _Tokens(NamedTuple):
    """Arrays ``[batch, seq, ...]``, or ``[tokens, ...]``, that a loss is computed from."""

    hidden: Array
    targets: Any  # Array; None among gradients, like the mask
    mask: Any

    def chunk(self, index: Array, length: int) -> "_Tokens":
        """Return ``length`` tokens of each row."""
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=length, axis=1)
        return jax.tree.map(lambda array: cut(array, index * length), self)

    def zero_uncounted(self) -> "_Tokens":
        """Return zeros for activations that are not counted, whatever they hold."""
        return self._replace(hidden=jnp.where(self.mask[..., None], self.hidden, 0))

    def counted_first(self, length: int) -> tuple["_Tokens", Array, Array]:
        """Move counted tokens to the front of each row, in order, and pad to whole chunks.

        Return these, the index that each token had, and how many chunks have counted tokens.
        """
        seq = self.mask.shape[1]
        order = jnp.argsort(~self.mask, axis=1, stable=True)
        counts = jnp.sum(self.mask, axis=1)
        padded = jnp.pad(order, ((0, 0), (0, -seq % length)))
        hidden = jnp.take_along_axis(self.hidden, padded[..., None], axis=1)
        targets = jnp.take_along_axis(self.targets, padded, axis=1)
        is_counted = jnp.arange(padded.shape[1]) < counts[:, None]
        return _Tokens(hidden, targets, is_counted), order, -(-jnp.max(counts) // length)


# The loss over all chunks, without and with gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(z_loss: float, length: int, head: Any, tokens: _Tokens) -> Array:
    tokens = tokens.zero_uncounted()
    if length == tokens.mask.shape[1]:
        return _chunk_loss(z_loss, head, tokens)
    tokens, _, num_chunks = tokens.counted_first(length)

    def add_chunk(index: Array, total: Array) -> Array:
        return total + _chunk_loss(z_loss, head, tokens.chunk(index, length))

    zero = jnp.zeros((), sum_dtype(tokens.hidden))
    return jax.lax.fori_loop(0, num_chunks, add_chunk, zero)


def _loss_forward(z_loss: float, length: int, head: Any, tokens: _Tokens) -> tuple[Array, Arrays]:
    """Compute the loss and, as residuals, the gradients of ``head`` and ``hidden``."""
    if isinstance(head, DecodeMatrix):
        raise ValueError(
            "linear_cross_entropy: head is laid out for decoding, which has no gradients; "
            "give an array"
        )
    tokens = tokens.zero_uncounted()
    if length == tokens.mask.shape[1]:
        total, d_hidden, d_logits = _chunk_gradients(z_loss, head, tokens)
        d_head = _head_gradient(tokens.hidden, d_logits)
        return total, (d_head.astype(head.dtype), d_hidden)

    tokens, order, num_chunks = tokens.counted_first(length)
    hidden = tokens.hidden
    wide = sum_dtype(hidden)
    embed, vocab = head.shape
    # The gradient of the head is the product of all activations with the gradients of all logits.
    # It is one product after the loop if the latter take at most half of its memory in float32.
    # Otherwise each chunk adds its product.
    stores_logits = 2 * hidden.size * hidden.dtype.itemsize <= wide.itemsize * embed**2
    if stores_logits:
        stored = jnp.zeros((*tokens.targets.shape, vocab), hidden.dtype)
    else:
        stored = jnp.zeros(head.shape, wide)

    def write(whole: Array, part: Array, index: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, index * length, axis=1)

    def add_chunk(index: Array, sums: Arrays) -> Arrays:
        total, d_hidden, stored = sums
        chunk = tokens.chunk(index, length)
        loss, d_chunk, d_logits = _chunk_gradients(z_loss, head, chunk)
        if stores_logits:
            stored = write(stored, d_logits, index)
        else:
            stored += _head_gradient(chunk.hidden, d_logits)
        return total + loss, write(d_hidden, d_chunk, index), stored

    zeros = (jnp.zeros((), wide), jnp.zeros_like(hidden), stored)
    total, d_hidden, stored = jax.lax.fori_loop(0, num_chunks, add_chunk, zeros)
    d_head = _head_gradient(hidden, stored) if stores_logits else stored
    in_order = jnp.argsort(order, axis=1)
    d_hidden = jnp.take_along_axis(d_hidden, in_order[..., None], axis=1)
    return total, (d_head.astype(head.dtype), d_hidden)


def _loss_backward(
    z_loss: float, length: int, gradients: Arrays, scale: Array
) -> tuple[Array, _Tokens]:
    d_head, d_hidden = (
        (gradient.astype(scale.dtype) * scale).astype(gradient.dtype) for gradient in gradients
    )
    return d_head, _Tokens(d_hidden, None, None)


_loss.defvjp(_loss_forward, _loss_backward)


# One chunk


def _chunk_loss(z_loss: float, head: Any, tokens: _Tokens) -> Array:
    total, _ = _losses(z_loss, head, _flatten(tokens))
    return total


def _chunk_gradients(z_loss: float, head: Array, tokens: _Tokens) -> Arrays:
    """Compute the loss of a chunk, and the gradients of its activations and of its logits.

    The gradient of a counted token's logits is
    ``softmax(logits) * (1 + 2 * z_loss * logsumexp(logits)) - one_hot(target)``.
    """
    batch, length, _ = shape = tokens.hidden.shape
    dtype = tokens.hidden.dtype
    tokens = _flatten(tokens)
    total, (shifted, log_sum, log_normalizer) = _losses(z_loss, head, tokens)
    d_logits = jnp.exp(shifted - log_sum[:, None])
    d_logits *= (1 + 2 * z_loss * log_normalizer)[:, None] if z_loss else 1.0
    is_target = jnp.arange(d_logits.shape[1]) == tokens.targets[:, None]
    d_logits -= is_target.astype(d_logits.dtype)
    d_logits = jnp.where(tokens.mask[:, None], d_logits, 0.0).astype(dtype)
    d_hidden = jnp.einsum("tv,ev->te", d_logits, head, preferred_element_type=shifted.dtype)
    return total, d_hidden.astype(dtype).reshape(shape), d_logits.reshape(batch, length, -1)


def _losses(z_loss: float, head: Any, tokens: _Tokens) -> tuple[Array, list[Array]]:
    """Return the loss of flat tokens, and the parts of the softmax."""
    log_prob, *parts = _log_softmax(project(tokens.hidden, head), tokens.targets)
    losses = z_loss * jnp.square(parts[-1]) - log_prob if z_loss else -log_prob
    return jnp.sum(jnp.where(tokens.mask, losses, 0.0)), parts


def _head_gradient(hidden: Array, d_logits: Array) -> Array:
    wide = sum_dtype(hidden)
    hidden, d_logits = _flatten((hidden, d_logits))
    return jnp.einsum("te,tv->ev", hidden, d_logits, preferred_element_type=wide)


def _flatten(arrays: Any) -> Any:
    """Join the axes ``batch, seq`` of each array."""
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), arrays)


def _log_softmax(logits: Array, targets: Array) -> Arrays:
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
