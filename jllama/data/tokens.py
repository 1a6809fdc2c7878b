"""From a corpus to token ids on disk: documents, their split, their tokenizer, flat files of ids.

The work is done once and cached. All stages are generators over chunks of text, so memory does not
grow with the corpus: ``read_corpus`` -> ``split_documents`` -> ``write_tokens``.
"""

import collections
import functools
import gzip
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jllama.core import JllamaError
from jllama.data.config import DataConfig
from jllama.data.corpus import (
    Document,
    Files,
    Findings,
    corpus_files,
    encode_rest,
    hash_fraction,
    read_corpus,
    write_cached,
)
from jllama.data.datasets import Dataset
from jllama.system.devices import num_cores
from jllama.system.files import cache_folder, errors_as
from jllama.system.places import Place, as_place
from jllama.system.progress import progress
from jllama.system.remote import fetch
from jllama.tokenizers.base import BytesTokenizer, Tokenizer
from jllama.tokenizers.loading import load_tokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

CACHE_VERSION = 2  # part of every key: raise it when the files below change
_TRAINING_VERSION = 2  # raise it when the tokenizer's training changes
FEW_DOCUMENTS = 32  # up to this many, each document is split; above, a document is in one split
GROUP_CHARS = 1 << 18  # what a thread tokenizes at a time: one long chunk or many short ones
GZIP_LIMIT = 1 << 26  # bytes of validation text that gzip is measured on
SPLITS = ("train", "validation")
TOKENS_JOB = "jllama_tokens.json"
"""What ``jllama data tokenize`` writes before its shards, see ``token_shards``."""


class Chunk(NamedTuple):
    """A part of a document, never empty, that belongs to one split."""

    split: str
    text: str
    starts: bool  # whether it is the first chunk of its document in this split
    ends: bool  # whether it is the last one


def prepare_data(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Tokenize a corpus, or open the tokens in the cache.

    All of the text is read, also where a run would read it as a stream.

    The key of the cache is the files' names, sizes and modification times, the options that change
    the tokens, and the tokenizer. The text is read in chunks and tokenized by threads on all cores.
    A chunk ends where no tokenizer of a Llama has a token across the border (``corpus.CUTS``). If
    ``corpus.LONGEST_CHUNK`` characters have no such place, it ends anywhere, and the tokens there
    may differ from those of the whole text.

    Args:
        config: the corpus, its tokenizer and its split.
        tokenizer: replaces ``config.tokenizer``.

    Raises:
        JllamaError: a file cannot be read or cached, or the text is too short.

    Examples:
        >>> data = jllama.prepare_data(jllama.DataConfig(path="my_texts/", tokenizer="bytes"))
        >>> data.tokenizer.vocab_size
        259
    """
    # 1. Identify the corpus.
    cache = cache_dir(config)
    files = corpus_files(config.path, cache, config.follow_links)
    listing = file_stats(files)
    # These options are part of the key only if they are set, so that older caches stay valid.
    defaults = ("utf-8", "refuse")
    others = [value for value in (config.encoding, config.bad_rows) if value not in defaults]
    corpus = sha256(CACHE_VERSION, listing, config.text_field, config.validation_fraction, *others)

    # 2. Prepare to read it. The progress bars show a share if its size is known.
    is_compressed = any(name.endswith((".gz", ".zst", ".parquet")) for name in files)
    num_bytes = None if is_compressed else sum(size for _, size, _ in listing)
    notes: list[str] = []
    read_chunks = functools.partial(_read_chunks, config, files.values(), notes)

    # 3. Load or train the tokenizer.
    if tokenizer is None and config.tokenizer == "bpe":
        key = sha256(_TRAINING_VERSION, corpus, config.vocab_size)
        folder = cache / f"bpe-{key[:16]}"
        if not folder.exists():
            with (
                write_cached(folder) as partial,
                progress("learning a vocabulary", num_bytes, of_bytes=True) as advance,
            ):
                chunks = read_chunks(advance)
                texts = (chunk.text for chunk in chunks if chunk.split == "train")
                partial.mkdir()
                train_sentencepiece(texts, config.vocab_size).save(partial)
        tokenizer = load_tokenizer(folder)
    tokenizer = tokenizer or find_tokenizer(config.tokenizer)

    # 4. Write the tokens, unless they are in the cache, and open them.
    key = sha256(corpus, tokenizer.fingerprint())
    folder = cache / f"tokens-{key[:16]}"
    if not folder.exists():
        with (
            write_cached(folder) as partial,
            progress("tokenizing", num_bytes, of_bytes=True) as advance,
        ):
            partial.mkdir()
            write_tokens(read_chunks(advance), tokenizer, partial, notes)
    advice = f"{folder} must be deleted, since it does not hold what was written there"
    with errors_as(advice, OSError, ValueError, KeyError, TypeError):
        counts = json.loads((folder / "counts.json").read_text())
        train, validation = (
            np.memmap(folder / f"{split}.bin", counts["dtype"], "r", shape=counts[split]["tokens"])
            for split in SPLITS
        )
        notes = counts.get("notes", ())
        return Dataset(tokenizer, train, validation, counts["fingerprint"], counts, tuple(notes))


def _read_chunks(
    config: DataConfig, files: Iterable[Place], notes: list[str], advance: Callable[[int], None]
) -> Iterator[Chunk]:
    """Yield the chunks of a corpus; report their bytes to ``advance``, set ``notes`` at the end."""
    findings = Findings(config.bad_rows)
    documents = read_corpus(files, config.text_field, config.encoding, findings)
    for chunk in split_documents(documents, config.validation_fraction):
        advance(len(chunk.text.encode()))
        yield chunk
    notes[:] = findings.finish()


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[Chunk]:
    """Assign each document to ``train`` or ``validation`` by its text alone, and yield its chunks.

    A text is held out if its SHA-256, as a number in [0, 1), is below ``validation_fraction``. So
    the order of the documents does not matter. If there are at most ``FEW_DOCUMENTS``, the end of
    each document is held out instead. A document is read twice, first for its hash or its length.
    """
    documents = iter(documents)
    first = list(itertools.islice(documents, FEW_DOCUMENTS + 1))
    for document in itertools.chain(first, documents):
        if len(first) <= FEW_DOCUMENTS:
            num_chars = sum(map(len, document()))
            end = round(num_chars * (1 - validation_fraction))
            yield from split_chunks("train", document(), end=end)
            yield from split_chunks("validation", document(), start=end)
        else:
            is_held_out = hash_fraction(document()) < validation_fraction
            yield from split_chunks("validation" if is_held_out else "train", document())


def split_chunks(
    split: str, texts: Iterable[str], start: int = 0, end: int = sys.maxsize
) -> Iterator[Chunk]:
    """Yield the characters from ``start`` to ``end`` of a document that comes in parts."""
    offset = 0
    # A chunk waits until it is known whether another one follows.
    waiting = ""
    starts = True
    for text in texts:
        part = text[max(start - offset, 0) : max(end - offset, 0)]
        offset += len(text)
        if waiting and part:
            yield Chunk(split, waiting, starts, False)
            starts = False
        waiting = part or waiting
    if waiting:
        yield Chunk(split, waiting, starts, True)


def find_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by ``DataConfig.tokenizer``, which is not ``bpe``."""
    return BytesTokenizer() if name == "bytes" else load_tokenizer(fetch(as_place(name)))


def cache_dir(config: DataConfig) -> Path:
    """Return the folder for downloads, tokenizers and tokens."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else cache_folder()


def is_stream(config: DataConfig) -> bool:
    """Return whether text is read as a stream, by ``jllama.data.streams``."""
    place = as_place(os.path.expanduser(config.path))
    is_local = isinstance(place, Path)
    has_tokens = is_local and (place / TOKENS_JOB).is_file()
    return config.stream or bool(config.mixture) or not is_local or has_tokens


def file_stats(files: Files) -> list[tuple[str, int, int | str]]:
    """Return (name, bytes, modification time) of each file: the key of what is made of them.

    A file at a URL has the version of its listing for a time.
    """
    if files.listed:
        return [(name, *facts) for name, facts in files.listed.items()]
    stats = ((name, path.stat()) for name, path in files.items())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def write_tokens(
    chunks: Iterable[Chunk],
    tokenizer: Tokenizer,
    folder: Path,
    notes: list[str],
    may_be_empty: bool = False,
) -> None:
    """Write ``train.bin``, ``validation.bin`` and ``counts.json``, with the documents in order.

    ``fingerprint`` in ``counts.json`` is a hash of the tokens, whatever the files' names are.
    Threads tokenize, because the libraries release Python's lock. ``notes`` is read at the end.
    """
    dtype = token_dtype(tokenizer)
    counts = {split: collections.Counter(tokens=0, documents=0, bytes=0) for split in SPLITS}
    held_out = bytearray()
    digests = {split: hashlib.sha256() for split in SPLITS}
    encode = functools.partial(_encode_group, tokenizer, dtype)
    for ids in _ordered_map(encode, _group_chunks(chunks, counts, held_out)):
        for split in SPLITS:
            with (folder / f"{split}.bin").open("ab") as file:
                file.write(ids[split].data)
            digests[split].update(ids[split].data)
            counts[split]["tokens"] += len(ids[split])

    for split in SPLITS:
        if not (may_be_empty or counts[split]["tokens"]):
            num_documents = sum(count["documents"] for count in counts.values())
            raise JllamaError(
                f"the {split} split is empty: the corpus has {num_documents} documents, "
                "so give more text or another data.validation_fraction"
            )
    gzipped = {"gzip_bytes": len(gzip.compress(held_out)), "gzip_of_bytes": len(held_out)}
    fingerprint = sha256(*(digest.hexdigest() for digest in digests.values()))
    content = {"fingerprint": fingerprint, "dtype": dtype.name}
    report = {**content, **counts, **gzipped, "notes": notes}
    (folder / "counts.json").write_text(json.dumps(report, indent=2) + "\n")


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of the tokens on disk."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _group_chunks(
    chunks: Iterable[Chunk], counts: Mapping[str, collections.Counter[str]], held_out: bytearray
) -> Iterator[list[Chunk]]:
    """Yield consecutive chunks in groups of at least ``GROUP_CHARS`` characters.

    The last group may be smaller. The chunks are added to ``counts``, and their validation text to
    ``held_out``.
    """
    group = []
    num_chars = 0
    for chunk in chunks:
        data = chunk.text.encode()
        counts[chunk.split].update(documents=int(chunk.starts), bytes=len(data))
        if chunk.split == "validation":
            held_out += data[: GZIP_LIMIT - len(held_out)]
        group.append(chunk)
        num_chars += len(chunk.text)
        if num_chars >= GROUP_CHARS:
            yield group
            group = []
            num_chars = 0
    yield group


def _encode_group(
    tokenizer: Tokenizer, dtype: np.dtype, group: list[Chunk]
) -> dict[str, np.ndarray]:
    """Return the ids of a group by split; BOS begins each document and EOS ends it."""
    ids = {split: [] for split in SPLITS}
    for chunk in group:
        if chunk.starts:
            ids[chunk.split] += [tokenizer.bos_id, *tokenizer.encode(chunk.text)]
        else:
            ids[chunk.split] += encode_rest(tokenizer, chunk.text)
        if chunk.ends:
            ids[chunk.split].append(tokenizer.eos_id)
    return {split: np.array(ids[split], dtype) for split in SPLITS}


def _ordered_map(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Compute ``function(item)`` in threads and yield the results in the order of the items.

    At most two items for each core are under way, so the items are never all in memory.
    """
    num_threads = num_cores()
    pending = collections.deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * num_threads:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def held_out_limit(config: DataConfig, fractions: Sequence[float] | np.ndarray) -> float:
    """Return the highest ``hash_fraction`` that is held out: ``config.validation_fraction``.

    At least the lowest of the sorted ``fractions`` is held out, and at least the highest is not.
    """
    return np.clip(config.validation_fraction, fractions[0], fractions[-2])


def sha256(*parts: object) -> str:
    """Return the SHA-256 of values that JSON can hold, in hexadecimal."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
