"""The layout of parameters for decoding: a layer each, matrices outputs first."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.parameters import Params, joined_groups, parameter_table

Quantization = Literal["int8"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Parameters in the layout for decoding: each layer by itself, its matrices outputs first, in floats or int8.

    Norms are arrays, matrices are ``jllama.functional.DecodeMatrix``. On one device those that the parameter table says
    so of are joined to one, outputs behind outputs, which few tokens are multiplied by faster than by several.
    """

    weights: dict[
        str, Any
    ]  # embed, final_norm, lm_head (unless tied), and layers: a dictionary by "0", "1", ...

    dtype = property(
        lambda self: self.weights["final_norm"].dtype, doc="The dtype of the activations."
    )
    quantized = property(
        lambda self: self.weights["embed"].scale is not None, doc="Whether the matrices are int8."
    )


def decode_layout(
    params: Params,
    config: LlamaConfig,
    quantize: Quantization | None = None,
    joins: bool | None = None,
) -> DecodeParams:
    """Parameters of the training layout in that for decoding; with ``quantize`` as integers, one scale an output.

    ``joins`` says whether to join matrices; None: where they are on one device.
    """
    table = parameter_table(config)

    def laid_out(path: str, leaf: Array) -> Any:
        axes = [axis for axis in table[path].axes if axis != "layers"]
        inputs = tuple(axes.index(axis) for axis in table[path].inputs)
        return _decode_matrix(leaf, inputs, quantize) if inputs else leaf

    if joins is None:
        leaf = jax.tree.leaves(params)[0]
        joins = isinstance(leaf, Tracer) or len(leaf.devices()) == 1
    weights = {name: laid_out(name, leaf) for name, leaf in params.items() if name != "layers"}
    weights["layers"] = {}
    for index in range(config.num_layers):
        layer = {name: stack[index] for name, stack in params["layers"].items()}
        joined = {}
        for name, parts in joined_groups(config).items() if joins else ():
            matrices = [layer.pop(part) for part in parts]
            flat = jnp.concatenate([matrix.reshape(len(matrix), -1) for matrix in matrices], axis=1)
            joined[name] = _decode_matrix(flat, (0,), quantize)
        layer = {name: laid_out(f"layers/{name}", leaf) for name, leaf in layer.items()}
        weights["layers"][str(index)] = layer | joined
    return DecodeParams(weights)


_decode_matrix = jax.jit(F.decode_matrix, static_argnums=(1, 2))
