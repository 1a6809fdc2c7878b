"""From logits to the next token. Settings are arrays, one value a row, so changing one never recompiles.

The steps, in the field's order (that of transformers' ``generate``: processors first, then the samplers)::

    logits + bias -> bans -> PENALTIES: repetition -> presence -> frequency     also when greedy
    temperature -> TRUNCATIONS: top_k -> top_p -> min_p -> draw                all inside ``sample``

A sampler of your own is a function in one of the two tables, under the name of its setting. Each truncation
renormalizes what it keeps, so ``top_p`` is a share of the top-k mass. All is float32. Banned tokens' minus infinity
stays; where all are banned, the draw is token 0. Nothing is sorted, which is slow on a CPU: cuts bisect a threshold.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Key, Num

Logits = Float[Array, "batch vocab"]
Chosen = Bool[Array, "batch vocab"]
Counts = Int[Array, "batch vocab"]
Values = Float[Array, "batch"]

_FLOAT32 = jnp.finfo(jnp.float32)


def ban(logits: Logits, banned: Chosen) -> Logits:
    """Minus infinity where ``banned``."""
    return jnp.where(banned, -jnp.inf, logits.astype(jnp.float32))


def ban_unset(logits: Logits, allowed: Int32[Array, "batch words"]) -> Logits:
    """Minus infinity where a token's bit is 0: 32 tokens to a word, the lowest bit first."""
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return ban(logits, bits.reshape(len(logits), -1)[:, : logits.shape[1]] == 0)


def penalize_repetition(logits: Logits, seen: Chosen, penalty: Values) -> Logits:
    """Where ``seen`` (in the prompt or generated), divide positive logits by ``penalty``, multiply the others by it.

    Source: Keskar et al. 2019, section 4.1 (arXiv:1909.05858), with the usual care for negative logits.
    """
    logits, penalty = logits.astype(jnp.float32), penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_presence(logits: Logits, counts: Counts, penalty: Values) -> Logits:
    """``logits - penalty * (counts > 0)``, of how often each token was generated. Source: OpenAI's API reference."""
    return penalize_frequency(logits, counts > 0, penalty)


def penalize_frequency(logits: Logits, counts: Counts | Chosen, penalty: Values) -> Logits:
    """``logits - penalty * counts``, of how often each token was generated. Source: OpenAI's API reference."""
    return logits.astype(jnp.float32) - penalty[:, None] * counts.astype(penalty.dtype)


def top_k_mask(logits: Logits, k: Int[Array, "batch"]) -> Chosen:
    """Keep the ``k`` largest logits (of equals the first), all if ``k <= 0``. Source: Fan et al. 2018, section 5.4."""
    return _likeliest(
        logits, jnp.ones_like, k.astype(jnp.float32), (k > 0) & (k < logits.shape[-1])
    )


def top_p_mask(logits: Logits, p: Values) -> Chosen:
    """Keep the fewest likeliest tokens whose probability reaches ``p``: the nucleus.

    A token stays if those before it (larger logits and, among equals, lower ids) sum to less than ``p``; the likeliest
    always stays, and ``p >= 1`` keeps all. Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751).
    """
    return _likeliest(logits, jax.nn.softmax, jnp.maximum(p, _FLOAT32.tiny), p < 1)


def min_p_mask(logits: Logits, p: Values) -> Chosen:
    """Keep the tokens with at least ``p`` times the likeliest one's probability: ``logit >= max(logits) + log(p)``.

    The likeliest always stays, and ``p <= 0`` keeps all. Source: Nguyen et al. 2024, section 3 (arXiv:2407.01082).
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
"""Setting -> ``(logits, value [batch], seen, counts) -> logits``, applied in this order. ``seen`` (in the prompt or
generated) and ``counts`` (how often generated) are ``[batch, vocab]`` as the logits are."""

TRUNCATIONS: dict[str, Callable[..., Array]] = {
    "top_k": top_k_mask,
    "top_p": top_p_mask,
    "min_p": min_p_mask,
}
"""Setting -> ``(logits [batch, vocab], value [batch]) -> kept [batch, vocab]``, each of what those before it left."""


def truncated_logits(
    logits: Logits, temperature: Values, **settings: Num[Array, "batch"]
) -> Logits:
    """Logits whose softmax is what ``sample`` draws from: over the temperature, minus infinity where not kept.

    ``settings`` are values of ``TRUNCATIONS``. The largest logit is shifted to 0, so that no temperature overflows.
    """
    if unknown := settings.keys() - TRUNCATIONS:
        raise TypeError(
            f"there is no truncation {min(unknown)}; jllama.functional.TRUNCATIONS has the others"
        )
    logits = jnp.minimum(logits.astype(jnp.float32), _FLOAT32.max)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)  # -inf where nothing is possible
    logits = logits / jnp.maximum(temperature, _FLOAT32.tiny)[:, None]
    for name, kept in TRUNCATIONS.items():
        if name in settings:
            logits = jnp.where(kept(logits, settings[name]), logits, -jnp.inf)
    return logits


def sample(
    logits: Logits, keys: Key[Array, "batch"], temperature: Values, **settings: Num[Array, "batch"]
) -> Int[Array, "batch"]:
    """Draw one token a row from the softmax of ``truncated_logits``; temperature 0 takes the first of the largest.

    The draw is the largest of logits plus Gumbel noise; it depends on the row's own logits, key and settings alone.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        noisy = truncated_logits(logits, temperature, **settings) + noise
        # XLA would fuse argmax with the noise into one scalar loop, three times slower on a CPU than top_k.
        return jnp.where(temperature > 0, jax.lax.top_k(noisy, 1)[1][:, 0], greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _likeliest(
    logits: Logits, weigh: Callable[[Array], Array], target: Array, cuts: Bool[Array, "batch"]
) -> Chosen:
    """Keep a token if the weights of those before it sum to less than ``target`` (positive); all where not ``cuts``."""
    logits = logits.astype(jnp.float32)

    def cut() -> Array:
        weights = weigh(logits)

        def weight(chosen: Array) -> Array:
            return jnp.sum(jnp.where(chosen, weights, 0), axis=-1)

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = low + (high - low + 1) // 2
            reached = weight(logits >= ordered_float(middle)) >= target
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

        # The largest threshold at which the weights reach the target: 32 halvings single out one float32, exactly, as
        # XLA adds in a fixed order, so that the rounded sums never fall as the threshold does.
        minus_infinity, infinity = (
            jnp.full(target.shape, bits, jnp.uint32) for bits in (0x007FFFFF, 0xFF800000)
        )
        threshold = ordered_float(jax.lax.fori_loop(0, 32, halve, (minus_infinity, infinity))[0])
        above, equal = logits > threshold, logits == threshold

        def break_ties() -> Array:  # lower ids come first; equal logits have equal weights
            rank = jnp.cumsum(equal, axis=-1) - 1
            fits = weight(above)[:, None] + rank.astype(weights.dtype) * weights < target[:, None]
            return above | (equal & ((rank == 0) | fits))

        ties = cuts & (jnp.sum(equal, axis=-1) > 1)
        return jax.lax.cond(jnp.any(ties), break_ties, lambda: above | equal)

    def ordered_float(bits: Array) -> Array:
        """A float of its bits as integers in the floats' order: positive with the sign bit set, negative inverted."""
        sign = jnp.uint32(1 << 31)
        return jax.lax.bitcast_convert_type(
            jnp.where(bits >= sign, bits ^ sign, ~bits), jnp.float32
        )[:, None]

    return jax.lax.cond(jnp.any(cuts), cut, lambda: jnp.full(logits.shape, True)) | ~cuts[:, None]
