"""``train``: open a run, take its steps, and evaluate the best checkpoint."""

import dataclasses
import functools
from collections.abc import Sequence

from jllama.data.datasets import GZIP, BatchSource
from jllama.parallel import distributed
from jllama.parallel.stopping import agree_to_stop
from jllama.system.errors import shell_command
from jllama.system.places import name_of
from jllama.system.progress import progress
from jllama.system.stop import Stopped, stop_signals
from jllama.training.checkpointing import restore_state
from jllama.training.config import TrainConfig
from jllama.training.events import Callback
from jllama.training.loop import Run, take_steps
from jllama.training.metrics import Evaluation
from jllama.training.mirror import mirrored, working_folder
from jllama.training.opening import open_run
from jllama.training.report import REPORT, words_to_use


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
    find_folder = functools.partial(working_folder, config.run_dir)
    with (
        distributed.connect_processes(config.distributed, find_folder) as folder,
        mirrored(folder, config.run_dir),
    ):
        resume = config.resume
        if resume not in ("never", "auto"):
            resume = str(folder)
        config = dataclasses.replace(config, run_dir=str(folder), resume=resume)
        run = open_run(config, data, callbacks)
        if isinstance(run, Evaluation):  # the run is finished
            return run
        plan = run.plan
        tracker = run.tracker
        num_steps = plan.options.steps
        final = None
        try:
            with (
                stop_signals(lambda: f"finishing step {run.step + 1:,} and saving") as signals,
                agree_to_stop(signals, plan.options.log_every) as run.stopping,
                progress("", num_steps, console=tracker.console) as tracker.move,
            ):
                take_steps(run)
                final = evaluate_best(run)
        finally:
            run.source.close()
            tracker.trace.close()
            tracker.report(0)  # also of a run that was stopped or has failed
        if final is None:
            raise Stopped(
                f"stopped at step {run.step:,} of {num_steps:,}; saved. Go on: {how_to_go_on(run)}",
                run.stopping.signal,
            )
        name = name_of(plan.folder)
        words = words_to_use(name, plan.data.is_chat, plan.options.sample_prompt)
        tracker.say(
            f"{tracker.seconds():.0f} s in all. Read {name}/{REPORT}, "
            f"or {words[0]}: {shell_command(*words)}"
        )
        return final


def how_to_go_on(run: Run) -> str:
    """Return the command that goes on with a run; rewards in Python are named again."""
    reward = run.plan.config.reward
    words = ["--reward", reward] if reward else []
    return shell_command("train", "--resume", name_of(run.plan.folder), *words)


def evaluate_best(run: Run) -> Evaluation | None:
    """Evaluate the best checkpoint on all validation data; return None if a stop came first."""
    tracker = run.tracker
    tracker.show(run.step, "saving")
    checkpoints = run.keeper.checkpoints
    checkpoints.wait()
    tracker.show(run.step, "evaluating")
    best_step = checkpoints.best_step()
    state = run.state
    if not (run.stopping.signal or best_step in (None, run.step)):
        state, _ = restore_state(checkpoints, run.training, best_step, state.base)
    final = run.source.evaluate(state, 0, run.stopping.ask)
    if final is not None:
        tracker.write(run.step, best_step=best_step, final=dataclasses.asdict(final))
        gzip_bits = run.plan.data.facts().get(GZIP)
        gzip = f"; gzip -9 needs {gzip_bits}" if gzip_bits else ""
        tracker.say(
            f"Best checkpoint (step {best_step}) on all validation data: {final}{gzip}.",
            "bold",
        )
    return final
