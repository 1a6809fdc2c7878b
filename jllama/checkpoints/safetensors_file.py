"""Files of the safetensors format: a length, a JSON header, and the tensors' bytes one after the other.

Source: https://github.com/huggingface/safetensors, "Format". Reading maps the file; writing streams it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jllama.checkpoints.tensors import FileTensor, OnProgress, blocks
from jllama.errors import JllamaError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""By the format's names for them; its other dtypes hold no weights of a Llama as they are."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's limit."""

_MAX_AXES, _MAX_ELEMENTS = 32, 1 << 59  # NumPy's limits; of an empty tensor, the file's size bounds neither


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a file by name, each a read-only view of the mapped file.

    Raises:
        JllamaError: the file is cut short or too long, its header is not one, or a tensor has another dtype than
            ``DTYPES``.
    """
    try:
        size = path.stat().st_size
        if size < 8:
            raise JllamaError(f"{path} has {size} bytes; a safetensors file begins with the 8 of its header's length")
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
    except OSError as error:
        raise JllamaError(f"{path} cannot be read: {error.strerror}") from error
    header_bytes = int.from_bytes(mapped[:8].tobytes(), "little")
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise JllamaError(
            f"{path} claims a header of {header_bytes} bytes, but the file has {size} and a header at most "
            f"{MAX_HEADER_BYTES}: it is cut short or not a safetensors file"
        )
    header, data = _header(mapped[8 : 8 + header_bytes].tobytes(), path), mapped[8 + header_bytes :]
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in DTYPES:
            raise JllamaError(f"{path} holds {name} as {dtype}; jllama reads {', '.join(DTYPES)}")
        tensor_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if (start, stop) != (end, end + tensor_bytes):
            raise JllamaError(
                f"{path} gives {name} the bytes {start} to {stop} of its data, but shape {shape} in {dtype} takes "
                f"{tensor_bytes} from byte {end} on: tensors must neither overlap nor leave gaps"
            )
        end = stop
    if end != len(data):
        raise JllamaError(
            f"{path} has {len(data)} bytes of tensors where its header describes {end}: "
            f"{'it is cut short' if end > len(data) else 'something was appended'}, copy it again"
        )
    return {
        name: data[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def _header(text: bytes, path: Path) -> dict[str, Any]:
    """The entries of a header, each of them of the right types, without the metadata."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise JllamaError(f"{path} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise JllamaError(f"{path} has a header that is no JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        match entry:
            case {"dtype": str(), "shape": list(shape), "data_offsets": [start, stop]} if (
                all(type(number) is int and number >= 0 for number in (*shape, start, stop))
                and len(shape) <= _MAX_AXES
                and math.prod(number for number in shape if number) <= _MAX_ELEMENTS
            ):
                pass
            case _:
                raise JllamaError(f"{path} describes {name} otherwise than by a dtype, a shape and two data_offsets")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"it has {name!r} twice")
        entries[name] = value
    return entries


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, FileTensor, np.dtype[Any]]], on_progress: OnProgress
) -> None:
    """Write tensors, each under its name and in its dtype (one of ``DTYPES``), a block of rows at a time.

    The wider dtypes come first, as the library has them, so that every tensor is aligned.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    ordered = sorted(tensors, key=lambda item: -item[2].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor, dtype in ordered:
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor, dtype in ordered:
            for block in blocks(tensor, dtype):
                file.write(block.view(np.uint8).data)
                on_progress(block.nbytes)
