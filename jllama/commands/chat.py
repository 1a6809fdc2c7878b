"""``jllama chat``: chat with a model in the terminal."""

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
from jllama.core import JllamaError, UsageError, check_fields
from jllama.generation.sampling_params import SamplingParams
from jllama.system.errors import unknown_name
from jllama.system.files import atomic_write_text, check_writable, read_json_object

_SETTINGS = ["max_new_tokens", *vars(SamplingParams())]
_COMMON = "adapter system load chat_template max_new_tokens temperature top_p seed quantize"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingParams, ModelOptions):
    """Chat with a model in the terminal; if stdin is no terminal, each line of it is answered.

    Examples:
        model.gguf --system "Answer in one sentence."
        smollm2/ --load said.json --temperature 0.2

    Args:
        system: the system prompt; if it is empty, the template decides.
        load: a file with a conversation to continue, as /save writes it.
        chat_template: a chat template in place of the checkpoint's own: llama2, llama3, chatml,
            mistral, phi4, granite, or a file with a Jinja template.
        max_new_tokens: the maximum number of tokens of an answer; 0 sets no limit but the model's
            context.
        seed: the seed of the first answer. Each later answer has the next one, so that the same
            conversation can be repeated.
    """

    system: str = ""
    load: str = ""
    chat_template: str = ""
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
    """Load a model and chat until the input ends.

    A mistake is printed and the chat goes on. Without a terminal the exit code then is 1.
    """
    options = parse(ChatOptions, argv, prog, ("checkpoint",), _COMMON)
    from jllama.generation.conversation import chat_ids
    from jllama.templates.messages import TEMPLATES, find_template

    # 1) Load the model, and open the session.
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        say(f"loading {options.checkpoint} ...")
    model = options.load_model()
    template = find_template(
        model.text_tokenizer, model.chat_template, options.chat_template or None
    )
    session = _Session(options, jllama.Conversation(model, template), at_terminal)
    options.say_loaded(model)
    if not options.chat_template and not model.chat_template:
        name = next(name for name, text in TEMPLATES.items() if text == template)
        missing = f"{options.checkpoint} has no chat template: it may not have been trained to chat"
        say(f"{missing}. This chat uses {name}; jllama sample continues a text instead.")

    # 2) Load an earlier conversation, set the system message, and try the template.
    if options.load:
        _load(session, options.load)
    if options.system:
        _system(session, options.system)
    # Fail now if the template refuses the conversation so far, and not at the first message.
    first = {"role": "user", "content": "Hello"}
    chat_ids(model, [*session.conversation.messages, first], template)

    # 3) Read lines: each is a command or a message.
    if at_terminal:
        say("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends\n")
    mistakes = 0
    with line_editing() if at_terminal else contextlib.nullcontext():
        for line in lines(at_terminal):
            if line.rstrip() == "/quit":
                break
            before = session.conversation.messages
            try:
                if line.startswith("/"):
                    _run_command(session, line)
                else:
                    _answer(session, line)
            except JllamaError as error:
                session.conversation.messages = before
                say(f"error: {error}", "red")
                mistakes += 1
            if at_terminal:
                print()
    return 1 if mistakes and not at_terminal else 0


def _answer(session: _Session, text: str) -> None:
    """Print the answer to a message as it is generated; Ctrl-C stops it."""
    # 1) Prepare the answer; nothing is computed before its first piece.
    conversation = session.conversation
    options = session.options
    seed = (options.seed + session.answers) % 2**32
    sampling = dataclasses.replace(sampling_params(options), seed=seed)
    pieces = conversation.answer(text, sampling, options.max_new_tokens or None)

    # 2) Print the pieces until the answer ends or Ctrl-C stops it.
    wrap = WordWrap(Console().width) if session.at_terminal else None
    status = "answering ..." if conversation.engine else "compiling ..."
    note = "(stopped)"
    first_s = 0.0
    with (
        stoppable() as pressed,
        contextlib.closing(pieces),
        contextlib.suppress(KeyboardInterrupt),  # a second Ctrl-C
    ):
        try:
            with Console(stderr=True).status(status):
                piece = next(pieces)
            first_s = time.perf_counter()
            _show(piece, wrap)
            while not pressed.is_set():
                _show(next(pieces), wrap)
        except StopIteration as end:
            note = _end_note(session, end.value, time.perf_counter() - first_s)
        except JllamaError as error:
            advice = "/reset begins a new conversation, /undo takes back a turn"
            raise JllamaError(f"{error} ({advice})") from error

    # 3) End the line, and print how the answer ended.
    if wrap:
        print(wrap.push("", last=True), end="")
    print(flush=True)
    session.answers += 1
    if note:
        say(note)


def _show(piece: str, wrap: WordWrap | None) -> None:
    print(wrap.push(piece) if wrap else piece, end="", flush=True)


def _end_note(session: _Session, completion: "jllama.Completion", seconds: float) -> str:
    """Return why an answer was cut off, if it was, and at a terminal its length and speed."""
    context = f"{session.conversation.model.config.max_seq_len:,} tokens"
    notes = []
    if completion.finish_reason == "length":
        limit = f"{session.options.max_new_tokens:,} tokens"
        notes.append(f"(cut off after {limit}; /set max_new_tokens changes it)")
    elif completion.finish_reason == "context":
        full = f"the model's context of {context} is full"
        notes.append(f"(cut off: {full}, begin a new conversation with /reset)")
    if session.at_terminal:
        length = completion.prompt_tokens + completion.new_tokens
        speed = completion.new_tokens / seconds
        notes.append(f"[{length:,} of {context}, {speed:,.0f} tokens/s]")
    return "\n".join(notes)


def _run_command(session: _Session, line: str) -> None:
    name, _, text = line.partition(" ")
    if name not in COMMANDS:
        unknown = unknown_name("command", name, COMMANDS)
        advice = "/help explains them; put a space in front to say it to the model"
        raise UsageError(f"{unknown} ({advice})")
    COMMANDS[name](session, text.strip())


def _retry(session: _Session, _: str) -> None:
    """Answer the last message again, with the next seed."""
    _answer(session, session.conversation.undo())


def _undo(session: _Session, _: str) -> None:
    """Take back the last message and its answer."""
    say(f"(taken back: {' '.join(session.conversation.undo().split())[:60]})")


def _reset(session: _Session, _: str) -> None:
    """Begin a new conversation with the same system prompt."""
    conversation = session.conversation
    conversation.messages = [
        message for message in conversation.messages if message["role"] == "system"
    ]
    say("(a new conversation)")


def _system(session: _Session, text: str) -> None:
    """Set the system prompt: /system Be brief. Without a text, remove it."""
    messages = [message for message in session.conversation.messages if message["role"] != "system"]
    if text:
        messages.insert(0, {"role": "system", "content": text})
    session.conversation.messages = messages
    say("(the system prompt is set)" if text else "(there is no system prompt)")


def _set(session: _Session, rest: str) -> None:
    """Change a setting: /set temperature 0.2. Without a name, show all settings."""
    name, *value = re.split(r"[\s=]+", rest.removeprefix("--"), maxsplit=1)
    if name not in ["", *_SETTINGS]:
        raise unknown_name("setting", name, _SETTINGS)
    if value:
        argv = [f"--checkpoint={session.options.checkpoint}", f"--{name}={value[0]}"]
        options = parse(ChatOptions, argv, "/set")
        session.options = dataclasses.replace(session.options, **{name: getattr(options, name)})
    if value and name == "seed":
        session.answers = 0
    names = [name] if name else _SETTINGS
    say("\n".join(f"{name} {getattr(session.options, name)}" for name in names))


def _save(session: _Session, name: str) -> None:
    """Write the conversation to a file: one line of JSON, {"messages": [...]}."""
    if not name:
        raise UsageError("/save needs the name of a file")
    path = Path(name).expanduser()
    if path.exists():
        raise UsageError(f"{name} exists: choose another name")
    check_writable(path)
    content = json.dumps({"messages": session.conversation.messages}, ensure_ascii=False)
    atomic_write_text(path, content + "\n")
    say(f"(saved {name})")


def _load(session: _Session, name: str) -> None:
    """Continue a conversation that /save wrote to a file."""
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
    """Show this list."""
    say("\n".join(f"{name:8} {function.__doc__}" for name, function in COMMANDS.items()))
    say("/quit    End the chat, as Ctrl-D does, or Ctrl-C while no answer is generated.")
    say("A line that ends in \\ continues on the next; one that begins with a space is no command.")


COMMANDS = {
    "/retry": _retry,
    "/undo": _undo,
    "/reset": _reset,
    "/system": _system,
    "/set": _set,
    "/save": _save,
    "/load": _load,
    "/help": _help,
}
