"""Tensors of files, which are read a block of rows at a time, and the checkpoint that they form.

All file formats share this module. Files are mapped into memory: opening a checkpoint takes no
time, whatever its size, and only the requested rows are read.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jllama import functional as F
from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import (
    NamedFormat,
    Parameter,
    Params,
    axis_sizes,
    flatten_matrix,
    inputs_first,
    joined_groups,
    layer_places,
    matrix_shape,
    parameter_table,
    shape_of,
)
from jllama.kernels.linear import int8_rows
from jllama.models.decode_params import DecodeParams, Quantization
from jllama.parallel.sharding import RULES, check_divides, matrix_sharding, row_spec
from jllama.system import cache
from jllama.system.devices import num_cores
from jllama.tokenizers.base import Tokenizer

BLOCK_BYTES = 16 << 20
_TILE = 256
_THREADS = min(4, num_cores())

Dtype = np.dtype | type
OnProgress = Callable[[int], None]
"""Receives the number of bytes that were read or written since the last call."""


class TensorSpec(NamedTuple):
    """A tensor of a file: a parameter outside the layers, or one layer of a parameter."""

    key: str  # path among unstacked parameters, such as embed or layers/3/wq
    path: str  # path in the table, such as embed or layers/wq
    parameter: Parameter
    layer: int  # 0 outside the layers
    place: int  # of the layer in the stack of ``path``
    shape: tuple[int, ...]  # ``matrix_shape``, the same in every file format

    def name(self, file_format: NamedFormat) -> str:
        """Return the tensor's name in files of a format."""
        return self.parameter.name(file_format, self.layer)


def tensor_specs(config: LlamaConfig) -> list[TensorSpec]:
    """Return all tensors of a model's file: the embedding, layer by layer, then the others."""
    table = parameter_table(config)
    first, *last = (path for path in table if not path.startswith("layers/"))
    in_layers = [
        (f"layers/{name}", layer, place)
        for layer, places in enumerate(layer_places(config))
        for name, place in places.items()
    ]
    specs = []
    for path, layer, place in [(first, 0, 0), *in_layers, *((path, 0, 0) for path in last)]:
        row = table[path]
        key = path.replace("/", f"/{layer}/")
        specs.append(TensorSpec(key, path, row, layer, place, matrix_shape(row, config)))
    return specs


def as_matrix(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """Return a view of one layer (or a part of it) as ``[outputs, inputs]``, or flat for a norm."""
    if not parameter.inputs:
        return array.reshape(-1)
    matrix = flatten_matrix(parameter, array)
    return matrix.T if inputs_first(parameter) else matrix


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A matrix ``[outputs, inputs]`` or a vector whose rows are computed when they are read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[slice], np.ndarray]  # takes a slice with start and stop, of step 1
    rows_at_once: int = 1  # rows that are stored together: reading fewer costs as much
    stored: np.ndarray | None = None  # what it is computed from, if that is one array
    quantized: str = ""  # GGML's type of ``stored``; empty if it is not quantized
    blocks: Any = None  # the same rows as bytes of that type, [outputs, bytes], if it is quantized

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        return self.read(rows)


FileTensor = np.ndarray | LazyTensor  # read by rows; an array may be a memory map
Renamed = Sequence[tuple[str, str]]  # parts of names in most files, and in those of a family
NamedTensor = tuple[str, FileTensor, np.dtype]  # to write: name, tensor, dtype in the file


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk, or one to be written, of any format; fields as in ``LanguageModel``."""

    config: LlamaConfig
    # By TensorSpec.key, each of TensorSpec.shape, with rotary channels half-split.
    tensors: Mapping[str, FileTensor]
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()  # empty if the files have none
    step: int | None = None
    adapter: Any = None  # the ``Adapter`` that was merged last, if any


def permuted(tensor: FileTensor, head_dim: int, to_half_split: bool) -> LazyTensor:
    """Reorder the rows of each head of a rotary matrix, as they are read.

    From interleaved pairs of channels to half-split ones, or (``to_half_split`` False) back.
    """
    half = head_dim // 2
    pairs = (half, 2) if to_half_split else (2, half)

    def read(rows: slice) -> np.ndarray:
        """Read the heads that the rows belong to, reorder them, and cut out the rows."""
        first = rows.start // head_dim * head_dim
        last = -(-rows.stop // head_dim) * head_dim
        heads = tensor[first:last].reshape(-1, *pairs, *tensor.shape[1:])
        whole = heads.swapaxes(1, 2).reshape(-1, *tensor.shape[1:])
        return whole[rows.start - first : rows.stop - first]

    if isinstance(tensor, LazyTensor):
        rows_at_once = math.lcm(head_dim, tensor.rows_at_once)
        stored = tensor.blocks
        if stored is not None:
            stored = permuted(stored, head_dim, to_half_split)
        return dataclasses.replace(tensor, read=read, rows_at_once=rows_at_once, blocks=stored)
    return LazyTensor(tensor.shape, tensor.dtype, read, head_dim, tensor)


def concatenate_rows(tensors: Sequence[FileTensor]) -> FileTensor:
    """Join matrices with the same inputs to one, the rows of each behind those before it."""
    if len(tensors) == 1:
        return tensors[0]

    def read(rows: slice) -> np.ndarray:
        parts = []
        start = 0  # the first row of this tensor in the joined matrix
        for tensor in tensors:
            num_rows = tensor.shape[0]
            first = min(max(rows.start - start, 0), num_rows)
            last = min(max(rows.stop - start, 0), num_rows)
            if first < last or rows.start == rows.stop:
                parts.append(tensor[first:last])
            start += num_rows
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    shape = sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:]
    dtype = functools.reduce(jnp.promote_types, [tensor.dtype for tensor in tensors])
    rows_at_once = math.lcm(*(getattr(tensor, "rows_at_once", 1) for tensor in tensors))
    joined = LazyTensor(shape, dtype, read, rows_at_once)
    kinds = {getattr(tensor, "quantized", "") for tensor in tensors}
    stored: list[Any] = [getattr(tensor, "blocks", None) for tensor in tensors]
    if len(kinds) == 1 and all(part is not None for part in stored):
        joined = dataclasses.replace(joined, quantized=kinds.pop(), blocks=concatenate_rows(stored))
    return joined


def reorder_rotary(
    spec: TensorSpec, tensor: FileTensor, config: LlamaConfig, to_half_split: bool
) -> FileTensor:
    """Convert a tensor to or from formats in which rotary channels are interleaved pairs.

    ``to_half_split`` converts from the format to ``Checkpoint``. A tensor that is not rotary is
    returned unchanged.
    """
    return permuted(tensor, config.head_dim, to_half_split) if spec.parameter.rotary else tensor


def blocks(tensor: FileTensor, dtype: Dtype) -> Iterator[np.ndarray]:
    """Yield a tensor's rows in order, as contiguous blocks of about ``BLOCK_BYTES`` in ``dtype``.

    Raises:
        JllamaError: A number is too large for the dtype (float16 ends at 65,504).
    """
    for _, block in _read_blocks(tensor, slice(0, tensor.shape[0]), dtype):
        yield np.ascontiguousarray(block)


def _read_blocks(
    tensor: FileTensor, rows: slice, dtype: Dtype
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield some rows in blocks, each with its slice; groups of ``rows_at_once`` stay whole."""
    multiple = getattr(tensor, "rows_at_once", 1)
    rows_per_block = BLOCK_BYTES // (4 * math.prod(tensor.shape[1:]))
    step = multiple * max(1, rows_per_block // multiple)
    for start in range(rows.start, rows.stop, step):
        place = slice(start, min(start + step, rows.stop))
        try:
            with np.errstate(over="raise"):
                block = tensor[place].astype(dtype, copy=False)
        except FloatingPointError as error:
            raise JllamaError(
                f"a weight is too large for {np.dtype(dtype).name}: choose bfloat16 or float32"
            ) from error
        yield place, block


def have_same_bits(tensor: FileTensor, other: FileTensor) -> bool:
    """Return whether two tensors are equal in shape, dtype and every bit."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    pairs = zip(blocks(tensor, tensor.dtype), blocks(other, other.dtype), strict=True)
    return all(np.array_equal(one.view(np.uint8), two.view(np.uint8)) for one, two in pairs)


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Describe the entries in which two mappings differ; empty if they are equal."""
    return "; ".join(
        f"{key} is {actual.get(key, 'absent')}, expected {expected.get(key, 'none')}"
        for key in {**expected, **actual}
        if actual.get(key) != expected.get(key)
    )


def row_range(tensor: FileTensor, start: int, size: int) -> FileTensor:
    """Return some rows of a matrix: one of those that were joined to it."""
    if isinstance(tensor, np.ndarray):
        return tensor[start : start + size]

    def read(rows: slice) -> np.ndarray:
        return tensor[slice(start + rows.start, start + rows.stop)]

    stored = tensor.blocks
    if stored is not None:
        stored = row_range(stored, start, size)
    shape = (size, *tensor.shape[1:])
    return dataclasses.replace(tensor, shape=shape, read=read, stored=None, blocks=stored)


def file_tensors(
    config: LlamaConfig,
    file_format: NamedFormat,
    is_fused: bool = False,
    renamed: Renamed = (),
) -> dict[str, list[TensorSpec]]:
    """Return what each tensor of a file holds, by its name; several if they are fused to one."""
    specs: dict[str, list[TensorSpec]] = {}
    for spec in tensor_specs(config):
        name = spec.name(file_format)
        if is_fused:
            name = spec.parameter.fused_name(file_format, spec.layer)
        for usual, own in renamed:
            name = name.replace(usual, own)
        specs.setdefault(name, []).append(spec)
    return specs


def names_of_experts(name: str, config: LlamaConfig) -> list[str]:
    """Return the names of a tensor's parts, if files have one for each expert, or its own name."""
    if "{}" not in name:
        return [name]
    return [name.format(expert) for expert in range(config.num_experts)]


def match_tensors(
    tensors: Mapping[str, FileTensor],
    config: LlamaConfig,
    file_format: NamedFormat,
    source: Path,
    *,
    is_fused: bool = False,
    is_interleaved: bool = True,
    renamed: Renamed = (),
) -> dict[str, FileTensor]:
    """Return a file's tensors by ``TensorSpec.key``, with rotary channels half-split.

    Args:
        tensors: The file's tensors.
        config: The architecture.
        file_format: The file's format.
        source: The file, for messages.
        is_fused: Whether the file has joined matrices (``parameters.FUSED``).
        is_interleaved: Whether its rotary channels are interleaved pairs.
        renamed: Parts of the names of tensors, and what they are in this file.

    Raises:
        JllamaError: A tensor is missing, not of this model, or of another shape; all are listed.
    """
    if config.num_layers > len(tensors):
        raise JllamaError(
            f"{source} says it has {config.num_layers} layers, "
            f"but holds {len(tensors)} tensors in all"
        )
    named = file_tensors(config, file_format, is_fused, renamed)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    expected = {}
    for name, specs in named.items():
        parts = names_of_experts(name, config)
        rows = sum(spec.shape[0] for spec in specs) // len(parts)
        expected |= {part: [rows, *specs[0].shape[1:]] for part in parts}
    problems = differences(shapes, expected)
    if problems:
        raise JllamaError(
            f"{source} does not hold the model that its configuration describes: {problems}"
        )
    matched = {}
    for name, specs in named.items():
        start = 0
        whole = concatenate_rows([tensors[part] for part in names_of_experts(name, config)])
        for spec in specs:
            part = whole
            if len(specs) > 1:
                part = row_range(part, start, spec.shape[0])
                start += spec.shape[0]
            if is_interleaved:
                part = reorder_rotary(spec, part, config, to_half_split=True)
            matched[spec.key] = part
    return matched


def tensors_to_write(
    checkpoint: Checkpoint,
    file_format: NamedFormat,
    *,
    is_fused: bool = False,
    is_interleaved: bool = True,
    renamed: Renamed = (),
) -> Iterator[tuple[str, TensorSpec, FileTensor]]:
    """Yield what ``match_tensors`` reads: each name, the first tensor under it, and the content."""
    config = checkpoint.config
    for name, specs in file_tensors(config, file_format, is_fused, renamed).items():
        tensor = concatenate_rows([checkpoint.tensors[spec.key] for spec in specs])
        if is_interleaved:
            tensor = reorder_rotary(specs[0], tensor, config, to_half_split=False)
        parts = names_of_experts(name, config)
        rows = tensor.shape[0] // len(parts)
        for index, part in enumerate(parts):
            content = tensor if len(parts) == 1 else row_range(tensor, index * rows, rows)
            yield part, specs[0], content


def size_bytes(checkpoint: Any, dtype: Dtype | None) -> int:
    """Return the bytes of all tensors, in ``dtype`` or (None) each in its own dtype."""
    tensors = checkpoint.tensors.values()
    return sum(
        math.prod(tensor.shape) * np.dtype(dtype or tensor.dtype).itemsize for tensor in tensors
    )


def base_fingerprint(checkpoint: Checkpoint) -> str:
    """Compute the hash by which an adapter recognizes its base: ``norms:rows``, each SHA-256.

    ``norms`` hashes all norms, ``rows`` the first row of every matrix, rounded to bfloat16, in
    the order of ``tensor_specs``. Matrices that were rounded otherwise (float16, or
    GGUF's quantized types) are left out: then the fingerprint is ``norms`` alone. An adapter that
    is merged into the checkpoint counts among its norms.
    """
    norms = hashlib.sha256()
    rows = hashlib.sha256()
    for spec in tensor_specs(checkpoint.config):
        digest, num_rows = (rows, 1) if spec.parameter.inputs else (norms, spec.shape[0])
        digest.update(checkpoint.tensors[spec.key][0:num_rows].astype(jnp.bfloat16).tobytes())
    if checkpoint.adapter:
        for key, tensor in checkpoint.adapter.tensors.items():
            norms.update(key.encode() + tensor.tobytes())
    is_rounded = any(
        tensor.dtype == np.float16 or getattr(tensor, "quantized", "")
        for tensor in checkpoint.tensors.values()
    )
    return norms.hexdigest() if is_rounded else f"{norms.hexdigest()}:{rows.hexdigest()}"


def load_params(
    checkpoint: Checkpoint,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    on_progress: OnProgress = lambda _: None,
    rules: Mapping[str, Sequence[str]] = RULES,
    convert: Callable[[str, Any], Any] = lambda path, stack: stack,
) -> Params:
    """Read parameters into the training layout, layers stacked, straight onto their devices.

    Each device gets its slice, and a process reads no more than the slices of its own devices.

    Args:
        checkpoint: The checkpoint to read.
        dtype: Dtype of all parameters; None keeps each parameter's own.
        mesh: Splits the parameters over devices; None puts them on the first device.
        on_progress: Receives the bytes read, counted in ``dtype``.
        rules: The mesh axes that each parameter axis may be split over.
        convert: ``convert(path, stack)`` returns the replacement of each parameter. It is called
            before the next parameter is read, the largest first, so that a device holds one at a
            time as it was read.

    Raises:
        UsageError: An axis does not divide over the mesh.
    """
    config = checkpoint.config
    dtypes = _parameter_dtypes(checkpoint, dtype, mesh, rules)
    table = parameter_table(config)
    shapes = {path: shape_of(row, config) for path, row in table.items()}
    arrays = dict.fromkeys(table)
    for path in sorted(table, key=lambda path: -math.prod(shapes[path])):
        sharding: Sharding = SingleDeviceSharding(jax.devices()[0])
        if mesh:
            sharding = NamedSharding(mesh, row_spec(mesh, table[path], config, rules))
        fill = functools.partial(_fill_stack, path, checkpoint, on_progress)
        arrays[path] = convert(path, _make_array(shapes[path], dtypes[path], sharding, fill))
        jax.block_until_ready(arrays[path])
    return unflatten_dict(arrays, sep="/")


def _fill_stack(
    path: str,
    checkpoint: Checkpoint,
    on_progress: OnProgress,
    slices: list[slice],
    out: np.ndarray,
) -> None:
    """Read a part of a parameter (a slice of each axis) from its layers' tensors into ``out``."""
    specs = [spec for spec in tensor_specs(checkpoint.config) if spec.path == path]
    row = specs[0].parameter
    sizes = axis_sizes(row, checkpoint.config)
    bounds = dict(zip(row.axes, slices, strict=True))
    layers = [out]
    if "layers" in bounds:
        specs = specs[bounds["layers"]]
        layers = list(out)
    tensors = [checkpoint.tensors[spec.key] for spec in specs]
    outputs = row.outputs
    if "experts" in outputs:  # the matrices of experts are read one by one
        outputs = tuple(axis for axis in outputs if axis != "experts")
        rows = math.prod(sizes[axis] for axis in outputs)
        experts = range(sizes["experts"])[bounds["experts"]]
        tensors = [row_range(tensor, index * rows, rows) for tensor in tensors for index in experts]
        matrices = [matrix for layer in layers for matrix in layer]
    else:
        matrices = [as_matrix(row, layer) for layer in layers]

    # In a file several axes are joined to one. Of these, only the first may be split over devices.
    part = []
    for axes in (outputs, row.inputs):
        if axes:
            inner = math.prod(sizes[axis] for axis in axes[1:])
            first = bounds[axes[0]]
            part.append(slice(first.start * inner, first.stop * inner))
    read = functools.partial(_read_part, dtype=out.dtype, on_progress=on_progress, part=part)
    _map_in_threads(lambda tensor, matrix: read(tensor, out=matrix), tensors, matrices)


def _map_in_threads(function: Callable[..., Any], *iterables: Iterable[Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, *iterables))


class _Group(NamedTuple):
    """The tensors of one leaf of ``DecodeParams.weights``; a joined matrix has several."""

    specs: list[TensorSpec]
    tensor: Any  # FileTensor: all of them, outputs behind outputs
    dtype: np.dtype  # of its floats
    layout: list[tuple[tuple[int, ...], np.dtype]]  # of its values and, for int8, its scale
    kernel: str = ""  # of ``F.DecodeMatrix``


def load_decode_params(
    checkpoint: Checkpoint,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
    on_progress: OnProgress = lambda _: None,
    quantize: Quantization | None = None,
    keeps_blocks: bool = False,
) -> DecodeParams:
    """Read parameters into the decoding layout; equals ``decode_layout`` of ``load_params``.

    With ``keeps_blocks``, matrices in GGML types that have kernels keep their bytes, but not those
    of experts.

    Each tensor goes straight to its place. With ``quantize`` it is rounded as it is read, so that
    only a few blocks are in memory as floats at any time. On a mesh, a matrix is split by the first
    axis of its outputs and the first of its inputs. On one device, weights computed from quantized
    tensors are cached (``jllama.system.cache``) and mapped the next time. Arguments and errors are
    those of ``load_params``.
    """
    config = checkpoint.config
    dtypes = _parameter_dtypes(checkpoint, dtype, mesh)
    is_one_device = mesh is None or mesh.size == 1
    kernels = dict.fromkeys(checkpoint.tensors, "")
    if keeps_blocks and is_one_device:
        kernels = {spec.key: _kernel_of(checkpoint, spec) for spec in tensor_specs(config)}
    # What to read, the largest first. A layer's matrices are joined where they have one kernel.
    joined_layers = set(range(config.num_layers if is_one_device else 0))
    for specs in _group_specs(config, joined_layers).values():
        if len({kernels[spec.key] for spec in specs}) > 1:
            joined_layers.discard(specs[0].layer)
    groups = {}
    for path, specs in _group_specs(config, joined_layers).items():
        tensor: Any = concatenate_rows([checkpoint.tensors[spec.key] for spec in specs])
        own = functools.reduce(np.promote_types, [dtypes[spec.path] for spec in specs])
        row = specs[0].parameter
        kernel = kernels[specs[0].key]
        layout = [(tensor.shape, own)]
        if kernel:
            layout = [(tensor.blocks.shape, np.dtype(np.uint8))]
        elif quantize and row.inputs and row.rounds:
            layout = [(tensor.shape, np.dtype(np.int8)), (tensor.shape[:1], own)]
            kernel = F.choose_kernel(quantize, tensor.shape[1]) if is_one_device else ""
        groups[path] = _Group(specs, tensor, own, layout, kernel)
    groups = dict(sorted(groups.items(), key=lambda item: -math.prod(item[1].tensor.shape)))

    # Read it, from the cache if it is there.
    key = None
    if mesh is None and not any(kernels.values()):
        key = _content_key(checkpoint, config, dtypes, quantize, joined_groups(config))
    content = cache.load("weights", key) if key else None
    cached = {} if content is None else _map_arrays(content, groups)

    def read(path: str) -> Any:
        return _read_group(groups[path], cached.get(path), mesh, config, on_progress)

    leaves = dict(zip(groups, _map_in_threads(read, groups), strict=True))
    if key and content is None:
        cache.store("weights", key, jax.tree.leaves([*leaves.values()]))
    return DecodeParams(unflatten_dict(leaves, sep="/"))


def _map_arrays(content: np.ndarray, groups: Mapping[str, _Group]) -> dict[str, list[np.ndarray]]:
    """Return views of the arrays in cached bytes, which hold those of each group in this order."""
    arrays = {path: [] for path in groups}
    start = 0
    for path, group in groups.items():
        for shape, dtype in group.layout:
            stop = start + math.prod(shape) * dtype.itemsize
            arrays[path].append(content[start:stop].view(dtype).reshape(shape))
            start = stop + -stop % cache.ALIGNMENT
    return arrays


def _read_group(
    group: _Group,
    cached: list[np.ndarray] | None,
    mesh: Mesh | None,
    config: LlamaConfig,
    on_progress: OnProgress,
) -> Any:
    """Read one leaf of ``DecodeParams.weights`` onto its devices, or take it from ``cached``."""
    row = group.specs[0].parameter
    sharding: Sharding = SingleDeviceSharding(jax.devices()[0])
    scale_sharding = sharding
    if mesh:
        split = matrix_sharding(mesh, row, config)
        sharding = split
        scale_sharding = NamedSharding(mesh, PartitionSpec(*split.spec[:1]))
    (shape, dtype), *scale_layout = group.layout
    if cached:
        stored, *scales = cached
        values = _put(stored, sharding)
        on_progress(values.size * group.dtype.itemsize)
    else:
        scales = [np.empty(*layout) for layout in scale_layout]  # one for int8, else none

        is_blocks = dtype == np.uint8

        def fill(part: Sequence[slice], out: np.ndarray) -> None:
            if is_blocks:
                _read_part(group.tensor.blocks, part, out, dtype, lambda _: None)
                on_progress(math.prod(group.tensor.shape) * group.dtype.itemsize)
                return
            row_scales = _read_part(group.tensor, part, out, group.dtype, on_progress)
            for scale in scales:
                scale[part[0]] = row_scales

        values = _make_array(shape, dtype, sharding, fill)
    sizes = axis_sizes(row, config)
    own_shape = tuple(sizes[axis] for axis in row.axes if axis != "layers")
    if not row.inputs:
        return values.reshape(own_shape)
    # The scale is complete by now, as far as this process has its rows.
    scale = _put(scales[0], scale_sharding) if scales else None
    matrix_shape = own_shape if len(group.specs) == 1 else group.tensor.shape[::-1]
    return F.DecodeMatrix(values, scale, matrix_shape, group.kernel)


def _put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _kernel_of(checkpoint: Checkpoint, spec: TensorSpec) -> str:
    """Return the kernel that multiplies a tensor's blocks as they are; empty if there is none."""
    tensor: Any = checkpoint.tensors[spec.key]
    if getattr(tensor, "blocks", None) is None or "experts" in spec.parameter.axes:
        return ""
    return F.choose_kernel(tensor.quantized, tensor.shape[1])


def _group_specs(config: LlamaConfig, joined_layers: Container[int]) -> dict[str, list[TensorSpec]]:
    """Return the tensors of each leaf of ``DecodeParams.weights``, by the leaf's path.

    In ``joined_layers`` matrices are joined as ``joined_groups`` says.
    """
    groups = {}
    for spec in tensor_specs(config):
        joined = spec.parameter.joined
        is_joined = joined and spec.layer in joined_layers
        path = f"layers/{spec.layer}/{joined}" if is_joined else spec.key
        groups.setdefault(path, []).append(spec)
    return groups


def _content_key(checkpoint: Checkpoint, *layout: Any) -> str | None:
    """Compute the cache key of decoding weights from the bytes that they are computed from.

    Return None unless some tensor is quantized and all are arrays (of a file, say), whose bytes are
    known.
    """
    tensors = checkpoint.tensors
    is_quantized = any(getattr(tensor, "quantized", "") for tensor in tensors.values())
    arrays = [getattr(tensor, "stored", tensor) for tensor in tensors.values()]
    if not is_quantized or not all(isinstance(array, np.ndarray) for array in arrays):
        return None
    return cache.key_of(layout, _map_in_threads(_digest, sorted(tensors.items())))


def _digest(item: tuple[str, FileTensor]) -> Any:
    """Describe a tensor with a hash of the bytes that it is computed from."""
    key, tensor = item
    array: Any = getattr(tensor, "stored", tensor)
    content = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    kind = type(tensor).__name__
    return key, kind, getattr(tensor, "quantized", ""), array.dtype, array.shape, content


def _parameter_dtypes(
    checkpoint: Checkpoint, dtype: Any, mesh: Mesh | None, rules: Any = RULES
) -> dict[str, np.dtype]:
    """Return each parameter's dtype: ``dtype``, or (None) one that holds those of its layers.

    The mesh is checked first: ``UsageError`` if an axis does not divide over it.
    """
    if mesh is not None:
        check_divides(mesh, checkpoint.config, rules)
    dtypes = {}
    for spec in tensor_specs(checkpoint.config):
        own = checkpoint.tensors[spec.key].dtype
        dtypes[spec.path] = np.dtype(dtype or jnp.promote_types(own, dtypes.get(spec.path, own)))
    return dtypes


def _make_array(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    fill: Callable[[list[slice], np.ndarray], None],
) -> jax.Array:
    """Make an array on its devices, in memory that a CPU does not copy; ``fill`` writes a part."""

    def read(index: Any) -> np.ndarray:
        part = [slice(*axis.indices(size)[:2]) for axis, size in zip(index, shape, strict=True)]
        part_shape = [axis.stop - axis.start for axis in part]
        memory = np.empty(math.prod(part_shape) * dtype.itemsize + 64, np.uint8)
        start = -memory.ctypes.data % 64  # a CPU copies what does not begin at a multiple of 64
        out = memory[start : start + memory.size - 64].view(dtype).reshape(part_shape)
        fill(part, out)
        return out

    return jax.make_array_from_callback(shape, sharding, read)


def _read_part(
    tensor: FileTensor,
    part: Sequence[slice],
    out: np.ndarray,
    dtype: np.dtype,
    on_progress: OnProgress,
) -> np.ndarray:
    """Copy a part (rows, and columns of a matrix) into ``out``, and return the scale of each row.

    Scales are 1 unless ``out`` is int8; ``dtype`` is that of the floats. Copying is bound by
    memory, and NumPy releases Python's lock meanwhile; each thread holds a few blocks.
    """
    rows, *columns = part
    scale = np.ones(rows.stop - rows.start, dtype)
    for place, block in _read_blocks(tensor, rows, dtype):
        within = slice(place.start - rows.start, place.stop - rows.start)
        if out.dtype == np.int8:  # of the whole row, even if only some columns are requested
            block, scale[within] = int8_rows(block, np)
        block = block[(slice(None), *columns)]
        _copy(block, out[within])
        on_progress(block.size * dtype.itemsize)
    return scale


def _copy(block: np.ndarray, out: np.ndarray) -> None:
    """Copy ``block`` to ``out``, in square tiles if one is transposed: twice as fast as by rows."""
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
    """The tensors of parameters in memory, of either layout; on a CPU each is a view.

    Raises:
        JllamaError: The parameters are int8.
    """

    def __init__(self, config: LlamaConfig, params: Params | DecodeParams) -> None:
        super().__init__()
        self.params = params
        is_decode = isinstance(params, DecodeParams)
        if is_decode and params.quantized:
            raise JllamaError(
                "the parameters are int8, which no format holds: load the model without quantize"
            )
        weights = params.weights if is_decode else params
        leaves: dict[str, Any] = flatten_dict(jax.tree.map(np.asarray, weights), sep="/")
        if not is_decode:
            for spec in tensor_specs(config):
                array = leaves[spec.path]
                part = array[spec.place] if spec.parameter.axes[0] == "layers" else array
                self[spec.key] = as_matrix(spec.parameter, part)
            return
        layers = {
            spec.layer
            for spec in tensor_specs(config)
            if f"layers/{spec.layer}/{spec.parameter.joined}" in leaves
        }
        for path, group in _group_specs(config, layers).items():
            leaf = leaves[path]
            values = leaf.values if group[0].parameter.inputs else leaf.reshape(-1)
            ends = np.cumsum([spec.shape[0] for spec in group])
            for spec, part in zip(group, np.split(values, ends[:-1]), strict=True):
                self[spec.key] = part
                if group[0].parameter.inputs and leaf.is_blocks:
                    self[spec.key] = _tensor_of_blocks(leaf.kernel, part, spec.shape)


def _tensor_of_blocks(kind: str, stored: np.ndarray, shape: tuple[int, ...]) -> LazyTensor:
    """Return a matrix whose rows are blocks of a GGML type that has a kernel."""

    def read(rows: slice) -> np.ndarray:
        return np.asarray(F.DecodeMatrix(stored, None, shape, kind)[rows])

    return LazyTensor(shape, np.dtype(np.float32), read, quantized=kind, blocks=stored)
