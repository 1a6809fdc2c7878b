"""What every file format shares: tensors that are read a block of rows at a time, and a checkpoint made of them.

Files are mapped into memory: a checkpoint is opened at once, whatever its size, and only what is asked for is read.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jllama import cache
from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams, Quantization
from jllama.errors import JllamaError
from jllama.functional.linear import int8_rows
from jllama.parameters import (
    NamedFormat,
    Params,
    TensorSpec,
    as_matrix,
    axis_sizes,
    joined_groups,
    parameter_table,
    shape_of,
    tensor_specs,
)
from jllama.sharding import RULES, check_divides, matrix_sharding, row_spec
from jllama.tokenizers import Tokenizer

BLOCK_BYTES = 16 << 20
_TILE = 256
_THREADS = min(4, os.cpu_count() or 1)

Dtype = np.dtype[Any] | type
OnProgress = Callable[
    [int], None
]  # is called with the number of bytes read or written since the last call


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A matrix ``[outputs, inputs]`` or a vector that has to be worked out as its rows are read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], np.ndarray]  # start and stop are given, and the step is 1
    rows_at_once: int = 1  # how many are stored together: fewer cost as much to read
    stored: np.ndarray | None = None  # all that it is made of, if that is an array
    quantized: str = ""  # GGML's type of that array

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        return self.read(rows)


FileTensor = np.ndarray | LazyTensor  # read by rows; an array may be a memory map
NamedTensor = tuple[str, FileTensor, np.dtype[Any]]  # to write, under its name and in its dtype


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk (or about to be), in no format's terms; its fields are those of ``LanguageModel``."""

    config: LlamaConfig
    tensors: Mapping[
        str, FileTensor
    ]  # by TensorSpec.key, each of TensorSpec.shape, rotary channels half-split
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()  # empty if the files do not say
    step: int | None = None
    adapter: Any = None  # the ``Adapter`` that was merged last, if any


def permuted(tensor: FileTensor, head_dim: int, to_half_split: bool) -> LazyTensor:
    """A rotary matrix with the rows of each head reordered: from interleaved pairs to half-split, or back."""
    pairs = (head_dim // 2, 2) if to_half_split else (2, head_dim // 2)

    def read(rows: slice) -> np.ndarray:
        """The rows asked for: whole heads are read, reordered and cut."""
        first, last = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
        heads = tensor[first:last].reshape(-1, *pairs, tensor.shape[1])
        return heads.swapaxes(1, 2).reshape(-1, tensor.shape[1])[
            rows.start - first : rows.stop - first
        ]

    if isinstance(tensor, LazyTensor):
        return dataclasses.replace(
            tensor, read=read, rows_at_once=math.lcm(head_dim, tensor.rows_at_once)
        )
    return LazyTensor(tensor.shape, tensor.dtype, read, head_dim, tensor)


def rows_behind_rows(tensors: Sequence[FileTensor]) -> LazyTensor:
    """Matrices of the same inputs as one, the rows of each behind those of the one before."""

    def read(rows: slice) -> np.ndarray:
        """The rows asked for, of each tensor that has some."""
        parts = []
        start = 0
        for tensor in tensors:
            first, last = (
                min(max(bound - start, 0), tensor.shape[0]) for bound in (rows.start, rows.stop)
            )
            if first < last or rows.start == rows.stop:
                parts.append(tensor[first:last])
            start += tensor.shape[0]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    shape = sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:]
    dtype = functools.reduce(jnp.promote_types, [tensor.dtype for tensor in tensors])
    return LazyTensor(
        shape, dtype, read, math.lcm(*(getattr(tensor, "rows_at_once", 1) for tensor in tensors))
    )


def reordered(
    spec: TensorSpec, tensor: FileTensor, config: LlamaConfig, to_half_split: bool
) -> FileTensor:
    """A tensor of ``Checkpoint`` as formats with interleaved rotary pairs have it, or (``to_half_split``) back."""
    return permuted(tensor, config.head_dim, to_half_split) if spec.parameter.rotary else tensor


def blocks(tensor: FileTensor, dtype: Dtype) -> Iterator[np.ndarray]:
    """A tensor's rows from first to last, contiguous and in ``dtype``, in blocks of about ``BLOCK_BYTES``.

    A number too large for the dtype (float16 ends at 65,504) raises JllamaError.
    """
    for _, block in _row_blocks(tensor, slice(0, tensor.shape[0]), dtype):
        yield np.ascontiguousarray(block)


def _row_blocks(
    tensor: FileTensor, rows: slice, dtype: Dtype
) -> Iterator[tuple[slice, np.ndarray]]:
    """Some rows in blocks, each with where it is: of a multiple of those that are stored or permuted together."""
    multiple = getattr(tensor, "rows_at_once", 1)
    step = multiple * max(1, BLOCK_BYTES // (4 * math.prod(tensor.shape[1:])) // multiple)
    for start in range(rows.start, rows.stop, step):
        here = slice(start, min(start + step, rows.stop))
        try:
            with np.errstate(over="raise"):
                block = tensor[here].astype(dtype, copy=False)
        except FloatingPointError as error:
            raise JllamaError(
                f"a weight is too large for {np.dtype(dtype).name}: take bfloat16 or float32"
            ) from error
        yield here, block


def same_bits(tensor: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    pairs = zip(blocks(tensor, tensor.dtype), blocks(other, other.dtype), strict=True)
    return all(np.array_equal(one.view(np.uint8), two.view(np.uint8)) for one, two in pairs)


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What two mappings do not have in common, in words; empty if they are equal."""
    keys = [key for key in {**expected, **actual} if actual.get(key) != expected.get(key)]
    return "; ".join(
        f"{key} is {actual.get(key, 'absent')}, expected {expected.get(key, 'none')}"
        for key in keys
    )


def matched(
    tensors: Mapping[str, FileTensor], config: LlamaConfig, file_format: NamedFormat, source: Path
) -> dict[str, FileTensor]:
    """The tensors of a file as ``Checkpoint`` has them: by ``TensorSpec.key``, rotary channels half-split.

    All that are missing, not of this model, or of another shape are listed in a JllamaError.
    """
    if config.num_layers > len(tensors):
        raise JllamaError(
            f"{source} says it has {config.num_layers} layers, but holds {len(tensors)} tensors in all"
        )
    specs = {spec.name(file_format): spec for spec in tensor_specs(config)}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if problems := differences(shapes, {name: list(spec.shape) for name, spec in specs.items()}):
        raise JllamaError(
            f"{source} does not hold the model that its configuration describes: {problems}"
        )
    if file_format == "huggingface":
        return {spec.key: tensors[name] for name, spec in specs.items()}
    return {
        spec.key: reordered(spec, tensors[name], config, to_half_split=True)
        for name, spec in specs.items()
    }


def size_bytes(checkpoint: Checkpoint | Any, dtype: Dtype | None) -> int:
    """The bytes of all tensors, in ``dtype`` or (None) each in its own."""
    tensors = checkpoint.tensors.values()
    return sum(
        math.prod(tensor.shape) * np.dtype(dtype or tensor.dtype).itemsize for tensor in tensors
    )


def base_fingerprint(checkpoint: Checkpoint) -> str:
    """What adapters know their base by: SHA-256 of its norms, and after a colon of its matrices' first rows, each
    rounded to bfloat16, in the order of ``tensor_specs``. Matrices that were rounded otherwise (float16, or GGUF's
    quantized types) are left out: then the norms speak alone.
    """
    norms, rows = hashlib.sha256(), hashlib.sha256()
    for spec in tensor_specs(checkpoint.config):
        digest, end = (rows, 1) if spec.parameter.inputs else (norms, spec.shape[0])
        digest.update(checkpoint.tensors[spec.key][0:end].astype(jnp.bfloat16).tobytes())
    tensors = checkpoint.tensors.values()
    is_rounded = any(each.dtype == np.float16 or getattr(each, "quantized", "") for each in tensors)
    return norms.hexdigest() if is_rounded else f"{norms.hexdigest()}:{rows.hexdigest()}"


def load_params(
    checkpoint: Checkpoint,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    on_progress: OnProgress = lambda _: None,
    rules: Mapping[str, Sequence[str]] = RULES,
    held: Callable[[str, Any], Any] = lambda path, stack: stack,
) -> Params:
    """Read a checkpoint's parameters into the training layout, layers stacked, straight onto their devices.

    Each device gets its slice, and a process reads no more than the slices of its own devices. ``dtype`` None keeps
    each parameter's own, ``mesh`` None puts all on the first device, and ``on_progress`` counts bytes in ``dtype``. An
    axis that does not divide over the mesh raises UsageError. ``held(path, stack)`` says what takes the place of each
    before the next is read, the largest first, so that a device has one at a time as it was read.
    """
    config, tensors, dtypes = (
        checkpoint.config,
        checkpoint.tensors,
        _dtypes(checkpoint, dtype, mesh, rules),
    )
    table = parameter_table(config)

    def fill(path: str, slices: list[slice], out: np.ndarray) -> None:
        """Read a part of a parameter from the tensors of its layers."""
        row = table[path]
        sizes = axis_sizes(row, config)
        bounds = dict(zip(row.axes, slices, strict=True))
        part = []
        for first, *others in filter(
            None, (row.outputs, row.inputs)
        ):  # joined axes, of which the first alone is cut
            inner = math.prod(sizes[axis] for axis in others)
            part.append(slice(bounds[first].start * inner, bounds[first].stop * inner))
        specs = [spec for spec in tensor_specs(config) if spec.path == path][
            bounds.get("layers", slice(None))
        ]
        matrices = [as_matrix(row, layer) for layer in (out if row.axes[0] == "layers" else [out])]
        list(
            threads.map(
                lambda spec, matrix: _read(tensors[spec.key], part, matrix, on_progress),
                specs,
                matrices,
            )
        )

    arrays = dict.fromkeys(table)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for path in sorted(table, key=lambda path: -math.prod(shape_of(table[path], config))):
            row = table[path]
            own_devices = SingleDeviceSharding(jax.devices()[0])
            sharding = (
                NamedSharding(mesh, row_spec(mesh, row, config, rules)) if mesh else own_devices
            )
            part = functools.partial(fill, path)
            arrays[path] = held(path, _filled(shape_of(row, config), dtypes[path], sharding, part))
            jax.block_until_ready(arrays[path])
    return unflatten_dict(arrays, sep="/")


def load_decode_params(
    checkpoint: Checkpoint,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    on_progress: OnProgress = lambda _: None,
    quantize: Quantization | None = None,
) -> DecodeParams:
    """Read a checkpoint's parameters into the decoding layout: what ``decode_layout`` makes of ``load_params``.

    Each tensor goes straight to its place. With ``quantize`` it is rounded as it is read, so that only a few blocks are
    ever in memory as floats. On a mesh, a matrix is split by the first axis of its outputs, and of its inputs.
    On one device, what was made of quantized tensors is kept (``jllama.cache``), and mapped the next time.
    Arguments and errors are those of ``load_params``.
    """
    config, dtypes = checkpoint.config, _dtypes(checkpoint, dtype, mesh)
    key = (
        None if mesh else _content_key(checkpoint, config, dtypes, quantize, joined_groups(config))
    )
    content: Any = cache.recall("weights", key) if key else None

    def mapped(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """The next array of what was kept."""
        nonlocal content
        num_bytes = math.prod(shape) * dtype.itemsize
        part, content = content[:num_bytes], content[num_bytes + -num_bytes % cache.ALIGNMENT :]
        return part.view(dtype).reshape(shape)

    def read(group: list[TensorSpec]) -> Any:
        """A tensor, or on one device several whose outputs are to stand behind each other."""
        row = group[0].parameter
        own = functools.reduce(np.promote_types, [dtypes[spec.path] for spec in group])
        tensor = rows_behind_rows([checkpoint.tensors[spec.key] for spec in group])
        split = matrix_sharding(mesh, row, config) if mesh else None
        sharding = split or SingleDeviceSharding(jax.devices()[0])
        shape = tensor.shape
        scale = np.empty(shape[0], own) if quantize and row.inputs else None
        held = own if scale is None else np.dtype(np.int8)

        def fill(part: list[slice], out: np.ndarray) -> None:
            _read(tensor, part, out, on_progress, scale)

        if content is None:
            values = _filled(shape, held, sharding, fill)
        else:
            values = jax.make_array_from_callback(shape, sharding, mapped(shape, held).__getitem__)
            scale = None if scale is None else mapped(scale.shape, own)
            on_progress(values.size * own.itemsize)
        if not row.inputs:
            return values
        scales = None
        if scale is not None:  # filled by now, as far as this process has its rows
            along_rows = (
                NamedSharding(split.mesh, PartitionSpec(*split.spec[:1])) if split else sharding
            )
            scales = jax.make_array_from_callback(scale.shape, along_rows, scale.__getitem__)
        is_one = len(group) == 1
        matrix_shape = shape_of(row, config)[row.axes[0] == "layers" :] if is_one else shape[::-1]
        return F.DecodeMatrix(values, scales, matrix_shape)

    groups = _groups(config, joins=mesh is None or mesh.size == 1)
    largest_first = sorted(
        groups, key=lambda key: -sum(math.prod(spec.shape) for spec in groups[key])
    )
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        found = (threads.map if content is None else map)(
            read, [groups[key] for key in largest_first]
        )
        leaves = dict(zip(largest_first, found, strict=True))
    if key and content is None:
        cache.keep("weights", key, jax.tree.leaves([*leaves.values()]))
    return DecodeParams(unflatten_dict(leaves, sep="/"))


def _groups(config: LlamaConfig, joins: bool) -> dict[str, list[TensorSpec]]:
    """The tensors that each leaf of ``DecodeParams.weights`` is made of, by its path: several of a joined matrix."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in tensor_specs(config):
        groups.setdefault(spec.joined_key if joins else spec.key, []).append(spec)
    return groups


def _content_key(checkpoint: Checkpoint, *how: Any) -> str | None:
    """The key of decoding weights by the bytes that they are made of; None if no tensor, or another one, takes work."""
    tensors = checkpoint.tensors
    types = {key: getattr(tensor, "quantized", "") for key, tensor in tensors.items()}
    arrays = {key: getattr(tensor, "stored", tensor) for key, tensor in tensors.items()}
    if not any(types.values()) or not all(
        isinstance(array, np.ndarray) for array in arrays.values()
    ):
        return None

    def digest(key: str) -> Any:
        array, kind = arrays[key], type(tensors[key]).__name__
        content = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        return key, kind, types[key], array.dtype, array.shape, content

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        return cache.key_of(how, [*threads.map(digest, sorted(arrays))])


def _dtypes(
    checkpoint: Checkpoint, dtype: Any, mesh: Mesh | None, rules: Any = RULES
) -> dict[str, np.dtype[Any]]:
    """The dtype of each parameter: the given one, or what holds those of all its layers; the mesh is checked first."""
    if mesh is not None:
        check_divides(mesh, checkpoint.config, rules)
    dtypes: dict[str, Any] = {}
    for spec in tensor_specs(checkpoint.config):
        own = checkpoint.tensors[spec.key].dtype
        dtypes[spec.path] = np.dtype(dtype or jnp.promote_types(own, dtypes.get(spec.path, own)))
    return dtypes


def _filled(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Sharding,
    fill: Callable[[list[slice], np.ndarray], None],
) -> jax.Array:
    """An array on its devices, of which ``fill`` writes the slices, each into memory that a CPU takes as it is."""

    def read(index: Any) -> np.ndarray:
        part = [slice(*each.indices(size)[:2]) for each, size in zip(index, shape, strict=True)]
        part_shape = [each.stop - each.start for each in part]
        memory = np.empty(math.prod(part_shape) * dtype.itemsize + 64, np.uint8)
        start = -memory.ctypes.data % 64  # JAX copies what does not begin at a multiple of it
        out = memory[start : start + memory.size - 64].view(dtype).reshape(part_shape)
        fill(part, out)
        return out

    return jax.make_array_from_callback(shape, sharding, read)


def _read(
    tensor: FileTensor,
    part: Sequence[slice],
    out: np.ndarray,
    on_progress: OnProgress,
    scale: np.ndarray | None = None,
) -> None:
    """Copy a part (rows, and columns of a matrix) into ``out``; with ``scale``, as int8 with the scale of each row.

    Copying is bound by memory, and NumPy lets go of Python's lock meanwhile; each thread holds a few blocks.
    """
    rows, *columns = part
    dtype = out.dtype if scale is None else scale.dtype
    for here, block in _row_blocks(tensor, rows, dtype):
        if scale is not None:  # of whole rows, whatever columns are asked for
            block, scale[here] = int8_rows(block, np)
        block = block[(slice(None), *columns)]
        _copy(block, out[here.start - rows.start : here.stop - rows.start])
        on_progress(block.size * dtype.itemsize)


def _copy(block: np.ndarray, out: np.ndarray) -> None:
    """Copy, where one of the two is transposed in square tiles: twice as fast as row by row."""
    if block.ndim == 1 or (block.strides[0] < block.strides[1]) == (
        out.strides[0] < out.strides[1]
    ):
        out[...] = block
        return
    for start in range(0, block.shape[0], _TILE):
        for left in range(0, block.shape[1], _TILE):
            tile = slice(start, start + _TILE), slice(left, left + _TILE)
            out[tile] = block[tile]


class TensorsOfParams(dict[str, FileTensor]):
    """The tensors of parameters in memory, of either layout, each (on a CPU) a view. int8 raises ``JllamaError``."""

    def __init__(self, config: LlamaConfig, params: Params | DecodeParams) -> None:
        super().__init__()
        if isinstance(params, DecodeParams) and params.quantized:
            raise JllamaError(
                "the parameters are int8, which no format holds: load the model without quantize"
            )
        self.params = params
        weights = params.weights if isinstance(params, DecodeParams) else params
        leaves: dict[str, Any] = flatten_dict(jax.tree.map(np.asarray, weights), sep="/")
        if isinstance(params, DecodeParams):
            joins = leaves.keys() == _groups(config, joins=True).keys()
            for path, group in _groups(config, joins).items():
                values = leaves[path].values if group[0].parameter.inputs else leaves[path]
                ends = np.cumsum([spec.shape[0] for spec in group])
                for spec, part in zip(group, np.split(values, ends[:-1]), strict=True):
                    self[spec.key] = part
            return
        for spec in tensor_specs(config):
            array = leaves[spec.path]
            part = array[spec.layer] if spec.parameter.axes[0] == "layers" else array
            self[spec.key] = as_matrix(spec.parameter, part)
