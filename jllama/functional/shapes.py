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
    it happens once, while tracing. NumPy arrays are as good as those of JAX.
    """
    parameters = inspect.signature(function).parameters
    expected = {}
    for name, parameter in parameters.items():
        hint = (typing.get_args(parameter.annotation) or (parameter.annotation,))[0]  # a union's differ in type alone
        if hasattr(hint, "dim_str"):
            expected[name] = (Integer if hint.dtype is Int else hint.dtype)[Any, hint.dim_str]  # tokens may be unsigned

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
    sentence = f"{wrong} is {_given(arrays[wrong])} but {_shown(expected[wrong])} is expected"
    before = list(arrays)[: list(arrays).index(wrong)]
    if before and isinstance(arrays[wrong], expected[wrong].dtype[Any, "..."]):
        beside = (f"{name} {_given(arrays[name])} is {_shown(expected[name])}" for name in before)
        sentence += f", where {' and '.join(beside)}"
    if not _misfit({name: _axes_1_and_2_exchanged(array) for name, array in arrays.items()}, expected):
        sentence += "; it fits after swapaxes(1, 2), heads before seq"
    return sentence


def _given(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "shape") else f"a {type(array).__name__}"


def _shown(hint: Any) -> str:
    """``Bool[Any, "#batch kv_seq"]`` as ``bool[batch or 1, kv_seq]``."""
    axes = [f"{axis[1:]} or 1" if axis.startswith("#") else axis.replace("#", "") for axis in hint.dim_str.split()]
    return f"{hint.dtype.__name__.lower()}[{', '.join(axes)}]"


def _axes_1_and_2_exchanged(array: Any) -> Any:
    shape = getattr(array, "shape", ())
    return jax.ShapeDtypeStruct((shape[0], shape[2], shape[1], shape[3]), array.dtype) if len(shape) == 4 else array
