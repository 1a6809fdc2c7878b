"""Begin a run or resume one: everything is checked before anything is written."""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console

from jllama.core import UsageError
from jllama.core.parameters import count_parameters
from jllama.core.step import TrainState
from jllama.data.batches import chat_validation_batches
from jllama.data.datasets import BatchSource, ChatDataset, TrainingData
from jllama.data.prompts import PromptDataset
from jllama.data.tokens import SPLITS, sha256
from jllama.formats.adapters import stacked
from jllama.formats.chat_files import write_chat_files
from jllama.formats.receipt import describe_weights
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.formats.tensors import Checkpoint, base_fingerprint, load_params
from jllama.models.build import check_attention
from jllama.parallel import distributed
from jllama.parallel.sharding import ruleset
from jllama.system.devices import device_memory_bytes, loss_chunk_tokens
from jllama.system.errors import shell_command
from jllama.system.files import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    SAMPLES,
    Json,
    atomic_write,
    errors_as,
    read_lines,
)
from jllama.system.machine import describe_devices, describe_driver, idle_accelerator
from jllama.system.memory import device_bytes
from jllama.system.progress import progress
from jllama.tokenizers.loading import has_tokenizer
from jllama.training import run_folder
from jllama.training.checkpointing import check_origin, restore_state
from jllama.training.compiling import (
    Training,
    autotuning_options,
    check_batch_divides,
    compile_training,
    put_on_devices,
)
from jllama.training.config import TrainConfig
from jllama.training.events import Callback
from jllama.training.keeper import Keeper
from jllama.training.loggers import check_logger
from jllama.training.loop import Run
from jllama.training.metrics import Evaluation, is_out_of_patience
from jllama.training.optimizer import make_optimizer
from jllama.training.receipt import begin_receipt
from jllama.training.report import run_facts
from jllama.training.resolve import resolve
from jllama.training.samples import copy_current_model, no_samples, sample
from jllama.training.sources import DataSource, Source
from jllama.training.tracker import Tracker

REFERENCE = "reference.npz"
REWARDED_SOURCE = "jllama.rl.rollouts"
"""The module with the source of training from rewards. It imports this room, so that this room
finds it by its name."""


class Beginning(NamedTuple):
    """What is decided about a run before anything is loaded."""

    config: TrainConfig  # complete
    data: TrainingData | PromptDataset
    origin: Checkpoint | None  # the checkpoint of ``init_from``
    step: int  # that the run goes on from
    resumes: bool
    replaces: bool  # whether another run's folder is cleared


def open_run(
    config: TrainConfig, own_data: BatchSource | None, callbacks: Sequence[Callback]
) -> Run | Evaluation:
    """Check and prepare everything that a run needs, and write its folder.

    Returns the final evaluation instead if the run is finished. ``own_data`` replaces
    ``config.data``.
    """
    folder = Path(config.run_dir)
    is_first_process = distributed.process_index() == 0
    console = Console(stderr=True, highlight=False, markup=False, quiet=not is_first_process)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole

    # 1) Decide: the configuration, the data, and the step to resume from.
    beginning = begin(config, folder, own_data, console)
    if isinstance(beginning, Evaluation):
        return beginning
    config, data, *_ = beginning
    rewarded = scorer = None
    if isinstance(data, PromptDataset):
        rewarded = importlib.import_module(REWARDED_SOURCE)
        scorer = rewarded.open_scorer(config, data)
    try:
        return build_run(beginning, console, callbacks, rewarded, scorer)
    except BaseException:
        if scorer:
            scorer.close()  # its processes
        raise


def build_run(
    beginning: Beginning,
    console: Console,
    callbacks: Sequence[Callback],
    rewarded: Any,
    scorer: Any,
) -> Run:
    """Load, compile and restore what a run needs, and write its folder.

    ``rewarded`` is the module with the source of training from rewards, and ``scorer`` what
    rewards its answers; None without rewards.
    """
    config, data, origin, step, resumes, replaces = beginning
    folder = Path(config.run_dir)
    warn_of_idle_accelerator(console)
    distributed.check_same({"the corpus": data.fingerprint, "the last checkpoint": step})

    # 2) Build: the programs, the state before the first step, and the source of batches.
    training = compile_training(config, compiler_options=autotuning_options(config, folder))
    check_memory(config, training)
    state = None
    if config.trains_adapters or config.has_reference or not resumes:
        state = load_initial_state(config, training, origin)
    if replaces:
        run_folder.clear(folder)
    if isinstance(data, ChatDataset) and data.rows_per_example > 1:
        initial = None if resumes else state
        data = add_reference_log_probs(data, folder, config, training, initial)
    samples = no_samples  # with rewards, answers to held-out prompts are shown
    if isinstance(data, PromptDataset):
        source = rewarded.open_rollouts(data, scorer, config, training, origin, state)
    else:
        source = DataSource(data, config, training)
        samples = functools.partial(sample, origin)

    # 3) Restore the checkpoint to resume from.
    tracker = Tracker(config, folder, console, callbacks)
    checkpoints = RunCheckpoints(folder / CHECKPOINTS, config.training.keep_last)
    origin_meta = describe_origin(config, origin, state)
    done = {}
    if resumes:
        state, meta = restore_state(checkpoints, training, step, state and state.base)
        # The answers of pairs were read by the model before training.
        may_change = config.resume_with_changes and getattr(data, "rows_per_example", 1) == 1
        is_same = check_origin(
            meta, data.fingerprint, origin_meta, checkpoints, step, may_change=may_change
        )
        origin_meta["data_since"] = set_position(source, meta, step, console, is_same=is_same)
        tracker.start_s -= meta["seconds"]
        done = last_records(folder, step)
    assert state is not None

    # 4) Write the folder.
    if distributed.process_index() == 0:
        write_folder(folder, beginning)
    receipt = begin_receipt(folder, config, data.fingerprint, training.mesh, step)
    keeper = Keeper(folder, checkpoints, origin_meta, receipt)
    copy_model = functools.partial(copy_current_model, origin)
    run = Run(
        config, data, training, source, tracker, keeper, samples, copy_model, state, step, done
    )
    log_facts(run)
    return run


def begin(
    config: TrainConfig, folder: Path, own_data: BatchSource | None, console: Console
) -> Beginning | Evaluation:
    """Decide how a run begins; return the final evaluation instead if it is finished."""
    check_options(config, folder)
    steps = []
    if (folder / CHECKPOINTS).exists():
        steps = RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    replaces = bool(steps) and config.resume == "never"
    if replaces:
        run_folder.confirm_overwrite(config)
    resumes = bool(steps) and not replaces
    config, data, origin = resolve(config, folder if resumes else None, own_data)
    step = steps[-1] if resumes else 0
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow")
        final = final_evaluation(folder, config, step, console)
        if final is not None:
            return final
    return Beginning(config, data, origin, step, resumes, replaces)


def write_folder(folder: Path, beginning: Beginning) -> None:
    """Write a run's configuration and, if it is new, its tokenizer and chat template."""
    config, data, origin, step, resumes, _ = beginning
    run_folder.write_config(folder, config, step)
    if resumes and has_tokenizer(folder):
        return
    data.tokenizer.save(folder)
    template = origin.chat_template if origin else None
    stop_ids = origin.stop_ids if origin else ()
    write_chat_files(folder, template, stop_ids)


def describe_origin(
    config: TrainConfig, origin: Checkpoint | None, initial: TrainState | None
) -> Json:
    """Return fingerprints of what a resumed run reads again: adapters' base, or the reference."""
    meta = {}
    if config.trains_adapters and origin:
        base = dataclasses.replace(origin, adapter=None)
        meta["base_fingerprint"] = base_fingerprint(base)
    # DoRA's first lengths are sums, whose last bits depend on the device.
    if config.has_reference and initial and not config.lora.dora:
        meta["reference_fingerprint"] = sha256(describe_weights(initial.params))
    return meta


def set_position(source: Source, meta: Json, step: int, console: Console, *, is_same: bool) -> int:
    """Go on in a checkpoint's data, or begin others; return the step after which they began."""
    if is_same:
        source.set_state(meta["batches"])
        return meta.get("data_since", 0)
    console.print(
        "the data have changed: they are read from their beginning, and the best checkpoint is the "
        f"best of those after step {step:,}",
        style="yellow",
    )
    return step


def last_records(folder: Path, step: int) -> dict[str, int]:
    """Return ``Run.done`` of a run that resumes from the checkpoint of ``step``."""
    done = {CHECKPOINTS: step}
    for name, key in ((METRICS, "validation_loss"), (SAMPLES, "text")):
        logged = [line["step"] for line in read_lines(folder / name, key)]
        done[name] = max((number for number in logged if number <= step), default=0)
    return done


def check_options(config: TrainConfig, folder: Path) -> None:
    """Raise ``UsageError`` for problems that show before any data or weights are read."""
    distributed.check_same(flatten_dict(run_folder.config_fields(config), sep="."))
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(
            f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto"
        )
    make_optimizer(config.optimizer, config.training.steps)
    check_attention(config.training.attention, backward=True)
    check_logger(config.logger)


def final_evaluation(
    folder: Path, config: TrainConfig, step: int, console: Console
) -> Evaluation | None:
    """Return the final evaluation if nothing is left to do, and print how to continue."""
    num_steps = config.training.steps
    patience = config.training.patience
    lines = read_lines(folder / METRICS, "final")
    has_all_steps = step >= num_steps
    if not lines or not (has_all_steps or is_out_of_patience(folder, patience)):
        return None
    options = ["--training.patience", 0]
    if has_all_steps:
        options = ["--training.steps", 2 * step, "--resume_with_changes", "true"]
    go_on = shell_command("train", "--resume", folder, *options)
    console.print(f"{folder} is finished (step {step:,} of {num_steps:,}). To go on: {go_on}")
    # Runs of 0.1 name the figures after the preference objective.
    figures = lines[-1]["final"].items()
    return Evaluation(**{name.replace("preference", "figures"): value for name, value in figures})


def check_memory(
    config: TrainConfig, training: Training, available_bytes: int | None = None
) -> None:
    """Raise ``UsageError`` if a batch does not divide over the devices, or cannot fit on one.

    Counted is what any program needs at least: the device's share of the state and the gradients,
    and each layer's input for one part of a batch. CPU devices share the memory of the machine.
    """
    check_batch_divides(config, training.mesh)
    options = config.training
    mesh = training.mesh
    device = mesh.local_devices[0]
    ways = options.accumulation * mesh.size / mesh.shape["tensor"]
    num_tokens = options.batch_size * options.seq_len / ways
    vocab_size = config.model.vocab_size
    logits_bytes = 4 * vocab_size * min(loss_chunk_tokens(device, vocab_size), num_tokens)
    # The logits are gone when the layers' gradients are there.
    state_bytes = device_bytes(jax.eval_shape(training.init, jax.random.key(0)))
    state_bytes += max(device_bytes(training.trained), logits_bytes)
    activation_bytes = 2 * num_tokens * config.model.embed_dim * config.model.num_layers
    num_sharing = len(mesh.local_devices) if device.platform == "cpu" else 1
    needed = np.array([state_bytes, activation_bytes]) * num_sharing
    available = available_bytes or device_memory_bytes(device) or np.inf
    if needed.sum() > available:
        state, batch, memory = (f"{size / 2**30:,.1f} GiB" for size in (*needed, available))
        raise UsageError(
            f"the model and its optimizer take {state} and a batch {batch}, over the {memory} of "
            f"{describe_devices(mesh)}: take a smaller model, training.batch_size or "
            "training.seq_len, or more devices"
        )


def load_initial_state(
    config: TrainConfig, training: Training, origin: Checkpoint | None
) -> TrainState:
    """Return the state before the first step, from the weights of ``origin`` if there is one."""
    params = None
    adapter = None
    if origin:
        trainable = training.trainable
        rules = ruleset(config.mesh)
        params = load_params(
            origin, trainable.load_dtype, training.mesh, rules=rules, convert=trainable.convert
        )
        if config.lora.init_from:
            adapter = stacked(origin.adapter)
    return training.init(jax.random.key(config.seed), params, adapter)


def add_reference_log_probs(
    data: ChatDataset,
    folder: Path,
    config: TrainConfig,
    training: Training,
    state: TrainState | None,
) -> ChatDataset:
    """Return pairs with their answers' log-probabilities under the model before training.

    They are computed by ``state`` and stored in the run's folder. A resumed run, without a state,
    reads them there.
    """
    path = folder / REFERENCE
    references: dict[str, Any] = {}
    if state is None:
        with errors_as(f"{path} is part of this run: put it back", OSError, ValueError, KeyError):
            stored = np.load(path)
            references = {split: stored[split] for split in SPLITS}
    else:
        sizes: Any = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len}
        total = sum(data.counts[split]["conversations"] for split in SPLITS)
        with progress("reading the answers before training", total) as move:
            for split in SPLITS:
                pairs = getattr(data, split)
                parts = []
                for batch in chat_validation_batches(pairs, **sizes):
                    on_devices = put_on_devices(batch, training.batch_sharding)
                    sums = training.log_probs(state.params, on_devices, state.base)
                    parts.append(np.asarray(process_allgather(sums, tiled=True)))
                    move(len(sums))
                references[split] = np.concatenate(parts)[: len(pairs.sizes)]
        if distributed.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial, partial.open("wb") as file:
                np.savez(file, **references)
    train, validation = (
        dataclasses.replace(getattr(data, split), reference=references[split]) for split in SPLITS
    )
    return dataclasses.replace(data, train=train, validation=validation)


def warn_of_idle_accelerator(console: Console) -> None:
    """Print a warning if the machine has a device that JAX does not use."""
    warning = idle_accelerator()
    if warning:
        console.print(f"warning: {warning}", style="yellow")


def log_facts(run: Run) -> None:
    """Log the facts that a run's page shows, if they have changed, and print a summary."""
    config = run.config
    tracker = run.tracker
    mesh = run.training.mesh
    devices = describe_devices(mesh)
    num_params = count_parameters(config.model)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(run.training.trained))
    num_frozen = num_params if config.trains_adapters else num_params - num_trained
    driver = describe_driver(mesh.devices.flat[0])
    facts = run_facts(run.data.facts(), devices, driver, num_trained, num_frozen)
    logged = [line["facts"] for line in read_lines(tracker.folder / METRICS, "facts")]
    if logged[-1:] != [facts]:
        tracker.write(run.step, facts=facts)

    # Bits depend on these two.
    before = {**facts, **logged[-1]} if logged else facts
    changes = [
        f"{before[name]} (now {facts[name]})"
        for name in ("devices", "versions")
        if before[name] != facts[name]
    ]
    if run.step and changes:
        tracker.say(
            f"note: this run had {' and '.join(changes)}, so its bits will differ from those of "
            "a run that had not changed",
            "yellow",
        )

    attention = run.training.decisions.attention
    of_them = ""
    if num_trained != num_params:
        kind = "adapters" if config.trains_adapters else "them"
        of_them = f", {num_trained:,} of {kind} trained"
    tracker.say(
        f"{tracker.folder}: {num_params:,} parameters{of_them} on {devices}, "
        f"{attention} attention, {run.data.size()}, step {run.step:,} of {config.training.steps:,}",
        "bold",
    )
    notes = list(run.data.notes)
    if attention == "triton":
        notes.insert(
            0,
            "with Python 3.12 or later pip install 'jllama[cuda]' brings tokamax, "
            "whose attention is faster",
        )
    for note in notes:
        tracker.say(f"note: {note}", "yellow")
