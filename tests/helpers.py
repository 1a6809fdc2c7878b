"""What several tests share. It imports nothing of ours: the import hook names ``typechecker`` by this module."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import beartype
import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jllama.config import LlamaConfig

# An int is good where a float is asked for, as PEP 484 has it: configurations hold ``rope_theta=500000``.
typechecker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def relative_error(actual, expected) -> float:
    """The largest absolute difference over the largest absolute expected value. NaN anywhere gives NaN: never small."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{actual.shape} against {expected.shape}"
    difference, size = np.max(np.abs(actual - expected), initial=0.0), np.max(np.abs(expected), initial=0.0)
    return float(difference / size) if size else float(difference)


def assert_same_bits(actual, expected) -> None:
    """Two trees of arrays, equal in structure, dtypes and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert found.dtype == wanted.dtype
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def random_params(config: "LlamaConfig", seed: int) -> dict:
    """Weights under which every knob matters: normal with fan-in scale, norm scales near one, a unit embedding."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int, inputs: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(inputs)).astype(np.float32)

    def scale(*shape: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)

    layers, embed, mlp = config.num_layers, config.embed_dim, config.mlp_dim
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    params = {
        "embed": matrix(config.vocab_size, embed, inputs=1),
        "layers": {
            "attn_norm": scale(layers, embed),
            "wq": matrix(layers, embed, heads, head_dim, inputs=embed),
            "wk": matrix(layers, embed, kv_heads, head_dim, inputs=embed),
            "wv": matrix(layers, embed, kv_heads, head_dim, inputs=embed),
            "wo": matrix(layers, heads, head_dim, embed, inputs=heads * head_dim),
            "mlp_norm": scale(layers, embed),
            "w_gate": matrix(layers, embed, mlp, inputs=embed),
            "w_up": matrix(layers, embed, mlp, inputs=embed),
            "w_down": matrix(layers, mlp, embed, inputs=mlp),
        },
        "final_norm": scale(embed),
    }
    if not config.tie_embeddings:
        params["lm_head"] = matrix(embed, config.vocab_size, inputs=embed)
    return params


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
