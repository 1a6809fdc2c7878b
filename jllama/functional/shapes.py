"""Arrays are held against their annotations, and what does not fit is said in one sentence."""

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
    """``function`` raises ``ValueError`` for arrays whose shape or kind of number is not the annotated one.

    Only shapes and dtypes are read. NumPy arrays are as good as those of JAX, and unsigned integers as signed ones.
    """
    parameters, expected = inspect.signature(function).parameters, {}
    for name, parameter in parameters.items():
        hint = (typing.get_args(parameter.annotation) or (parameter.annotation,))[
            0
        ]  # a union's differ in type alone
        if hasattr(hint, "dim_str"):
            expected[name] = (Integer if hint.dtype is Int else hint.dtype)[Any, hint.dim_str]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        arrays = {name: given[name] for name in expected if name in given}
        if wrong := _misfit(arrays, expected):
            raise ValueError(f"{function.__name__}: {_sentence(wrong, arrays, expected)}")
        return function(*args, **kwargs)

    return call


def _misfit(arrays: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first array that does not fit by itself, or beside those before it."""
    with jaxtyped("context"):  # in which an axis has one size, whichever array it is met in
        return next(
            (name for name, array in arrays.items() if not isinstance(array, expected[name])), None
        )


def _sentence(wrong: str, arrays: dict[str, Any], expected: dict[str, Any]) -> str:
    given, shown = {}, {}
    for name, array in arrays.items():
        given[name] = (
            f"{array.dtype}{list(array.shape)}"
            if hasattr(array, "shape")
            else f"a {type(array).__name__}"
        )
        axes = (
            f"{axis.replace('#', '')}{' or 1' * (axis[0] == '#')}"
            for axis in expected[name].dim_str.split()
        )
        shown[name] = f"{expected[name].dtype.__name__.lower()}[{', '.join(axes)}]"
    sentence = f"{wrong} is {given[wrong]} but {shown[wrong]} is expected"
    before = list(arrays)[: list(arrays).index(wrong)]
    if before and isinstance(arrays[wrong], expected[wrong].dtype[Any, "..."]):  # its kind is right
        sentence += ", where" + " and".join(
            f" {name} {given[name]} is {shown[name]}" for name in before
        )
    exchanged = {
        k: jax.eval_shape(lambda x: x.swapaxes(1, 2), x) if np.ndim(x) == 4 else x
        for k, x in arrays.items()
    }
    return sentence + "; it fits after swapaxes(1, 2), heads before seq" * (
        not _misfit(exchanged, expected)
    )
