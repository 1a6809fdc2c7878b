"""The training loop: read a batch, take a step; now and then log, evaluate, save and sample."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jllama import distributed
from jllama.checkpoints.run import CHECKPOINTS, METRICS, SAMPLES
from jllama.data.batches import Batch
from jllama.data.datasets import GZIP, BatchSource, ChatDataset
from jllama.devices import device_memory_bytes, peak_bytes, program_bytes
from jllama.errors import JllamaError, UsageError
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.language_model import LanguageModel
from jllama.parameters import training_flops_per_token
from jllama.progress import progress
from jllama.report import REPORT, command
from jllama.stop import Stopped, stop_signals
from jllama.templates.messages import conversing, message_ids
from jllama.training import run_folder
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, evaluate, figures_text, summarize
from jllama.training.opening import Run, kept_choices, open_run
from jllama.training.optimizer import learning_rate_at
from jllama.training.step import StepMetrics, compile_training, on_devices
from jllama.training.tracker import Callback


def train(
    config: TrainConfig, *, data: BatchSource | None = None, callbacks: Sequence[Callback] = ()
) -> Evaluation:
    """Train as configured; everything is left in ``config.run_dir``. Returns the best checkpoint's final evaluation.

    Nothing is left there before the corpus, the configuration and an earlier checkpoint have been found in order, and a
    finished run is left as it is. ``Stopped`` (by Ctrl-C or SIGTERM) is raised after saving a checkpoint; JllamaError
    for a corpus, folder, disk or loss that is not in order; UsageError for a configuration that does not fit them.

    Example::

        def show(event):
            if event.name == "evaluation":
                print(event.step, event.figures["validation_loss"])

        jllama.train(config, callbacks=[show])

    Args:
        config: the run.
        data: batches of one's own, in place of ``config.data``.
        callbacks: functions of an ``Event``, called after each log, evaluation and save, in every process; an error in
            one is a warning.
    """
    with distributed.joined(config.distributed, Path(config.run_dir)):
        run = open_run(config, data, callbacks)
        if isinstance(run, Evaluation):  # there is nothing left to do
            return run
        steps, tracker = run.config.training.steps, run.tracker

        def doing() -> str:
            return f"finishing step {run.step + 1:,} and saving"

        with (
            stop_signals(doing) as run.signals,
            progress("", steps, console=tracker.console) as tracker.move,
        ):
            take_steps(run)
            final = evaluate_best(run)
        if final is None:
            go_on = command("train", "--resume", tracker.folder)
            raise Stopped(
                f"stopped at step {run.step:,} of {steps:,}; saved. Go on: {go_on}", run.stop
            )
        sample = (
            "sample",
            "--checkpoint",
            tracker.folder,
            "--prompt",
            run.config.training.sample_prompt,
        )
        words = ("chat", tracker.folder) if run.data.is_chat else sample
        read = tracker.folder / REPORT
        tracker.say(
            f"{tracker.seconds():.0f} s in all. Read {read}, or {words[0]}: {command(*words)}"
        )
        return final


def take_steps(run: Run) -> None:
    """Take the steps that are left, with pauses for what is due; fewer after a signal, or when patience is over."""
    options = run.config.training
    ended = pause(run)  # what a stop came before is done first
    recent, start_s = [], time.perf_counter()
    while run.step < options.steps and not (run.stop or ended):
        batch = next_batch(run, recent, start_s)
        on_device = on_devices(batch, run.training.batch_sharding)
        program, compile_s = program_for(run, on_device)
        start_s += compile_s  # so that no step's time has it in it
        run.state, metrics = program(run.state, on_device)
        run.step += 1
        recent.append((metrics, batch))
        pauses = run.schedule.pauses(run.step)
        if (
            jax.process_count() == 1 or run.step % options.log_every == 0
        ):  # several wait for each other there
            pauses = is_stopping(run) or pauses
        if pauses:
            log(run, recent, start_s)
            ended = pause(run)
            recent, start_s = [], time.perf_counter()


def next_batch(run: Run, recent: Sequence[tuple[StepMetrics, Batch]], start_s: float) -> Batch:
    """The next batch, checked. If there is none, or it is wrong, what has been learned is saved first."""
    try:
        batch = next(run.batches)
        check_batch(run, batch)
        return batch
    except Exception as error:
        if recent:
            log(run, recent, start_s)
        if run.step and run.schedule.done.get(CHECKPOINTS, 0) != run.step:
            save(run, None)
        run.checkpoints.saved.wait()
        if not isinstance(error, StopIteration):
            raise
        is_saved = ", which is saved" if run.step else ""
        said = (
            f"the batches ended after step {run.step:,} of {run.config.training.steps:,}{is_saved}"
        )
        raise JllamaError(
            f"{said}: give as many as there are steps, or lower training.steps"
        ) from None


def check_batch(run: Run, batch: Any) -> None:
    """Raise ``UsageError`` for what is no batch for this run."""
    if not isinstance(batch, Batch):
        raise UsageError(
            f"a batch is a {type(batch).__name__}; it must be a jllama.Batch, as of text_batch"
        )
    run.training.step.check(batch)
    rows, expected = (
        len(batch.tokens),
        run.config.training.batch_size * (1 if batch.reference is None else 2),
    )
    if rows != expected:
        raise UsageError(
            f"a batch has {rows} rows; with training.batch_size it must have {expected}"
        )


def program_for(run: Run, batch: Batch) -> tuple[Any, float]:
    """The step compiled for a batch's shape, and the seconds that it took now: chats have rows of two lengths."""
    start_s = time.perf_counter()
    shape = batch.tokens.shape
    if shape not in run.programs:
        run.tracker.show(run.step, "compiling")
        program = fitting_program(run, batch)
        run.planned_bytes = max(run.planned_bytes, sum(program_bytes(program)))
        in_four_bits = any(leaf.dtype == jnp.uint4 for leaf in jax.tree.leaves(run.state.base))
        if in_four_bits and jax.__version_info__ < (0, 11):  # which refuses its own layout of them
            program = run.training.step.program  # and so is compiled again
        run.programs[shape] = program
    return run.programs[shape], time.perf_counter() - start_s


def fitting_program(run: Run, batch: Batch) -> Any:
    """The compiled step; where ``training.remat`` is ``auto`` and it does not fit the device, with ``block``."""
    options, device = run.config.training, run.training.mesh.local_devices[0]
    try:
        program = run.training.step.lower(run.state, batch).compile()
        fits = sum(program_bytes(program)) <= (device_memory_bytes(device) or math.inf)
    except jax.errors.JaxRuntimeError as error:  # as TPUs' compiler refuses what does not fit
        if options.remat != "auto" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program, fits = None, False
    if options.remat != "auto" or not distributed.largest(0 if fits else 1):
        return program
    run.tracker.say(
        "note: what remat dots keeps does not fit the device, so each layer is computed again (block)"
    )
    run.config = dataclasses.replace(
        run.config, training=dataclasses.replace(options, remat="block")
    )
    choices = kept_choices(run.config, run.tracker.folder)
    run.training = compile_training(run.config, run.training.mesh, compiler_options=choices)
    return run.training.step.lower(run.state, batch).compile()


def is_stopping(run: Run) -> bool:
    """Whether any process has got a signal to stop; all ask at the same places."""
    run.stop = run.stop or distributed.largest(run.signals[0] if run.signals else 0)
    return run.stop > 0


def pause(run: Run) -> bool:
    """Do what is due or owed, unless the last step was left out and others follow; whether patience is over."""
    options, schedule, tracker = run.config.training, run.schedule, run.tracker
    if run.skipped and not (run.stop or run.step == options.steps):
        return False
    evaluation = None
    if schedule.owes(METRICS, run.step) and not run.stop:
        evaluation = evaluate_now(run)
    ended = distributed.largest(run_folder.out_of_patience(tracker.folder, options.patience)) > 0
    is_due = schedule.owes(CHECKPOINTS, run.step) or (evaluation and not options.save_every)
    if (run.stop or ended or is_due) and schedule.done.get(CHECKPOINTS, 0) != run.step:
        save(run, evaluation)
    if schedule.owes(SAMPLES, run.step) and not run.stop:
        with tracker.attempt("sampling", run.step):
            if options.sample_tokens:
                sample(run)
            schedule.done[SAMPLES] = run.step
        with tracker.attempt("reporting", run.step):
            tracker.report()
    if evaluation and ended:
        said = f"step {run.step}: the validation loss has not fallen for {options.patience} evaluations"
        tracker.say(f"{said}, so training ends here", "bold")
    tracker.show(run.step)
    return ended


# What a pause may do


def log(run: Run, recent: Sequence[tuple[StepMetrics, Batch]], start_s: float) -> None:
    """Wait for the recent steps, log and show their means, and by itself each that was left out, with its batch."""
    config, tracker = run.config, run.tracker
    for step, (metrics, batch) in enumerate(recent, run.step - len(recent) + 1):
        run.skipped = run.skipped + 1 if bool(metrics.skipped) else 0  # the wait is here
        if run.skipped:
            log_skipped(run, step, metrics, batch)
    elapsed_s = time.perf_counter() - start_s
    taken = [metrics for metrics, _ in recent if not metrics.skipped]
    if not taken:
        return

    # One line of figures.
    shares = run.training.trainable.shares
    flops_per_token = training_flops_per_token(config.model, config.training.seq_len, shares)
    record = summarize(taken, elapsed_s * len(taken) / len(recent), flops_per_token)
    if run.data.is_chat:
        segments = [
            batch.segments[batch.segments.any(axis=1)].ravel() for _, batch in recent
        ]  # rows of this process
        record["padding"] = float(np.mean(np.concatenate(segments) == 0))
    record["learning_rate"] = float(
        learning_rate_at(run.step - 1, config.optimizer, config.training.steps)
    )
    peak, planned = peak_bytes(run.training.mesh.local_devices), run.planned_bytes
    record |= {"planned_bytes": planned, "peak_bytes": peak, "elapsed_s": tracker.seconds()}
    tracker.write(run.step, **record)

    # The same for people.
    figures = figures_text(record.get("figures"))
    tracker.note = f"loss {record['loss']:.3f}{figures}  {record['tokens_per_s']:,.0f} tokens/s"
    if not tracker.console.is_terminal:
        mfu = f"  MFU {record['mfu']:.1%}" if record["mfu"] else ""
        memory = f"  {peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f}" if peak else ""
        tracker.say(
            f"step {run.step}: {tracker.note}  learning rate {record['learning_rate']:.1e}{mfu}{memory}"
        )
    tracker.show(run.step)
    tell(run, "log", record)


def log_skipped(run: Run, step: int, metrics: StepMetrics, batch: Batch) -> None:
    """Log a step that left the parameters as they were, and its batch; one too many in a row ends the run."""
    options, tracker = run.config.training, run.tracker
    loss, norm = (value if math.isfinite(value) else None for value in map(float, metrics[:2]))
    tracker.write(step, skipped=True, loss=loss, grad_norm=norm)
    tracker.write(step, run_folder.SKIPPED, tokens=np.asarray(batch.tokens).tolist())
    wrong = "the loss or its gradient is not a finite number"
    if loss is not None and norm is not None:
        wrong = f"the gradient's norm, {norm:.3g}, is a spike"
    tracker.say(f"step {step} is left out, its batch is in {run_folder.SKIPPED}: {wrong}", "yellow")
    at_the_end = norm is None and step == options.steps and run.skipped > 1
    if at_the_end or run.skipped >= options.max_skipped:
        in_a_row = f" ({run.skipped} steps in a row)" if run.skipped > 1 else ""
        give_up(run, f"{wrong} at step {step}{in_a_row}")


def evaluate_now(run: Run) -> Evaluation | None:
    """Evaluate on a part of the validation data, show and log it; None if that failed or a stop came in between."""
    result, eval_tokens = None, run.config.training.eval_tokens
    with run.tracker.attempt("evaluating", run.step):
        result = evaluate(
            run.training, run.data, run.config, run.state, eval_tokens, lambda: is_stopping(run)
        )
    if result is None:
        return None
    if not math.isfinite(result.validation_loss):
        give_up(run, f"the validation loss is not a finite number at step {run.step}")
    run.tracker.write(run.step, **dataclasses.asdict(result))
    run.schedule.done[METRICS] = run.step
    run.tracker.say(f"step {run.step}: {result}", "bold")
    tell(run, "evaluation", dataclasses.asdict(result))
    return result


def evaluate_best(run: Run) -> Evaluation | None:
    """Evaluate the best checkpoint on all of the validation data, show and log it; None if a stop came first."""
    tracker, saved = run.tracker, run.checkpoints.saved
    tracker.show(run.step, "saving")
    saved.wait()
    tracker.show(run.step, "evaluating")
    best, state = saved.best_step(), run.state
    if not (run.stop or best in (None, run.step)):
        state, _ = run.checkpoints.restore(best, state.base)
    final = evaluate(run.training, run.data, run.config, state, 0, lambda: is_stopping(run))
    if final is not None:
        tracker.write(run.step, best_step=best, final=dataclasses.asdict(final))
        tracker.report()
        gzip = run.data.facts().get(GZIP)
        beside = f"; gzip -9 needs {gzip}" if gzip else ""
        tracker.say(
            f"Best checkpoint (step {best}) on the whole validation text: {final}{beside}.", "bold"
        )
    return final


def save(run: Run, evaluation: Evaluation | None) -> None:
    """Begin to save a checkpoint."""
    run.tracker.show(run.step, "saving")
    run.schedule.done[CHECKPOINTS] = run.step
    loss = evaluation.validation_loss if evaluation else None
    run.checkpoints.save(run.step, run.state, run.batches.get_state(), run.tracker.seconds(), loss)
    tell(run, "save", {})


def sample(run: Run) -> None:
    """Let the model go on from the prompt, or answer the questions; show and log what it writes.

    In a run on chats all of them go through the template, and without any it is asked what the first held-out
    conversation begins with.
    """
    options, model = run.config.training, model_now(run)
    prompts: list[str] = options.questions or [options.sample_prompt]
    if options.questions:
        sampling = SamplingParams(temperature=0.0)
    else:
        key = jax.random.fold_in(
            jax.random.fold_in(run.state.key, run.state.step), run.config.sampling.seed
        )
        sampling = dataclasses.replace(run.config.sampling, seed=int(jax.random.bits(key)))

    # Chats are asked in ids.
    asked: list[Any] = prompts
    max_new_tokens = options.sample_tokens or 0
    if isinstance(run.data, ChatDataset):
        if not any(prompts):
            asked = [run.data.first_question()]
            prompts = [model.text_tokenizer.decode(asked[0])]
        elif model.chat_template:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            asked = [
                message_ids(model.text_tokenizer, model.chat_template, each, True)
                for each in conversations
            ]
        if asked is not prompts:
            max_new_tokens = min(max_new_tokens, model.config.max_seq_len - max(map(len, asked)))
    completions = generate(model, asked, sampling, max_new_tokens=max_new_tokens)
    between = " " if options.questions else ""
    for prompt, completion in zip(prompts, completions, strict=True):
        run.tracker.write(run.step, SAMPLES, prompt=prompt, text=completion.text)
        run.tracker.say(f"{prompt}{between}{completion.text}\n", "dim")


def model_now(run: Run) -> LanguageModel:
    """The model as it is now, to talk with."""
    tokenizer, origin = run.data.tokenizer, run.origin
    talk = conversing(tokenizer, origin.chat_template, origin.stop_ids) if origin else (None, ())
    return LanguageModel(run.config.model, run.training.model_weights(run.state), tokenizer, *talk)


def tell(run: Run, name: str, figures: Mapping[str, Any]) -> None:
    """Call the callbacks. Their models are copies, as the next step uses the arrays of its state up."""

    def model() -> LanguageModel:
        now = model_now(run)
        return dataclasses.replace(now, params=jax.tree.map(jnp.copy, now.params))

    run.tracker.call(name, run.step, figures, model)


def give_up(run: Run, wrong: str) -> NoReturn:
    """End the run, and say what of it is good."""
    saved = run.checkpoints.saved
    saved.wait()
    kept = saved.steps()
    last = (
        f"the last good checkpoint is of step {kept[-1]}"
        if kept
        else "no checkpoint had been saved yet"
    )
    raise JllamaError(
        f"{wrong}; {last}: try a lower optimizer.learning_rate or optimizer.clip_norm"
    )
