"""AdamW on matrices and norms, with a warm-up, a cosine and a clip."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.parameters import Params, map_by_path, parameter_table


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) under a warm-up and a cosine.

    Args:
        learning_rate: the peak, reached at the end of the warm-up.
        final_fraction: the learning rate ends at this share of the peak.
        warmup_fraction: the share of all steps over which the learning rate rises linearly.
        beta1: decay of the gradient's running mean.
        beta2: decay of the squared gradient's running mean.
        epsilon: added to the root of the squared gradient's mean.
        weight_decay: per unit of learning rate, on matrices only (never on norms).
        clip_norm: gradients are scaled down to this global norm if theirs is larger.
    """

    learning_rate: float = 3e-4
    final_fraction: float = 0.1
    warmup_fraction: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if not getattr(self, name) > 0:
                raise UsageError(f"optimizer.{name} is {getattr(self, name)}; it must be positive")
        for name in ("final_fraction", "warmup_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"optimizer.{name} is {getattr(self, name)}; it must be between 0 and 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"optimizer.{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if not self.weight_decay >= 0:
            raise UsageError(f"optimizer.weight_decay is {self.weight_decay}; it must not be negative")


def learning_rate_at(step: ArrayLike, config: OptimizerConfig, total_steps: int) -> Float[Array, ""]:
    """The learning rate of a step, counted from 0: a linear warm-up, then half a cosine down to a floor.

    With ``w = ceil(warmup_fraction * total_steps)``, at most ``total_steps - 1``: ``peak * (step + 1) / w`` for
    ``step < w``; the peak at ``w - 1``; then ``floor + (peak - floor) * (1 + cos(pi * t)) / 2`` with
    ``t = (step + 1 - w) / (total_steps - w)``, so that the last step, ``total_steps - 1``, has the floor, and so has
    any step after it.
    """
    warmup = min(math.ceil(config.warmup_fraction * total_steps), total_steps - 1)
    done = jnp.asarray(step, jnp.float32) + 1
    rising = done / max(warmup, 1)
    t = jnp.clip((done - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    falling = config.final_fraction + (1 - config.final_fraction) * (1 + jnp.cos(jnp.pi * t)) / 2
    return config.learning_rate * jnp.where(done < warmup, rising, falling)


def decay_mask(config: LlamaConfig, params: Params) -> Params:
    """True for the parameters that weight decay applies to: the matrices of the table."""
    table = parameter_table(config)
    return map_by_path(lambda path, _: table[path].is_matrix, params)


def make_optimizer(
    config: OptimizerConfig, model: LlamaConfig, params: Params, total_steps: int
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with the schedule of ``learning_rate_at``."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            lambda step: learning_rate_at(step, config, total_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask(model, params),
        ),
    )
