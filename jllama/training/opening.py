"""Beginning a run, or going on with one: everything is checked before anything is written."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from rich.console import Console

from jllama import distributed, files
from jllama.checkpoints.chat_files import write_chat_files
from jllama.checkpoints.run import CHECKPOINTS, CONFIG, METRICS, SAMPLES
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.checkpoints.tensors import Checkpoint, base_fingerprint, load_params
from jllama.data.datasets import BatchSource, ChatDataset, TrainingData
from jllama.devices import describe_devices, describe_driver, idle_accelerator
from jllama.errors import UsageError
from jllama.loggers import check_logger
from jllama.model import check_attention
from jllama.parameters import count_parameters
from jllama.report import command, run_facts
from jllama.sharding import ruleset
from jllama.tokenizers import has_tokenizer
from jllama.training import run_folder
from jllama.training.checkpointing import Checkpoints
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, check_memory
from jllama.training.optimizer import make_optimizer
from jllama.training.references import with_references
from jllama.training.resolve import resolved
from jllama.training.schedule import Schedule
from jllama.training.step import Training, TrainState, attention_of, compile_training
from jllama.training.tracker import Callback, Tracker

_OF_BITS = "devices", "versions"
"""The facts of a run that its bits depend on."""


@dataclasses.dataclass
class Run:
    """A run of training: what it is made of, and where it stands."""

    config: TrainConfig
    data: TrainingData
    origin: Checkpoint | None
    training: Training
    checkpoints: Checkpoints
    schedule: Schedule
    tracker: Tracker
    batches: Any  # an endless iterator with a state
    state: TrainState
    step: int = 0
    skipped: int = 0  # how many of the last steps were left out, one after the other
    programs: dict[Any, Any] = dataclasses.field(
        default_factory=dict
    )  # of a step, by the shape of its rows
    planned_bytes: int = 0  # of the largest
    signals: Sequence[int] = ()
    stop: int = 0  # the signal to stop that all processes know of


def open_run(
    config: TrainConfig, source: BatchSource | None, callbacks: Sequence[Callback]
) -> Run | Evaluation:
    """Check and prepare all that a run needs, and begin its folder; the final evaluation of one that is finished."""
    folder = Path(config.run_dir)
    console = Console(
        stderr=True, highlight=False, markup=False, quiet=distributed.process_index() > 0
    )
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole
    _check(config, folder)
    existing = _checkpoint_steps(folder)
    replaces = bool(existing) and config.resume == "never"
    if replaces:
        _ask_to_replace(config, folder)
        existing = []
    config, data, origin = resolved(config, folder if existing else None, source)
    step = existing[-1] if existing else 0
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow")
        if finished := _finished(folder, config, step, console):
            return finished

    # The programs, and the state before the first step.
    if warning := idle_accelerator():
        console.print(f"warning: {warning}", style="yellow")
    distributed.check_same({"the corpus": data.fingerprint, "the last checkpoint": step})
    training = compile_training(config, compiler_options=kept_choices(config, folder))
    check_memory(config, training)
    state = None
    if config.trains_adapters or not existing:
        state = _initial_state(config, training, origin)
    if replaces:
        run_folder.clear(folder)
    if isinstance(data, ChatDataset) and data.rows_each > 1:
        data = with_references(data, folder, config, training, None if existing else state)

    # The checkpoint to go on from.
    batches = _batches(data, config, training)
    schedule = Schedule(config.training)
    tracker = Tracker(config, folder, console, callbacks)
    fingerprint = base_fingerprint(origin) if config.trains_adapters and origin else None
    saved = RunCheckpoints(folder / CHECKPOINTS, config.training.keep_last)
    checkpoints = Checkpoints(saved, training, data.fingerprint, fingerprint)
    if existing:
        state, meta = checkpoints.restore(step, state and state.base)
        batches.set_state(meta["batches"])
        tracker.start_s -= meta["seconds"]
        schedule.done = {CHECKPOINTS: step}
        for name, key in ((METRICS, "validation_loss"), (SAMPLES, "text")):
            lines = files.read_lines(folder / name, key)
            schedule.done[name] = max(
                (line["step"] for line in lines if line["step"] <= step), default=0
            )
    assert state is not None
    if distributed.process_index() == 0:
        run_folder.write_config(folder, config, step)
        if not (existing and has_tokenizer(folder)):
            data.tokenizer.save(folder)
            write_chat_files(
                folder, origin.chat_template if origin else None, origin.stop_ids if origin else ()
            )
    run = Run(config, data, origin, training, checkpoints, schedule, tracker, batches, state, step)
    _announce(run)
    return run


def _check(config: TrainConfig, folder: Path) -> None:
    """Raise ``UsageError`` for what can be seen before anything is read."""
    distributed.check_same(flatten_dict(run_folder.as_written(config), sep="."))
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(
            f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto"
        )
    make_optimizer(config.optimizer, config.training.steps)
    check_attention(config.training.attention, backward=True)
    check_logger(config.logger)


def _checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that a folder holds."""
    if not (folder / CHECKPOINTS).exists():
        return []
    return RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()


def _ask_to_replace(config: TrainConfig, folder: Path) -> None:
    """Raise unless the run that is there may be removed."""
    if not config.overwrite:
        go_on = command("train", "--resume", folder)
        advice = (
            f"continue it with {go_on}, or choose another run_dir, or replace it with --overwrite"
        )
        raise UsageError(f"{folder} already holds a run: {advice}")
    run_folder.ask_to_overwrite(config)


def _finished(folder: Path, config: TrainConfig, step: int, console: Console) -> Evaluation | None:
    """The final evaluation of a run that has nothing left to do; else None."""
    steps, patience = config.training.steps, config.training.patience
    final = files.read_lines(folder / METRICS, "final")
    if not final or not (step >= steps or run_folder.out_of_patience(folder, patience)):
        return None
    longer = ("--training.steps", 2 * step, "--resume_with_changes", "true")
    go_on = command(
        "train", "--resume", folder, *(longer if step >= steps else ("--training.patience", 0))
    )
    console.print(f"{folder} is finished (step {step:,} of {steps:,}). To go on: {go_on}")
    figures = final[-1]["final"].items()  # which runs of 0.1 call those of preferences
    return Evaluation(**{name.replace("preference", "figures"): value for name, value in figures})


def kept_choices(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """XLA's options for keeping a GPU's choices of kernels, which it makes by timing, so that a run goes on with them.

    They are those with which JAX's own cache of compiled programs keeps them.
    """
    if jax.default_backend() != "gpu" or config.training.deterministic is False:
        return {}
    mode = "UPDATE" if distributed.process_index() == 0 else "READ"
    return {
        "xla_gpu_per_fusion_autotune_cache_dir": str((folder / run_folder.AUTOTUNING).absolute()),
        "xla_gpu_experimental_autotune_cache_mode": f"AUTOTUNE_CACHE_MODE_{mode}",
    }


def _initial_state(
    config: TrainConfig, training: Training, origin: Checkpoint | None
) -> TrainState:
    """The state before the first step, of the weights to begin from, if any, each in its final form as it is read."""
    params = None
    if origin:
        dtype, held = training.trainable.reading()
        params = load_params(origin, dtype, training.mesh, rules=ruleset(config.mesh), held=held)
    return training.init(jax.random.key(config.seed), params)


def _batches(data: TrainingData, config: TrainConfig, training: Training) -> Any:
    """Batches of NumPy arrays, of which this process reads the rows of its own devices."""
    options = config.training
    num_rows = options.batch_size * data.rows_each
    parts = training.batch_sharding.addressable_devices_indices_map((num_rows,)).values()
    rows = np.unique([np.arange(num_rows)[part] for part in parts]).tolist()
    size: Any = {
        "batch_size": options.batch_size,
        "seq_len": options.seq_len,
        "seed": config.seed,
        "rows": rows,
    }
    return data.training_batches(**size, packing=config.data.packing)


def _announce(run: Run) -> None:
    """Log what a run's page says of it, unless that has been done, and say it in a few words."""
    config, tracker, mesh = run.config, run.tracker, run.training.mesh
    attention = attention_of(config, mesh)
    devices, total = describe_devices(mesh), count_parameters(config.model)
    trained = sum(leaf.size for leaf in jax.tree.leaves(run.training.trained))
    driver = describe_driver(mesh.devices.flat[0])
    frozen = total if config.trains_adapters else total - trained
    facts = run_facts(run.data.facts(), devices, driver, trained, frozen)
    logged = [line["facts"] for line in files.read_lines(tracker.folder / METRICS, "facts")]
    if logged[-1:] != [facts]:
        tracker.write(run.step, facts=facts)
    before = {**facts, **logged[-1]} if logged else facts
    changes = [
        f"{before[name]} (now {facts[name]})" for name in _OF_BITS if before[name] != facts[name]
    ]
    if run.step and changes:
        said = f"this run had {' and '.join(changes)}"
        tracker.say(
            f"note: {said}, so its bits will differ from those of a run that had not changed",
            "yellow",
        )
    kind = "adapters" if config.trains_adapters else "them"
    of_which = f", {trained:,} of {kind} trained" if trained != total else ""
    said = f"{tracker.folder}: {total:,} parameters{of_which} on {devices}, {attention} attention"
    tracker.say(
        f"{said}, {run.data.size()}, step {run.step:,} of {config.training.steps:,}", "bold"
    )
    if attention == "triton":
        advice = "with Python 3.12 or later pip install 'jllama[cuda]' brings tokamax, whose attention is faster"
        tracker.say(f"note: {advice}", "yellow")
    for note in run.data.notes:
        tracker.say(f"note: {note}", "yellow")
