"""The layout of parameters for decoding: one dictionary a layer, matrices with outputs first."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from jllama import functional as F
from jllama.core.config import LlamaConfig
from jllama.core.model import weights_of_layer
from jllama.core.parameters import PARAMETERS, Params, joined_groups

Quantization = Literal["int8"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Parameters in the layout for decoding, in floats or int8.

    Norms are arrays, matrices are ``jllama.functional.DecodeMatrix``. On one device, matrices with
    the same ``joined`` in the table of parameters are one, with their outputs concatenated: one
    product with few tokens is faster than several.

    Examples:
        >>> model = jllama.load("smollm2/", layout="training")
        >>> params = jllama.decode_layout(model.params, model.config)
        >>> isinstance(params, jllama.DecodeParams)
        True
    """

    weights: dict[str, Any]
    """embed, final_norm, lm_head (unless tied), and layers: a dictionary by "0", "1", ..."""

    @property
    def dtype(self) -> Any:
        """The dtype of the activations."""
        return self.weights["final_norm"].dtype

    @property
    def quantized(self) -> bool:
        """Whether the matrices are int8."""
        return self.weights["embed"].scale is not None


def decode_layout(
    params: Params,
    config: LlamaConfig,
    quantize: Quantization | None = None,
    joins: bool | None = None,
) -> DecodeParams:
    """Convert parameters from the layout for training to that for decoding.

    Args:
        params: parameters with all layers stacked.
        config: the architecture.
        quantize: ``int8`` makes integers, with one scale for each output.
        joins: whether to join matrices; None: if they are on one device.

    Examples:
        >>> model = jllama.load("smollm2/", layout="training")
        >>> params = jllama.decode_layout(model.params, model.config)
    """
    if joins is None:
        leaf = jax.tree.leaves(params)[0]
        joins = isinstance(leaf, Tracer) or len(leaf.devices()) == 1
    groups = joined_groups(config) if joins else {}
    weights = {
        name: _decode_leaf(name, leaf, quantize, joins)
        for name, leaf in params.items()
        if name != "layers"
    }
    weights["layers"] = {}
    for index in range(config.num_layers):
        layer = weights_of_layer(params["layers"], config, index)
        joined = {}
        for name, parts in groups.items():
            if parts[0] not in layer:
                continue
            matrices = [layer.pop(part) for part in parts]
            flat = jnp.concatenate([matrix.reshape(len(matrix), -1) for matrix in matrices], axis=1)
            joined[name] = _with_kernel(_decode_matrix(flat, (0,), quantize), joins)
        for name, leaf in layer.items():
            layer[name] = _decode_leaf(f"layers/{name}", leaf, quantize, joins)
        weights["layers"][str(index)] = layer | joined
    return DecodeParams(weights)


def _decode_leaf(path: str, leaf: Array, quantize: Quantization | None, is_one_device: bool) -> Any:
    """Convert one parameter, or one layer of it, if it is a matrix."""
    row = PARAMETERS[path]
    axes = [axis for axis in row.axes if axis != "layers"]
    inputs = tuple(axes.index(axis) for axis in row.inputs)
    if not inputs:
        return leaf
    matrix = _decode_matrix(leaf, inputs, quantize if row.rounds else None)
    return _with_kernel(matrix, is_one_device)


def _with_kernel(matrix: F.DecodeMatrix, is_one_device: bool) -> F.DecodeMatrix:
    """Choose the kernel of an int8 matrix on one device."""
    if matrix.scale is None or not is_one_device:
        return matrix
    kernel = F.choose_kernel("int8", matrix.values.shape[1])
    return dataclasses.replace(matrix, kernel=kernel)


_decode_matrix = jax.jit(F.decode_matrix, static_argnums=(1, 2))
