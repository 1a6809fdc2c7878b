import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match
from hypothesis import given
from hypothesis import strategies as st

from jllama import oracle
from jllama.functional import cross_entropy
from jllama.verify.checks import relative_error

VOCAB = 50
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from([(7,), (2, 9)])
Z_LOSS = 1e-4
loss = jax.jit(cross_entropy, static_argnames="z_loss")
loss_gradient = jax.jit(jax.grad(lambda *arrays: cross_entropy(*arrays)[0]))
z_loss_gradient = jax.jit(jax.grad(lambda *arrays: cross_entropy(*arrays, z_loss=Z_LOSS)[0]))


def draw(seed, shape, size=3.0, density=0.6):
    rng = np.random.default_rng(seed)
    logits = np.float64(np.float32(size * rng.standard_normal((*shape, VOCAB)) + rng.uniform(-20, 20, (*shape, 1))))
    return logits, rng.integers(0, VOCAB, shape), rng.random(shape) < density


def on_device(logits, targets, mask):
    return jnp.float32(logits), jnp.asarray(targets, jnp.int32), jnp.asarray(mask)


@given(seed=seeds, shape=shapes, size=st.sampled_from([0.1, 3.0, 100.0]), density=st.sampled_from([0.0, 0.5, 1.0]))
def test_equals_the_oracle(seed, shape, size, density):
    logits, targets, mask = draw(seed, shape, size, density)
    expected, expected_count = oracle.cross_entropy(logits, targets, mask)
    total, count = loss(*on_device(logits, targets, mask))
    assert total.dtype == jnp.float32
    assert count == expected_count == mask.sum()
    assert relative_error(total, expected) < 1e-5
    with jax.enable_x64(True):
        total, _ = loss(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask))
        assert relative_error(total, expected) < 1e-12


@given(seed=seeds, z_loss=st.sampled_from([1e-4, 0.1]))
def test_z_loss_adds_the_squared_log_normaliser(seed, z_loss):
    logits, targets, mask = draw(seed, (2, 9))
    log_normaliser = np.log(np.exp(logits).sum(axis=-1))
    expected = oracle.cross_entropy(logits, targets, mask)[0] + z_loss * np.sum(log_normaliser[mask] ** 2)
    with jax.enable_x64(True):
        total, count = loss(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask), z_loss=z_loss)
        assert relative_error(total, expected) < 1e-12
        assert count == mask.sum()


def test_uniform_logits_cost_log_vocab_each():
    total, count = loss(jnp.zeros((5, VOCAB)), jnp.arange(5), jnp.ones(5, bool))
    assert relative_error(total / count, np.log(VOCAB)) < 1e-6


@given(
    seed=seeds,
    garbage=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
    target=st.sampled_from([-100, -1, VOCAB, 10**6]),
)
def test_masked_garbage_changes_nothing(seed, garbage, target):
    logits, targets, mask = draw(seed, (2, 9))
    spoilt = (np.where(mask[..., None], logits, garbage), np.where(mask, targets, target), mask)
    clean, dirty = on_device(logits, targets, mask), on_device(*spoilt)
    np.testing.assert_array_equal(loss(*dirty), loss(*clean))
    gradient = np.asarray(z_loss_gradient(*dirty))
    np.testing.assert_array_equal(gradient, z_loss_gradient(*clean))
    assert not gradient[~mask].any()


def test_all_masked_is_zero_with_zero_gradients():
    logits, targets, _ = draw(0, (2, 9))
    arrays = on_device(np.full_like(logits, np.nan), np.full_like(targets, -100), np.zeros((2, 9), bool))
    assert tuple(map(float, loss(*arrays))) == (0.0, 0.0)
    assert not np.any(loss_gradient(*arrays))


@pytest.mark.parametrize("target", [VOCAB, 10**6])
def test_a_counted_target_out_of_range_is_not_silent(target):
    assert np.isnan(loss(jnp.zeros((1, VOCAB)), jnp.array([target]), jnp.ones(1, bool))[0])


@given(seed=seeds, cut=st.sampled_from([0, 1, 4]))
def test_parts_add_up(seed, cut):
    arrays = draw(seed, (2, 9))
    first, second = (on_device(*(a[:, part] for a in arrays)) for part in (slice(cut), slice(cut, None)))
    whole = loss(*on_device(*arrays))
    parts = [a + b for a, b in zip(loss(*first), loss(*second), strict=True)]
    assert relative_error(parts[0], whole[0]) < 1e-6
    assert parts[1] == whole[1]


@given(seed=seeds)
def test_gradient_is_probability_minus_target(seed):
    logits, targets, mask = draw(seed, (2, 9))
    expected = (oracle.softmax(logits) - np.eye(VOCAB)[targets]) * mask[..., None]
    assert relative_error(loss_gradient(*on_device(logits, targets, mask)), expected) < 1e-5


@pytest.mark.parametrize("size", [1e4, 1e15])
def test_huge_logits_stay_finite(size):
    logits = jnp.float32([[size, -size, 0.0], [size, -size, 0.0], [-size, -size, -size]])
    arrays = (logits, jnp.array([0, 1, 2]), jnp.ones(3, bool))
    assert relative_error(loss(*arrays)[0], 2 * size + np.log(3)) < 1e-5
    assert np.all(np.isfinite(z_loss_gradient(*arrays)))


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets, mask = draw(0, (512,))
    low = jnp.asarray(logits, jnp.bfloat16)
    total, _ = loss(low, jnp.asarray(targets), jnp.asarray(mask))
    assert total.dtype == jnp.float32
    assert relative_error(total, oracle.cross_entropy(np.asarray(low, np.float64), targets, mask)[0]) < 1e-5


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_gradients(z_loss):
    rng = np.random.default_rng(0)
    targets, mask = jnp.asarray(rng.integers(0, 6, (2, 4))), jnp.asarray(rng.random((2, 4)) < 0.6)
    assert_gradients_match(
        lambda logits: cross_entropy(logits, targets, mask, z_loss)[0], 2 * rng.standard_normal((2, 4, 6))
    )
