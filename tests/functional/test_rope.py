import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match
from hypothesis import given
from hypothesis import strategies as st

from jllama import oracle
from jllama.config import LlamaConfig, RopeScaling
from jllama.functional import (
    apply_rope,
    apply_rope_interleaved,
    dynamic_theta,
    half_split_from_interleaved,
    inverse_frequencies,
    rope_tables,
    scale_linear,
    scale_llama3,
    scale_yarn,
)
from jllama.verify.checks import relative_error

HEAD_DIM = 64
LAST_POSITION = 2**24 - 1
seeds = st.integers(0, 2**32 - 1)
positions_of_any_size = st.lists(st.integers(0, LAST_POSITION), min_size=9, max_size=9)


def draw(seed, seq, heads=3, head_dim=HEAD_DIM):
    return np.float64(np.float32(np.random.default_rng(seed).standard_normal((heads, seq, head_dim))))


def exact_tables(positions, frequencies):
    angles = np.outer(positions, frequencies)
    return jnp.asarray(np.cos(angles))[None], jnp.asarray(np.sin(angles))[None]


def rotated(x, positions, frequencies):
    """``[heads, seq, head_dim]`` through ``apply_rope`` in float32."""
    tables = rope_tables(jnp.asarray(positions, jnp.int32)[None], frequencies)
    return np.asarray(apply_rope(jnp.float32(x)[None], *tables)[0], np.float64)


# Frequencies


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
def test_inverse_frequencies_equal_the_oracle(head_dim, theta):
    expected = oracle.rope_frequencies(LlamaConfig(head_dim=head_dim, rope_theta=theta))
    np.testing.assert_allclose(inverse_frequencies(head_dim, theta), expected, rtol=1e-14)


def test_linear_scaling_equals_the_oracle():
    config = LlamaConfig(head_dim=128, rope_scaling=RopeScaling("linear", 4.0))
    actual = scale_linear(inverse_frequencies(128, 10_000.0), 4.0)
    np.testing.assert_allclose(actual, oracle.rope_frequencies(config), rtol=1e-14)


@pytest.mark.parametrize(("head_dim", "factor"), [(128, 8.0), (64, 32.0), (128, 32.0)])
def test_llama3_scaling_equals_meta_in_all_three_bands(head_dim, factor):
    config = LlamaConfig(head_dim=head_dim, rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", factor))
    plain = inverse_frequencies(head_dim, 500_000.0)
    actual = scale_llama3(plain, factor, 1.0, 4.0, 8192)
    np.testing.assert_allclose(actual, oracle.rope_frequencies(config), rtol=1e-14)
    wavelengths = 2 * np.pi / plain
    kept, divided = wavelengths < 8192 / 4, wavelengths > 8192
    blended = ~kept & ~divided
    assert min(kept.sum(), divided.sum(), blended.sum()) >= 3
    np.testing.assert_array_equal(actual[kept], plain[kept])
    np.testing.assert_array_equal(actual[divided], plain[divided] / factor)
    assert np.all((actual[blended] < plain[blended]) & (actual[blended] > plain[blended] / factor))


@given(
    head_dim=st.sampled_from([64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 2),
    high=st.floats(2.5, 8),
    length=st.sampled_from([512, 4096, 8192, 32768]),
)
def test_llama3_scaling_equals_meta_for_any_numbers(head_dim, theta, factor, low, high, length):
    scaling = RopeScaling("llama3", factor, low, high, length)
    expected = oracle.rope_frequencies(LlamaConfig(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling))
    actual = scale_llama3(inverse_frequencies(head_dim, theta), factor, low, high, length)
    np.testing.assert_allclose(actual, expected, rtol=1e-13)


def oracle_config(head_dim, theta, *scaling, max_seq_len=256, **more):
    rope_scaling = RopeScaling(*scaling, **more)
    return LlamaConfig(head_dim=head_dim, rope_theta=theta, rope_scaling=rope_scaling, max_seq_len=max_seq_len)


@pytest.mark.parametrize(("head_dim", "theta", "length"), [(128, 10_000.0, 4096), (64, 500_000.0, 8192)])
def test_yarn_scaling_keeps_blends_and_divides(head_dim, theta, length):
    plain = inverse_frequencies(head_dim, theta)
    actual = scale_yarn(plain, theta, 16.0, 32.0, 1.0, length)
    config = oracle_config(head_dim, theta, "yarn", 16.0, original_max_seq_len=length)
    np.testing.assert_allclose(actual, oracle.rope_frequencies(config), rtol=1e-14)
    turns = length * plain / (2 * np.pi)
    np.testing.assert_array_equal(actual[turns >= 32], plain[turns >= 32])
    slow = np.flatnonzero(turns <= 1)[1:]  # the bounds are rounded outwards, by less than one pair
    np.testing.assert_array_equal(actual[slow], plain[slow] / 16)
    share = (actual / plain - 1 / 16) / (1 - 1 / 16)  # how much of each frequency is kept: an even slope
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
def test_yarn_scaling_equals_the_oracle_for_any_numbers(head_dim, theta, factor, fast, slow, length):
    more = {"original_max_seq_len": length, "beta_fast": fast, "beta_slow": slow}
    expected = oracle.rope_frequencies(oracle_config(head_dim, theta, "yarn", factor, **more))
    plain = inverse_frequencies(head_dim, theta)
    actual = scale_yarn(plain, theta, factor, fast, slow, length)
    np.testing.assert_allclose(actual, expected, rtol=1e-11)
    assert np.all((actual <= plain * (1 + 1e-15)) & (actual >= plain / factor * (1 - 1e-15)))
    assert np.all(np.diff(actual) < 0)
    np.testing.assert_allclose(scale_yarn(plain, theta, 1.0, fast, slow, length), plain, rtol=1e-15)


@given(
    head_dim=st.sampled_from([4, 64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    seq=st.integers(0, 2**20),
    max_seq_len=st.integers(1, 2**20),
    original=st.integers(1, 2**17),
)
def test_dynamic_scaling_equals_the_oracle_for_any_numbers(head_dim, theta, factor, seq, max_seq_len, original):
    length = max(seq, max_seq_len)
    config = oracle_config(head_dim, theta, "dynamic", factor, original_max_seq_len=original, max_seq_len=max_seq_len)
    actual = inverse_frequencies(head_dim, dynamic_theta(theta, head_dim, factor, length, original))
    np.testing.assert_allclose(actual, oracle.rope_frequencies(config, seq), rtol=1e-11)
    stretch = max(1, factor * length / original - (factor - 1))
    kept_and_slowed = inverse_frequencies(head_dim, theta)[[0, -1]] / [1, stretch]
    np.testing.assert_allclose(actual[[0, -1]], kept_and_slowed, rtol=1e-11)


@given(
    factor=st.floats(1, 64),
    length=st.integers(1, 2**17),
    original=st.integers(1, 2**17),
)
def test_dynamic_scaling_starts_at_the_original_length_and_grows(factor, length, original):
    theta, longer = (dynamic_theta(10_000.0, 64, factor, tokens, original) for tokens in (length, length + 1))
    assert theta == 10_000.0 if length <= original else theta > 10_000.0
    assert longer > theta if length >= original else longer == theta


# Tables


def assert_tables_exact(positions, frequencies):
    angles = np.outer(positions, frequencies)
    cos, sin = rope_tables(jnp.asarray(positions, jnp.int32), frequencies)
    assert cos.dtype == sin.dtype == jnp.float32
    assert np.abs(np.float64(cos) - np.cos(angles)).max() < 1e-6
    assert np.abs(np.float64(sin) - np.sin(angles)).max() < 1e-6


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_tables_are_exact_at_telling_positions(theta):
    edges = [255, 256, 257, 4000, 9000, 65535, 65536, 65537, 100_000, 131_071, 2**20, LAST_POSITION - 1, LAST_POSITION]
    assert_tables_exact([*range(513), *edges], inverse_frequencies(128, theta))


@given(positions=positions_of_any_size, factor=st.sampled_from([1.0, 8.0, 32.0]))
def test_tables_are_exact_everywhere(positions, factor):
    assert_tables_exact(positions, scale_llama3(inverse_frequencies(64, 500_000.0), factor, 1.0, 4.0, 8192))


def test_tables_take_positions_of_any_shape_and_trace():
    positions = jnp.array([[0, 5, 9000], [3, 4, 100_000]])
    frequencies = inverse_frequencies(64, 10_000.0)
    compiled = jax.jit(lambda positions: rope_tables(positions, frequencies))(positions)
    assert compiled[0].shape == (2, 3, 32)
    for actual, expected in zip(compiled, rope_tables(positions.reshape(-1), frequencies), strict=True):
        assert relative_error(actual.reshape(-1, 32), expected) < 1e-6


# Rotation


@given(seed=seeds, positions=positions_of_any_size, theta=st.sampled_from([10_000.0, 500_000.0]))
def test_equals_the_oracle(seed, positions, theta):
    x, frequencies = draw(seed, len(positions)), inverse_frequencies(HEAD_DIM, theta)
    expected = oracle.rotate(x, np.array(positions), frequencies)
    assert relative_error(rotated(x, positions, frequencies), expected) < 1e-5
    with jax.enable_x64(True):
        exact = apply_rope(jnp.asarray(x)[None], *exact_tables(positions, frequencies))[0]
        assert exact.dtype == jnp.float64
        assert relative_error(exact, expected) < 1e-12


@given(seed=seeds, positions=positions_of_any_size)
def test_keeps_the_norm_of_every_pair(seed, positions):
    x = draw(seed, len(positions))
    pairs, turned = (
        a[..., : HEAD_DIM // 2] + 1j * a[..., HEAD_DIM // 2 :]
        for a in (x, rotated(x, positions, inverse_frequencies(HEAD_DIM, 10_000.0)))
    )
    assert relative_error(np.abs(turned), np.abs(pairs)) < 1e-5


@given(seed=seeds, query=st.integers(0, 10_000), distance=st.integers(0, 512), shift=st.integers(0, 2**20))
def test_dot_products_depend_on_the_distance_alone(seed, query, distance, shift):
    q, k = draw(seed, 1), draw(seed + 1, 1)
    frequencies = inverse_frequencies(HEAD_DIM, 10_000.0)

    def score(offset):
        rotated_query = rotated(q, [query + distance + offset], frequencies)
        return np.sum(rotated_query * rotated(k, [query + offset], frequencies), axis=-1)

    bound = np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1)
    assert np.all(np.abs(score(0) - score(shift)) < 2e-6 * bound)


def test_position_zero_is_the_identity():
    x = draw(0, 5)
    np.testing.assert_array_equal(rotated(x, np.zeros(5), inverse_frequencies(HEAD_DIM, 10_000.0)), x)


@given(seed=seeds, positions=positions_of_any_size)
def test_layouts_are_equal_after_the_permutation_and_not_before(seed, positions):
    x, tables = (
        jnp.float32(draw(seed, 9))[None],
        rope_tables(
            jnp.asarray([[*positions[:-1], LAST_POSITION]], jnp.int32), inverse_frequencies(HEAD_DIM, 10_000.0)
        ),
    )
    interleaved = apply_rope_interleaved(x, *tables)
    np.testing.assert_array_equal(
        apply_rope(half_split_from_interleaved(x), *tables), half_split_from_interleaved(interleaved)
    )
    assert relative_error(apply_rope(x, *tables), interleaved) > 100 * 1e-5


@given(seed=seeds, positions=positions_of_any_size)
def test_interleaved_equals_complex_numbers(seed, positions):
    x, frequencies = draw(seed, len(positions)), inverse_frequencies(HEAD_DIM, 10_000.0)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * np.outer(positions, frequencies))
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    with jax.enable_x64(True):
        actual = apply_rope_interleaved(jnp.asarray(x)[None], *exact_tables(positions, frequencies))[0]
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("rope", [apply_rope, apply_rope_interleaved])
def test_each_row_has_its_own_positions(rope):
    x = jnp.float32(np.stack([draw(0, 5), draw(1, 5)]))
    cos, sin = rope_tables(jnp.array([[0, 1, 2, 3, 4], [9000, 9001, 9002, 0, 1]]), inverse_frequencies(HEAD_DIM, 1e4))
    both = rope(x, cos, sin)
    for row in (0, 1):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(both[one], rope(x[one], cos[one], sin[one]))


@pytest.mark.parametrize("rope", [apply_rope, apply_rope_interleaved])
def test_bfloat16_input_is_turned_in_float32(rope):
    x = jnp.asarray(draw(0, 5), jnp.bfloat16)[None]
    tables = rope_tables(jnp.arange(8190, 8195)[None], inverse_frequencies(HEAD_DIM, 10_000.0))
    actual = rope(x, *tables)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, rope(x.astype(jnp.float32), *tables).astype(jnp.bfloat16))


@pytest.mark.parametrize("rope", [apply_rope, apply_rope_interleaved])
def test_gradients(rope):
    positions, frequencies = [0, 7, 9000], inverse_frequencies(8, 10_000.0)
    assert_gradients_match(lambda x: rope(x, *exact_tables(positions, frequencies)), draw(0, 3, 2, 8)[None])
