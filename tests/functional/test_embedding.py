"""The look-up of embeddings and its gradient, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.functional import embedding
from jllama.kernels.embedding import sums_by_token
from jllama.lab.checks import relative_error

compiled_sums = jax.jit(sums_by_token, static_argnums=0)


def draw(vocab, count, seed):
    rng = np.random.default_rng(seed)
    # Some tokens occur often, many never.
    tokens = np.minimum(rng.geometric(min(1, 2 / vocab), (2, count)) - 1, vocab - 1)
    return tokens.astype(np.int32), rng.standard_normal((2, count, 5)).astype(np.float32)


def summed(vocab, tokens, gradient):
    expected = np.zeros((vocab, 5))
    np.add.at(expected, tokens, np.float64(gradient))
    return expected


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (2, 700), (50, 128), (399, 129)])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_sorted_sums_are_those_of_numpy(vocab, count, seed):
    """Blocks of one token, tokens over several blocks, blocks that are not full."""
    tokens, gradient = draw(vocab, count, seed)
    sums = compiled_sums(jax.ShapeDtypeStruct((vocab, 5), jnp.float32), tokens, gradient)
    assert relative_error(sums, summed(vocab, tokens, gradient)) < 1e-5


def test_one_token_over_many_blocks_and_ids_from_the_end():
    tokens, gradient = np.zeros((2, 1000), np.int32), np.ones((2, 1000, 5), np.float32)
    tokens[1, 500:] = -1
    sums = compiled_sums(jax.ShapeDtypeStruct((3, 5), jnp.float32), tokens, gradient)
    np.testing.assert_array_equal(sums, np.array([[1500.0], [0], [500]]) * np.ones(5))


def test_sums_in_sixteen_bits_are_made_in_thirty_two():
    tokens, ones = np.zeros((1, 4096), np.int32), np.ones((1, 4096, 5), jnp.bfloat16)
    sums = compiled_sums(jax.ShapeDtypeStruct((2, 5), jnp.bfloat16), tokens, ones)
    assert float(sums[0, 0]) == 4096  # a sum in bfloat16 stays at 256


def test_the_gradient_of_a_table():
    tokens, gradient = draw(50, 128, 0)
    table = np.random.default_rng(1).standard_normal((50, 5)).astype(np.float32)
    values, back = jax.vjp(jax.jit(lambda table: embedding(table, jnp.asarray(tokens))), table)
    np.testing.assert_array_equal(values, table[tokens])
    assert relative_error(back(gradient)[0], summed(50, tokens, gradient)) < 1e-5
