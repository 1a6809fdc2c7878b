"""One mesh of the devices, and which axis of which array is split over which axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jllama.config import LlamaConfig, MeshConfig
from jllama.errors import UsageError
from jllama.parameters import parameter_table, shape_of

RULES: dict[str, str] = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "fsdp"}
"""Mesh axis that splits each logical axis of a parameter; those not named are whole on every device."""

BATCH = PartitionSpec(("data", "fsdp"))
"""How the rows of a batch are split."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices (of every process) or those given, with axes ``data``, ``fsdp`` and ``tensor``.

    Sizes that do not multiply to the number of devices raise ``UsageError``.
    """
    devices = jax.devices() if devices is None else devices
    data = config.data or max(1, len(devices) // (config.fsdp * config.tensor))
    shape = (data, config.fsdp, config.tensor)
    if math.prod(shape) != len(devices):
        sizes = f"data={data} x fsdp={config.fsdp} x tensor={config.tensor}"
        raise UsageError(f"the mesh {sizes} needs {math.prod(shape)} devices, but there are {len(devices)}")
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)


def axes_sharding(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> NamedSharding:
    """The split over the mesh, by ``RULES``, of an array with these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*map(RULES.get, axes)))


def check_divides(mesh: Mesh | AbstractMesh, config: LlamaConfig) -> None:
    """Raise ``UsageError`` if an axis of a parameter does not divide over its mesh axis."""
    for path, row in parameter_table(config).items():
        for axis, size in zip(row.axes, shape_of(row, config), strict=True):
            ways = mesh.shape[RULES[axis]] if axis in RULES else 1
            if size % ways:
                raise UsageError(f"the {axis} axis of {path} has size {size}, which does not divide {ways} ways")


def state_sharding(mesh: Mesh | AbstractMesh, config: LlamaConfig, state: Any) -> Any:
    """The sharding of every leaf of a training state (arrays or their shapes).

    A leaf whose path ends in a parameter's path and that has its shape (the parameter itself, its moments in an
    optimizer) is split like that parameter; everything else is whole on every device. An axis that does not divide over
    its mesh axis raises ``UsageError``.
    """
    check_divides(mesh, config)
    table = parameter_table(config)

    def sharding(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        path = "/" + jax.tree_util.keystr(key_path, simple=True, separator="/")
        rows = (row for name, row in table.items() if path.endswith(f"/{name}") and shape_of(row, config) == leaf.shape)
        return next((axes_sharding(mesh, row.axes) for row in rows), NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, state)
