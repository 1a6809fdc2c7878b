"""Matrices laid out for decoding: outputs first, and if wanted in eight-bit integers."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

_LARGEST = 127


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["shape"]
)
@dataclasses.dataclass(frozen=True)
class DecodeMatrix:
    """Stands in for a matrix in products ``x @ matrix``, and in look-ups of rows if it is a table."""

    # Any: JAX puts trees together from leaves that are no arrays, too. Outputs first: fastest for few tokens on a CPU.
    values: Any  # Float or Int8[Array, "outputs inputs"], the latter from -127 to 127
    scale: Any  # Float[Array, "outputs"] of integers, which stand for values * scale[:, None]; None for floats
    shape: tuple[int, ...]  # of the matrix, whose axes may be several inputs or outputs

    dtype = property(
        lambda self: (self.values if self.scale is None else self.scale).dtype,
        doc="Of its numbers.",
    )

    @property
    def T(self) -> "DecodeMatrix":
        """A table of one row an output, as a matrix that is multiplied from the left."""
        return dataclasses.replace(self, shape=self.shape[::-1])

    def reshape(self, rows: int, columns: int) -> "DecodeMatrix":
        """With its inputs joined to one axis, and its outputs; -1 as in NumPy."""
        return dataclasses.replace(self, shape=self.values.shape[::-1])

    def __getitem__(self, rows: Any) -> Any:
        """Rows of a table of one row an output; all that is (``...``) is the matrix itself."""
        if rows is ...:
            return self
        values = self.values[rows].astype(self.dtype)
        return values if self.scale is None else values * self.scale[rows][..., None]

    def __rmatmul__(self, x: Float[Array, "tokens inputs"]) -> Float[Array, "tokens outputs"]:
        """``multiply`` in the dtype of ``x``."""
        return self.multiply(x, x.dtype)

    def dense(self, dtype: Any) -> Array:
        """The matrix itself, of ``shape``, whose inputs come before its outputs."""
        values = self.values.astype(dtype)
        return (
            values if self.scale is None else values * self.scale[:, None].astype(dtype)
        ).T.reshape(self.shape)

    def multiply(
        self, x: Float[Array, "tokens inputs"], dtype: Any
    ) -> Float[Array, "tokens outputs"]:
        """``x @ matrix`` in ``dtype``. By integers, which a CPU multiplies several times faster with integers, few
        tokens become two rows each, ``x = s * (high + low / 254)``: an error of at most ``max(abs(x)) / 64516``.
        """
        wide, is_few = dtype if self.scale is None else jnp.float32, len(x) <= 32
        plain = functools.partial(
            jnp.einsum, "ti,oi->to", preferred_element_type=wide
        )  # integers are widened like x
        if self.scale is None:
            quick = functools.partial(_product_from_the_left, dtype=dtype) if is_few else plain
        else:
            quick = _split_product if is_few else lambda x, values: plain(x, _late(values, x))
        product = jax.lax.platform_dependent(x, self.values, cpu=quick, default=plain)
        return (
            product
            if self.scale is None
            else (product * self.scale.astype(product.dtype)).astype(dtype)
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b", "magnitude"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class AdaptedMatrix:
    """Stands in for a matrix ``W`` with an adapter in products: ``x W + scale (x a) b`` (arXiv:2106.09685, eq. 3).

    With ``magnitude``, outputs of ``W + scale a b`` have that length, constant to gradients (arXiv:2402.09353, eq. 11).
    """

    base: Any  # Float[Array, "inputs outputs"], or with axes of several inputs or outputs
    a: Any  # Float[Array, "inputs rank"]
    b: Any  # Float[Array, "rank outputs"]
    magnitude: Any  # Float[Array, "outputs"], or None
    scale: float

    shape = property(lambda self: self.base.shape, doc="Of the matrix.")
    dtype = property(lambda self: self.base.dtype, doc="Of the matrix.")

    def reshape(self, rows: int, columns: int) -> "AdaptedMatrix":
        """With its inputs joined to one axis, and its outputs; -1 as in NumPy."""
        return dataclasses.replace(self, base=self.base.reshape(rows, columns))

    def __getitem__(self, rows: Any) -> "AdaptedMatrix":
        """All that is (``...``): the matrix itself."""
        return self

    def __rmatmul__(self, x: Float[Array, "tokens inputs"]) -> Float[Array, "tokens outputs"]:
        product = x @ self.base + self.scale * ((x @ self.a) @ self.b)
        return product if self.magnitude is None else product * self._stretch()

    def merged(self) -> Array:
        """One matrix that gives the same products, with the axes of ``base``."""
        whole = self._sum() if self.magnitude is None else self._sum() * self._stretch()
        return whole.reshape(self.base.shape)

    def _sum(self) -> Float[Array, "inputs outputs"]:
        return self.base.reshape(len(self.a), -1) + self.scale * (self.a @ self.b)

    def _stretch(self) -> Float[Array, "outputs"]:
        return self.magnitude / jax.lax.stop_gradient(output_lengths(self._sum()))


def output_lengths(matrix: Float[Array, "*lead inputs outputs"]) -> Float[Array, "*lead outputs"]:
    """The length of each output of a matrix, as a vector over its inputs."""
    return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=-2))


def project(
    x: Float[Array, "*lead inputs"], matrix: Array | DecodeMatrix
) -> Float[Array, "*lead outputs"]:
    """``x @ matrix``, summed and returned in float32 whatever the dtype of ``x`` (float64 for float64)."""
    flat, wide = x.reshape(-1, x.shape[-1]), np.promote_types(x.dtype, np.float32)
    is_decode = isinstance(matrix, DecodeMatrix)
    product = (
        matrix.multiply(flat, wide)
        if is_decode
        else jnp.matmul(flat, matrix, preferred_element_type=wide)
    )
    return product.reshape(*x.shape[:-1], matrix.shape[1])


def decode_matrix(
    matrix: Float[Array, "*axes"], inputs: Sequence[int], quantize: Literal["int8"] | None = None
) -> DecodeMatrix:
    """Lay out a matrix outputs first, and round it if asked; ``inputs`` are the axes that a product sums over."""
    outputs = [axis for axis in range(matrix.ndim) if axis not in inputs]
    rows = matrix.transpose(*outputs, *inputs).reshape(
        math.prod(matrix.shape[axis] for axis in outputs), -1
    )
    return DecodeMatrix(*(int8_rows(rows) if quantize else (rows, None)), matrix.shape)


def int8_rows(rows: Any, numpy: Any = jnp) -> tuple[Any, Any]:
    """``(values, scale)``: each row rounded to eight bits, with ``scale = max(abs(row)) / 127``; errors are at most
    half a scale. The same bits from either NumPy: XLA multiplies by reciprocals where NumPy would divide, so they are
    written out. Source: Dettmers et al. 2022, section 2 (arXiv:2208.07339), vector-wise quantization of the weights.
    """
    scale = numpy.max(numpy.abs(rows.astype(numpy.float32)), axis=1) * np.float32(1 / _LARGEST)
    reciprocal = np.float32(1) / numpy.where(scale > 0, scale, np.float32(1))
    wide = rows.astype(np.promote_types(rows.dtype, np.float32))
    return numpy.round(wide * reciprocal[:, None].astype(wide.dtype)).astype(
        numpy.int8
    ), scale.astype(rows.dtype)


def _product_from_the_left(x: Array, values: Array, dtype: Any) -> Array:
    """The same as ``(values @ x.T).T``, which is 1.5 times as fast for eight tokens, if XLA does not turn it back."""
    columns = jax.lax.optimization_barrier(x.T)
    return jax.lax.optimization_barrier(jnp.matmul(values, columns, preferred_element_type=dtype)).T


def _late(values: Int8[Array, "outputs inputs"], x: Array) -> Array:
    """The same values, changed (by nothing) once ``x`` is there: XLA would widen those of all layers at first, into
    memory whose pages take as long as the products of 64 tokens.
    """
    return values ^ (x[0, 0] > jnp.inf).astype(jnp.int8)


def _split_product(
    x: Float[Array, "tokens inputs"], values: Int8[Array, "outputs inputs"]
) -> Array:
    wide, rows = x.astype(jnp.float32), len(x)
    unit = jnp.maximum(
        jnp.max(jnp.abs(wide), axis=1, keepdims=True) / _LARGEST, jnp.finfo(jnp.float32).tiny
    )
    high = jnp.round(wide / unit)
    parts = jnp.concatenate([high, jnp.round((wide / unit - high) * 2 * _LARGEST)])
    if rows == 1:  # a loop, 1.4 times as fast
        # By the identity, as a product is never fused: XLA would split x again for each output.
        parts = jnp.eye(2, dtype=jnp.int32) @ parts.astype(jnp.int32)
        products = [part.astype(jnp.int16) * _late(values, x).astype(jnp.int32) for part in parts]
        # Both sums at once, as XLA would cut one by itself in pieces of 32.
        sums = jax.lax.reduce(
            products, [np.int32(0)] * 2, functools.partial(jax.tree.map, jnp.add), [1]
        )
        sums = jnp.stack(sums)
    else:
        sums = jnp.einsum(
            "ti,oi->to", parts.astype(jnp.int8), values, preferred_element_type=jnp.int32
        )
    high, low = sums[:rows].astype(jnp.float32), sums[rows:].astype(jnp.float32)
    return (high + low / (2 * _LARGEST)) * unit
