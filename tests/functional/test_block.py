"""Normalization, the feed-forward network and rotary embedding, each against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match, half_split_from_interleaved
from hypothesis import given
from hypothesis import strategies as st

from jllama.functional import apply_rope, rms_norm, rope_tables, swiglu
from jllama.lab.checks import relative_error
from jllama.models import oracle, rope_scaling
from jllama.models.rope_scaling import Llama3Scaling

HEAD_DIM = 64
LAST_POSITION = 2**24 - 1
seeds = st.integers(0, 2**32 - 1)
positions_of_any_size = st.lists(st.integers(0, LAST_POSITION), min_size=9, max_size=9)
norm = jax.jit(rms_norm, static_argnums=2)
feed_forward = jax.jit(swiglu)
turn = jax.jit(apply_rope)


# Normalization


def draw_rows(seed, shape, size=1.0):
    """Rows of very different sizes, and a scale."""
    rng = np.random.default_rng(seed)
    x = size * rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, (*shape[:-1], 1)))
    return x, 1 + 0.3 * rng.standard_normal(shape[-1])


@given(seed=seeds, size=st.sampled_from([1e-3, 1.0, 1e3]), eps=st.sampled_from([1e-6, 1e-5]))
def test_rms_norm_equals_the_oracle(seed, size, eps):
    x, scale = draw_rows(seed, (2, 3, 96), size)
    with jax.enable_x64(True):
        assert relative_error(norm(x, scale, eps), oracle.rms_norm(x, scale, eps)) < 1e-14


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_row_gives_zeros_with_finite_gradients(dtype):
    normed, back = jax.vjp(jax.jit(lambda x: rms_norm(x, jnp.ones(64), 1e-5)), jnp.zeros(64, dtype))
    assert not np.any(normed)
    assert np.all(np.isfinite(*back(jnp.ones(64, dtype))))


def test_bfloat16_input_has_float32_statistics():
    # Rows are long enough that a bfloat16 sum of squares would stop growing.
    x, scale = map(np.float32, draw_rows(0, (3, 4096)))
    low = x.astype(jnp.bfloat16)
    actual, wide = norm(low, scale, 1e-5), norm(np.float32(low), scale, 1e-5)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, np.asarray(wide).astype(jnp.bfloat16))
    exact = oracle.rms_norm(np.float64(low), np.float64(scale), 1e-5)
    assert relative_error(wide, exact) < 1e-5


def test_gradients_of_rms_norm():
    x, scale = draw_rows(0, (3, 8))
    assert_gradients_match(lambda x, scale: rms_norm(x, scale, 1e-5), x, scale)


# Feed-forward network


def draw_feed_forward(seed, lead, embed=64, mlp=172, size=1.0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, embed), (embed, mlp), (embed, mlp), (mlp, embed))
    sizes = (size, embed**-0.5, embed**-0.5, mlp**-0.5)
    return [s * rng.standard_normal(shape) for s, shape in zip(sizes, shapes, strict=True)]


@given(seed=seeds, lead=st.sampled_from([(), (2, 5)]), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_swiglu_equals_the_oracle(seed, lead, size):
    arrays = draw_feed_forward(seed, lead, size=size)
    with jax.enable_x64(True):
        assert relative_error(feed_forward(*arrays), oracle.swiglu(*arrays)) < 1e-12


def test_saturated_gates_are_zero_or_the_identity():
    gates = np.float32([-1e4, -100.0, 0.0, 100.0, 1e4])
    one = jnp.ones((1, 1), jnp.float32)
    values, back = jax.vjp(jax.jit(lambda x: swiglu(x, one, one, one)), gates[:, None])
    (slopes,) = back(jnp.ones((5, 1)))
    passed = np.maximum(gates, 0)
    np.testing.assert_allclose(values[:, 0], passed**2, rtol=1e-6)
    np.testing.assert_allclose(slopes[:, 0], 2 * passed, rtol=1e-6)


def test_bfloat16_stays_bfloat16_and_near():
    arrays = [array.astype(jnp.bfloat16) for array in draw_feed_forward(0, (7,))]
    actual = feed_forward(*arrays)
    assert actual.dtype == jnp.bfloat16
    assert relative_error(actual, oracle.swiglu(*map(np.float64, arrays))) < 2e-2


def test_gradients_of_swiglu():
    assert_gradients_match(swiglu, *draw_feed_forward(0, (3,), embed=4, mlp=6))


# Rotary embedding


def draw_heads(seed, rows, seq, heads=3, head_dim=HEAD_DIM):
    return np.random.default_rng(seed).standard_normal((rows, heads, seq, head_dim))


def inverse_frequencies(head_dim, theta):
    return np.array(rope_scaling.inverse_frequencies(head_dim, theta))


def exact_tables(positions, frequencies):
    angles = np.asarray(positions)[..., None] * frequencies
    return np.cos(angles), np.sin(angles)


def assert_tables_exact(tables, positions, frequencies):
    for actual, expected in zip(
        tables(np.int32(positions)), exact_tables(positions, frequencies), strict=True
    ):
        assert actual.dtype == jnp.float32
        assert np.abs(np.float64(actual) - expected).max() < 1e-6


def test_tables_are_exact_at_telling_positions():
    """Also for positions of several axes."""
    frequencies = inverse_frequencies(128, 10_000.0)
    edges = [*range(513), 4000, 9000, 65535, 65536, 65537, 100_000, 131_071, 2**20]
    positions = [edges, [LAST_POSITION - edge for edge in edges]]
    tables = jax.jit(lambda positions: rope_tables(positions, frequencies))
    assert_tables_exact(tables, positions, frequencies)


SCALED = np.array(Llama3Scaling(8.0).frequencies(64, 500_000.0, 0))
scaled_tables = jax.jit(lambda positions: rope_tables(positions, SCALED))


@given(positions=positions_of_any_size)
def test_tables_are_exact_everywhere(positions):
    assert_tables_exact(scaled_tables, positions, SCALED)


@given(seed=seeds, positions=positions_of_any_size, theta=st.sampled_from([10_000.0, 500_000.0]))
def test_rotation_is_that_of_the_oracle_and_of_complex_numbers(seed, positions, theta):
    """The oracle's heads are half-split, too; a complex number is a pair of neighbors."""
    x, frequencies = draw_heads(seed, 2, 9), inverse_frequencies(HEAD_DIM, theta)
    positions = np.array([positions, [*positions[1:], LAST_POSITION]])  # each row has its own
    cos, sin = exact_tables(positions, frequencies)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)[:, None]
    pairs = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    half_split = half_split_from_interleaved(x)
    with jax.enable_x64(True):
        actual = turn(half_split, cos, sin)
        assert actual.dtype == jnp.float64
    assert relative_error(actual, half_split_from_interleaved(pairs)) < 1e-12
    for row in (0, 1):
        expected = oracle.rotate(half_split[row], positions[row], frequencies)
        assert relative_error(actual[row], expected) < 1e-12


def test_bfloat16_input_is_turned_in_float32():
    x = draw_heads(0, 1, 5).astype(jnp.bfloat16)
    tables = exact_tables([range(8190, 8195)], inverse_frequencies(HEAD_DIM, 10_000.0))
    tables = [np.float32(table) for table in tables]
    actual, wide = turn(x, *tables), turn(np.float32(x), *tables)
    assert (actual.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(actual, np.asarray(wide).astype(jnp.bfloat16))


def test_gradients_of_apply_rope():
    tables = exact_tables([[0, 7, 9000]], inverse_frequencies(8, 10_000.0))
    assert_gradients_match(
        lambda x: apply_rope(x, *map(jnp.asarray, tables)), draw_heads(0, 1, 3, 2, 8)
    )
