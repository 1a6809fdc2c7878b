"""Checks of every call into jllama against its annotations, shapes included.

Import it before jllama.
"""

import functools
import inspect
import typing
from typing import Any

import beartype
import jaxtyping

# With PEP 484's tower an int is a float: configurations have ``rope_theta=500000``.
typechecker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_jaxtyped: Any = jaxtyping.jaxtyped


def _may_have_shape(annotation: Any) -> bool:
    """Whether jaxtyping must check an annotation or a part of it; names in quotes may be of any."""
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_may_have_shape, typing.get_args(annotation)))


def _jaxtyped_if_shaped(*functions: Any, **options: Any) -> Any:
    """Decorate as ``jaxtyping.jaxtyped`` does, but ours without shapes with beartype alone.

    Most functions of jllama have none; beartype alone checks them in a tenth of the time.
    """
    if not functions:
        return functools.partial(_jaxtyped_if_shaped, **options)
    (function,) = functions
    if getattr(function, "__module__", "") == "jllama.kernels.quantized":
        return function  # Numba compiles a function from its own code
    is_ours = inspect.isfunction(function) and function.__module__.startswith("jllama")
    if is_ours and not any(map(_may_have_shape, function.__annotations__.values())):
        return typechecker(function)
    return _jaxtyped(function, **options)


# The hook looks for this name when a module is imported.
jaxtyping.jaxtyped = _jaxtyped_if_shaped
jaxtyping.install_import_hook("jllama", "typecheck.typechecker")
