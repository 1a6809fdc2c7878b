"""From a corpus to tokens on disk, once: documents, their split, their tokenizer, and flat files of ids."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from jllama.data.config import DataConfig
from jllama.data.corpus import Document, corpus_files, read_corpus
from jllama.errors import JllamaError
from jllama.files import cache_folder, written_whole
from jllama.progress import progress
from jllama.tokenizers import BytesTokenizer, Tokenizer, load_tokenizer, train_sentencepiece

CACHE_VERSION = 1  # part of every fingerprint: raise it when the files below change
_TRAINING = 2  # raise it when the tokenizer's training changes
FEW_DOCUMENTS = 32  # up to so many, each document is split; above, whole documents go to one side
CHUNK_CHARS = 1 << 18  # what one thread tokenizes at a time, a block of a document or many short ones
GZIP_LIMIT = 1 << 26  # bytes of validation text that gzip is measured on
SPLITS = ("train", "validation")


class Block(NamedTuple):
    """A part of a document, never empty, that one split gets; whether it is the first of those, and the last."""

    split: str
    text: str
    starts: bool
    ends: bool


@dataclasses.dataclass(frozen=True)
class SplitCounts:
    """What one split holds: ``tokens`` with BOS and EOS, ``documents``, and ``bytes`` of UTF-8 text."""

    tokens: int
    documents: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A tokenized corpus: each document as BOS, its tokens, EOS, one after the other in a memory-mapped array.

    ``gzip_bytes`` is what ``gzip -9`` makes of the first ``gzip_of_bytes`` bytes of the validation text.
    ``fingerprint`` names corpus, split and tokenizer.
    """

    tokenizer: Tokenizer
    train: Integer[np.ndarray, "train_tokens"]
    validation: Integer[np.ndarray, "validation_tokens"]
    fingerprint: str
    train_counts: SplitCounts
    validation_counts: SplitCounts
    gzip_bytes: int
    gzip_of_bytes: int

    @property
    def gzip_bits_per_byte(self) -> float:
        """What ``gzip -9`` needs for a byte of the validation text, in bits: a model that beats it has learned."""
        return 8 * self.gzip_bytes / self.gzip_of_bytes


def prepare_data(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Tokenize a corpus, or find it done: the cache is keyed by the files' names, sizes and times, and the tokenizer.

    Memory does not grow with the corpus: it is read and tokenized in blocks, on every core. A block ends where no
    Llama's tokenizer has a token across (``corpus.CUTS``), so a document's ids are those of its whole text; only where
    ``corpus.LONGEST_BLOCK`` characters have no such place, a token may be another there.
    A ``tokenizer`` given here, a loaded model's, stands in for the configuration's.
    Source text that cannot be read or is too short, and a cache folder that cannot be written, raise JllamaError.
    """
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else cache_folder()
    files = corpus_files(config.path, cache)
    stats = {name: path.stat() for name, path in files.items()}
    listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    corpus = _sha256(CACHE_VERSION, listing, config.text_field, config.validation_fraction)
    is_packed = any(name.endswith((".gz", ".zst", ".parquet")) for name in files)
    size = None if is_packed else sum(stat.st_size for stat in stats.values())

    def blocks(move: Callable[[int], None]) -> Iterator[Block]:
        for block in split_documents(read_corpus(files, config.text_field), config.validation_fraction):
            move(len(block.text.encode()))
            yield block

    if tokenizer is None and config.tokenizer == "bpe":
        folder = cache / f"bpe-{_sha256(_TRAINING, corpus, config.vocab_size)[:16]}"
        if not folder.exists():
            with _cached(folder) as partial, progress("reading for a vocabulary", size, of_bytes=True) as move:

                def training() -> Iterator[str]:
                    yield from (block.text for block in blocks(move) if block.split == "train")
                    move(description="training the vocabulary")

                train_sentencepiece(training(), config.vocab_size).save(partial)
        tokenizer = load_tokenizer(folder)
    elif tokenizer is None:
        tokenizer = BytesTokenizer() if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer)

    fingerprint = _sha256(corpus, tokenizer.fingerprint())
    folder = cache / f"tokens-{fingerprint[:16]}"
    if not folder.exists():
        with _cached(folder) as partial, progress("tokenizing", size, of_bytes=True) as move:
            _write_tokens(blocks(move), tokenizer, partial, fingerprint)
    return _load_tokens(folder, tokenizer)


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[Block]:
    """Give each document to ``train`` or ``validation``, by nothing but its text, so the order has no say.

    A text is held out if its SHA-256, read as a number in [0, 1), is under ``validation_fraction``. Of a corpus with
    ``FEW_DOCUMENTS`` or fewer, where that would be a gamble, each document's end is held out instead. What is not in
    memory is read twice: once for its hash or its length.
    """
    documents = iter(documents)
    first = list(itertools.islice(documents, FEW_DOCUMENTS + 1))
    if len(first) > FEW_DOCUMENTS:
        for document in itertools.chain(first, documents):
            digest = hashlib.sha256()
            for text in document.blocks():
                digest.update(text.encode())
            fraction = int.from_bytes(digest.digest()[:8]) / 2**64
            yield from _blocks("validation" if fraction < validation_fraction else "train", document.blocks())
    else:
        for document in first:
            held_out = round(sum(map(len, document.blocks())) * (1 - validation_fraction))
            yield from _blocks("train", _between(document.blocks(), 0, held_out))
            yield from _blocks("validation", _between(document.blocks(), held_out, sys.maxsize))


def _between(texts: Iterable[str], start: int, end: int) -> Iterator[str]:
    """The characters from ``start`` to ``end`` of a text that comes in parts; parts may be empty."""
    for text in texts:
        yield text[max(start, 0) : max(end, 0)]
        start, end = start - len(text), end - len(text)


def _blocks(split: str, texts: Iterable[str]) -> Iterator[Block]:
    pairs = itertools.pairwise(itertools.chain(filter(None, texts), [""]))
    for number, (text, following) in enumerate(pairs):
        yield Block(split, text, starts=number == 0, ends=not following)


def _encode_rest(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a block that is not its document's first: behind a newline, or SentencePiece would add a space."""
    newline, ids = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
    return ids[len(newline) :] if ids[: len(newline)] == newline else tokenizer.encode(text)


def _write_tokens(blocks: Iterable[Block], tokenizer: Tokenizer, folder: Path, fingerprint: str) -> None:
    """Write ``train.bin``, ``validation.bin`` and ``counts.json`` into ``folder``.

    Threads tokenize: the libraries release Python's lock. Results are written in the order of the documents.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts = {split: collections.Counter(tokens=0, documents=0, bytes=0) for split in SPLITS}
    gzip, gzip_bytes, gzip_of_bytes = zlib.compressobj(9, wbits=31), 0, 0

    def tokenize(group: list[Block]) -> dict[str, np.ndarray]:
        ids = {split: [] for split in SPLITS}
        for split, text, starts, ends in group:
            ids[split] += [tokenizer.bos_id, *tokenizer.encode(text)] if starts else _encode_rest(tokenizer, text)
            ids[split] += [tokenizer.eos_id] * ends
        return {split: np.array(ids[split], dtype) for split in SPLITS}

    with contextlib.ExitStack() as stack:
        outputs = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        waiting, most = collections.deque(), 2 * (os.cpu_count() or 1)  # so that the corpus is never all in memory
        for group in itertools.chain(_groups(blocks), itertools.repeat([], most)):  # empty ones push the last ones out
            for block in group:
                data = block.text.encode()
                counts[block.split].update(documents=int(block.starts), bytes=len(data))
                if block.split == "validation":
                    data = data[: GZIP_LIMIT - gzip_of_bytes]
                    gzip_bytes += len(gzip.compress(data))
                    gzip_of_bytes += len(data)
            waiting.append(pool.submit(tokenize, group))
            if len(waiting) > most:
                for split, ids in waiting.popleft().result().items():
                    outputs[split].write(ids.data)
                    counts[split]["tokens"] += len(ids)

    documents = sum(count["documents"] for count in counts.values())
    if empty := [split for split in SPLITS if not counts[split]["tokens"]]:
        said = f"the {empty[0]} split is empty: the corpus has {documents} documents"
        raise JllamaError(f"{said}, so give more text or another data.validation_fraction")
    gzipped = {"gzip_bytes": gzip_bytes + len(gzip.flush()), "gzip_of_bytes": gzip_of_bytes}
    report = {"fingerprint": fingerprint, "dtype": dtype.name, **counts, **gzipped}
    (folder / "counts.json").write_text(json.dumps(report, indent=2) + "\n")


def _groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Consecutive blocks, until together they reach CHUNK_CHARS characters."""
    group, size = [], 0
    for block in blocks:
        group.append(block)
        size += len(block.text)
        if size >= CHUNK_CHARS:
            yield group
            group, size = [], 0
    yield group


def _load_tokens(folder: Path, tokenizer: Tokenizer) -> Dataset:
    try:
        report = json.loads((folder / "counts.json").read_text())
        for split in SPLITS:
            counts = SplitCounts(**report.pop(split))
            tokens = np.memmap(folder / f"{split}.bin", report["dtype"], mode="r", shape=(counts.tokens,))
            report |= {split: tokens, f"{split}_counts": counts}
        del report["dtype"]
        return Dataset(tokenizer, **report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{folder} does not hold what was written there ({error})"
        raise JllamaError(f"{said}: delete it and start again") from None


def _sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextlib.contextmanager
def _cached(folder: Path) -> Iterator[Path]:
    """Inside, an empty folder that takes the place of ``folder`` at the end, unless another process was quicker."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(folder, shared=True) as partial:
            partial.mkdir()
            yield partial
    except OSError as error:
        if not folder.exists():
            said = f"cannot write {folder}: {error.strerror}"
            raise JllamaError(f"{said}; make room or give another data.cache_dir") from None
