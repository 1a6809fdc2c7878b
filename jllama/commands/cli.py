"""What all commands share: dataclasses as options, help pages, exit codes and error messages.

This module imports no JAX, so help and usage errors appear at once.
"""

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
from jllama.core import JllamaError, UsageError, printable
from jllama.system.errors import unknown_name

T = TypeVar("T")

# Each command is a module of ``jllama.commands`` with a function ``main(argv, prog) -> exit code``.
COMMANDS = {
    "train": "train a Llama on text or chats",
    "sample": "generate text",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over HTTP as OpenAI's API does, with a chat page",
    "convert": "convert a checkpoint to another format",
    "verify": "compare jllama, or a checkpoint, with the NumPy reference",
    "report": "write a page about one or several runs, or send their metrics to a logger",
    "eval": "measure how well a model predicts text or solves tasks",
    "data": "show what a model learns from a chat file, or tokenize texts once",
    "bench": "measure training, generation and start-up, beside limits and peers",
    "plan": "predict memory and speed on TPUs or GPUs that are not present",
    "speedrun": "make a chat model from text, by all stages",
    "doctor": "show versions and devices, and run self-checks",
}

VERBS = {
    "audit": ("verify", "compute steps of a training run again, and compare them"),
    "bisect": ("verify", "find where two checkpoints or runs begin to differ"),
    "check": ("verify", "find mistakes in model components written by a class"),
    "replay": ("verify", "repeat a server's answer and compare the two"),
    "cache": ("doctor", "list or remove cached files"),
}
"""Commands that stand behind another one, such as ``jllama verify audit``, and their purpose."""

_PROGRAM = "jllama" if Path(sys.argv[0]).stem == "jllama" else "python -m jllama"
_EXAMPLES = ("train quickstart", 'sample runs/quickstart --prompt "def "', "chat model.gguf")
_COMPLETION = (
    "tab completion: pip install 'jllama[completion]'; "
    'eval "$(register-python-argcomplete jllama)"'
)
# The names that other tools use for an option. They are never accepted: an error suggests our name.
_ALIASES = """
accumulation=grad_accum,gradient_accumulation,gradient_accumulation_steps
batch_size=bs,bsz,batch,micro_batch_size,per_device_train_batch_size
checkpoint=model,model_path,ckpt,input,path clip_norm=clip,grad_clip,max_grad_norm
embed_dim=d_model,dim,n_embd,n_embed,hidden_size,hidden_dim eval_every=eval_interval,eval_steps
learning_rate=lr,max_lr max_new_tokens=max_tokens,max_length,n_predict,num_tokens
max_seq_len=block_size,context,context_length,ctx,ctx_size,n_ctx
mlp_dim=d_ff,ffn_dim,intermediate_size num_heads=heads,n_head,n_heads,num_attention_heads
num_layers=depth,layers,n_layer,n_layers,num_hidden_layers path=corpus,dataset,input,train_data
run_dir=out,out_dir,output,output_dir source=input,model steps=iters,max_iters,max_steps,num_steps
target=output,out,outfile temperature=t,temp to=format,outtype
warmup_fraction=warmup,warmup_ratio,warmup_steps weight_decay=wd
"""
_WITHOUT_EFFECT = {"--training.grpo.exact=false"}
"""Options of earlier versions, as the files of their runs have them."""
_NEAR = 0.75  # the share of letters in order that makes a name near
_SCALARS = {int: ("N", "a whole number"), float: ("X", "a finite number"), str: ("TEXT", "text")}
_HELP = {
    "help": "show this page; --help all shows every option",
    "print_config": "print the configuration as YAML, and exit",
}


_EXPERT = """
rope_factor resume_with_changes data.encoding data.follow_links optimizer.epsilon
optimizer.moment_dtype training.spike_factor training.z_loss training.deterministic
training.reduce_dtype training.compiler_options training.max_skipped training.profile
training.grpo.clip_low training.grpo.clip_high training.grpo.importance_cap
training.grpo.mask_overlong training.grpo.updates training.grpo.eval_prompts
training.grpo.reward_limit_s training.grpo.reward_processes mesh.rules distributed.timeout_s
"""
"""Options that stand at the end of the help, because few users set them."""
_IMPORTS = "Python files of yours to run first; they add blocks and more (docs/extend.md)"


class _Parser(jsonargparse.ArgumentParser):
    """Parser that reports a mistake as one sentence and suggests the nearest option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(_plain_message(self, " ".join(message.split()))) from ex


def _plain_message(parser: _Parser, message: str) -> str:
    """Translate a message of argparse or jsonargparse."""
    # An option that has a single value was given a part, such as --data.task.
    part = r"Parser key \"(.+?)\": .*NestedArg\(key='(.+?)'.*"
    message = re.sub(part, r"unrecognized arguments: --\1.\2", message)
    unknown = re.search(r"unrecognized arguments: -+([\w.-]+)", message)
    if unknown:
        name = unknown[1]
        return f"there is no option {name}{_suggestion(name, parser._option_string_actions)}"
    missing = re.search(r"the following arguments are required: (.*)", message)
    if missing:
        names = missing[1].replace(", ", " and ")
        return f"{names} {'are' if ' ' in names else 'is'} missing; usage: {parser.usage}"
    if message.endswith(": expected one argument"):
        return f"{message} (write a value that begins with a dash as --option=-value)"
    wrong = re.match(r'Parser key "([\w.]+)": (?:.* value: (.*))?', message)
    if wrong:
        name, value = wrong.groups()
        actions = {action.dest: action for action in parser._actions}
        expected = _kind(getattr(actions[name], "_typehint", None))[1]
        if not value:
            return f"{name} must be {expected}"
        value = value.strip('"')
        return f"{name} is {value!r}; it must be {expected}"
    return message


def parse(
    options: type[T],
    argv: Sequence[str],
    prog: str,
    positional: Sequence[str] = (),
    common: str = "",
) -> T:
    """Build a dataclass of options from its defaults, ``--config`` YAML files and flags.

    Flags override files, and later files override earlier ones. An empty ``argv`` prints the help
    page to stderr and exits with code 2 if the first positional argument is required.

    Args:
        options: the dataclass; its docstring is the help page, with ``Examples`` and ``Args``.
        argv: the arguments. ``--help`` prints the page, ``--help all`` the page with every option,
            ``--print_config`` the configuration; these three exit with code 0.
        prog: the program's name on the page.
        positional: fields whose values may be given in this order without their names; ``config``
            may be one of them.
        common: names, with spaces, of the other options on the short page; "" shows all.

    Raises:
        UsageError: if an option is unknown, or a value has the wrong type or is out of range.
    """
    asks_help = bool({"-h", "--help"} & {*argv})
    shown: Sequence[str] = ()
    if (asks_help or not argv) and common and argv[-1:] != ["all"]:
        shown = (*positional, *common.split(), "help")
    parser = _parser(options, prog, positional, shown)
    first = positional[0] if positional else ""
    needs_argument = first == "config" or f" {first.upper()} " in (parser.usage or "")
    if asks_help or (needs_argument and not argv):
        page = parser.format_help().replace("``", "")
        print(page.rstrip(), file=sys.stdout if argv else sys.stderr)
        raise SystemExit(0 if argv else 2)
    try:
        settings = parser.parse_args(_flags(parser, argv, positional))
        _import_files(settings.imports)
        settings = parser.instantiate(settings)
    # An IndexError comes from --print_config= with options of its own.
    except (RecursionError, IndexError, ValueError) as error:
        raise UsageError("the value of an option cannot be parsed; give a plain value") from error
    settings.pop("config")
    settings.pop("imports")
    return options(**vars(settings))


def _import_files(paths: Iterable[str]) -> None:
    """Run Python files that add blocks and more (docs/extend.md)."""
    for path in paths:
        from jllama.rl.worker import describe_error, import_file

        if not path.endswith(".py"):
            raise UsageError(f"--import {path}: give a Python file, which ends in .py")
        try:
            import_file(path)
        except Exception as error:
            raise UsageError(f"--import {path}: {describe_error(f'{path}:', error)}") from error


def _parser(options: type, prog: str, positional: Sequence[str], shown: Sequence[str]) -> _Parser:
    """Build the parser of a dataclass; its help lists the options in ``shown``, or all if empty."""
    # 1) Describe the command.
    doc = options.__doc__ or ""
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=prog, formatter_class=layout, default_env=False, allow_abbrev=False)
    fields = dataclasses.fields(options)
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    words = [name.upper() if name in required else f"[{name.upper()}]" for name in positional]
    parser.usage = " ".join([prog, *words, "[options]"])
    parser.description = _description(doc, prog)
    if "config" in positional:
        parser.epilog = _configurations()
    else:
        parser.epilog = _verbs(prog.rpartition(" ")[2])

    # 2) Add the options: the common ones, and the fields of the dataclass.
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_argument("--imports", "--import", type=list[str], default=[], help=_IMPORTS)
    parser.add_class_arguments(options)

    # 3) Correct the titles, the help and the names of what was added.
    for group in parser._action_groups:
        if doc.startswith(group.title or ":"):
            group.title = None  # the page begins with it
    groups = {action.dest.rpartition(".")[0] for action in parser._actions}
    experts = parser.add_argument_group("for experts")
    for action in parser._actions:
        _describe(action)
        if action.dest in groups and not hasattr(action, "_typehint"):
            # No --model FILE: --config does this better.
            action.help = argparse.SUPPRESS
            del parser._option_string_actions[f"--{action.dest}"]
        if shown and action.dest not in shown:
            action.help = argparse.SUPPRESS
        if action.dest in _EXPERT.split():
            vars(action)["container"]._group_actions.remove(action)
            experts._group_actions.append(action)
        if len(action.dest) == 1:  # -n as well as --n
            parser._option_string_actions[f"-{action.dest}"] = action
    return parser


def _description(doc: str, prog: str) -> str:
    """Return the top of a help page: the first paragraph and the examples."""
    parts = [textwrap.fill(doc.partition("\n\n")[0], 79)]
    examples = [example.description or "" for example in docstring_parser.parse(doc).examples]
    parts += ["examples:\n" + textwrap.indent(lines, f"  {prog} ") for lines in examples]
    return "\n\n".join(parts)


def _verbs(command: str) -> str:
    """List the commands that stand behind a command."""
    lines = [f"  {name:8} {text}" for name, (parent, text) in VERBS.items() if parent == command]
    return "\n".join(["commands:", *lines]) if lines else ""


def _configurations() -> str:
    """List the configurations of runs that come with jllama, those of clusters last."""
    lines = ["configurations:"]
    configs = shipped_configs()
    del configs["speedrun"]  # of several runs
    for name in sorted(configs, key=lambda name: (name.startswith("llama"), name)):
        title = configs[name].read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"  {name:22} {title}")
    return "\n".join(lines)


def _describe(action: argparse.Action) -> None:
    """Complete the help of an option: how its value is written, and its default."""
    hint = getattr(action, "_typehint", None)
    if bool in (hint, *typing.get_args(hint)):  # --json means --json true
        action.nargs = "?"
        action.const = True
    if hint not in (None, bool, bool | None):
        action.metavar = _kind(hint)[0]
    text = (action.help or "").replace("``", "")
    has_default = bool(action.default) and action.default != argparse.SUPPRESS
    if has_default or type(action.default) is int:
        text += " (default: %(default)s)"
    action.help = _HELP.get(action.dest, text)


def _flags(parser: _Parser, argv: Sequence[str], positional: Sequence[str]) -> list[str]:
    """Rewrite arguments as ``--name=value``; a ``--config`` becomes the options in its file."""
    flags: list[str] = []
    words = list(argv)
    options = {word.partition("=")[0] for word in argv}
    names = [name for name in positional if name == "config" or f"--{name}" not in options]
    actions = parser._option_string_actions
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name == "-" or not name.startswith("-"):
            if not names:
                raise UsageError(f"{word!r} is one argument too many; usage: {parser.usage}")
            # A list takes all further words: --runs+ adds an element.
            is_list = f"--{names[0]}+" in actions
            name = f"--{names[0]}+" if is_list else f"--{names.pop(0)}"
            equals, value = "=", word
        elif not equals and words and _takes_value(parser, name, words[0], bool(names)):
            equals = "="
            value = words.pop(0)
        hint = getattr(actions.get(name), "_typehint", None)
        if name == "--config" and equals:
            flags += _file_flags(parser, _read_config(parser, value), "--")
        elif typing.get_origin(hint) is list and name[-1] != "+" and not value.startswith("["):
            flags.append(f"{name}+{equals}{value}")  # one more of several
        else:
            flags.append(name + equals + value)
    return flags


def _takes_value(parser: _Parser, name: str, word: str, misses_positional: bool) -> bool:
    """Return whether the next word is the value of an option that was written without ``=``."""
    if name == "--print_config" or (word.startswith("-") and word != "-"):
        return False
    action = parser._option_string_actions.get(name)
    if action is None or action.nargs is None:  # an unknown option is assumed to take a value
        return True
    words = ["true", "false"]
    for kind in typing.get_args(getattr(action, "_typehint", None)):
        words += typing.get_args(kind)
    return action.nargs == "?" and (word in words or not misses_positional)


def shipped_configs() -> dict[str, Path]:
    """Return the configurations that come with jllama, by name: the wheel's or the repository's."""
    package = Path(__file__).parents[1]
    paths = [*package.glob("configs/*.yaml")] or package.parent.glob("configs/*.yaml")
    return {path.stem: path for path in sorted(paths)}


def _read_config(parser: _Parser, name: str) -> yaml.MappingNode:
    """Parse a ``--config`` file, or a shipped configuration that is given by its name."""
    path = Path(name)
    shipped = shipped_configs()
    try:
        if not path.exists() and str(path.parent) in (".", "configs"):
            path = shipped.get(path.name.removesuffix(".yaml"), path)
        with path.open(encoding="utf-8") as file:
            text = file.read(1_000_001)
        _check_depth(text)
        root = yaml.compose(text)
    except RecursionError as error:
        problem = f"{name} is too large or nested too deep, or has aliases: give plain options"
        raise UsageError(problem) from error
    except OSError as error:
        expected = f"a file, or by its name one of {', '.join(shipped)}"
        if name in jllama.PRESETS and "--preset" in parser._option_string_actions:
            expected = f"--preset {name}"
        problem = f"the configuration {' '.join(name.split())[:200]} cannot be read"
        raise UsageError(f"{problem}: {error.strerror}; give {expected}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        content = " ".join(text.split())[:50] or "nothing"
        raise UsageError(f"{name} holds {content!r}; it must hold options, such as 'seed: 1'")
    return root


def _check_depth(text: str) -> None:
    """Raise ``RecursionError`` for over 1,000,000 characters, 50 levels, or an alias.

    With aliases a file of a few lines can describe ten lists of ten lists of ten lists ...
    """
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if len(text) > 1_000_000 or depth > 50 or isinstance(event, yaml.AliasEvent):
            raise RecursionError


def _file_flags(parser: _Parser, options: yaml.MappingNode, prefix: str) -> list[str]:
    """Return a configuration file's options as flags; a null is left out."""
    flags = []
    for key, node in options.value:
        name = f"{prefix}{key.value}"
        if isinstance(node, yaml.MappingNode) and name not in parser._option_string_actions:
            flags += _file_flags(parser, node, f"{name}.")
        elif not node.tag.endswith(":null"):
            is_scalar = isinstance(node, yaml.ScalarNode)
            flags.append(f"{name}={node.value if is_scalar else yaml.serialize(node)}")
    return [flag for flag in flags if flag not in _WITHOUT_EFFECT]


def _kind(hint: Any) -> tuple[str, str]:
    """Return how the help writes a value of this type, and how an error message describes it."""
    origin = typing.get_origin(hint)
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if origin is Literal:
        return "{" + ",".join(map(str, kinds)) + "}", f"one of {', '.join(map(str, kinds))}"
    if origin in (types.UnionType, typing.Union):
        return _kind(kinds[-1])
    if origin is list and kinds == [str]:
        return "TEXT", 'text, or JSON such as ["a", "b"]'
    if hint is bool:
        return "", "true or false"
    if origin in (dict, Mapping):
        return "JSON", 'a JSON object, such as {"5": 1.5}'
    return _SCALARS.get(hint, ("JSON", "JSON, such as [1, 2]"))


def run(command: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 1 for failure, 2 for bad usage.

    A mistake of the user is reported in one sentence.
    """
    arguments = sys.argv[1:] if argv is None else [*argv]
    module = f"jllama.commands.{command}"
    words = [VERBS[command][0], command] if command in VERBS else [command]
    prog = prog or " ".join([_PROGRAM, *words])
    return _guarded(lambda: importlib.import_module(module).main(arguments, prog))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jllama COMMAND ...``, also ``python -m jllama COMMAND ...``."""
    return _guarded(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help"):
        listing = "\n".join(f"  {command:8} {purpose}" for command, purpose in COMMANDS.items())
        examples = "\n".join(f"  {_PROGRAM} {words}" for words in _EXAMPLES)
        usage = f"usage: {_PROGRAM} COMMAND [--help] ..."
        page = f"{usage}\n\n{listing}\n\nexamples:\n{examples}\n\n{_COMPLETION}"
        print(page, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if name == "--version":
        versions = f"jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"
        print(f"jllama {jllama.__version__} ({versions})")
        return 0
    if name in VERBS:
        print(f"jllama {name} is now jllama {VERBS[name][0]} {name}", file=sys.stderr)
    elif name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    return run(*_split_command(argv))


def _split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the command, which may stand behind another one, and its arguments."""
    verb = words[1] if len(words) > 1 else ""
    if verb in VERBS and VERBS[verb][0] == words[0]:
        return verb, words[2:]
    return words[0], words[1:]


def _complete() -> None:
    """Answer the shell, which asks by environment variables for completions, and exit."""
    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    if words[1:] and words[1] in COMMANDS and os.environ["COMP_LINE"][len(" ".join(words[:2])) :]:
        command, rest = _split_command(words[1:])
        os.environ["_ARGCOMPLETE"] = str(len(words) - len(rest))  # words to skip
        run(command, ["--"])  # the parser answers, and exits
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=COMMANDS)
    argcomplete.autocomplete(parser)


def _guarded(work: Callable[[], int]) -> int:
    """Return the exit code of ``work``; print an error of the user as one sentence.

    An error that the user can do nothing about stays a traceback.
    """
    _prepare_process()

    # Run the work; an error of the user becomes one line.
    code = 1
    problem = ""
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()  # notice here, and not after the end, that the reader has gone
    except SystemExit as stop:  # help was shown
        code = int(stop.code or 0)
    except JllamaError as error:
        code = 2 if isinstance(error, UsageError) else 1
        problem = f"error: {error}"
    except KeyboardInterrupt:
        problem = "stopped"
    except MemoryError as error:
        problem = _error_line("there is not enough memory", str(error))
    except BrokenPipeError:  # the reader of our output has gone
        pass
    except OSError as error:  # a full disk, a file where a folder should be
        problem = _error_line(error.strerror or str(error), str(error.filename or ""))
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        details = " ".join(str(error).split())[:200]
        problem = f"error: the device's memory is full ({details}); process less at once"

    # Print the line, and write what is still buffered.
    with contextlib.suppress(OSError):
        print(problem, file=sys.stderr, end="\n" if problem else "", flush=True)
    try:
        sys.stdout.flush()
    except OSError:
        # Otherwise Python flushes once more when it ends, and reports the failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _error_line(*parts: str) -> str:
    return printable(": ".join(["error", *filter(None, parts)]))


def _prepare_process() -> None:
    """Replace closed streams by the null device, escape what cannot be encoded, silence threads."""
    # Take the descriptors 0 to 2 if they are free: no file that we open may become stderr.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8")  # noqa: SIM115 - stays open to the end
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Orbax raises what fails in its threads; hundreds of logged lines would hide that.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


_in_hook = threading.RLock()


def _unraisable(problem: Any) -> None:
    """Repeat a Ctrl-C that arrived in a callback, and ignore all else.

    What is ignored comes from tensorstore's closed event loop after each failed write.
    """
    # JAX has a callback that Python calls at each collection of garbage.
    if problem.exc_type is KeyboardInterrupt:
        with _in_hook:
            threading.Timer(0.05, _interrupt).start()


def _interrupt() -> None:
    with _in_hook:  # Python would drop an interrupt inside the hook, too
        _thread.interrupt_main()


def _suggestion(name: str, options: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest option, or an empty text.

    An option is near by another tool's name for it, by its beginning, or by its letters.
    """
    entries = (entry.partition("=") for entry in _ALIASES.split())
    aliases = {name: others for name, _, others in entries}
    meanings: dict[str, str] = {}
    for flag in options:
        option = flag.removeprefix("--")
        last = option.rpartition(".")[2]  # the group may be missing or wrong: --learning_rate
        for word in (option, last, *aliases.get(last, last).split(",")):
            meanings[word] = option
    name = name.replace("-", "_")
    last = name.rpartition(".")[2]
    if re.search("activation|hidden_act|dropout|position", last):
        return "; docs/extend.md shows a block of your own, with other parts than Llama's"
    near = (
        [word for word in (name, last) if word in meanings]
        or [word for word in meanings if word.startswith(name)]
        or difflib.get_close_matches(name, meanings, 1, _NEAR)
        or difflib.get_close_matches(last, meanings, 1, _NEAR)
    )
    return f"; did you mean {meanings[near[0]]}?" if near else ""
