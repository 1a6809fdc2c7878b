"""Optimizers by name, all under the same clip, weight decay and schedule of the learning rate."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jllama.config import LlamaConfig
from jllama.errors import UsageError, unknown_name
from jllama.parameters import map_by_path, parameter_table
from jllama.training.config import OptimizerConfig

OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda config: optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
    "lion": lambda config: optax.scale_by_lion(config.beta1, config.beta2),
    "adafactor": lambda _: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
}
"""How each optimizer turns clipped gradients into directions; ``make_optimizer`` adds what they all share.

To add one: ``OPTIMIZERS["sgd"] = lambda config: optax.trace(config.beta1)``. Leaves of its state that have the shape of
their parameter are split over devices as that is; all others are whole on every device.
"""

_UNUSED = {"lion": ("epsilon",), "adafactor": ("beta1", "beta2", "epsilon")}


def learning_rate_at(step: ArrayLike, config: OptimizerConfig, total_steps: int) -> Float[Array, ""]:
    """The learning rate of a step, counted from 0: a linear warm-up, then half a cosine down to a floor.

    ``peak * (step + 1) / w`` while ``step < w = ceil(warmup_fraction * total_steps)``, not over ``total_steps - 1``;
    then ``floor + (peak - floor) * (1 + cos(pi * t)) / 2`` with ``t = (step + 1 - w) / (total_steps - w)``, at most 1.
    """
    warmup = min(math.ceil(config.warmup_fraction * total_steps), total_steps - 1)
    peak, floor = config.learning_rate, config.learning_rate * config.final_fraction
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total_steps, floor)
    return jnp.asarray(schedule(jnp.asarray(step) + 1))


def make_optimizer(config: OptimizerConfig, model: LlamaConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, find the direction, decay the table's matrices, scale by ``-learning_rate_at``.

    UsageError if ``OPTIMIZERS`` has no such name, or this optimizer none of the options given.
    """
    if config.name not in OPTIMIZERS:
        raise unknown_name("optimizer", config.name, OPTIMIZERS)
    for option in _UNUSED.get(config.name, ()):
        if getattr(config, option) != getattr(OptimizerConfig, option):
            raise UsageError(f"optimizer.{option} is given but {config.name} has none: leave it out")
    table = parameter_table(model)
    is_decayed = functools.partial(map_by_path, lambda path, _: path not in table or table[path].role == "matrix")
    rate = optax.scale_by_learning_rate(lambda step: learning_rate_at(step, config, total_steps))
    decay = optax.add_decayed_weights(config.weight_decay, is_decayed)
    chain = optax.chain(_kept_in(jnp.dtype(config.moment_dtype), OPTIMIZERS[config.name](config)), decay, rate)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), chain)


def _kept_in(dtype: jnp.dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same in float32, with its state's float32 arrays kept in another dtype between two steps."""

    def cast(state: Any, before: Any, after: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(after) if leaf.dtype == before else leaf, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, dtype, jnp.float32), params)
        return updates, cast(state, jnp.float32, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), jnp.float32, dtype), update)
