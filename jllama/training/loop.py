"""The training loop: read a batch, take a step; now and then look, save and sample."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.run import CHECKPOINTS, CONFIG, RunCheckpoints
from jllama.checkpoints.tensors import Checkpoint, load_params
from jllama.config import LlamaConfig
from jllama.data.batches import training_batches
from jllama.data.config import DataConfig
from jllama.data.tokens import Dataset, prepare_data
from jllama.errors import JllamaError, UsageError
from jllama.generation.text import generate, prompt_ids
from jllama.language_model import LanguageModel
from jllama.parameters import count_parameters
from jllama.sharding import describe_devices, idle_accelerator, make_mesh
from jllama.tokenizers import has_tokenizer, load_tokenizer
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, check_memory, make_evaluator, summarize
from jllama.training.optimizer import learning_rate_at
from jllama.training.report import write_report
from jllama.training.run_folder import (
    METRICS,
    REPORT,
    SAMPLES,
    append_line,
    changes_on_resume,
    command,
    locked,
    read_lines,
    write_config,
)
from jllama.training.step import StepMetrics, Training, TrainState, compile_training
from jllama.training.stop import Stopped, stop_signals

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Run:
    """What stays the same from the first step to the last."""

    console: Console
    folder: Path
    config: TrainConfig
    data: Dataset
    mesh: Mesh
    batches: grain.DatasetIterator
    checkpoints: RunCheckpoints


def train(config: TrainConfig) -> Evaluation:
    """Train as configured; everything is left in ``config.run_dir``. Returns the best checkpoint's final evaluation.

    Nothing is left there before the corpus, the configuration and an earlier checkpoint have been found in order. A run
    that is finished is left as it is.

    Raises:
        Stopped: by Ctrl-C or SIGTERM, after saving a checkpoint; a ``JllamaError``, too.
        JllamaError: the corpus, the folder or the disk is not in order, another process trains there, the loss is no
            longer a number, or the run cannot go on with this configuration.
        UsageError: the configuration does not fit the corpus, the devices or itself.
    """
    console = Console(stderr=True, highlight=False)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole
    folder = Path(config.run_dir)
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto")
    with locked(folder):
        return _train(config, folder, console)


def _train(config: TrainConfig, folder: Path, console: Console) -> Evaluation:
    began = (folder / CHECKPOINTS).exists() and RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    if began and config.resume == "never":
        raise UsageError(
            f"{folder} already holds a run: continue it with {command('train', '--resume', folder)}, "
            f"or choose another --run_dir"
        )
    origin = _origin(config, folder if began else None) if config.init_from else None
    if origin:
        tokenizer = origin.tokenizer
    else:  # a vocabulary is trained once: a later version may train another on the same text
        tokenizer = load_tokenizer(folder) if began and config.data.tokenizer == "bpe" else None
    data = prepare_data(config.data, tokenizer)
    config = _resolved(config, data, origin)
    total_steps, saved_step = config.training.steps, began[-1] if began else 0
    if saved_step:
        for change in changes_on_resume(folder, config, saved_step):
            console.print(change, style="yellow", markup=False)
        ends = [line["final"] for line in read_lines(folder / METRICS) if "final" in line]
        if saved_step >= total_steps and ends:
            more = ("--training.steps", 2 * saved_step, "--resume_with_changes", "true")
            go_on = f"To go on: {command('train', '--resume', folder, *more)}"
            console.print(f"{folder} is finished (step {saved_step:,} of {total_steps:,}). {go_on}", markup=False)
            return Evaluation(**ends[-1])

    mesh = make_mesh(config.mesh)
    if warning := idle_accelerator():
        console.print(f"warning: {warning}", style="yellow", markup=False)
    check_memory(config, mesh)
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    size = {"batch_size": config.training.batch_size, "seq_len": config.training.seq_len}
    batches = training_batches(data.train, **size, seed=config.seed, **process)
    training = compile_training(config, mesh, bos_id=data.tokenizer.bos_id)
    abstract = jax.eval_shape(training.init, jax.random.key(config.seed))
    checkpoints = RunCheckpoints(folder / CHECKPOINTS, config.training.keep_last)
    run = _Run(console, folder, config, data, mesh, batches, checkpoints)
    if began:
        state, seconds_before = _restore(run, saved_step, abstract, training.shardings)
    else:
        params = load_params(origin, jnp.float32, mesh) if origin else None
        state, seconds_before = training.init(jax.random.key(config.seed), params), 0.0
    write_config(folder, config, saved_step)
    if not (began and has_tokenizer(folder)):
        data.tokenizer.save(folder)

    console.print(
        f"[bold]{escape(str(folder))}[/bold]: {count_parameters(config.model):,} parameters on "
        f"{describe_devices(mesh)}, {data.train_counts.tokens:,} training tokens, "
        f"step {saved_step:,} of {total_steps:,}"
    )
    return _loop(run, state, training, seconds_before)


def _loop(run: _Run, state: TrainState, training: Training, seconds_before: float) -> Evaluation:
    """From the first step of this process to the last, with all that is done now and then; see ``train``."""
    began_s, looking_s = time.perf_counter(), 0.0
    recent: list[StepMetrics] = []
    config, checkpoints, step, total_steps = run.config, run.checkpoints, int(state.step), run.config.training.steps
    eval_every = config.training.eval_every
    save_every = config.training.save_every or eval_every

    def seconds() -> float:
        return seconds_before + time.perf_counter() - began_s

    def due(step: int, every: int) -> bool:
        return step % every == 0 or step == total_steps

    with stop_signals(lambda: f"finishing step {step + 1:,} and saving") as stop, _progress(run.console) as progress:
        task = progress.add_task("", total=total_steps, completed=step, note="compiling")
        show = functools.partial(progress.update, task)
        evaluate = make_evaluator(config, run.data, training, stop)
        evaluated = {line["step"] for line in read_lines(run.folder / METRICS) if "validation_loss" in line}
        if step and due(step, eval_every) and step not in evaluated:  # a stop came first
            show(note="evaluating")
            _sample_and_report(run, state, _evaluate(run, evaluate, state), seconds())
        shape = (config.training.batch_size, config.training.seq_len + 1)
        rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=training.batch_sharding)
        take_step = training.step.lower(state, rows).compile()  # here, so that no step's time has it in it
        recent_began_s, note, stopping = time.perf_counter(), "", False
        while step < total_steps and not stopping:
            state, metrics = take_step(state, jax.make_array_from_process_local_data(rows.sharding, next(run.batches)))
            step += 1
            recent.append(metrics)
            stopping = bool(stop)  # asked once a step: what stops the loop is always saved below
            evaluating = due(step, eval_every) and not stopping
            saving = due(step, save_every) or stopping
            if evaluating or saving or step % config.training.log_every == 0:
                _check_finite(recent, step, checkpoints)
                note = _log(run, recent, step, time.perf_counter() - recent_began_s)
                show(completed=step, note=note)
                recent = []
            if evaluating or saving:
                look_began_s, evaluation = time.perf_counter(), None
                if evaluating:
                    show(note="evaluating")
                    evaluation = _evaluate(run, evaluate, state)
                if saving:
                    show(note="saving")
                    _save(run, state, evaluation, seconds())
                if evaluating and not stop:
                    show(note="sampling")
                    _sample_and_report(run, state, evaluation, seconds())
                show(note=note)
                looking_s += time.perf_counter() - look_began_s
            if not recent:
                recent_began_s = time.perf_counter()
        show(note="saving")
        checkpoints.wait()
        show(note="evaluating")
        best, params = checkpoints.best_step(), state.params
        if not (stop or best is None or best == step):
            saved = Checkpoint(config.model, checkpoints.tensors(best, config.model))
            params = load_params(saved, mesh=run.mesh)
        final = evaluate(params, 0)
        if final is None:
            go_on = command("train", "--resume", run.folder)
            raise Stopped(f"stopped at step {step:,} of {total_steps:,}; saved. Go on: {go_on}", stop[0])

    append_line(run.folder / METRICS, {"step": step, "best_step": best, "final": dataclasses.asdict(final)})
    _report(run, final, seconds())
    run.console.print(
        f"Best checkpoint (step {best}) on the whole validation text: loss [bold]{final.validation_loss:.4f}[/bold], "
        f"[bold]{final.bits_per_byte:.3f}[/bold] bits per byte; gzip -9 needs {_gzip_bits_per_byte(run.data):.3f} "
        f"(a model that beats gzip has learned something)."
    )
    run.console.print(
        f"{seconds():.0f} s in all, {looking_s:.0f} s of it evaluating, sampling and saving. "
        f"Read {run.folder / REPORT}, or sample: {_sample_command(run)}",
        markup=False,
    )
    return final


def _origin(config: TrainConfig, begun: Path | None) -> Checkpoint:
    """The checkpoint to begin from, opened; once a run has begun, its own folder stands in for ``init_from``."""
    path = begun or config.init_from
    origin = open_checkpoint(path, None if begun else config.rope_factor)
    for name, value in vars(origin.config).items():
        if (given := getattr(config.model, name)) not in (value, getattr(LlamaConfig(), name)):
            raise UsageError(
                f"model.{name} is {given} but it is {value} in {path}: "
                f"leave model out, since init_from brings the architecture"
            )
    if config.data.tokenizer != DataConfig.tokenizer:
        raise UsageError("data.tokenizer cannot be given with init_from, which brings its own tokenizer: leave it out")
    if origin.tokenizer is None:
        raise JllamaError(f"{path} has no tokenizer: put the one it was trained with beside its weights")
    return origin


def _resolved(config: TrainConfig, data: Dataset, origin: Checkpoint | None) -> TrainConfig:
    """The configuration with the architecture, the vocabulary, the window and the number of steps filled in."""
    vocab_size = data.tokenizer.vocab_size
    model = origin.config if origin else config.model
    if model.vocab_size and model.vocab_size < vocab_size:
        raise UsageError(
            f"model.vocab_size is {model.vocab_size} but the tokenizer has {vocab_size} tokens: "
            f"leave it at 0 to take the tokenizer's"
        )
    seq_len = config.training.seq_len or min(model.max_seq_len, 1024 if origin else model.max_seq_len)
    if seq_len > model.max_seq_len:
        raise UsageError(
            f"training.seq_len is {seq_len} but model.max_seq_len is {model.max_seq_len}: lower one or raise the other"
        )
    steps, epochs = config.training.steps, config.training.epochs
    if epochs:
        steps = math.ceil(epochs * data.train_counts.tokens / (config.training.batch_size * seq_len))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model, vocab_size=model.vocab_size or vocab_size),
        training=dataclasses.replace(config.training, steps=steps, epochs=0.0, seq_len=seq_len),
    )
    prompt_tokens = len(prompt_ids(data.tokenizer, config.training.sample_prompt))
    if prompt_tokens + config.training.sample_tokens > config.model.max_seq_len:
        raise UsageError(
            f"training.sample_prompt has {prompt_tokens} tokens and training.sample_tokens is "
            f"{config.training.sample_tokens}: together they exceed model.max_seq_len {config.model.max_seq_len}"
        )
    return config


def _rest(state: TrainState, key: Any) -> dict[str, Any]:
    """A state without its parameters, as checkpoints hold it: ``key`` is the data of its key."""
    return {"opt_state": state.opt_state, "step": state.step, "key": key}


def _save(run: _Run, state: TrainState, evaluation: Evaluation | None, seconds: float) -> None:
    rest = _rest(state, jax.random.key_data(state.key))
    meta = {"batches": run.batches.get_state(), "corpus": run.data.fingerprint, "seconds": seconds}
    run.checkpoints.save(int(state.step), state.params, rest, meta, evaluation.validation_loss if evaluation else None)


def _restore(run: _Run, step: int, abstract: TrainState, shardings: TrainState) -> tuple[TrainState, float]:
    """The state saved at a step, with the batches set to follow it, and the seconds spent until then."""
    shapes = (abstract.params, _rest(abstract, jax.eval_shape(jax.random.key_data, abstract.key)))
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        (shardings.params, _rest(shardings, shardings.key)),
    )
    params, rest, meta = run.checkpoints.restore(step, *placed)
    if run.data.fingerprint not in (meta.get("corpus"), *meta.get("identity", {}).values()):  # 0.1.0 had an identity
        raise JllamaError(
            f"changed since {run.checkpoints.folder / str(step)} was saved: the corpus or its tokenizer; "
            f"restore what it was, or start a new run with another --run_dir"
        )
    run.batches.set_state(meta["batches"])
    state = TrainState(rest["step"], params, rest["opt_state"], jax.random.wrap_key_data(rest["key"]))
    return state, meta["seconds"]


def _log(run: _Run, recent: list[StepMetrics], step: int, elapsed_s: float) -> str:
    """Write the means of the recent steps to the metrics; returns them in a few words for the bar."""
    record = summarize(recent, elapsed_s, run.config, run.mesh.size)
    rate = float(learning_rate_at(step - 1, run.config.optimizer, run.config.training.steps))
    append_line(run.folder / METRICS, {"step": step, **record, "learning_rate": rate})
    note = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
    if not run.console.is_terminal or run.console.width >= 110:
        note += f"  learning rate {rate:.1e}" + (f"  MFU {record['mfu']:.1%}" if record["mfu"] else "")
    if not run.console.is_terminal:
        run.console.print(f"step {step}: {note}")
    return note


def _evaluate(run: _Run, evaluate: Callable[..., Evaluation | None], state: TrainState) -> Evaluation | None:
    """Evaluate, show and log it; None if that failed or a stop came in between."""
    evaluation = _or_warn(run.console, lambda: evaluate(state.params, run.config.training.eval_tokens))
    if evaluation is not None:
        step = int(state.step)
        if not math.isfinite(evaluation.validation_loss):
            raise _not_finite("validation loss", step, run.checkpoints)
        append_line(run.folder / METRICS, {"step": step, **dataclasses.asdict(evaluation)})
        run.console.print(
            f"step {step}: validation loss [bold]{evaluation.validation_loss:.4f}[/bold], perplexity "
            f"{evaluation.perplexity:.2f}, {evaluation.bits_per_byte:.3f} bits per byte"
        )
    return evaluation


def _sample_and_report(run: _Run, state: TrainState, evaluation: Evaluation | None, seconds: float) -> None:
    _or_warn(run.console, lambda: _sample(run, state))
    _or_warn(run.console, lambda: _report(run, evaluation, seconds))


def _check_finite(recent: list[StepMetrics], step: int, checkpoints: RunCheckpoints) -> None:
    """Wait for the recent steps. Raises ``JllamaError`` if one has gone wrong, so that nothing of it is ever saved."""
    for number, metrics in enumerate(recent, step - len(recent) + 1):
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            raise _not_finite("loss or its gradient", number, checkpoints)


def _not_finite(what: str, step: int, checkpoints: RunCheckpoints) -> JllamaError:
    checkpoints.wait()
    kept = checkpoints.steps()
    last = f"the last good checkpoint is of step {kept[-1]}" if kept else "no checkpoint had been saved yet"
    return JllamaError(
        f"the {what} is not a finite number at step {step}; {last}: "
        f"try a lower optimizer.learning_rate or optimizer.clip_norm"
    )


def _sample(run: _Run, state: TrainState) -> None:
    """Let the model write, show it and log it."""
    prompt, count = run.config.training.sample_prompt, run.config.training.sample_tokens
    if not count:
        return
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), run.config.sampling.seed)
    sampling = dataclasses.replace(run.config.sampling, seed=int(jax.random.bits(key)))
    model = LanguageModel(run.config.model, state.params, run.data.tokenizer)
    written = generate(model, [prompt], sampling, max_new_tokens=count)[0]
    append_line(run.folder / SAMPLES, {"step": int(state.step), "prompt": prompt, "text": written.text})
    run.console.print(f"[dim]{escape(prompt + written.text)}[/dim]\n")


def _sample_command(run: _Run) -> str:
    return command("sample", "--checkpoint", run.folder, "--prompt", run.config.training.sample_prompt)


def _report(run: _Run, evaluation: Evaluation | None, seconds: float) -> None:
    """Write the run's report so far, with its receipt."""
    data, config = run.data, run.config
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jllama", "jax", "flax", "optax")]
    results = dataclasses.asdict(evaluation) if evaluation else {}
    deeper = dataclasses.replace(config.model, num_layers=config.model.num_layers + 1)
    a_layer = count_parameters(deeper) - count_parameters(config.model)
    receipt = {
        "parameters": f"{count_parameters(config.model):,}, {a_layer:,} of them in each layer",
        "text": config.data.path,
        "training text": f"{data.train_counts.bytes:,} bytes, {data.train_counts.tokens:,} tokens",
        "validation text": f"{data.validation_counts.bytes:,} bytes, {data.validation_counts.tokens:,} tokens",
        "devices": describe_devices(run.mesh),
        "time": f"{seconds:.0f} s",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in results.items()},
        "bits per byte of gzip -9": f"{_gzip_bits_per_byte(data):.4f} (a model that beats gzip has learned something)",
        "loss of a blind guess": f"{math.log(config.model.vocab_size):.4f} (ln {config.model.vocab_size:,})",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    commands = {"sample": _sample_command(run), "go on": command("train", "--resume", run.folder)}
    write_report(run.folder, receipt, commands)


def _gzip_bits_per_byte(data: Dataset) -> float:
    return 8 * data.gzip_bytes / data.gzip_of_bytes


def _or_warn(console: Console, action: Callable[[], T]) -> T | None:
    """Do something that training can go on without: say so if it fails."""
    try:
        return action()
    except Exception as error:
        console.print(f"[yellow]warning:[/yellow] {escape(f'{type(error).__name__}: {error}')}; training goes on")
        return None


def _progress(console: Console) -> Progress:
    done = (MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[note]}"))
    times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
    return Progress(*done, *times, console=console, expand=True, disable=not console.is_terminal)
