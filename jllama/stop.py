"""Stopping a run: the first Ctrl-C or SIGTERM is answered at once and obeyed when the step is done."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jllama.errors import JllamaError

_NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}


class Stopped(JllamaError):
    """A run was asked to stop, and what it has done is saved; ``exit_code`` is 128 + the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def stop_signals(doing: Callable[[], str]) -> Iterator[list[int]]:
    """Collects the numbers of Ctrl-C and SIGTERM in the list that it yields, which the loop asks once a step.

    ``doing`` says what is finished first; the answer comes from a thread that the system wakes, since Python runs a
    handler only between two of its own instructions, and a compilation is one. A second signal, at least a second
    later, ends the process there and then (in an interactive session it is a KeyboardInterrupt). Outside the main
    thread signals are left alone.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _frame: Any) -> None:
        received.append(number)
        if len(received) > 1 and hasattr(sys, "ps1"):  # an interactive session
            raise KeyboardInterrupt

    def watch() -> None:
        deaf_until_s = 0.0
        while number := reader.recv(1):
            if number[0] in _NAMES and not deaf_until_s:
                deaf_until_s = (
                    time.monotonic() + 1
                )  # schedulers and shells send several at once and mean one
                _say(f"{_NAMES[number[0]]}: {doing()}; again to quit now")
            elif (
                number[0] in _NAMES and time.monotonic() > deaf_until_s and not hasattr(sys, "ps1")
            ):
                end("stopped at once; the last checkpoint stays as it was", 128 + number[0])

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, receive) for number in _NAMES}
    fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def end(text: str, exit_code: int) -> NoReturn:
    """Say a last line, and end the process there and then."""
    _say(text)
    os._exit(exit_code)


def _say(text: str) -> None:
    """Write a line to stderr past all buffers and locks; on a terminal over the bar, with the cursor shown again."""
    with contextlib.suppress(Exception):  # it may be closed
        start = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{start}{text}\n".encode())
