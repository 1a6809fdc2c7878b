"""The training loop: take steps, and pause to log, evaluate, save and sample."""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jllama import distributed
from jllama.checkpoints.receipt import describe_weights
from jllama.checkpoints.run import CHECKPOINTS, METRICS, SAMPLES
from jllama.data.batches import Batch
from jllama.data.datasets import GZIP, BatchSource, ChatDataset
from jllama.data.prompts import PromptDataset
from jllama.devices import device_memory_bytes, peak_bytes, program_bytes
from jllama.errors import JllamaError, UsageError, shell_command
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.language_model import LanguageModel
from jllama.parameters import training_flops_per_token
from jllama.progress import progress
from jllama.report import REPORT
from jllama.stop import Stopped, stop_signals
from jllama.templates.messages import chat_format, message_ids
from jllama.training.checkpointing import restore_state, save_state
from jllama.training.config import TrainConfig
from jllama.training.metrics import Evaluation, evaluate, figures_text, summarize
from jllama.training.opening import Run, autotuning_options, open_run
from jllama.training.optimizer import learning_rate_at
from jllama.training.receipt import write_receipt
from jllama.training.rollouts import Rollouts, rollout_record
from jllama.training.run_folder import SKIPPED, is_out_of_patience
from jllama.training.step import StepMetrics, TrainState, compile_training, put_on_devices
from jllama.training.tracker import REPORT_EVERY_S, Callback, Event

SHOWN_ANSWERS = 8
"""How many answers to held-out prompts are shown side by side over time."""


def train(
    config: TrainConfig, *, data: BatchSource | None = None, callbacks: Sequence[Callback] = ()
) -> Evaluation:
    """Train as configured, and return the final evaluation of the best checkpoint.

    Everything is written to ``config.run_dir``, and nothing before the corpus, the configuration
    and an earlier checkpoint have been checked. A finished run is left unchanged.

    Examples:
        >>> data = jllama.DataConfig(path="my_texts/", tokenizer="bytes")
        >>> model = jllama.LlamaConfig(num_layers=1, embed_dim=32, num_heads=2, max_seq_len=64)
        >>> training = jllama.LoopConfig(batch_size=4, steps=2, sample_tokens=0)
        >>> config = jllama.TrainConfig(model, data=data, run_dir="runs/mine", training=training)
        >>> jllama.train(config).validation_loss > 0
        True

    Args:
        config: the run.
        data: your own batches, in place of ``config.data``.
        callbacks: functions of an ``Event``, called after each log, evaluation and save, in every
            process; an error in one is a warning.

    Raises:
        Stopped: Ctrl-C or SIGTERM stopped the run, and a checkpoint was saved.
        JllamaError: there is a problem with the corpus, the folder, the disk or the loss.
        UsageError: the configuration does not fit them.
    """
    with distributed.connect_processes(config.distributed, Path(config.run_dir)):
        run = open_run(config, data, callbacks)
        if isinstance(run, Evaluation):  # the run is finished
            return run
        tracker = run.tracker
        num_steps = run.config.training.steps
        try:
            with (
                stop_signals(lambda: f"finishing step {run.step + 1:,} and saving") as run.signals,
                progress("", num_steps, console=tracker.console) as tracker.move,
            ):
                take_steps(run)
                final = evaluate_best(run)
        finally:
            if isinstance(run.batches, Rollouts):
                run.batches.scorer.close()
            tracker.report(0)  # also of a run that was stopped or has failed
        if final is None:
            reward = run.config.reward
            words = ["--reward", reward] if reward else []
            go_on = shell_command("train", "--resume", tracker.folder, *words)
            raise Stopped(
                f"stopped at step {run.step:,} of {num_steps:,}; saved. Go on: {go_on}",
                run.stop_signal,
            )
        words = ["chat", tracker.folder]
        if not run.data.is_chat:
            prompt = run.config.training.sample_prompt
            words = ["sample", "--checkpoint", tracker.folder, "--prompt", prompt]
        tracker.say(
            f"{tracker.seconds():.0f} s in all. Read {tracker.folder / REPORT}, "
            f"or {words[0]}: {shell_command(*words)}"
        )
        return final


def take_steps(run: Run) -> None:
    """Take the steps that are left, until a signal arrives or the validation loss stops falling."""
    options = run.config.training
    has_ended = pause(run)  # what is overdue comes first
    run.start_s = time.perf_counter()
    while run.step < options.steps and not (run.stop_signal or has_ended):
        batch = next_batch(run)
        on_devices = put_on_devices(batch, run.training.batch_sharding)
        exact = run.batches.sampler.exact if isinstance(run.batches, Rollouts) else ()
        program = program_for(run, on_devices, *exact)
        run.state, metrics = program(run.state, on_devices, *exact)
        run.step += 1
        run.recent.append((metrics, batch))

        intervals = options.log_every, interval(run, METRICS), interval(run, CHECKPOINTS)
        pauses = run.step == options.steps or any(run.step % every == 0 for every in intervals)
        # Several processes wait for each other to learn of signals, so they ask less often.
        if jax.process_count() == 1 or run.step % options.log_every == 0:
            pauses = is_stopping(run) or pauses
        is_between = not isinstance(run.batches, Rollouts) or run.batches.is_between
        if pauses and is_between:
            log(run)
            has_ended = pause(run)
            run.recent = []
            run.start_s = time.perf_counter()


def pause(run: Run) -> bool:
    """Evaluate, save and sample if due; return whether the validation loss has stopped falling.

    Nothing is done after a skipped step, unless it is the last one.
    """
    options = run.config.training
    tracker = run.tracker
    if run.num_skipped and not (run.stop_signal or run.step == options.steps):
        return False

    evaluation = None
    if is_due(run, METRICS) and not run.stop_signal:
        evaluation = evaluate_now(run)
    data_since = run.origin_meta.get("data_since", 0)
    is_over = is_out_of_patience(tracker.folder, options.patience, data_since)
    has_ended = distributed.max_over_processes(is_over) > 0

    is_validated = evaluation and not options.save_every
    must_save = is_validated or run.stop_signal or has_ended or is_due(run, CHECKPOINTS)
    if must_save and not is_saved(run):
        save(run, evaluation)

    if is_due(run, SAMPLES) and not run.stop_signal:
        with tracker.attempt("sampling", run.step):
            if options.sample_tokens and not isinstance(run.batches, Rollouts):
                sample(run)
            run.done[SAMPLES] = run.step
        tracker.report(REPORT_EVERY_S)
    if evaluation and has_ended:
        tracker.say(
            f"step {run.step}: the validation loss has not fallen for {options.patience} "
            "evaluations, so training ends here",
            "bold",
        )
    tracker.show(run.step)
    return has_ended


def interval(run: Run, name: str) -> int:
    """Return the steps between two evaluations, samples or checkpoints (see ``Run.done``)."""
    options = run.config.training
    if name == CHECKPOINTS and options.save_every:
        return options.save_every
    return options.eval_every


def is_due(run: Run, name: str) -> bool:
    """Return whether an evaluation, sample or checkpoint is due or overdue.

    Each is due after every ``interval`` steps and after the last step. One that failed, or that a
    stop prevented, stays due, also when the run is resumed.
    """
    last_due = run.step
    if run.step != run.config.training.steps:
        last_due -= run.step % interval(run, name)
    return run.done.get(name, 0) < last_due


def is_saved(run: Run) -> bool:
    """Return whether the current step has a checkpoint."""
    return run.done.get(CHECKPOINTS, 0) == run.step


def is_stopping(run: Run) -> bool:
    """Return whether any process has a signal; all processes call this at the same steps."""
    own_signal = run.signals[0] if run.signals else 0
    run.stop_signal = run.stop_signal or distributed.max_over_processes(own_signal)
    return run.stop_signal > 0


# A step's batch and program


def next_batch(run: Run) -> Batch:
    """Return the next batch, checked; if that fails, first log and save the steps so far."""
    try:
        if isinstance(run.batches, Rollouts):
            batch = run.batches.next_batch(run.training, run.state, run.step)
        else:
            batch = next(run.batches)
        check_batch(run, batch)
        return batch
    except Exception as error:
        if run.recent:
            log(run)
        if run.step and not is_saved(run):
            save(run, None)
        run.checkpoints.wait()
        if not isinstance(error, StopIteration):
            raise
        which = ", which is saved" if run.step else ""
        raise JllamaError(
            f"the batches ended after step {run.step:,} of {run.config.training.steps:,}{which}: "
            "give as many as there are steps, or lower training.steps"
        ) from None


def check_batch(run: Run, batch: Any) -> None:
    """Raise ``UsageError`` for anything but a batch that fits this run."""
    if not isinstance(batch, Batch):
        raise UsageError(
            f"a batch is a {type(batch).__name__}; it must be a jllama.Batch, see jllama.text_batch"
        )
    run.training.step.check(batch)
    num_rows = len(batch.tokens)
    expected = run.config.training.batch_size
    if batch.reference is not None:  # of pairs
        expected *= 2
    if num_rows != expected:
        raise UsageError(
            f"a batch has {num_rows} rows; with training.batch_size it must have {expected}"
        )


def program_for(run: Run, batch: Batch, *exact: Any) -> Any:
    """Return the step compiled for a batch's shape; chats have two shapes."""
    shape = batch.tokens.shape
    if shape not in run.programs:
        start_s = time.perf_counter()
        run.tracker.show(run.step, "compiling")
        program = compile_fitting(run, batch, *exact)
        run.planned_bytes = max(run.planned_bytes, sum(program_bytes(program)))
        in_four_bits = any(leaf.dtype == jnp.uint4 for leaf in jax.tree.leaves(run.state.base))
        if in_four_bits and jax.__version_info__ < (0, 11):
            # These versions reject their own layout of such arrays, so the step is compiled by its
            # first call.
            program = run.training.step.program
        run.programs[shape] = program
        run.start_s += time.perf_counter() - start_s  # compiling is not part of a step's time
    return run.programs[shape]


def compile_fitting(run: Run, batch: Batch, *exact: Any) -> Any:
    """Compile the step; where ``remat`` is ``auto``, with ``block`` if ``dots`` does not fit."""
    options = run.config.training
    program, fits = None, False
    try:
        program = run.training.step.lower(run.state, batch, *exact).compile()
        available = device_memory_bytes(run.training.mesh.local_devices[0])
        fits = sum(program_bytes(program)) <= (available or math.inf)
    except jax.errors.JaxRuntimeError as error:
        # The compiler for TPUs refuses a program that does not fit.
        if options.remat != "auto" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
    if options.remat != "auto" or not distributed.max_over_processes(not fits):
        return program
    run.tracker.say(
        "note: what remat dots keeps does not fit the device, "
        "so each layer is computed again (block)"
    )
    options = dataclasses.replace(options, remat="block")
    run.config = dataclasses.replace(run.config, training=options)
    xla_options = autotuning_options(run.config, run.tracker.folder)
    run.training = compile_training(run.config, run.training.mesh, compiler_options=xla_options)
    return run.training.step.lower(run.state, batch, *exact).compile()


# What a pause does


def log(run: Run) -> None:
    """Wait for the recent steps; log and show their means, and each skipped step by itself."""
    config = run.config
    tracker = run.tracker
    recent = run.recent
    taken = []
    for step, (metrics, batch) in enumerate(recent, run.step - len(recent) + 1):
        is_skipped = bool(metrics.skipped)  # the wait is here
        if is_skipped:
            run.num_skipped += 1
            log_skipped(run, step, metrics, batch)
        else:
            run.num_skipped = 0
            taken.append(metrics)
    elapsed_s = time.perf_counter() - run.start_s
    if not taken:
        return

    # A line of figures for programs.
    shares = run.training.trainable.shares
    flops_per_token = training_flops_per_token(config.model, config.training.seq_len, shares)
    record = summarize(taken, elapsed_s * len(taken) / len(recent), flops_per_token)
    if run.data.is_chat:
        # Only the rows of this process are filled.
        segments = [batch.segments[batch.segments.any(axis=1)].ravel() for _, batch in recent]
        record["padding"] = float(np.mean(np.concatenate(segments) == 0))
    total_steps = config.training.steps
    record["learning_rate"] = float(learning_rate_at(run.step - 1, config.optimizer, total_steps))
    peak = peak_bytes(run.training.mesh.local_devices)
    if isinstance(run.batches, Rollouts):
        record |= rollout_record(run.batches.records, elapsed_s)
        run.batches.records = []
        for step, problem in run.batches.problems.items():
            tracker.say(f"step {step}: some answers have no reward: {problem}", "yellow")
        run.batches.problems = {}
    record |= {
        "planned_bytes": run.planned_bytes,
        "peak_bytes": peak,
        "elapsed_s": tracker.seconds(),
    }
    tracker.write(run.step, **record)

    # A line for people.
    figures = figures_text(record.get("figures"))
    tracker.note = f"loss {record['loss']:.3f}{figures}  {record['tokens_per_s']:,.0f} tokens/s"
    if "reward" in record:
        tracker.note = "reward {reward:.3f}, mismatch {mismatch_max:.1e}, ".format_map(record)
        tracker.note += (
            f"{record['sampled_tokens'] / record['step_s']:,.0f} answer tokens/s{figures}"
        )
    if not tracker.console.is_terminal:
        line = f"step {run.step}: {tracker.note}  learning rate {record['learning_rate']:.1e}"
        if record["mfu"]:
            line += f"  MFU {record['mfu']:.1%}"
        if peak:
            line += f"  {peak / 2**30:.2f} GiB, planned {run.planned_bytes / 2**30:.2f}"
        tracker.say(line)
    tracker.show(run.step)
    notify(run, "log", record)


def log_skipped(run: Run, step: int, metrics: StepMetrics, batch: Batch) -> None:
    """Log a skipped step and its batch; end the run if there were too many in a row."""
    options = run.config.training
    tracker = run.tracker
    loss, norm = (
        value if math.isfinite(value) else None
        for value in (float(metrics.loss), float(metrics.grad_norm))
    )
    tracker.write(step, skipped=True, loss=loss, grad_norm=norm)
    tracker.write(step, SKIPPED, tokens=np.asarray(batch.tokens).tolist())
    problem = "the loss or its gradient is not a finite number"
    has_no_reward = isinstance(run.batches, Rollouts) and step in run.batches.problems
    if has_no_reward:
        problem = run.batches.problems.pop(step)
    if loss is not None and norm is not None:
        problem = f"the gradient's norm, {norm:.3g}, is a spike"
    tracker.say(f"step {step} is left out, its batch is in {SKIPPED}: {problem}", "yellow")
    diverged_at_end = norm is None and step == options.steps and run.num_skipped > 1
    if diverged_at_end or run.num_skipped >= options.max_skipped:
        in_a_row = f" ({run.num_skipped} steps in a row)" if run.num_skipped > 1 else ""
        problem = f"{problem} at step {step}{in_a_row}"
        if not has_no_reward:
            raise_failure(run, problem)
        if not is_saved(run):
            save(run, None)
        raise_failure(run, problem, "mend the reward, and resume the run")


def evaluate_now(run: Run) -> Evaluation | None:
    """Evaluate on ``eval_tokens`` tokens; return None if that failed or was stopped."""
    tracker = run.tracker
    max_tokens = run.config.training.eval_tokens
    evaluation = None
    with tracker.attempt("evaluating", run.step):
        evaluation = evaluate_state(run, run.state, max_tokens)
    if evaluation is None:
        return None
    if not math.isfinite(evaluation.validation_loss):
        raise_failure(run, f"the validation loss is not a finite number at step {run.step}")
    record = dataclasses.asdict(evaluation)
    tracker.write(run.step, **record)
    run.done[METRICS] = run.step
    tracker.say(f"step {run.step}: {evaluation}", "bold")
    notify(run, "evaluation", record)
    return evaluation


def evaluate_state(run: Run, state: TrainState, max_tokens: int) -> Evaluation | None:
    """Evaluate a state on ``max_tokens`` tokens, or on prompts; 0 means all, None that a stop came.

    With rewards, what the checkpoints are compared by is minus the mean reward.
    """
    if not isinstance(run.batches, Rollouts):
        assert not isinstance(run.data, PromptDataset)
        stopping = functools.partial(is_stopping, run)
        return evaluate(run.training, run.data, run.config, state, max_tokens, stopping)
    if is_stopping(run):
        return None
    num_prompts = run.config.training.grpo.eval_prompts if max_tokens else 0
    figures, samples = run.batches.evaluate(state, num_prompts)
    if max_tokens:
        for answer in samples[:SHOWN_ANSWERS]:
            prompt = run.data.tokenizer.decode(answer.prompt.ids)
            line = {"prompt": prompt, "text": answer.text, "is_question": True}
            run.tracker.write(run.step, SAMPLES, **line)
    return Evaluation(-figures["reward"], None, None, figures)


def evaluate_best(run: Run) -> Evaluation | None:
    """Evaluate the best checkpoint on all validation data; return None if a stop came first."""
    tracker = run.tracker
    checkpoints = run.checkpoints
    tracker.show(run.step, "saving")
    checkpoints.wait()
    tracker.show(run.step, "evaluating")
    best_step = checkpoints.best_step()
    state = run.state
    if not (run.stop_signal or best_step in (None, run.step)):
        state, _ = restore_state(checkpoints, run.training, best_step, state.base)
    final = evaluate_state(run, state, 0)
    if final is not None:
        tracker.write(run.step, best_step=best_step, final=dataclasses.asdict(final))
        gzip_bits = run.data.facts().get(GZIP)
        gzip = f"; gzip -9 needs {gzip_bits}" if gzip_bits else ""
        tracker.say(
            f"Best checkpoint (step {best_step}) on all validation data: {final}{gzip}.",
            "bold",
        )
    return final


def save(run: Run, evaluation: Evaluation | None) -> None:
    """Begin to save a checkpoint."""
    tracker = run.tracker
    tracker.show(run.step, "saving")
    run.done[CHECKPOINTS] = run.step
    meta = {
        "batches": run.batches.get_state(),
        "corpus": run.data.fingerprint,
        "seconds": tracker.seconds(),
        **run.origin_meta,
    }
    loss = evaluation.validation_loss if evaluation else None
    run.receipt["weights"][str(run.step)] = describe_weights(run.training.weights(run.state))
    write_receipt(run.tracker.folder, run.receipt)
    save_state(run.checkpoints, run.training, run.step, run.state, meta, loss)
    notify(run, "save", {})


def sample(run: Run) -> None:
    """Let the model continue the sample prompt or answer the questions; show and log the texts.

    In a run on chats they go through the template; if there are none, the first question of the
    validation data is asked.
    """
    options = run.config.training
    model = current_model(run)
    texts: list[str] = options.questions or [options.sample_prompt]
    separator = ""
    if options.questions:
        separator = " "
        sampling = SamplingParams(temperature=0.0)
    else:
        key = jax.random.fold_in(run.state.key, run.state.step)
        key = jax.random.fold_in(key, run.config.sampling.seed)
        sampling = dataclasses.replace(run.config.sampling, seed=int(jax.random.bits(key)))

    # Chats are prompted with ids.
    prompts: list[Any] = texts
    max_new_tokens = options.sample_tokens or 0
    if isinstance(run.data, ChatDataset):
        if not any(texts):
            prompts = [run.data.first_question()]
            texts = [model.text_tokenizer.decode(prompts[0])]
        elif model.chat_template:
            prompts = [
                message_ids(
                    model.text_tokenizer,
                    model.chat_template,
                    [{"role": "user", "content": text}],
                    True,
                )
                for text in texts
            ]
        if prompts is not texts:
            longest = max(map(len, prompts))
            max_new_tokens = min(max_new_tokens, model.config.max_seq_len - longest)
    completions = generate(model, prompts, sampling, max_new_tokens=max_new_tokens)
    for text, completion in zip(texts, completions, strict=True):
        run.tracker.write(run.step, SAMPLES, prompt=text, text=completion.text)
        run.tracker.say(f"{text}{separator}{completion.text}\n", "dim")


def current_model(run: Run) -> LanguageModel:
    """Return the current model, with its tokenizer and chat template."""
    tokenizer = run.data.tokenizer
    template = None
    stop_ids = ()
    if run.origin:
        template, stop_ids = chat_format(tokenizer, run.origin.chat_template, run.origin.stop_ids)
    weights = run.training.model_weights(run.state)
    return LanguageModel(run.config.model, weights, tokenizer, template, stop_ids)


def copy_current_model(run: Run) -> LanguageModel:
    """Return the current model with arrays of its own, as the next step donates the state's."""
    model = current_model(run)
    return dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))


def notify(run: Run, name: str, figures: Mapping[str, Any]) -> None:
    """Call the callbacks with an event."""
    run.tracker.notify(Event(name, run.step, figures, functools.partial(copy_current_model, run)))


def raise_failure(
    run: Run,
    problem: str,
    advice: str = "try a lower optimizer.learning_rate or optimizer.clip_norm",
) -> NoReturn:
    """End the run with an error that names the last good checkpoint."""
    run.checkpoints.wait()
    steps = run.checkpoints.steps()
    last = "no checkpoint had been saved yet"
    if steps:
        last = f"the last good checkpoint is of step {steps[-1]}"
    raise JllamaError(f"{problem}; {last}: {advice}")
