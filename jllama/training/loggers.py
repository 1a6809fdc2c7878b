"""Loggers of a run's metrics: TensorBoard, Weights & Biases, trackio; and retries for them."""

import atexit
import contextlib
import functools
import importlib
import importlib.util
import math
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from jllama.core import JllamaError
from jllama.system.errors import unknown_name

Write = Callable[[Any, Any], None]


def _tensorboard(folder: Path, config: Mapping[str, Any], step: int) -> Write:
    """Write events to the run's folder ``tensorboard``; older ones from ``step`` on are void."""
    # Not through ``SummaryWriter``: its thread ends at the first full disk, and is then waited for
    # forever.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import scalar

    messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    (folder / "tensorboard").mkdir(exist_ok=True)
    events = EventsWriter(str(folder / "tensorboard/events"), f".{uuid.uuid4().hex[:8]}")
    start = messages.SessionLog(status=messages.SessionLog.START)
    events.write_event(messages.Event(wall_time=time.time(), step=step, session_log=start))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            summary = scalar(name, value)
            events.write_event(messages.Event(wall_time=time.time(), step=step, summary=summary))
        events.flush()

    return write


def _wandb(folder: Path, config: Mapping[str, Any], step: int, package: str = "wandb") -> Write:
    """Log to a new run from step 0 on, else to the last one; trackio has the same functions."""
    options: dict[str, Any] = {"resume": "allow" if step else "never", "embed": False}
    if package == "wandb":
        resume = "auto" if step else None
        options = {"dir": folder, "resume": resume, "reinit": "create_new"}
    with contextlib.redirect_stdout(sys.stderr):
        run = importlib.import_module(package).init(
            project="jllama", name=folder.name, config=dict(config), **options
        )
    # Runs at the exit before the package's own handlers, so what they print goes to stderr.
    atexit.register(lambda: setattr(sys, "stdout", sys.stderr))
    return lambda step, values: run.log(values, step=step)


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], Write]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": functools.partial(_wandb, package="trackio"),
}
"""``(a run's folder, its configuration, first step)`` -> ``write(step, numbers by name)``."""


def check_logger(name: str) -> None:
    """Check that a logger can be used; an empty name is none.

    Raises:
        UsageError: there is no logger of this name.
        JllamaError: its package is not installed.
    """
    if name and name not in LOGGERS:
        raise unknown_name("logger", name, LOGGERS)
    if name in ("wandb", "trackio") and importlib.util.find_spec(name) is None:
        raise JllamaError(
            f"the logger {name} needs a package that is not installed: pip install 'jllama[{name}]'"
        )


def finite_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers in a line of ``metrics.jsonl``; nested: ``final/perplexity``."""
    flat: dict[Any, Any] = flatten_dict(dict(line), sep="/")
    return {
        name: value
        for name, value in flat.items()
        if name != "step" and type(value) in (int, float) and math.isfinite(value)
    }


def retrying_writer(
    open: Callable[[Any], Write], warn: Callable[[Exception], None]
) -> Callable[..., None]:
    """Return a function that delivers records to a writer in order, and never raises.

    A record that fails is retried with the next one, by another writer.

    Args:
        open: returns a writer, from the first value of the first record to deliver.
        warn: gets the error of the first of several failures in a row.
    """
    waiting: list[Any] = []
    write: Write | None = None

    def deliver(*record: Any) -> None:
        nonlocal write
        waiting.append(record)
        try:
            if write is None:
                write = open(waiting[0][0])
            while waiting:
                write(*waiting[0])
                del waiting[0]
        except Exception as error:
            write = None
            if len(waiting) == 1:
                warn(error)

    return deliver
