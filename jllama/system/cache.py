"""Weights and programs stored for later processes, by a hash of all that they are made of.

The cache saves time and decides nothing: an entry that cannot be written or read is made again.
Programs are run without a check, so nothing is read that another user may have written.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jllama.system.files import atomic_write, cache_folder

_WRITABLE = 0o022  # the permissions of a file's group and of others to write it
_DAY_S = 86_400
ALIGNMENT = 64
"""Of each array, in bytes: on a CPU, JAX takes such an array without copying it."""


def max_bytes() -> int:
    """Return the limit of each kind of entries: ``$JLLAMA_CACHE_GIB``, or 8 GiB.

    0, or a text that is not a number, turns the cache off.
    """
    with contextlib.suppress(ValueError, OverflowError):
        return int(float(os.environ.get("JLLAMA_CACHE_GIB") or 8) * 2**30)
    return 0


def key_of(*parts: Any) -> str:
    """Return a hash of the parts' ``repr`` and of the running code: jllama and its libraries."""
    return hashlib.sha256(repr((parts, _code())).encode()).hexdigest()


@functools.cache
def _code() -> list[Any]:
    """Return a hash of jllama's source, and the versions of its libraries."""
    libraries = ("jax", "jaxlib", "flax", "numpy", "gguf")
    return [source_hash(), *map(importlib.metadata.version, libraries)]


@functools.cache
def source_hash() -> str:
    """Return the SHA-256 of jllama's source, names and contents."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def load(kind: str, key: str) -> np.ndarray | None:
    """Return the stored bytes, mapped and read-only.

    None if there are none, if they are damaged, or if other users may have written them.
    """
    path = cache_folder() / kind / key
    with contextlib.suppress(OSError, ValueError):
        if not max_bytes() or not _is_safe(_WRITABLE, cache_folder(), path.parent, path):
            return None
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
        if _checksum(key, mapped[:-8]) == mapped[-8:].tobytes():
            with contextlib.suppress(OSError):
                os.utime(path)  # for ``_forget``
            return mapped[:-8]
    return None


def store(kind: str, key: str, arrays: Sequence[Any]) -> None:
    """Store the bytes of arrays, each from a multiple of ``ALIGNMENT`` on.

    The entries used least recently are removed for it. Several processes may store the same entry.
    On a full disk, or one that cannot be written, nothing is stored.
    """
    size = 8 + sum(array.nbytes + _padding(array) for array in arrays)
    with contextlib.suppress(OSError):
        folder = private_folder(kind) if size <= max_bytes() else None
        if folder is None or 2 * size > shutil.disk_usage(folder).free:
            return
        _forget(folder, max_bytes() - size)
        with atomic_write(folder / key, shared=True) as partial:
            partial.touch(0o600)  # whatever the umask
            with partial.open("wb+") as file:
                for array in arrays:
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                    file.write(bytes(_padding(array)))
                file.flush()
                file.write(_checksum(key, np.memmap(file, np.uint8, "r")))


def _padding(array: Any) -> int:
    return -array.nbytes % ALIGNMENT


def private_folder(kind: str) -> Path | None:
    """Return the folder of a kind of entries, made for this user alone if it is missing.

    None, with a note on stderr, if other users can write there or own a file in it; None as well if
    it cannot be made.
    """
    folder = cache_folder() / kind
    with contextlib.suppress(OSError):
        for path in (folder.parent, folder):
            path.mkdir(0o700, parents=True, exist_ok=True)
        if _is_safe(_WRITABLE, folder.parent, folder) and _is_safe(0, *folder.iterdir()):
            return folder
    return None


def _is_safe(forbidden: int, *paths: Path) -> bool:
    """Return whether this user or root owns all paths, without some permissions for other users."""
    if os.name == "nt":  # a mode does not show its permissions
        return True
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & forbidden:
            _print_unused(path)
            return False
    return True


@functools.cache
def _print_unused(path: Path) -> None:
    print(
        f"note: {path} is not used, since other users may have written to it, and it is run "
        "as code: remove it, or set JLLAMA_CACHE to a folder of your own",
        file=sys.stderr,
    )


def _checksum(key: str, content: np.ndarray) -> bytes:
    """Return eight bytes: the sum of all words and of the key, so that a file of zeros is invalid.

    It is as fast as memory is read.
    """
    return ((int(content.view(np.uint64).sum()) + int(key[:16], 16)) % 2**64).to_bytes(8, "little")


def _forget(folder: Path, max_size: int) -> None:
    """Keep at most ``max_size`` bytes, used last, and no temporary file older than a day."""
    for path in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime):
        status = path.stat()
        max_size -= status.st_size
        is_left_over = path.name.startswith(".") and status.st_mtime < time.time() - _DAY_S
        if max_size < 0 or is_left_over:
            path.unlink(missing_ok=True)
