import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import oracle
from jllama.functional import (
    ATTENTION,
    AttentionImplementation,
    Mask,
    attention,
    choose_attention,
    grouped_query_attention,
    masked_softmax,
)
from jllama.verify.checks import relative_error

BATCH = 2
HERE = [name for name, implementation in ATTENTION.items() if not implementation.platform]
# heads, kv_heads, seq, kv_seq, head_dim: multi-head, grouped, multi-query, one step of decoding
SHAPES = [(4, 4, 7, 7, 64), (8, 2, 9, 9, 64), (6, 1, 5, 12, 80), (4, 2, 1, 16, 64)]
seeds = st.integers(0, 2**32 - 1)
grouped_attention = jax.jit(grouped_query_attention)
attention_gradients = jax.jit(
    jax.grad(
        lambda q, k, v, mask: jnp.sum(grouped_query_attention(q, k, v, mask) ** 2),
        argnums=(0, 1, 2),
    )
)


def draw(seed, shape, batch=BATCH):
    heads, kv_heads, seq, kv_seq, head_dim = shape
    rng = np.random.default_rng(seed)
    sizes = ((heads, seq), (kv_heads, kv_seq), (kv_heads, kv_seq))
    return tuple(
        np.float64(np.float32(rng.standard_normal((batch, *size, head_dim)))) for size in sizes
    )


def draw_mask(seed, shape, density, batch=BATCH):
    return np.random.default_rng(seed).random((batch, shape[2], shape[3])) < density


def single(arrays):
    return tuple(jnp.float32(array) for array in arrays)


def oracle_attention(q, k, v, mask):
    return np.stack([oracle.attention(q[b], k[b], v[b], mask[b]) for b in range(len(q))])


# Masks, against loops


MASKS = {
    "nothing": (),
    "a window": ("window",),
    "documents": ("segments",),
    "documents in a window": ("segments", "window"),
    "a cache": ("offset", "lengths"),
    "a cache in a window": ("offset", "lengths", "window"),
    "an offset and documents": ("offset", "segments"),
    "everything": ("offset", "segments", "lengths", "window"),
}
"""What a mask is made of: each is a program of its own, so values alone are drawn."""


def draw_small_mask(seed, seq, kv_seq, kind):
    """A mask in which some queries see nothing."""
    rng = np.random.default_rng(seed)
    fields = {
        "offset": [rng.integers(-2, kv_seq + 1, BATCH)],
        "segments": [rng.integers(0, 3, (BATCH, size)) for size in (seq, kv_seq)],
        "lengths": [rng.integers(0, kv_seq + 1, BATCH)],
    }
    arrays = (
        jnp.asarray(array, jnp.int32) if name in MASKS[kind] else None
        for name, drawn in fields.items()
        for array in drawn
    )
    return Mask(*arrays, window=3 if "window" in MASKS[kind] else None)


def loops(mask, seq, kv_seq):
    def sees(b, t, s):
        up_to = t + (0 if mask.offset is None else mask.offset[b])
        same = mask.query_segments is None or mask.query_segments[b, t] == mask.key_segments[b, s]
        is_near = mask.window is None or up_to - s < mask.window
        return s <= up_to and is_near and same and (mask.lengths is None or s < mask.lengths[b])

    mask = jax.tree.map(np.asarray, mask)
    return np.array(
        [[[sees(b, t, s) for s in range(kv_seq)] for t in range(seq)] for b in range(BATCH)]
    )


@pytest.mark.parametrize("kind", MASKS)
@settings(max_examples=8)
@given(seed=seeds, sizes=st.sampled_from([(1, 1, 0), (6, 4, 0), (3, 9, 2), (1, 7, 3)]))
def test_a_mask_is_what_loops_say(kind, seed, sizes):
    seq, kv_seq, first = sizes
    mask = draw_small_mask(seed, seq + first, kv_seq, kind)
    dense = np.broadcast_to(mask.dense(seq, kv_seq, first), (BATCH, seq, kv_seq))
    np.testing.assert_array_equal(dense, loops(mask, seq + first, kv_seq)[:, first:])


# Implementations


@pytest.fixture(scope="module")
def small_blocks():
    """Blocks of a few queries and keys, for which eight tokens are a long sequence."""
    module = importlib.import_module("jllama.functional.attention")
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"_BLOCK": 4, "_CACHE_BLOCK": 3, "_CACHE_QUERIES": 3}.items():
            patch.setattr(module, name, size)
        yield


@functools.partial(jax.jit, static_argnums=4)
def attended(query, key, value, mask, implementation):
    return attention(query, key, value, mask, implementation)


@functools.partial(jax.jit, static_argnums=4)
def attended_gradients(query, key, value, mask, implementation):
    def objective(*arrays):
        return jnp.sum(attention(*arrays, mask, implementation) ** 2)

    return jax.grad(objective, argnums=(0, 1, 2))(query, key, value)


SMALL_SHAPES = {
    "nothing": [(4, 2, 9, 9, 16)],
    "a window": [(4, 2, 9, 9, 16)],
    "documents": [(4, 2, 9, 9, 16)],
    "documents in a window": [(3, 1, 9, 9, 16)],
    "a cache": [(3, 1, 1, 7, 16), (4, 2, 9, 9, 16)],
    "a cache in a window": [(2, 2, 10, 6, 16)],
    "an offset and documents": [(2, 2, 10, 6, 16)],
    "everything": [(3, 1, 1, 7, 16), (4, 2, 9, 9, 16)],
}
"""The shapes that masks of each kind are tried with; a causal sequence is as long as itself."""


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("kind", MASKS)
@settings(max_examples=8)
@given(data=st.data(), seed=seeds)
def test_every_implementation_equals_the_oracle(small_blocks, implementation, kind, data, seed):
    shape = data.draw(st.sampled_from(SMALL_SHAPES[kind]))
    arrays, mask = draw(seed, shape), draw_small_mask(seed, shape[2], shape[3], kind)
    dense = loops(mask, shape[2], shape[3])
    expected = oracle_attention(*arrays, dense)
    assert relative_error(attended(*single(arrays), mask, implementation), expected) < 1e-5
    if ATTENTION[implementation].backward:
        gradients = attended_gradients(*single(arrays), mask, implementation)
        for gradient, reference in zip(
            gradients, attention_gradients(*single(arrays), jnp.asarray(dense)), strict=True
        ):
            assert np.all(np.isfinite(gradient))
            assert relative_error(gradient, reference) < 1e-5
    with jax.enable_x64(True):
        exact = attended(*map(jnp.asarray, arrays), mask, implementation)
        assert relative_error(exact, expected) < 1e-12


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("window", [1, 2, 64, 65, 130, 199, 200, 1000])
def test_windows_of_any_size_over_long_rows(implementation, window):
    """Values and gradients, where a window begins in any block; one token more or less is seen."""
    shape = (4, 2, 200, 200, 16)
    arrays = draw(0, shape)
    ahead = np.subtract.outer(np.arange(200), np.arange(200))
    dense = np.broadcast_to((ahead >= 0) & (ahead < window), (BATCH, 200, 200))
    expected = oracle_attention(*arrays, dense)
    actual = attended(*single(arrays), Mask(window=window), implementation)
    assert relative_error(actual, expected) < 1e-5
    if window < 200:
        wider = attended(*single(arrays), Mask(window=window + 1), implementation)
        assert relative_error(wider, expected) > 1e-3
    if implementation == "blocked":
        gradients = attended_gradients(*single(arrays), Mask(window=window), implementation)
        references = attention_gradients(*single(arrays), jnp.asarray(dense))
        for gradient, reference in zip(gradients, references, strict=True):
            np.testing.assert_allclose(gradient, reference, atol=2e-5)


def test_a_window_saves_products(monkeypatch):
    """A block of 64 queries has scores of the keys in its window alone."""
    module = importlib.import_module("jllama.functional.attention")
    monkeypatch.setattr(module, "_BLOCK", 64)
    shapes = [jax.ShapeDtypeStruct((1, 4, 4096, 16), jnp.float32)] * 3

    def max_keys(mask):
        program = attended_gradients.trace(*shapes, mask, "blocked").jaxpr
        return max(map(int, re.findall(r"f32\[1,4,1,64,(\d+)\]", str(program))))

    assert max_keys(Mask(window=100)) == 99 + 64
    assert max_keys(Mask()) == 4096


@pytest.mark.parametrize("implementation", HERE)
def test_every_implementation_in_bfloat16(small_blocks, implementation):
    shape = (8, 2, 9, 9, 64)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in draw(0, shape)]
    actual = attended(*arrays, Mask(), implementation)
    assert actual.dtype == jnp.bfloat16
    exact = (np.asarray(a, np.float64) for a in arrays)
    assert relative_error(actual, oracle_attention(*exact, loops(Mask(), 9, 9))) < 1e-2


@pytest.mark.parametrize("implementation", HERE)
@given(seed=seeds, cut=st.integers(1, 8))
def test_documents_packed_in_a_row_do_not_see_each_other(small_blocks, implementation, seed, cut):
    shape = (4, 2, 9, 9, 16)
    arrays, others = single(draw(seed, shape)), single(draw(seed + 1, shape))
    segments = jnp.broadcast_to(jnp.arange(9) >= cut, (BATCH, 9)).astype(jnp.int32)
    first = (segments == 0)[:, None, :, None]
    mask = Mask(query_segments=segments, key_segments=segments)
    before = attended(*arrays, mask, implementation)
    changed = (jnp.where(first, other, array) for other, array in zip(others, arrays, strict=True))
    after = attended(*changed, mask, implementation)
    np.testing.assert_array_equal(after[:, :, cut:], before[:, :, cut:])


def test_blocks_hold_no_more_than_a_block_of_scores():
    shapes = [jax.ShapeDtypeStruct((1, 4, 2048, 16), jnp.float32)] * 3

    def temporaries(implementation):
        compiled = attended_gradients.lower(*shapes, Mask(), implementation).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 4 * 2048 * 2048 * 4
    assert temporaries("reference") > 2 * scores
    assert temporaries("blocked") < scores / 2


def test_no_masks_of_all_blocks_are_kept_for_all_layers():
    """JAX computes what does not depend on a layer before the scan over layers.

    All masks together would be as large as the scores.
    """

    def temporaries(seq):
        def objective(arrays):
            layer = jax.checkpoint(
                lambda x, _: (attention(x, *arrays[1:], implementation="blocked"), None)
            )
            return jnp.sum(jax.lax.scan(layer, arrays[0], length=2)[0])

        shapes = [jax.ShapeDtypeStruct((1, 4, seq, 16), jnp.float32)] * 3
        compiled = jax.jit(jax.grad(objective)).lower(shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.2 * temporaries(2048)


def test_auto_goes_by_the_shapes_alone():
    assert choose_attention(1, 4096) == "reference"
    assert choose_attention(512, 4096, backward=False) == "reference"
    assert choose_attention(100, 100, backward=False) == "reference"
    assert choose_attention(512, 512, backward=False) == "blocked"
    assert choose_attention(100, 100) == "blocked"
    assert choose_attention(0, 0) == "reference"
    assert choose_attention(8192, 8192) == "blocked"


def test_auto_takes_a_kernel_where_the_platform_has_one():
    assert choose_attention(512, 512, platform="tpu") == "splash"
    assert choose_attention(1, 4096, platform="tpu") == "reference"
    assert choose_attention(512, 512, platform="gpu", dtype=jnp.bfloat16) in ("tokamax", "triton")
    assert choose_attention(512, 512, platform="gpu", dtype=jnp.bfloat16, packed=False) == "cudnn"
    assert choose_attention(8192, 8192, platform="gpu") == "blocked"
    windowed = choose_attention(512, 512, platform="gpu", dtype=jnp.bfloat16, window=True)
    assert windowed in ("tokamax", "blocked")


def test_what_cannot_be_served_is_an_error_that_names_the_implementation(monkeypatch):
    arrays = single(draw(0, (2, 2, 3, 3, 8)))
    with pytest.raises(
        ValueError,
        match="no attention implementation 'flash'; there are reference, blocked, cached, split",
    ):
        attention(*arrays, implementation="flash")
    no_documents = AttentionImplementation(
        ATTENTION["reference"].function,
        lambda query, key, mask: "segments" if mask.query_segments is not None else None,
    )
    monkeypatch.setitem(ATTENTION, "flash", no_documents)
    segments = jnp.zeros((BATCH, 3), jnp.int32)
    assert attention(*arrays, implementation="flash").shape == (BATCH, 2, 3, 8)
    with pytest.raises(
        ValueError, match="the attention implementation 'flash' cannot serve segments"
    ):
        attention(*arrays, Mask(None, segments, segments), "flash")


# Softmax


@given(
    seed=seeds, size=st.sampled_from([1e-3, 1.0, 100.0]), density=st.sampled_from([0.1, 0.5, 1.0])
)
def test_masked_softmax_equals_the_oracle(seed, size, density):
    rng = np.random.default_rng(seed)
    scores = np.float64(np.float32(size * rng.standard_normal((6, 11))))
    mask = rng.random((6, 11)) < density
    expected = np.zeros(scores.shape)
    for row in np.flatnonzero(mask.any(axis=-1)):
        expected[row, mask[row]] = oracle.softmax(scores[row, mask[row]])
    actual = masked_softmax(jnp.float32(scores), jnp.asarray(mask))
    assert relative_error(actual, expected) < 1e-5
    np.testing.assert_allclose(np.sum(actual, axis=-1), mask.any(axis=-1), rtol=1e-6)
    assert not np.any(np.asarray(actual)[~mask])
    with jax.enable_x64(True):
        assert (
            relative_error(masked_softmax(jnp.asarray(scores), jnp.asarray(mask)), expected) < 1e-12
        )


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_masked_softmax_of_huge_scores_is_finite(size):
    scores = jnp.float32([[size, -size, size, 0.0], [-size, -size, -size, size]])
    mask = jnp.array([[True] * 4, [True, True, True, False]])
    expected = [[0.5, 0, 0.5, 0], [1 / 3, 1 / 3, 1 / 3, 0]]
    assert relative_error(masked_softmax(scores, mask), expected) < 1e-6
    assert np.all(np.isfinite(jax.grad(lambda scores: masked_softmax(scores, mask)[0, 0])(scores)))


def test_masked_softmax_is_float32_for_bfloat16_scores():
    scores, mask = jnp.asarray([[0.1, 2.0, -1.0]], jnp.bfloat16), jnp.ones((1, 3), bool)
    actual = masked_softmax(scores, mask)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, masked_softmax(scores.astype(jnp.float32), mask))


# Attention


@given(seed=seeds, shape=st.sampled_from(SHAPES), density=st.sampled_from([0.0, 0.2, 0.7, 1.0]))
def test_equals_the_oracle(seed, shape, density):
    arrays, mask = draw(seed, shape), draw_mask(seed, shape, density)
    expected = oracle_attention(*arrays, mask)
    assert relative_error(grouped_attention(*single(arrays), jnp.asarray(mask)), expected) < 1e-5
    with jax.enable_x64(True):
        actual = grouped_attention(*map(jnp.asarray, arrays), jnp.asarray(mask))
        assert relative_error(actual, expected) < 1e-12


def test_equals_the_oracle_over_512_causal_positions():
    shape = (4, 2, 512, 512, 64)
    arrays, mask = draw(0, shape, batch=1), np.tri(512, dtype=bool)[None]
    assert (
        relative_error(
            grouped_attention(*single(arrays), jnp.asarray(mask)), oracle_attention(*arrays, mask)
        )
        < 1e-5
    )


@given(seed=seeds, shape=st.sampled_from(SHAPES))
def test_grouped_equals_multi_head_with_neighbors_sharing(seed, shape):
    (q, k, v), mask = single(draw(seed, shape)), jnp.asarray(draw_mask(seed, shape, 0.7))
    group = shape[0] // shape[1]
    repeated = (jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1))
    assert (
        relative_error(grouped_attention(q, k, v, mask), grouped_attention(q, *repeated, mask))
        < 1e-5
    )


def test_grouping_heads_in_turn_is_something_else():
    shape = (8, 2, 9, 9, 64)
    (q, k, v), mask = single(draw(0, shape)), jnp.asarray(draw_mask(0, shape, 0.7))
    in_turn = (jnp.tile(k, (1, 4, 1, 1)), jnp.tile(v, (1, 4, 1, 1)))
    assert (
        relative_error(grouped_attention(q, *in_turn, mask), grouped_attention(q, k, v, mask))
        > 100 * 1e-5
    )


def test_mask_broadcasts_over_batch_and_queries():
    shape = (8, 2, 9, 9, 64)
    arrays, mask = single(draw(0, shape)), jnp.asarray(draw_mask(0, shape, 0.5))
    for small in (mask[:1], mask[:, :1], mask[:1, :1]):
        full = jnp.broadcast_to(small, mask.shape)
        np.testing.assert_array_equal(
            grouped_attention(*arrays, small), grouped_attention(*arrays, full)
        )


@given(seed=seeds, position=st.integers(0, 8))
def test_no_query_sees_later_tokens(seed, position):
    shape = (8, 2, 9, 9, 64)
    (q, k, v), other = single(draw(seed, shape)), single(draw(seed + 1, shape))
    later = (jnp.arange(9) > position)[:, None]
    mask = Mask().dense(9, 9)
    before = np.asarray(grouped_attention(q, k, v, mask))
    after = np.asarray(
        grouped_attention(q, jnp.where(later, other[1], k), jnp.where(later, other[2], v), mask)
    )
    np.testing.assert_array_equal(before[:, :, : position + 1], after[:, :, : position + 1])
    if position < 8:
        assert (
            relative_error(after[:, :, position + 1 :], before[:, :, position + 1 :]) > 100 * 1e-5
        )


@given(seed=seeds, shape=st.sampled_from(SHAPES), poison=st.sampled_from([1e30, -1e30, 1e4]))
def test_contents_of_masked_keys_change_nothing(seed, shape, poison):
    q, k, v = single(draw(seed, shape))
    hidden = np.random.default_rng(seed).random((BATCH, shape[3])) < 0.5
    mask = jnp.asarray(draw_mask(seed, shape, 0.8) & ~hidden[:, None])
    poisoned = tuple(jnp.where(hidden[:, None, :, None], poison, array) for array in (k, v))
    np.testing.assert_array_equal(
        grouped_attention(q, *poisoned, mask), grouped_attention(q, k, v, mask)
    )
    clean, dirty = (attention_gradients(q, *pair, mask) for pair in ((k, v), poisoned))
    for expected, actual in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_fully_masked_queries_give_zeros_and_zero_gradients():
    shape = (8, 2, 9, 9, 64)
    arrays = single(draw(0, shape))
    mask = jnp.asarray(draw_mask(0, shape, 0.7)).at[0, 3].set(False).at[1].set(False)
    out = np.asarray(grouped_attention(*arrays, mask))
    assert not out[0, :, 3].any()
    assert not out[1].any()
    grads = attention_gradients(*arrays, mask)
    assert all(np.all(np.isfinite(grad)) for grad in grads)
    assert not np.any(grads[0][0, :, 3])
    assert not any(np.any(grad[1]) for grad in grads)


@given(seed=seeds)
def test_result_is_within_the_values(seed):
    shape = (8, 2, 9, 9, 64)
    (q, k, v), mask = single(draw(seed, shape)), jnp.ones((1, 1, 9), bool)
    out = np.asarray(grouped_attention(q, k, v, mask))
    low, high = (
        np.repeat(bound, 4, axis=1)[:, :, None] for bound in (v.min(axis=2), v.max(axis=2))
    )
    assert np.all((out >= low - 1e-6) & (out <= high + 1e-6))


def test_bfloat16_stays_bfloat16_and_near():
    shape = (8, 2, 9, 9, 64)
    arrays, mask = [jnp.asarray(a, jnp.bfloat16) for a in draw(0, shape)], draw_mask(0, shape, 0.7)
    actual = grouped_attention(*arrays, jnp.asarray(mask))
    assert actual.dtype == jnp.bfloat16
    assert (
        relative_error(actual, oracle_attention(*(np.asarray(a, np.float64) for a in arrays), mask))
        < 1e-2
    )


def test_gradients():
    shape = (4, 2, 3, 5, 4)
    mask = jnp.asarray(draw_mask(0, shape, 0.6, batch=1)).at[0, 1].set(False)
    assert_gradients_match(
        lambda q, k, v: grouped_query_attention(q, k, v, mask), *draw(0, shape, batch=1)
    )
    assert_gradients_match(
        lambda scores: masked_softmax(scores, mask[0]), draw(1, shape)[0][0, 0, :, :1] * np.ones(5)
    )
