"""The checkpoints of a run: one folder for each saved step. Only this module uses orbax.

Each folder is complete or absent, so that a process may be killed at any moment: orbax writes it
under another name and renames it at the end, and renames one that is no longer needed before it is
deleted.
"""

import contextlib
import itertools
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import checkpoint_managers

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.model import abstract_params
from jllama.core.parameters import Params, parameter_table
from jllama.formats.bucket import COMPLETE, link_checkpoints
from jllama.formats.receipt import (
    check_weights,
    describe_weights,
    fingerprint_of_parts,
    read_receipt,
)
from jllama.formats.tensors import (
    FileTensor,
    LazyTensor,
    TensorSpec,
    as_matrix,
    differences,
    tensor_specs,
)
from jllama.parallel.distributed import process_index
from jllama.system.files import Json, read_json_object, refuse_special_files
from jllama.system.places import as_place, is_url, name_of
from jllama.system.remote import PATIENCE_S, download, list_files

# Nothing is wrong with a folder that is only read.
logging.getLogger("absl").addFilter(
    lambda record: "Given directory is read only" not in f"{record.msg}"
)
_CHUNK_BYTES = 64 << 20  # a chunk is always read whole
_CHUNKED = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
_BY_LAYER = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,))
# Where checkpoints wait to be deleted: a partly deleted one must not look complete.
_UNWANTED = "unwanted"


class RunCheckpoints:
    """The checkpoints of one run, in a folder.

    Saving continues in the background; its errors are raised by the next call.

    Args:
        folder: The folder.
        keep_last: How many of the latest checkpoints to keep, besides the best by validation loss.
        read_only: Never write or clean up.
        copied_gb: The gigabytes of arrays to copy at a time, in order to split them by layer; at
            least the largest array. None copies all at once.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 1,
        *,
        read_only: bool = False,
        copied_gb: int | None = None,
    ) -> None:
        # 1) Check the folder's name, and delete checkpoints that are marked for removal.
        self.folder = folder.resolve()
        if "\\" in self.folder.as_posix():
            raise JllamaError(
                f"the folder {self.folder} has a backslash in its name, which tensorstore reads as "
                "a slash: rename it"
            )
        name = name_of(self.folder.parent)
        self.place: Any = as_place(name) if is_url(name) else None
        if not read_only:
            self._sweep()

        # 2) Choose how to store items. In a working folder each process has a part of each
        # checkpoint, in files of its own, and waits for no other.
        limits: Any = {"use_compression": False, "save_concurrent_gb": copied_gb}
        processes = ocp.options.MultiprocessingOptions()
        if self.place:
            index = process_index()
            processes = ocp.options.MultiprocessingOptions(
                primary_host=None, active_processes={index}, barrier_sync_key_prefix=str(index)
            )
            limits |= {"use_ocdbt": False, "multiprocessing_options": processes}
            self.folder.mkdir(exist_ok=True)
        handlers = {
            "params": ocp.PyTreeCheckpointHandler(**limits),
            "state": ocp.PyTreeCheckpointHandler(**limits),
            "meta": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        }

        # 3) Choose which checkpoints stay: the last ones and the best.
        latest = checkpoint_managers.LatestN(keep_last)

        def loss(metrics: Json) -> float:
            """Return a checkpoint's loss; that of later data is always lower than of earlier."""
            return metrics["validation_loss"] - 1000.0 * metrics.get("data_since", 0)

        best = checkpoint_managers.BestN(
            get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )

        # 4) Open the folder.
        access: Json = {"cleanup_tmp_directories": True, "todelete_subdir": _UNWANTED}
        if self.place:
            access["create"] = False
            # Done in the background, it counts on the directories of other processes.
            access["async_options"] = ocp.AsyncOptions(create_directories_asynchronously=False)
        if read_only:
            access = {"read_only": True, "create": False, "save_interval_steps": 0}
        options = ocp.CheckpointManagerOptions(
            best_fn=loss,
            best_mode="min",
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, best]),
            multiprocessing_options=processes,
            **access,
        )
        with _reading(self.folder):
            refuse_special_files(*_files_below(self.folder))
            self._manager = ocp.CheckpointManager(
                self.folder, item_handlers=handlers, options=options
            )

    def steps(self) -> list[int]:
        """Return the steps that are saved completely, oldest first."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """Return the saved step with the lowest validation loss; the last if none was evaluated."""
        with _reading(self.folder):
            best = self._manager.best_step()
            return self._manager.latest_step() if best is None else best

    def save(
        self, step: int, params: Params, state: Any, meta: Json, validation_loss: float | None
    ) -> None:
        """Begin to save; the arrays are copied first, so they may be donated afterwards.

        ``state`` is the rest of a training's state; None for a model that is not being trained.

        Raises:
            JllamaError: This or the previous save failed, because the disk is full, say. Earlier
                checkpoints stay.
        """
        self.wait()
        chunks = jax.tree.map(lambda _: _CHUNKED, params)
        chunks["layers"] = jax.tree.map(lambda _: _BY_LAYER, params["layers"])
        items = {"params": ocp.args.PyTreeSave(params, chunks), "meta": ocp.args.JsonSave(meta)}
        if state is not None:
            items["state"] = ocp.args.PyTreeSave(state)
        metrics = {"validation_loss": validation_loss, "data_since": meta.get("data_since", 0)}
        if validation_loss is None:
            metrics = None
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)
        except Exception as error:
            raise self._save_error(error) from error

    def wait(self) -> None:
        """Wait until the save is on disk; ``JllamaError`` if it could not be written."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._save_error(error) from error
        if self.place:
            link_checkpoints(self.folder.parent)  # before the next one takes their place
        self._sweep()

    def _sweep(self) -> None:
        if process_index() == 0 or self.place:
            shutil.rmtree(self.folder / _UNWANTED, ignore_errors=True)

    def restore(self, step: int, params: Params, state: Any) -> tuple[Params, Any, Json]:
        """Read the parameters, training state and metadata of a step.

        ``params`` and ``state`` have the expected shapes, dtypes and shardings. If ``state`` is
        None, it is not read.

        Raises:
            JllamaError: Files are damaged, or arrays differ from the expected ones; these are
                listed.
        """
        with _reading(self.folder / str(step)):
            expected = {"params": params}
            if state is not None:
                expected["state"] = state
            if self.place:
                self._fetch_arrays(step, expected)
            self._check(step, expected)
            metadata = self._manager.item_metadata(step)
            arrays = {}
            for name, shapes in expected.items():
                # Use the structure that was saved: other versions had other nodes without arrays.
                item = _with_leaves(metadata[name].tree, shapes)
                placed = ocp.checkpoint_utils.construct_restore_args(item)
                arrays[name] = ocp.args.PyTreeRestore(item, placed)
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**arrays, meta=ocp.args.JsonRestore())
            )
            trees = {
                name: _with_leaves(shapes, restored[name]) for name, shapes in expected.items()
            }
        saved = self._saved_fingerprints(step)
        if saved:
            check_weights(self.folder / str(step), saved, describe_weights(trees["params"]))
        return trees["params"], trees.get("state"), restored["meta"]

    def _fetch_arrays(self, step: int, expected: Json) -> None:
        """Read the files of a step in a bucket that hold parts of this process's arrays."""
        place = self.place / self.folder.name / str(step)
        folder = self.folder / str(step)
        listed = list_files(place)
        # Another process may still copy its part.
        end_s = time.monotonic() + PATIENCE_S
        while jax.process_count() > 1 and COMPLETE not in listed and time.monotonic() < end_s:
            time.sleep(0.5)
            listed = list_files(place)
        files = {name: facts for name, facts in listed.items() if not (folder / name).exists()}
        shapes = {name: facts for name, facts in files.items() if name.endswith(".zarray")}
        download(place, folder, shapes)
        needed = set()
        for path, array in _by_path(expected).items():
            item, _, name = path.partition("/")
            stored = f"{item}/{name.replace('/', '.')}"
            shape = folder / stored / ".zarray"
            if not shape.exists():
                continue  # what was saved is another model, as ``_check`` says
            chunk = read_json_object(shape)["chunks"]
            parts = array.sharding.addressable_devices_indices_map(array.shape).values()
            for part in parts:
                ranges = []
                for index, size, chunk_size in zip(part, array.shape, chunk, strict=False):
                    start, stop, _ = index.indices(size)
                    ranges.append(range(start // chunk_size, -(-stop // chunk_size)))
                for numbers in itertools.product(*ranges):
                    needed.add(f"{stored}/{'.'.join(map(str, numbers)) or '0'}")
        # What holds no array's elements is small.
        is_chunk = re.compile(r"(params|state)/[^/]+/[\d.]+$")
        chosen = [name for name in files if name in needed or not is_chunk.match(name)]
        download(place, folder, {name: files[name] for name in chosen})

    def tensors(self, step: int, config: LlamaConfig) -> dict[str, FileTensor]:
        """Return the saved parameters of a step as tensors by ``TensorSpec.key``, not read yet.

        Errors are those of ``restore``, except for dtypes. Reading a tensor may raise them, too.
        """
        source = self.folder / str(step)
        saved = self._saved_fingerprints(step)
        with _reading(source):
            self._check(step, {"params": abstract_params(config)}, dtypes=False)
            stores = {
                path: _StoredArray(source, path, saved.get(path))
                for path in parameter_table(config)
            }
        return {spec.key: _stored_tensor(spec, stores[spec.path]) for spec in tensor_specs(config)}

    def arrays(self, step: int) -> dict[str, "_StoredArray"]:
        """Return a step's parameters as saved, by path, not read yet."""
        source = self.folder / str(step)
        with _reading(source):
            paths = _by_path(self._manager.item_metadata(step)["params"].tree)
            return {path: _StoredArray(source, path) for path in paths}

    def _saved_fingerprints(self, step: int) -> Json:
        """Return the fingerprints that the run's receipt has of a step's parameters."""
        return read_receipt(self.folder.parent)["weights"].get(str(step), {})

    def _check(self, step: int, expected: Json, *, dtypes: bool = True) -> None:
        """Raise ``JllamaError`` for another model's arrays, or JSON that orbax would crash on.

        That is JSON nested too deeply.
        """
        for path in _files_below(self.folder / str(step)):
            is_array = path.parent.name == "d" or path.name.isdecimal()
            if not path.suffix and not is_array:
                read_json_object(path)
        metadata = self._manager.item_metadata(step)
        saved = _shapes({item: metadata[item].tree for item in expected}, dtypes)
        problems = differences(saved, _shapes(expected, dtypes))
        if problems:
            kind = "of another model"
            if "params/" not in problems:
                kind = (
                    "of another version, whose optimizer has another state: "
                    "begin a new run from its weights, with init_from"
                )
            raise JllamaError(f"the checkpoint {self.folder / str(step)} is {kind} ({problems})")

    def _save_error(self, error: Exception) -> JllamaError:
        steps = self.steps()
        last = "there is no earlier checkpoint"
        if steps:
            last = f"the last good checkpoint is step {steps[-1]}"
        return JllamaError(
            f"could not save a checkpoint in {self.folder} ({_reason(error)}); {last}"
        )


def _files_below(folder: Path) -> list[Path]:
    """Return every file in a folder and its subfolders; files may vanish meanwhile."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turn any error inside into a ``JllamaError`` that names the checkpoint."""
    try:
        yield
    except JllamaError:
        raise
    except Exception as error:
        advice = "put it back from a copy, or delete it to go on from an earlier one"
        raise JllamaError(
            f"the checkpoint {source} cannot be read ({_reason(error)}): {advice}"
        ) from error


class _StoredArray:
    """An array that orbax wrote; orbax itself would have it in memory twice.

    Before its first part is read, it is compared with the fingerprint that the receipt has of it.
    """

    def __init__(self, source: Path, path: str, saved: str | None = None) -> None:
        name = f"{path.replace('/', '.')}/"
        # A URL would decode "%41" in a folder's name.
        store: Json = {"driver": "file", "path": f"{source}/params/"}
        if (source / "params/manifest.ocdbt").exists():
            store = {"driver": "ocdbt", "base": store, "path": name}
        else:  # of a run in a bucket
            store["path"] += name
        array = {"driver": "zarr", "kvstore": store}
        self.store: Any = tensorstore.open(array, read=True).result()
        self.source = source
        self.path = path
        self.saved = saved
        self._lock = threading.Lock()  # many threads read

    def fingerprint(self) -> str:
        """Compute the fingerprint, with one layer of a stack in memory at a time."""
        places: Sequence[Any] = [...]
        if self.path.startswith("layers/"):
            places = range(self.store.shape[0])
        with _reading(self.source):
            return fingerprint_of_parts(self.store[place].read().result() for place in places)

    def read(self, *index: Any) -> np.ndarray:
        """Read a part."""
        with _reading(self.source):
            with self._lock:
                if self.saved:
                    actual = {self.path: self.fingerprint()}
                    check_weights(self.source, {self.path: self.saved}, actual)
                    self.saved = None
            return self.store[index].read().result()


def _stored_tensor(spec: TensorSpec, stored: _StoredArray) -> LazyTensor:
    """Return one layer's part of an array, read by rows."""
    store = stored.store
    row = spec.parameter
    sizes = dict(zip(row.axes, store.shape, strict=True))
    chunk = dict(zip(row.axes, store.chunk_layout.read_chunk.shape, strict=True))
    inner = math.prod(sizes[axis] for axis in row.outputs[1:])
    whole_inputs = all(chunk[axis] >= sizes[axis] for axis in row.inputs)

    def read(rows: slice) -> np.ndarray:
        first = rows.start // inner
        parts = {"layers": spec.place, row.outputs[0]: slice(first, -(-rows.stop // inner))}
        array = stored.read(*(parts.get(axis, slice(None)) for axis in row.axes))
        return as_matrix(row, array)[rows.start - first * inner : rows.stop - first * inner]

    rows_at_once = inner * chunk[row.outputs[0]] if whole_inputs else spec.shape[0]
    return LazyTensor(spec.shape, np.dtype(store.dtype.numpy_dtype), read, rows_at_once)


def _reason(error: Exception) -> str:
    """Describe an error of orbax or tensorstore in a few words.

    tensorstore's message has the whole path to the fault before the reason.
    """
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    system = re.search(r": ([^:]+) \[(?:os_error_code|tensorstore_spec)", reason)
    return system[1] if system else reason


def _by_path(tree: Any) -> dict[str, Any]:
    """Return every array of a tree by its path: of keys, positions, and names in named tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keyed = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {path: leaf for path, leaf in keyed.items() if hasattr(leaf, "shape")}


def _with_leaves(tree: Any, other: Any) -> Any:
    """Return a tree of the same structure, with the arrays of another tree at the same paths."""
    by_path = _by_path(other)
    return jax.tree.unflatten(jax.tree.structure(tree), [by_path[path] for path in _by_path(tree)])


def _shapes(tree: Any, dtypes: bool) -> dict[str, str]:
    """Return ``dtype[shape]`` of every array, by its path."""
    return {
        path: f"{leaf.dtype if dtypes else ''}{list(leaf.shape)}"
        for path, leaf in _by_path(tree).items()
    }
