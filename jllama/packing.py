"""A model's parameters in the form that decoding takes."""

from __future__ import annotations

import functools
from typing import Literal

import jax

from jllama.config import LlamaConfig
from jllama.functional import pack, pack_int8
from jllama.parameters import Parameter, Params, parameter_table

Quantized = Literal["int8"]


def pack_params(params: Params, config: LlamaConfig, quantize: Quantized | None = None) -> Params:
    """Stacked parameters with one dictionary a layer, and every matrix a ``PackedMatrix``; norms stay as they are.

    With ``quantize`` matrices become eight-bit integers, one scale an output channel; of the embedding each row is one.
    """
    table = parameter_table(config)
    layers: Params = {str(number): {} for number in range(config.num_layers)}
    for name, stack in params["layers"].items():
        inputs = _inputs(f"layers/{name}", table)
        for number in range(config.num_layers):
            layers[str(number)][name] = _pack_one(stack[number], inputs, quantize)
    others = {
        name: _pack_one(leaf, _inputs(name, table), quantize) for name, leaf in params.items() if name != "layers"
    }
    return others | {"layers": layers}


def _inputs(path: str, table: dict[str, Parameter]) -> tuple[int, ...]:
    """Which axes of one layer's share a product sums over; none for a norm."""
    axes = [axis for axis in table[path].axes if axis != "layers"]
    return tuple(axes.index(axis) for axis in table[path].inputs)


@functools.partial(jax.jit, static_argnames=("inputs", "quantize"))
def _pack_one(leaf: jax.Array, inputs: tuple[int, ...], quantize: Quantized | None) -> object:
    if not inputs:
        return leaf
    return pack_int8(leaf, inputs) if quantize else pack(leaf, inputs)
