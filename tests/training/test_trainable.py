"""What is trained by name, and the running mean of it."""

import functools
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from models import SMALL, weights
from tuning import Selection, assert_trees_close

import jllama
from jllama.core.parameters import count_parameters
from jllama.models.config import LoraConfig
from jllama.parallel.sharding import MeshConfig, make_mesh
from jllama.training.compiling import compile_training
from jllama.training.metrics import training_flops_per_token
from jllama.training.trainable import selected_weights

WEIGHTS = weights(SMALL)
WINDOWS = np.random.default_rng(0).integers(2, SMALL.vocab_size, (5, 8, 17))
QUICK = {"xla_backend_optimization_level": 0}


SOME = {"trainable": Selection(["layers/[1-9]/w_*", "embed", "layers/*/attn_norm"])}


@functools.cache
def compiled(mesh=MeshConfig(), **options):  # noqa: B008
    loop = jllama.LoopConfig(**{"batch_size": 8, "seq_len": 16, "steps": 10} | options)
    # With this epsilon AdamW does not blow up the last bits of small gradients.
    rates = {"learning_rate": 0.01, "warmup_steps": 1, "epsilon": 1e-4}
    optimizer = jllama.OptimizerConfig(clip_norm=1e30, **rates)
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


def flat(tree):
    return flatten_dict(tree, sep="/")


def test_what_is_selected_moves_as_if_all_did_and_the_rest_not_at_all():
    """AdamW moves each number by itself, so a first step of what is selected is that of training
    everything; of what is frozen, the optimizer keeps nothing.
    """
    before, after = steps(compiled(**SOME), 1)
    everything = flat(steps(compiled(), 1)[1].params)
    moments = flat(after.opt_state[1][0].mu)
    before, after = flat(before.params), flat(after.params)
    selected = {f"layers/w_{name}": [False, True] for name in ("down", "gate", "up")}
    selected |= {"embed": [True], "layers/attn_norm": [True, True]}
    for path, leaf in after.items():
        layers = selected.get(path, [False] * len(leaf))
        moves = np.reshape(layers, (-1, *[1] * (leaf.ndim - 1)))
        assert ((leaf != before[path]).any(axis=tuple(range(1, leaf.ndim))) == layers).all(), path
        expected = np.where(moves, everything[path], before[path])
        np.testing.assert_allclose(leaf, expected, rtol=2e-6, atol=2e-6)
        if path in selected:
            shape = leaf.shape if path == "embed" else (sum(layers), *leaf.shape[1:])
            assert moments[path].shape == shape
    assert moments.keys() == selected.keys()


def test_a_selection_is_the_same_in_parts_and_recomputed():
    in_parts = compiled(**SOME, accumulation=2, remat="block")
    one, other = (steps(training, 2)[-1].params for training in (compiled(**SOME), in_parts))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, other)


def test_the_running_mean_is_numpys():
    """With the decay of each step as ``core.step.update`` says, of all that is trained, and of
    nothing else; it does not change what is trained.
    """
    training = compiled(ema=0.4, **SOME)
    states, select = steps(training), training.trainable.select
    mean = [np.float64(leaf) for leaf in jax.tree.leaves(select(states[0].params))]
    for number, state in enumerate(states[1:], 1):
        decay = min(0.4, number / (number + 9))
        trained = jax.tree.leaves(select(state.params))
        mean = [decay * old + (1 - decay) * new for old, new in zip(mean, trained, strict=True)]
        assert_trees_close(state.average, mean, 1e-5)
    weights = training.weights(states[-1])
    assert_trees_close(select(weights), mean, 1e-5)
    np.testing.assert_array_equal(weights["final_norm"], states[0].params["final_norm"])
    plain = steps(compiled(**SOME))[-1]
    jax.tree.map(np.testing.assert_array_equal, plain.params, states[-1].params)


def test_a_step_that_is_left_out_does_not_move_the_mean():
    training = compiled(ema=0.4, **SOME)
    state = training.init(jax.random.key(0), jax.tree.map(lambda leaf: leaf * np.nan, WEIGHTS))
    before = jax.device_get(state.average)
    state, metrics = training.step(state, jllama.text_batch(WINDOWS[0], 1))
    assert metrics.skipped
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.average))


def test_flops_are_those_of_what_has_gradients():
    matrices = training_flops_per_token(SMALL, 0) / 6
    for pattern, factor in (("*", 6), ("final_norm", 4)):
        shares = selected_weights(SMALL, [pattern]).shares
        assert training_flops_per_token(SMALL, 0, shares) == factor * matrices
    assert selected_weights(SMALL, ["layers/0/wq"]).shares == {"layers/wq": 1 / SMALL.num_layers}
    trained = compiled(trainable=Selection(["*"])).trained
    assert sum(leaf.size for leaf in jax.tree.leaves(trained)) == count_parameters(SMALL)


@pytest.mark.parametrize("pattern", ["layers/*/w_dwn", "layers/99/*", "", "layers/w_down"])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    names = "the names are embed, .*, where \\* is 0 to "
    message = f"training.trainable has '{re.escape(pattern)}', .*: {names}"
    with pytest.raises(jllama.UsageError, match=message):
        select(trainable=["embed", pattern])()


def test_adapters_and_a_selection_are_refused_together():
    with pytest.raises(jllama.UsageError, match="leave one out"):
        select(trainable=["embed"])(init_from="x", lora=LoraConfig(rank=2))
