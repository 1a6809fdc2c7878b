"""Files of a corpus, and the documents in them.

A file holds one document, or one in each line of JSON Lines, or one in each row of Parquet. No
document is ever whole in memory: it is read in chunks, as often as its chunks are requested. A file
is at a local path or at a URL, which is read by ranges.
"""

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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jllama.core import JllamaError
from jllama.system.files import atomic_write, errors_as
from jllama.system.places import Place, as_place
from jllama.system.remote import list_files, patiently
from jllama.tokenizers.base import Tokenizer

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__"}
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

CHUNK = 1 << 18  # characters
LONGEST_CHUNK = 1 << 20  # characters, if there is no place to cut
LONGEST_LINE = 1 << 28  # bytes of a line of JSON, or of an array, which is in memory as a whole
MAX_NAMED = 20  # rows and files that an error names
RANGE_BYTES = 1 << 21  # what a request reads of a URL
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*[^\W\d_](?= [^\W\d_])", re.DOTALL))
"""Where a chunk may end: after a line that no white space follows, else after a word that one space
follows."""

_KINDS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PAR1": "Parquet",
    # The kinds below are recognized, and refused.
    b"PK\x03\x04": "ZIP",
    b"BZh91AY&SY": "bzip2",
    b"\xfd7zXZ": "xz",
    b"%PDF-": "PDF",
    b"\x89PNG": "PNG",
    b"\x93NUMPY": "NumPy",
    b"GGUF": "GGUF",
}
"""The kind of a file by its first bytes."""
_TEXT_TYPE = re.compile("(large_|dictionary<values=)?str(?!uct)")
"""How the names of text types begin, in Python and in Parquet."""
_EXTRAS = {
    "Zstandard": ("zstd", "compression.zstd", "backports.zstd"),
    "Parquet": ("parquet", "pyarrow.parquet"),
}
"""The extra of jllama that installs the reader of a kind, and the modules that may read it."""

Document = Callable[[], Iterator[str]]
"""A text, never empty, in chunks of about ``CHUNK`` characters that end as ``CUTS`` says, or of
``LONGEST_CHUNK``."""


class Findings:
    """Problems of data, and notes on what may be a mistake.

    By ``policy``, a row or file that cannot be learned from raises an error at once (``first``),
    raises one error together with all others (``refuse``), or is left out (``skip``). ``notes``
    counts other observations by their description.
    """

    def __init__(self, policy: Literal["first", "refuse", "skip"] = "first") -> None:
        self.policy = policy
        self.problems: list[str] = []
        self.notes = Counter[str]()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Treat a ``JllamaError`` inside as a row or file that cannot be learned from."""
        try:
            yield
        except JllamaError as error:
            if self.policy == "first":
                raise
            self.problems.append(str(error))

    def finish(self) -> list[str]:
        """Return the lines to print; raise one ``JllamaError`` for all that is refused."""
        notes = [f"{note}: {count:,}" for note, count in self.notes.items() if count]
        if not self.problems:
            return notes
        title = (
            f"{len(self.problems):,} rows or files cannot be learned from: "
            "data.bad_rows skip leaves them out"
        )
        lines = [title, *self.problems[:MAX_NAMED]]
        if self.policy == "skip":
            return lines + notes
        if len(self.problems) == 1:
            lines = self.problems
        raise JllamaError(*lines)


FAIL_FAST = Findings()


class Files(dict[str, Place]):
    """The files of a corpus by their name within it.

    ``listed`` has the size and a version of each file at a URL, from the listing that found it.
    """

    listed: Mapping[str, tuple[int, str]] = MappingProxyType({})


@dataclasses.dataclass
class Cursor:
    """How far a file has been read.

    Attributes:
        skip: the bytes that have been read of what the file holds uncompressed, or the tokens of a
            shard of tokens.
        number: the rows, lines or elements of the file that have been read, or the chunks of a text
            that is not UTF-8.
    """

    skip: int = 0
    number: int = 0


def corpus_files(path: str, cache_dir: Path, follow_links: bool = False) -> Files:
    """Return the files of a corpus by their name within it, sorted.

    Args:
        path: ``stdlib``, ``tinyshakespeare`` (downloaded into ``cache_dir`` if missing),
            ``persona``, a file, a folder (every file below it that is not hidden) or a glob; these
            three may be at a URL, where one listing finds all files.
        cache_dir: the folder for downloads.
        follow_links: allow links that lead out of a folder.

    Raises:
        JllamaError: there is no file, or a link leads out of the folder.
    """
    place = as_place(path)
    root = Path(path).expanduser()
    listed: dict[str, tuple[int, str]] = {}
    if not isinstance(place, Path):
        place, listed = _listing(place)
        files = {name or place.name: place / name if name else place for name in listed}
        listed = dict(zip(files, listed.values(), strict=True))
    elif path == "stdlib":
        below = _walk(Path(sysconfig.get_paths()["stdlib"]), STDLIB_LEFT_OUT)
        files = {name: file for name, file in below if file.suffix == ".py"}
    elif path == "tinyshakespeare":
        files = {path: _tinyshakespeare(cache_dir / "tinyshakespeare.txt")}
    elif path == "persona":
        files = {"persona.jsonl": Path(__file__).with_name("persona.jsonl")}
    elif root.is_file():
        files = {root.name: root}
    elif root.is_dir():
        files = dict(_walk(root))
        for file in files.values():
            if not follow_links and root.resolve() not in file.resolve().parents:
                raise JllamaError(
                    f"{file} is a link out of the folder, to {file.resolve()}: "
                    "set data.follow_links to true, or remove such links"
                )
    else:
        matches = map(Path, glob.glob(str(root), recursive=True))
        files = {file.as_posix(): file for file in matches if file.is_file()}
    if not files:
        advice = "give stdlib, tinyshakespeare, persona, or an existing file, folder or glob"
        raise JllamaError(f"data.path {path!r} has no files: {advice}")
    result = Files(sorted(files.items()))
    result.listed = listed
    return result


def _listing(place: Any) -> tuple[Place, dict[str, tuple[int, str]]]:
    """Return a URL, and the sizes and versions of the files below it that are not hidden.

    The URL of a glob ends before its first pattern; the files are those that match.
    """
    pattern = place
    while glob.has_magic(place.path):
        place = place.parent
    matches = re.compile("").match
    if place != pattern:
        from fsspec.utils import glob_translate

        matches = re.compile(glob_translate(str(pattern.relative_to(place)))).match
    listed = {
        name: facts
        for name, facts in list_files(place).items()
        if matches(name) and "/." not in f"/{name}"
    }
    return place, listed


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the files below ``root`` with their relative names.

    Hidden files and folders, and folders that ``left_out`` names, are skipped.
    """
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and name not in left_out
        ]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file.relative_to(root).as_posix(), file


def read_corpus(
    files: Iterable[Place],
    text_field: str = "text",
    encoding: str = "utf-8",
    findings: Findings = FAIL_FAST,
) -> Iterator[Document]:
    """Yield the documents of ``corpus_files`` that are not empty.

    A ``.jsonl`` file has an object in each line, a Parquet file has rows; both have the text in
    ``text_field``. Any other file is one document, in ``encoding``. All but Parquet may be
    compressed with gzip or Zstandard, with or without ``.gz`` or ``.zst`` at the end of the name.

    Raises:
        JllamaError: a file is not text of that encoding, also while a document is read; or
            ``findings`` collects this.
    """
    for path in files:
        with findings.collect():
            if not has_rows(path):
                # This reads the whole file, so all of it is known to be text.
                if sum(map(len, _decode_file(path, encoding, Cursor()))):
                    yield lambda path=path: cut_chunks(_decode_file(path, encoding, Cursor()))
                continue
            for text in _row_texts(path, text_field, findings, Cursor()):
                yield functools.partial(cut_chunks, [text])


def _row_texts(path: Place, text_field: str, findings: Findings, cursor: Cursor) -> Iterator[str]:
    """Yield the texts of a file with rows that are not empty."""
    check = functools.partial(_check_text, text_field)
    for place, fields in read_rows(path, [text_field], check, findings, cursor=cursor):
        text = fields[text_field] or ""
        problem = f"{place} is not a JSON object"
        with findings.collect(), errors_as(problem, UnicodeEncodeError):
            text.encode()  # raises for a lone surrogate
            if text:
                yield text


def read_texts(
    path: Place, text_field: str, encoding: str, findings: Findings, cursor: Cursor
) -> Iterator[str]:
    """Yield the texts of a file from a cursor on, which moves behind each of them.

    A file that ``read_corpus`` takes for one document is one text in each of its chunks, so that it
    is read once, and from any of them on.
    """
    if has_rows(path):
        yield from _row_texts(path, text_field, findings, cursor)
        return
    with findings.collect():
        chunks = cut_chunks(_decode_file(path, encoding, cursor))
        for text in itertools.islice(chunks, cursor.number, None):
            if encoding == "utf-8":
                cursor.skip += len(text.encode())
            else:
                cursor.number += 1
            yield text


def has_rows(path: Place) -> bool:
    """Return whether a file is JSON Lines or Parquet, which ``read_rows`` reads."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".jsonl"):
        return True
    with _open_file(path) as (kind, _):
        return kind == "Parquet"


def read_rows(
    path: Place,
    names: Collection[str] | None = None,
    check: Callable[[str, dict[str, str]], object] = lambda place, types: None,
    findings: Findings = FAIL_FAST,
    new_names: Mapping[str, str] = MappingProxyType({}),
    cursor: Cursor | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the fields of each JSON object or Parquet row of a file.

    A JSON object is a line that is not blank, or an element of one array; all its fields are
    returned. Only the columns in ``names`` (None: all) are read from Parquet, without the nulls
    that its types add to calls and tools.

    ``check`` may raise ``JllamaError``. It is called with the place of an object, or with the path
    of a Parquet file, and with the types of the fields by name. ``new_names`` has the names that
    fields get before anything else looks at them. Reading begins at the ``cursor``, which moves
    behind each object before that is yielded.
    """
    cursor = cursor or Cursor()
    with findings.collect(), _open_file(path) as (kind, file):
        if kind == "Parquet":
            parquet = _import_reader(path, kind)
            table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            types = {field.name: str(field.type) for field in table.schema_arrow}
            check(str(path), _renamed(types, new_names))
            columns = [
                name for name in types if names is None or new_names.get(name, name) in names
            ]
            end = 0
            for group in range(table.num_row_groups):
                start = end
                end += table.metadata.row_group(group).num_rows
                if end <= cursor.number:
                    continue
                batches = table.iter_batches(64, row_groups=[group], columns=columns)
                rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                for row in itertools.islice(rows, cursor.number - start, None):
                    cursor.number += 1
                    place = f"{path} row {cursor.number}"
                    yield place, _renamed(_without_padding(row), new_names)
            return
        for place, value in _json_values(path, file, cursor):
            problem = f"{place} is not a JSON object"
            with findings.collect():
                with errors_as(problem, ValueError, TypeError, RecursionError):
                    if isinstance(value, bytes):
                        value = json.loads(value.decode())
                    fields = _renamed({**value}, new_names)
                check(place, {name: type(field).__name__ for name, field in fields.items()})
                yield place, fields


def _renamed(fields: dict[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields by their new names."""
    renamed = {new_names.get(name, name): value for name, value in fields.items()}
    if len(renamed) < len(fields):
        raise JllamaError(f"{', '.join(fields)}: two of them have one name by data.fields")
    return renamed


def _without_padding(value: Any, is_inside: bool = False) -> Any:
    """Return a value of Parquet without null fields inside of calls and tools.

    A type of Parquet has the fields of all rows, which are null in a row that lacks them.
    """
    if isinstance(value, list):
        return [_without_padding(item, is_inside) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_padding(item, is_inside or name in ("tools", "tool_calls"))
        for name, item in value.items()
        if item is not None or not is_inside
    }


def _json_values(path: Place, file: Any, cursor: Cursor) -> Iterator[tuple[str, Any]]:
    """Yield the place and the bytes of each line that is not blank.

    If the file is one JSON array, yield the place and the value of each element.
    """
    file.seek(cursor.skip)
    for line in iter(lambda: file.readline(LONGEST_LINE), b""):
        place = f"{path} line {cursor.number + 1}"
        if len(line) == LONGEST_LINE:
            raise JllamaError(f"{place} has over {LONGEST_LINE:,} bytes: write its text to a file")
        content = line
        if not cursor.skip:
            content = line.removeprefix(codecs.BOM_UTF8)
            if content.lstrip().startswith(b"["):
                problem = f"{path} is not a JSON array of at most {LONGEST_LINE:,} bytes"
                with errors_as(problem, ValueError, RecursionError):
                    values = json.loads(content + file.read(LONGEST_LINE - len(line)))
                for value in values[cursor.number :]:
                    cursor.number += 1
                    yield f"{path} element {cursor.number}", value
                return
        cursor.skip += len(line)
        cursor.number += 1
        if content.strip():
            yield place, content


@contextlib.contextmanager
def _open_file(path: Place) -> Iterator[tuple[str | None, Any]]:
    """Open a file; give its kind in ``_KINDS`` and a reader of its decompressed content.

    The reader of Parquet has no buffer. Errors inside become a ``JllamaError``.
    """
    advice = (
        f"{path} must be converted to UTF-8 text, read by another data.encoding, fetched again "
        "or left out"
    )
    with (
        errors_as(advice, OSError, EOFError, ValueError, LookupError, zlib.error),
        open_place(path) as raw,
    ):
        start = raw.read(16)
        raw.seek(0)
        kind = next((kind for magic, kind in _KINDS.items() if start.startswith(magic)), None)
        file = io.BufferedReader(raw, CHUNK if isinstance(path, Path) else RANGE_BYTES)
        if kind == "gzip":
            yield kind, gzip.GzipFile(fileobj=file)
        elif kind == "Zstandard":
            zstd = _import_reader(path, kind)
            with errors_as(advice, zstd.ZstdError):
                yield kind, zstd.ZstdFile(file)
        elif kind in (None, "Parquet"):
            yield kind, raw if kind else file
        else:
            raise ValueError(f"it is a {kind} file")


def open_place(path: Place) -> Any:
    """Open a file for reading; each read of a URL is a request that is repeated if it fails."""
    if isinstance(path, Path):
        return path.open("rb", buffering=0)
    from fsspec.spec import AbstractBufferedFile

    file: Any = patiently(path, AbstractBufferedFile, path.fs, path.path, cache_type="none")

    def read(start: int, end: int) -> Any:
        end = min(end, file.size)
        data = path.fs.cat_file(path.path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"{len(data)} of {end - start} bytes came")
        return data

    file.cache.fetcher = functools.partial(patiently, path, read)
    return file


def _import_reader(path: Place, kind: str) -> Any:
    """Import the module that reads a kind of file; raise ``JllamaError`` if there is none."""
    extra, *modules = _EXTRAS[kind]
    for name in modules:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise JllamaError(
        f"{path} is a {kind} file, and the package that reads it is not installed: "
        f"pip install 'jllama[{extra}]'"
    )


def _decode_file(path: Place, encoding: str, cursor: Cursor) -> Iterator[str]:
    """Yield the text of a file in parts, from a cursor on; NUL is not text.

    The cursor is moved behind a byte order mark.
    """
    is_utf8 = encoding == "utf-8"
    with _open_file(path) as (_, file):
        "".encode(encoding)  # raises LookupError unless it is an encoding of text
        if is_utf8:
            mark = codecs.BOM_UTF8
            cursor.skip = cursor.skip or len(mark) * file.peek(3).startswith(mark)
            file.seek(cursor.skip)
        num_read = file.tell()
        decoder = codecs.getincrementaldecoder(encoding)()
        for data in itertools.chain(iter(lambda: file.read(CHUNK), b""), [b""]):
            num_read += len(data)
            try:
                # No UTF-8 text has 0xFF, so the decoder refuses a NUL at its offset.
                without_nul = data.replace(b"\0", b"\xff") if is_utf8 else data
                text = decoder.decode(without_nul, not data)
                if "\0" in text:
                    raise ValueError("it has a NUL character, which text does not have")
            except UnicodeDecodeError as error:
                # The error's bytes may begin in earlier data: count from their end.
                place = error.start - len(error.object)
                byte = data[place] if -place <= len(data) else error.object[place]
                raise ValueError(
                    f"byte 0x{byte:02X} at offset {num_read + place} is not {encoding.upper()} text"
                ) from None
            yield text


def cut_chunks(parts: Iterable[str]) -> Iterator[str]:
    """Yield the same text in chunks, see ``Document``.

    The text behind the end of a chunk has the same chunks when it is cut by itself.
    """
    pending = ""
    size = CHUNK
    for part in parts:
        pending += part
        start = 0
        while len(pending) - start >= size:
            num_chars = _chunk_end(pending[start : start + size])
            if not num_chars:
                size += CHUNK
                continue
            yield pending[start : start + num_chars]
            start += num_chars
            size = CHUNK
        pending = pending[start:]
    if pending:
        yield pending


def tokenize(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a document: BOS, its tokens, EOS."""
    first, *rest = cut_chunks([text])
    ids = [tokenizer.bos_id, *tokenizer.encode(first)]
    for chunk in rest:
        ids += encode_rest(tokenizer, chunk)
    return [*ids, tokenizer.eos_id]


def encode_rest(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a chunk that is not the first of its document.

    It is encoded behind a newline, because SentencePiece would put a space in front of it.
    """
    newline = tokenizer.encode("\n")
    ids = tokenizer.encode("\n" + text)
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return tokenizer.encode(text)


def hash_fraction(parts: Iterable[str]) -> float:
    """Return the SHA-256 of a text, which comes in parts, as a number in [0, 1).

    A text is held out for validation if its number is low.
    """
    digest = hashlib.sha256()
    for text in parts:
        digest.update(text.encode())
    return int.from_bytes(digest.digest()[:8]) / 2**64


def _chunk_end(text: str) -> int:
    """Return the last place in a text where a chunk may end, or 0 to wait for more text."""
    for pattern in CUTS:
        match = pattern.match(text)
        if match:
            return match.end()
    return len(text) if len(text) >= LONGEST_CHUNK else 0


def _check_text(field: str, place: str, types: dict[str, str]) -> None:
    """Raise ``JllamaError`` unless ``field`` is one of the fields, with a type that is text."""
    texts = [name for name, kind in types.items() if _TEXT_TYPE.match(kind)]
    if field in texts:
        return
    problem = f"a {types[field]} in" if field in types else "no"
    advice = f"set data.text_field to one of {texts}"
    if "messages" in types:
        advice = "'messages' make it a chat: set data.task to chat"
    raise JllamaError(f"{place} has {problem} field {field!r}, where its text should be: {advice}")


def _tinyshakespeare(target: Path) -> Path:
    """Download the file if it is missing; it appears only when it is whole and checked."""
    if not target.is_file():
        advice = (
            f"tinyshakespeare must be downloaded elsewhere, from {SHAKESPEARE_URL}, "
            "and given as data.path"
        )
        with (
            errors_as(advice, OSError),
            urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as response,
        ):
            data = response.read()
            if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
                raise OSError(f"these {len(data)} bytes are not the known file")
        with write_cached(target) as partial:
            partial.write_bytes(data)
    return target


@contextlib.contextmanager
def write_cached(target: Path) -> Iterator[Path]:
    """Give a path to write to, which is moved to ``target`` at the end.

    If another process has written ``target`` meanwhile, its result stays.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target, shared=True) as partial:
            yield partial
    except OSError as error:
        if not target.exists():
            raise JllamaError(
                f"cannot write {target}: {error.strerror}; make room or set data.cache_dir"
            ) from None
