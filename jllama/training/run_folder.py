"""What training writes into the folder of a run, besides the checkpoints (``jllama.checkpoints.native``)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

from jllama.checkpoints.native import CONFIG, read_config
from jllama.errors import JllamaError
from jllama.files import write_text_whole
from jllama.training.config import TrainConfig

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

METRICS, SAMPLES, REPORT = "metrics.jsonl", "samples.jsonl", "report.html"
HISTORY = "config.history.jsonl"
_LOCK = "in_use"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder of a run, made if need be, for this process alone; made in vain, it goes again.

    Raises:
        JllamaError: another process has it; the message says which.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    with path.open("a+") as file:
        if not _lock(path, file):
            file.seek(0)
            holder = file.read() or "another process"
            raise JllamaError(f"{folder} is in use by {holder}: wait for it, or choose another --run_dir")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _lock(path: Path, file: TextIO) -> bool:
    """Whether the file is ours now, until this process dies; it is where the system has no such locks, too."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has none
        return True
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))  # or its owner deleted it just now


def command(name: str, *arguments: object) -> str:
    """A command line of jllama's, to be pasted into a shell."""
    return shlex.join(["python", "-m", "jllama", name, *map(str, arguments)])


def as_written(config: TrainConfig) -> dict[str, Any]:
    """A configuration as ``config.yaml`` has it: enough to start the same run again."""
    plain = dataclasses.replace(config, resume="never", resume_with_changes=False)
    return yaml.safe_load(yaml.safe_dump(dataclasses.asdict(plain), sort_keys=False))


def write_config(folder: Path, config: TrainConfig, step: int) -> None:
    """Write the resolved configuration. One that it replaces after a first checkpoint goes to the history."""
    fields = as_written(config)
    before = read_config(folder) if step else fields
    if before != fields:
        append_line(folder / HISTORY, {"until_step": step, "config": before})
    write_text_whole(folder / CONFIG, yaml.safe_dump(fields, sort_keys=False))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one JSON object to a ``.jsonl`` file."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a ``.jsonl`` file; a last line that a killed process left half written is passed over."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of later steps and of the end: a resumed run does them again."""
    kept = [record for record in read_lines(path) if record["step"] <= step and "final" not in record]
    write_text_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
