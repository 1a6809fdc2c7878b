"""Steps of a run computed again and compared with what it logged and saved."""

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path

import jax

from jllama.core import JllamaError, UsageError
from jllama.formats.receipt import RECEIPT, read_receipt
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.lab.bisect import Bisection, compare_values, run_history, run_session
from jllama.lab.checks import relative_error
from jllama.system.files import CHECKPOINTS, METRICS
from jllama.training.config import TrainConfig
from jllama.training.events import Event
from jllama.training.run import train

# Relative differences that other orders of sums make in some hundred steps, by the dtype of
# activations.
_FLOAT32_TOLERANCE = 1e-4
_BFLOAT16_TOLERANCE = 3e-2
_NOT_COPIED = (RECEIPT, "report.html")


class _Done(BaseException):
    """Ends the training of the copy; another error of a callback is only a warning."""


def audit(config: TrainConfig, first: int, last: int) -> Bisection:
    """Compute the steps after ``first`` up to ``last`` again, from the checkpoint before them.

    The run's folder stays as it is: a copy of it is trained, with its evaluations and checkpoints.
    The weights of all the run's checkpoints are compared with its receipt, too.

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

    # 2) Resume the run in a copy of the folder with this checkpoint alone.
    history = run_history(folder)
    stored = {step: _fingerprints(saved, step) for step in steps}
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
        is_saved = str(last) in read_receipt(folder)["weights"]

        def stop_at_last(event: Event) -> None:
            is_before_save = event.step == last and is_saved and event.name != "save"
            if event.step >= last and not is_before_save:
                raise _Done

        config = dataclasses.replace(config, run_dir=str(copy), resume="auto", logger="")
        with contextlib.suppress(_Done):
            train(config, callbacks=[stop_at_last])

        # 3) Compare what was read, what was logged and what was saved.
        compared = [*compare_values("session", run_session(folder), run_session(copy))]
        compared += compare_values("training", history, stored.get(start, {}))
        again = RunCheckpoints(copy / CHECKPOINTS, read_only=True)
        for one in compare_values("training", history, run_history(copy, first, last)):
            step, _, path = one.name.removeprefix("step ").partition("/")
            # Other bits of weights: how far are they from those of the checkpoint? That is not
            # known if the checkpoint is not what the receipt says.
            is_receipts = stored.get(int(step), {}).get(one.name, "") == history.get(one.name)
            if one.error and is_receipts and int(step) in again.steps():
                pair = [run.arrays(int(step))[path] for run in (again, saved)]
                one = one._replace(error=relative_error(*(array.read(...) for array in pair)))
            compared.append(one)
    if all(one.part == "session" for one in compared):
        raise JllamaError(
            f"{folder} has no figures of steps {first + 1} to {last}: choose a range with a line "
            f"of {METRICS}, or train with --training.log_every 1"
        )
    for fingerprints in stored.values():
        part = f"checkpoints that are not what {RECEIPT} says"
        compared += compare_values(part, history, fingerprints)
    dtype = config.training.dtype
    is_float32 = dtype == "float32" or (dtype == "auto" and jax.default_backend() == "cpu")
    return Bisection(compared, _FLOAT32_TOLERANCE if is_float32 else _BFLOAT16_TOLERANCE)


def _fingerprints(saved: RunCheckpoints, step: int) -> dict[str, str]:
    """Return the fingerprints of a checkpoint's weights, named as those of the history."""
    return {
        f"step {step}/{path}": array.fingerprint() for path, array in saved.arrays(step).items()
    }
