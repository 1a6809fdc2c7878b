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
from hypothesis import example, given
from hypothesis.extra import numpy as hnp
from tuning import compiled, first_errors, sampled_answers

from jllama import GrpoConfig, LoopConfig, TrainConfig
from jllama import functional as F
from jllama.core.step import Batch, Sampled, Targets
from jllama.functional import drawn_log_probs, sample
from jllama.rl.rollouts import Sample, assemble, group_advantages, mismatch
from jllama.training import objectives, plan

LOSS, SLOPE = 1e-5, 1e-4
PAPER = GrpoConfig(group_size=4, kl=0.1, normalization="answers")
DAPO = GrpoConfig(group_size=4, clip_high=0.28, importance_cap=1.2)
DR_GRPO = GrpoConfig(group_size=4, normalization="constant", max_answer_tokens=12)
ROWS = sampled_answers()


WITHOUT_REFERENCE = ROWS._replace(sampled=ROWS.sampled._replace(reference=None))


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
    rows = ROWS if options.kl else WITHOUT_REFERENCE
    errors = first_errors(kind, rows, training, loss)
    assert errors[0] < LOSS
    assert errors[1] < SLOPE


def test_the_log_probabilities_are_the_oracles():
    """Of the first two columns of an answer; others are taken for no answer's."""
    training = compiled("full", grpo=dataclasses.replace(DAPO, max_answer_tokens=2))
    rows = WITHOUT_REFERENCE
    state = tuning.begun("full", training)
    actual = np.asarray(training.drawn_log_probs(state.params, rows))
    counts = rows.counted[:, 1:] & (rows.segments[:, 1:] == rows.segments[:, :-1])
    expected = tuning.drawn_log_probs(tuning.WEIGHTS, rows)[:, 1:]
    columns = np.arange(counts.shape[1]) - counts.argmax(axis=1)[:, None]
    is_scored = (columns >= 0) & (columns < 2)
    np.testing.assert_array_equal(np.isfinite(actual), is_scored)
    assert (counts & ~is_scored).any()
    assert np.abs(actual - expected)[counts & is_scored].max() < 1e-5


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


def test_ten_steps_have_torchs_losses(monkeypatch):
    """Other answers at each of five steps, then the same ones again, from where training came to.

    Both compute in float64: a mean of ratios near 1 is no better than the log-probabilities, which
    float32 has to 1e-6.
    """
    monkeypatch.setattr(plan, "compute_dtype", lambda *_: np.dtype("float64"))
    options = GrpoConfig(group_size=4, clip_high=0.28, importance_cap=1.2, kl=0.1)
    batches = [sampled_answers(40 + number % 5) for number in range(10)]
    optimizer = dataclasses.replace(tuning.OPTIMIZER, learning_rate=3e-4)
    actual = []
    with jax.enable_x64(True):
        training = compiled.__wrapped__("full", optimizer=optimizer, grpo=options)
        state = tuning.begun("full", training)
        for rows in batches:
            state, metrics = training.step(state, rows)
            actual.append(float(metrics.loss))

    model = their_model("llama").double().train()
    loss = functools.partial(their_loss, options=options)
    expected = their_losses(model, batches, loss, optimizer)
    assert np.abs(np.subtract(expected[:5], expected[5:])).min() > 0.01  # weights move
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


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
    """Token by token in float64, for any options; what does not count has no part.

    Loss and count are both sums, so those of parts of a batch add up.
    """
    new, counted, sampled, options = case
    with pytest.MonkeyPatch.context() as monkeypatch:
        loss, count, figures = grpo(*case, monkeypatch)
        padded = np.pad(new, ((0, 0), (1, 0)))
        monkeypatch.setattr(tuning, "drawn_log_probs", lambda *_: np.float64(padded))
        whole = jax.tree.map(
            lambda array: np.pad(array, ((0, 0), (1, 0))) if array.ndim == 2 else array, sampled
        )
        ones = np.ones(padded.shape)
        rows = Batch(ones, ones, np.pad(counted, ((0, 0), (1, 0))), sampled=whole)
        by_tokens = options.normalization == "tokens"
        assert count == (counted.sum() if by_tokens else len(counted))
        if counted.any():
            expected = tuning.grpo_loss(options, None, rows)
            assert loss / count == pytest.approx(expected, rel=1e-4, abs=1e-5)
        else:
            assert loss == 0

        # Tokens that do not count may be anything.
        other = np.where(counted, new, np.float32(-50))
        same, _, same_figures = grpo(other, counted, sampled, options, monkeypatch)
        assert same == loss
        assert jax.device_get(same_figures) == jax.device_get(figures)


@pytest.mark.parametrize("clips", [(0.0, 0.0), (0.2, 0.28), (0.9, 2.0)])
def test_a_clip_ends_the_gradient_on_its_own_side(clips, monkeypatch):
    """Above with a positive advantage, below with a negative one; never on the other side."""
    low, high = 1 - clips[0], 1 + clips[1]
    rng = np.random.default_rng(0)
    near = [edge + 1e-3 * side for edge in (low, high) for side in (-1, 1)]
    ratios = np.float32([*rng.uniform(0.0625, 4, 60), *near])
    advantages = rng.uniform(0.125, 2, 64) * rng.choice([-1, 1], 64)
    zeros, ones = np.zeros((64, 1), np.float32), np.ones((64, 1), np.int32)
    sampled = Sampled(np.float32(advantages), zeros, zeros, {})
    config = LoopConfig(grpo=GrpoConfig(clip_low=clips[0], clip_high=clips[1]))

    @jax.jit
    @jax.grad
    def gradients(new):
        monkeypatch.setattr(objectives, "drawn_scores", lambda *_: (new, -new))
        targets = Targets(ones, ones, ones, ones > 0, None, sampled)
        total, _, _ = objectives.grpo(
            lambda batch: None, jax.tree.map(jnp.asarray, targets), config
        )
        return total

    is_clipped = np.where(advantages > 0, ratios > high, ratios < low)
    expected = np.where(is_clipped, 0, -ratios * advantages)
    actual = gradients(np.log(ratios)[:, None])[:, 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


# Advantages

rewards_of_groups = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(2, 6)),
    elements=st.floats(-100, 100, width=16),
)


@given(rewards=rewards_of_groups)
@example(np.full((2, 3), 0.1))  # whose mean rounds: 0.1 three times is not three tenths
def test_advantages_are_the_papers(rewards):
    """Of a group alone; equal rewards are no direction."""
    size = rewards.shape[1]
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    expected = {
        "group": centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4),
        "centered": centered,
        "rloo": rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / (size - 1),
    }
    has_signal = np.ptp(rewards, axis=1, keepdims=True) > 0
    for kind, values in expected.items():
        actual = group_advantages(rewards, kind)
        np.testing.assert_allclose(actual, values * has_signal, rtol=1e-4, atol=1e-4)
        assert not actual[~has_signal[:, 0]].any()


# Batches


def test_a_batch_has_each_answers_tokens_where_they_are():
    prompt = types.SimpleNamespace(ids=(5, 6, 7))
    samples = [
        Sample(prompt, [8, 9], [-1.0, -2.0], "ab", False),
        Sample(prompt, [8, 9, 10, 11], [-1.0, -2.0, -3.0, -4.0], "abcd", True),
    ]
    options = GrpoConfig(group_size=2, max_answer_tokens=4)
    training = LoopConfig(batch_size=4, seq_len=40, grpo=options)
    config = TrainConfig(tuning.CONFIG, init_from="x", reward="exact", training=training)
    batch = assemble(samples, np.float32([1, -1]), plan.decide(config), 60)
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
