"""Deliberate mistakes, each of which has shipped somewhere: how far the matrix sees them. The tests plant them too."""

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
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.model import KVCache
from jllama.parameters import Params
from jllama.verify.checks import Check, random_params
from jllama.verify.conformance import (
    VARIANTS,
    cached_error,
    implementation_of,
    weights,
    whole_error,
)

Model = tuple[LlamaConfig, Params]  # an architecture and its parameters in the training layout
_attention = jax.jit(
    F.attention, static_argnames="implementation"
)  # its loop would be compiled anew in each layer


def model_with(**wrong: Any) -> types.ModuleType:
    """A copy of ``jllama.model`` with some pure functions replaced.

    Its layers are not compiled, which would take longer; attention is, once for all mistakes.
    """
    copy = types.ModuleType("jllama.model_copy")
    exec(
        compile(
            Path(jllama.model.__file__).read_text(),
            jllama.model.__file__,
            "exec",
            dont_inherit=True,
        ),
        vars(copy),
    )
    functions = types.SimpleNamespace(**vars(F) | {"attention": _attention} | wrong)
    vars(copy).update(F=functions, KVCache=KVCache, _run_layer=vars(copy)["_run_layer"].__wrapped__)
    return copy


class Mutation(NamedTuple):
    """One deliberate mistake. Nothing of its model is compiled, so run it on small inputs.

    ``misread`` gets what was in a file, parameters in the training layout, and returns what a wrong reader would.
    """

    name: str  # of the matrix's column
    misread: Callable[[LlamaConfig, Params], Model] = lambda config, params: (config, params)
    model: types.ModuleType = model_with()  # of ``jllama.model``, wrong or not
    applies: Callable[[LlamaConfig], bool] = lambda _: True  # whether it changes a model's logits


def _wrong_field(name: str, field: str, change: Callable[[Any], Any]) -> Mutation:
    def misread(config: LlamaConfig, params: Params) -> Model:
        return dataclasses.replace(config, **{field: change(getattr(config, field))}), params

    return Mutation(name, misread, applies=lambda config: misread(config, {})[0] != config)


def interleaved(matrix: Any) -> Array:
    """Put the channels of a half-split matrix in the order of Meta's files: ``i`` and ``i + head_dim / 2`` in pairs."""
    return jnp.stack(jnp.split(jnp.asarray(matrix), 2, axis=-1), axis=-1).reshape(matrix.shape)


def _keys_divide_as_queries(config: LlamaConfig) -> bool:
    rows = config.num_kv_heads * config.head_dim
    return config.num_kv_heads < config.num_heads and rows % (2 * config.num_heads) == 0


def _not_permuted(config: LlamaConfig, params: Params) -> Model:
    layers = params["layers"]
    return config, params | {
        "layers": layers | {name: interleaved(layers[name]) for name in ("wq", "wk")}
    }


def _keys_permuted_as_queries(config: LlamaConfig, params: Params) -> Model:
    """Put keys in half-split order as if there were as many heads of them as of queries, where they divide so."""
    keys = params["layers"]["wk"]
    in_heads = interleaved(keys).reshape(*keys.shape[:2], config.num_heads, -1, 2)
    return config, params | {
        "layers": params["layers"] | {"wk": in_heads.swapaxes(-1, -2).reshape(keys.shape)}
    }


def _post_norm() -> types.ModuleType:
    """The Transformer of 2017: each branch's sum is normalized, not its input."""
    model = model_with()

    def call(layer: Any, x: Array, attend: Any, cached: Any = None) -> tuple:
        mixed, kept = layer.attention(x, attend, cached)
        x = F.rms_norm(x + mixed, layer.attn_norm[...], layer.norm_eps)
        return F.rms_norm(x + layer.feed_forward(x), layer.mlp_norm[...], layer.norm_eps), kept

    model.Layer.__call__ = call
    return model


def _remainder_attention(
    query: Array, key: Array, value: Array, mask: F.Mask, implementation: str
) -> Array:
    """Query head ``n`` uses key-value head ``n % kv_heads``."""
    order = np.argsort(np.arange(query.shape[1]) % key.shape[1], kind="stable")
    return _attention(query[:, order], key, value, mask, implementation)[:, np.argsort(order)]


def _mask_one_ahead(offset: Array | None = None, **segments: Any) -> F.Mask:
    """The mask of queries that stand one further on."""
    return F.Mask(jnp.ones(1, int) if offset is None else offset + 1, **segments)


def _bfloat16_tables(*arguments: Any) -> list[Array]:
    return [table.astype(jnp.bfloat16).astype(jnp.float32) for table in F.rope_tables(*arguments)]


def _cache_one_on() -> types.ModuleType:
    """Write to the cache, after the first tokens, one slot and one position too far on."""
    model = model_with()
    right = model.Llama.decode

    def decode(llama: Any, tokens: Array, cache: KVCache, counts: Array) -> tuple:
        return right(
            llama, tokens, cache._replace(lengths=cache.lengths + (cache.lengths > 0)), counts
        )

    model.Llama.decode = decode
    return model


def _untied(config: LlamaConfig, params: Params) -> Model:
    """Take a tied head for a separate one, which the file does not have."""
    separate = dataclasses.replace(config, tie_embeddings=False)
    return separate, {"lm_head": random_params(separate, 1)["lm_head"]} | params


MUTATIONS = [
    _wrong_field("theta x2", "rope_theta", lambda theta: 2 * theta),
    _wrong_field("no scaling", "rope_scaling", lambda _: None),
    _wrong_field(
        "factor 8 for 32",
        "rope_scaling",
        lambda s: s and dataclasses.replace(s, factor=min(s.factor, 8.0)),
    ),
    _wrong_field("eps x10", "norm_eps", lambda eps: 10 * eps),
    Mutation("post-norm", model=_post_norm()),
    Mutation(
        "heads n % kv",
        model=model_with(attention=_remainder_attention),
        applies=lambda config: 1 < config.num_kv_heads < config.num_heads,
    ),
    Mutation("q/k not permuted", _not_permuted),
    Mutation("k permuted as q", _keys_permuted_as_queries, applies=_keys_divide_as_queries),
    Mutation("head untied", _untied, applies=lambda config: config.tie_embeddings),
    Mutation("bfloat16 RoPE", model=model_with(rope_tables=_bfloat16_tables)),
    Mutation("mask +1", model=model_with(Mask=_mask_one_ahead)),
    Mutation("cache +1", model=_cache_one_on()),
]


def mutation_checks() -> list[Check]:
    """For every variant and mutation that concerns it: how far the mistake moves the logits from the oracle's."""

    def moved(mutation: Mutation, variant: LlamaConfig) -> float:
        config, params = mutation.misread(variant, weights(variant))
        stacks, layers = params["layers"], range(config.num_layers)
        # A layer each, of plain arrays: a scan, or a choice of ways to multiply, would be compiled for each mistake.
        unrolled = {str(i): {name: stack[i] for name, stack in stacks.items()} for i in layers}
        plain = jax.tree.map(jnp.asarray, DecodeParams(params | {"layers": unrolled}))
        mistaken = implementation_of(mutation.model)
        return float(
            np.max(
                [error(mistaken, config, plain, variant) for error in (whole_error, cached_error)]
            )
        )

    return [
        Check("mutations", name, mutation.name, functools.partial(moved, mutation, config))
        for mutation in MUTATIONS
        for name, config in VARIANTS.items()
        if mutation.applies(config)
    ]
