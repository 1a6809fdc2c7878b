"""The folder of a run: what is in it, and how to find one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jllama.checkpoints.native import Checkpoints
from jllama.config import LlamaConfig, RopeScaling
from jllama.errors import JllamaError
from jllama.model import abstract_params
from jllama.parameters import Params
from jllama.tokenizers import Tokenizer, load_tokenizer
from jllama.training.config import TrainConfig

CONFIG, METRICS, SAMPLES, REPORT, CHECKPOINTS = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "report.html",
    "checkpoints",
)


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write the resolved configuration: enough to start the same run again."""
    (folder / CONFIG).write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def read_model_config(path: str | Path) -> LlamaConfig:
    """The architecture that a run was trained with.

    Raises:
        JllamaError: the configuration is missing or cannot be read.
    """
    folder = Path(path)
    try:
        fields = yaml.safe_load((folder / CONFIG).read_text())["model"]
        if fields["rope_scaling"]:
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        return LlamaConfig(**fields)
    except FileNotFoundError as error:
        raise JllamaError(f"{folder} is not a run: it has no {CONFIG}") from error
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise JllamaError(f"{folder / CONFIG} does not describe a model: {reason}") from error


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
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    partial.replace(path)


def load_run(path: str, step: int | None = None) -> tuple[LlamaConfig, Params, Tokenizer, int]:
    """A trained model: its architecture, parameters (stacked), tokenizer, and the step they are from.

    Args:
        path: the run's folder.
        step: which checkpoint; None takes the one with the lowest validation loss.

    Raises:
        JllamaError: there is no run or no such checkpoint there, or it is of another model.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise JllamaError(f"there is no folder {path}: give the folder of a run, such as runs/quickstart")
    if not (folder / CONFIG).is_file():
        parents = [parent for parent in folder.resolve().parents[:2] if (parent / CONFIG).is_file()]
        if parents:
            raise JllamaError(f"{path} lies inside a run: give the run's folder itself, {parents[0]}")
        raise JllamaError(f"{path} is not a run: it has no {CONFIG}; give the folder that training made")
    if not (folder / CHECKPOINTS).is_dir():
        raise JllamaError(f"{path} holds no checkpoint yet: it has no {CHECKPOINTS} folder")
    config = read_model_config(folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS, read_only=True)
    steps = checkpoints.steps()
    if not steps:
        raise JllamaError(f"{folder / CHECKPOINTS} holds no finished checkpoint")
    if step is not None and step not in steps:
        raise JllamaError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    chosen = checkpoints.best_step() if step is None else step
    assert chosen is not None  # there are steps
    params = checkpoints.restore_params(chosen, abstract_params(config))
    return config, params, load_tokenizer(folder), chosen
