"""The training loop: take steps, and pause to log, evaluate, save and sample.

It gets a ``Run``: programs, a state, and what the loop calls. Batches come from a ``Source``, and a
pause goes to the run's tracker (log, page, loggers, callbacks), keeper (checkpoints) and sampler.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jllama.core import JllamaError, UsageError
from jllama.core.step import Batch, StepMetrics, TrainState
from jllama.parallel import distributed
from jllama.system.devices import device_memory_bytes
from jllama.system.files import CHECKPOINTS, METRICS, SAMPLES, SKIPPED
from jllama.system.memory import peak_bytes, program_bytes
from jllama.training.compiling import Training, compile_plan, put_on_devices
from jllama.training.metrics import (
    Evaluation,
    is_out_of_patience,
    summarize,
    training_flops_per_token,
)
from jllama.training.optimizer import learning_rate_at
from jllama.training.plan import Plan

if TYPE_CHECKING:
    from jllama.training.sources import Source


@dataclasses.dataclass
class Run:
    """A training run: its parts, and where it stands."""

    training: Training
    source: "Source"
    tracker: Any  # a ``Tracker``: what people and programs see of it
    keeper: Any  # a ``Keeper`` of its checkpoints
    sample: Callable[["Run"], None]  # shows and logs texts by the current model
    state: TrainState
    step: int = 0
    # The step of the last evaluation (``METRICS``), sample (``SAMPLES``) and checkpoint
    # (``CHECKPOINTS``).
    done: dict[str, int] = dataclasses.field(default_factory=dict)
    # The steps since the last pause, and when they began.
    recent: list[tuple[StepMetrics, Batch]] = dataclasses.field(default_factory=list)
    start_s: float = 0.0
    num_skipped: int = 0  # how many of the last steps were skipped in a row
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)  # by the batch's shape
    planned_bytes: int = 0  # of the largest program
    saved_s: float = dataclasses.field(default_factory=time.perf_counter)  # the last time
    stopping: Any = None  # an ``Agreement`` with other processes, while steps are taken

    @property
    def plan(self) -> Plan:
        """What is decided about the run."""
        return self.training.plan


def take_steps(run: Run) -> None:
    """Take the steps that are left, until a signal arrives or the validation loss stops falling."""
    options = run.plan.options

    # What is overdue comes first.
    has_ended = pause(run)
    run.start_s = time.perf_counter()
    while run.step < options.steps and not (run.stopping.signal or has_ended):
        take_step(run)

        # Whether to pause. Answers of a model are used to the end: a run that goes on has others.
        if not run.source.is_between:
            continue
        intervals = options.log_every, *run.plan.intervals.values()
        pauses = run.step == options.steps or any(run.step % every == 0 for every in intervals)
        if run.stopping.may_ask(run.step):
            pauses = run.stopping.ask() or is_overdue(run) or pauses

        # Log, evaluate, save and sample.
        if pauses:
            log(run)
            has_ended = pause(run)
            run.recent = []
            run.start_s = time.perf_counter()


def pause(run: Run) -> bool:
    """Evaluate, save and sample if due; return whether the validation loss has stopped falling.

    Nothing is done after a skipped step, unless it is the last one.
    """
    options = run.plan.options
    tracker = run.tracker
    if run.num_skipped and not (run.stopping.signal or run.step == options.steps):
        return False

    # 1) Evaluate, and see whether training has ended.
    evaluation = None
    if is_due(run, METRICS) and not run.stopping.signal:
        evaluation = evaluate_now(run)
    data_since = run.keeper.meta.get("data_since", 0)
    is_over = is_out_of_patience(run.plan.folder, options.patience, data_since)
    has_ended = distributed.max_over_processes(is_over) > 0

    # 2) Save.
    is_validated = evaluation and not options.save_every
    must_save = is_validated or run.stopping.signal or has_ended or is_due(run, CHECKPOINTS)
    if not is_saved(run) and (must_save or is_overdue(run)):
        save(run, evaluation)

    # 3) Sample, and draw the page.
    if is_due(run, SAMPLES) and not run.stopping.signal:
        with tracker.attempt("sampling", run.step):
            run.sample(run)
            run.done[SAMPLES] = run.step
        tracker.report()
    if evaluation and has_ended:
        tracker.say(
            f"step {run.step}: the validation loss has not fallen for {options.patience} "
            "evaluations, so training ends here",
            "bold",
        )
    tracker.show(run.step)
    return has_ended


def is_due(run: Run, name: str) -> bool:
    """Return whether an evaluation, sample or checkpoint is due or overdue.

    Each is due after every ``Plan.intervals`` steps and after the last step. One that failed, or
    that a stop prevented, stays due, also when the run is resumed.
    """
    last_due = run.step
    if run.step != run.plan.options.steps:
        last_due -= run.step % run.plan.intervals[name]
    return run.done.get(name, 0) < last_due


def is_saved(run: Run) -> bool:
    """Return whether the current step has a checkpoint."""
    return run.done.get(CHECKPOINTS, 0) == run.step


def is_overdue(run: Run) -> bool:
    """Return whether the last checkpoint is older than ``save_minutes`` in some process."""
    limit_s = 60 * run.plan.options.save_minutes
    age_s = time.perf_counter() - run.saved_s
    return limit_s > 0 and distributed.max_over_processes(age_s > limit_s) > 0


# A step: its batch and program


def take_step(run: Run) -> None:
    """Take a step with the next batch; it runs on when this returns, the one before has ended."""
    with run.tracker.step(run):
        batch = next_batch(run)
        on_devices = put_on_devices(batch, run.training.batch_sharding)
        run.state, metrics = program_for(run, on_devices)(run.state, on_devices)
        run.step += 1
        run.recent.append((metrics, batch))
        # A host that is many steps ahead of its devices could not stop soon.
        if len(run.recent) > 1:
            jax.block_until_ready(run.recent[-2][0])


def next_batch(run: Run) -> Batch:
    """Return the next batch, checked; if that fails, first log and save the steps so far."""
    is_read = False
    try:
        batch = run.source.next(run.step, run.state)
        is_read = True
        check_batch(run, batch)
        return batch
    except Exception as error:
        if is_read:  # but wrong: the run goes on before it
            getattr(run.source.stream, "give_back", bool)()
        if run.recent:
            log(run)
        if not is_saved(run):
            save(run, None)
        run.keeper.checkpoints.wait()
        if not isinstance(error, StopIteration):
            raise
        which = ", which is saved" if run.step else ""
        raise JllamaError(
            f"the batches ended after step {run.step:,} of {run.plan.options.steps:,}{which}: give "
            "as many as there are steps, or lower training.steps"
        ) from None


def check_batch(run: Run, batch: Any) -> None:
    """Raise ``UsageError`` for anything but a batch that fits this run."""
    if not isinstance(batch, Batch):
        raise UsageError(
            f"a batch is a {type(batch).__name__}; it must be a jllama.Batch, see jllama.text_batch"
        )
    run.training.step.check(batch)
    num_rows = len(batch.tokens)
    expected = run.plan.options.batch_size
    if batch.reference is not None:  # of pairs
        expected *= 2
    if num_rows != expected:
        raise UsageError(
            f"a batch has {num_rows} rows; with training.batch_size it must have {expected}"
        )


def program_for(run: Run, batch: Batch) -> Any:
    """Return the step compiled for a batch's shape; chats have two shapes."""
    shape = batch.tokens.shape
    if shape not in run.programs:
        start_s = time.perf_counter()
        run.tracker.show(run.step, "compiling")
        program = compile_fitting(run, batch)
        run.planned_bytes = max(run.planned_bytes, sum(program_bytes(program)))
        in_four_bits = any(leaf.dtype == jnp.uint4 for leaf in jax.tree.leaves(run.state.base))
        if in_four_bits and jax.__version_info__ < (0, 11):
            # These versions reject their own layout of such arrays, so the step is compiled by its
            # first call.
            program = run.training.step.program
        run.programs[shape] = program
        run.start_s += time.perf_counter() - start_s  # compiling is not part of a step's time
    return run.programs[shape]


def compile_fitting(run: Run, batch: Batch) -> Any:
    """Compile the step; where ``remat`` is ``auto``, with ``block`` if ``dots`` does not fit."""
    is_fixed = run.plan.remat != "auto"
    program, fits = None, False
    try:
        program = run.training.step.lower(run.state, batch).compile()
        available = device_memory_bytes(run.plan.mesh.local_devices[0])
        fits = sum(program_bytes(program)) <= (available or math.inf)
    except jax.errors.JaxRuntimeError as error:
        # The compiler for TPUs refuses a program that does not fit.
        if is_fixed or "RESOURCE_EXHAUSTED" not in str(error):
            raise
    if is_fixed or not distributed.max_over_processes(not fits):
        return program
    run.tracker.say(
        "note: what remat dots keeps does not fit the device, "
        "so each layer is computed again (block)"
    )
    run.training = compile_plan(dataclasses.replace(run.plan, remat="block"))
    run.source.training = run.training
    return run.training.step.lower(run.state, batch).compile()


# What a pause does


def log(run: Run) -> None:
    """Wait for the recent steps; log and show their means, and each skipped step by itself."""
    plan = run.plan
    recent = run.recent

    # Wait for the steps.
    taken = []
    for step, (metrics, batch) in enumerate(recent, run.step - len(recent) + 1):
        is_skipped = bool(metrics.skipped)  # the wait is here
        if is_skipped:
            run.num_skipped += 1
            log_skipped(run, step, metrics, batch)
        else:
            run.num_skipped = 0
            taken.append(metrics)
    elapsed_s = time.perf_counter() - run.start_s
    if not taken:
        return

    # Their means, and what the source and the devices have to add.
    flops_per_token = training_flops_per_token(
        plan.model, plan.options.seq_len, plan.trainable.shares
    )
    record = summarize(taken, elapsed_s * len(taken) / len(recent), flops_per_token)
    rate = learning_rate_at(run.step - 1, plan.optimizer, plan.options.steps)
    figures, warnings = run.source.figures([batch for _, batch in recent], elapsed_s)
    for warning in warnings:
        run.tracker.say(warning, "yellow")
    record |= {
        "learning_rate": float(rate),
        **figures,
        "planned_bytes": run.planned_bytes,
        "peak_bytes": peak_bytes(plan.mesh.local_devices),
        "elapsed_s": run.tracker.seconds(),
    }
    run.tracker.notify(run, "log", record)


def log_skipped(run: Run, step: int, metrics: StepMetrics, batch: Batch) -> None:
    """Log a skipped step and its batch; end the run if there were too many in a row."""
    options = run.plan.options
    tracker = run.tracker
    loss, norm = (
        value if math.isfinite(value) else None
        for value in (float(metrics.loss), float(metrics.grad_norm))
    )
    tracker.write(step, skipped=True, loss=loss, grad_norm=norm)
    tracker.write(step, SKIPPED, tokens=np.asarray(batch.tokens).tolist())
    reason = run.source.why_skipped(step)
    problem = reason or "the loss or its gradient is not a finite number"
    if loss is not None and norm is not None:
        problem = f"the gradient's norm, {norm:.3g}, is a spike"
    tracker.say(f"step {step} is left out, its batch is in {SKIPPED}: {problem}", "yellow")
    diverged_at_end = norm is None and step == options.steps and run.num_skipped > 1
    if diverged_at_end or run.num_skipped >= options.max_skipped:
        in_a_row = f" ({run.num_skipped} steps in a row)" if run.num_skipped > 1 else ""
        problem = f"{problem} at step {step}{in_a_row}"
        if not reason:
            raise_failure(run, problem)
        if not is_saved(run):
            save(run, None)
        raise_failure(run, problem, run.source.advice)


def evaluate_now(run: Run) -> Evaluation | None:
    """Evaluate on ``eval_tokens`` tokens; return None if that failed or was stopped."""
    tracker = run.tracker
    max_tokens = run.plan.options.eval_tokens
    evaluation = None
    with tracker.attempt("evaluating", run.step):
        evaluation = run.source.evaluate(run.state, max_tokens, run.stopping.ask)
    if evaluation is None:
        return None
    for line in run.source.samples:
        tracker.write(run.step, SAMPLES, **line)
    if not math.isfinite(evaluation.validation_loss):
        raise_failure(run, f"the validation loss is not a finite number at step {run.step}")
    run.done[METRICS] = run.step
    tracker.notify(run, "evaluation", dataclasses.asdict(evaluation))
    return evaluation


def save(run: Run, evaluation: Evaluation | None) -> None:
    """Begin to save a checkpoint."""
    run.tracker.show(run.step, "saving")
    run.done[CHECKPOINTS] = run.step
    run.saved_s = time.perf_counter()
    run.keeper.save(run, evaluation.validation_loss if evaluation else None)
    run.tracker.notify(run, "save", {})


def raise_failure(
    run: Run,
    problem: str,
    advice: str = "try a lower optimizer.learning_rate or optimizer.clip_norm",
) -> NoReturn:
    """End the run with an error that names the last good checkpoint."""
    run.keeper.checkpoints.wait()
    steps = run.keeper.checkpoints.steps()
    last = "no checkpoint had been saved yet"
    if steps:
        last = f"the last good checkpoint is of step {steps[-1]}"
    raise JllamaError(f"{problem}; {last}: {advice}")
