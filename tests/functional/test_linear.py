"""Matrices for decoding: what they stand for, and what products with them come to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import USERS_GENERATOR
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.functional import DecodeMatrix, decode_matrix
from jllama.lab.checks import relative_error

LAYOUTS = {
    "to heads": ((48, 4, 16), (0,)),
    "from heads": ((4, 16, 48), (0, 1)),
    "table": ((50, 48), (1,)),
}
"""The shape of a matrix, and the axes of its inputs."""
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
lay_out = jax.jit(decode_matrix, static_argnums=(1, 2))
multiply = jax.jit(lambda x, matrix: x @ matrix, compiler_options=USERS_GENERATOR)


def int8(matrix, inputs=(0,)):
    return lay_out(matrix, inputs, "int8")


def draw(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def flat(weights, inputs):
    """``[inputs, outputs]``."""
    outputs = [axis for axis in range(weights.ndim) if axis not in inputs]
    rows = np.prod([weights.shape[axis] for axis in inputs])
    return weights.transpose(*inputs, *outputs).reshape(rows, -1)


def stands_for(matrix):
    """In float64, inputs first."""
    return np.asarray(matrix.values, np.float64).T * np.asarray(matrix.scale, np.float64)


@EVERY_LAYOUT
@settings(max_examples=10)
@given(seed=st.integers(0, 99), spread=st.sampled_from([1e-6, 1.0, 1e6]))
def test_every_number_is_within_half_a_step_of_its_channel(layout, seed, spread):
    shape, inputs = LAYOUTS[layout]
    channels = [1 if axis in inputs else size for axis, size in enumerate(shape)]
    weights = draw(seed, shape) * np.float32(spread) * np.exp(draw(seed + 1, channels))
    matrix = int8(weights, inputs)
    expected = flat(weights, inputs)
    np.testing.assert_allclose(matrix.scale, np.abs(expected).max(axis=0) / 127, rtol=1e-6)
    assert np.all(np.abs(stands_for(matrix) - expected) <= 0.5001 * np.asarray(matrix.scale))
    assert np.abs(np.asarray(matrix.values, int)).max(axis=1).tolist() == [127] * len(matrix.scale)
    assert (matrix.shape, matrix.dtype) == (shape, jnp.float32)


@pytest.mark.parametrize("tokens", [1, 3, 32, 33])
@settings(max_examples=8)
@given(seed=st.integers(0, 99), outlier=st.sampled_from([1.0, 100.0]))
def test_a_product_is_that_of_what_the_matrix_stands_for(tokens, seed, outlier):
    """Test both sides of 32 tokens; errors are bounded by the token's largest value.

    Up to 32 tokens, a row by itself has the same bits.
    """
    matrix = int8(draw(seed, (48, 4, 16))).reshape(48, -1)
    x = draw(seed + 1, (tokens, 48))
    x[:, 5] *= outlier
    expected = x.astype(np.float64) @ stands_for(matrix)
    actual = np.asarray(multiply(x, matrix))
    largest = np.abs(x).max(axis=1, keepdims=True)
    bound = (
        largest * np.abs(stands_for(matrix)).sum(axis=0) / 64516 + 1e-4 * np.abs(expected) + 1e-4
    )
    assert np.all(np.abs(actual - expected) <= bound)
    if tokens <= 32:
        alone = [multiply(x[row : row + 1], matrix) for row in range(tokens)]
        np.testing.assert_array_equal(actual, np.concatenate(alone))


@pytest.mark.parametrize("tokens", [1, 64])
def test_matrices_are_not_widened_before_they_are_needed(tokens):
    matrices = [int8(draw(layer, (256, 256))) for layer in range(8)]

    @jax.jit
    def layers(x, matrices):
        for matrix in matrices:
            x = jnp.tanh(x @ matrix)
        return x

    needed = layers.lower(jnp.ones((tokens, 256)), matrices).compile().memory_analysis()
    in_float32, activations = 4 * 256 * 256, 4 * 256 * tokens
    assert needed
    assert needed.temp_size_in_bytes < 2 * in_float32 + 4 * activations


@EVERY_LAYOUT
def test_floats_are_multiplied_as_they_are(layout):
    shape, inputs = LAYOUTS[layout]
    weights = draw(0, shape)
    matrix, expected = lay_out(weights, inputs), flat(weights, inputs)
    assert (matrix.shape, matrix.dtype, matrix.scale) == (shape, jnp.float32, None)
    rows = matrix.reshape(len(expected), -1)
    x = draw(1, (3, len(expected)))
    assert relative_error(multiply(x, rows), x @ expected) < 1e-5
    wide = jax.eval_shape(lambda x: rows.multiply(x, jnp.float32), x.astype(jnp.bfloat16))
    assert wide.dtype == jnp.float32


def test_a_table_is_looked_up_and_multiplied():
    weights, ids = draw(0, (50, 48)), np.array([[3, 49], [0, 3]])
    np.testing.assert_array_equal(lay_out(weights, (1,))[ids], weights[ids])
    table = int8(weights, (1,))
    assert relative_error(table[ids], stands_for(table).T[ids]) < 1e-6
    assert table[...] is table
    x = draw(1, (2, 48))
    assert relative_error(multiply(x, table.T), x @ stands_for(table)) < 1e-4


def test_a_channel_of_zeros_and_a_row_of_zeros():
    matrix = int8(np.zeros((4, 3), np.float32))
    assert np.all(np.asarray(matrix.scale) == 0)
    for tokens in (1, 40):
        assert np.all(np.asarray(multiply(np.ones((tokens, 4), np.float32), matrix)) == 0)
    some = int8(np.ones((4, 3), np.float32))
    assert np.all(np.asarray(multiply(np.zeros((1, 4), np.float32), some)) == 0)


def test_bfloat16():
    matrix = int8(draw(0, (48, 64)).astype(jnp.bfloat16))
    assert isinstance(matrix, DecodeMatrix)
    x = draw(1, (2, 48)).astype(jnp.bfloat16)
    product = multiply(x, matrix)
    assert product.dtype == jnp.bfloat16
    assert relative_error(product, np.float64(x) @ stands_for(matrix)) < 1e-2
