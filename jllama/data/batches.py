"""Batches of windows over a flat array of tokens: endless and shuffled for training, exhaustive for validation."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Bool, Int32, Integer

from jllama.errors import JllamaError

_Tokens = Integer[np.ndarray, "tokens"]


class Rows(NamedTuple):
    """Rows of whole conversations to learn from, NumPy's or JAX's arrays.

    Tokens attend within their own segment; a token is a target if it counts, and is never one at index 0 of a row. With
    ``reference`` rows are pairs, the preferred answer at even indices and the rejected one at odd ones, each with the
    summed log-probability of its counted tokens under the model before training.
    """

    tokens: Any  # Int32[Array, "rows window"]
    segments: Any  # Int32[Array, "rows window"], 0 for padding, then 1, 2, ... in each row
    counted: Any  # Bool[Array, "rows window"]
    reference: Any = None  # Float32[Array, "rows"]


def training_batches(
    tokens: _Tokens, *, batch_size: int, seq_len: int, seed: int, rows: slice | Sequence[int] = slice(None)
) -> grain.DatasetIterator[Int32[np.ndarray, "rows window"]]:
    """Windows of ``seq_len + 1`` tokens (inputs, and the same shifted by one) forever, in int32.

    Every epoch shuffles strides of ``seq_len`` anew, from another random offset: no token is a target twice in one, but
    for a few at the very end. Of each batch only ``rows`` are read, the others are zeros; the state (``get_state``,
    ``set_state``) does not depend on them. Too few tokens raise JllamaError.
    """
    needed = batch_size * seq_len + 1
    if len(tokens) < needed:
        said = f"the training split has {len(tokens)} tokens, and one batch of {batch_size} x {seq_len} needs {needed}"
        raise JllamaError(f"{said}: give more text, or lower batch_size or seq_len")
    windows, last = (len(tokens) - 1) // seq_len, len(tokens) - seq_len - 1
    offset = functools.lru_cache(lambda epoch: int(np.random.default_rng((seed, epoch)).integers(seq_len)))

    def gather(index: int, chosen: np.ndarray) -> np.ndarray:
        epochs = (index * batch_size + np.arange(batch_size)) // windows
        starts = np.minimum(chosen * seq_len + [offset(epoch) for epoch in epochs.tolist()], last)
        batch = np.zeros((batch_size, seq_len + 1), np.int32)
        batch[rows] = tokens[starts[rows, None] + np.arange(seq_len + 1)]
        return batch

    # Without drop_remainder, the length of the endless dataset overflows at batch size 1 (grain 0.2.18).
    shuffled = grain.MapDataset.range(windows).seed(seed).shuffle().repeat(None).batch(batch_size, drop_remainder=True)
    return iter(shuffled.map_with_index(gather).to_iter_dataset(grain.ReadOptions(num_threads=0)))


def validation_batches(
    tokens: _Tokens, *, batch_size: int, seq_len: int, max_tokens: int = 0
) -> Iterator[tuple[Int32[np.ndarray, "rows window"], Bool[np.ndarray, "rows seq"]]]:
    """Windows that predict every token but the first exactly once, with a mask over the ``seq_len`` targets.

    Window ``w`` predicts tokens ``w * seq_len + 1`` to ``(w + 1) * seq_len``; what is beyond the last token or window
    is zeros, which the mask leaves out. With ``max_tokens`` over 0, an evenly spaced subset of about that many targets,
    at least one window. Fewer than two tokens raise JllamaError.
    """
    if len(tokens) < 2:
        advice = "at least 2 are needed: give more text or raise data.validation_fraction"
        raise JllamaError(f"the validation split has {len(tokens)} tokens, and {advice}")
    windows = -(-(len(tokens) - 1) // seq_len)
    count = min(windows, max(1, max_tokens // seq_len)) if max_tokens else windows
    starts = np.full((-(-count // batch_size), batch_size), len(tokens))
    starts.flat[:count] = np.arange(count) * windows // count * seq_len

    def batch(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = starts[:, None] + np.arange(seq_len + 1)
        inside = positions < len(tokens)
        rows = np.where(inside, tokens[np.minimum(positions, len(tokens) - 1)], 0)
        return rows.astype(np.int32), inside[:, 1:]

    return map(batch, starts)
