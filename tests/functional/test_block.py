"""Normalization, the feed-forward network and rotary embedding, each against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match, half_split_from_interleaved
from hypothesis import given
from hypothesis import strategies as st

from jllama import oracle, rope_scaling
from jllama.functional import apply_rope, rms_norm, rope_tables, swiglu
from jllama.rope_scaling import Llama3Scaling
from jllama.verify.checks import relative_error

HEAD_DIM = 64
LAST_POSITION = 2**24 - 1
SHAPES = [(64,), (5, 64), (2, 3, 96)]
LEADS = [(), (7,), (2, 5)]
seeds = st.integers(0, 2**32 - 1)
positions_of_any_size = st.lists(st.integers(0, LAST_POSITION), min_size=9, max_size=9)


# Normalization


def draw_rows(seed, shape, size=1.0):
    """Rows of very different sizes, and a scale, in float64 that is exact in float32."""
    rng = np.random.default_rng(seed)
    x = size * rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, (*shape[:-1], 1)))
    return tuple(
        np.float64(np.float32(array)) for array in (x, 1 + 0.3 * rng.standard_normal(shape[-1]))
    )


@given(
    seed=seeds,
    shape=st.sampled_from(SHAPES),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    eps=st.sampled_from([1e-6, 1e-5]),
)
def test_rms_norm_equals_the_oracle(seed, shape, size, eps):
    x, scale = draw_rows(seed, shape, size)
    actual = rms_norm(jnp.float32(x), jnp.float32(scale), eps)
    assert actual.dtype == jnp.float32
    assert relative_error(actual, oracle.rms_norm(x, scale, eps)) < 1e-6
    with jax.enable_x64(True):
        assert (
            relative_error(
                rms_norm(jnp.asarray(x), jnp.asarray(scale), eps), oracle.rms_norm(x, scale, eps)
            )
            < 1e-14
        )


@given(seed=seeds, factor=st.floats(1e-6, 1e6))
def test_rms_norm_without_eps_ignores_the_scale_of_its_input(seed, factor):
    with jax.enable_x64(True):
        x, scale = map(jnp.asarray, draw_rows(seed, (5, 64)))
        assert relative_error(rms_norm(factor * x, scale, 0.0), rms_norm(x, scale, 0.0)) < 1e-13


@given(seed=seeds)
def test_rms_norm_gives_rows_of_unit_root_mean_square(seed):
    x, _ = draw_rows(seed, (5, 64))
    rows = np.asarray(rms_norm(jnp.float32(x), jnp.ones(64), 1e-12), np.float64)
    np.testing.assert_allclose(np.sqrt(np.mean(rows**2, axis=-1)), 1.0, rtol=1e-6)


def test_eps_matters_at_small_activations():
    x, scale = draw_rows(0, (5, 64), size=1e-3)
    x, scale = jnp.float32(x), jnp.float32(scale)
    assert relative_error(rms_norm(x, scale, 1e-6), rms_norm(x, scale, 1e-5)) > 100 * 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_row_gives_zeros_with_finite_gradients(dtype):
    x = jnp.zeros((2, 64), dtype)
    assert not np.any(rms_norm(x, jnp.ones(64), 1e-5))
    assert np.all(
        np.isfinite(
            jax.grad(lambda x: rms_norm(x, jnp.ones(64), 1e-5).sum().astype(jnp.float32))(x)
        )
    )


def test_bfloat16_input_has_float32_statistics():
    x, scale = draw_rows(
        0, (3, 4096)
    )  # long enough that a bfloat16 sum of squares would stop growing
    low, scale = jnp.asarray(x, jnp.bfloat16), jnp.float32(scale)
    actual = rms_norm(low, scale, 1e-5)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        actual, rms_norm(low.astype(jnp.float32), scale, 1e-5).astype(jnp.bfloat16)
    )


def test_bfloat16_result_is_the_oracle_rounded():
    x, scale = draw_rows(0, (3, 4096))
    low = jnp.asarray(x, jnp.bfloat16)
    actual = np.asarray(rms_norm(low, jnp.float32(scale), 1e-5), np.float64)
    np.testing.assert_allclose(
        actual, oracle.rms_norm(np.asarray(low, np.float64), scale, 1e-5), rtol=2**-8
    )


def test_gradients_of_rms_norm():
    x, scale = draw_rows(0, (3, 8))
    assert_gradients_match(lambda x, scale: rms_norm(x, scale, 1e-5), x, scale)


# Feed-forward network


def draw_feed_forward(seed, lead, embed=64, mlp=172, size=1.0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, embed), (embed, mlp), (embed, mlp), (mlp, embed))
    sizes = (size, embed**-0.5, embed**-0.5, mlp**-0.5)
    return [
        np.float64(np.float32(s * rng.standard_normal(shape)))
        for s, shape in zip(sizes, shapes, strict=True)
    ]


@given(seed=seeds, lead=st.sampled_from(LEADS), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_swiglu_equals_the_oracle(seed, lead, size):
    arrays = draw_feed_forward(seed, lead, size=size)
    expected = oracle.swiglu(*arrays)
    assert relative_error(swiglu(*map(jnp.float32, arrays)), expected) < 1e-5
    with jax.enable_x64(True):
        assert relative_error(swiglu(*map(jnp.asarray, arrays)), expected) < 1e-12


def test_gate_and_up_are_not_interchangeable():
    x, w_gate, w_up, w_down = map(jnp.float32, draw_feed_forward(0, (7,)))
    assert (
        relative_error(swiglu(x, w_up, w_gate, w_down), swiglu(x, w_gate, w_up, w_down))
        > 100 * 1e-5
    )


@pytest.mark.parametrize("gate", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_saturated_gates_are_zero_or_the_identity(gate):
    one = jnp.ones((1, 1))
    value, slope = jax.value_and_grad(lambda x: swiglu(x, one, one, one)[0, 0])(
        jnp.full((1, 1), gate)
    )
    assert relative_error(value, gate**2 if gate > 0 else 0.0) < 1e-6
    assert relative_error(slope, [[2.0 * gate if gate > 0 else 0.0]]) < 1e-6


def test_bfloat16_stays_bfloat16_and_near():
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in draw_feed_forward(0, (7,))]
    actual = swiglu(*arrays)
    assert actual.dtype == jnp.bfloat16
    assert (
        relative_error(actual, oracle.swiglu(*(np.asarray(array, np.float64) for array in arrays)))
        < 2e-2
    )


def test_gradients_of_swiglu():
    assert_gradients_match(swiglu, *draw_feed_forward(0, (3,), embed=4, mlp=6))


# Rotary embedding


def draw_heads(seed, seq, heads=3, head_dim=HEAD_DIM):
    return np.float64(
        np.float32(np.random.default_rng(seed).standard_normal((heads, seq, head_dim)))
    )


def inverse_frequencies(head_dim, theta):
    return np.array(rope_scaling.inverse_frequencies(head_dim, theta))


def exact_tables(positions, frequencies):
    angles = np.outer(positions, frequencies)
    return jnp.asarray(np.cos(angles))[None], jnp.asarray(np.sin(angles))[None]


def rotated(x, positions, frequencies):
    """``[heads, seq, head_dim]`` through ``apply_rope`` in float32."""
    tables = rope_tables(jnp.asarray(positions, jnp.int32)[None], frequencies)
    return np.asarray(apply_rope(jnp.float32(x)[None], *tables)[0], np.float64)


# Tables


def assert_tables_exact(positions, frequencies):
    angles = np.outer(positions, frequencies)
    cos, sin = rope_tables(jnp.asarray(positions, jnp.int32), frequencies)
    assert cos.dtype == sin.dtype == jnp.float32
    assert np.abs(np.float64(cos) - np.cos(angles)).max() < 1e-6
    assert np.abs(np.float64(sin) - np.sin(angles)).max() < 1e-6


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_tables_are_exact_at_telling_positions(theta):
    edges = [
        255,
        256,
        257,
        4000,
        9000,
        65535,
        65536,
        65537,
        100_000,
        131_071,
        2**20,
        LAST_POSITION - 1,
        LAST_POSITION,
    ]
    assert_tables_exact([*range(513), *edges], inverse_frequencies(128, theta))


@given(positions=positions_of_any_size, factor=st.sampled_from([1.0, 8.0, 32.0]))
def test_tables_are_exact_everywhere(positions, factor):
    assert_tables_exact(positions, np.array(Llama3Scaling(factor).frequencies(64, 500_000.0, 0)))


def test_tables_take_positions_of_any_shape_and_trace():
    positions = jnp.array([[0, 5, 9000], [3, 4, 100_000]])
    frequencies = inverse_frequencies(64, 10_000.0)
    compiled = jax.jit(lambda positions: rope_tables(positions, frequencies))(positions)
    assert compiled[0].shape == (2, 3, 32)
    for actual, expected in zip(
        compiled, rope_tables(positions.reshape(-1), frequencies), strict=True
    ):
        assert relative_error(actual.reshape(-1, 32), expected) < 1e-6


# Rotation


@given(seed=seeds, positions=positions_of_any_size, theta=st.sampled_from([10_000.0, 500_000.0]))
def test_rotation_equals_the_oracle(seed, positions, theta):
    x, frequencies = draw_heads(seed, len(positions)), inverse_frequencies(HEAD_DIM, theta)
    expected = oracle.rotate(x, np.array(positions), frequencies)
    assert relative_error(rotated(x, positions, frequencies), expected) < 1e-5
    with jax.enable_x64(True):
        exact = apply_rope(jnp.asarray(x)[None], *exact_tables(positions, frequencies))[0]
        assert exact.dtype == jnp.float64
        assert relative_error(exact, expected) < 1e-12


@given(seed=seeds, positions=positions_of_any_size)
def test_keeps_the_norm_of_every_pair(seed, positions):
    x = draw_heads(seed, len(positions))
    pairs, turned = (
        a[..., : HEAD_DIM // 2] + 1j * a[..., HEAD_DIM // 2 :]
        for a in (x, rotated(x, positions, inverse_frequencies(HEAD_DIM, 10_000.0)))
    )
    assert relative_error(np.abs(turned), np.abs(pairs)) < 1e-5


@given(
    seed=seeds,
    query=st.integers(0, 10_000),
    distance=st.integers(0, 512),
    shift=st.integers(0, 2**20),
)
def test_dot_products_depend_on_the_distance_alone(seed, query, distance, shift):
    q, k = draw_heads(seed, 1), draw_heads(seed + 1, 1)
    frequencies = inverse_frequencies(HEAD_DIM, 10_000.0)

    def score(offset):
        rotated_query = rotated(q, [query + distance + offset], frequencies)
        return np.sum(rotated_query * rotated(k, [query + offset], frequencies), axis=-1)

    bound = np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1)
    assert np.all(np.abs(score(0) - score(shift)) < 2e-6 * bound)


def test_position_zero_is_the_identity():
    x = draw_heads(0, 5)
    np.testing.assert_array_equal(
        rotated(x, np.zeros(5), inverse_frequencies(HEAD_DIM, 10_000.0)), x
    )


@given(seed=seeds, positions=positions_of_any_size)
def test_half_split_heads_are_turned_as_interleaved_ones_are(seed, positions):
    x, frequencies = draw_heads(seed, 9), inverse_frequencies(HEAD_DIM, 10_000.0)
    positions = [*positions[:-1], LAST_POSITION]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * np.outer(positions, frequencies))
    expected = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    with jax.enable_x64(True):
        tables = exact_tables(positions, frequencies)
        actual = apply_rope(jnp.asarray(half_split_from_interleaved(x))[None], *tables)[0]
        assert relative_error(actual, half_split_from_interleaved(expected)) < 1e-12
        assert relative_error(apply_rope(jnp.asarray(x)[None], *tables)[0], expected) > 100 * 1e-5


def test_each_row_has_its_own_positions():
    x = jnp.float32(np.stack([draw_heads(0, 5), draw_heads(1, 5)]))
    cos, sin = rope_tables(
        jnp.array([[0, 1, 2, 3, 4], [9000, 9001, 9002, 0, 1]]), inverse_frequencies(HEAD_DIM, 1e4)
    )
    both = apply_rope(x, cos, sin)
    for row in (0, 1):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(both[one], apply_rope(x[one], cos[one], sin[one]))


def test_bfloat16_input_is_turned_in_float32():
    x = jnp.asarray(draw_heads(0, 5), jnp.bfloat16)[None]
    tables = rope_tables(jnp.arange(8190, 8195)[None], inverse_frequencies(HEAD_DIM, 10_000.0))
    actual = apply_rope(x, *tables)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        actual, apply_rope(x.astype(jnp.float32), *tables).astype(jnp.bfloat16)
    )


def test_gradients_of_apply_rope():
    positions, frequencies = [0, 7, 9000], inverse_frequencies(8, 10_000.0)
    assert_gradients_match(
        lambda x: apply_rope(x, *exact_tables(positions, frequencies)), draw_heads(0, 3, 2, 8)[None]
    )
