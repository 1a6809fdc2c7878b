"""Batches of rows of tokens, windows of a text or whole conversations: endless and shuffled for training, exhaustive
for validation.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Bool, Float32, Integer

from jllama.errors import JllamaError

OPEN_ROWS = 256  # that a conversation may still be packed into

_Tokens = Integer[np.ndarray, "tokens"]
_RowsRead = slice | Sequence[int]
_ALL = slice(None)


class Batch(NamedTuple):
    """Rows of tokens to learn from, each token predicting the next: NumPy's or JAX's arrays, of any source.

    Tokens attend within their own segment, a document or a conversation. A token is a target if it counts and the one
    before it is in its segment. With ``reference`` rows are pairs of answers, the preferred one at even indices and the
    rejected one at odd ones, each with the summed log-probability of its targets under the model before training.
    """

    tokens: Any  # Int32[Array, "rows window"]
    segments: Any  # Int32[Array, "rows window"], 0 for padding, then 1, 2, ... in each row
    counted: Any  # Bool[Array, "rows window"]
    reference: Any = None  # Float32[Array, "rows"]


def text_batch(
    windows: Integer[np.ndarray, "rows window"], bos_id: int, counted: Any = None
) -> Batch:
    """Windows of a text in which each ``bos_id`` begins a document; all tokens count, or those ``counted``.

    Example::

        windows = np.random.default_rng(0).integers(2, 256, (8, 65))
        state, metrics = training.step(state, jllama.text_batch(windows, bos_id=1))
    """
    windows = windows.astype(np.int32)
    segments = 1 + np.cumsum(windows == bos_id, axis=1, dtype=np.int32)
    return Batch(windows, segments, np.ones(windows.shape, bool) if counted is None else counted)


@dataclasses.dataclass(frozen=True)
class Conversations:
    """Number ``i`` is the ``sizes[i]`` tokens from ``starts[i]`` on, of which those that ``counted`` marks are learned.

    Source ``sources[i]`` has the share ``weights[sources[i]]`` of what is drawn. With ``rows_each`` 2, numbers 2i and
    2i + 1 are a preferred answer and a rejected one, each with its ``reference``, see ``Batch``.
    """

    tokens: _Tokens
    counted: Bool[np.ndarray, "tokens"]
    starts: Integer[np.ndarray, "conversations"]
    sizes: Integer[np.ndarray, "conversations"]
    sources: Integer[np.ndarray, "conversations"]
    weights: Sequence[float] = (1.0,)
    rows_each: int = 1
    reference: Float32[np.ndarray, "conversations"] | None = None


def training_batches(
    tokens: _Tokens,
    *,
    bos_id: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    rows: _RowsRead = _ALL,
) -> grain.DatasetIterator[Batch]:
    """Windows of ``seq_len + 1`` tokens of a text forever; ``bos_id`` begins its documents.

    Every epoch shuffles strides of ``seq_len`` anew, from another random offset: no token is a target twice in one, but
    for a few at the very end. Of each batch only ``rows`` are read, the others are zeros; the state (``get_state``,
    ``set_state``) does not depend on them. Too few tokens raise JllamaError.
    """
    needed = batch_size * seq_len + 1
    if len(tokens) < needed:
        said = f"the training split has {len(tokens)} tokens, and one batch of {batch_size} x {seq_len} needs {needed}"
        raise JllamaError(f"{said}: give more text, or lower batch_size or seq_len")
    windows, last = (len(tokens) - 1) // seq_len, len(tokens) - seq_len - 1
    offset = functools.lru_cache(
        lambda epoch: int(np.random.default_rng((seed, epoch)).integers(seq_len))
    )

    def gather(index: int, chosen: np.ndarray) -> Batch:
        epochs = (index * batch_size + np.arange(batch_size)) // windows
        starts = np.minimum(chosen * seq_len + [offset(epoch) for epoch in epochs.tolist()], last)
        found = np.zeros((batch_size, seq_len + 1), np.int32)
        found[rows] = tokens[starts[rows, None] + np.arange(seq_len + 1)]
        return text_batch(found, bos_id)

    # Without drop_remainder, the length of the endless dataset overflows at batch size 1 (grain 0.2.18).
    shuffled = (
        grain.MapDataset.range(windows)
        .seed(seed)
        .shuffle()
        .repeat(None)
        .batch(batch_size, drop_remainder=True)
    )
    return iter(shuffled.map_with_index(gather).to_iter_dataset(grain.ReadOptions(num_threads=0)))


def validation_batches(
    tokens: _Tokens, *, bos_id: int, batch_size: int, seq_len: int, max_tokens: int = 0
) -> Iterator[Batch]:
    """Windows that predict every token but the first exactly once.

    Window ``w`` predicts tokens ``w * seq_len + 1`` to ``(w + 1) * seq_len``; what is beyond the last token or window
    is zeros, which do not count. With ``max_tokens`` over 0, an evenly spaced subset of about that many targets,
    at least one window. Fewer than two tokens raise JllamaError.
    """
    if len(tokens) < 2:
        advice = "at least 2 are needed: give more text or raise data.validation_fraction"
        raise JllamaError(f"the validation split has {len(tokens)} tokens, and {advice}")
    windows = -(-(len(tokens) - 1) // seq_len)
    count = min(windows, max(1, max_tokens // seq_len)) if max_tokens else windows
    starts = np.full((-(-count // batch_size), batch_size), len(tokens))
    starts.flat[:count] = np.arange(count) * windows // count * seq_len

    def batch(starts: np.ndarray) -> Batch:
        positions = starts[:, None] + np.arange(seq_len + 1)
        inside = positions < len(tokens)
        return text_batch(
            np.where(inside, tokens[np.minimum(positions, len(tokens) - 1)], 0), bos_id, inside
        )

    return map(batch, starts)


def chat_batches(
    data: Conversations,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    rows: _RowsRead = _ALL,
    packing: bool = True,
) -> grain.DatasetIterator[Batch]:
    """Batches of ``batch_size`` rows, or pairs of rows, forever; ``rows`` and the state are as in ``training_batches``.

    With ``packing`` a source's conversations share rows of ``seq_len + 1`` tokens; without, and in pairs, each has its
    own, as long as that or, where the batch's longest fits, about a quarter of it. Every epoch shuffles a source's rows
    anew, and they are drawn by its weight.
    """
    is_alone, short = data.rows_each > 1 or not packing, min(-(-seq_len // 32) * 8, seq_len) + 1

    def gather(chosen: Sequence[np.ndarray]) -> Batch:
        fits = is_alone and data.sizes[np.concatenate(chosen)].max() <= short
        return _rows(data, chosen, short if fits else seq_len + 1, rows)

    plans = _plans(data, seq_len, seed, packing)
    streams = [grain.MapDataset.source(plan).seed(seed).shuffle().repeat(None) for plan in plans]
    batches = grain.MapDataset.mix(streams, data.weights).batch(
        batch_size, drop_remainder=True, batch_fn=gather
    )
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def chat_validation_batches(
    data: Conversations, *, batch_size: int, seq_len: int, max_tokens: int = 0
) -> Iterator[Batch]:
    """Each conversation once, in order, in rows of ``seq_len + 1`` tokens; those that the last batch lacks are padding.

    With ``max_tokens`` over 0, evenly spaced rows, or pairs of them, with about that many tokens, at least one.
    """
    plan = _plan(data, np.arange(len(data.sizes)), seq_len, packing=True)
    share = max_tokens / data.sizes.sum() if max_tokens else 1
    count = min(len(plan), max(1, int(len(plan) * share)))
    chosen = [plan[index] for index in np.arange(count) * len(plan) // count]
    chosen += [np.zeros(0, int)] * (-count % batch_size)
    batches = (chosen[start : start + batch_size] for start in range(0, count, batch_size))
    return (_rows(data, batch, seq_len + 1) for batch in batches)


def rows_an_epoch(data: Conversations, *, seq_len: int, seed: int, packing: bool = True) -> int:
    """How many rows, or pairs of them, ``chat_batches`` has of all conversations together."""
    return sum(map(len, _plans(data, seq_len, seed, packing)))


def _plans(data: Conversations, seq_len: int, seed: int, packing: bool) -> list[list[np.ndarray]]:
    owns = (np.flatnonzero(data.sources == source) for source in range(len(data.weights)))
    return [
        _plan(data, np.random.default_rng(seed).permutation(own), seq_len, packing) for own in owns
    ]


def _plan(data: Conversations, order: np.ndarray, seq_len: int, packing: bool) -> list[np.ndarray]:
    """The conversations in each row, first fit in one of the last ``OPEN_ROWS``; or those of each pair."""
    if data.rows_each > 1 or not packing:
        return list(order[order % data.rows_each == 0, None] + np.arange(data.rows_each))
    room, row_of, used = np.full(len(order), seq_len + 1), np.zeros(len(order), int), 0
    for place, size in enumerate(data.sizes[order].tolist()):
        first = max(used - OPEN_ROWS, 0)
        row_of[place] = row = first + int(np.argmax(room[first : used + 1] >= size))
        room[row] -= size
        used = max(used, row + 1)
    return np.split(order[np.argsort(row_of, kind="stable")], np.cumsum(np.bincount(row_of))[:-1])


def _rows(
    data: Conversations, plan: Sequence[np.ndarray], window: int, read: _RowsRead = _ALL
) -> Batch:
    """The rows as planned, a pair's one after the other; those not in ``read`` are zeros."""
    each_row = [unit[side :: data.rows_each] for unit in plan for side in range(data.rows_each)]
    tokens, segments, counted = (
        np.zeros((len(each_row), window), dtype) for dtype in (np.int32, np.int32, bool)
    )
    for row in np.arange(len(each_row))[read]:
        end = 0
        for segment, index in enumerate(each_row[row], 1):
            source = slice(data.starts[index], data.starts[index] + data.sizes[index])
            place, end = np.s_[row, end : end + data.sizes[index]], end + data.sizes[index]
            tokens[place], segments[place], counted[place] = (
                data.tokens[source],
                segment,
                data.counted[source],
            )
    if data.reference is None:
        return Batch(tokens, segments, counted)
    return Batch(
        tokens,
        segments,
        counted,
        np.array([data.reference[own].sum() for own in each_row], np.float32),
    )
