"""A conversation's terminal: lines that are typed or pasted, words that wrap whole, answers that Ctrl-C stops."""

import contextlib
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console

from jllama.errors import JllamaError
from jllama.files import cache_folder

_WIDE = "\u2e80"  # from here on Chinese, Japanese, Korean, emoji: a line may end after any of them
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # would move the cursor, or worse


class WordWrap:
    """Breaks a text that comes in pieces into lines of whole words; the word under way is held back."""

    def __init__(self, width: int) -> None:
        self._width, self._column, self._word = width, 0, ""
        self._words = re.compile(rf"\s|[{_WIDE}-\U0010ffff]|[^\s{_WIDE}-\U0010ffff]{{1,{width}}}")

    def push(self, text: str, last: bool = False) -> str:
        """What can be shown now: with the ``last`` piece, all."""
        parts, shown = self._words.findall(self._word + CONTROLS.sub("", text)), ""
        ends = (
            last
            or not parts
            or parts[-1].isspace()
            or parts[-1] >= _WIDE
            or len(parts[-1]) == self._width
        )
        self._word = "" if ends else parts.pop()
        for part in parts:
            cells = 8 if part == "\t" else cell_len(part)
            if part == "\n":
                self._column = 0
            elif self._column + cells <= self._width:
                self._column += cells
            elif part.isspace():  # the next word begins a line
                self._column, part = self._width, ""
            else:
                self._column, part = cells, "\n" * (self._column > 0) + part
            shown += part
        return shown


def say(text: str, style: str = "dim") -> None:
    """What is not the model's: to stderr, so that stdout holds the answers alone."""
    console = Console(stderr=True, highlight=False)
    console.print(text, style=style, markup=False, emoji=False, soft_wrap=not console.is_terminal)


def lines(at_terminal: bool) -> Iterator[str]:
    """What is said, turn by turn, until the input ends; blank lines are left out.

    A turn is a line, a paste at a terminal, or lines of which all but the last end in a backslash. ``JllamaError`` if
    the input is not UTF-8 text.
    """
    number, line, more = 0, "", sys.stdin is not None  # it is None where it was closed
    while more:
        number += 1
        try:
            line += _typed("... " if line else "> ") if at_terminal else input()
            line.encode()  # an input that is not UTF-8 may come as lone surrogates
        except UnicodeError as error:
            raise JllamaError(f"line {number} of the input is not UTF-8 text: {error}") from error
        except EOFError:
            more = False
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            line, more = "", False
        if more and line.endswith("\\"):
            line = line[:-1] + "\n"
            continue
        if line.strip():
            yield line
        line = ""
    if at_terminal:
        print()


def _typed(prompt: str) -> str:
    color = Console().color_system is not None
    marks_paste = "GNU" in (getattr(sys.modules.get("readline"), "__doc__", None) or "")
    start = "\001\033[1;36m\002" if marks_paste else "\033[1;36m"  # marked as taking no room
    try:
        line = input(start * color + prompt)
        with contextlib.suppress(OSError, EOFError):  # Windows cannot wait so
            while (
                not marks_paste and select.select([sys.stdin], [], [], 0.05)[0]
            ):  # faster than anybody types
                line += "\n" + input()
        return line
    finally:
        print("\033[0m" * color, end="", flush=True)


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Editing keys, pastes and earlier lines at the prompt, where there is readline; what cannot be kept is not."""
    path = cache_folder() / "chat_history"
    try:
        import readline
    except ImportError:
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    readline.set_history_length(1000)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C only sets the event, so that nothing is broken off halfway; a second one interrupts.

    Keys are not shown meanwhile, so that they are not mixed with the answer.
    """
    pressed = threading.Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        _show_keys(False)
        yield pressed
    finally:
        _show_keys(True)
        signal.signal(signal.SIGINT, before)


def _show_keys(shown: bool) -> None:
    with contextlib.suppress(ImportError):
        import termios

        if sys.stdin.isatty():
            mode = termios.tcgetattr(sys.stdin)
            mode[3] = mode[3] | termios.ECHO if shown else mode[3] & ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
