"""Where files are: at local paths, or at the URLs of buckets and hubs that fsspec knows.

Only this module tells them apart. A local path is a ``pathlib.Path``, and nothing of fsspec is
imported for it. A URL is a ``UPath``, which has the same methods. A URL never becomes a local
folder of that name, and never holds credentials, which the libraries find in the environment.
"""

import hashlib
import itertools
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jllama.core import JllamaError, UsageError
from jllama.system.files import atomic_write_text, cache_folder, read_optional_json, remove
from jllama.system.progress import progress

if TYPE_CHECKING:
    from upath import UPath

    Place = Path | UPath
else:
    Place = Any

PATIENCE_S = 600.0
"""How long a server that fails or cannot be reached is asked again."""
_PAUSES_S = (1, 2, 4, 8, 15)  # the last one again and again
_NUM_CONNECTIONS = 16
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?:([^/@]*)@)?([^?#]*)(.*)", re.DOTALL)
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
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
_Result = TypeVar("_Result")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether this is a URL, also one that ``Path`` has shortened to ``gs:/bucket``."""
    return _URL.match(os.fspath(place)) is not None


def as_place(place: "str | os.PathLike[str] | UPath") -> Place:
    """Return a ``Path``, or the ``UPath`` of a URL, whose files can be read in the same way.

    Raises:
        UsageError: the URL's scheme is unknown or needs a package that is not installed; or the URL
            has credentials or a query, which the message leaves out.

    Examples:
        >>> as_place("runs/mine").name
        'mine'
    """
    text = str(place)
    url = _URL.match(text)
    if url is None:
        return Path(text)
    scheme, credentials, rest, query = url.groups()
    scheme = scheme.lower()
    has_query = re.match(r"\?[^/]*=", query) or (query and scheme in ("http", "https"))
    if credentials is not None or has_query:
        raise UsageError(
            f"{scheme}://{rest} has credentials or a query, which would be written to logs: leave "
            "them out; credentials are read from the environment"
        )
    shown = f"{scheme}://{rest}{query}"  # other ? and # are characters of names or patterns
    if scheme == "file":
        return Path("/" + rest)
    # Without this, gcsfs asks for the kind of each bucket first.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    extra = _EXTRAS.get(scheme)
    advice = f"install the package of fsspec for {scheme}://"
    if extra:
        advice = f"pip install 'jllama[{extra}]'"
    try:
        from upath import UPath

        found = UPath(shown, use_listings_cache=False)
        _ = found.fs
    except (ImportError, ValueError) as error:
        raise UsageError(f"{shown} cannot be read or written here: {advice}") from error
    return found


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return a local path; raise ``UsageError`` for a URL."""
    found = as_place(place)
    if not isinstance(found, Path):
        raise UsageError(f"{found} is a URL; give a local path")
    return found


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
            is_refused = 400 <= int(getattr(error, "code", None) or 0) < 408
            is_final = isinstance(error, _FINAL) or "Credential" in type(error).__name__
            if is_refused or is_final or time.monotonic() + pause_s > end_s:
                raise JllamaError(f"{place} cannot be read or written: {reason}") from error
            if count == 0:
                note = f"note: {place} does not answer ({reason}); trying again"
                print(f"{note} for up to {PATIENCE_S / 60:.0f} minutes", file=sys.stderr)
        time.sleep(pause_s)
    raise AssertionError("the pauses never end")


def list_files(place: Place) -> dict[str, tuple[int, str]]:
    """Return the size and a version of every file below a place, by its name within it, sorted.

    A bucket answers a thousand names with each request. The name of a single file is empty.
    """
    if isinstance(place, Path):
        files = (
            [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
        )
        stats = {path.relative_to(place).as_posix(): path.stat() for path in files}
        return {
            name.removeprefix("."): (stat.st_size, str(stat.st_mtime_ns))
            for name, stat in sorted(stats.items())
        }
    root = place.fs._strip_protocol(place.path)
    found: Any = patiently(place, place.fs.find, root, detail=True)
    listed = {}
    for path, facts in sorted(found.items()):
        version = next((facts[name] for name in _VERSIONS if facts.get(name)), "")
        name = path[len(root) :].lstrip("/")
        if not path.endswith("/"):  # a folder that a console has made
            listed[name] = (facts["size"], str(version))
    return listed


def fetch(place: Place, leave_out: str = "") -> Path:
    """Return a local path with the files of a place: itself, or a copy in the cache of a URL's.

    Only what is missing or has changed is downloaded.

    Args:
        place: a file or a folder.
        leave_out: a regular expression of names within a folder that are not needed.

    Raises:
        JllamaError: there is nothing, or it cannot be read.
    """
    if isinstance(place, Path):
        return place
    files = {
        name: facts
        for name, facts in list_files(place).items()
        if not (leave_out and re.match(leave_out, name))
    }
    if not files:
        raise JllamaError(f"there is nothing at {place}")
    key = hashlib.sha256(f"{place} {leave_out}".encode()).hexdigest()[:16]
    folder = cache_folder() / "places" / key
    download(place, folder / place.name, files, folder / _INDEX)
    return folder / place.name


def download(
    place: "UPath", target: Path, files: dict[str, tuple[int, str]], index: Path | None = None
) -> None:
    """Make ``target`` the copy of a place's ``files``, as ``list_files`` has them.

    ``index`` is a file that says what the copy has, so that only changes are read.
    """
    before: Any = read_optional_json(index) if index else {}
    wanted = {
        name: facts
        for name, facts in files.items()
        if before.get(name) != list(facts) or not (target / name).exists()
    }
    num_bytes = sum(size for size, _ in wanted.values())

    def read(name: str) -> int:
        source = place / name if name else place
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        expected_bytes = wanted[name][0]

        def get() -> None:
            source.fs.get_file(source.path, str(partial))
            if partial.stat().st_size != expected_bytes:
                raise OSError(f"{partial.stat().st_size} of {expected_bytes} bytes came")

        try:
            patiently(source, get)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return expected_bytes

    with progress(f"reading {place}", num_bytes, of_bytes=True) as advance:
        for size in in_threads(read, wanted):
            advance(size)
    for name in before.keys() - files.keys():
        remove(target / name)
    if index and before != {name: list(facts) for name, facts in files.items()}:
        atomic_write_text(index, json.dumps(files))


def upload(source: Path, place: "UPath", names: Iterable[str]) -> None:
    """Write files of a local folder to a place, several at a time. Each is complete or absent."""

    def write(name: str) -> None:
        target = place / name
        patiently(target, target.fs.put_file, str(source / name), target.path)

    list(in_threads(write, names))


def in_threads(function: Callable[[Any], _Result], items: Iterable[Any]) -> Iterator[_Result]:
    """Call a function that waits for a server with each item, and yield the results in order."""
    with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        try:
            yield from pool.map(function, items)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
