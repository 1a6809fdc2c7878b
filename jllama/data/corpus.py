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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from jllama.errors import JllamaError
from jllama.files import fault_of, written_whole

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

BLOCK = 1 << 18  # characters
LONGEST_BLOCK = 1 << 20  # characters, where there is no place to cut
LONGEST_LINE = 1 << 28  # bytes of one line of JSON, or an array: it is in memory as a whole
MOST_NAMED = 20  # of the rows and files that cannot be learned from
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL))
"""Where a block may end: after a line that no white space follows, or else after a word that one space follows."""

_KINDS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PAR1": "Parquet",  # up to here these are read
    b"PK\x03\x04": "ZIP",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ": "xz",
    b"%PDF-": "PDF",
    b"\x89PNG": "PNG",
    b"\x93NUMPY": "NumPy",
    b"GGUF": "GGUF",
}
_TEXT = re.compile(
    "(large_|dictionary<values=)?str(?!uct)"
)  # how its types begin, in Python and in Parquet
_EXTRAS = {
    "Zstandard": ("zstd", "compression.zstd", "backports.zstd"),
    "Parquet": ("parquet", "pyarrow.parquet"),
}

Document = Callable[[], Iterator[str]]
"""A text, never empty, in parts of about ``BLOCK`` characters that end as ``CUTS`` says, or of ``LONGEST_BLOCK``."""


class Findings:
    """What is wrong in data, and what may not be meant.

    Rows and files that cannot be learned from are refused at the first, or together, or left out. ``notes`` counts the
    rest by what it is.
    """

    def __init__(self, policy: Literal["first", "refuse", "skip"] = "first") -> None:
        self.policy = policy
        self.named: list[str] = []
        self.notes = Counter[str]()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, a JllamaError is a row or file that cannot be learned from."""
        try:
            yield
        except JllamaError as error:
            if self.policy == "first":
                raise
            self.named.append(str(error))

    def finish(self) -> list[str]:
        """Return what to say, a line each; what is refused is one JllamaError."""
        notes = [f"{what}: {count:,}" for what, count in self.notes.items() if count]
        if not self.named:
            return notes
        said = f"{len(self.named):,} rows or files cannot be learned from: data.bad_rows skip leaves them out"
        lines = [said, *self.named[:MOST_NAMED]]
        if self.policy == "refuse":
            raise JllamaError(*(lines if len(self.named) > 1 else self.named))
        return lines + notes


AT_ONCE = Findings()


def corpus_files(path: str, cache_dir: Path, follow_links: bool = False) -> dict[str, Path]:
    """Return the files of a corpus by their name within it, sorted; JllamaError if there is none.

    ``path`` is ``stdlib``, ``tinyshakespeare`` (downloaded into ``cache_dir`` if it is not there), ``persona``, a file,
    a folder (every file below it, hidden ones left out) or a glob. Links that lead out of a folder are refused, but for
    ``follow_links``.
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
        for file in files.values():
            if not follow_links and root.resolve() not in file.resolve().parents:
                said = f"{file} is a link out of the folder, to {file.resolve()}"
                raise JllamaError(f"{said}: set data.follow_links to true, or remove such links")
    else:
        files = {
            file.as_posix(): file
            for file in map(Path, glob.glob(str(root), recursive=True))
            if file.is_file()
        }
    if not files:
        advice = "give stdlib, tinyshakespeare, persona, or an existing file, folder or glob"
        raise JllamaError(f"data.path {path!r} has no files: {advice}")
    return dict(sorted(files.items()))


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """The files below ``root`` by their relative names; hidden ones and folders named in ``left_out`` are skipped."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and name not in left_out
        ]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from ((file.relative_to(root).as_posix(), file) for file in files if file.is_file())


def read_corpus(
    files: Iterable[Path],
    text_field: str = "text",
    encoding: str = "utf-8",
    findings: Findings = AT_ONCE,
) -> Iterator[Document]:
    """Yield the documents of ``corpus_files`` that are not empty.

    A ``.jsonl`` file has an object on each line, and a Parquet file a row each, with the text in ``text_field``; any
    other file is one document, in ``encoding``. All but Parquet may be packed with gzip or Zstandard, with ``.gz`` or
    ``.zst`` behind the name or without. What is no text of that encoding (also while a document is read) raises
    JllamaError, or is what ``findings`` make of it.
    """
    for path in files:
        with findings.noted():
            if has_rows(path):
                for where, fields in read_rows(
                    path, [text_field], functools.partial(_check_text, text_field), findings
                ):
                    text = fields[text_field] or ""
                    with (
                        findings.noted(),
                        fault_of(f"{where} is not a JSON object", UnicodeEncodeError),
                    ):
                        text.encode()  # not so a lone surrogate
                        if text:
                            yield functools.partial(cut, [text])
            elif sum(map(len, _decoded(path, encoding))):  # all of it is text
                yield lambda path=path: cut(_decoded(path, encoding))


def has_rows(path: Path) -> bool:
    """Whether a file is of JSON Lines or Parquet, which ``read_rows`` reads."""
    with _opened(path) as (kind, _):
        return kind == "Parquet" or path.name.removesuffix(".gz").removesuffix(".zst").endswith(
            ".jsonl"
        )


def read_rows(
    path: Path,
    names: Collection[str],
    check: Callable[[str, dict[str, str]], object],
    findings: Findings = AT_ONCE,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object, of a line that is not blank or of an array, or each row's columns that ``names`` has.

    Before it comes where it stands. ``check``, called with such a place, or a Parquet file's path, and the types of the
    fields there, may refuse it.
    """
    with findings.noted(), _opened(path) as (kind, file):
        if kind == "Parquet":
            table = _extra(path, "Parquet").ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            kinds = {field.name: str(field.type) for field in table.schema_arrow}
            check(str(path), kinds)
            batches = table.iter_batches(64, columns=[name for name in names if name in kinds])
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))
        else:
            for where, value in _json_values(path, file):
                with findings.noted():
                    with fault_of(
                        f"{where} is not a JSON object", ValueError, TypeError, RecursionError
                    ):
                        fields = {
                            **(json.loads(value.decode()) if isinstance(value, bytes) else value)
                        }
                    check(where, {name: type(each).__name__ for name, each in fields.items()})
                    yield where, fields


def _json_values(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    """Each line that is not blank, as bytes, or each value of a file that is one JSON array; and where it stands."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        where = f"{path} line {number}"
        if len(line) == LONGEST_LINE:
            raise JllamaError(f"{where} has over {LONGEST_LINE:,} bytes: write its text to a file")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if number == 1 and line.lstrip().startswith(b"["):
            with fault_of(
                f"{path} is no JSON array of up to {LONGEST_LINE:,} bytes",
                ValueError,
                RecursionError,
            ):
                values = json.loads(line + file.read(LONGEST_LINE - len(line)))
            yield from ((f"{path} element {place}", value) for place, value in enumerate(values, 1))
        elif line.strip():
            yield where, line


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[str | None, Any]]:
    """Which of ``_KINDS`` a file is, and its content unpacked; what goes wrong meanwhile is a JllamaError."""
    advice = f"{path} must be converted to UTF-8 text, read by another data.encoding, fetched again or left out"
    with (
        fault_of(advice, OSError, EOFError, ValueError, LookupError, zlib.error),
        path.open("rb") as file,
    ):
        kind = next(
            (kind for magic, kind in _KINDS.items() if file.peek(16).startswith(magic)), None
        )
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
    raise JllamaError(
        f"{path} is a {kind} file, and what reads those is not installed: pip install 'jllama[{extra}]'"
    )


def _decoded(path: Path, encoding: str) -> Iterator[str]:
    """The text of a file, without a byte order mark; NUL is none."""
    read_bytes = 0
    with _opened(path) as (_, file):
        "".encode(encoding)  # LookupError, unless it is one of text
        is_utf8 = encoding == "utf-8"
        decoder = codecs.getincrementaldecoder("utf-8-sig" if is_utf8 else encoding)()
        for chunk in itertools.chain(iter(lambda: file.read(BLOCK), b""), [b""]):
            read_bytes += len(chunk)
            try:
                # No UTF-8 text has 0xFF.
                text = decoder.decode(
                    chunk.replace(b"\0", b"\xff") if is_utf8 else chunk, not chunk
                )
                if "\0" in text:
                    raise ValueError("it has a NUL, which no text has")
            except UnicodeDecodeError as error:
                place = error.start - len(error.object)  # from the end of what was read
                byte = chunk[place] if -place <= len(chunk) else error.object[place]
                said = f"byte 0x{byte:02X} at offset {read_bytes + place}"
                raise ValueError(f"{said} is not {encoding.upper()} text") from None
            yield text


def cut(parts: Iterable[str]) -> Iterator[str]:
    """The same text in blocks, see ``Document``."""
    pending = ""
    for more in (
        part[start : start + BLOCK] for part in parts for start in range(0, len(part), BLOCK)
    ):
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
        with (
            fault_of(advice, OSError),
            urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response,
        ):
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
            raise JllamaError(
                f"cannot write {target}: {error.strerror}; make room or set data.cache_dir"
            ) from None
