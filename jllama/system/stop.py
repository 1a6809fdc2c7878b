"""Stopping a run: the first Ctrl-C or SIGTERM is answered at once and obeyed after the step."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jllama.core import JllamaError

_NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}


class Stopped(JllamaError):
    """A run was asked to stop and is saved; ``exit_code`` is 128 + the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def stop_signals(doing: Callable[[], str]) -> Iterator[list[int]]:
    """Collect the numbers of Ctrl-C and SIGTERM in a list, which the loop checks once a step.

    ``doing`` returns what is finished first, for the answer. The answer comes from a thread that
    the system wakes: Python runs a handler only between two of its own instructions, and a
    compilation is one instruction. A second signal, at least a second later, ends the process at
    once; in an interactive session it is a KeyboardInterrupt. Outside the main thread signals are
    not handled.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _frame: Any) -> None:
        received.append(number)
        if len(received) > 1 and hasattr(sys, "ps1"):
            raise KeyboardInterrupt

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handlers = {number: signal.signal(number, receive) for number in _NAMES}
    wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_answer, args=(reader, doing), daemon=True)
    thread.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def _answer(reader: socket.socket, doing: Callable[[], str]) -> None:
    """Answer the first signal that the system writes to a socket; a later one ends the process."""
    ignored_until_s = 0.0
    while content := reader.recv(1):
        number = content[0]
        if number not in _NAMES:
            continue
        if not ignored_until_s:
            # Schedulers and shells send several signals at once and mean one.
            ignored_until_s = time.monotonic() + 1
            answer = f"{_NAMES[number]}: {doing()}; again to quit now"
            with contextlib.suppress(Exception):  # stderr may be closed
                _write_line(sys.stderr.fileno(), answer)
        elif time.monotonic() > ignored_until_s and not hasattr(sys, "ps1"):
            exit_now("stopped at once; the last checkpoint stays as it was", 128 + number)


def exit_now(text: str, exit_code: int) -> NoReturn:
    """Print a last line, after which other threads print nothing, and end the process at once."""
    try:
        stderr = os.dup(sys.stderr.fileno())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _write_line(stderr, text)
    finally:  # whatever happened to stderr
        os._exit(exit_code)


def _write_line(stderr: int, text: str) -> None:
    """Write a line to a descriptor, past all buffers and locks.

    On a terminal it replaces a progress bar, and the cursor is shown again.
    """
    start = "\r\x1b[2K\x1b[?25h" if os.isatty(stderr) else ""
    os.write(stderr, f"{start}{text}\n".encode())
