"""From logits to the next token.

Settings are arrays, one value a row, so changing one recompiles nothing.

The steps, in the field's order (that of transformers' ``generate``: processors, then samplers)::

    logits + bias -> bans -> PENALTIES: repetition -> presence -> frequency    also when greedy
    temperature -> TRUNCATIONS: top_k -> top_p -> min_p -> draw               all inside ``sample``

A sampler of your own is a function in one of the two tables, under the name of its setting. Each
truncation renormalizes what it leaves, so ``top_p`` is a share of the top-k mass. All is float32.
A banned token's logit stays minus infinity; where all are banned, the draw is token 0. Nothing is
sorted, which is slow on a CPU: truncations find their threshold by bisection.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key, Num, UInt32

from jllama.core import ops

Logits = Float[Array, "batch vocab"]
Chosen = Bool[Array, "batch vocab"]
Counts = Int[Array, "batch vocab"]
Values = Float[Array, "batch"]
Ranks = UInt32[Array, "batch"]

_FLOAT32 = jnp.finfo(jnp.float32)
_RANK_OF_MINUS_INFINITY = 0x007FFFFF
_RANK_OF_INFINITY = 0xFF800000


def ban(logits: Logits, banned: Chosen) -> Logits:
    """Set logits to minus infinity where ``banned``."""
    return jnp.where(banned, -jnp.inf, logits.astype(jnp.float32))


def ban_unset(logits: Logits, allowed: Int32[Array, "batch words"]) -> Logits:
    """Set logits to minus infinity where a token's bit in ``allowed`` is 0.

    A word has the bits of 32 tokens, the lowest bit first.
    """
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return ban(logits, bits.reshape(len(logits), -1)[:, : logits.shape[1]] == 0)


def penalize_repetition(logits: Logits, seen: Chosen, penalty: Values) -> Logits:
    """Divide positive logits by ``penalty`` and multiply the others by it, where ``seen``.

    ``seen`` is true for tokens of the prompt and generated ones. Source: Keskar et al. 2019,
    section 4.1 (arXiv:1909.05858), with the usual care for negative logits.
    """
    logits = logits.astype(jnp.float32)
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_presence(logits: Logits, counts: Counts, penalty: Values) -> Logits:
    """Compute ``logits - penalty * (counts > 0)``; ``counts`` says how often a token was generated.

    Source: OpenAI's API reference.
    """
    return penalize_frequency(logits, counts > 0, penalty)


def penalize_frequency(logits: Logits, counts: Counts | Chosen, penalty: Values) -> Logits:
    """Compute ``logits - penalty * counts``; ``counts`` says how often a token was generated.

    Source: OpenAI's API reference.
    """
    return logits.astype(jnp.float32) - penalty[:, None] * counts.astype(penalty.dtype)


def top_k_mask(logits: Logits, k: Int[Array, "batch"]) -> Chosen:
    """Keep the ``k`` largest logits, the first of equal ones; all if ``k <= 0``.

    Source: Fan et al. 2018, section 5.4.
    """
    cuts = (k > 0) & (k < logits.shape[-1])
    return _keep_likeliest(logits, jnp.ones_like, k.astype(jnp.float32), cuts)


def top_p_mask(logits: Logits, p: Values) -> Chosen:
    """Keep the nucleus: the fewest likeliest tokens whose probabilities sum to at least ``p``.

    A token stays if those before it (larger logits and, among equals, lower ids) sum to less than
    ``p``. The likeliest token always stays, and ``p >= 1`` keeps all. Source: Holtzman et al. 2020,
    section 3.1 (arXiv:1904.09751).
    """
    return _keep_likeliest(logits, jax.nn.softmax, jnp.maximum(p, _FLOAT32.tiny), p < 1)


def min_p_mask(logits: Logits, p: Values) -> Chosen:
    """Keep tokens of at least ``p`` times the largest probability.

    That is, ``logit >= max(logits) + log(p)``. The likeliest token always stays, and ``p <= 0``
    keeps all. Source: Nguyen et al. 2024, section 3 (arXiv:2407.01082).
    """
    logits = logits.astype(jnp.float32)
    return logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.clip(p, 0, 1))[:, None]


PENALTIES: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "repetition_penalty": lambda logits, penalty, seen, counts: penalize_repetition(
        logits, seen, penalty
    ),
    "presence_penalty": lambda logits, penalty, seen, counts: penalize_presence(
        logits, counts, penalty
    ),
    "frequency_penalty": lambda logits, penalty, seen, counts: penalize_frequency(
        logits, counts, penalty
    ),
}
"""Setting -> ``(logits, value [batch], seen, counts) -> logits``, applied in this order.

``seen`` (in the prompt or generated) and ``counts`` (how often generated) are ``[batch, vocab]``
like the logits.
"""

TRUNCATIONS: dict[str, Callable[..., Array]] = {
    "top_k": top_k_mask,
    "top_p": top_p_mask,
    "min_p": min_p_mask,
}
"""Setting -> ``(logits [batch, vocab], value [batch]) -> mask [batch, vocab]``.

The mask is true for tokens that stay. Each truncation takes the logits that those before it left.
"""


def truncated_logits(
    logits: Logits, temperature: Values, **settings: Num[Array, "batch"]
) -> Logits:
    """Compute the logits whose softmax ``sample`` draws from.

    They are divided by the temperature, and minus infinity where truncated. The largest is shifted
    to 0, so that no temperature overflows. ``settings`` are values for ``TRUNCATIONS``.
    """
    return _truncate(settings, ops.tempered_logits(logits, temperature))


def _truncate(settings: Mapping[str, Array], logits: Logits) -> Logits:
    """Apply truncations to logits that are divided by the temperature."""
    unknown = settings.keys() - TRUNCATIONS
    if unknown:
        raise TypeError(
            f"there is no truncation {min(unknown)}; jllama.functional.TRUNCATIONS has the others"
        )
    for name, mask in TRUNCATIONS.items():
        if name in settings:
            logits = jnp.where(mask(logits, settings[name]), logits, -jnp.inf)
    return logits


def drawn_log_probs(
    logits: Logits,
    drawn: Int[Array, "batch"],
    temperature: Values,
    **settings: Num[Array, "batch"],
) -> tuple[Values, Values]:
    """Compute the log-probability of each drawn token, and the entropy of its distribution.

    The distribution is the softmax of ``truncated_logits``, which ``sample`` draws from, in nats.
    The drawn token always counts among those that stay: where two programs round differently, one
    of them may truncate it. Which tokens stay is a constant to gradients.
    """
    shifted = truncated_logits(logits, temperature)
    stays = shifted > -jnp.inf
    if settings:
        stays = truncated_logits(jax.lax.stop_gradient(logits), temperature, **settings) > -jnp.inf
    is_drawn = jnp.arange(logits.shape[-1]) == drawn[:, None]
    shifted = jnp.where(stays | is_drawn, shifted, -jnp.inf)
    exponentials = jnp.exp(shifted)
    total = jnp.sum(exponentials, axis=-1)
    log_total = jnp.log(total)
    log_prob = jnp.sum(jnp.where(is_drawn, shifted, 0.0), axis=-1) - log_total
    weighted = jnp.where(exponentials > 0, exponentials * shifted, 0.0)
    return log_prob, log_total - jnp.sum(weighted, axis=-1) / total


def sample(
    logits: Logits, keys: Key[Array, "batch"], temperature: Values, **settings: Num[Array, "batch"]
) -> Int[Array, "batch"]:
    """Draw one token a row from the softmax of ``truncated_logits``.

    Temperature 0 takes the first of the largest logits. Otherwise the draw is the largest of logits
    plus Gumbel noise. It depends on the row's own logits, key and settings alone.

    Examples:
        >>> logits = jnp.array([[0.0, 2.0, 1.0]])
        >>> print(sample(logits, jax.random.split(jax.random.key(0), 1), temperature=jnp.zeros(1)))
        [1]
    """
    return ops.sample(logits, keys, temperature, functools.partial(_truncate, settings))


def _keep_likeliest(
    logits: Logits, weigh: Callable[[Array], Array], target: Values, cuts: Bool[Array, "batch"]
) -> Chosen:
    """Keep a token if the weights of those before it sum to less than ``target``.

    ``target`` is positive. Rows without ``cuts`` keep all tokens.
    """
    logits = logits.astype(jnp.float32)
    mask = jax.lax.cond(
        jnp.any(cuts),
        lambda: _cut(logits, weigh(logits), target, cuts),
        lambda: jnp.full(logits.shape, True),
    )
    return mask | ~cuts[:, None]


def _cut(logits: Logits, weights: Logits, target: Values, cuts: Bool[Array, "batch"]) -> Chosen:
    threshold = _largest_threshold(logits, weights, target)
    above = logits > threshold
    equal = logits == threshold
    has_ties = cuts & (jnp.sum(equal, axis=-1) > 1)

    def break_ties() -> Array:
        # Lower ids come first; equal logits have equal weights.
        num_before = jnp.cumsum(equal, axis=-1) - 1
        weight_before = (
            _sum_where(above, weights)[:, None] + num_before.astype(weights.dtype) * weights
        )
        return above | (equal & ((num_before == 0) | (weight_before < target[:, None])))

    return jax.lax.cond(jnp.any(has_ties), break_ties, lambda: above | equal)


def _largest_threshold(logits: Logits, weights: Logits, target: Values) -> Float[Array, "batch 1"]:
    """Find the largest threshold such that logits from it on have weights of ``target`` or more.

    32 halvings of the range of all floats single out one float32. The result is exact, as XLA adds
    in a fixed order: the rounded sum never falls when the threshold does.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        is_reached = _sum_where(logits >= _float_of_rank(middle), weights) >= target
        return jnp.where(is_reached, middle, low), jnp.where(is_reached, high, middle - 1)

    low = jnp.full(target.shape, _RANK_OF_MINUS_INFINITY, jnp.uint32)
    high = jnp.full(target.shape, _RANK_OF_INFINITY, jnp.uint32)
    rank, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return _float_of_rank(rank)


def _float_of_rank(rank: Ranks) -> Float[Array, "batch 1"]:
    """Return the float32 at a place in the order of all floats.

    A positive float's rank is its bits with the sign bit set, a negative one's its inverted bits.
    """
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(rank >= sign, rank ^ sign, ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]


def _sum_where(chosen: Chosen, weights: Logits) -> Values:
    return jnp.sum(jnp.where(chosen, weights, 0), axis=-1)
