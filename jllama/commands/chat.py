"""``python -m jllama chat``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from jllama.checkpoints.formats import load
from jllama.commands.cli import parse
from jllama.errors import JllamaError, UsageError
from jllama.files import cache_folder, write_text_whole
from jllama.generation.chat import Conversation, chat_ids, chat_template
from jllama.generation.engine import PrefixCache
from jllama.generation.settings import SamplingConfig

COMMANDS = {
    "/reset": "forget what was said, but not the system prompt",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/save FILE": 'write the conversation as one line of JSON, {"messages": [...]}',
    "/help": "show this",
    "/quit": "end; so do Ctrl-D, and Ctrl-C where no answer is being made",
}
HISTORY_LINES = 1000


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Talk with a model in the terminal; where the input is no terminal, each of its lines is answered.

    Args:
        checkpoint: the folder of a run, or a model in any format: a Hugging Face or Meta folder, a GGUF or llama2.c
            file, a Hugging Face hub id.
        system: the system prompt; empty leaves it to the template.
        template: llama2, llama3, chatml or a file with a Jinja chat template; empty takes the checkpoint's own.
        max_new_tokens: the most tokens of an answer; 0 sets no limit but the model's context.
        temperature: divides the logits; 0 always takes the likeliest token, 1 draws from the model as it is.
        top_k: draw among the k likeliest tokens only; 0 is all of them.
        top_p: draw among the likeliest tokens that together reach this probability; 1 is all of them.
        min_p: leave out tokens less likely than this share of the likeliest one's probability; 0 leaves out none.
        repetition_penalty: divides the logits of tokens seen before; 1 changes nothing.
        seed: of the first answer, the next has one more: the same conversation goes the same way again.
        quantize: hold the weights as int8, a quarter of float32's memory; the answers change a little.
        step: which checkpoint of a run; 0 takes the one with the lowest validation loss.
        dtype: of the parameters; without it float32 on a CPU, and elsewhere the files' own.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out.
    """

    checkpoint: str
    system: str = ""
    template: str = ""
    max_new_tokens: int = 0
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    quantize: Literal["int8"] | None = None
    step: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    rope_factor: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; it must not be negative")
        if self.step < 0:
            raise UsageError(f"step is {self.step}; it must be a saved step, or 0 for the best")


def main(argv: Sequence[str], prog: str) -> int:
    """Load a model and talk until the input ends. In a terminal a mistake is said and the conversation goes on."""
    options = parse(ChatOptions, argv, prog, positional=("checkpoint",))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = SamplingConfig(**{name: getattr(options, name) for name in names})
    model = load(options.checkpoint, options.dtype, rope_factor=options.rope_factor, step=options.step or None)
    model = model.for_decoding(options.quantize)
    conversation = Conversation(model, chat_template(model, options.template or None))
    _set_system(conversation, options.system)
    chat_ids(model, [*conversation.messages, {"role": "user", "content": "Hello"}], conversation.template)  # may fail
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    _say(options.checkpoint if model.step is None else f"{options.checkpoint}, step {model.step}")
    if at_terminal:
        _say("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    mistakes = 0
    with _line_editing() if at_terminal else contextlib.nullcontext():
        for line in _lines(at_terminal):
            try:
                if line.rstrip() == "/quit":
                    break
                if line.startswith("/"):
                    _obey(conversation, line)
                else:
                    _answer(conversation, line, sampling, options.max_new_tokens or None)
                    sampling = dataclasses.replace(sampling, seed=(sampling.seed + 1) % 2**32)
            except JllamaError as error:
                _say(f"error: {error}")
                mistakes += 1
    return 1 if mistakes and not at_terminal else 0


def _answer(conversation: Conversation, text: str, sampling: SamplingConfig, max_new_tokens: int | None) -> None:
    pieces = conversation.answer(text, sampling, max_new_tokens)
    note = "stopped"
    with _ctrl_c() as pressed, contextlib.closing(pieces):
        try:
            while not pressed.is_set():
                sys.stdout.write(next(pieces))
                sys.stdout.flush()
        except StopIteration as end:
            cut = {
                "length": f"cut off after {max_new_tokens} tokens",
                "context": f"cut off: the model's context of {conversation.model.config.max_seq_len} tokens is full, "
                f"begin a new conversation with /reset",
            }
            note = cut.get(end.value.finish_reason, "")
        except KeyboardInterrupt:  # the second Ctrl-C: what was being computed is lost
            conversation.prefix = PrefixCache()
    print(flush=True)
    if note:
        _say(f"({note})")


def _obey(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/reset":
        conversation.messages = [message for message in conversation.messages if message["role"] == "system"]
        _say("(a new conversation)")
    elif name == "/system":
        _set_system(conversation, rest)
        _say("(the system prompt is set)" if rest else "(there is no system prompt)")
    elif name == "/save":
        _save(conversation, rest)
        _say(f"(saved {rest})")
    elif name == "/help":
        _say("\n".join(f"{command:14} {purpose}" for command, purpose in COMMANDS.items()))
        _say("A line that ends in \\ goes on in the next; one that begins with a space is never a command.")
    else:
        raise UsageError(f"there is no command {name}: /help lists them; put a space in front to say it to the model")


def _set_system(conversation: Conversation, text: str) -> None:
    others = [message for message in conversation.messages if message["role"] != "system"]
    conversation.messages = [{"role": "system", "content": text}, *others] if text else others


def _save(conversation: Conversation, name: str) -> None:
    path = Path(name).expanduser()
    if not name or path.exists():
        raise UsageError(f"{name} exists: choose another name" if name else "/save needs the name of a file")
    try:
        write_text_whole(path, json.dumps({"messages": conversation.messages}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise JllamaError(f"cannot write {name}: {error.strerror}; choose another place") from error


def _lines(at_terminal: bool) -> Iterator[str]:
    """The lines of the input that are not blank, until it ends; those that end in a backslash with what follows."""
    number = 0
    while True:
        line, more = "", True
        try:
            while more:
                number += 1
                line += input(("... " if line else "> ") if at_terminal else "")
                more = line.endswith("\\")
                line = line[:-1] + "\n" if more else line
            line.encode()  # an input that is not UTF-8 may come as lone surrogates
        except UnicodeError as error:
            raise JllamaError(f"line {number} of the input is not UTF-8 text: {error}") from error
        except EOFError:
            if line.strip():
                yield line
            break
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            break
        if line.strip():
            yield line
    if at_terminal:
        print()


@contextlib.contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C only sets the event, so that nothing is broken off halfway; a second one interrupts."""
    pressed = threading.Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Editing keys and earlier lines at the prompt, on systems that have readline; what cannot be kept is not."""
    try:
        import readline
    except ImportError:
        yield
        return
    folder = cache_folder()
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(folder / "chat_history")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(folder / "chat_history")


def _say(text: str) -> None:
    """What is not the model's: to stderr, so that stdout holds the answers alone."""
    print(text, file=sys.stderr, flush=True)
