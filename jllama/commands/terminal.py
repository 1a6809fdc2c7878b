"""The terminal of a conversation: input lines, word wrap, and answers that Ctrl-C stops."""

import contextlib
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console

from jllama.core import JllamaError
from jllama.system.files import cache_folder

# Characters from here on are Chinese, Japanese, Korean or emoji: a line may end after any of them.
_WIDE = "\u2e80"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which would move the cursor or worse."""


class WordWrap:
    """Wrapper that breaks streamed text into lines of whole words; it delays an unfinished word."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._word = ""
        self._words = re.compile(rf"\s|[{_WIDE}-\U0010ffff]|[^\s{_WIDE}-\U0010ffff]{{1,{width}}}")

    def push(self, text: str, last: bool = False) -> str:
        """Return the text that can be shown now; after the ``last`` piece, all of it."""
        parts = self._words.findall(self._word + CONTROLS.sub("", text))
        self._word = ""
        if parts and not last:
            end = parts[-1]
            is_whole = end.isspace() or end >= _WIDE or len(end) == self._width
            if not is_whole:
                self._word = parts.pop()
        shown = ""
        for part in parts:
            cells = 8 if part == "\t" else cell_len(part)
            if part == "\n":
                self._column = 0
            elif self._column + cells <= self._width:
                self._column += cells
            elif part.isspace():
                self._column = self._width  # the next word begins a line
                continue
            else:
                if self._column > 0:
                    shown += "\n"
                self._column = cells
            shown += part
        return shown


def say(text: str, style: str = "dim") -> None:
    """Print a note to stderr, so that stdout holds nothing but the model's answers."""
    console = Console(stderr=True, highlight=False)
    console.print(text, style=style, markup=False, emoji=False, soft_wrap=not console.is_terminal)


def lines(at_terminal: bool) -> Iterator[str]:
    """Yield the user's turns until the input ends, without blank ones.

    A turn is a line, a paste at a terminal, or several lines of which all but the last end in a
    backslash.

    Raises:
        JllamaError: if the input is not UTF-8 text.
    """
    number = 0
    line = ""
    is_open = sys.stdin is not None  # it is None if it was closed
    while is_open:
        number += 1
        try:
            if at_terminal:
                line += _typed("... " if line else "> ")
            else:
                line += input()
            line.encode()  # input that is not UTF-8 may arrive as lone surrogates
        except UnicodeError as error:
            raise JllamaError(f"line {number} of the input is not UTF-8 text: {error}") from error
        except EOFError:
            is_open = False
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            line = ""
            is_open = False
        if is_open and line.endswith("\\"):
            line = line[:-1] + "\n"
            continue
        if line.strip():
            yield line
        line = ""
    if at_terminal:
        print()


def _typed(prompt: str) -> str:
    """Read a line, or the lines of a paste, in color if the terminal has colors."""
    marks_paste = "GNU" in (getattr(sys.modules.get("readline"), "__doc__", None) or "")
    start = end = ""
    if Console().color_system is not None:
        # \001 and \002 tell GNU readline that the code takes no room.
        start = "\001\033[1;36m\002" if marks_paste else "\033[1;36m"
        end = "\033[0m"
    try:
        line = input(start + prompt)
        with contextlib.suppress(OSError, EOFError):  # Windows cannot wait on stdin
            # What follows within 50 ms was pasted: nobody types that fast.
            while not marks_paste and select.select([sys.stdin], [], [], 0.05)[0]:
                line += "\n" + input()
        return line
    finally:
        print(end, end="", flush=True)


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Offer editing keys, pastes and a history at the prompt, if Python has readline."""
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
        with contextlib.suppress(OSError):  # a history that cannot be written is dropped
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event, so that the work can end in order; a second interrupts.

    Meanwhile typed keys are not shown, so that they do not mix with the answer.
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
            if shown:
                mode[3] |= termios.ECHO
            else:
                mode[3] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
