"""Exact mode of training from rewards: the trainer's values are the sampler's, bit for bit.

Two programs that compute the same product for another number of tokens add in another order. In
exact mode, sampler and trainer compute everything of a forward pass for blocks of the same number
of tokens, each in a loop of its own that is compiled alike in both, with the same weights. So an
activation depends on its token's own context alone: not on the program, the other rows, or how
prompts were cut. The backward pass is the usual one, at these activations.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.model import LAYER_CLASSES, AttentionInputs, Layer, write_slots

_KEY_BLOCK = 256  # that ``functional.cached_attention`` reads at once


@dataclasses.dataclass(frozen=True)
class ExactConfig(LlamaConfig):
    """A Llama whose layers compute blocks of ``block_tokens`` tokens, whatever the batch."""

    block_tokens: int = 8


def exact_config(config: LlamaConfig, block_tokens: int) -> ExactConfig:
    """Return the same model with layers that compute blocks of tokens."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ExactConfig(**fields, block_tokens=block_tokens)


class ExactLayer(Layer):
    """The block of an ``ExactConfig``; it needs a cache, and ``slots`` that are positions."""

    config: ExactConfig

    def __call__(
        self, x: Array, inputs: AttentionInputs, cached: Any = None
    ) -> tuple[Array, Any]:
        """Return the block's output, and ``cached`` with the new keys and values in it."""
        assert cached is not None
        batch, seq, _ = x.shape
        in_blocks = functools.partial(map_blocks, self.config.block_tokens, inputs.slots)

        # Queries, keys and values of each token.
        tables = ()
        if inputs.cos is not None:
            shape = batch, seq, inputs.cos.shape[-1]
            tables = jnp.broadcast_to(inputs.cos, shape), jnp.broadcast_to(inputs.sin, shape)
        heads = in_blocks(functools.partial(self._block_heads, inputs), x, tables)
        query, key, value = (array.swapaxes(1, 2) for array in heads)
        keys = write_slots(cached[0], key, inputs.slots)
        values = write_slots(cached[1], value, inputs.slots)

        # Attention, with each query as a row of its own, and what follows.
        attend = functools.partial(self._block_attention, inputs, (keys, values))
        rows = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, seq))
        mixed = in_blocks(attend, query.swapaxes(1, 2), rows, inputs.slots)
        return in_blocks(self._block_output, x, mixed), (keys, values)

    def finish(self, x: Array, scale: Array, inputs: AttentionInputs) -> Array:
        """Apply the model's final norm to the output of its last layer."""
        norm = functools.partial(F.rms_norm, scale=scale, eps=self.norm_eps)
        return map_blocks(self.config.block_tokens, inputs.slots, norm, x)

    def _block_heads(self, inputs: AttentionInputs, x: Array, tables: Any) -> tuple[Array, ...]:
        cos, sin = tables or (None, None)
        inputs = dataclasses.replace(inputs, cos=cos, sin=sin)
        heads = self.heads(self.normalize(x, "attn_norm"), inputs)
        return tuple(array.swapaxes(1, 2) for array in heads)

    def _block_attention(
        self, inputs: AttentionInputs, cached: Any, query: Array, rows: Array, slots: Array
    ) -> Array:
        keys, values = (
            jnp.pad(array[rows[:, 0]], ((0, 0), (0, 0), (0, -array.shape[2] % _KEY_BLOCK), (0, 0)))
            for array in cached
        )
        keys, values = jax.lax.optimization_barrier((keys, values))
        mask = F.Mask(offset=slots[:, 0], window=inputs.mask.window)
        return F.attention(query.swapaxes(1, 2), keys, values, mask, "cached").swapaxes(1, 2)

    def _block_output(self, x: Array, mixed: Array) -> Array:
        wo = self.wo[...]
        update = (mixed.reshape(len(x), -1) @ wo.reshape(-1, wo.shape[-1])).reshape(x.shape)
        x = x + self.residual(self.normalize(update, "attn_out_norm"))
        return x + self.feed_forward_update(x)


LAYER_CLASSES[ExactConfig] = ExactLayer


def map_blocks(
    size: int, slots: Int[Array, "batch seq"], function: Callable[..., Any], *arrays: Any
) -> Any:
    """Apply a function to blocks of ``size`` tokens ``[size, 1, ...]`` of ``[batch, seq, ...]``.

    The compiler must not see how many blocks there are, or it would compile one block in another
    way than several. So the loop's bound depends on ``slots``, and there is always room for two
    blocks.
    """
    batch, seq = slots.shape
    num_blocks = -(-batch * seq // size)
    room = max(num_blocks, 2) * size

    def flatten(array: Array) -> Array:
        flat = array.reshape(batch * seq, *array.shape[2:])
        return jnp.pad(flat, [(0, room - batch * seq)] + [(0, 0)] * (flat.ndim - 1))

    flat = jax.tree.map(flatten, arrays)

    def block(index: Array) -> Any:
        parts = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, index * size, size)[:, None], flat
        )
        return jax.tree.map(lambda array: array[:, 0], function(*parts))

    def write(index: Array, outputs: Any) -> Any:
        return jax.tree.map(
            lambda output, part: jax.lax.dynamic_update_slice_in_dim(
                output, part, index * size, axis=0
            ),
            outputs,
            block(index),
        )

    shapes = jax.eval_shape(block, jnp.int32(0))
    outputs = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape[1:]), leaf.dtype), shapes)
    bound = jnp.where(jnp.min(slots) >= 0, num_blocks, 0)
    outputs = jax.lax.fori_loop(0, bound, write, outputs)
    return jax.tree.map(
        lambda array: array[: batch * seq].reshape(batch, seq, *array.shape[1:]), outputs
    )


@jax.custom_vjp
def substitute(usual: Array, exact: Array) -> Array:
    """Return ``exact``, whose gradient is that of ``usual``: the same function, rounded elsewhere."""
    return exact


substitute.defvjp(lambda usual, exact: (exact, None), lambda _, gradient: (gradient, None))
