"""Objectives: what training minimizes, each a function of a model's forward pass and a batch.

An objective takes ``(forward, batch, options)`` and returns a sum of losses, the count that it is
divided by, and sums of further figures, whose means are logged. It sees one device's part of a
batch, inside the compiled step; sums over all devices and all parts of a batch are added up
outside. ``training.objective`` chooses an entry of ``OBJECTIVES``.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jllama import functional as F
from jllama.core import UsageError
from jllama.core.step import Forward, Objective, Sums, Targets, next_token
from jllama.training.config import LoopConfig


def preference(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Sum the loss of direct preference optimization over pairs (preferred, rejected).

    ``loss = -log sigmoid(reward(chosen) - reward(rejected))`` with ``reward = beta * (log p - log
    p_reference)``, where ``beta`` is ``options.dpo_beta`` and ``p_reference`` the model before
    training (arXiv:2305.18290, equation 7).
    """
    if batch.reference is None:
        raise UsageError(
            "training.objective is preference, and the data has no pairs of answers: leave it out"
        )
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


def grpo(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Sum the loss of group-relative policy optimization over the tokens of answers.

    ``ratio = exp(new - old)`` is that of a token's probability now to that before the first update.
    Its loss is ``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`` with the advantage
    ``A`` of its answer (arXiv:2402.03300, equation 3), plus ``kl`` times ``exp(d) - d - 1`` with
    ``d = reference - new`` (equation 4). See ``jllama.GrpoConfig`` for the options.
    """
    if batch.sampled is None:
        raise UsageError(
            "training.objective is grpo, and the batch has no answers of the model: "
            "give reward and prompts, or another objective"
        )
    sampled = batch.sampled
    settings = options.grpo
    log_probs, entropy = drawn_scores(forward, batch, settings.max_answer_tokens)

    # The loss of each token.
    advantages = sampled.advantages[:, None]
    ratio = jnp.exp(jnp.where(batch.counted, log_probs - sampled.old, 0.0))
    clipped_ratio = jnp.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    losses = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    figures = {
        "entropy": entropy,
        "clipped": clipped_ratio * advantages < ratio * advantages,
        "ratio_change": jnp.abs(ratio - 1),
    }
    if settings.importance_cap:
        weights = jnp.exp(jnp.where(batch.counted, sampled.old - sampled.sampler, 0.0))
        losses = losses * jnp.minimum(weights, settings.importance_cap)
    if sampled.reference is not None:
        difference = jnp.where(batch.counted, sampled.reference - log_probs, 0.0)
        divergence = jnp.exp(difference) - difference - 1
        losses = losses + settings.kl * divergence
        figures["kl"] = divergence

    # Their sum, and what it is divided by.
    num_tokens = jnp.sum(batch.counted, axis=1, dtype=jnp.float32)
    per_token = jnp.ones_like(num_tokens)
    count = jnp.sum(num_tokens)
    if settings.normalization != "tokens":
        per_token = 1 / jnp.maximum(num_tokens, 1.0)
        count = jnp.sum(jnp.any(batch.segments != 0, axis=1), dtype=jnp.float32)

    def total(values: Array, weights: Array) -> Array:
        return jnp.sum(jnp.where(batch.counted, weights[:, None] * values, 0.0))

    loss_weights = per_token
    if settings.normalization == "constant":
        loss_weights = jnp.full_like(per_token, 1 / settings.max_answer_tokens)
    means = {name: total(values, per_token) for name, values in figures.items()}
    return total(losses, loss_weights), count, means


def drawn_scores(
    forward: Forward, batch: Targets, max_answer_tokens: int
) -> tuple[Float[Array, "rows seq"], Float[Array, "rows seq"]]:
    """Return each counted target's log-probability, and the entropy, in what it was drawn from.

    The counted targets of a row are within ``max_answer_tokens``, and only these are scored, since
    prompts may be long. Others have NaN.
    """
    assert batch.sampled is not None
    llama, hidden = forward(batch)
    rows, seq = batch.targets.shape
    first = jnp.argmax(batch.counted, axis=1, keepdims=True)
    columns = first + jnp.arange(min(max_answer_tokens, seq))
    here = jnp.arange(rows)[:, None], columns
    targets = batch.targets.at[here].get(mode="fill", fill_value=0)
    settings = {
        name: jnp.broadcast_to(values[:, None], targets.shape)
        for name, values in batch.sampled.settings.items()
    }
    hidden = hidden.at[here].get(mode="fill", fill_value=0)
    scores = llama.score_tokens(drawn_score, hidden, (targets, settings))
    unscored = jnp.full((rows, seq), jnp.nan)
    log_probs, entropy = (unscored.at[here].set(score, mode="drop") for score in scores)
    return log_probs, entropy


def drawn_score(
    logits: Float[Array, "*lead vocab"], drawn: tuple[Array, dict[str, Array]]
) -> tuple[Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Compute ``functional.drawn_log_probs`` of tokens with their settings.

    Ids from ``num_ids`` on are no tokens of the tokenizer and never drawn.
    """
    targets, settings = jax.tree.map(jnp.ravel, drawn)
    num_ids = settings.pop("num_ids")
    flat = logits.reshape(-1, logits.shape[-1])
    flat = F.ban(flat, jnp.arange(flat.shape[1]) >= num_ids[:, None])
    scores = F.drawn_log_probs(flat, targets, **settings)
    log_probs, entropy = (values.reshape(logits.shape[:-1]) for values in scores)
    return log_probs, entropy


def row_log_probs(forward: Forward, batch: Targets) -> Float[Array, "rows"]:
    """Return the summed log-probability of each row's counted targets, in nats."""
    llama, hidden = forward(batch)
    log_probs, _ = llama.token_log_probs(hidden, batch.targets)
    return jnp.sum(jnp.where(batch.counted, log_probs, 0.0), axis=1)


def automatic(forward: Forward, batch: Targets, options: LoopConfig) -> Sums:
    """Choose by the batch: ``preference`` for pairs, ``grpo`` for the model's own answers."""
    name = "next_token" if batch.reference is None else "preference"
    if batch.sampled is not None:
        name = "grpo"
    return OBJECTIVES[name](forward, batch, options)


OBJECTIVES: dict[str, Objective] = {
    "auto": automatic,
    "next_token": next_token,
    "preference": preference,
    "grpo": grpo,
}
"""Objectives by the names that ``training.objective`` takes. To add one, see docs/extend.md::

    jllama.OBJECTIVES["mine"] = lambda forward, batch, options: (loss_sum, count, {})
"""
