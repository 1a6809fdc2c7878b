"""The errors that all of jllama raises.

The core is the way from a token to a trained weight. Its files import only each other; in reading
order they are ``config``, ``parameters``, ``ops``, ``model``, ``step`` and ``engine``. Everything
here works on one device and is its formula; faster forms and more devices come as arguments.
"""

import re
import reprlib
from collections.abc import Callable
from typing import Any


def printable(text: str) -> str:
    """Return a line for a terminal: control characters escaped, very long words and texts cut."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    words = re.sub(r"(\S{200})\S{100,}(\S{200})", r"\1...\2", escaped)
    return re.sub(r"(?s)^(.{4000}).{500,}(.{1500})$", r"\1 ... \2", words)


class JllamaError(Exception):
    """An error in the user's files or data (exit code 1).

    The message is one sentence: what was found, what was expected, what to do. Further arguments
    are lines printed below it.

    Examples:
        >>> print(JllamaError("model.json is not JSON: write it again"))
        model.json is not JSON: write it again
    """

    def __str__(self) -> str:
        return "\n".join(map(printable, self.args))


class UsageError(JllamaError):
    """An error in the command line, the configuration or an argument (exit code 2).

    Examples:
        >>> import jllama
        >>> try:
        ...     jllama.preset("llama3.2-1")
        ... except jllama.UsageError as error:
        ...     print(error)
        there is no preset llama3.2-1; did you mean llama3.2-1b?
    """


def check_fields(
    config: Any, group: str, names: str, is_right: Callable[[Any], bool], expected: str
) -> None:
    """Raise ``UsageError`` for the first field of a configuration with a wrong value.

    Args:
        config: the configuration.
        group: where its fields stand in a file of options, such as ``lora.``.
        names: the fields to check, separated by spaces.
        is_right: whether a value is allowed.
        expected: what is allowed, in words.
    """
    for name in names.split():
        value = getattr(config, name)
        if not is_right(value):
            shown = "empty" if value == "" else value
            raise UsageError(f"{group}{name} is {shown}; it must be {expected}")


def check_size(name: str, value: int, max_size: int, *, min_size: int = 1) -> None:
    """Raise ``UsageError`` unless a size is an integer from ``min_size`` to ``max_size``."""
    if type(value) is not int:
        raise UsageError(f"{name} is {reprlib.repr(value)}; it must be a whole number")
    if value < min_size:
        expected = "at least 1" if min_size else "positive, or 0 to derive it"
        raise UsageError(f"{name} is {value}; it must be {expected}")
    if value > max_size:
        raise UsageError(f"{name} is {value:,}; it must be at most {max_size:,}: no Llama has more")
