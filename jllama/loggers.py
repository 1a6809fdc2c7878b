"""Where else a run's metrics go: TensorBoard, Weights & Biases, trackio; and how what fails is tried again."""

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from jllama.errors import JllamaError, unknown_name

Write = Callable[[Any, Any], None]


@contextlib.contextmanager
def _tensorboard(folder: Path, config: Mapping[str, Any], step: int) -> Iterator[Write]:
    """Events in the run's folder ``tensorboard``; earlier ones from ``step`` on are void.

    Not through ``SummaryWriter``, whose thread ends at the first full disk and is then waited for forever.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import scalar

    messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    (folder / "tensorboard").mkdir(exist_ok=True)
    with contextlib.closing(EventsWriter(str(folder / "tensorboard/events"), f".{uuid.uuid4().hex[:8]}")) as events:

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                events.write_event(messages.Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            events.flush()

        start = messages.SessionLog(status=messages.SessionLog.START)
        events.write_event(messages.Event(wall_time=time.time(), step=step, session_log=start))
        yield write


@contextlib.contextmanager
def _wandb(folder: Path, config: Mapping[str, Any], step: int, package: str = "wandb") -> Iterator[Write]:
    """A new run from step 0 on, else the one that was begun: in wandb by an id in the run's folder ``wandb``, in
    trackio, which has the same functions, by the folder's name. What they print is chatter.
    """
    names: dict[str, Any] = {"project": "jllama", "name": folder.name, "config": dict(config)}
    if package == "trackio":
        names |= {"resume": "allow" if step else "never", "embed": False}
    else:
        own_id = folder / "wandb/id"
        if step == 0 or not own_id.exists():
            own_id.parent.mkdir(exist_ok=True)
            own_id.write_text(uuid.uuid4().hex)
        names |= {"id": own_id.read_text(), "dir": folder, "resume": "allow", "reinit": "create_new"}
    with contextlib.redirect_stdout(sys.stderr):
        run = importlib.import_module(package).init(**names)
    yield lambda step, values: run.log(values, step=step)
    with contextlib.redirect_stdout(sys.stderr):
        run.finish()


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], AbstractContextManager[Write]]]
LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": functools.partial(_wandb, package="trackio")}
"""``(a run's folder, its configuration, first step)`` -> a context manager of ``write(step, numbers by name)``."""


def check_logger(name: str) -> None:
    """Raise ``UsageError`` for a name that is no logger's, ``JllamaError`` for one whose package is not there."""
    if name and name not in LOGGERS:
        raise unknown_name("logger", name, LOGGERS)
    if name in ("wandb", "trackio") and importlib.util.find_spec(name) is None:
        raise JllamaError(f"the logger {name} needs a package that is not installed: pip install 'jllama[{name}]'")


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What is drawn of a line of ``metrics.jsonl``: its finite numbers, nested ones as ``final/perplexity``."""
    flat = {str(name): value for name, value in flatten_dict(dict(record), sep="/").items() if name != "step"}
    return {name: value for name, value in flat.items() if isinstance(value, int | float) and math.isfinite(value)}


class Outlet:
    """Gives records in order to what ``open(first of the first one)`` gives, and stops nobody: what fails is told to
    ``warn``, and tried again with the next record; what goes on failing is told once.
    """

    def __init__(self, open: Callable[[Any], AbstractContextManager[Write]], warn: Callable[[Exception], None]) -> None:
        self.open, self.warn, self.waiting, self.opened = open, warn, [], contextlib.ExitStack()
        self.write: Write | None = None

    def give(self, *record: Any) -> None:
        """Add a record, and write all that wait."""
        self.waiting.append(record)
        try:
            self.write = self.write or self.opened.enter_context(self.open(self.waiting[0][0]))
            while self.waiting:
                self.write(*self.waiting[0])
                del self.waiting[0]
        except Exception as error:
            if len(self.waiting) == 1:
                self.warn(error)
            self.close()

    def close(self) -> None:
        """End what was opened, whatever comes of it."""
        self.write = None
        with contextlib.suppress(Exception):
            self.opened.close()
