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

from jllama.functional import (
    ATTENTION,
    AttentionImplementation,
    Mask,
    attention,
    choose_attention,
    grouped_query_attention,
    masked_softmax,
)
from jllama.lab.checks import relative_error
from jllama.models import oracle

BATCH = 2
HERE = [name for name, implementation in ATTENTION.items() if not implementation.platform]
# heads, kv_heads, seq, kv_seq, head_dim: grouped, multi-query for one step of decoding, multi-head
GROUPED, STEP, MULTI_HEAD = SHAPES = [(4, 2, 9, 9, 16), (3, 1, 1, 7, 16), (2, 2, 10, 6, 16)]
LONG = (4, 2, 200, 200, 16)
seeds = st.integers(0, 2**32 - 1)
softmax = jax.jit(masked_softmax)
attended = jax.jit(attention, static_argnums=4)


@jax.jit
def formula(query, key, value, mask):
    """Return the result, and the gradients of the sum of its squares."""
    out, back = jax.vjp(lambda *arrays: grouped_query_attention(*arrays, mask), query, key, value)
    return out, back(2 * out)


@functools.partial(jax.jit, static_argnums=4)
def with_gradients(query, key, value, mask, implementation):
    """Return the same of an implementation; no gradients if it has none."""

    def function(*arrays):
        return attention(*arrays, mask, implementation)

    # Without a backward pass the result may be computed in another way than with one.
    out = function(query, key, value)
    if not ATTENTION[implementation].backward:
        return out, ()
    _, back = jax.vjp(function, query, key, value)
    return out, back(2 * out)


def draw(seed, shape, batch=BATCH):
    heads, kv_heads, seq, kv_seq, head_dim = shape
    rng = np.random.default_rng(seed)
    sizes = ((heads, seq), (kv_heads, kv_seq), (kv_heads, kv_seq))
    return [rng.standard_normal((batch, *size, head_dim)) for size in sizes]


def draw_dense(seed, shape, density, batch=BATCH):
    return np.random.default_rng(seed).random((batch, shape[2], shape[3])) < density


def oracle_attention(q, k, v, mask):
    return np.stack([oracle.attention(q[b], k[b], v[b], mask[b]) for b in range(len(q))])


def assert_equal_to_oracle_and_formula(implementation, arrays, mask, dense):
    """Compare values with the oracle's, gradients with the formula's, in float64."""
    with jax.enable_x64(True):
        out, gradients = with_gradients(*arrays, mask, implementation)
        _, expected = formula(*arrays, dense)
        assert relative_error(out, oracle_attention(*arrays, dense)) < 1e-12
        if ATTENTION[implementation].backward:
            for gradient, reference in zip(gradients, expected, strict=True):
                assert relative_error(gradient, reference) < 1e-12


# Implementations


MASKS = {
    "nothing": ((), GROUPED),
    "documents": (("segments",), GROUPED),
    "documents in a window": (("segments", "window"), GROUPED),
    "a cache": (("offset", "lengths"), STEP),
    "a cache in a window": (("offset", "lengths", "window"), MULTI_HEAD),
    "everything": (("offset", "segments", "lengths", "window"), GROUPED),
}
"""What a mask is made of, and the shape that it is tried with."""


def draw_mask(seed, kind):
    """A mask in which some queries see nothing, if there is an offset."""
    fields, (_, _, seq, kv_seq, _) = MASKS[kind]
    rng = np.random.default_rng(seed)
    drawn = {
        "offset": [rng.integers(-2, kv_seq + 1, BATCH)],
        "segments": [rng.integers(0, 3, (BATCH, size)) for size in (seq, kv_seq)],
        "lengths": [rng.integers(0, kv_seq + 1, BATCH)],
    }
    arrays = (
        np.int32(array) if name in fields else None for name in drawn for array in drawn[name]
    )
    return Mask(*arrays, window=3 if "window" in fields else None)


def loops(mask, seq, kv_seq):
    def sees(b, t, s):
        up_to = t + (0 if mask.offset is None else mask.offset[b])
        same = mask.query_segments is None or mask.query_segments[b, t] == mask.key_segments[b, s]
        is_near = mask.window is None or up_to - s < mask.window
        return s <= up_to and is_near and same and (mask.lengths is None or s < mask.lengths[b])

    return np.array(
        [[[sees(b, t, s) for s in range(kv_seq)] for t in range(seq)] for b in range(BATCH)]
    )


@pytest.fixture(scope="module")
def small_blocks():
    """Blocks of a few queries and keys, for which eight tokens are a long sequence."""
    module = importlib.import_module("jllama.kernels.attention")
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"_BLOCK": 4, "_CACHE_BLOCK": 3, "_CACHE_QUERIES": 3}.items():
            patch.setattr(module, name, size)
        yield


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("kind", MASKS)
@settings(max_examples=6)
@given(seed=seeds)
def test_every_implementation_equals_the_oracle(small_blocks, implementation, kind, seed):
    _, shape = MASKS[kind]
    mask = draw_mask(seed, kind)
    dense = loops(mask, shape[2], shape[3])
    assert_equal_to_oracle_and_formula(implementation, draw(seed, shape), mask, dense)


@pytest.mark.parametrize(
    ("implementation", "window"),
    [*((name, 70) for name in HERE), *(("blocked", window) for window in (1, 130, 199, 1000))],
)
def test_windows_of_any_size_over_long_rows(implementation, window):
    """Where a window begins in any block."""
    ahead = np.subtract.outer(np.arange(200), np.arange(200))
    dense = np.broadcast_to((ahead >= 0) & (ahead < window), (BATCH, 200, 200))
    assert_equal_to_oracle_and_formula(implementation, draw(0, LONG), Mask(window=window), dense)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_every_implementation_in_fewer_bits(implementation, dtype, tolerance):
    arrays = [jnp.asarray(array, dtype) for array in draw(0, LONG)]
    actual = attended(*arrays, Mask(), implementation)
    assert actual.dtype == dtype
    exact = (np.float64(array) for array in arrays)
    dense = np.broadcast_to(np.tri(200, dtype=bool), (BATCH, 200, 200))
    assert relative_error(actual, oracle_attention(*exact, dense)) < tolerance


def test_a_window_saves_products(monkeypatch):
    """A block of 64 queries has scores of the keys in its window alone."""
    module = importlib.import_module("jllama.kernels.attention")
    monkeypatch.setattr(module, "_BLOCK", 64)
    shapes = [jax.ShapeDtypeStruct((1, 4, 4096, 16), jnp.float32)] * 3

    def max_keys(mask):
        program = with_gradients.trace(*shapes, mask, "blocked").jaxpr
        return max(map(int, re.findall(r"f32\[1,4,1,64,(\d+)\]", str(program))))

    assert max_keys(Mask(window=100)) == 99 + 64
    assert max_keys(Mask()) == 4096


def test_blocks_hold_neither_all_scores_nor_all_masks():
    """JAX computes what does not depend on a layer before the scan over layers.

    There, the masks of all blocks would take half a byte for each score.
    """
    seq = 4096
    shapes = [jax.ShapeDtypeStruct((1, 1, seq, 4), jnp.float32)] * 3

    def objective(arrays):
        layer = jax.checkpoint(
            lambda x, _: (attention(x, *arrays[1:], implementation="blocked"), None)
        )
        return jnp.sum(jax.lax.scan(layer, arrays[0], length=2)[0])

    blocked = jax.jit(jax.grad(objective)).lower(shapes)
    reference = with_gradients.lower(*shapes, Mask(), "reference")
    few, many = (
        program.compile().memory_analysis().temp_size_in_bytes for program in (blocked, reference)
    )
    assert few < 0.6 * seq**2 < 8 * seq**2 < many


def test_auto_goes_by_the_shapes_and_the_platform():
    assert choose_attention(1, 4096) == "reference"
    assert choose_attention(512, 4096, backward=False) == "reference"
    assert choose_attention(100, 100, backward=False) == "reference"
    assert choose_attention(512, 512, backward=False) == "blocked"
    assert choose_attention(100, 100) == "blocked"
    assert choose_attention(0, 0) == "reference"
    assert choose_attention(512, 512, platform="tpu") == "splash"
    assert choose_attention(1, 4096, platform="tpu") == "reference"
    assert choose_attention(8192, 8192, platform="gpu") == "blocked"
    on_gpu = functools.partial(choose_attention, 512, 512, platform="gpu", dtype=jnp.bfloat16)
    assert on_gpu() in ("tokamax", "triton")
    assert on_gpu(packed=False) == "cudnn"
    assert on_gpu(window=True) in ("tokamax", "blocked")


def test_what_cannot_be_served_is_an_error_that_names_the_implementation(monkeypatch):
    arrays = [jnp.float32(array) for array in draw(0, (2, 2, 3, 3, 8))]
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
    shaped = jax.eval_shape(lambda *arrays: attention(*arrays, implementation="flash"), *arrays)
    assert shaped.shape == (BATCH, 2, 3, 8)
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
    scores = size * rng.standard_normal((6, 11))
    mask = rng.random((6, 11)) < density
    expected = np.zeros(scores.shape)
    for row in np.flatnonzero(mask.any(axis=-1)):
        expected[row, mask[row]] = oracle.softmax(scores[row, mask[row]])
    with jax.enable_x64(True):
        actual = softmax(scores, mask)
        assert relative_error(actual, expected) < 1e-12
    assert not np.any(np.asarray(actual)[~mask])


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_masked_softmax_of_huge_scores_is_finite(size):
    scores = jnp.float32([[size, -size, size, 0.0], [-size, -size, -size, size]])
    mask = jnp.array([[True] * 4, [True, True, True, False]])
    expected = [[0.5, 0, 0.5, 0], [1 / 3, 1 / 3, 1 / 3, 0]]
    assert relative_error(softmax(scores, mask), expected) < 1e-6
    assert np.all(np.isfinite(slopes(scores, mask)))


@jax.jit
def slopes(scores, mask):
    return jax.grad(lambda scores: masked_softmax(scores, mask)[0, 0])(scores)


def test_masked_softmax_is_float32_for_bfloat16_scores():
    scores, mask = jnp.asarray([[0.1, 2.0, -1.0]], jnp.bfloat16), np.ones((1, 3), bool)
    actual = softmax(scores, mask)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, softmax(np.float32(scores), mask))


# The formula


@given(seed=seeds, shape=st.sampled_from(SHAPES), density=st.sampled_from([0.0, 0.2, 0.7, 1.0]))
def test_equals_the_oracle(seed, shape, density):
    arrays, mask = draw(seed, shape), draw_dense(seed, shape, density)
    with jax.enable_x64(True):
        actual, _ = formula(*arrays, mask)
        assert relative_error(actual, oracle_attention(*arrays, mask)) < 1e-12


def test_mask_broadcasts_over_batch_and_queries():
    arrays, mask = draw(0, GROUPED), draw_dense(0, GROUPED, 0.5)
    for small in (mask[:1], mask[:, :1]):
        full = np.broadcast_to(small, mask.shape)
        np.testing.assert_array_equal(formula(*arrays, small)[0], formula(*arrays, full)[0])


@given(seed=seeds, shape=st.sampled_from(SHAPES), poison=st.sampled_from([1e30, -1e30, 1e4]))
def test_contents_of_masked_keys_change_nothing(seed, shape, poison):
    query, *pair = draw(seed, shape)
    hidden = np.random.default_rng(seed).random((BATCH, shape[3])) < 0.5
    mask = draw_dense(seed, shape, 0.8) & ~hidden[:, None]
    poisoned = (np.where(hidden[:, None, :, None], poison, array) for array in pair)
    clean, dirty = formula(query, *pair, mask), formula(query, *poisoned, mask)
    for expected, actual in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_fully_masked_queries_give_zeros_and_zero_gradients():
    mask = draw_dense(0, GROUPED, 0.7)
    mask[0, 3] = mask[1] = False
    out, gradients = jax.device_get(formula(*draw(0, GROUPED), mask))
    assert not out[0, :, 3].any()
    assert not out[1].any()
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert not np.any(gradients[0][0, :, 3])
    assert not any(np.any(gradient[1]) for gradient in gradients)


def test_gradients():
    shape = (4, 2, 3, 5, 4)
    mask = draw_dense(0, shape, 0.6, batch=1)
    mask[0, 1] = False
    assert_gradients_match(
        lambda q, k, v: grouped_query_attention(q, k, v, jnp.asarray(mask)),
        *draw(0, shape, batch=1),
    )
