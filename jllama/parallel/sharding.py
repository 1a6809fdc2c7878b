"""The mesh of devices, how arrays are split over its axes, and what devices exchange.

Rows of a batch are split over ``data``, ``fsdp`` and ``expert``, tokens of a row over
``sequence``: a training step exchanges those by hand, inside ``jax.shard_map``. Heads, feed-forward
width and vocabulary are split over ``tensor``, where XLA inserts the exchanges. Sources:
Rajbhandari et al. 2020 (arXiv:1910.02054), stage 3; Shoeybi et al. 2019 (arXiv:1909.08053).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import Parameter, axis_sizes, parameter_table, shape_of
from jllama.parallel.config import MeshConfig
from jllama.parallel.shards import AXES, AnyMesh
from jllama.system.errors import unknown_name

RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor", "fsdp"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor", "fsdp"),
    "experts": ("expert",),
    "expert_mlp": ("tensor", "fsdp"),
    "embed": ("fsdp",),
}
"""Mesh axes that may split each logical axis of a matrix.

The first one is taken that has several devices, divides the size and splits no other axis of the
matrix. ``mesh.rules`` of a configuration replaces entries. Scales of norms, and axes that are not
named, are replicated.
"""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh over devices, with the axes ``AXES``.

    Args:
        config: the size of each axis; one may be -1, for all remaining devices.
        devices: None: all devices of all processes.

    Raises:
        UsageError: the product of the sizes is not the number of devices.

    Examples:
        >>> import jax
        >>> dict(make_mesh(MeshConfig(), jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'expert': 1, 'sequence': 1, 'tensor': 1}
    """
    devices = jax.devices() if devices is None else devices
    sizes = {name: getattr(config, name) for name in AXES}
    num_fixed = math.prod(size for size in sizes.values() if size > 0)
    for name, size in sizes.items():
        if size < 0:
            sizes[name] = max(1, len(devices) // num_fixed)
    num_needed = math.prod(sizes.values())
    if num_needed != len(devices):
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise UsageError(
            f"the mesh {shown} needs {num_needed} devices, but there are {len(devices)}"
        )
    shape = tuple(sizes.values())
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except NotImplementedError:  # a mesh axis takes a part of a dimension of the TPU's torus
        array = create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(array, AXES, axis_types=types)


def ruleset(config: MeshConfig) -> Mapping[str, Sequence[str]]:
    """Return ``RULES`` with the entries that a configuration replaces.

    Raises:
        UsageError: an axis is unknown.
    """
    for axis, names in config.rules.items():
        if axis not in RULES:
            raise unknown_name("logical axis", axis, RULES)
        unknown = {*names} - {"fsdp", "tensor"}
        if unknown:
            raise unknown_name("mesh axis for parameters", min(unknown), ("fsdp", "tensor"))
    return RULES | config.rules


def row_spec(
    mesh: AnyMesh, row: Parameter, config: LlamaConfig, rules: Any = RULES
) -> PartitionSpec:
    """Return how a parameter is split in training: matrices by the rules, where sizes divide."""
    if not row.inputs:
        return PartitionSpec()
    names: list[str | None] = []
    for axis, size in axis_sizes(row, config).items():
        usable = (
            name
            for name in rules.get(axis, ())
            if mesh.shape[name] > 1 and name not in names and size % mesh.shape[name] == 0
        )
        names.append(next(usable, None))
    return PartitionSpec(*names)


def matrix_sharding(mesh: Mesh, row: Parameter, config: LlamaConfig) -> NamedSharding:
    """Return the sharding of one layer of a parameter as ``[outputs, inputs]``.

    Each of the two axes is split like the first split one of the axes that it flattens.
    """
    if not row.inputs:
        return NamedSharding(mesh, PartitionSpec())
    by_axis = dict(zip(row.axes, row_spec(mesh, row, config), strict=True))
    outputs = next((by_axis[axis] for axis in row.outputs if by_axis[axis]), None)
    return NamedSharding(mesh, PartitionSpec(outputs, by_axis[row.inputs[0]]))


def check_divides(mesh: AnyMesh, config: LlamaConfig, rules: Any = RULES) -> None:
    """Check that a model can be split over a mesh.

    Raises:
        UsageError: heads, width or vocabulary do not divide over ``tensor``, or no axis of a matrix
            divides over ``fsdp``.
    """
    tensor = mesh.shape["tensor"]
    fsdp = mesh.shape["fsdp"]
    if mesh.shape["expert"] > 1 and (config.num_experts or 1) % mesh.shape["expert"]:
        raise UsageError(
            f"mesh.expert is {mesh.shape['expert']}, which does not divide the model's "
            f"{config.num_experts} experts"
        )
    if mesh.shape["sequence"] > 1 and (config.attention_chunk or config.temperature_step):
        raise UsageError(
            "mesh.sequence is over 1, and a model with attention_chunk or temperature_step cannot "
            "be split along it: leave it out"
        )
    for path, row in parameter_table(config).items():
        sizes = axis_sizes(row, config)
        for axis, size in sizes.items():
            is_split = axis in ("heads", "kv_heads") or "tensor" in rules.get(axis, ())
            divides = size % tensor == 0 or (axis == "kv_heads" and tensor % size == 0)
            if is_split and not divides:
                nearest = _nearest_ways(tensor, [size])
                raise UsageError(
                    f"the {axis} axis of {path} has size {size}, which does not divide {tensor} "
                    f"ways: the nearest mesh.tensor that does is {nearest}"
                )
        fsdp_sizes = [size for axis, size in sizes.items() if "fsdp" in rules.get(axis, ())]
        needs_fsdp = fsdp > 1 and row.inputs and fsdp_sizes
        if needs_fsdp and "fsdp" not in row_spec(mesh, row, config, rules):
            nearest = _nearest_ways(fsdp, fsdp_sizes)
            raise UsageError(
                f"no axis of {path}, of sizes {fsdp_sizes}, divides {fsdp} ways: "
                f"the nearest mesh.fsdp that one does is {nearest}"
            )


def _nearest_ways(max_ways: int, sizes: Sequence[int]) -> int:
    """Return the largest number up to ``max_ways`` that divides one of the sizes."""
    return max(n for n in range(1, max_ways + 1) if any(size % n == 0 for size in sizes))


def state_sharding(mesh: AnyMesh, config: LlamaConfig, state: Any, rules: Any = RULES) -> Any:
    """Return the sharding of every leaf of a training state (arrays or their shapes).

    A leaf whose path ends in a parameter's path and that has its shape, with all layers or some, is
    split like the parameter: the parameter itself and its moments in an optimizer. All other leaves
    are replicated.

    Raises:
        UsageError: as ``check_divides``.
    """
    check_divides(mesh, config, rules)
    table = parameter_table(config)

    def sharding(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        path = "/" + jax.tree_util.keystr(key_path, simple=True, separator="/")
        for name, row in table.items():
            shape = shape_of(row, config)
            is_stacked = name.startswith("layers/") and leaf.ndim == len(shape)
            first = 1 if is_stacked else 0
            if path.endswith(f"/{name}") and shape[first:] == leaf.shape[first:]:
                return NamedSharding(mesh, row_spec(mesh, row, config, rules))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)


def gather_weight(
    part: Array, receiver: Any, axis: int | None, dtype: Any, stages: Sequence[Any]
) -> Array:
    """Return the whole weight from its parts on the devices of ``fsdp``.

    Its gradient is summed over those devices, and each device keeps its part as the gradient of
    ``receiver``: that of ``part`` would have to have the dtype of ``part``.

    Args:
        part: this device's part of the weight.
        receiver: zeros of the part's shape, in the dtype in which gradients are summed.
        axis: the axis that is split; None: the weight is whole already.
        dtype: the dtype of the result.
        stages: as ``gather_groups`` returns them.
    """
    stages = stages if axis is not None else ()

    @jax.custom_vjp
    def whole(part: Array, receiver: Any) -> Array:
        part = part.astype(dtype)
        for groups in stages:
            part = jax.lax.all_gather(
                part, "fsdp", axis=axis or 0, axis_index_groups=groups, tiled=True
            )
        return part

    whole.defvjp(
        lambda part, receiver: (whole(part, receiver), None),
        lambda _, gradient: (None, _scatter(gradient, receiver, axis, stages)),
    )
    return whole(part, receiver)


def _scatter(gradient: Array, receiver: Any, axis: int | None, stages: Sequence[Any]) -> Array:
    """Return this device's part of the gradients' sum over ``fsdp``, in ``receiver``'s dtype."""
    gradient = gradient.astype(receiver.dtype)
    if axis == 0 and stages:
        # XLA makes an all-reduce of [4096, 32, 128] or [4096, 128256] on TPUs.
        gradient = gradient.reshape(len(gradient), -1)
        width = gradient.shape[1]
        padding = -width % 1024 if width > 2**16 else 0
        gradient = jnp.pad(gradient, ((0, 0), (0, padding)))
    for groups in reversed(stages):
        gradient = jax.lax.psum_scatter(
            gradient, "fsdp", scatter_dimension=axis or 0, axis_index_groups=groups, tiled=True
        )
    if axis != 0:
        return gradient
    return gradient[:, : receiver.size // len(receiver)].reshape(receiver.shape)


def gather_groups(mesh: Mesh) -> list[list[list[int]] | None]:
    """Return the groups along ``fsdp`` in which devices gather, by stage; None is all at once.

    On a TPU's torus a gather over all dimensions compiles to an all-reduce of a copy padded with
    zeros, which moves twice the bytes. Over one dimension and then the others it stays a gather.
    """
    devices = mesh.devices[0, :, 0, 0, 0]
    size = len(devices)
    if size == 1:
        return []
    if devices[0].platform != "tpu":
        return [None]
    # The first ``inner`` devices lie along one dimension: that in which the first two differ.
    moved = [
        {i for i, place in enumerate(device.coords) if place != devices[0].coords[i]}
        for device in devices
    ]
    inner = next((n for n in range(1, size) if len(moved[n] | moved[1]) > 1), size)
    if inner in (1, size) or size % inner:
        return [None]
    index = np.arange(size).reshape(-1, inner)
    return [index.tolist(), index.T.tolist()]
