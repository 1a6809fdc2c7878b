"""What a peer is asked and what it answers, and what models predict in the same places."""

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jllama.models.build
from jllama.core.config import LlamaConfig
from jllama.core.parameters import Params
from jllama.data.batches import pack_first_fit
from jllama.models import oracle

MAX_ORACLE_TOKENS = 1024
"""A batch of more is computed in float32, by the model that ``jllama verify`` compares with the
oracle: in float64 it would take minutes."""
TINY = np.finfo(np.float64).tiny
"""A probability that has a logarithm, for those that are too small to be a float64."""
_MIN_PACKED = 256  # tokens of a row that shorter ones are packed into


class Row(NamedTuple):
    """A prompt, and the places of interest in it.

    Attributes:
        kind: what it is for.
        ids: its tokens, with those that were generated.
        places: indices of tokens whose next token's probabilities are of interest.
        num_prompt: how many of the tokens are the prompt; the others were generated.
        positions: those that queries and keys are turned by; None for 0, 1, 2, ...
        messages: what a chat template makes the prompt of, if it is a conversation.
        is_text: whether it is sent as text, so that the server decides whether it begins with BOS.
    """

    kind: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    num_prompt: int
    positions: tuple[int, ...] | None = None
    messages: tuple[Any, ...] = ()
    is_text: bool = False


class Observed(NamedTuple):
    """A peer's log-probabilities of the next token, in some places of a row.

    Attributes:
        row: the row; its ``places`` are those that were observed.
        ids: tokens in each place, the likeliest and perhaps the actual one; -1 pads.
        log_probs: their log-probabilities. NaN if the peer says only that it prefers this token.
        dtype: of the logits that they are from, if it is known.
    """

    row: Row
    ids: Int[np.ndarray, "places tokens"]
    log_probs: Float[np.ndarray, "places tokens"]
    dtype: str = ""


Inputs = tuple[
    Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch seq"], Int[np.ndarray, "batch seq"]
]
"""Tokens, segments and positions: rows that share arrays."""
Where = tuple[Int[np.ndarray, "places"], Int[np.ndarray, "places"]]
"""The places of the rows in ``Inputs``, as indices of both axes."""


def pack(rows: Sequence[Row]) -> Iterator[tuple[list[int], Inputs, Where]]:
    """Yield all rows, by their indices, those of similar length together.

    Lengths are powers of two.
    """
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        length = max(_MIN_PACKED, 1 << (len(row.ids) - 1).bit_length())
        by_length.setdefault(length, []).append(index)
    for length, indices in by_length.items():
        # A row goes behind those before it, or begins a new one.
        sizes = [len(rows[index].ids) for index in indices]
        packed = pack_first_fit(sizes, length, open_rows=1)
        tokens, segments, positions = np.zeros((3, len(packed), length), np.int32)
        places = []
        for batch, members in enumerate(packed):
            end = 0
            for member in members:
                row = rows[indices[member]]
                start = end
                end += sizes[member]
                tokens[batch, start:end] = row.ids
                segments[batch, start:end] = member + 1
                positions[batch, start:end] = row.positions or range(sizes[member])
                places += [(batch, start + place) for place in row.places]
        batch_index, seq_index = np.array(places, np.int32).T
        yield indices, (tokens, segments, positions), (batch_index, seq_index)


def predict(
    config: LlamaConfig,
    params: Params,
    rows: Sequence[Row],
    observed: Sequence[Observed],
    model: types.ModuleType = jllama.models.build,
    *,
    with_oracle: bool = False,
) -> list[Float[np.ndarray, "..."]]:
    """Compute what a model gives where a peer was observed, for each row.

    That is the log-probability of each token; where the peer only prefers a token, it is how much
    less likely it is than the likeliest.

    Args:
        config: the architecture.
        params: in the training layout.
        rows: those of ``observed``, or what a mistake makes of them, with as many places.
        observed: what the peer answered.
        model: ``jllama.models.build``, or a copy of it with a mistake.
        with_oracle: use the float64 oracle, if there are few tokens.
    """
    if not rows:
        return []
    width = _rounded_up(max(one.ids.shape[1] for one in observed), 8)
    predicted: list[Any] = [None] * len(rows)
    for indices, inputs, places in pack(rows):
        # 1) Collect the tokens to score, padded to one width.
        parts = [observed[index] for index in indices]
        ids = np.concatenate(
            [np.pad(one.ids, ((0, 0), (0, width - one.ids.shape[1]))) for one in parts]
        )
        # Padded, so that other answers to the same prompts need no other program.
        padding = (0, _rounded_up(len(ids), 64) - len(ids))
        ids = np.pad(ids, (padding, (0, 0)))
        where = tuple(np.pad(index, padding) for index in places)

        # 2) Compute their log-probabilities, and that of the likeliest token.
        tokens, segments, positions = inputs
        if with_oracle and tokens.size <= MAX_ORACLE_TOKENS:
            logits = oracle.forward(params, tokens, config, positions, segments)[where]
            log_probs = np.log(oracle.softmax(logits) + TINY)
            best = log_probs.max(axis=1, keepdims=True)
            log_probs = np.take_along_axis(log_probs, ids, axis=1)
        else:
            with jax.default_matmul_precision("highest"):
                best, log_probs = _log_probs(model, config, params, inputs, where, ids)

        # 3) Split the results by row, without the padding.
        ends = np.cumsum([len(one.ids) for one in parts])
        values = np.split(np.asarray(log_probs, np.float64), ends)[:-1]
        bests = np.split(np.asarray(best, np.float64), ends)[:-1]
        for index, one, value, top in zip(indices, parts, values, bests, strict=True):
            value = value[:, : one.ids.shape[1]]
            predicted[index] = np.where(np.isnan(one.log_probs), value - top, value)
    return predicted


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.partial(jax.jit, static_argnames=("model", "config"))
def _log_probs(
    model: types.ModuleType,
    config: LlamaConfig,
    params: Params,
    inputs: tuple[Array, ...],
    where: tuple[Array, ...],
    ids: Array,
) -> tuple[Array, Array]:
    llama = model.build_model(config, params)
    hidden = llama.hidden(*inputs)[where]
    log_probs = jax.nn.log_softmax(llama.logits(hidden).astype(jnp.float32))
    best = log_probs.max(axis=1, keepdims=True)
    return best, jnp.take_along_axis(log_probs, ids, axis=1)


def differences(
    observed: Sequence[Observed], predicted: Sequence[Float[np.ndarray, "..."]]
) -> list[Float[np.ndarray, "..."]]:
    """Subtract predictions from what was observed, in nats; NaN where nothing was."""
    gaps = []
    for one, values in zip(observed, predicted, strict=True):
        actual = np.nan_to_num(one.log_probs, nan=0.0)
        gaps.append(np.where(one.ids < 0, np.nan, actual - values))
    return gaps


def cut_row(row: Row, place: int) -> Row:
    """Return a row that ends with a place of interest."""
    num_prompt = min(row.num_prompt, place + 1)
    return row._replace(ids=row.ids[: place + 1], places=(place,), num_prompt=num_prompt)


def split_places(observed: Sequence[Observed]) -> list[Observed]:
    """Return what was observed of each place by itself, whose row ends there."""
    return [
        Observed(
            cut_row(one.row, place),
            one.ids[index : index + 1],
            one.log_probs[index : index + 1],
        )
        for one in observed
        for index, place in enumerate(one.row.places)
    ]
