"""Checks of array arguments against their annotations, and the dtype of sums.

An error of a check is one sentence.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import Int, Integer, jaxtyped

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` raise ``ValueError`` for arrays of another shape or dtype than annotated.

    Only shapes and dtypes are read. NumPy arrays are as good as those of JAX, and unsigned integers
    as good as signed ones.
    """
    parameters = inspect.signature(function).parameters
    expected = {}
    for name, parameter in parameters.items():
        # The members of a union differ in the type of the array alone.
        members = typing.get_args(parameter.annotation) or (parameter.annotation,)
        hint = members[0]
        if hasattr(hint, "dim_str"):
            dtype: Any = Integer if hint.dtype is Int else hint.dtype
            expected[name] = dtype[Any, hint.dim_str]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        values = dict(zip(parameters, args, strict=False)) | kwargs
        arrays = {name: values[name] for name in expected if name in values}
        misfit = _first_misfit(arrays, expected)
        if misfit:
            raise ValueError(f"{function.__name__}: {_describe(misfit, arrays, expected)}")
        return function(*args, **kwargs)

    return call


def _first_misfit(arrays: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Name the first array that does not fit by itself, or together with those before it."""
    with jaxtyped("context"):  # within it, an axis has the same size in all arrays
        for name, array in arrays.items():
            if not isinstance(array, expected[name]):
                return name
    return None


def _describe(misfit: str, arrays: dict[str, Any], expected: dict[str, Any]) -> str:
    """Describe the array that does not fit, those before it, and an exchange of axes that helps."""
    actual = {name: _actual_shape(array) for name, array in arrays.items()}
    annotated = {name: _annotated_shape(expected[name]) for name in arrays}
    message = f"{misfit} is {actual[misfit]} but {annotated[misfit]} is expected"

    # With the right dtype, the sizes of the arrays before it may be the reason.
    names = list(arrays)
    before = names[: names.index(misfit)]
    if before and isinstance(arrays[misfit], expected[misfit].dtype[Any, "..."]):
        sizes = [f" {name} {actual[name]} is {annotated[name]}" for name in before]
        message += ", where" + " and".join(sizes)

    exchanged = {name: _exchange_heads(array) for name, array in arrays.items()}
    if not _first_misfit(exchanged, expected):
        message += "; it fits after swapaxes(1, 2), heads before seq"
    return message


def _actual_shape(array: Any) -> str:
    if hasattr(array, "shape"):
        return f"{array.dtype}{list(array.shape)}"
    return f"a {type(array).__name__}"


def _annotated_shape(hint: Any) -> str:
    axes = []
    for axis in hint.dim_str.split():
        may_be_one = axis.startswith("#")
        name = axis.replace("#", "")
        axes.append(f"{name} or 1" if may_be_one else name)
    return f"{hint.dtype.__name__.lower()}[{', '.join(axes)}]"


def _exchange_heads(array: Any) -> Any:
    """Exchange heads and sequence in the shape of an array with four axes."""
    if np.ndim(array) != 4:
        return array
    return jax.eval_shape(lambda array: array.swapaxes(1, 2), array)


def power_of_two_at_least(number: int, minimum: int) -> int:
    """Round a length up, so that few programs are compiled."""
    return max(minimum, 1 << (number - 1).bit_length())
