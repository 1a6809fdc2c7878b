"""Matrices laid out for decoding, which stand in for arrays in products."""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jllama.core.ops import sum_dtype
from jllama.kernels.int8 import int8_rows, split_product, widen_late

KERNELS = ("int8", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
"""The kinds of weights that ``kernels.quantized`` multiplies."""
_MAX_FEW = 32  # tokens that a CPU multiplies in another way than many


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale"],
    meta_fields=["shape", "kernel"],
)
@dataclasses.dataclass(frozen=True)
class DecodeMatrix:
    """A matrix for products ``x @ matrix``, or a table for look-ups; outputs come first.

    This layout is the fastest for few tokens on a CPU. The types of the fields are ``Any`` because
    JAX also builds trees from leaves that are not arrays.

    Attributes:
        values: Float or Int8[Array, "outputs inputs"], the latter from -127 to 127; or
            UInt8[Array, "outputs bytes"], blocks of a GGML type.
        scale: Float[Array, "outputs"], where int8 ``values`` mean ``values * scale[:, None]``; else
            None.
        shape: the shape of the matrix, which may have several axes of inputs or outputs.
        kernel: the format by which ``kernels.quantized`` multiplies on a CPU; empty: XLA does.
    """

    values: Any
    scale: Any
    shape: tuple[int, ...]
    kernel: str = ""

    @property
    def is_blocks(self) -> bool:
        """Whether the values are blocks of a GGML type."""
        return bool(self.kernel) and self.scale is None

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers that the values stand for."""
        if self.is_blocks:
            return jnp.dtype(jnp.float32)
        return self.values.dtype if self.scale is None else self.scale.dtype

    @property
    def T(self) -> "DecodeMatrix":
        """The matrix for products, of a table with one row an output."""
        return dataclasses.replace(self, shape=self.shape[::-1])

    def reshape(self, rows: int, columns: int) -> "DecodeMatrix":
        """Flatten to ``[inputs, outputs]``; -1 is allowed as in NumPy."""
        outputs = len(self.values)
        return dataclasses.replace(self, shape=(math.prod(self.shape) // outputs, outputs))

    def __getitem__(self, rows: Any) -> Any:
        """Look up rows of a table, or matrices of experts; ``[...]`` returns the matrix itself.

        ``shape`` has one axis of inputs, the last one.
        """
        if rows is ...:
            return self
        if self.is_blocks:
            from jllama.kernels import quantized  # brings numba

            return quantized.unpack(self.kernel, self.values[rows])
        values = self.values.reshape(self.shape)[rows].astype(self.dtype)
        if self.scale is None:
            return values
        return values * self.scale.reshape(self.shape[:-1])[rows][..., None]

    def __rmatmul__(self, x: Float[Array, "tokens inputs"]) -> Float[Array, "tokens outputs"]:
        """Compute ``x @ matrix`` in the dtype of ``x``."""
        return self.multiply(x, x.dtype)

    def dense(self, dtype: Any) -> Array:
        """Return the matrix as an array of ``shape``, inputs before outputs."""
        values = self.values.astype(dtype)
        if self.scale is not None:
            values = values * self.scale[:, None].astype(dtype)
        return values.T.reshape(self.shape)

    def multiply(
        self, x: Float[Array, "tokens inputs"], dtype: Any
    ) -> Float[Array, "tokens outputs"]:
        """Compute ``x @ matrix`` in ``dtype``.

        On a CPU, a ``kernel`` rounds ``x`` to 16 bits in groups of 256 numbers: always for blocks,
        and for int8 if the tokens are few. Without one, ``int8.split_product`` adds an error of at
        most ``max(abs(x)) / 64516`` to few tokens.
        """
        is_few = len(x) <= _MAX_FEW
        integer_product = split_product
        if self.kernel:
            from jllama.kernels import quantized  # brings numba

            integer_product = functools.partial(quantized.product, self.kernel)
        if self.is_blocks:
            return integer_product(x, self.values).astype(dtype)
        if self.scale is None:
            product = functools.partial(_product, dtype=dtype)
            on_cpu = functools.partial(_product_from_left, dtype=dtype) if is_few else product
            return jax.lax.platform_dependent(x, self.values, cpu=on_cpu, default=product)
        on_cpu = integer_product if is_few else _late_product
        product = jax.lax.platform_dependent(x, self.values, cpu=on_cpu, default=_product)
        return (product * self.scale.astype(product.dtype)).astype(dtype)


def project(
    x: Float[Array, "*lead inputs"], matrix: Array | DecodeMatrix
) -> Float[Array, "*lead outputs"]:
    """Compute ``x @ matrix`` in float32 for any dtype of ``x`` (in float64 for float64)."""
    flat = x.reshape(-1, x.shape[-1])
    wide = sum_dtype(x)
    if isinstance(matrix, DecodeMatrix):
        product = matrix.multiply(flat, wide)
    else:
        product = jnp.matmul(flat, matrix, preferred_element_type=wide)
    return product.reshape(*x.shape[:-1], matrix.shape[1])


def decode_matrix(
    matrix: Float[Array, "*axes"], inputs: Sequence[int], quantize: Literal["int8"] | None = None
) -> DecodeMatrix:
    """Lay out a matrix outputs first, and round it to int8 with ``quantize``.

    ``inputs`` are the axes that a product sums over.
    """
    outputs = [axis for axis in range(matrix.ndim) if axis not in inputs]
    num_outputs = math.prod(matrix.shape[axis] for axis in outputs)
    rows = matrix.transpose(*outputs, *inputs).reshape(num_outputs, -1)
    values, scale = int8_rows(rows) if quantize else (rows, None)
    return DecodeMatrix(values, scale, matrix.shape)


def choose_kernel(kind: str, inputs: int) -> str:
    """Return the kernel for weights of a kind, ``int8`` or a GGML type; empty if there is none.

    There are kernels on CPUs, with numba, for whole blocks of 32 inputs.
    """
    is_served = kind in KERNELS and inputs % 32 == 0 and jax.default_backend() == "cpu"
    if not is_served or importlib.util.find_spec("numba") is None:
        return ""
    from jllama.kernels import quantized  # brings numba

    quantized.register(kind)
    return kind


def _product(x: Array, values: Array, dtype: Any = jnp.float32) -> Array:
    """Compute ``x @ values.T``; integers are widened like ``x``."""
    return jnp.einsum("ti,oi->to", x, values, preferred_element_type=dtype)


def _product_from_left(x: Array, values: Array, dtype: Any) -> Array:
    """Compute ``(values @ x.T).T``: 1.5 times as fast for eight tokens.

    The barriers keep XLA from turning the product around again. XLA widens bfloat16 on a CPU in any
    case; where it does so by itself, a product in a loop adds in another order than one outside.
    """
    wide = sum_dtype(x)
    columns = jax.lax.optimization_barrier(x.T.astype(wide))
    product = jnp.matmul(values.astype(wide), columns)
    return jax.lax.optimization_barrier(product).T.astype(dtype)


def _late_product(x: Array, values: Array) -> Array:
    return _product(x, widen_late(values, x))
