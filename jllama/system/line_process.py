"""Child processes that answer each line with a line, and are killed when that takes too long.

Each leads a session of its own, and is killed together with all processes of its group. One that
``start`` has started ends with its parent, however that ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

Process = subprocess.Popen[bytes]
_FOLDER = str(Path(__file__).parents[2])  # where jllama is, if it is not installed
_PROGRAM = """
import importlib, sys
_, folder, system, parent, module, *arguments = sys.argv
sys.path.append(folder)
importlib.import_module(system).end_with_parent(int(parent))
importlib.import_module(module).main(*arguments)
"""


def start(module: str, *arguments: str) -> Process:
    """Start a process that calls ``main`` of a module with these arguments."""
    return subprocess.Popen(
        # Not by "-m", which looks for modules in the current folder.
        [
            *(sys.executable, "-P", "-c", _PROGRAM),
            *(_FOLDER, __name__, str(os.getpid()), module, *arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def ask(process: Process, line: bytes, limit_s: float, max_bytes: int = -1) -> bytes:
    """Send a line and return the reply, of at most ``max_bytes``.

    The reply is not a whole line if the process has ended, or took over ``limit_s`` and was killed.
    An empty line is not sent.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    clock = threading.Timer(limit_s, kill, (process,))
    clock.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline(max_bytes)
    except OSError:  # it has ended
        return b""
    except BaseException:  # the reply would be taken for that to the next line
        kill(process)
        raise
    finally:
        clock.cancel()


def kill(process: Process) -> None:
    """Kill a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_with_parent(parent: int) -> None:
    """Kill this process and all of its group as soon as its parent is another one."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def end(process: Process) -> None:
    """Kill a process and what it has started, and close its pipes."""
    kill(process)
    with contextlib.suppress(OSError):  # closing its stdin flushes what it has not read
        process.__exit__(None, None, None)
