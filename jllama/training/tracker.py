"""What people and programs see of a run: lines of metrics, loggers, callbacks, the progress bar and the report."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jllama import distributed, files
from jllama.checkpoints.run import METRICS
from jllama.language_model import LanguageModel
from jllama.loggers import LOGGERS, numbers, persistent
from jllama.report import REPORT, write_report
from jllama.training import run_folder
from jllama.training.config import TrainConfig


class Event(NamedTuple):
    """What a callback gets: ``log``, ``evaluation`` or ``save``, after how many steps, and the figures of it.

    ``figures`` are those of ``metrics.jsonl``, of ``save`` none. ``model()`` is the model as it is now, a copy.
    """

    name: str
    step: int
    figures: Mapping[str, Any]
    model: Callable[[], LanguageModel]


Callback = Callable[[Event], object]


@dataclasses.dataclass
class Tracker:
    """The lines of a run's folder, its loggers and callbacks, and what is on the screen.

    What fails here is a warning, and the run goes on.
    """

    config: TrainConfig
    folder: Path
    console: Console
    callbacks: Sequence[Callback] = ()
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    note: str = ""  # how the last steps went
    move: Callable[..., None] = lambda **_: None  # the progress bar

    def __post_init__(self) -> None:
        logger = LOGGERS.get(self.config.logger, lambda *_: lambda *_: None)
        open_logger = functools.partial(logger, self.folder, run_folder.as_written(self.config))
        self._append = persistent(lambda _: files.append_line, self.warn)
        self._log = persistent(open_logger, self.warn)

    def seconds(self) -> float:
        """How long the run has taken, with what came before it went on."""
        return time.perf_counter() - self.start_s

    def show(self, step: int, doing: str = "") -> None:
        """Show what is being done, or else how the last steps went, in the progress bar."""
        self.move(description=doing or self.note, completed=step)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line."""
        self.console.print(text, style=style)

    def write(self, step: int, name: str = METRICS, **record: Any) -> None:
        """Add a line to a file of the run, and metrics to its logger; process 0 alone does."""
        if distributed.process_index() == 0:
            line = {"step": step, **record}
            self._append(self.folder / name, line)
            if name == METRICS:
                self._log(step, numbers(line))

    def call(
        self, name: str, step: int, figures: Mapping[str, Any], model: Callable[[], LanguageModel]
    ) -> None:
        """Call the callbacks, each of which may fail."""
        for callback in self.callbacks:
            try:
                callback(Event(name, step, figures, model))
            except Exception as error:
                self.warn(error, f"the callback {getattr(callback, '__name__', callback)} failed: ")

    def report(self) -> None:
        """Write the run's page."""
        if distributed.process_index() == 0:
            write_report([self.folder], self.folder / REPORT)

    @contextlib.contextmanager
    def attempt(self, doing: str, step: int) -> Iterator[None]:
        """Show what is being done; an error in it is a warning."""
        self.show(step, doing)
        try:
            yield
        except Exception as error:
            if (
                jax.process_count() > 1 and doing != "reporting"
            ):  # the others would wait for this one
                raise
            self.warn(error)

    def warn(self, error: Exception, what: str = "") -> None:
        """Say in a line what went wrong."""
        said = f"{what}{type(error).__name__}: {' '.join(str(error).split())}"
        self.say(f"warning: {said}; training goes on", "yellow")
