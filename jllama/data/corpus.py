"""A corpus is a list of files; each file holds one document, or one a line in JSON."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
import urllib.request
from collections.abc import Collection, Iterator
from pathlib import Path

from jllama.errors import JllamaError

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, never empty, and where it came from."""

    name: str
    text: str


def corpus_files(path: str, cache_dir: Path) -> dict[str, Path]:
    """The files of a corpus by their name within it, in an order that only depends on the names.

    ``path`` is ``stdlib``, ``tinyshakespeare`` (downloaded into ``cache_dir`` if it is not there), a file, a folder
    (every file below it, hidden ones left out) or a glob. No file at all raises JllamaError.
    """
    if path == "stdlib":
        walked = _walk(Path(sysconfig.get_paths()["stdlib"]), STDLIB_LEFT_OUT)
        files = {name: file for name, file in walked if file.suffix == ".py"}
    elif path == "tinyshakespeare":
        files = {path: _tinyshakespeare(cache_dir)}
    elif (root := Path(path).expanduser()).is_file():
        files = {root.name: root}
    elif root.is_dir():
        files = dict(_walk(root))
    else:
        found = map(Path, glob.glob(str(root), recursive=True))
        files = {file.as_posix(): file for file in found if file.is_file()}
    if not files:
        raise JllamaError(
            f"data.path {path!r} has no files: give stdlib, tinyshakespeare, or an existing file, folder or glob"
        )
    return dict(sorted(files.items()))


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """The files below ``root`` by their relative names; hidden ones and folders named in ``left_out`` are skipped."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        files = [Path(folder, name) for name in names if not name.startswith(".")]
        yield from ((file.relative_to(root).as_posix(), file) for file in files if file.is_file())


def read_corpus(files: dict[str, Path], text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of ``corpus_files``, one file in memory at a time.

    A ``.jsonl`` file has an object on each line, with the text in ``text_field``; any other file is one document.
    Empty documents are left out. What is not UTF-8 text, and a corpus without text, raise JllamaError.
    """
    empty = True
    for name, path in files.items():
        try:
            for document in _read_jsonl(name, path, text_field) if path.suffix == ".jsonl" else _read_text(name, path):
                if document.text:
                    empty = False
                    yield document
        except OSError as error:
            raise JllamaError(f"cannot read {path}: {error.strerror}; check it, or leave it out of data.path") from None
    if empty:
        raise JllamaError(f"the corpus holds no text: all its {len(files)} files are empty, so give others")


def _read_text(name: str, path: Path) -> Iterator[Document]:
    yield Document(name, _decode(path.read_bytes(), path))


def _read_jsonl(name: str, path: Path, text_field: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Document(f"{name}:{number}", _json_text(_decode(line, path, offset), text_field, path, number))
            offset += len(line)


def _decode(data: bytes, path: Path, offset: int = 0) -> str:
    """UTF-8 text without NUL, or an error that names the byte's offset in the file."""
    before_nul = data.partition(b"\0")[0]
    try:
        text, bad = before_nul.decode(), len(before_nul)
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad < len(data):
        raise JllamaError(
            f"{path} has byte 0x{data[bad]:02X} at offset {offset + bad}, which is not UTF-8 text: "
            f"convert the file, or leave it out of data.path"
        )
    return text


def _json_text(line: str, text_field: str, path: Path, number: int) -> str:
    where = f"{path} line {number}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise JllamaError(f"{where} is not JSON ({error}): each line of a .jsonl file must be an object") from None
    if not isinstance(value, dict):
        raise JllamaError(f"{where} is a JSON {type(value).__name__}: each line of a .jsonl file must be an object")
    text = value.get(text_field)
    if not isinstance(text, str):
        found = f"a {type(text).__name__} in" if text_field in value else "no"
        raise JllamaError(
            f"{where} has {found} field {text_field!r}, where its text should be: "
            f"set data.text_field to one of {sorted(value)}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JllamaError(
            f"{where} has the lone surrogate \\u{ord(text[error.start]):04x}, which is not text: mend the line"
        ) from None
    return text


def _tinyshakespeare(cache_dir: Path) -> Path:
    """Download the file if it is not in ``cache_dir``; it appears there only when whole and checked."""
    target = cache_dir / "tinyshakespeare.txt"
    if target.is_file():
        return target
    instead = f"download {SHAKESPEARE_URL} elsewhere and give --data.path FILE"
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
    except OSError as error:
        raise JllamaError(f"cannot download tinyshakespeare ({error}): {instead}") from None
    if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
        raise JllamaError(f"the download of tinyshakespeare is not the known file ({len(data)} bytes): {instead}")
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        raise JllamaError(f"cannot write {target}: {error.strerror}; give another --data.cache_dir") from None
    return target
