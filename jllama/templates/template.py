"""Jinja chat templates, rendered as by transformers, in a process with limits.

A template is a program that comes with a checkpoint, so it is not trusted. The sandbox of jinja2
keeps it from Python's internals. Its time and memory are limited by limits of the process that it
runs in (``template_worker``). The process is reused between calls.
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

from jllama.core import JllamaError, UsageError
from jllama.system import line_process
from jllama.system.line_process import Process

SECONDS = 5.0  # of processor time, if the system can limit it
CLOCK_SECONDS = 20.0  # by the clock, whatever else the machine does
MEMORY_BYTES = 512 * 2**20  # of the whole process, if the system can limit it
MAX_BYTES = 16_000_000  # of the text in UTF-8: about four million tokens

MAX_WORKERS = 4  # a slow template delays other calls only when all workers are busy

_free_workers = threading.BoundedSemaphore(MAX_WORKERS)
_workers: dict[int, list[Process]] = {}
"""The idle workers by the id of the process that started them: a fork of it needs its own."""


def render(template: str, **variables: Any) -> str:
    """Return the text that a template makes of ``variables``; raise as ``render_answers`` does."""
    return render_answers(template, variables).text


class AnswerSpan(NamedTuple):
    """The place of an answer in a text, in characters."""

    start: int
    end: int
    written: str  # what the template writes before the answer, and is no part of it
    is_open: bool  # whether the end also contains text of the template's own


class Rendered(NamedTuple):
    """The text that a template makes of messages, and the places of the answers in it."""

    text: str
    spans: list[AnswerSpan]
    is_tagged: bool
    """Whether the spans are those of ``{% generation %}`` tags."""

    left_out: list[str]
    """The parts of the conversation that make no difference to the text."""


def render_answers(
    template: str, variables: Mapping[str, Any], answers: Sequence[int] = ()
) -> Rendered:
    """Render a template, and find the messages ``answers`` (by index) in the text.

    The spans are those of ``{% generation %}`` tags. If there are no tags, or if ``answers`` are
    not all of the assistant's messages, the spans are found by changing the answers; the span of an
    answer that is no part of its own in the text is empty. ``left_out`` is empty without answers.

    Raises:
        UsageError: JSON cannot hold a variable.
        JllamaError: the template is not Jinja, refuses the messages (``raise_exception``), fails,
            uses what the sandbox forbids, or exceeds the limits above.
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
        spans = [AnswerSpan(*span) for span in reply.pop("spans")]
        return Rendered(**reply, spans=spans)
    problem = reply.get("error", "")
    remedy = "; give another template"
    if "refused" in reply:
        problem = f"refuses these messages: {reply['refused']}"
        remedy = ""
    # The template may have written this text.
    line = "".join(char if char.isprintable() else " " for char in problem[:1000])
    raise JllamaError(f"the chat template {' '.join(line.split())[:280]}{remedy}")


def _ask(request: bytes) -> dict[str, Any]:
    """Return the reply of an idle or a new worker. A worker that gives no reply is killed."""
    idle = _workers.setdefault(os.getpid(), [])
    worker = _take_worker(idle)
    line = line_process.ask(worker, request, CLOCK_SECONDS, MAX_BYTES)
    reply = {}
    with contextlib.suppress(ValueError):
        reply = json.loads(line.decode("utf-8", "surrogatepass"))
    if reply:
        idle.append(worker)
        return reply
    line_process.end(worker)
    if len(line) == MAX_BYTES:
        return {"error": f"was stopped: it makes a text of over {MAX_BYTES:,} bytes"}
    return {
        "error": "was stopped: it takes too much time or memory "
        f"(over {SECONDS:g} s or {MEMORY_BYTES // 2**20} MiB); perhaps it loops without end"
    }


def _take_worker(idle: list[Process]) -> Process:
    """Return the last idle worker that is alive, or a new one."""
    while True:
        try:
            worker = idle.pop()
        except IndexError:
            return _start_worker()
        if worker.poll() is None:
            return worker
        line_process.end(worker)


def _start_worker() -> Process:
    """Start a worker, which imports only the standard library and jinja2.

    It has a session of its own, so that Ctrl-C does not reach it.
    """
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    script = Path(__file__).with_name("template_worker.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(MEMORY_BYTES), *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@atexit.register
def _stop() -> None:
    for worker in _workers.pop(os.getpid(), []):
        line_process.end(worker)
