import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match
from hypothesis import given
from hypothesis import strategies as st

from jllama import oracle
from jllama.functional import swiglu
from jllama.verify.checks import relative_error

LEADS = [(), (7,), (2, 5)]


def draw(seed, lead, embed=64, mlp=172, size=1.0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, embed), (embed, mlp), (embed, mlp), (mlp, embed))
    sizes = (size, embed**-0.5, embed**-0.5, mlp**-0.5)
    return [np.float64(np.float32(s * rng.standard_normal(shape))) for s, shape in zip(sizes, shapes, strict=True)]


@given(seed=st.integers(0, 2**32 - 1), lead=st.sampled_from(LEADS), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_equals_the_oracle(seed, lead, size):
    arrays = draw(seed, lead, size=size)
    expected = oracle.swiglu(*arrays)
    assert relative_error(swiglu(*map(jnp.float32, arrays)), expected) < 1e-5
    with jax.enable_x64(True):
        assert relative_error(swiglu(*map(jnp.asarray, arrays)), expected) < 1e-12


def test_gate_and_up_are_not_interchangeable():
    x, w_gate, w_up, w_down = map(jnp.float32, draw(0, (7,)))
    assert relative_error(swiglu(x, w_up, w_gate, w_down), swiglu(x, w_gate, w_up, w_down)) > 100 * 1e-5


@pytest.mark.parametrize("gate", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_saturated_gates_are_zero_or_the_identity(gate):
    one = jnp.ones((1, 1))
    value, slope = jax.value_and_grad(lambda x: swiglu(x, one, one, one)[0, 0])(jnp.full((1, 1), gate))
    assert relative_error(value, gate**2 if gate > 0 else 0.0) < 1e-6
    assert relative_error(slope, [[2.0 * gate if gate > 0 else 0.0]]) < 1e-6


def test_bfloat16_stays_bfloat16_and_near():
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in draw(0, (7,))]
    actual = swiglu(*arrays)
    assert actual.dtype == jnp.bfloat16
    assert relative_error(actual, oracle.swiglu(*(np.asarray(array, np.float64) for array in arrays))) < 2e-2


def test_gradients():
    assert_gradients_match(swiglu, *draw(0, (3,), embed=4, mlp=6))
