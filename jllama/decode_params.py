"""The layout of parameters for decoding: a layer each, matrices outputs first."""

import dataclasses
from typing import Any, Literal

import jax
from jaxtyping import Array

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.parameters import Params, parameter_table

Quantization = Literal["int8"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Parameters in the layout for decoding: each layer by itself, its matrices outputs first, in floats or int8.

    Norms are arrays, matrices are ``jllama.functional.DecodeMatrix``.
    """

    weights: dict[str, Any]  # embed, final_norm, lm_head (unless tied), and layers: a dictionary by "0", "1", ...

    dtype = property(lambda self: self.weights["final_norm"].dtype, doc="The dtype of the activations.")
    quantized = property(lambda self: self.weights["embed"].scale is not None, doc="Whether the matrices are int8.")


def decode_layout(params: Params, config: LlamaConfig, quantize: Quantization | None = None) -> DecodeParams:
    """Parameters of the training layout in that for decoding; with ``quantize`` as integers, one scale an output."""
    table = parameter_table(config)

    def laid_out(path: str, leaf: Array) -> Any:
        axes = [axis for axis in table[path].axes if axis != "layers"]
        inputs = tuple(axes.index(axis) for axis in table[path].inputs)
        return _decode_matrix(leaf, inputs, quantize) if inputs else leaf

    weights = {name: laid_out(name, leaf) for name, leaf in params.items() if name != "layers"}
    weights["layers"] = {
        str(i): {name: laid_out(f"layers/{name}", stack[i]) for name, stack in params["layers"].items()}
        for i in range(config.num_layers)
    }
    return DecodeParams(weights)


_decode_matrix = jax.jit(F.decode_matrix, static_argnums=(1, 2))
