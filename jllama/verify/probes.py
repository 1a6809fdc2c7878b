"""Prompts that reach where mistakes hide, and whether a server's answers depend on its state."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jllama.errors import JllamaError
from jllama.generation.text import prompt_ids
from jllama.language_model import LanguageModel
from jllama.templates.messages import message_ids
from jllama.verify.checkpoint import PROSE
from jllama.verify.rows import Observed, Row
from jllama.verify.server import Asking, RefusalError, Server, generate, observe, stream

FAR = (2048, 8192, 32_768, 100_000)
"""Lengths of long prompts; they begin and end with the same text, so that attention reaches far."""
_TEXT_TOKENS = 200
_REPEATED_WORDS = 30
_SHORT = (1, 2, 3, 5, 8)
_NEW_TOKENS = 24
_CONVERSATIONS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Count to five."}],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello. How can I help?"},
        {"role": "user", "content": "Write a line about rain."},
    ],
)


class Behavior(NamedTuple):
    """How the answers of a server change with what should make no difference.

    Attributes:
        about: what was done.
        share: of the log-probabilities that changed at all.
        largest: the largest change, in nats.
    """

    about: str
    share: float
    largest: float


def make_rows(model: LanguageModel, max_tokens: int) -> list[Row]:
    """Return the prompts; none has more than ``max_tokens`` or the model's context.

    Without a tokenizer they are random tokens.
    """
    limit = min(max_tokens, model.config.max_seq_len) - 1  # one more token is generated
    rng = np.random.default_rng(0)
    tokenizer = model.tokenizer
    words = PROSE.split()

    def encode(words: Sequence[str]) -> list[int]:
        if tokenizer is None:
            return rng.integers(0, model.config.vocab_size, len(words)).tolist()
        return prompt_ids(tokenizer, " ".join(words))

    # 1) A text, its beginnings, and long texts in which words come in any order.
    ids = encode(words)
    rows = [_row("text", ids[: min(_TEXT_TOKENS, limit)], 0)]
    rows += [_row("short", ids[:length], length - 1) for length in _SHORT]
    for length in FAR:
        if length <= limit + 1:
            num_words = max(length * len(words) // len(ids) - 3 * _REPEATED_WORDS, 0)
            middle = rng.choice(words, num_words).tolist()
            repeated = words[:_REPEATED_WORDS]
            far = encode([*repeated, *middle, *repeated])[:limit]
            rows.append(_row("far", far, len(far) - 64))
    if tokenizer is None:
        return rows

    # 2) What a server makes of text, special tokens and conversations.
    plain = _row("plain text", encode(words[len(words) // 2 :])[: min(64, limit)], 1)
    rows.append(plain._replace(is_text=True))
    special = sorted(tokenizer.special_tokens.values())[:8]
    mixed = [int(id) for pair in zip(ids[1:], special, strict=False) for id in pair]
    rows.append(_row("special tokens", [int(ids[0]), *mixed], 0))
    if model.chat_template:
        for messages in _CONVERSATIONS:
            with_template = message_ids(tokenizer, model.chat_template, messages, True)
            if len(with_template) <= limit:
                row = _row("chat", with_template, len(with_template) - 1)
                rows.append(row._replace(messages=tuple(messages)))
    return rows


def _row(kind: str, ids: Sequence[int] | np.ndarray, first_place: int) -> Row:
    tokens = tuple(int(id) for id in ids)
    return Row(kind, tokens, tuple(range(first_place, len(tokens))), len(tokens))


def observe_function(
    function: Callable[[np.ndarray], object], rows: Sequence[Row], top: int
) -> Iterator[Observed]:
    """Yield the ``top`` log-probabilities in each place, from a function of tokens to logits."""
    for row in rows:
        logits = function(np.asarray(row.ids, np.int32))
        if hasattr(logits, "detach"):
            # NumPy takes no PyTorch tensor that has gradients, is on a GPU or in bfloat16.
            logits = logits.detach().cpu().double()
        logits = np.asarray(logits, np.float64)
        if logits.ndim == 3 and len(logits) == 1:
            logits = logits[0]
        if logits.ndim != 2 or len(logits) != len(row.ids):
            raise JllamaError(
                f"the function returns {list(logits.shape)} for {len(row.ids)} tokens; "
                "expected logits [tokens, vocab]"
            )
        logits = logits[list(row.places)]
        largest = logits.max(axis=1, keepdims=True)
        log_probs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        ids = np.argsort(-log_probs, axis=1)[:, :top]
        yield Observed(row, ids, np.take_along_axis(log_probs, ids, axis=1))


def decoded(server: Server, asking: Asking, rows: Sequence[Row]) -> list[Observed]:
    """Let the server generate after the beginning of the text, one token at a time."""
    text = rows[0].ids[: _NEW_TOKENS + 1]
    row = Row("decode", text, (), len(text))
    try:
        _, observed = generate(server, asking, row, _NEW_TOKENS)
    except RefusalError:
        return []
    return [observed] if observed else []


def behaviors(
    server: Server, asking: Asking, rows: Sequence[Row], before: Sequence[Observed]
) -> Iterator[Behavior]:
    """Yield what changes when a request is repeated, shares a prefix, has company, or streams."""
    text = rows[0]
    first = next(one for one in before if one.row.ids == text.ids)
    ask = functools.partial(observe, on_done=lambda _: None)
    again = ask(server, asking, [text])
    yield _changes("the same request again", first, again)
    half = len(text.ids) // 2
    places = tuple(place for place in first.row.places if place < half)
    prefix = text._replace(ids=text.ids[:half], places=places, num_prompt=half)
    yield _changes("a prefix of an earlier prompt", first, ask(server, asking, [prefix]))
    busy = dataclasses.replace(server, parallel=max(server.parallel, 4))
    others = [row for row in rows if row.kind in ("short", "plain text")]
    together = ask(busy, asking, [text, *others])
    company = [one for one in together if one.row.ids == text.ids]
    yield _changes(f"beside {len(others)} other prompts", first, company)
    try:
        prompt = server.tokenizer.decode(text.ids[:half])
        texts = [stream(server, prompt, _NEW_TOKENS, is_stream) for is_stream in (False, True)]
    except RefusalError:
        return
    yield Behavior("streamed, or in one piece (whole answers)", float(texts[0] != texts[1]), 0.0)


def _changes(about: str, before: Observed, after: Sequence[Observed]) -> Behavior:
    """Compare log-probabilities of the same tokens in the same places."""
    known = {
        (place, id): log_prob
        for place, *columns in zip(before.row.places, before.ids, before.log_probs, strict=True)
        for id, log_prob in zip(*columns, strict=True)
    }
    gaps = []
    for one in after:
        for place, *columns in zip(one.row.places, one.ids, one.log_probs, strict=True):
            for id, log_prob in zip(*columns, strict=True):
                is_preference = np.isnan(log_prob)
                if id >= 0 and is_preference:
                    gaps.append(0.0 if (place, id) in known else 1.0)
                elif id >= 0 and (place, id) in known:
                    gaps.append(abs(log_prob - known[place, id]))
    if not gaps:
        return Behavior(about, 0.0, 0.0)
    return Behavior(about, float(np.mean(np.array(gaps) != 0)), float(max(gaps)))
