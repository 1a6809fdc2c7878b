"""What is trained: all weights, or the adapters of weights that stay as they are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key

from jllama.config import LlamaConfig, LoraConfig
from jllama.errors import UsageError
from jllama.lora import adapted, frozen, initial_adapter
from jllama.parameters import Params
from jllama.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class FullWeights:
    """All weights are trained, as float32 masters."""

    def init(self, key: Key[Array, ""], drawn: Params) -> tuple[Params, Params | None]:
        """What is trained and what stays as it is, from all weights."""
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), drawn), None

    def specs(self, weights: Any) -> tuple[Any, Any]:
        """How what is trained and what stays are split over devices, by how all weights are."""
        return weights, PartitionSpec()

    def learned(self, trained: Params, base: Params | None, dtype: Any) -> tuple[Params, Params]:
        """What the gradient is taken of, and this device's parts of the weights.

        Of zeros beside the weights, which products are not made with: gradients may have a ``dtype`` of their own, see
        ``jllama.sharding.gather``.
        """
        return jax.tree.map(lambda part: jnp.zeros(part.shape, dtype), trained), trained

    def assemble(self, learned: Params, weights: Params) -> tuple[Params, Params]:
        """The model's parameters, and beside each what gets its gradient when it is gathered."""
        return weights, learned


@dataclasses.dataclass(frozen=True)
class LoraAdapters:
    """Adapters (``jllama.lora``) are trained, in float32, of weights that stay as they are, in ``dtype``."""

    model: LlamaConfig
    lora: LoraConfig
    dtype: np.dtype[Any]

    def init(self, key: Key[Array, ""], drawn: Params) -> tuple[Params, Params | None]:
        """As of ``FullWeights``; the adapters change nothing yet."""
        return initial_adapter(key, drawn, self.model, self.lora), frozen(drawn, self.model, self.lora, self.dtype)

    def specs(self, weights: Any) -> tuple[Any, Any]:
        """As of ``FullWeights``; each device has all adapters."""
        return PartitionSpec(), weights

    def learned(self, trained: Params, base: Params | None, dtype: Any) -> tuple[Params, Params]:
        """As of ``FullWeights``: the adapters themselves."""
        assert base is not None
        return trained, base

    def assemble(self, learned: Params, weights: Params) -> tuple[Params, Params]:
        """As of ``FullWeights``; no gathered weight has a gradient."""
        return adapted(weights, learned, self.lora), {**dict.fromkeys(weights), "layers": {}}


Trainable = FullWeights | LoraAdapters


def trainable_of(config: TrainConfig, dtype: np.dtype[Any], mesh_shape: Any) -> Trainable:
    """What a configuration trains; ``UsageError`` if its base cannot be split over such a mesh."""
    lora = config.lora
    if not lora.rank:
        return FullWeights()
    for name in ("fsdp", "tensor"):
        if lora.base in ("int8", "nf4") and mesh_shape[name] > 1:
            problem = f"lora.base is {lora.base}, whose weights are whole on each device"
            raise UsageError(f"{problem}, and mesh.{name} would split them: make it 1")
    return LoraAdapters(config.model, lora, dtype)
