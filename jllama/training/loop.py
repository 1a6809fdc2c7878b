"""The training loop: read a batch, take a step; now and then evaluate, save and sample."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jllama import files
from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.run import CHECKPOINTS, CONFIG
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.checkpoints.tensors import Checkpoint, load_params
from jllama.config import LlamaConfig
from jllama.data.batches import training_batches
from jllama.data.config import DataConfig
from jllama.data.tokens import Dataset, prepare_data
from jllama.devices import describe_devices, idle_accelerator
from jllama.errors import JllamaError, UsageError
from jllama.generation.text import generate, prompt_ids
from jllama.language_model import LanguageModel
from jllama.parameters import count_parameters
from jllama.sharding import make_mesh
from jllama.stop import Stopped, stop_signals
from jllama.tokenizers import has_tokenizer, load_tokenizer
from jllama.training import run_folder
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, check_memory, evaluate, summarize
from jllama.training.optimizer import learning_rate_at, make_optimizer
from jllama.training.report import sample_command, write_report
from jllama.training.step import StepMetrics, Training, TrainState, attention_of, compile_training


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
    with files.locked(Path(config.run_dir)):
        opened = _open(config)
        if isinstance(opened, Evaluation):  # there is nothing left to do
            return opened
        run, state = opened
        options, total_steps, step = run.config.training, run.config.training.steps, int(state.step)

        def due(every: int) -> bool:
            return step % every == 0 or step == total_steps

        with stop_signals(lambda: f"finishing step {step + 1:,} and saving") as stop, run.progress:
            evaluated = files.read_lines(run.folder / run_folder.METRICS, "validation_loss")
            if step and due(options.eval_every) and step not in [line["step"] for line in evaluated]:
                # a stop came first
                run.sample_and_report(state, run.evaluate(state, stop))
            run.show("compiling")
            windows = jax.ShapeDtypeStruct((options.batch_size, options.seq_len + 1), jnp.int32)
            take_step = run.training.step.lower(state, windows).compile()  # here, so that no step's time has it in it
            recent, recent_start_s, at_eval_s, stopping = [], time.perf_counter(), 0.0, False
            while step < total_steps and not stopping:
                batch = jax.make_array_from_process_local_data(run.training.batch_sharding, next(run.batches))
                state, metrics = take_step(state, batch)
                step += 1
                recent.append(metrics)
                stopping = bool(stop)  # asked once a step: what stops the loop is always saved below
                evaluating = due(options.eval_every) and not stopping
                saving = due(options.save_every or options.eval_every) or stopping
                if evaluating or saving or step % options.log_every == 0:
                    run.log(recent, step, recent_start_s)
                    recent, recent_start_s = [], time.perf_counter()
                if evaluating or saving:
                    evaluation = run.evaluate(state, stop) if evaluating else None
                    if saving:
                        run.save(state, evaluation)
                    if evaluating and not stop:
                        run.sample_and_report(state, evaluation)
                    run.show()
                    at_eval_s += time.perf_counter() - recent_start_s
                    recent_start_s = time.perf_counter()
            final = run.evaluate_best(state, stop)
            if final is None:
                go_on = run_folder.command("train", "--resume", run.folder)
                raise Stopped(f"stopped at step {step:,} of {total_steps:,}; saved. Go on: {go_on}", stop[0])
        run.print(
            f"{run.seconds():.0f} s in all, {at_eval_s:.0f} s of it evaluating, sampling and saving. "
            f"Read {run.folder / run_folder.REPORT}, or sample: {sample_command(run.config)}"
        )
        return final


@dataclasses.dataclass
class _Run:
    """An opened run, and what is done in it now and then."""

    config: TrainConfig
    console: Console
    data: Dataset
    checkpoints: RunCheckpoints
    batches: grain.DatasetIterator
    training: Training
    seconds_before: float = 0.0

    def __post_init__(self) -> None:
        self.folder, self.start_s, self.note = Path(self.config.run_dir), time.perf_counter(), ""
        done = (MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[note]}"))
        times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
        quiet = not self.console.is_terminal
        self.progress = Progress(*done, *times, console=self.console, expand=True, disable=quiet)
        self.task = self.progress.add_task("", total=self.config.training.steps, note="")

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.start_s

    def show(self, doing: str = "", **fields: Any) -> None:
        """What is being done, or else how the last steps went, in the progress bar."""
        self.progress.update(self.task, note=doing or self.note, **fields)

    def print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False)

    def log(self, recent: list[StepMetrics], step: int, start_s: float) -> None:
        """Wait for the recent steps, log and show their means; what is no number ends the run before it is saved."""
        for number, metrics in enumerate(recent, step - len(recent) + 1):
            if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
                raise self.not_finite("loss or its gradient", number)
        record = summarize(recent, time.perf_counter() - start_s, self.config)
        rate = float(learning_rate_at(step - 1, self.config.optimizer, self.config.training.steps))
        self.write({"step": step, **record, "learning_rate": rate})
        self.note = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        if not self.console.is_terminal or self.console.width >= 110:
            self.note += f"  learning rate {rate:.1e}" + (f"  MFU {record['mfu']:.1%}" if record["mfu"] else "")
        if not self.console.is_terminal:
            self.print(f"step {step}: {self.note}")
        self.show(completed=step)

    def evaluate(self, state: TrainState, stop: Sequence[int]) -> Evaluation | None:
        """Evaluate on a part of the validation text, show and log it; None if that failed or a stop came in between."""
        self.show("evaluating")
        step, options, result = int(state.step), self.config.training, None
        with self.warn_instead():
            result = evaluate(self.training, self.data, state.params, options, options.eval_tokens, stop)
        if result is not None:
            if not math.isfinite(result.validation_loss):
                raise self.not_finite("validation loss", step)
            self.write({"step": step, **dataclasses.asdict(result)})
            self.console.print(
                f"step {step}: validation loss [bold]{result.validation_loss:.4f}[/bold], perplexity "
                f"{result.perplexity:.2f}, {result.bits_per_byte:.3f} bits per byte"
            )
        return result

    def evaluate_best(self, state: TrainState, stop: Sequence[int]) -> Evaluation | None:
        """Evaluate the best checkpoint on all of the validation text, show and log it; None if a stop came first."""
        self.show("saving")
        self.checkpoints.wait()
        self.show("evaluating")
        step, best, params = int(state.step), self.checkpoints.best_step(), state.params
        if not (stop or best is None or best == step):
            saved = Checkpoint(self.config.model, self.checkpoints.tensors(best, self.config.model))
            params = load_params(saved, mesh=self.training.mesh)
        final = evaluate(self.training, self.data, params, self.config.training, stop=stop)
        if final is not None:
            self.write({"step": step, "best_step": best, "final": dataclasses.asdict(final)})
            self.report(final)
            self.console.print(
                f"Best checkpoint (step {best}) on the whole validation text: loss [bold]{final.validation_loss:.4f}"
                f"[/bold], [bold]{final.bits_per_byte:.3f}[/bold] bits per byte; gzip -9 needs "
                f"{self.data.gzip_bits_per_byte:.3f} (a model that beats gzip has learned something)."
            )
        return final

    def save(self, state: TrainState, evaluation: Evaluation | None) -> None:
        self.show("saving")
        meta = {"batches": self.batches.get_state(), "corpus": self.data.fingerprint, "seconds": self.seconds()}
        loss = evaluation.validation_loss if evaluation else None
        without_params = _without_params(state, jax.random.key_data(state.key))
        self.checkpoints.save(int(state.step), state.params, without_params, meta, loss)

    def restore(self, step: int) -> TrainState:
        """The state saved at a step, on its devices; the batches and the clock go on from there."""
        abstract = jax.eval_shape(self.training.init, jax.random.key(0))
        key = jax.eval_shape(jax.jit(jax.random.key_data, out_shardings=abstract.key.sharding), abstract.key)
        params, saved, meta = self.checkpoints.restore(step, abstract.params, _without_params(abstract, key))
        if self.data.fingerprint not in (meta.get("corpus"), *meta.get("identity", {}).values()):  # 0.1.0: an identity
            raise JllamaError(
                f"changed since {self.checkpoints.folder / str(step)} was saved: the corpus or its tokenizer; "
                f"restore what it was, or start a new run with another run_dir"
            )
        self.batches.set_state(meta["batches"])
        self.seconds_before = meta["seconds"]
        return TrainState(saved["step"], params, saved["opt_state"], jax.random.wrap_key_data(saved["key"]))

    def sample_and_report(self, state: TrainState, evaluation: Evaluation | None) -> None:
        """Let the model write, show and log it, and write the report so far: training can go on without either."""
        self.show("sampling")
        prompt, count = self.config.training.sample_prompt, self.config.training.sample_tokens
        with self.warn_instead():
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), self.config.sampling.seed)
            sampling = dataclasses.replace(self.config.sampling, seed=int(jax.random.bits(key)))
            model = LanguageModel(self.config.model, state.params, self.data.tokenizer)
            for completion in generate(model, [prompt][:count], sampling, max_new_tokens=count):
                record = {"step": int(state.step), "prompt": prompt, "text": completion.text}
                files.append_line(self.folder / run_folder.SAMPLES, record)
                self.console.print(f"[dim]{escape(prompt + completion.text)}[/dim]\n")
        with self.warn_instead():
            self.report(evaluation)

    def report(self, evaluation: Evaluation | None) -> None:
        write_report(self.config, self.data, describe_devices(self.training.mesh), evaluation, self.seconds())

    def write(self, record: dict[str, Any]) -> None:
        files.append_line(self.folder / run_folder.METRICS, record)

    @contextlib.contextmanager
    def warn_instead(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.print(f"warning: {type(error).__name__}: {error}; training goes on", style="yellow")

    def not_finite(self, what: str, step: int) -> JllamaError:
        self.checkpoints.wait()
        kept = self.checkpoints.steps()
        last = f"the last good checkpoint is of step {kept[-1]}" if kept else "no checkpoint had been saved yet"
        return JllamaError(
            f"the {what} is not a finite number at step {step}; {last}: "
            f"try a lower optimizer.learning_rate or optimizer.clip_norm"
        )


def _without_params(state: TrainState, key: Any) -> dict[str, Any]:
    """What a checkpoint holds of a state besides its parameters; ``key`` is the data of its key."""
    return {"opt_state": state.opt_state, "step": state.step, "key": key}


def _open(config: TrainConfig) -> tuple[_Run, TrainState] | Evaluation:
    """Check and prepare all that a run needs, and begin its folder; the final evaluation of one that is finished."""
    console, folder = Console(stderr=True, highlight=False), Path(config.run_dir)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto")
    make_optimizer(config.optimizer, config.model, config.training.steps)
    attention_of(config)  # unknown ones are said before the text is read
    existing = (folder / CHECKPOINTS).exists() and RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    if existing and config.resume == "never":
        go_on = run_folder.command("train", "--resume", folder)
        raise UsageError(f"{folder} already holds a run: continue it with {go_on}, or choose another run_dir")

    # The text. A vocabulary is trained once: a later version may train another on the same text.
    origin = _origin(config, folder if existing else None) if config.init_from else None
    own_tokenizer = existing and not origin and config.data.tokenizer == "bpe"
    data = prepare_data(config.data, origin.tokenizer if origin else load_tokenizer(folder) if own_tokenizer else None)
    config = _resolved(config, data, origin)
    options, step = config.training, existing[-1] if existing else 0
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow", markup=False)
        final = files.read_lines(folder / run_folder.METRICS, "final")
        if step >= options.steps and final:
            more = ("--training.steps", 2 * step, "--resume_with_changes", "true")
            go_on = f"To go on: {run_folder.command('train', '--resume', folder, *more)}"
            console.print(f"{folder} is finished (step {step:,} of {options.steps:,}). {go_on}", markup=False)
            return Evaluation(**final[-1]["final"])

    # The devices, the programs, the state
    mesh = make_mesh(config.mesh)
    if warning := idle_accelerator():
        console.print(f"warning: {warning}", style="yellow", markup=False)
    training = compile_training(config, mesh, bos_id=data.tokenizer.bos_id)
    check_memory(config, training)
    size = {"batch_size": options.batch_size, "seq_len": options.seq_len, "seed": config.seed}
    process = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    batches = training_batches(data.train, **size, **process)
    run = _Run(config, console, data, RunCheckpoints(folder / CHECKPOINTS, options.keep_last), batches, training)
    if existing:
        state = run.restore(step)
    else:
        params = load_params(origin, jnp.float32, mesh) if origin else None
        state = training.init(jax.random.key(config.seed), params)
    run_folder.write_config(folder, config, step)
    if not (existing and has_tokenizer(folder)):
        data.tokenizer.save(folder)
    console.print(
        f"[bold]{escape(str(folder))}[/bold]: {count_parameters(config.model):,} parameters on "
        f"{describe_devices(mesh)}, {attention_of(config)} attention, {data.train_counts.tokens:,} training tokens, "
        f"step {step:,} of {options.steps:,}"
    )
    return run, state


def _origin(config: TrainConfig, existing: Path | None) -> Checkpoint:
    """The checkpoint to begin from, opened; an existing run's folder stands in for ``init_from``."""
    path = existing or config.init_from
    origin = open_checkpoint(path, None if existing else config.rope_factor)
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
    model, options = origin.config if origin else config.model, config.training
    num_tokens, context = data.tokenizer.vocab_size, model.max_seq_len
    if model.vocab_size and model.vocab_size < num_tokens:
        raise UsageError(
            f"model.vocab_size is {model.vocab_size} but the tokenizer has {num_tokens} tokens: "
            f"leave it at 0 to take the tokenizer's"
        )
    seq_len = options.seq_len or min(context, 1024 if origin else context)
    if seq_len > context:
        raise UsageError(
            f"training.seq_len is {seq_len} but model.max_seq_len is {context}: lower one or raise the other"
        )
    prompt_tokens = len(prompt_ids(data.tokenizer, options.sample_prompt))
    if prompt_tokens + options.sample_tokens > context:
        raise UsageError(
            f"training.sample_prompt has {prompt_tokens} tokens and training.sample_tokens is "
            f"{options.sample_tokens}: together they exceed model.max_seq_len {context}"
        )
    in_epochs = math.ceil(options.epochs * data.train_counts.tokens / (options.batch_size * seq_len))
    options = dataclasses.replace(options, steps=in_epochs or options.steps, epochs=0.0, seq_len=seq_len)
    model = dataclasses.replace(model, vocab_size=model.vocab_size or num_tokens)
    return dataclasses.replace(config, model=model, training=options)
