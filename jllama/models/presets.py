"""The configurations of released Llamas and related models, by name.

Other configurations work just as well.
"""

from typing import Any

from jllama.core.config import LLAMA_VALUES, LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.models.rope_scaling import Llama3Scaling, YarnScaling
from jllama.system.errors import unknown_name
from jllama.tokenizers.base import Tokenizer

# The sizes of each model, in the order of the fields of ``LlamaConfig``, and what often differs.
# Source: the params.json and config.json that the models were published with; of Qwen 2.5 and 3
# those of the models trained to converse.
_TABLE = """
name               vocab layers embed heads kv head   mlp context  theta  eps window tied
llama1-7b          32000     32  4096    32 32  128 11008    2048  10000 1e-6      -   no
llama1-13b         32000     40  5120    40 40  128 13824    2048  10000 1e-6      -   no
llama1-33b         32000     60  6656    52 52  128 17920    2048  10000 1e-6      -   no
llama1-65b         32000     80  8192    64 64  128 22016    2048  10000 1e-5      -   no
llama2-7b          32000     32  4096    32 32  128 11008    4096  10000 1e-5      -   no
llama2-13b         32000     40  5120    40 40  128 13824    4096  10000 1e-5      -   no
llama2-70b         32000     80  8192    64  8  128 28672    4096  10000 1e-5      -   no
codellama-7b       32016     32  4096    32 32  128 11008   16384    1e6 1e-5      -   no
codellama-13b      32016     40  5120    40 40  128 13824   16384    1e6 1e-5      -   no
codellama-34b      32000     48  8192    64  8  128 22016   16384    1e6 1e-5      -   no
codellama-70b      32016     80  8192    64  8  128 28672   16384    1e6 1e-5      -   no
llama3-8b         128256     32  4096    32  8  128 14336    8192 500000 1e-5      -   no
llama3-70b        128256     80  8192    64  8  128 28672    8192 500000 1e-5      -   no
llama3.1-8b       128256     32  4096    32  8  128 14336  131072 500000 1e-5      -   no
llama3.1-70b      128256     80  8192    64  8  128 28672  131072 500000 1e-5      -   no
llama3.1-405b     128256    126 16384   128  8  128 53248  131072 500000 1e-5      -   no
llama3.2-1b       128256     16  2048    32  8   64  8192  131072 500000 1e-5      -  yes
llama3.2-3b       128256     28  3072    24  8  128  8192  131072 500000 1e-5      -  yes
llama3.3-70b      128256     80  8192    64  8  128 28672  131072 500000 1e-5      -   no
openllama-3b       32000     26  3200    32 32  100  8640    2048  10000 1e-6      -   no
tinyllama-1.1b     32000     22  2048    32  4   64  5632    2048  10000 1e-5      -   no
smollm2-135m       49152     30   576     9  3   64  1536    8192 100000 1e-5      -  yes
smollm2-360m       49152     32   960    15  5   64  2560    8192 100000 1e-5      -  yes
smollm2-1.7b       49152     24  2048    32 32   64  8192    8192 130000 1e-5      -  yes
mistral-7b-v0.1    32000     32  4096    32  8  128 14336   32768  10000 1e-5   4096   no
mistral-7b-v0.2    32000     32  4096    32  8  128 14336   32768    1e6 1e-5      -   no
mistral-7b-v0.3    32768     32  4096    32  8  128 14336   32768    1e6 1e-5      -   no
mistral-nemo-12b  131072     40  5120    32  8  128 14336 1024000    1e6 1e-5      -   no
ministral-8b      131072     36  4096    32  8  128 12288   32768    1e8 1e-5  32768   no
mistral-small-24b 131072     40  5120    32  8  128 32768   32768    1e8 1e-5      -   no
qwen2.5-0.5b      151936     24   896    14  2   64  4864   32768    1e6 1e-6      -  yes
qwen2.5-1.5b      151936     28  1536    12  2  128  8960   32768    1e6 1e-6      -  yes
qwen2.5-3b        151936     36  2048    16  2  128 11008   32768    1e6 1e-6      -  yes
qwen2.5-7b        152064     28  3584    28  4  128 18944   32768    1e6 1e-6      -   no
qwen2.5-14b       152064     48  5120    40  8  128 13824   32768    1e6 1e-6      -   no
qwen2.5-32b       152064     64  5120    40  8  128 27648   32768    1e6 1e-6      -   no
qwen2.5-72b       152064     80  8192    64  8  128 29568   32768    1e6 1e-6      -   no
qwen3-0.6b        151936     28  1024    16  8  128  3072   40960    1e6 1e-6      -  yes
qwen3-1.7b        151936     28  2048    16  8  128  6144   40960    1e6 1e-6      -  yes
qwen3-4b          151936     36  2560    32  8  128  9728   40960    1e6 1e-6      -  yes
qwen3-8b          151936     36  4096    32  8  128 12288   40960    1e6 1e-6      -   no
qwen3-14b         151936     40  5120    40  8  128 17408   40960    1e6 1e-6      -   no
qwen3-32b         151936     64  5120    64  8  128 25600   40960    1e6 1e-6      -   no
smollm3-3b        128256     36  2048    16  4  128 11008   65536    5e6 1e-6      -  yes
olmo2-1b          100352     16  2048    16 16  128  8192    4096 500000 1e-6      -   no
olmo2-7b          100352     32  4096    32 32  128 11008    4096 500000 1e-6      -   no
olmo2-13b         100352     40  5120    40 40  128 13824    4096 500000 1e-6      -   no
olmo2-32b         100352     64  5120    40  8  128 27648    4096 500000 1e-6      -   no
olmo3-7b          100278     32  4096    32 32  128 11008   65536 500000 1e-6   4096   no
olmo3-32b         100278     64  5120    40  8  128 27648   65536 500000 1e-6   4096   no
phi-3-mini-4k      32064     32  3072    32 32   96  8192    4096  10000 1e-5   2047   no
phi-4             100352     40  5120    40 10  128 17920   16384 250000 1e-5      -   no
granite-3.3-2b     49159     40  2048    32  8   64  8192  131072    1e7 1e-5      -  yes
granite-3.3-8b     49159     40  4096    32  8  128 12800  131072    1e7 1e-5      -  yes
mixtral-8x7b       32000     32  4096    32  8  128 14336   32768    1e6 1e-5      -   no
mixtral-8x22b      32768     56  6144    48  8  128 16384   65536    1e6 1e-5      -   no
llama4-scout      202048     48  5120    40  8  128 16384 10485760 500000 1e-5     -   no
llama4-maverick   202048     48  5120    40  8  128 16384 1048576 500000 1e-5      -   no
qwen3-30b-a3b     151936     48  2048    32  4  128  6144   40960    1e6 1e-6      -   no
qwen3-235b-a22b   151936     94  4096    64  4  128 12288   40960    1e6 1e-6      -   no
olmoe-1b-7b        50304     16  2048    16 16  128  1024    4096  10000 1e-5      -   no
stories-260k         512      5    64     8  4    8   172     512  10000 1e-5      -  yes
stories-15m        32000      6   288     6  6   48   768     256  10000 1e-5      -  yes
stories-42m        32000      8   512     8  8   64  1376    1024  10000 1e-5      -  yes
stories-110m       32000     12   768    12 12   64  2048    1024  10000 1e-5      -  yes
"""
# What all models have whose names begin so.
_OLMO = {"qk_norm": "whole", "norm_placement": "after"}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}


def _experts(num: int, per_token: int, dim: int, normalize: bool) -> dict[str, Any]:
    """Return the fields of a configuration that say which experts it has."""
    return {
        "num_experts": num,
        "experts_per_token": per_token,
        "expert_dim": dim,
        "normalize_expert_weights": normalize,
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "llama3.1-": {"rope_scaling": Llama3Scaling(8.0)},
    "llama3.2-": {"rope_scaling": Llama3Scaling(32.0)},
    "llama3.3-": {"rope_scaling": Llama3Scaling(8.0)},
    "qwen2.5-": {"attention_bias": True},
    "qwen3-": {"qk_norm": "head"},
    "olmo2-": _OLMO,
    "olmo3-": {
        **_OLMO,
        "rope_scaling": YarnScaling(8.0),
        "rope_scaling_layers": "full_attention",
    },
    "llama4-": {
        "router": "sigmoid",
        "shared_expert": True,
        "attention_chunk": 8192,
        "temperature_step": 8192,
    },
    "llama4-scout": {
        **_experts(16, 1, 8192, False),
        "qk_norm": "rotated",
        "rope_scaling": Llama3Scaling(16.0, 1.0, 1.0),
    },
    "llama4-maverick": {
        **_experts(128, 1, 8192, False),
        "dense_layers": tuple(range(0, 48, 2)),
    },
    "mixtral-8x7b": _experts(8, 2, 14_336, True),
    "mixtral-8x22b": _experts(8, 2, 16_384, True),
    "qwen3-30b-": _experts(128, 8, 768, True),
    "qwen3-235b-": _experts(128, 8, 1536, True),
    "olmoe-": {"qk_norm": "whole", **_experts(64, 8, 1024, False)},
    "granite-3.3-2b": {**_GRANITE, "attention_multiplier": 1 / 64, "logits_scaling": 8.0},
    "granite-3.3-8b": {**_GRANITE, "attention_multiplier": 1 / 128, "logits_scaling": 16.0},
}
_EVERY_FOURTH = {
    "smollm3-": "no_rope_layers",
    "llama4-": "no_rope_layers",
    "olmo3-": "full_attention_layers",
}
"""A field that has every fourth layer."""


def every_fourth(num_layers: int) -> tuple[int, ...]:
    """Return every fourth layer: without RoPE in SmolLM3 and Llama 4, without a window in OLMo 3.

    Examples:
        >>> every_fourth(8)
        (3, 7)
    """
    return tuple(range(3, num_layers, 4))


def _read_row(row: str) -> tuple[str, LlamaConfig]:
    """Return the name and the configuration in a row of the table."""
    name, *sizes, context, theta, eps, window, tied = row.split()
    num_layers = int(sizes[1])
    options: dict[str, Any] = {}
    for prefix, values in _OPTIONS.items():
        if name.startswith(prefix):
            options |= values
    for prefix, field in _EVERY_FOURTH.items():
        if name.startswith(prefix):
            options[field] = every_fourth(num_layers)
    config = LlamaConfig(
        *map(int, sizes),
        max_seq_len=int(context),
        rope_theta=float(theta),
        norm_eps=float(eps),
        sliding_window=0 if window == "-" else int(window),
        tie_embeddings=tied == "yes",
        **options,
    )
    return name, config


PRESETS: dict[str, LlamaConfig] = dict(map(_read_row, _TABLE.strip().splitlines()[1:]))
"""The configurations by name."""


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


def summary(config: LlamaConfig, dtype: str, tokenizer: Tokenizer | None) -> str:
    """Describe a model: nearest released Llama, layers, parameters, dtype and tokenizer size."""
    tokens = f"tokenizer of {tokenizer.vocab_size:,} tokens" if tokenizer else "no tokenizer"
    sizes = f"{config.num_layers} layers, {count_parameters(config):,} parameters"
    if config.num_experts:
        sizes += f", {count_parameters(config, active=True):,} of them for each token"
    return f"{nearest_preset(config) or 'llama'}, {sizes}, {dtype}, {tokens}"
