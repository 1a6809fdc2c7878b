"""The matrix: every variant of Llama through every file format, compared with the float64 oracle.

The code under test is a value, so that the checks run on jllama's own and on copies with one thing deliberately wrong.
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

import jllama.model
from jllama import oracle
from jllama.checkpoints import registry
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.language_model import LanguageModel
from jllama.model import KVCache
from jllama.parameters import Params
from jllama.presets import preset
from jllama.rope_scaling import DynamicScaling, LinearScaling, YarnScaling
from jllama.verify.checks import Check, random_params, relative_error, worst_error
from jllama.verify.reference_writers import FORMAT_WRITERS

SEQ = 512
FAR = (9_000, 100_000)  # positions past the original context of RoPE, and far past it
_CHUNK = 16
Tokens = Int[np.ndarray, "rows seq"]


class Implementation(NamedTuple):
    """What the checks call. The loss is a mean, in nats, over tokens but the first where ``mask`` holds, or zero."""

    load: Callable[..., LanguageModel]  # (path, layout=..., rope_factor=...), as jllama.load
    forward: Callable[
        ..., Array
    ]  # (config, params, tokens, segments=None, positions=None, attention="auto")
    extend: Callable[
        ..., tuple[Array, KVCache]
    ]  # (config, decode params, tokens, cache, counts) -> (logits, cache)
    loss: Callable[..., Array]  # (config, params, tokens, mask, remat=False)


def implementation_of(model: types.ModuleType) -> Implementation:
    """The implementation that ``jllama.model``, or a copy of it, makes up; nothing in it is compiled yet."""

    def forward(
        config: LlamaConfig, params: Params | DecodeParams, *inputs: Any, **options: Any
    ) -> Array:
        llama = model.build_model(config, params)
        return llama.logits(llama.hidden(*inputs, **options))

    def extend(config: LlamaConfig, params: DecodeParams, *inputs: Any) -> tuple[Array, KVCache]:
        llama = model.build_model(config, params)
        hidden, cache = llama.decode(*inputs)
        return llama.logits(hidden), cache

    def loss(
        config: LlamaConfig, params: Params, tokens: Array, mask: Array, remat: bool = False
    ) -> Array:
        llama = model.build_model(config, params)
        total, count = llama.loss(
            llama.hidden(tokens[:, :-1], remat="block" if remat else "dots"), tokens[:, 1:], mask
        )
        return total / jnp.maximum(count, 1)

    return Implementation(registry.load, forward, extend, loss)


def compiled(implementation: Implementation) -> Implementation:
    """The same implementation with ``forward`` and ``extend`` under ``jit``."""
    forward = jax.jit(implementation.forward, static_argnames=("config", "attention"))
    return implementation._replace(
        forward=forward, extend=jax.jit(implementation.extend, static_argnames="config")
    )


@functools.cache
def jllama_itself() -> Implementation:
    """The code that users run, compiled."""
    return compiled(implementation_of(jllama.model))


def small(name: str, heads: int, kv_heads: int, **changed: object) -> LlamaConfig:
    """A preset with few heads, layers and tokens; its head_dim, epsilon, RoPE, tying and context length stay."""
    config = preset(name)
    sizes = {
        "vocab_size": 384,
        "num_layers": 2,
        "embed_dim": heads * config.head_dim,
        "mlp_dim": 512,
    }
    return dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads, **(sizes | changed))


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
    "multi-query": small("tinyllama-1.1b", 8, 1),
    "own head_dim": small("llama3-8b", 4, 2, embed_dim=192),
    "linear x4": _LLAMA_2(rope_scaling=LinearScaling(4.0), max_seq_len=16_384),
    # dynamic scaling sees more tokens than its context: that is when it scales
    "dynamic x4": _LLAMA_2(
        rope_scaling=DynamicScaling(4.0, original_max_seq_len=SEQ // 2), max_seq_len=SEQ // 2
    ),
    "yarn x32": _LLAMA_2(
        rope_scaling=YarnScaling(32.0, original_max_seq_len=4096), max_seq_len=131_072
    ),
}  # released Llamas made small, with every field that can go wrong left as it is


def tokens_and_positions(config: LlamaConfig) -> tuple[Tokens, Tokens]:
    """Rows of random tokens, and their positions.

    The first row is at 0 to 511. Half of each other row is at the start and half around a position of ``FAR`` that the
    context reaches (or at the end of a shorter one), so that its tokens see their neighbors and, far back, the start.
    """
    reached = [far for far in FAR if far + SEQ // 4 <= config.max_seq_len]
    reached = reached or [config.max_seq_len - SEQ // 4] * (config.max_seq_len > SEQ)
    start, around = np.arange(SEQ // 2), np.arange(-SEQ // 4, SEQ // 4)
    positions = np.stack(
        [np.arange(SEQ), *(np.concatenate([start, far + around]) for far in reached)]
    )
    return np.random.default_rng(0).integers(0, config.vocab_size, positions.shape), positions


@functools.cache
def weights(config: LlamaConfig) -> Params:
    """The variant's weights: small embeddings and sharp attention, under which every mistake shows."""
    sharpness = (
        config.rope_scaling.attention_factor**2 if config.rope_scaling else 1.0
    )  # yarn's own
    return random_params(config, 0, embed_std=0.01, query_gain=2.0 / sharpness)


@functools.cache
def reference_logits(
    config: LlamaConfig, rows: int | None = None, seq: int = SEQ
) -> Float[np.ndarray, "_ _ vocab"]:
    """The float64 oracle's logits for ``weights(config)`` at ``tokens_and_positions(config)``, or at a part of them."""
    tokens, positions = tokens_and_positions(config)
    return oracle.forward(weights(config), tokens[:rows, :seq], config, positions[:rows, :seq])


def whole_error(
    implementation: Implementation, config: LlamaConfig, params: Any, variant: LlamaConfig
) -> float:
    """How far the logits of a forward pass over each row of positions are from the oracle's for the variant."""
    tokens, positions = (jnp.asarray(rows) for rows in tokens_and_positions(variant))
    return worst_error(
        implementation.forward(config, params, tokens, None, positions), reference_logits(variant)
    )


def cached_error(
    implementation: Implementation, config: LlamaConfig, params: Any, variant: LlamaConfig
) -> float:
    """How far the logits of a token behind some others, which are in the cache, are from the oracle's."""
    tokens, cache = (
        jnp.asarray(tokens_and_positions(variant)[0]),
        KVCache.zeros(config, 1, 2 * _CHUNK),
    )
    _, cache = implementation.extend(
        config, params, tokens[:1, :_CHUNK], cache, jnp.array([_CHUNK])
    )
    last = tokens[:1, _CHUNK : 2 * _CHUNK]  # one more token; the rest of the chunk is padding
    decoded, _ = implementation.extend(config, params, last, cache, jnp.array([1]))
    return relative_error(decoded[0, 0], reference_logits(variant, 1, _CHUNK + 1)[0, -1])


def conformance_checks(implementation: Implementation, folder: Path | None = None) -> list[Check]:
    """For every variant and format that can hold it: ``whole_error`` in the layout for training, ``cached_error`` in
    that for decoding, the worse of the two.
    ``folder`` keeps the files, for further implementations to load; without it each is removed at once.
    """

    def error(name: str, file_format: str) -> float:
        variant, writer = VARIANTS[name], FORMAT_WRITERS[file_format]
        with tempfile.TemporaryDirectory() as scratch:
            if not (path := (folder or Path(scratch)) / f"{name} {file_format}").exists():
                writer.write(path, variant, weights(variant))
            scaling, is_meta, errors = variant.rope_scaling, file_format.startswith("meta"), []
            for layout, compute in (("decode", cached_error), ("training", whole_error)):
                rope_factor = scaling.factor if is_meta and scaling else None
                model = implementation.load(path, layout=layout, rope_factor=rope_factor)
                # Meta's files do not say the context either, and no logit of what they can hold depends on it.
                config = (
                    dataclasses.replace(model.config, max_seq_len=variant.max_seq_len)
                    if is_meta
                    else model.config
                )
                errors.append(compute(implementation, config, model.params, variant))
        return float(np.max(errors))

    return [
        Check("conformance", name, file_format, functools.partial(error, name, file_format))
        for name, variant in VARIANTS.items()
        for file_format, writer in FORMAT_WRITERS.items()
        if writer.holds(variant)
    ]
