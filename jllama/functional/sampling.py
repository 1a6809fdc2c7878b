"""From logits to the next token. Settings are arrays, one value a row, so changing one never recompiles.

The steps, in the field's order (that of transformers' ``generate``: processors first, then the samplers)::

    logits + bias -> ban -> PENALTIES: repetition -> presence -> frequency     also when greedy
    temperature -> TRUNCATIONS: top_k -> top_p -> min_p -> draw                all inside ``sample``

A sampler of your own is a function in one of the two tables, under the name of its setting. Each truncation
renormalizes what it keeps, so ``top_p`` is a share of the top-k mass. A bias is plain addition. All is float32. Logits
of minus infinity (banned tokens) stay so through every step; where all are, the draw is token 0.

Nothing is sorted: on a CPU, sorting a large vocabulary takes about as long as a small model's step. A cut keeps the
likeliest tokens by a threshold, found by bisection, and noise belongs to token ids, not to ranks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num, UInt32

_FLOAT32 = jnp.finfo(jnp.float32)


def ban(logits: Float[Array, "batch vocab"], banned: Bool[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    """Minus infinity where ``banned``."""
    return jnp.where(banned, -jnp.inf, logits.astype(jnp.float32))


def penalize_repetition(
    logits: Float[Array, "batch vocab"], seen: Bool[Array, "batch vocab"], penalty: Float[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """Divide positive logits by ``penalty`` and multiply the others by it, where ``seen``; 1 changes nothing.

    ``seen`` marks the tokens of the prompt and of what was generated; ``penalty`` is positive, and over 1 it makes them
    less likely. Source: Keskar et al. 2019, section 4.1 (arXiv:1909.05858), with the usual care for negative logits.
    """
    logits, penalty = logits.astype(jnp.float32), penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_presence(
    logits: Float[Array, "batch vocab"], counts: Int[Array, "batch vocab"], penalty: Float[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """``logits - penalty * (counts > 0)``, ``counts`` being how often each token was generated (not in the prompt).

    Source: OpenAI's API reference, ``presence_penalty``.
    """
    return logits.astype(jnp.float32) - penalty[:, None] * (counts > 0).astype(penalty.dtype)


def penalize_frequency(
    logits: Float[Array, "batch vocab"], counts: Int[Array, "batch vocab"], penalty: Float[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """``logits - penalty * counts``, ``counts`` being how often each token was generated (not in the prompt).

    Source: OpenAI's API reference, ``frequency_penalty``.
    """
    return logits.astype(jnp.float32) - penalty[:, None] * counts.astype(penalty.dtype)


def top_k_mask(logits: Float[Array, "batch vocab"], k: Int[Array, "batch"]) -> Bool[Array, "batch vocab"]:
    """Keep the ``k`` largest logits (among equals, the first); ``k <= 0`` or ``k >= vocab`` keeps all.

    Source: Fan et al. 2018, section 5.4 (arXiv:1805.04833).
    """
    cuts = (k > 0) & (k < logits.shape[-1])
    return _likeliest(logits.astype(jnp.float32), jnp.ones_like, k.astype(jnp.float32), cuts)


def top_p_mask(logits: Float[Array, "batch vocab"], p: Float[Array, "batch"]) -> Bool[Array, "batch vocab"]:
    """Keep the fewest likeliest tokens whose probability reaches ``p``: the nucleus.

    A token stays if those before it (larger logits and, among equals, lower ids) sum to less than ``p``; the likeliest
    always stays, and ``p >= 1`` keeps all. Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751).
    """
    return _likeliest(logits.astype(jnp.float32), jax.nn.softmax, jnp.maximum(p, _FLOAT32.tiny), p < 1)


def min_p_mask(logits: Float[Array, "batch vocab"], p: Float[Array, "batch"]) -> Bool[Array, "batch vocab"]:
    """Keep the tokens with at least ``p`` times the likeliest one's probability: ``logit >= max(logits) + log(p)``.

    The likeliest always stays, and ``p <= 0`` keeps all. Source: Nguyen et al. 2024, section 3 (arXiv:2407.01082).
    """
    logits = logits.astype(jnp.float32)
    return logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.clip(p, 0, 1))[:, None]


PENALTIES: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "repetition_penalty": lambda logits, penalty, seen, counts: penalize_repetition(logits, seen, penalty),
    "presence_penalty": lambda logits, penalty, seen, counts: penalize_presence(logits, counts, penalty),
    "frequency_penalty": lambda logits, penalty, seen, counts: penalize_frequency(logits, counts, penalty),
}
"""Setting -> ``(logits, value, seen, counts) -> logits``, applied in this order: ``logits`` and ``counts`` (how often
each token was generated) are ``[batch, vocab]``, as is ``seen`` (also in the prompt); ``value`` is ``[batch]``."""

TRUNCATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "top_k": top_k_mask,
    "top_p": top_p_mask,
    "min_p": min_p_mask,
}
"""Setting -> ``(logits, value) -> kept``, applied in this order to logits over the temperature, each to what those
before it left: ``logits`` and ``kept`` (booleans) are ``[batch, vocab]``, ``value`` is ``[batch]``."""


def truncated_logits(
    logits: Float[Array, "batch vocab"], temperature: Float[Array, "batch"], **settings: Num[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """Logits whose softmax is what ``sample`` draws from: over the temperature, minus infinity where not kept.

    ``settings`` are values of ``TRUNCATIONS``. The logits are shifted so that the largest is 0, which changes no
    probability and lets no temperature overflow.
    """
    if unknown := settings.keys() - TRUNCATIONS:
        raise TypeError(f"there is no truncation {min(unknown)}; jllama.functional.TRUNCATIONS has the others")
    logits = jnp.minimum(logits.astype(jnp.float32), _FLOAT32.max)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = logits - jnp.where(jnp.isfinite(largest), largest, 0)  # -inf where nothing is possible
    logits = logits / jnp.maximum(temperature, _FLOAT32.tiny)[:, None]
    for name, kept in TRUNCATIONS.items():
        if name in settings:
            logits = jnp.where(kept(logits, settings[name]), logits, -jnp.inf)
    return logits


def sample(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, "batch"],
    temperature: Float[Array, "batch"],
    **settings: Num[Array, "batch"],
) -> Int[Array, "batch"]:
    """Draw one token a row from the softmax of ``truncated_logits``; temperature 0 takes the largest logit.

    The draw is the largest of logits plus Gumbel noise, one number a token id. Among equal logits, temperature 0 takes
    the first. A row's draw depends on its own logits, key and settings alone.
    """

    def draw(logits: Array) -> Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        noisy = truncated_logits(logits, temperature, **settings) + noise
        # argmax, but XLA would fuse argmax with the noise into one scalar loop, three times slower on a CPU
        drawn = jax.lax.top_k(noisy, 1)[1][:, 0]
        return jnp.where(temperature > 0, drawn, greedy(logits))

    def greedy(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(temperature > 0), draw, greedy, logits)


def _likeliest(
    logits: Float[Array, "batch vocab"],
    weigh: Callable[[Array], Array],
    target: Float[Array, "batch"],
    cuts: Bool[Array, "batch"],
) -> Bool[Array, "batch vocab"]:
    """Keep a token if the weights of those before it sum to less than ``target``; all of them where not ``cuts``.

    Before it are larger logits and, among equals, lower ids. Equal logits have equal weights, and targets are positive.
    """

    def cut() -> Array:
        weights = weigh(logits)

        def weight(chosen: Array) -> Array:
            return jnp.sum(jnp.where(chosen, weights, 0), axis=-1)

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = low + (high - low + 1) // 2
            reached = weight(logits >= _ordered_float(middle)) >= target
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

        # The largest threshold at which the weights reach the target: 32 halvings single out one float32. XLA adds in a
        # fixed order, so the rounded sums never fall as the threshold does, and bisection is exact.
        low, high = (jnp.full(target.shape, bound, jnp.uint32) for bound in (_MINUS_INFINITY, _INFINITY))
        threshold = _ordered_float(jax.lax.fori_loop(0, 32, halve, (low, high))[0])
        above, equal = logits > threshold, logits == threshold

        def break_ties() -> Array:
            rank = jnp.cumsum(equal, axis=-1) - 1
            fits = weight(above)[:, None] + rank.astype(weights.dtype) * weights < target[:, None]
            return above | (equal & ((rank == 0) | fits))

        ties = cuts & (jnp.sum(equal, axis=-1) > 1)
        return jax.lax.cond(jnp.any(ties), break_ties, lambda: above | equal)

    return jax.lax.cond(jnp.any(cuts), cut, lambda: jnp.full(logits.shape, True)) | ~cuts[:, None]


# The bits of floats as integers in the floats' order: positive ones with the sign bit set, negative ones inverted.
_MINUS_INFINITY, _INFINITY = 0x007FFFFF, 0xFF800000


def _ordered_float(order: UInt32[Array, "batch"]) -> Float[Array, "batch 1"]:
    sign = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(order >= sign, order ^ sign, ~order), jnp.float32)[:, None]
