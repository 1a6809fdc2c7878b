"""Small models that many tests share, made and compiled once a process.

Their weights make mistakes show.
"""

import functools

import jax
import jax.numpy as jnp
from reference_writers import FORMAT_WRITERS

from jllama.core.config import LlamaConfig
from jllama.formats import registry
from jllama.lab import conformance
from jllama.lab.checks import random_params
from jllama.lab.conformance import VARIANTS, compiled_jllama, implementation_of
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import YarnScaling
from jllama.templates.messages import TEMPLATES
from jllama.tokenizers.base import BytesTokenizer

SMALL = LlamaConfig(
    vocab_size=61,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=96,
    max_seq_len=64,
)
"""For many steps: heads are together twice as wide as the embedding, and share keys and values."""
LONG = LlamaConfig(
    vocab_size=97,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=160,
    max_seq_len=512,
)
"""For positions: enough of them, and of channels in a head, that a wrong angle moves the logits."""
FILE = LlamaConfig(
    vocab_size=300,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=48,
    max_seq_len=64,
)
"""For files: as many tokens as a small SentencePiece model has, and sizes that llama2.c allows."""
SERVED = LlamaConfig(
    vocab_size=259,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=96,
    max_seq_len=1024,
)
"""For the server: the byte tokenizer's tokens, and a context of four chunks."""
_SIZES = {
    "vocab_size": 96,
    "num_layers": 4,
    "embed_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "mlp_dim": 96,
    "max_seq_len": 512,
}
_WINDOWS = {
    "sliding_window": 4,
    "full_attention_layers": (1, 3),
    "rope_scaling": YarnScaling(8.0, original_max_seq_len=32),
    "rope_scaling_layers": "full_attention",
}
_AFTER = {"qk_norm": "whole", "norm_placement": "after"}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_EXPERTS = {"mlp_dim": 40, "num_experts": 6, "experts_per_token": 2, "expert_dim": 40}
FAMILIES = {
    "llama": LlamaConfig(**_SIZES),
    "mistral": LlamaConfig(**_SIZES, sliding_window=5),
    "qwen2": LlamaConfig(**_SIZES, attention_bias=True, tie_embeddings=True),
    "qwen3": LlamaConfig(**_SIZES, qk_norm="head", norm_eps=1e-6),
    "smollm3": LlamaConfig(**_SIZES, no_rope_layers=(3,)),
    "olmo2": LlamaConfig(**_SIZES, **_AFTER),
    "olmo3": LlamaConfig(**_SIZES, **_AFTER, **_WINDOWS),
    "phi": LlamaConfig(**_SIZES, partial_rotary_factor=0.75, sliding_window=6),
    "granite": LlamaConfig(**_SIZES, **_FACTORS),
    "mixtral": LlamaConfig(**_SIZES | _EXPERTS, normalize_expert_weights=True),
    "olmoe": LlamaConfig(**_SIZES | _EXPERTS, qk_norm="whole"),
    "all at once": LlamaConfig(
        **_SIZES,
        **_AFTER,
        **_WINDOWS,
        **_FACTORS,
        attention_bias=True,
        no_rope_layers=(0, 2),
        partial_rotary_factor=0.75,
    ),
}
"""A model of each family, and one with all options; windows are shorter than any text."""

laid_out = jax.jit(decode_layout, static_argnums=(1, 2, 3))
"""``decode_layout`` as one program."""
forward, extend = compiled_jllama().forward, compiled_jllama().extend
"""``forward(config, params, tokens, ...)`` and ``extend(config, decode_params, tokens, cache,
counts)``."""


@functools.cache
def weights(config):
    """Float32 NumPy arrays in the training layout."""
    return random_params(config, 0)


@functools.cache
def family_weights(name):
    """The same of a family's model; a tied embedding is small, since it is the head."""
    config = FAMILIES[name]
    return random_params(config, 0, embed_std=0.2 if config.tie_embeddings else 1.0)


@functools.cache
def params(config, dtype="float32"):
    """The same on the device, in any dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights(config))


@functools.cache
def decode_params(config, dtype="float32", quantize=None):
    """The same in the layout for decoding."""
    return laid_out(params(config, dtype), config, quantize)


@functools.cache
def served(seed=0, dtype="float32", quantize=None):
    """Return a model of ``SERVED`` with a tokenizer, in the layout for decoding."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), random_params(SERVED, seed))
    model = LanguageModel(
        SERVED, params, BytesTokenizer(), TEMPLATES["chatml"], (BytesTokenizer.eos_id,)
    )
    return model.for_decoding(quantize)


def planted(mutation):
    """Return an implementation, loading included, with a mistake of ``lab.mutations``."""

    def load(path, layout):
        model = registry.load(path, layout="training")
        config, params = model.config, model.params
        if mutation.applies(config):
            config, params = mutation.misread(config, params)
        params = jax.tree.map(jnp.asarray, params)
        return LanguageModel(
            config, decode_layout(params, config) if layout == "decode" else params
        )

    return implementation_of(mutation.model)._replace(load=load)


def written_variant(folder, name, file_format):
    """Write a variant of ``lab.conformance`` by a writer of ``reference_writers``, once a folder.

    Return its path.
    """
    path = folder / f"{name} {file_format}"
    if not path.exists():
        config = VARIANTS[name]
        FORMAT_WRITERS[file_format].write(path, config, conformance.weights(config))
    return path


ON_EIGHT_DEVICES = LlamaConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=48,
    max_seq_len=16,
)
"""What meshes of eight devices compute in tests/parallel."""
