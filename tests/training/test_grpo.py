"""The objective of training from rewards: its loss and gradient are the float64 oracle's and
torch's, and it does with clips, masks and counts what the papers say.
"""

import dataclasses
import functools
import types

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import tuning
from helpers_torch import their_losses, their_model
from hypothesis import given
from hypothesis.extra import numpy as hnp
from tuning import compiled, first_errors, sampled_answers

from jllama import GrpoConfig, LoopConfig, TrainConfig
from jllama import functional as F
from jllama.data.batches import Sampled
from jllama.functional import drawn_log_probs, sample
from jllama.training import objectives
from jllama.training.objectives import Targets
from jllama.training.rollouts import Sample, assemble, group_advantages, mismatch

LOSS, SLOPE = 1e-5, 1e-4
PAPER = GrpoConfig(group_size=4, kl=0.1, normalization="answers")
DAPO = GrpoConfig(group_size=4, clip_high=0.28, importance_cap=1.2)
DR_GRPO = GrpoConfig(group_size=4, normalization="constant", max_answer_tokens=12)
ROWS = sampled_answers()


def without_reference(rows):
    return rows._replace(sampled=rows.sampled._replace(reference=None))


def rows_for(options):
    return ROWS if options.kl else without_reference(ROWS)


# Loss and gradient


@pytest.mark.parametrize(
    ("kind", "options", "accumulation"),
    [
        ("lora", dataclasses.replace(PAPER, importance_cap=1.2), 4),
        pytest.param("full", PAPER, 1, marks=pytest.mark.slow),
        pytest.param("full", DAPO, 2, marks=pytest.mark.slow),
        pytest.param("dora", DR_GRPO, 8, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_the_oracles(kind, options, accumulation):
    training = compiled(kind, grpo=options, accumulation=accumulation)
    loss = functools.partial(tuning.grpo_loss, options)
    errors = first_errors(kind, rows_for(options), training, loss)
    assert errors[0] < LOSS
    assert errors[1] < SLOPE


def test_the_log_probabilities_are_the_oracles():
    training = compiled("full", grpo=DAPO)
    rows = without_reference(ROWS)
    state = tuning.begun("full", training)
    actual = np.asarray(training.drawn_log_probs(state.params, rows))
    counts = rows.counted[:, 1:] & (rows.segments[:, 1:] == rows.segments[:, :-1])
    expected = tuning.drawn_log_probs(tuning.WEIGHTS, rows)[:, 1:]
    assert np.abs(actual - expected)[counts].max() < 1e-5
    few = compiled("full", grpo=dataclasses.replace(DAPO, max_answer_tokens=1))
    scored = np.isfinite(np.asarray(few.drawn_log_probs(state.params, rows)))
    assert (scored.sum(axis=1) == 1).all()  # the first; others would be no answer's
    assert counts[scored].all()


def their_loss(model, rows, options):
    """The same objective, written in torch for transformers' model."""
    tokens = torch.tensor(rows.tokens).long()
    settings = rows.sampled.settings
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logits = logits[:, :, : settings["num_ids"][0]] / float(settings["temperature"][0])
    lowest = torch.topk(logits.detach(), int(settings["top_k"][0])).values[..., -1:]
    targets = tokens[:, 1:, None]
    is_target = torch.zeros_like(logits, dtype=torch.bool).scatter(2, targets, True)
    logits = logits.masked_fill((logits.detach() < lowest) & ~is_target, -torch.inf)
    new = torch.log_softmax(logits, dim=-1).gather(2, targets)[..., 0]
    sampled = rows.sampled
    old, sampler, reference = (
        torch.tensor(array[:, 1:]).double()
        for array in (sampled.old, sampled.sampler, sampled.reference)
    )
    counted = torch.tensor(rows.counted[:, 1:] & (rows.segments[:, 1:] == rows.segments[:, :-1]))
    advantages = torch.tensor(sampled.advantages)[:, None]
    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 1 - options.clip_low, 1 + options.clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    losses = losses * torch.clamp(torch.exp(old - sampler), max=options.importance_cap)
    difference = reference - new
    losses = losses + options.kl * (torch.exp(difference) - difference - 1)
    return losses[counted].mean()


def test_ten_steps_have_torchs_losses():
    """Other answers at each of five steps, then the same ones again, from where training came to;
    torch computes in float64.
    """
    options = GrpoConfig(group_size=4, clip_high=0.28, importance_cap=1.2, kl=0.1)
    batches = [sampled_answers(40 + step % 5) for step in range(10)]
    optimizer = dataclasses.replace(tuning.OPTIMIZER, learning_rate=3e-4)
    training = compiled("full", optimizer=optimizer, grpo=options)
    state = tuning.begun("full", training)
    actual = []
    for rows in batches:
        state, metrics = training.step(state, rows)
        actual.append(float(metrics.loss))

    model = their_model("llama").double().train()
    loss = functools.partial(their_loss, options=options)
    expected = their_losses(model, batches, loss, optimizer)
    assert np.abs(np.subtract(expected[:5], expected[5:])).min() > 0.01  # weights move
    assert np.abs(np.subtract(actual, expected)).max() < 1e-6


# Clips, masks, counts

SHAPE = 3, 4


@st.composite
def cases(draw):
    """Log-probabilities of a few tokens, which of them count, advantages and options."""
    logs = hnp.arrays(np.float32, SHAPE, elements=st.floats(-3, 0, width=32))
    new, old, sampler, reference = (draw(logs) for _ in range(4))
    counted = draw(hnp.arrays(bool, SHAPE))
    scores = st.floats(-2, 2, width=32)
    advantages = draw(hnp.arrays(np.float32, SHAPE[0], elements=scores))
    options = GrpoConfig(
        clip_low=draw(st.floats(0, 1)),
        clip_high=draw(st.floats(0, 2)),
        kl=draw(st.sampled_from([0.0, 0.5])),
        importance_cap=draw(st.sampled_from([0.0, 1.5])),
        normalization=draw(st.sampled_from(["tokens", "answers", "constant"])),
        max_answer_tokens=5,
    )
    sampled = Sampled(advantages, sampler, old, {}, reference if options.kl else None)
    return new, counted, sampled, options


def grpo(new, counted, sampled, options, monkeypatch):
    """The objective's mean and figures, for these log-probabilities."""
    ones = np.ones(new.shape, np.int32)
    monkeypatch.setattr(objectives, "drawn_scores", lambda *_: (jnp.array(new), jnp.array(-new)))
    targets = Targets(*jax.tree.map(jnp.array, (ones, ones, ones, counted, None, sampled)))
    loss, count, figures = objectives.grpo(lambda batch: None, targets, LoopConfig(grpo=options))
    return float(loss), float(count), figures


@given(case=cases())
def test_losses_are_the_formulas(case):
    """Token by token in float64, for any options; what does not count has no part."""
    new, counted, sampled, options = case
    with pytest.MonkeyPatch.context() as monkeypatch:
        loss, count, figures = grpo(*case, monkeypatch)
        padded = np.pad(new, ((0, 0), (1, 0)))
        monkeypatch.setattr(tuning, "drawn_log_probs", lambda *_: np.float64(padded))
        columns = {
            name: np.pad(getattr(sampled, name), ((0, 0), (1, 0)))
            for name in ("old", "sampler", "reference")
            if getattr(sampled, name) is not None
        }
        rows = types.SimpleNamespace(
            tokens=padded,
            segments=np.ones(padded.shape),
            counted=np.pad(counted, ((0, 0), (1, 0))),
            sampled=sampled._replace(**columns),
        )
        if counted.any():
            expected = tuning.grpo_loss(options, None, rows)
            assert loss / count == pytest.approx(expected, rel=1e-4, abs=1e-5)
        else:
            assert loss == 0

        # Tokens that do not count may be anything.
        other = np.where(counted, new, np.float32(-50))
        same, _, same_figures = grpo(other, counted, sampled, options, monkeypatch)
        assert same == loss
        assert {name: float(value) for name, value in same_figures.items()} == {
            name: float(value) for name, value in figures.items()
        }


@given(
    ratio=st.floats(0.0625, 4, width=32),
    advantage=st.floats(0.125, 2, width=32),
    clips=st.tuples(st.floats(0, 0.9), st.floats(0, 2)),
)
def test_a_clip_ends_the_gradient_on_its_own_side(ratio, advantage, clips):
    """Above with a positive advantage, below with a negative one; never on the other side."""
    options = GrpoConfig(clip_low=clips[0], clip_high=clips[1])
    low, high = 1 - clips[0], 1 + clips[1]
    if min(abs(ratio - low), abs(ratio - high)) < 1e-3:
        return
    for sign in (1, -1):
        with pytest.MonkeyPatch.context() as monkeypatch:

            def loss(new, sign=sign, monkeypatch=monkeypatch):
                monkeypatch.setattr(objectives, "drawn_scores", lambda *_: (new, -new))
                ones = jnp.ones((1, 1), jnp.int32)
                zeros = jnp.zeros((1, 1))
                sampled = Sampled(jnp.full(1, sign * advantage), zeros, zeros, {})
                targets = Targets(ones, ones, ones, ones > 0, None, sampled)
                total, _, _ = objectives.grpo(lambda batch: None, targets, LoopConfig(grpo=options))
                return total

            gradient = float(jax.grad(loss)(jnp.log(jnp.full((1, 1), ratio)))[0, 0])
        is_clipped = ratio > high if sign > 0 else ratio < low
        expected = 0.0 if is_clipped else -sign * ratio * advantage
        assert gradient == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("normalization", ["tokens", "answers", "constant"])
def test_the_parts_of_a_batch_add_up(normalization, monkeypatch):
    rng = np.random.default_rng(0)
    new, old = (rng.uniform(-2, 0, (6, 5)).astype(np.float32) for _ in range(2))
    counted = rng.random((6, 5)) < 0.6
    options = GrpoConfig(normalization=normalization)

    def sums(rows):
        sampled = Sampled(np.arange(6.0, dtype=np.float32)[rows], old[rows], old[rows], {})
        loss, count, _ = grpo(new[rows], counted[rows], sampled, options, monkeypatch)
        return np.array([loss, count])

    together = sums(slice(0, 6))
    np.testing.assert_allclose(sums(slice(0, 2)) + sums(slice(2, 6)), together, rtol=1e-5)


# Advantages

rewards_of_groups = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(2, 6)),
    elements=st.floats(-100, 100, width=16),
)


@given(rewards=rewards_of_groups, shift=st.integers(-1000, 1000))
def test_advantages_are_of_a_group_alone(rewards, shift):
    for kind in ("group", "centered", "rloo"):
        advantages = group_advantages(rewards, kind)
        assert np.isfinite(advantages).all()
        assert np.abs(advantages.sum(axis=1)).max() < 1e-3 * (1 + np.abs(rewards).max())
        order = np.argsort(rewards, axis=1, kind="stable")
        assert (np.diff(np.take_along_axis(advantages, order, axis=1)) >= 0).all()
        np.testing.assert_allclose(
            group_advantages(rewards + shift, kind), advantages, rtol=1e-3, atol=1e-3
        )
        for row, expected in zip(rewards, advantages, strict=True):
            np.testing.assert_array_equal(group_advantages(row[None], kind)[0], expected)


@given(rewards=rewards_of_groups)
def test_advantages_are_the_papers(rewards):
    for row in rewards:
        has_signal = len(set(row)) > 1
        size = len(row)
        mean = sum(row) / size
        deviation = (sum((reward - mean) ** 2 for reward in row) / (size - 1)) ** 0.5
        actual = {kind: group_advantages(row[None], kind)[0] for kind in ("group", "centered")}
        actual["rloo"] = group_advantages(row[None], "rloo")[0]
        for index, reward in enumerate(row):
            others = (sum(row) - reward) / (size - 1)
            expected = {
                "group": (reward - mean) / (deviation + 1e-4),
                "centered": reward - mean,
                "rloo": reward - others,
            }
            for kind, value in expected.items():
                found = actual[kind][index]
                assert found == pytest.approx(value if has_signal else 0, rel=1e-4, abs=1e-4)


def test_equal_rewards_are_no_direction():
    """Also where their mean rounds: 0.1 three times is not three tenths."""
    rewards = np.full((2, 3), 0.1)
    for kind in ("group", "centered", "rloo"):
        assert not group_advantages(rewards, kind).any()


# Batches


def config(**options):
    grpo_options = GrpoConfig(group_size=2, max_answer_tokens=4, **options)
    training = LoopConfig(batch_size=4, seq_len=40, grpo=grpo_options)
    return TrainConfig(tuning.CONFIG, init_from="x", reward="exact", training=training)


def test_a_batch_has_each_answers_tokens_where_they_are():
    prompt = types.SimpleNamespace(ids=(5, 6, 7))
    samples = [
        Sample(prompt, [8, 9], [-1.0, -2.0], "ab", False),
        Sample(prompt, [8, 9, 10, 11], [-1.0, -2.0, -3.0, -4.0], "abcd", True),
    ]
    advantages = np.float32([1, -1])
    batch = assemble(samples, advantages, config(), 60)
    assert batch.tokens.shape == (2, 33)
    assert batch.tokens[1, :8].tolist() == [5, 6, 7, 8, 9, 10, 11, 0]
    assert np.flatnonzero(batch.counted[0]).tolist() == [3, 4]
    assert np.flatnonzero(batch.counted[1]).tolist() == [3, 4, 5, 6]
    assert batch.sampled.sampler[1, 3:7].tolist() == [-1, -2, -3, -4]
    assert np.flatnonzero(batch.segments[0]).tolist() == [0, 1, 2, 3, 4]
    assert batch.sampled.settings["num_ids"].tolist() == [60, 60]


def test_mismatch_is_of_probabilities():
    figures = mismatch(np.float32([-1, -1, -1, -1]), np.float32([-1, -1.005, -0.98, -1]))
    assert figures["mismatch_max"] == pytest.approx(0.02, rel=1e-5)
    assert figures["mismatch_mean"] == pytest.approx(0.025 / 4, rel=1e-5)
    assert figures["mismatch_outside"] == 0.25


# What was drawn

SIZE = 12


@jax.jit
def tables(logits, key, temperature, settings):
    """Draw a token; return it, its log-probability and entropy, all tokens' ones, and which may be
    drawn.
    """
    temperatures = temperature[None]
    drawn = sample(logits, key[None], temperatures, **settings)
    log_prob, entropy = drawn_log_probs(logits, drawn, temperatures, **settings)
    every, _ = jax.vmap(
        lambda token: drawn_log_probs(logits, token[None], temperatures, **settings)
    )(jnp.arange(SIZE))
    stays = jnp.isfinite(F.truncated_logits(logits, temperatures, **settings))
    return drawn[0], log_prob[0], entropy[0], every[:, 0], stays[0]


@given(
    logits=hnp.arrays(np.float32, (1, SIZE), elements=st.floats(-8, 8, width=16)),
    seed=st.integers(0, 99),
    temperature=st.floats(0.125, 2, width=16),
    top_k=st.integers(1, SIZE),
    top_p=st.floats(0.0625, 1, width=16),
)
def test_what_is_drawn_has_the_log_probability_it_was_drawn_with(
    logits, seed, temperature, top_k, top_p
):
    """The probabilities of what may be drawn add up to 1, for any truncation."""
    settings = {"top_k": jnp.array([top_k]), "top_p": jnp.array([top_p], jnp.float32)}
    key = jax.random.key(seed)
    drawn, log_prob, entropy, every, stays = jax.tree.map(
        np.asarray, tables(jnp.array(logits), key, jnp.float32(temperature), settings)
    )
    assert stays[drawn]
    assert log_prob == pytest.approx(every[drawn], rel=1e-6, abs=1e-6)
    probabilities = np.exp(np.float64(every[stays]))
    assert probabilities.sum() == pytest.approx(1, rel=1e-5)
    expected = -np.sum(probabilities * every[stays])
    assert entropy == pytest.approx(expected, rel=1e-4, abs=1e-5)
