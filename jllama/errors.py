"""The two errors a user can cause; the command line prints them as one sentence and no traceback."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class JllamaError(Exception):
    """Something went wrong with the user's files or data (exit code 1).

    The message is one sentence: what was found, what was expected, what to do.
    """


class UsageError(JllamaError):
    """The command line or the configuration is wrong (exit code 2)."""


def check_fields(config: Any, group: str, names: str, is_right: Callable[[Any], bool], expected: str) -> None:
    """Raise ``UsageError`` for the first of a configuration's fields (``names``, with spaces) that is not right."""
    for name in names.split():
        if not is_right(value := getattr(config, name)):
            raise UsageError(f"{group}{name} is {value}; it must be {expected}")


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UsageError:
    """The error for a name that a registry does not have: it gives the nearest one, or all of them."""
    nearest = difflib.get_close_matches(name, names := list(names), 1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
    return UsageError(f"there is no {kind} {name}; {advice}")
