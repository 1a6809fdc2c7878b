"""What every file format shares: tensors that are read a block of rows at a time, and a checkpoint made of them.

A tensor is a matrix ``[outputs, inputs]`` or a vector, on disk. Reading maps the file into memory, so a checkpoint is
opened at once whatever its size, and only what is asked for is ever read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.parameters import (
    Axis,
    NamedFormat,
    Parameter,
    Params,
    TensorSpec,
    as_matrix,
    parameter_table,
    shape_of,
    tensor_specs,
)
from jllama.sharding import check_divides, parameter_sharding
from jllama.tokenizers import Tokenizer

BLOCK_BYTES = 16 << 20
_TILE = 256
_THREADS = min(4, os.cpu_count() or 1)

OnProgress = Callable[[int], None]
"""Is told of each further so many bytes that are done."""


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[OnProgress]:
    """Bytes done, speed and time left, on stderr if that is a terminal."""
    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda done_bytes: progress.advance(task, done_bytes)


@runtime_checkable
class FileTensor(Protocol):
    """A matrix ``[outputs, inputs]`` or a vector, read by rows. A NumPy array or memory map is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``[outputs, inputs]``, or ``[embed]`` of a norm."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what reading gives; float32 for what is stored quantised."""
        ...

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """Rows ``start`` to ``stop``, both given, step 1."""
        ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk (or about to be), in no format's terms.

    Args:
        config: the architecture.
        tensors: by ``TensorSpec.key``, each of ``TensorSpec.shape``, rotary channels half-split.
        tokenizer: None if the files have none.
        chat_template: the Jinja template that turns messages into a prompt, if the files have one.
        stop_ids: tokens that end an answer; empty if the files do not say.
    """

    config: LlamaConfig
    tensors: Mapping[str, FileTensor]
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()


class PermutedRows:
    """A rotary matrix with the rows of each head reordered: from interleaved pairs to half-split, or back."""

    def __init__(self, tensor: FileTensor, head_dim: int, to_half_split: bool) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.head_dim, self.to_half_split = head_dim, to_half_split

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """The rows asked for: whole heads are read, reordered and cut."""
        first = rows.start // self.head_dim * self.head_dim
        last = -(-rows.stop // self.head_dim) * self.head_dim
        half = self.head_dim // 2
        pairs = (half, 2) if self.to_half_split else (2, half)
        heads = self.tensor[first:last].reshape(-1, *pairs, self.shape[1])
        return heads.swapaxes(1, 2).reshape(-1, self.shape[1])[rows.start - first : rows.stop - first]


def half_split(stored: TensorSpec, tensor: FileTensor, head_dim: int) -> FileTensor:
    """A tensor of a format with interleaved rotary pairs, as ``Checkpoint`` has it."""
    return PermutedRows(tensor, head_dim, to_half_split=True) if stored.parameter.rotary else tensor


def interleaved(stored: TensorSpec, tensor: FileTensor, head_dim: int) -> FileTensor:
    """A checkpoint's tensor as formats with interleaved rotary pairs have it."""
    return PermutedRows(tensor, head_dim, to_half_split=False) if stored.parameter.rotary else tensor


def blocks(tensor: FileTensor, dtype: np.dtype[Any] | type, row_multiple: int = 1) -> Iterator[np.ndarray]:
    """A tensor's rows from first to last, contiguous and in ``dtype``, in blocks of about ``BLOCK_BYTES``.

    Raises:
        JllamaError: a number is too large for the dtype (float16 ends at 65,504).
    """
    row_bytes = 4 * math.prod(tensor.shape[1:])
    step = row_multiple * max(1, BLOCK_BYTES // (row_bytes * row_multiple))
    for start in range(0, tensor.shape[0], step):
        yield np.ascontiguousarray(_cast(tensor[start : min(start + step, tensor.shape[0])], dtype))


def _cast(block: np.ndarray, dtype: np.dtype[Any] | type) -> np.ndarray:
    try:
        with np.errstate(over="raise"):
            return block.astype(dtype, copy=False)
    except FloatingPointError as error:
        raise JllamaError(f"a weight is too large for {np.dtype(dtype).name}: choose bfloat16 or float32") from error


def same_bits(tensor: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    pairs = zip(blocks(tensor, tensor.dtype), blocks(other, other.dtype), strict=True)
    return all(np.array_equal(one.view(np.uint8), two.view(np.uint8)) for one, two in pairs)


def matched(
    found: Mapping[str, FileTensor],
    config: LlamaConfig,
    file_format: NamedFormat,
    source: Path,
    ignored: Collection[str] = (),
) -> dict[str, FileTensor]:
    """The tensors of a file by ``TensorSpec.key``, still in the file's own order of rotary channels.

    Raises:
        JllamaError: any is missing, is not one of this model's (nor ``ignored``), or has another shape: all are listed.
    """
    if config.num_layers > len(found):
        raise JllamaError(f"{source} says it has {config.num_layers} layers, but holds {len(found)} tensors in all")
    expected = {stored.name(file_format): stored for stored in tensor_specs(config)}
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {', '.join(missing)}")
    if extra := [name for name in found if name not in expected and name not in ignored]:
        problems.append(f"not of a Llama of this configuration: {', '.join(extra)}")
    problems += [
        f"{name} has shape {list(found[name].shape)}, expected {list(stored.shape)}"
        for name, stored in expected.items()
        if name in found and tuple(found[name].shape) != stored.shape
    ]
    if problems:
        raise JllamaError(f"{source} does not hold the model that its configuration describes: {'; '.join(problems)}")
    return {stored.key: found[name] for name, stored in expected.items()}


def size_bytes(checkpoint: Checkpoint, dtype: np.dtype[Any] | type | None) -> int:
    """The bytes of all tensors, in ``dtype`` or (None) each in its own."""
    return sum(
        math.prod(tensor.shape) * (tensor.dtype if dtype is None else np.dtype(dtype)).itemsize
        for tensor in checkpoint.tensors.values()
    )


def load_params(
    checkpoint: Checkpoint,
    dtype: np.dtype[Any] | type | None = None,
    mesh: Mesh | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Params:
    """Read a checkpoint's parameters, layers stacked, straight onto their devices.

    Each device gets its slice, and a process reads no more than the slices of its own devices.

    Args:
        checkpoint: open files.
        dtype: of the parameters; None keeps each one's own.
        mesh: splits the parameters over devices, as training does; None puts them on the first device.
        on_progress: told of bytes read, in ``dtype``.

    Raises:
        UsageError: an axis of a parameter does not divide over the mesh.
    """
    params: Params = {}
    if mesh is not None:
        check_divides(mesh, checkpoint.config)
    for path, row in parameter_table(checkpoint.config).items():
        tensors = [checkpoint.tensors[stored.key] for stored in tensor_specs(checkpoint.config) if stored.path == path]
        own = np.dtype(dtype or jnp.result_type(*(tensor.dtype for tensor in tensors)))
        shape = shape_of(row, checkpoint.config)
        sharding = SingleDeviceSharding(jax.devices()[0]) if mesh is None else parameter_sharding(mesh, row)
        read = functools.partial(_read, row, shape, tensors, own, on_progress)
        array = jax.make_array_from_callback(shape, sharding, read)
        *parents, name = path.split("/")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = array
    return params


def _read(
    row: Parameter,
    shape: tuple[int, ...],
    tensors: list[FileTensor],
    dtype: np.dtype[Any],
    on_progress: OnProgress,
    index: Any,
) -> np.ndarray:
    """The part of a parameter at ``index``, from the tensors of its layers."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    sizes = dict(zip(row.axes, shape, strict=True))
    bounds: dict[Axis, tuple[int, int]] = {
        axis: (start, stop) for axis, (start, stop, _) in zip(row.axes, ranges, strict=True)
    }
    out = aligned_empty(tuple(stop - start for start, stop, _ in ranges), dtype)
    in_layers = row.axes[0] == "layers"
    first_layer, last_layer = bounds.get("layers", (0, 1))
    rows, columns = (_flat_range(axes, bounds, sizes) for axes in (row.outputs, row.inputs))

    def read_layer(layer: int) -> None:
        tensor, matrix = tensors[layer], as_matrix(row, out[layer - first_layer] if in_layers else out)
        step = max(1, BLOCK_BYTES // (4 * math.prod(tensor.shape[1:])))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            block = _cast(tensor[start:stop], dtype)
            _copy(block[:, columns] if row.inputs else block, matrix[start - rows.start : stop - rows.start])
            on_progress((stop - start) * (columns.stop - columns.start) * dtype.itemsize)

    # Copying is bound by memory, and NumPy lets go of Python's lock meanwhile; each thread holds a few blocks.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(read_layer, layer) for layer in range(first_layer, last_layer)]:
            done.result()
    return out


def _copy(block: np.ndarray, place: np.ndarray) -> None:
    """Copy in square tiles: twice as fast as row by row where one of the two is transposed."""
    if block.ndim == 1:
        place[:] = block
        return
    for start in range(0, block.shape[0], _TILE):
        for left in range(0, block.shape[1], _TILE):
            tile = slice(start, start + _TILE), slice(left, left + _TILE)
            place[tile] = block[tile]


def _flat_range(axes: tuple[Axis, ...], bounds: Mapping[Axis, tuple[int, int]], sizes: Mapping[Axis, int]) -> slice:
    """Where a part lies along flattened axes, of which only the first is ever cut."""
    if not axes:
        return slice(0, 1)
    rest = math.prod(sizes[axis] for axis in axes[1:])
    start, stop = bounds[axes[0]]
    return slice(start * rest, stop * rest)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Uninitialised memory at a multiple of 64 bytes: JAX takes such an array on a CPU without copying it."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


class TensorsOfParams(Mapping[str, FileTensor]):
    """The tensors of parameters in memory, each made (as a view, on a CPU) when it is asked for.

    Args:
        config: the architecture.
        params: gives the parameters, layers stacked; called when a tensor is first asked for.
    """

    def __init__(self, config: LlamaConfig, params: Callable[[], Params]) -> None:
        self._stored = {stored.key: stored for stored in tensor_specs(config)}
        self._params = functools.cache(params)

    def __getitem__(self, key: str) -> FileTensor:
        stored = self._stored[key]
        leaf: Any = self._params()
        for name in stored.path.split("/"):
            leaf = leaf[name]
        array = np.asarray(leaf)
        return as_matrix(stored.parameter, array[stored.layer] if stored.parameter.axes[0] == "layers" else array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
