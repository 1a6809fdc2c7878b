"""Log-probabilities of given tokens, and from them how well a model predicts a text."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.errors import JllamaError, UsageError
from jllama.language_model import LanguageModel
from jllama.model import as_token_ids, build_model, power_of_two_at_least
from jllama.parameters import Params


class TokenScores(NamedTuple):
    """Some tokens of one row: ``log p(token | those before it)`` in nats, and whether it was the likeliest one."""

    log_probs: Float[np.ndarray, "scored"]
    is_likeliest: Bool[np.ndarray, "scored"]


class TextScore(NamedTuple):
    """How well a model predicts a text, as sums that add up over texts."""

    nats: float  # the negative log-likelihood
    tokens: int
    text_bytes: int  # of UTF-8, which the tokens stand for

    loss = property(lambda self: self.nats / self.tokens, doc="In nats a token.")
    perplexity = property(
        lambda self: math.exp(min(self.loss, 700.0)), doc="It depends on the tokenizer."
    )
    bits_per_byte = property(
        lambda self: self.nats / math.log(2) / self.text_bytes, doc="It does not depend on it."
    )


def token_log_probs(
    model: LanguageModel,
    rows: Sequence[Sequence[int] | Int[np.ndarray, "_"]],
    counts: Sequence[int] | None = None,
    *,
    batch_size: int = 8,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[TokenScores]:
    """Score the last ``counts`` tokens of each row of ids (None: all but the first), given those before them.

    A row's first token has nothing before it and cannot be scored: a text begins with BOS. Probabilities are over all
    rows of the embedding, also where the tokenizer has fewer. ``batch_size`` rows, the longest first, go through the
    model at once, padded on the right up to a power of two: rows of any lengths take few compilations, and come out
    the same. After each batch ``on_progress`` gets the number of tokens scored so far and in all.

    Raises ``UsageError``: a row but for its last token exceeds the context, or its count; an id is no token's.
    """
    arrays = [np.asarray(row, np.int32) for row in rows]
    counts = [max(len(row) - 1, 0) for row in arrays] if counts is None else counts
    config, context = model.config, model.config.max_seq_len
    for row, count in zip(arrays, counts, strict=True):
        if (inputs := max(len(row) - 1, 0)) > context:
            said = f"a row has {len(row)} tokens to be predicted from {inputs}"
            raise UsageError(f"{said}, over the model's context of {context}: cut it into windows")
        if not 0 <= count <= inputs:
            raise UsageError(
                f"{count} tokens of a row of {len(row)} are to be scored; there are {inputs}"
            )

    scores, done = [TokenScores(np.zeros(0, np.float32), np.zeros(0, bool))] * len(arrays), 0
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -len(arrays[i]))
    widths = [
        min(power_of_two_at_least(len(row) - 1, 32), context) for row in arrays
    ]  # one compilation each
    for width, group in itertools.groupby(order, widths.__getitem__):
        indices = list(group)
        size = math.ceil(
            len(indices) / math.ceil(len(indices) / batch_size)
        )  # even batches: one shape, little padding
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            tokens = np.zeros((size, width + 1), np.int32)
            for row, index in zip(tokens, batch, strict=False):
                row[: len(arrays[index])] = arrays[index]
            results = map(np.asarray, _score(model.params, config, as_token_ids(tokens, config)))
            for index, log_probs, is_likeliest in zip(batch, *results, strict=False):
                scored = slice(len(arrays[index]) - 1 - counts[index], len(arrays[index]) - 1)
                scores[index] = TokenScores(log_probs[scored], is_likeliest[scored])
            done += sum(counts[index] for index in batch)
            on_progress(done, sum(counts))
    return scores


def sliding_windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut a sequence, BOS included, into windows that score each token but the first once: ``(start, end, count)``.

    Of ``sequence[start:end]``, one longer than ``window`` as its last token is only predicted, the last ``count``
    tokens are scored: all of the first, then the next ``stride`` (1 to ``window``) with as much before them as fits.
    """
    end = 1
    while end < length:
        count = min(window if end == 1 else stride, length - end)
        end += count
        yield max(end - window - 1, 0), end, count


def perplexity(
    model: LanguageModel, text: str, *, window: int = 0, stride: int = 0, batch_size: int = 8
) -> float:
    """Measure how well a model predicts a text: the exponential of its loss in nats a token, lower is better.

    It depends on the tokenizer: models with different ones are compared by ``TextScore.bits_per_byte`` of
    ``score_texts``, which has the same arguments and raises the same errors. Source: Jelinek et al. 1977.

    Args:
        model: what ``load`` gives, with its tokenizer.
        text: scored from its first token to its last.
        window: the most tokens that the model sees at once; 0 is its context, at most 2,048.
        stride: new tokens that each window scores, the others being context; 0 is half a window.
        batch_size: how many windows go through the model at once.

    Example::

        print(jllama.perplexity(jllama.load("runs/quickstart"), "To be, or not to be"))
    """
    return score_texts(
        model, [text], batch_size=batch_size, **window_sizes(model, window, stride)
    ).perplexity


def window_sizes(model: LanguageModel, window: int, stride: int) -> dict[str, Any]:
    """Fill in the ``window`` and ``stride`` of ``score_texts``: 0 is the context, at most 2,048, or half a window."""
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
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> TextScore:
    """Measure how well a model predicts texts, each by itself, in sliding windows of at most ``window`` tokens.

    A text is its tokens behind one BOS (``tokenizer.bos_id``), also where the tokenizer adds none to a prompt: the
    first token needs something before it. EOS is not scored, and empty texts count for nothing. A conversation is its
    ids, and which of them are scored. Only the first ``max_tokens`` of all that is scored are. The rest is as in
    ``sliding_windows`` and ``token_log_probs``. ``UsageError`` if ``window``, ``stride`` or ``batch_size`` is out of
    range; ``JllamaError``: the model has no tokenizer, nothing is to be scored, or a log-probability is not finite.
    """
    tokenizer, context = model.text_tokenizer, model.config.max_seq_len
    for name, value, most, right in (
        ("window", window, context, f"between 1 and the model's context of {context}"),
        (
            "stride",
            stride,
            window,
            f"between 1 and the window of {window}, or tokens would be left out",
        ),
        ("batch_size", batch_size, batch_size, "at least 1"),
    ):
        if not 1 <= value <= most:
            raise UsageError(f"{name} is {value}; it must be {right}")
    rows, counts, masks = [], [], []
    total, text_bytes, token_bytes = 0, 0, tokenizer.token_bytes()
    for text in texts:
        if isinstance(text, str):
            ids = np.array([tokenizer.bos_id, *tokenizer.encode(text)], np.int32)
            scored = np.arange(len(ids)) > 0
            text_bytes += len(text.encode())
        else:
            ids, scored = map(np.array, text)
            text_bytes += int(token_bytes[ids[scored]].sum())
        # What is over max_tokens is cut off.
        left = len(ids) if max_tokens is None else max_tokens - total
        kept = int(np.searchsorted(np.cumsum(scored), left, side="right"))
        text_bytes -= int(token_bytes[ids[kept:]][scored[kept:]].sum())
        for start, end, count in sliding_windows(kept, window, stride):
            rows.append(ids[start:end])
            counts.append(count)
            masks.append(scored[end - count : end])
        total += int(scored[:kept].sum())
        if total == max_tokens:
            break
    if not total:
        raise JllamaError("the texts have no tokens to score: give some that are not empty")
    scores = token_log_probs(model, rows, counts, batch_size=batch_size, on_progress=on_progress)
    nats = -math.fsum(
        row.log_probs[mask].sum(dtype=np.float64) for row, mask in zip(scores, masks, strict=True)
    )
    if not math.isfinite(nats):
        advice = (
            "the weights hold damaged numbers (jllama verify finds them), or overflow their dtype"
        )
        raise JllamaError(f"the loss is {nats}: {advice}")
    return TextScore(nats, total, text_bytes)


@functools.partial(jax.jit, static_argnames="config")
def _score(
    params: Params | DecodeParams, config: LlamaConfig, tokens: Array
) -> tuple[Array, Array]:
    llama = build_model(config, params)
    return llama.token_log_probs(llama.hidden(tokens[:, :-1]), tokens[:, 1:])
