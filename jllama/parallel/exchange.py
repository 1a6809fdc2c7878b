"""How a training step is split over a mesh of devices.

Each device has some rows of a batch and some parts of the weights.

Exchanges along ``data``, ``fsdp``, ``expert`` and ``sequence`` are written out here; XLA makes
those along ``tensor``. On a single device nothing is exchanged.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import Params, map_by_path, parameter_table, shape_of
from jllama.core.step import Exchanges, Outputs, Targets
from jllama.kernels.adapted import AdaptedExperts, AdaptedMatrix
from jllama.parallel.sharding import gather_groups, gather_weight, row_spec
from jllama.parallel.shards import BATCH

BY_HAND = ("data", "fsdp", "expert", "sequence")
"""Mesh axes whose exchanges are written out."""
_OF_WEIGHTS = ("fsdp", "expert")
"""Those that split weights."""


@dataclasses.dataclass(frozen=True)
class Parallelism(Exchanges):
    """The exchanges of a step; arrays are gathered and summed on each device, inside the step.

    Args:
        model: the architecture.
        mesh: the devices.
        rules: mesh axes that split logical axes, see ``RULES``.
        dtype: of products.
        reduce_dtype: the dtype that gradients are summed in.
        dequantize: makes an array of a shape and dtype from quantized weights.
        specs: the partition specs of the state's ``params`` and ``base``, and of gradients.
    """

    model: LlamaConfig
    mesh: Mesh
    rules: Mapping[str, Sequence[str]]
    dtype: Any
    reduce_dtype: Any
    dequantize: Callable[[Any, tuple[int, ...], Any], Array]
    specs: tuple[Any, Any, Any] = (None, None, None)

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered."""
        return bool(gather_groups(self.mesh))

    def map(self, function: Any, outputs: Outputs, *arguments: Any) -> Any:
        """Call ``function(params, base, targets)`` on each device with its parts."""
        targets: Targets = arguments[-1]
        has_answers = targets.reference is not None or targets.sampled is not None
        if has_answers and self.mesh.shape["sequence"] > 1:
            raise UsageError(
                "mesh.sequence is over 1, and answers cannot be split along it: leave it out"
            )
        params_specs, base_specs, gradient_specs = self.specs
        specs = {
            "sums": PartitionSpec(),
            "gradients": (PartitionSpec(), gradient_specs),
            "rows": BATCH,
        }
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(params_specs, base_specs, jax.tree.map(self.batch_spec, targets)),
            out_specs=specs[outputs],
            axis_names={*BY_HAND},
            check_vma=False,
        )
        device = self.mesh.local_devices[0]
        on_gpu = device.platform == "gpu"  # tokamax asks for the default device
        with jax.default_device(device) if on_gpu else contextlib.nullcontext():
            return mapped(*arguments)

    def sum(self, tree: Any) -> Any:
        """Sum figures over all devices."""
        return jax.lax.psum(tree, BY_HAND)

    def spec(self, path: str) -> tuple[Any, ...]:
        """Return the mesh axes that a parameter's axes are split over."""
        return tuple(row_spec(self.mesh, parameter_table(self.model)[path], self.model, self.rules))

    def weight_specs(self) -> Params:
        """Return how each parameter is split along ``fsdp`` and ``expert``."""
        specs = {}
        for path in parameter_table(self.model):
            axes = [name if name in _OF_WEIGHTS else None for name in self.spec(path)]
            specs[path] = PartitionSpec(*axes) if any(axes) else PartitionSpec()
        return unflatten_dict(specs, sep="/")

    def batch_spec(self, part: Array) -> PartitionSpec:
        """Return how ``[rows, seq]`` is split, by rows and tokens, or ``[rows]``."""
        return PartitionSpec(BATCH[0], "sequence") if part.ndim > 1 else BATCH

    def positions(self, inputs: Int[Array, "rows seq"]) -> Int[Array, "1 seq"]:
        """Return the indices of this device's tokens in their rows."""
        length = inputs.shape[1]
        return (jax.lax.axis_index("sequence") * length + jnp.arange(length))[None]

    def gather(self, path: str, part: Any, receiver: Any) -> Any:
        """Return a whole parameter, or one layer's share of it, in ``dtype``.

        Its gradient becomes that of ``receiver``, zeros of the shape of ``part``, unless it is
        None.
        """
        if isinstance(part, AdaptedMatrix):
            arrays = {
                name: leaf.astype(self.dtype)
                for name, leaf in vars(part).items()
                if isinstance(leaf, Array)
            }
            base = self.gather(path, part.base, None)
            if isinstance(part, AdaptedExperts):  # which are whole on each device, unlike the base
                first = jax.lax.axis_index("expert") * len(base)
                for name in "ab":
                    arrays[name] = jax.lax.dynamic_slice_in_dim(arrays[name], first, len(base))
            arrays["base"] = base
            return dataclasses.replace(part, **arrays)
        if not isinstance(part, Array):  # it is quantized
            return self.dequantize(
                part, shape_of(parameter_table(self.model)[path], self.model)[1:], self.dtype
            )
        spec = self.spec(path)[-part.ndim :]
        axis = spec.index("fsdp") if "fsdp" in spec else None
        return gather_weight(part, receiver, axis, self.dtype, gather_groups(self.mesh))

    def sum_gradients(self, gradients: Params) -> Params:
        """Sum over all devices in ``reduce_dtype``, except along axes that split the weight.

        Where ``gather_weight`` gathered a weight, its gradient is already summed along ``fsdp``; an
        expert has seen the tokens of all devices along ``expert``.
        """

        def sum_one(path: str, leaf: Array) -> Array:
            spec = self.spec(path) if path in parameter_table(self.model) else ()
            axes = [name for name in BY_HAND if self.mesh.shape[name] > 1 and name not in spec]
            if not axes:
                return leaf
            return jax.lax.psum(leaf.astype(self.reduce_dtype), axes)

        return map_by_path(sum_one, gradients)
