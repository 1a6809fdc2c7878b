"""Files of buckets and hubs: list, read and write them, and wait while a server fails.

A bucket has no rename and no append: a file there is written whole, and is complete or absent.
"""

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jllama.core import JllamaError
from jllama.system.files import (
    atomic_write,
    atomic_write_text,
    cache_folder,
    errors_as,
    read_optional_json,
    remove,
)
from jllama.system.places import Place, as_place, is_url
from jllama.system.progress import progress

if TYPE_CHECKING:
    from upath import UPath

PATIENCE_S = 600.0
"""How long a server that fails or cannot be reached is asked again."""
_PAUSES_S = (1, 2, 4, 8, 15)  # the last one again and again
_NUM_CONNECTIONS = 16
# What no later try would change.
_FINAL = (
    FileExistsError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    JllamaError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)
_VERSIONS = ("generation", "ETag", "etag", "blob_id", "mtime", "created")
_INDEX = ".index.json"
_LAST = re.compile(r"(adapter_)?config\.(json|yaml)|params\.json")
"""Files by which a folder is recognized as a model."""
Facts = tuple[int, str]
"""Of a file in a bucket: its size in bytes, and a text that changes with its content."""
_Result = TypeVar("_Result")


def patiently(
    place: Any, action: Callable[..., _Result], *arguments: Any, **options: Any
) -> _Result:
    """Call ``action``; if the server or the connection fails, say so once and try again.

    Raises:
        JllamaError: it still fails after ``PATIENCE_S`` seconds, or in a way that does not pass.
        FileNotFoundError: there is no such file.
        FileExistsError: ``action`` was to create what is there.
    """
    end_s = time.monotonic() + PATIENCE_S
    pauses = itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1]))
    for count, pause_s in enumerate(pauses):
        try:
            return action(*arguments, **options)
        except (FileNotFoundError, FileExistsError, JllamaError):
            raise
        except Exception as error:
            # One line, without the parts of URLs that may be credentials.
            reason = re.sub(r"(://)[^/@\s]*@|\?[^\s'\")]*", r"\1", " ".join(str(error).split()))
            reason = f"{type(error).__name__}: {reason[:200]}"
            is_final = isinstance(error, _FINAL) or "Credential" in type(error).__name__
            is_refused = 300 <= _http_status(error) < 408
            if is_final or is_refused or time.monotonic() + pause_s > end_s:
                raise JllamaError(f"{place} cannot be read or written: {reason}") from error
            if count == 0:
                note = f"note: {place} does not answer ({reason}); trying again"
                print(f"{note} for up to {PATIENCE_S / 60:.0f} minutes", file=sys.stderr)
        time.sleep(pause_s)
    raise AssertionError("the pauses never end")


def _http_status(error: BaseException | None) -> int:
    """Return the HTTP status in an error of a library, or in what it was raised from; else 0."""
    if error is None:
        return 0
    if str(error).startswith("Forbidden"):  # gcsfs
        return 403
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else _http_status(error.__cause__)


def list_files(place: Place) -> dict[str, Facts]:
    """Return the size and a version of every file below a place, by its name within it, sorted.

    A bucket answers a thousand names with each request. The name of a single file is empty.
    """
    if isinstance(place, Path):
        paths = [place] if place.is_file() else place.rglob("*")
        listed = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # it is removed meanwhile
                stat = path.stat()
                if path.is_file():
                    name = path.relative_to(place).as_posix().removeprefix(".")
                    listed[name] = (stat.st_size, str(stat.st_mtime_ns))
        return dict(sorted(listed.items()))
    root = place.fs._strip_protocol(place.path)
    listed = {}
    place.fs.invalidate_cache()  # of the hub, which keeps one in any case
    try:
        below: Any = patiently(place, place.fs.find, root, detail=True)
    except FileNotFoundError:  # the bucket
        return listed
    for path, facts in sorted(below.items()):
        version = next((facts[name] for name in _VERSIONS if facts.get(name)), "")
        name = path[len(root) :].removeprefix("/")
        parts = name.split("/")
        if ".." in parts:
            raise JllamaError(f"{place} has a file {name!r}, which would lie outside of a copy")
        if path == root or "" not in parts:  # else it is a folder that a console has made
            listed[name] = (facts["size"], str(version))
    return listed


def fetch(place: Place, choose: Callable[[dict[str, Facts]], dict[str, Facts]] = dict) -> Path:
    """Return a local path with the files of a place: itself, or a copy in the cache of a URL's.

    Only what is missing or has changed is downloaded.

    Args:
        place: a file or a folder.
        choose: returns those of the files that are needed.

    Raises:
        JllamaError: there is nothing, or it cannot be read.
    """
    if isinstance(place, Path):
        return place
    files = choose(list_files(place))
    if not files:
        raise JllamaError(f"there is nothing at {place}")
    key = hashlib.sha256(f"{place} {choose.__name__}".encode()).hexdigest()[:16]
    folder = cache_folder() / "places" / key
    download(place, folder / place.name, files, folder / _INDEX)
    return folder / place.name


def download(
    place: "UPath", target: Path, files: Mapping[str, Facts], index: Path | None = None
) -> None:
    """Make ``target`` the copy of a place's ``files``, as ``list_files`` has them.

    ``index`` is a file that says what the copy has, so that only changes are read.
    """
    before: Any = read_optional_json(index) if index else {}
    if index:  # what is here if this is interrupted
        index.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(index, json.dumps(dict.fromkeys(files) | before))
    missing = {
        name: facts
        for name, facts in files.items()
        if before.get(name) != list(facts) or not (target / name).exists()
    }
    num_bytes = sum(size for size, _ in missing.values())

    def read(name: str) -> int:
        source = place / name if name else place
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with errors_as(f"{source} was there and is gone", FileNotFoundError):
                patiently(source, _read_file, source, partial, missing[name][0])
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return missing[name][0]

    with progress(f"reading {place}", num_bytes, of_bytes=True) as advance:
        for size in in_threads(read, missing):
            advance(size)
    for name in before.keys() - files.keys():
        path = target / name
        remove(path)
        with contextlib.suppress(OSError):  # a folder is not empty
            for parent in path.parents:
                parent.rmdir()
    if index:
        atomic_write_text(index, json.dumps(files))


def _read_file(source: "UPath", target: Path, num_bytes: int) -> None:
    """Read a file of a size, which may grow meanwhile: an answer may be cut."""
    source.fs.get_file(source.path, str(target))
    size = target.stat().st_size
    if size != num_bytes and size != source.fs.info(source.path)["size"]:
        raise OSError(f"{size} of {num_bytes} bytes came")


def upload(source: Path, place: Place, names: Iterable[str]) -> None:
    """Write files of a local folder to a place, several at a time. Each is complete or absent."""

    def write(name: str) -> None:
        target: Any = place / name if name else place
        if not isinstance(target, Path):
            patiently(target, target.fs.put_file, str(source / name), target.path)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target, shared=True) as partial:
            shutil.copyfile(source / name, partial)

    list(in_threads(write, names))


def overlap(place: str, other: str) -> bool:
    """Return whether two URLs are the same, or one lies in the other."""
    texts = sorted(f"{as_place(text)}".rstrip("/") + "/" for text in (place, other))
    return is_url(place) and is_url(other) and texts[1].startswith(texts[0])


def publish(source: Path, place: "UPath", before: Collection[str] = ()) -> None:
    """Write a file or a folder to a place, in which ``before`` are the files there.

    The files by which a model is recognized are removed first and written last, so that nobody
    finds an incomplete one.
    """
    files = list_files(source)
    if "" in files:
        return upload(source, place, files)
    is_last = {name: _LAST.fullmatch(name) is not None for name in sorted({*files, *before})}
    delete(place, [name for name in before if is_last[name]])
    upload(source, place, [name for name in files if not is_last[name]])
    delete(place, [name for name in before if name not in files])
    return upload(source, place, [name for name in files if is_last[name]])


def delete(place: "UPath", names: Iterable[str]) -> None:
    """Delete files of a place, if they are there."""

    def remove(name: str) -> None:
        target = place / name
        with contextlib.suppress(FileNotFoundError):
            patiently(target, target.fs.rm_file, target.path)

    list(in_threads(remove, names))


def in_threads(function: Callable[[Any], _Result], items: Iterable[Any]) -> Iterator[_Result]:
    """Call a function that waits for a server with each item, and yield the results in order."""
    with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        try:
            yield from pool.map(function, items)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
