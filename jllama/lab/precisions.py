"""What rounding does to the logits: weights and activations as another program would store them."""

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jllama import functional as F
from jllama.core.config import LlamaConfig
from jllama.core.parameters import Params, parameter_table
from jllama.formats.tensors import as_matrix
from jllama.kernels.int8 import int8_rows
from jllama.lab.mutations import Mistake, Model, model_with

_BLOCK = 32  # numbers that share a scale in GGML's formats
_GGML = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def round_blocks(x: Float[Array, "*lead inputs"]) -> Float[Array, "*lead inputs"]:
    """Round to GGML's ``Q8_0``: blocks of 32 integers, times ``max(abs(block)) / 127``."""
    size = _BLOCK if x.shape[-1] % _BLOCK == 0 else x.shape[-1]
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    scale = scale.astype(jnp.float16).astype(x.dtype)
    integers = jnp.round(blocks / jnp.where(scale > 0, scale, 1))
    return (integers * scale).reshape(x.shape)


def cast(dtype: Any, config: LlamaConfig, params: Params) -> Model:
    """Return a model with all parameters in another dtype; activations then have it, too."""
    return config, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def change_matrices(
    change: Callable[[np.ndarray], Any],
    config: LlamaConfig,
    params: Params,
    keeps_router: bool = False,
) -> Model:
    """Return a model with ``change`` of every matrix, as ``[outputs, inputs]`` in float32.

    The router is one of them, or stays as it is, which is usual if the others are quantized.
    """
    changed: Params = params | {"layers": dict(params["layers"])}
    for path, row in parameter_table(config).items():
        if row.role != "matrix" or (keeps_router and not row.rounds):
            continue
        in_layers, _, name = path.rpartition("/")
        parent = changed["layers"] if in_layers else changed
        array = np.array(parent[name], np.float32)
        layers = array if in_layers else array[None]
        for layer in layers:
            matrix = as_matrix(row, layer)
            matrix[...] = change(np.ascontiguousarray(matrix))
        parent[name] = array
    return config, changed


def round_ggml(name: str, rows: Float[np.ndarray, "outputs inputs"]) -> np.ndarray:
    """Round a matrix to one of GGML's formats; one whose rows are no blocks stays."""
    if rows.shape[1] % _BLOCK:
        return rows
    kind = gguf.GGMLQuantizationType[name]
    return gguf.dequantize(gguf.quantize(rows, kind), kind)


def round_float(dtype: Any, rows: np.ndarray) -> np.ndarray:
    """Round to a floating-point dtype, and return float32."""
    return rows.astype(dtype).astype(np.float32)


def _round_int8(rows: Float[np.ndarray, "outputs inputs"]) -> np.ndarray:
    values, scale = int8_rows(rows, np)
    return values * scale[:, None]


WEIGHTS: Mapping[str, Callable[[LlamaConfig, Params], Model]] = {
    "bfloat16": partial(change_matrices, partial(round_float, jnp.bfloat16)),
    "float16": partial(change_matrices, partial(round_float, jnp.float16)),
    "int8": partial(change_matrices, _round_int8, keeps_router=True),
} | {name: partial(change_matrices, partial(round_ggml, name), keeps_router=True) for name in _GGML}
"""How matrices are rounded, by the name of a precision."""


def _float16_attention(
    query: Array, key: Array, value: Array, mask: F.Mask, implementation: str
) -> Array:
    """Attend over keys and values that are stored in float16."""
    query, key, value = (
        array.astype(jnp.float16).astype(jnp.float32) for array in (query, key, value)
    )
    return F.attention(query, key, value, mask, implementation)


def _rounding_model() -> types.ModuleType:
    """Return a model whose products all have inputs in blocks of 8-bit integers."""
    model = model_with(
        attention=lambda *inputs: round_blocks(_float16_attention(*inputs)),
        silu_gate=lambda gate, up: round_blocks(F.silu_gate(gate, up)),
        project=lambda x, head: F.project(round_blocks(x), head),
    )
    products = model.Layer.products
    experts = model.Layer.experts
    model.Layer.products = lambda layer, x, *names: products(layer, round_blocks(x), *names)
    model.Layer.experts = lambda layer, x, inputs: experts(layer, round_blocks(x), inputs)
    return model


_INT8_PRODUCTS = _rounding_model()
PRECISIONS: dict[str, Mistake] = {
    "float32": Mistake("float32"),
    "float16-cache": Mistake(
        "float32 with keys and values in float16",
        model=model_with(attention=_float16_attention),
    ),
    "float16": Mistake("float16", partial(cast, jnp.float16)),
    "bfloat16": Mistake("bfloat16", partial(cast, jnp.bfloat16)),
    "int8-products": Mistake(
        "products of 8-bit activations, with keys and values in float16, as llama.cpp computes "
        "with quantized weights",
        model=_INT8_PRODUCTS,
    ),
    "int8": Mistake("weights in 8 bits by row", WEIGHTS["int8"]),
} | {
    name: Mistake(
        f"weights in {name}, in products of 8-bit activations",
        WEIGHTS[name],
        _INT8_PRODUCTS,
    )
    for name in _GGML
}
"""Mistakes that are none, by the name that ``--precision`` takes, the finest first."""
WITHOUT_QUANTIZATION = tuple(PRECISIONS)[:5]
"""Those that leave the weights of the checkpoint as they are."""
