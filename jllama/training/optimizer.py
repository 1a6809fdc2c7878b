"""AdamW on matrices and norms, with a warm-up, a cosine and a clip."""

from __future__ import annotations

import math

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jllama.config import LlamaConfig
from jllama.parameters import Params, map_by_path, parameter_table
from jllama.training.config import OptimizerConfig


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


def make_optimizer(
    config: OptimizerConfig, model: LlamaConfig, params: Params, total_steps: int
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with the schedule of ``learning_rate_at``; only the table's matrices decay."""
    table = parameter_table(model)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            lambda step: learning_rate_at(step, config, total_steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=map_by_path(lambda path, _: table[path].is_matrix, params),
        ),
    )
