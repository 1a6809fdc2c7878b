"""The training loop: read a batch, take a step; now and then evaluate, save and sample."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from rich.console import Console

from jllama import distributed, files
from jllama.checkpoints.huggingface import write_chat_files
from jllama.checkpoints.run import CHECKPOINTS, CONFIG, METRICS, SAMPLES
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.checkpoints.tensors import Checkpoint, base_fingerprint, load_params
from jllama.data.tokens import Dataset
from jllama.devices import describe_devices, idle_accelerator, peak_bytes, program_bytes
from jllama.errors import JllamaError, UsageError
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.language_model import LanguageModel
from jllama.loggers import LOGGERS, check_logger, numbers, persistent
from jllama.lora import merged
from jllama.model import check_attention
from jllama.parameters import count_parameters
from jllama.progress import progress
from jllama.report import REPORT, command, run_facts, write_report
from jllama.sharding import ruleset
from jllama.stop import Stopped, stop_signals
from jllama.templates.messages import conversing, message_ids
from jllama.tokenizers import has_tokenizer
from jllama.training import run_folder
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, check_memory, evaluate, figures_text, summarize
from jllama.training.opening import batches_of, first_question, resolved, with_references
from jllama.training.optimizer import learning_rate_at, make_optimizer
from jllama.training.step import StepMetrics, Training, TrainState, attention_of, compile_training, on_devices


def train(config: TrainConfig) -> Evaluation:
    """Train as configured; everything is left in ``config.run_dir``. Returns the best checkpoint's final evaluation.

    Nothing is left there before the corpus, the configuration and an earlier checkpoint have been found in order, and a
    finished run is left as it is. ``Stopped`` (by Ctrl-C or SIGTERM) is raised after saving a checkpoint; JllamaError
    for a corpus, folder, disk or loss that is not in order; UsageError for a configuration that does not fit them.
    """
    with distributed.joined(config.distributed, Path(config.run_dir)):
        run = _open(config)
        if isinstance(run, Evaluation):  # there is nothing left to do
            return run
        options, bar = run.config.training, progress("", run.config.training.steps, console=run.console)
        with stop_signals(lambda: f"finishing step {run.step + 1:,} and saving") as run.signals, bar as run.move:
            ended = run.pause()  # what a stop came before is done first
            recent, start_s = [], time.perf_counter()
            while run.step < options.steps and not (run.stop or ended):
                rows = next(run.batches)
                run.training.step.check(rows)
                batch = on_devices(rows, run.training.batch_sharding)
                if (shape := jax.tree.leaves(batch)[0].shape) not in run.programs:  # chats have rows of two lengths
                    run.show("compiling")
                    compile_s = time.perf_counter()
                    run.programs[shape] = program = run.training.step.lower(run.state, batch).compile()
                    run.planned_bytes = max(run.planned_bytes, sum(program_bytes(program)))
                    start_s += time.perf_counter() - compile_s  # so that no step's time has it in it
                run.state, metrics = run.programs[shape](run.state, batch)
                run.step += 1
                recent.append((metrics, rows))
                logging = run.due(options.log_every, options.eval_every, options.save_every or options.eval_every)
                if jax.process_count() == 1 or run.step % options.log_every == 0:  # several wait for each other there
                    logging = run.stopping() or logging
                if logging:
                    run.log(recent, start_s)
                    ended = run.pause()
                    recent, start_s = [], time.perf_counter()
            final = run.evaluate_best()
            if final is None:
                go_on = command("train", "--resume", run.folder)
                raise Stopped(f"stopped at step {run.step:,} of {options.steps:,}; saved. Go on: {go_on}", run.stop)
        sample = "sample", "--checkpoint", run.folder, "--prompt", options.sample_prompt
        words = sample if run.data.is_text else ("chat", run.folder)
        run.console.print(f"{run.seconds():.0f} s in all. Read {run.folder / REPORT}, or {words[0]}: {command(*words)}")
        return final


@dataclasses.dataclass
class _Run:
    config: TrainConfig
    folder: Path
    console: Console
    data: Dataset
    origin: Checkpoint | None
    training: Training
    checkpoints: RunCheckpoints
    batches: Any
    state: Any  # TrainState; of a run that goes on, what ``restore`` needs of it
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)  # of a step, by the shape of its rows
    planned_bytes: int = 0  # of the largest
    base_fingerprint: str | None = None
    step: int = 0
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    signals: Sequence[int] = ()
    stop: int = 0  # the signal that all processes know of
    skipped: int = 0  # how many of the last steps were left out, one after the other
    done: dict[str, int] = dataclasses.field(default_factory=dict)  # the step of the last of what ``owes`` names
    move: Callable[..., None] = lambda **_: None
    note: str = ""

    def __post_init__(self) -> None:
        logger = LOGGERS.get(self.config.logger, lambda *_: lambda *_: None)
        open_logger = functools.partial(logger, self.folder, run_folder.as_written(self.config))
        self.give, self.draw = (persistent(each, self.warn) for each in (lambda _: files.append_line, open_logger))

    def seconds(self) -> float:
        return time.perf_counter() - self.start_s

    def show(self, doing: str = "") -> None:
        """What is being done, or else how the last steps went, in the progress bar."""
        self.move(description=doing or self.note, completed=self.step)

    def due(self, *every: int) -> bool:
        return any(self.step % each == 0 for each in every) or self.step == self.config.training.steps

    def owes(self, name: str) -> bool:
        """Whether the last evaluation (``METRICS``), sample or checkpoint that was due has not come about."""
        options = self.config.training
        every = (name == CHECKPOINTS and options.save_every) or options.eval_every
        return self.done.get(name, 0) < (self.step if self.due(every) else self.step - self.step % every)

    def stopping(self) -> bool:
        """Whether any process has got a signal to stop; all ask at the same places."""
        self.stop = self.stop or distributed.largest(self.signals[0] if self.signals else 0)
        return self.stop > 0

    def write(self, name: str = METRICS, **record: object) -> None:
        """Add a line to a file of the run, and metrics to its logger; process 0 alone does."""
        if distributed.process_index() == 0:
            line: dict[str, Any] = {"step": self.step, **record}
            self.give(self.folder / name, line)
            if name == METRICS:
                self.draw(line["step"], numbers(line))

    def log(self, recent: list[tuple[StepMetrics, Any]], start_s: float) -> None:
        """Wait for the recent steps, log and show their means, and by itself each that was left out, with its batch."""
        for step, (metrics, rows) in enumerate(recent, self.step - len(recent) + 1):
            self.skipped = self.skipped + 1 if bool(metrics.skipped) else 0  # the wait is here
            if self.skipped:
                self.log_skipped(step, metrics, rows)
        elapsed_s, taken = time.perf_counter() - start_s, [metrics for metrics, _ in recent if not metrics.skipped]
        if not taken:
            return
        record = summarize(taken, elapsed_s * len(taken) / len(recent), self.config)
        if not self.data.is_text:
            segments = [each.segments[each.segments.any(axis=1)].ravel() for _, each in recent]  # rows of this process
            record["padding"] = float(np.mean(np.concatenate(segments) == 0))
        rate = float(learning_rate_at(self.step - 1, self.config.optimizer, self.config.training.steps))
        peak, planned = peak_bytes(self.training.mesh.local_devices), self.planned_bytes
        self.write(**record, learning_rate=rate, planned_bytes=planned, peak_bytes=peak, elapsed_s=self.seconds())
        self.note = f"loss {record['loss']:.3f}{figures_text(record.get('figures'))}"
        self.note += f"  {record['tokens_per_s']:,.0f} tokens/s"
        if not self.console.is_terminal:
            mfu = f"  MFU {record['mfu']:.1%}" if record["mfu"] else ""
            memory = f"  {peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f}" if peak else ""
            self.console.print(f"step {self.step}: {self.note}  learning rate {rate:.1e}{mfu}{memory}")
        self.show()

    def log_skipped(self, step: int, metrics: StepMetrics, rows: Any) -> None:
        """Log a step that left the parameters as they were, and its batch; one too many in a row ends the run."""
        loss, norm = (value if math.isfinite(value) else None for value in map(float, metrics[:2]))
        self.write(step=step, skipped=True, loss=loss, grad_norm=norm)
        self.write(run_folder.SKIPPED, step=step, tokens=np.asarray(rows.tokens).tolist())
        wrong = "the loss or its gradient is not a finite number"
        wrong = f"the gradient's norm, {norm:.3g}, is a spike" if None not in (loss, norm) else wrong
        self.console.print(f"step {step} is left out, its batch is in {run_folder.SKIPPED}: {wrong}", style="yellow")
        at_the_end = norm is None and step == self.config.training.steps and self.skipped > 1
        if at_the_end or self.skipped >= self.config.training.max_skipped:
            self.give_up(f"{wrong} at step {step}" + f", the {self.skipped}th in a row" * (self.skipped > 1))

    def pause(self) -> bool:
        """Do what is due or owed, unless the last step was left out and others follow; whether patience is over."""
        options = self.config.training
        if self.skipped and not (self.stop or self.step == options.steps):
            return False
        evaluation = self.evaluate() if self.owes(METRICS) and not self.stop else None
        ended = distributed.largest(run_folder.out_of_patience(self.folder, options.patience)) > 0
        saving = self.stop or ended or self.owes(CHECKPOINTS) or (evaluation and not options.save_every)
        if saving and self.done.get(CHECKPOINTS, 0) != self.step:
            self.save(evaluation)
        if self.owes(SAMPLES) and not self.stop:
            with self.attempt("sampling"):
                if options.sample_tokens:
                    self.sample()
                self.done[SAMPLES] = self.step
            with self.attempt("reporting"):
                self.report()
        if evaluation and ended:
            said = f"step {self.step}: the validation loss has not fallen for {options.patience} evaluations"
            self.console.print(f"{said}, so training ends here", style="bold")
        self.show()
        return ended

    def evaluate(self) -> Evaluation | None:
        """Evaluate on a part of the validation text, show and log it; None if that failed or a stop came in between."""
        result, tokens = None, self.config.training.eval_tokens
        with self.attempt("evaluating"):
            result = evaluate(self.training, self.data, self.config, self.state, tokens, self.stopping)
        if result is not None:
            if not math.isfinite(result.validation_loss):
                self.give_up(f"the validation loss is not a finite number at step {self.step}")
            self.write(**dataclasses.asdict(result))
            self.done[METRICS] = self.step
            self.console.print(f"step {self.step}: {result}", style="bold")
        return result

    def evaluate_best(self) -> Evaluation | None:
        """Evaluate the best checkpoint on all of the validation text, show and log it; None if a stop came first."""
        self.show("saving")
        self.checkpoints.wait()
        self.show("evaluating")
        best, state = self.checkpoints.best_step(), self.state
        if not (self.stop or best is None or best == self.step):
            state = state._replace(params=self.restored(best)[0].params)
        final = evaluate(self.training, self.data, self.config, state, 0, self.stopping)
        if final is not None:
            self.write(best_step=best, final=dataclasses.asdict(final))
            self.report()
            text = f"Best checkpoint (step {best}) on the whole validation text: {final}"
            if self.data.is_text:
                bits = f"{self.data.gzip_bits_per_byte:.3f}"
                text += f"; gzip -9 needs {bits} (a model that beats gzip has learned something)"
            self.console.print(f"{text}.", style="bold")
        return final

    def save(self, evaluation: Evaluation | None) -> None:
        self.show("saving")
        self.done[CHECKPOINTS] = self.step
        meta = {"batches": self.batches.get_state(), "corpus": self.data.fingerprint, "seconds": self.seconds()}
        meta |= {"base_fingerprint": self.base_fingerprint} if self.base_fingerprint else {}
        loss, key = evaluation.validation_loss if evaluation else None, jax.random.key_data(self.state.key)
        self.checkpoints.save(self.step, self.state.params, _others(self.state, key), meta, loss)

    def restored(self, step: int) -> tuple[TrainState, dict[str, Any]]:
        """The state saved at a step, on its devices, and the notes."""
        abstract = jax.eval_shape(self.training.init, jax.random.key(0))
        key = jax.eval_shape(jax.jit(jax.random.key_data, out_shardings=abstract.key.sharding), abstract.key)
        params, others, meta = self.checkpoints.restore(step, abstract.params, _others(abstract, key))
        others["key"] = jax.random.wrap_key_data(others["key"])
        return TrainState(params=params, base=self.state and self.state.base, **others), meta

    def restore(self, step: int) -> None:
        """Take up the state saved at a step; the batches and the clock go on from there."""
        state, meta = self.restored(step)
        corpora = (meta.get("corpus"), *meta.get("identity", {}).values())  # 0.1.0 wrote an identity
        if self.data.fingerprint not in corpora:
            said = f"changed since {self.checkpoints.folder / str(step)} was saved: the corpus or its tokenizer"
            raise JllamaError(f"{said}; restore what it was, or start a new run with another run_dir")
        if meta.get("base_fingerprint") != self.base_fingerprint:
            said = f"{self.config.init_from} is not the model that {self.folder} began from"
            raise JllamaError(f"{said}: put that there again, or start a new run with another run_dir")
        self.batches.set_state(meta["batches"])
        self.state, self.step, self.start_s = state, step, self.start_s - meta["seconds"]
        self.done[CHECKPOINTS] = step
        for name, key in ((METRICS, "validation_loss"), (SAMPLES, "text")):
            lines = files.read_lines(self.folder / name, key)
            self.done[name] = max((line["step"] for line in lines if line["step"] <= step), default=0)

    def model(self) -> LanguageModel:
        """The model as it is now, to talk with."""
        config, state, origin, tokenizer = self.config, self.state, self.origin, self.data.tokenizer
        params = state.params if state.base is None else merged(state.base, state.params, config.model, config.lora)
        talk = conversing(tokenizer, origin.chat_template, origin.stop_ids) if origin else (None, ())
        return LanguageModel(config.model, params, tokenizer, *talk)

    def sample(self) -> None:
        """Let the model go on from the prompt, or answer the questions; show and log what it writes.

        In a run on chats all of them go through the template, and without any it is asked what the first held-out
        conversation begins with.
        """
        options: Any = self.config.training
        model, sampling = self.model(), SamplingParams(temperature=0.0)
        prompts = options.questions or [options.sample_prompt]
        asked: list[Any] = prompts
        if not options.questions:
            key = jax.random.fold_in(jax.random.fold_in(self.state.key, self.state.step), self.config.sampling.seed)
            sampling = dataclasses.replace(self.config.sampling, seed=int(jax.random.bits(key)))
        if not (self.data.is_text or any(prompts)):
            asked = [first_question(self.data)]
            prompts = [model.text_tokenizer.decode(asked[0])]
        elif model.chat_template and not self.data.is_text:
            asked = [
                message_ids(model.text_tokenizer, model.chat_template, [{"role": "user", "content": each}], True)
                for each in prompts
            ]
        count = options.sample_tokens
        if asked is not prompts:  # but ids
            count = min(count, model.config.max_seq_len - max(map(len, asked)))
        completions = generate(model, asked, sampling, max_new_tokens=count)
        for prompt, completion in zip(prompts, completions, strict=True):
            self.write(SAMPLES, prompt=prompt, text=completion.text)
            self.console.print(f"{prompt}{' ' * bool(options.questions)}{completion.text}\n", style="dim")

    def report(self) -> None:
        if distributed.process_index() == 0:
            write_report([self.folder], self.folder / REPORT)

    @contextlib.contextmanager
    def attempt(self, doing: str) -> Iterator[None]:
        self.show(doing)
        try:
            yield
        except Exception as error:
            if jax.process_count() > 1 and doing != "reporting":  # the others would wait for this one
                raise
            self.warn(error)

    def warn(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.console.print(f"warning: {said}; training goes on", style="yellow")

    def give_up(self, wrong: str) -> NoReturn:
        """End the run, and say what of it is good."""
        self.checkpoints.wait()
        kept = self.checkpoints.steps()
        last = f"the last good checkpoint is of step {kept[-1]}" if kept else "no checkpoint had been saved yet"
        raise JllamaError(f"{wrong}; {last}: try a lower optimizer.learning_rate or optimizer.clip_norm")


def _open(config: TrainConfig) -> _Run | Evaluation:
    """Check and prepare all that a run needs, and begin its folder; the final evaluation of one that is finished."""
    folder, index = Path(config.run_dir), distributed.process_index()
    console = Console(stderr=True, highlight=False, markup=False, quiet=index > 0)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole
    distributed.check_same(flatten_dict(run_folder.as_written(config), sep="."))
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto")
    make_optimizer(config.optimizer, config.training.steps)
    check_attention(config.training.attention, backward=True)  # also before the text is read
    check_logger(config.logger)
    existing = (folder / CHECKPOINTS).exists() and RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    replaces = existing and config.resume == "never"
    if replaces:
        if not config.overwrite:
            go_on = command("train", "--resume", folder)
            advice = f"continue it with {go_on}, or choose another run_dir, or replace it with --overwrite"
            raise UsageError(f"{folder} already holds a run: {advice}")
        run_folder.ask_to_overwrite(config)
        existing = []
    config, data, origin = resolved(config, folder if existing else None)
    step, steps = existing[-1] if existing else 0, config.training.steps
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow")
        final = files.read_lines(folder / METRICS, "final")
        if final and (step >= steps or run_folder.out_of_patience(folder, config.training.patience)):
            longer = ("--training.steps", 2 * step, "--resume_with_changes", "true")
            go_on = command("train", "--resume", folder, *(longer if step >= steps else ("--training.patience", 0)))
            console.print(f"{folder} is finished (step {step:,} of {steps:,}). To go on: {go_on}")
            figures = final[-1]["final"].items()  # which runs of 0.1 call those of preferences
            return Evaluation(**{name.replace("preference", "figures"): value for name, value in figures})

    if warning := idle_accelerator():
        console.print(f"warning: {warning}", style="yellow")
    distributed.check_same({"the corpus": data.fingerprint, "the last checkpoint": step})
    training = compile_training(config)
    check_memory(config, training)
    state = None
    if config.lora.rank or not existing:
        dtype = None if config.lora.rank and config.lora.base != "auto" else jnp.float32
        params = load_params(origin, dtype, training.mesh, rules=ruleset(config.mesh)) if origin else None
        state = training.init(jax.random.key(config.seed), params)
    if replaces:
        run_folder.clear(folder)
    if data.preference:
        data = with_references(data, folder, config, training, None if existing else state)
    batches = batches_of(data, config, training)
    checkpoints = RunCheckpoints(folder / CHECKPOINTS, config.training.keep_last)
    run = _Run(config, folder, console, data, origin, training, checkpoints, batches, state)
    if config.lora.rank and origin:
        run.base_fingerprint = base_fingerprint(origin)
    if existing:
        run.restore(step)
    if index == 0:
        run_folder.write_config(folder, config, step)
        if not (existing and has_tokenizer(folder)):
            data.tokenizer.save(folder)
            write_chat_files(folder, origin.chat_template if origin else None, origin.stop_ids if origin else ())
    _announce(run)
    return run


def _announce(run: _Run) -> None:
    """Log what a run's page says of it, unless that has been done, and say it in a few words."""
    config, data, devices = run.config, run.data, describe_devices(run.training.mesh)
    total, trained = count_parameters(config.model), sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    facts = run_facts(data, devices, trained, total if config.lora.rank else 0)
    if [line["facts"] for line in files.read_lines(run.folder / METRICS, "facts")][-1:] != [facts]:
        run.write(facts=facts)
    parameters = f"{total:,} parameters{f', {trained:,} of adapters trained' if config.lora.rank else ''} on {devices}"
    tokens = facts.get("training chats", f"{data.counts['train']['tokens']:,} training tokens")
    said = f"{run.folder}: {parameters}, {attention_of(config, run.training.mesh)} attention, {tokens}"
    run.console.print(f"{said}, step {run.step:,} of {config.training.steps:,}", style="bold")
    for note in data.notes:
        run.console.print(f"note: {note}", style="yellow")


def _others(state: Any, key: Any) -> dict[str, Any]:
    """What is saved of a state besides its parameters, with the key as plain numbers."""
    spikes = {} if state.usual_norm is None else {"usual_norm": state.usual_norm}
    return {"opt_state": state.opt_state, "step": state.step, "key": key, **spikes}
