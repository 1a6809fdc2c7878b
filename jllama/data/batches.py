"""Batches: rows of tokens, cut from a text or assembled from whole conversations.

A batch is made in three steps:

1. A plan lists the rows of one epoch. A row is one window of a text, or a list of conversations.
2. Grain shuffles the plan, repeats it and takes ``batch_size`` rows at a time. Its state is the
   index of the next batch, so a run continues exactly where it stopped.
3. A function copies the tokens of these rows from the memory-mapped file into a ``Batch``.

Batches for training never end. Batches for validation go through all tokens once, in order.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool, Float32, Integer

from jllama.core import JllamaError
from jllama.core.step import Batch

OPEN_ROWS = 256  # the number of last rows that a conversation may still be packed into

_Tokens = Integer[np.ndarray, "tokens"]
_PerConversation = Integer[np.ndarray, "conversations"]
_RowSelection = slice | Sequence[int]
_ALL_ROWS = slice(None)


def text_batch(
    windows: Integer[np.ndarray, "rows window"], bos_id: int, counted: Any = None
) -> Batch:
    """Make a batch of windows of a text in which each ``bos_id`` begins a document.

    Args:
        windows: the token ids, one window in each row.
        bos_id: the token that begins a document, and so a segment.
        counted: ``Bool[Array, "rows window"]``, which tokens are learned; by default all.

    Examples:
        >>> batch = text_batch(np.array([[7, 8, 1, 9]]), bos_id=1)
        >>> batch.segments.tolist()
        [[1, 1, 2, 2]]
    """
    windows = windows.astype(np.int32)
    segments = 1 + np.cumsum(windows == bos_id, axis=1, dtype=np.int32)
    if counted is None:
        counted = np.ones(windows.shape, bool)
    return Batch(windows, segments, counted)


@dataclasses.dataclass(frozen=True)
class ChatTokens:
    """Tokenized conversations in one flat array.

    Conversation ``i`` is the ``sizes[i]`` tokens from ``starts[i]`` on. The tokens that ``counted``
    marks are learned. It belongs to source ``sources[i]``. Source ``s`` provides the share
    ``weights[s]`` of the rows that are drawn.

    ``rows_per_example`` is 1, or 2 for pairs: then conversations ``2i`` and ``2i + 1`` are a
    preferred and a rejected answer, each with its ``reference`` (see ``Batch``).
    """

    tokens: _Tokens
    counted: Bool[np.ndarray, "tokens"]
    starts: _PerConversation
    sizes: _PerConversation
    sources: _PerConversation
    weights: Sequence[float] = (1.0,)
    rows_per_example: int = 1
    reference: Float32[np.ndarray, "conversations"] | None = None


def training_batches(
    tokens: _Tokens,
    *,
    bos_id: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    rows: _RowSelection = _ALL_ROWS,
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator over batches of windows of a text.

    An epoch cuts the text into strides of ``seq_len`` tokens, from a random offset on, and shuffles
    them. Each epoch has another offset and another order. Within an epoch no token is a target
    twice, except for a few at the end of the text.

    Args:
        tokens: the text, in which ``bos_id`` begins each document.
        bos_id: see ``text_batch``.
        batch_size: the number of windows in a batch.
        seq_len: the number of targets in a window, which has ``seq_len + 1`` tokens.
        seed: decides offsets and orders.
        rows: the rows of each batch to read, for a process that needs only some; the others are
            zeros. The state (``get_state``, ``set_state``) does not depend on it.

    Raises:
        JllamaError: the text is shorter than one batch.

    Examples:
        >>> batches = training_batches(np.arange(9), bos_id=0, batch_size=2, seq_len=3, seed=0)
        >>> next(batches).tokens.shape
        (2, 4)
    """
    num_needed = batch_size * seq_len + 1
    if len(tokens) < num_needed:
        raise JllamaError(
            f"the training split has {len(tokens)} tokens, and one batch of {batch_size} x "
            f"{seq_len} needs {num_needed}: give more text, or lower batch_size or seq_len"
        )
    num_windows = (len(tokens) - 1) // seq_len
    last_start = len(tokens) - seq_len - 1

    @functools.lru_cache
    def offset(epoch: int) -> int:
        return int(np.random.default_rng((seed, epoch)).integers(seq_len))

    def read_windows(batch_index: int, numbers: np.ndarray) -> Batch:
        epochs = (batch_index * batch_size + np.arange(batch_size)) // num_windows
        offsets = [offset(epoch) for epoch in epochs.tolist()]
        starts = np.minimum(numbers * seq_len + offsets, last_start)
        windows = np.zeros((batch_size, seq_len + 1), np.int32)
        windows[rows] = tokens[starts[rows, None] + np.arange(seq_len + 1)]
        return text_batch(windows, bos_id)

    plan = grain.MapDataset.range(num_windows).seed(seed).shuffle().repeat(None)
    # Without drop_remainder, the length of the endless dataset overflows at batch size 1
    # (grain 0.2.18).
    batches = plan.batch(batch_size, drop_remainder=True).map_with_index(read_windows)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def validation_batches(
    tokens: _Tokens, *, bos_id: int, batch_size: int, seq_len: int, max_tokens: int = 0
) -> Iterator[Batch]:
    """Return batches of windows that predict every token except the first exactly once.

    Window ``w`` predicts tokens ``w * seq_len + 1`` to ``(w + 1) * seq_len``. Places beyond the
    last token, and the windows that the last batch lacks, are zeros that do not count.

    If ``max_tokens`` is positive, only evenly spaced windows with about that many targets are used,
    at least one window.

    Raises:
        JllamaError: there are fewer than two tokens.
    """
    if len(tokens) < 2:
        raise JllamaError(
            f"the validation split has {len(tokens)} tokens, and at least 2 are needed: "
            "give more text or raise data.validation_fraction"
        )
    num_windows = -(-(len(tokens) - 1) // seq_len)
    count = num_windows
    if max_tokens:
        count = min(num_windows, max(1, max_tokens // seq_len))
    # A window that is missing in the last batch starts beyond the last token.
    starts = np.full((-(-count // batch_size), batch_size), len(tokens))
    starts.flat[:count] = np.arange(count) * num_windows // count * seq_len

    def read_windows(starts: np.ndarray) -> Batch:
        positions = starts[:, None] + np.arange(seq_len + 1)
        is_inside = positions < len(tokens)
        windows = np.where(is_inside, tokens[np.minimum(positions, len(tokens) - 1)], 0)
        return text_batch(windows, bos_id, is_inside)

    return map(read_windows, starts)


def chat_batches(
    data: ChatTokens,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    rows: _RowSelection = _ALL_ROWS,
    packing: bool = True,
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator over batches of ``batch_size`` rows, or pairs of rows.

    With ``packing``, conversations of one source share rows of ``seq_len + 1`` tokens. Without it,
    and for pairs, each conversation has its own row. These rows have ``seq_len + 1`` tokens, or
    about a quarter of that if the longest conversation of the batch fits; no other widths occur.

    Every epoch shuffles the rows of a source anew. Sources are drawn by their weights. ``rows`` and
    the state are as in ``training_batches``.
    """
    full_width = seq_len + 1
    short_width = min(-(-seq_len // 32) * 8, seq_len) + 1
    is_packed = packing and data.rows_per_example == 1

    def read_rows(plan: Sequence[np.ndarray]) -> Batch:
        width = full_width
        if not is_packed and data.sizes[np.concatenate(plan)].max() <= short_width:
            width = short_width
        return _assemble(data, plan, width, rows)

    plans = _plan_sources(data, seq_len, seed, packing)
    streams = [grain.MapDataset.source(plan).seed(seed).shuffle().repeat(None) for plan in plans]
    mixture = grain.MapDataset.mix(streams, data.weights)
    batches = mixture.batch(batch_size, drop_remainder=True, batch_fn=read_rows)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def chat_validation_batches(
    data: ChatTokens, *, batch_size: int, seq_len: int, max_tokens: int = 0
) -> Iterator[Batch]:
    """Return batches that have each conversation once, in order, in rows of ``seq_len + 1`` tokens.

    Rows that the last batch lacks are padding. If ``max_tokens`` is positive, only evenly spaced
    rows, or pairs of rows, with about that many tokens are used, at least one.
    """
    plan = _plan_rows(data, np.arange(len(data.sizes)), seq_len, packing=True)
    count = len(plan)
    if max_tokens:
        share = max_tokens / data.sizes.sum()
        count = min(len(plan), max(1, int(len(plan) * share)))
    chosen = [plan[index] for index in np.arange(count) * len(plan) // count]
    chosen += [np.zeros(0, int)] * (-count % batch_size)
    batches = (chosen[start : start + batch_size] for start in range(0, count, batch_size))
    return (_assemble(data, batch, seq_len + 1) for batch in batches)


def num_epoch_rows(data: ChatTokens, *, seq_len: int, seed: int, packing: bool = True) -> int:
    """Return the number of rows, or pairs of rows, that hold every conversation once."""
    return sum(map(len, _plan_sources(data, seq_len, seed, packing)))


def _plan_sources(
    data: ChatTokens, seq_len: int, seed: int, packing: bool
) -> list[list[np.ndarray]]:
    """Plan the rows of each source, from its conversations in random order."""
    plans = []
    for source in range(len(data.weights)):
        members = np.flatnonzero(data.sources == source)
        order = np.random.default_rng(seed).permutation(members)
        plans.append(_plan_rows(data, order, seq_len, packing))
    return plans


def _plan_rows(
    data: ChatTokens, order: np.ndarray, seq_len: int, packing: bool
) -> list[np.ndarray]:
    """Return the indices of the conversations in each row, or of the two of each pair."""
    if data.rows_per_example > 1 or not packing:
        is_first = order % data.rows_per_example == 0
        return list(order[is_first, None] + np.arange(data.rows_per_example))
    rows = pack_first_fit(data.sizes[order].tolist(), seq_len + 1, OPEN_ROWS)
    return [order[members] for members in rows]


def pack_first_fit(sizes: Sequence[int], row_size: int, open_rows: int) -> list[list[int]]:
    """Return the members of each row of at most ``row_size`` tokens, as indices of ``sizes``.

    Packing is first fit: a member goes to the first of the last ``open_rows`` rows that has room
    for it, or else begins a new row. There is at least one row.
    """
    members: list[list[int]] = [[]]
    # Free tokens in each row, also in the rows that are not begun yet.
    room = np.full(len(sizes) + 1, row_size)
    for index, size in enumerate(sizes):
        first_open = max(len(members) - open_rows, 0)
        # The first True of the open rows and of a new one, which has room for anything. NumPy's
        # search takes half the time of a loop.
        has_room = room[first_open : len(members) + 1] >= size
        row = first_open + int(np.argmax(has_room))
        if row == len(members):
            members.append([])
        members[row].append(index)
        room[row] -= size
    return members


def _assemble(
    data: ChatTokens,
    plan: Sequence[np.ndarray],
    width: int,
    selection: _RowSelection = _ALL_ROWS,
) -> Batch:
    """Copy the planned conversations into rows of ``width`` tokens.

    The two rows of a pair follow each other. Rows that are not in ``selection`` are zeros.
    """
    members = [
        unit[side :: data.rows_per_example]
        for unit in plan
        for side in range(data.rows_per_example)
    ]
    shape = len(members), width
    tokens = np.zeros(shape, np.int32)
    segments = np.zeros(shape, np.int32)
    counted = np.zeros(shape, bool)
    for row in np.arange(len(members))[selection]:
        end = 0
        for segment, index in enumerate(members[row], 1):
            start = end
            end += data.sizes[index]
            source = slice(data.starts[index], data.starts[index] + data.sizes[index])
            tokens[row, start:end] = data.tokens[source]
            segments[row, start:end] = segment
            counted[row, start:end] = data.counted[source]
    reference = None
    if data.reference is not None:
        sums = [data.reference[indices].sum() for indices in members]
        reference = np.array(sums, np.float32)
    return Batch(tokens, segments, counted, reference)
