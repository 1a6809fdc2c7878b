"""What is trained: all weights, some of them by name, or the adapters of weights that stay as they are."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key

from jllama.config import LlamaConfig, LoraConfig
from jllama.errors import UsageError
from jllama.lora import adapted, frozen, held, initial_adapter, merged, qwix
from jllama.parameters import Params, parameter_table
from jllama.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class FullWeights:
    """All weights are float32 masters. They are trained, or those selected are, and the others stay as they are.

    ``selection`` has the paths of the trained parameters, each with its trained layers if those are not all; None is
    everything.
    """

    selection: Mapping[str, np.ndarray | None] | None = None
    shares: Mapping[str, float] | None = (
        None  # how much of each parameter is trained, see ``training_flops_per_token``
    )

    def init(self, key: Key[Array, ""], drawn: Params) -> tuple[Params, Params | None]:
        """The state's ``params`` and ``base``, from all weights."""
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), drawn), None

    def reading(self) -> tuple[Any, Callable[[str, Any], Any]]:
        """In which dtype weights are read to begin with (None: each in its own), and what each becomes then."""
        return jnp.float32, lambda path, stack: stack

    def specs(self, weights: Any) -> tuple[Any, Any, Any]:
        """How ``params``, ``base`` and gradients are split over devices, by how all weights are."""
        gradients = weights
        if self.selection is not None:
            flat = flatten_dict(weights, sep="/")
            gradients = unflatten_dict({path: flat[path] for path in self.selection}, sep="/")
        return weights, PartitionSpec(), gradients

    def trained(self, params: Params) -> Params:
        """What the optimizer updates: the selected parameters, of stacked ones the selected layers."""
        if self.selection is None:
            return params
        whole: Any = flatten_dict(params, sep="/")
        parts = {}
        for path, layers in self.selection.items():
            parts[path] = whole[path] if layers is None else _some_layers(whole[path], layers)
        return unflatten_dict(parts, sep="/")

    def replaced(self, params: Params, trained: Params) -> Params:
        """``params`` with others of what is trained."""
        if self.selection is None:
            return trained
        whole: Any = flatten_dict(params, sep="/")
        for path, leaf in flatten_dict(trained, sep="/").items():
            layers = self.selection[path]
            whole[path] = leaf if layers is None else _with_layers(whole[path], layers, leaf)
        return unflatten_dict(whole, sep="/")

    def learned(self, params: Params, base: Params | None, dtype: Any) -> tuple[Params, Params]:
        """What the gradient is taken of, and this device's parts of the weights.

        Of zeros beside the weights, which products are not made with: gradients may have a ``dtype`` of their own, see
        ``jllama.sharding.gather``.
        """
        return jax.tree.map(lambda part: jnp.zeros(part.shape, dtype), self.trained(params)), params

    def assemble(self, learned: Params, weights: Params) -> tuple[Params, Params]:
        """The model's parameters, and beside each what gets its gradient when it is gathered, if anything does."""
        if self.selection is None:
            return weights, learned
        shapes: Any = flatten_dict(weights, sep="/")
        zeros: Any = flatten_dict(learned, sep="/")
        for path, layers in self.selection.items():
            if layers is not None:
                all_layers = jnp.zeros(shapes[path].shape, zeros[path].dtype)
                zeros[path] = _with_layers(all_layers, layers, zeros[path])
        return weights, {**dict.fromkeys(weights), "layers": {}, **unflatten_dict(zeros, sep="/")}

    def merged(self, params: Params, base: Params | None) -> Params:
        """All weights of the model as it is now."""
        return params


@dataclasses.dataclass(frozen=True)
class LoraAdapters:
    """Adapters (``jllama.lora``) are trained, in float32, of weights that stay as they are, in ``dtype``."""

    model: LlamaConfig
    lora: LoraConfig
    dtype: np.dtype[Any]
    shares: Mapping[str, float] | None = dataclasses.field(default_factory=dict)

    def init(self, key: Key[Array, ""], drawn: Params) -> tuple[Params, Params | None]:
        """As of ``FullWeights``; the adapters change nothing yet."""
        base = frozen(drawn, self.model, self.lora, self.dtype)
        return initial_adapter(key, base, self.model, self.lora), base

    def reading(self) -> tuple[Any, Callable[[str, Any], Any]]:
        """As of ``FullWeights``."""
        dtypes = {"auto": self.dtype, "bfloat16": jnp.bfloat16}
        return dtypes.get(self.lora.base), lambda path, stack: held(
            path, stack, self.model, self.lora, self.dtype
        )

    def specs(self, weights: Any) -> tuple[Any, Any, Any]:
        """As of ``FullWeights``; each device has all adapters."""
        return PartitionSpec(), weights, PartitionSpec()

    def trained(self, params: Params) -> Params:
        """As of ``FullWeights``: all adapters."""
        return params

    def replaced(self, params: Params, trained: Params) -> Params:
        """As of ``FullWeights``."""
        return trained

    def learned(self, params: Params, base: Params | None, dtype: Any) -> tuple[Params, Params]:
        """As of ``FullWeights``: the adapters themselves."""
        assert base is not None
        return params, base

    def assemble(self, learned: Params, weights: Params) -> tuple[Params, Params]:
        """As of ``FullWeights``; no gathered weight has a gradient."""
        return adapted(weights, learned, self.lora), {**dict.fromkeys(weights), "layers": {}}

    def merged(self, params: Params, base: Params | None) -> Params:
        """As of ``FullWeights``, in float32."""
        assert base is not None
        return merged(base, params, self.model, self.lora)


Trainable = FullWeights | LoraAdapters


@jax.jit
def _some_layers(stack: Array, layers: Array) -> Array:
    return stack[layers]


@jax.jit
def _with_layers(stack: Array, layers: Array, part: Array) -> Array:
    return stack.at[layers].set(part)


def trainable_of(config: TrainConfig, dtype: np.dtype[Any], mesh_shape: Any) -> Trainable:
    """What a configuration trains; ``UsageError`` if its base cannot be split over such a mesh."""
    lora = config.lora
    patterns = config.training.trainable
    if patterns and config.trains_adapters:
        raise UsageError(
            "training.trainable is given, and with lora.rank adapters alone are trained: leave one out"
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
        qwix()  # or an error
    return LoraAdapters(config.model, lora, dtype)


def selected_weights(config: LlamaConfig, patterns: Sequence[str]) -> FullWeights:
    """The weights whose names match one of some patterns: ``layers/3/wq``, ``layers/*/w_down``, ``embed``.

    UsageError for a pattern that matches none.
    """
    names = {}  # of a stacked parameter those of its layers
    for path in parameter_table(config):
        count = config.num_layers if path.startswith("layers/") else 1
        names[path] = [path.replace("layers/", f"layers/{layer}/") for layer in range(count)]
    for pattern in patterns:
        if not any(fnmatch.filter(own, pattern) for own in names.values()):
            known = ", ".join(path.replace("layers/", "layers/*/") for path in names)
            said = f"training.trainable has {pattern!r}, which no parameter's name matches"
            raise UsageError(
                f"{said}: the names are {known}, where * is 0 to {config.num_layers - 1}"
            )

    selection = {}
    for path, own in names.items():
        layers = [
            layer
            for layer, name in enumerate(own)
            if any(fnmatch.fnmatchcase(name, each) for each in patterns)
        ]
        if layers:
            selection[path] = None if len(layers) == len(own) else np.array(layers)
    shares = {
        path: 1.0 if layers is None else len(layers) / config.num_layers
        for path, layers in selection.items()
    }
    return FullWeights(selection, shares)
