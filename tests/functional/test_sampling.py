import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import chdtrc
from transformers.generation import logits_process as processors

from jllama.functional import (
    PENALTIES,
    ban,
    min_p_mask,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
    sample,
    top_k_mask,
    top_p_mask,
    truncated_logits,
)
from jllama.models import oracle

VOCAB = 8
DRAWS = 10_000
LARGE_VOCAB = 128_256
K_GRID = [0, 1, 3, VOCAB, VOCAB + 5]
P_GRID = [0.0, 1e-9, 0.3, 0.5, 0.9, 1.0]
MIN_P_GRID = [0.0, 1e-9, 0.1, 0.5, 1.0]
ROUNDING = 1e-6  # of float32 sums and exponentials
FLAT, ONE_HOT, TIES = (
    [0.0] * VOCAB,
    [60.0] + [0.0] * (VOCAB - 1),
    [1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 0.0, 2.0],
)
SOME_IMPOSSIBLE = [-np.inf, 0.5, -np.inf, 1.5, 0.0, -np.inf, -1.0, 1.5]
ALL_BUT_ONE_IMPOSSIBLE, ALL_IMPOSSIBLE = [-np.inf] * 5 + [-3.0] + [-np.inf] * 2, [-np.inf] * VOCAB

# Ties, peaks and impossible tokens are as likely as anything else. The first logit is finite: the
# others may all be -inf.
# Steps of 1/64 stay apart in float32 whatever is subtracted.
finite = st.one_of(
    st.sampled_from([0.0, 1.0, 60.0]), st.integers(-640, 640).map(lambda steps: steps / 64)
)
logit_rows = st.tuples(
    finite, st.lists(st.one_of(finite, st.just(-np.inf)), min_size=VOCAB - 1, max_size=VOCAB - 1)
).map(lambda parts: [parts[0], *parts[1]])
share = st.floats(0, 1, width=32, allow_subnormal=False)
# XLA takes most of these tests' time, and less of it without LLVM's optimizations. The large
# vocabulary is tested with them.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@quick_jit
def compiled(rows, keys, temperature, top_k, top_p, min_p):
    keys = jax.random.wrap_key_data(keys)
    return sample(rows, keys, temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@quick_jit
def compiled_truncated_logits(rows, temperature, top_k, top_p, min_p):
    return truncated_logits(rows, temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@quick_jit
def penalized(rows, counts, values):
    """By each penalty alone."""
    return [
        penalty(rows, value, counts > 0, counts)
        for penalty, value in zip(PENALTIES.values(), values, strict=True)
    ]


masks = {function: jax.jit(function) for function in (top_k_mask, top_p_mask, min_p_mask)}


def ranking(logits):
    """The tokens, likeliest first; among equals the lower id."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def numpy_kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that the cuts leave, likeliest first, in float64."""
    order = ranking(logits)[: 1 if temperature == 0 else top_k if top_k > 0 else None]
    probabilities = oracle.softmax(
        np.array([logits[token] for token in order], np.float64) / (temperature or 1.0)
    )
    nucleus = [
        rank
        for rank in range(len(order))
        if rank == 0 or top_p >= 1 or probabilities[:rank].sum() < top_p
    ]
    return [order[rank] for rank in nucleus if probabilities[rank] >= min_p * probabilities[0]]


def numpy_distribution(logits, temperature, chosen):
    """Compute probabilities token by token in float64, where only ``chosen`` may be drawn."""
    result = np.zeros(len(logits))
    result[chosen] = oracle.softmax(np.float64(logits)[chosen] / temperature)
    return result


def row_arrays(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    values = np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p)
    return [np.full(count, value) for value in values]


def key_data(seed, count):
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), np.uint32)


def draw(logits, seed=0, **settings):
    """Many tokens for one row of logits."""
    rows = np.broadcast_to(np.float32(logits), (DRAWS, VOCAB))
    return np.asarray(compiled(rows, key_data(seed, DRAWS), *row_arrays(DRAWS, **settings)))


def mask(function, logits, setting):
    """What one row keeps, as a boolean array."""
    setting = np.asarray([setting], np.int32 if function is top_k_mask else np.float32)
    return np.asarray(masks[function](np.float32(logits)[None], setting))[0]


# Penalties and bans


@given(
    logits=logit_rows,
    counts=st.lists(st.integers(0, 5), min_size=VOCAB, max_size=VOCAB).map(np.array),
    repetition=st.floats(0.125, 8, width=32),
    additive=st.floats(-2, 2, width=32),
)
def test_penalties_are_their_formulas(logits, counts, repetition, additive):
    exact, neutral = np.array(logits), (1.0, 0.0, 0.0)
    values = np.float32([neutral, (repetition, additive, additive)]).T
    expected = (
        np.where(counts > 0, np.where(exact > 0, exact / repetition, exact * repetition), exact),
        exact - additive * (counts > 0),
        exact - additive * counts,
    )
    actual = penalized(np.float32([logits] * 2), np.int32([counts] * 2), values)
    for rows, row in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(rows[0], logits)
        np.testing.assert_allclose(rows[1], row, rtol=ROUNDING, atol=ROUNDING)


def test_banned_tokens_are_never_drawn():
    banned = np.array([[token in (0, 5) for token in range(VOCAB)]])
    logits = ban(jnp.float32([ONE_HOT]), jnp.asarray(banned))
    assert set(draw(logits[0])) == {1, 2, 3, 4, 6, 7}
    assert set(draw(logits[0], temperature=0.0)) == {1}


# The kept sets


@given(logits=logit_rows, k=st.integers(-2, VOCAB + 5))
@example(logits=FLAT, k=3)
@example(logits=[-0.0, 0.0, -1.0, 0.0, -0.0, -1.0, 0.0, -0.0], k=3)
@example(logits=ALL_IMPOSSIBLE, k=3)
def test_top_k_keeps_the_k_largest(logits, k):
    expected = ranking(logits)[: k if k > 0 else None]
    assert np.flatnonzero(mask(top_k_mask, logits, k)).tolist() == sorted(expected)


@given(logits=logit_rows, p=st.one_of(st.sampled_from([0.0, 1e-9, 1.0]), share))
@example(logits=FLAT, p=1.0)
@example(logits=ONE_HOT, p=0.999)
@example(logits=TIES, p=0.5)
@example(logits=SOME_IMPOSSIBLE, p=0.9)
def test_top_p_keeps_the_smallest_prefix_that_reaches_p(logits, p):
    order = ranking(logits)
    chosen = mask(top_p_mask, logits, p)[order]
    size, mass = chosen.sum(), np.cumsum(oracle.softmax(np.array(logits, np.float64)[order]))
    assert size >= 1
    assert chosen[:size].all()
    if p == 1:
        assert size == VOCAB
    else:
        assert mass[size - 1] >= p - ROUNDING
        assert size == 1 or mass[size - 2] < p + ROUNDING


def test_top_p_at_exact_boundaries():
    """With eight times exactly 1/8."""
    sizes = {0.0: 1, 1e-9: 1, 0.125: 1, 0.1250001: 2, 0.5: 4, 0.5000001: 5, 0.875: 7, 1.0: 8}
    for p, size in sizes.items():
        assert mask(top_p_mask, FLAT, p).tolist() == [rank < size for rank in range(VOCAB)]


@given(logits=logit_rows, p=st.one_of(st.sampled_from([0.0, 1e-9, 1.0]), share))
@example(logits=TIES, p=1.0)
@example(logits=SOME_IMPOSSIBLE, p=0.0)
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(logits, p):
    chosen = mask(min_p_mask, logits, p)
    ratios = np.exp(np.array(logits, np.float64) - max(logits))
    assert chosen[np.argmax(logits)]
    assert chosen[ratios >= p * (1 + 1e-5)].all()
    assert not chosen[ratios < p * (1 - 1e-5)].any()


@pytest.mark.parametrize("function", masks)
def test_no_mask_is_empty_when_every_token_is_impossible(function):
    for setting in (0, 1) if function is top_k_mask else (0.0, 1e-9, 0.5, 1.0):
        assert mask(function, ALL_IMPOSSIBLE, setting).any()


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_cuts_of_a_large_vocabulary(step):
    """Sums of 128,256 small probabilities round; in steps of 0.25 thousands of tokens are tied."""
    logits = 3 * np.random.default_rng(0).standard_normal((4, LARGE_VOCAB)).astype(np.float32)
    if step:
        logits = step * np.round(logits / step)
    orders = np.argsort(-logits, axis=-1, kind="stable")
    ks = np.array([1, 40, 50_000, LARGE_VOCAB - 1])
    for row, chosen in enumerate(np.asarray(masks[top_k_mask](logits, ks))):
        np.testing.assert_array_equal(np.flatnonzero(chosen), np.sort(orders[row, : ks[row]]))
    ps = np.float32([1e-6, 0.5, 0.95, 0.9999])
    for row, chosen in enumerate(np.asarray(masks[top_p_mask](logits, ps))):
        size, mass = (
            chosen.sum(),
            np.cumsum(oracle.softmax(logits[row, orders[row]].astype(np.float64))),
        )
        assert chosen[orders[row, :size]].all()
        assert mass[size - 1] >= ps[row] - 1e-5
        assert size == 1 or mass[size - 2] < ps[row] + 1e-5


# The whole chain


@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.1, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from(K_GRID),
    top_p=st.one_of(st.sampled_from(P_GRID), share),
    min_p=st.one_of(st.sampled_from(MIN_P_GRID), share),
)
@example(logits=FLAT, temperature=1.0, top_k=5, top_p=0.5, min_p=1.0)
@example(logits=TIES, temperature=1.0, top_k=3, top_p=0.5, min_p=0.5)
def test_the_chain_is_numpys(logits, temperature, top_k, top_p, min_p):
    row, settings = np.float32(logits)[None], row_arrays(1, temperature, top_k, top_p, min_p)
    truncated = np.asarray(compiled_truncated_logits(row, *settings))
    chosen = np.flatnonzero(truncated[0] > -np.inf)
    possible = np.flatnonzero(row[0] > -np.inf)
    smallest = numpy_kept(
        logits, temperature, top_k, top_p - ROUNDING if top_p < 1 else 1.0, min_p * (1 + 1e-4)
    )
    largest = numpy_kept(logits, temperature, top_k, top_p + ROUNDING, min_p * (1 - 1e-4))
    assert np.argmax(logits) in chosen
    assert {*smallest} & {*possible} <= {*chosen} <= {*largest}
    expected = numpy_distribution(logits, temperature, chosen)
    probabilities = oracle.softmax(np.float64(truncated[0]))
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    [(0.7, 1000, 0.9, 0.0, 1.3), (1.5, 40, 0.8, 0.1, 0.8), (0.8, 2000, 0.95, 0.02, 1.1)],
)
def test_the_chain_is_that_of_transformers(temperature, top_k, top_p, min_p, repetition_penalty):
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((8, 1000)).astype(np.float32)
    ids = rng.integers(1000, size=(8, 300))
    scores, input_ids = torch.tensor(logits), torch.tensor(ids)
    for processor, setting in (
        (processors.RepetitionPenaltyLogitsProcessor, repetition_penalty),
        (processors.TemperatureLogitsWarper, temperature),
        (processors.TopKLogitsWarper, top_k),
        (processors.TopPLogitsWarper, top_p),
        (processors.MinPLogitsWarper, min_p),
    ):
        scores = processor(setting)(input_ids, scores)
    expected = torch.softmax(scores.double(), dim=-1).numpy()
    seen = np.zeros_like(logits, np.int32)
    np.put_along_axis(seen, ids, 1, axis=-1)
    rows, *_ = penalized(logits, seen, np.full((3, 8), np.float32(repetition_penalty)))
    settings = row_arrays(8, temperature, top_k, top_p, min_p)
    truncated = np.float64(compiled_truncated_logits(rows, *settings))
    probabilities = oracle.softmax(truncated)
    np.testing.assert_array_equal(probabilities > 0, expected > 0)
    np.testing.assert_allclose(probabilities, expected, rtol=2e-5)


# The draws


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, VOCAB + 5, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 3, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (0.7, 0, 1.0, 0.2),
        (1.5, 6, 0.6, 0.3),
    ],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p, min_p):
    for seed, logits in enumerate(([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], SOME_IMPOSSIBLE)):
        settings = (temperature, top_k, top_p, min_p)
        expected = DRAWS * numpy_distribution(logits, temperature, numpy_kept(logits, *settings))
        drawn = draw(logits, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        check_counts(drawn, expected)


def check_counts(drawn, expected):
    counts, possible = np.bincount(drawn, minlength=VOCAB), expected > 0
    assert not counts[~possible].any()
    statistic = np.sum((counts - expected)[possible] ** 2 / expected[possible])
    assert chdtrc(possible.sum() - 1, statistic) > 1e-3


@given(
    rows=st.lists(logit_rows, min_size=4, max_size=4),
    top_k=st.sampled_from(K_GRID),
    top_p=st.sampled_from(P_GRID),
    min_p=st.sampled_from(MIN_P_GRID),
)
@example(
    rows=[FLAT, ONE_HOT, TIES, [-0.0, 0.0, -1.0, 0.0, -0.0, -1.0, 0.0, -0.0]],
    top_k=0,
    top_p=1.0,
    min_p=0.0,
)
def test_temperature_zero_is_argmax(rows, top_k, top_p, min_p):
    logits, keys = np.float32(rows), key_data(0, 4)
    temperature, *cuts = row_arrays(4, 0.0, top_k, top_p, min_p)
    expected = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(compiled(logits, keys, temperature, *cuts), expected)
    temperature[0] = 1.0
    np.testing.assert_array_equal(compiled(logits, keys, temperature, *cuts)[1:], expected[1:])


@given(
    rows=st.lists(logit_rows, min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0]), min_size=4, max_size=4),
    top_ks=st.lists(st.sampled_from(K_GRID), min_size=4, max_size=4),
    top_ps=st.lists(st.sampled_from(P_GRID), min_size=4, max_size=4),
    min_ps=st.lists(st.sampled_from(MIN_P_GRID), min_size=4, max_size=4),
)
@example(
    rows=[TIES, FLAT, FLAT, SOME_IMPOSSIBLE],
    seed=0,
    temperatures=[0.0, 1.0, 4.0, 1.0],
    top_ks=[0, 0, 3, 0],
    top_ps=[1.0, 1.0, 1.0, 0.9],
    min_ps=[0.0, 0.0, 0.0, 0.1],
)
def test_a_row_alone_equals_the_row_in_a_batch(rows, seed, temperatures, top_ks, top_ps, min_ps):
    settings = np.float32(temperatures), np.int32(top_ks), np.float32(top_ps), np.float32(min_ps)
    arrays = (np.float32(rows), key_data(seed, 4), *settings)
    together = np.asarray(compiled(*arrays))
    alone = [int(compiled(*(array[row : row + 1] for array in arrays))[0]) for row in range(4)]
    assert together.tolist() == alone


@pytest.mark.parametrize("top_k", [0, 3, VOCAB + 5])
def test_one_possible_token_is_drawn_and_where_there_is_none_still_a_token(top_k):
    rows = np.float32([ALL_BUT_ONE_IMPOSSIBLE, ALL_IMPOSSIBLE] * 2)
    for temperature, top_p, min_p in itertools.product(
        (0.0, 1e-30, 1.0, 1e30), (0.0, 0.5, 1.0), (0.0, 0.5, 1.0)
    ):
        settings = row_arrays(4, temperature, top_k, top_p, min_p)
        assert compiled(rows, key_data(0, 4), *settings).tolist() == [5, 0, 5, 0]
    for row in (ALL_BUT_ONE_IMPOSSIBLE, ALL_IMPOSSIBLE):
        settings = row_arrays(1, 0.5, top_k, 0.5, 0.5)
        assert not np.isnan(compiled_truncated_logits(np.float32([row]), *settings)).any()


@pytest.mark.parametrize("bias", [1e3, 1e30, 3e38, np.inf])
def test_large_biases_decide(bias):
    favored, avoided = np.float32([TIES] * 4), np.float32([TIES] * 4)
    favored[:, 1] += np.float32(bias)
    avoided[:, 1] -= np.float32(bias)
    for settings in (
        {},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 1e-30},
    ):
        arrays = key_data(0, 4), *row_arrays(4, **settings)
        assert compiled(favored, *arrays).tolist() == [1] * 4
        assert 1 not in compiled(avoided, *arrays)


def test_a_tiny_temperature_takes_the_largest_and_a_huge_one_takes_any():
    logits = [0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.9, -1.0]
    assert set(draw(logits, temperature=1e-30)) == {3}
    check_counts(draw(logits, temperature=1e30), np.full(VOCAB, DRAWS / VOCAB))


def test_same_key_same_token_and_other_keys_other_tokens():
    assert np.array_equal(draw(FLAT, seed=1), draw(FLAT, seed=1))
    assert np.mean(draw(FLAT, seed=1) == draw(FLAT, seed=2)) < 0.2  # 1/8 by chance


def test_changing_settings_does_not_compile_again():
    compiled(np.zeros((4, VOCAB), np.float32), key_data(0, 4), *row_arrays(4))
    programs = compiled._cache_size()  # of all the tests so far
    for settings in itertools.product((0.0, 0.5), K_GRID[:2], P_GRID[:2], MIN_P_GRID[:2]):
        compiled(np.zeros((4, VOCAB), np.float32), key_data(0, 4), *row_arrays(4, *settings))
    assert compiled._cache_size() == programs


def test_bfloat16_logits_become_float32():
    logits, counts, penalty = (
        jnp.zeros((1, VOCAB), jnp.bfloat16),
        jnp.ones((1, VOCAB), jnp.int32),
        jnp.ones(1),
    )
    for function, arguments in (
        (penalize_repetition, (counts > 0, penalty)),
        (penalize_presence, (counts, penalty)),
        (penalize_frequency, (counts, penalty)),
        (ban, (counts > 1,)),
        (truncated_logits, row_arrays(1)[:1]),
    ):
        assert jax.eval_shape(function, logits, *arguments).dtype == jnp.float32
