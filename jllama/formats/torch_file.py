"""Files of ``torch.save``, read and written without torch.

Such a file is a zip archive of uncompressed entries in one folder: ``data.pkl``, a pickle of the
dictionary, in which each tensor names the entry ``data/KEY`` of its numbers; ``byteorder``;
``version``. Source: torch/serialization.py.

A pickle is a program. Here Python's unpickler runs it with only the operations that a dictionary of
tensors needs. It looks up no name, so a file can call nothing. (This is the unpickler written in
Python. A few bytes can make the one in C allocate gigabytes, or hash nested tuples forever, before
it looks up any name.)
"""

import io
import math
import pickle
import pickletools
import reprlib
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from jllama.core import JllamaError
from jllama.formats.tensors import NamedTensor, OnProgress, blocks
from jllama.system.files import refuse_pointer

MAX_INDEX_BYTES = 4 << 20
"""Limit for ``data.pkl`` and the zip directory.

A pickle has about 200 bytes a tensor, and Llama 3.1 405B has 1,138 tensors.
"""

_STORAGES = {
    "torch.DoubleStorage": np.dtype("f8"),
    "torch.FloatStorage": np.dtype("f4"),
    "torch.HalfStorage": np.dtype("f2"),
    "torch.BFloat16Storage": np.dtype(jnp.bfloat16),
}
_OPERATIONS = (
    "PROTO FRAME BINUNICODE SHORT_BINUNICODE BININT BININT1 BININT2 LONG1 NONE NEWTRUE "
    "NEWFALSE EMPTY_TUPLE MARK TUPLE TUPLE1 TUPLE2 TUPLE3 BINPUT LONG_BINPUT MEMOIZE "
    "BINGET LONG_BINGET SETITEM SETITEMS GLOBAL STACK_GLOBAL BINPERSID REDUCE STOP"
)
_OPERATION_NAMES = {ord(operation.code): operation.name for operation in pickletools.opcodes}


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a file by name, each a read-only view of the mapped file.

    Nothing in the file is ever run.

    Raises:
        JllamaError: The file is cut short, damaged or of torch before 1.6; it calls anything that
            tensors do not need; or it is not a dictionary of floating-point tensors, each inside
            its own storage.
    """
    refuse_pointer(path)
    try:
        with _Directory(path) as file:
            if file.read(2) == b"\x80\x02":  # a bare pickle
                raise JllamaError(
                    "was saved by torch before 1.6: torch.load it and torch.save it again"
                )
            with zipfile.ZipFile(file) as archive:
                content = _Unpickler(*_read_entries(archive, file)).load()
        if not isinstance(content, dict):
            raise JllamaError("holds no dictionary of tensors: save a state_dict")
        for name, value in content.items():
            if not isinstance(value, np.ndarray) and not name.endswith("_extra_state"):
                raise JllamaError(f"holds no tensor under {name[:200]!r}: save a plain state_dict")
        return {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    except JllamaError as error:
        raise JllamaError(f"{path} {error}") from error
    except OSError as error:
        raise JllamaError(f"{path} cannot be read: {error.strerror or error}") from error
    # Python does not document which errors a damaged archive or pickle raises.
    except Exception as error:
        raise JllamaError(
            f"{path} is cut short, damaged or not a file of torch.save: {error}"
        ) from error


class _Directory(io.FileIO):
    """A file that is read in small parts, whatever length its zip directory claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes; refuse a request for more than ``MAX_INDEX_BYTES``."""
        if size is not None and size > MAX_INDEX_BYTES:
            raise zipfile.BadZipFile(
                f"its directory or data.pkl claims {size} bytes; jllama reads {MAX_INDEX_BYTES}"
            )
        return super().read(size)


def _read_entries(archive: zipfile.ZipFile, file: io.FileIO) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return the pickle, and views of each entry's bytes, by the entry's name in its folder."""
    infos = {info.orig_filename: info for info in archive.infolist()}
    pickles = [name for name in infos if name.endswith("/data.pkl")]
    if len(pickles) != 1 or len(infos) != len(archive.infolist()):
        raise ValueError(
            f"it has {len(pickles)} entries named data.pkl, or two entries of one name"
        )
    folder = pickles[0].removesuffix("data.pkl")
    mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
    entries = {}
    for name, info in infos.items():
        if not name.startswith(folder) or name.startswith("/") or ".." in name.split("/"):
            raise JllamaError(
                f"has an entry named {name!r}, outside its own folder {folder!r}: do not trust it"
            )
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise JllamaError(f"has {name!r} compressed, as torch never does: torch.save it again")
        with archive.open(info):  # reads and checks the header in front of the bytes
            start = file.tell()
        if start + info.file_size > mapped.size:
            raise ValueError(f"{name!r} goes on past its end")
        entries[name.removeprefix(folder)] = mapped[start : start + info.file_size]
    if "byteorder" in entries and entries["byteorder"].tobytes() != b"little":
        raise JllamaError(
            "is from a big-endian machine: torch.load it on a little-endian one and torch.save it"
        )
    return archive.read(pickles[0]), entries  # this checks the pickle's checksum


class _Dict(dict[str, Any]):
    """A dictionary of the pickle. A key that is not text is refused before it is hashed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str):
            raise ValueError("it has a key that is not text")
        super().__setitem__(key, value)


class _Storage(NamedTuple):
    data: np.ndarray
    dtype: np.dtype


def _build_tensor(storage: _Storage, offset: Any, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """Return a view of a storage; offset and strides are in numbers, not bytes.

    NumPy checks that the tensor is inside its storage.
    """
    if not isinstance(storage, _Storage):
        raise ValueError("it builds a tensor in a way that torch does not")
    width = storage.dtype.itemsize
    count = storage.data.size // width
    try:
        are_indices = all(type(n) is int and n >= 0 for n in (offset, *shape, *strides))
        if len(shape) > 8 or not are_indices or not 0 < math.prod(shape) <= count:
            raise ValueError
        # The stride of an axis of size 1 is never used and may be any number.
        in_bytes = [
            stride * width if size > 1 else 0 for size, stride in zip(shape, strides, strict=True)
        ]
        return np.ndarray(shape, storage.dtype, storage.data, offset * width, in_bytes)
    except (ValueError, OverflowError) as error:
        raise JllamaError(
            f"describes a tensor of shape {reprlib.repr(shape)} and strides "
            f"{reprlib.repr(strides)} from number {reprlib.repr(offset)} on, "
            f"which is empty or not inside its storage of {count} numbers"
        ) from error


# Stand-ins for the names of a pickle; no name is looked up.
_GLOBALS: dict[str, Any] = _STORAGES | {
    "collections.OrderedDict": lambda: _Dict(),
    "torch._utils._rebuild_tensor_v2": _build_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    # What modules of Llama 4 keep beside tensors, which is dropped.
    "_io.BytesIO": None,
    "_codecs.encode": lambda *_: None,
    "__builtin__.bytes": lambda *_: None,
}


class _Dispatch(dict[int, Any]):
    """The methods of operations by their codes; refuses others."""

    def __missing__(self, code: int) -> Any:
        raise JllamaError(
            f"uses the pickle operation {_OPERATION_NAMES[code]}, "
            "which no tensors need: do not trust it"
        )


class _Unpickler(pickle._Unpickler):
    """Python's unpickler without operations that call, import, or allocate more than a file has."""

    dispatch: ClassVar[Any] = _Dispatch(
        {
            code: run
            for code, run in pickle._Unpickler.dispatch.items()
            if _OPERATION_NAMES[code] in _OPERATIONS.split()
        }
    )
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Dict())
    # BUILD sets attributes, such as a state_dict's _metadata: drop them.
    dispatch[pickle.BUILD[0]] = lambda self: self.stack.pop()
    # NEWOBJ calls a class with arguments: here the arguments are dropped, and BytesIO's None stays.
    dispatch[pickle.NEWOBJ[0]] = lambda self: self.stack.pop()

    def __init__(self, data: bytes, entries: Mapping[str, np.ndarray]) -> None:
        super().__init__(io.BytesIO(data))
        self.entries = entries

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        full = f"{module}.{name}"
        if full in _GLOBALS:
            return _GLOBALS[full]
        is_storage = full.startswith("torch.") and full.endswith("Storage")
        if is_storage or full == "torch._utils._rebuild_tensor_v3":
            dtypes = ", ".join(map(str, _STORAGES.values()))
            raise JllamaError(
                f"holds tensors of {full}; jllama reads {dtypes}: convert them with torch first"
            )
        raise JllamaError(
            f"asks to call {full[:200]!r}, which no tensors need: do not trust it; nothing was run"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage that a tensor refers to, whose entry must have the right size."""
        match pid:
            case ("storage", np.dtype() as dtype, str(key), str(), int(count)):
                data = self.entries.get(f"data/{key}")
            case _:
                raise ValueError("it refers to a storage in a way that torch does not")
        if data is None or data.size != count * dtype.itemsize:
            actual = "no such entry" if data is None else f"{data.size} bytes"
            raise JllamaError(
                f"holds {actual} where data/{key[:200]} must have {count} numbers in {dtype}"
            )
        return _Storage(data, dtype)


def write_torch_file(path: Path, tensors: Sequence[NamedTensor], on_progress: OnProgress) -> None:
    """Write tensors as ``torch.save`` would, a block of rows at a time.

    The dtypes are those that can be read. ``torch.load`` reads the file with ``weights_only=True``
    and with ``mmap=True``.
    """
    entries = {"data.pkl": _pickle(tensors), "byteorder": b"little", "version": b"3\n"}
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
        for number, (_, tensor, dtype) in enumerate(tensors):
            info = zipfile.ZipInfo(f"archive/data/{number}")
            # As in torch, numbers begin at multiples of 64 bytes. 30 bytes precede the name;
            # zip64's field has 20.
            padding = -(file.tell() + 30 + len(info.filename) + 4 + 20) % 64
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as entry:
                for block in blocks(tensor, dtype):
                    entry.write(block.view(np.uint8).data)
                    on_progress(block.nbytes)


def _pickle(tensors: Sequence[NamedTensor]) -> bytes:
    """Pickle an ordered dictionary of tensors, each with its own storage, in protocol 2."""
    classes = {
        dtype: f"c{name.replace('.', chr(10))}\n".encode() for name, dtype in _STORAGES.items()
    }
    empty_dict = b"ccollections\nOrderedDict\n)R"
    out = [b"\x80\x02", empty_dict, b"("]
    for number, (name, tensor, dtype) in enumerate(tensors):
        shape = tuple(tensor.shape)
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        out += [
            _literals(name),
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            # The storage.
            b"((",
            _literals("storage"),
            classes[dtype],
            _literals(str(number), "cpu", math.prod(shape)),
            b"tQ",
            # Offset, shape, strides, whether it needs a gradient, and its hooks.
            _literals(0, shape, strides, False),
            empty_dict,
            b"tR",
        ]
    return b"".join([*out, b"u."])


def _literals(*values: Any) -> bytes:
    """Pickle values one after the other, without the protocol and the end."""
    return b"".join(pickle.dumps(value, 2)[2:-1] for value in values)
