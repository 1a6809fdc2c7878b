"""What training writes into the folder of a run, besides the checkpoints, and with what changes a run may go on."""

import contextlib
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from flax.traverse_util import flatten_dict

from jllama import distributed
from jllama.checkpoints.registry import check_target
from jllama.checkpoints.run import CONFIG, METRICS, SAMPLES, read_config
from jllama.config import DistributedConfig
from jllama.errors import JllamaError, UsageError
from jllama.files import append_line, read_lines, remove, write_text_whole
from jllama.training.config import OptimizerConfig, TrainConfig
from jllama.training.optimizer import learning_rate_at

HISTORY, SKIPPED, AUTOTUNING = "config.history.jsonl", "skipped.jsonl", "autotuning"

# How the names of options begin that may, or must not, differ when a run goes on; all others do when that is asked for.
# The fingerprint that checkpoints hold speaks for the data, epochs are resolved to steps.
_IGNORED = r"run_dir|resume|overwrite|yes|distributed|training\.epochs"
_FIXED = r"model|init_from|preset|rope_factor|seed|lora|optimizer\.name|data\.(tokenizer|vocab_size|packing)|"
_FIXED += r"training\.(batch_size|seq_len|spike_factor|trainable|ema)"
_FREE = r"mesh|sampling|logger|data|training\.(accumulation|attention|deterministic|compiler_|remat|log_every|keep_|"
_FREE += r"save_|eval_|sample_|questions|patience|max_skipped)"


def ask_to_overwrite(config: TrainConfig) -> None:
    """Have a run's name typed on the terminal, unless ``config.yes``.

    Raises ``JllamaError`` if the name is not typed, if the folder holds what no run writes, or what is read.
    """
    folder = Path(config.run_dir).resolve()
    check_target(
        folder, [Path(path) for path in (config.init_from, config.data.path) if path], True
    )
    if not config.yes:
        print(
            f"{folder} and its checkpoints will be removed. To go on, type its name, {folder.name}:",
            file=sys.stderr,
        )
        if not sys.stdin.isatty() or sys.stdin.readline().strip() != folder.name:
            raise UsageError(
                f"{folder} stays as it is: its name must be typed on a terminal, or --yes be given"
            )


def clear(folder: Path) -> None:
    """Remove all that a run's folder holds but its locks, in process 0; the others wait for it."""
    if distributed.process_index() == 0:
        for path in folder.iterdir():
            if not path.name.startswith("in_use"):
                remove(path)
    distributed.largest(0)


def write_config(folder: Path, config: TrainConfig, step: int) -> None:
    """Write a run's resolved configuration, what it replaces to the history; drop what was logged after ``step``."""
    fields = as_written(config)
    if step and (before := read_config(folder).fields) != fields:
        append_line(folder / HISTORY, {"until_step": step, "config": before})
    write_text_whole(folder / CONFIG, yaml.safe_dump(fields, sort_keys=False))
    for name in (METRICS, SAMPLES, *([SKIPPED] if (folder / SKIPPED).exists() else [])):
        kept = [
            line
            for line in read_lines(folder / name)
            if line["step"] <= step and "final" not in line
        ]
        write_text_whole(folder / name, "".join(json.dumps(line) + "\n" for line in kept))


def out_of_patience(folder: Path, patience: int) -> bool:
    """Whether the validation loss that a run has logged was not lower in its last ``patience`` evaluations, if any."""
    losses = (
        [line["validation_loss"] for line in read_lines(folder / METRICS, "validation_loss")]
        if patience
        else []
    )
    return 0 < patience < len(losses) - min(range(len(losses)), key=losses.__getitem__, default=0)


def as_written(config: TrainConfig) -> dict[str, Any]:
    """A configuration as ``config.yaml`` has it: enough to start the same run again."""
    asked: Any = dict.fromkeys(["resume_with_changes", "overwrite", "yes"], False)
    plain = dataclasses.replace(config, resume="never", distributed=DistributedConfig(), **asked)
    return yaml.safe_load(yaml.safe_dump(dataclasses.asdict(plain), sort_keys=False))


def changes_on_resume(folder: Path, config: TrainConfig, step: int) -> list[str]:
    """How a configuration differs from that of the run it goes on with, in words; JllamaError if it may not so."""
    flat = functools.partial(flatten_dict, is_leaf=lambda path, _: len(path) == 2, sep=".")
    now, before = flat(as_written(config)), read_config(folder).fields
    was = now | flat(before)
    changed = [name for name in now if was[name] != now[name] and not re.match(_IGNORED, name)]
    told = {name: f"{name} was {was[name]} and is {now[name]}" for name in changed}
    fixed = [text for name, text in told.items() if re.match(_FIXED, name)]
    free = [text for name, text in told.items() if re.match(_FREE, name)]
    asked = [text for text in told.values() if text not in free]
    if any(re.match(r"training\.steps|optimizer", name) for name in told):
        with contextlib.suppress(
            KeyError, TypeError, UsageError
        ):  # of a config.yaml edited by hand
            old = learning_rate_at(
                step - 1, OptimizerConfig(**before["optimizer"]), before["training"]["steps"]
            )
            new = learning_rate_at(step, config.optimizer, config.training.steps)
            asked.append(
                f"the learning rate was {old:.2e} at step {step:,} and is {new:.2e} at step {step + 1:,}"
            )
    if refused := fixed or ([] if config.resume_with_changes else asked):
        leave = "leave out what has changed," + (
            " or go on so with resume_with_changes," if not fixed else ""
        )
        raise JllamaError(f"{', '.join(refused)}: {leave} or start a new run with another run_dir")
    return free + asked
