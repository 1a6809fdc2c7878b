"""Arrays are held against their annotations, and what does not fit is said in one sentence."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jaxtyping import Int, Integer, jaxtyped

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` raises ``ValueError`` for arrays whose shape or kind of number is not the annotated one.

    The message says what was given and what is expected. Nothing but shapes and dtypes is read, so that under ``jit``
    it happens once, while tracing. NumPy arrays are as good as those of JAX, and unsigned integers as signed ones.
    """
    parameters, expected = inspect.signature(function).parameters, {}
    for name, parameter in parameters.items():
        hint = (typing.get_args(parameter.annotation) or (parameter.annotation,))[0]  # a union's differ in type alone
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
        return next((name for name, array in arrays.items() if not isinstance(array, expected[name])), None)


def _sentence(wrong: str, arrays: dict[str, Any], expected: dict[str, Any]) -> str:
    given, shown, exchanged = {}, {}, dict(arrays)
    for name, array in arrays.items():
        shape = getattr(array, "shape", None)
        given[name] = f"a {type(array).__name__}" if shape is None else f"{array.dtype}{list(shape)}"
        axes = [
            f"{axis[1:]} or 1" if axis[0] == "#" else axis.replace("#", "") for axis in expected[name].dim_str.split()
        ]
        shown[name] = f"{expected[name].dtype.__name__.lower()}[{', '.join(axes)}]"
        if shape is not None and len(shape) == 4:
            exchanged[name] = jax.ShapeDtypeStruct((shape[0], shape[2], shape[1], shape[3]), array.dtype)
    sentence = f"{wrong} is {given[wrong]} but {shown[wrong]} is expected"
    if isinstance(arrays[wrong], expected[wrong].dtype[Any, "..."]):  # its kind is right
        before = list(arrays)[: list(arrays).index(wrong)]
        sentence += ", where" * bool(before) + " and".join(f" {name} {given[name]} is {shown[name]}" for name in before)
    return sentence + "; it fits after swapaxes(1, 2), heads before seq" * (not _misfit(exchanged, expected))
