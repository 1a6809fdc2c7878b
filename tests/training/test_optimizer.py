"""The schedule against numbers worked out by hand, the decayed set by name, and AdamW against
float64 NumPy.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.model import abstract_params
from jllama.parameters import map_by_path
from jllama.presets import preset
from jllama.training.optimizer import OPTIMIZERS, OptimizerConfig, learning_rate_at, make_optimizer
from jllama.verify.checks import random_params, relative_error

MODEL = LlamaConfig(
    vocab_size=11, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=12
)
EVERY = dataclasses.replace(
    MODEL, attention_bias=True, qk_norm="whole", norm_placement="after", sliding_window=4
)
"""With each kind of parameter that other families have beside a Llama's."""
NORMS = {"layers/attn_norm", "layers/mlp_norm", "final_norm"}
MATRICES = {f"layers/{name}" for name in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")} | {
    "embed",
    "lm_head",
}


def by_path(params):
    leaves = {}
    map_by_path(leaves.__setitem__, params)
    return leaves


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 2e-4),  # 100 steps, 10 of them warm-up, from a peak of 2e-3 to a tenth of it
        (1, 4e-4),
        (8, 1.8e-3),
        (9, 2e-3),
        (10, 2e-4 + 1.8e-3 * (1 + math.cos(math.pi / 90)) / 2),
        (54, 1.1e-3),
        (98, 2e-4 + 1.8e-3 * (1 + math.cos(math.pi * 89 / 90)) / 2),
        (99, 2e-4),
        (100, 2e-4),
        (10**6, 2e-4),
    ],
)
def test_golden_learning_rates(step, expected):
    config = OptimizerConfig(learning_rate=2e-3, final_fraction=0.1, warmup_fraction=0.1)
    assert float(learning_rate_at(step, config, 100)) == pytest.approx(expected, rel=1e-5)
    traced = jax.jit(lambda step: learning_rate_at(step, config, 100))(jnp.int32(step))
    assert float(traced) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 2e-4),  # 100 steps, 10 of them warm-up, to a peak of 2e-3
        ("constant", 8, 1.8e-3),
        ("constant", 9, 2e-3),
        ("constant", 99, 2e-3),
        ("constant", 10**6, 2e-3),
        ("wsd", 0, 2e-4),
        ("wsd", 9, 2e-3),
        ("wsd", 79, 2e-3),  # 20 steps of decay to a tenth of the peak
        ("wsd", 80, 2e-3 - 1.8e-3 / 20),
        ("wsd", 89, 1.1e-3),
        ("wsd", 98, 2e-4 + 1.8e-3 / 20),
        ("wsd", 99, 2e-4),
        ("wsd", 10**6, 2e-4),
    ],
)
def test_golden_learning_rates_of_the_schedules_that_stay(schedule, step, expected):
    decay = {"decay_fraction": 0.2} if schedule == "wsd" else {}
    config = OptimizerConfig(learning_rate=2e-3, warmup_fraction=0.1, schedule=schedule, **decay)
    assert float(learning_rate_at(step, config, 100)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 7, 10])
def test_schedules_that_stay_have_any_warm_up(schedule, warmup):
    """None, one that ends where the decay of half of the steps begins, and one over all steps."""
    config = OptimizerConfig(
        learning_rate=1.0,
        warmup_fraction=warmup / 10,
        schedule=schedule,
        **({"decay_fraction": 0.5} if schedule == "wsd" else {}),
    )
    actual = [float(learning_rate_at(step, config, 10)) for step in range(10)]
    rising = min(warmup, 9)
    start = max(5, rising) if schedule == "wsd" else 10
    expected = [(step + 1) / rising if step < rising else 1.0 for step in range(10)]
    for step in range(start, 10):
        expected[step] = 1.0 - 0.9 * (step + 1 - start) / (10 - start)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_more_steps_change_no_rate_before_the_decay(schedule):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, schedule=schedule)
    for step in range(18):  # of 20 steps, the last two are the decay
        assert learning_rate_at(step, config, 20) == learning_rate_at(step, config, 1000)


def test_learning_rates_without_a_warm_up():
    config = OptimizerConfig(learning_rate=1.0, final_fraction=0.0, warmup_fraction=0.0)
    actual = [float(learning_rate_at(step, config, 4)) for step in range(5)]
    half = math.sqrt(0.5)
    np.testing.assert_allclose(actual, [(1 + half) / 2, 0.5, (1 - half) / 2, 0, 0], atol=1e-6)


def test_a_warm_up_over_all_steps_still_ends_at_the_floor():
    config = OptimizerConfig(learning_rate=1.0, final_fraction=0.1, warmup_fraction=1.0)
    actual = [float(learning_rate_at(step, config, 4)) for step in range(5)]
    np.testing.assert_allclose(actual, [1 / 3, 2 / 3, 1, 0.1, 0.1], atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_warm_up_is_rounded_up_and_the_optimizer_counts_its_own_updates(name):
    # 1.5 of 10 steps: 2.
    config = OptimizerConfig(name, learning_rate=0.5, warmup_fraction=0.15, weight_decay=0.0)
    optimizer = make_optimizer(config, 10)
    params = jax.tree.map(jnp.asarray, random_params(MODEL, 0))
    state, moved, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for _ in range(3):
        updates, state = update(jax.tree.map(jnp.ones_like, params), state, params)
        # A constant gradient moves by the learning rate.
        moved.append(-float(updates["final_norm"][0]))
    falling = 0.05 + 0.45 * (1 + math.cos(math.pi / 8)) / 2
    np.testing.assert_allclose(moved, [0.25, 0.5, falling], rtol=1e-4)


@pytest.mark.parametrize("model", [MODEL, EVERY], ids=["llama", "every"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_gradient_decays_the_matrices_alone(name, model):
    config = OptimizerConfig(
        name, learning_rate=0.2, final_fraction=1.0, warmup_fraction=0.0, weight_decay=0.3
    )
    before = random_params(model, 0)
    optimizer = make_optimizer(config, 10)
    params = jax.tree.map(jnp.asarray, before)

    @jax.jit
    def step(params):
        gradients = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    before, after = by_path(before), by_path(step(params))
    if model is MODEL:
        assert set(before) == NORMS | MATRICES
    for path in MATRICES:
        np.testing.assert_allclose(after[path], before[path] * (1 - 0.2 * 0.3), rtol=1e-6)
    for path in set(before) - MATRICES:
        np.testing.assert_array_equal(after[path], before[path])


def test_adamw_against_numpy():
    config = OptimizerConfig(
        "adamw", 0.1, 0.2, 0.3, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.05, clip_norm=2.0
    )
    rng, steps = np.random.default_rng(0), 7
    expected = {
        path: leaf.astype(np.float64) for path, leaf in by_path(random_params(MODEL, 0)).items()
    }
    first, second = (
        {path: np.zeros(leaf.shape) for path, leaf in expected.items()} for _ in range(2)
    )
    start = dict(expected)

    params = jax.tree.map(jnp.asarray, random_params(MODEL, 0))
    optimizer = make_optimizer(config, steps)
    state, clipped, compiled_update = optimizer.init(params), [], jax.jit(optimizer.update)
    for step in range(steps):
        size = 10.0 ** (step % 3 - 2)  # some gradients are longer than the clip, some are not
        gradients = jax.tree.map(
            lambda leaf, size=size: size * rng.standard_normal(leaf.shape), params
        )
        norm = math.sqrt(sum(np.sum(leaf**2) for leaf in by_path(gradients).values()))
        clipped.append(norm > config.clip_norm)
        done = step + 1
        falling = 0.02 + 0.08 * (1 + math.cos(math.pi * (done - 3) / 4)) / 2
        rate = 0.1 * done / 3 if done < 3 else falling  # ceil(0.3 * 7) steps of warm-up
        for path, leaf in by_path(gradients).items():
            g = leaf / max(1.0, norm / config.clip_norm)
            first[path] = 0.8 * first[path] + 0.2 * g
            second[path] = 0.9 * second[path] + 0.1 * g * g
            update = (
                first[path] / (1 - 0.8**done) / (np.sqrt(second[path] / (1 - 0.9**done)) + 1e-3)
            )
            decay = 0.05 * expected[path] if path in MATRICES else 0.0
            expected[path] = expected[path] - rate * (update + decay)
        narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradients)
        updates, state = compiled_update(narrow, state, params)
        params = optax.apply_updates(params, updates)
    assert set(clipped) == {True, False}
    for path, leaf in by_path(params).items():
        assert leaf.dtype == jnp.float32
        assert relative_error(np.float64(leaf) - start[path], expected[path] - start[path]) < 1e-5


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_moments_in_bfloat16_are_float32_ones_rounded_between_steps(name):
    dtypes = ("bfloat16", "float32")
    narrow, wide = (
        make_optimizer(OptimizerConfig(name, moment_dtype=dtype), 9) for dtype in dtypes
    )

    def rounded(state):
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype) if leaf.ndim else leaf, state
        )

    params = jax.tree.map(jnp.asarray, random_params(MODEL, 0))
    stored, expected = narrow.init(params), wide.init(params)
    moments = [leaf for leaf in jax.tree.leaves(stored) if leaf.ndim]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(jnp.bfloat16)}
    for step in range(3):
        gradients = random_params(MODEL, step + 1)
        updates, stored = narrow.update(gradients, stored, params)
        expected_updates, expected = wide.update(gradients, rounded(expected), params)
        for one, other in zip(
            jax.tree.leaves(updates), jax.tree.leaves(expected_updates), strict=True
        ):
            assert one.dtype == jnp.float32
            np.testing.assert_array_equal(one, other)


def test_lion_against_numpy():
    """Chen et al. 2023, algorithm 2: the sign of one average, and another that is kept."""
    config = OptimizerConfig(
        "lion", 0.1, 1.0, 0.0, beta1=0.8, beta2=0.6, weight_decay=0.0, clip_norm=1e30
    )
    rng, params = np.random.default_rng(0), {"final_norm": jnp.ones(8)}
    optimizer, stored, expected = make_optimizer(config, 10), np.zeros(8), np.ones(8)
    state = optimizer.init(params)
    for _ in range(5):
        gradient = rng.standard_normal(8)
        expected = expected - 0.1 * np.sign(0.8 * stored + 0.2 * gradient)
        stored = 0.6 * stored + 0.4 * gradient
        updates, state = optimizer.update(
            {"final_norm": jnp.asarray(gradient, jnp.float32)}, state, params
        )
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["final_norm"], expected, rtol=1e-6)


def test_adafactor_against_numpy():
    """Shazeer and Stern 2018, algorithm 4: second moments as rows and columns; no step is longer
    than one unit.
    """
    config = OptimizerConfig("adafactor", 0.1, 1.0, 0.0, weight_decay=0.0, clip_norm=1e30)
    rng, params = np.random.default_rng(0), {"embed": jnp.ones((256, 128))}
    optimizer, rows, columns, expected = make_optimizer(config, 10), 0.0, 0.0, np.ones((256, 128))
    state = optimizer.init(params)
    assert {leaf.shape for leaf in jax.tree.leaves(state)} == {
        (),
        (1,),
        (256,),
        (128,),
    }  # no second moment is whole
    for step in range(1, 5):
        gradient = rng.standard_normal((256, 128)) * rng.random((256, 1)) * 10.0**step
        decay = 1 - step**-0.8
        rows = decay * rows + (1 - decay) * np.mean(gradient**2, axis=1)
        columns = decay * columns + (1 - decay) * np.mean(gradient**2, axis=0)
        update = gradient / np.sqrt(rows[:, None] * columns / np.mean(rows))
        expected = expected - 0.1 * update / max(1.0, np.sqrt(np.mean(update**2)))
        updates, state = optimizer.update(
            {"embed": jnp.asarray(gradient, jnp.float32)}, state, params
        )
        params = optax.apply_updates(params, updates)
    assert relative_error(params["embed"] - 1, expected - 1) < 1e-5


def adafactor_direction(gradient, moments, step):
    """Shazeer and Stern 2018: algorithm 4 for a matrix, algorithm 5 for a vector; ``moments``
    change in place.
    """
    decay = 1 - step**-0.8
    square = gradient**2 + 1e-30
    if gradient.ndim == 2:
        rows, columns = moments.setdefault("factors", [0.0, 0.0])
        rows = decay * rows + (1 - decay) * square.sum(axis=1)
        columns = decay * columns + (1 - decay) * square.sum(axis=0)
        moments["factors"] = [rows, columns]
        second = np.outer(rows, columns) / rows.sum()
    else:
        second = moments["whole"] = decay * moments.get("whole", 0.0) + (1 - decay) * square
    update = gradient / np.sqrt(second)
    return update / max(1.0, np.sqrt(np.mean(update**2)))


def matrices_of(path, stack):
    """Each layer's matrix, or vector, of a parameter, with the axes of inputs and of outputs
    joined.
    """
    shapes = {
        "wq": (8, 8),
        "wk": (8, 4),
        "wv": (8, 4),
        "wo": (8, 8),
    }  # embed 8, two heads of 4, one for keys
    if not path.startswith("layers/"):
        return [stack]
    return [layer.reshape(shapes.get(path.removeprefix("layers/"), layer.shape)) for layer in stack]


def test_adafactor_takes_each_matrix_of_each_layer_by_itself():
    """Against the paper's algorithm in float64; gradients of one layer are far larger than those of
    the other.
    """
    config = OptimizerConfig("adafactor", 0.1, 1.0, 0.0, weight_decay=0.0, clip_norm=1e30)
    rng, optimizer = np.random.default_rng(0), make_optimizer(config, 10)
    params = jax.tree.map(jnp.asarray, random_params(MODEL, 0))
    state, moments, update = optimizer.init(params), {}, jax.jit(optimizer.update)
    for step in range(1, 5):
        gradients = jax.tree.map(
            lambda leaf: (
                rng.standard_normal(leaf.shape)
                * rng.random(leaf.shape[:1] + (1,) * (leaf.ndim - 1)) ** 3
            ),
            params,
        )
        updates, state = update(jax.tree.map(jnp.float32, gradients), state, params)
        for path, leaf in by_path(gradients).items():
            actual = matrices_of(path, np.asarray(by_path(updates)[path]))
            for index, gradient in enumerate(matrices_of(path, leaf)):
                stored = moments.setdefault((path, index), {})
                expected = -0.1 * adafactor_direction(gradient, stored, step)
                assert relative_error(actual[index], expected) < 1e-5, (path, index, step)
        params = optax.apply_updates(params, updates)


def test_adafactor_keeps_rows_and_columns_of_every_matrix():
    """For Llama 3.2 1B, whose heads are 64 wide: no second moment of any matrix is kept whole."""
    model = preset("llama3.2-1b")
    state = jax.eval_shape(
        make_optimizer(OptimizerConfig("adafactor"), 10).init, abstract_params(model)
    )
    factors = sum(
        rows + columns for rows, columns in [(2048, 2048), (2048, 512), (2048, 512), (2048, 2048)]
    )
    factors += 3 * (2048 + 8192)
    norms = 2 * 2048
    # Of optax, one number each: a factored matrix has no whole moment, a norm no factors.
    placeholders = 7 + 2 * 2
    embedding, final_norm, counts = (
        128_256 + 2048 + 1,
        2048 + 2,
        2 + 16,
    )  # of steps, one for each layer too
    expected = 16 * (factors + norms + placeholders) + embedding + final_norm + counts
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == expected == 902_597


WHOLE = random_params(MODEL, 0)
ADAPTER = {"wq": {"a": np.ones((2, 8, 3)), "b": np.ones((2, 3, 8)), "magnitude": np.ones((2, 8))}}


@pytest.mark.parametrize(
    "params",
    [
        WHOLE,
        {"layers": ADAPTER},
        # Of one layer.
        {"layers": {name: WHOLE["layers"][name][:1] for name in ("wo", "attn_norm")}},
        {"final_norm": WHOLE["final_norm"]},
        random_params(EVERY, 0),
    ],
    ids=["whole", "adapter", "part", "no matrix", "every"],
)
def test_muon_is_the_paper_s_on_each_matrix_of_each_layer_and_adamw_on_all_else(params):
    """Jordan et al. 2024 in float64: two interpolations, five steps of the polynomial."""
    config = OptimizerConfig("muon", 0.1, 1.0, 0.0, beta1=0.8, weight_decay=0.3, clip_norm=1e30)
    rng, params = np.random.default_rng(0), jax.tree.map(jnp.float32, params)
    muon, adamw = (
        make_optimizer(config, 20),
        make_optimizer(dataclasses.replace(config, name="adamw"), 20),
    )
    together, other = params, params
    matrices = {
        (path, index): np.float64(matrix)
        for path, leaf in by_path(params).items()
        for index, matrix in enumerate(matrices_of(path, leaf))
        if path in MATRICES - {"embed", "lm_head"} or path.endswith(("/a", "/b"))
    }
    momenta = {key: np.zeros_like(matrix) for key, matrix in matrices.items()}
    state, state_of_other = muon.init(params), adamw.init(params)
    updates, updates_of_other = map(jax.jit, (muon.update, adamw.update))
    for _ in range(20):
        gradients = jax.tree.map(lambda leaf: jnp.float32(rng.standard_normal(leaf.shape)), params)
        stacks = {path: matrices_of(path, leaf) for path, leaf in by_path(gradients).items()}
        update, state = updates(gradients, state, together)
        together = optax.apply_updates(together, update)
        update, state_of_other = updates_of_other(gradients, state_of_other, other)
        other = optax.apply_updates(other, update)
        for key, matrix in matrices.items():
            gradient = np.float64(stacks[key[0]][key[1]])
            momenta[key] = 0.95 * momenta[key] + 0.05 * gradient
            x = 0.05 * gradient + 0.95 * momenta[key]
            x /= np.linalg.norm(x)
            for _ in range(5):
                square = x @ x.T
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            direction = 0.2 * math.sqrt(max(x.shape)) * x
            matrices[key] = matrix - 0.1 * (direction + 0.3 * matrix)
    seen = set()
    for path, leaf in by_path(together).items():
        for index, matrix in enumerate(matrices_of(path, leaf)):
            expected = matrices.get((path, index), matrices_of(path, by_path(other)[path])[index])
            seen |= {(path, index)} & set(matrices)
            assert relative_error(matrix, expected) < 1e-6, (path, index)
    assert seen == set(matrices)


def test_muon_s_first_step_against_singular_values_in_numpy():
    """Jordan et al. 2024: the polynomial, five times, on the singular values of the gradient over
    their norm.
    """
    config = OptimizerConfig("muon", 0.1, 1.0, 0.0, weight_decay=0.0, clip_norm=1e30)
    rng, optimizer = np.random.default_rng(0), make_optimizer(config, 10)
    params = jax.tree.map(jnp.asarray, WHOLE)
    gradients = jax.tree.map(lambda leaf: np.float32(rng.standard_normal(leaf.shape)), WHOLE)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    for path in MATRICES - {"embed", "lm_head"}:
        actual = matrices_of(path, np.asarray(by_path(updates)[path]))
        for index, gradient in enumerate(matrices_of(path, np.float64(by_path(gradients)[path]))):
            left, values, right = np.linalg.svd(gradient, full_matrices=False)
            values = values / np.linalg.norm(values)
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            assert np.all((values > 0.5) & (values < 1.3))
            expected = -0.1 * 0.2 * math.sqrt(max(gradient.shape)) * left @ np.diag(values) @ right
            assert relative_error(actual[index], expected) < 1e-5, (path, index)


@pytest.mark.parametrize("trained", ["adamw", "adafactor", "muon"])
def test_a_parameter_that_an_added_optimizer_freezes_keeps_its_bits(monkeypatch, trained):
    """No weight decay moves it, while all others move as the optimizer that they have says."""

    def labels(params):
        return {name: "frozen" if name == "embed" else "trained" for name in params}

    def frozen_embedding(config):
        parts = {"frozen": optax.set_to_zero(), "trained": OPTIMIZERS[trained](config)}
        return optax.multi_transform(parts, labels)

    monkeypatch.setitem(OPTIMIZERS, "frozen_embedding", frozen_embedding)
    params = jax.tree.map(jnp.asarray, random_params(MODEL, 0))
    gradients, moved = jax.tree.map(jnp.ones_like, params), {}
    for name in ("frozen_embedding", trained):
        optimizer = make_optimizer(OptimizerConfig(name, learning_rate=0.1, clip_norm=1e30), 10)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        moved[name] = by_path(optax.apply_updates(params, updates))
    for path, before in by_path(params).items():
        expected = before if path == "embed" else moved[trained][path]
        np.testing.assert_array_equal(moved["frozen_embedding"][path], expected, path)
        assert not np.array_equal(moved[trained][path], before)


def test_the_magnitudes_of_dora_do_not_decay():
    matrix, magnitude = jnp.ones((2, 8, 4)), jnp.ones((2, 8))
    params = {"layers": {"wq": {"a": matrix, "b": matrix, "magnitude": magnitude}}}
    config = OptimizerConfig(
        learning_rate=0.2, final_fraction=1.0, warmup_fraction=0.0, weight_decay=0.5
    )
    optimizer = make_optimizer(config, 10)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    moved = updates["layers"]["wq"]
    np.testing.assert_array_equal(moved["magnitude"], jnp.zeros((2, 8)))
    np.testing.assert_allclose(moved["a"], -0.1 * matrix, rtol=1e-6)
    np.testing.assert_allclose(moved["b"], -0.1 * matrix, rtol=1e-6)


def test_unknown_names_and_options_that_an_optimizer_does_not_have_are_refused():
    for config, message in [
        (OptimizerConfig("adamv"), "there is no optimizer adamv; did you mean adamw?"),
        (OptimizerConfig("x"), "there is no optimizer x; there are adamw, lion, adafactor, muon"),
        (
            OptimizerConfig("lion", epsilon=1e-6),
            "optimizer.epsilon is given but lion has none: leave it out",
        ),
        (
            OptimizerConfig(decay_fraction=0.5),
            "optimizer.decay_fraction is given but cosine has none: leave it out",
        ),
        (
            OptimizerConfig(final_fraction=0.5, schedule="constant"),
            "optimizer.final_fraction is given but constant has none: leave it out",
        ),
        (
            OptimizerConfig("adafactor", beta1=0.5),
            "optimizer.beta1 is given but adafactor has none: leave it out",
        ),
    ]:
        with pytest.raises(UsageError, match=f"^{message}"):
            make_optimizer(config, 10)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning_rate", [0, -1e-3, math.nan, math.inf]),
        ("epsilon", [0, -1e-8]),
        ("clip_norm", [0, -1]),
        ("final_fraction", [-0.1, 1.1, math.nan]),
        ("warmup_fraction", [-0.1, 1.1]),
        ("beta1", [-0.1, 1.0, math.nan]),  # at 1 the bias correction divides by zero
        ("beta2", [-0.1, 1.0]),
        ("decay_fraction", [-0.1, 1.1]),
        ("warmup_steps", [-1]),
        ("weight_decay", [-0.1, math.nan, math.inf]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(UsageError, match=rf"^optimizer\.{name} is {value}; it must "):
            OptimizerConfig(**{name: value})


def test_a_decay_that_bfloat16_would_round_away_is_refused():
    with pytest.raises(
        UsageError, match=r"^optimizer.beta2 is 0.999; it must be at most 0.99 with "
    ):
        OptimizerConfig(beta2=0.999, moment_dtype="bfloat16")
