"""A model's weights in eight bits, for decoding."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jllama.checkpoints.formats import Model
from jllama.config import LlamaConfig
from jllama.functional import quantize_int8
from jllama.parameters import Params, parameter_table


def for_decoding(model: Model, quantize_to: Literal["int8"] | None = None) -> Model:
    """The same model with unstacked layers, and in eight bits if asked; the stacked ones can go with the old one."""
    params = model.unstacked_params
    return dataclasses.replace(model, params=quantize(params, model.config) if quantize_to else params)


def quantize(params: Params, config: LlamaConfig) -> Params:
    """The same parameters with every matrix as an ``Int8Matrix``, one scale an output channel; norms stay as they are.

    Of the embedding each row is a channel. ``params`` have unstacked layers.
    """
    table = parameter_table(config)

    def round_one(path: str, leaf: jax.Array) -> object:
        row = table[path]
        if not row.is_matrix:
            return leaf
        axes = [axis for axis in row.axes if axis != "layers"]
        return _quantize(leaf, inputs=tuple(axes.index(axis) for axis in row.inputs))

    layers = {
        number: {name: round_one(f"layers/{name}", leaf) for name, leaf in layer.items()}
        for number, layer in params["layers"].items()
    }
    return {name: round_one(name, leaf) for name, leaf in params.items() if name != "layers"} | {"layers": layers}


_quantize = jax.jit(quantize_int8, static_argnames="inputs")
