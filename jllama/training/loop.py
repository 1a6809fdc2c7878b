"""The training loop: read a batch, take a step; now and then look, save and sample."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import platform
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jllama.checkpoints.formats import Model, open_checkpoint
from jllama.checkpoints.native import CHECKPOINTS, Checkpoints
from jllama.checkpoints.tensors import Checkpoint, load_params
from jllama.config import LlamaConfig
from jllama.data.batches import training_batches
from jllama.data.config import DataConfig
from jllama.data.tokens import Dataset, prepare_data
from jllama.errors import JllamaError, UsageError
from jllama.generation.text import generate, prompt_ids
from jllama.model import abstract_params
from jllama.parallel.mesh import BATCH, make_mesh, state_sharding
from jllama.parameters import count_parameters
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, first_not_finite, make_evaluator, summarise
from jllama.training.optimizer import learning_rate_at, make_optimizer
from jllama.training.report import write_report
from jllama.training.run_folder import METRICS, REPORT, SAMPLES, append_line, forget_after, write_config
from jllama.training.step import StepMetrics, TrainState, initial_state, train_step

P = ParamSpec("P")
T = TypeVar("T")


def train(config: TrainConfig) -> Evaluation:
    """Train as configured; everything is left in ``config.run_dir``. Returns the best checkpoint's final evaluation.

    Nothing is written there before the corpus, the configuration and an earlier checkpoint have been found in order.

    Raises:
        JllamaError: the corpus, the folder or the disk is not in order, the loss is no longer a number, or the run
            was interrupted (after saving a checkpoint).
        UsageError: the configuration does not fit the corpus, the devices or itself.
    """
    console = Console(stderr=True, highlight=False)
    folder = Path(config.run_dir)
    if config.resume == "never" and (folder / CHECKPOINTS).exists():
        raise UsageError(f"{folder} already holds a run: continue it with --resume auto, or choose another --run_dir")

    begun = Checkpoints(folder / CHECKPOINTS, read_only=True).steps() if (folder / CHECKPOINTS).exists() else []
    origin = _origin(config, folder if begun else None) if config.init_from else None
    data = prepare_data(config.data, origin.tokenizer if origin else None)
    config = _resolved(config, data, origin)
    mesh = make_mesh(config.mesh)
    _check_division(config, mesh)
    batches = training_batches(
        data.train,
        batch_size=config.training.batch_size,
        seq_len=config.training.seq_len,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    optimizer = make_optimizer(config.optimizer, config.model, abstract_params(config.model), config.training.steps)
    start = functools.partial(initial_state, config=config.model, optimizer=optimizer)
    abstract = jax.eval_shape(start, jax.random.key(config.seed))
    shardings = state_sharding(mesh, config.model, abstract)

    identity = _identity(config, data)
    checkpoints = Checkpoints(folder / CHECKPOINTS, config.training.keep_last)
    if saved := checkpoints.steps():
        state, seconds_before = _restore(checkpoints, saved[-1], abstract, shardings, batches, identity)
    else:
        # It runs once, so what counts is compiling: 0.9 s unoptimised, 5.6 s otherwise, for a small model on two cores.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        draw = jax.jit(start, out_shardings=shardings, compiler_options=options, donate_argnums=1)
        params = load_params(origin, jnp.float32, mesh) if origin else None
        state, seconds_before = draw(jax.random.key(config.seed), params), 0.0
    first_step = int(state.step)
    write_config(folder, config)
    data.tokenizer.save(folder)
    for name in (METRICS, SAMPLES):
        forget_after(folder / name, first_step)

    dtype = _dtype(config.training.dtype)
    take_step = jax.jit(
        functools.partial(
            train_step,
            config=config.model,
            optimizer=optimizer,
            bos_id=data.tokenizer.bos_id,
            accumulation=config.training.accumulation,
            z_loss=config.training.z_loss,
            dtype=dtype,
            remat=config.training.remat,
        ),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )
    evaluate = make_evaluator(config.model, data, mesh, config.training.batch_size, config.training.seq_len, dtype)
    batch_sharding = NamedSharding(mesh, BATCH)
    console.print(
        f"[bold]{escape(str(folder))}[/bold]: {count_parameters(config.model):,} parameters on {mesh.size} "
        f"{jax.default_backend()} device(s), {data.train_counts.tokens:,} training tokens, "
        f"step {first_step:,} of {config.training.steps:,}"
    )

    began_s = time.perf_counter()
    recent: list[StepMetrics] = []
    recent_began_s, looking_s = began_s, 0.0
    step = first_step
    with _progress(console) as progress, _stop_signal() as stop_requested:
        task = progress.add_task("", total=config.training.steps, completed=step, note="compiling")
        stopping = False
        while step < config.training.steps and not stopping:
            state, metrics = take_step(state, jax.make_array_from_process_local_data(batch_sharding, next(batches)))
            step += 1
            recent.append(metrics)
            stopping = stop_requested()  # asked once a step: what stops the loop is always saved below
            look = step % config.training.eval_every == 0 or step == config.training.steps or stopping
            if look or step % config.training.log_every == 0:
                _check_finite(recent, step, checkpoints)
                record = summarise(recent, time.perf_counter() - recent_began_s, config, mesh.size)
                rate = learning_rate_at(step - 1, config.optimizer, config.training.steps)
                append_line(folder / METRICS, {"step": step, **record, "learning_rate": float(rate)})
                note = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
                progress.update(task, completed=step, note=note)
                if not console.is_terminal:
                    console.print(f"step {step}: {note}")
                recent = []
            if look:
                look_began_s = time.perf_counter()
                evaluation = _or_warn(console, evaluate, state.params, config.training.eval_tokens)
                seconds = seconds_before + time.perf_counter() - began_s
                if evaluation is not None:
                    if not math.isfinite(evaluation.validation_loss):
                        raise _not_finite("validation loss", step, checkpoints)
                    append_line(folder / METRICS, {"step": step, **dataclasses.asdict(evaluation)})
                    console.print(
                        f"step {step}: validation loss [bold]{evaluation.validation_loss:.4f}[/bold], perplexity "
                        f"{evaluation.perplexity:.2f}, {evaluation.bits_per_byte:.3f} bits per byte"
                    )
                _save(checkpoints, state, batches, identity, evaluation, seconds)
                _or_warn(console, _sample, console, folder, state, config, data)
                _or_warn(console, _report, folder, config, data, mesh, evaluation, seconds)
                looking_s += time.perf_counter() - look_began_s
            if not recent:
                recent_began_s = time.perf_counter()
        checkpoints.wait()
    if step < config.training.steps:
        raise JllamaError(f"stopped at step {step}, which is saved: continue with --resume auto")

    best = checkpoints.best_step()
    params = state.params
    if best is not None and best != step:
        params = checkpoints.restore_params(best, config.model, mesh=mesh)
    final = evaluate(params, 0)
    seconds = seconds_before + time.perf_counter() - began_s
    append_line(folder / METRICS, {"step": step, "best_step": best, "final": dataclasses.asdict(final)})
    _report(folder, config, data, mesh, final, seconds)
    console.print(
        f"Best checkpoint (step {best}) on the whole validation text: loss [bold]{final.validation_loss:.4f}[/bold], "
        f"[bold]{final.bits_per_byte:.3f}[/bold] bits per byte; gzip -9 needs {_gzip_bits_per_byte(data):.3f}."
    )
    console.print(
        f"{seconds:.0f} s in all, {looking_s:.0f} s of it evaluating, sampling and saving. Read {folder / REPORT}, "
        f'or sample: python sample.py --checkpoint {folder} --prompt "..."'
    )
    return final


def _origin(config: TrainConfig, begun: Path | None) -> Checkpoint:
    """The checkpoint to begin from, opened; once a run has begun, its own folder stands in for ``init_from``."""
    path = begun or config.init_from
    origin = open_checkpoint(path, None if begun else config.rope_factor)
    given = dataclasses.asdict(config.model)
    changed = [
        name
        for name, value in dataclasses.asdict(origin.config).items()
        if given[name] not in (value, dataclasses.asdict(LlamaConfig())[name])
    ]
    if changed:
        raise UsageError(
            f"model.{changed[0]} is {given[changed[0]]} but it is {getattr(origin.config, changed[0])} in {path}: "
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
    seq_len = config.training.seq_len or model.max_seq_len
    if seq_len > model.max_seq_len:
        raise UsageError(
            f"training.seq_len is {seq_len} but model.max_seq_len is {model.max_seq_len}: lower one or raise the other"
        )
    steps = config.training.steps or math.ceil(
        config.training.epochs * data.train_counts.tokens / (config.training.batch_size * seq_len)
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model, vocab_size=model.vocab_size or vocab_size),
        training=dataclasses.replace(config.training, steps=steps, seq_len=seq_len),
    )
    prompt_tokens = len(prompt_ids(data.tokenizer, config.training.sample_prompt))
    if prompt_tokens + config.training.sample_tokens > config.model.max_seq_len:
        raise UsageError(
            f"training.sample_prompt has {prompt_tokens} tokens and training.sample_tokens is "
            f"{config.training.sample_tokens}: together they exceed model.max_seq_len {config.model.max_seq_len}"
        )
    return config


def _check_division(config: TrainConfig, mesh: Mesh) -> None:
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.training.batch_size % (ways * config.training.accumulation):
        raise UsageError(
            f"training.batch_size {config.training.batch_size} does not divide into {config.training.accumulation} "
            f"part(s) over {ways} device(s)"
        )


def _dtype(name: str) -> Any:
    if name == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(name)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to), shapes, shardings)


def _identity(config: TrainConfig, data: Dataset) -> dict[str, Any]:
    """What the order of the batches depends on: a run cannot go on if any of it changes."""
    return {
        "the corpus or its tokenizer": data.fingerprint,
        "seed": config.seed,
        "training.batch_size": config.training.batch_size,
        "training.seq_len": config.training.seq_len,
    }


def _save(
    checkpoints: Checkpoints,
    state: TrainState,
    batches: grain.DatasetIterator,
    identity: dict[str, Any],
    evaluation: Evaluation | None,
    seconds: float,
) -> None:
    rest = {"opt_state": state.opt_state, "step": state.step, "key": jax.random.key_data(state.key)}
    meta = {"batches": batches.get_state(), "identity": identity, "seconds": seconds}
    checkpoints.save(int(state.step), state.params, rest, meta, evaluation.validation_loss if evaluation else None)


def _restore(
    checkpoints: Checkpoints,
    step: int,
    abstract: TrainState,
    shardings: TrainState,
    batches: grain.DatasetIterator,
    identity: dict[str, Any],
) -> tuple[TrainState, float]:
    """The state saved at a step, with the batches set to follow it, and the seconds spent until then."""
    key_shape = jax.eval_shape(jax.random.key_data, abstract.key)
    rest = {"opt_state": abstract.opt_state, "step": abstract.step, "key": key_shape}
    rest_shardings = {"opt_state": shardings.opt_state, "step": shardings.step, "key": shardings.key}
    params, rest, meta = checkpoints.restore(
        step, _placed(abstract.params, shardings.params), _placed(rest, rest_shardings)
    )
    if changed := [name for name, value in identity.items() if meta["identity"].get(name) != value]:
        raise JllamaError(
            f"changed since {checkpoints.folder / str(step)} was saved: {', '.join(changed)}; "
            f"restore what it was, or start a new run with another --run_dir"
        )
    batches.set_state(meta["batches"])
    state = TrainState(rest["step"], params, rest["opt_state"], jax.random.wrap_key_data(rest["key"]))
    return state, meta["seconds"]


def _check_finite(recent: list[StepMetrics], step: int, checkpoints: Checkpoints) -> None:
    """Wait for the recent steps. Raises ``JllamaError`` if one has gone wrong, so that nothing of it is ever saved."""
    bad = first_not_finite(recent)
    if bad is not None:
        raise _not_finite("loss or its gradient", step - len(recent) + bad + 1, checkpoints)


def _not_finite(what: str, step: int, checkpoints: Checkpoints) -> JllamaError:
    checkpoints.wait()
    kept = checkpoints.steps()
    last = f"the last good checkpoint is of step {kept[-1]}" if kept else "no checkpoint had been saved yet"
    return JllamaError(
        f"the {what} is not a finite number at step {step}; {last}: "
        f"try a lower optimizer.learning_rate or optimizer.clip_norm"
    )


def _sample(console: Console, folder: Path, state: TrainState, config: TrainConfig, data: Dataset) -> None:
    """Let the model write, show it and log it."""
    prompt, count = config.training.sample_prompt, config.training.sample_tokens
    if not count:
        return
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), config.sampling.seed)
    sampling = dataclasses.replace(config.sampling, seed=int(jax.random.bits(key)))
    model = Model(config.model, state.params, data.tokenizer)
    written = generate(model, [prompt], sampling, max_new_tokens=count)[0]
    append_line(folder / SAMPLES, {"step": int(state.step), "prompt": prompt, "text": written.text})
    console.print(f"[dim]{escape(prompt + written.text)}[/dim]\n")


def _report(
    folder: Path, config: TrainConfig, data: Dataset, mesh: Mesh, evaluation: Evaluation | None, seconds: float
) -> None:
    """Write the run's report so far, with its receipt."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jllama", "jax", "flax", "optax")]
    results = dataclasses.asdict(evaluation) if evaluation else {}
    receipt = {
        "parameters": f"{count_parameters(config.model):,}",
        "training text": f"{data.train_counts.bytes:,} bytes, {data.train_counts.tokens:,} tokens",
        "validation text": f"{data.validation_counts.bytes:,} bytes, {data.validation_counts.tokens:,} tokens",
        "device": f"{mesh.size} x {jax.devices()[0].device_kind}",
        "time": f"{seconds:.0f} s",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in results.items()},
        "bits per byte of gzip -9": f"{_gzip_bits_per_byte(data):.4f}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
    write_report(folder, receipt)


def _gzip_bits_per_byte(data: Dataset) -> float:
    return 8 * data.gzip_bytes / data.gzip_of_bytes


def _or_warn(console: Console, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Do something that training can go on without: say so if it fails."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        console.print(f"[yellow]warning:[/yellow] {escape(f'{type(error).__name__}: {error}')}; training goes on")
        return None


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into an answer of true, so that the loop can save before it stops."""
    received: list[int] = []

    def receive(number: int, _frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress(console: Console) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
