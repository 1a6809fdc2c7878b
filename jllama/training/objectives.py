"""Objectives: what training minimizes, each a function of a model's forward pass and a batch.

An objective takes ``(forward, batch, options)`` and returns a sum of losses, the count that it is
divided by, and sums of further figures, whose means are logged. It sees one device's part of a
batch, inside the compiled step; sums over all devices and all parts of a batch are added up
outside. ``training.objective`` chooses an entry of ``OBJECTIVES``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jllama.model import Llama
from jllama.training.config import LoopConfig


class Targets(NamedTuple):
    """A batch as an objective sees it: each input token predicts the target at its index."""

    inputs: Int[Array, "rows seq"]
    targets: Int[Array, "rows seq"]
    segments: Int[Array, "rows seq"]  # of the inputs
    # Targets that take part in the loss, each in its input's segment.
    counted: Bool[Array, "rows seq"]
    reference: Float[Array, "rows"] | None  # of pairs of answers, see ``jllama.data.batches.Batch``


Scalar = Float[Array, ""]
Forward = Callable[[Targets], tuple[Llama, Float[Array, "rows seq embed"]]]
"""The model and its final activations for a batch's inputs; ``model.loss``, ``logits`` and others
continue from them.
"""
Sums = tuple[Scalar, Scalar, dict[str, Scalar]]
"""The sum of losses, what it is divided by, and sums of an objective's further figures."""
Objective = Callable[[Forward, Targets, LoopConfig], Sums]


def next_token(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Sum ``-log p(target | tokens up to its input)`` over counted targets, in nats.

    ``options.z_loss`` times the squared log-normalizer is added to it (arXiv:2204.02311, section
    5).
    """
    llama, hidden = forward(batch)
    loss_sum, count = llama.loss(hidden, batch.targets, batch.counted, options.z_loss)
    return loss_sum, count, {}


def preference(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Sum the loss of direct preference optimization over pairs (preferred, rejected).

    ``loss = -log sigmoid(reward(chosen) - reward(rejected))`` with ``reward = beta * (log p - log
    p_reference)``, where ``beta`` is ``options.dpo_beta`` and ``p_reference`` the model before
    training (arXiv:2305.18290, equation 7).
    """
    assert batch.reference is not None
    ratios = (row_log_probs(forward, batch) - batch.reference).reshape(-1, 2)
    chosen, rejected = options.dpo_beta * ratios.T
    margin = options.dpo_beta * (ratios[:, 0] - ratios[:, 1])
    is_pair = jnp.any(batch.counted, axis=1)[::2]  # and not padding

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(is_pair, values, 0.0))

    figures = {
        "accuracy": margin > 0,
        "margin": margin,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    num_pairs = total(jnp.ones_like(margin))
    loss_sum = total(jax.nn.softplus(-margin))
    return loss_sum, num_pairs, {name: total(values) for name, values in figures.items()}


def row_log_probs(forward: Forward, batch: Targets) -> Float[Array, "rows"]:
    """Return the summed log-probability of each row's counted targets, in nats."""
    llama, hidden = forward(batch)
    log_probs, _ = llama.token_log_probs(hidden, batch.targets)
    return jnp.sum(jnp.where(batch.counted, log_probs, 0.0), axis=1)


OBJECTIVES: dict[str, Objective] = {"next_token": next_token, "preference": preference}
"""Objectives by the names that ``training.objective`` takes. To add one, see docs/extend.md::

    jllama.OBJECTIVES["mine"] = lambda forward, batch, options: (loss_sum, count, {})
"""
