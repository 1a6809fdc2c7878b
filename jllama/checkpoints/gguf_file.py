"""GGUF files: keys with typed values, then each tensor's name, sizes, type and offset, then the tensors, aligned.

The header is parsed and written here, every number checked against the file's size before it is believed; the ``gguf``
package knows the quantized types. Source: ggml's ``docs/gguf.md``.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize

from jllama.checkpoints.tensors import FileTensor, LazyTensor, OnProgress, blocks
from jllama.errors import JllamaError
from jllama.files import fault_of

MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_MAX_DIMS, _MAX_ARRAY = 4, 1 << 24
OURS = "jllama.rope_scaling."
"""Keys that only jllama writes and reads: the fields of the scaling, which llama.cpp has folded into other numbers."""

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64}
PLAIN = {GGMLQuantizationType[name]: np.dtype(type_) for name, type_ in _FLOATS.items()}
_NUMBERS = GGUFReader.gguf_scalar_to_np  # the NumPy type of each numeric value type

_TensorInfo = tuple[
    GGMLQuantizationType, tuple[int, ...], int
]  # type, shape, offset from where the tensors begin


def _quantized(
    stored: np.ndarray, type_: GGMLQuantizationType, shape: tuple[int, ...]
) -> LazyTensor:
    """A tensor whose rows are stored as blocks of a GGML type, none across two. Reading dequantizes to float32."""

    def read(rows: slice) -> np.ndarray:
        return dequantize(np.ascontiguousarray(stored[rows]), type_).reshape(-1, *shape[1:])

    return LazyTensor(
        shape, PLAIN[GGMLQuantizationType.F32], read, stored=stored, quantized=type_.name
    )


def read_gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """Read the metadata and map the tensors of a GGUF file, versions 2 and 3, little-endian.

    A float32 of the metadata is the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06. In arrays of
    strings, bytes that are not UTF-8 become lone surrogates (``surrogateescape``). Tensors are ``[outputs, inputs]``;
    beside quantized ones, 16-bit ones too are read as float32. A file that is truncated or makes no sense, or a tensor
    that cannot be dequantized, raises JllamaError.
    """
    if not path.is_file() or (size := path.stat().st_size) < 24:
        raise JllamaError(
            f"there is no GGUF file at {path}, or it is truncated to less than a header"
        )
    data = np.memmap(path, np.uint8, "r")
    header = _Header(path, data.data)
    if header.take(4) != MAGIC:
        raise JllamaError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    if (version := header.number("I")) not in (2, 3):
        what = "a big-endian GGUF file" if not version & 0xFFFF else f"GGUF version {version}"
        raise JllamaError(
            f"{path} is {what}; versions 2 and 3, little-endian, can be read: convert it again"
        )
    num_tensors, num_keys = header.number("Q"), header.number("Q")
    metadata = header.named("key", num_keys, header.value)
    infos: dict[str, _TensorInfo] = header.named("tensor", num_tensors, header.tensor_info)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise JllamaError(f"{path} has general.alignment {alignment!r}; it must be a power of two")
    first = GGUFWriter.ggml_pad(header.offset, alignment)
    is_quantized = any(type_ not in PLAIN for type_, _, _ in infos.values())
    tensors: dict[str, FileTensor] = {}
    next_offset, previous = 0, "the header"
    for name, (type_, shape, offset) in sorted(infos.items(), key=lambda item: item[1][2]):
        stop = first + offset + _num_bytes(shape, type_)
        if stop > size:
            raise JllamaError(
                f"{path} is truncated: the tensor {name} ends at byte {stop} of {size}: fetch it again"
            )
        if offset != next_offset:
            where = f"at offset {offset}, expected {next_offset}, right after {previous}"
            raise JllamaError(
                f"{path} has the tensor {name} {where}: one has a wrong type or size, fetch it again"
            )
        stored = data[first + offset : stop]
        if type_ in PLAIN and not (is_quantized and PLAIN[type_].itemsize == 2):
            tensors[name] = stored.view(PLAIN[type_]).reshape(shape)
        else:
            tensors[name] = _quantized(stored.reshape(shape[0], -1), type_, shape)
        next_offset, previous = GGUFWriter.ggml_pad(stop - first, alignment), name
    if (excess := size - first - next_offset) > 0:
        raise JllamaError(
            f"{path} has {excess} bytes after {previous}, so its type or size is wrong: fetch it again"
        )
    return metadata, tensors


def _num_bytes(shape: tuple[int, ...], type_: GGMLQuantizationType) -> int:
    return math.prod(quant_shape_to_byte_shape(shape, type_))


class _Header:
    """A position in a file's header, from which one value after another is read, never past the file's end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.offset = path, data, 0

    def take(self, num_bytes: int) -> memoryview:
        start, self.offset = self.offset, self.offset + num_bytes
        if self.offset > (size := len(self.data)):
            raise JllamaError(
                f"{self.path} is truncated: it has {size} bytes but its header goes to {self.offset}"
            )
        return self.data[start : self.offset]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, errors: str = "strict") -> str:
        data = self.take(self.number("Q"))
        try:
            return str(data, "utf-8", errors)
        except UnicodeDecodeError as error:
            start = self.offset - len(data)
            raise JllamaError(
                f"{self.path} has a string at byte {start} that is not UTF-8: {error}"
            ) from error

    def named(self, what: str, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
        entries = {}
        for _ in range(count):
            if (name := self.text()) in entries:
                raise JllamaError(f"{self.path} has the {what} {name} twice")
            entries[name] = read(name)
        return entries

    def value(self, key: str) -> Any:
        type_, count, errors = self._type(GGUFValueType, f"key {key}"), 1, "strict"
        if is_array := type_ == GGUFValueType.ARRAY:
            type_, count, errors = (
                self._type(GGUFValueType, f"key {key}"),
                self.number("Q"),
                "surrogateescape",
            )
            if type_ == GGUFValueType.ARRAY or count > _MAX_ARRAY:
                what = f"at most {_MAX_ARRAY} are read, and no arrays within an array"
                raise JllamaError(
                    f"{self.path} claims {count} elements of type {type_.name} for {key}; {what}"
                )
        if type_ == GGUFValueType.STRING:
            values: list[Any] = [self.text(errors) for _ in range(count)]
        else:
            dtype = np.dtype(_NUMBERS[type_])
            values = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if is_array:
            return values
        return shortest(values[0]) if type_ == GGUFValueType.FLOAT32 else values[0]

    def _type(self, types: Any, of: str) -> Any:
        number = self.number("I")
        with fault_of(f"{self.path} has the {of} of the unknown type {number}", ValueError):
            return types(number)

    def tensor_info(self, name: str) -> _TensorInfo:
        num_dims = self.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise JllamaError(
                f"{self.path} has the tensor {name} with {num_dims} axes; GGUF has 1 to {_MAX_DIMS}"
            )
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]
        type_, offset = self._type(GGMLQuantizationType, f"tensor {name}"), self.number("Q")
        block, block_bytes = GGML_QUANT_SIZES[type_]
        tensor = f"{self.path} has the tensor {name} of shape {list(shape)} and type {type_.name}"
        if 0 in shape or shape[-1] % block or (block > 1 and num_dims == 1):
            raise JllamaError(
                f"{tensor}; only matrices may be quantized, and no row be empty or end inside a block"
            )
        with fault_of(
            f"{tensor}, which cannot be read: convert the model again, to another type",
            NotImplementedError,
        ):
            if type_ not in PLAIN:  # only trying shows whether the package can
                dequantize(np.zeros((1, block_bytes), np.uint8), type_)
        return type_, shape, offset


def shortest(value: float) -> float:
    """The float64 with the shortest decimal of those that are ``value`` in float32."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


TypedTensor = tuple[
    str, FileTensor, GGMLQuantizationType
]  # to write: a tensor under its name, in its type


def write_gguf_file(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[TypedTensor], on_progress: OnProgress
) -> None:
    """Write a GGUF file of version 3, a block of rows at a time.

    Whole numbers take 32 bits, others are float32, or float64 under keys of ``OURS``; one that these cannot hold
    raises JllamaError before anything is written.
    """
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + _value(key, value) for key, value in metadata.items()]
    offset = 0
    for name, tensor, type_ in tensors:
        dims = tensor.shape[::-1]
        parts += [_text(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)]
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


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    """A value after its type, that of an empty list being strings."""
    is_array = isinstance(value, list)
    values: list[Any] = value if is_array else [value]
    types: dict[type, GGUFValueType] = {str: GGUFValueType.STRING, bool: GGUFValueType.BOOL}
    types[float] = GGUFValueType.FLOAT64 if key.startswith(OURS) else GGUFValueType.FLOAT32
    types[object] = GGUFValueType.INT32 if is_array else GGUFValueType.UINT32
    type_ = next(types[kind] for kind in types if isinstance(values[0] if values else "", kind))
    is_inexact = type_ == GGUFValueType.FLOAT32 and not is_array and shortest(value) != value
    if is_inexact or (type_ == GGUFValueType.UINT32 and not 0 <= values[0] < 1 << 32):
        raise JllamaError(
            f"GGUF stores {key} as {type_.name}, which cannot hold {value!r}: convert to hf or orbax"
        )
    data = (
        np.array(values, _NUMBERS[type_]).tobytes()
        if type_ in _NUMBERS
        else b"".join(map(_text, values))
    )
    head = (GGUFValueType.ARRAY, type_, len(values)) if is_array else (type_,)
    return struct.pack("<IIQ" if is_array else "<I", *head) + data
