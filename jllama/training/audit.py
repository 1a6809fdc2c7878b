"""Steps of a run computed again and compared with what it logged and saved."""

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jllama.checkpoints.run import CHECKPOINTS, METRICS, SAMPLES
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.errors import JllamaError, UsageError, shell_command
from jllama.files import Json, read_lines
from jllama.training.checkpointing import restore_state
from jllama.training.config import TrainConfig
from jllama.training.loop import next_batch, program_for
from jllama.training.metrics import Evaluation, summarize
from jllama.training.opening import Run, open_run
from jllama.training.receipt import describe_session, describe_weights, read_receipt
from jllama.training.run_folder import SKIPPED
from jllama.training.step import StepMetrics, compute_dtype, put_on_devices

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-2}
"""The relative difference of losses, gradients and weights that other bits of the same dtype of
activations make in some hundred steps."""
_NOT_COPIED = (METRICS, SAMPLES, SKIPPED, CHECKPOINTS, "in_use*", "report.html", "autotuning")


class Compared(NamedTuple):
    """One figure of a run, as it was and as it is now."""

    step: int
    name: str  # loss or grad_norm, or a parameter's path
    before: Any
    after: Any
    error: float  # relative; 0 for the same bits


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        start: the step of the checkpoint from which steps were computed; 0 for the beginning.
        compared: the figures; those of weights are fingerprints.
        changes: what of code, versions, device and flags is another than it was.
        tolerance: of relative differences.
    """

    start: int
    compared: list[Compared]
    changes: list[str]
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether no difference is over the tolerance."""
        return all(one.error <= self.tolerance for one in self.compared)

    @property
    def verdict(self) -> str:
        """One sentence."""
        different = [one for one in self.compared if one.error]
        num_steps = len({one.step for one in self.compared})
        if not different:
            return f"PASS: the same bits in all {len(self.compared)} figures of {num_steps} steps"
        first = different[0]
        worst = max(different, key=lambda one: one.error)
        size = f"by up to {worst.error:.1e} ({worst.name} at step {worst.step:,})"
        first_text = f"first in {first.name} at step {first.step:,}"
        if self.passed:
            return f"PASS: other bits, {first_text}, {size}; allowed are {self.tolerance:.0e}"
        return f"FAIL: another run, {first_text}, {size}; allowed are {self.tolerance:.0e}"


def audit(
    config: TrainConfig,
    first: int,
    last: int,
    on_step: Callable[[int], object] = lambda _: None,
) -> Audit:
    """Compute the steps after ``first`` up to ``last`` again, from the checkpoint before them.

    The run's folder stays as it is: the steps are computed in a copy.

    Raises:
        UsageError: the run has no such steps, or gets rewards.
        JllamaError: nothing that was logged or saved in these steps is there to compare with.
    """
    folder = Path(config.run_dir)
    if config.reward:
        raise UsageError(
            f"{folder} gets rewards for answers that were sampled: only runs on text, "
            "chats and pairs can be audited"
        )
    saved = RunCheckpoints(folder / CHECKPOINTS, read_only=True)
    steps = saved.steps()
    if not first < last <= max(steps, default=0):
        raise UsageError(
            f"steps is {first}:{last}; expected two steps of {folder}, which is saved up to "
            f"step {max(steps, default=0)}, the smaller one first"
        )
    start = max((step for step in steps if step <= first), default=0)
    receipt = read_receipt(folder)
    with tempfile.TemporaryDirectory(prefix="audit") as scratch:
        copy = Path(scratch) / folder.resolve().name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        if start:
            name = f"{CHECKPOINTS}/{start}"
            shutil.copytree(folder / name, copy / name)
        run = open_run(dataclasses.replace(config, run_dir=str(copy), resume="auto"), None, ())
        assert not isinstance(run, Evaluation), "no step is left"
        compared = _compute(run, folder, saved, receipt["weights"], last, on_step)
        before = next(reversed(receipt["sessions"].values()), {})
        changes = _changes(before, describe_session(run.training.mesh))
    compared = [one for one in compared if one.step > first or one.step == start]
    if not compared:
        raise JllamaError(
            f"{folder} has no figures of steps {first + 1} to {last}: choose a range that holds a "
            f"line of {METRICS}, or train with {shell_command('train', '--training.log_every', 1)}"
        )
    dtype = compute_dtype(run.config, run.training.mesh).name
    return Audit(start, compared, changes, TOLERANCES[dtype])


def _compute(
    run: Run,
    folder: Path,
    saved: RunCheckpoints,
    weights: dict[str, dict[str, str]],
    last: int,
    on_step: Callable[[int], object],
) -> list[Compared]:
    """Take steps up to ``last``, and compare each figure that the run has of them."""
    lines = {line["step"]: line for line in read_lines(folder / METRICS, "tokens_per_s")}
    compared = [*_compare_weights(run, saved, weights)]  # the checkpoint may have been changed
    recent: list[StepMetrics] = []  # since the last pause; a line has their means
    while run.step < last:
        batch = put_on_devices(next_batch(run), run.training.batch_sharding)
        run.state, metrics = program_for(run, batch)(run.state, batch)
        run.step += 1
        if not metrics.skipped:
            recent.append(metrics)
        line = lines.get(run.step)
        if line and recent:
            means = summarize(recent, 1.0, 1.0)
            for name in ("loss", "grad_norm"):
                error = _relative_error(means[name], line[name])
                compared.append(Compared(run.step, name, line[name], means[name], error))
        if line or run.step in saved.steps():
            recent = []
        compared += _compare_weights(run, saved, weights)
        on_step(run.step)
    return compared


def _compare_weights(
    run: Run, saved: RunCheckpoints, weights: dict[str, dict[str, str]]
) -> Iterator[Compared]:
    """Yield the fingerprint of each parameter, if the receipt has those of this step."""
    before = weights.get(str(run.step))
    if before is None:
        return
    params = run.training.weights(run.state)
    after = describe_weights(params)
    errors = dict.fromkeys(before, 0.0)
    if after != before and run.step in saved.steps():
        state, _ = restore_state(saved, run.training, run.step, run.state.base)
        old = flatten_dict(run.training.weights(state), sep="/")
        new = flatten_dict(params, sep="/")
        errors = {path: _relative_error(new[path], old[path]) for path in before}
    for path, number in before.items():
        error = errors[path]
        if number != after.get(path):
            error = error or math.inf  # the file is not what the receipt says that it is
        yield Compared(run.step, path, number, after.get(path), error)


def _relative_error(actual: Any, expected: Any) -> float:
    """Compute the largest difference over the largest value."""
    actual, expected = (
        np.asarray(jax.device_get(value), np.float64) for value in (actual, expected)
    )
    largest = np.max(np.abs(expected))
    return float(np.max(np.abs(actual - expected)) / (largest or 1.0))


def _changes(before: Json, after: Json) -> list[str]:
    """Describe what differs between two sessions."""
    old, new = (flatten_dict(session, sep=".") for session in (before, after))
    return [
        f"{name} was {old.get(name)} and is {new.get(name)}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
