"""Errors that a user can cause; the command line prints one sentence and no traceback."""

import contextlib
import difflib
import os
import shlex
import threading
from collections.abc import Iterable, Iterator

from jllama.core import JllamaError, UsageError

_SILENCE = threading.Lock()  # all threads share one stderr


class ContextError(UsageError):
    """A prompt and its new tokens do not fit into the context."""

    code = "context_length_exceeded"  # OpenAI's name for it


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UsageError:
    """Return the error for a name that a registry lacks; it suggests the nearest or all names."""
    names = list(names)
    nearest = difflib.get_close_matches(name, names, 1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
    return UsageError(f"there is no {kind} {name}; {advice}")


def no_tokenizer(source: object) -> JllamaError:
    """Return the error for a model (its path or name) without the tokenizer that a task needs."""
    return JllamaError(
        f"{source} has no tokenizer: put the one it was trained with beside its weights"
    )


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard what is written to stderr inside the block.

    Before they fail, libraries print panics (Rust) and stacks (C++) there.
    """
    with _SILENCE, open(os.devnull, "wb") as null:
        stderr = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def shell_command(*words: object) -> str:
    """Return a command line of jllama with these words, for a shell."""
    return shlex.join(["python", "-m", "jllama", *map(str, words)])
