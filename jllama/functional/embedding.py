"""The look-up of embeddings, with a gradient that is the same bits each time on GPUs, too."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jllama.functional.linear import DecodeMatrix
from jllama.functional.shapes import checked

_BLOCK = 256  # tokens


@checked
def embedding(
    table: Float[Array | DecodeMatrix, "vocab embed"], tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq embed"]:
    """``table[token]`` for each token.

    The gradient of a row is the sum of the gradients of its tokens. A GPU would add them up in the order in which its
    threads come to it, which differs from run to run: there they are sorted by token first, and added in float32.

    >>> print(embedding(jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([[1, 0, 1]])))
    [[[2. 3.]
      [0. 1.]
      [2. 3.]]]
    """
    if isinstance(table, DecodeMatrix):
        return table[tokens]
    return _embedding(jax.ShapeDtypeStruct(table.shape, table.dtype), table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embedding(shape: jax.ShapeDtypeStruct, table: Array, tokens: Array) -> Array:
    return table[tokens]


def _forward(shape: jax.ShapeDtypeStruct, table: Array, tokens: Array) -> tuple[Array, Array]:
    return table[tokens], tokens


def _backward(shape: jax.ShapeDtypeStruct, tokens: Array, gradient: Array) -> tuple[Array, None]:
    def scattered(tokens: Array, gradient: Array) -> Array:
        return jax.linear_transpose(lambda table: table[tokens], shape)(gradient)[0]

    sorted_first = functools.partial(sums_by_token, shape)
    return jax.lax.platform_dependent(tokens, gradient, cuda=sorted_first, default=scattered), None


_embedding.defvjp(_forward, _backward)


def sums_by_token(
    table: jax.ShapeDtypeStruct,
    tokens: Int[Array, "batch seq"],
    gradient: Float[Array, "batch seq embed"],
) -> Float[Array, "vocab embed"]:
    """The gradient of a table of embeddings, without a sum whose order is open.

    Tokens are sorted, so that equal ones are neighbors. Products with zeros and ones add them up within blocks, then
    over blocks, and the last token of its kind writes the sum. Each product's order is fixed, and exact but for sums.
    """
    num_rows, embed = table.shape
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")

    # Sorted, in whole blocks; the padding is of a token behind the last.
    flat = tokens.ravel()
    flat = jnp.where(flat < 0, flat + num_rows, flat)
    order = jnp.argsort(flat, stable=True)
    behind = (0, -flat.size % _BLOCK)
    ids = jnp.pad(flat[order], behind, constant_values=num_rows).reshape(-1, _BLOCK)
    rows = jnp.pad(gradient.reshape(-1, embed)[order], (behind, (0, 0))).reshape(*ids.shape, embed)

    # Of each token all that are equal in its block; then, of a block's first token, those in the blocks before.
    equal = (ids[:, :, None] == ids[:, None, :]).astype(rows.dtype)
    sums = product("bij,bje->bie", equal, rows)
    continues = jnp.tril(ids[:, :1] == ids[None, :, -1], -1).astype(jnp.float32)
    before = product("bc,ce->be", continues, sums[:, -1])
    is_first = ids == ids[:, :1]
    sums += jnp.where(is_first[:, :, None], before[:, None], 0)

    # One write for each token that occurs; all others go to rows of their own behind the table, and are dropped.
    ids, sums = ids.ravel(), sums.reshape(-1, embed)
    is_last = jnp.append(ids[:-1] != ids[1:], True) & (ids < num_rows)
    places = jnp.where(is_last, ids, num_rows + jnp.arange(ids.size))
    zeros = jnp.zeros(table.shape, table.dtype)
    return zeros.at[places].set(sums.astype(table.dtype), mode="drop", unique_indices=True)
