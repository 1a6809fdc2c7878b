"""What is trained by name, and the running mean of it."""

import functools
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from models import SMALL, weights

import jllama
from jllama.config import LoraConfig
from jllama.parameters import count_parameters, training_flops_per_token
from jllama.sharding import MeshConfig, make_mesh
from jllama.training.step import compile_training
from jllama.training.trainable import selected_weights

WEIGHTS = weights(SMALL)
SELECTED = ["layers/[1-9]/w_*", "embed", "layers/*/attn_norm"]
WINDOWS = np.random.default_rng(0).integers(2, SMALL.vocab_size, (5, 8, 17))
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def compiled(mesh=MeshConfig(), **options):  # noqa: B008
    loop = jllama.LoopConfig(**{"batch_size": 8, "seq_len": 16, "steps": 10} | options)
    optimizer = jllama.OptimizerConfig(clip_norm=1e30, learning_rate=0.01, warmup_steps=1)
    config = jllama.TrainConfig(SMALL, training=loop, optimizer=optimizer)
    return compile_training(config, make_mesh(mesh, jax.devices()[:1]), compiler_options=QUICK)


def steps(training, count=5):
    """The state before each step and after the last, on the host."""
    state = training.init(jax.random.key(0), WEIGHTS)
    results = [jax.device_get(state._replace(key=None))]
    for windows in WINDOWS[:count]:
        state, _ = training.step(state, jllama.text_batch(windows, 1))
        results.append(jax.device_get(state._replace(key=None)))
    return results


def select(**options):
    loop = jllama.LoopConfig(batch_size=8, seq_len=16, **options)
    return lambda **others: compile_training(jllama.TrainConfig(SMALL, training=loop, **others))


class Selected(list):
    """A list that a cache takes."""

    def __hash__(self):
        return hash(tuple(self))


def test_what_is_selected_moves_as_if_all_did_and_the_rest_not_at_all():
    """AdamW moves each number by itself, so a first step of what is selected is that of training
    everything.
    """
    before, after = (
        flatten_dict(state.params, sep="/")
        for state in steps(compiled(trainable=Selected(SELECTED)), 1)
    )
    everything = flatten_dict(steps(compiled(), 1)[1].params, sep="/")
    for path, leaf in after.items():
        moves = np.zeros(len(leaf) if path.startswith("layers/") else 1, bool)
        if path.startswith("layers/w_"):
            moves[1:] = True
        if path in ("embed", "layers/attn_norm"):
            moves[:] = True
        stacked = path.startswith("layers/")
        for moved, own, whole, start in zip(
            moves,
            *(
                (leaves[path] if stacked else leaves[path][None])
                for leaves in (after, everything, before)
            ),
            strict=True,
        ):
            np.testing.assert_allclose(
                own, whole if moved else start, rtol=2e-6 if moved else 0, atol=2e-6 * moved
            )
            assert np.any(own != start) == moved, path


def test_the_optimizer_keeps_nothing_of_what_is_frozen():
    state = steps(compiled(trainable=Selected(SELECTED)), 1)[1]
    shapes = {
        path: leaf.shape for path, leaf in flatten_dict(state.opt_state[1][0].mu, sep="/").items()
    }
    expected = {
        path: leaf.shape
        for path, leaf in flatten_dict(state.params, sep="/").items()
        if path in shapes
    }
    assert [*shapes] == [
        "embed",
        "layers/attn_norm",
        "layers/w_down",
        "layers/w_gate",
        "layers/w_up",
    ]
    for path, shape in expected.items():
        rows = (SMALL.num_layers - 1,) if path.startswith("layers/w_") else shape[:1]
        assert shapes[path] == (*rows, *shape[1:])


@pytest.mark.parametrize("options", [{"accumulation": 2}, {"remat": "block"}], ids=str)
def test_a_selection_is_the_same_in_parts_and_recomputed(options):
    one, other = (
        steps(compiled(trainable=Selected(SELECTED), **more), 2)[-1].params
        for more in ({}, options)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, other)


def test_the_running_mean_is_numpys():
    """With the decay of each step as ``step.apply_update`` says, of all that is trained, and of
    nothing else.
    """
    for options in ({}, {"trainable": Selected(SELECTED)}):
        training = compiled(ema=0.4, **options)
        states = steps(training)
        mean = [
            np.float64(leaf)
            for leaf in jax.tree.leaves(training.trainable.select(states[0].params))
        ]
        for number, state in enumerate(states[1:], 1):
            decay = min(0.4, number / (number + 9))
            trained = jax.tree.leaves(training.trainable.select(state.params))
            mean = [decay * old + (1 - decay) * new for old, new in zip(mean, trained, strict=True)]
            for own, expected in zip(jax.tree.leaves(state.average), mean, strict=True):
                np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
        weights = training.weights(states[-1])
        for own, expected in zip(
            jax.tree.leaves(training.trainable.select(weights)), mean, strict=True
        ):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
        if options:
            np.testing.assert_array_equal(weights["final_norm"], states[0].params["final_norm"])


def test_a_mean_does_not_change_what_is_trained():
    plain, averaged = (steps(compiled(**options))[-1].params for options in ({}, {"ema": 0.4}))
    jax.tree.map(np.testing.assert_array_equal, plain, averaged)


def test_a_step_that_is_left_out_does_not_move_the_mean():
    training = compiled(ema=0.4)
    state = training.init(jax.random.key(0), jax.tree.map(lambda leaf: leaf * np.nan, WEIGHTS))
    before = jax.device_get(state.average)
    state, metrics = training.step(state, jllama.text_batch(WINDOWS[0], 1))
    assert metrics.skipped
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.average))


def test_flops_are_those_of_what_has_gradients():
    matrices = training_flops_per_token(SMALL, 0) / 6
    assert training_flops_per_token(SMALL, 0, selected_weights(SMALL, ["*"]).shares) == 6 * matrices
    assert (
        training_flops_per_token(SMALL, 0, selected_weights(SMALL, ["final_norm"]).shares)
        == 4 * matrices
    )
    assert selected_weights(SMALL, ["layers/0/wq"]).shares == {"layers/wq": 1 / SMALL.num_layers}
    trained = compiled(trainable=Selected(["*"])).trained
    assert sum(leaf.size for leaf in jax.tree.leaves(trained)) == count_parameters(SMALL)


@pytest.mark.parametrize("pattern", ["layers/*/w_dwn", "layers/99/*", "", "layers/w_down"])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    message = (
        f"training.trainable has '{re.escape(pattern)}', .*: "
        "the names are embed, .*, where \\* is 0 to "
    )
    with pytest.raises(jllama.UsageError, match=message):
        select(trainable=["embed", pattern])()


def test_adapters_and_a_selection_are_refused_together():
    with pytest.raises(jllama.UsageError, match="leave one out"):
        select(trainable=["embed"])(init_from="x", lora=LoraConfig(rank=2))
