"""One sentence reports what does not fit, without the import hook and at no cost under jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllama import functional as F


def ones(*shape, dtype=np.float32):
    return jnp.asarray(np.ones(shape, dtype))


def mask(*shape):
    return ones(*shape, dtype=bool)


WRONG = {
    "a shorter scale": (
        lambda: F.rms_norm(ones(2, 128), ones(64), 1e-5),
        "rms_norm: scale is float32[64] but float[embed] is expected, "
        "where x float32[2, 128] is float[*lead, embed]",
    ),
    "a number as scale": (
        lambda: F.rms_norm(ones(2, 128), 1.0, 1e-5),
        "scale is a float but float[embed] is",
    ),
    "a list": (
        lambda: F.rms_norm([[1.0]], ones(1), 1e-5),
        "rms_norm: x is a list but float[*lead, embed] is expected",
    ),
    "integers": (
        lambda: F.rms_norm(ones(2, 4, dtype=np.int32), ones(4), 1e-5),
        "rms_norm: x is int32[2, 4] but float",
    ),
    "by name": (
        lambda: F.rms_norm(eps=1e-5, scale=ones(3), x=ones(2, 4)),
        "scale is float32[3] but",
    ),
    "torch's layout of a matrix": (
        lambda: F.swiglu(ones(3, 64), ones(172, 64), ones(172, 64), ones(64, 172)),
        "swiglu: w_gate is float32[172, 64] but float[embed, mlp] is expected, "
        "where x float32[3, 64] is",
    ),
    "an additive mask": (
        lambda: F.grouped_query_attention(
            ones(1, 4, 8, 6), ones(1, 2, 8, 6), ones(1, 2, 8, 6), ones(1, 8, 8)
        ),
        "mask is float32[1, 8, 8] but bool[batch or 1, seq or 1, kv_seq] is expected",
    ),
    "seq before heads": (
        lambda: F.grouped_query_attention(
            ones(1, 8, 4, 6), ones(1, 8, 2, 6), ones(1, 8, 2, 6), mask(1, 8, 8)
        ),
        "it fits after swapaxes(1, 2), heads before seq",
    ),
    "seq before heads, causal": (
        lambda: F.attention(ones(1, 8, 4, 6), ones(1, 8, 2, 6), ones(1, 8, 2, 6)),
        "it fits after swapaxes(1, 2), heads before seq",
    ),
    "seq before heads, rotated": (
        lambda: F.apply_rope(ones(1, 8, 4, 6), ones(1, 8, 3), ones(1, 8, 3)),
        "it fits after swapaxes(1, 2), heads before seq",
    ),
    "tables of whole heads": (
        lambda: F.apply_rope(ones(1, 4, 8, 6), ones(1, 8, 6), ones(1, 8, 6)),
        "apply_rope: cos is float32[1, 8, 6] but float[batch or 1, seq, head_dim//2] is expected",
    ),
    "no batch": (
        lambda: F.attention(ones(4, 8, 6), ones(4, 8, 6), ones(4, 8, 6)),
        "query is float32[4, 8, 6] but float[batch, heads, seq, head_dim] is expected",
    ),
    "heads that don't divide": (
        lambda: F.attention(ones(1, 4, 8, 6), ones(1, 3, 8, 6), ones(1, 3, 8, 6)),
        "query has 4 heads and key 3; the first must be a multiple of the second",
    ),
    "float positions": (
        lambda: F.rope_tables(ones(2, 8), np.ones(4)),
        "rope_tables: positions is float32[2, 8] but integer[*lead] is expected",
    ),
    "float targets": (
        lambda: F.linear_cross_entropy(ones(2, 8, 9), ones(9, 5), ones(2, 8), mask(2, 8)),
        "linear_cross_entropy: targets is float32[2, 8] but integer[batch, seq] is expected",
    ),
    "targets of another length": (
        lambda: F.linear_cross_entropy(
            ones(2, 8, 9), ones(9, 5), ones(2, 7, dtype=np.int32), mask(2, 7)
        ),
        "targets is int32[2, 7] but integer[batch, seq] is expected, "
        "where hidden float32[2, 8, 9] is",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_says_what_was_given_and_what_is_expected(name):
    call, sentence = WRONG[name]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        call()
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@given(
    x=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    scale=st.lists(st.integers(1, 3), max_size=2),
)
def test_a_norm_takes_what_fits_and_nothing_else(x, scale):
    norm = functools.partial(jax.eval_shape, lambda *arrays: F.rms_norm(*arrays, 1e-5))
    shapes = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in (x, scale)]
    if scale == x[-1:]:
        assert norm(*shapes).shape == tuple(x)
    else:
        with pytest.raises(
            ValueError,
            match=f"rms_norm: scale is float32\\[{', '.join(map(str, scale))}\\] but float",
        ):
            norm(*shapes)


def test_only_shapes_and_dtypes_are_read():
    def gradient(x, scale):
        return jax.grad(lambda x: F.rms_norm(x, scale, 1e-5).sum())(x)

    rows = jax.eval_shape(jax.vmap(gradient, (0, None)), ones(3, 2, 8), ones(8))
    assert rows.shape == (3, 2, 8)


def test_a_missing_argument_is_reported_by_python_as_ever():
    with pytest.raises(TypeError, match="argument: 'eps'"):
        F.rms_norm(ones(2, 4), ones(4))
