"""Activations and attention weights of a model, by name."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jllama import functional as F
from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.model import AttentionInputs, Layer, Llama, attention_inputs, check_length
from jllama.core.parameters import Params
from jllama.models.build import build_model
from jllama.models.decode_params import DecodeParams

PARTS = ("attention", "attention_weights", "feed_forward")


def check_names(config: LlamaConfig, names: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for a name that ``activations`` does not have."""
    known = ["embedding", "final_norm"]
    for index in range(config.num_layers):
        parts = (*PARTS, "experts") if config.num_experts else PARTS
        known += [f"layers/{index}", *(f"layers/{index}/{part}" for part in parts)]
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no activation {name}; there are {', '.join(known[:6])} and so on"
            )


@functools.partial(jax.jit, static_argnames=("config", "names"))
def activations(
    config: LlamaConfig,
    params: Params | DecodeParams,
    tokens: Int[Array, "batch seq"],
    names: tuple[str, ...],
    segments: Int[Array, "batch seq"] | None = None,
) -> dict[str, Array]:
    """Compute the activations of these names for whole sequences, see ``LanguageModel.capture``.

    Others are not computed, as the compiled program does not return them.
    """
    llama = build_model(config, params)
    length = tokens.shape[1]
    check_length(config, length)
    mask = F.Mask(query_segments=segments, key_segments=segments)
    functions = llama.functions
    options = {"attention": functions.attention, "functions": functions}
    inputs = attention_inputs(config, jnp.arange(length)[None], mask, length, **options)
    x = llama.embedding(tokens)
    values = {"embedding": x}
    for index, layer in enumerate(_layers(llama)):
        name = f"layers/{index}"
        x, parts = _run(layer, x, inputs[index])
        values |= {f"{name}/{part}": value for part, value in parts.items()} | {name: x}
    values["final_norm"] = F.rms_norm(x, llama.final_norm[...], config.norm_eps)
    missing = [name for name in names if name not in values]
    if missing:
        raise UsageError(f"the block {config.block} does not say its {missing[0]}: see Layer")
    return {name: values[name] for name in names}


def _run(layer: Layer, x: Array, inputs: AttentionInputs) -> tuple[Array, dict[str, Array]]:
    """Return a layer's output, and parts by name, from what its methods return on the way."""
    parts = {}
    heads = layer.heads
    residual = layer.residual

    def seen_heads(x: Array, inputs: AttentionInputs) -> tuple[Array, ...]:
        query, key, value = heads(x, inputs)
        mask = inputs.mask.dense(query.shape[2], key.shape[2])
        parts["attention_weights"] = F.attention_weights(query, key, mask)
        return query, key, value

    def seen_residual(update: Array) -> Array:
        name = "feed_forward" if "attention" in parts else "attention"
        parts[name] = residual(update)
        return parts[name]

    def seen_route(*arguments: Any) -> tuple[Array, Array]:
        weights, chosen = functions.route(*arguments)
        parts["experts"] = chosen.reshape(*x.shape[:2], -1)
        return weights, chosen

    functions = inputs.functions
    inputs = dataclasses.replace(inputs, functions=functions._replace(route=seen_route))
    layer.heads = seen_heads
    layer.residual = seen_residual
    output, _ = layer(x, inputs)
    return output, parts


def _layers(llama: Llama) -> Iterator[Layer]:
    """Yield each layer, also of stacked ones."""
    for index in range(llama.config.num_layers):
        if isinstance(llama.layers, Layer):
            graph, stacked = nnx.split(llama.layers)
            yield nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], stacked))  # noqa: B023
        else:
            yield llama.layers[str(index)]
