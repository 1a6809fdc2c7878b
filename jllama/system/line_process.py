"""Child processes that answer each line with a line, and are killed when that takes too long.

Each leads a session of its own, and is killed together with all processes of its group.
"""

import contextlib
import os
import signal
import subprocess
import threading

Process = subprocess.Popen[bytes]


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


def end(process: Process) -> None:
    """Kill a process and what it has started, and close its pipes."""
    kill(process)
    with contextlib.suppress(OSError):  # closing its stdin flushes what it has not read
        process.__exit__(None, None, None)
