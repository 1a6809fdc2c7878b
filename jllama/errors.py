"""The two errors a user can cause; the command line prints them as one sentence and no traceback."""

import contextlib
import difflib
import os
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MAX_SEQ_LEN = 1 << 28
"""At least 25 times any released Llama's, so what is larger is a slip or a damaged file."""
_SILENCE = threading.Lock()  # stderr is one for all threads


def printable(text: str) -> str:
    """A line for a terminal: control characters are escaped, and what is absurdly long is cut."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    words = re.sub(r"(\S{200})\S{100,}(\S{200})", r"\1...\2", escaped)
    return re.sub(r"(?s)^(.{4000}).{500,}(.{1500})$", r"\1 ... \2", words)


class JllamaError(Exception):
    """The user's files or data are wrong (exit code 1); one sentence: what was found, what was expected, what to do.

    Further arguments are lines below it.
    """

    def __str__(self) -> str:
        return "\n".join(map(printable, self.args))


class UsageError(JllamaError):
    """The command line or the configuration is wrong (exit code 2)."""


class ContextError(UsageError):
    """A prompt and its new tokens exceed the context."""

    code = "context_length_exceeded"  # as OpenAI calls it


def check_fields(
    config: Any, group: str, names: str, is_right: Callable[[Any], bool], expected: str
) -> None:
    """Raise ``UsageError`` for the first of a configuration's fields (``names``, with spaces) that is not right."""
    for name in names.split():
        if not is_right(value := getattr(config, name)):
            raise UsageError(
                f"{group}{name} is {'empty' if value == '' else value}; it must be {expected}"
            )


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UsageError:
    """The error for a name that a registry does not have: it gives the nearest one, or all of them."""
    nearest = difflib.get_close_matches(name, names := list(names), 1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
    return UsageError(f"there is no {kind} {name}; {advice}")


def no_tokenizer(source: object) -> JllamaError:
    """The error for a model, by its path or name, that has no tokenizer where one is needed."""
    return JllamaError(
        f"{source} has no tokenizer: put the one it was trained with beside its weights"
    )


def check_size(name: str, value: int, most: int, *, least: int = 1) -> None:
    """Raise ``UsageError`` unless a size is a whole number from ``least`` to ``most``."""
    if type(value) is not int:
        raise UsageError(f"{name} is {reprlib.repr(value)}; it must be a whole number")
    if value < least:
        raise UsageError(
            f"{name} is {value}; it must be {'at least 1' if least else 'positive, or 0 to work it out'}"
        )
    if value > most:
        raise UsageError(
            f"{name} is {value:,}, and no Llama's is over {most:,}: it cannot be meant"
        )


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Inside, nothing reaches stderr: before they fail, libraries print panics (Rust) and stacks (C++) there."""
    with _SILENCE, open(os.devnull, "wb") as null:
        stderr = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
