"""Where else a run's metrics go: TensorBoard, Weights & Biases, trackio; and how what fails is tried again."""

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

from jllama.errors import JllamaError, unknown_name

Write = Callable[[Any, Any], None]


def _tensorboard(folder: Path, config: Mapping[str, Any], step: int) -> Write:
    """Events in the run's folder ``tensorboard``; earlier ones from ``step`` on are void."""
    # Not through ``SummaryWriter``, whose thread ends at the first full disk and is then waited for forever.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import scalar

    messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    (folder / "tensorboard").mkdir(exist_ok=True)
    events = EventsWriter(str(folder / "tensorboard/events"), f".{uuid.uuid4().hex[:8]}")
    start = messages.SessionLog(status=messages.SessionLog.START)
    events.write_event(messages.Event(wall_time=time.time(), step=step, session_log=start))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            events.write_event(
                messages.Event(wall_time=time.time(), step=step, summary=scalar(name, value))
            )
        events.flush()

    return write


def _wandb(folder: Path, config: Mapping[str, Any], step: int, package: str = "wandb") -> Write:
    """A new run from step 0 on, else the last one; also in trackio, which has the same functions."""
    names: dict[str, Any] = {
        "dir": folder,
        "resume": "auto" if step else None,
        "reinit": "create_new",
    }
    if package == "trackio":
        names = {"resume": "allow" if step else "never", "embed": False}
    with contextlib.redirect_stdout(sys.stderr):
        run = importlib.import_module(package).init(
            project="jllama", name=folder.name, config=dict(config), **names
        )
    atexit.register(
        lambda: setattr(sys, "stdout", sys.stderr)
    )  # before what they say at the end: it is chatter
    return lambda step, values: run.log(values, step=step)


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], Write]]
LOGGERS = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": functools.partial(_wandb, package="trackio"),
}
"""``(a run's folder, its configuration, first step)`` -> ``write(step, numbers by name)``."""


def check_logger(name: str) -> None:
    """Raise ``UsageError`` for a name that is no logger's, ``JllamaError`` for one whose package is not there."""
    if name and name not in LOGGERS:
        raise unknown_name("logger", name, LOGGERS)
    if name in ("wandb", "trackio") and importlib.util.find_spec(name) is None:
        raise JllamaError(
            f"the logger {name} needs a package that is not installed: pip install 'jllama[{name}]'"
        )


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """What is drawn of a line of ``metrics.jsonl``: its finite numbers, nested ones as ``final/perplexity``."""
    flat: dict[Any, Any] = flatten_dict(
        {name: value for name, value in line.items() if name != "step"}, sep="/"
    )
    return {
        name: value
        for name, value in flat.items()
        if type(value) in (int, float) and math.isfinite(value)
    }


def persistent(
    open: Callable[[Any], Write], warn: Callable[[Exception], None]
) -> Callable[..., None]:
    """Gives records in order to the writer that ``open(first of the first record)`` gives, and stops nobody.

    What fails is told to ``warn`` and tried again, with another writer, at the next record; what goes on is told once.
    """
    waiting, writers = [], []

    def give(*record: Any) -> None:
        waiting.append(record)
        try:
            writers.extend([] if writers else [open(waiting[0][0])])
            while waiting:
                writers[0](*waiting[0])
                del waiting[0]
        except Exception as error:
            writers.clear()
            if len(waiting) == 1:
                warn(error)

    return give
