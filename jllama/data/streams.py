"""Text that is read as a stream: shards are read and tokenized while the model trains.

The shards of each epoch are shuffled and dealt to lanes, whose number depends on the batch size and
the number of shards alone. A row of a batch belongs to a lane. So the order of the data depends on
the seed and the step, never on the processes that train or read: a process reads the lanes that its
rows need. In a lane the documents follow each other, and each stretch of rows is shuffled.

A position in the stream is that of each lane: where its stretch begins in a shard, and how many of
its rows have been taken. So a run goes on by reading each lane's last stretch again.
"""

import dataclasses
import itertools
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Integer

from jllama.core import JllamaError, UsageError
from jllama.core.step import Batch
from jllama.data import stretches
from jllama.data.batches import text_batch, validation_batches
from jllama.data.config import DataConfig
from jllama.data.corpus import (
    MAX_NAMED,
    Cursor,
    Files,
    Findings,
    corpus_files,
    hash_fraction,
    read_texts,
    write_cached,
)
from jllama.data.stretches import START, Source, Stretch
from jllama.data.tokens import (
    SPLITS,
    TOKENS_JOB,
    cache_dir,
    file_stats,
    find_tokenizer,
    held_out_limit,
    sha256,
    token_dtype,
)
from jllama.parallel import distributed
from jllama.system import line_process
from jllama.system.devices import num_cores
from jllama.system.places import as_place
from jllama.system.progress import progress
from jllama.system.remote import patiently
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

MAX_LANES = 64
_HELD_OUT_SHARDS = 16  # at most so many, evenly spaced, are looked at for held-out text
_HELD_OUT_TOKENS = 1 << 20  # at most about so many tokens, if the shards are of tokens
_HELD_OUT_CHARS = 1 << 25  # at most about so many characters are
LEARNED_CHARS = 1 << 27
"""About so many characters, at the beginnings of all paths of a stream, are what ``bpe`` learns
from."""
TOKENIZER = "tokenizer"
"""The folder of the tokenizer in what ``jllama data tokenize`` writes."""
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
                source,
                num_lanes=_num_lanes(batch_size, len(source.shards)),
                seed=seed,
                seq_len=seq_len,
            )
            for source in data.sources
        ]
        self.sizes = [seq_len, *(source.num_lanes for source in self.sources)]
        self.step = 0
        self.lanes: dict[tuple[int, int], Iterator[Any]] = {}
        self.positions: dict[tuple[int, int], list[Any]] = {}
        self.problems: list[str] = []
        self.num_problems = 0
        self.wait_s = 0.0
        self._workers: list[_Worker] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self.lanes:
            self._start()
        batch_size = self.shape[0]
        windows = np.zeros(self.shape, np.int32)
        positions = {**self.positions}
        drawn = draw(self.bounds, self.step * batch_size + self.seed + np.arange(batch_size))
        for row, source in enumerate(drawn.tolist()):
            lane = self._lane(source, row)
            if lane in self.lanes:
                tokens, positions[lane] = next(self.lanes[lane])
                if row in self.rows:
                    windows[row] = tokens
        self.step += 1
        self.positions = positions
        return text_batch(windows, self.bos_id)

    def get_state(self) -> dict[str, Any]:
        """Return the position in the stream; all processes call this together."""
        parts = distributed.gather([*self.positions.values()])
        lanes = {tuple(position[:2]): position for part in parts for position in part}
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
        self.positions = {tuple(position[:2]): position for position in state["lanes"]}

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
        for worker in self._workers:
            worker.thread.shutdown(wait=False, cancel_futures=True)
            line_process.end(worker.process)
        self._workers = []
        self.lanes = {}

    def _lane(self, source: int, row: int) -> tuple[int, int]:
        return source, row * self.sources[source].num_lanes // self.shape[0]

    def _start(self) -> None:
        """Begin to read the lanes that this process needs, from their positions on."""
        lanes = sorted(
            {self._lane(source, row) for source in range(len(self.sources)) for row in self.rows}
        )
        for _ in lanes[: max(num_cores() - 1, 1)]:
            self._workers.append(_Worker(self.sources))
        begun = self.positions
        self.positions = {}
        for index, lane in enumerate(lanes):
            worker = self._workers[index % len(self._workers)]
            position = begun.get(lane, [*lane, [*START], 0])
            self.positions[lane] = position
            future = worker.ask(*lane, position[2])
            self.lanes[lane] = self._rows(worker, lane, future, position[3])

    def _rows(
        self, worker: "_Worker", lane: tuple[int, int], future: Future[Stretch], taken: int
    ) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """Yield the rows of a lane, and the position behind each.

        A position is the numbers of the source and the lane, the position where a stretch begins,
        and how many of its rows have been taken.
        """
        seq_len = self.shape[1] - 1
        while True:
            # Wait for a stretch, and have the next one read.
            begun_s = time.perf_counter()
            position, tokens, problems = future.result()
            self.wait_s += time.perf_counter() - begun_s
            future = worker.ask(*lane, None)
            self.problems += problems
            self.num_problems += len(problems)

            # Shuffle its rows.
            seeds = [self.seed, *lane, *position]
            order = np.random.default_rng(seeds).permutation(len(tokens) // seq_len)
            for index in range(taken, len(order)):
                start = order[index] * seq_len
                row = tokens[start : start + seq_len + 1]
                yield row, [*lane, [*position], index + 1]
            taken = 0


class _Worker:
    """A process that reads stretches ahead, and the thread that waits for it."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.process: Any = line_process.start(stretches.__name__)
        self.thread = ThreadPoolExecutor(1)
        pickle.dump(sources, self.process.stdin)

    def ask(self, *request: Any) -> Future[Stretch]:
        """Request a stretch, see ``stretches.main``."""
        return self.thread.submit(self._answer, request)

    def _answer(self, request: Any) -> Any:
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            reply = pickle.load(self.process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise JllamaError(f"a process that reads the data has ended: {error}") from error
        if isinstance(reply, JllamaError):
            raise reply
        return reply


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
        UsageError: the tokenizer is not the one that wrote shards of tokens.
        JllamaError: a file cannot be read, or there is too little text.
    """
    # 1. List the files. Shards of tokens have a job.
    cache = cache_dir(config)
    weights = config.mixture or {config.path: 1.0}
    corpora = {path: corpus_files(path, cache, config.follow_links) for path in weights}
    jobs = {}
    for path, files in corpora.items():
        if TOKENS_JOB in files:
            jobs[path] = json.loads(patiently(files[TOKENS_JOB], files[TOKENS_JOB].read_bytes))

    # 2. Load the tokenizer, and save it where the processes that read find it.
    name = config.tokenizer
    if name == "bpe" and jobs:
        name = str(as_place(next(iter(jobs))) / TOKENIZER)
    if tokenizer is None and name == "bpe":
        tokenizer = train_sentencepiece(_texts_to_learn(config, corpora), config.vocab_size)
    tokenizer = tokenizer or find_tokenizer(name)
    fingerprint = tokenizer.fingerprint()
    folder = cache / f"tokenizer-{fingerprint[:16]}"
    if not folder.exists():
        with write_cached(folder) as partial:
            tokenizer.save(partial)

    # 3. Make a source of each path, with its held-out text.
    shares = [*weights.values()]
    sources = []
    held_out = []
    parts = []
    num_bytes = 0
    for path, files in corpora.items():
        job = jobs.get(path, {})
        stats = file_stats(files)
        parts.append(job or [stat[:2] for stat in stats])
        num_bytes += sum(size for _, size, _ in stats)
        shards, held_out_shards = (
            [str(file) for name, file in files.items() if not job or name.endswith(f"/{split}.bin")]
            for split in SPLITS
        )
        if job and job["shards"] != len(shards):
            raise JllamaError(
                f"{path} has {len(shards)} of {job['shards']} shards of tokens: run jllama data "
                "tokenize again, for those that are missing"
            )
        if job and job["tokenizer"] != fingerprint:
            raise UsageError(
                f"{path} has tokens of another tokenizer than data.tokenizer or init_from; leave "
                "data.tokenizer out, or take the model that it belongs to"
            )
        dtype = token_dtype(tokenizer).name
        source = Source(held_out_shards, str(folder), dtype, bool(job), config)
        limit, documents = _hold_out(source, tokenizer, weights[path] / sum(shares))
        held_out += documents
        sources.append(dataclasses.replace(source, shards=shards, limit=limit))

    # 4. Say what it is.
    options = [config.text_field, config.encoding, config.bad_rows, config.validation_fraction]
    key = sha256(parts, shares, options, fingerprint)
    validation = np.concatenate([np.zeros(0, np.uint16), *held_out])
    return StreamDataset(tokenizer, sources, shares, validation, key, num_bytes)


def _texts_to_learn(config: DataConfig, corpora: Mapping[str, Files]) -> Iterator[str]:
    """Yield the first texts of each corpus, which has an equal share of ``LEARNED_CHARS``.

    Bad rows are skipped here, and reported when they are trained on.
    """
    with progress("learning a vocabulary", LEARNED_CHARS) as advance:
        for files in corpora.values():
            texts = itertools.chain.from_iterable(
                read_texts(file, config.text_field, config.encoding, Findings("skip"), Cursor())
                for file in files.values()
            )
            for text in _beginning(texts, LEARNED_CHARS / len(corpora)):
                advance(len(text))
                yield text


def _beginning(blocks: Iterable[Any], size: float) -> Iterator[Any]:
    """Yield the first texts, or blocks of tokens, that have at least ``size`` together."""
    for block in blocks:
        yield block
        size -= len(block)
        if size <= 0:
            break


def _hold_out(source: Source, tokenizer: Tokenizer, share: float) -> tuple[float, list[np.ndarray]]:
    """Return the highest ``hash_fraction`` that is held out, and the tokens of such documents.

    The first documents of some shards, evenly spaced, are looked at. Of shards of held-out tokens
    the first blocks are taken. ``share`` is the weight of the source.
    """
    findings = source.findings()
    shards = source.shards[:: -(-len(source.shards) // _HELD_OUT_SHARDS)]
    max_size = share * (_HELD_OUT_TOKENS if source.has_tokens else _HELD_OUT_CHARS) / len(shards)
    blocks = []
    for shard in shards:
        blocks += _beginning(stretches.read_shard(source, shard, Cursor(), findings), max_size)
    if source.has_tokens:
        return 0.0, blocks
    documents = {hash_fraction([text]): text for text in blocks}
    if len(documents) < 2:
        raise JllamaError(
            f"{source.shards[0]} and the files beside it have {len(documents)} different "
            "documents; give at least 2, one of them to hold out"
        )
    limit = float(held_out_limit(source.config, sorted(documents)))
    held_out = [text for fraction, text in documents.items() if fraction <= limit]
    return limit, [source.encode(tokenizer, text) for text in held_out]
