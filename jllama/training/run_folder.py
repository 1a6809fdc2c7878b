"""The text files of a run's folder, and which options may change when a run is resumed."""

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

from jllama.core import JllamaError, UsageError
from jllama.formats.bucket import known
from jllama.formats.registry import check_target
from jllama.formats.run import read_config
from jllama.parallel import distributed
from jllama.parallel.config import DistributedConfig
from jllama.system.errors import shell_command
from jllama.system.files import (
    CONFIG,
    METRICS,
    SAMPLES,
    SKIPPED,
    append_line,
    atomic_write_text,
    read_lines,
    remove,
)
from jllama.system.places import PLACE, as_place, is_url, name_of
from jllama.system.remote import delete, list_files, overlap
from jllama.training.config import OptimizerConfig, TrainConfig
from jllama.training.optimizer import learning_rate_at

HISTORY = "config.history.jsonl"

# How the names of options begin that are ignored, must stay, or may change when a run is resumed.
# All others may change with ``resume_with_changes``. Fingerprints in checkpoints identify the data,
# and epochs are resolved to steps.
_IGNORED = r"run_dir|resume|overwrite|yes|distributed|training\.(epochs|profile)"
_FIXED = (
    r"model|init_from|preset|rope_factor|seed|lora|optimizer\.name|data\.(tokenizer|vocab_size|packing)"
    r"|training\.(batch_size|seq_len|spike_factor|trainable|ema)"
)
_FREE = (
    r"mesh|sampling|logger|data"
    r"|training\.(accumulation|attention|deterministic|compiler_|remat|log_every|keep_|save_|eval_|sample_"
    r"|questions|patience|max_skipped)"
)


def confirm_overwrite(config: TrainConfig) -> None:
    """Raise unless ``overwrite`` is set, and ``yes`` is or the run's name is typed.

    Raises ``JllamaError`` if the folder holds something that no run writes, or a file that this run
    reads.
    """
    folder = Path(config.run_dir)
    name = name_of(folder)
    if not config.overwrite:
        raise UsageError(
            f"{name} already holds a run: continue it with "
            f"{shell_command('train', '--resume', name)}, or choose another run_dir, "
            "or replace it with --overwrite"
        )
    folder = folder.resolve()
    read = [path for path in (config.init_from, config.data.path) if path]
    if any(overlap(name, path) for path in read):
        raise UsageError(f"{name} has files that this run reads: choose another run_dir")
    check_target(folder, [Path(path) for path in read], True)
    if config.yes:
        return
    print(
        f"{folder} and its checkpoints will be removed. To go on, type its name, {folder.name}:",
        file=sys.stderr,
    )
    if not sys.stdin.isatty() or sys.stdin.readline().strip() != folder.name:
        raise UsageError(
            f"{folder} stays as it is: its name must be typed on a terminal, or --yes be given"
        )


def is_written_here(folder: Path) -> bool:
    """Return whether this process writes a run's files: process 0, or all in their own copies."""
    return distributed.process_index() == 0 or is_url(name_of(folder))


def clear(folder: Path) -> None:
    """Remove everything in a run's folder but its locks; all processes wait for process 0."""
    name = name_of(folder)
    if is_written_here(folder):
        for path in folder.iterdir():
            if not path.name.startswith(("in_use", PLACE)):
                remove(path)
    if distributed.process_index() == 0 and is_url(name):
        place: Any = as_place(name)
        delete(place, known(list_files(place)))
    distributed.max_over_processes(0)


def write_config(folder: Path, config: TrainConfig, step: int) -> None:
    """Write a run's resolved configuration.

    A different one from before goes to the history, and lines that were logged after ``step`` are
    dropped.
    """
    fields = config_fields(config)
    before = read_config(folder).fields if step else fields
    if before != fields:
        append_line(folder / HISTORY, {"until_step": step, "config": before})
    atomic_write_text(folder / CONFIG, yaml.safe_dump(fields, sort_keys=False))
    for name in (METRICS, SAMPLES, SKIPPED):
        path = folder / name
        if name == SKIPPED and not path.exists():
            continue
        lines = [
            json.dumps(line) + "\n"
            for line in read_lines(path)
            if line["step"] <= step and "final" not in line
        ]
        atomic_write_text(path, "".join(lines))


def config_fields(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as ``config.yaml`` has it: enough to start the same run again."""
    plain = dataclasses.replace(
        config,
        run_dir=name_of(config.run_dir),
        resume="never",
        resume_with_changes=False,
        overwrite=False,
        yes=False,
        distributed=DistributedConfig(),
    )
    return json.loads(json.dumps(dataclasses.asdict(plain)))


def changes_on_resume(folder: Path, config: TrainConfig, step: int) -> list[str]:
    """Describe what has changed since the resumed run; ``JllamaError`` if it must not change."""
    flatten = functools.partial(flatten_dict, is_leaf=lambda path, _: len(path) == 2, sep=".")
    fields = flatten(config_fields(config))
    saved = read_config(folder).fields
    before = fields | flatten(saved)
    fixed = []
    free = []
    others = []
    for name, value in fields.items():
        if before[name] == value or re.match(_IGNORED, name):
            continue
        kind = others
        if re.match(_FIXED, name):
            kind = fixed
        elif re.match(_FREE, name):
            kind = free
        kind.append(f"{name} was {before[name]} and is {value}")

    # A change of the learning rate is described in numbers.
    if any(re.match(r"training\.steps|optimizer", change) for change in others):
        # The saved config.yaml may have been edited by hand.
        with contextlib.suppress(KeyError, TypeError, UsageError):
            saved_optimizer = OptimizerConfig(**saved["optimizer"])
            old = learning_rate_at(step - 1, saved_optimizer, saved["training"]["steps"])
            new = learning_rate_at(step, config.optimizer, config.training.steps)
            others.append(
                f"the learning rate was {old:.2e} at step {step:,} "
                f"and is {new:.2e} at step {step + 1:,}"
            )
    if fixed or (others and not config.resume_with_changes):
        go_on = "" if fixed else " or go on so with resume_with_changes,"
        raise JllamaError(
            f"{', '.join(fixed or others)}: leave out what has changed,{go_on} "
            "or start a new run with another run_dir"
        )
    return free + others
