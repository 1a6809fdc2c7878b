"""How a training step is split over a mesh of devices.

Each device has some rows of a batch and some parts of the weights.

Exchanges along ``data``, ``fsdp`` and ``sequence`` are written out here; XLA makes those along
``tensor``. On a single device nothing is exchanged.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from jllama.functional.linear import AdaptedMatrix
from jllama.lora import dequantize
from jllama.parameters import Params, map_by_path, parameter_table, shape_of
from jllama.sharding import BATCH, gather_groups, gather_weight, row_spec, ruleset
from jllama.training.config import TrainConfig

BY_HAND = ("data", "fsdp", "sequence")
"""Mesh axes whose exchanges are written out."""


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """The exchanges of a step; arrays are gathered and summed on each device, inside the step."""

    config: TrainConfig
    mesh: Mesh
    dtype: Any  # of products

    def spec(self, path: str) -> tuple[Any, ...]:
        """Return the mesh axes that a parameter's axes are split over."""
        model = self.config.model
        return tuple(
            row_spec(self.mesh, parameter_table(model)[path], model, ruleset(self.config.mesh))
        )

    def weight_specs(self) -> Params:
        """Return how each parameter is split along ``fsdp``."""
        specs = {}
        for path in parameter_table(self.config.model):
            axes = [name if name == "fsdp" else None for name in self.spec(path)]
            specs[path] = PartitionSpec(*axes) if "fsdp" in axes else PartitionSpec()
        return unflatten_dict(specs, sep="/")

    def batch_spec(self, part: Array) -> PartitionSpec:
        """Return how ``[rows, seq]`` is split, by rows and tokens, or ``[rows]``."""
        return PartitionSpec(BATCH[0], "sequence") if part.ndim > 1 else BATCH

    def positions(self, inputs: Int[Array, "rows seq"]) -> Int[Array, "1 seq"]:
        """Return the indices of this device's tokens in their rows."""
        length = inputs.shape[1]
        return (jax.lax.axis_index("sequence") * length + jnp.arange(length))[None]

    def gather(self, path: str, part: Any, slot: Any) -> Any:
        """Return a whole parameter, or one layer's share of it, in ``dtype``.

        Its gradient becomes that of ``slot``, zeros of the shape of ``part``, unless that is None.
        """
        model = self.config.model
        if isinstance(part, AdaptedMatrix):
            arrays = {
                name: leaf.astype(self.dtype)
                for name, leaf in vars(part).items()
                if isinstance(leaf, Array)
            }
            arrays["base"] = self.gather(path, part.base, None)
            return dataclasses.replace(part, **arrays)
        if not isinstance(part, Array):  # it is quantized
            return dequantize(part, shape_of(parameter_table(model)[path], model)[1:], self.dtype)
        spec = self.spec(path)[-part.ndim :]
        axis = spec.index("fsdp") if "fsdp" in spec else None
        return gather_weight(part, slot, axis, self.dtype, gather_groups(self.mesh))

    def gather_layer(self, weights: Params, slots: Params) -> Params:
        """Return one layer's whole weights."""
        return {
            name: self.gather(f"layers/{name}", part, slots.get(name))
            for name, part in weights.items()
        }

    def sum_gradients(self, gradients: Params) -> Params:
        """Sum over all devices in ``reduce_dtype``, except along ``fsdp``.

        Where ``gather_weight`` gathered a weight, its gradient is already summed along that axis.
        """

        def sum_one(path: str, leaf: Array) -> Array:
            axes = [name for name in BY_HAND if self.mesh.shape[name] > 1]
            if path in parameter_table(self.config.model) and "fsdp" in self.spec(path):
                axes.remove("fsdp")
            if not axes:
                return leaf
            return jax.lax.psum(leaf.astype(self.config.training.reduce_dtype), axes)

        return map_by_path(sum_one, gradients)
