"""Jinja chat templates, rendered as transformers renders them, but within limits.

A template is a program that comes with a checkpoint, so it is not trusted: jinja2's sandbox keeps it from Python's
internals, and here it also gets a time, a memory and a length that no honest template comes near. Source of what a
template may use: transformers, ``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jllama.errors import JllamaError

SECONDS = 5.0  # of this thread's processor time
MAX_TEXT = 4_000_000  # characters of one text: about a million tokens
MAX_NUMBER = 100_000  # what a filter or function is given: such numbers are widths and counts
MAX_BITS = 1000  # of an integer
MAX_MADE = 256_000_000  # characters of all values made on the way

_PART = 10  # characters: what an entry of a list is reckoned at
_GROWING = ("replace", "join", "indent", "tojson")  # filters and methods that repeat one argument for parts of another
_UNUSED_FILTERS = ("filesizeformat", "pprint", "random", "striptags", "sum", "urlencode", "urlize", "wordwrap")
_UNUSED_METHODS = ("encode", "expandtabs", "to_bytes", "translate")


@dataclasses.dataclass
class _Budget:
    """What is left to the template being rendered in this thread."""

    deadline_s: float
    made: int = 0


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("chat template budget")


def render(template: str, **variables: Any) -> str:
    """The text that a template makes of ``variables``.

    Raises:
        JllamaError: the template is not Jinja, refuses the variables (``raise_exception``), fails, reaches for what
            the sandbox keeps from it, or goes beyond the limits above.
    """
    remedy = "; give another with --template"
    token = _budget.set(_Budget(time.thread_time() + SECONDS))
    try:
        return _compiled(template).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        said = f"the chat template is not Jinja: {error.message} in line {error.lineno}"
    except SecurityError as error:
        said = f"the chat template was stopped: {error}"
    except _RefusedError as error:
        said, remedy = f"the chat template refuses these messages: {error}", ""
    except RecursionError:
        said = "the chat template was stopped: it is nested too deep, or calls itself without end"
    except Exception as error:  # whatever someone's program may raise
        said = f"the chat template failed: {error or type(error).__name__}"
    finally:
        _budget.reset(token)
    line = "".join(char if char.isprintable() else " " for char in said)  # the template may have written it
    raise JllamaError(" ".join(line.split())[:300] + remedy)


class _RefusedError(Exception):
    """The template's own ``raise_exception``."""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that weighs what a template does: operators and calls here, the rest in filters (``_put_filters``)."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise SecurityError(f"it computes a number of over {MAX_BITS} bits")
        elif operator == "*":
            _check_text(_length(left) * _length(right))
        elif operator == "+":
            _check_text(_length(left) + _length(right))
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, values = getattr(__obj, "__self__", None), (*args, *kwargs.values())
        if isinstance(owner, str) and __obj.__name__ == "join":
            _weigh("join", *values, owner)
        elif isinstance(owner, str):
            _weigh(__obj.__name__, owner, *values)
        else:
            _check_numbers(values)
        return _made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks an answer for training: here its content, nothing else."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(Namespace):
    """jinja2's, without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a name called self
        for name in (values := dict(*args[1:], **kwargs)):
            _Namespace._check(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"

    @staticmethod
    def _check(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"it sets {name!r} in a namespace")


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    _check_text(len(template))
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.concat = _join  # pyright: ignore[reportAttributeAccessIssue] - jinja2 means it to be replaced
    filters = environment.filters | {"tojson": _tojson}
    environment.filters = {
        name: functools.update_wrapper(functools.partial(_filter, name, function), function)
        for name, function in filters.items()
        if name not in _UNUSED_FILTERS
    }
    environment.filters |= {"_counted": _counted, "_made": _made, "_joined": lambda values: _join(map(str, values))}
    environment.globals = {
        "range": environment.globals["range"],
        "cycler": jinja2.utils.Cycler,
        "joiner": jinja2.utils.Joiner,
        "namespace": _Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    tree = environment.parse(template)
    _put_filters(tree)
    tree.set_environment(environment)
    return environment.from_string(tree)


def _put_filters(node: nodes.Node) -> None:
    """Count what jinja2 has no method for: each step of a loop, each list and dict written out, each ``a ~ b``."""
    for name, value in list(node.iter_fields()):
        setattr(node, name, [_counting(part) for part in value] if isinstance(value, list) else _counting(value))
    if isinstance(node, nodes.For):
        node.iter = _filtered(node.iter, "_counted")


def _counting(part: Any) -> Any:
    """A field of a node, or one of its parts, with the filters that it and all below it needs."""
    if isinstance(part, nodes.Node):
        _put_filters(part)
    if isinstance(part, nodes.Concat):
        return _filtered(nodes.List(part.nodes, lineno=part.lineno), "_joined")
    is_new = isinstance(part, (nodes.List, nodes.Dict)) or (isinstance(part, nodes.Tuple) and part.ctx == "load")
    return _filtered(part, "_made") if is_new else part


def _filtered(part: Any, name: str) -> nodes.Filter:
    return nodes.Filter(part, name, [], [], None, None, lineno=part.lineno)


def _raise_exception(message: Any) -> None:
    raise _RefusedError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers defines it: jinja2's own escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _filter(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a filter gives, weighed before it runs. What it would make on demand, it makes at once, counted."""
    values = (*args[hasattr(function, "jinja_pass_arg") :], *kwargs.values())  # without the context
    if name == "format":
        _check_format(str(values[0]))
    if name not in ("length", "count"):
        _weigh(name, *values)
    result = function(*args, **kwargs)
    return _made(list(_counted(result)) if isinstance(result, Iterator) else result)


def _weigh(name: str, value: Any, *others: Any) -> None:
    """Refuse a filter or a method of a text whose result may be too long."""
    length, parts = _size((value, *others))
    _check_numbers(others)
    if name in _GROWING:
        texts = [other for other in others if isinstance(other, str)]
        hits = max(parts, _length(value))
        if isinstance(value, str) and name != "join":
            hits = max(value.count(text) for text in ("\n", *texts))
        length += hits * max([4, *map(len, texts), *(other for other in others if isinstance(other, int))])
    _check_text(length)


def _size(value: Any) -> tuple[int, int]:
    """Characters and parts of a value, those of lists in lists too: what is in it twice counts twice."""
    characters, parts, rest = 0, 0, [value]
    while rest and characters + _PART * (parts + len(rest)) <= MAX_TEXT:
        value = rest.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Collection) and not isinstance(value, range):
            rest.extend(value)
            rest.extend(value.values() if isinstance(value, dict) else ())
        parts += 1
    _check_text(characters + _PART * (parts + len(rest)))
    return characters, parts


def _length(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else len(value) if isinstance(value, Collection) else 1


def _check_text(length: int) -> None:
    if length > MAX_TEXT:
        raise SecurityError(f"it makes a text of over {MAX_TEXT:,} characters")


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values):
        raise SecurityError(f"it gives a filter or function a number over {MAX_NUMBER:,}")


def _check_format(text: str) -> None:
    """Refuse a format with a width that is large, or that is itself a value."""
    if re.search(r"\d{5}|%[-+ #0]*\*|\{[^{}]*\{", text):
        raise SecurityError(f"it formats a value to a width that may be too large: {text[:50]!r}")


def _made(value: Any) -> Any:
    """Pass on a new value, having weighed it and looked at the clock."""
    characters, parts = _size(value)
    budget = _budget.get()
    budget.made += characters + _PART * parts
    if budget.made > MAX_MADE or time.thread_time() > budget.deadline_s:
        raise SecurityError("it takes too much time or memory; perhaps it loops without end")
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _made(None)
        yield value


def _join(parts: Iterable[str]) -> str:
    whole, length = [], 0
    for part in parts:
        length += len(_made(part))
        _check_text(length)
        whole.append(part)
    return "".join(whole)
