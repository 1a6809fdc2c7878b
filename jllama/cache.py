"""What is made once and kept for later processes, by a hash of all that it is made of: weights and programs.

It saves time and decides nothing: what cannot be kept or read, for whatever reason, is made again. Programs are run as
they are read, so nothing is read that another user can have written.
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

from jllama.files import cache_folder, written_whole

_WRITABLE = 0o022  # the permissions of a file's group and of others to write it
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
    return [
        digest.hexdigest(),
        *map(importlib.metadata.version, ("jax", "jaxlib", "flax", "numpy", "gguf")),
    ]


def recall(kind: str, key: str) -> np.ndarray | None:
    """The bytes that were kept, mapped and read-only.

    None if there are none, if they are not those that were written, or if other users could have written them.
    """
    path = cache_folder() / kind / key
    with contextlib.suppress(OSError, ValueError):
        if not (most_bytes() and _only_ours(_WRITABLE, cache_folder(), path.parent, path)):
            return None
        mapped = np.memmap(path, np.uint8, "r").view(np.ndarray)
        if _checksum(key, mapped[:-8]) == mapped[-8:].tobytes():
            with contextlib.suppress(OSError):
                os.utime(path)  # for ``_forget``
            return mapped[:-8]
    return None


def keep(kind: str, key: str, arrays: Sequence[Any]) -> None:
    """Keep the bytes of arrays, each from a multiple of ``ALIGNMENT`` on; what was used least recently goes.

    Whole or not at all, whoever else does the same; on a full disk, or one that cannot be written, nothing is kept.
    """
    size = sum(array.nbytes + -array.nbytes % ALIGNMENT for array in arrays) + 8
    with contextlib.suppress(OSError):
        folder = private_folder(kind) if size <= most_bytes() else None
        if folder is None or 2 * size > shutil.disk_usage(folder).free:
            return
        _forget(folder, most_bytes() - size)
        with written_whole(folder / key, shared=True) as partial:
            partial.touch(0o600)  # whatever the umask
            with partial.open("wb+") as file:
                for array in arrays:
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                    file.write(bytes(-array.nbytes % ALIGNMENT))
                file.flush()
                file.write(_checksum(key, np.memmap(file, np.uint8, "r")))


def private_folder(kind: str) -> Path | None:
    """Make the folder of a kind, for this user alone, if it is not there yet.

    Returns None if it cannot be made, or if other users can write there or own a file in it, which is said once.
    """
    folder = cache_folder() / kind
    with contextlib.suppress(OSError):
        for path in (folder.parent, folder):
            path.mkdir(0o700, parents=True, exist_ok=True)
        if _only_ours(_WRITABLE, folder.parent, folder) and _only_ours(0, *folder.iterdir()):
            return folder
    return None


def _only_ours(others: int, *paths: Path) -> bool:
    """Whether files and folders are this user's or root's, and other users have none of these permissions for them."""
    if os.name == "nt":  # its permissions are not shown as a mode
        return True
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & others:
            _say_unused(path)
            return False
    return True


@functools.cache
def _say_unused(path: Path) -> None:
    advice = "as code: remove it, or set JLLAMA_CACHE to a folder of your own"
    print(
        f"note: {path} is not used, since other users may have written to it, and it is run {advice}",
        file=sys.stderr,
    )


def _checksum(key: str, content: np.ndarray) -> bytes:
    """Eight bytes: the sum of all words, and of the key, so that a file of zeros is none. Made at memory speed."""
    return ((int(content.view(np.uint64).sum()) + int(key[:16], 16)) % 2**64).to_bytes(8, "little")


def _forget(folder: Path, most: int) -> None:
    """Leave at most so many bytes, those used last; what a killed process left half written goes after a day."""
    for path in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime):
        most -= path.stat().st_size
        if most < 0 or (path.name.startswith(".") and path.stat().st_mtime < time.time() - 86_400):
            path.unlink(missing_ok=True)
