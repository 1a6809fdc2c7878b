"""Safetensors files: a length, a JSON header, and the tensors' bytes one after the other.

The library checks a file. Files are mapped and written here, because the library has no bfloat16
for NumPy and writes only from memory. Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from jllama.core import JllamaError
from jllama.formats.tensors import NamedTensor, OnProgress, blocks
from jllama.system.files import errors_as, refuse_pointer

DTYPES = {
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Dtypes by their names in the format; its other dtypes do not hold plain weights of a Llama."""


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a file by name, each a read-only view of the mapped file.

    Raises:
        JllamaError: The file is cut short or too long, or has a tensor of a dtype not in
            ``DTYPES``.
    """
    refuse_pointer(path)
    tensors = {}
    damaged = f"{path} is cut short, damaged or not a safetensors file"
    with (
        errors_as(f"{path} cannot be read", OSError),
        errors_as(damaged, ValueError, safetensors.SafetensorError),
    ):
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
        # Opening checks the header, and that the tensors fill the file.
        with safetensors.safe_open(path, "np"):
            pass
        begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        header = json.loads(mapped[8:begin].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype = entry["dtype"]
            if dtype not in DTYPES:
                raise JllamaError(
                    f"{path} holds {name} as {dtype}; jllama reads {', '.join(DTYPES)}"
                )
            start, stop = entry["data_offsets"]
            data = mapped[begin + start : begin + stop]
            tensors[name] = data.view(DTYPES[dtype]).reshape(entry["shape"])
    return tensors


def write_safetensors(
    path: Path,
    tensors: Sequence[NamedTensor],
    on_progress: OnProgress,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors under their names, each in its dtype, one of ``DTYPES``, by blocks of rows.

    Wider dtypes come first, as in the library, so that every tensor is aligned.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    ordered = sorted(tensors, key=lambda item: -item[2].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor, dtype in ordered:
        start = end
        end += math.prod(tensor.shape) * dtype.itemsize
        header[name] = {
            "dtype": codes[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor, dtype in ordered:
            for block in blocks(tensor, dtype):
                file.write(block.view(np.uint8).data)
                on_progress(block.nbytes)
