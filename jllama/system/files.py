"""Files: read small ones that others made, and write our own completely or not at all."""

import contextlib
import errno
import json
import os
import platform
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jllama.core import JllamaError, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What is in the folder of a run.
CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SKIPPED = "skipped.jsonl"
AUTOTUNING = "autotuning"

Json = dict[str, Any]
"""A JSON object, such as a request's body or an answer."""
_MAX_BYTES, _MAX_DEPTH = 100_000_000, 50
_POINTER = b"version https://git-lfs"


def read_json_object(path: Path) -> Json:
    """Read a JSON file that holds an object.

    Raises:
        JllamaError: it cannot be read, holds something else, or is far too large or nested.
    """
    refuse_special_files(path)
    refuse_pointer(path)
    with (
        errors_as(f"{path} cannot be read", OSError),
        errors_as(f"{path} is not JSON", ValueError, RecursionError),
    ):
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is over {_MAX_BYTES} bytes, too large for its name")
        content = json.loads(path.read_bytes())
        level = [content]
        for _ in range(_MAX_DEPTH):
            inner = []
            for value in level:
                if isinstance(value, dict):
                    inner += value.values()
                elif isinstance(value, list):
                    inner += value
            level = inner
        if level:
            raise ValueError(f"it is nested over {_MAX_DEPTH} deep")
    if not isinstance(content, dict):
        raise JllamaError(f"{path} is not a JSON object")
    return content


def read_optional_json(path: Path) -> Json:
    """Return ``read_json_object`` of a file, or an empty object if there is none."""
    return read_json_object(path) if has_file(path) else {}


def without_nulls(fields: Mapping[str, Any]) -> Json:
    """Return the fields that a file sets: those but null, and but a ``vocab_size`` of -1."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and (name, value) != ("vocab_size", -1)
    }


def read_fields(
    fields: Mapping[str, Any], table: Mapping[str, tuple[str, Any]], source: Path
) -> Json:
    """Return values of a file that describes a model, by our names.

    ``table`` has for each of our names the arguments of ``read_field``: the key and the default.
    """
    return {name: read_field(fields, *entry, source) for name, entry in table.items()}


def read_field(fields: Mapping[str, Any], key: str, default: Any, source: Path) -> Any:
    """Return a value of a file that describes a model.

    Args:
        fields: the file's object.
        key: the value's key.
        default: the value of a missing key; None requires a whole number.
        source: the file, for messages.

    Raises:
        JllamaError: the value does not have the default's type, or is not positive and finite.
    """
    kinds = {int: "a positive whole number", float: "a positive number", bool: "true or false"}
    value = fields.get(key, default)
    kind = int if default is None else type(default)
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    is_valid = is_kind and (kind is bool or 0 < value < 1e300)
    is_checked = key in fields or default is None
    if is_checked and not is_valid:
        raise JllamaError(f"{source} has {key} {json.dumps(value)[:100]}; it must be {kinds[kind]}")
    return kind(value)


@contextlib.contextmanager
def errors_as(
    source: Path | str, *errors: type[Exception], kind: type[JllamaError] = JllamaError
) -> Iterator[None]:
    """Turn errors inside the block into one of a ``kind`` that names their source.

    Turned are the given types, ``UsageError`` (of a ``LlamaConfig``, for example), and a panic of a
    library in Rust, which is no ``Exception``.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, (UsageError, *errors)):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise kind(f"{source}: {reason or type(error).__name__}") from error


def refuse_special_files(*paths: Path) -> None:
    """Raise ``JllamaError`` if a path is a pipe, a socket or a device: reading may never end."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise JllamaError(f"{path} is a pipe, a socket or a device: put a file there")


def refuse_pointer(path: Path) -> None:
    """Raise ``JllamaError`` if a file is what Git LFS puts in the place of a large one."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise JllamaError(f"{path} is a pointer of Git LFS: run git lfs pull")


def has_file(path: Path) -> bool:
    """Return whether there is a file to read.

    Raises:
        JllamaError: something else is there, such as a folder or a link to nothing.
    """
    refuse_special_files(path)
    if path.is_dir() or (path.is_symlink() and not path.exists()):
        raise JllamaError(
            f"{path} is a folder, or a link to nothing: put a file there, or remove it"
        )
    return path.is_file()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in a folder that nobody else reads yet."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def atomic_write(target: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path for a file or folder that replaces ``target`` at the end of the block.

    After an error nothing changes. A file is replaced at once; an old folder is first renamed, and
    renamed back if anything fails.

    Args:
        target: the path to write.
        shared: several processes may write it at the same time. The first folder stays; the others
            raise ``OSError``.
    """
    partial = _beside(target, f"{uuid.uuid4().hex[:8]}.partial" if shared else "partial")
    old = _beside(target, "old")
    restore_replaced(target)
    try:
        remove(partial)
        yield partial
        if not shared and target.exists() and (target.is_dir() or partial.is_dir()):
            remove(old)
            target.rename(old)
        partial.replace(target)
    finally:
        restore_replaced(target)
        remove(partial)
        remove(old)


def restore_replaced(target: Path) -> None:
    """Undo an interrupted ``atomic_write``, which renamed ``target`` and did not replace it."""
    old = _beside(target, "old")
    if old.exists() and not target.exists():
        old.rename(target)


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file; at any moment the old one or the new one is there."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def file_lock(folder: Path, process: int = 0) -> Iterator[None]:
    """Lock a folder for this process inside the block, or until the process dies.

    The folder is created if it is missing, and then removed if it stays empty. Systems without file
    locks let every process in.

    Args:
        folder: the folder.
        process: a number that differs between processes that use the folder together.

    Raises:
        JllamaError: another process has the folder; the message says which.
    """
    is_new = not folder.exists()
    path = folder / (f"in_use.{process}" if process else "in_use")
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.fstat(file.fileno()).st_nlink > 0  # or its owner has just deleted it
        except OSError as error:
            is_locked = not isinstance(error, BlockingIOError)  # this file system has no locks
        if not is_locked:
            file.seek(0)
            owner = file.read() or "another process"
            index = f" as process_id {process}" if process else ""
            raise JllamaError(
                f"{folder} is in use by {owner}{index}: wait for it, or choose another folder"
            )
        file.truncate(0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {platform.node()} since {now}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()


def append_line(path: Path, record: Json) -> None:
    """Append a JSON object to a ``.jsonl`` file, or raise ``OSError`` and leave it unchanged."""
    line = json.dumps(record).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        if file.write(line) < len(line):
            os.truncate(path, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path, key: str = "step") -> list[Json]:
    """Return the objects of a ``.jsonl`` file that have a key; there are none without a file.

    A line that a killed process did not finish is skipped.
    """
    records = []
    text = path.read_text(encoding="utf-8", errors="replace") if has_file(path) else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and key in record]


def check_writable(path: Path) -> None:
    """Raise ``UsageError`` unless ``atomic_write_text`` could write this file; do not change it."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EEXIST, "there is something that is no ordinary file")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from error


def cache_folder() -> Path:
    """Return the folder of downloads and programs: ``$JLLAMA_CACHE``, or ``~/.cache/jllama``."""
    return Path(os.environ.get("JLLAMA_CACHE") or "~/.cache/jllama").expanduser()
