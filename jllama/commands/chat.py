"""``jllama chat``."""

import contextlib
import dataclasses
import json
import re
import sys
import time
from pathlib import Path

from rich.console import Console

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions, sampling_params
from jllama.commands.terminal import WordWrap, line_editing, lines, say, stoppable
from jllama.errors import JllamaError, UsageError, check_fields, unknown_name
from jllama.files import check_writable, read_json_object, write_text_whole
from jllama.generation.sampling_params import SamplingParams

_SETTINGS = ["max_new_tokens", *vars(SamplingParams())]
_COMMON = (
    "adapter",
    "system",
    "load",
    "template",
    "max_new_tokens",
    "temperature",
    "top_p",
    "seed",
    "quantize",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingParams, ModelOptions):
    """Chat with a model in the terminal; where the input is no terminal, each of its lines is answered.

    Examples:
        model.gguf --system "Answer in one sentence."
        smollm2/ --load said.json --temperature 0.2

    Args:
        system: the system prompt; empty leaves it to the template.
        load: a conversation to go on with, as /save writes it.
        template: llama2, llama3, chatml or a file with a Jinja chat template; empty takes the checkpoint's own.
        max_new_tokens: the most tokens of an answer; 0 sets no limit but the model's context.
        seed: of the first answer; each later one has the next, so that the same conversation goes the same way again.
    """

    system: str = ""
    load: str = ""
    template: str = ""
    max_new_tokens: int = 1024
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)
        ModelOptions.__post_init__(self)
        check_fields(self, "", "max_new_tokens", lambda value: value >= 0, "0 or more")


@dataclasses.dataclass
class _Session:
    options: ChatOptions
    conversation: "jllama.Conversation"
    at_terminal: bool
    answers: int = 0


def main(argv: list[str], prog: str) -> int:
    """Load a model and talk until the input ends. In a terminal a mistake is said and the conversation goes on."""
    options = parse(ChatOptions, argv, prog, ("checkpoint",), _COMMON)
    from jllama.conversation import chat_ids
    from jllama.templates.messages import TEMPLATES, find_template

    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        say(f"loading {options.checkpoint} ...")
    model = options.load_model()
    template = find_template(model.text_tokenizer, model.chat_template, options.template or None)
    session = _Session(options, jllama.Conversation(model, template), at_terminal)
    options.say_loaded(model)
    if not options.template and not model.chat_template:
        name = next(name for name, text in TEMPLATES.items() if text == template)
        missing = f"{options.checkpoint} has no chat template: it may not have been trained to chat"
        say(f"{missing}. Using {name}; sample lets it continue a text.")
    if options.load:
        _load(session, options.load)
    if options.system:
        _system(session, options.system)
    chat_ids(
        model, [*session.conversation.messages, {"role": "user", "content": "Hello"}], template
    )  # may fail
    if at_terminal:
        say("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends\n")
    mistakes = 0
    with line_editing() if at_terminal else contextlib.nullcontext():
        for line in lines(at_terminal):
            if line.rstrip() == "/quit":
                break
            before = session.conversation.messages
            try:
                (_obey if line.startswith("/") else _answer)(session, line)
            except JllamaError as error:
                session.conversation.messages = before
                say(f"error: {error}", "red")
                mistakes += 1
            if at_terminal:
                print()
    return 1 if mistakes and not at_terminal else 0


def _answer(session: _Session, text: str) -> None:
    conversation, options = session.conversation, session.options
    sampling = dataclasses.replace(
        sampling_params(options), seed=(options.seed + session.answers) % 2**32
    )
    pieces = conversation.answer(text, sampling, options.max_new_tokens or None)
    wrap = WordWrap(Console().width).push if session.at_terminal else lambda text, last=False: text
    note, first_s, context = "(stopped)", 0.0, f"{conversation.model.config.max_seq_len:,} tokens"
    with (
        stoppable() as pressed,
        contextlib.closing(pieces),
        contextlib.suppress(KeyboardInterrupt),
    ):  # a second Ctrl-C
        try:
            with Console(stderr=True).status(
                "answering ..." if conversation.engine else "compiling ..."
            ):
                piece = next(pieces)
            first_s = time.perf_counter()
            print(wrap(piece), end="", flush=True)
            while not pressed.is_set():
                print(wrap(next(pieces)), end="", flush=True)
        except StopIteration as end:
            cut = {
                "length": f"(cut off after {options.max_new_tokens:,} tokens; /set max_new_tokens changes it)",
                "context": f"(cut off: the model's context of {context} is full, begin a new conversation with /reset)",
            }
            note = cut.get(end.value.finish_reason, "")
            if session.at_terminal:
                speed = end.value.new_tokens / (time.perf_counter() - first_s)
                note += f"\n[{end.value.prompt_tokens + end.value.new_tokens:,} of {context}, {speed:,.0f} tokens/s]"
        except JllamaError as error:
            raise JllamaError(
                f"{error} (/reset begins a new conversation, /undo takes back a turn)"
            ) from error
    print(wrap("", last=True), flush=True)
    session.answers += 1
    if note:
        say(note.strip())


def _obey(session: _Session, line: str) -> None:
    name, _, text = line.partition(" ")
    if name not in COMMANDS:
        unknown = unknown_name("command", name, COMMANDS)
        raise UsageError(
            f"{unknown} (/help explains them; put a space in front to say it to the model)"
        )
    COMMANDS[name](session, text.strip())


def _retry(session: _Session, _: str) -> None:
    """Answer the last question again, with the next seed."""
    _answer(session, session.conversation.undo())


def _undo(session: _Session, _: str) -> None:
    """Take back the last question and its answer."""
    say(f"(taken back: {' '.join(session.conversation.undo().split())[:60]})")


def _reset(session: _Session, _: str) -> None:
    """Forget what was said, but not the system prompt."""
    conversation = session.conversation
    conversation.messages = [
        message for message in conversation.messages if message["role"] == "system"
    ]
    say("(a new conversation)")


def _system(session: _Session, text: str) -> None:
    """Set the system prompt: /system Be brief. Without a text, remove it."""
    others = [message for message in session.conversation.messages if message["role"] != "system"]
    session.conversation.messages = (
        [{"role": "system", "content": text}, *others] if text else others
    )
    say("(the system prompt is set)" if text else "(there is no system prompt)")


def _set(session: _Session, rest: str) -> None:
    """Change a setting: /set temperature 0.2. Without a name, show them all."""
    name, *value = re.split(r"[\s=]+", rest.removeprefix("--"), maxsplit=1)
    if name not in ["", *_SETTINGS]:
        raise unknown_name("setting", name, _SETTINGS)
    if value:
        given = parse(
            ChatOptions,
            [f"--checkpoint={session.options.checkpoint}", f"--{name}={value[0]}"],
            "/set",
        )
        session.options = dataclasses.replace(session.options, **{name: getattr(given, name)})
        session.answers = 0 if name == "seed" else session.answers
    say(
        "\n".join(
            f"{each} {getattr(session.options, each)}" for each in ([name] if name else _SETTINGS)
        )
    )


def _save(session: _Session, name: str) -> None:
    """Write the conversation to a file: one line of JSON, {"messages": [...]}."""
    path = Path(name).expanduser()
    if not name or path.exists():
        raise UsageError(
            f"{name} exists: choose another name" if name else "/save needs the name of a file"
        )
    check_writable(path)
    write_text_whole(
        path, json.dumps({"messages": session.conversation.messages}, ensure_ascii=False) + "\n"
    )
    say(f"(saved {name})")


def _load(session: _Session, name: str) -> None:
    """Go on with a conversation that /save wrote to a file."""
    from jllama.templates.messages import check_messages

    if not name:
        raise UsageError("/load needs the name of a file")
    messages = read_json_object(Path(name).expanduser()).get("messages")
    if not isinstance(messages, list):
        raise JllamaError(f'{name} has no list of "messages": give a file that /save wrote')
    check_messages(messages)
    session.conversation.messages = messages
    say(f"(loaded {len(messages)} messages)")


def _help(*_: object) -> None:
    """Show this."""
    say("\n".join(f"{name:8} {obey.__doc__}" for name, obey in COMMANDS.items()))
    say("/quit    End; so do Ctrl-D, and Ctrl-C where no answer is being made.")
    say(
        "A line that ends in \\ goes on in the next; one that begins with a space is never a command."
    )


COMMANDS = {
    f"/{f.__name__[1:]}": f for f in (_retry, _undo, _reset, _system, _set, _save, _load, _help)
}
