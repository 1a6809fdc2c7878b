"""A small model to tune, conversations packed and apart, compiled steps, and the same losses in
float64.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
from unittest import mock

import jax
import numpy as np
from models import FAMILIES, SMALL, family_weights

from jllama.core.step import Batch, Sampled
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.config import LoraConfig
from jllama.parallel.sharding import MeshConfig, make_mesh
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig

CONFIG = dataclasses.replace(SMALL, vocab_size=64, tie_embeddings=True)
WEIGHTS = random_params(CONFIG, 0, embed_std=0.2)  # small, as the embedding is the head
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_fraction=0.2, clip_norm=0.5, epsilon=1e-6)
"""Gradients are longer than the clip, so that it counts."""
KINDS = {
    "full": LoraConfig(),
    "lora": LoraConfig(rank=4, alpha=6.0),
    "rslora": LoraConfig(rank=4, alpha=6.0, targets=("wq", "wo", "w_down"), rank_stabilized=True),
    "dora": LoraConfig(rank=4, alpha=6.0, dora=True),
}
ROWS, WINDOW, STEPS = 8, 25, 20
CACHED = ("compiled", "random_adapter")
ONE_DEVICE = make_mesh(MeshConfig(), jax.devices()[:1])


@contextlib.contextmanager
def family(name):
    """All functions of this module are about the model of a family."""
    model = {"CONFIG": FAMILIES[name], "WEIGHTS": family_weights(name)}
    fresh = {made: functools.cache(globals()[made].__wrapped__) for made in CACHED}
    with mock.patch.multiple("tuning", **model, **fresh):
        yield


class Selection(list):
    """A list that a cache takes."""

    def __hash__(self):
        return hash(tuple(self))


def assert_trees_close(actual, expected, tolerance):
    for leaf, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(leaf, reference) < tolerance


def digest(tree):
    return hashlib.sha256(
        b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    ).hexdigest()


def conversations(seed, count=ROWS):
    """``(tokens, counted)`` of each: one turn or two, of a question and an answer, which counts."""
    rng, result = np.random.default_rng(seed), []
    for _ in range(count):
        lengths = rng.integers(1, 4, 2 * rng.integers(1, 3))
        counted = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        result.append((rng.integers(2, CONFIG.vocab_size, len(counted)).astype(np.int32), counted))
    return result


def rows_of(groups, count=ROWS):
    """So many rows, in each the conversations of a group, then padding."""
    tokens, segments = (np.zeros((count, WINDOW), np.int32) for _ in range(2))
    counted = np.zeros((count, WINDOW), bool)
    for row, group in enumerate(groups):
        start = 0
        for number, (ids, counts) in enumerate(group, 1):
            here = row, slice(start, start := start + len(ids))
            tokens[here], segments[here], counted[here] = ids, number, counts
    return Batch(tokens, segments, counted)


def apart(turns):
    """Each conversation in a row of its own."""
    return rows_of(([turn] for turn in turns), max(len(turns), ROWS))


def packed(turns):
    """Up to three conversations in a row; rows that are left over are padding."""
    return rows_of([turns[:2], turns[2:5], turns[5:7], turns[7:]])


@functools.cache
def compiled(kind, mesh=ONE_DEVICE, optimizer=OPTIMIZER, **options):
    """The programs of a tuning of this kind."""
    loop = LoopConfig(
        **{"dtype": "float32", "batch_size": ROWS, "seq_len": WINDOW - 1, "steps": STEPS}
        | {"balance_loss": 0.0}
        | options
    )
    config = TrainConfig(
        CONFIG, init_from="WEIGHTS", optimizer=optimizer, training=loop, lora=KINDS[kind]
    )
    return compile_training(config, mesh, compiler_options={"xla_backend_optimization_level": 0})


def begun(kind, training):
    """The state before the first step; adapters are as after some, so that each part of them has a
    gradient.
    """
    state = training.init(jax.random.key(0), jax.tree.map(np.copy, WEIGHTS))
    if kind == "full":
        return state
    return state._replace(params=jax.device_put(random_adapter(kind), training.shardings.params))


@functools.cache
def random_adapter(kind):
    """Factors whose product is a tenth of the matrix, and magnitudes near the lengths of its
    outputs.
    """
    lora, rng, layers = KINDS[kind], np.random.default_rng(1), {}
    for name in lora.targets:
        matrix = matrices(name)
        (count, inputs, outputs), rank = matrix.shape, lora.rank
        a, b = (
            rng.standard_normal(shape) for shape in ((count, inputs, rank), (count, rank, outputs))
        )
        layers[name] = {"a": a / math.sqrt(inputs), "b": 0.1 * b / math.sqrt(rank)}
        if lora.dora:
            layers[name]["magnitude"] = np.linalg.norm(matrix, axis=1) * rng.uniform(
                0.8, 1.2, (count, outputs)
            )
    return jax.tree.map(np.float32, {"layers": layers})


def matrices(name):
    """A stack of matrices of the layers in float64, inputs and outputs joined."""
    stack = np.float64(WEIGHTS["layers"][name])
    if name == "wo":
        return stack.reshape(len(stack), -1, CONFIG.embed_dim)
    return stack.reshape(*stack.shape[:2], -1)


def sums(kind, params):
    """``W + scale A B`` of each adapted matrix, in float64."""
    lora = KINDS[kind]
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.rank_stabilized else lora.rank)
    return {
        n: matrices(n) + scale * np.float64(p["a"]) @ np.float64(p["b"])
        for n, p in params["layers"].items()
    }


def merged(kind, params, near=None):
    """The weights that are computed with. DoRA divides by the lengths of outputs, which it takes
    for constants: those of ``near``, if that is given.
    """
    if kind == "full":
        return params
    layers, whole = dict(WEIGHTS["layers"]), sums(kind, params)
    if KINDS[kind].dora:
        lengths = {
            n: np.linalg.norm(matrix, axis=1) for n, matrix in sums(kind, near or params).items()
        }
        whole = {
            n: matrix * (params["layers"][n]["magnitude"] / lengths[n])[:, None]
            for n, matrix in whole.items()
        }
    return WEIGHTS | {
        "layers": layers | {n: matrix.reshape(layers[n].shape) for n, matrix in whole.items()}
    }


def log_probs(weights, rows):
    """The summed log-probability of each row's counted tokens, in float64."""
    result, has_any = np.zeros(len(rows.tokens)), rows.counted[:, 1:].any(axis=1)
    tokens, segments, counted = (array[has_any] for array in rows[:3])
    logits = oracle.forward(weights, tokens[:, :-1], CONFIG, segments=segments[:, :-1])
    scored = zip(logits, tokens[:, 1:], counted[:, 1:], strict=True)
    result[has_any] = [-oracle.cross_entropy(*row)[0] for row in scored]
    return result


def answers_loss(weights, rows):
    """Nats per counted token."""
    return -log_probs(weights, rows).sum() / rows.counted[:, 1:].sum()


def preference_loss(weights, pairs, beta=0.1):
    """Rafailov et al. 2023, eq. 7: the mean of ``-log sigmoid(beta * margin)`` over pairs, without
    padding.
    """
    ratios = (log_probs(weights, pairs) - pairs.reference)[pairs.counted.any(axis=1)].reshape(-1, 2)
    return np.mean(np.logaddexp(0, -beta * (ratios[:, 0] - ratios[:, 1])))


def drawn_log_probs(weights, rows):
    """The log-probability of each column's token in what it was drawn from, in float64.

    Of the settings, temperature and ``top_k`` are applied; ids from ``num_ids`` on are never drawn.
    """
    logits = oracle.forward(weights, rows.tokens[:, :-1], CONFIG, segments=rows.segments[:, :-1])
    settings, targets = rows.sampled.settings, rows.tokens[:, 1:, None]
    scaled = logits[..., : settings["num_ids"][0]] / settings["temperature"][:, None, None]
    drawn = np.take_along_axis(scaled, targets, axis=2)
    lowest = np.sort(scaled)[..., -settings["top_k"][0], None]
    stays = (scaled >= lowest) | (scaled == drawn)
    shares = np.where(stays, np.exp(scaled - drawn), 0)
    return np.pad(-np.log(shares.sum(axis=2)), ((0, 0), (1, 0)))


def sampled_answers(seed=3, temperature=0.7, top_k=40):
    """Conversations apart as if the model had answered: ratios on both sides of both clips."""
    rows = apart(conversations(seed))
    rng = np.random.default_rng(seed)
    settings = {
        "temperature": np.full(ROWS, temperature, np.float32),
        "top_k": np.full(ROWS, top_k, np.int32),
        "num_ids": np.full(ROWS, CONFIG.vocab_size - 1, np.int32),
    }
    zeros = np.zeros(rows.tokens.shape, np.float32)
    tokens = np.minimum(rows.tokens, CONFIG.vocab_size - 2)
    advantages = rng.standard_normal(ROWS).astype(np.float32)
    rows = rows._replace(tokens=tokens, sampled=Sampled(advantages, zeros, zeros, settings, zeros))
    near = drawn_log_probs(WEIGHTS, rows)
    old, sampler, reference = (
        (near + width * rng.standard_normal(near.shape)).astype(np.float32)
        for width in (0.3, 0.3, 0.5)
    )
    sampled = rows.sampled._replace(old=old, sampler=sampler, reference=reference)
    return rows._replace(sampled=sampled)


def grpo_loss(options, weights, rows):
    """Shao et al. 2024, eq. 3 and 4, of each token, in float64."""
    new, sampled = drawn_log_probs(weights, rows), rows.sampled
    counted = rows.counted & (np.diff(rows.segments, axis=1, prepend=-1) == 0)
    advantages = np.float64(sampled.advantages)[:, None]
    ratio = np.exp(new - sampled.old)
    clipped = np.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
    losses = -np.minimum(ratio * advantages, clipped * advantages)
    if options.importance_cap:
        drift = np.exp(np.float64(sampled.old) - sampled.sampler)
        losses = losses * np.minimum(drift, options.importance_cap)
    if options.kl:
        difference = sampled.reference - new
        losses = losses + options.kl * (np.exp(difference) - difference - 1)
    num_tokens = counted.sum(axis=1)
    totals = np.where(counted, losses, 0).sum(axis=1)
    if options.normalization == "tokens":
        return totals.sum() / num_tokens.sum()
    if options.normalization == "constant":
        return np.mean(totals / options.max_answer_tokens)
    return np.mean(totals / np.maximum(num_tokens, 1))


def first_step(kind, rows, training):
    """The parameters before the first step, its gradient and its metrics.

    AdamW's first moment is made of the gradient after it was clipped.
    """
    state = begun(kind, training)
    params = jax.tree.map(np.array, state.params)
    state, metrics = training.step(state, rows)
    factor = max(1.0, float(metrics.grad_norm) / OPTIMIZER.clip_norm) / (1 - OPTIMIZER.beta1)
    gradient = jax.tree.map(lambda mean: factor * np.float64(mean), state.opt_state[1][0].mu)
    return params, gradient, metrics


def first_errors(kind, rows, training, loss=answers_loss):
    """How far loss and gradient of a first step are from the oracle's."""
    params, gradient, metrics = first_step(kind, rows, training)
    value = loss(merged(kind, params), rows)
    return relative_error(metrics.loss, value), slope_error(kind, params, gradient, loss, rows)


def slope_error(kind, params, gradient, loss, rows):
    """How far a gradient is from finite differences of a float64 loss, in the worst of some
    directions.

    Of each array a random direction, relative to what random directions have, and the largest
    coordinate.
    """
    rng, worst = np.random.default_rng(0), 0.0
    leaves, tree = jax.tree.flatten(jax.tree.map(np.float64, params))

    def slope(index, direction, step=1e-4):
        ends = (
            [x + s * direction if i == index else x for i, x in enumerate(leaves)]
            for s in (step, -step)
        )
        high, low = (
            loss(merged(kind, jax.tree.unflatten(tree, end), near=params), rows) for end in ends
        )
        return (high - low) / (2 * step)

    for index, array in enumerate(jax.tree.leaves(gradient)):
        drawn, place = rng.standard_normal(array.shape), np.abs(array).argmax()
        drawn /= np.linalg.norm(drawn)
        largest = np.eye(1, array.size, place).reshape(array.shape)
        checks = [
            (largest, np.abs(array).max()),
            (drawn, np.linalg.norm(array) / np.sqrt(array.size)),
        ]
        worst = max(
            [worst, *(abs(slope(index, d) - np.sum(array * d)) / scale for d, scale in checks)]
        )
    return worst
