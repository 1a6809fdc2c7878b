"""GGUF files: keys with typed values; each tensor's name, sizes, type and offset; and the data.

The header is parsed and written here, and every number is checked against the file's size before it
is used. The ``gguf`` package knows the quantized types. Source: ggml's ``docs/gguf.md``.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize

from jllama.core import JllamaError
from jllama.formats.tensors import FileTensor, LazyTensor, OnProgress, blocks
from jllama.system.files import errors_as

MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ARRAY = 1 << 24
OURS = "jllama.rope_scaling."
"""Prefix of keys that only jllama writes and reads: the fields of the RoPE scaling.

For llama.cpp, other keys and ``ROPE_FREQS`` are computed from them.
"""

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64}
PLAIN = {GGMLQuantizationType[name]: np.dtype(type_) for name, type_ in _FLOATS.items()}
_NUMBERS = GGUFReader.gguf_scalar_to_np  # the NumPy type of each numeric value type


class _TensorInfo(NamedTuple):
    type_: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # from the start of the data


def _dequantize_lazily(
    stored: np.ndarray, type_: GGMLQuantizationType, shape: tuple[int, ...], mapped: Any
) -> LazyTensor:
    """Return a float32 tensor of rows stored as blocks of a GGML type; no block spans two rows.

    ``mapped`` is the file's ``mmap``: what was read does not stay in the process's memory.
    """

    def copy(rows: slice) -> np.ndarray:
        block = np.array(stored[rows])
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
        return block

    def read(rows: slice) -> np.ndarray:
        return dequantize(copy(rows), type_).reshape(-1, *shape[1:])

    blocks = LazyTensor(stored.shape, stored.dtype, copy)
    return LazyTensor(shape, PLAIN[GGMLQuantizationType.F32], read, 1, stored, type_.name, blocks)


def read_gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """Read the metadata and map the tensors of a GGUF file, versions 2 and 3, little-endian.

    A float32 of the metadata becomes the shortest decimal that rounds to it: 1e-05, not
    9.999999747378752e-06. In arrays of strings, bytes that are not UTF-8 become lone surrogates
    (``surrogateescape``). Tensors are ``[outputs, inputs]``, those of experts one below the other.
    If any tensor is quantized, 16-bit ones are read as float32, too.

    Raises:
        JllamaError: The file is truncated or makes no sense, or a tensor cannot be dequantized.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size < 24:
        raise JllamaError(
            f"there is no GGUF file at {path}, or it is truncated to less than a header"
        )
    # The header.
    data = np.memmap(path, np.uint8, "r")
    header = _Header(path, data.data)
    if header.take(4) != MAGIC:
        raise JllamaError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = header.number("I")
    if version not in (2, 3):
        kind = f"GGUF version {version}" if version & 0xFFFF else "a big-endian GGUF file"
        raise JllamaError(
            f"{path} is {kind}; versions 2 and 3, little-endian, can be read: convert it again"
        )

    # The metadata, and the place of each tensor.
    num_tensors = header.number("Q")
    num_keys = header.number("Q")
    metadata = header.entries("key", num_keys, header.value)
    infos = header.entries("tensor", num_tensors, header.tensor_info)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise JllamaError(f"{path} has general.alignment {alignment!r}; it must be a power of two")

    # The tensors, in the order of their offsets: they must fill the rest of the file without gaps.
    first = GGUFWriter.ggml_pad(header.offset, alignment)
    is_quantized = any(info.type_ not in PLAIN for info in infos.values())
    tensors = {}
    next_offset = 0
    previous = "the header"
    for name, info in sorted(infos.items(), key=lambda item: item[1].offset):
        stop = first + info.offset + _num_bytes(info.shape, info.type_)
        if stop > size:
            raise JllamaError(
                f"{path} is truncated: the tensor {name} ends "
                f"at byte {stop} of {size}: fetch it again"
            )
        if info.offset != next_offset:
            raise JllamaError(
                f"{path} has the tensor {name} at offset {info.offset}, expected {next_offset}, "
                f"right after {previous}: one has a wrong type or size, fetch it again"
            )
        stored = data[first + info.offset : stop]
        dtype = PLAIN.get(info.type_)
        shape = info.shape
        if len(shape) == 3:  # a matrix of each expert
            shape = (shape[0] * shape[1], shape[2])
        if dtype is None or (is_quantized and dtype.itemsize == 2):
            rows = stored.reshape(shape[0], -1)
            tensors[name] = _dequantize_lazily(rows, info.type_, shape, data.base)
        else:
            tensors[name] = stored.view(dtype).reshape(shape)
        next_offset = GGUFWriter.ggml_pad(stop - first, alignment)
        previous = name
    excess = size - first - next_offset
    if excess > 0:
        raise JllamaError(
            f"{path} has {excess} bytes after {previous}, "
            "so its type or size is wrong: fetch it again"
        )
    return metadata, tensors


def _num_bytes(shape: tuple[int, ...], type_: GGMLQuantizationType) -> int:
    return math.prod(quant_shape_to_byte_shape(shape, type_))


class _Header:
    """A position in a file's header, from which values are read, never past the file's end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes and move past them."""
        start = self.offset
        self.offset += num_bytes
        if self.offset > len(self.data):
            raise JllamaError(
                f"{self.path} is truncated: it has {len(self.data)} "
                f"bytes but its header goes to {self.offset}"
            )
        return self.data[start : self.offset]

    def number(self, code: str) -> Any:
        """Read a number of a type of ``struct``."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, errors: str = "strict") -> str:
        """Read a string after its length."""
        data = self.take(self.number("Q"))
        try:
            return str(data, "utf-8", errors)
        except UnicodeDecodeError as error:
            raise JllamaError(
                f"{self.path} has a string at byte "
                f"{self.offset - len(data)} that is not UTF-8: {error}"
            ) from error

    def entries(self, kind: str, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
        """Read ``count`` names, each followed by what ``read`` reads."""
        entries = {}
        for _ in range(count):
            name = self.text()
            if name in entries:
                raise JllamaError(f"{self.path} has the {kind} {name} twice")
            entries[name] = read(name)
        return entries

    def value(self, key: str) -> Any:
        """Read a value after its type."""
        type_ = self._type(GGUFValueType, f"key {key}")
        if type_ == GGUFValueType.ARRAY:
            type_ = self._type(GGUFValueType, f"key {key}")
            count = self.number("Q")
            if type_ == GGUFValueType.ARRAY or count > _MAX_ARRAY:
                raise JllamaError(
                    f"{self.path} claims {count} elements of type {type_.name} for {key}; "
                    f"at most {_MAX_ARRAY} are read, and no arrays within an array"
                )
            return self._values(type_, count, "surrogateescape")
        (value,) = self._values(type_, 1, "strict")
        return shortest(value) if type_ == GGUFValueType.FLOAT32 else value

    def _values(self, type_: GGUFValueType, count: int, errors: str) -> list[Any]:
        if type_ == GGUFValueType.STRING:
            return [self.text(errors) for _ in range(count)]
        dtype = np.dtype(_NUMBERS[type_])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def _type(self, types: Any, owner: str) -> Any:
        number = self.number("I")
        with errors_as(f"{self.path} has the {owner} of the unknown type {number}", ValueError):
            return types(number)

    def tensor_info(self, name: str) -> _TensorInfo:
        """Read the shape, type and offset of a tensor; ``JllamaError`` if it cannot be read."""
        num_dims = self.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise JllamaError(
                f"{self.path} has the tensor {name} with {num_dims} axes; GGUF has 1 to {_MAX_DIMS}"
            )
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]
        type_ = self._type(GGMLQuantizationType, f"tensor {name}")
        offset = self.number("Q")
        block, block_bytes = GGML_QUANT_SIZES[type_]
        tensor = f"{self.path} has the tensor {name} of shape {list(shape)} and type {type_.name}"
        if 0 in shape or shape[-1] % block or (block > 1 and num_dims == 1):
            raise JllamaError(
                f"{tensor}; only matrices may be quantized, "
                "and no row may be empty or end inside a block"
            )
        advice = f"{tensor}, which cannot be read: convert the model again, to another type"
        with errors_as(advice, NotImplementedError):
            if type_ not in PLAIN:  # whether the package can dequantize it shows only when it tries
                dequantize(np.zeros((1, block_bytes), np.uint8), type_)
        return _TensorInfo(type_, shape, offset)


def shortest(value: float) -> float:
    """Return the float64 with the shortest decimal that rounds to the same float32 as ``value``."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[tuple[str, FileTensor, GGMLQuantizationType]],
    on_progress: OnProgress,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Write a GGUF file of version 3, a block of rows at a time.

    ``shapes`` are those of tensors that have a matrix of each expert, by name.

    Integers have 32 bits, other numbers are float32, or float64 under keys of ``OURS``.

    Raises:
        JllamaError: These types cannot hold a number; nothing is written.
    """
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_encode_text(key) + _encode_value(key, value) for key, value in metadata.items()]
    offset = 0
    for name, tensor, type_ in tensors:
        dims = shapes.get(name, tensor.shape)[::-1]
        info = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)
        parts.append(_encode_text(name) + info)
        offset += GGUFWriter.ggml_pad(_num_bytes(tensor.shape, type_), _ALIGNMENT)
    header = b"".join(parts)
    with path.open("wb") as file:
        file.write(header + bytes(-len(header) % _ALIGNMENT))
        for _, tensor, type_ in tensors:
            for block in blocks(tensor, PLAIN.get(type_, np.dtype(np.float32))):
                data = block if type_ in PLAIN else quantize(block, type_)
                data.tofile(file)
                on_progress(data.nbytes)
            file.write(bytes(-_num_bytes(tensor.shape, type_) % _ALIGNMENT))


def _encode_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _encode_value(key: str, value: Any) -> bytes:
    """Encode a value after its type; an empty list is one of strings."""
    is_array = isinstance(value, list)
    values: list[Any] = value if is_array else [value]
    first = values[0] if values else ""
    if isinstance(first, str):
        type_ = GGUFValueType.STRING
    elif isinstance(first, bool):
        type_ = GGUFValueType.BOOL
    elif isinstance(first, float):
        type_ = GGUFValueType.FLOAT64 if key.startswith(OURS) else GGUFValueType.FLOAT32
    else:
        type_ = GGUFValueType.INT32 if is_array else GGUFValueType.UINT32
    is_inexact = type_ == GGUFValueType.FLOAT32 and not is_array and shortest(value) != value
    if is_inexact or (type_ == GGUFValueType.UINT32 and not 0 <= values[0] < 1 << 32):
        raise JllamaError(
            f"GGUF stores {key} as {type_.name}, which "
            f"cannot hold {value!r}: convert to hf or orbax"
        )
    if type_ in _NUMBERS:
        data = np.array(values, _NUMBERS[type_]).tobytes()
    else:
        data = b"".join(map(_encode_text, values))
    if is_array:
        return struct.pack("<IIQ", GGUFValueType.ARRAY, type_, len(values)) + data
    return struct.pack("<I", type_) + data
