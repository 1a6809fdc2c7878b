"""The Llamas of the matrix: released ones made small, with every field that can go wrong left as it is."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jaxtyping import Float, Int

from jllama import oracle
from jllama.config import LlamaConfig
from jllama.parameters import Params
from jllama.presets import preset
from jllama.rope_scaling import DynamicScaling, LinearScaling, YarnScaling
from jllama.verify.checks import random_params

SEQ = 512
FAR = (9_000, 100_000)
"""Positions past the original context of RoPE, and far past it."""


def small(name: str, heads: int, kv_heads: int, **changed: object) -> LlamaConfig:
    """A preset with few heads, layers and tokens; its head_dim, epsilon, RoPE, tying and context length stay."""
    config = preset(name)
    sizes = {"vocab_size": 384, "num_layers": 2, "embed_dim": heads * config.head_dim, "mlp_dim": 512}
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
    "dynamic x4": _LLAMA_2(rope_scaling=DynamicScaling(4.0, original_max_seq_len=SEQ // 2), max_seq_len=SEQ // 2),
    "yarn x32": _LLAMA_2(rope_scaling=YarnScaling(32.0, original_max_seq_len=4096), max_seq_len=131_072),
}


def tokens_and_positions(config: LlamaConfig) -> tuple[Int[np.ndarray, "rows seq"], Int[np.ndarray, "rows seq"]]:
    """Rows of random tokens, and their positions.

    The first row is at 0 to 511. Half of each other row is at the start and half around a position of ``FAR`` that the
    context reaches (or at the end of a shorter one), so that its tokens see their neighbors and, far back, the start.
    """
    reached = [far for far in FAR if far + SEQ // 4 <= config.max_seq_len]
    reached = reached or [config.max_seq_len - SEQ // 4] * (config.max_seq_len > SEQ)
    start, around = np.arange(SEQ // 2), np.arange(-SEQ // 4, SEQ // 4)
    positions = np.stack([np.arange(SEQ), *(np.concatenate([start, far + around]) for far in reached)])
    return np.random.default_rng(0).integers(0, config.vocab_size, positions.shape), positions


@functools.cache
def weights(config: LlamaConfig) -> Params:
    """The variant's weights: small embeddings and sharp attention, under which every mistake shows."""
    sharpness = config.rope_scaling.attention_factor**2 if config.rope_scaling else 1.0  # yarn's own
    return random_params(config, 0, embed_std=0.01, query_gain=2.0 / sharpness)


@functools.cache
def reference_logits(config: LlamaConfig, rows: int | None = None, seq: int = SEQ) -> Float[np.ndarray, "_ _ vocab"]:
    """The float64 oracle's logits for ``weights(config)`` at ``tokens_and_positions(config)``, or at a part of them."""
    tokens, positions = tokens_and_positions(config)
    return oracle.forward(weights(config), tokens[:rows, :seq], config, positions[:rows, :seq])
