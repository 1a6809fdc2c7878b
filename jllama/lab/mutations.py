"""Mutations: deliberate mistakes that have shipped somewhere, and how far they move the logits.

A small error proves little if wrong code would have one too. So each mistake is planted in a copy
of the code or of the weights, for every variant that it concerns. The tests plant them too.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import jllama.core.model
import jllama.models.build
from jllama import functional as F
from jllama.core import ops
from jllama.core.config import LlamaConfig
from jllama.core.model import KVCache, weights_of_layer
from jllama.core.parameters import Params
from jllama.lab.checks import Check, random_params
from jllama.lab.conformance import VARIANTS, cached_error, implementation_of, weights, whole_error
from jllama.lab.rows import Row
from jllama.models.build import functions_of
from jllama.models.decode_params import DecodeParams

Model = tuple[LlamaConfig, Params]
"""An architecture and its parameters in the training layout."""

# Compiled once: the loop in attention would be compiled anew in each layer.
_attention = jax.jit(F.attention, static_argnames="implementation")
_CHUNK_TOKENS = 2048  # of the loss


def model_with(**functions: Any) -> types.ModuleType:
    """Return a copy of ``jllama.core.model`` that calls these functions in place of the usual ones.

    They are named as in ``core.ops`` or ``core.model.Functions``. Its layers are not compiled, as
    that would take longer; attention is, once for all mistakes.
    """
    copy = types.ModuleType("jllama.model_copy")
    names = vars(copy)
    path = jllama.core.model.__file__
    exec(compile(Path(path).read_text(), path, "exec", dont_inherit=True), names)
    replaced = types.SimpleNamespace(**vars(ops) | functions)
    names.update(ops=replaced, KVCache=KVCache, _run_layer=names["_run_layer"].__wrapped__)
    kernel = functions.get("attention", _attention)
    others = {name: functions[name] for name in ("project", "route") if name in functions}
    # Experts, too, call the functions in place of the usual ones.
    mix: Any = functions_of("auto", "dots", _CHUNK_TOKENS).mix_experts
    mix_experts = types.FunctionType(inspect.unwrap(mix.func).__code__, vars(replaced))
    others["mix_experts"] = functools.partial(mix_experts, **mix.keywords)

    def build_model(
        config: LlamaConfig,
        params: Params | DecodeParams,
        attention: str = "auto",
        remat: str = "dots",
    ) -> Any:
        weights = params.weights if isinstance(params, DecodeParams) else params
        window = config.sliding_window or None
        called = functions_of(attention, remat, _CHUNK_TOKENS, window, kernel=kernel)
        return names["build_llama"](config, weights, called._replace(**others))

    names["build_model"] = build_model
    return copy


_PLAIN = model_with()


class Mistake(NamedTuple):
    """One mistake: in how a file is read (``misread``), in the code (``model``) or in a prompt.

    Attributes:
        about: what is wrong, as in "with ... our logits agree with theirs"; empty if it has another
            form there.
        misread: takes the configuration and the parameters of a file, in the training layout, and
            returns what a wrong reader would.
        model: ``jllama.models.build``, or a copy of ``core.model`` with a mistake.
        name: of the matrix's column; empty if it has none.
        applies: whether the mistake changes the logits of a model.
        sees_ahead: whether later tokens of a prompt change what is predicted in a place.
        change: takes a row, and returns what the mistake makes of it, with as many places; None
            if it changes the model alone.
        precision: the name of the precision with which it is no mistake.
    """

    about: str
    misread: Callable[[LlamaConfig, Params], Model] = lambda config, params: (config, params)
    model: types.ModuleType = jllama.models.build
    name: str = ""
    applies: Callable[[LlamaConfig], bool] = lambda _: True
    sees_ahead: bool = False
    change: Callable[[Row], Row] | None = None
    precision: str = ""


def replace_fields(config: LlamaConfig, params: Params, **fields: Any) -> Model:
    """Return a model with other fields of the configuration and the same weights."""
    return dataclasses.replace(config, **fields), params


def _wrong_field(name: str, field: str, change: Callable[[Any], Any]) -> Mistake:
    """Return a mutation of one field of the configuration."""

    def misread(config: LlamaConfig, params: Params) -> Model:
        return replace_fields(config, params, **{field: change(getattr(config, field))})

    return Mistake("", misread, name=name, applies=lambda config: misread(config, {})[0] != config)


def _factor_at_most_8(scaling: Any) -> Any:
    return scaling and dataclasses.replace(scaling, factor=min(scaling.factor, 8.0))


def interleave_channels(matrix: Any) -> Array:
    """Reorder the channels of a half-split matrix as in Meta's files: 0, half, 1, half + 1, ..."""
    return jnp.stack(jnp.split(jnp.asarray(matrix), 2, axis=-1), axis=-1).reshape(matrix.shape)


def _with_layers(params: Params, **arrays: Any) -> Params:
    return params | {"layers": params["layers"] | arrays}


def _not_permuted(config: LlamaConfig, params: Params) -> Model:
    """Leave queries and keys in the interleaved order of Meta's and GGUF's files."""
    layers = params["layers"]
    wrong = {name: interleave_channels(layers[name]) for name in ("wq", "wk")}
    return config, _with_layers(params, **wrong)


def _keys_permuted_as_queries(config: LlamaConfig, params: Params) -> Model:
    """Reorder keys to half-split as if there were as many key heads as query heads."""
    keys = params["layers"]["wk"]
    by_head = interleave_channels(keys).reshape(*keys.shape[:2], config.num_heads, -1, 2)
    return config, _with_layers(params, wk=by_head.swapaxes(-1, -2).reshape(keys.shape))


def _keys_divide_as_queries(config: LlamaConfig) -> bool:
    """Whether ``_keys_permuted_as_queries`` is possible and gives another result."""
    rows = config.num_kv_heads * config.head_dim
    return config.num_kv_heads < config.num_heads and rows % (2 * config.num_heads) == 0


def _untied(config: LlamaConfig, params: Params) -> Model:
    """Take a tied head for a separate one, which the file does not have and which stays random."""
    separate = dataclasses.replace(config, tie_embeddings=False)
    return separate, {"lm_head": random_params(separate, 1)["lm_head"]} | params


def _post_norm_layer(layer: Any, x: Array, inputs: Any, cached: Any = None) -> tuple:
    """Normalize the sum after each branch, as in the Transformer of 2017, not its input."""
    mixed, cached = layer.attention(x, inputs, cached)
    x = layer.normalize(x + layer.residual(mixed), "attn_norm")
    x = x + layer.residual(layer.feed_forward_network(x, inputs.functions))
    return layer.normalize(x, "mlp_norm"), cached


def model_with_layer(call: Callable[..., tuple]) -> types.ModuleType:
    """Return a copy of ``jllama.core.model`` whose layers are called with this function."""
    model = model_with()
    model.Layer.__call__ = call
    return model


def _remainder_attention(
    query: Array, key: Array, value: Array, mask: F.Mask, implementation: str
) -> Array:
    """Let query head ``n`` use key-value head ``n % kv_heads``: tiled, not repeated."""
    order = np.argsort(np.arange(query.shape[1]) % key.shape[1], kind="stable")
    return _attention(query[:, order], key, value, mask, implementation)[:, np.argsort(order)]


def _mask_one_ahead(offset: Array | None = None, **others: Any) -> F.Mask:
    """Let each query also see the token after it."""
    return F.Mask(jnp.ones(1, int) if offset is None else offset + 1, **others)


def _bfloat16_tables(*arguments: Any) -> list[Array]:
    """Round RoPE's cosines and sines to bfloat16."""
    return [table.astype(jnp.bfloat16).astype(jnp.float32) for table in F.rope_tables(*arguments)]


def _has_experts(config: LlamaConfig) -> bool:
    return config.num_experts > 0


def _without_shared_expert(config: LlamaConfig, params: Params) -> Model:
    """Leave out the SwiGLU that every token has besides its experts."""
    layers = params["layers"].items()
    others = {name: stack for name, stack in layers if not name.startswith("shared_")}
    return dataclasses.replace(config, shared_expert=False), params | {"layers": others}


def _without_bias(config: LlamaConfig, params: Params) -> Model:
    """Forget the biases of queries, keys and values."""
    zeros = {name: 0 * params["layers"][name] for name in ("bq", "bk", "bv")}
    return config, _with_layers(params, **zeros)


def _norm_before(config: LlamaConfig, params: Params) -> Model:
    """Normalize the input of attention and of the MLP with the norms of their outputs."""
    layers = dict(params["layers"])
    layers["attn_norm"] = layers.pop("attn_out_norm")
    layers["mlp_norm"] = layers.pop("mlp_out_norm")
    return dataclasses.replace(config, norm_placement="before"), params | {"layers": layers}


def _layers_one_before(config: LlamaConfig, params: Params) -> Model:
    """Count layers from 1 where files count from 0."""
    fields = {}
    for name in ("no_rope_layers", "full_attention_layers"):
        layers = getattr(config, name)
        fields[name] = tuple((layer - 1) % config.num_layers for layer in layers)
    return dataclasses.replace(config, **fields), params


def _without_window(config: LlamaConfig, params: Params) -> Model:
    """Ignore the sliding window; layers without it stay scaled as they were."""
    return dataclasses.replace(config, sliding_window=10 * config.max_seq_len), params


def _no_norm(layer: Any, x: Array, name: str) -> Array:
    return x


def _norm_of_each_head(layer: Any, x: Array, name: str) -> Array:
    """Normalize each head by itself, with its part of the scale for all heads."""
    if layer.config.qk_norm != "whole":
        return layer.normalize(x, name)
    ones = jnp.ones(x.shape[-1], x.dtype)
    return F.rms_norm(x, ones, layer.config.norm_eps) * getattr(layer, f"{name}_whole")[...]


def _model_with_norm(normalize_heads: Callable[..., Array]) -> types.ModuleType:
    """Return a model with another norm of queries and keys."""
    model = model_with()
    model.Layer.normalize_heads = normalize_heads
    return model


def _norm_after_rope() -> types.ModuleType:
    """Normalize queries and keys after the rotation; scales of a pair's channels differ."""
    model = model_with()
    right = model.Layer.normalize_heads
    without_norm = model.Layer.heads  # once ``normalize_heads`` is replaced below

    def late(layer: Any, x: Array, name: str) -> Array:
        tokens = x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])
        normed = right(layer, tokens, name).reshape(x.swapaxes(1, 2).shape)
        return normed.swapaxes(1, 2)

    def heads(layer: Any, x: Array, inputs: Any) -> tuple[Array, ...]:
        query, key, value = without_norm(layer, x, inputs)
        return late(layer, query, "q_norm"), late(layer, key, "k_norm"), value

    model.Layer.normalize_heads = _no_norm
    model.Layer.heads = heads
    return model


def _cache_one_ahead() -> types.ModuleType:
    """Write tokens after a prompt one slot, and so one position, too far into the cache."""
    model = model_with()
    right = model.Llama.decode

    def decode(llama: Any, tokens: Array, cache: KVCache, counts: Array) -> tuple:
        ahead = cache._replace(lengths=cache.lengths + (cache.lengths > 0))
        return right(llama, tokens, ahead, counts)

    model.Llama.decode = decode
    return model


MUTATIONS = [
    # RoPE's base is not the file's, such as 10,000 hard-coded.
    _wrong_field("theta x2", "rope_theta", lambda theta: 2 * theta),
    # RoPE's scaling is ignored: Llama 3.1 run as Llama 3.
    _wrong_field("no scaling", "rope_scaling", lambda _: None),
    # Llama 3.1's factor of RoPE's scaling is hard-coded; Llama 3.2 has 32.
    _wrong_field("factor 8 for 32", "rope_scaling", _factor_at_most_8),
    # The norms' epsilon is another release's: 1e-5 for 1e-6, or the reverse.
    _wrong_field("eps x10", "norm_eps", lambda eps: 10 * eps),
    # Norms stand after attention and the MLP, not before them.
    Mistake(
        "norms after attention and the MLP, not before them",
        model=model_with_layer(_post_norm_layer),
        name="post-norm",
        applies=lambda config: config.norm_placement == "before",
    ),
    # Key and value heads are tiled over the query heads, not repeated.
    Mistake(
        "key-value heads tiled over the query heads, not repeated",
        model=model_with(attention=_remainder_attention),
        name="heads n % kv",
        applies=lambda config: 1 < config.num_kv_heads < config.num_heads,
    ),
    # Rotary channels are left interleaved, as Meta's and GGUF's files have them.
    Mistake(
        "the order of rotated channels that Meta's files have",
        _not_permuted,
        name="q/k not permuted",
    ),
    # With grouped queries, keys are reordered with the number of query heads.
    Mistake(
        "keys' channels reordered with the number of query heads",
        _keys_permuted_as_queries,
        name="k permuted as q",
        applies=_keys_divide_as_queries,
    ),
    # The output head of a tied model is a separate, random matrix.
    Mistake(
        "a random output head beside the embedding",
        _untied,
        name="head untied",
        applies=lambda config: config.tie_embeddings,
    ),
    # RoPE's tables are computed or stored in bfloat16.
    Mistake(
        "RoPE tables in bfloat16",
        model=model_with(rope_tables=_bfloat16_tables),
        name="bfloat16 RoPE",
    ),
    # The causal mask is off by one: a token sees the next one.
    Mistake(
        "a mask that shows each token the next one",
        model=model_with(Mask=_mask_one_ahead),
        name="mask +1",
        sees_ahead=True,
    ),
    # Decoded tokens are off by one in the cache.
    Mistake("", model=_cache_one_ahead(), name="cache +1"),
    # Qwen 2's biases of queries, keys and values are not read.
    Mistake(
        "no biases of queries, keys and values",
        _without_bias,
        name="no bias",
        applies=lambda config: config.attention_bias,
    ),
    # Queries and keys are normalized after RoPE, not before it, or not at all.
    Mistake(
        "norms of queries and keys after the rotation",
        model=_norm_after_rope(),
        name="norm after RoPE",
        applies=lambda config: config.qk_norm in ("head", "whole"),
    ),
    Mistake(
        "no norms of queries and keys",
        model=_model_with_norm(_no_norm),
        name="no q/k norm",
        applies=lambda config: config.qk_norm in ("head", "whole"),
    ),
    # OLMo's norm of all heads is taken of each head, as Qwen 3's.
    Mistake(
        "norms of each head, not of all together",
        model=_model_with_norm(_norm_of_each_head),
        name="norm by head",
        applies=lambda config: config.qk_norm == "whole",
    ),
    # OLMo's norms of outputs are applied to inputs.
    Mistake(
        "norms before attention and the MLP, not after them",
        _norm_before,
        name="pre-norm",
        applies=lambda config: config.norm_placement == "after",
    ),
    # The sliding window is off by one, or ignored.
    _wrong_field("window +1", "sliding_window", lambda window: window and window + 1),
    Mistake(
        "no sliding window",
        _without_window,
        name="no window",
        applies=lambda config: config.sliding_window > 0,
    ),
    # Layers that differ from the others are off by one.
    Mistake(
        "the layers that differ counted from 1, not from 0",
        _layers_one_before,
        name="layers -1",
        applies=lambda config: bool(config.no_rope_layers or config.full_attention_layers),
    ),
    # Layers without rotation are rotated.
    _wrong_field("RoPE everywhere", "no_rope_layers", lambda _: ()),
    # OLMo 3's layers with a window are scaled, too.
    _wrong_field("scaled windows", "rope_scaling_layers", lambda _: "all"),
    # All channels of a head are rotated where only a part is.
    _wrong_field("whole rotation", "partial_rotary_factor", lambda _: 1.0),
    # One of Granite's factors is ignored.
    _wrong_field("no embed factor", "embedding_multiplier", lambda _: 1.0),
    _wrong_field("no add factor", "residual_multiplier", lambda _: 1.0),
    _wrong_field("no score factor", "attention_multiplier", lambda _: 0.0),
    _wrong_field("no logit factor", "logits_scaling", lambda _: 1.0),
    # Gate and up are exchanged: Meta's and Mixtral's files call them w1 and w3.
    Mistake(
        "gate and up exchanged",
        model=model_with(silu_gate=lambda gate, up: F.silu_gate(up, gate)),
        name="gate for up",
    ),
    # The weights of experts are divided by their sum where they should not be, or the reverse.
    _wrong_field(
        "weight sum", "normalize_expert_weights", lambda is_normalized: not is_normalized
    )._replace(applies=lambda config: _has_experts(config) and config.router == "softmax"),
    # The last of a token's experts is forgotten.
    _wrong_field("expert -1", "experts_per_token", lambda count: count - 1 if count > 1 else count),
    # The router's logits are computed in bfloat16.
    Mistake(
        "experts chosen by logits in bfloat16",
        model=model_with(
            # Not by ``astype``: in compiled code XLA would leave such rounding out.
            route=lambda logits, *choice: ops.route(jax.lax.reduce_precision(logits, 8, 7), *choice)
        ),
        name="bfloat16 router",
        applies=_has_experts,
    ),
    # Llama 4's chunks of attention are one longer, or forgotten, and so are its temperatures.
    _wrong_field("chunk +1", "attention_chunk", lambda chunk: chunk and chunk + 1),
    _wrong_field("no chunks", "attention_chunk", lambda _: 0),
    _wrong_field("no temperature", "temperature_step", lambda _: 0),
    # Its shared expert is forgotten, or its router multiplies outputs by parts of a softmax.
    Mistake(
        "no shared expert",
        _without_shared_expert,
        name="no shared expert",
        applies=lambda config: config.shared_expert,
    ),
    _wrong_field("softmax router", "router", lambda _: "softmax"),
    # Its layers without experts are each one later.
    _wrong_field("dense +1", "dense_layers", lambda layers: [layer + 1 for layer in layers]),
]
"""The known mistakes, in the order of the matrix's columns."""


def mutation_checks() -> list[Check]:
    """Return a check of each mutation with each variant that it concerns."""
    return [
        Check("mutations", name, mutation.name, functools.partial(mutation_error, mutation, config))
        for mutation in MUTATIONS
        for name, config in VARIANTS.items()
        if mutation.applies(config)
    ]


def mutation_error(mutation: Mistake, variant: LlamaConfig) -> float:
    """Compute how far a mistake moves the logits of a variant from the oracle's.

    The result is the larger one of ``whole_error`` and ``cached_error``.
    """
    config, params = mutation.misread(variant, weights(variant))
    # Plain arrays, one layer each: a scan over layers, or a choice of how to multiply, would be
    # compiled for each mistake.
    layers = {
        str(index): weights_of_layer(params["layers"], config, index)
        for index in range(config.num_layers)
    }
    unrolled = jax.tree.map(jnp.asarray, DecodeParams(params | {"layers": layers}))
    # A copy's layers are not compiled either.
    model = _PLAIN if mutation.model is jllama.models.build else mutation.model
    wrong = implementation_of(model)
    errors = [compute(wrong, config, unrolled, variant) for compute in (whole_error, cached_error)]
    return float(np.max(errors))
