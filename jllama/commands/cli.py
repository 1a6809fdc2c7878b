"""What every command shares: dataclasses as options, errors as one sentence, exit codes."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import jsonargparse

from jllama.errors import JllamaError, UsageError

T = TypeVar("T")

COMMANDS = {
    "train": "train a Llama on text",
    "sample": "let a trained model write",
    "doctor": "show what this machine has, and check that it computes rightly",
}
"""Each is a module of ``jllama.commands`` with a function ``main(argv, prog) -> exit code``."""


class _Parser(jsonargparse.ArgumentParser):
    """Reports a mistake as one sentence, naming the nearest option where there is one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(_sentence(message, self.known_options())) from ex

    def known_options(self) -> list[str]:
        return [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]


def parse(options: type[T], argv: Sequence[str], prog: str) -> T:
    """Fill a dataclass from defaults, then ``--config`` YAML files, then flags; the last one wins.

    ``--help`` and ``--print_config`` print and exit.

    Raises:
        UsageError: an option is unknown or has a value of the wrong type or out of range.
    """
    description = (options.__doc__ or "").partition("\n\n")[0]
    parser = _Parser(prog=prog, description=description, default_env=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options below")
    parser.add_class_arguments(options)
    settings = parser.instantiate(parser.parse_args(list(argv)))
    return options(**{name: value for name, value in vars(settings).items() if name != "config"})


def run(command: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command. Returns its exit code: 0 done, 1 failed, 2 bad usage; a mistake of the user's is one sentence."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        module = importlib.import_module(f"jllama.commands.{command}")
        return module.main(arguments, prog or f"python -m jllama {command}")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JllamaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m jllama COMMAND ...``."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run(argv[0], argv[1:])
    listing = "\n".join(f"  {name:8} {purpose}" for name, purpose in COMMANDS.items())
    usage = f"usage: python -m jllama COMMAND [--help] ...\n\n{listing}"
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    problem = f"there is no command {argv[0]!r}{_nearest(argv[0], list(COMMANDS))}" if argv else "a command is missing"
    print(f"error: {problem}\n\n{usage}", file=sys.stderr)
    return 2


def _sentence(message: str, known: list[str]) -> str:
    """The parser's complaint on one line, with the nearest known option if it is about an unknown one."""
    message = " ".join(message.split())
    unknown = re.search(r"unrecognized arguments: --([\w.]+)", message) or re.search(
        r"Option '([\w.]+)' is not accepted", message
    )
    nested = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    name = unknown[1] if unknown else f"{nested[1]}.{nested[2]}" if nested else None
    if name is not None:
        return f"there is no option {name}{_nearest(name, known)}"
    return re.sub(r"typing\.|<class '(\w+)'>", r"\1", message).removeprefix("Parser key ")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    if not close:  # the group may be missing: --learning_rate for --optimizer.learning_rate
        by_last = {option.rpartition(".")[2]: option for option in known}
        close = [by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], list(by_last), 1, 0.6)]
    return f"; did you mean {close[0]}?" if close else ""
