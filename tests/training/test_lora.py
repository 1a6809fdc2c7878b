"""Tuning on conversations: loss and gradient against the float64 oracle, what stays as it was,
mistakes seen.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import tuning
from models import forward
from tuning import (
    CONFIG,
    KINDS,
    STEPS,
    WEIGHTS,
    apart,
    begun,
    compiled,
    conversations,
    digest,
    first_step,
    packed,
)

import jllama.model
import jllama.training.step
from jllama import functional as F
from jllama import lora
from jllama.config import LoraConfig
from jllama.functional.linear import AdaptedMatrix
from jllama.sharding import sharded_attention
from jllama.training.metrics import mean_figures
from jllama.verify.checks import relative_error

LOSS, SLOPE = 1e-6, 1e-5
"""The largest relative errors of right code, of a loss and of a gradient."""
ROWS, ADAPTER = packed(conversations(0)), tuning.random_adapter("lora")
SCRIPT = Path(__file__).parents[1] / "tuned_on_eight_devices.py"


def assert_right(kind, rows, training, loss=tuning.answers_loss):
    """Loss and gradient of a first step are the oracle's."""
    errors = tuning.first_errors(kind, rows, training, loss)
    assert errors[0] < LOSS
    assert errors[1] < SLOPE


def assert_trees_close(actual, expected, tolerance):
    for leaf, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(leaf, reference) < tolerance


def test_the_batch_is_what_it_is_to_be():
    """Several conversations in a row, padding, and parts that count unequally."""
    assert ROWS.segments.max() == 3
    assert (ROWS.segments == 0).any()
    counts = ROWS.counted[:, 1:].reshape(4, -1).sum(axis=1).tolist()
    assert counts[0] != counts[1]
    assert counts[2:] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("lora", {}, marks=pytest.mark.slow),
        ("dora", {"accumulation": 4}),
        pytest.param("full", {}, marks=pytest.mark.slow),
        pytest.param("full", {"accumulation": 4}, marks=pytest.mark.slow),
        pytest.param("rslora", {"accumulation": 2, "remat": "block"}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_the_oracles(kind, options):
    assert_right(kind, ROWS, compiled(kind, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_so_they_are_with_the_loss_in_chunks(kind, monkeypatch):
    monkeypatch.setattr(jllama.training.step, "loss_chunk_tokens", lambda *_: 7)
    assert_right(kind, ROWS, compiled.__wrapped__(kind))


@pytest.mark.slow
def test_so_they_are_on_eight_devices():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, SCRIPT.parents[:2])),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len({row["mesh"] for row in report}) == 5
    assert [
        row for row in report if not (row["errors"][0] < LOSS and row["errors"][1] < SLOPE)
    ] == []


def test_packed_rows_are_each_conversation_alone():
    training = compiled("lora")
    _, together, metrics = first_step("lora", ROWS, training)
    _, alone, metrics_alone = first_step("lora", apart(conversations(0)), training)
    assert metrics.tokens == metrics_alone.tokens == (ROWS.segments > 0).sum()
    assert relative_error(metrics.loss, metrics_alone.loss) < LOSS
    assert_trees_close(together, alone, 5e-6)


def test_a_neighbor_changes_nothing():
    """One that does not count says something else: not a bit of loss or gradient is another."""
    training, (first, *others) = compiled("lora"), conversations(0)
    silent = first[0], np.zeros_like(first[1])
    changed = CONFIG.vocab_size - 1 - first[0], silent[1]
    before, after = (
        first_step("lora", packed([neighbor, *others]), training) for neighbor in (silent, changed)
    )
    assert digest(before) == digest(after)


def test_a_segment_s_first_token_is_no_target():
    """Also where it counts: nothing of its own is before it."""
    first = np.diff(ROWS.segments, axis=1, prepend=0) != 0
    marked = ROWS._replace(counted=ROWS.counted | first)
    actual, expected = (first_step("lora", rows, compiled("lora")) for rows in (marked, ROWS))
    assert digest(actual) == digest(expected)


def test_adapters_alone_are_trained():
    """After twenty steps the base, with the head that is the embedding, has the same bits, and no
    optimizer state.
    """
    training = compiled("lora")
    state = begun("lora", training)
    before, adapters = digest(state.base), jax.tree.map(np.array, state.params)
    losses = []
    for _ in range(STEPS):
        state, metrics = training.step(state, ROWS)
        losses.append(float(metrics.loss))
        assert not metrics.skipped
    assert losses[-1] < losses[0] - 1
    assert digest(state.base) == before
    assert digest(state.base) == digest(jax.tree.map(jnp.asarray, WEIGHTS))
    assert all(
        np.all(old != new)
        for old, new in zip(*map(jax.tree.leaves, (adapters, state.params)), strict=True)
    )
    trained = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * trained
    # Bytes, layers, rank, inputs and outputs.
    assert trained == 4 * 2 * 4 * (192 + 128 + 128 + 192 + 3 * 160)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_equals_unmerged(kind):
    adapter = tuning.random_adapter(kind)
    whole = lora.merge(jax.tree.map(jnp.asarray, WEIGHTS), adapter, CONFIG, KINDS[kind])
    assert_trees_close(whole, tuning.merged(kind, adapter), 1e-6)
    training = compiled(kind)
    actual = training.log_probs(adapter, ROWS, base=jax.tree.map(jnp.asarray, WEIGHTS))
    inputs, targets = ROWS.tokens[:, :-1], ROWS.tokens[:, 1:]
    log_probs = jax.nn.log_softmax(forward(CONFIG, whole, inputs, ROWS.segments[:, :-1]))
    counted = (
        np.take_along_axis(np.asarray(log_probs), targets[..., None], axis=-1)[..., 0]
        * ROWS.counted[:, 1:]
    )
    assert relative_error(actual, counted.sum(axis=1)) < 1e-6


def test_fresh_adapters_change_nothing():
    for kind in ("lora", "dora"):
        adapter = lora.initial_adapter(
            jax.random.key(0), jax.tree.map(jnp.asarray, WEIGHTS), CONFIG, KINDS[kind]
        )
        assert_trees_close(tuning.merged(kind, adapter), WEIGHTS, 1e-6)
        for name, part in adapter["layers"].items():
            assert np.std(part["a"]) == pytest.approx(
                1 / math.sqrt(3 * part["a"].shape[1]), rel=0.1
            ), name


# Preference training


def preferred(training):
    """Three pairs and padding, scored by the model before training."""
    state, pairs = begun("lora", training), apart(conversations(0, 6))
    return pairs._replace(
        reference=np.asarray(training.log_probs(state.params, pairs, base=state.base))
    )


def test_the_first_preference_loss_is_ln_2():
    training = compiled("lora")
    pairs = preferred(training)
    expected = tuning.log_probs(tuning.merged("lora", ADAPTER), pairs)
    assert relative_error(pairs.reference, expected) < LOSS
    _, metrics = training.step(begun("lora", training), pairs)
    assert abs(float(metrics.loss) - math.log(2)) < 1e-7  # float32 has no nearer number


def test_the_preference_gradient_is_the_oracles():
    training = compiled("lora")
    pairs = preferred(training)
    moved = pairs._replace(reference=pairs.reference + np.float32([3, -4, 10, 2, -20, 5, 9, 1]))
    assert_right("lora", moved, training, tuning.preference_loss)


def test_the_figures_of_pairs_are_the_oracles():
    """Of a step in one part and in two, and of an evaluation; padding is no pair."""
    pairs = preferred(compiled("lora"))
    moved = pairs._replace(reference=pairs.reference + np.float32([3, -4, 10, 20, -20, 5, 9, 1]))
    actual = tuning.log_probs(tuning.merged("lora", ADAPTER), moved)
    rewards = 0.1 * (actual - moved.reference).reshape(-1, 2)[:3]
    expected = {
        "accuracy": np.sum(rewards[:, 0] > rewards[:, 1]),
        "margin": np.sum(rewards[:, 0] - rewards[:, 1]),
    }
    expected |= {"chosen_reward": rewards[:, 0].sum(), "rejected_reward": rewards[:, 1].sum()}
    assert 0 < expected["accuracy"] < 3

    def assert_right_figures(count, figures):
        assert (float(count), figures.keys()) == (3, expected.keys())
        for name, value in expected.items():
            assert float(figures[name]) == pytest.approx(value, rel=1e-5), name

    for accumulation in (1, 2):
        training = compiled("lora", accumulation=accumulation)
        _, metrics = training.step(begun("lora", training), moved)
        assert_right_figures(metrics.num_counted, metrics.figures)
    state = begun("lora", training)
    assert_right_figures(*training.evaluate(state.params, moved, state.base)[1:])
    means = mean_figures([metrics.figures] * 2, [metrics.num_counted] * 2)
    assert means == pytest.approx({name: value / 3 for name, value in expected.items()}, rel=1e-5)


def test_preference_steps_raise_the_margin_as_torch_has_it():
    training = compiled("lora")
    pairs, state, margins = preferred(training), begun("lora", training), []
    for _ in range(STEPS):
        actual = np.asarray(training.log_probs(state.params, pairs, base=state.base))
        ratios = torch.from_numpy(actual - pairs.reference).reshape(-1, 2)[:3]
        margins.append(float(torch.mean(ratios[:, 0] - ratios[:, 1])))
        expected = -torch.nn.functional.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean()
        state, metrics = training.step(state, pairs)
        assert relative_error(metrics.loss, expected) < 1e-5
    assert np.all(np.diff(margins[:10]) > 0)
    assert margins[-1] > 5


# Mistakes


def seen(loss, meant=ROWS):
    """By how many tolerances a loss with adapters is not the oracle's."""
    return relative_error(loss, tuning.answers_loss(tuning.merged("lora", ADAPTER), meant)) / LOSS


def loss_of(rows, weights=WEIGHTS, training=None):
    evaluate = (training or compiled("lora")).evaluate
    total, count, _ = evaluate(ADAPTER, rows, base=jax.tree.map(np.float32, weights))
    return float(total / count)


def test_answers_one_token_off_are_seen():
    assert seen(loss_of(ROWS)) < 1
    for shift in (-1, 1):
        shifted = ROWS._replace(counted=np.roll(ROWS.counted, shift, axis=1) & (ROWS.segments > 0))
        assert seen(loss_of(shifted)) > 100


def test_a_neighbor_that_is_attended_is_seen():
    assert seen(loss_of(ROWS._replace(segments=np.minimum(ROWS.segments, 1)))) > 100


def test_a_mean_of_means_is_seen():
    parts = (
        jax.tree.map(lambda part, first=first: np.roll(part, first, axis=0), ROWS)
        for first in (0, -2)
    )
    is_first = np.arange(len(ROWS.tokens))[:, None] < 2
    assert (
        seen(np.mean([loss_of(rows._replace(counted=rows.counted & is_first)) for rows in parts]))
        > 100
    )


def test_a_head_that_is_trained_is_seen():
    """Moved as far as AdamW moves what has a gradient in one step; that it keeps its bits is tested
    above.
    """
    rate, embed = np.float32(tuning.OPTIMIZER.learning_rate), WEIGHTS["embed"]
    moved = embed + rate * np.random.default_rng(0).choice([-1, 1], embed.shape)
    assert seen(loss_of(ROWS, WEIGHTS | {"embed": moved})) > 100


def swapped(x, matrix):
    """``B`` and ``A`` for each other, where the matrix is square and so nothing else tells."""
    product = x @ matrix.base
    is_square = matrix.a.shape == matrix.b.T.shape
    return product + matrix.scale * (
        x @ matrix.b.T @ matrix.a.T if is_square else x @ matrix.a @ matrix.b
    )


PLANTED = {
    "alpha divided by nothing": lambda patch: patch(
        LoraConfig, "scale", property(lambda lora: lora.alpha)
    ),
    "alpha divided by the root of the rank": lambda patch: patch(
        LoraConfig, "scale", property(lambda lora: lora.alpha / math.sqrt(lora.rank))
    ),
    "A and B swapped": lambda patch: patch(
        AdaptedMatrix, "__rmatmul__", lambda matrix, x: swapped(x, matrix)
    ),
    "a neighbor attended": lambda patch: patch(
        jllama.model,
        "sharded_attention",
        lambda mesh, q, k, v, mask, name: sharded_attention(mesh, q, k, v, F.Mask(), name),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake, monkeypatch):
    PLANTED[mistake](monkeypatch.setattr)
    assert seen(loss_of(ROWS, training=compiled.__wrapped__("lora"))) > 100
