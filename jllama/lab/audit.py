"""Steps of a run computed again and compared with what it logged and saved."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict

from jllama.core import JllamaError, UsageError
from jllama.core.step import StepMetrics
from jllama.formats.receipt import RECEIPT, describe_weights
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.lab.bisect import (
    FIGURES,
    Bisection,
    Difference,
    compare_values,
    run_history,
    run_session,
)
from jllama.lab.checks import relative_error
from jllama.system.files import CHECKPOINTS, METRICS, SAMPLES, SKIPPED, Json
from jllama.training.config import TrainConfig
from jllama.training.loop import Run, take_step
from jllama.training.metrics import Evaluation, summarize
from jllama.training.opening import open_run

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-2}
"""Relative differences that other orders of sums make in some hundred steps, by the dtype of
activations."""
_NOT_COPIED = (METRICS, SAMPLES, SKIPPED, RECEIPT, "report.html")


def audit(
    config: TrainConfig,
    first: int,
    last: int,
    on_step: Callable[[int], object] = lambda _: None,
) -> Bisection:
    """Compute the steps after ``first`` up to ``last`` again, from the checkpoint before them.

    The run's folder stays as it is: the steps are computed in a copy. The weights of all its
    checkpoints are compared with its receipt, too.

    Raises:
        UsageError: the run has no such steps, or learns from rewards.
        JllamaError: it logged and saved nothing in these steps.
    """
    # 1) Check that the run can be audited, and choose the checkpoint to begin with.
    folder = Path(config.run_dir)
    if config.reward:
        raise UsageError(
            f"{folder} learns from rewards for sampled answers: only runs on text, chats and pairs "
            "can be audited"
        )
    saved = RunCheckpoints(folder / CHECKPOINTS, read_only=True)
    steps = saved.steps()
    if not first < last <= max(steps, default=0):
        raise UsageError(
            f"steps is {first}:{last}; expected two steps of {folder}, which is saved up to step "
            f"{max(steps, default=0)}, the smaller one first"
        )
    start = max((step for step in steps if step <= first), default=0)

    # 2) Copy the folder with this checkpoint alone, so that the run's own files stay as they are.
    with tempfile.TemporaryDirectory(prefix="audit") as scratch:
        copy = Path(scratch) / folder.resolve().name
        copy.mkdir()
        for path in folder.iterdir():
            is_own = path.is_file() and not path.is_symlink()
            if is_own and path.name not in _NOT_COPIED and not path.name.startswith("in_use"):
                shutil.copy(path, copy)
        if start:
            checkpoint = f"{CHECKPOINTS}/{start}"
            shutil.copytree(folder / checkpoint, copy / checkpoint)

        # 3) Resume the run in the copy, and compare each step with what the run logged and saved.
        options = dataclasses.replace(config.training, profile="")
        config = dataclasses.replace(
            config, training=options, run_dir=str(copy), resume="auto", logger=""
        )
        run = open_run(config, None, ())
        assert not isinstance(run, Evaluation), "no step is left"
        history = run_history(folder)
        compared = [*compare_values("session", run_session(folder), run_session(copy))]
        compared += _compare_weights(run, saved, history)
        while run.step < last:
            compared += _take_step(run, saved, history, is_shown=run.step >= first)
            on_step(run.step)

    # 4) Require figures of these steps, and compare the weights of all checkpoints.
    if all(one.part == "session" for one in compared):
        raise JllamaError(
            f"{folder} has no figures of steps {first + 1} to {last}: choose a range with a line "
            f"of {METRICS}, or train with --training.log_every 1"
        )
    for step in steps:
        part = f"checkpoints that are not what {RECEIPT} says"
        compared += compare_values(part, history, _fingerprints(saved, step))
    return Bisection(compared, TOLERANCES[run.plan.dtype.name])


def _take_step(
    run: Run, saved: RunCheckpoints, history: Json, *, is_shown: bool
) -> Iterator[Difference]:
    """Take a step, and yield a comparison of each figure that the run has of it."""
    take_step(run)
    # The figures are means over the steps since the last pause, those that were skipped left out.
    taken: list[StepMetrics] = [one for one, _ in run.recent if not one.skipped]
    names = [f"step {run.step}/{figure}" for figure in FIGURES]
    is_logged = names[0] in history
    if is_logged and taken and is_shown:
        means = summarize(taken, 1.0, 1.0)
        after = {name: means[figure] for name, figure in zip(names, FIGURES, strict=True)}
        yield from compare_values("training", history, after)
    if is_logged or run.step in saved.steps():
        run.recent = []
    if is_shown:
        yield from _compare_weights(run, saved, history)


def _compare_weights(run: Run, saved: RunCheckpoints, history: Json) -> Iterator[Difference]:
    """Yield a comparison of each parameter, if the receipt has the fingerprints of this step."""
    params = run.training.weights(run.state)
    prefix = f"step {run.step}/"
    if f"{prefix}embed" not in history and f"{prefix}layers/wq" not in history:
        return
    after = {prefix + path: number for path, number in describe_weights(params).items()}
    differences = [*compare_values("training", history, after)]
    if not any(one.error for one in differences) or run.step not in saved.steps():
        yield from differences
        return
    stored = _fingerprints(saved, run.step)
    if any(history.get(name, text) != text for name, text in stored.items()):
        yield from differences  # the checkpoint is not what the receipt says
        return
    # Other bits: how far are they from those of the checkpoint?
    arrays = saved.arrays(run.step)
    leaves = flatten_dict(jax.device_get(params), sep="/")
    for one in differences:
        path = one.name.removeprefix(prefix)
        error = relative_error(leaves[path], arrays[path].read(...))
        yield one._replace(error=one.error and error)


def _fingerprints(saved: RunCheckpoints, step: int) -> dict[str, str]:
    """Return the fingerprints of a checkpoint's weights, named as those of the history."""
    return {
        f"step {step}/{path}": array.fingerprint() for path, array in saved.arrays(step).items()
    }
