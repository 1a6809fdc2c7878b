"""Begin a run or resume one: everything is checked before anything is written."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console

from jllama import distributed
from jllama.checkpoints.adapters import stacked
from jllama.checkpoints.chat_files import write_chat_files
from jllama.checkpoints.receipt import describe_weights
from jllama.checkpoints.run import CHECKPOINTS, CONFIG, METRICS, SAMPLES
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.checkpoints.tensors import Checkpoint, base_fingerprint, load_params
from jllama.data.batches import Batch, chat_validation_batches
from jllama.data.datasets import BatchSource, ChatDataset, TrainingData
from jllama.data.prompts import PromptDataset
from jllama.data.tokens import SPLITS, sha256
from jllama.devices import (
    describe_devices,
    describe_driver,
    device_bytes,
    device_memory_bytes,
    idle_accelerator,
    loss_chunk_tokens,
)
from jllama.errors import UsageError, shell_command
from jllama.files import Json, atomic_write, errors_as, read_lines
from jllama.language_model import LanguageModel
from jllama.loggers import check_logger
from jllama.model import check_attention
from jllama.parameters import count_parameters
from jllama.progress import progress
from jllama.report import run_facts
from jllama.rewards import RewardError, Scorer
from jllama.sharding import ruleset
from jllama.templates.messages import chat_format
from jllama.tokenizers import has_tokenizer
from jllama.training import run_folder
from jllama.training.checkpointing import check_origin, restore_state
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation
from jllama.training.optimizer import make_optimizer
from jllama.training.receipt import begin_receipt
from jllama.training.resolve import resolve
from jllama.training.rollouts import Rollouts, Sampler, drawn_settings
from jllama.training.step import (
    StepMetrics,
    Training,
    TrainState,
    attention_of,
    check_batch_divides,
    compile_training,
    put_on_devices,
)
from jllama.training.tracker import Callback, Tracker

REFERENCE = "reference.npz"


@dataclasses.dataclass
class Run:
    """A training run: its parts, and where it stands."""

    config: TrainConfig
    data: TrainingData | PromptDataset
    origin: Checkpoint | None  # the checkpoint of ``init_from``
    training: Training
    origin_meta: Json  # fingerprints of the model that adapters or rewards need again
    checkpoints: RunCheckpoints
    tracker: Tracker
    batches: Any  # an endless iterator with a state
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
    signals: Sequence[int] = ()  # received by this process
    stop_signal: int = 0  # known to all processes
    receipt: Json = dataclasses.field(default_factory=dict)  # see ``jllama.training.receipt``


def open_run(
    config: TrainConfig, source: BatchSource | None, callbacks: Sequence[Callback]
) -> Run | Evaluation:
    """Check and prepare everything that a run needs, and write its folder.

    Returns the final evaluation instead if the run is finished. ``source`` replaces
    ``config.data``.
    """
    folder = Path(config.run_dir)
    is_first_process = distributed.process_index() == 0
    console = Console(stderr=True, highlight=False, markup=False, quiet=not is_first_process)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole

    # The configuration, the data, and the step to resume from.
    check_options(config, folder)
    steps = []
    if (folder / CHECKPOINTS).exists():
        steps = RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    replaces = bool(steps) and config.resume == "never"
    if replaces:
        run_folder.confirm_overwrite(config)
    resumes = bool(steps) and not replaces
    config, data, origin = resolve(config, folder if resumes else None, source)
    step = steps[-1] if resumes else 0
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow")
        final = final_evaluation(folder, config, step, console)
        if final is not None:
            return final

    # The programs, and the state before the first step.
    scorer = open_scorer(config, data)
    warn_of_idle_accelerator(console)
    distributed.check_same({"the corpus": data.fingerprint, "the last checkpoint": step})
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

    origin_meta = describe_origin(config, origin, state)

    # The checkpoint to resume from.
    if isinstance(data, PromptDataset):
        batches = open_rollouts(data, scorer, config, training, origin, state)
    else:
        batches = open_batches(data, config, training)
    tracker = Tracker(config, folder, console, callbacks)
    checkpoints = RunCheckpoints(folder / CHECKPOINTS, config.training.keep_last)
    done = {}
    if resumes:
        state, meta = restore_state(checkpoints, training, step, state and state.base)
        # The answers of pairs were read by the model before training.
        may_change = config.resume_with_changes and getattr(data, "rows_per_example", 1) == 1
        is_same = check_origin(
            meta, data.fingerprint, origin_meta, checkpoints, step, may_change=may_change
        )
        origin_meta["data_since"] = set_position(batches, meta, step, console, is_same=is_same)
        tracker.start_s -= meta["seconds"]
        done = last_records(folder, step)
    assert state is not None

    # The folder.
    if is_first_process:
        run_folder.write_config(folder, config, step)
        if not (resumes and has_tokenizer(folder)):
            data.tokenizer.save(folder)
            template = origin.chat_template if origin else None
            stop_ids = origin.stop_ids if origin else ()
            write_chat_files(folder, template, stop_ids)
    run = Run(
        config,
        data,
        origin,
        training,
        origin_meta,
        checkpoints,
        tracker,
        batches,
        state,
        step,
        done,
        receipt=begin_receipt(folder, config, data.fingerprint, training.mesh, step),
    )
    log_facts(run)
    return run


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


def set_position(batches: Any, meta: Json, step: int, console: Console, *, is_same: bool) -> int:
    """Go on in a checkpoint's data, or begin others; return the step after which they began."""
    if is_same:
        batches.set_state(meta["batches"])
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
    if not lines or not (has_all_steps or run_folder.is_out_of_patience(folder, patience)):
        return None
    options = ["--training.patience", 0]
    if has_all_steps:
        options = ["--training.steps", 2 * step, "--resume_with_changes", "true"]
    go_on = shell_command("train", "--resume", folder, *options)
    console.print(f"{folder} is finished (step {step:,} of {num_steps:,}). To go on: {go_on}")
    # Runs of 0.1 name the figures after the preference objective.
    figures = lines[-1]["final"].items()
    return Evaluation(**{name.replace("preference", "figures"): value for name, value in figures})


def autotuning_options(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Return XLA's options that keep a GPU's choices of kernels in the run's folder.

    XLA chooses by timing, so a resumed run would otherwise choose others. JAX's cache of compiled
    programs keeps the choices by the same options.
    """
    if jax.default_backend() != "gpu" or config.training.deterministic is False:
        return {}
    mode = "UPDATE" if distributed.process_index() == 0 else "READ"
    return {
        "xla_gpu_per_fusion_autotune_cache_dir": str((folder / run_folder.AUTOTUNING).absolute()),
        "xla_gpu_experimental_autotune_cache_mode": f"AUTOTUNE_CACHE_MODE_{mode}",
    }


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


def open_scorer(config: TrainConfig, data: TrainingData | PromptDataset) -> Scorer | None:
    """Start the rewards, and try them once, so that a mistake in them costs no weights to load.

    Raises:
        JllamaError: a reward fails for an answer to the first prompt.
    """
    if not isinstance(data, PromptDataset):
        return None
    grpo = config.training.grpo
    limits: Any = {"limit_s": grpo.reward_limit_s, "num_processes": grpo.reward_processes}
    scorer = Scorer(config.rewards, **limits)
    row = data.train[0]
    answers = ["An answer to try the reward."] * grpo.group_size
    try:
        scorer.score([row.prompt], [answers], [row.fields], [row.place])
    except RewardError:
        scorer.close()
        raise
    return scorer


def warn_of_idle_accelerator(console: Console) -> None:
    """Print a warning if the machine has a device that JAX does not use."""
    warning = idle_accelerator()
    if warning:
        console.print(f"warning: {warning}", style="yellow")


def open_rollouts(
    data: PromptDataset,
    scorer: Scorer | None,
    config: TrainConfig,
    training: Training,
    origin: Checkpoint | None,
    initial: TrainState | None,
) -> Rollouts:
    """Return batches of the model's own answers; ``initial`` is the state before training."""
    assert origin is not None
    assert scorer is not None
    if jax.process_count() > 1:
        raise UsageError(f"reward is {config.reward}; it must be left out with several processes")
    drawn_settings(config.sampling, 1, data.tokenizer.vocab_size)  # raises if one does not fit
    template, stop_ids = chat_format(data.tokenizer, origin.chat_template, origin.stop_ids)
    model = LanguageModel(config.model, {}, data.tokenizer, template, stop_ids)
    reference = None
    if config.has_reference and initial:
        # The step donates its state, so that the reference needs parameters of its own.
        reference = jax.tree.map(jnp.copy, initial.params)
    sampler = Sampler(model, config, training)
    return Rollouts(data, config, sampler, scorer, reference)


def open_batches(data: TrainingData, config: TrainConfig, training: Training) -> Any:
    """Return the batches as NumPy arrays; this process reads the rows of its own devices."""
    options = config.training
    num_rows = options.batch_size * data.rows_per_example
    parts = training.batch_sharding.addressable_devices_indices_map((num_rows,)).values()
    rows = np.unique([np.arange(num_rows)[part] for part in parts]).tolist()
    sizes: Any = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    return data.training_batches(**sizes, seed=config.seed, rows=rows, packing=config.data.packing)


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

    attention = attention_of(config, mesh)
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
