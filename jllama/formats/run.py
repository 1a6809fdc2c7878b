"""jllama's own format: the folder of a run.

``config.yaml`` has the architecture under ``model``, ``checkpoints`` has the saved steps
(``run_checkpoints``), and ``tokenizer.*`` the tokenizer. A converted model is a run of step 0.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from flax.traverse_util import flatten_dict

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.model import abstract_params
from jllama.formats.adapters import Adapter, unstacked
from jllama.formats.chat_files import read_text_files, write_chat_files
from jllama.formats.tensors import Checkpoint, OnProgress, TensorsOfParams, load_params
from jllama.models.config import LoraConfig
from jllama.models.lora import initial_adapter
from jllama.system.files import (
    CHECKPOINTS,
    CONFIG,
    atomic_write_text,
    errors_as,
    refuse_special_files,
)


class RunConfig(NamedTuple):
    """The content of a run's ``config.yaml``."""

    fields: dict[str, Any]  # all of it
    model: LlamaConfig
    lora: LoraConfig  # of rank 0 if the run trains all weights


def recognizes(path: Path) -> bool:
    """Return whether a path is the folder of a run."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> RunConfig:
    """Read a run's ``config.yaml``.

    Raises:
        JllamaError: It cannot be read, or does not describe a model.
    """
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
    with errors_as(f"{path} does not describe a model", *errors):
        fields = {**yaml.safe_load(path.read_bytes())}
        # This raises ValueError if a number is too long to be printed.
        model = LlamaConfig(**{**fields["model"]})
        lora: Any = fields.get("lora", {})
        targets = tuple(lora.get("targets", LoraConfig.targets))  # YAML has lists
        return RunConfig(fields, model, LoraConfig(**lora | {"targets": targets}))


def base_of(path: Path) -> tuple[str, float | None] | None:
    """Return the base of the adapter that a run trained, with its RoPE factor; None for a model.

    Raises:
        JllamaError: The run does not name its base.
    """
    fields, _, lora = read_config(path)
    if not lora.rank:
        return None
    with errors_as(f"{path} has adapters of its init_from", KeyError):
        return str(fields["init_from"]), fields.get("rope_factor")


def read(path: Path, step: int | None = None) -> Checkpoint:
    """Open a checkpoint of a run: that of ``step``, or (None) of the lowest validation loss."""
    config = read_config(path).model
    checkpoints, step = _open_step(path, step)
    tensors = checkpoints.tensors(step, config)
    return Checkpoint(config, tensors, *read_text_files(path), step=step)


def read_adapter(path: Path, config: LlamaConfig, step: int | None = None) -> Adapter:
    """Read the adapter that a run trained on a base with the architecture ``config``.

    ``step`` is as in ``read``.
    """
    fields, _, lora = read_config(path)
    if not lora.rank:
        raise JllamaError(
            f"{path} is a run that trained no adapter: give it as the checkpoint itself"
        )
    checkpoints, step = _open_step(path, step)
    with errors_as(path / CONFIG):
        shapes = jax.eval_shape(
            lambda p: initial_adapter(jax.random.key(0), p, config, lora), abstract_params(config)
        )
    params, _, meta = checkpoints.restore(step, shapes, None)
    tensors = {}
    for name, leaf in flatten_dict(params["layers"], sep="/").items():
        tensors |= unstacked(name, np.asarray(leaf), config)
    base = str(fields.get("init_from", ""))
    fingerprint = str(meta.get("base_fingerprint") or "")
    return Adapter(lora, tensors, config, path, base, fingerprint, step)


def _open_step(path: Path, step: int | None) -> tuple[Any, int]:
    """Open the checkpoints of a run and choose a step, as ``read`` does."""
    # Not at the top: importing orbax takes half a second.
    from jllama.formats.run_checkpoints import RunCheckpoints

    if not (path / CHECKPOINTS).is_dir():
        raise JllamaError(f"{path} holds no checkpoint yet: it has no {CHECKPOINTS} folder")
    checkpoints = RunCheckpoints(path / CHECKPOINTS, read_only=True)
    steps = checkpoints.steps()
    if not steps:
        raise JllamaError(f"{path / CHECKPOINTS} holds no finished checkpoint")
    chosen = checkpoints.best_step() if step is None else step
    if chosen not in steps:
        raise JllamaError(
            f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}"
        )
    return checkpoints, chosen


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype | None, on_progress: OnProgress
) -> None:
    """Write a model as a run of step 0 into a folder, to sample from it or to train it further."""
    from jllama.formats.run_checkpoints import RunCheckpoints

    # Parameters in the training layout are saved as they are, unless their dtype changes.
    tensors = checkpoint.tensors
    params = tensors.params if isinstance(tensors, TensorsOfParams) else None
    if not isinstance(params, dict) or any(
        leaf.dtype != (dtype or leaf.dtype) for leaf in jax.tree.leaves(params)
    ):
        params = load_params(
            checkpoint, dtype, on_progress=lambda num_bytes: on_progress(num_bytes // 2)
        )
    fields = {"model": dataclasses.asdict(checkpoint.config)}
    atomic_write_text(target / CONFIG, yaml.safe_dump(fields, sort_keys=False))
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(target)
    write_chat_files(target, checkpoint.chat_template, checkpoint.stop_ids)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    checkpoints = RunCheckpoints(target / CHECKPOINTS, copied_gb=1 + largest // 10**9)
    checkpoints.save(0, params, None, {}, None)
    checkpoints.wait()
