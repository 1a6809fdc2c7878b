"""Deliberate mistakes, each of which has shipped somewhere: how far does the matrix see them?

A mutation turns the code under test into a copy with one thing wrong. It is used twice: for the matrix's own figures of
sensitivity, and by the tests, which plant it and look at which cells fail.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import jllama.model
from jllama import functional as F
from jllama.checkpoints.registry import Layout
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams, decode_layout
from jllama.model import KVCache
from jllama.parameters import Params
from jllama.rope_scaling import RopeScaling
from jllama.verify.checks import Check, random_params
from jllama.verify.conformance import model_error
from jllama.verify.implementation import Implementation, implementation_of, model_with
from jllama.verify.variants import VARIANTS, weights

Plant = Callable[[Implementation], Implementation]


class Mutation(NamedTuple):
    """One deliberate mistake, planted in an implementation; ``applies`` says whether it changes a model's logits.

    Nothing planted is compiled, so run it on small inputs.
    """

    name: str
    plant: Plant
    applies: Callable[[LlamaConfig], bool] = lambda _: True


def misreading(change: Callable[..., tuple[LlamaConfig, Params]]) -> Plant:
    """Plant a mistake in reading: ``change`` gets a model in the training layout and returns the wrong one."""

    def plant(implementation: Implementation) -> Implementation:
        def load(path: Path, rope_factor: float | None, layout: Layout) -> tuple[LlamaConfig, Params | DecodeParams]:
            config, params = change(*implementation.load(path, rope_factor, "training"))
            params = jax.tree.map(jnp.asarray, params)
            return config, decode_layout(params, config) if layout == "decode" else params

        return implementation._replace(load=load)

    return plant


def miscomputing(model: types.ModuleType) -> Plant:
    """Plant a wrong copy of the model."""
    return lambda implementation: implementation_of(model)._replace(load=implementation.load)


def _field(name: str, change: Callable[[Any], Any]) -> Plant:
    """Plant a reader that gets a field of the configuration wrong."""
    return misreading(lambda config, p: (dataclasses.replace(config, **{name: change(getattr(config, name))}), p))


def _layers(change: Callable[[LlamaConfig, Params], Params]) -> Plant:
    """Plant a reader that gets those matrices of the layers wrong that ``change`` returns."""
    return misreading(lambda config, p: (config, p | {"layers": p["layers"] | change(config, p["layers"])}))


def interleaved(matrix: Any) -> Array:
    """Put the channels of a half-split matrix in the order of Meta's files: ``i`` and ``i + head_dim / 2`` in pairs."""
    return jnp.stack(jnp.split(jnp.asarray(matrix), 2, axis=-1), axis=-1).reshape(matrix.shape)


def _keys_divide_as_queries(config: LlamaConfig) -> bool:
    rows = config.num_kv_heads * config.head_dim
    return config.num_kv_heads < config.num_heads and rows % (2 * config.num_heads) == 0


def _permuted_with_num_heads(config: LlamaConfig, layers: Params) -> Params:
    """Keys put in half-split order as if there were as many heads of them as of queries, where they divide so."""
    shape = (*layers["wk"].shape[:2], config.num_heads, -1, 2)
    keys = (
        interleaved(layers["wk"]).reshape(shape).swapaxes(-1, -2) if _keys_divide_as_queries(config) else layers["wk"]
    )
    return {"wk": keys.reshape(layers["wk"].shape)}


def _post_norm() -> types.ModuleType:
    """The Transformer of 2017: each branch's sum is normalized, not its input."""
    model = model_with()

    def call(layer: Any, x: Array, attend: Any, cached: Any = None) -> tuple:
        mixed, kept = layer.attention(x, attend, cached)
        x = F.rms_norm(x + mixed, layer.attn_norm[...], layer.norm_eps)
        fed = F.swiglu(x, layer.w_gate[...], layer.w_up[...], layer.w_down[...])
        return F.rms_norm(x + fed, layer.mlp_norm[...], layer.norm_eps), kept

    model.Layer.__call__ = call
    return model


def _remainder_attention(query: Array, key: Array, value: Array, mask: F.Mask, implementation: str) -> Array:
    """Query head ``n`` uses key-value head ``n % kv_heads``."""
    order = np.argsort(np.arange(query.shape[1]) % key.shape[1], kind="stable")
    return F.attention(query[:, order], key, value, mask, implementation)[:, np.argsort(order)]


def _mask_one_ahead(offset: Array | None = None, **segments: Any) -> F.Mask:
    """The mask of queries that stand one further on."""
    return F.Mask(jnp.ones(1, int) if offset is None else offset + 1, **segments)


def _bfloat16_tables(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    cos, sin = (table.astype(jnp.bfloat16) for table in F.rope_tables(positions, frequencies))
    return cos.astype(jnp.float32), sin.astype(jnp.float32)


def _cache_one_on(implementation: Implementation) -> Implementation:
    """Write to the cache, after the first tokens, one slot and one position too far on."""
    right = implementation_of(jllama.model)

    def extend(config: LlamaConfig, params: DecodeParams, tokens: Array, cache: KVCache, counts: Array) -> tuple:
        moved = cache._replace(lengths=cache.lengths + (cache.lengths > 0))
        return right.extend(config, params, tokens, moved, counts)

    return right._replace(load=implementation.load, extend=extend)


def _untied(config: LlamaConfig, params: Params) -> tuple[LlamaConfig, Params]:
    """Take a tied head for a separate one, which the file does not have."""
    separate = dataclasses.replace(config, tie_embeddings=False)
    return separate, {"lm_head": random_params(separate, 1)["lm_head"]} | params


def _eight_for_32(scaling: RopeScaling | None) -> RopeScaling | None:
    """Fix the scaling factor at Llama 3.1's."""
    return dataclasses.replace(scaling, factor=8.0) if scaling and scaling.factor == 32 else scaling


MUTATIONS = [
    Mutation("theta x2", _field("rope_theta", lambda theta: 2 * theta)),
    Mutation("no scaling", _field("rope_scaling", lambda _: None), lambda config: config.rope_scaling is not None),
    Mutation(
        "factor 8 for 32",
        _field("rope_scaling", _eight_for_32),
        lambda config: _eight_for_32(config.rope_scaling) != config.rope_scaling,
    ),
    Mutation("eps x10", _field("norm_eps", lambda eps: 10 * eps)),
    Mutation("post-norm", miscomputing(_post_norm())),
    Mutation(
        "heads n % kv",
        miscomputing(model_with(attention=_remainder_attention)),
        lambda config: 1 < config.num_kv_heads < config.num_heads,
    ),
    Mutation("q/k not permuted", _layers(lambda _, layers: {name: interleaved(layers[name]) for name in ("wq", "wk")})),
    Mutation("k permuted as q", _layers(_permuted_with_num_heads), _keys_divide_as_queries),
    Mutation("head untied", misreading(_untied), lambda config: config.tie_embeddings),
    Mutation("bfloat16 RoPE", miscomputing(model_with(rope_tables=_bfloat16_tables))),
    Mutation("mask +1", miscomputing(model_with(Mask=_mask_one_ahead))),
    Mutation("cache +1", _cache_one_on),
]


def _unrolled(params: Any, config: LlamaConfig) -> DecodeParams:
    """A layer each, of plain arrays: a scan, or a choice of ways to multiply, would be compiled for each mistake."""
    layers = {str(i): {name: stack[i] for name, stack in params["layers"].items()} for i in range(config.num_layers)}
    return DecodeParams(jax.tree.map(jnp.asarray, params | {"layers": layers}))


def mutation_checks() -> list[Check]:
    """For every variant and mutation that concerns it: how far the mistake moves the logits from the oracle's.

    Nothing is compiled whole, which would take longer than running it.
    """

    def error(mutation: Mutation, config: LlamaConfig) -> float:
        right = implementation_of(jllama.model)._replace(load=lambda *_: (config, weights(config)))
        wrong = mutation.plant(right)
        read_config, params = wrong.load(Path(), None, "training")
        return model_error(wrong, read_config, _unrolled(params, read_config), config)

    return [
        Check("mutations", name, mutation.name, functools.partial(error, mutation, config))
        for mutation in MUTATIONS
        for name, config in VARIANTS.items()
        if mutation.applies(config)
    ]
