"""jllama's own format: the folder of a run.

``config.yaml`` holds the architecture under ``model``, ``checkpoints`` the saved steps (``run_checkpoints``), and
``tokenizer.*`` stands beside them. A converted model is a run of step 0.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from flax.traverse_util import flatten_dict

from jllama.checkpoints.adapters import Adapter
from jllama.checkpoints.huggingface import read_text_files, write_chat_files
from jllama.checkpoints.tensors import Checkpoint, OnProgress, TensorsOfParams, load_params
from jllama.config import LlamaConfig, LoraConfig
from jllama.errors import JllamaError
from jllama.files import fault_of, refuse_special_files, write_text_whole
from jllama.lora import initial_adapter
from jllama.model import abstract_params

CONFIG, CHECKPOINTS, METRICS, SAMPLES = (
    "config.yaml",
    "checkpoints",
    "metrics.jsonl",
    "samples.jsonl",
)


class RunConfig(NamedTuple):
    """What a run's ``config.yaml`` holds: all of it as it stands there, and of that what describes the model."""

    fields: dict[str, Any]
    model: LlamaConfig
    lora: LoraConfig  # of rank 0 if the run trains everything


def recognizes(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> RunConfig:
    """Read a run's ``config.yaml``. If it cannot be read, or describes no model, that is a JllamaError."""
    path = folder / CONFIG
    refuse_special_files(path)
    errors = (
        OSError,
        yaml.YAMLError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    )
    with fault_of(f"{path} does not describe a model", *errors):
        fields = {**yaml.safe_load(path.read_text(encoding="utf-8"))}
        model = LlamaConfig(**{**fields["model"]})  # ValueError: a number is too long to be printed
        lora: Any = fields.get("lora", {})
        targets = tuple(lora.get("targets", LoraConfig.targets))  # YAML has lists
        return RunConfig(fields, model, LoraConfig(**lora | {"targets": targets}))


def read(path: Path, step: int | None = None) -> Checkpoint:
    """Open a checkpoint of a run: of the given step, or that of the lowest validation loss."""
    config = read_config(path).model
    checkpoints, chosen = _opened(path, step)
    return Checkpoint(
        config, checkpoints.tensors(chosen, config), *read_text_files(path), step=chosen
    )


def read_adapter(path: Path, config: LlamaConfig, step: int | None = None) -> Adapter:
    """The adapter that a run has trained of a base with this architecture; the step is chosen as ``read`` does."""
    fields, _, lora = read_config(path)
    if not lora.rank:
        raise JllamaError(
            f"{path} is a run that trained no adapter: give it as the checkpoint itself"
        )
    checkpoints, chosen = _opened(path, step)
    with fault_of(path / CONFIG):
        shapes = jax.eval_shape(
            lambda p: initial_adapter(jax.random.key(0), p, config, lora), abstract_params(config)
        )
    params, _, meta = checkpoints.restore(chosen, shapes, None)
    leaves = {
        name: np.asarray(leaf) for name, leaf in flatten_dict(params["layers"], sep="/").items()
    }
    tensors = {
        f"layers/{n}/{name}": stack[n].T
        for name, stack in leaves.items()
        for n in range(config.num_layers)
    }
    fingerprint = str(meta.get("base_fingerprint") or "")
    return Adapter(
        lora, tensors, config, path, str(fields.get("init_from", "")), fingerprint, chosen
    )


def _opened(path: Path, step: int | None) -> tuple[Any, int]:
    from jllama.checkpoints.run_checkpoints import (
        RunCheckpoints,
    )  # not at the top: orbax takes half a second

    if not (path / CHECKPOINTS).is_dir():
        raise JllamaError(f"{path} holds no checkpoint yet: it has no {CHECKPOINTS} folder")
    checkpoints = RunCheckpoints(path / CHECKPOINTS, read_only=True)
    if not (steps := checkpoints.steps()):
        raise JllamaError(f"{path / CHECKPOINTS} holds no finished checkpoint")
    chosen = checkpoints.best_step() if step is None else step
    if chosen not in steps:
        raise JllamaError(
            f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}"
        )
    return checkpoints, chosen


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype[Any] | None, on_progress: OnProgress
) -> None:
    """Write a model as a run of step 0 into a folder: enough to sample from it and to train it on."""
    from jllama.checkpoints.run_checkpoints import RunCheckpoints

    held = checkpoint.tensors
    params = (
        held.params if isinstance(held, TensorsOfParams) else None
    )  # in this layout they are saved as they are
    if not isinstance(params, dict) or any(
        leaf.dtype != (dtype or leaf.dtype) for leaf in jax.tree.leaves(params)
    ):
        params = load_params(
            checkpoint, dtype, on_progress=lambda num_bytes: on_progress(num_bytes // 2)
        )
    write_text_whole(
        target / CONFIG,
        yaml.safe_dump({"model": dataclasses.asdict(checkpoint.config)}, sort_keys=False),
    )
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(target)
    write_chat_files(target, checkpoint.chat_template, checkpoint.stop_ids)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    checkpoints = RunCheckpoints(target / CHECKPOINTS, copied_gb=1 + largest // 10**9)
    checkpoints.save(0, params, None, {}, None)
    checkpoints.wait()
