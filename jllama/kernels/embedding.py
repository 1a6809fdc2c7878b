"""The look-up of embeddings, with a gradient that has the same bits in each run, also on GPUs."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jllama.kernels.linear import DecodeMatrix
from jllama.kernels.shapes import checked

_BLOCK = 256  # tokens


@checked
def embedding(
    table: Float[Array | DecodeMatrix, "vocab embed"], tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq embed"]:
    """Look up ``table[token]`` for each token.

    The gradient of a row is the sum of the gradients of its tokens. A GPU would add them in the
    order in which its threads arrive, which differs from run to run. There, tokens are therefore
    sorted first, and their gradients are added in float32.

    Examples:
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
    on_gpu = functools.partial(sums_by_token, shape)
    elsewhere = functools.partial(_scatter_add, shape)
    return jax.lax.platform_dependent(tokens, gradient, cuda=on_gpu, default=elsewhere), None


_embedding.defvjp(_forward, _backward)


def _scatter_add(table: jax.ShapeDtypeStruct, tokens: Array, gradient: Array) -> Array:
    """Add each token's gradient to its row, as JAX does."""
    return jax.linear_transpose(lambda table: table[tokens], table)(gradient)[0]


def sums_by_token(
    table: jax.ShapeDtypeStruct,
    tokens: Int[Array, "batch seq"],
    gradient: Float[Array, "batch seq embed"],
) -> Float[Array, "vocab embed"]:
    """Add each token's gradient to its row, in an order that does not depend on the run.

    Tokens are sorted, so that equal ones are neighbors. Products with zeros and ones add their
    gradients within blocks, then over blocks; the last of equal tokens writes the sum. The order of
    each product is fixed, and a product with zeros and ones rounds nothing but its sums.
    """
    num_rows, embed = table.shape
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")

    # 1) Sort, and pad to whole blocks with a token past the last one.
    flat = tokens.ravel()
    flat = jnp.where(flat < 0, flat + num_rows, flat)
    order = jnp.argsort(flat, stable=True)
    padding = (0, -flat.size % _BLOCK)
    ids = jnp.pad(flat[order], padding, constant_values=num_rows).reshape(-1, _BLOCK)
    rows = jnp.pad(gradient.reshape(-1, embed)[order], (padding, (0, 0)))
    rows = rows.reshape(*ids.shape, embed)

    # 2) For each token, add the gradients of the equal tokens in its block.
    equal = (ids[:, :, None] == ids[:, None, :]).astype(rows.dtype)
    sums = product("bij,bje->bie", equal, rows)

    # 3) To a block's first token, and its equals, add the sums of the blocks before.
    continues = jnp.tril(ids[:, :1] == ids[None, :, -1], -1).astype(jnp.float32)
    before = product("bc,ce->be", continues, sums[:, -1])
    is_first = ids == ids[:, :1]
    sums += jnp.where(is_first[:, :, None], before[:, None], 0)

    # 4) Write once for each token that occurs. All other sums go to distinct rows past the table,
    # and are dropped.
    ids = ids.ravel()
    sums = sums.reshape(-1, embed)
    is_last = jnp.append(ids[:-1] != ids[1:], True) & (ids < num_rows)
    targets = jnp.where(is_last, ids, num_rows + jnp.arange(ids.size))
    zeros = jnp.zeros(table.shape, table.dtype)
    return zeros.at[targets].set(sums.astype(table.dtype), mode="drop", unique_indices=True)
