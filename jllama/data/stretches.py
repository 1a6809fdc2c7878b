"""Stretches of streamed text: a process of its own reads and tokenizes them, without JAX.

A stretch is rows of a lane that follow each other (see ``streams``). It is a function of its
source, its lane and the position where it begins, whoever reads it.
"""

import dataclasses
import functools
import os
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jllama.core import JllamaError
from jllama.data.config import DataConfig
from jllama.data.corpus import Cursor, Findings, hash_fraction, open_place, read_texts, tokenize
from jllama.system.files import errors_as
from jllama.system.places import as_place
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.loading import load_tokenizer

STRETCH_ROWS = 64
STRETCH_TOKENS = 1 << 18  # a stretch has fewer rows if they are long
_BLOCK_TOKENS = 1 << 18

Position = Sequence[int]
"""The epoch, the number of shards of the lane that are done in it, the fields of a cursor that is
before a document, and the tokens of the document that are done."""
START = (0, 0, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Source:
    """The shards of a stream, and how their text becomes tokens.

    Attributes:
        shards: the places of files, or of shards of tokens, as texts.
        tokenizer: the folder that holds it.
        dtype: that of the tokens.
        has_tokens: whether the shards hold tokens.
        config: how text is read.
        limit: the highest ``hash_fraction`` that is held out.
        num_lanes: how many lanes the shards of an epoch are dealt to.
        seed: decides the order of the shards in each epoch.
        seq_len: the tokens of a row, without its first.
    """

    shards: Sequence[str]
    tokenizer: str
    dtype: str
    has_tokens: bool
    config: DataConfig
    limit: float = 0.0
    num_lanes: int = 1
    seed: int = 0
    seq_len: int = 1

    def findings(self) -> Findings:
        """Return what collects bad rows, or raises for the first one."""
        return Findings("skip" if self.config.bad_rows == "skip" else "first")

    def encode(self, tokenizer: Tokenizer, text: str) -> np.ndarray:
        """Return the tokens of a document."""
        return np.array(tokenize(tokenizer, text), self.dtype)


class Stretch(NamedTuple):
    """The tokens from a position on, and the rows or files that were left out there.

    Each row begins with the last token of the row before it.
    """

    position: Position
    tokens: np.ndarray
    problems: list[str]


@functools.cache
def _tokenizer(folder: str) -> Tokenizer:
    """Load a tokenizer once for all lanes: a large one takes 50 MB."""
    return load_tokenizer(folder)


def read_stretches(source: Source, lane: int, position: Position) -> Iterator[Stretch]:
    """Yield the stretches of a lane from a position on, without an end.

    Raises:
        JllamaError: a file cannot be read or has no text; or all shards of a lane have none.
    """
    findings = source.findings()
    num_rows = max(min(STRETCH_ROWS, STRETCH_TOKENS // source.seq_len), 1)
    size = num_rows * source.seq_len
    *begin, offset = position
    read = deque()
    num_tokens = -offset
    for place, ids in _documents(source, lane, begin, findings):
        read.append((place, ids))
        num_tokens += len(ids)
        while num_tokens > size:
            tokens = np.concatenate([ids for _, ids in read])[offset : offset + size + 1]
            yield Stretch((*read[0][0], offset), tokens, [*findings.problems])
            findings.problems.clear()
            num_tokens -= size
            offset += size
            while offset >= len(read[0][1]):
                offset -= len(read.popleft()[1])


def _documents(
    source: Source, lane: int, position: Sequence[int], findings: Findings
) -> Iterator[tuple[Position, np.ndarray]]:
    """Yield the position of each document of a lane to train on, and its tokens.

    Shards of tokens have blocks instead of documents.
    """
    tokenizer = _tokenizer(source.tokenizer)
    epoch, turn, *begun = position
    while True:
        is_empty = True
        order = np.random.default_rng((source.seed, epoch)).permutation(len(source.shards))
        for number in order[lane :: source.num_lanes][turn:]:
            cursor = Cursor(*begun)
            before = dataclasses.astuple(cursor)
            for document in read_shard(source, source.shards[int(number)], cursor, findings):
                ids = document
                if not source.has_tokens:
                    ids = np.zeros(0)
                    if hash_fraction([document]) > source.limit:
                        ids = source.encode(tokenizer, document)
                if len(ids):
                    is_empty = False
                    yield (epoch, turn, *before), ids
                before = dataclasses.astuple(cursor)
            turn += 1
            begun = ()
        if is_empty:
            raise JllamaError(
                f"{source.shards[0]} and the files beside it have no text to train on: give others "
                "or lower data.validation_fraction"
            )
        epoch += 1
        turn = 0


def read_shard(source: Source, shard: str, cursor: Cursor, findings: Findings) -> Iterator[Any]:
    """Yield the texts of a shard from a cursor on, or its tokens in blocks; move the cursor."""
    place = as_place(shard)
    if not source.has_tokens:
        config = source.config
        yield from read_texts(place, config.text_field, config.encoding, findings, cursor)
        return
    size = np.dtype(source.dtype).itemsize
    with errors_as(f"{place} cannot be read", OSError, ValueError), open_place(place) as file:
        file.seek(cursor.skip * size)
        for data in iter(lambda: file.read(_BLOCK_TOKENS * size), b""):
            cursor.skip += len(data) // size
            yield np.frombuffer(data, source.dtype)


def main() -> None:
    """Answer requests until the input ends, by a stretch or why there is none.

    The input has the sources, and then requests: the numbers of a source and a lane, and a
    position, or None for the next stretch of the lane.
    """
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    answer(os.fdopen(0, "rb"), replies)


def answer(requests: Any, replies: Any) -> None:
    """Do as ``main`` with files."""
    sources = pickle.load(requests)
    lanes = {}
    while requests.peek(1):
        source, lane, position = pickle.load(requests)
        try:
            if position:
                lanes[source, lane] = read_stretches(sources[source], lane, position)
            reply: Any = next(lanes[source, lane])
        except Exception as error:
            reply = error
            if not isinstance(error, JllamaError):
                reply = JllamaError(f"{type(error).__name__}: {error}")
        pickle.dump(reply, replies)
        replies.flush()
