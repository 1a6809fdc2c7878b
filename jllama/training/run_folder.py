"""What training writes into the folder of a run, besides the checkpoints (``jllama.checkpoints.native``)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jllama.checkpoints.native import CONFIG
from jllama.files import write_text_whole
from jllama.training.config import TrainConfig

METRICS, SAMPLES, REPORT = "metrics.jsonl", "samples.jsonl", "report.html"


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write the resolved configuration: enough to start the same run again."""
    (folder / CONFIG).write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


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
