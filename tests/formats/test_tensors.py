"""Tensors in the files' layout and back, by blocks, reordered, sliced over a mesh; what differs is
listed.
"""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import assert_same_bits, half_split_from_interleaved
from helpers_checkpoints import message, opened, small_configs
from hypothesis import given
from hypothesis import strategies as st

from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters, parameter_table
from jllama.formats import tensors
from jllama.formats.tensors import (
    LazyTensor,
    blocks,
    load_params,
    match_tensors,
    permuted,
    size_bytes,
    tensor_specs,
)
from jllama.kernels.int8 import int8_rows
from jllama.lab.checks import random_params

CONFIG = LlamaConfig(
    vocab_size=11, num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=12
)


@given(small_configs(), st.integers(0, 3))
def test_parameters_come_back_from_the_files_layout(config, seed):
    params = random_params(config, seed)
    checkpoint = opened(config, params)
    assert_same_bits(load_params(checkpoint), params)
    assert size_bytes(checkpoint, None) == 4 * count_parameters(config)
    assert size_bytes(checkpoint, jnp.bfloat16) == 2 * count_parameters(config)
    for stored in tensor_specs(config):
        assert tuple(checkpoint.tensors[stored.key].shape) == stored.shape


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_reordering_is_the_rotary_permutation_of_each_head(heads, half, inputs, data):
    head_dim = 2 * half
    matrix = np.arange(heads * head_dim * inputs, dtype=np.float32).reshape(-1, inputs)
    rows = st.integers(0, heads * head_dim)
    start, stop = sorted((data.draw(rows), data.draw(rows)))
    by_head = np.moveaxis(matrix.reshape(heads, head_dim, inputs), 1, -1)
    expected = np.moveaxis(half_split_from_interleaved(by_head), -1, 1).reshape(matrix.shape)
    split = permuted(matrix, head_dim, to_half_split=True)
    np.testing.assert_array_equal(split[start:stop], expected[start:stop])
    np.testing.assert_array_equal(
        permuted(split, head_dim, to_half_split=False)[start:stop], matrix[start:stop]
    )


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 600), st.booleans())
def test_blocks_are_the_rows_in_order(rows, inputs, block_bytes, flat):
    shape = (rows,) if flat else (rows, inputs)
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    if rows == inputs:
        matrix = matrix.T  # not contiguous
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "BLOCK_BYTES", block_bytes)
        pieces = list(blocks(matrix, jnp.bfloat16))
    assert np.concatenate(pieces).tobytes() == matrix.astype(jnp.bfloat16).tobytes()
    row_bytes = matrix.nbytes // rows
    for piece in pieces:
        assert piece.flags.c_contiguous
        assert piece.shape[0] * row_bytes <= max(block_bytes, row_bytes)


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_a_part_is_read_and_no_more(monkeypatch, rows_at_once):
    """As a device gets its slice: some rows and columns; for int8 by the scale of whole rows."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 50)
    matrix = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
    read = []

    def rows_of(rows):
        read.extend(range(12)[rows])
        return matrix[rows]

    lazy = LazyTensor(matrix.shape, matrix.dtype, rows_of, rows_at_once)
    rows, columns = slice(3, 10), slice(1, 4)
    out, integers = np.empty((7, 3), np.float32), np.empty((7, 3), np.int8)
    float64 = np.dtype(np.float64)
    done = []
    ones = tensors._read_part(lazy, [rows, columns], out, out.dtype, done.append)
    scale = tensors._read_part(lazy, [rows, columns], integers, float64, lambda _: None)
    assert read == 2 * [*range(3, 10)]
    assert sum(done) == out.nbytes
    np.testing.assert_array_equal(out, matrix[rows, columns])
    whole, scales = int8_rows(matrix.astype(np.float64), np)
    np.testing.assert_array_equal(integers, whole[rows, columns])
    np.testing.assert_array_equal(scale, scales[rows])
    np.testing.assert_array_equal(ones, np.ones(7))


def test_any_half_of_a_parameter_is_read():
    """By layers or by the first axis of its outputs or inputs, as over the devices of a mesh."""
    params = flatten_dict(random_params(CONFIG, 0), sep="/")
    checkpoint = opened(CONFIG, unflatten_dict(params, sep="/"))
    for path, row in parameter_table(CONFIG).items():
        for name in {"layers", *row.outputs[:1], *row.inputs[:1]} & {*row.axes}:
            axis, shape = row.axes.index(name), params[path].shape
            slices = [slice(0, size) for size in shape]
            slices[axis] = slice(shape[axis] // 2, shape[axis])
            expected = params[path][tuple(slices)]
            out = np.empty_like(expected)
            tensors._fill_stack(path, checkpoint, lambda _: None, slices, out)
            np.testing.assert_array_equal(out, expected)


def test_every_difference_is_listed(tmp_path):
    names = {stored.name("huggingface"): stored for stored in tensor_specs(CONFIG)}
    found = {name: np.zeros(stored.shape, np.float32) for name, stored in names.items()}
    assert set(match_tensors(found, CONFIG, "huggingface", tmp_path)) == {
        stored.key for stored in tensor_specs(CONFIG)
    }
    del found["lm_head.weight"], found["model.layers.1.mlp.up_proj.weight"]
    found["model.layers.2.mlp.up_proj.weight"] = np.zeros(1)
    found["model.norm.weight"] = np.zeros(9)
    assert message(match_tensors, found, CONFIG, "huggingface", tmp_path) == (
        f"{tmp_path} does not hold the model that its configuration describes: "
        "model.layers.1.mlp.up_proj.weight is absent, expected [12, 8]; "
        "model.norm.weight is [9], expected [8]; lm_head.weight is absent, "
        "expected [11, 8]; model.layers.2.mlp.up_proj.weight is [1], expected none"
    )


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jllama.formats.tensors import Checkpoint, TensorsOfParams, load_decode_params, load_params
from jllama.core.config import LlamaConfig
from jllama.models.decode_params import decode_layout
from jllama.parallel.sharding import MeshConfig, make_mesh, state_sharding
from jllama.lab.checks import random_params

config = LlamaConfig(
    vocab_size=12, num_layers=3, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=20
)
params = random_params(config, 0)
checkpoint = Checkpoint(config, TensorsOfParams(config, params))
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
loaded = load_params(checkpoint, mesh=mesh)
trees = loaded, params, state_sharding(mesh, config, params)
for array, expected, sharding in zip(*map(jax.tree.leaves, trees), strict=True):
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
for quantize in (None, "int8"):
    loaded = load_decode_params(checkpoint, mesh=mesh, quantize=quantize)
    trees = loaded, decode_layout(jax.tree.map(jnp.asarray, params), config, quantize, joins=False)
    for array, expected in zip(*map(jax.tree.leaves, trees), strict=True):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    layer = loaded.weights["layers"]["2"]
    specs = {name: leaf.values.sharding.spec for name, leaf in layer.items() if "w" in name}
    assert specs["wq"] == specs["w_up"] == jax.P("tensor", "fsdp")
    assert specs["wo"] == specs["w_down"] == jax.P("fsdp", "tensor")
print("done")
"""


@pytest.mark.slow
def test_each_device_gets_its_slice(request):
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PATH": ""},
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stderr
