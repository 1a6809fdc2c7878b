"""The kernels, interpreted on a CPU, against the reference, which ``test_attention`` checks."""

import dataclasses
import functools
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but

from jllama.core import UsageError
from jllama.functional import (
    ATTENTION,
    Mask,
    UnsupportedAttention,
    attention,
    choose_attention,
    choose_cache_attention,
)
from jllama.kernels import kernels
from jllama.kernels.kernels import first_of_segments, paged, splash, triton
from jllama.lab.checks import relative_error
from jllama.models import oracle
from jllama.models.build import check_attention


def tokamax(*arguments, interpret):
    return kernels.tokamax(*arguments)


KERNELS = {"splash": splash, "triton": triton, "tokamax": tokamax}


def draw(heads, kv_heads, seq, kv_seq, head_dim, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, heads, seq, head_dim), *[(2, kv_heads, kv_seq, head_dim)] * 2]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0)
def gradients(name, arrays, mask):
    """Return the value of an objective and its gradients, by a kernel or by the formula."""

    def objective(*arrays):
        if name == "reference":
            out = attention(*arrays, mask, name)
        else:
            out = KERNELS[name](*arrays, mask, interpret=True)
        return jnp.sum(out * jnp.cos(arrays[0])), out

    return jax.grad(objective, (0, 1, 2), has_aux=True)(*arrays)


def compare(name, arrays, mask):
    """The largest relative error of values and gradients."""
    results = (jax.tree.leaves(gradients(each, arrays, mask)) for each in (name, "reference"))
    return max(map(relative_error, *results))


def documents(seq, window=None):
    starts = np.random.default_rng(1).random((2, seq)) < 0.02
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    return Mask(query_segments=segments, key_segments=segments, window=window)


SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "seq"),
    slow_but([(2, 1, 100, 130)], [(4, 2, 64, 200), (2, 2, 128, 256), (2, 1, 100, 130)]),
)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@SHAPES
@pytest.mark.parametrize("name", ["splash", "triton"])
def test_values_and_gradients_are_those_of_the_reference(
    name, heads, kv_heads, head_dim, seq, packed
):
    arrays = draw(heads, kv_heads, seq, seq, head_dim)
    assert compare(name, arrays, documents(seq) if packed else Mask()) < 1e-5


@pytest.mark.parametrize("window", slow_but([129], [1, 70, 129, 300, None]))
def test_splash_slides_a_window_and_goes_on_behind_other_tokens(window):
    assert compare("splash", draw(4, 2, 260, 260, 64), documents(260, window)) < 1e-5
    behind = Mask(offset=np.array([100, 37]), window=window)
    assert compare("splash", draw(4, 2, 100, 256, 64), behind) < 1e-5


@pytest.fixture
def plain_tokamax(monkeypatch):
    """Tokamax's plain formula, which every device has, in the place of its kernels."""
    pytest.importorskip("tokamax")
    api, base, _ = kernels._tokamax_package()
    plain = api.IMPLEMENTATIONS["xla"].replace(vjp=base.DotProductAttentionVjp())
    formulas = types.SimpleNamespace(IMPLEMENTATIONS={"mosaic_gpu": plain, "triton": plain})
    monkeypatch.setattr(kernels, "_tokamax_package", lambda: (formulas, base, lambda: True))


@pytest.mark.parametrize("window", [None, 50])
@SHAPES
def test_tokamax_is_told_of_documents_heads_and_sums(
    plain_tokamax, heads, kv_heads, head_dim, seq, window
):
    arrays = draw(heads, kv_heads, seq, seq, head_dim)
    assert compare("tokamax", arrays, Mask(window=window)) < 1e-5
    mask = documents(seq, window)
    padded_tail = mask.query_segments + 1
    padded_tail[1, seq // 2 :] = 0
    for segments in (
        mask.query_segments,
        np.broadcast_to(np.arange(seq, dtype=np.int32), (2, seq)),  # a document a token
        padded_tail,
    ):
        packed = Mask(query_segments=segments, key_segments=segments, window=window)
        assert compare("tokamax", arrays, packed) < 1e-5


def test_the_first_index_of_each_segment():
    segments = np.random.default_rng(0).integers(0, 3, (4, 300)).cumsum(axis=1) // 7
    expected = [[list(row).index(segment) for segment in row] for row in segments]
    np.testing.assert_array_equal(jax.jit(first_of_segments)(segments), expected)


def test_without_tokamax_one_sentence_says_what_to_install(monkeypatch):
    kernels._tokamax_package.cache_clear()
    monkeypatch.setitem(sys.modules, "tokamax", None)
    for name in [name for name in sys.modules if name.startswith("tokamax.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        UnsupportedAttention,
        match=r"tokamax, which can't be imported .*: pip install 'jllama\[cuda\]'",
    ):
        attention(*draw(2, 1, 8, 8, 64, jnp.bfloat16), Mask(), "tokamax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"tokamax is not installed: pip install 'jllama\[cuda\]'"):
        check_attention("tokamax", "gpu", backward=True)


def test_auto_takes_the_fastest_kernel_that_is_there(monkeypatch):
    def chosen(*modules):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in modules or None)
        return choose_attention(512, 512, platform="gpu", dtype=jnp.bfloat16)

    own = "jax.experimental.pallas.ops.gpu.attention"
    assert [chosen("tokamax", own), chosen(own), chosen()] == ["tokamax", "triton", "blocked"]


def test_paged_reads_each_row_as_far_as_its_own_tokens():
    """Against the oracle; what stands behind them, other rows and a longer cache change no bit."""
    pallas = pytest.importorskip("jax.experimental.pallas.tpu")
    lengths = np.array([300, 3])
    query, key, value = draw(4, 2, 1, 768, 128)
    behind = np.arange(768)[:, None] > lengths[:, None, None, None]
    key, value = (jnp.where(behind, 1e30, array).astype(jnp.bfloat16) for array in (key, value))
    with pallas.force_tpu_interpret_mode():
        mixed = paged(query, key, value, Mask(offset=jnp.asarray(lengths)))
        longer = (jnp.pad(array[1:], ((0, 0), (0, 0), (0, 256), (0, 0))) for array in (key, value))
        alone = paged(query[1:], *longer, Mask(offset=jnp.asarray(lengths[1:])))
    np.testing.assert_array_equal(alone[0], mixed[1])
    for row, length in enumerate(lengths):
        own = (np.float64(array[row, :, : length + 1]) for array in (key, value))
        expected = oracle.attention(np.float64(query[row]), *own, np.ones((1, length + 1), bool))
        assert relative_error(np.asarray(mixed[row]), expected) < 1e-5


def test_auto_over_a_cache_goes_by_platform_and_shapes():
    def chosen(platform, seq=1, head_dim=128, dtype=jnp.bfloat16, window=None):
        key = jax.ShapeDtypeStruct((2, 2, 512, head_dim), dtype)
        return choose_cache_attention(seq, key, platform, window)

    assert [chosen(platform) for platform in ("cpu", "gpu", "tpu")] == ["cached", "split", "paged"]
    assert [chosen("tpu", head_dim=64), chosen("tpu", dtype=jnp.float32), chosen("tpu", 5)] == [
        "split"
    ] * 3
    assert [chosen(platform, window=9) for platform in ("cpu", "tpu")] == ["cached", "split"]
    assert [chosen(platform, 512) for platform in ("cpu", "gpu", "tpu")] == ["cached"] * 3


OFFSET, LENGTHS = Mask(offset=np.array([3])), Mask(lengths=np.array([3, 3]))
MANY_TOKENS = "all but one new token a row, over bfloat16 keys"


@pytest.mark.parametrize(
    ("name", "mask", "dtype", "reason"),
    [
        ("paged", OFFSET, jnp.float32, MANY_TOKENS),
        ("paged", dataclasses.replace(OFFSET, window=3), jnp.bfloat16, MANY_TOKENS),
        ("splash", LENGTHS, jnp.float32, "a mask with lengths"),
        ("tokamax", LENGTHS, jnp.bfloat16, "a mask with an offset or lengths"),
        ("tokamax", Mask(), jnp.float32, "float32: only bfloat16 and float16"),
        ("triton", OFFSET, jnp.float32, "a mask with an offset or lengths"),
        ("triton", Mask(window=3), jnp.float32, "a sliding window"),
        ("cudnn", Mask(), jnp.float32, "float32: only bfloat16 and float16"),
        ("cudnn", documents(8), jnp.bfloat16, "a mask with segments, an offset or lengths"),
    ],
)
def test_what_a_kernel_cannot_serve_is_an_error_that_names_it(name, mask, dtype, reason):
    with pytest.raises(
        ValueError, match=f"the attention implementation '{name}' cannot serve {reason}"
    ):
        attention(*draw(2, 1, 8, 8, 64, dtype), mask, name)
    assert ATTENTION[name].platform in ("tpu", "gpu")
