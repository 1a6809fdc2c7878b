"""Rewards that come with jllama; each can be verified without a model."""

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jllama.core import JllamaError, UsageError
from jllama.system.files import errors_as
from jllama.templates.template import render

Reward = Callable[[Any, Sequence[str], Mapping[str, Any]], Sequence[float | None]]
"""``(prompt, answers, row) -> scores``, one for each answer; None leaves an answer out."""

_NUMBER = re.compile(
    r"(?<![\d.])(?<!\d[-+*/^])"  # not in the middle of a number or of an expression
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?!\d|[.,]\d|[-+*/^]\d)"
)


def checked_scores(scores: Any) -> list[float | None]:
    """Return a reward's scores as floats; raise ``TypeError`` if they are no list of numbers."""
    if isinstance(scores, str | bytes | Mapping):
        kind = type(scores).__name__
        raise TypeError(f"it returned a {kind}, where a list of a number for each answer should be")
    return [None if score is None else float(score) for score in scores]


def field(row: Mapping[str, Any], name: str) -> Any:
    """Return a field of a record; raise ``JllamaError`` if it is missing."""
    if name not in row:
        raise JllamaError(f"the row has no field {name}, but {', '.join(row)}")
    return row[name]


def exact(argument: str) -> Reward:
    """Reward answers that equal the field ``answer``, or the one named, but for outer spaces."""
    name = argument or "answer"

    def score(prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        expected = str(field(row, name)).strip()
        return [float(answer.strip() == expected) for answer in answers]

    return score


def number(argument: str) -> Reward:
    """Reward answers whose last number is that of the field ``answer``, or the one named.

    Numbers may have signs, decimals, and commas between thousands. Expressions such as 5-3 are no
    numbers. The field is a number and nothing else, or ends with ``####`` and a number, as those of
    GSM8K do.
    """
    name = argument or "answer"

    def score(prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        text = str(field(row, name)).rpartition("####")[2].strip()
        expected = last_number(text)
        if not _NUMBER.fullmatch(_with_ascii_signs(text)):
            raise JllamaError(f"the row's field {name} is {text!r}, where a number should be")
        return [float(last_number(answer) == expected) for answer in answers]

    return score


def last_number(text: str) -> float | None:
    """Return the last number in a text that is no part of an expression, or None."""
    matches = _NUMBER.findall(_with_ascii_signs(text))
    return float(matches[-1].replace(",", "")) if matches else None


def _with_ascii_signs(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def regex(argument: str) -> Reward:
    """Reward answers that the pattern, or that in the field ``pattern``, matches as a whole."""
    if argument:
        _compile(argument)  # raises

    def score(prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        pattern = _compile(argument or str(field(row, "pattern")))
        return [float(pattern.fullmatch(answer.strip()) is not None) for answer in answers]

    return score


@functools.lru_cache
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UsageError(f"the pattern {pattern!r} is no regular expression: {error}") from error


def json_by_schema(argument: str) -> Reward:
    """Reward answers that are JSON by the schema in a file, or in the field ``schema``."""
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
    except ImportError as error:
        raise JllamaError("the reward json needs pip install 'jllama[rewards]'") from error
    schema = None
    if argument:
        with errors_as(argument, OSError, ValueError):
            schema = json.loads(Path(argument).read_text(encoding="utf-8"))

    def score(prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        expected = field(row, "schema") if schema is None else schema
        validator = jsonschema.validators.validator_for(expected)
        validator.check_schema(expected)
        return [float(_is_valid(validator(expected), answer)) for answer in answers]

    return score


def _is_valid(validator: Any, answer: str) -> bool:
    try:
        return validator.is_valid(json.loads(answer, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def expression(argument: str) -> Reward:
    """Reward answers by an expression of ``answer``, ``prompt`` and ``row``.

    It is evaluated in the sandbox of chat templates, whose language is nearly Python's.
    """
    if not argument:
        raise UsageError("the reward expression needs one: expression:answer == row.answer")
    template = f"{{% for answer in answers %}}{{{{ ({argument}) | tojson }}}}\n{{% endfor %}}"

    def score(prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        text = render(template, prompt=prompt, answers=[*answers], row={**row})
        return [float(json.loads(line)) for line in text.splitlines()]

    return score


def length(argument: str) -> Reward:
    """Subtract the share by which an answer is longer than so many characters, at most 1."""
    if not argument.isdigit() or not int(argument):
        raise UsageError(f"the reward length has {argument!r}; it needs a number: length:200")
    limit = int(argument)

    def score(prompt: Any, answers: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        return [-min(max(len(answer) - limit, 0) / limit, 1.0) for answer in answers]

    return score


REWARDS: dict[str, Callable[[str], Reward]] = {
    "exact": exact,
    "number": number,
    "regex": regex,
    "json": json_by_schema,
    "expression": expression,
    "length": length,
}
"""Rewards by name. An entry takes the text after the colon of ``name:text``, which may be empty. To
add one::

    jllama.REWARDS["short"] = lambda text: lambda prompt, answers, row: [-len(a) for a in answers]
"""
