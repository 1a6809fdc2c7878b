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
from jllama.errors import UsageError
from jllama.model import AttentionInputs, Layer, Llama, attention_inputs, build_model, check_length
from jllama.parameters import Params

PARTS = ("attention", "attention_weights", "feed_forward")


def check_names(config: LlamaConfig, names: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for a name that ``activations`` does not have."""
    known = ["embedding", "final_norm"]
    for index in range(config.num_layers):
        known += [f"layers/{index}", *(f"layers/{index}/{part}" for part in PARTS)]
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
    inputs = attention_inputs(config, jnp.arange(length)[None], mask, length)
    x = llama.embedding(tokens)
    values = {"embedding": x}
    for index, layer in enumerate(_layers(llama)):
        name = f"layers/{index}"
        for part, value in zip(PARTS, _parts(layer, x, inputs[index]), strict=True):
            values[f"{name}/{part}"] = value
        x, _ = layer(x, inputs[index])
        values[name] = x
    values["final_norm"] = F.rms_norm(x, llama.final_norm[...], config.norm_eps)
    return {name: values[name] for name in names}


def _parts(layer: Layer, x: Array, inputs: AttentionInputs) -> tuple[Array, Array, Array]:
    """Compute the ``PARTS`` of a layer whose input is ``x``."""
    query, key, _ = layer.heads(layer.normalize(x, "attn_norm"), inputs)
    weights = F.attention_weights(query, key, inputs.mask.dense(x.shape[1], x.shape[1]))
    mixed, _ = layer.attention_update(x, inputs)
    return mixed, weights, layer.feed_forward_update(x + mixed)


def _layers(llama: Llama) -> Iterator[Layer]:
    """Yield each layer, also of stacked ones."""
    for index in range(llama.config.num_layers):
        if isinstance(llama.layers, Layer):
            graph, stacked = nnx.split(llama.layers)
            yield nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], stacked))  # noqa: B023
        else:
            yield llama.layers[str(index)]
