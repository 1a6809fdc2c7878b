"""What every command shares: dataclasses as options, errors as one sentence, exit codes."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import os
import re
import sys
import typing
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import docstring_parser
import jsonargparse

from jllama.errors import JllamaError, UsageError

T = TypeVar("T")

COMMANDS = {
    "train": "train a Llama on text",
    "sample": "let a trained model write",
    "chat": "talk with a model in the terminal",
    "convert": "turn a checkpoint of any format into another",
    "verify": "prove that jllama, or a checkpoint of yours, computes what the oracle does",
    "eval": "measure how well a model predicts a text",
    "bench": "measure how fast a model decodes here",
    "doctor": "show what this machine has, and check that it computes rightly",
}
"""Each is a module of ``jllama.commands`` with a function ``main(argv, prog) -> exit code``."""


_TYPES = {"int": "a whole number", "float": "a finite number", "bool": "true or false", "str": "text"}


class _Parser(jsonargparse.ArgumentParser):
    """Reports a mistake as one sentence, naming the nearest option where there is one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(_sentence(message, self.known_options())) from ex

    def known_options(self) -> list[str]:
        return [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]


def parse(options: type[T], argv: Sequence[str], prog: str, positional: Sequence[str] = ()) -> T:
    """Fill a dataclass from defaults, then ``--config`` YAML files, then flags; the last one wins.

    Fields named in ``positional`` are given in order and without their names; one with a default may be left out.
    ``--help`` and ``--print_config`` print and exit.

    Raises:
        UsageError: an option is unknown or has a value of the wrong type or out of range.
    """
    description = (options.__doc__ or "").partition("\n\n")[0]
    parser = _Parser(prog=prog, description=description, default_env=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options below")
    explained = {param.arg_name: param.description for param in docstring_parser.parse(options.__doc__ or "").params}
    for field in dataclasses.fields(options):  # pyright: ignore[reportArgumentType] - T is a dataclass
        if field.name in positional:
            optional = {} if field.default is dataclasses.MISSING else {"nargs": "?", "default": field.default}
            parser.add_argument(field.name, type=str, help=explained[field.name], **optional)
    parser.add_class_arguments(options, skip=set(positional))
    for action in parser._actions:
        if getattr(action, "_typehint", None) in (bool, bool | None):  # --compare alone means --compare true
            action.nargs, action.const = "?", True
        if action.option_strings and len(action.dest) == 1:  # -n as well as --n
            parser._option_string_actions[f"-{action.dest}"] = action
    try:
        settings = parser.parse_args(list(argv))
        for name, kind in typing.get_type_hints(options).items():
            if dataclasses.is_dataclass(kind) and not isinstance(settings[name], jsonargparse.Namespace):
                example = dataclasses.fields(kind)[0].name
                raise UsageError(f"{name} is {settings[name]!r}; it must hold options, such as {name}.{example}")
        settings = parser.instantiate(settings)
    except UnicodeDecodeError as error:
        raise UsageError(f"the --config file is not UTF-8 text: {error}") from error
    except ValueError as error:  # from a dataclass that may also be null
        raise UsageError(_sentence(str(error), parser.known_options())) from error
    return options(**{name: value for name, value in vars(settings).items() if name != "config"})


def run(command: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command. Returns its exit code: 0 done, 1 failed, 2 bad usage; a mistake of the user's is one sentence."""
    _quieten_threads()
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
    except OSError as error:  # a full disk, a file where a folder should be
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return 1


def _quieten_threads() -> None:
    """Orbax raises what goes wrong in its threads, and we say it: hundreds of lines more about it would drown that."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _unraisable(problem: Any) -> None:
    if str(problem.exc_value) != "Event loop is closed":  # tensorstore says so for each write after a failed one
        sys.__unraisablehook__(problem)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m jllama COMMAND ...``."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run(argv[0], argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        listing = "\n".join(f"  {name:8} {purpose}" for name, purpose in COMMANDS.items())
        print(f"usage: python -m jllama COMMAND [--help] ...\n\n{listing}")
        return 0
    problem = f"there is no command {argv[0]!r}{_nearest(argv[0], list(COMMANDS))}" if argv else "a command is missing"
    print(f"error: {problem}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
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
    message = re.sub(r"typing\.|<class '(\w+)'>", r"\1", message).removeprefix("Parser key ")
    if wrong := re.fullmatch(r'"([\w.]+)": Expected an? (.*)\. Got value: (.*)', message):
        wanted = re.sub(r"^Literal\[(.*)\]$", r"one of \1", wrong[2])
        return f"{wrong[1]} is {wrong[3]!r}; it must be {_TYPES.get(wanted, wanted)}"
    if nullable := re.search(r"Subtypes: .* Errors: - (.*) - Expected a NoneType", message):
        where = re.match(r'"([\w.]+)": ', message)
        return f"{where[1]}: {nullable[1]}" if where else nullable[1]
    if message.startswith("Unexpected config:"):
        found = message.partition(":")[2].strip() or "nothing"
        return f"the --config file holds {found!r}; it must hold options, such as 'seed: 1'"
    if message.endswith(": expected one argument"):
        return f"{message} (one that begins with a dash is written --option=-value)"
    return message


def _nearest(name: str, known: list[str]) -> str:
    begun = [option for option in known if option.startswith(name)]
    close = begun[:1] or difflib.get_close_matches(name, known, 1, 0.5)
    if not close:  # the group may be missing: --learning_rate for --optimizer.learning_rate
        by_last = {option.rpartition(".")[2]: option for option in known}
        close = [by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], list(by_last), 1, 0.6)]
    return f"; did you mean {close[0]}?" if close else ""
