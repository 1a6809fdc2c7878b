"""A corpus is a list of files; each file holds one document, or one a line in JSON, or one a row in Parquet.

None is ever whole in memory: a document is read in blocks, as often as its blocks are asked for.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import sysconfig
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jllama.errors import JllamaError
from jllama.files import written_whole

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

BLOCK = 1 << 18  # characters
LONGEST_BLOCK = 1 << 20  # characters, where there is no place to cut
LONGEST_LINE = 1 << 28  # bytes of one line of JSON: it is in memory as a whole
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL))
"""Where a block may end: after a line that no white space follows, or else after a word that one space follows."""

_KINDS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PAR1": "Parquet",
    b"PK\x03\x04": "ZIP",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ": "xz",
    b"%PDF-": "PDF",
    b"\x89PNG": "PNG",
    b"\x93NUMPY": "NumPy",
    b"GGUF": "GGUF",
}
"""Kinds of files by how they begin. The first three are read."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text, never empty, and where it came from.

    Args:
        name: of the file, with the line or row.
        blocks: gives the text from its beginning, in parts of about ``BLOCK`` characters that end as ``CUTS`` says. A
            text without such places is cut every ``LONGEST_BLOCK`` characters.
    """

    name: str
    blocks: Callable[[], Iterator[str]]

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(self.blocks())


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
        matches = map(Path, glob.glob(str(root), recursive=True))
        files = {file.as_posix(): file for file in matches if file.is_file()}
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
    """Yield the documents of ``corpus_files``.

    A ``.jsonl`` file has an object on each line, and a Parquet file a row each, with the text in ``text_field``; any
    other file is one document. All but Parquet may be packed with gzip or Zstandard, whatever the name; ``.gz`` and
    ``.zst`` are no part of it. Empty documents are left out. What is not UTF-8 text, and a corpus without text, raise
    JllamaError; so do, while a document's blocks are read, the errors in it.
    """
    empty = True
    for name, path in files.items():
        with _opened(path) as (kind, file):
            if kind == "Parquet":
                documents = _read_parquet(name, path, file, text_field)
            elif path.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
                documents = _read_jsonl(name, path, file, text_field)
            else:
                first = list(itertools.islice(cut(_decoded(file, path)), 2))  # a small file is read but once
                blocks = functools.partial(iter, first) if len(first) < 2 else functools.partial(_text_blocks, path)
                documents = [Document(name, blocks)] if first else []
            for document in documents:
                empty = False
                yield document
    if empty:
        raise JllamaError(f"the corpus holds no text: all its {len(files)} files are empty, so give others")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[str | None, io.BufferedIOBase]]:
    """Which of ``_KINDS`` a file is, and its content unpacked; what goes wrong meanwhile is a JllamaError."""
    instead = "or leave it out of data.path"
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        with path.open("rb") as raw:
            begin = raw.peek(16)
            kind = next((kind for magic, kind in _KINDS.items() if begin.startswith(magic)), None)
            file: Any = raw
            if kind == "gzip":
                file = gzip.GzipFile(fileobj=raw)
            elif kind == "Zstandard":
                zstd = _extra(path, kind, "zstd", ("compression.zstd", "backports.zstd"))
                file, damages = zstd.ZstdFile(raw), (*damages, zstd.ZstdError)
            elif kind not in (None, "Parquet"):
                raise JllamaError(f"{path} is a {kind} file, which is not read: make text files of it, {instead}")
            yield kind, file
    except damages as error:
        raise JllamaError(f"{path} is cut short or damaged ({error}): fetch it again, {instead}") from None
    except OSError as error:
        raise JllamaError(f"cannot read {path}: {error.strerror or error}; check it, {instead}") from None


def _extra(path: Path, kind: str, extra: str, modules: Iterable[str]) -> ModuleType:
    for name in modules:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise JllamaError(f"{path} is a {kind} file, and what reads those is not installed: pip install 'jllama[{extra}]'")


def _text_blocks(path: Path) -> Iterator[str]:
    with _opened(path) as (_, file):
        yield from cut(_decoded(file, path))


def _decoded(file: io.BufferedIOBase, path: Path) -> Iterator[str]:
    data, offset = b"", 0
    while chunk := file.read(BLOCK):
        text, used = _decode(data + chunk, path, offset, final=False)
        data, offset = (data + chunk)[used:], offset + used
        yield text
    yield _decode(data, path, offset)[0]


def cut(parts: Iterable[str]) -> Iterator[str]:
    """The same text in blocks, see ``Document``."""
    pending = ""
    for part in parts:
        pending += part
        if len(pending) >= BLOCK:
            match = next(filter(None, (pattern.match(pending) for pattern in CUTS)), None)
            end = match.end() if match else len(pending) if len(pending) >= LONGEST_BLOCK else 0
            if end:
                yield pending[:end]
                pending = pending[end:]
    if pending:
        yield pending


def _document(name: str, text: str) -> Iterator[Document]:
    """A text that is in memory, if it is not empty."""
    if text:
        yield Document(name, lambda: cut(text[start : start + BLOCK] for start in range(0, len(text), BLOCK)))


def _read_jsonl(name: str, path: Path, file: io.BufferedIOBase, text_field: str) -> Iterator[Document]:
    offset = 0
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        where = f"{path} line {number}"
        if len(line) == LONGEST_LINE:
            raise JllamaError(f"{where} has over {LONGEST_LINE:,} bytes: write its text to a file")
        if line.strip():
            yield from _document(f"{name}:{number}", _json_text(_decode(line, path, offset)[0], text_field, where))
        offset += len(line)


def _read_parquet(name: str, path: Path, file: io.BufferedIOBase, text_field: str) -> Iterator[Document]:
    """The rows one after the other, of some pages in memory at a time; a row without a value has no text."""
    parquet = _extra(path, "Parquet", "parquet", ("pyarrow.parquet",))
    number = 0
    try:
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        columns = {field.name: str(field.type) for field in table.schema_arrow}
        texts = [name for name, type in columns.items() if re.match("(large_|dictionary<values=)?string", type)]
        if text_field not in texts:
            raise _no_text(str(path), columns.get(text_field), text_field, list(columns), texts)
        for batch in table.iter_batches(64, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                number += 1
                yield from _document(f"{name}:{number}", text or "")
    except (ValueError, OSError) as error:  # pyarrow's own errors among them
        said = " ".join(str(error).split())[:200]
        raise JllamaError(f"{path} cannot be read as Parquet behind row {number} ({said}): fetch it again") from None


def _decode(data: bytes, path: Path, offset: int = 0, *, final: bool = True) -> tuple[str, int]:
    """UTF-8 text without NUL, and of how many bytes: of all if ``final``. An error names the offset in the file."""
    before_nul, nul, _ = data.partition(b"\0")
    try:
        text, used = codecs.utf_8_decode(before_nul, "strict", final or bool(nul))
        if not nul:
            return text, used
        bad = used
    except UnicodeDecodeError as error:
        bad = error.start
    raise JllamaError(
        f"{path} has byte 0x{data[bad]:02X} at offset {offset + bad}, which is not UTF-8 text: "
        f"convert the file, or leave it out of data.path"
    )


def _no_text(where: str, kind: str | None, text_field: str, names: list[str], texts: list[str]) -> JllamaError:
    said = f"{where} has {f'a {kind} in' if kind else 'no'} field {text_field!r}, where its text should be: "
    if "messages" in names:
        return JllamaError(f"{said}'messages' make it a chat, and so far jllama trains on plain text")
    return JllamaError(f"{said}set data.text_field to one of {texts}")


def _json_text(line: str, text_field: str, where: str) -> str:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise JllamaError(f"{where} is a JSON {type(value).__name__}: each line of a .jsonl file must be an object")
        text = value.get(text_field)
        if not isinstance(text, str):
            kind = type(text).__name__ if text_field in value else None
            raise _no_text(where, kind, text_field, list(value), sorted(value))
        text.encode()
        return text
    except UnicodeEncodeError as error:
        char = f"\\u{ord(error.object[error.start]):04x}"
        raise JllamaError(f"{where} has the lone surrogate {char}, which is not text: mend the line") from None
    except (ValueError, RecursionError) as error:
        raise JllamaError(f"{where} is not JSON ({error}): each line of a .jsonl file must be an object") from None


def _tinyshakespeare(cache_dir: Path) -> Path:
    """Download the file if it is not in ``cache_dir``; it appears there only when whole and checked."""
    target = cache_dir / "tinyshakespeare.txt"
    if target.is_file():
        return target
    instead = f"download {SHAKESPEARE_URL} elsewhere and give it as data.path"
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
    except OSError as error:
        raise JllamaError(f"cannot download tinyshakespeare ({error}): {instead}") from None
    if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
        raise JllamaError(f"the download of tinyshakespeare is not the known file ({len(data)} bytes): {instead}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with written_whole(target, shared=True) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise JllamaError(f"cannot write {target}: {error.strerror}; give another data.cache_dir") from None
    return target
