"""From a corpus to tokens on disk, once: documents, their split, their tokenizer, and flat files of ids."""

import collections
import gzip
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jllama.data.config import DataConfig
from jllama.data.corpus import Document, Findings, cached, corpus_files, read_corpus
from jllama.data.datasets import Dataset
from jllama.errors import JllamaError
from jllama.files import cache_folder, fault_of
from jllama.progress import progress
from jllama.tokenizers import BytesTokenizer, Tokenizer, load_tokenizer, train_sentencepiece

CACHE_VERSION = 1  # part of every fingerprint: raise it when the files below change
_TRAINING = 2  # raise it when the tokenizer's training changes
FEW_DOCUMENTS = 32  # up to so many, each document is split; above, whole documents go to one side
CHUNK_CHARS = (
    1 << 18
)  # what one thread tokenizes at a time, a block of a document or many short ones
GZIP_LIMIT = 1 << 26  # bytes of validation text that gzip is measured on
SPLITS = ("train", "validation")


class Block(NamedTuple):
    """A part of a document, never empty, that one split gets; whether it is the first of those, and the last."""

    split: str
    text: str
    starts: bool
    ends: bool


def prepare_data(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Tokenize a corpus, or find it done: the cache is keyed by the files' names, sizes and times, and the tokenizer.

    It goes in blocks, on every core, so memory does not grow with it. A block ends where no Llama's tokenizer has a
    token across (``corpus.CUTS``), or after ``corpus.LONGEST_BLOCK`` characters without such a place, where a token may
    be another. What cannot be read or cached, or is too short, raises JllamaError; ``tokenizer`` replaces ``config``'s.
    """
    cache = cache_of(config)
    files = corpus_files(config.path, cache, config.follow_links)
    listing = listing_of(files)
    others = [
        value for value in (config.encoding, config.bad_rows) if value not in ("utf-8", "refuse")
    ]
    corpus = sha256(CACHE_VERSION, listing, config.text_field, config.validation_fraction, *others)
    is_packed = any(name.endswith((".gz", ".zst", ".parquet")) for name in files)
    size = None if is_packed else sum(size for _, size, _ in listing)

    notes: list[str] = []

    def blocks(move: Callable[[int], None]) -> Iterator[Block]:
        findings = Findings(config.bad_rows)
        documents = read_corpus(files.values(), config.text_field, config.encoding, findings)
        for block in split_documents(documents, config.validation_fraction):
            move(len(block.text.encode()))
            yield block
        notes[:] = findings.finish()

    if tokenizer is None and config.tokenizer == "bytes":
        tokenizer = BytesTokenizer()
    elif tokenizer is None:
        folder = Path(config.tokenizer)
        if config.tokenizer == "bpe":
            folder = cache / f"bpe-{sha256(_TRAINING, corpus, config.vocab_size)[:16]}"
            if not folder.exists():
                with (
                    cached(folder) as partial,
                    progress("learning a vocabulary", size, of_bytes=True) as move,
                ):
                    texts = (block.text for block in blocks(move) if block.split == "train")
                    partial.mkdir()
                    train_sentencepiece(texts, config.vocab_size).save(partial)
        tokenizer = load_tokenizer(folder)

    fingerprint = sha256(corpus, tokenizer.fingerprint())
    folder = cache / f"tokens-{fingerprint[:16]}"
    if not folder.exists():
        with cached(folder) as partial, progress("tokenizing", size, of_bytes=True) as move:
            partial.mkdir()
            _write_tokens(blocks(move), tokenizer, partial, fingerprint, notes)
    advice = f"{folder} must be deleted, since it does not hold what was written there"
    with fault_of(advice, OSError, ValueError, KeyError, TypeError):
        counts = json.loads((folder / "counts.json").read_text())
        sizes = {folder / f"{split}.bin": counts[split]["tokens"] for split in SPLITS}
        train, validation = (
            np.memmap(path, counts["dtype"], "r", shape=(size,)) for path, size in sizes.items()
        )
        return Dataset(
            tokenizer, train, validation, fingerprint, counts, notes=tuple(counts.get("notes", ()))
        )


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[Block]:
    """Give each document to ``train`` or ``validation``, by nothing but its text, so the order has no say.

    A text is held out if its SHA-256, as a number in [0, 1), is under ``validation_fraction``; of ``FEW_DOCUMENTS`` or
    fewer, each document's end is. What is not in memory is read twice, the first time for its hash or its length.
    """
    documents = iter(documents)
    first = list(itertools.islice(documents, FEW_DOCUMENTS + 1))
    for document in itertools.chain(first, documents):
        if len(first) <= FEW_DOCUMENTS:
            end = round(sum(map(len, document())) * (1 - validation_fraction))
            yield from _blocks("train", document(), end=end)
            yield from _blocks("validation", document(), end)
        else:
            digest = hashlib.sha256()
            for text in document():
                digest.update(text.encode())
            fraction = int.from_bytes(digest.digest()[:8]) / 2**64
            yield from _blocks(
                "validation" if fraction < validation_fraction else "train", document()
            )


def _blocks(
    split: str, texts: Iterable[str], start: int = 0, end: int = sys.maxsize
) -> Iterator[Block]:
    """The characters from ``start`` to ``end`` of a document that comes in parts."""
    offset = 0
    waiting, starts = "", True  # a block waits until it is known whether another follows
    for text in texts:
        part = text[max(start - offset, 0) : max(end - offset, 0)]
        offset += len(text)
        if waiting and part:
            yield Block(split, waiting, starts, False)
            starts = False
        waiting = part or waiting
    if waiting:
        yield Block(split, waiting, starts, True)


def cache_of(config: DataConfig) -> Path:
    """The folder for downloads, tokenizers and tokens."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else cache_folder()


def listing_of(files: Mapping[str, Path]) -> list[tuple[str, int, int]]:
    """Names, sizes in bytes and times of files: what a cache of what is made of them is keyed by."""
    return [(name, (stat := path.stat()).st_size, stat.st_mtime_ns) for name, path in files.items()]


def encode_rest(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a block that is not its document's first: behind a newline, or SentencePiece would add a space."""
    newline, ids = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
    return ids[len(newline) :] if ids[: len(newline)] == newline else tokenizer.encode(text)


def _groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Blocks that follow each other, of ``CHUNK_CHARS`` characters or more together; the last ones may have fewer."""
    group, chars = [], 0
    for block in blocks:
        group.append(block)
        chars += len(block.text)
        if chars >= CHUNK_CHARS:
            yield group
            group, chars = [], 0
    yield group


def _write_tokens(
    blocks: Iterable[Block], tokenizer: Tokenizer, folder: Path, fingerprint: str, notes: list[str]
) -> None:
    """Write the documents in their order, their counts, and the notes that there are at the end.

    Threads tokenize: the libraries release Python's lock.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts = {split: collections.Counter(tokens=0, documents=0, bytes=0) for split in SPLITS}
    held_out = bytearray()

    def tokenize(group: list[Block]) -> dict[str, np.ndarray]:
        ids = {split: [] for split in SPLITS}
        for split, text, starts, ends in group:
            ids[split] += (
                [tokenizer.bos_id, *tokenizer.encode(text)]
                if starts
                else encode_rest(tokenizer, text)
            )
            ids[split] += [tokenizer.eos_id] * ends
        return {split: np.array(ids[split], dtype) for split in SPLITS}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting, most = (
            collections.deque(),
            2 * (os.cpu_count() or 1),
        )  # so that the corpus is never all in memory
        for group in itertools.chain(
            _groups(blocks), itertools.repeat([], most)
        ):  # empty ones push the last ones out
            for block in group:
                data = block.text.encode()
                counts[block.split].update(documents=int(block.starts), bytes=len(data))
                held_out += (
                    data[: GZIP_LIMIT - len(held_out)] if block.split == "validation" else b""
                )
            waiting.append(pool.submit(tokenize, group))
            if len(waiting) > most:
                for split, ids in waiting.popleft().result().items():
                    with (folder / f"{split}.bin").open("ab") as file:
                        file.write(ids.data)
                    counts[split]["tokens"] += len(ids)

    if empty := [split for split in SPLITS if not counts[split]["tokens"]]:
        said = f"the {empty[0]} split is empty: the corpus has {sum(c['documents'] for c in counts.values())} documents"
        raise JllamaError(f"{said}, so give more text or another data.validation_fraction")
    gzipped = {"gzip_bytes": len(gzip.compress(held_out)), "gzip_of_bytes": len(held_out)}
    report = {"fingerprint": fingerprint, "dtype": dtype.name, **counts, **gzipped, "notes": notes}
    (folder / "counts.json").write_text(json.dumps(report, indent=2) + "\n")


def sha256(*parts: object) -> str:
    """The SHA-256 of what JSON can hold, in hexadecimal."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
