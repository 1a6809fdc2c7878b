"""Low-rank adapters: which matrices have one, their first values, and how they join the weights that they adapt.

Adapters are a nested dictionary, as parameters are: ``{"layers": {"wq": {"a": [layers, inputs, rank], "b": [layers,
rank, outputs]}}}``, and with DoRA ``"magnitude": [layers, outputs]``; inputs and outputs of several axes are joined.
"""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jllama.config import LlamaConfig, LoraConfig
from jllama.errors import UsageError
from jllama.functional.linear import AdaptedMatrix, DecodeMatrix, decode_matrix, output_lengths
from jllama.parameters import Params, map_by_path, matrix_shape, parameter_table, shape_of


def adapter_shapes(config: LlamaConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """``(inputs, outputs)`` of each adapted matrix of a layer; ``UsageError`` for targets or a rank that do not fit."""
    table = parameter_table(config).items()
    rows = {
        path.removeprefix("layers/"): row
        for path, row in table
        if path.startswith("layers/") and row.inputs
    }
    if wrong := [name for name in lora.targets if name not in rows]:
        raise UsageError(
            f"lora.targets has {wrong[0]}, and of a layer's matrices there are {', '.join(rows)}"
        )
    shapes = {name: matrix_shape(rows[name], config)[::-1] for name in lora.targets}
    if lora.rank > (most := min(map(min, shapes.values()))):
        raise UsageError(
            f"lora.rank is {lora.rank}; it must be at most {most}, the least width of an adapted matrix"
        )
    return shapes


def initial_adapter(
    key: Key[Array, ""], base: Params, config: LlamaConfig, lora: LoraConfig
) -> Params:
    """The adapter before training, float32: it changes nothing, since ``b`` is zero.

    ``a`` is uniform within ``1 / sqrt(inputs)``, as PEFT's; a magnitude is the length that each output has in ``base``,
    which is as ``frozen`` holds it.
    """
    layers, shapes = {}, adapter_shapes(config, lora).items()
    for draw, (name, (inputs, outputs)) in zip(
        jax.random.split(key, len(shapes)), shapes, strict=True
    ):
        bound, shape = 1 / math.sqrt(inputs), (config.num_layers, inputs, lora.rank)
        drawn = jax.random.uniform(draw, shape, jnp.float32, -bound, bound)
        layers[name] = {
            "a": drawn,
            "b": jnp.zeros((config.num_layers, lora.rank, outputs), jnp.float32),
        }
        if lora.dora:
            layers[name]["magnitude"] = jax.lax.map(
                lambda part, shape=(inputs, outputs): output_lengths(
                    dense(part, shape, jnp.float32).reshape(shape)
                ),
                base["layers"][name],
            )
    return {"layers": layers}


def frozen(params: Params, config: LlamaConfig, lora: LoraConfig, dtype: Any) -> Params:
    """The weights to adapt, each as ``held`` has it."""
    return map_by_path(lambda path, part: held(path, part, config, lora, dtype), params)


def held(path: str, part: Any, config: LlamaConfig, lora: LoraConfig, dtype: Any) -> Any:
    """One of the weights to adapt as ``lora.base`` holds it, where ``auto`` is ``dtype``; what is so held stays so.

    Layers' matrices alone are quantized.
    """
    inputs = parameter_table(config)[path].inputs if path.startswith("layers/") else ()
    if not isinstance(part, Array):
        return part
    if lora.base in ("int8", "nf4") and inputs:
        return _quantized(part, lora.base, len(inputs))
    return part.astype(jnp.bfloat16 if lora.base == "bfloat16" else dtype)


@functools.partial(jax.jit, static_argnames=("base", "num_inputs"))
def _quantized(stack: Array, base: str, num_inputs: int) -> Any:
    """Matrices of layers in the numbers of a base, one after the other, so that one at a time is there in floats."""

    def quantized(matrix: Array) -> Any:
        if base == "int8":
            return decode_matrix(matrix, range(num_inputs), "int8")
        joined = matrix.reshape(math.prod(matrix.shape[:num_inputs]), -1).astype(jnp.float32)
        return qwix().quantize(
            joined, "nf4", channelwise_axes=(1,), tiled_axes={0: math.gcd(64, len(joined))}
        )

    return jax.lax.map(quantized, stack)


def dense(part: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """A weight that ``frozen`` holds, in floats; ``shape`` is that of the matrix."""
    if isinstance(part, Array):
        return part.astype(dtype)
    return (
        part.dense(dtype)
        if isinstance(part, DecodeMatrix)
        else qwix().dequantize(part).astype(dtype).reshape(shape)
    )


def adapted(base: Params, adapter: Params, lora: LoraConfig) -> Params:
    """Parameters whose adapted matrices are ``AdaptedMatrix``, layers stacked."""
    matrices = {
        name: AdaptedMatrix(
            base["layers"][name], part["a"], part["b"], part.get("magnitude"), lora.scale
        )
        for name, part in adapter["layers"].items()
    }
    return {**base, "layers": {**base["layers"], **matrices}}


@functools.partial(jax.jit, static_argnums=(2, 3))
def merged(base: Params, adapter: Params, config: LlamaConfig, lora: LoraConfig) -> Params:
    """Parameters in float32 that give the same products without an adapter; ``base`` as ``frozen`` holds it."""
    table = parameter_table(config)
    shapes = {name: shape_of(table[f"layers/{name}"], config)[1:] for name in base["layers"]}

    def layer(weights: Params, parts: Params) -> Params:
        weights = {name: dense(part, shapes[name], jnp.float32) for name, part in weights.items()}
        whole = adapted({"layers": weights}, {"layers": parts}, lora)["layers"]
        return {name: part.merged() if name in parts else part for name, part in whole.items()}

    others = {name: leaf.astype(jnp.float32) for name, leaf in base.items() if name != "layers"}
    return {**others, "layers": jax.vmap(layer)(base["layers"], adapter["layers"])}


def qwix() -> Any:
    """The package that quantizes to NormalFloat (arXiv:2305.14314)."""
    try:
        return importlib.import_module("qwix")
    except ImportError:
        raise UsageError(
            "lora.base is nf4, which needs the package qwix: pip install 'jllama[nf4]'"
        ) from None
