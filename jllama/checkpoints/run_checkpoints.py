"""The checkpoints of a run: one folder a saved step. The one place that knows orbax.

Each folder is whole or absent: orbax writes it beside and renames it at the end, and one that is no longer needed is
renamed before it is deleted, so a process may be killed at any moment.
"""

import contextlib
import math
import operator
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import checkpoint_managers

from jllama.checkpoints.tensors import FileTensor, LazyTensor, differences
from jllama.config import LlamaConfig
from jllama.distributed import process_index
from jllama.errors import JllamaError
from jllama.files import Json, read_json_object, refuse_special_files
from jllama.model import abstract_params
from jllama.parameters import Params, TensorSpec, as_matrix, parameter_table, tensor_specs

_CHUNK_BYTES = 64 << 20  # a chunk is always read whole
_CHUNKED = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
_BY_LAYER = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,))
_UNWANTED = "unwanted"  # where checkpoints wait to be deleted: half of one must not be taken for a whole one


class RunCheckpoints:
    """The checkpoints of one run, in a folder. Saving goes on in the background; its errors surface at the next call.

    The ``keep_last`` latest are kept, besides the best by validation loss. ``read_only`` never writes or cleans up.
    Arrays are copied to be cut by layer: ``copied_gb`` of them at once, which must hold the largest (None: all).
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 1,
        *,
        read_only: bool = False,
        copied_gb: int | None = None,
    ) -> None:
        self.folder = folder.resolve()
        if not read_only:
            self._sweep()
        limits: Any = {"use_compression": False, "save_concurrent_gb": copied_gb}
        params, state = (ocp.PyTreeCheckpointHandler(**limits) for _ in range(2))
        handlers = {"params": params, "state": state, "meta": ocp.JsonCheckpointHandler()}
        latest = checkpoint_managers.LatestN(keep_last)
        loss = operator.itemgetter("validation_loss")
        best = checkpoint_managers.BestN(
            get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        reading: Json = {"read_only": True, "create": False, "save_interval_steps": 0}
        options = ocp.CheckpointManagerOptions(
            best_fn=loss,
            best_mode="min",
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, best]),
            **(
                reading
                if read_only
                else {"cleanup_tmp_directories": True, "todelete_subdir": _UNWANTED}
            ),
        )
        with _reading(self.folder):
            refuse_special_files(*_files_below(self.folder))
            self._manager = ocp.CheckpointManager(
                self.folder, item_handlers=handlers, options=options
            )

    def steps(self) -> list[int]:
        """The steps that are saved whole, oldest first."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The saved step with the lowest validation loss; the last one if none was evaluated."""
        with _reading(self.folder):
            best = self._manager.best_step()
            return self._manager.latest_step() if best is None else best

    def save(
        self, step: int, params: Params, state: Any, meta: Json, validation_loss: float | None
    ) -> None:
        """Begin to save; the arrays are copied first, so they may be donated as soon as this returns.

        ``state`` is the rest of what training needs; None for a model that is not being trained. If this or the save
        before failed, for a full disk say, that is a JllamaError, and earlier checkpoints stay.
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
        if process_index() == 0:
            shutil.rmtree(self.folder / _UNWANTED, ignore_errors=True)

    def restore(self, step: int, params: Params, state: Any) -> tuple[Params, Any, Json]:
        """The saved parameters, training state (None: left out) and metadata of a step, placed as the shapes say.

        If the files are damaged, or the arrays are not the ones expected, a JllamaError lists what differs.
        """
        with _reading(self.folder / str(step)):
            expected = {"params": params} | ({} if state is None else {"state": state})
            self._check(step, expected)
            metadata = self._manager.item_metadata(step)
            arrays = {}
            for name, shapes in expected.items():
                # In the structure that was saved: other versions have had other nodes without arrays.
                item = _with_leaves(metadata[name].tree, shapes)
                placed = ocp.checkpoint_utils.construct_restore_args(item)
                arrays[name] = ocp.args.PyTreeRestore(item, placed)
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**arrays, meta=ocp.args.JsonRestore())
            )
            trees = {
                name: _with_leaves(shapes, restored[name]) for name, shapes in expected.items()
            }
        return trees["params"], trees.get("state"), restored["meta"]

    def tensors(self, step: int, config: LlamaConfig) -> dict[str, FileTensor]:
        """The saved parameters of a step as tensors by ``TensorSpec.key``, not read yet.

        Raises as ``restore`` does, but for dtypes; reading a tensor, too, raises ``JllamaError``.
        """
        source = self.folder / str(step)
        with _reading(source):
            self._check(step, {"params": abstract_params(config)}, dtypes=False)
            stores = {}
            for path in parameter_table(
                config
            ):  # in tensorstore's zarr format, by the path with dots
                store = {
                    "driver": "ocdbt",
                    "base": f"file://{source}/params/",
                    "path": f"{path.replace('/', '.')}/",
                }
                stores[path] = tensorstore.open(
                    {"driver": "zarr", "kvstore": store}, read=True
                ).result()
        return {
            spec.key: _stored_tensor(spec, stores[spec.path], source)
            for spec in tensor_specs(config)
        }

    def _check(self, step: int, expected: Json, *, dtypes: bool = True) -> None:
        """Refuse another model's arrays (by item), and JSON, nested too deep, that orbax would crash on."""
        for path in _files_below(self.folder / str(step)):
            if (
                not path.suffix and path.parent.name != "d"
            ):  # the arrays are in folders of that name
                read_json_object(path)
        metadata = self._manager.item_metadata(step)
        saved = _shapes({item: metadata[item].tree for item in expected}, dtypes)
        problems = differences(saved, _shapes(expected, dtypes))
        if problems:
            kind = "of another model"
            if "params/" not in problems:
                kind = (
                    "of another version, whose optimizer kept another state: "
                    "begin a new run from its weights, with init_from"
                )
            raise JllamaError(f"the checkpoint {self.folder / str(step)} is {kind} ({problems})")

    def _save_error(self, error: Exception) -> JllamaError:
        kept = self.steps()
        last = (
            f"the last good checkpoint is step {kept[-1]}"
            if kept
            else "there is no earlier checkpoint"
        )
        return JllamaError(
            f"could not save a checkpoint in {self.folder} ({_reason(error)}); {last}"
        )


def _files_below(folder: Path) -> list[Path]:
    """Every file in a folder and in the folders in it, as far as they do not vanish meanwhile."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except JllamaError:
        raise
    except Exception as error:
        advice = "put it back from a copy, or delete it to go on from an earlier one"
        raise JllamaError(
            f"the checkpoint {source} cannot be read ({_reason(error)}): {advice}"
        ) from error


def _stored_tensor(spec: TensorSpec, store: Any, source: Path) -> LazyTensor:
    """One layer's share of an array that orbax wrote, read by rows: orbax itself would hold every array twice."""
    row, sizes = spec.parameter, dict(zip(spec.parameter.axes, store.shape, strict=True))
    chunk = dict(zip(row.axes, store.chunk_layout.read_chunk.shape, strict=True))
    inner = math.prod(sizes[axis] for axis in row.outputs[1:])
    whole_inputs = all(chunk[axis] >= sizes[axis] for axis in row.inputs)

    def read(rows: slice) -> np.ndarray:
        first, last = rows.start // inner, -(-rows.stop // inner)
        parts = {"layers": spec.layer, row.outputs[0]: slice(first, last)}
        with _reading(source):
            array = store[tuple(parts.get(axis, slice(None)) for axis in row.axes)].read().result()
        return as_matrix(row, array)[rows.start - first * inner : rows.stop - first * inner]

    rows_at_once = inner * chunk[row.outputs[0]] if whole_inputs else spec.shape[0]
    return LazyTensor(spec.shape, np.dtype(store.dtype.numpy_dtype), read, rows_at_once)


def _reason(error: Exception) -> str:
    """An error of orbax or tensorstore in a few words; the latter tells the whole way there before the reason."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    system = re.search(r": ([^:]+) \[(?:os_error_code|tensorstore_spec)", reason)
    return system[1] if system else reason


def _by_path(tree: Any) -> dict[str, Any]:
    """Every array of a tree, with tuples and named tuples told apart by position or name alone."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keyed = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {path: leaf for path, leaf in keyed.items() if hasattr(leaf, "shape")}


def _with_leaves(tree: Any, other: Any) -> Any:
    """The structure of a tree with the arrays that another has at the same paths."""
    by_path = _by_path(other)
    return jax.tree.unflatten(jax.tree.structure(tree), [by_path[path] for path in _by_path(tree)])


def _shapes(tree: Any, dtypes: bool) -> dict[str, str]:
    """``path -> dtype[shape]`` of every array."""
    return {
        path: f"{leaf.dtype if dtypes else ''}{list(leaf.shape)}"
        for path, leaf in _by_path(tree).items()
    }
