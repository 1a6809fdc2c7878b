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

from jllama import oracle
from jllama.functional import (
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
compiled = quick_jit(
    lambda rows, keys, t, k, p, m: sample(rows, keys, t, top_k=k, top_p=p, min_p=m)
)
compiled_truncated_logits = quick_jit(
    lambda rows, t, k, p, m: truncated_logits(rows, t, top_k=k, top_p=p, min_p=m)
)
masks = {function: quick_jit(function) for function in (top_k_mask, top_p_mask, min_p_mask)}
penalties = tuple(map(quick_jit, (penalize_repetition, penalize_presence, penalize_frequency)))


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
    result[chosen] = oracle.softmax(
        np.array([logits[token] for token in chosen], np.float64) / (temperature or 1.0)
    )
    return result


def row_arrays(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    settings = (
        (temperature, jnp.float32),
        (top_k, jnp.int32),
        (top_p, jnp.float32),
        (min_p, jnp.float32),
    )
    return tuple(jnp.full(count, value, dtype) for value, dtype in settings)


def draw(logits, seed=0, **settings):
    """Many tokens for one row of logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, VOCAB))
    return np.asarray(
        compiled(
            rows, jax.random.split(jax.random.key(seed), DRAWS), *row_arrays(DRAWS, **settings)
        )
    )


def mask(function, logits, setting):
    """What one row keeps, as a boolean array."""
    return np.asarray(masks[function](jnp.float32(logits)[None], jnp.asarray([setting])))[0]


# Penalties and bans


@given(
    logits=logit_rows,
    counts=st.lists(st.integers(0, 5), min_size=VOCAB, max_size=VOCAB).map(np.array),
    repetition=st.floats(0.125, 8, width=32),
    additive=st.floats(-2, 2, width=32),
)
def test_penalties_are_their_formulas(logits, counts, repetition, additive):
    settings = jnp.float32([[1.0, repetition], [0.0, additive]])
    rows, counted, exact = jnp.float32([logits] * 2), jnp.array([counts] * 2), np.array(logits)
    repeated, present, frequent = penalties
    for actual, expected in (
        (
            repeated(rows, counted > 0, settings[0]),
            np.where(
                counts > 0, np.where(exact > 0, exact / repetition, exact * repetition), exact
            ),
        ),
        (present(rows, counted, settings[1]), exact - additive * (counts > 0)),
        (frequent(rows, counted, settings[1]), exact - additive * counts),
    ):
        np.testing.assert_array_equal(actual[0], logits)  # the first row's penalty is neutral
        np.testing.assert_allclose(actual[1], expected, rtol=ROUNDING, atol=ROUNDING)


def test_banned_tokens_are_never_drawn():
    banned = jnp.array([[token in (0, 5) for token in range(VOCAB)]])
    logits = ban(jnp.float32([ONE_HOT]), banned)
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
    chosen = mask(top_p_mask, logits, np.float32(p))[order]
    size, mass = chosen.sum(), np.cumsum(oracle.softmax(np.array(logits, np.float64)[order]))
    assert size >= 1
    assert chosen[:size].all()
    if p == 1:
        assert size == VOCAB
    else:
        assert mass[size - 1] >= p - ROUNDING
        assert size == 1 or mass[size - 2] < p + ROUNDING


@pytest.mark.parametrize(
    ("p", "size"),
    [
        (0.0, 1),
        (1e-9, 1),
        (0.125, 1),
        (0.1250001, 2),
        (0.5, 4),
        (0.5000001, 5),
        (0.875, 7),
        (1.0, 8),
    ],
)
def test_top_p_at_exact_boundaries(p, size):
    chosen = mask(top_p_mask, FLAT, np.float32(p))  # eight times exactly 1/8
    assert chosen.tolist() == [rank < size for rank in range(VOCAB)]


@given(logits=logit_rows, p=st.one_of(st.sampled_from([0.0, 1e-9, 1.0]), share))
@example(logits=TIES, p=1.0)
@example(logits=SOME_IMPOSSIBLE, p=0.0)
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(logits, p):
    chosen = mask(min_p_mask, logits, np.float32(p))
    ratios = np.exp(np.array(logits, np.float64) - max(logits))
    assert chosen[np.argmax(logits)]
    assert chosen[ratios >= p * (1 + 1e-5)].all()
    assert not chosen[ratios < p * (1 - 1e-5)].any()


@pytest.mark.parametrize("function", [top_k_mask, top_p_mask, min_p_mask])
def test_no_mask_is_empty_when_every_token_is_impossible(function):
    for setting in (0, 1) if function is top_k_mask else (0.0, 1e-9, 0.5, 1.0):
        assert mask(
            function,
            ALL_IMPOSSIBLE,
            np.asarray(setting, np.int32 if function is top_k_mask else np.float32),
        ).any()


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_cuts_of_a_large_vocabulary(step):
    """Sums of 128,256 small probabilities round; in steps of 0.25 thousands of tokens are tied."""
    logits = 3 * np.random.default_rng(0).standard_normal((4, LARGE_VOCAB)).astype(np.float32)
    if step:
        logits = step * np.round(logits / step)
    orders = np.argsort(-logits, axis=-1, kind="stable")
    ks = np.array([1, 40, 50_000, LARGE_VOCAB - 1])
    for row, chosen in enumerate(np.asarray(jax.jit(top_k_mask)(logits, jnp.asarray(ks)))):
        np.testing.assert_array_equal(np.flatnonzero(chosen), np.sort(orders[row, : ks[row]]))
    ps = np.float32([1e-6, 0.5, 0.95, 0.9999])
    for row, chosen in enumerate(np.asarray(jax.jit(top_p_mask)(logits, jnp.asarray(ps)))):
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
    row, settings = jnp.float32(logits)[None], row_arrays(1, temperature, top_k, top_p, min_p)
    truncated = compiled_truncated_logits(row, *settings)
    chosen = np.flatnonzero(truncated[0] > -np.inf)
    possible = np.flatnonzero(row[0] > -np.inf)
    smallest = numpy_kept(
        logits, temperature, top_k, top_p - ROUNDING if top_p < 1 else 1.0, min_p * (1 + 1e-4)
    )
    largest = numpy_kept(logits, temperature, top_k, top_p + ROUNDING, min_p * (1 - 1e-4))
    assert np.argmax(logits) in chosen
    assert {*smallest} & {*possible} <= {*chosen} <= {*largest}
    expected = numpy_distribution(logits, temperature, chosen)
    np.testing.assert_allclose(jax.nn.softmax(truncated)[0], expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    [
        (0.7, 0, 1.0, 0.0, 1.0),
        (1.0, 40, 1.0, 0.0, 1.0),
        (1.0, 0, 0.9, 0.0, 1.0),
        (1.0, 0, 1.0, 0.05, 1.0),
        (1.0, 0, 1.0, 0.0, 1.3),
        (1.5, 40, 0.8, 0.1, 0.8),
        (0.8, 2000, 0.95, 0.02, 1.1),
    ],
)
def test_the_chain_is_that_of_transformers(temperature, top_k, top_p, min_p, repetition_penalty):
    rng = np.random.default_rng(0)
    logits, ids = (
        3 * rng.standard_normal((8, 1000)).astype(np.float32),
        rng.integers(1000, size=(8, 300)),
    )
    scores, input_ids = torch.tensor(logits), torch.tensor(ids)
    for used, processor, setting in (
        (repetition_penalty != 1, processors.RepetitionPenaltyLogitsProcessor, repetition_penalty),
        (True, processors.TemperatureLogitsWarper, temperature),
        (top_k > 0, processors.TopKLogitsWarper, top_k),
        (top_p < 1, processors.TopPLogitsWarper, top_p),
        (min_p > 0, processors.MinPLogitsWarper, min_p),
    ):
        scores = processor(setting)(input_ids, scores) if used else scores
    expected = torch.softmax(scores, dim=-1).numpy()
    seen = np.zeros_like(logits, bool)
    np.put_along_axis(seen, ids, True, axis=-1)
    penalized = penalties[0](logits, seen, jnp.full(8, repetition_penalty, jnp.float32))
    truncated = compiled_truncated_logits(
        penalized, *row_arrays(8, temperature, top_k, top_p, min_p)
    )
    probabilities = np.asarray(jax.nn.softmax(truncated))
    np.testing.assert_array_equal(probabilities > 0, expected > 0)
    np.testing.assert_allclose(probabilities, expected, rtol=2e-5)


# The draws


@pytest.mark.parametrize(("top_k", "top_p"), list(itertools.product(K_GRID, P_GRID)))
def test_every_cut_leaves_the_tokens_that_numpy_leaves(top_k, top_p):
    rows = (FLAT, ONE_HOT, TIES, SOME_IMPOSSIBLE)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    repeated = jnp.repeat(jnp.float32(rows), DRAWS // 4, axis=0)
    drawn = np.asarray(compiled(repeated, keys, *row_arrays(DRAWS, top_k=top_k, top_p=top_p)))
    for logits, tokens in zip(rows, drawn.reshape(4, -1), strict=True):
        expected = numpy_distribution(logits, 1.0, numpy_kept(logits, 1.0, top_k, top_p))
        assert np.unique(tokens).tolist() == np.flatnonzero(expected > 1e-6).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.7, 5, 0.9, 0.0),
        (1.5, 6, 0.6, 0.3),
        (1.0, VOCAB + 5, 1.0, 0.0),
    ],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p, min_p):
    for seed, logits in enumerate(([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], SOME_IMPOSSIBLE)):
        settings = (temperature, top_k, top_p, min_p)
        expected = DRAWS * numpy_distribution(logits, temperature, numpy_kept(logits, *settings))
        drawn = draw(logits, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        check_counts(drawn, expected)


def test_draws_from_penalized_logits_follow_the_distribution():
    logits, counts = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], [3, 0, 1, 0, 2, 0, 1, 0]
    rows, counted = jnp.float32([logits] * 2), jnp.array([counts] * 2)
    repeated, present, frequent = penalties
    penalized = repeated(rows, counted > 0, jnp.full(2, 1.25))
    penalized = frequent(present(penalized, counted, jnp.full(2, 0.25)), counted, jnp.full(2, 0.5))
    by_hand = [
        2 / 1.25 - 0.25 - 1.5,
        1.5,
        1 / 1.25 - 0.25 - 0.5,
        0.5,
        -0.25 - 1,
        -0.5,
        -1.25 - 0.25 - 0.5,
        -1.5,
    ]
    check_counts(draw(penalized[0]), DRAWS * numpy_distribution(by_hand, 1.0, list(range(VOCAB))))


def check_counts(drawn, expected):
    counts, possible = np.bincount(drawn, minlength=VOCAB), expected > 0
    assert not counts[~possible].any()
    statistic = np.sum((counts - expected)[possible] ** 2 / expected[possible])
    assert chdtrc(possible.sum() - 1, statistic) > 1e-3


def test_top_p_is_a_share_of_the_top_k_mass():
    logits = np.log([0.4, 0.3, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])
    # 0.4 is over half of the 0.7 that top_k leaves, and less than half of the whole.
    assert set(draw(logits, top_k=2, top_p=0.55)) == {0}
    assert set(draw(logits, top_p=0.55)) == {0, 1}


def test_temperature_comes_before_the_cuts():
    logits = np.log([0.4, 0.3, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])
    assert set(draw(logits, min_p=0.5)) == {0, 1}
    assert set(draw(logits, temperature=2.0, min_p=0.45)) == {
        0,
        1,
        2,
    }  # (0.1 / 0.4) ** (1 / 2) is a half
    assert set(draw(logits, top_p=0.5)) == {0, 1}
    assert set(draw(logits, temperature=0.5, top_p=0.5)) == {0}  # 0.16 of 0.275


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
    logits, keys = jnp.float32(rows), jax.random.split(jax.random.key(0), 4)
    temperature, *cuts = row_arrays(4, 0.0, top_k, top_p, min_p)
    expected = np.argmax(np.float32(rows), axis=-1)
    np.testing.assert_array_equal(compiled(logits, keys, temperature, *cuts), expected)
    one_warm_row = compiled(logits, keys, temperature.at[0].set(1.0), *cuts)
    np.testing.assert_array_equal(one_warm_row[1:], expected[1:])


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
    keys = jax.random.split(jax.random.key(seed), 4)
    settings = (
        jnp.float32(temperatures),
        jnp.array(top_ks),
        jnp.float32(top_ps),
        jnp.float32(min_ps),
    )
    arrays = (jnp.float32(rows), keys, *settings)
    together = np.asarray(compiled(*arrays))
    alone = [int(compiled(*(array[row : row + 1] for array in arrays))[0]) for row in range(4)]
    assert together.tolist() == alone
    for row, token in enumerate(alone):
        largest = numpy_kept(
            rows[row],
            temperatures[row],
            top_ks[row],
            top_ps[row] + ROUNDING,
            min_ps[row] * (1 - 1e-5),
        )
        assert token in largest


def test_a_row_without_cuts_draws_the_same_beside_rows_with_cuts():
    logits, keys = jnp.float32([TIES] * 4), jax.random.split(jax.random.key(0), 4)
    temperature, *nothing_cut = row_arrays(4)
    expected = compiled(logits, keys, temperature, *nothing_cut)
    for cuts in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        others = [
            everywhere.at[0].set(nowhere[0])
            for everywhere, nowhere in zip(row_arrays(4, **cuts), row_arrays(4), strict=True)
        ]
        assert compiled(logits, keys, *others)[0] == expected[0]


@pytest.mark.parametrize("top_k", K_GRID)
def test_one_possible_token_is_drawn_and_where_there_is_none_still_a_token(top_k):
    rows = jnp.float32(
        [ALL_BUT_ONE_IMPOSSIBLE, ALL_IMPOSSIBLE, ALL_BUT_ONE_IMPOSSIBLE, ALL_IMPOSSIBLE]
    )
    keys = jax.random.split(jax.random.key(0), 4)
    for temperature, top_p, min_p in itertools.product(
        (0.0, 1e-30, 1.0, 1e30), (0.0, 0.5, 1.0), (0.0, 0.5, 1.0)
    ):
        drawn = compiled(rows, keys, *row_arrays(4, temperature, top_k, top_p, min_p))
        assert drawn.tolist() == [5, 0, 5, 0]
    for row in (ALL_BUT_ONE_IMPOSSIBLE, ALL_IMPOSSIBLE):
        truncated = compiled_truncated_logits(
            jnp.float32([row]), *row_arrays(1, 0.5, top_k, 0.5, 0.5)
        )
        assert not jnp.isnan(truncated).any()


@pytest.mark.parametrize("bias", [1e3, 1e30, 3e38, np.inf])
def test_large_biases_decide(bias):
    keys = jax.random.split(jax.random.key(0), 4)
    favored, avoided = (
        jnp.float32([[*TIES[:1], TIES[1] + change, *TIES[2:]]] * 4) for change in (bias, -bias)
    )
    for settings in (
        {},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 1e-30},
    ):
        assert compiled(favored, keys, *row_arrays(4, **settings)).tolist() == [1] * 4
        assert 1 not in compiled(avoided, keys, *row_arrays(4, **settings))


def test_a_tiny_temperature_takes_the_largest_and_a_huge_one_takes_any():
    logits = [0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.9, -1.0]
    assert set(draw(logits, temperature=1e-30)) == {3}
    check_counts(draw(logits, temperature=1e30), np.full(VOCAB, DRAWS / VOCAB))


def test_same_key_same_token_and_other_keys_other_tokens():
    assert np.array_equal(draw(FLAT, seed=1), draw(FLAT, seed=1))
    assert np.mean(draw(FLAT, seed=1) == draw(FLAT, seed=2)) < 0.2  # 1/8 by chance


def test_changing_settings_does_not_compile_again():
    counted = [
        quick_jit(lambda *a, f=f: f(*a))
        for f in (ban, penalize_repetition, penalize_presence, penalize_frequency)
    ]
    banned, repeated, present, frequent = counted
    logits, keys = jnp.zeros((4, VOCAB)), jax.random.split(jax.random.key(0), 4)
    compiled(logits, keys, *row_arrays(4))
    shapes = compiled._cache_size()  # of all the tests so far
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.5), K_GRID, P_GRID[::2], MIN_P_GRID[::2]
    ):
        temperatures, *cuts = row_arrays(4, temperature, top_k, top_p, min_p)
        counts = jnp.full(logits.shape, top_k)
        logits = repeated(banned(logits, counts == 1), counts > 0, 1 + cuts[1])
        logits = frequent(present(logits, counts, cuts[1]), counts, cuts[2])
        compiled(logits, keys, temperatures.at[0].set(1.0), *cuts)
    assert [function._cache_size() for function in (compiled, *counted)] == [shapes, 1, 1, 1, 1]


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
