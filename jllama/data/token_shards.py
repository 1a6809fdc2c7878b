"""Shards of tokens: a corpus that is tokenized once and then read by ranges, wherever it is.

``PLACE/tokens/00000.bin`` has the tokens of the first file of the corpus, and
``PLACE/held_out/00000.bin`` those of its held-out documents, each in BOS, tokens, EOS; the latter
is written first. ``PLACE/tokens.json`` says what is tokenized, and how many shards there will be.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jllama.core import UsageError
from jllama.data.config import DataConfig
from jllama.data.corpus import Cursor, hash_fraction
from jllama.data.streams import HELD_OUT, TOKENIZER, TOKENS, prepare_stream
from jllama.data.stretches import Source, read_shard
from jllama.data.tokens import TOKENS_JOB, ordered_map
from jllama.system.files import write_json
from jllama.system.places import Place
from jllama.system.progress import progress
from jllama.system.remote import list_files, patiently, upload
from jllama.tokenizers.base import Tokenizer


def tokenize_shards(config: DataConfig, target: Place, process: int, num_processes: int) -> None:
    """Write each ``num_processes``-th shard, from ``process`` on, unless it is there.

    Raises:
        UsageError: ``target`` has shards of something else.
        JllamaError: a file cannot be read or written.
    """
    # 1. Compare with what is there.
    data = prepare_stream(config)
    (source,) = data.sources
    job = {
        "fingerprint": data.fingerprint,
        "shards": len(source.shards),
        "tokenizer": data.tokenizer.fingerprint(),
    }
    listed = list_files(target)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if TOKENS_JOB not in listed:
            data.tokenizer.save(folder / TOKENIZER)
            upload(folder, target, list_files(folder))
            write_json(folder / TOKENS_JOB, job)
            upload(folder, target, [TOKENS_JOB])
        elif json.loads(patiently(target, (target / TOKENS_JOB).read_bytes)) != job:
            raise UsageError(f"{target} has tokens of other texts or options; give another place")

    # 2. Write the shards that are missing.
    names = {number: f"{number:05}.bin" for number in range(len(source.shards))}
    numbers = [*names][process::num_processes]
    missing = [number for number in numbers if TOKENS + names[number] not in listed]
    findings = source.findings()
    begun_s = time.perf_counter()
    num_tokens = 0
    with progress("tokenizing", len(numbers)) as move:
        move(len(numbers) - len(missing))
        for number in missing:
            texts = read_shard(source, source.shards[number], Cursor(), findings)
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                num_tokens += _write_shard(source, data.tokenizer, texts, folder, names[number])
                for split in (HELD_OUT, TOKENS):
                    upload(folder, target, [split + names[number]])
            speed = num_tokens / (time.perf_counter() - begun_s)
            move(1, description=f"tokenizing, {speed:,.0f} tokens/s")
    for line in findings.finish():
        print(line)


def _write_shard(
    source: Source, tokenizer: Tokenizer, texts: Iterable[str], folder: Path, name: str
) -> int:
    """Write the tokens of texts, and those of held-out ones; return how many there are."""

    def encode(text: str) -> tuple[str, np.ndarray]:
        split = HELD_OUT if hash_fraction([text]) <= source.limit else TOKENS
        return split, source.encode(tokenizer, text)

    num_tokens = 0
    with contextlib.ExitStack() as stack:
        files = {}
        for split in (TOKENS, HELD_OUT):
            path = folder / split / name
            path.parent.mkdir()
            files[split] = stack.enter_context(path.open("wb"))
        for split, ids in ordered_map(encode, texts):
            files[split].write(ids.data)
            num_tokens += len(ids)
    return num_tokens
