"""The schedule against numbers worked out by hand, and optimizers against float64 NumPy."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import map_by_path
from jllama.lab.checks import random_params, relative_error
from jllama.training.optimizer import OPTIMIZERS, OptimizerConfig, learning_rate_at, make_optimizer

MODEL = LlamaConfig(
    vocab_size=11, num_layers=2, embed_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=12
)
EVERY = dataclasses.replace(
    MODEL, attention_bias=True, qk_norm="whole", norm_placement="after", sliding_window=4
)
"""With each kind of parameter that other families have beside a Llama's."""
MATRICES = {f"layers/{name}" for name in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")} | {
    "embed",
    "lm_head",
}


def stepped(optimizer, gradients, params):
    """The parameters after a first step."""

    @jax.jit
    def step(gradients, params):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return step(gradients, params)


def by_path(params):
    leaves = {}
    map_by_path(leaves.__setitem__, params)
    return leaves


LATE = 10**6
FALLING = [2e-4 + 1.8e-3 * (1 + math.cos(math.pi * step / 90)) / 2 for step in (1, 89)]
# 100 steps, 10 of them warm-up, from a peak of 2e-3 to a tenth of it; with wsd in 20 steps.
RATES = {
    "cosine": {1: 4e-4, 10: FALLING[0], 54: 1.1e-3, 98: FALLING[1], 99: 2e-4, LATE: 2e-4},
    "constant": {99: 2e-3, LATE: 2e-3},
    "wsd": {79: 2e-3, 80: 1.91e-3, 89: 1.1e-3, 98: 2.9e-4, 99: 2e-4, LATE: 2e-4},
}


def rates(config, steps, total_steps):
    return jax.vmap(lambda step: learning_rate_at(step, config, total_steps))(np.array(steps))


@pytest.mark.parametrize("schedule", RATES)
def test_golden_learning_rates(schedule):
    decay = {"decay_fraction": 0.2} if schedule == "wsd" else {}
    config = OptimizerConfig(learning_rate=2e-3, warmup_fraction=0.1, schedule=schedule, **decay)
    golden = {0: 2e-4, 8: 1.8e-3, 9: 2e-3} | RATES[schedule]
    steps, expected = zip(*golden.items(), strict=True)
    np.testing.assert_allclose(rates(config, steps, 100), expected, rtol=1e-5)


@pytest.mark.parametrize("schedule", RATES)
@pytest.mark.parametrize("warmup", [0, 7, 10])
def test_schedules_have_any_warm_up(schedule, warmup):
    """None, one that ends where wsd's decay of half of the steps begins, and one over all steps."""
    decay = {"decay_fraction": 0.5} if schedule == "wsd" else {}
    config = OptimizerConfig(
        learning_rate=1.0, warmup_fraction=warmup / 10, schedule=schedule, **decay
    )
    rising = min(warmup, 9)
    start = {"cosine": rising, "constant": math.inf, "wsd": max(5, rising)}[schedule]
    expected = []
    for step in range(12):
        share = min(max(step + 1 - start, 0) / (10 - start), 1)
        if schedule == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        expected.append((step + 1) / rising if step < rising else 1.0 - 0.9 * share)
    np.testing.assert_allclose(rates(config, range(12), 10), expected, atol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_more_steps_change_no_rate_before_the_decay(schedule):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, schedule=schedule)
    few, many = (rates(config, range(18), total_steps) for total_steps in (20, 1000))
    np.testing.assert_array_equal(few, many)  # of 20 steps, the last two are the decay


def adamw_direction(gradient, moments, step):
    moments["first"] = 0.8 * moments.get("first", 0.0) + 0.2 * gradient
    moments["second"] = 0.9 * moments.get("second", 0.0) + 0.1 * gradient**2
    second = np.sqrt(moments["second"] / (1 - 0.9**step))
    return moments["first"] / (1 - 0.8**step) / (second + 1e-3)


def lion_direction(gradient, moments, step):
    """Chen et al. 2023, algorithm 2: the sign of one average, and another that is kept."""
    stored = moments.get("stored", 0.0)
    moments["stored"] = 0.6 * stored + 0.4 * gradient
    return np.sign(0.8 * stored + 0.2 * gradient)


def adafactor_direction(gradient, moments, step):
    """Shazeer and Stern 2018: algorithm 4 for a matrix, algorithm 5 for a vector."""
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


def muon_direction(gradient, moments, step):
    """Jordan et al. 2024: two interpolations, five steps of the polynomial."""
    moments["stored"] = 0.95 * moments.get("stored", 0.0) + 0.05 * gradient
    x = 0.05 * gradient + 0.95 * moments["stored"]
    x /= np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return 0.2 * math.sqrt(max(x.shape)) * x


DIRECTIONS = {
    "adamw": adamw_direction,
    "lion": lion_direction,
    "adafactor": adafactor_direction,
    "muon": muon_direction,
}
"""In float64, of one matrix or vector of one layer; ``moments`` change in place."""
ADAMW = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
BETAS = {"adamw": ADAMW, "muon": ADAMW, "lion": {"beta1": 0.8, "beta2": 0.6}, "adafactor": {}}


def is_matrix(path):
    return path in MATRICES or path.endswith(("/a", "/b"))


def direction_of(name, path):
    """Muon is for each matrix of each layer, and AdamW for everything else."""
    if name == "muon" and not (is_matrix(path) and path.startswith("layers/")):
        return adamw_direction
    return DIRECTIONS[name]


def matrices_of(path, stack):
    """Each layer's matrix, or vector, of a parameter, with the axes of inputs and of outputs
    joined.
    """
    # Embed 8, two heads of 4, one for keys.
    shapes = {"wq": (8, 8), "wk": (8, 4), "wv": (8, 4), "wo": (8, 8)}
    if not path.startswith("layers/"):
        return [stack]
    if path.startswith("layers/experts"):  # an adapter's, of three experts
        return [*stack.reshape(-1, *stack.shape[2:])]
    return [layer.reshape(shapes.get(path.removeprefix("layers/"), layer.shape)) for layer in stack]


WHOLE, EVERYTHING = random_params(MODEL, 0), random_params(EVERY, 0)
ADAPTER = {"wq": {"a": np.ones((2, 8, 3)), "b": np.ones((2, 3, 8)), "magnitude": np.ones((2, 8))}}
TREES = {
    "every": EVERYTHING,
    "adapter": {"layers": ADAPTER},
    "experts": {"layers": {"experts_up": {"a": np.ones((2, 3, 8, 2)), "b": np.ones((2, 3, 2, 5))}}},
    # Of one layer.
    "part": {"layers": {name: WHOLE["layers"][name][:1] for name in ("wo", "attn_norm")}},
    # Not every layer has a matrix, as with layers of experts between dense ones.
    "uneven": {
        "layers": {
            "w_gate": WHOLE["layers"]["w_gate"],
            "w_down": WHOLE["layers"]["w_down"][:1],
            "attn_norm": WHOLE["layers"]["attn_norm"],
        }
    },
    "no matrix": {"final_norm": WHOLE["final_norm"]},
}
CASES = [(name, "every") for name in OPTIMIZERS] + [("muon", name) for name in TREES][1:]


@pytest.mark.parametrize(("name", "tree"), [*CASES, ("adamw", "adapter"), ("adafactor", "uneven")])
def test_steps_are_the_paper_s_on_each_matrix_of_each_layer(name, tree):
    """With a warm-up, some gradients longer than the clip, and decay of matrices alone."""
    config = OptimizerConfig(name, 0.1, 0.2, 0.3, weight_decay=0.05, clip_norm=0.5, **BETAS[name])
    optimizer, rng = make_optimizer(config, 7), np.random.default_rng(0)
    params = jax.tree.map(np.float32, TREES[tree])
    expected = {
        (path, index): np.float64(matrix)
        for path, leaf in by_path(params).items()
        for index, matrix in enumerate(matrices_of(path, leaf))
    }
    start, moments = dict(expected), {key: {} for key in expected}
    state, update, clipped = optimizer.init(params), jax.jit(optimizer.update), set()
    if name == "adafactor":  # rows or columns of two layers: no moment of a matrix is whole
        assert max(leaf.size for leaf in jax.tree.leaves(state)) == 2 * MODEL.mlp_dim
    for done in range(1, 8):
        # Gradients of one layer are larger than those of the other.
        size = 10.0 ** (done % 3 - 2)
        gradients = jax.tree.map(
            lambda leaf, size=size: np.float32(
                size
                * rng.standard_normal(leaf.shape)
                * (0.1 + rng.random(leaf.shape[:1] + (1,) * (leaf.ndim - 1)) ** 3)
            ),
            params,
        )
        leaves = {path: np.float64(leaf) for path, leaf in by_path(gradients).items()}
        norm = math.sqrt(sum(np.sum(leaf**2) for leaf in leaves.values()))
        clipped.add(norm > config.clip_norm)
        falling = 0.02 + 0.08 * (1 + math.cos(math.pi * (done - 3) / 4)) / 2
        rate = 0.1 * done / 3 if done < 3 else falling  # ceil(0.3 * 7) steps of warm-up
        for path, leaf in leaves.items():
            direction_at = direction_of(name, path)
            for index, gradient in enumerate(matrices_of(path, leaf)):
                key = path, index
                gradient = gradient / max(1.0, norm / config.clip_norm)
                direction = direction_at(gradient, moments[key], done)
                decay = 0.05 * expected[key] if is_matrix(path) else 0.0
                expected[key] = expected[key] - rate * (direction + decay)
        updates, state = update(gradients, state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
    assert clipped == {True, False}
    for path, leaf in by_path(params).items():
        assert leaf.dtype == np.float32
        for index, matrix in enumerate(matrices_of(path, leaf)):
            moved, move = (end - start[path, index] for end in (matrix, expected[path, index]))
            assert relative_error(moved, move) < 1e-5, (path, index)


@pytest.mark.parametrize("trained", ["adafactor", "muon"])
def test_a_parameter_that_an_added_optimizer_freezes_keeps_its_bits(monkeypatch, trained):
    """No weight decay moves it, while all others move as the optimizer that they have says."""

    def labels(params):
        return {name: "frozen" if name == "embed" else "trained" for name in params}

    def frozen_embedding(config):
        parts = {"frozen": optax.set_to_zero(), "trained": OPTIMIZERS[trained](config)}
        return optax.multi_transform(parts, labels)

    monkeypatch.setitem(OPTIMIZERS, "frozen_embedding", frozen_embedding)
    params, moved = random_params(MODEL, 0), {}
    gradients = jax.tree.map(np.ones_like, params)
    for name in ("frozen_embedding", trained):
        optimizer = make_optimizer(OptimizerConfig(name, learning_rate=0.1, clip_norm=1e30), 10)
        moved[name] = by_path(stepped(optimizer, gradients, params))
    for path, before in by_path(params).items():
        expected = before if path == "embed" else moved[trained][path]
        np.testing.assert_array_equal(moved["frozen_embedding"][path], expected, path)
        assert not np.array_equal(moved[trained][path], before)


def test_unknown_names_and_options_that_an_optimizer_does_not_have_are_refused():
    for config, message in [
        (OptimizerConfig("adamv"), "there is no optimizer adamv; did you mean adamw?"),
        (OptimizerConfig("x"), "there is no optimizer x; there are adamw, lion, adafactor, muon"),
    ]:
        with pytest.raises(UsageError, match=f"^{message}"):
            make_optimizer(config, 10)
    for name, option in [
        ("lion", {"epsilon": 1e-6}),
        ("adafactor", {"beta1": 0.5}),
        ("cosine", {"decay_fraction": 0.5}),
        ("constant", {"final_fraction": 0.5}),
    ]:
        kind = {"schedule": name} if name in RATES else {"name": name}
        message = f"^optimizer.{next(iter(option))} is given but {name} has none: leave it out"
        with pytest.raises(UsageError, match=message):
            make_optimizer(OptimizerConfig(**kind, **option), 10)


WRONG = {
    "learning_rate": [0, -1e-3, math.nan, math.inf],
    "epsilon": [0, -1e-8],
    "clip_norm": [0, -1],
    "final_fraction": [-0.1, 1.1, math.nan],
    "warmup_fraction": [-0.1, 1.1],
    "beta1": [-0.1, 1.0, math.nan],  # at 1 the bias correction divides by zero
    "beta2": [-0.1, 1.0],
    "decay_fraction": [-0.1, 1.1],
    "warmup_steps": [-1],
    "weight_decay": [-0.1, math.nan, math.inf],
}


@pytest.mark.parametrize("name", WRONG)
def test_values_out_of_range_are_refused_by_name(name):
    for value in WRONG[name]:
        with pytest.raises(UsageError, match=rf"^optimizer\.{name} is {value}; it must "):
            OptimizerConfig(**{name: value})


def test_a_decay_that_bfloat16_would_round_away_is_refused():
    with pytest.raises(
        UsageError, match=r"^optimizer.beta2 is 0.999; it must be at most 0.99 with "
    ):
        OptimizerConfig(beta2=0.999, moment_dtype="bfloat16")
