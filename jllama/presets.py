"""The configurations of released Llamas and related models, by name.

Other configurations work just as well.
"""

import functools

from jllama.config import LLAMA_VALUES, LlamaConfig
from jllama.errors import unknown_name
from jllama.rope_scaling import Llama3Scaling, YarnScaling

_llama1 = functools.partial(LlamaConfig, 32_000, max_seq_len=2048, norm_eps=1e-6)
_llama2 = functools.partial(LlamaConfig, 32_000, max_seq_len=4096)
_codellama = functools.partial(LlamaConfig, max_seq_len=16_384, rope_theta=1_000_000.0)
_llama3 = functools.partial(LlamaConfig, 128_256, max_seq_len=8192, rope_theta=500_000.0)
_llama31 = functools.partial(_llama3, max_seq_len=131_072, rope_scaling=Llama3Scaling(8.0))
_llama32 = functools.partial(_llama31, rope_scaling=Llama3Scaling(32.0), tie_embeddings=True)
_smollm2 = functools.partial(LlamaConfig, 49_152, max_seq_len=8192, tie_embeddings=True)
_mistral = functools.partial(LlamaConfig, max_seq_len=32_768, rope_theta=1_000_000.0)
_qwen = functools.partial(_mistral, norm_eps=1e-6)
_qwen25 = functools.partial(_qwen, attention_bias=True)
_qwen3 = functools.partial(_qwen, 151_936, max_seq_len=40_960, qk_norm="head")
_olmo2 = functools.partial(
    LlamaConfig,
    max_seq_len=4096,
    norm_eps=1e-6,
    rope_theta=500_000.0,
    qk_norm="whole",
    norm_placement="after",
)
_granite33 = functools.partial(
    LlamaConfig,
    49_159,
    max_seq_len=131_072,
    rope_theta=10_000_000.0,
    tie_embeddings=True,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
)


def _olmo3(num_layers: int, *sizes: int) -> LlamaConfig:
    return _olmo2(
        100_278,
        num_layers,
        *sizes,
        max_seq_len=65_536,
        rope_scaling=YarnScaling(8.0),
        rope_scaling_layers="full_attention",
        sliding_window=4096,
        full_attention_layers=every_fourth(num_layers),
    )


def every_fourth(num_layers: int) -> tuple[int, ...]:
    """Return every fourth layer: those of SmolLM3 without RoPE, and of OLMo 3 without a window.

    Examples:
        >>> every_fourth(8)
        (3, 7)
    """
    return tuple(range(3, num_layers, 4))


_stories = functools.partial(LlamaConfig, tie_embeddings=True)

# The numbers are, in order: vocab_size where the family has none of its own, num_layers, embed_dim,
# num_heads, num_kv_heads, head_dim, mlp_dim.
# Source: the params.json and config.json that the models were published with; of Qwen 2.5 and 3
# those of the models trained to converse.
PRESETS: dict[str, LlamaConfig] = {
    "llama1-7b": _llama1(32, 4096, 32, 32, 128, 11_008),
    "llama1-13b": _llama1(40, 5120, 40, 40, 128, 13_824),
    "llama1-33b": _llama1(60, 6656, 52, 52, 128, 17_920),
    "llama1-65b": _llama1(80, 8192, 64, 64, 128, 22_016, norm_eps=1e-5),
    "llama2-7b": _llama2(32, 4096, 32, 32, 128, 11_008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 128, 13_824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 128, 28_672),
    "codellama-7b": _codellama(32_016, 32, 4096, 32, 32, 128, 11_008),
    "codellama-13b": _codellama(32_016, 40, 5120, 40, 40, 128, 13_824),
    "codellama-34b": _codellama(32_000, 48, 8192, 64, 8, 128, 22_016),
    "codellama-70b": _codellama(32_016, 80, 8192, 64, 8, 128, 28_672),
    "llama3-8b": _llama3(32, 4096, 32, 8, 128, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 8, 128, 28_672),
    "llama3.1-8b": _llama31(32, 4096, 32, 8, 128, 14_336),
    "llama3.1-70b": _llama31(80, 8192, 64, 8, 128, 28_672),
    "llama3.1-405b": _llama31(126, 16_384, 128, 8, 128, 53_248),
    "llama3.2-1b": _llama32(16, 2048, 32, 8, 64, 8192),
    "llama3.2-3b": _llama32(28, 3072, 24, 8, 128, 8192),
    "llama3.3-70b": _llama31(80, 8192, 64, 8, 128, 28_672),
    "openllama-3b": _llama1(26, 3200, 32, 32, 100, 8640),
    "tinyllama-1.1b": LlamaConfig(32_000, 22, 2048, 32, 4, 64, 5632, max_seq_len=2048),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 64, 1536, rope_theta=100_000.0),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 64, 2560, rope_theta=100_000.0),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 64, 8192, rope_theta=130_000.0),
    "mistral-7b-v0.1": _mistral(
        32_000, 32, 4096, 32, 8, 128, 14_336, rope_theta=10_000.0, sliding_window=4096
    ),
    "mistral-7b-v0.2": _mistral(32_000, 32, 4096, 32, 8, 128, 14_336),
    "mistral-7b-v0.3": _mistral(32_768, 32, 4096, 32, 8, 128, 14_336),
    "mistral-nemo-12b": _mistral(131_072, 40, 5120, 32, 8, 128, 14_336, max_seq_len=1_024_000),
    "ministral-8b": _mistral(
        131_072, 36, 4096, 32, 8, 128, 12_288, rope_theta=100_000_000.0, sliding_window=32_768
    ),
    "mistral-small-24b": _mistral(131_072, 40, 5120, 32, 8, 128, 32_768, rope_theta=100_000_000.0),
    "qwen2.5-0.5b": _qwen25(151_936, 24, 896, 14, 2, 64, 4864, tie_embeddings=True),
    "qwen2.5-1.5b": _qwen25(151_936, 28, 1536, 12, 2, 128, 8960, tie_embeddings=True),
    "qwen2.5-3b": _qwen25(151_936, 36, 2048, 16, 2, 128, 11_008, tie_embeddings=True),
    "qwen2.5-7b": _qwen25(152_064, 28, 3584, 28, 4, 128, 18_944),
    "qwen2.5-14b": _qwen25(152_064, 48, 5120, 40, 8, 128, 13_824),
    "qwen2.5-32b": _qwen25(152_064, 64, 5120, 40, 8, 128, 27_648),
    "qwen2.5-72b": _qwen25(152_064, 80, 8192, 64, 8, 128, 29_568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 128, 6144, tie_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 128, 9728, tie_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 128, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 128, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 128, 25_600),
    "smollm3-3b": LlamaConfig(
        128_256,
        36,
        2048,
        16,
        4,
        128,
        11_008,
        max_seq_len=65_536,
        norm_eps=1e-6,
        rope_theta=5_000_000.0,
        tie_embeddings=True,
        no_rope_layers=every_fourth(36),
    ),
    "olmo2-1b": _olmo2(100_352, 16, 2048, 16, 16, 128, 8192),
    "olmo2-7b": _olmo2(100_352, 32, 4096, 32, 32, 128, 11_008),
    "olmo2-13b": _olmo2(100_352, 40, 5120, 40, 40, 128, 13_824),
    "olmo2-32b": _olmo2(100_352, 64, 5120, 40, 8, 128, 27_648),
    "olmo3-7b": _olmo3(32, 4096, 32, 32, 128, 11_008),
    "olmo3-32b": _olmo3(64, 5120, 40, 8, 128, 27_648),
    "phi-3-mini-4k": LlamaConfig(
        32_064, 32, 3072, 32, 32, 96, 8192, max_seq_len=4096, sliding_window=2047
    ),
    "phi-4": LlamaConfig(
        100_352, 40, 5120, 40, 10, 128, 17_920, max_seq_len=16_384, rope_theta=250_000.0
    ),
    "granite-3.3-2b": _granite33(
        40, 2048, 32, 8, 64, 8192, attention_multiplier=1 / 64, logits_scaling=8.0
    ),
    "granite-3.3-8b": _granite33(
        40, 4096, 32, 8, 128, 12_800, attention_multiplier=1 / 128, logits_scaling=16.0
    ),
    "stories-260k": _stories(512, 5, 64, 8, 4, 8, 172, max_seq_len=512),
    "stories-15m": _stories(32_000, 6, 288, 6, 6, 48, 768, max_seq_len=256),
    "stories-42m": _stories(32_000, 8, 512, 8, 8, 64, 1376, max_seq_len=1024),
    "stories-110m": _stories(32_000, 12, 768, 12, 12, 64, 2048, max_seq_len=1024),
}


def preset(name: str) -> LlamaConfig:
    """Return the configuration of a released model.

    Raises:
        UsageError: no preset has this name.

    Examples:
        >>> preset("llama3.2-1b").num_layers
        16
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


SHAPE_FIELDS = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
"""The sizes that identify a released model; a file may have lost or changed the other fields."""
OTHER_FIELDS = (
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
    "tie_embeddings",
    "max_seq_len",
    *LLAMA_VALUES,
)


def nearest_preset(config: LlamaConfig) -> str:
    """Return the name of the most similar released model of this shape; empty if there is none."""
    # The context length decides between two that are equally near: it is rarely changed.
    fields = (*OTHER_FIELDS, *OTHER_FIELDS, "max_seq_len")
    same_shape = [
        name for name in PRESETS if not differing_fields(SHAPE_FIELDS, config, PRESETS[name])
    ]
    return min(
        same_shape,
        key=lambda name: len(differing_fields(fields, config, PRESETS[name])),
        default="",
    )


def differing_fields(
    fields: tuple[str, ...], config: LlamaConfig, released: LlamaConfig
) -> list[str]:
    """Return the fields in which two configurations differ."""
    return [field for field in fields if getattr(config, field) != getattr(released, field)]
