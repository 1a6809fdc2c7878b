"""Products with quantized matrices on a CPU: against float64, and the same bits in any company."""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllama.functional import DecodeMatrix
from jllama.kernels import quantized
from jllama.kernels.linear import KERNELS

ROWS = (1, 2, 4, 5, 8, 9, 13, 40)


def stored(kind, outputs, inputs, seed=0):
    """Random bytes of a format, and the weights that they stand for in float64.

    GGML's K types have no writer in Python: their bytes are drawn, and their halves set.
    """
    draws = np.random.default_rng(seed)
    if kind == "int8":
        values = draws.integers(-127, 128, (outputs, inputs), dtype=np.int8)
        return values, values.astype(np.float64)
    type_ = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    rows = draws.integers(0, 256, (outputs, inputs // block, block_bytes), dtype=np.uint8)
    halves = np.exp(draws.uniform(-12, 3, (outputs, inputs // block, 2)))  # subnormal ones, too
    halves = halves.astype(np.float16).view(np.uint8)
    places = {"Q8_0": slice(2), "Q4_0": slice(2), "Q4_K": slice(4), "Q6_K": slice(208, 210)}
    rows[..., places[kind]] = halves.reshape(*rows.shape[:2], 4)[
        ..., : len(range(*places[kind].indices(block_bytes)))
    ]
    rows = rows.reshape(outputs, -1)
    return rows, gguf.dequantize(rows, type_).astype(np.float64)


def drawn(rows, inputs, seed=1):
    """Rows of x of very different sizes, with outliers."""
    draws = np.random.default_rng(seed)
    x = draws.standard_normal((rows, inputs)) * np.exp(draws.uniform(-9, 9, (rows, 1)))
    x[:, draws.integers(inputs)] *= 300
    return x.astype(np.float32)


def product(kind, x, weights):
    return np.asarray(jax.jit(quantized.product, static_argnums=0)(kind, x, weights))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 512), (64, 768), (1, 256)])
def test_the_error_is_that_of_rounding_x(kind, outputs, inputs):
    """Half a unit of 16 bits in each group of 256, and little more."""
    weights, expected = stored(kind, outputs, inputs)
    x = drawn(max(ROWS), inputs)
    actual = product(kind, x, weights)
    groups = np.abs(x.astype(np.float64)).reshape(len(x), -1, 256)
    half_units = (groups.max(axis=2) / 32767 / 2).repeat(256, axis=1)
    limit = half_units @ np.abs(expected).T
    limit += 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(expected).T)
    assert (np.abs(actual - x.astype(np.float64) @ expected.T) <= limit).all()


def test_x_is_rounded_as_numpy_does():
    """Bit by bit, in whole groups and in one that is not: the weights are the identity's."""
    inputs = 288
    x = drawn(11, inputs)
    x[0] = np.arange(inputs) % 64 + 0.5  # halves between two integers
    x[0, [0, 256]] = -32767
    x[1, [3, 270]] = -np.finfo(np.float32).max
    x[2] *= np.float32(1e-31) / np.abs(x[2]).max()
    x[3] *= np.float32(2e-30) / np.abs(x[3]).max()
    x[4, 256:] = np.float32(-1e-42)
    x[5, 256:] = -0.0
    x[6, 280] = -np.nan
    x[7, [5, 280]] = -np.inf
    x[8, [5, 6]] = np.inf, np.nan
    expected = []
    for group in (x[:, :256], x[:, 256:]):
        largest = np.abs(group).max(axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            inverse = np.where(largest > 1e-30, np.float32(32767) / largest, np.float32(0))
            expected.append(np.rint(group * inverse) * (largest * np.float32(1 / 32767)))
    expected = np.concatenate(expected, axis=1)
    expected[6:9] = np.nan  # a sum has all of a row
    identity = np.eye(inputs, dtype=np.int8)
    assert np.array_equal(product("int8", x, identity), expected, equal_nan=True)
    assert product("int8", x[:0], identity).shape == (0, inputs)
    narrow = jnp.asarray(x[9:], jnp.bfloat16)
    wide = np.asarray(narrow.astype(jnp.float32))
    assert np.array_equal(product("int8", narrow, identity), product("int8", wide, identity))


@pytest.mark.parametrize("kind", KERNELS)
def test_a_row_has_the_same_bits_in_any_company(kind):
    """Alone, among others, and in another place."""
    weights, _ = stored(kind, 50, 512)
    x = drawn(max(ROWS), 512)
    whole = product(kind, x, weights)
    for rows in ROWS:
        assert np.array_equal(product(kind, x[:rows], weights), whole[:rows])
        assert np.array_equal(product(kind, x[-rows:], weights), whole[-rows:])


@pytest.mark.parametrize("kind", KERNELS)
def test_parts_that_threads_compute_side_by_side_are_the_whole(kind):
    """Many parts beside one for each few outputs; from several of Python's threads at once, too."""
    weights, _ = stored(kind, 3001, 512)
    x = drawn(6, 512)
    pieces = [product(kind, x, weights[first : first + 60]) for first in range(0, 3001, 60)]
    expected = np.concatenate(pieces, axis=1)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for actual in threads.map(lambda _: product(kind, x, weights), range(100)):
            assert np.array_equal(actual, expected)


IN_A_PROCESS = """
import hashlib, sys
import test_quantized as tests
weights, _ = tests.stored("Q8_0", 3001, 512)
answer = tests.product("Q8_0", tests.drawn(6, 512), weights)
print(hashlib.sha256(answer.tobytes()).hexdigest())
"""


def test_the_number_of_threads_changes_no_bits():
    """XLA has as many as NPROC says."""
    found = set()
    for threads in ("1", "4"):
        environment = {**os.environ, "NPROC": threads, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", IN_A_PROCESS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["int8", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("inputs", [32, 96, 288])
def test_a_row_may_end_within_a_group(kind, inputs):
    weights, expected = stored(kind, 9, inputs)
    x = drawn(10, inputs)
    actual = product(kind, x, weights)
    largest = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    limit = largest / 32767 * np.abs(expected).sum(axis=1)
    assert (np.abs(actual - x.astype(np.float64) @ expected.T) <= limit).all()


@pytest.mark.parametrize("kind", KERNELS[1:])
def test_weights_are_unpacked_as_ggml_does(kind):
    weights, expected = stored(kind, 6, 512)
    actual = quantized.unpack(kind, jnp.asarray(weights).reshape(2, 3, -1))
    # The package multiplies Q6_K's two scales first.
    rounding = 1e-7 * np.abs(expected) if kind == "Q6_K" else 0
    assert (np.abs(np.asarray(actual).reshape(6, -1) - expected) <= rounding).all()


@pytest.mark.parametrize("kind", KERNELS)
def test_zeros_give_zeros_and_what_is_no_number_is_none(kind):
    weights, _ = stored(kind, 7, 256)
    x = np.zeros((6, 256), np.float32)
    x[1, 5] = np.nan
    x[2, 200] = np.inf
    actual = product(kind, x, weights)
    assert not actual[[0, 3, 4, 5]].any()
    assert not np.isfinite(actual[1:3]).any()


def test_a_table_of_blocks_is_looked_up():
    weights, expected = stored("Q8_0", 12, 64)
    table = DecodeMatrix(jnp.asarray(weights), None, (12, 64), "Q8_0")
    assert table.dtype == np.float32
    rows = np.asarray(table[jnp.array([[3, 0], [11, 3]])])
    assert np.array_equal(rows, expected[[[3, 0], [11, 3]]].astype(np.float32))
    x = drawn(3, 64)
    assert np.array_equal(np.asarray(jnp.asarray(x) @ table.T), product("Q8_0", x, weights))


def test_it_notices_a_wrong_format():
    """Blocks that are read as those of another type, or one byte later, are far away."""
    weights, expected = stored("Q8_0", 8, 512)
    x = drawn(4, 512)
    right = x.astype(np.float64) @ expected.T
    shifted = np.roll(weights, 1, axis=1)
    difference = np.abs(product("Q8_0", x, shifted) - right)
    assert not (difference <= 0.1 * np.abs(right).max()).all()
