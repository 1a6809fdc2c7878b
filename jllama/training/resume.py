"""Going on with a run: which options may change, which only if asked, and which never."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from jllama.checkpoints.native import read_config
from jllama.errors import JllamaError, UsageError
from jllama.training.config import OptimizerConfig, TrainConfig
from jllama.training.optimizer import learning_rate_at
from jllama.training.run_folder import as_written

_FREE = {  # what is seen, what is kept, where it is computed; of data the fingerprint speaks, which checkpoints hold
    *("mesh", "sampling", "data", "training.accumulation", "training.remat", "training.log_every"),
    *("training.keep_last", "training.save_every", "training.eval_every", "training.eval_tokens"),
    *("training.sample_prompt", "training.sample_tokens"),
}
_UNSEEN = {"run_dir", "resume", "resume_with_changes", "training.epochs"}  # epochs are resolved to steps
_FIXED = {
    *("model", "init_from", "rope_factor", "seed", "training.batch_size", "training.seq_len"),
    *("data.tokenizer", "data.vocab_size"),
}


def changes_on_resume(folder: Path, config: TrainConfig, step: int) -> list[str]:
    """How a resolved configuration differs from that of the run that it goes on with, in words.

    Raises:
        JllamaError: a run at ``step`` cannot go on with such a change, or not without ``resume_with_changes``.
    """
    now = _flat(as_written(config))
    was = now | _flat(read_config(folder))
    changed = [name for name in now if was[name] != now[name] and name not in _UNSEEN]
    told = {name: f"{name} was {was[name]} and is {now[name]}" for name in changed}
    if fixed := [text for name, text in told.items() if _in(name, _FIXED)]:
        raise JllamaError(
            f"{', '.join(fixed)}: {folder} cannot go on so; leave out what has changed, or start a new run with "
            f"another --run_dir"
        )
    asked = [text for name, text in told.items() if not _in(name, _FREE)]
    if any(name == "training.steps" or name.startswith("optimizer.") for name in changed):
        with contextlib.suppress(TypeError, UsageError):  # of a config.yaml edited by hand
            fields = {name.partition(".")[2]: value for name, value in was.items() if name.startswith("optimizer.")}
            old = learning_rate_at(step - 1, OptimizerConfig(**fields), was["training.steps"])
            new = learning_rate_at(step, config.optimizer, config.training.steps)
            asked.append(f"the learning rate was {old:.2e} at step {step:,} and is {new:.2e} at step {step + 1:,}")
    if asked and not config.resume_with_changes:
        raise JllamaError(
            f"{', '.join(asked)}: leave out what has changed, or go on so with --resume_with_changes true, or start a "
            f"new run with another --run_dir"
        )
    return [text for name, text in told.items() if _in(name, _FREE)] + asked


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The options of a configuration by their full names."""
    groups = {name: group for name, group in fields.items() if isinstance(group, dict)}
    options = {f"{name}.{option}": value for name, group in groups.items() for option, value in group.items()}
    return {name: value for name, value in fields.items() if name not in groups} | options


def _in(name: str, group: set[str]) -> bool:
    return name in group or name.partition(".")[0] in group
