"""What every command shares: dataclasses as options, help, errors as one sentence, exit codes. It imports no JAX."""

import _thread
import argparse
import contextlib
import dataclasses
import difflib
import importlib
import importlib.metadata
import io
import logging
import os
import platform
import re
import sys
import textwrap
import threading
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import docstring_parser
import jsonargparse
import yaml

import jllama
from jllama.errors import JllamaError, UsageError, printable, unknown_name

T = TypeVar("T")

COMMANDS = {
    "train": "train a Llama on text",
    "sample": "let a trained model write",
    "chat": "talk with a model in the terminal",
    "serve": "answer over HTTP as OpenAI's API does, with a page to chat",
    "replay": "have a server make an answer again, and compare",
    "convert": "turn a checkpoint of any format into another",
    "verify": "prove that jllama, or a checkpoint of yours, computes what the oracle does",
    "check": "find out what is wrong in the components that a class has written",
    "report": "show what runs have logged, together or into a logger",
    "eval": "measure how well a model predicts a text",
    "data": "show which tokens of a file of chats a model learns from",
    "bench": "measure training, decoding and start-up here, beside limits and peers",
    "plan": "compile a step for TPUs or GPUs that are not there, and say what it needs",
    "cache": "show what is kept to be made only once, or remove it",
    "doctor": "show what this machine has, and check that it computes rightly",
}  # each is a module of ``jllama.commands`` with a function ``main(argv, prog) -> exit code``

_PROGRAM = "jllama" if Path(sys.argv[0]).stem == "jllama" else "python -m jllama"
_EXAMPLES = ("train quickstart", 'sample runs/quickstart --prompt "def "', "chat model.gguf")
_COMPLETION = "tab completion: pip install 'jllama[completion]'; eval \"$(register-python-argcomplete jllama)\""
_ALIASES = """
accumulation=grad_accum,gradient_accumulation,gradient_accumulation_steps
batch_size=bs,bsz,batch,micro_batch_size,per_device_train_batch_size checkpoint=model,model_path,ckpt,input,path
clip_norm=clip,grad_clip,max_grad_norm embed_dim=d_model,dim,n_embd,n_embed,hidden_size,hidden_dim
eval_every=eval_interval,eval_steps learning_rate=lr,max_lr max_new_tokens=max_tokens,max_length,n_predict,num_tokens
max_seq_len=block_size,context,context_length,ctx,ctx_size,n_ctx mlp_dim=d_ff,ffn_dim,intermediate_size
num_heads=heads,n_head,n_heads,num_attention_heads num_layers=depth,layers,n_layer,n_layers,num_hidden_layers
path=corpus,dataset,input,train_data run_dir=out,out_dir,output,output_dir source=input,model
steps=iters,max_iters,max_steps,num_steps target=output,out,outfile temperature=t,temp to=format,outtype
warmup_fraction=warmup,warmup_ratio,warmup_steps weight_decay=wd
"""  # What other tools call an option: never accepted, always answered with the name here.
_SCALARS = {int: ("N", "a whole number"), float: ("X", "a finite number"), str: ("TEXT", "text")}
_HELP = {
    "help": "show the usual options, or with --help all every one, and exit",
    "print_config": "print the configuration that the other arguments make, as YAML, and exit",
}


class _Parser(jsonargparse.ArgumentParser):
    """Reports a mistake as one sentence, naming the nearest option where there is one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = " ".join(message.split())
        # An option that is one value was given a part, such as --data.task.
        message = re.sub(
            r"Parser key \"(.+?)\": .*NestedArg\(key='(.+?)'.*",
            r"unrecognized arguments: --\1.\2",
            message,
        )
        if unknown := re.search(r"unrecognized arguments: -+([\w.-]+)", message):
            message = f"there is no option {unknown[1]}{_nearest(unknown[1], self._option_string_actions)}"
        elif missing := re.search(r"the following arguments are required: (.*)", message):
            names = missing[1].replace(", ", " and ")
            message = f"{names} {'are' if ' ' in names else 'is'} missing; usage: {self.usage}"
        elif message.endswith(": expected one argument"):
            message += " (one that begins with a dash is written --option=-value)"
        elif wrong := re.match(r'Parser key "([\w.]+)": (?:.* value: (.*))?', message):
            hint = next(
                getattr(action, "_typehint", None)
                for action in self._actions
                if action.dest == wrong[1]
            )
            value = f"is {wrong[2].strip(chr(34))!r}; it must" if wrong[2] else "must"
            message = f"{wrong[1]} {value} be {_kind(hint)[1]}"
        raise UsageError(message) from ex


def parse(
    options: type[T],
    argv: Sequence[str],
    prog: str,
    positional: Sequence[str] = (),
    common: Sequence[str] = (),
) -> T:
    """Fill a dataclass from defaults, then ``--config`` YAML files, then flags; the last one wins.

    Fields named in ``positional`` may be given in this order without their names; so may ``config``. ``--help`` prints
    a page with the ``Examples`` of the dataclass and the options in ``common`` (all, if it names none), ``--help all``
    every option, ``--print_config`` the configuration; they exit. So does an empty ``argv``, with code 2, if the first
    positional argument is needed. ``UsageError`` for an unknown option, or a value of the wrong type or out of range.
    """
    asks = not argv or bool({"-h", "--help"} & {*argv})
    usual = (*positional, *common, "help") if asks and common and argv[-1:] != ["all"] else ()
    parser, first = _parser(options, prog, positional, usual), "".join(positional[:1])
    bare = not argv and (first == "config" or f" {first.upper()} " in (parser.usage or ""))
    if bare or (argv and asks):
        print(
            parser.format_help().replace("``", ""), end="", file=sys.stderr if bare else sys.stdout
        )
        raise SystemExit(2 if bare else 0)
    try:
        settings = parser.instantiate(parser.parse_args(_named(parser, argv, positional)))
    except (
        RecursionError,
        IndexError,
        ValueError,
    ) as error:  # IndexError: of --print_config=, with options of its own
        raise UsageError("an option's value cannot be understood: give a plain one") from error
    return options(**{name: value for name, value in vars(settings).items() if name != "config"})


def _parser(options: type, prog: str, positional: Sequence[str], usual: Sequence[str]) -> _Parser:
    """The parser, and its help page: usage, examples, configurations where a command takes one, ``usual`` options."""
    hints, doc = typing.get_type_hints(options), options.__doc__ or ""
    needed = [
        field.name for field in dataclasses.fields(options) if field.default is dataclasses.MISSING
    ]
    words = [name.upper() if name in needed else f"[{name.upper()}]" for name in positional]
    parts = [textwrap.fill(doc.partition("\n\n")[0], 79)]
    examples = [example.description or "" for example in docstring_parser.parse(doc).examples]
    parts += ["examples:\n" + textwrap.indent(lines, f"  {prog} ") for lines in examples]
    if "config" in positional:
        titles = {
            name: path.read_text().splitlines()[0] for name, path in shipped_configs().items()
        }
        parts.append(
            "\n".join(["configurations:", *(f"  {name:22} {titles[name][2:]}" for name in titles)])
        )
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, formatter_class=layout, default_env=False, allow_abbrev=False)
    parser.usage, parser.description = " ".join([prog, *words, "[options]"]), "\n\n".join(parts)
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_class_arguments(options)
    for group in parser._action_groups:
        if doc.startswith(group.title or ":"):
            group.title = None  # the page begins with it
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if bool in (hint, *typing.get_args(hint)):  # --json: --json true
            action.nargs, action.const = "?", True
        if hint not in (None, bool, bool | None):
            action.metavar = _kind(hint)[0]
        shown = type(action.default) is int or (
            action.default and action.default != argparse.SUPPRESS
        )
        default = " (default: %(default)s)" if shown else ""
        action.help = _HELP.get(action.dest, (action.help or "").replace("``", "") + default)
        if dataclasses.is_dataclass(hints.get(action.dest)):
            action.help = argparse.SUPPRESS  # --model FILE, which --config does better
            del parser._option_string_actions[f"--{action.dest}"]
        if usual and action.dest not in usual:
            action.help = argparse.SUPPRESS
        if len(action.dest) == 1:  # -n as well as --n
            parser._option_string_actions[f"-{action.dest}"] = action
    return parser


def _named(parser: _Parser, argv: Sequence[str], positional: Sequence[str]) -> list[str]:
    """The arguments with a name before each that has none, and what each ``--config`` file says in its place."""
    named, words, given = [], list(argv), {word.partition("=")[0] for word in argv}
    names = [name for name in positional if name == "config" or f"--{name}" not in given]
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("-") or name == "-":
            if not names:
                raise UsageError(
                    f"{name + equals + value!r} is one argument too many; usage: {parser.usage}"
                )
            more = f"--{names[0]}+"  # of a list
            option = more if more in parser._option_string_actions else f"--{names.pop(0)}"
            name, equals, value = option, "=", name + equals + value
        elif not equals and words and (words[0] == "-" or not words[0].startswith("-")):
            action = parser._option_string_actions.get(
                name
            )  # an unknown option is taken to have a value
            nargs = 0 if name == "--print_config" else action and action.nargs
            kinds = typing.get_args(getattr(action, "_typehint", None))
            own = ("true", "false", *(word for kind in kinds for word in typing.get_args(kind)))
            if nargs is None or (nargs == "?" and (words[0] in own or not names)):
                equals, value = "=", words.pop(0)
        is_list = (
            typing.get_origin(getattr(parser._option_string_actions.get(name), "_typehint", None))
            is list
        )
        name += "+" * bool(
            is_list and not name.endswith("+") and not value.startswith("[")
        )  # one more of several
        is_file = name == "--config" and equals
        named += (
            _flags(parser, _read_config(parser, value), "--")
            if is_file
            else [name + equals + value]
        )
    return named


def shipped_configs() -> dict[str, Path]:
    """The configurations that jllama brings, by name: from the wheel, or from the repository."""
    package = Path(__file__).parents[1]
    paths = [*package.glob("configs/*.yaml")] or package.parent.glob("configs/*.yaml")
    return {path.stem: path for path in sorted(paths)}


def _read_config(parser: _Parser, name: str) -> yaml.MappingNode:
    """What a ``--config`` file holds, or a shipped configuration by its name."""
    path, shipped = Path(name), shipped_configs()
    try:
        if not path.exists() and str(path.parent) in (".", "configs"):
            path = shipped.get(path.name.removesuffix(".yaml"), path)
        with path.open(encoding="utf-8") as file:
            text = file.read(1_000_001)
        depth = 0
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if len(text) > 1_000_000 or depth > 50 or isinstance(event, yaml.AliasEvent):
                raise RecursionError  # aliases: ten of ten of ten ... is a file of a few lines
        root = yaml.compose(text)
    except RecursionError as error:
        raise UsageError(
            f"{name} is too large or nested too deep, or has aliases: give plain options"
        ) from error
    except OSError as error:
        shown, expected = (
            " ".join(name.split())[:200],
            f"a file, or by its name one of {', '.join(shipped)}",
        )
        if name in jllama.PRESETS and "--preset" in parser._option_string_actions:
            expected = f"--preset {name}"
        raise UsageError(
            f"the configuration {shown} cannot be read: {error.strerror}; give {expected}"
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        shown = " ".join(text.split())[:50] or "nothing"
        raise UsageError(f"{name} holds {shown!r}; it must hold options, such as 'seed: 1'")
    return root


def _flags(parser: _Parser, options: yaml.MappingNode, prefix: str) -> list[str]:
    """The options of a configuration file as arguments: scalars as they are written, null as if left out."""
    flags = []
    for key, node in options.value:
        name = f"{prefix}{key.value}"
        if isinstance(node, yaml.MappingNode) and name not in parser._option_string_actions:
            flags += _flags(parser, node, f"{name}.")
        elif not node.tag.endswith(":null"):
            flags.append(
                f"{name}={node.value if isinstance(node, yaml.ScalarNode) else yaml.serialize(node)}"
            )
    return flags


def _kind(hint: Any) -> tuple[str, str]:
    """How an option's value looks in the help, and what is said where it is wrong."""
    kinds, origin = (
        [kind for kind in typing.get_args(hint) if kind is not types.NoneType],
        typing.get_origin(hint),
    )
    if origin is Literal:
        return "{" + ",".join(map(str, kinds)) + "}", f"one of {', '.join(map(str, kinds))}"
    if origin in (types.UnionType, typing.Union):
        return _kind(kinds[-1])
    json = (
        'a JSON object, such as {"5": 1.5}' if origin in (dict, Mapping) else "JSON, such as [1, 2]"
    )
    if origin is list and kinds == [str]:
        return "TEXT", 'text, or JSON such as ["a", "b"]'
    return ("", "true or false") if hint is bool else _SCALARS.get(hint, ("JSON", json))


def run(command: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command. Returns its exit code: 0 done, 1 failed, 2 bad usage; a mistake of the user's is one sentence."""
    argv, module = sys.argv[1:] if argv is None else [*argv], f"jllama.commands.{command}"
    return _guarded(
        lambda: importlib.import_module(module).main(argv, prog or f"{_PROGRAM} {command}")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``jllama COMMAND ...``, also ``python -m jllama COMMAND ...``."""
    return _guarded(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    name = argv[0] if argv else ""
    if not argv or name in ("-h", "--help"):
        listing = "\n".join(f"  {command:8} {purpose}" for command, purpose in COMMANDS.items())
        examples = "\n".join(f"  {_PROGRAM} {words}" for words in _EXAMPLES)
        page = f"usage: {_PROGRAM} COMMAND [--help] ...\n\n{listing}\n\nexamples:\n{examples}\n\n{_COMPLETION}"
        print(page, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if name == "--version":
        versions = f"jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"
        print(f"jllama {jllama.__version__} ({versions})")
        return 0
    if name in COMMANDS:
        return run(name, argv[1:])
    raise unknown_name("command", name, COMMANDS)


def _complete() -> None:
    """Answer the shell, which asks by environment variables what could come next, and exit."""
    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    if words[1:] and words[1] in COMMANDS and os.environ["COMP_LINE"][len(" ".join(words[:2])) :]:
        os.environ["_ARGCOMPLETE"] = "2"  # words to skip
        run(words[1], ["--"])  # the parser answers, and exits
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=COMMANDS)
    argcomplete.autocomplete(parser)


def _guarded(work: Callable[[], int]) -> int:
    """The exit code of a command, or of what went wrong in it; what the user can do nothing about is a traceback."""
    _prepare_process()
    code, problem = 1, ""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()  # a reader that has gone is noticed here, and not after the end
    except SystemExit as stop:  # help was shown
        code = int(stop.code or 0)
    except JllamaError as error:
        code, problem = (2 if isinstance(error, UsageError) else 1), f"error: {error}"
    except KeyboardInterrupt:
        problem = "stopped"
    except MemoryError as error:
        problem = printable(
            ": ".join(filter(None, ("error: there is not enough memory", str(error))))
        )
    except BrokenPipeError:  # the reader of our output has gone
        pass
    except OSError as error:  # a full disk, a file where a folder should be
        problem = printable(
            ": ".join(
                filter(None, ("error", error.strerror or str(error), str(error.filename or "")))
            )
        )
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        problem = f"error: the device's memory is full ({' '.join(str(error).split())[:200]}): take less at once"
    with contextlib.suppress(OSError):
        print(problem, file=sys.stderr, end="\n" if problem else "", flush=True)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python tries once more, and says so
    return code


def _prepare_process() -> None:
    """Give closed streams the null device, show what a stream cannot encode by its number, and silence threads."""
    while (
        null := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # the lowest free one: no file of ours must become stderr
        pass
    os.close(null)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for name in (
        "absl",
        "asyncio",
    ):  # Orbax raises what goes wrong in its threads: hundreds of lines would drown that
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


_in_hook = threading.RLock()


def _unraisable(problem: Any) -> None:
    """Silent on tensorstore's closed event loop, after each failed write; a Ctrl-C that met a callback comes again."""
    if (
        problem.exc_type is KeyboardInterrupt
    ):  # JAX has one that Python calls at each collection of garbage
        with _in_hook:
            threading.Timer(0.05, _interrupt).start()


def _interrupt() -> None:
    with _in_hook:  # Python would drop it in the hook, too
        _thread.interrupt_main()


def _nearest(name: str, options: Iterable[str]) -> str:
    """The words that suggest an option, by what other tools call it, by how it begins, or by its letters."""
    aliases = {
        name: others for name, _, others in (entry.partition("=") for entry in _ALIASES.split())
    }
    meant: dict[str, str] = {}
    for option in (each.removeprefix("--") for each in options):
        own = option.rpartition(".")[2]  # the group may be missing or wrong: --learning_rate
        meant |= dict.fromkeys([option, own, *aliases.get(own, own).split(",")], option)
    name = name.replace("-", "_")
    own = name.rpartition(".")[2]
    close = [each for each in (name, own) if each in meant] or [
        each for each in meant if each.startswith(name)
    ]
    close = (
        close
        or difflib.get_close_matches(name, meant, 1)
        or difflib.get_close_matches(own, meant, 1)
    )
    return f"; did you mean {meant[close[0]]}?" if close else ""
