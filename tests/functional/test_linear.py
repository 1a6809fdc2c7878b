"""Matrices for decoding: what they stand for, and what products with them come to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import USERS_GENERATOR
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.functional import DecodeMatrix, decode_matrix

SHAPE = (48, 4, 16)  # like a projection to heads: 48 inputs, 64 outputs
multiply = jax.jit(lambda x, matrix: x @ matrix, compiler_options=USERS_GENERATOR)


def int8(matrix, inputs):
    return decode_matrix(matrix, inputs, "int8")


def draw(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stands_for(matrix):
    """In float64, inputs first."""
    return np.asarray(matrix.values, np.float64).T * np.asarray(matrix.scale, np.float64)


@given(seed=st.integers(0, 99), spread=st.sampled_from([1e-6, 1.0, 1e6]))
def test_every_number_is_within_half_a_step_of_its_channel(seed, spread):
    weights = draw(seed, SHAPE) * spread * np.exp(draw(seed + 1, (1, 4, 16)))
    matrix = int8(jnp.asarray(weights), (0,))
    flat = weights.reshape(48, 64)
    np.testing.assert_allclose(matrix.scale, np.abs(flat).max(axis=0) / 127, rtol=1e-6)
    assert np.all(np.abs(stands_for(matrix) - flat) <= 0.5001 * np.asarray(matrix.scale))
    assert np.abs(np.asarray(matrix.values, int)).max(axis=1).tolist() == [127] * 64
    assert (matrix.shape, matrix.dtype) == (SHAPE, jnp.float32)


@pytest.mark.parametrize("tokens", [1, 3, 32, 33])
@settings(max_examples=10)
@given(seed=st.integers(0, 99), outlier=st.sampled_from([1.0, 100.0]))
def test_a_product_is_that_of_what_the_matrix_stands_for(tokens, seed, outlier):
    """Test both sides of 32 tokens; errors are bounded by the token's largest value."""
    matrix = int8(jnp.asarray(draw(seed, SHAPE)), (0,)).reshape(48, -1)
    x = draw(seed + 1, (tokens, 48))
    x[:, 5] *= outlier
    expected = x.astype(np.float64) @ stands_for(matrix)
    actual = np.asarray(multiply(jnp.asarray(x), matrix))
    largest = np.abs(x).max(axis=1, keepdims=True)
    bound = (
        largest * np.abs(stands_for(matrix)).sum(axis=0) / 64516 + 1e-4 * np.abs(expected) + 1e-4
    )
    assert np.all(np.abs(actual - expected) <= bound)


@settings(max_examples=10)
@given(seed=st.integers(0, 99), tokens=st.sampled_from([2, 5, 8, 32]))
def test_a_row_by_itself_has_the_same_bits(seed, tokens):
    matrix = int8(jnp.asarray(draw(seed, SHAPE)), (0,)).reshape(48, -1)
    x = draw(seed + 1, (tokens, 48))
    alone = [multiply(jnp.asarray(x[row : row + 1]), matrix) for row in range(tokens)]
    np.testing.assert_array_equal(multiply(jnp.asarray(x), matrix), np.concatenate(alone))


@pytest.mark.parametrize("tokens", [1, 64])
def test_matrices_are_not_widened_before_they_are_needed(tokens):
    matrices = [int8(jnp.asarray(draw(layer, (256, 256))), (0,)) for layer in range(8)]

    @jax.jit
    def layers(x, matrices):
        for matrix in matrices:
            x = jnp.tanh(x @ matrix)
        return x

    needed = layers.lower(jnp.ones((tokens, 256)), matrices).compile().memory_analysis()
    in_float32, activations = 4 * 256 * 256, 4 * 256 * tokens
    assert needed
    assert needed.temp_size_in_bytes < 2 * in_float32 + 4 * activations


def test_several_input_axes():
    weights = draw(0, (4, 16, 48))  # heads and channels to the stream
    matrix = int8(jnp.asarray(weights), (0, 1))
    x = draw(1, (2, 64))
    actual = multiply(jnp.asarray(x), matrix.reshape(-1, matrix.shape[-1]))
    np.testing.assert_allclose(actual, x @ weights.reshape(64, 48), atol=0.3)


@pytest.mark.parametrize(("shape", "inputs"), [(SHAPE, (0,)), ((4, 16, 48), (0, 1))])
def test_floats_are_multiplied_as_they_are(shape, inputs):
    weights = draw(0, shape)
    rows = int(np.prod([shape[axis] for axis in inputs]))
    matrix = decode_matrix(jnp.asarray(weights), inputs)
    assert (matrix.shape, matrix.dtype, matrix.scale) == (shape, jnp.float32, None)
    x = draw(1, (3, rows))
    product = multiply(jnp.asarray(x), matrix.reshape(rows, -1))
    np.testing.assert_allclose(product, x @ weights.reshape(rows, -1), rtol=1e-5, atol=1e-5)
    wide = matrix.reshape(rows, -1).multiply(jnp.asarray(x, jnp.bfloat16), jnp.float32)
    assert wide.dtype == jnp.float32


def test_a_table_of_floats_is_looked_up():
    weights = draw(0, (50, 48))
    np.testing.assert_array_equal(
        decode_matrix(jnp.asarray(weights), (1,))[jnp.array([3, 49])], weights[[3, 49]]
    )


def test_a_table_is_looked_up_and_multiplied():
    weights = draw(0, (50, 48))
    table = int8(jnp.asarray(weights), (1,))
    rows = table[jnp.array([[3, 49], [0, 3]])]
    assert rows.shape == (2, 2, 48)
    np.testing.assert_allclose(rows, weights[[[3, 49], [0, 3]]], atol=0.02)
    assert table[...] is table
    x = draw(1, (2, 48))
    np.testing.assert_allclose(multiply(jnp.asarray(x), table.T), x @ weights.T, atol=0.3)


def test_a_channel_of_zeros_and_a_row_of_zeros():
    matrix = int8(jnp.zeros((4, 3)), (0,))
    assert np.all(np.asarray(matrix.scale) == 0)
    for tokens in (1, 40):
        assert np.all(np.asarray(multiply(jnp.ones((tokens, 4)), matrix)) == 0)
    some = int8(jnp.ones((4, 3)), (0,))
    assert np.all(np.asarray(multiply(jnp.zeros((1, 4)), some)) == 0)


def test_bfloat16():
    weights = draw(0, (48, 64))
    matrix = int8(jnp.asarray(weights, jnp.bfloat16), (0,))
    assert isinstance(matrix, DecodeMatrix)
    x = jnp.asarray(draw(1, (2, 48)), jnp.bfloat16)
    product = multiply(x, matrix)
    assert product.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(product, np.float32), np.asarray(x, np.float32) @ weights, atol=0.5
    )
