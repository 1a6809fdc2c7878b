"""A corpus is a list of files; each holds one document, or one a line in JSON, or one a row in Parquet.

None is ever whole in memory: a document is read in blocks, as often as its blocks are asked for.
"""

import codecs
import contextlib
import functools
import glob
import gzip
import hashlib
import importlib
import itertools
import json
import os
import re
import sysconfig
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from jllama.errors import JllamaError
from jllama.files import fault_of, written_whole

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

BLOCK = 1 << 18  # characters
LONGEST_BLOCK = 1 << 20  # characters, where there is no place to cut
LONGEST_LINE = 1 << 28  # bytes of one line of JSON: it is in memory as a whole
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL))
"""Where a block may end: after a line that no white space follows, or else after a word that one space follows."""

_KINDS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PAR1": "Parquet"}  # these are read
_KINDS |= {b"PK\x03\x04": "ZIP", b"BZh91AY&SY": "bzip2", b"\xfd7zXZ": "xz", b"%PDF-": "PDF"}
_KINDS |= {b"\x89PNG": "PNG", b"\x93NUMPY": "NumPy", b"GGUF": "GGUF"}
_TEXT = re.compile("(large_|dictionary<values=)?str(?!uct)")  # how its types begin, in Python and in Parquet
_EXTRAS = {"Zstandard": ("zstd", "compression.zstd", "backports.zstd"), "Parquet": ("parquet", "pyarrow.parquet")}

Document = Callable[[], Iterator[str]]
"""A text, never empty, in parts of about ``BLOCK`` characters that end as ``CUTS`` says, or of ``LONGEST_BLOCK``."""


def corpus_files(path: str, cache_dir: Path) -> dict[str, Path]:
    """The files of a corpus by their name within it, sorted; JllamaError if there is none.

    ``path`` is ``stdlib``, ``tinyshakespeare`` (downloaded into ``cache_dir`` if it is not there), ``persona``, a file,
    a folder (every file below it, hidden ones left out) or a glob.
    """
    if path == "stdlib":
        walked = _walk(Path(sysconfig.get_paths()["stdlib"]), STDLIB_LEFT_OUT)
        files = {name: file for name, file in walked if file.suffix == ".py"}
    elif path == "tinyshakespeare":
        files = {path: _tinyshakespeare(cache_dir / "tinyshakespeare.txt")}
    elif path == "persona":
        files = {"persona.jsonl": Path(__file__).with_name("persona.jsonl")}
    elif (root := Path(path).expanduser()).is_file():
        files = {root.name: root}
    elif root.is_dir():
        files = dict(_walk(root))
    else:
        files = {file.as_posix(): file for file in map(Path, glob.glob(str(root), recursive=True)) if file.is_file()}
    if not files:
        advice = "give stdlib, tinyshakespeare, persona, or an existing file, folder or glob"
        raise JllamaError(f"data.path {path!r} has no files: {advice}")
    return dict(sorted(files.items()))


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """The files below ``root`` by their relative names; hidden ones and folders named in ``left_out`` are skipped."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from ((file.relative_to(root).as_posix(), file) for file in files if file.is_file())


def read_corpus(files: Iterable[Path], text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of ``corpus_files`` that are not empty.

    A ``.jsonl`` file has an object on each line, and a Parquet file a row each, with the text in ``text_field``; any
    other file is one document. All but Parquet may be packed with gzip or Zstandard, with ``.gz`` or ``.zst`` behind
    the name or without. What is not UTF-8 text (also while a document is read) raises JllamaError.
    """
    for path in files:
        if has_rows(path):
            for where, fields in read_rows(path, [text_field], functools.partial(_check_text, text_field)):
                if text := fields[text_field]:
                    with fault_of(f"{where} is not a JSON object", UnicodeEncodeError):
                        text.encode()  # not so a lone surrogate
                    yield functools.partial(cut, [text])
        elif any(_decoded(path)):
            yield lambda path=path: cut(_decoded(path))


def has_rows(path: Path) -> bool:
    """Whether a file is of JSON Lines or Parquet, which ``read_rows`` reads."""
    with _opened(path) as (kind, _):
        return kind == "Parquet" or path.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


def read_rows(
    path: Path, names: Collection[str], check: Callable[[str, dict[str, str]], object]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object of each line that is not blank, or each row's columns that ``names`` has, and where it stands.

    ``check``, called with such a place, or a Parquet file's path, and the types of the fields there, may refuse it.
    """
    with _opened(path) as (kind, file):
        if kind == "Parquet":
            table = _extra(path, "Parquet").ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            kinds = {field.name: str(field.type) for field in table.schema_arrow}
            check(str(path), kinds)
            batches = table.iter_batches(64, columns=[name for name in names if name in kinds])
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))
        else:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
                where = f"{path} line {number}"
                if len(line) == LONGEST_LINE:
                    raise JllamaError(f"{where} has over {LONGEST_LINE:,} bytes: write its text to a file")
                if line.strip():
                    with fault_of(f"{where} is not a JSON object", ValueError, TypeError, RecursionError):
                        fields = {**json.loads(line.decode())}
                    check(where, {name: type(each).__name__ for name, each in fields.items()})
                    yield where, fields


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[str | None, Any]]:
    """Which of ``_KINDS`` a file is, and its content unpacked; what goes wrong meanwhile is a JllamaError."""
    advice = f"{path} must be converted to UTF-8 text, fetched again or left out of data.path"
    with fault_of(advice, OSError, EOFError, ValueError, zlib.error), path.open("rb") as file:
        kind = next((kind for magic, kind in _KINDS.items() if file.peek(16).startswith(magic)), None)
        if kind == "gzip":
            yield kind, gzip.GzipFile(fileobj=file)
        elif kind == "Zstandard":
            zstd = _extra(path, kind)
            with fault_of(advice, zstd.ZstdError):
                yield kind, zstd.ZstdFile(file)
        elif kind in (None, "Parquet"):
            yield kind, file
        else:
            raise ValueError(f"it is a {kind} file")


def _extra(path: Path, kind: str) -> Any:
    extra, *modules = _EXTRAS[kind]
    for name in modules:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise JllamaError(f"{path} is a {kind} file, and what reads those is not installed: pip install 'jllama[{extra}]'")


def _decoded(path: Path) -> Iterator[str]:
    """The UTF-8 text of a file; NUL is none."""
    data, offset = b"", 0
    with _opened(path) as (_, file):
        for chunk in itertools.chain(iter(lambda: file.read(BLOCK), b""), [b""]):
            data += chunk
            try:
                text, used = codecs.utf_8_decode(data.replace(b"\0", b"\xff"), "strict", not chunk)  # no text has 0xFF
            except UnicodeDecodeError as error:
                byte, at = data[error.start], offset + error.start
                raise ValueError(f"byte 0x{byte:02X} at offset {at} is not UTF-8 text") from None
            data, offset = data[used:], offset + used
            yield text


def cut(parts: Iterable[str]) -> Iterator[str]:
    """The same text in blocks, see ``Document``."""
    pending = ""
    for more in (part[start : start + BLOCK] for part in parts for start in range(0, len(part), BLOCK)):
        pending += more
        if len(pending) >= BLOCK:
            match = next(filter(None, (pattern.match(pending) for pattern in CUTS)), None)
            end = match.end() if match else len(pending) if len(pending) >= LONGEST_BLOCK else 0
            if end:
                yield pending[:end]
                pending = pending[end:]
    if pending:
        yield pending


def _check_text(field: str, where: str, kinds: dict[str, str]) -> None:
    """Raise the error for fields, of these types, unless one is text and has the name that it should have."""
    if _TEXT.match(kinds.get(field, "")):
        return
    said = f"{where} has {f'a {kinds[field]} in' if field in kinds else 'no'} field {field!r}, where its text should be"
    advice = f"set data.text_field to one of {[name for name in kinds if _TEXT.match(kinds[name])]}"
    advice = "'messages' make it a chat: set data.task to chat" if "messages" in kinds else advice
    raise JllamaError(f"{said}: {advice}")


def _tinyshakespeare(target: Path) -> Path:
    """Download the file if it is not there; it appears only when whole and checked."""
    if not target.is_file():
        advice = f"tinyshakespeare must be downloaded elsewhere, from {SHAKESPEARE_URL}, and given as data.path"
        with fault_of(advice, OSError), urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response:
            data = response.read()
            if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
                raise OSError(f"these {len(data)} bytes are not the known file")
        with cached(target) as partial:
            partial.write_bytes(data)
    return target


@contextlib.contextmanager
def cached(target: Path) -> Iterator[Path]:
    """Inside, a path for what takes its place at ``target`` at the end, unless another process was quicker."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target, shared=True) as partial:
            yield partial
    except OSError as error:
        if not target.exists():
            raise JllamaError(f"cannot write {target}: {error.strerror}; make room or set data.cache_dir") from None
