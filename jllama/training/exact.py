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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jllama import functional as F
from jllama.config import BLOCKS, LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.model import (
    AttentionInputs,
    Layer,
    attention_inputs,
    build_model,
    write_slots,
)
from jllama.parameters import Params

_KEY_BLOCK = 256  # that ``functional.cached_attention`` reads at once


@dataclasses.dataclass(frozen=True)
class ExactConfig(LlamaConfig):
    """A Llama whose layers compute blocks of ``block_tokens`` tokens, whatever the batch."""

    block_tokens: int = 8
    # Which roundings a program leaves out would depend on the program.
    compiler_options: ClassVar[dict[str, Any]] = {"xla_allow_excess_precision": False}


def exact_config(config: LlamaConfig, block_tokens: int) -> ExactConfig:
    """Return the same model with layers that compute blocks of tokens."""
    fields: Any = vars(config) | {"block": "exact"}
    return ExactConfig(**fields, block_tokens=block_tokens)


class ExactLayer(Layer):
    """The block of an ``ExactConfig``; it needs a cache, and ``slots`` that are positions."""

    config: ExactConfig

    def __call__(self, x: Array, inputs: AttentionInputs, cached: Any = None) -> tuple[Array, Any]:
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
        attention = functools.partial(self._block_attention, inputs, (keys, values))
        rows = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, seq))
        mixed = in_blocks(attention, query.swapaxes(1, 2), rows, inputs.slots)
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


BLOCKS["exact"] = ExactLayer


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


class ExactValues:
    """The values of a forward pass over whole rows, computed as an engine with such layers does.

    Args:
        config: the engine's.
        params: the engine's, with ``stack_layers``.
        segments: 1 for the tokens of a row, 0 for padding after them.
    """

    def __init__(
        self, config: ExactConfig, params: DecodeParams, segments: Int[Array, "rows seq"]
    ) -> None:
        self.config = config
        self.layers = params.weights["layers"]
        self._rest = {name: leaf for name, leaf in params.weights.items() if name != "layers"}
        rows, seq = segments.shape
        # Positions that depend on data are not computed by the compiler, which rounds otherwise.
        self._slots = jnp.where(segments != 0, jnp.arange(seq, dtype=jnp.int32), seq)
        offset = jnp.zeros(rows, jnp.int32)
        self._inputs = attention_inputs(
            config, self._slots, F.Mask(offset=offset), slots=self._slots
        )

    def _model(self, weights: Params) -> Any:
        layers = {str(index): weights for index in range(self.config.num_layers)}
        return build_model(self.config, DecodeParams({**self._rest, "layers": layers}))

    def layer(self, index: int, x: Array, weights: Params) -> Array:
        """Return the output of a layer with these weights; ``index`` is that in its period."""
        layer = self._model(weights).layers["0"]
        rows, seq, _ = x.shape
        zeros = jnp.zeros((rows, self.config.num_kv_heads, seq, self.config.head_dim), x.dtype)
        output, _ = layer(x, self._inputs[index], (zeros, zeros))
        return output

    def finish(self, x: Array) -> Array:
        """Return the final activations, from the output of the last layer."""
        llama = self._first_layer_model()
        return llama.layers["0"].finish(
            jax.lax.stop_gradient(x), llama.final_norm[...], self._inputs[0]
        )

    def score(self, score: Callable[[Array, Any], Any], hidden: Array, targets: Any) -> Any:
        """Return the first of ``score(logits, targets)``."""
        llama = self._first_layer_model()

        def block(hidden: Array, targets: Any) -> Any:
            # Another score computed beside it would be fused with it, and round it otherwise.
            return score(llama.logits(hidden), targets)[0]

        slots = jnp.broadcast_to(self._slots[:, :1], hidden.shape[:2])
        size = self.config.block_tokens
        return map_blocks(size, slots, block, jax.lax.stop_gradient(hidden), targets)

    def _first_layer_model(self) -> Any:
        return self._model(jax.tree.map(lambda stack: stack[0], self.layers))


def stack_layers(params: DecodeParams) -> DecodeParams:
    """Return parameters for decoding with their layers stacked, so that a loop can run them."""
    by_index = params.weights["layers"]  # "10" may come before "2"
    layers = [by_index[str(index)] for index in range(len(by_index))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return DecodeParams({**params.weights, "layers": stacked})
