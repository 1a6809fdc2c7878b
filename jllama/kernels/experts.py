"""The product of rows with the matrices of their experts, as each platform computes it best."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jllama.core.ops import ragged_product, sum_dtype

_TILE_ROWS = {"cpu": 64, "gpu": 256, "tpu": 512}
_MAX_COPIED = 2**27
"""Numbers in the copies of matrices that a GPU makes at once: 256 MiB in bfloat16."""


def multiply_rows(
    platform: str, x: Float[Array, "rows inputs"], matrices: Any, sizes: Int[Array, "experts"]
) -> Float[Array, "rows outputs"]:
    """Compute ``ops.ragged_product``, also with ``AdaptedExperts``."""

    def product(x: Array, matrices: Array) -> Array:
        return grouped_product(platform, x, matrices, sizes)

    of_adapted = getattr(matrices, "multiply_rows", None)
    return of_adapted(x, product) if of_adapted else product(x, matrices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_product(
    platform: str,
    x: Float[Array, "rows inputs"],
    matrices: Float[Array, "experts outputs inputs"],
    sizes: Int[Array, "experts"],
) -> Float[Array, "rows outputs"]:
    """Compute ``ops.ragged_product``.

    XLA computes that as products of all rows with all matrices, except on TPUs, and there so the
    gradients of matrices. Here rows are put into tiles of one expert each: ``ceil(n / size)`` for
    an expert with ``n`` rows, the last of which is filled up with zeros. A loop multiplies one tile
    after the other, or on GPUs many at once, with copies of their matrices.
    """
    if platform == "tpu":
        is_of_somebody = jnp.arange(len(x)) < sizes.sum()
        return jnp.where(is_of_somebody[:, None], ragged_product(x, matrices, sizes), 0)
    tiles = _tiles(platform, len(x), sizes, matrices)
    inputs = tiles.fill(x)

    def multiply(index: Array, products: Array) -> Array:
        product = jnp.einsum("nri,noi->nro", inputs[index], matrices[tiles.experts[index]])
        return products.at[index].set(product)

    products = jnp.zeros((*inputs.shape[:-1], matrices.shape[1]), x.dtype)
    products = jax.lax.fori_loop(0, tiles.num_turns, multiply, products)
    return products.reshape(-1, products.shape[-1])[tiles.places]


def _forward(platform: str, *arguments: Array) -> tuple[Array, tuple[Array, ...]]:
    return grouped_product(platform, *arguments), arguments


def _backward(platform: str, saved: tuple[Array, ...], gradient: Array) -> tuple[Any, ...]:
    """Multiply by the transposed matrices, and sum over the tiles of each expert."""
    x, matrices, sizes = saved
    of_rows = grouped_product(platform, gradient, matrices.swapaxes(1, 2), sizes)
    tiles = _tiles(platform, len(x), sizes, matrices)
    inputs = tiles.fill(x)
    outputs = tiles.fill(gradient)
    wide = sum_dtype(matrices)

    def add(index: Array, sums: Array) -> Array:
        products = jnp.einsum(
            "nro,nri->noi", outputs[index], inputs[index], preferred_element_type=wide
        )
        if len(products) == 1:
            return sums.at[tiles.experts[index, 0]].add(products[0])
        # Not a scatter, in which GPUs add in no fixed order.
        is_of = jax.nn.one_hot(tiles.experts[index], len(sizes), dtype=products.dtype)
        return sums + jnp.einsum("ne,noi->eoi", is_of, products)

    sums = jax.lax.fori_loop(0, tiles.num_turns, add, jnp.zeros(matrices.shape, wide))
    return of_rows, sums.astype(matrices.dtype), None


grouped_product.defvjp(_forward, _backward)


class _Tiles(NamedTuple):
    """How rows lie in tiles, for turns of a loop that has some tiles in each."""

    sources: Array  # [turns, tiles, tile_rows]: the row in each place; none is after the last one
    places: Array  # [rows]: the place of each row
    experts: Array  # [turns, tiles]: the expert of each tile
    num_turns: Array  # that have any rows

    def fill(self, rows: Array) -> Array:
        """Put rows into their tiles, and zeros into places without a row."""
        return rows.at[self.sources].get(mode="fill", fill_value=0)


def _tiles(platform: str, num_rows: int, sizes: Array, matrices: Array) -> _Tiles:
    """Return the tiles of rows that are sorted by their experts."""
    tile_rows = _TILE_ROWS.get(platform, 64)
    at_once = 1
    if platform == "gpu":
        at_once = min(max(_MAX_COPIED // matrices[0].size, 1), 64)
    num_turns = -(-(num_rows // tile_rows + len(sizes)) // at_once)  # at most
    counts = -(-sizes // tile_rows)
    tile_ends = jnp.cumsum(counts)
    row_ends = jnp.cumsum(sizes)
    first_tiles = tile_ends - counts
    first_rows = row_ends - sizes

    # From rows to places.
    experts = _index(row_ends, num_rows)
    places = jnp.arange(num_rows) + (first_tiles * tile_rows - first_rows)[experts]

    # From places to rows.
    experts = _index(tile_ends, num_turns * at_once)
    first = (jnp.arange(len(experts)) - first_tiles[experts]) * tile_rows
    within = first[:, None] + jnp.arange(tile_rows)
    is_row = within < sizes[experts][:, None]
    sources = jnp.where(is_row, within + first_rows[experts][:, None], num_rows)
    shape = (num_turns, at_once)
    sources = sources.reshape(*shape, tile_rows)
    return _Tiles(sources, places, experts.reshape(shape), -(-tile_ends[-1] // at_once))


def _index(ends: Array, count: int) -> Array:
    """Return, for each of ``count`` items, the part that it is in; parts end before ``ends``.

    Items behind all of them are in the last one.
    """
    return (jnp.arange(count)[:, None] >= ends[:-1]).sum(axis=1)
