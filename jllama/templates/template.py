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
from typing import Any, NamedTuple

from jllama.errors import JllamaError, UsageError

SECONDS = 5.0  # of processor time, where the system can limit it
CLOCK_SECONDS = 20.0  # by the clock, whatever else the machine does
MEMORY_BYTES = 512 * 2**20  # of the whole process, where the system can limit it
MAX_BYTES = 16_000_000  # of the text in UTF-8: about four million tokens

MAX_WORKERS = 4  # a slow template holds up only those who render when all of them are busy

_free_workers = threading.BoundedSemaphore(MAX_WORKERS)
_workers: dict[int, list[subprocess.Popen[bytes]]] = {}
"""The idle workers, by the id of the process that started them: a fork of that process needs its own."""


def render(template: str, **variables: Any) -> str:
    """The text that a template makes of ``variables``; errors are those of ``render_answers``."""
    return render_answers(template, variables)[0]


class Rendered(NamedTuple):
    """What a template makes of messages, and where the answers are in it."""

    text: str
    spans: list[Any]
    """Of each answer the start and end in characters, what the template writes before it, and whether the template's
    own text stands at its end, too."""

    is_tagged: bool
    """Whether the spans are those of ``{% generation %}`` tags."""

    left_out: list[str]
    """The parts of the conversation that the text would be the same without."""


def render_answers(
    template: str, variables: Mapping[str, Any], answers: Sequence[int] = ()
) -> Rendered:
    """Render a template, and find the messages ``answers`` (by index) in the text.

    Spans are what is in ``{% generation %}`` tags. Where there are no tags, or not all of the assistant's messages are
    asked for, they are those of the answers, empty for one that the template does not write as a part of its own.
    Without answers, ``left_out`` is not looked for.

    Raises ``UsageError`` for a variable that JSON cannot hold, and ``JllamaError`` where the template is not Jinja,
    refuses (``raise_exception``), fails, reaches for what it must not, or goes beyond the limits above.
    """
    try:
        request = json.dumps([template, variables, [*answers], SECONDS]).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"a chat template takes text, numbers, lists and objects, as JSON does: {error}"
        ) from error
    with _free_workers:
        reply = _ask(request)
    if "text" in reply:
        return Rendered(**reply)
    said = f"refuses these messages: {reply['refused']}" if "refused" in reply else reply["error"]
    line = "".join(
        char if char.isprintable() else " " for char in said[:1000]
    )  # the template may have written it
    remedy = "" if "refused" in reply else "; give another template"
    raise JllamaError(f"the chat template {' '.join(line.split())[:280]}{remedy}")


def _ask(request: bytes) -> dict[str, Any]:
    """The reply of an idle worker, or of a new one. A worker that gives no reply is ended."""
    idle = _workers.setdefault(os.getpid(), [])
    worker = _take(idle)
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
        return {
            "error": f"was stopped: it takes too much time or memory (over {limits}); perhaps it loops without end"
        }
    finally:
        clock.cancel()
        if reply:
            idle.append(worker)
        else:
            _end(worker)


def _take(idle: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """The last idle worker that lives, or a new one."""
    while True:
        try:
            worker = idle.pop()
        except IndexError:
            return _start()
        if worker.poll() is None:
            return worker
        _end(worker)


def _start() -> subprocess.Popen[bytes]:
    """A new worker, which imports the standard library and jinja2 alone. Ctrl-C means the parent, not its session."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = [
        str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin
    ]
    script = Path(__file__).with_name("template_worker.py")
    program = [sys.executable, "-I", "-S", str(script), str(MEMORY_BYTES), *folders]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    with contextlib.suppress(OSError):  # what it was never given is still to be flushed
        worker.__exit__(None, None, None)


@atexit.register
def _stop() -> None:
    for worker in _workers.pop(os.getpid(), []):
        _end(worker)
