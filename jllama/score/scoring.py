"""Log-probabilities of given tokens, and how well a model predicts a text."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.core.model import as_token_ids
from jllama.core.parameters import Params
from jllama.kernels.shapes import power_of_two_at_least
from jllama.models.build import build_model
from jllama.models.decode_params import DecodeParams
from jllama.models.language_model import LanguageModel


class TokenScores(NamedTuple):
    """Scores of some tokens of one row."""

    log_probs: Float[np.ndarray, "scored"]  # log p(token | tokens before it), in nats
    is_likeliest: Bool[np.ndarray, "scored"]


class TextScore(NamedTuple):
    """How well a model predicts a text, as sums that add up over texts."""

    nats: float  # the negative log-likelihood
    tokens: int
    text_bytes: int  # UTF-8 bytes that the tokens stand for

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss, which depends on the tokenizer.

        Examples:
            >>> model = jllama.load("smollm2/")
            >>> jllama.perplexity(model, "The quick brown fox") > 1
            True
        """
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, which do not depend on the tokenizer."""
        return self.nats / math.log(2) / self.text_bytes


def token_log_probs(
    model: LanguageModel,
    rows: Sequence[Sequence[int] | Int[np.ndarray, "_"]],
    counts: Sequence[int] | None = None,
    *,
    batch_size: int = 8,
    on_progress: Callable[..., object] = lambda **state: None,
) -> list[TokenScores]:
    """Score the last tokens of each row of ids, given all tokens before them.

    The first token of a row has nothing before it and cannot be scored, so a text begins with BOS.
    Probabilities are over all rows of the embedding, also where the tokenizer has fewer tokens.

    Batches have similar lengths, the longest first, and are padded on the right to a power of two.
    Rows of any lengths thus take few compilations, and padding does not change the scores.

    Args:
        model: the model, in either layout.
        rows: token ids; only the last may be beyond the context.
        counts: how many tokens to score of each row; None scores all but the first.
        batch_size: how many rows go through the model at once.
        on_progress: called after each batch with the number of tokens scored so far, ``completed``,
            and of all, ``total``.

    Raises:
        UsageError: a row exceeds the context, a count exceeds its row, or an id is outside the
            vocabulary.
    """
    # 1) Check that the rows fit the model's context.
    arrays = [np.asarray(row, np.int32) for row in rows]
    if counts is None:
        counts = [max(len(row) - 1, 0) for row in arrays]
    config = model.config
    context = config.max_seq_len
    for row, count in zip(arrays, counts, strict=True):
        num_inputs = max(len(row) - 1, 0)
        if num_inputs > context:
            raise UsageError(
                f"a row has {len(row)} tokens to be predicted from {num_inputs}, "
                f"over the model's context of {context}: cut it into windows"
            )
        if not 0 <= count <= num_inputs:
            raise UsageError(
                f"{count} tokens of a row of {len(row)} are to be scored; there are {num_inputs}"
            )

    # 2) Sort the rows by length, the longest first.
    scores = [TokenScores(np.zeros(0, np.float32), np.zeros(0, bool))] * len(arrays)
    num_done = 0
    widths = [min(power_of_two_at_least(len(row) - 1, 32), context) for row in arrays]
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -len(arrays[i]))
    # Each width is compiled once, for batches of even sizes.
    for width, group in itertools.groupby(order, lambda i: widths[i]):
        indices = list(group)
        num_batches = math.ceil(len(indices) / batch_size)
        size = math.ceil(len(indices) / num_batches)
        for start in range(0, len(indices), size):
            # 3) Score a batch, padded on the right.
            batch = indices[start : start + size]
            tokens = np.zeros((size, width + 1), np.int32)
            for row, index in zip(tokens, batch, strict=False):
                row[: len(arrays[index])] = arrays[index]
            results = _score(model.params, config, as_token_ids(tokens, config))

            # 4) Take the scores of the last tokens of its rows.
            for index, log_probs, is_likeliest in zip(
                batch, *map(np.asarray, results), strict=False
            ):
                end = len(arrays[index]) - 1
                scored = slice(end - counts[index], end)
                scores[index] = TokenScores(log_probs[scored], is_likeliest[scored])
            num_done += sum(counts[index] for index in batch)
            on_progress(completed=num_done, total=sum(counts))
    return scores


@functools.partial(jax.jit, static_argnames="config")
def _score(
    params: Params | DecodeParams, config: LlamaConfig, tokens: Array
) -> tuple[Array, Array]:
    llama = build_model(config, params)
    return llama.token_log_probs(llama.hidden(tokens[:, :-1]), tokens[:, 1:])


def sliding_windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut a sequence, BOS included, into windows that score each token but the first once.

    Yields ``(start, end, count)``: the last ``count`` tokens of ``sequence[start:end]`` are scored.
    In the first window these are all tokens, and in the others the next ``stride`` (1 to
    ``window``), with as many before them as fit. ``sequence[start:end]`` has up to ``window + 1``
    tokens, as its last token is only predicted.

    Examples:
        >>> list(sliding_windows(10, window=4, stride=3))
        [(0, 5, 4), (3, 8, 3), (5, 10, 2)]
    """
    end = 1
    while end < length:
        max_count = window if end == 1 else stride
        count = min(max_count, length - end)
        end += count
        yield max(end - window - 1, 0), end, count


def perplexity(
    model: LanguageModel, text: str, *, window: int = 0, stride: int = 0, batch_size: int = 8
) -> float:
    """Return the perplexity of a text: the exponential of the loss in nats per token.

    Lower is better. It depends on the tokenizer. To compare models with different ones use
    ``TextScore.bits_per_byte`` of ``score_texts``, which has the same arguments and raises the same
    errors. Source: Jelinek et al. 1977.

    Args:
        model: what ``load`` returns, with its tokenizer.
        text: scored from its first token to its last.
        window: how many tokens the model sees at most; 0 is its context, at most 2,048.
        stride: how many new tokens each window scores, the others being context; 0 is half a
            window.
        batch_size: how many windows go through the model at once.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> jllama.perplexity(model, "The quick brown fox") > 1
        True
    """
    sizes = window_sizes(model, window, stride)
    return score_texts(model, [text], batch_size=batch_size, **sizes).perplexity


def window_sizes(model: LanguageModel, window: int, stride: int) -> dict[str, Any]:
    """Return ``window`` and ``stride`` with 0 replaced by the context, at most 2,048, or half a
    window.
    """
    window = window or min(model.config.max_seq_len, 2048)
    return {"window": window, "stride": stride or max(window // 2, 1)}


def score_texts(
    model: LanguageModel,
    texts: Iterable[str | tuple[Sequence[int], Sequence[bool]]],
    *,
    window: int,
    stride: int,
    batch_size: int = 8,
    max_tokens: int | None = None,
    on_progress: Callable[..., object] = lambda **state: None,
) -> TextScore:
    """Score texts, each by itself, in sliding windows of at most ``window`` tokens.

    A text is its tokens after one BOS (``tokenizer.bos_id``), also where the tokenizer adds none to
    a prompt, because the first token needs something before it. EOS is not scored, and empty texts
    count for nothing.

    Args:
        model: the model, with its tokenizer.
        texts: strings, or conversations as ``(ids, which of them are scored)``.
        window: see ``sliding_windows``, as for ``stride``.
        stride: at most ``window``.
        batch_size: how many windows go through the model at once.
        max_tokens: only the first ``max_tokens`` scored tokens of all texts count.
        on_progress: see ``token_log_probs``.

    Raises:
        UsageError: ``window``, ``stride`` or ``batch_size`` is out of range.
        JllamaError: the model has no tokenizer, nothing is to be scored, or a log-probability is
            not finite.
    """
    # Check the options.
    tokenizer = model.text_tokenizer
    context = model.config.max_seq_len
    over_window = f"between 1 and the window of {window}, or tokens would be left out"
    for name, value, maximum, expected in (
        ("window", window, context, f"between 1 and the model's context of {context}"),
        ("stride", stride, window, over_window),
        ("batch_size", batch_size, batch_size, "at least 1"),
    ):
        if not 1 <= value <= maximum:
            raise UsageError(f"{name} is {value}; it must be {expected}")

    # Rows of at most a window, how many tokens each adds, and which of these are scored.
    rows = []
    counts = []
    masks = []
    num_scored = 0
    text_bytes = 0
    token_bytes = tokenizer.token_bytes()
    for text in texts:
        if isinstance(text, str):
            ids = np.array([tokenizer.bos_id, *tokenizer.encode(text)], np.int32)
            is_scored = np.arange(len(ids)) > 0
            text_bytes += len(text.encode())
        else:
            ids, is_scored = map(np.array, text)
            text_bytes += int(token_bytes[ids[is_scored]].sum())
        # Cut off what is over max_tokens.
        num_left = len(ids) if max_tokens is None else max_tokens - num_scored
        length = int(np.searchsorted(np.cumsum(is_scored), num_left, side="right"))
        text_bytes -= int(token_bytes[ids[length:]][is_scored[length:]].sum())
        for start, end, count in sliding_windows(length, window, stride):
            rows.append(ids[start:end])
            counts.append(count)
            masks.append(is_scored[end - count : end])
        num_scored += int(is_scored[:length].sum())
        if num_scored == max_tokens:
            break
    if not num_scored:
        raise JllamaError("the texts have no tokens to score: give some that are not empty")

    # The sum over all scored tokens.
    scores = token_log_probs(model, rows, counts, batch_size=batch_size, on_progress=on_progress)
    nats = -math.fsum(
        row.log_probs[mask].sum(dtype=np.float64) for row, mask in zip(scores, masks, strict=True)
    )
    if not math.isfinite(nats):
        raise JllamaError(
            f"the loss is {nats}: the weights hold damaged numbers (jllama verify finds them), "
            "or overflow their dtype"
        )
    return TextScore(nats, num_scored, text_bytes)
