"""What is trained: all weights, some of them by name, or adapters of frozen weights."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import Params, layers_of, parameter_table
from jllama.core.step import Trainable
from jllama.models.config import LoraConfig
from jllama.models.lora import adapt, convert_weight, freeze, import_qwix, initial_adapter, merge
from jllama.training.config import TrainConfig


class FullWeights(Trainable):
    """All weights, with what reading, splitting and merging them needs."""

    # How much of each parameter is trained, see ``training_flops_per_token``; None is all.
    shares: Mapping[str, float] | None = None
    # In which dtype weights are read from a checkpoint; None keeps each one's own.
    load_dtype: Any = jnp.float32

    def convert(self, path: str, stack: Any) -> Any:
        """Return what takes the place of a parameter as soon as it is read."""
        return stack

    def specs(self, weights: Any) -> tuple[Any, Any, Any]:
        """Return the specs of ``params``, ``base`` and gradients, from those of all weights."""
        return weights, PartitionSpec(), weights

    def merge(self, params: Params, base: Params | None) -> Params:
        """Return all weights of the current model."""
        return params


@dataclasses.dataclass(frozen=True)
class SelectedWeights(FullWeights):
    """All weights are float32 masters. The selected ones are trained, and the others never change.

    ``selection`` maps the paths of trained parameters to their trained layers; None is all of them.
    """

    selection: Mapping[str, np.ndarray | None]
    shares: Mapping[str, float] | None

    def specs(self, weights: Any) -> tuple[Any, Any, Any]:
        """Return the specs, with gradients of the selected parameters alone."""
        flat = flatten_dict(weights, sep="/")
        gradients = unflatten_dict({path: flat[path] for path in self.selection}, sep="/")
        return weights, PartitionSpec(), gradients

    def select(self, params: Params) -> Params:
        """Return the selected parameters, and of stacked ones the selected layers."""
        flat: Any = flatten_dict(params, sep="/")
        selected = {}
        for path, layers in self.selection.items():
            selected[path] = flat[path] if layers is None else _some_layers(flat[path], layers)
        return unflatten_dict(selected, sep="/")

    def with_trained(self, params: Params, trained: Params) -> Params:
        """Return ``params`` with new values of what ``select`` returns."""
        flat: Any = flatten_dict(params, sep="/")
        for path, leaf in flatten_dict(trained, sep="/").items():
            layers = self.selection[path]
            flat[path] = leaf if layers is None else _with_layers(flat[path], layers, leaf)
        return unflatten_dict(flat, sep="/")

    def assemble(self, variables: Params, weights: Params) -> tuple[Params, Params]:
        """Return parameters and variables; one of some layers becomes a stack of all layers."""
        shapes: Any = flatten_dict(weights, sep="/")
        flat: Any = flatten_dict(variables, sep="/")
        for path, layers in self.selection.items():
            if layers is not None:
                all_layers = jnp.zeros(shapes[path].shape, flat[path].dtype)
                flat[path] = _with_layers(all_layers, layers, flat[path])
        return weights, {**dict.fromkeys(weights), "layers": {}, **unflatten_dict(flat, sep="/")}


@jax.jit
def _some_layers(stack: Array, layers: Array) -> Array:
    return stack[layers]


@jax.jit
def _with_layers(stack: Array, layers: Array, part: Array) -> Array:
    return stack.at[layers].set(part)


@dataclasses.dataclass(frozen=True)
class LoraAdapters(FullWeights):
    """Float32 adapters (``jllama.models.lora``) are trained, of a base that never changes."""

    model: LlamaConfig
    lora: LoraConfig
    dtype: np.dtype[Any]
    shares: Mapping[str, float] | None = dataclasses.field(default_factory=dict)

    @property
    def load_dtype(self) -> Any:
        """In which dtype base weights are read."""
        return {"auto": self.dtype, "bfloat16": jnp.bfloat16}.get(self.lora.base)

    def convert(self, path: str, stack: Any) -> Any:
        """Return a base parameter in its final form, quantized if ``lora.base`` says so."""
        return convert_weight(path, stack, self.model, self.lora, self.dtype)

    def init(self, key: Key[Array, ""], weights: Params) -> tuple[Params, Params | None]:
        """Return adapters that change nothing yet, and their base."""
        base = freeze(weights, self.model, self.lora, self.dtype)
        return initial_adapter(key, base, self.model, self.lora), base

    def specs(self, weights: Any) -> tuple[Any, Any, Any]:
        """Return the specs: the base is split like weights, adapters are whole on each device."""
        return PartitionSpec(), weights, PartitionSpec()

    def split(self, params: Params, base: Params | None, dtype: Any) -> tuple[Params, Params]:
        """Return the adapters to differentiate by, and this device's parts of the base."""
        assert base is not None
        return params, base

    def assemble(self, variables: Params, weights: Params) -> tuple[Params, Params]:
        """Return the model's parameters with adapters; no gathered weight has a gradient."""
        return adapt(weights, variables, self.lora), {**dict.fromkeys(weights), "layers": {}}

    def merge(self, params: Params, base: Params | None) -> Params:
        """Return all weights of the current model in float32, adapters merged into them."""
        assert base is not None
        return merge(base, params, self.model, self.lora)


def trainable_of(config: TrainConfig, dtype: np.dtype[Any], mesh_shape: Any) -> FullWeights:
    """Return what is trained; ``UsageError`` if the base cannot be split over the mesh."""
    lora = config.lora
    patterns = config.training.trainable
    if patterns and config.trains_adapters:
        raise UsageError(
            "training.trainable is given, and with lora.rank adapters alone are trained: "
            "leave one out"
        )
    if patterns:
        return selected_weights(config.model, patterns)
    if not config.trains_adapters:
        return FullWeights()
    for name in ("fsdp", "tensor"):
        if lora.base in ("int8", "nf4") and mesh_shape[name] > 1:
            problem = f"lora.base is {lora.base}, whose weights are whole on each device"
            raise UsageError(f"{problem}, and mesh.{name} would split them: make it 1")
    if lora.base == "nf4":
        import_qwix()  # raises if the package is missing
    return LoraAdapters(config.model, lora, dtype)


def selected_weights(config: LlamaConfig, patterns: Sequence[str]) -> SelectedWeights:
    """Select the weights whose names match any pattern, such as ``layers/*/w_down``.

    Raises ``UsageError`` for a pattern that matches none.
    """
    # The names of each parameter; a stacked one has a name for each layer.
    names = {}
    for path, row in parameter_table(config).items():
        layers = layers_of(row, config) if path.startswith("layers/") else [0]
        names[path] = [path.replace("layers/", f"layers/{layer}/") for layer in layers]
    for pattern in patterns:
        if not any(fnmatch.filter(layer_names, pattern) for layer_names in names.values()):
            known = ", ".join(path.replace("layers/", "layers/*/") for path in names)
            problem = f"training.trainable has {pattern!r}, which no parameter's name matches"
            raise UsageError(
                f"{problem}: the names are {known}, where * is 0 to {config.num_layers - 1}"
            )

    selection: dict[str, np.ndarray | None] = {}
    shares = {}
    for path, layer_names in names.items():
        layers = [
            layer
            for layer, name in enumerate(layer_names)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if layers:
            is_whole = len(layers) == len(layer_names)
            selection[path] = None if is_whole else np.array(layers)
            shares[path] = len(layers) / len(layer_names)
    return SelectedWeights(selection, shares)
