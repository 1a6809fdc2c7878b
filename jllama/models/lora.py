"""Low-rank adapters: the adapted matrices, their first values, and how they join the base weights.

An adapter is a nested dictionary like ``params``: ``{"layers": {"wq": {"a": [layers, inputs, rank],
"b": [layers, rank, outputs]}}}``, and with DoRA ``"magnitude": [layers, outputs]``. Inputs and
outputs of several axes are flattened. Those of experts have an axis more, after ``layers``.
"""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import (
    EXPERT_MATRICES,
    PARAMETERS,
    Parameter,
    Params,
    map_by_path,
    matrix_shape,
    parameter_table,
    shape_of,
)
from jllama.kernels.adapted import AdaptedExperts, AdaptedMatrix, output_lengths
from jllama.kernels.linear import DecodeMatrix, decode_matrix
from jllama.models.config import LoraConfig


def adapter_shapes(config: LlamaConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return ``(inputs, outputs)`` of each adapted matrix of a layer, or of an expert, by name.

    Raises:
        UsageError: a target is not a matrix of a layer, the rank exceeds a matrix's width, or
            experts are to have DoRA.
    """
    rows = adaptable_rows(config)
    shapes = {}
    for name in lora.targets:
        if name not in rows:
            raise UsageError(
                f"lora.targets has {name}; the matrices of a layer are {', '.join(rows)}"
            )
        outputs, inputs = matrix_shape(rows[name], config)
        if name in EXPERT_MATRICES:
            outputs //= config.num_experts
            if lora.dora:
                raise UsageError(
                    f"lora.targets has {name}, and experts have no DoRA: leave lora.dora out, or "
                    "merge such an adapter"
                )
        shapes[name] = inputs, outputs
    max_rank = min(map(min, shapes.values()))
    if lora.rank > max_rank:
        raise UsageError(
            f"lora.rank is {lora.rank}; it must be at most {max_rank}, "
            "the smallest width of an adapted matrix"
        )
    return shapes


def adaptable_rows(config: LlamaConfig) -> dict[str, Parameter]:
    """Return the rows of the matrices of a layer that may have adapters, by name."""
    return {
        path.removeprefix("layers/"): row
        for path, row in parameter_table(config).items()
        if path.startswith("layers/") and _is_adaptable(row)
    }


def _is_adaptable(row: Parameter) -> bool:
    """Return whether a parameter is a matrix, and not that of a router."""
    return bool(row.inputs) and row.rounds


def initial_adapter(
    key: Key[Array, ""], base: Params, config: LlamaConfig, lora: LoraConfig
) -> Params:
    """Return the adapter before training, in float32; it changes nothing, since ``b`` is zero.

    ``a`` is uniform within ``1 / sqrt(inputs)``, as in PEFT. A magnitude is the length that the
    output has in ``base``, whose weights are as ``freeze`` returns them.
    """
    shapes = adapter_shapes(config, lora)
    keys = jax.random.split(key, len(shapes))
    layers = {}
    for matrix_key, (name, (inputs, outputs)) in zip(keys, shapes.items(), strict=True):
        bound = 1 / math.sqrt(inputs)
        num_axes = 2 if name in EXPERT_MATRICES else 1
        lead = shape_of(PARAMETERS[f"layers/{name}"], config)[:num_axes]
        shape = (*lead, inputs, lora.rank)
        layers[name] = {
            "a": jax.random.uniform(matrix_key, shape, jnp.float32, -bound, bound),
            "b": jnp.zeros((*lead, lora.rank, outputs), jnp.float32),
        }
        if lora.dora:
            layers[name]["magnitude"] = jax.lax.map(
                lambda part, shape=(inputs, outputs): output_lengths(
                    dequantize(part, shape, jnp.float32).reshape(shape)
                ),
                base["layers"][name],
            )
    return {"layers": layers}


def freeze(params: Params, config: LlamaConfig, lora: LoraConfig, dtype: Any) -> Params:
    """Return the base weights as ``lora.base`` stores them; see ``convert_weight``."""
    return map_by_path(lambda path, part: convert_weight(path, part, config, lora, dtype), params)


def convert_weight(path: str, part: Any, config: LlamaConfig, lora: LoraConfig, dtype: Any) -> Any:
    """Return one base weight as ``lora.base`` stores it; a weight stored so already is unchanged.

    ``int8`` and ``nf4`` apply to the matrices that adapters may have, but for those of experts,
    ``bfloat16`` to all weights; the others are in ``dtype``.
    """
    row = parameter_table(config)[path]
    is_matrix = path.startswith("layers/") and _is_adaptable(row) and "experts" not in row.axes
    if not isinstance(part, Array):
        return part
    if lora.base in ("int8", "nf4") and is_matrix:
        return _quantize(part, lora.base, len(row.inputs))
    return part.astype(jnp.bfloat16 if lora.base == "bfloat16" else dtype)


@functools.partial(jax.jit, static_argnames=("base", "num_inputs"))
def _quantize(stack: Array, base: str, num_inputs: int) -> Any:
    """Quantize the matrices of all layers one after another, so that only one is in floats."""

    def quantize(matrix: Array) -> Any:
        if base == "int8":
            return decode_matrix(matrix, range(num_inputs), "int8")
        num_rows = math.prod(matrix.shape[:num_inputs])
        flat = matrix.reshape(num_rows, -1).astype(jnp.float32)
        tile = math.gcd(64, num_rows)
        return import_qwix().quantize(flat, "nf4", channelwise_axes=(1,), tiled_axes={0: tile})

    return jax.lax.map(quantize, stack)


def dequantize(part: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a base weight in floats; ``shape`` is that of the matrix."""
    if isinstance(part, Array):
        return part.astype(dtype)
    if isinstance(part, DecodeMatrix):
        return part.dense(dtype)
    return import_qwix().dequantize(part).astype(dtype).reshape(shape)


def adapt(base: Params, adapter: Params, lora: LoraConfig) -> Params:
    """Return parameters whose adapted matrices are ``AdaptedMatrix``, layers stacked."""
    adapted = {
        name: _adapted(name, base["layers"][name], part, lora)
        for name, part in adapter["layers"].items()
    }
    return {**base, "layers": {**base["layers"], **adapted}}


def _adapted(name: str, weight: Any, part: Params, lora: LoraConfig) -> AdaptedMatrix:
    kind = AdaptedExperts if name in EXPERT_MATRICES else AdaptedMatrix
    return kind(weight, part["a"], part["b"], part.get("magnitude"), lora.scale)


@functools.partial(jax.jit, static_argnums=(2, 3))
def merge(base: Params, adapter: Params, config: LlamaConfig, lora: LoraConfig) -> Params:
    """Return float32 parameters that give the same products without an adapter."""
    merged: Params = {
        name: leaf.astype(jnp.float32) for name, leaf in base.items() if name != "layers"
    }
    merged["layers"] = {}
    for name, stack in base["layers"].items():
        shape = shape_of(PARAMETERS[f"layers/{name}"], config)[1:]
        merge_layers = jax.vmap(functools.partial(_merged, lora, name, shape))
        merged["layers"][name] = merge_layers(stack, adapter["layers"].get(name))
    return merged


def _merged(lora: LoraConfig, name: str, shape: Any, weight: Any, part: Params | None) -> Array:
    """Return one layer of a matrix in float32, with its adapter if it has one."""
    matrix = dequantize(weight, shape, jnp.float32)
    return _adapted(name, matrix, part, lora).merge() if part else matrix


def import_qwix() -> Any:
    """Import the package that quantizes to NormalFloat (arXiv:2305.14314).

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("qwix")
    except ImportError:
        raise UsageError(
            "lora.base is nf4, which needs the package qwix: pip install 'jllama[nf4]'"
        ) from None
