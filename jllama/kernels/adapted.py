"""Matrices with an adapter, which stand in for arrays in products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b", "magnitude"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix ``W`` with a LoRA or DoRA adapter, for products ``x @ matrix``.

    LoRA: ``x W + scale (x a) b`` (arXiv:2106.09685, eq. 3). DoRA stretches each output of
    ``W + scale a b`` to the length ``magnitude``; the original length is a constant to gradients
    (arXiv:2402.09353, eq. 11).

    Attributes:
        base: Float[Array, "inputs outputs"], or with several axes of inputs or outputs.
        a: Float[Array, "inputs rank"].
        b: Float[Array, "rank outputs"].
        magnitude: Float[Array, "outputs"]; None for LoRA.
        scale: the factor of the adapter's product.
    """

    base: Any
    a: Any
    b: Any
    magnitude: Any
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.base.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.base.dtype

    def reshape(self, rows: int, columns: int) -> "AdaptedMatrix":
        """Flatten to ``[inputs, outputs]``; -1 is allowed as in NumPy."""
        return dataclasses.replace(self, base=self.base.reshape(rows, columns))

    def __getitem__(self, rows: Any) -> "AdaptedMatrix":
        """Return the matrix itself, for ``[...]``."""
        return self

    def __rmatmul__(self, x: Float[Array, "tokens inputs"]) -> Float[Array, "tokens outputs"]:
        product = x @ self.base + self.scale * ((x @ self.a) @ self.b)
        return product if self.magnitude is None else product * self._stretch()

    def merge(self) -> Array:
        """Return one array that gives the same products, with the axes of ``base``."""
        whole = self._sum()
        if self.magnitude is not None:
            whole = whole * self._stretch()
        return whole.reshape(self.base.shape)

    def _sum(self) -> Float[Array, "inputs outputs"]:
        return self.base.reshape(len(self.a), -1) + self.scale * (self.a @ self.b)

    def _stretch(self) -> Float[Array, "outputs"]:
        return self.magnitude / jax.lax.stop_gradient(output_lengths(self._sum()))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b", "magnitude"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class AdaptedExperts(AdaptedMatrix):
    """The matrices ``W`` of experts, each with a LoRA adapter: ``x W^T + scale (x a) b``.

    ``base`` is ``[experts, outputs, inputs]``, ``a`` ``[experts, inputs, rank]`` and ``b``
    ``[experts, rank, outputs]``. ``magnitude`` is None.
    """

    def __getitem__(self, experts: Any) -> Any:
        """Return the merged matrices of some experts, or for ``[:]`` and ``[...]`` itself."""
        if not isinstance(experts, Array):
            return self
        return jax.tree.map(lambda part: part[experts], self).merge()

    def multiply_rows(self, rows: Array, product: Callable[[Array, Array], Array]) -> Array:
        """Multiply rows by the matrices of their experts, with ``product`` for arrays."""
        low = product(rows, self.a.swapaxes(1, 2))
        added = product(low, self.b.swapaxes(1, 2))
        return product(rows, self.base) + self.scale * added

    def merge(self) -> Array:
        """Return one array that gives the same products."""
        return self.base + self.scale * (self.a @ self.b).swapaxes(1, 2)


def output_lengths(matrix: Float[Array, "*lead inputs outputs"]) -> Float[Array, "*lead outputs"]:
    """Compute the Euclidean length of each output of a matrix, over its inputs."""
    return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=-2))
