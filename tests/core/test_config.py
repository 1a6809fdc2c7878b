"""Sizes are derived by rules, and what cannot be built is refused in one sentence."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllama.core import UsageError
from jllama.core.config import MAX_SIZES, ROPE_SCALINGS, LlamaConfig, RopeScaling, llama_mlp_dim
from jllama.models.rope_scaling import DynamicScaling, Llama3Scaling, YarnScaling


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
        *[
            (
                {"type": type, "factor": factor},
                f"^rope_scaling.factor is {factor}; it must be at least 1, and finite$",
            )
            for type, factor in [("linear", 0.5), ("dynamic", math.nan), ("llama3", math.inf)]
        ],
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
        *[
            (
                {"type": type, "factor": 8.0, name: value},
                f"{names}; they must be positive, the first one not larger$",
            )
            for type, name, value, names in [
                ("llama3", "low_freq_factor", 4.5, "low_freq_factor 4.5 and high_freq_factor 4.0"),
                ("llama3", "low_freq_factor", 0.0, "low_freq_factor 0.0 and high_freq_factor 4.0"),
                ("llama3", "high_freq_factor", 0.5, "low_freq_factor 1.0 and high_freq_factor 0.5"),
                ("yarn", "beta_slow", 33.0, "beta_slow 33.0 and beta_fast 32.0"),
                ("yarn", "beta_fast", math.nan, "beta_slow 1.0 and beta_fast nan"),
            ]
        ],
        *[
            (
                {"type": "yarn", "factor": 8.0, "attention_factor": value},
                f"^rope_scaling.attention_factor is {value}; "
                "it must be positive, or 0 to derive it$",
            )
            for value in (-1.0, math.nan)
        ],
    ],
)
def test_scaling_that_means_nothing_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RopeScaling.from_fields(settings)


@given(factor=st.floats(1, 1000), given_factor=st.floats(0.1, 10))
def test_yarn_derives_its_attention_factor(factor, given_factor):
    derived = 0.1 * math.log(factor) + 1
    assert YarnScaling(factor).attention_factor == pytest.approx(derived, rel=1e-15)
    # DeepSeek's quotient takes both of its fields.
    for fields in ({"mscale": 0.7}, {"mscale_all_dim": 0.7}):
        assert YarnScaling(factor, **fields).attention_factor == pytest.approx(derived, rel=1e-15)
    assert YarnScaling(factor, mscale=0.7, mscale_all_dim=0.7).attention_factor == 1
    assert YarnScaling(factor, attention_factor=given_factor).attention_factor == given_factor
    assert DynamicScaling(factor).attention_factor == 1


def test_a_scaling_factor_is_never_guessed():
    with pytest.raises(TypeError, match="factor"):
        Llama3Scaling()
