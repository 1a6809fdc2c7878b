import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match
from hypothesis import given
from hypothesis import strategies as st

from jllama import oracle
from jllama.functional import rms_norm
from jllama.verify.checks import relative_error

seeds = st.integers(0, 2**32 - 1)
SHAPES = [(64,), (5, 64), (2, 3, 96)]


def draw(seed, shape, size=1.0):
    """Rows of very different sizes, and a scale, in float64 that is exact in float32."""
    rng = np.random.default_rng(seed)
    x = size * rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, (*shape[:-1], 1)))
    return tuple(np.float64(np.float32(array)) for array in (x, 1 + 0.3 * rng.standard_normal(shape[-1])))


@given(
    seed=seeds, shape=st.sampled_from(SHAPES), size=st.sampled_from([1e-3, 1.0, 1e3]), eps=st.sampled_from([1e-6, 1e-5])
)
def test_rms_norm_equals_the_oracle(seed, shape, size, eps):
    x, scale = draw(seed, shape, size)
    actual = rms_norm(jnp.float32(x), jnp.float32(scale), eps)
    assert actual.dtype == jnp.float32
    assert relative_error(actual, oracle.rms_norm(x, scale, eps)) < 1e-6
    with jax.enable_x64(True):
        assert relative_error(rms_norm(jnp.asarray(x), jnp.asarray(scale), eps), oracle.rms_norm(x, scale, eps)) < 1e-14


@given(seed=seeds, factor=st.floats(1e-6, 1e6))
def test_rms_norm_without_eps_ignores_the_scale_of_its_input(seed, factor):
    with jax.enable_x64(True):
        x, scale = map(jnp.asarray, draw(seed, (5, 64)))
        assert relative_error(rms_norm(factor * x, scale, 0.0), rms_norm(x, scale, 0.0)) < 1e-13


@given(seed=seeds)
def test_rms_norm_gives_rows_of_unit_root_mean_square(seed):
    x, _ = draw(seed, (5, 64))
    rows = np.asarray(rms_norm(jnp.float32(x), jnp.ones(64), 1e-12), np.float64)
    np.testing.assert_allclose(np.sqrt(np.mean(rows**2, axis=-1)), 1.0, rtol=1e-6)


def test_eps_matters_at_small_activations():
    x, scale = draw(0, (5, 64), size=1e-3)
    x, scale = jnp.float32(x), jnp.float32(scale)
    assert relative_error(rms_norm(x, scale, 1e-6), rms_norm(x, scale, 1e-5)) > 100 * 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_row_gives_zeros_with_finite_gradients(dtype):
    x = jnp.zeros((2, 64), dtype)
    assert not np.any(rms_norm(x, jnp.ones(64), 1e-5))
    assert np.all(np.isfinite(jax.grad(lambda x: rms_norm(x, jnp.ones(64), 1e-5).sum().astype(jnp.float32))(x)))


def test_bfloat16_input_has_float32_statistics():
    x, scale = draw(0, (3, 4096))  # long enough that a bfloat16 sum of squares would stop growing
    low, scale = jnp.asarray(x, jnp.bfloat16), jnp.float32(scale)
    actual = rms_norm(low, scale, 1e-5)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, rms_norm(low.astype(jnp.float32), scale, 1e-5).astype(jnp.bfloat16))


def test_bfloat16_result_is_the_oracle_rounded():
    x, scale = draw(0, (3, 4096))
    low = jnp.asarray(x, jnp.bfloat16)
    actual = np.asarray(rms_norm(low, jnp.float32(scale), 1e-5), np.float64)
    np.testing.assert_allclose(actual, oracle.rms_norm(np.asarray(low, np.float64), scale, 1e-5), rtol=2**-8)


def test_gradients():
    x, scale = draw(0, (3, 8))
    assert_gradients_match(lambda x, scale: rms_norm(x, scale, 1e-5), x, scale)
