"""The sizes of every released Llama come out of the rules, and what cannot be built is refused in
one sentence.
"""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllama.config import MAX_SIZES, LlamaConfig, llama_mlp_dim
from jllama.errors import UsageError
from jllama.rope_scaling import (
    ROPE_SCALINGS,
    DynamicScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)


@pytest.mark.parametrize(
    ("embed_dim", "rule", "mlp_dim"),
    [
        (4096, {}, 11008),  # Llama 1 and 2 7B
        (5120, {}, 13824),  # 13B
        (6656, {}, 17920),  # Llama 1 33B
        (8192, {}, 22016),  # Llama 1 65B
        (8192, {"multiple_of": 4096, "multiplier": 1.3}, 28672),  # Llama 2 and 3 70B
        (4096, {"multiple_of": 1024, "multiplier": 1.3}, 14336),  # Llama 3 8B
        (16384, {"multiple_of": 4096, "multiplier": 1.2}, 53248),  # Llama 3.1 405B
        (2048, {"multiple_of": 256, "multiplier": 1.5}, 8192),  # Llama 3.2 1B
        (3072, {"multiple_of": 256, "multiplier": 1.0}, 8192),  # Llama 3.2 3B
        (288, {"multiple_of": 32}, 768),  # llama2.c stories15M
    ],
)
def test_mlp_dim_of_released_models(embed_dim, rule, mlp_dim):
    assert llama_mlp_dim(embed_dim, **rule) == mlp_dim


@given(
    embed_dim=st.integers(1, 20_000),
    multiple_of=st.sampled_from([1, 32, 256, 1024, 4096]),
    multiplier=st.none() | st.floats(0.5, 2),
)
def test_mlp_dim_is_the_next_multiple_up(embed_dim, multiple_of, multiplier):
    unrounded = int(8 * embed_dim / 3)
    if multiplier is not None:
        unrounded = int(multiplier * unrounded)
    width = llama_mlp_dim(embed_dim, multiple_of=multiple_of, multiplier=multiplier)
    assert width % multiple_of == 0
    assert unrounded <= width < unrounded + multiple_of


@given(head_dim=st.integers(1, 64), kv_heads=st.integers(1, 8), group=st.integers(1, 8))
def test_derived_sizes(head_dim, kv_heads, group):
    heads, head_dim = kv_heads * group, 2 * head_dim
    config = LlamaConfig(embed_dim=heads * head_dim, num_heads=heads)
    assert (config.num_kv_heads, config.head_dim) == (heads, head_dim)
    assert config.mlp_dim == llama_mlp_dim(heads * head_dim)
    grouped = LlamaConfig(embed_dim=heads * head_dim, num_heads=heads, num_kv_heads=kv_heads)
    assert (grouped.num_kv_heads, grouped.head_dim) == (kv_heads, head_dim)


def test_given_sizes_are_kept():
    # Neither embed_dim / num_heads nor the rule: heads wider than the residual stream, as published
    # models have.
    config = LlamaConfig(embed_dim=100, num_heads=6, num_kv_heads=2, head_dim=64, mlp_dim=7)
    assert (config.num_kv_heads, config.head_dim, config.mlp_dim) == (2, 64, 7)


@given(
    config=st.builds(
        LlamaConfig,
        vocab_size=st.integers(0, 1000),
        embed_dim=st.just(256),
        num_heads=st.sampled_from([2, 4, 8]),
        num_kv_heads=st.sampled_from([0, 1, 2]),
        head_dim=st.sampled_from([0, 64, 80]),
        rope_scaling=st.none()
        | st.builds(
            lambda kind, factor: kind(factor),
            st.sampled_from([*ROPE_SCALINGS.values()]),
            st.floats(1, 64),
        ),
    )
)
def test_a_config_is_a_value(config):
    assert dataclasses.replace(config) == config
    assert hash(dataclasses.replace(config)) == hash(config)
    assert dataclasses.replace(config, max_seq_len=config.max_seq_len + 1) != config


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LlamaConfig().embed_dim = 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[
            ({name: value}, f"^{name} is {value}; it must be at least 1$")
            for name in ("num_layers", "embed_dim", "num_heads", "max_seq_len")
            for value in (0, -1)
        ],
        *[
            ({name: -1}, f"^{name} is -1; it must be positive, or 0 to derive it$")
            for name in ("vocab_size", "num_kv_heads", "head_dim", "mlp_dim")
        ],
        *[
            ({name: value}, f"^{name} is {value}; it must be positive, and finite$")
            for name in ("norm_eps", "rope_theta")
            for value in (0.0, -1.0, float("nan"), float("inf"))
        ],
        *[
            (
                {name: most + 1},
                f"^{name} is {most + 1:,}; it must be at most {most:,}: no Llama has more$",
            )
            for name, most in MAX_SIZES.items()
        ],
        ({"embed_dim": 10**8}, "^embed_dim is 100,000,000; it must be at most"),
        ({"num_layers": 10**6}, "^num_layers is 1,000,000; it must be at most"),
        ({"vocab_size": 99_999_999_999}, "^vocab_size is 99,999,999,999; it must be at most"),
        (
            {"max_seq_len": 2**63 - 1},
            "^max_seq_len is 9,223,372,036,854,775,807; it must be at most",
        ),
        (
            {"embed_dim": 100, "num_heads": 3},
            "^embed_dim 100 is not divisible by num_heads 3: .* give head_dim$",
        ),
        ({"num_heads": 4, "num_kv_heads": 3}, "^num_heads 4 is not divisible by num_kv_heads 3: "),
        ({"num_heads": 4, "num_kv_heads": 8}, "^num_heads 4 is not divisible by num_kv_heads 8: "),
        ({"head_dim": 65}, "^head_dim 65 is odd: "),
        ({"embed_dim": 12, "num_heads": 4}, "^head_dim 3 is odd: "),
        (
            {"head_dim": 2, "rope_scaling": DynamicScaling(2.0)},
            "^head_dim is 2; it must be over 2 with .* dynamic$",
        ),
        (
            {"rope_theta": 1.0, "rope_scaling": YarnScaling(2.0)},
            "^rope_theta is 1.0; it must be over 1 with .* yarn$",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        LlamaConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"type": "linear", "factor": 0.5},
            r"^rope_scaling.factor is 0.5; it must be at least 1, and finite$",
        ),
        (
            {"type": "llama3", "factor": 0.0},
            r"^rope_scaling.factor is 0.0; it must be at least 1, and finite$",
        ),
        (
            {"type": "dynamic", "factor": float("nan")},
            r"^rope_scaling.factor is nan; it must be at least 1, and finite$",
        ),
        (
            {"type": "linear", "factor": float("inf")},
            r"^rope_scaling.factor is inf; it must be at least 1, and finite$",
        ),
        (
            {"type": "yarn", "factor": 2.0, "original_max_seq_len": 2**40},
            r"^rope_scaling.original_max_seq_len is 1,099",
        ),
        *[
            (
                {"type": type, "factor": 8.0, "original_max_seq_len": 0},
                r"^rope_scaling.original_max_seq_len is 0; it must be at least 1$",
            )
            for type in ("dynamic", "llama3", "yarn")
        ],
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0},
            "low_freq_factor 4.0 and high_freq_factor 4.0",
        ),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 0.0},
            "they must be positive, the first one smaller$",
        ),
        (
            {"type": "llama3", "factor": 8.0, "high_freq_factor": 0.5},
            "they must be positive, the first one smaller$",
        ),
        ({"type": "yarn", "factor": 8.0, "beta_slow": 32.0}, "beta_slow 32.0 and beta_fast 32.0"),
        (
            {"type": "yarn", "factor": 8.0, "beta_slow": 0.0},
            "they must be positive, the first one smaller$",
        ),
        (
            {"type": "yarn", "factor": 8.0, "beta_fast": float("nan")},
            "they must be positive, the first one smaller$",
        ),
        *[
            (
                {"type": "yarn", "factor": 8.0, "attention_factor": value},
                f"^rope_scaling.attention_factor is {value}; "
                "it must be positive, or 0 to derive it$",
            )
            for value in (-1.0, float("nan"))
        ],
        *[
            (
                {"type": type, "factor": 8.0, "attention_factor": 1.0},
                rf"^rope_scaling.attention_factor is 1.0; {type} has no such field$",
            )
            for type in ("linear", "dynamic", "llama3")
        ],
    ],
)
def test_scaling_that_means_nothing_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RopeScaling.from_fields(settings)


@given(factor=st.floats(1, 1000), given_factor=st.floats(0.1, 10))
def test_yarn_derives_its_attention_factor(factor, given_factor):
    assert YarnScaling(factor).attention_factor == pytest.approx(
        0.1 * math.log(factor) + 1, rel=1e-15
    )
    assert YarnScaling(factor, attention_factor=given_factor).attention_factor == given_factor
    assert DynamicScaling(factor).attention_factor == 1


def test_a_scaling_factor_is_never_guessed():
    with pytest.raises(TypeError, match="factor"):
        Llama3Scaling()
