"""Activations and attention weights of a model, by name."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.errors import unknown_name
from jllama.model import AttentionInputs, Layer, Llama, attention_inputs, build_model, check_length
from jllama.parameters import Params

PARTS = ("attention", "attention_weights", "feed_forward")


def check_names(config: LlamaConfig, names: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for a name that ``activations`` does not have."""
    layers = [f"layers/{number}" for number in range(config.num_layers)]
    known = [
        "embedding",
        "final_norm",
        *layers,
        *(f"{layer}/{part}" for layer in layers for part in PARTS),
    ]
    for name in names:
        if name not in known:
            raise unknown_name("activation", name, known)


@functools.partial(jax.jit, static_argnames=("config", "names"))
def activations(
    config: LlamaConfig,
    params: Params | DecodeParams,
    tokens: Int[Array, "batch seq"],
    names: tuple[str, ...],
    segments: Int[Array, "batch seq"] | None = None,
) -> dict[str, Array]:
    """These activations of whole sequences, see ``LanguageModel.capture``; what is not asked for is not computed."""
    llama = build_model(config, params)
    length = tokens.shape[1]
    check_length(config, length)
    mask = F.Mask(query_segments=segments, key_segments=segments)
    attend = attention_inputs(config, jnp.arange(length)[None], mask, length)
    x = llama.embedding(tokens)
    found = {"embedding": x}
    for number, layer in enumerate(_layers(llama)):
        name = f"layers/{number}"
        for part, value in zip(PARTS, _parts(layer, x, attend), strict=True):
            found[f"{name}/{part}"] = value
        x, _ = layer(x, attend)
        found[name] = x
    found["final_norm"] = F.rms_norm(x, llama.final_norm[...], config.norm_eps)
    return {name: found[name] for name in names}


def _parts(layer: Layer, x: Array, attend: AttentionInputs) -> tuple[Array, Array, Array]:
    """What ``PARTS`` names of a layer with the input ``x``."""
    normed = F.rms_norm(x, layer.attn_norm[...], layer.norm_eps)
    query, key, _ = layer.heads(normed)
    query, key = (F.apply_rope(each, attend.cos, attend.sin) for each in (query, key))
    weights = F.attention_weights(query, key, attend.mask.dense(x.shape[1], x.shape[1]))
    mixed, _ = layer.attention(normed, attend)
    return (
        mixed,
        weights,
        layer.feed_forward(F.rms_norm(x + mixed, layer.mlp_norm[...], layer.norm_eps)),
    )


def _layers(llama: Llama) -> Iterator[Layer]:
    """Each layer, also of those that are stacked."""
    for number in range(llama.config.num_layers):
        if isinstance(llama.layers, Layer):
            graph, stacked = nnx.split(llama.layers)
            yield nnx.merge(graph, jax.tree.map(lambda leaf: leaf[number], stacked))  # noqa: B023
        else:
            yield llama.layers[str(number)]
