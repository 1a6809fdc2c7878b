"""What people and programs see of a run: metrics, loggers, callbacks, the screen, the report."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from jllama.parallel import distributed
from jllama.system import files
from jllama.system.files import METRICS
from jllama.training.events import REPORT_EVERY_S, Callback, Event
from jllama.training.loggers import LOGGERS, finite_numbers, retrying_writer
from jllama.training.loop import Run
from jllama.training.metrics import Evaluation, note_of
from jllama.training.plan import Plan
from jllama.training.profile import profiled_steps
from jllama.training.report import REPORT, write_report
from jllama.training.run_folder import config_fields
from jllama.training.samples import copy_current_model


@dataclasses.dataclass
class Tracker:
    """A run's log files, loggers, callbacks and screen; an error in them is only a warning."""

    plan: Plan
    console: Console
    callbacks: Sequence[Callback] = ()
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    note: str = ""  # how the last steps went
    reported_s: float = -REPORT_EVERY_S  # when the page was last written, as ``seconds`` counts
    move: Callable[..., None] = lambda **_: None  # the progress bar
    # Of the profiled steps, while they are taken.
    trace: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        config = self.plan.config
        logger = LOGGERS.get(config.logger, lambda *_: lambda *_: None)
        open_logger = functools.partial(logger, self.plan.folder, config_fields(config))
        self._append = retrying_writer(lambda _: files.append_line, self.warn)
        self._log = retrying_writer(open_logger, self.warn)

    def seconds(self) -> float:
        """Return how long the run has taken, including the time before it was resumed."""
        return time.perf_counter() - self.start_s

    def show(self, step: int, activity: str = "") -> None:
        """Show the current activity in the progress bar, or how the last steps went."""
        self.move(description=activity or self.note, completed=step)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line."""
        self.console.print(text, style=style)

    def write(self, step: int, name: str = METRICS, **record: Any) -> None:
        """Append a line to a file of the run, and metrics to its logger, in process 0 alone."""
        if distributed.process_index() == 0:
            line = {"step": step, **record}
            self._append(self.plan.folder / name, line)
            if name == METRICS:
                self._log(step, finite_numbers(line))

    @contextlib.contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Record the step that is taken in the block, if it is one of ``training.profile``.

        A trace begins when the devices have completed the step before, and ends when they have
        completed its last one, or the last of the run. That it cannot be written is a warning, in
        one process of several too: the others do not wait for it.
        """
        first, last = profiled_steps(self.plan.options.profile)
        step = run.step + 1
        if step == max(first, self.plan.step + 1) <= last:
            jax.block_until_ready(run.state)
            folder = self.plan.folder / f"profile/{distributed.process_index()}"
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python fill a trace, and slow the host
            trace = jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options)
            with self.warnings():
                self.trace.enter_context(self.warnings())  # also when it ends, and is written
                self.trace.enter_context(trace)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == min(last, self.plan.options.steps):
            self.show(step, "profiling")
            jax.block_until_ready(run.state)
            self.trace.close()

    def notify(self, run: Run, name: str, figures: Mapping[str, Any]) -> None:
        """Call what observes the run with an event: metrics, the screen, and each callback."""
        event = Event(name, run.step, figures, functools.partial(copy_current_model, run))
        for observer in (self.record, self.narrate, *self.callbacks):
            with self.warnings(f"the callback {getattr(observer, '__name__', observer)} failed: "):
                observer(event)

    def record(self, event: Event) -> None:
        """Write the figures of an event to the metrics."""
        if event.figures:
            self.write(event.step, **event.figures)

    def narrate(self, event: Event) -> None:
        """Print a line of an event for people."""
        if event.name == "evaluation":
            self.say(f"step {event.step}: {Evaluation(**event.figures)}", "bold")
        if event.name != "log":
            return
        figures = event.figures
        self.note = note_of(figures)
        if not self.console.is_terminal:
            line = f"step {event.step}: {self.note}  learning rate {figures['learning_rate']:.1e}"
            if figures["mfu"]:
                line += f"  MFU {figures['mfu']:.1%}"
            if figures["peak_bytes"]:
                peak, planned = (figures[f"{name}_bytes"] / 2**30 for name in ("peak", "planned"))
                line += f"  {peak:.2f} GiB, planned {planned:.2f}"
            self.say(line)
        self.show(event.step)

    def report(self, every_s: float = REPORT_EVERY_S) -> None:
        """Write the run's page, unless that was done less than ``every_s`` seconds ago."""
        if distributed.process_index() or self.seconds() - self.reported_s < every_s:
            return
        with self.warnings():
            write_report([self.plan.folder], self.plan.folder / REPORT)
        self.reported_s = self.seconds()

    @contextlib.contextmanager
    def attempt(self, activity: str, step: int) -> Iterator[None]:
        """Show an activity; an error in it is a warning, unless other processes would wait."""
        self.show(step, activity)
        with contextlib.nullcontext() if jax.process_count() > 1 else self.warnings():
            yield

    @contextlib.contextmanager
    def warnings(self, context: str = "") -> Iterator[None]:
        """Turn an error in the block into a warning."""
        try:
            yield
        except Exception as error:
            self.warn(error, context)

    def warn(self, error: Exception, context: str = "") -> None:
        """Print an error in one line."""
        message = f"{context}{type(error).__name__}: {' '.join(str(error).split())}"
        self.say(f"warning: {message}; training goes on", "yellow")
