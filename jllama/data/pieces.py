"""Pieces of streamed text: a process of its own reads and tokenizes them, without JAX.

A piece is the tokens of some documents that follow each other in a lane (see ``streams``). It is a
function of its source, its lane and the position where it begins, whoever reads it.
"""

import dataclasses
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jllama.core import JllamaError
from jllama.data.corpus import (
    Cursor,
    Findings,
    cut_chunks,
    hash_fraction,
    open_place,
    read_texts,
    tokenize,
)
from jllama.system.files import errors_as
from jllama.system.places import as_place
from jllama.tokenizers.loading import load_tokenizer

PIECE_CHARS = 1 << 18
"""What a piece is made of at least: characters, or tokens of a shard of tokens."""
_BLOCK_TOKENS = 1 << 16

Position = tuple[int, ...]
"""The epoch, the number of shards of the lane that are done in it, and the fields of a cursor."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The shards of a stream, and how their text becomes tokens.

    Attributes:
        shards: the places of files, or of shards of tokens, as texts.
        tokenizer: the folder that holds it.
        dtype: that of the tokens.
        has_tokens: whether the shards hold tokens.
        limit: the highest ``hash_fraction`` that is held out.
        num_lanes: how many lanes the shards of an epoch are dealt to.
        seed: decides the order of the shards in each epoch.
    """

    shards: Sequence[str]
    tokenizer: str
    dtype: str
    has_tokens: bool
    text_field: str
    encoding: str
    bad_rows: Any
    limit: float = 0.0
    num_lanes: int = 1
    seed: int = 0

    def findings(self) -> Findings:
        """Return what collects bad rows, or raises for the first one."""
        return Findings("skip" if self.bad_rows == "skip" else "first")


class Piece(NamedTuple):
    """The tokens from a position on, and the rows or files that were left out there."""

    position: Position
    tokens: np.ndarray
    problems: list[str]


def read_pieces(source: Source, lane: int, position: Position) -> Iterator[Piece]:
    """Yield the pieces of a lane from a position on, without an end.

    Raises:
        JllamaError: a file cannot be read or has no text; or all shards of a lane have none.
    """
    findings = source.findings()
    tokenizer = load_tokenizer(source.tokenizer)
    ids = []
    size = 0
    for document, after in _documents(source, lane, position, findings):
        size += len(document)
        if not len(document):
            pass
        elif source.has_tokens:
            ids.append(document)
        elif hash_fraction(cut_chunks([document])) > source.limit:
            ids.append(np.array(tokenize(tokenizer, document), source.dtype))
        if ids and size >= PIECE_CHARS:
            yield Piece(position, np.concatenate(ids), [*findings.problems])
            findings.problems.clear()
            position = after
            ids = []
            size = 0
        if not ids and after[0] > position[0] + 1:
            raise JllamaError(
                f"{source.shards[0]} and the files beside it have no text to train on: give others "
                "or lower data.validation_fraction"
            )


def _documents(
    source: Source, lane: int, position: Position, findings: Findings
) -> Iterator[tuple[Any, Position]]:
    """Yield the documents of a lane, or its tokens in blocks, and the position behind each."""
    epoch, turn, *begun = position
    while True:
        order = np.random.default_rng((source.seed, epoch)).permutation(len(source.shards))
        for number in order[lane :: source.num_lanes][turn:]:
            cursor = Cursor(*begun)
            for document in read_shard(source, source.shards[int(number)], cursor, findings):
                yield document, (epoch, turn, *dataclasses.astuple(cursor))
            turn += 1
            begun = ()
        epoch += 1
        turn = 0
        yield "", (epoch, turn, 0, 0, 0)


def read_shard(source: Source, shard: str, cursor: Cursor, findings: Findings) -> Iterator[Any]:
    """Yield the texts of a shard from a cursor on, or its tokens in blocks; move the cursor."""
    place = as_place(shard)
    if not source.has_tokens:
        yield from read_texts(place, source.text_field, source.encoding, findings, cursor)
        return
    size = np.dtype(source.dtype).itemsize
    with errors_as(f"{place} cannot be read", OSError, ValueError), open_place(place) as file:
        file.seek(cursor.skip * size)
        for data in iter(lambda: file.read(_BLOCK_TOKENS * size), b""):
            cursor.skip += len(data) // size
            yield np.frombuffer(data, source.dtype)


class Reader:
    """The lanes that are being read."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.pieces: dict[Any, Iterator[Piece]] = {}

    def answer(self, source: int, lane: int, position: Position | None) -> Piece | JllamaError:
        """Return the piece at a position, or the next one of the lane, or why there is none."""
        try:
            if position is not None:
                self.pieces[source, lane] = read_pieces(self.sources[source], lane, position)
            return next(self.pieces[source, lane])
        except JllamaError as error:
            return error
        except Exception as error:
            return JllamaError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until the input ends: the sources, then the arguments of ``answer``."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    requests = os.fdopen(0, "rb")
    reader = Reader(pickle.load(requests))
    while requests.peek(1):
        pickle.dump(reader.answer(*pickle.load(requests)), replies)
        replies.flush()
