"""Conformance: every variant of Llama, and of related families, in every file format.

The float64 oracle is the judge.

The code under test is a value, an ``Implementation``, so that the same checks run on jllama and on
copies of it with one deliberate mistake.
"""

import dataclasses
import functools
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jllama.models.build
from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.model import KVCache
from jllama.core.parameters import Params
from jllama.formats import registry
from jllama.lab.checks import Check, RefusedError, random_params, relative_error, worst_error
from jllama.models import oracle
from jllama.models.decode_params import DecodeParams
from jllama.models.language_model import LanguageModel
from jllama.models.presets import preset
from jllama.models.rope_scaling import DynamicScaling, LinearScaling, YarnScaling

SEQ = 512
FAR = (9_000, 100_000)
"""Positions past the original context of RoPE, and far past it."""
_CHUNK = 16
Tokens = Int[np.ndarray, "rows seq"]


class Implementation(NamedTuple):
    """The functions under test.

    Attributes:
        load: ``(path, layout=...)``, as ``jllama.load``.
        forward: ``(config, params, tokens, segments=None, positions=None, attention="auto")`` to
            logits.
        extend: ``(config, decode params, tokens, cache, counts)`` to ``(logits, cache)``.
    """

    load: Callable[..., LanguageModel]
    forward: Callable[..., Array]
    extend: Callable[..., tuple[Array, KVCache]]


def implementation_of(model: types.ModuleType) -> Implementation:
    """Return the implementation by ``models.build`` or a copy of it; none of it is compiled."""

    def forward(
        config: LlamaConfig,
        params: Params | DecodeParams,
        *inputs: Any,
        attention: str = "auto",
        **others: Any,
    ) -> Array:
        llama = model.build_model(config, params, attention=attention)
        return llama.logits(llama.hidden(*inputs, **others))

    def extend(config: LlamaConfig, params: DecodeParams, *inputs: Any) -> tuple[Array, KVCache]:
        llama = model.build_model(config, params)
        hidden, cache = llama.decode(*inputs)
        return llama.logits(hidden), cache

    return Implementation(registry.load, forward, extend)


def compile_implementation(implementation: Implementation) -> Implementation:
    """Return the implementation with ``forward`` and ``extend`` under ``jax.jit``."""
    return implementation._replace(
        forward=jax.jit(implementation.forward, static_argnames=("config", "attention")),
        extend=jax.jit(implementation.extend, static_argnames="config"),
    )


@functools.cache
def compiled_jllama() -> Implementation:
    """Return the code that users run, compiled."""
    return compile_implementation(implementation_of(jllama.models.build))


def small(name: str, heads: int, kv_heads: int, **changes: object) -> LlamaConfig:
    """Return a preset with few heads, layers and tokens.

    Its head_dim, epsilon, RoPE, tying and context length stay, unless ``changes`` sets them.
    """
    layers = dict.fromkeys(("no_rope_layers", "full_attention_layers", "dense_layers"), ())
    config = dataclasses.replace(preset(name), **layers)
    sizes = {
        "vocab_size": 384,
        "num_layers": 2,
        "embed_dim": heads * config.head_dim,
        "mlp_dim": 512,
    }
    return dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads, **(sizes | changes))


_LLAMA_2 = functools.partial(small, "llama2-7b", 4, 4)
VARIANTS: dict[str, LlamaConfig] = {
    "Llama 1": small("llama1-7b", 4, 4),
    "Llama 2": _LLAMA_2(),
    "Llama 2 grouped": small("llama2-70b", 4, 2),
    "Code Llama": small("codellama-34b", 4, 2),
    "Llama 3": small("llama3-8b", 4, 2),
    "Llama 3.1": small("llama3.1-8b", 4, 2),
    "Llama 3.2 tied": small("llama3.2-1b", 8, 2),
    "Llama 3.3": small("llama3.3-70b", 4, 2, mlp_dim=448),
    "OpenLLaMA 3B": small("openllama-3b", 4, 4),
    "TinyLlama": small("tinyllama-1.1b", 8, 4),
    "SmolLM2": small("smollm2-135m", 12, 4),
    "llama2.c": small("stories-42m", 8, 8),
    "Mistral": small("mistral-7b-v0.1", 4, 2, sliding_window=96),
    "Qwen 2.5 tied": small("qwen2.5-0.5b", 8, 2),
    "Qwen 2 in windows": small("qwen2.5-7b", 4, 2, sliding_window=96, full_attention_layers=(0,)),
    "Qwen 3": small("qwen3-8b", 4, 2),
    "SmolLM3": small("smollm3-3b", 4, 2, num_layers=4, no_rope_layers=(3,)),
    "OLMo 2": small("olmo2-7b", 4, 4),
    "OLMo 3": small("olmo3-7b", 4, 4, num_layers=4, sliding_window=96, full_attention_layers=(3,)),
    "Phi-4": small("phi-4", 4, 2),
    "partial rotation": small("phi-4", 4, 2, partial_rotary_factor=0.75),
    "Granite 3": small("granite-3.3-8b", 4, 2),
    "Llama 4": small(
        "llama4-scout",
        4,
        2,
        num_layers=4,
        num_experts=5,
        expert_dim=96,
        no_rope_layers=(3,),
        dense_layers=(0, 2),
        attention_chunk=48,
        temperature_step=40,
    ),
    "Mixtral": small("mixtral-8x7b", 4, 2, num_experts=5, expert_dim=160),
    "Qwen 3 experts": small(
        "qwen3-30b-a3b", 4, 2, num_experts=32, experts_per_token=1, expert_dim=64
    ),
    "OLMoE": small("olmoe-1b-7b", 4, 4, num_experts=12, expert_dim=96),
    "multi-query": small("tinyllama-1.1b", 8, 1),
    "own head_dim": small("llama3-8b", 4, 2, embed_dim=192),
    "linear x4": _LLAMA_2(rope_scaling=LinearScaling(4.0), max_seq_len=16_384),
    # The context is shorter than SEQ, since dynamic scaling acts beyond it only.
    "dynamic x4": _LLAMA_2(
        rope_scaling=DynamicScaling(4.0, original_max_seq_len=SEQ // 2), max_seq_len=SEQ // 2
    ),
    "yarn x32": _LLAMA_2(
        rope_scaling=YarnScaling(32.0, original_max_seq_len=4096), max_seq_len=131_072
    ),
}
"""Released models made small, with every field that can go wrong as released."""


def tokens_and_positions(config: LlamaConfig) -> tuple[Tokens, Tokens]:
    """Draw rows of ``SEQ`` random tokens, and return them with their positions.

    The first row is at positions 0 to 511. Each further row has half of its tokens at the start and
    half around a position of ``FAR`` that the context reaches, or around the end of a shorter
    context. So its last tokens see their neighbors and, far back, the start.
    """
    centers = [far for far in FAR if far + SEQ // 4 <= config.max_seq_len]
    if not centers and config.max_seq_len > SEQ:
        centers = [config.max_seq_len - SEQ // 4]
    start = np.arange(SEQ // 2)
    around = np.arange(-SEQ // 4, SEQ // 4)
    further_rows = (np.concatenate([start, center + around]) for center in centers)
    positions = np.stack([np.arange(SEQ), *further_rows])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, positions.shape)
    return tokens, positions


@functools.cache
def weights(config: LlamaConfig) -> Params:
    """Return the variant's weights: small embeddings and sharp attention show every mistake."""
    # YaRN sharpens attention itself, and Granite's multiplier flattens it.
    sharpness = config.rope_scaling.attention_factor**2 if config.rope_scaling else 1.0
    if config.attention_multiplier:
        sharpness *= config.attention_multiplier * config.head_dim**0.5
    return random_params(config, 0, embed_std=0.01, query_gain=2.0 / sharpness)


@functools.cache
def reference_logits(
    config: LlamaConfig, rows: int | None = None, seq: int = SEQ
) -> Float[np.ndarray, "_ _ vocab"]:
    """Compute the float64 oracle's logits of the first ``rows`` rows and ``seq`` tokens.

    Weights, tokens and positions are ``weights(config)`` and ``tokens_and_positions(config)``.
    """
    tokens, positions = tokens_and_positions(config)
    return oracle.forward(weights(config), tokens[:rows, :seq], config, positions[:rows, :seq])


def whole_error(
    implementation: Implementation, config: LlamaConfig, params: Any, variant: LlamaConfig
) -> float:
    """Compute the relative error of one forward pass, at all positions, against the oracle.

    Args:
        implementation: the code under test.
        config: what it takes the variant's configuration to be.
        params: what it takes the variant's weights to be.
        variant: the configuration that the oracle runs.
    """
    tokens, positions = map(jnp.asarray, tokens_and_positions(variant))
    logits = implementation.forward(config, params, tokens, None, positions)
    return worst_error(logits, reference_logits(variant))


def cached_error(
    implementation: Implementation, config: LlamaConfig, params: Any, variant: LlamaConfig
) -> float:
    """Compute the relative error of a decoded token's logits against the oracle.

    The tokens before it are prefilled in one chunk. Arguments are as in ``whole_error``.
    """
    tokens = jnp.asarray(tokens_and_positions(variant)[0])[:1, : 2 * _CHUNK]
    cache = KVCache.zeros(config, 1, 2 * _CHUNK)
    prompt = tokens[:, :_CHUNK]
    _, cache = implementation.extend(config, params, prompt, cache, jnp.array([_CHUNK]))
    # Only the first token of this chunk counts; the rest is padding.
    decoded, _ = implementation.extend(config, params, tokens[:, _CHUNK:], cache, jnp.array([1]))
    return relative_error(decoded[0, 0], reference_logits(variant, 1, _CHUNK + 1)[0, -1])


def conformance_checks(implementation: Implementation) -> list[Check]:
    """Return a check of each variant in each format."""
    return [
        Check(
            "conformance",
            name,
            file_format,
            functools.partial(format_error, implementation, name, file_format),
        )
        for name in VARIANTS
        for file_format in registry.FORMATS
    ]


def format_error(implementation: Implementation, name: str, file_format: str) -> float:
    """Write a variant in a format, and compute the ``file_error`` of the file.

    Raises:
        RefusedError: the format cannot hold the variant.
    """
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        try:
            registry.save(LanguageModel(variant, weights(variant)), path, file_format)
        except JllamaError as error:
            raise RefusedError(str(error)) from error
        return file_error(implementation, path, variant)


def file_error(implementation: Implementation, path: Path, variant: LlamaConfig) -> float:
    """Load a variant from a file, and compute the error of its logits.

    The result is the larger one of ``cached_error`` in the decoding layout and ``whole_error`` in
    the training layout.
    """
    errors = []
    for layout, compute in (("decode", cached_error), ("training", whole_error)):
        model = implementation.load(path, layout=layout)
        errors.append(compute(implementation, model.config, model.params, variant))
    return float(np.max(errors))
