"""Objectives: what training minimizes, each a function of a model's forward pass and a batch.

An objective takes ``(forward, batch, options)`` and returns a sum of losses, over how many it is to be divided, and
sums of further figures, whose means are logged. It sees one device's part of a batch, within the compiled step: sums of
all devices and of all parts of a batch are added up outside. A function added to ``OBJECTIVES`` is chosen by
``training.objective``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jllama.model import Llama
from jllama.training.config import LoopConfig


class Targets(NamedTuple):
    """A batch as an objective sees it: each input token, in its segment, predicts the target at the same index."""

    inputs: Int[Array, "rows seq"]
    targets: Int[Array, "rows seq"]
    segments: Int[Array, "rows seq"]  # of the inputs
    counted: Bool[
        Array, "rows seq"
    ]  # which targets are learned from: those in the segment of their input that count
    reference: Float[Array, "rows"] | None  # of pairs of answers, see ``jllama.data.batches.Batch``


Forward = Callable[[Targets], tuple[Llama, Float[Array, "rows seq embed"]]]
"""The model, and its final activations for a batch's inputs: ``model.loss``, ``logits`` and others go on from them."""
Sums = tuple[Float[Array, ""], Float[Array, ""], dict[str, Float[Array, ""]]]
"""Of losses, of what they are divided by, and of an objective's further figures."""
Objective = Callable[[Forward, Targets, LoopConfig], Sums]


def next_token(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Cross entropy of each target that counts: ``-log p(target | tokens up to its input)``, in nats.

    With ``options.z_loss`` that times the squared log-normalizer beside it (arXiv:2204.02311, section 5).
    """
    llama, hidden = forward(batch)
    total, count = llama.loss(hidden, batch.targets, batch.counted, options.z_loss)
    return total, count, {}


def preference(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Direct preference optimization of pairs of answers (arXiv:2305.18290, equation 7), the preferred one first.

    A pair's loss is ``-log sigmoid(margin)``. The margin is the preferred answer's reward less the other's, and a
    reward ``options.dpo_beta`` times the answer's log-probability less that before training.
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
    pairs = total(jnp.ones_like(margin))
    return (
        total(jax.nn.softplus(-margin)),
        pairs,
        {name: total(values) for name, values in figures.items()},
    )


def row_log_probs(forward: Forward, batch: Targets) -> Float[Array, "rows"]:
    """The summed log-probability of each row's targets that count, in nats."""
    llama, hidden = forward(batch)
    return jnp.sum(
        jnp.where(batch.counted, llama.token_log_probs(hidden, batch.targets)[0], 0.0), axis=1
    )


OBJECTIVES: dict[str, Objective] = {"next_token": next_token, "preference": preference}
