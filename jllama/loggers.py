"""Where else a run's metrics go: TensorBoard, Weights & Biases, trackio; and how what fails is tried again."""

import contextlib
import dataclasses
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

Write = Callable[[int, Any], None]


@contextlib.contextmanager
def _tensorboard(folder: Path, config: Mapping[str, Any], step: int) -> Iterator[Write]:
    """Events from ``step`` on in the folder ``tensorboard`` of a run; earlier files' from there on are void.

    Not through ``SummaryWriter``, whose thread ends at the first full disk and is then waited for forever.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import scalar

    messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    start = messages.SessionLog(status=messages.SessionLog.START)
    (folder / "tensorboard").mkdir(exist_ok=True)
    with contextlib.closing(EventsWriter(str(folder / "tensorboard" / "events"), f".{uuid.uuid4().hex[:8]}")) as events:
        events.write_event(messages.Event(wall_time=time.time(), step=step, session_log=start))

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                events.write_event(messages.Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            events.flush()

        yield write


@contextlib.contextmanager
def _wandb(folder: Path, config: Mapping[str, Any], step: int) -> Iterator[Write]:
    """A new run there from step 0 on; else the one that was begun, whose id stands in the run's folder ``wandb``."""
    wandb, own_id = importlib.import_module("wandb"), folder / "wandb" / "id"
    if step == 0 or not own_id.exists():
        own_id.parent.mkdir(exist_ok=True)
        own_id.write_text(uuid.uuid4().hex)
    names = {"project": "jllama", "name": folder.name, "id": own_id.read_text(), "dir": folder, "resume": "allow"}
    with wandb.init(**names, config=dict(config), reinit="create_new") as run:
        yield lambda step, values: run.log(values, step=step)


@contextlib.contextmanager
def _trackio(folder: Path, config: Mapping[str, Any], step: int) -> Iterator[Write]:
    """A new run there from step 0 on, else the last one of the folder's name. What it prints is chatter."""
    trackio, names = importlib.import_module("trackio"), {"project": "jllama", "name": folder.name}
    with contextlib.redirect_stdout(sys.stderr):
        run = trackio.init(**names, resume="allow" if step else "never", config=dict(config), embed=False)
    yield lambda step, values: run.log(values, step=step)
    with contextlib.redirect_stdout(sys.stderr):
        run.finish()


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any], int], AbstractContextManager[Write]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
"""``(a run's folder, its configuration, first step)`` -> a context manager of ``write(step, numbers by name)``."""


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What is drawn of a line of ``metrics.jsonl``: its finite numbers, nested ones as ``final/perplexity``."""
    flat = {str(name): value for name, value in flatten_dict(dict(record), sep="/").items() if name != "step"}
    return {name: value for name, value in flat.items() if isinstance(value, int | float) and math.isfinite(value)}


def check_logger(name: str) -> None:
    """Raise ``UsageError`` for a name that is no logger's, ``JllamaError`` for one whose package is not there."""
    if name and name not in LOGGERS:
        raise unknown_name("logger", name, LOGGERS)
    if name in ("wandb", "trackio") and importlib.util.find_spec(name) is None:
        raise JllamaError(f"the logger {name} needs a package that is not installed: pip install 'jllama[{name}]'")


@dataclasses.dataclass
class Outlet:
    """Gives records in order to where ``open(first step)`` leads, and stops nobody: what fails is said to ``warn``,
    opened anew, and tried again, with all that waits, at the next record; what goes on failing is said once.
    """

    open: Callable[[int], AbstractContextManager[Write]]
    warn: Callable[[Exception], None]
    waiting: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    write: Write | None = None
    opened: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def give(self, step: int, record: Any) -> None:
        """Add a record, and write all that wait."""
        self.waiting.append((step, record))
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
