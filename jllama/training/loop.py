"""The training loop: read a batch, take a step; now and then evaluate, save and sample."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from rich.console import Console

from jllama import distributed, files
from jllama.checkpoints.huggingface import write_chat_files
from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.run import CHECKPOINTS, CONFIG, METRICS, SAMPLES
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.checkpoints.tensors import Checkpoint, base_fingerprint, load_params
from jllama.config import LlamaConfig
from jllama.data.batches import rows_an_epoch
from jllama.data.chats import ChatDataset, data_task, prepare_chats
from jllama.data.tokens import Dataset, prepare_data
from jllama.devices import describe_devices, idle_accelerator, peak_bytes, program_bytes
from jllama.errors import JllamaError, UsageError, check_fields, no_tokenizer
from jllama.generation.text import generate, prompt_ids
from jllama.language_model import LanguageModel
from jllama.lora import merged
from jllama.model import check_attention
from jllama.parameters import Params, count_parameters
from jllama.progress import progress
from jllama.report import REPORT, command, write_report
from jllama.sharding import ruleset
from jllama.stop import Stopped, stop_signals
from jllama.templates.messages import end_of_turn_ids, find_template
from jllama.tokenizers import Tokenizer, has_tokenizer, load_tokenizer
from jllama.training import run_folder
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, check_memory, evaluate, summarize
from jllama.training.optimizer import learning_rate_at, make_optimizer
from jllama.training.rows import batches_of, on_devices, reference_log_probs, validation_rows
from jllama.training.step import StepMetrics, Training, TrainState, attention_of, compile_training


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
        options, total_steps, stopping = run.config.training, run.config.training.steps, False

        def due(every: int) -> bool:
            return run.step % every == 0 or run.step == total_steps

        bar = progress("", total_steps, console=run.console)
        with stop_signals(lambda: f"finishing step {run.step + 1:,} and saving") as run.signals, bar as run.move:
            evaluated = [line["step"] for line in files.read_lines(run.folder / METRICS, "validation_loss")]
            if run.step and due(options.eval_every) and run.step not in evaluated:  # a stop came first
                run.sample_and_report(run.evaluate())
            recent, start_s = [], time.perf_counter()
            while run.step < total_steps and not stopping:
                batch = on_devices(next(run.batches), run.training.batch_sharding)
                if (shape := jax.tree.leaves(batch)[0].shape) not in run.programs:  # chats have rows of two lengths
                    run.show("compiling")
                    compile_s = time.perf_counter()
                    run.programs[shape] = run.training.step.lower(run.state, batch).compile()
                    start_s += time.perf_counter() - compile_s  # so that no step's time has it in it
                run.state, metrics = run.programs[shape](run.state, batch)
                run.step += 1
                recent.append(metrics)
                if jax.process_count() == 1 or run.step % options.log_every == 0:  # several wait for each other there
                    stopping = run.stopping()  # what stops the loop is always saved below
                evaluating = due(options.eval_every) and not stopping
                saving = due(options.save_every or options.eval_every) or stopping
                if evaluating or saving or run.step % options.log_every == 0:
                    run.log(recent, start_s)
                    recent, start_s = [], time.perf_counter()
                if evaluating or saving:
                    evaluation = run.evaluate() if evaluating else None
                    if saving:
                        run.save(evaluation)
                    if evaluating and not run.stop:
                        run.sample_and_report(evaluation)
                    run.show()
                    start_s = time.perf_counter()
            final = run.evaluate_best()
            if final is None:
                go_on = command("train", "--resume", run.folder)
                raise Stopped(f"stopped at step {run.step:,} of {total_steps:,}; saved. Go on: {go_on}", run.stop)
        sample = command("sample", "--checkpoint", run.folder, "--prompt", options.sample_prompt)
        run.console.print(f"{run.seconds():.0f} s in all. Read {run.folder / REPORT}, or sample: {sample}")
        return final


@dataclasses.dataclass
class _Run:
    """An opened run, and what is done in it now and then."""

    config: TrainConfig
    folder: Path
    console: Console
    data: Dataset | ChatDataset
    origin: Checkpoint | None
    training: Training
    checkpoints: RunCheckpoints
    batches: Any = None
    state: TrainState = dataclasses.field(init=False)
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)  # of a step, by the shape of its rows
    references: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # of pairs of answers
    base_fingerprint: str | None = None
    step: int = 0
    start_s: float = dataclasses.field(default_factory=time.perf_counter)
    signals: Sequence[int] = ()
    stop: int = 0  # the signal that all processes know of
    move: Callable[..., None] = lambda **_: None
    note: str = ""

    def seconds(self) -> float:
        return time.perf_counter() - self.start_s

    def show(self, doing: str = "") -> None:
        """What is being done, or else how the last steps went, in the progress bar."""
        self.move(description=doing or self.note, completed=self.step)

    def stopping(self) -> bool:
        """Whether any process has got a signal to stop; all ask at the same places."""
        self.stop = self.stop or distributed.largest(self.signals[0] if self.signals else 0)
        return self.stop > 0

    def write(self, name: str = METRICS, **record: object) -> None:
        """Add a line to a file of the run; process 0 alone does."""
        if distributed.process_index() == 0:
            files.append_line(self.folder / name, {"step": self.step, **record})

    def log(self, recent: list[StepMetrics], start_s: float) -> None:
        """Wait for the recent steps, log and show their means; what is no number ends the run before it is saved."""
        for step, metrics in enumerate(recent, self.step - len(recent) + 1):
            self.check_finite("loss or its gradient", step, float(metrics.loss) + float(metrics.grad_norm))
        record = summarize(recent, time.perf_counter() - start_s, self.config)  # timed when they are done
        rate = float(learning_rate_at(self.step - 1, self.config.optimizer, self.config.training.steps))
        peak = peak_bytes(self.training.mesh.local_devices)
        planned = max(map(sum, map(program_bytes, self.programs.values())), default=0)
        self.write(**record, learning_rate=rate, planned_bytes=planned, peak_bytes=peak)
        self.note = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        if not self.console.is_terminal:
            mfu = f"  MFU {record['mfu']:.1%}" if record["mfu"] else ""
            memory = f"  {peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f}" if peak else ""
            self.console.print(f"step {self.step}: {self.note}  learning rate {rate:.1e}{mfu}{memory}")
        self.show()

    def evaluate(self) -> Evaluation | None:
        """Evaluate on a part of the validation text, show and log it; None if that failed or a stop came in between."""
        options, result = self.config.training, None
        with self.attempt("evaluating"):
            result = self.losses(self.state.params, options.eval_tokens)
        if result is not None:
            self.check_finite("validation loss", self.step, result.validation_loss)
            self.write(**dataclasses.asdict(result))
            self.console.print(f"step {self.step}: {result}", style="bold")
        return result

    def losses(self, params: Params, tokens: int = 0) -> Evaluation | None:
        batches = validation_rows(self.data, self.config, self.references, tokens)
        return evaluate(self.training, self.data.tokenizer, batches, params, self.state.base, self.stopping)

    def evaluate_best(self) -> Evaluation | None:
        """Evaluate the best checkpoint on all of the validation text, show and log it; None if a stop came first."""
        self.show("saving")
        self.checkpoints.wait()
        self.show("evaluating")
        best, params = self.checkpoints.best_step(), self.state.params
        if not (self.stop or best is None or best == self.step):
            params = self.restored(best)[0]
        final = self.losses(params)
        if final is not None:
            self.write(best_step=best, final=dataclasses.asdict(final))
            self.report(final)
            text = f"Best checkpoint (step {best}) on the whole validation text: {final}"
            if isinstance(self.data, Dataset):
                bits = f"{self.data.gzip_bits_per_byte:.3f}"
                text += f"; gzip -9 needs {bits} (a model that beats gzip has learned something)"
            self.console.print(f"{text}.", style="bold")
        return final

    def save(self, evaluation: Evaluation | None) -> None:
        self.show("saving")
        meta = {"batches": self.batches.get_state(), "corpus": self.data.fingerprint, "seconds": self.seconds()}
        meta |= {"base_fingerprint": self.base_fingerprint} if self.base_fingerprint else {}
        loss, key = evaluation.validation_loss if evaluation else None, jax.random.key_data(self.state.key)
        self.checkpoints.save(self.step, self.state.params, _others(self.state, key), meta, loss)

    def restored(self, step: int) -> tuple[Params, dict[str, Any], dict[str, Any]]:
        """What was saved at a step: the parameters, the rest of the state, on their devices, and the notes."""
        abstract = jax.eval_shape(self.training.init, jax.random.key(0))
        key = jax.eval_shape(jax.jit(jax.random.key_data, out_shardings=abstract.key.sharding), abstract.key)
        return self.checkpoints.restore(step, abstract.params, _others(abstract, key))

    def restore(self, step: int) -> None:
        """Take up the state saved at a step; the batches and the clock go on from there."""
        params, saved, meta = self.restored(step)
        corpora = (meta.get("corpus"), *meta.get("identity", {}).values())  # 0.1.0 wrote an identity
        if self.data.fingerprint not in corpora:
            said = f"changed since {self.checkpoints.folder / str(step)} was saved: the corpus or its tokenizer"
            raise JllamaError(f"{said}; restore what it was, or start a new run with another run_dir")
        if meta.get("base_fingerprint") != self.base_fingerprint:
            said = f"{self.config.init_from} is not the model that {self.folder} began from"
            raise JllamaError(f"{said}: put that there again, or start a new run with another run_dir")
        self.batches.set_state(meta["batches"])
        self.step, self.start_s = step, self.start_s - meta["seconds"]
        base = self.state.base if self.config.lora.rank else None
        key, usual = jax.random.wrap_key_data(saved["key"]), saved.get("usual_norm")
        self.state = TrainState(saved["step"], params, saved["opt_state"], key, base, usual)

    def sample_and_report(self, evaluation: Evaluation | None) -> None:
        """Let the model write, show and log it, and write the report so far: training can go on without either."""
        with self.attempt("sampling"):
            if self.config.training.sample_tokens:
                self.sample(self.config.training.sample_prompt)
        with self.attempt("reporting"):
            self.report(evaluation)

    def model(self) -> LanguageModel:
        """The model as it is now, to talk with."""
        config, state, lora = self.config.model, self.state, self.config.lora
        params = state.params if state.base is None else _merged(state.base, state.params, config, lora)
        template, stop_ids = _conversing(self.origin) if self.origin else (None, ())
        return LanguageModel(config, params, self.data.tokenizer, template, stop_ids)

    def sample(self, prompt: str) -> None:
        key = jax.random.fold_in(jax.random.fold_in(self.state.key, self.state.step), self.config.sampling.seed)
        model = self.model()
        count, seed = self.config.training.sample_tokens, int(jax.random.bits(key))
        text = generate(model, prompt, self.config.sampling, max_new_tokens=count, seed=seed)[0].text
        self.write(SAMPLES, prompt=prompt, text=text)
        self.console.print(f"{prompt}{text}\n", style="dim")

    def report(self, evaluation: Evaluation | None) -> None:
        if distributed.process_index() == 0:
            devices = describe_devices(self.training.mesh)
            write_report(self.folder, self.data, devices, vars(evaluation) if evaluation else {}, self.seconds())

    @contextlib.contextmanager
    def attempt(self, doing: str) -> Iterator[None]:
        self.show(doing)
        try:
            yield
        except Exception as error:
            if jax.process_count() > 1 and doing != "reporting":  # the others would wait for this one
                raise
            self.console.print(f"warning: {type(error).__name__}: {error}; training goes on", style="yellow")

    def check_finite(self, what: str, step: int, value: float) -> None:
        if not math.isfinite(value):
            self.checkpoints.wait()
            kept = self.checkpoints.steps()
            last = f"the last good checkpoint is of step {kept[-1]}" if kept else "no checkpoint had been saved yet"
            said = f"the {what} is not a finite number at step {step}; {last}"
            raise JllamaError(f"{said}: try a lower optimizer.learning_rate or optimizer.clip_norm")


def _open(config: TrainConfig) -> _Run | Evaluation:
    """Check and prepare all that a run needs, and begin its folder; the final evaluation of one that is finished."""
    folder, index = Path(config.run_dir), distributed.process_index()
    console = Console(stderr=True, highlight=False, markup=False, quiet=index > 0)
    console.soft_wrap = not console.is_terminal  # a log keeps its lines whole
    distributed.check_same(flatten_dict(run_folder.as_written(config), sep="."))
    if config.resume not in ("never", "auto") and not (folder / CONFIG).is_file():
        raise UsageError(f"resume is {config.resume}, which is not a run's folder: give one, or never, or auto")
    task = data_task(config.data)
    if task != "text":
        check_fields(config, "", "init_from", bool, f"a model to begin from, since data.task is {task}")
    make_optimizer(config.optimizer, config.model, config.training.steps)
    check_attention(config.training.attention)  # also before the text is read
    existing = (folder / CHECKPOINTS).exists() and RunCheckpoints(folder / CHECKPOINTS, read_only=True).steps()
    if existing and config.resume == "never":
        go_on = command("train", "--resume", folder)
        raise UsageError(f"{folder} already holds a run: continue it with {go_on}, or choose another run_dir")

    # The data. A vocabulary is trained once: a later version may train another on the same text.
    origin = _origin(config, folder if existing and not config.lora.rank else None) if config.init_from else None
    own_tokenizer = existing and not origin and config.data.tokenizer == "bpe"
    if task == "text":
        own = load_tokenizer(folder) if own_tokenizer else None
        data = prepare_data(config.data, origin.tokenizer if origin else own)
        config = _resolved(config, data.tokenizer, origin)
        rows = len(data.train) / config.training.seq_len
    else:
        assert origin is not None and origin.tokenizer is not None  # noqa: PT018
        config = _resolved(config, origin.tokenizer, origin)
        data = prepare_chats(config.data, origin.tokenizer, *_conversing(origin), config.training.seq_len)
        size: Any = {"seq_len": config.training.seq_len, "packing": config.data.packing}
        rows = rows_an_epoch(data.train, seed=config.seed, **size)
    options, step = config.training, existing[-1] if existing else 0
    steps = math.ceil(options.epochs * rows / options.batch_size) or options.steps
    config = dataclasses.replace(config, training=dataclasses.replace(options, steps=steps, epochs=0.0))
    if step:
        for change in run_folder.changes_on_resume(folder, config, step):
            console.print(change, style="yellow")
        final = files.read_lines(folder / METRICS, "final")
        if step >= config.training.steps and final:
            more = ("--training.steps", 2 * step, "--resume_with_changes", "true")
            go_on = command("train", "--resume", folder, *more)
            console.print(f"{folder} is finished (step {step:,} of {config.training.steps:,}). To go on: {go_on}")
            return Evaluation(**final[-1]["final"])

    # The devices, the programs, the state
    if warning := idle_accelerator():
        console.print(f"warning: {warning}", style="yellow")
    distributed.check_same({"the corpus": data.fingerprint, "the last checkpoint": step})
    training = compile_training(config, bos_id=data.tokenizer.bos_id)
    check_memory(config, training)
    checkpoints = RunCheckpoints(folder / CHECKPOINTS, config.training.keep_last)
    run = _Run(config, folder, console, data, origin, training, checkpoints)
    if config.lora.rank and origin:
        run.base_fingerprint = base_fingerprint(origin)
    if config.lora.rank or not existing:
        dtype = None if config.lora.rank and config.lora.base != "auto" else jnp.float32
        params = load_params(origin, dtype, training.mesh, rules=ruleset(config.mesh)) if origin else None
        run.state = training.init(jax.random.key(config.seed), params)
    if isinstance(data, ChatDataset) and data.preference:
        run.references = reference_log_probs(folder, data, config, training, None if existing else run.state)
    run.batches = batches_of(data, config, training, run.references)
    if existing:
        run.restore(step)
    if index == 0:
        run_folder.write_config(folder, config, step)
        if not (existing and has_tokenizer(folder)):
            data.tokenizer.save(folder)
            write_chat_files(folder, origin.chat_template if origin else None, origin.stop_ids if origin else ())
    console.print(_summary(run), style="bold")
    return run


def _summary(run: _Run) -> str:
    """A run in a few words, as it begins."""
    config, data, mesh = run.config, run.data, run.training.mesh
    trained = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
    others = f", {trained:,} of adapters trained" if config.lora.rank else ""
    parameters = f"{count_parameters(config.model):,} parameters{others} on {describe_devices(mesh)}"
    if isinstance(data, Dataset):
        tokens = f"{len(data.train):,} training tokens"
    else:
        counts = data.counts["train"]
        tokens = f"{counts['conversations']:,} conversations to learn from: {counts['counted_tokens']:,} tokens of "
        tokens += f"{counts['tokens']:,} count ({counts['cut']:,} cut, {counts['dropped']:,} left out, being too long)"
    attention = f"{attention_of(config, mesh)} attention"
    return f"{run.folder}: {parameters}, {attention}, {tokens}, step {run.step:,} of {config.training.steps:,}"


def _origin(config: TrainConfig, existing: Path | None) -> Checkpoint:
    """The checkpoint to begin from, opened; an existing run's folder stands in for ``init_from``."""
    path = existing or config.init_from
    origin = open_checkpoint(path, None if existing else config.rope_factor)
    for name, value in vars(origin.config).items():
        allowed, said = (value, getattr(LlamaConfig(), name)), f"{value}, as in {path}, or left out with init_from"
        check_fields(config.model, "model.", name, allowed.__contains__, said)
    check_fields(config.data, "data.", "tokenizer", lambda name: name == "bpe", "left out: init_from brings its own")
    if origin.tokenizer is None:
        raise no_tokenizer(path)
    return origin


def _conversing(origin: Checkpoint) -> tuple[str | None, tuple[int, ...]]:
    """The chat template of a checkpoint, or the one that its tokenizer asks for, if any, and what ends an answer."""
    assert origin.tokenizer is not None
    template = origin.chat_template
    with contextlib.suppress(JllamaError):
        template = find_template(origin.tokenizer, template)
    return template, end_of_turn_ids(origin.tokenizer, origin.stop_ids or (origin.tokenizer.eos_id,))


def _resolved(config: TrainConfig, tokenizer: Tokenizer, origin: Checkpoint | None) -> TrainConfig:
    """The configuration with the architecture, the vocabulary and the window filled in."""
    model, options = origin.config if origin else config.model, config.training
    num_tokens, context = tokenizer.vocab_size, model.max_seq_len
    said = f"0, or at least the {num_tokens} tokens of the tokenizer"
    check_fields(model, "model.", "vocab_size", lambda size: size == 0 or size >= num_tokens, said)
    seq_len = options.seq_len or min(context, 1024 if origin else context)
    check_fields(options, "training.", "seq_len", lambda size: size <= context, f"at most model.max_seq_len, {context}")
    sample_limit = context - len(prompt_ids(tokenizer, options.sample_prompt))
    said = f"at most {sample_limit}, which is what training.sample_prompt leaves of model.max_seq_len"
    check_fields(options, "training.", "sample_tokens", lambda count: count <= sample_limit, said)
    model = dataclasses.replace(model, vocab_size=model.vocab_size or num_tokens)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(options, seq_len=seq_len))


_merged = jax.jit(merged, static_argnums=(2, 3))


def _others(state: Any, key: Any) -> dict[str, Any]:
    """What is saved of a state besides its parameters, with the key as plain numbers."""
    spikes = {} if state.usual_norm is None else {"usual_norm": state.usual_norm}
    return {"opt_state": state.opt_state, "step": state.step, "key": key, **spikes}
