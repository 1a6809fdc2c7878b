"""Optimizers by name, all under the same clip and schedule of the learning rate."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jllama.errors import UsageError, unknown_name
from jllama.parameters import PARAMETERS, joined, map_by_path
from jllama.training.config import OptimizerConfig


def with_decay(
    direction: optax.GradientTransformation, config: OptimizerConfig
) -> optax.GradientTransformation:
    """Add ``config.weight_decay`` times each matrix to the direction that an optimizer gives; the
    state stays its own.

    Scales of norms, biases and the magnitudes of DoRA do not decay.

    Example::

        jllama.OPTIMIZERS["sgd"] = lambda config: with_decay(optax.trace(config.beta1), config)
    """
    decay = optax.add_decayed_weights(
        config.weight_decay, lambda params: map_by_path(_is_matrix, params)
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = direction.update(updates, state, params)
        updates, _ = decay.update(updates, decay.init(params), params)
        return updates, state

    return optax.GradientTransformation(direction.init, update)


def _is_matrix(path: str, _: Any) -> bool:
    if path in PARAMETERS:
        return PARAMETERS[path].role == "matrix"
    return not path.endswith("/magnitude")  # what else an adapter has are matrices


def adafactor() -> optax.GradientTransformation:
    """Adafactor's direction for each matrix of each layer by itself (arXiv:1804.04235, algorithm
    4).

    Second moments are kept as the means of each matrix's rows and columns, and no update has a root
    mean square over 1. Axes that are inputs together (or outputs), such as heads and head_dim,
    count as one.
    """
    alone = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0)
    )

    def init(params: Any) -> Any:
        return alone.init(map_by_path(_as_matrix, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        gradients = map_by_path(_as_matrix, updates)
        found, state = alone.update(
            gradients, state, gradients
        )  # in place of parameters, whose shapes count
        return jax.tree.map(lambda matrix, like: matrix.reshape(like.shape), found, updates), state

    parts: Any = {
        "stacked": optax.GradientTransformation(_over_layers(init), _over_layers(update)),
        "alone": optax.GradientTransformation(init, update),
    }
    return optax.partition(
        parts, lambda params: {name: "stacked" if name == "layers" else "alone" for name in params}
    )


def _over_layers(function: Any) -> Any:
    """The function for each layer of a stack; where there is none, as where all are frozen, it has
    nothing to do.
    """

    def mapped(params: Any, *others: Any) -> Any:
        run = jax.vmap(function) if jax.tree.leaves(params) else function
        return run(params, *others)

    return mapped


def _as_matrix(path: str, leaf: Any) -> Any:
    # What another optimizer has is an empty node of optax here.
    is_matrix = path in PARAMETERS and PARAMETERS[path].inputs and hasattr(leaf, "shape")
    return joined(PARAMETERS[path], leaf) if is_matrix else leaf


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon's direction for each matrix of each layer (an adapter's ``a`` and ``b`` are two),
    AdamW's for all else.

    ``0.2 * sqrt(max(inputs, outputs)) * orthogonal(m)``: ``m`` is Nesterov's momentum of decay
    0.95, and ``orthogonal`` brings its singular values near 1 by five steps of Newton and Schulz
    (Jordan et al. 2024). The factor gives it the root mean square of AdamW's directions, so that
    one learning rate is for both (arXiv:2502.16982, section 2.2). Axes that are inputs together (or
    outputs), such as heads and head_dim, count as one.
    """
    axes_of = functools.partial(map_by_path, _matrix_axes)
    orthogonal: Any = optax.contrib.scale_by_muon(weight_dimension_numbers=axes_of)

    # The coefficients of the polynomial are no state: moment_dtype would round them.
    def init(params: Any) -> Any:
        return orthogonal.init(params)._replace(ns_coeffs=())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = state._replace(ns_coeffs=orthogonal.init({}).ns_coeffs)
        found, state = orthogonal.update(updates, state, params)
        return jax.tree.map(_as_long_as_adamw, found, axes_of(found)), state._replace(ns_coeffs=())

    def part_of(path: str, leaf: Any) -> str:
        return "muon" if path.startswith("layers/") and _is_matrix(path, leaf) else "adamw"

    parts: Any = {
        "muon": optax.GradientTransformation(init, update),
        "adamw": optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
    }
    return optax.partition(parts, functools.partial(map_by_path, part_of))


def _matrix_axes(path: str, leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf  # an empty node of optax: AdamW or another has it
    if path not in PARAMETERS:
        return optax.contrib.MuonDimensionNumbers(1, 2)  # of an adapter
    row = PARAMETERS[path]
    inputs, outputs = (tuple(map(row.axes.index, axes)) for axes in (row.inputs, row.outputs))
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def _as_long_as_adamw(direction: Array, axes: Any) -> Array:
    sizes = [np.take(direction.shape, each).prod() for each in axes]
    return 0.2 * math.sqrt(max(sizes)) * direction


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda config: with_decay(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon), config
    ),
    "lion": lambda config: with_decay(optax.scale_by_lion(config.beta1, config.beta2), config),
    "adafactor": lambda config: with_decay(adafactor(), config),
    "muon": lambda config: with_decay(muon(config), config),
}
"""How each optimizer turns clipped gradients into directions, weight decay included;
``make_optimizer`` adds the rest.

To add one: ``OPTIMIZERS["sgd"] = lambda config: with_decay(optax.trace(config.beta1), config)``.
What it gives zero for stays as it is. Leaves of its state that have the shape of their parameter
are split over devices as that is; all others are whole on every device.
"""

_UNUSED = {"lion": "epsilon", "adafactor": "beta1 beta2 epsilon"}
_UNUSED |= {"cosine": "decay_fraction", "constant": "decay_fraction final_fraction"}
"""Options that an optimizer or a schedule has no use for."""


def learning_rate_at(
    step: ArrayLike, config: OptimizerConfig, total_steps: int
) -> Float[Array, ""]:
    """The learning rate of a step, counted from 0: a linear warm-up, then what ``config.schedule``
    says.

    ``peak * (step + 1) / w`` while ``step < w``, where ``w`` is ``warmup_steps`` or else
    ``ceil(warmup_fraction * total_steps)``, and not over ``total_steps - 1``. Then with ``cosine``
    ``floor + (peak - floor) * (1 + cos(pi * t)) / 2`` where ``t = (step + 1 - w) / (total_steps -
    w)``, at most 1. With ``constant`` the peak. With ``wsd`` the peak until ``ceil(decay_fraction *
    total_steps)`` steps are left (at least until the warm-up has ended), and then a straight line
    down to the floor (arXiv:2404.06395, section 4).
    """
    warmup = min(
        config.warmup_steps or math.ceil(config.warmup_fraction * total_steps), total_steps - 1
    )
    peak, floor = config.learning_rate, config.learning_rate * config.final_fraction
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total_steps, floor)
    else:
        share = config.decay_fraction if config.schedule == "wsd" else 0.0
        end = max(total_steps - math.ceil(share * total_steps), warmup)
        rising = optax.linear_schedule(0.0, peak, warmup)
        falling = optax.linear_schedule(peak, floor, total_steps - end)
        schedule = optax.join_schedules(
            [rising, optax.constant_schedule(peak), falling], [warmup, end]
        )
    return jnp.asarray(schedule(jnp.asarray(step) + 1))


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, find the direction, scale by ``-learning_rate_at``.

    UsageError if ``OPTIMIZERS`` has no such name, or this optimizer or schedule has no use for an
    option that is given.
    """
    if config.name not in OPTIMIZERS:
        raise unknown_name("optimizer", config.name, OPTIMIZERS)
    for name in (config.name, config.schedule):
        for option in _UNUSED.get(name, "").split():
            if getattr(config, option) != getattr(OptimizerConfig, option):
                raise UsageError(f"optimizer.{option} is given but {name} has none: leave it out")
    rate = optax.scale_by_learning_rate(lambda step: learning_rate_at(step, config, total_steps))
    direction = _kept_in(jnp.dtype(config.moment_dtype), OPTIMIZERS[config.name](config))
    # The second place is empty: checkpoints know the schedule's state by the third.
    chain = optax.chain(direction, optax.identity(), rate)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), chain)


def _kept_in(dtype: jnp.dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same in float32, with its state's float32 arrays kept in another dtype between two steps."""

    def cast(state: Any, before: Any, after: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(after) if leaf.dtype == before else leaf, state
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, dtype, jnp.float32), params)
        return updates, cast(state, jnp.float32, dtype)

    return optax.GradientTransformation(
        lambda params: cast(inner.init(params), jnp.float32, dtype), update
    )
