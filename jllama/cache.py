"""What is made once and kept for later processes, by a hash of all that it is made of: weights and programs.

It saves time and decides nothing: what cannot be kept or read, for whatever reason, is made again.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jllama.files import cache_folder, written_whole

ALIGNMENT = 64  # of each array: JAX takes one that begins so, on a CPU, without copying it


def most_bytes() -> int:
    """How much of each kind is kept: ``$JLLAMA_CACHE_GIB``, or 8 GiB; 0 (or what is no number) keeps nothing."""
    with contextlib.suppress(ValueError, OverflowError):
        return int(float(os.environ.get("JLLAMA_CACHE_GIB") or 8) * 2**30)
    return 0


def key_of(*parts: Any) -> str:
    """A key of all that the parts' ``repr`` say, and of the code that is running: jllama's source and its libraries."""
    return hashlib.sha256(repr((parts, _code())).encode()).hexdigest()


@functools.cache
def _code() -> list[Any]:
    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return [digest.hexdigest(), *map(importlib.metadata.version, ("jax", "jaxlib", "flax", "numpy", "gguf"))]


def recall(kind: str, key: str) -> np.ndarray | None:
    """The bytes that were kept, mapped and read-only; None if there are none, or not those that were written."""
    path = cache_folder() / kind / key
    with contextlib.suppress(OSError, ValueError):
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
        if most_bytes() and _checksum(key, mapped[:-8]) == mapped[-8:].tobytes():
            with contextlib.suppress(OSError):
                os.utime(path)  # for ``_forget``
            return mapped[:-8]
    return None


def keep(kind: str, key: str, arrays: Sequence[Any]) -> None:
    """Keep the bytes of arrays, each from a multiple of ``ALIGNMENT`` on; what was used least recently goes.

    Whole or not at all, whoever else does the same; on a full disk, or one that cannot be written, nothing is kept.
    """
    path = cache_folder() / kind / key
    size = sum(array.nbytes + -array.nbytes % ALIGNMENT for array in arrays) + 8
    with contextlib.suppress(OSError):
        if size > most_bytes():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if 2 * size > shutil.disk_usage(path.parent).free:
            return
        _forget(path.parent, most_bytes() - size)
        with written_whole(path, shared=True) as partial, partial.open("wb+") as file:
            for array in arrays:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                file.write(bytes(-array.nbytes % ALIGNMENT))
            file.flush()
            file.write(_checksum(key, np.memmap(file, np.uint8, "r")))


def _checksum(key: str, content: np.ndarray) -> bytes:
    """Eight bytes: the sum of all words, and of the key, so that a file of zeros is none. Made at memory speed."""
    return ((int(content.view(np.uint64).sum()) + int(key[:16], 16)) % 2**64).to_bytes(8, "little")


def _forget(folder: Path, most: int) -> None:
    """Leave at most so many bytes, those used last; what a killed process left half written goes after a day."""
    for path in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime):
        most -= path.stat().st_size
        if most < 0 or (path.name.startswith(".") and path.stat().st_mtime < time.time() - 86_400):
            path.unlink(missing_ok=True)
