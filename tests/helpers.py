"""What several tests share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jllama.verify.checks import relative_error


def assert_same_bits(actual, expected) -> None:
    """Two trees of arrays, equal in structure, dtypes and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert found.dtype == wanted.dtype
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def assert_gradients_match(function: Callable[..., jax.Array], *arguments: np.ndarray) -> None:
    """Every derivative of a random weighting of ``function``'s results, against central differences, in float64."""
    step, tolerance = 1e-5, 1e-7
    with jax.enable_x64(True):
        values = [jnp.asarray(argument, jnp.float64) for argument in arguments]
        weights = np.random.default_rng(0).standard_normal(jax.eval_shape(function, *values).shape)
        objective = jax.jit(lambda *values: jnp.sum(function(*values) * weights))
        gradients = jax.jit(jax.grad(objective, argnums=tuple(range(len(values)))))(*values)
        for number, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            steps = step * np.eye(value.size).reshape(-1, *value.shape)

            def at(moved, number=number):
                return objective(*values[:number], moved, *values[number + 1 :])

            differences = jax.vmap(at)(value + steps) - jax.vmap(at)(value - steps)
            assert relative_error(gradient, (differences / (2 * step)).reshape(value.shape)) < tolerance


def half_split_from_interleaved(x: np.ndarray) -> np.ndarray:
    """A head's channels, from interleaved pairs to half-split: all even ones, then all odd ones."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
