"""How a training step is split over a mesh: each device has rows of a batch and parts of the
weights.

What is exchanged along ``data``, ``fsdp`` and ``sequence`` is written out here; along ``tensor``
XLA sees to it. On one device nothing is exchanged.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from jllama.functional.linear import AdaptedMatrix
from jllama.lora import dense
from jllama.parameters import Params, map_by_path, parameter_table, shape_of
from jllama.sharding import BATCH, gather, gather_stages, row_spec, ruleset
from jllama.training.config import TrainConfig

BY_HAND = ("data", "fsdp", "sequence")
"""Mesh axes whose exchanges are written out."""


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """The exchanges of a step; what gathers or sums is called on each device, within the step."""

    config: TrainConfig
    mesh: Mesh
    dtype: Any  # of products

    def spec(self, path: str) -> tuple[Any, ...]:
        """The mesh axes that a parameter's axes are split over."""
        model = self.config.model
        return tuple(
            row_spec(self.mesh, parameter_table(model)[path], model, ruleset(self.config.mesh))
        )

    def weight_specs(self) -> Params:
        """How each parameter is split along ``fsdp``."""
        specs = {}
        for path in parameter_table(self.config.model):
            by_fsdp = [name if name == "fsdp" else None for name in self.spec(path)]
            specs[path] = PartitionSpec(*(by_fsdp if "fsdp" in by_fsdp else ()))
        return unflatten_dict(specs, sep="/")

    def batch_spec(self, part: Array) -> PartitionSpec:
        """How a batch's array is split: ``[rows, seq]`` by rows and tokens, ``[rows]`` by rows."""
        return PartitionSpec(BATCH[0], "sequence") if part.ndim > 1 else BATCH

    def positions(self, inputs: Int[Array, "rows seq"]) -> Int[Array, "1 seq"]:
        """Where this device's tokens stand in their rows."""
        return (jax.lax.axis_index("sequence") * inputs.shape[1] + jnp.arange(inputs.shape[1]))[
            None
        ]

    def gather(self, path: str, part: Any, gradient: Any) -> Any:
        """A whole parameter, or one layer's share of it, for the products, from all devices that
        hold some.

        Its own gradient goes to ``gradient``, zeros like the part, unless that is None.
        """
        if isinstance(part, AdaptedMatrix):
            others = {
                name: leaf.astype(self.dtype)
                for name, leaf in vars(part).items()
                if isinstance(leaf, Array)
            }
            return dataclasses.replace(
                part, **{**others, "base": self.gather(path, part.base, None)}
            )
        if not isinstance(part, Array):
            shape = shape_of(parameter_table(self.config.model)[path], self.config.model)
            return dense(part, shape[1:], self.dtype)
        spec = self.spec(path)[-part.ndim :]
        axis = spec.index("fsdp") if "fsdp" in spec else None
        return gather(part, gradient, axis, self.dtype, gather_stages(self.mesh))

    def gather_layer(self, weights: Params, gradients: Params) -> Params:
        """One layer's whole weights."""
        return {
            name: self.gather(f"layers/{name}", part, gradients.get(name))
            for name, part in weights.items()
        }

    def sum_gradients(self, gradients: Params) -> Params:
        """Sums over all devices, in ``reduce_dtype``; those that ``gather`` has summed stay where
        their parts are.
        """

        def summed(path: str, leaf: Array) -> Array:
            is_summed = path in parameter_table(self.config.model) and "fsdp" in self.spec(path)
            axes = [
                name
                for name in BY_HAND
                if self.mesh.shape[name] > 1 and not (is_summed and name == "fsdp")
            ]
            return (
                jax.lax.psum(leaf.astype(self.config.training.reduce_dtype), axes) if axes else leaf
            )

        return map_by_path(summed, gradients)

    def sum(self, figures: Any) -> Any:
        """Sums over all devices."""
        return jax.lax.psum(figures, BY_HAND)
