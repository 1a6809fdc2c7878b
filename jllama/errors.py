"""The two errors a user can cause; the command line prints them as one sentence and no traceback."""

import difflib
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

MAX_SEQ_LEN = 1 << 28
"""At least 25 times any released Llama's, so what is larger is a slip or a damaged file."""


class JllamaError(Exception):
    """The user's files or data are wrong (exit code 1); one sentence: what was found, what was expected, what to do."""


class UsageError(JllamaError):
    """The command line or the configuration is wrong (exit code 2)."""


class ContextError(UsageError):
    """A prompt and its new tokens exceed the context."""

    code = "context_length_exceeded"  # as OpenAI calls it


def check_fields(config: Any, group: str, names: str, is_right: Callable[[Any], bool], expected: str) -> None:
    """Raise ``UsageError`` for the first of a configuration's fields (``names``, with spaces) that is not right."""
    for name in names.split():
        if not is_right(value := getattr(config, name)):
            raise UsageError(f"{group}{name} is {'empty' if value == '' else value}; it must be {expected}")


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UsageError:
    """The error for a name that a registry does not have: it gives the nearest one, or all of them."""
    nearest = difflib.get_close_matches(name, names := list(names), 1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
    return UsageError(f"there is no {kind} {name}; {advice}")


def no_tokenizer(source: object) -> JllamaError:
    """The error for a model, by its path or name, that has no tokenizer where one is needed."""
    return JllamaError(f"{source} has no tokenizer: put the one it was trained with beside its weights")


def check_size(name: str, value: int, most: int, *, least: int = 1) -> None:
    """Raise ``UsageError`` unless a size is a whole number from ``least`` to ``most``."""
    if type(value) is not int:
        raise UsageError(f"{name} is {reprlib.repr(value)}; it must be a whole number")
    if value < least:
        raise UsageError(f"{name} is {value}; it must be {'at least 1' if least else 'positive, or 0 to work it out'}")
    if value > most:
        raise UsageError(f"{name} is {value:,}, and no Llama's is over {most:,}: it cannot be meant")
