"""Shards of tokens: a corpus that is tokenized once and then read by ranges, wherever it is.

``PLACE/00000/train.bin`` has the tokens of the first file of the corpus, each document in BOS,
tokens, EOS, and ``PLACE/00000/validation.bin``, which is written first, those of its held-out
documents. ``PLACE/jllama_tokens.json`` says what is tokenized, and how many shards there will be.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jllama.core import UsageError
from jllama.data.config import DataConfig
from jllama.data.corpus import Cursor, cut_chunks, hash_fraction
from jllama.data.streams import TOKENIZER, prepare_stream
from jllama.data.stretches import Source, read_shard
from jllama.data.tokens import SPLITS, TOKENS_JOB, Chunk, split_chunks, write_tokens
from jllama.system.files import write_json
from jllama.system.places import Place
from jllama.system.progress import progress
from jllama.system.remote import list_files, patiently, upload


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
    numbers = range(len(source.shards))[process::num_processes]
    findings = source.findings()
    with progress("tokenizing", len(numbers)) as move:
        for number in numbers:
            move(1)
            name = f"{number:05}"
            if f"{name}/train.bin" in listed:
                continue
            texts = read_shard(source, source.shards[number], Cursor(), findings)
            with tempfile.TemporaryDirectory() as folder:
                write_tokens(_chunks(source, texts), data.tokenizer, Path(folder), [], True)
                for split in reversed(SPLITS):
                    upload(Path(folder), target / name, [f"{split}.bin"])
    for line in findings.finish():
        print(line)


def _chunks(source: Source, texts: Iterable[str]) -> Iterator[Chunk]:
    for text in texts:
        is_held_out = hash_fraction([text]) <= source.limit
        yield from split_chunks(SPLITS[is_held_out], cut_chunks([text]))
