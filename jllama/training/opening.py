"""Begin a run or resume one: everything is checked before anything is written."""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jllama.core import JllamaError, UsageError
from jllama.core.parameters import count_parameters
from jllama.core.step import TrainState
from jllama.data.datasets import BatchSource
from jllama.data.prompts import PromptDataset
from jllama.data.tokens import sha256
from jllama.formats.adapters import stacked
from jllama.formats.chat_files import write_chat_files
from jllama.formats.receipt import describe_weights
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.formats.tensors import base_fingerprint, load_params
from jllama.parallel import distributed
from jllama.system.devices import device_memory_bytes, loss_chunk_tokens
from jllama.system.files import (
    CHECKPOINTS,
    METRICS,
    SAMPLES,
    Json,
    read_lines,
)
from jllama.system.machine import describe_devices, describe_driver, idle_accelerator
from jllama.system.memory import device_bytes
from jllama.system.places import name_of
from jllama.tokenizers.loading import has_tokenizer
from jllama.training import run_folder
from jllama.training.checkpointing import Keeper, restore_state
from jllama.training.compiling import Training, compile_plan
from jllama.training.config import TrainConfig
from jllama.training.events import Callback
from jllama.training.loop import Run
from jllama.training.metrics import Evaluation
from jllama.training.plan import Plan, check_batch_divides
from jllama.training.receipt import begin_receipt
from jllama.training.report import run_facts
from jllama.training.resolve import resolve
from jllama.training.samples import sample
from jllama.training.sources import DataSource, Source
from jllama.training.tracker import Tracker

REWARDED_SOURCE = "jllama.rl.rollouts"
"""The module with the source of training from rewards. It imports this room, so that this room
finds it by its name."""


def open_run(
    config: TrainConfig, own_data: BatchSource | None, callbacks: Sequence[Callback]
) -> Run | Evaluation:
    """Check and prepare everything that a run needs, and write its folder.

    Returns the final evaluation instead if the run is finished. ``own_data`` replaces
    ``config.data``.
    """
    is_first_process = distributed.process_index() == 0
    console = Console(stderr=True, highlight=False, markup=False, quiet=not is_first_process)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole

    # 1) Decide: the run is finished, goes on or begins.
    plan = resolve(config, own_data, console)
    if isinstance(plan, Evaluation):
        return plan
    make_source = DataSource
    if isinstance(plan.data, PromptDataset):
        make_source = importlib.import_module(REWARDED_SOURCE).Rollouts
    source = make_source(plan)

    # 2) Build.
    try:
        return build_run(plan, source, console, callbacks)
    except BaseException:
        source.close()
        raise


def build_run(plan: Plan, source: Source, console: Console, callbacks: Sequence[Callback]) -> Run:
    """Load, compile and restore what a run needs, and write its folder."""
    warning = idle_accelerator()
    if warning:
        console.print(f"warning: {warning}", style="yellow")
    distributed.check_same({"the corpus": plan.data.fingerprint, "the last checkpoint": plan.step})

    # The programs, and the state before the first step.
    training = compile_plan(plan)
    check_memory(training)
    state: Any = None
    if plan.config.trains_adapters or plan.config.has_reference or not plan.resumes:
        state = load_initial_state(training)
    if plan.replaces:
        run_folder.clear(plan.folder)
    source.begin(training, state)

    # The run, at its first step or at that of its checkpoint.
    tracker = Tracker(plan, console, callbacks)
    checkpoints = RunCheckpoints(plan.folder / CHECKPOINTS, plan.options.keep_last)
    keeper = Keeper(checkpoints, describe_origin(plan, state))
    meta: Json = {}
    if plan.resumes:
        base = state and state.base
        state, meta = restore_state(checkpoints, training, plan.step, base)
    run = Run(training, source, tracker, keeper, sample, state, plan.step)
    if plan.resumes:
        go_on(run, meta)
    if run_folder.is_written_here(plan.folder):
        write_folder(plan)
    keeper.receipt = begin_receipt(plan)
    log_facts(run)
    return run


def go_on(run: Run, meta: Json) -> None:
    """Bring all but the state of a run to the checkpoint whose metadata are given.

    Raises:
        JllamaError: other data or another model would go on from it.
    """
    plan = run.plan
    keeper = run.keeper

    # Whether it was trained on these data, from this model. The answers of pairs were read by the
    # model before training, so that pairs must not change.
    identity = meta.get("identity", {})  # version 0.1.0 wrote one
    is_same = plan.data.fingerprint in (meta.get("corpus"), *identity.values())
    is_paired = getattr(plan.data, "rows_per_example", 1) > 1
    may_change = plan.config.resume_with_changes and not is_paired
    folder = keeper.checkpoints.folder
    problem = ""
    if not (is_same or may_change):
        problem = (
            f"the corpus or its tokenizer has changed since {folder / str(run.step)} was saved; go "
            "on with other texts, chats or prompts by resume_with_changes"
        )
    elif any(meta.get(name, value) != value for name, value in keeper.meta.items()):
        problem = f"init_from is not the model that the run {folder.parent} began from"
    if problem:
        raise JllamaError(
            f"{problem}; restore what it was, or start a new run with another run_dir"
        )

    # Go on in the same data, or begin others.
    if is_same:
        run.source.stream.set_state(meta["batches"])
        keeper.meta["data_since"] = meta.get("data_since", 0)
    else:
        run.tracker.say(
            "the data have changed: they are read from their beginning, and the best checkpoint is "
            f"the best of those after step {run.step:,}",
            "yellow",
        )
        keeper.meta["data_since"] = run.step

    # What the run has logged, and when it began.
    run.tracker.start_s -= meta["seconds"]
    run.done[CHECKPOINTS] = run.step
    for name, key in ((METRICS, "validation_loss"), (SAMPLES, "text")):
        logged = [line["step"] for line in read_lines(plan.folder / name, key)]
        run.done[name] = max((number for number in logged if number <= run.step), default=0)


def write_folder(plan: Plan) -> None:
    """Write a run's configuration and, if it is new, its tokenizer and chat template."""
    folder = plan.folder
    run_folder.write_config(folder, plan.config, plan.step)
    if plan.resumes and has_tokenizer(folder):
        return
    plan.data.tokenizer.save(folder)
    if plan.origin:
        write_chat_files(folder, plan.origin.chat_template, plan.origin.stop_ids)


def describe_origin(plan: Plan, initial: TrainState | None) -> Json:
    """Return fingerprints of what a resumed run reads again: adapters' base, or the reference."""
    config = plan.config
    meta = {}
    if config.trains_adapters and plan.origin:
        base = dataclasses.replace(plan.origin, adapter=None)
        meta["base_fingerprint"] = base_fingerprint(base)
    # DoRA's first lengths are sums, whose last bits depend on the device.
    if config.has_reference and initial and not config.lora.dora:
        meta["reference_fingerprint"] = sha256(describe_weights(initial.params))
    return meta


def check_memory(training: Training, available_bytes: int | None = None) -> None:
    """Raise ``UsageError`` if a batch does not divide over the devices, or cannot fit on one.

    Counted is what any program needs at least: the device's share of the state and the gradients,
    and each layer's input for one part of a batch. CPU devices share the memory of the machine.
    """
    plan = training.plan
    check_batch_divides(plan)
    options = plan.options
    mesh = plan.mesh
    device = mesh.local_devices[0]
    ways = options.accumulation * mesh.size / mesh.shape["tensor"]
    num_tokens = options.batch_size * options.seq_len / ways
    vocab_size = plan.model.vocab_size
    logits_bytes = 4 * vocab_size * min(loss_chunk_tokens(device, vocab_size), num_tokens)
    # The logits are gone when the layers' gradients are there.
    state_bytes = device_bytes(jax.eval_shape(training.init, jax.random.key(0)))
    state_bytes += max(device_bytes(training.trained), logits_bytes)
    activation_bytes = 2 * num_tokens * plan.model.embed_dim * plan.model.num_layers
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


def load_initial_state(training: Training) -> TrainState:
    """Return the state before the first step, from the weights of ``origin`` if there is one."""
    plan = training.plan
    trainable = plan.trainable
    params = None
    adapter = None
    if plan.origin:
        params = load_params(
            plan.origin,
            trainable.load_dtype,
            plan.mesh,
            rules=plan.rules,
            convert=trainable.convert,
        )
        if plan.config.lora.init_from:
            adapter = stacked(plan.origin.adapter)
    return training.init(jax.random.key(plan.seed), params, adapter)


def log_facts(run: Run) -> None:
    """Log the facts that a run's page shows, if they have changed, and print a summary."""
    plan = run.plan
    tracker = run.tracker
    devices = describe_devices(plan.mesh)
    num_params = count_parameters(plan.model)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(run.training.trained))
    num_frozen = num_params if plan.config.trains_adapters else num_params - num_trained
    driver = describe_driver(plan.mesh.devices.flat[0])
    facts = run_facts(plan.data.facts(), devices, driver, num_trained, num_frozen)
    logged = [line["facts"] for line in read_lines(plan.folder / METRICS, "facts")]
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

    of_them = ""
    if num_trained != num_params:
        kind = "adapters" if plan.config.trains_adapters else "them"
        of_them = f", {num_trained:,} of {kind} trained"
    tracker.say(
        f"{name_of(plan.folder)}: {num_params:,} parameters{of_them} on {devices}, "
        f"{plan.attention} "
        f"attention, {plan.data.size()}, step {run.step:,} of {plan.options.steps:,}",
        "bold",
    )
    notes = list(plan.data.notes)
    if plan.attention == "triton":
        notes.insert(
            0,
            "with Python 3.12 or later pip install 'jllama[cuda]' brings tokamax, "
            "whose attention is faster",
        )
    for note in notes:
        tracker.say(f"note: {note}", "yellow")
