"""Files: reading small ones of other people's making, and writing our own whole or not at all."""

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

from jllama.errors import JllamaError, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Json = dict[str, Any]
"""An object of JSON, such as a request's body or an answer."""
_MAX_BYTES, _MAX_DEPTH = 100_000_000, 50


def read_json_object(path: Path) -> Json:
    """The object that a JSON file holds. One that cannot be read, or is absurdly large or nested, is a JllamaError."""
    refuse_special_files(path)
    with (
        fault_of(f"{path} cannot be read", OSError),
        fault_of(f"{path} is not JSON", ValueError, RecursionError),
    ):
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is over {_MAX_BYTES} bytes, not what its name says")
        content = json.loads(path.read_bytes())
        level = [content]
        for _ in range(_MAX_DEPTH):
            values = [each.values() if isinstance(each, dict) else each for each in level]
            level = [
                inner
                for each in values
                if not isinstance(each, str | int | float | None)
                for inner in each
            ]
        if level:
            raise ValueError(f"it is nested over {_MAX_DEPTH} deep")
    if not isinstance(content, dict):
        raise JllamaError(f"{path} is not a JSON object")
    return content


def read_fields(
    fields: Mapping[str, Any], table: Mapping[str, tuple[str, Any]], source: Path
) -> Json:
    """Values of a file that describes a model, by our names; ``table`` has the file's key for each, and a default.

    A value that is not of the default's type (without a default, None: not whole), or a number that is not positive and
    finite, raises ``JllamaError``.
    """
    kinds = {int: "a positive whole number", float: "a positive number", bool: "true or false"}
    values = {}
    for name, (key, default) in table.items():
        value, kind = fields.get(key, default), int if default is None else type(default)
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if (key in fields or default is None) and not (
            is_kind and (kind is bool or 0 < value < 1e300)
        ):
            raise JllamaError(
                f"{source} has {key} {json.dumps(value)[:100]}; it must be {kinds[kind]}"
            )
        values[name] = kind(value)
    return values


@contextlib.contextmanager
def fault_of(
    source: Path | str, *errors: type[Exception], kind: type[JllamaError] = JllamaError
) -> Iterator[None]:
    """Inside, these errors and a ``UsageError`` (of a ``LlamaConfig``, say) are one of a ``kind`` naming the source.

    So is a panic of a library in Rust, which is no ``Exception``.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not (is_panic or isinstance(error, (UsageError, *errors))):
            raise
        reason = (
            getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        )
        raise kind(f"{source}: {reason}") from error


def refuse_special_files(*paths: Path) -> None:
    """Raise ``JllamaError`` for a pipe, a socket or a device: reading one may never end."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise JllamaError(f"{path} is a pipe, a socket or a device: put a file there")


def has_file(path: Path) -> bool:
    """Whether there is a file to read at ``path``; anything else there, also a link to nothing, is a JllamaError."""
    refuse_special_files(path)
    if path.is_dir() or (path.is_symlink() and not path.exists()):
        raise JllamaError(
            f"{path} is a folder, or a link to nothing: put a file there, or remove it"
        )
    return path.is_file()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a folder that is not yet in its place."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def written_whole(target: Path, *, shared: bool = False) -> Iterator[Path]:
    """A path beside ``target`` for a file or folder, which takes its name at the end; after an error nothing is left.

    A file that stood there is replaced at once; a folder is put aside first, and back if anything fails. With
    ``shared``, processes may write the same at the same time: the first folder stays, and then this is an ``OSError``.
    """
    partial, old = (
        _beside(target, f"{uuid.uuid4().hex[:8]}.partial" if shared else "partial"),
        _beside(target, "old"),
    )
    put_back(target)
    try:
        remove(partial)
        yield partial
        if not shared and target.exists() and (target.is_dir() or partial.is_dir()):
            remove(old)
            target.rename(old)
        partial.replace(target)
    finally:
        put_back(target)
        remove(partial)
        remove(old)


def put_back(target: Path) -> None:
    """Undo half a replacement by ``written_whole``: what stood at ``target`` is aside, and nothing has its name."""
    if _beside(target, "old").exists() and not target.exists():
        _beside(target, "old").rename(target)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """Write a text file, UTF-8, so that at any moment the old one or the new one is there."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(folder: Path, process: int = 0) -> Iterator[None]:
    """A folder, created if need be, for this process alone, until it dies; one that stays empty goes again.

    Processes that use it together have different numbers. Systems without such locks let everybody in. Raises
    ``JllamaError`` that says which process has the folder.
    """
    is_new, path = not folder.exists(), folder / (f"in_use.{process}" if process else "in_use")
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.fstat(file.fileno()).st_nlink > 0  # or its owner deleted it just now
        except OSError as error:
            is_ours = not isinstance(error, BlockingIOError)  # this file system has none
        if not is_ours:
            file.seek(0)
            holder = file.read() or "another process"
            used = f"{folder} is in use by {holder}{f' as process_id {process}' if process else ''}"
            raise JllamaError(f"{used}: wait for it, or choose another folder")
        file.truncate(0)
        file.write(
            f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        )
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what is not empty stays
                if is_new:
                    folder.rmdir()


def append_line(path: Path, record: Json) -> None:
    """Add one JSON object to a ``.jsonl`` file, or raise OSError and leave it as it was."""
    line = json.dumps(record).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        if (size := file.tell()) + file.write(line) < size + len(line):
            os.truncate(path, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path, key: str = "step") -> list[Json]:
    """The objects of a ``.jsonl`` file that have a key; a last line that a killed process left half is passed over."""
    lines = []
    for line in path.read_text().splitlines() if has_file(path) else ():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict) and key in line]


def check_writable(path: Path) -> None:
    """Raise ``UsageError`` unless ``write_text_whole`` could write this file, of which nothing is changed."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EEXIST, "there is something that is no ordinary file")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from error


def cache_folder() -> Path:
    """Where downloads, tokens and compiled programs are kept: ``$JLLAMA_CACHE``, or ``~/.cache/jllama``."""
    return Path(os.environ.get("JLLAMA_CACHE") or "~/.cache/jllama").expanduser()
