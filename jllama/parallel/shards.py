"""Arrays that are split over a mesh: rows and caches of decoding, and attention over them."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jllama import functional as F

AnyMesh = Mesh | AbstractMesh
AXES = ("data", "fsdp", "expert", "sequence", "tensor")
BATCH = PartitionSpec(("data", "fsdp", "expert"))
"""How the rows of a batch are split."""


def row_ways(sizes: Mapping[str, int]) -> int:
    """Return how many ways the rows of a batch are split, by the sizes of a mesh."""
    return math.prod(sizes[name] for name in BATCH[0])


def batch_shardings(mesh: AnyMesh, tree: Any) -> Any:
    """Return the sharding of every array of a decoding batch.

    Arrays are ``[rows, ...]``, or ``[rows, kv_heads, seq, head_dim]`` in a cache. Rows are split
    over the axes of ``BATCH``, unless a ``shard_map`` does that, and heads over ``tensor``, where
    they divide.
    """
    by_hand = jax.sharding.get_abstract_mesh().manual_axes
    names = tuple(name for name in BATCH[0] if mesh.shape[name] > 1 and name not in by_hand)
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _batch_spec(mesh, names, leaf)), tree)


def _batch_spec(mesh: AnyMesh, names: tuple[str, ...], leaf: Any) -> PartitionSpec:
    """Return how an array of a decoding batch is split, with its rows over some mesh axes."""
    ways = math.prod(mesh.shape[name] for name in names)
    rows = names if names and leaf.shape[0] % ways == 0 else None
    tensor = mesh.shape["tensor"]
    if leaf.ndim == 4 and tensor > 1 and leaf.shape[1] % tensor == 0:
        return PartitionSpec(rows, "tensor")
    return PartitionSpec(rows) if rows else PartitionSpec()


def map_shards(mesh: AnyMesh | None, function: Callable[..., Array], *arrays: Any) -> Array:
    """Apply a function to each device's rows and heads; the result is split like ``arrays[0]``."""
    if mesh is None:
        return function(*arrays)
    outer = jax.sharding.get_abstract_mesh()
    specs = jax.tree.map(lambda sharding: sharding.spec, batch_shardings(mesh, arrays))
    local = jax.shard_map(
        function,
        mesh=mesh if outer.empty else outer,
        in_specs=specs,
        out_specs=specs[0],
        axis_names={*AXES} - {*outer.manual_axes},
        check_vma=False,
    )
    return local(*arrays)


def sharded_attention(
    mesh: AnyMesh,
    query: Array,
    key: Array,
    value: Array,
    mask: F.Mask,
    implementation: str = "auto",
) -> Array:
    """Compute ``functional.attention`` of this device's queries.

    Keys and values are gathered over ``sequence``; heads are split over ``tensor``. If there are
    fewer key-value heads than ``tensor``, they are replicated, and each device takes those of its
    queries.
    """
    if mesh.size == 1:  # an exchange with nobody would still copy
        return F.attention(query, key, value, mask, implementation)
    if mesh.shape["sequence"] > 1 and "sequence" in jax.sharding.get_abstract_mesh().manual_axes:
        whole = functools.partial(jax.lax.all_gather, axis_name="sequence", tiled=True)
        key = whole(key, axis=2)
        value = whole(value, axis=2)
        segments = None if mask.key_segments is None else whole(mask.key_segments, axis=1)
        offset = jnp.reshape(jax.lax.axis_index("sequence") * query.shape[2], 1).astype(jnp.int32)
        mask = F.Mask(offset, mask.query_segments, segments, window=mask.window)
    group_size = query.shape[1] // key.shape[1]
    divides = key.shape[1] % mesh.shape["tensor"] == 0

    def local(query: Array, key: Array, value: Array, mask: F.Mask) -> Array:
        if not divides:
            first = jax.lax.axis_index("tensor") * query.shape[1] // group_size
            key = jax.lax.dynamic_slice_in_dim(key, first, 1, axis=1)
            value = jax.lax.dynamic_slice_in_dim(value, first, 1, axis=1)
        return F.attention(query, key, value, mask, implementation)

    return map_shards(mesh, local, query, key, value, mask)


def spread_experts(
    mix: Callable[..., Array], x: Array, weights: Array, chosen: Array, *matrices: Array
) -> Array:
    """Compute ``ops.mix_experts`` where each device of ``expert`` has some of the experts.

    All tokens visit all devices, and each adds what its experts say. To send a token to those of
    its experts alone would move less, if they are few, but how much depends on the choice: arrays
    of fixed size would have to drop tokens, or be as large as these.
    """
    whole = functools.partial(jax.lax.all_gather, axis_name="expert", tiled=True)
    first = jax.lax.axis_index("expert") * matrices[0].shape[0]
    mixed = mix(whole(x), whole(weights), whole(chosen) - first, *matrices)
    return jax.lax.psum_scatter(mixed, "expert", tiled=True)
