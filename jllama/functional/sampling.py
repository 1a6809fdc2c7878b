"""Choosing the next token. Every setting is an array with one value a row, so changing one never recompiles."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def top_k_mask(sorted_logits: Float[Array, "batch vocab"], k: Int[Array, "batch"]) -> Bool[Array, "batch vocab"]:
    """Keep the ``k`` largest of logits sorted in descending order; ``k <= 0`` or ``k >= vocab`` keeps all.

    Source: Fan et al. 2018, section 5.4 (arXiv:1805.04833).
    """
    vocab = sorted_logits.shape[-1]
    return jnp.arange(vocab) < jnp.where(k <= 0, vocab, k)[:, None]


def top_p_mask(sorted_logits: Float[Array, "batch vocab"], p: Float[Array, "batch"]) -> Bool[Array, "batch vocab"]:
    """Keep the shortest prefix of descending logits whose probability reaches ``p``: the nucleus.

    Token ``j`` stays if the tokens before it sum to less than ``p``; the first always stays, and ``p >= 1`` keeps all.
    Logits of minus infinity have probability zero. Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751).
    """
    probabilities = jax.nn.softmax(sorted_logits.astype(jnp.float32), axis=-1)
    # XLA sums in parallel: over a large vocabulary the sum may fall by a rounding error, so take its running maximum.
    mass_before = jax.lax.cummax(jnp.cumsum(probabilities, axis=-1) - probabilities, axis=1)
    keep = (mass_before < p[:, None]) | (p >= 1.0)[:, None]
    return keep.at[:, 0].set(True)


def sample(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, "batch"],
    temperature: Float[Array, "batch"],
    top_k: Int[Array, "batch"],
    top_p: Float[Array, "batch"],
) -> Int[Array, "batch"]:
    """Draw one token a row from ``softmax(logits / temperature)``, cut to the top k and then to the top p of those.

    Each cut renormalises what it keeps, so ``top_p`` is a share of the top-k mass. Temperature 0 takes the largest
    logit (the first, among equals). A row's draw depends on its own logits, key and settings alone.
    """

    def draw(logits: Array) -> Array:
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1) / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        ranked = jnp.where(top_k_mask(ranked, top_k), ranked, -jnp.inf)
        ranked = jnp.where(top_p_mask(ranked, top_p), ranked, -jnp.inf)
        rank = jax.vmap(jax.random.categorical)(keys, ranked)
        drawn = jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
        return jnp.where(temperature > 0, drawn, order[:, 0]).astype(jnp.int32)

    def greedy(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(temperature > 0), draw, greedy, logits.astype(jnp.float32))
