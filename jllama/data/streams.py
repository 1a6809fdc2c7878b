"""Text that is read as a stream: shards are read and tokenized while the model trains.

The shards of each epoch are shuffled and dealt to lanes, whose number depends on the batch size and
the number of shards alone. A row of a batch belongs to a lane. So the order of the data depends on
the seed and the step, never on the processes that train or read: a process reads the lanes that its
rows need. In a lane the documents follow each other, and each stretch of rows is shuffled.

A position in the stream is that of each lane: where its stretch begins in a shard, and how many of
its rows have been taken. So a run goes on by reading each lane's last stretch again.
"""

import dataclasses
import functools
import json
import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jaxtyping import Integer

from jllama.core import JllamaError, UsageError
from jllama.core.step import Batch
from jllama.data import pieces
from jllama.data.batches import text_batch, validation_batches
from jllama.data.config import DataConfig
from jllama.data.corpus import (
    MAX_NAMED,
    Cursor,
    corpus_files,
    cut_chunks,
    hash_fraction,
    tokenize,
    write_cached,
)
from jllama.data.pieces import Piece, Source
from jllama.data.tokens import (
    TOKENS_JOB,
    cache_dir,
    file_stats,
    held_out_limit,
    sha256,
    token_dtype,
)
from jllama.parallel import distributed
from jllama.system import line_process
from jllama.system.devices import num_cores
from jllama.system.files import Json
from jllama.system.places import Place, as_place
from jllama.system.remote import fetch, patiently
from jllama.tokenizers.base import BytesTokenizer, Tokenizer
from jllama.tokenizers.loading import load_tokenizer

MAX_LANES = 64
STRETCH_ROWS = 64
STRETCH_TOKENS = 1 << 18  # a stretch has fewer rows if they are long
READ_AHEAD = 2  # pieces of each lane
HELD_OUT_TOKENS = 1 << 20  # that validation uses
_HELD_OUT_SHARDS = 16  # at most so many, evenly spaced, are looked at for them
_HELD_OUT_CHARS = 1 << 27  # at most so many characters are
TOKENS = "tokens"
HELD_OUT = "held_out"
TOKENIZER = "tokenizer"
INDEX = "index.json"
"""What ``jllama data tokenize`` writes: two folders of shards, their tokenizer and their index."""
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, and odd


@dataclasses.dataclass(frozen=True)
class StreamDataset:
    """Text that is read as a stream, with the methods of ``Dataset``.

    Attributes:
        tokenizer: that of all sources.
        sources: the shards of each source.
        weights: the share of the rows that are drawn from each source.
        validation: the tokens of held-out documents.
        fingerprint: a hash of the names and sizes of the shards, and of what else decides tokens.
        num_bytes: the size of all shards.
    """

    tokenizer: Tokenizer
    sources: Sequence[Source]
    weights: Sequence[float]
    validation: Integer[np.ndarray, "validation_tokens"]
    fingerprint: str
    num_bytes: int
    notes: tuple[str, ...] = ()
    is_chat = False
    rows_per_example = 1
    is_stream = True

    def training_batches(self, *, packing: bool = True, **sizes: Any) -> "StreamBatches":
        """Return endless batches."""
        return StreamBatches(self, **sizes)

    def validation_batches(self, **sizes: Any) -> Iterator[Batch]:
        """Return batches of the held-out text, see ``batches.validation_batches``."""
        return validation_batches(self.validation, bos_id=self.tokenizer.bos_id, **sizes)

    def size(self) -> str:
        """Describe the amount of training data."""
        num_shards = sum(len(source.shards) for source in self.sources)
        return f"a stream of {num_shards:,} shards of {self.num_bytes:,} bytes"

    def facts(self) -> dict[str, str]:
        """Describe the data for the run's page."""
        validation = f"{len(self.validation):,} tokens, of the first documents of some shards"
        return {"training text": self.size(), "validation text": validation}


class StreamBatches:
    """An endless iterator over batches of a stream.

    Each batch has ``batch_size`` rows of ``seq_len + 1`` tokens. Only ``rows`` are read, the others
    are zeros.

    ``get_state`` returns the position of all lanes, whichever process reads them.
    """

    def __init__(
        self,
        data: StreamDataset,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        rows: slice | Sequence[int] = slice(None),
    ) -> None:
        self.bos_id = data.tokenizer.bos_id
        self.shape = batch_size, seq_len + 1
        self.seed = seed
        self.rows = {*np.arange(batch_size)[rows].tolist()}
        self.bounds = np.cumsum(data.weights) / sum(data.weights)
        self.sources = [
            dataclasses.replace(
                source, num_lanes=_num_lanes(batch_size, len(source.shards)), seed=seed
            )
            for source in data.sources
        ]
        self.sizes = [seq_len, *(source.num_lanes for source in self.sources)]
        self.step = 0
        self.lanes: dict[tuple[int, int], Iterator[Any]] = {}
        self.positions: list[Any] = []
        self.problems: list[str] = []
        self.num_problems = 0
        self.wait_s = 0.0
        self._workers: list[_Worker] = []
        weakref.finalize(self, _close, self._workers)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self.lanes:
            self._start()
        batch_size = self.shape[0]
        windows = np.zeros(self.shape, np.int32)
        positions = {tuple(position[:2]): position for position in self.positions}
        drawn = draw(self.bounds, self.step * batch_size + self.seed + np.arange(batch_size))
        for row, source in enumerate(drawn.tolist()):
            lane = self._lane(source, row)
            if lane in self.lanes:
                tokens, positions[lane] = next(self.lanes[lane])
                if row in self.rows:
                    windows[row] = tokens
        self.step += 1
        self.positions = [*positions.values()]
        return text_batch(windows, self.bos_id)

    def get_state(self) -> dict[str, Any]:
        """Return the position in the stream; all processes call this together."""
        lanes = {
            tuple(position[:2]): position
            for part in distributed.gather(self.positions)
            for position in part
        }
        return {"batches": self.step, "sizes": self.sizes, "lanes": sorted(lanes.values())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            UsageError: it has other lanes.
        """
        if state["sizes"] != self.sizes:
            raise UsageError(
                f"training.seq_len and the lanes of the stream are {self.sizes}, and they were "
                f"{state['sizes']}: keep training.seq_len, and a training.batch_size with as many "
                "lanes, or start a new run"
            )
        self.close()
        self.step = state["batches"]
        self.positions = state["lanes"]

    def figures(self) -> tuple[dict[str, Any], list[str]]:
        """Return what is logged, and lines about rows and files that were left out.

        ``data_wait_s`` and the lines are since the last call, ``bad_rows`` since reading began.
        """
        figures = {"data_wait_s": self.wait_s, "bad_rows": self.num_problems}
        lines = [f"left out: {problem}" for problem in self.problems[:MAX_NAMED]]
        self.wait_s = 0.0
        self.problems = []
        return figures, lines

    def close(self) -> None:
        """End the processes that read."""
        _close(self._workers)
        self.lanes = {}

    def _lane(self, source: int, row: int) -> tuple[int, int]:
        return source, row * self.sources[source].num_lanes // self.shape[0]

    def _start(self) -> None:
        """Begin to read the lanes that this process needs, from their positions on."""
        lanes = sorted(
            {self._lane(source, row) for source in range(len(self.sources)) for row in self.rows}
        )
        in_memory = any(source.shards[0].startswith("memory:") for source in self.sources)
        for _ in lanes[: max(num_cores() - 1, 1)]:
            self._workers.append(_Worker(self.sources, in_memory))
        begun = {tuple(position[:2]): position for position in self.positions}
        self.positions = []
        for index, lane in enumerate(lanes):
            ask = functools.partial(self._workers[index % len(self._workers)].ask, *lane)
            start = begun.get(lane, [*lane, [0] * 5, 0, 0, 0])
            self.positions.append(start)
            waiting = deque([ask(start[2])])
            for _ in range(READ_AHEAD - 1):
                waiting.append(ask(None))
            self.lanes[lane] = self._rows(start, waiting, ask)

    def _rows(
        self, start: Sequence[Any], waiting: deque[Future[Piece]], ask: Callable[..., Any]
    ) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """Yield the rows of a lane, and the position behind each.

        A position is the numbers of the source and the lane, the position of the piece in which a
        stretch begins, the tokens of it that are before that, the number of the stretch, and how
        many of its rows have been taken.
        """
        *lane, _, offset, stretch, taken = start
        seq_len = self.shape[1] - 1
        num_rows = max(min(STRETCH_ROWS, STRETCH_TOKENS // seq_len), 1)
        read: deque[Piece] = deque()
        while True:
            # Wait for the pieces of a stretch.
            end = offset + num_rows * seq_len + 1
            while sum(len(piece.tokens) for piece in read) < end:
                begun_s = time.perf_counter()
                piece = waiting.popleft().result()
                self.wait_s += time.perf_counter() - begun_s
                waiting.append(ask(None))
                read.append(piece)
                self.problems += piece.problems
                self.num_problems += len(piece.problems)

            # Shuffle its rows.
            tokens = np.concatenate([piece.tokens for piece in read])[offset:end]
            order = np.random.default_rng([self.seed, *lane, stretch]).permutation(num_rows)
            rows = tokens[order[:, None] * seq_len + np.arange(seq_len + 1)]
            position = [*lane, [*read[0].position], offset, stretch]
            for index in range(taken, num_rows):
                yield rows[index], [*position, index + 1]

            # Go on behind it.
            taken = 0
            stretch += 1
            offset = end - 1
            while offset >= len(read[0].tokens):
                offset -= len(read.popleft().tokens)


class _Worker:
    """A process that reads pieces ahead, or a thread for files that only this process has."""

    def __init__(self, sources: Sequence[Source], in_memory: bool) -> None:
        self.process: Any = None
        self.reader = pieces.Reader(sources)
        if not in_memory:
            self.process = line_process.start(pieces.__name__)
            pickle.dump(sources, self.process.stdin)
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, *request: Any) -> Future[Piece]:
        """Request a piece, see ``pieces.Reader.answer``."""
        future: Future[Piece] = Future()
        self.requests.put((future, request))
        return future

    def _run(self) -> None:
        for future, request in iter(self.requests.get, None):
            try:
                reply = self._answer(request)
            except (OSError, EOFError, ValueError) as error:
                reply = JllamaError(f"a process that reads the data has ended: {error}")
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _answer(self, request: Any) -> Any:
        if self.process is None:
            return self.reader.answer(*request)
        pickle.dump(request, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.requests.put(None)
        if worker.process:
            line_process.end(worker.process)
    workers.clear()


def _num_lanes(batch_size: int, num_shards: int) -> int:
    """Return the largest divisor of ``batch_size`` that is not over ``num_shards``."""
    limit = min(batch_size, num_shards, MAX_LANES)
    return next(count for count in range(limit, 0, -1) if batch_size % count == 0)


def draw(bounds: np.ndarray, numbers: Integer[np.ndarray, "rows"]) -> Integer[np.ndarray, "rows"]:
    """Return the source of each row by its number; shares follow the weights closely.

    ``bounds`` are the cumulative shares. The fractions of multiples of the golden ratio are spread
    evenly over [0, 1).
    """
    fractions = numbers.astype(np.uint64) * np.uint64(_GOLDEN) / 2.0**64
    return np.minimum(np.searchsorted(bounds, fractions, side="right"), len(bounds) - 1)


def prepare_stream(config: DataConfig, tokenizer: Tokenizer | None = None) -> StreamDataset:
    """List the shards of a stream, and read held-out documents for validation.

    A document is held out if its ``hash_fraction`` is at most ``config.validation_fraction``. Among
    those that are looked at, at least one is held out and one is not.

    Args:
        config: the corpus or mixture, and how it is read.
        tokenizer: replaces ``config.tokenizer``.

    Raises:
        UsageError: the tokenizer is to be learned, or is not the one that wrote shards of tokens.
        JllamaError: a file cannot be read, or there is too little text.
    """
    # 1. List the files.
    cache = cache_dir(config)
    weights = config.mixture or {config.path: 1.0}
    corpora = {path: corpus_files(path, cache, config.follow_links) for path in weights}
    indices = {path: read_index(files) for path, files in corpora.items()}

    # 2. Load the tokenizer, and save it where the processes that read find it.
    place = next((path for path, index in indices.items() if index), "")
    if tokenizer is None and config.tokenizer == "bpe" and place:
        tokenizer = load_tokenizer(fetch(as_place(place) / "tokenizer"))
    elif tokenizer is None:
        tokenizer = _find_tokenizer(config.tokenizer)
    fingerprint = tokenizer.fingerprint()
    folder = cache / f"tokenizer-{fingerprint[:16]}"
    if not folder.exists():
        with write_cached(folder) as partial:
            tokenizer.save(partial)

    # 3. Make a source of each path, with its held-out text.
    sources = []
    held_out = []
    for path, files in corpora.items():
        index = indices[path]
        if index and index["tokenizer"] != fingerprint:
            raise UsageError(
                f"{path} has tokens of another tokenizer than data.tokenizer or init_from; leave "
                "data.tokenizer out, or take the model that it belongs to"
            )
        shards = [
            str(file) for name, file in files.items() if not index or name.startswith(f"{TOKENS}/")
        ]
        source = Source(
            shards,
            str(folder),
            token_dtype(tokenizer).name,
            bool(index),
            config.text_field,
            config.encoding,
            config.bad_rows,
        )
        max_tokens = round(HELD_OUT_TOKENS * weights[path] / sum(weights.values()))
        held_out_in = source
        if index:
            others = [str(file) for name, file in files.items() if name.startswith(f"{HELD_OUT}/")]
            held_out_in = dataclasses.replace(source, shards=others)
        limit, documents = _hold_out(held_out_in, tokenizer, config, max_tokens)
        held_out += documents
        source = dataclasses.replace(source, limit=limit)
        sources.append(source)

    # 4. Say what it is.
    sizes = [[stats[:2] for stats in file_stats(files)] for files in corpora.values()]
    options = [config.text_field, config.encoding, config.bad_rows, config.validation_fraction]
    parts = [
        index.get("fingerprint", size) for index, size in zip(indices.values(), sizes, strict=True)
    ]
    key = sha256(parts, [*weights.values()], options, fingerprint)
    num_bytes = sum(size for listing in sizes for _, size in listing)
    validation = np.concatenate(held_out) if held_out else np.zeros(0, np.uint16)
    return StreamDataset(tokenizer, sources, [*weights.values()], validation, key, num_bytes)


def read_index(files: Mapping[str, Place]) -> Json:
    """Return the index of shards of tokens; empty if the files are something else."""
    if TOKENS_JOB not in files:
        return {}
    place = files.get(INDEX)
    if place is None:
        raise JllamaError(
            f"{files[TOKENS_JOB].parent} has no {INDEX}: its shards of tokens are not complete, so "
            "run jllama data tokenize again"
        )
    return json.loads(patiently(place, place.read_bytes))


def _find_tokenizer(name: str) -> Tokenizer:
    if name == "bpe":
        raise UsageError(
            "data.tokenizer is bpe, which is learned from all of the text; it must be bytes or "
            "the path of a tokenizer for a stream, or init_from brings it"
        )
    return BytesTokenizer() if name == "bytes" else load_tokenizer(fetch(as_place(name)))


def _hold_out(
    source: Source, tokenizer: Tokenizer, config: DataConfig, max_tokens: int
) -> tuple[float, list[np.ndarray]]:
    """Return the highest ``hash_fraction`` that is held out, and the tokens of such documents.

    The first documents of some shards, evenly spaced, are looked at. Shards of tokens are of
    held-out documents alone.
    """
    findings = source.findings()
    fractions = []
    documents = []
    lowest = 1.0
    count = min(len(source.shards), _HELD_OUT_SHARDS)
    for index in range(count):
        shard = source.shards[index * len(source.shards) // count]
        num_chars = 0
        num_tokens = 0
        for document in pieces.read_shard(source, shard, Cursor(), findings):
            fraction = 0.0
            ids = document
            if not source.has_tokens:
                fraction = hash_fraction(cut_chunks([document]))
                fractions.append(fraction)
            if fraction <= max(config.validation_fraction, lowest):
                if not source.has_tokens:
                    ids = np.array(tokenize(tokenizer, document), source.dtype)
                documents.append((fraction, ids))
                num_tokens += len(ids)
            lowest = min(lowest, fraction)
            num_chars += len(document)
            is_enough = num_tokens * count >= max_tokens
            if is_enough or num_chars * count >= _HELD_OUT_CHARS:
                break
    if source.has_tokens:
        return 0.0, [ids for _, ids in documents]
    fractions = sorted({*fractions})
    if len(fractions) < 2:
        raise JllamaError(
            f"{source.shards[0]} and the files beside it have {len(fractions)} different "
            "documents; give at least 2, one of them to hold out"
        )
    limit = float(held_out_limit(config, fractions))
    return limit, [ids for fraction, ids in documents if fraction <= limit]
