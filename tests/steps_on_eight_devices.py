"""Sharded against one device, and what is where, as JSON on stdout.

``test_sharding.py`` runs it in a process of its own.
"""

import functools
import json

import jax
import numpy as np
from equalities import (
    MESHES,
    Case,
    one_and_eight_devices,
    run_three_steps,
    sharded_error,
    sharded_training_error,
    short_training,
    train_briefly,
)
from jax.sharding import NamedSharding
from models import ON_EIGHT_DEVICES as CONFIG

from jllama.core import UsageError
from jllama.core.model import abstract_params
from jllama.core.parameters import map_by_path
from jllama.data.batches import text_batch
from jllama.lab.checks import random_params, worst_error
from jllama.lab.conformance import compiled_jllama
from jllama.parallel.sharding import MeshConfig, make_mesh, state_sharding
from jllama.parallel.shards import BATCH
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig

REFUSED = [(3, 1, 1), (0, 1, 3), (0, 16, 1), (2, 1, 4), (1, 1, 8)]
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16))


def refusal(sizes):
    try:
        state_sharding(make_mesh(MeshConfig(*sizes)), CONFIG, abstract_params(CONFIG))
    except UsageError as error:
        return str(error)


@functools.cache
def trained_by_muon(mesh):
    """The state after three steps on random tokens, and each step's loss."""
    # Epsilon is as large as in ``short_training``.
    optimizer = OptimizerConfig("muon", learning_rate=3e-2, epsilon=1e-2)
    config = TrainConfig(CONFIG, optimizer=optimizer, training=LoopConfig(steps=3, dtype="float32"))
    training, losses = compile_training(config, mesh), []
    state = training.init(jax.random.key(0))
    for windows in np.random.default_rng(0).integers(1, 64, (3, 8, 17)).astype(np.int32):
        state, metrics = training.step(state, text_batch(windows, bos_id=1))
        losses.append(float(metrics.loss))
    return state, losses


def shards(tree):
    """The shape of one device's share of each parameter."""
    found = {}
    map_by_path(
        lambda path, leaf: found.setdefault(path, leaf.addressable_shards[0].data.shape), tree
    )
    return found


def distance(tree, other):
    return worst_error(jax.tree.leaves(tree), jax.tree.leaves(other))


def wrong_on_the_last_device(config, params, tokens):
    """Logits whose last row is another one's if there are several devices."""
    logits = compiled_jllama().forward(config, params, tokens)
    return logits.at[-1].set(logits[0]) if len(tokens.sharding.device_set) > 1 else logits


@functools.cache
def selected(mesh):
    """Weights of which some layers of some parameters have been trained, and their running mean."""
    training = short_training(
        CONFIG, mesh, trainable=["layers/1/w*", "layers/*/attn_norm", "embed"], ema=0.3
    )
    state, _ = run_three_steps(training, CONFIG)
    return jax.tree.map(np.array, (state.params, state.average, training.weights(state)))


@functools.cache
def initial(mesh):
    """The parameters before the first step."""
    state = short_training(CONFIG, mesh).init(jax.random.key(0))
    return jax.tree.map(np.array, state.params)


def main():
    implementation, params = compiled_jllama(), random_params(CONFIG, 0)
    wrong = implementation._replace(forward=wrong_on_the_last_device)
    right_case, wrong_case = (
        Case(code, CONFIG, params, TOKENS) for code in (implementation, wrong)
    )
    report = {"refused": [refusal(sizes) for sizes in REFUSED]}
    for name, sizes in MESHES.items():
        meshes = one_and_eight_devices(sizes)
        (one, _), (eight, _) = (train_briefly(CONFIG, mesh) for mesh in meshes)
        batch = jax.device_put(TOKENS, NamedSharding(meshes[1], BATCH))
        (by_one, losses_of_one), (by_eight, losses) = map(trained_by_muon, meshes)
        states = by_eight.opt_state[1][0].inner_states
        momentum = states["muon"].inner_state.trace["layers"]
        report[name] = {
            "muon_error": max(
                distance(by_eight.params, by_one.params), distance(losses, losses_of_one)
            ),
            "momentum_shards": shards({"layers": {each: momentum[each] for each in MATRICES}}),
            "error": sharded_error(right_case, sizes),
            "wrong_error": sharded_error(wrong_case, sizes),
            "training_error": sharded_training_error(right_case, sizes),
            "initial_error": distance(*map(initial, meshes)),
            "moved": distance(initial(meshes[0]), one.params),
            "rows": sorted({shard.data.shape[0] for shard in batch.addressable_shards}),
            "shards": shards(eight.params),
            "moment_shards": shards(eight.opt_state[1][0].mu),
            "selected_error": distance(*map(selected, meshes)),
            "devices": [len(run.params["embed"].sharding.device_set) for run in (one, eight)],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
