"""One mesh of the devices, which axis of which array is split over which axis of the mesh, and what devices exchange.

Rows of a batch are split over ``data`` and ``fsdp``, tokens of a row over ``sequence``: a training step exchanges those
by hand, inside ``jax.shard_map``. Heads, feed-forward width and vocabulary are split over ``tensor``, where XLA finds
the exchanges. Sources: Rajbhandari et al. 2020 (arXiv:1910.02054), stage 3; Shoeybi et al. 2019 (arXiv:1909.08053).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jllama import functional as F
from jllama.config import LlamaConfig, MeshConfig
from jllama.errors import UsageError, unknown_name
from jllama.parameters import Parameter, axis_sizes, parameter_table, shape_of

AXES = ("data", "fsdp", "sequence", "tensor")
RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor", "fsdp"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor", "fsdp"),
    "embed": ("fsdp",),
}
"""Mesh axes that may split each logical axis of a matrix: the first that has devices, divides it and is still free.

``mesh.rules`` of a configuration replaces some. Scales of norms, and axes that are not named, are whole everywhere.
"""

BATCH = PartitionSpec(("data", "fsdp"))
"""How the rows of a batch are split."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices (of every process) or those given, with ``AXES``; one of its sizes may be -1.

    Sizes that do not multiply to the number of devices raise ``UsageError``.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {name: getattr(config, name) for name in AXES}
    given = math.prod(size for size in sizes.values() if size > 0)
    sizes = {
        name: size if size > 0 else max(1, len(devices) // given) for name, size in sizes.items()
    }
    if math.prod(sizes.values()) != len(devices):
        said = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise UsageError(
            f"the mesh {said} needs {math.prod(sizes.values())} devices, but there are {len(devices)}"
        )
    kinds, shape = (AxisType.Auto,) * len(AXES), tuple(sizes.values())
    try:
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # an axis of the mesh takes a part of a side of the torus
        return Mesh(
            create_device_mesh(shape, devices, allow_split_physical_axes=True),
            AXES,
            axis_types=kinds,
        )


def ruleset(config: MeshConfig) -> Mapping[str, Sequence[str]]:
    """``RULES`` with those of a configuration in their place; ``UsageError`` for an axis that there is not."""
    for axis, names in config.rules.items():
        if axis not in RULES:
            raise unknown_name("logical axis", axis, RULES)
        if unknown := {*names} - {"fsdp", "tensor"}:
            raise unknown_name("mesh axis for parameters", min(unknown), ("fsdp", "tensor"))
    return RULES | config.rules


def row_spec(
    mesh: Mesh | AbstractMesh, row: Parameter, config: LlamaConfig, rules: Any = RULES
) -> PartitionSpec:
    """How a parameter is split in the layout for training: by the rules, as far as sizes divide."""
    names: list[str | None] = []
    for axis, size in axis_sizes(row, config).items() if row.inputs else ():
        fitting = (
            n
            for n in rules.get(axis, ())
            if mesh.shape[n] > 1 and n not in names and size % mesh.shape[n] == 0
        )
        names.append(next(fitting, None))
    return PartitionSpec(*names)


def matrix_sharding(mesh: Mesh, row: Parameter, config: LlamaConfig) -> NamedSharding:
    """The split of one layer's share of a parameter as ``[outputs, inputs]``: by the first axis of each alone."""
    by_axis = dict(zip(row.axes, row_spec(mesh, row, config), strict=bool(row.inputs)))
    return NamedSharding(
        mesh, PartitionSpec(*(by_axis[axes[0]] for axes in (row.outputs, row.inputs) if by_axis))
    )


def check_divides(mesh: Mesh | AbstractMesh, config: LlamaConfig, rules: Any = RULES) -> None:
    """Raise ``UsageError`` if heads, width or vocabulary do not divide over ``tensor``, or a matrix over ``fsdp``."""
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for path, row in parameter_table(config).items():
        sizes = axis_sizes(row, config)
        for axis, size in sizes.items():
            fits = size % tensor == 0 or (axis == "kv_heads" and tensor % size == 0)
            if (axis in ("heads", "kv_heads") or "tensor" in rules.get(axis, ())) and not fits:
                nearest = max(ways for ways in range(1, tensor + 1) if size % ways == 0)
                said = f"the {axis} axis of {path} has size {size}, which does not divide {tensor} ways"
                raise UsageError(f"{said}: the nearest mesh.tensor that does is {nearest}")
        split = [
            size for axis, size in sizes.items() if row.inputs and "fsdp" in rules.get(axis, ())
        ]
        if split and fsdp > 1 and "fsdp" not in row_spec(mesh, row, config, rules):
            nearest = max(
                ways for ways in range(1, fsdp + 1) if any(size % ways == 0 for size in split)
            )
            said = f"no axis of {path}, of sizes {split}, divides {fsdp} ways"
            raise UsageError(f"{said}: the nearest mesh.fsdp that one does is {nearest}")


def state_sharding(
    mesh: Mesh | AbstractMesh, config: LlamaConfig, state: Any, rules: Any = RULES
) -> Any:
    """The sharding of every leaf of a training state (arrays or their shapes).

    A leaf whose path ends in a parameter's path and that has its shape (the parameter itself, its moments in an
    optimizer; of all layers or of some) is split like it; everything else is whole on every device. ``UsageError`` as
    ``check_divides``.
    """
    check_divides(mesh, config, rules)
    table = parameter_table(config)

    def sharding(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        path = "/" + jax.tree_util.keystr(key_path, simple=True, separator="/")
        for name, row in table.items():
            shape = shape_of(row, config)
            first = 1 if name.startswith("layers/") and leaf.ndim == len(shape) else 0
            if path.endswith(f"/{name}") and shape[first:] == leaf.shape[first:]:
                return NamedSharding(mesh, row_spec(mesh, row, config, rules))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch_shardings(mesh: Mesh | AbstractMesh, tree: Any) -> Any:
    """The sharding of every array of a decoding batch, ``[rows, ...]`` or a cache's ``[rows, kv_heads, ...]`` of four
    axes: rows over ``data`` and ``fsdp``, unless those are by hand, and heads over ``tensor``, where they divide.
    """
    by_hand = jax.sharding.get_abstract_mesh().manual_axes
    names = tuple(name for name in BATCH[0] if mesh.shape[name] > 1 and name not in by_hand)
    ways, tensor = math.prod(mesh.shape[name] for name in names), mesh.shape["tensor"]

    def sharding(leaf: Any) -> NamedSharding:
        rows = names if names and leaf.shape[0] % ways == 0 else None
        heads = ["tensor"] * (leaf.ndim == 4 and tensor > 1 and leaf.shape[1] % tensor == 0)
        return NamedSharding(mesh, PartitionSpec(*([rows, *heads] if rows or heads else [])))

    return jax.tree.map(sharding, tree)


def spread(mesh: Mesh | AbstractMesh | None, function: Callable[..., Array], *arrays: Any) -> Array:
    """``function(*arrays)``, by each device for its rows and heads; the result is split as the first array is."""
    if mesh is None:
        return function(*arrays)
    outer, inputs = (
        jax.sharding.get_abstract_mesh(),
        jax.tree.map(lambda at: at.spec, batch_shardings(mesh, arrays)),
    )
    names, where = {*AXES} - {*outer.manual_axes}, mesh if outer.empty else outer
    local = jax.shard_map(
        function,
        mesh=where,
        in_specs=inputs,
        out_specs=inputs[0],
        axis_names=names,
        check_vma=False,
    )
    return local(*arrays)


def gather(part: Array, kept: Any, axis: int | None, dtype: Any, stages: Sequence[Any]) -> Array:
    """The whole weight, in ``dtype``, of its parts along ``axis`` on the devices of ``fsdp``.

    Its gradient is summed over those devices in the dtype of ``kept``, and each keeps its part: as the gradient of
    ``kept``, zeros of the part's shape, since that of ``part`` would have to have its dtype. ``stages`` as
    ``gather_stages`` gives them. With no ``axis`` the weight is whole already.
    """
    stages = stages if axis is not None else ()

    @jax.custom_vjp
    def whole(part: Array, kept: Any) -> Array:
        part = part.astype(dtype)
        for groups in stages:
            part = jax.lax.all_gather(
                part, "fsdp", axis=axis or 0, axis_index_groups=groups, tiled=True
            )
        return part

    def backward(_: None, gradient: Array) -> tuple[None, Array]:
        gradient = gradient.astype(kept.dtype)
        if (
            axis == 0 and stages
        ):  # of other shapes XLA makes an all-reduce on TPUs: of [4096, 32, 128], [4096, 128256]
            gradient = gradient.reshape(len(gradient), -1)
            gradient = jnp.pad(
                gradient,
                ((0, 0), (0, -gradient.shape[1] % 1024 if gradient.shape[1] > 2**16 else 0)),
            )
        for groups in reversed(stages):
            gradient = jax.lax.psum_scatter(
                gradient, "fsdp", scatter_dimension=axis or 0, axis_index_groups=groups, tiled=True
            )
        return None, gradient[:, : kept.size // len(kept)].reshape(
            kept.shape
        ) if axis == 0 else gradient

    whole.defvjp(lambda part, kept: (whole(part, kept), None), backward)
    return whole(part, kept)


def gather_stages(mesh: Mesh) -> list[list[list[int]] | None]:
    """In which groups of devices along ``fsdp`` to gather, one after the other; None is all at once.

    On a TPU's torus a gather over all of its dimensions compiles to an all-reduce of a copy padded with zeros, which
    moves twice the bytes; over one dimension and then the others it stays a gather.
    """
    places = [
        tuple(each.coords) if each.platform == "tpu" else () for each in mesh.devices[0, :, 0, 0]
    ]
    if (size := len(places)) == 1:
        return []
    moved = [
        [i for i, (one, two) in enumerate(zip(place, places[0], strict=True)) if one != two]
        for place in places
    ]
    inner = next((n for n in range(1, size) if len({*moved[n]} | {*moved[1]}) > 1), size)
    if not places[0] or inner == size or size % inner or inner == 1:
        return [None]
    index = np.arange(size).reshape(-1, inner)
    return [index.tolist(), index.T.tolist()]


def spread_attention(
    mesh: Mesh | AbstractMesh,
    query: Array,
    key: Array,
    value: Array,
    mask: F.Mask,
    implementation: str = "auto",
) -> Array:
    """``functional.attention`` of this device's queries: keys of all of ``sequence``, heads split over ``tensor``.

    Key-value heads that are fewer than ``tensor`` are whole everywhere, and each device takes those of its queries.
    """
    if mesh.size == 1:  # an exchange with nobody would still copy
        return F.attention(query, key, value, mask, implementation)
    if mesh.shape["sequence"] > 1 and "sequence" in jax.sharding.get_abstract_mesh().manual_axes:
        whole = functools.partial(jax.lax.all_gather, axis_name="sequence", tiled=True)
        key, value = whole(key, axis=2), whole(value, axis=2)
        segments = None if mask.key_segments is None else whole(mask.key_segments, axis=1)
        offset = jnp.reshape(jax.lax.axis_index("sequence") * query.shape[2], 1).astype(jnp.int32)
        mask = F.Mask(offset, mask.query_segments, segments)
    groups, divides = query.shape[1] // key.shape[1], key.shape[1] % mesh.shape["tensor"] == 0

    def local(query: Array, key: Array, value: Array, mask: F.Mask) -> Array:
        if not divides:
            first = jax.lax.axis_index("tensor") * query.shape[1] // groups
            key, value = (
                jax.lax.dynamic_slice_in_dim(each, first, 1, axis=1) for each in (key, value)
            )
        return F.attention(query, key, value, mask, implementation)

    return spread(mesh, local, query, key, value, mask)
