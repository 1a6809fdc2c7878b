"""Jinja chat templates, rendered as transformers renders them, in a process with limits.

A template is a program that comes with a checkpoint, so it is not trusted. jinja2's sandbox keeps it from Python's
internals; its time and memory are limits of the process it runs in (``template_worker``), which is kept between calls.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jllama.errors import JllamaError, UsageError

SECONDS = 5.0  # of processor time, where the system can limit it
CLOCK_SECONDS = 20.0  # by the clock, whatever else the machine does
MEMORY_BYTES = 512 * 2**20  # of the whole process, where the system can limit it
MAX_BYTES = 16_000_000  # of the text in UTF-8: about four million tokens

_lock = threading.Lock()
_workers: dict[int, subprocess.Popen[bytes]] = {}
"""The one worker, by the id of the process that started it: a fork of that process needs its own."""


def render(template: str, **variables: Any) -> str:
    """The text that a template makes of ``variables``; errors are those of ``render_answers``."""
    return render_answers(template, variables)[0]


def render_answers(
    template: str, variables: Mapping[str, Any], answers: Sequence[int] = ()
) -> tuple[str, list[Any], bool]:
    """The text that a template makes of ``variables``, spans (start, end) of characters, and whether they are tagged.

    They are what is in ``{% generation %}`` tags. Where there are no tags, they are those of the messages ``answers``
    (by index), empty for one that the template does not write as a part of its own.

    Raises ``UsageError`` for a variable that JSON cannot hold, and ``JllamaError`` where the template is not Jinja,
    refuses (``raise_exception``), fails, reaches for what it must not, or goes beyond the limits above.
    """
    try:
        request = json.dumps([template, variables, [*answers], SECONDS]).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a chat template takes text, numbers, lists and objects, as JSON does: {error}") from error
    with _lock:
        reply = _ask(request)
    if "text" in reply:
        return reply["text"], reply["spans"], reply["tagged"]
    said = f"refuses these messages: {reply['refused']}" if "refused" in reply else reply["error"]
    line = "".join(char if char.isprintable() else " " for char in said[:1000])  # the template may have written it
    remedy = "" if "refused" in reply else "; give another template"
    raise JllamaError(f"the chat template {' '.join(line.split())[:280]}{remedy}")


def _ask(request: bytes) -> dict[str, Any]:
    """The worker's reply. One that gives none is ended: the next call starts another."""
    worker = _workers.get(os.getpid())
    if worker is None or worker.poll() is not None:
        _stop()
        # It imports the standard library and jinja2 alone. Its session is its own: Ctrl-C means the parent.
        specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin]
        script = Path(__file__).with_name("template_worker.py")
        program = [sys.executable, "-I", "-S", str(script), str(MEMORY_BYTES), *folders]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        worker = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)
        _workers[os.getpid()] = worker
    assert worker.stdin is not None and worker.stdout is not None  # noqa: PT018
    clock, reply = threading.Timer(CLOCK_SECONDS, worker.kill), {}
    clock.start()
    try:
        worker.stdin.write(request)
        worker.stdin.flush()
        line = worker.stdout.readline(MAX_BYTES)
        if len(line) == MAX_BYTES:
            return {"error": f"was stopped: it makes a text of over {MAX_BYTES:,} bytes"}
        reply = json.loads(line.decode("utf-8", "surrogatepass"))
        return reply
    except (OSError, ValueError):  # it has ended
        limits = f"{SECONDS:g} s or {MEMORY_BYTES // 2**20} MiB"
        return {"error": f"was stopped: it takes too much time or memory (over {limits}); perhaps it loops without end"}
    finally:
        clock.cancel()
        if not reply:
            _stop()


@atexit.register
def _stop() -> None:
    if worker := _workers.pop(os.getpid(), None):
        worker.kill()
        with contextlib.suppress(OSError):  # what it was never given is still to be flushed
            worker.__exit__(None, None, None)
