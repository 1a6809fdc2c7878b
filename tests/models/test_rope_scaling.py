"""Frequencies against the oracle; names and fields as configurations and run folders have them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllama.core import UsageError
from jllama.core.config import ROPE_SCALINGS, LlamaConfig, RopeScaling
from jllama.core.model import rope_frequencies as frequencies
from jllama.models import oracle, rope_scaling
from jllama.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling


def inverse_frequencies(head_dim, theta):
    return np.array(rope_scaling.inverse_frequencies(head_dim, theta))


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
def test_plain_and_linear_frequencies_equal_the_oracle(head_dim, theta):
    plain = LlamaConfig(head_dim=head_dim, rope_theta=theta)
    for config in (plain, dataclasses.replace(plain, rope_scaling=LinearScaling(4.0))):
        expected = oracle.rope_frequencies(config)
        np.testing.assert_allclose(frequencies(config), expected, rtol=1e-14)


def test_llama3_scaling_keeps_blends_and_divides():
    config = LlamaConfig(head_dim=64, rope_theta=500_000.0, rope_scaling=Llama3Scaling(32.0))
    plain, actual = inverse_frequencies(64, 500_000.0), frequencies(config)
    wavelengths = 2 * np.pi / plain
    is_kept, is_divided = wavelengths < 8192 / 4, wavelengths > 8192
    is_blended = ~is_kept & ~is_divided
    assert min(is_kept.sum(), is_divided.sum(), is_blended.sum()) >= 3
    np.testing.assert_array_equal(actual[is_kept], plain[is_kept])
    np.testing.assert_array_equal(actual[is_divided], plain[is_divided] / 32)
    blended = actual[is_blended] / plain[is_blended]
    assert np.all((blended < 1) & (blended > 1 / 32))


@given(
    head_dim=st.sampled_from([64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 2),
    high=st.floats(2.5, 8),
    length=st.sampled_from([512, 4096, 8192, 32768]),
)
def test_llama3_scaling_equals_the_oracle_for_any_numbers(
    head_dim, theta, factor, low, high, length
):
    scaling = Llama3Scaling(factor, low, high, length)
    config = LlamaConfig(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    np.testing.assert_allclose(frequencies(config), oracle.rope_frequencies(config), rtol=1e-13)


def test_yarn_scaling_keeps_blends_and_divides():
    theta, length = 500_000.0, 8192
    scaling = YarnScaling(16.0, original_max_seq_len=length)
    config = LlamaConfig(head_dim=64, rope_theta=theta, rope_scaling=scaling)
    plain, actual = inverse_frequencies(64, theta), frequencies(config)
    turns = length * plain / (2 * np.pi)
    np.testing.assert_array_equal(actual[turns >= 32], plain[turns >= 32])
    slow = np.flatnonzero(turns <= 1)[1:]  # the bounds are rounded outwards, by less than one pair
    np.testing.assert_array_equal(actual[slow], plain[slow] / 16)
    # How much of each frequency is kept is an even slope.
    share = (actual / plain - 1 / 16) / (1 - 1 / 16)
    sloped = share[(share > 0) & (share < 1)]
    assert len(sloped) >= 8
    np.testing.assert_allclose(np.diff(sloped), -1 / (len(sloped) + 1), rtol=1e-9)


@given(
    head_dim=st.sampled_from([2, 8, 64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    fast=st.floats(8, 64),
    slow=st.floats(0.25, 4),
    length=st.sampled_from([1, 64, 512, 4096, 32768, 2**20]),
)
def test_yarn_scaling_equals_the_oracle_for_any_numbers(
    head_dim, theta, factor, fast, slow, length
):
    scaling = YarnScaling(factor, length, fast, slow)
    config = LlamaConfig(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    plain, actual = inverse_frequencies(head_dim, theta), frequencies(config)
    np.testing.assert_allclose(actual, oracle.rope_frequencies(config), rtol=1e-11)
    assert np.all((actual <= plain * (1 + 1e-15)) & (actual >= plain / factor * (1 - 1e-15)))
    assert np.all(np.diff(actual) < 0)
    np.testing.assert_allclose(
        YarnScaling(1.0, length, fast, slow).frequencies(head_dim, theta, 0), plain, rtol=1e-15
    )


@given(
    head_dim=st.sampled_from([4, 64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    seq=st.integers(0, 2**20),
    max_seq_len=st.integers(1, 2**20),
    original=st.integers(1, 2**17),
)
def test_dynamic_scaling_equals_the_oracle_for_any_numbers(
    head_dim, theta, factor, seq, max_seq_len, original
):
    length, scaling = max(seq, max_seq_len), DynamicScaling(factor, original)
    config = LlamaConfig(
        head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_seq_len=max_seq_len
    )
    actual = frequencies(config, seq)
    np.testing.assert_allclose(actual, oracle.rope_frequencies(config, seq), rtol=1e-11)
    stretch = max(1, factor * length / original - (factor - 1))
    kept_and_slowed = inverse_frequencies(head_dim, theta)[[0, -1]] / [1, stretch]
    np.testing.assert_allclose(actual[[0, -1]], kept_and_slowed, rtol=1e-11)


# Configurations

OLD_FIELDS = {  # of every run folder of jllama 0.1
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0},
}


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_a_run_folder_of_jllama_0_1_is_read(name):
    """And a configuration as plain data."""
    scaling = ROPE_SCALINGS[name](4.0)
    config = LlamaConfig(rope_scaling={"type": name, "factor": 4.0, **OLD_FIELDS})
    assert config.rope_scaling == scaling
    fields = dataclasses.asdict(config)
    assert fields["rope_scaling"] == {"type": name} | vars(scaling)
    assert LlamaConfig(**fields) == config
    for field in OLD_FIELDS.keys() - vars(scaling).keys():
        with pytest.raises(
            UsageError, match=rf"^rope_scaling\.{field} is 7.0; {name} has no such field$"
        ):
            RopeScaling.from_fields({"type": name, "factor": 4.0, field: 7.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"factor": 8.0},
            r"rope_scaling\.type is None; it must be one of linear, dynamic, llama3, yarn",
        ),
        ({"type": ["yarn"], "factor": 8.0}, r"rope_scaling\.type is \['yarn'\]; it must be one of"),
        ({"type": "llama3"}, r"rope_scaling\.factor is missing"),
        ({"type": "llama3", "factor": "8"}, r"rope_scaling\.factor is '8'; it must be a number"),
        ({"type": "llama3", "factor": True}, r"rope_scaling\.factor is True; it must be a number"),
        (
            {"type": "llama3", "factor": 8, "fator": 9},
            r"rope_scaling\.fator is 9; llama3 has no such field",
        ),
        (
            {"type": "yarn", "factor": 8, "original_max_seq_len": 1.5},
            r"max_seq_len is 1\.5; it must be a whole",
        ),
    ],
)
def test_a_mapping_that_is_no_scaling_is_refused_in_one_sentence(fields, message):
    with pytest.raises(UsageError, match=message):
        LlamaConfig(rope_scaling=fields)
