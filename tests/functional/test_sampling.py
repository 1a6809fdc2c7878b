import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import chdtrc

from jllama import oracle
from jllama.functional import sample, top_k_mask, top_p_mask

VOCAB = 8
DRAWS = 20_000
K_GRID = [0, 1, 3, VOCAB, VOCAB + 5]
P_GRID = [0.0, 1e-9, 0.3, 0.5, 0.9, 1.0]
FLAT, ONE_HOT, TIES = [0.0] * VOCAB, [60.0] + [0.0] * (VOCAB - 1), [1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 0.0, 2.0]
SOME_IMPOSSIBLE = [-np.inf, 0.5, -np.inf, 1.5, 0.0, -np.inf, -1.0, 1.5]

# Ties, peaks and impossible tokens are as likely as anything else. The first is finite: the others may all be -inf.
finite = st.one_of(st.sampled_from([0.0, 1.0, 60.0]), st.floats(-10, 10, width=32))
logit_rows = st.tuples(
    finite, st.lists(st.one_of(finite, st.just(-np.inf)), min_size=VOCAB - 1, max_size=VOCAB - 1)
).map(lambda parts: [parts[0], *parts[1]])
compiled = jax.jit(sample)


def numpy_distribution(logits, temperature, top_k, top_p):
    """Probabilities of the tokens, token by token, in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        order = order[:1]
    elif top_k > 0:
        order = order[:top_k]
    probabilities = oracle.softmax(np.array([logits[token] for token in order], np.float64) / (temperature or 1.0))
    kept, mass = 0, 0.0
    while kept == 0 or (kept < len(order) and mass < top_p):
        mass += probabilities[kept]
        kept += 1
    result = np.zeros(len(logits))
    result[order[:kept]] = probabilities[:kept] / mass
    return result


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """Many tokens for one row of logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, VOCAB))
    keys = jax.random.split(jax.random.key(seed), DRAWS)
    settings = ((temperature, jnp.float32), (top_k, jnp.int32), (top_p, jnp.float32))
    return np.asarray(compiled(rows, keys, *(jnp.full(DRAWS, value, dtype) for value, dtype in settings)))


# The kept sets


@given(logits=logit_rows, k=st.integers(-2, VOCAB + 5))
def test_top_k_keeps_the_k_largest(logits, k):
    ranked = sorted(logits, reverse=True)
    kept = np.asarray(top_k_mask(jnp.array([ranked]), jnp.array([k])))[0]
    assert kept.tolist() == [k <= 0 or rank < k for rank in range(VOCAB)]


@given(logits=logit_rows, p=st.one_of(st.sampled_from([0.0, 1e-9, 1.0]), st.floats(0, 1, width=32)))
@example(logits=FLAT, p=1.0)
@example(logits=ONE_HOT, p=0.999)
@example(logits=TIES, p=0.5)
@example(logits=SOME_IMPOSSIBLE, p=0.9)
def test_top_p_keeps_the_smallest_prefix_that_reaches_p(logits, p):
    ranked = np.array(sorted(logits, reverse=True), np.float64)
    kept = np.asarray(top_p_mask(jnp.float32(ranked)[None], jnp.float32([p])))[0]
    size, mass = kept.sum(), np.cumsum(oracle.softmax(ranked))
    assert size >= 1
    assert kept[:size].all()
    if p == 1:
        assert size == VOCAB
    else:
        tolerance = 1e-6  # float32 sums
        assert mass[size - 1] >= p - tolerance
        assert size == 1 or mass[size - 2] < p + tolerance


@pytest.mark.parametrize(
    ("p", "size"), [(0.0, 1), (1e-9, 1), (0.25, 1), (0.2500001, 2), (0.5, 2), (0.5000001, 3), (0.75, 3), (1.0, 4)]
)
def test_top_p_at_exact_boundaries(p, size):
    assert np.asarray(top_p_mask(jnp.zeros((1, 4)), jnp.float32([p]))).sum() == size  # four times exactly 1/4


@pytest.mark.parametrize("seed", range(4))
def test_top_p_keeps_a_prefix_in_a_large_vocabulary(seed):
    """A parallel sum of 128,256 small probabilities may fall by a rounding error from one token to the next."""
    logits = 3 * np.random.default_rng(seed).standard_normal(128_256).astype(np.float32)
    ranked = jnp.asarray(-np.sort(-logits))[None]
    probabilities = jax.nn.softmax(ranked)
    falling = jnp.cumsum(probabilities, axis=-1) - probabilities
    for place in np.flatnonzero(np.diff(falling[0]) < 0)[:10]:
        for p in (falling[0, place], falling[0, place + 1]):
            kept = np.asarray(top_p_mask(ranked, p[None]))[0]
            assert kept[: kept.sum()].all()


# The draws


@pytest.mark.parametrize(("top_k", "top_p"), list(itertools.product(K_GRID, P_GRID)))
def test_every_cut_leaves_the_tokens_that_numpy_leaves(top_k, top_p):
    for logits in (FLAT, ONE_HOT, TIES, SOME_IMPOSSIBLE):
        tokens, counts = np.unique(draw(logits, top_k=top_k, top_p=top_p), return_counts=True)
        assert counts.sum() == DRAWS
        expected = numpy_distribution(logits, 1.0, top_k, top_p)
        assert tokens.tolist() == np.flatnonzero(expected > 1e-6).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 0, 0.8),
        (0.7, 5, 0.9),
        (1.5, 6, 0.6),
        (1.0, VOCAB + 5, 1.0),
    ],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    for seed, logits in enumerate(([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], SOME_IMPOSSIBLE)):
        expected = DRAWS * numpy_distribution(logits, temperature, top_k, top_p)
        counts = np.bincount(draw(logits, temperature, top_k, top_p, seed), minlength=VOCAB)
        possible = expected > 0
        assert not counts[~possible].any()
        statistic = np.sum((counts - expected)[possible] ** 2 / expected[possible])
        assert chdtrc(possible.sum() - 1, statistic) > 1e-3


def test_top_p_is_a_share_of_the_top_k_mass():
    logits = np.log([0.4, 0.3, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])
    # 0.4 is over half of the 0.7 that top_k leaves, and less than half of the whole.
    assert set(draw(logits, top_k=2, top_p=0.55)) == {0}
    assert set(draw(logits, top_p=0.55)) == {0, 1}


@given(rows=st.lists(logit_rows, min_size=4, max_size=4), top_k=st.sampled_from(K_GRID), top_p=st.sampled_from(P_GRID))
@example(rows=[FLAT, ONE_HOT, TIES, [-0.0, 0.0, -1.0, 0.0, -0.0, -1.0, 0.0, -0.0]], top_k=0, top_p=1.0)
def test_temperature_zero_is_argmax(rows, top_k, top_p):
    logits, keys = jnp.float32(rows), jax.random.split(jax.random.key(0), 4)
    cuts = (jnp.full(4, top_k), jnp.full(4, top_p, jnp.float32))
    expected = np.argmax(np.float32(rows), axis=-1)
    np.testing.assert_array_equal(compiled(logits, keys, jnp.zeros(4), *cuts), expected)
    one_warm_row = compiled(logits, keys, jnp.zeros(4).at[0].set(1.0), *cuts)
    np.testing.assert_array_equal(one_warm_row[1:], expected[1:])


@given(
    rows=st.lists(logit_rows, min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0]), min_size=4, max_size=4),
    top_ks=st.lists(st.sampled_from(K_GRID), min_size=4, max_size=4),
    top_ps=st.lists(st.sampled_from(P_GRID), min_size=4, max_size=4),
)
def test_a_row_alone_equals_the_row_in_a_batch(rows, seed, temperatures, top_ks, top_ps):
    keys = jax.random.split(jax.random.key(seed), 4)
    arrays = (jnp.float32(rows), keys, jnp.float32(temperatures), jnp.array(top_ks), jnp.float32(top_ps))
    together = np.asarray(compiled(*arrays))
    alone = [int(compiled(*(array[row : row + 1] for array in arrays))[0]) for row in range(4)]
    assert together.tolist() == alone
    for row, token in enumerate(alone):
        assert numpy_distribution(rows[row], temperatures[row], top_ks[row], min(top_ps[row] + 1e-6, 1.0))[token] > 0


def test_same_key_same_token_and_other_keys_other_tokens():
    assert np.array_equal(draw(FLAT, seed=1), draw(FLAT, seed=1))
    assert np.mean(draw(FLAT, seed=1) == draw(FLAT, seed=2)) < 0.2  # 1/8 by chance


def test_changing_settings_does_not_compile_again():
    counted = jax.jit(lambda *arrays: sample(*arrays))
    logits, keys = jnp.zeros((2, VOCAB)), jax.random.split(jax.random.key(0), 2)
    for temperature, top_k, top_p in itertools.product((0.0, 0.5, 1.0), K_GRID, P_GRID):
        counted(logits, keys, jnp.float32([temperature, 1.0]), jnp.array([top_k, 2]), jnp.float32([top_p, 0.5]))
    assert counted._cache_size() == 1


def test_bfloat16_logits_are_drawn_in_float32():
    logits = jnp.asarray([TIES], jnp.bfloat16)
    settings = (jnp.ones(1), jnp.array([0]), jnp.float32([0.9]))
    for seed in range(20):
        keys = jax.random.split(jax.random.key(seed), 1)
        assert compiled(logits, keys, *settings) == compiled(logits.astype(jnp.float32), keys, *settings)
