"""jllama's own format: the folder of a run, and the checkpoints in it. The one place that knows orbax.

``config.yaml`` holds the architecture under ``model``; ``tokenizer.*`` stands beside it; ``checkpoints`` holds one
folder a saved step. Each of these is whole or absent: orbax writes it beside and renames it at the end, and one that is
no longer wanted is renamed before it is deleted, so a process may be killed at any moment. A converted model is a run
of step 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
import yaml
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers

from jllama.checkpoints.huggingface import read_text_files, write_chat_files
from jllama.checkpoints.tensors import Checkpoint, OnProgress, TensorsOfParams, aligned_empty, load_params
from jllama.config import LlamaConfig, RopeScaling
from jllama.errors import JllamaError, UsageError
from jllama.files import check_orbax_files, files_below, refuse_special_files, write_text_whole
from jllama.model import abstract_params
from jllama.parameters import Params
from jllama.sharding import state_sharding

_CHUNK_BYTES = 64 << 20  # a chunk is always read whole
_CHUNKED = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
_BY_LAYER = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,))
CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
_UNWANTED = "unwanted"  # where checkpoints wait to be deleted: half of one must not be taken for a whole one


class RunCheckpoints:
    """The checkpoints of one run. Saving goes on in the background; its errors surface at the next call.

    Args:
        folder: where they are, or will be.
        keep_last: how many of the latest to keep, besides the best by validation loss.
        read_only: never write or clean up.
    """

    def __init__(self, folder: Path, keep_last: int = 1, *, read_only: bool = False) -> None:
        self.folder = folder.resolve()
        if not read_only:
            self._sweep()
        arrays = ocp.PyTreeCheckpointHandler
        handlers: dict[str, Any] = {name: arrays(use_compression=False) for name in ("params", "state")}
        handlers["meta"] = ocp.JsonCheckpointHandler()
        latest = checkpoint_managers.LatestN(keep_last)
        best = checkpoint_managers.BestN(
            get_metric_fn=_validation_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            best_fn=_validation_loss,
            best_mode="min",
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, best]),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
            todelete_subdir=None if read_only else _UNWANTED,
            save_interval_steps=0 if read_only else 1,
        )
        with self._reading(self.folder):
            refuse_special_files(*files_below(self.folder))
            self._manager = ocp.CheckpointManager(self.folder, item_handlers=handlers, options=options)

    def steps(self) -> list[int]:
        """The steps that are saved whole, oldest first."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The saved step with the lowest validation loss; the last one if none was evaluated."""
        with self._reading(self.folder):
            best = self._manager.best_step()
            return self._manager.latest_step() if best is None else best

    def save(self, step: int, params: Params, state: Any, meta: dict[str, Any], validation_loss: float | None) -> None:
        """Begin to save; the arrays are copied first, so they may be donated as soon as this returns.

        ``state`` is the rest of what training needs; None for a model that is not being trained.

        Raises:
            JllamaError: this or the save before failed, a full disk for instance; earlier checkpoints stay.
        """
        self.wait()
        chunks = jax.tree.map(lambda _: _CHUNKED, params)
        chunks["layers"] = jax.tree.map(lambda _: _BY_LAYER, params["layers"])
        items = {"params": ocp.args.PyTreeSave(params, chunks), "meta": ocp.args.JsonSave(meta)}
        if state is not None:
            items["state"] = ocp.args.PyTreeSave(state)
        metrics = None if validation_loss is None else {"validation_loss": validation_loss}
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)
        except Exception as error:
            raise self._save_error(error) from error

    def wait(self) -> None:
        """Wait until everything begun is on disk. Raises ``JllamaError`` if it could not be written."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error
        self._sweep()

    def _sweep(self) -> None:
        shutil.rmtree(self.folder / _UNWANTED, ignore_errors=True)

    def restore(self, step: int, params: Params, state: Any) -> tuple[Params, Any, dict[str, Any]]:
        """The saved parameters, training state and metadata of a step, placed as the given shapes say.

        Raises:
            JllamaError: the files are damaged, or the arrays are not the ones expected; the message lists what differs.
        """
        with self._reading(self.folder / str(step)):
            self._check(step, "params", params)
            self._check(step, "state", state)
            args = ocp.args.Composite(
                params=_restore_args(params), state=_restore_args(state), meta=ocp.args.JsonRestore()
            )
            restored = self._manager.restore(step, args=args)
        return restored["params"], restored["state"], restored["meta"]

    def restore_params(
        self,
        step: int,
        config: LlamaConfig,
        dtype: np.dtype[Any] | type | None = None,
        mesh: Mesh | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> Params:
        """The saved parameters alone, in ``dtype`` or (None) as saved, split over ``mesh`` or on the first device.

        They are read some layers at a time, each device's slice straight into its place: orbax itself would hold
        every array twice. ``on_progress`` is told of the bytes. Raises as ``restore`` does, but for dtypes;
        ``UsageError`` if they do not fit the mesh.
        """
        shapes = abstract_params(config)
        first = SingleDeviceSharding(jax.devices()[0])
        shardings = state_sharding(mesh, config, shapes) if mesh else jax.tree.map(lambda _: first, shapes)
        with self._reading(self.folder / str(step)):
            self._check(step, "params", shapes, dtypes=False)
            folder = self.folder / str(step) / "params"
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf, sharding: _read_array(folder, path, leaf.shape, dtype, sharding, on_progress),
                shapes,
                shardings,
            )

    @contextlib.contextmanager
    def _reading(self, what: Path) -> Iterator[None]:
        try:
            yield
        except JllamaError:
            raise
        except Exception as error:
            raise JllamaError(
                f"the checkpoint {what} cannot be read ({_reason(error)}): "
                f"put it back from a copy, or delete it to go on from an earlier one"
            ) from error

    def _check(self, step: int, item: str, expected: Any, *, dtypes: bool = True) -> None:
        check_orbax_files(self.folder / str(step))
        found, wanted = (
            _shapes(tree, dtypes=dtypes) for tree in (self._manager.item_metadata(step)[item].tree, expected)
        )
        differences = [
            f"{path} is {found.get(path, 'absent')} in the checkpoint but {wanted.get(path, 'absent')} in this model"
            for path in sorted(found.keys() | wanted.keys())
            if found.get(path) != wanted.get(path)
        ]
        if differences:
            raise JllamaError(f"the checkpoint {self.folder / str(step)} is of another model: {'; '.join(differences)}")

    def _save_error(self, error: Exception) -> JllamaError:
        kept = self.steps()
        last = f"the last good checkpoint is step {kept[-1]}" if kept else "there is no earlier checkpoint"
        return JllamaError(f"could not save a checkpoint in {self.folder} ({_reason(error)}); {last}")


def _restore_args(shapes: Any) -> Any:
    return ocp.args.PyTreeRestore(shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes))


def _read_array(
    folder: Path, path: tuple[Any, ...], shape: tuple[int, ...], dtype: Any, sharding: Sharding, on_progress: OnProgress
) -> jax.Array:
    """One array of an item that orbax wrote: in tensorstore's zarr format, by its path with dots, in an OCDBT store."""
    name = ".".join(key.key for key in path)
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    store: Any = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result()
    own = np.dtype(dtype or store.dtype.numpy_dtype)
    step = store.chunk_layout.read_chunk.shape[0]

    def read(index: Any) -> np.ndarray:
        bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        first, last, _ = bounds[0]
        out = aligned_empty(tuple(stop - start for start, stop, _ in bounds), own)
        for start in range(first, last, step):
            stop = min(start + step, last)
            out[start - first : stop - first] = store[(slice(start, stop), *index[1:])].read().result()
            on_progress(out[start - first : stop - first].nbytes)
        return out

    return jax.make_array_from_callback(shape, sharding, read)


def _reason(error: Exception) -> str:
    """An error of orbax or tensorstore in a few words; the latter tells the whole way there before the reason."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    system = re.search(r": ([^:]+) \[(?:os_error_code|tensorstore_spec)", reason)
    return system[1] if system else reason


def _validation_loss(metrics: dict[str, float]) -> float:
    return metrics["validation_loss"]


def _shapes(tree: Any, *, dtypes: bool = True) -> dict[str, str]:
    """``path -> dtype[shape]`` of every leaf, with tuples and named tuples told apart by position or name alone."""

    def name(key: Any) -> str:
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        "/".join(map(name, path)): f"{leaf.dtype if dtypes else ''}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


def recognizes(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """What a run's ``config.yaml`` holds.

    Raises:
        JllamaError: it cannot be read, or is no mapping.
    """
    try:
        refuse_special_files(folder / CONFIG)
        fields = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        return {**fields}
    except (OSError, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise _bad_config(folder, error) from error


def read_model_config(folder: Path) -> LlamaConfig:
    """The architecture that a run was trained with.

    Raises:
        JllamaError: the configuration cannot be read.
    """
    try:
        fields = {**read_config(folder)["model"]}
        if fields["rope_scaling"]:
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        return LlamaConfig(**fields)
    except (KeyError, TypeError, ValueError, UsageError) as error:  # also numbers too long to be printed
        raise _bad_config(folder, error) from error


def _bad_config(folder: Path, error: Exception) -> JllamaError:
    return JllamaError(f"{folder / CONFIG} does not describe a model: {' '.join(str(error).split())}")


def open_run(folder: Path, step: int | None = None) -> tuple[LlamaConfig, RunCheckpoints, int]:
    """A run's architecture, its checkpoints, and a step: the given one, or that of the lowest validation loss.

    Raises:
        JllamaError: there is no such checkpoint in it, or its configuration cannot be read.
    """
    if not (folder / CHECKPOINTS).is_dir():
        raise JllamaError(f"{folder} holds no checkpoint yet: it has no {CHECKPOINTS} folder")
    config = read_model_config(folder)
    checkpoints = RunCheckpoints(folder / CHECKPOINTS, read_only=True)
    steps = checkpoints.steps()
    if not steps:
        raise JllamaError(f"{folder / CHECKPOINTS} holds no finished checkpoint")
    chosen = checkpoints.best_step() if step is None else step
    if chosen not in steps:
        raise JllamaError(f"{folder} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return config, checkpoints, chosen


def read(path: Path) -> Checkpoint:
    """The best checkpoint of a run; its parameters are read into memory when the first one is asked for."""
    config, checkpoints, step = open_run(path)
    tensors = TensorsOfParams(config, lambda: checkpoints.restore_params(step, config))
    return Checkpoint(config, tensors, *read_text_files(path))


def write(checkpoint: Checkpoint, target: Path, dtype: np.dtype[Any] | None, on_progress: OnProgress) -> None:
    """Write a model as a run of step 0 into a folder: enough to sample from it and to train it on."""
    params = load_params(
        checkpoint, dtype, on_progress=lambda num_bytes: on_progress(num_bytes // 2)
    )  # then they are saved
    model = dataclasses.asdict(checkpoint.config)
    write_text_whole(target / CONFIG, yaml.safe_dump({"model": model}, sort_keys=False))
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save(target)
    write_chat_files(target, checkpoint.chat_template, checkpoint.stop_ids)
    checkpoints = RunCheckpoints(target / CHECKPOINTS)
    checkpoints.save(0, params, None, {}, None)
    checkpoints.wait()
