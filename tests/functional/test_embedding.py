"""The look-up of embeddings and its gradient, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jllama.functional import embedding
from jllama.functional.embedding import sums_by_token

compiled_sums = jax.jit(sums_by_token, static_argnums=0)


def draw(vocab, count, seed):
    rng = np.random.default_rng(seed)
    tokens = np.minimum(
        rng.geometric(min(1, 2 / vocab), (2, count)) - 1, vocab - 1
    )  # some often, many never
    return jnp.asarray(tokens), jnp.asarray(rng.standard_normal((2, count, 5)), jnp.float32)


def summed(vocab, tokens, gradient):
    expected = np.zeros((vocab, 5))
    np.add.at(expected, np.asarray(tokens), np.asarray(gradient, np.float64))
    return expected


@given(st.sampled_from([1, 2, 50, 399]), st.sampled_from([1, 128, 129, 700]), st.integers(0, 2**31))
def test_sorted_sums_are_those_of_numpy(vocab, count, seed):
    """Blocks of one token, tokens over several blocks, blocks that are not full."""
    tokens, gradient = draw(vocab, count, seed)
    sums = compiled_sums(jax.ShapeDtypeStruct((vocab, 5), jnp.float32), tokens, gradient)
    np.testing.assert_allclose(sums, summed(vocab, tokens, gradient), rtol=1e-5, atol=2e-4)


def test_one_token_over_many_blocks_and_ids_from_the_end():
    tokens, gradient = jnp.zeros((2, 1000), jnp.int32).at[1, 500:].set(-1), jnp.ones((2, 1000, 5))
    sums = sums_by_token(jax.ShapeDtypeStruct((3, 5), jnp.float32), tokens, gradient)
    np.testing.assert_array_equal(sums, np.array([[1500.0], [0], [500]]) * np.ones(5))


def test_sums_in_sixteen_bits_are_made_in_thirty_two():
    ones = jnp.ones((1, 4096, 5), jnp.bfloat16)
    sums = sums_by_token(
        jax.ShapeDtypeStruct((2, 5), jnp.bfloat16), jnp.zeros((1, 4096), jnp.int32), ones
    )
    assert float(sums[0, 0]) == 4096  # a sum in bfloat16 stays at 256


def test_the_gradient_of_a_table():
    tokens, gradient = draw(50, 128, 0)
    table = jnp.asarray(np.random.default_rng(1).standard_normal((50, 5)), jnp.float32)
    values, back = jax.vjp(lambda table: embedding(table, tokens), table)
    np.testing.assert_array_equal(values, np.asarray(table)[np.asarray(tokens)])
    np.testing.assert_allclose(
        back(gradient)[0], summed(50, tokens, gradient), rtol=1e-5, atol=1e-5
    )
