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
from jllama.core.model import (
    AttentionInputs,
    KVCache,
    Layer,
    Llama,
    attention_inputs,
    build_layer,
    check_length,
    weights_of_layer,
)
from jllama.core.parameters import Params
from jllama.models.build import build_model
from jllama.models.decode_params import DecodeParams

PARTS = ("attention", "attention_weights", "feed_forward")


def check_names(config: LlamaConfig, names: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for a name that ``activations`` does not have."""
    known = ["embedding", "final_norm"]
    for index, kind in enumerate(config.layer_kinds):
        parts = (*PARTS, "experts") if kind.feed_forward == "experts" else PARTS
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
    positions = jnp.arange(length)[None]
    inputs = attention_inputs(
        config, positions, mask, length, len(tokens), functions=llama.functions
    )
    x = llama.embedding(tokens)
    values = {"embedding": x}
    for index, layer in enumerate(_layers(llama)):
        name = f"layers/{index}"
        x, parts, _ = _run(layer, x, inputs[index])
        values |= {f"{name}/{part}": value for part, value in parts.items()} | {name: x}
    values["final_norm"] = F.rms_norm(x, llama.final_norm[...], config.norm_eps)
    missing = [name for name in names if name not in values]
    if missing:
        raise UsageError(f"the block {config.block} does not say its {missing[0]}: see Layer")
    return {name: values[name] for name in names}


@functools.partial(jax.jit, static_argnames="config")
def decoded_experts(
    config: LlamaConfig, params: DecodeParams, tokens: Int[Array, "batch seq"]
) -> Int[Array, "layers batch seq chosen"]:
    """Return the experts that each layer with a router chooses when tokens are decoded one by one.

    A sampler has these. The order of a token's experts is as in ``LanguageModel.capture``.
    """
    num_rows, length = tokens.shape

    def decode(state: Any, column: Array) -> tuple[Any, Array]:
        position, caches = state
        llama = build_model(config, params)
        positions = jnp.broadcast_to(position, (num_rows, 1))
        inputs = attention_inputs(
            config,
            positions,
            F.Mask(offset=positions[:, 0]),
            functions=llama.functions._replace(attention=llama.functions.cached),
            slots=positions,
            batch=num_rows,
            num_keys=length,
        )
        x = llama.embedding(column[:, None])
        written = []
        chosen = []
        for layer, of_layer, cached in zip(_layers(llama), inputs, caches, strict=True):
            x, parts, cached = _run(layer, x, of_layer, cached)
            written.append(cached)
            if "experts" in parts:
                chosen.append(parts["experts"][:, 0])
        return (position + 1, written), jnp.stack(chosen)

    cache = KVCache.zeros(config, num_rows, length, params.weights["final_norm"].dtype)
    start = (jnp.int32(0), [*zip(cache.keys, cache.values, strict=True)])
    _, chosen = jax.lax.scan(decode, start, tokens.T)
    return jnp.moveaxis(chosen, 0, 2)


def _run(
    layer: Layer, x: Array, inputs: AttentionInputs, cached: Any = None
) -> tuple[Array, dict[str, Array], Any]:
    """Return a layer's output, parts by name as its methods return them, and its longer cache."""
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
    output, cached = layer(x, inputs, cached)
    return output, parts, cached


def _layers(llama: Llama) -> Iterator[Layer]:
    """Yield each layer, also of stacked ones."""
    for index in range(llama.config.num_layers):
        if isinstance(llama.layers, Layer):
            stacks = nnx.to_pure_dict(nnx.state(llama.layers))
            weights = weights_of_layer(stacks, llama.config, index)
            yield build_layer(llama.config, weights)
        else:
            yield llama.layers[str(index)]
