"""Attention over a cache, by each implementation.

It is right wherever blocks end, and a row has the same bits beside any other rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.functional import Mask, attention
from jllama.lab.checks import relative_error
from jllama.models import oracle

OVER_A_CACHE = pytest.mark.parametrize("name", ["cached", "split"])
seeds = st.integers(0, 2**32 - 1)


def draw(seed, seq, lengths, max_len, heads=4, kv_heads=2, head_dim=64):
    """Return queries, and caches of keys and values.

    The keys of the queries follow ``lengths`` others. Huge values that no query sees follow them.
    """
    rng, rows = np.random.default_rng(seed), len(lengths)
    sizes = ((heads, seq), (kv_heads, max_len), (kv_heads, max_len))
    query, key, value = (
        rng.standard_normal((rows, *size, head_dim)).astype(np.float32) for size in sizes
    )
    for row, length in enumerate(lengths):
        for array in (key, value):
            array[row, :, length + seq :] *= 1e30
    return query, key, value


def draw_lengths(seed, rows, max_length):
    """How many tokens the rows hold already: none and as many as fit, too."""
    rng = np.random.default_rng(seed)
    return [
        int(rng.choice([0, max_length, *rng.integers(0, max_length + 1, 2)])) for _ in range(rows)
    ]


@functools.partial(jax.jit, static_argnums=(0, 5))
def compiled(name, query, key, value, lengths, window):
    return attention(query, key, value, Mask(lengths, window=window), name)


def over_cache(name, query, key, value, lengths, window=None):
    lengths = jnp.asarray(lengths, jnp.int32)
    return np.asarray(compiled(name, query, key, value, lengths, window))


def with_room(arrays, more):
    """The same in a longer cache."""
    query, *others = arrays
    return query, *(np.pad(array, ((0, 0), (0, 0), (0, more), (0, 0))) for array in others)


@OVER_A_CACHE
@pytest.mark.parametrize(
    ("seq", "window"),
    slow_but(
        [(1, None), (256, None), (5, 300)],
        [(1, None), (5, None), (256, None), (1, 1), (1, 100), (5, 300), (256, 100)],
    ),
)
@settings(max_examples=4)
@given(seed=seeds)
def test_new_tokens_over_a_cache_are_the_end_of_whole_rows(name, seq, window, seed):
    """Compare with the oracle over each row's own tokens; later slots of the cache are not read.

    Bits are the same beside other rows, at another place in the batch, and in a longer cache.
    """
    lengths, others = (draw_lengths(number, 2, 768 - seq) for number in (seed, seed + 1))
    arrays = draw(seed, seq, lengths, 768)
    mixed = over_cache(name, *arrays, lengths, window)
    query, key, value = map(np.float64, arrays)
    for row, length in enumerate(lengths):
        keys, values = (array[row, :, : length + seq] for array in (key, value))
        ahead = length + np.arange(seq)[:, None] - np.arange(length + seq)
        mask = (ahead >= 0) & (ahead < (window or np.inf))
        assert relative_error(mixed[row], oracle.attention(query[row], keys, values, mask)) < 1e-5
    beside = draw(seed + 1, seq, others, 768)
    for array, own in zip(beside, arrays, strict=True):
        array[1] = own[0]
    company = over_cache(name, *beside, [others[0], lengths[0]], window)
    np.testing.assert_array_equal(company[1], mixed[0])
    longer = over_cache(name, *with_room(arrays, 256), lengths, window)
    np.testing.assert_array_equal(longer, mixed)


@OVER_A_CACHE
@pytest.mark.parametrize(
    ("rows", "seq"), slow_but([(8, 1), (1, 64)], [(1, 1), (8, 1), (1, 16), (1, 64), (1, 128)])
)
@settings(max_examples=4)
@given(seed=seeds)
def test_a_row_gets_the_same_bits_where_a_short_cache_grows(name, rows, seq, seed):
    """The shapes are the engine's: a chunk of a prompt, or a step of all rows.

    One row needs more slots, so the cache grows.
    """
    lengths = draw_lengths(seed, rows, 128 - seq)
    # XLA:CPU sums fewer numbers by another function.
    heads = 32 if (name, rows, seq) == ("split", 1, 1) else 4
    arrays = draw(seed, seq, lengths, 128, heads)
    mixed = over_cache(name, *arrays, lengths)
    for more in (128, 896):
        np.testing.assert_array_equal(over_cache(name, *with_room(arrays, more), lengths), mixed)


@pytest.mark.parametrize(
    ("seq", "window", "unread"), [(1, None, slice(512, None)), (128, 100, slice(512))]
)
def test_a_cache_is_read_only_from_the_first_window_to_the_longest_row(seq, window, unread):
    """In blocks of 256: what is before or behind them may be anything."""
    lengths = [700, 900] if window else [3, 300]
    arrays = draw(0, seq, lengths, 1280)
    expected = over_cache("cached", *arrays, lengths, window)
    for array in arrays[1:]:
        array[:, :, unread] = np.nan
    np.testing.assert_array_equal(over_cache("cached", *arrays, lengths, window), expected)
