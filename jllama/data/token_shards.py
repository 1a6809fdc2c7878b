"""Shards of tokens: a corpus that is tokenized once and then read by ranges, wherever it is.

``PLACE/tokens/00000.bin`` has the tokens of the first file of the corpus, and
``PLACE/held_out/00000.bin`` those of its held-out documents, each in BOS, tokens, EOS.
``PLACE/parts/00000.json`` says that both are complete. ``PLACE/tokens.json`` says what is
tokenized, and ``PLACE/index.json`` is written last.
"""

import contextlib
import functools
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jllama.core import UsageError
from jllama.data.config import DataConfig
from jllama.data.corpus import Cursor, cut_chunks, hash_fraction, tokenize
from jllama.data.pieces import Source, read_shard
from jllama.data.streams import HELD_OUT, INDEX, TOKENIZER, TOKENS, prepare_stream
from jllama.data.tokens import TOKENS_JOB, ordered_map, sha256
from jllama.system.files import Json, write_json
from jllama.system.places import Place
from jllama.system.progress import progress
from jllama.system.remote import in_threads, list_files, patiently, upload
from jllama.tokenizers.base import Tokenizer

_PARTS = "parts"


def tokenize_shards(config: DataConfig, target: Place, process: int, num_processes: int) -> None:
    """Write each ``num_processes``-th shard, from ``process`` on, unless it is complete.

    The process that finds all shards complete writes the index.

    Raises:
        UsageError: ``target`` has shards of something else.
        JllamaError: a file cannot be read or written.
    """
    # 1. Compare with what is there.
    data = prepare_stream(config)
    (source,) = data.sources
    job = {"fingerprint": data.fingerprint, "shards": len(source.shards)}
    listed = list_files(target)
    if TOKENS_JOB not in listed:
        _write(target, TOKENS_JOB, job)
        with _folder(target) as folder:
            data.tokenizer.save(folder / TOKENIZER)
            names = [f"{TOKENIZER}/{path.name}" for path in (folder / TOKENIZER).iterdir()]
            _move(folder, target, names)
    elif _read(target / TOKENS_JOB) != job:
        raise UsageError(f"{target} has tokens of other texts or options; give another place")

    # 2. Write the shards that are missing.
    parts = {number: f"{_PARTS}/{number:05}.json" for number in range(len(source.shards))}
    numbers = [*parts][process::num_processes]
    missing = [number for number in numbers if parts[number] not in listed]
    begun_s = time.perf_counter()
    num_tokens = 0
    with progress("tokenizing", len(numbers)) as move:
        move(len(numbers) - len(missing))
        for number in missing:
            part = _write_shard(source, data.tokenizer, number, target)
            _write(target, parts[number], part)
            num_tokens += part["tokens"]
            speed = num_tokens / (time.perf_counter() - begun_s)
            move(1, description=f"tokenizing, {speed:,.0f} tokens/s")

    # 3. Write the index, if this was the last one.
    listed = list_files(target)
    if all(name in listed for name in parts.values()):
        shards = [*in_threads(_read, [target / name for name in parts.values()])]
        index = {
            "tokenizer": data.tokenizer.fingerprint(),
            "dtype": source.dtype,
            "fingerprint": sha256(shards),
            "tokens": sum(part["tokens"] for part in shards),
            "documents": sum(part["documents"] for part in shards),
            "shards": shards,
        }
        _write(target, INDEX, index)


def _write_shard(source: Source, tokenizer: Tokenizer, number: int, target: Place) -> Json:
    """Tokenize a file of the corpus, and return what is to be said of its shard."""
    findings = source.findings()
    counts = Counter(tokens=0, documents=0, held_out_tokens=0)
    digest = hashlib.sha256()
    texts = read_shard(source, source.shards[number], Cursor(), findings)
    encode = functools.partial(_encode, source, tokenizer)
    names = [f"{split}/{number:05}.bin" for split in (TOKENS, HELD_OUT)]
    with _folder(target) as folder:
        for name in names:
            (folder / name).parent.mkdir()
        with (folder / names[0]).open("wb") as train, (folder / names[1]).open("wb") as held_out:
            for is_held_out, ids in ordered_map(encode, texts):
                (held_out if is_held_out else train).write(ids.data)
                digest.update(ids.data)
                counts["held_out_tokens" if is_held_out else "tokens"] += len(ids)
                counts["documents"] += 1
        _move(folder, target, names)
    return {
        "name": source.shards[number].rpartition("/")[2],
        **counts,
        "left_out": len(findings.problems),
        "sha256": digest.hexdigest(),
    }


def _encode(source: Source, tokenizer: Tokenizer, text: str) -> tuple[bool, np.ndarray]:
    """Return whether a text is held out, and its tokens."""
    is_held_out = hash_fraction(cut_chunks([text])) <= source.limit
    return is_held_out, np.array(tokenize(tokenizer, text), source.dtype)


def _read(place: Place) -> Json:
    return json.loads(patiently(place, place.read_bytes))


def _write(target: Place, name: str, content: Json) -> None:
    """Write a JSON file."""
    with _folder(target) as folder:
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, content)
        _move(folder, target, [name])


@contextlib.contextmanager
def _folder(target: Place) -> Iterator[Path]:
    """Give a folder to write to, on the disk of a local target, which is removed at the end."""
    parent = None
    if isinstance(target, Path):
        target.mkdir(parents=True, exist_ok=True)
        parent = target
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=parent) as folder:
        yield Path(folder)


def _move(folder: Path, target: Place, names: Iterable[str]) -> None:
    """Move files to the target."""
    if not isinstance(target, Path):
        upload(folder, target, names)
        return
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        (folder / name).replace(target / name)
