"""Optimizers by name, all with the same gradient clipping and learning-rate schedule."""

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

from jllama.core import UsageError
from jllama.core.parameters import PARAMETERS, flatten_matrix, map_by_path
from jllama.system.errors import unknown_name
from jllama.training.config import OptimizerConfig


def with_decay(
    direction: optax.GradientTransformation, config: OptimizerConfig
) -> optax.GradientTransformation:
    """Add ``config.weight_decay`` times each matrix to an optimizer's direction.

    Scales of norms, biases and the magnitudes of DoRA do not decay. The optimizer's state keeps its
    structure.

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
    return not path.endswith("/magnitude")  # all other arrays of an adapter are matrices


def adafactor() -> optax.GradientTransformation:
    """Return Adafactor's direction for each matrix of each layer (arXiv:1804.04235, algorithm 4).

    Second moments are stored as the means of each matrix's rows and columns, and the root mean
    square of an update is at most 1. Several input axes (or output axes) of a matrix, such as heads
    and head_dim, count as one.
    """
    factored = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0)
    )

    def init(params: Any) -> Any:
        return factored.init(map_by_path(_as_matrix, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        gradients = map_by_path(_as_matrix, updates)
        # The third argument stands for the parameters, of which only shapes count.
        matrices, state = factored.update(gradients, state, gradients)
        return jax.tree.map(
            lambda matrix, like: matrix.reshape(like.shape), matrices, updates
        ), state

    alone = optax.GradientTransformation(init, update)
    stacked = optax.GradientTransformation(jax.vmap(init), jax.vmap(update))

    def partition(tree: Any) -> optax.GradientTransformation:
        labels = _parts_of(tree)
        parts: Any = dict.fromkeys(jax.tree.leaves(labels), stacked) | {"alone": alone}
        return optax.partition(parts, labels)

    return optax.GradientTransformation(
        lambda params: partition(params).init(params),
        lambda updates, state, params=None: partition(updates).update(updates, state, params),
    )


def _parts_of(params: Any) -> Any:
    """Name the part of each leaf: stacks of one length share a part, and the longest is stacked."""
    layers = params.get("layers", {})
    longest = max((len(leaf) for leaf in jax.tree.leaves(layers)), default=0)
    labels = jax.tree.map(
        lambda leaf: "stacked" if len(leaf) == longest else f"stacked_{len(leaf)}", layers
    )
    return dict.fromkeys(params, "alone") | ({"layers": labels} if layers else {})


def _as_matrix(path: str, leaf: Any) -> Any:
    # A leaf that another optimizer updates is an empty node of optax here.
    if path in PARAMETERS and PARAMETERS[path].inputs and hasattr(leaf, "shape"):
        return flatten_matrix(PARAMETERS[path], leaf)
    is_of_experts = getattr(leaf, "ndim", 0) == 3  # their adapters, as one matrix
    return leaf.reshape(-1, leaf.shape[-1]) if is_of_experts else leaf


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return Muon's direction for each matrix of each layer, and AdamW's for everything else.

    ``0.2 * sqrt(max(inputs, outputs)) * orthogonal(m)``, where ``m`` is Nesterov momentum,
    ``t = 0.95 t + g`` and ``m = 0.95 t + g``, and ``orthogonal`` brings its singular values near 1
    by five Newton-Schulz steps (Jordan et al. 2024). The factor gives the direction the root mean
    square of AdamW's, so that both share a learning rate (arXiv:2502.16982, section 2.2). An
    adapter's ``a`` and ``b`` are two matrices. Several input axes (or output axes) count as one.
    """
    axes_of = functools.partial(map_by_path, _matrix_axes)
    momentum = optax.trace(0.95, nesterov=True)
    # Without momentum of its own: it would correct gradient and momentum by different factors.
    orthogonal: Any = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=axes_of
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = momentum.update(updates, state, params)
        updates, _ = orthogonal.update(updates, orthogonal.init(updates))
        return jax.tree.map(_scale_as_adamw, updates, axes_of(updates)), state

    def part_of(path: str, leaf: Any) -> str:
        return "muon" if path.startswith("layers/") and _is_matrix(path, leaf) else "adamw"

    parts: Any = {
        "muon": optax.GradientTransformation(momentum.init, update),
        "adamw": optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
    }
    return optax.partition(parts, functools.partial(map_by_path, part_of))


def _matrix_axes(path: str, leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf  # an empty node of optax, of a leaf that another optimizer updates
    if path not in PARAMETERS:
        # Of an adapter; that of experts has an axis more.
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)
    row = PARAMETERS[path]
    own_outputs = [axis for axis in row.outputs if axis != "experts"]
    inputs, outputs = (tuple(map(row.axes.index, axes)) for axes in (row.inputs, own_outputs))
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


def _scale_as_adamw(direction: Array, axes: Any) -> Array:
    sizes = [np.take(direction.shape, indices).prod() for indices in axes]
    return 0.2 * math.sqrt(max(sizes)) * direction


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda config: with_decay(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon), config
    ),
    "lion": lambda config: with_decay(optax.scale_by_lion(config.beta1, config.beta2), config),
    "adafactor": lambda config: with_decay(adafactor(), config),
    "muon": lambda config: with_decay(muon(config), config),
}
"""How each optimizer turns clipped gradients into directions, with weight decay; ``make_optimizer``
adds the rest.

To add one: ``OPTIMIZERS["sgd"] = lambda config: with_decay(optax.trace(config.beta1), config)``. A
parameter whose direction is zero does not change. Leaves of the state with the shape of their
parameter are split over devices like it; all others are whole on every device.
"""

_UNUSED = {
    "lion": "epsilon",
    "adafactor": "beta1 beta2 epsilon",
    "cosine": "decay_fraction",
    "constant": "decay_fraction final_fraction",
}
"""Options that an optimizer or a schedule does not use."""


def learning_rate_at(
    step: ArrayLike, config: OptimizerConfig, total_steps: int
) -> Float[Array, ""]:
    """Return the learning rate of a step, counted from 0.

    With ``w`` warm-up steps (``warmup_steps`` or else ``ceil(warmup_fraction * total_steps)``, at
    most ``total_steps - 1``), it is ``peak * (step + 1) / w`` while ``step < w``, and then by
    ``config.schedule``:

    - ``cosine``: ``floor + (peak - floor) * (1 + cos(pi * t)) / 2`` with
      ``t = min((step + 1 - w) / (total_steps - w), 1)`` and ``floor = final_fraction * peak``.
    - ``constant``: ``peak``.
    - ``wsd``: ``peak`` until ``ceil(decay_fraction * total_steps)`` steps are left (but not before
      the warm-up has ended), then a straight line to ``floor`` (arXiv:2404.06395, section 4).
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_fraction * total_steps)
    warmup = min(warmup, total_steps - 1)
    peak = config.learning_rate
    floor = peak * config.final_fraction
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total_steps, floor)
    else:
        share = config.decay_fraction if config.schedule == "wsd" else 0.0
        decay_start = max(total_steps - math.ceil(share * total_steps), warmup)
        rising = optax.linear_schedule(0.0, peak, warmup)
        falling = optax.linear_schedule(peak, floor, total_steps - decay_start)
        schedule = optax.join_schedules(
            [rising, optax.constant_schedule(peak), falling], [warmup, decay_start]
        )
    return jnp.asarray(schedule(jnp.asarray(step) + 1))


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Chain clipping by the global norm, the optimizer's direction, and ``-learning_rate_at``.

    Raises ``UsageError`` if ``OPTIMIZERS`` has no such name, or an option is set that the optimizer
    or the schedule does not use.
    """
    if config.name not in OPTIMIZERS:
        raise unknown_name("optimizer", config.name, OPTIMIZERS)
    for name in (config.name, config.schedule):
        for option in _UNUSED.get(name, "").split():
            if getattr(config, option) != getattr(OptimizerConfig, option):
                raise UsageError(f"optimizer.{option} is given but {name} has none: leave it out")
    rate = optax.scale_by_learning_rate(lambda step: learning_rate_at(step, config, total_steps))
    direction = _store_state_in(jnp.dtype(config.moment_dtype), OPTIMIZERS[config.name](config))
    # The second place is empty, because checkpoints have the schedule's state in the third.
    chain = optax.chain(direction, optax.identity(), rate)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), chain)


def _store_state_in(
    dtype: jnp.dtype, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Compute in float32, and store float32 arrays of the state in another dtype between steps."""

    def cast(state: Any, before: Any, after: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(after) if leaf.dtype == before else leaf, state
        )

    def init(params: Any) -> Any:
        return cast(inner.init(params), jnp.float32, dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, dtype, jnp.float32), params)
        return updates, cast(state, jnp.float32, dtype)

    return optax.GradientTransformation(init, update)
