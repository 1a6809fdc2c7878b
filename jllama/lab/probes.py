"""Prompts that reach where mistakes hide, and whether a server's answers depend on its state."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jllama.core import JllamaError
from jllama.generation.text import prompt_ids
from jllama.lab.checkpoint import PROSE
from jllama.lab.checks import detached
from jllama.lab.rows import TINY, Observed, Row
from jllama.lab.server import Server, generate, observe
from jllama.models import oracle
from jllama.models.language_model import LanguageModel
from jllama.system.web import RefusalError
from jllama.templates.messages import message_ids

FAR = (2048, 8192, 32_768, 100_000)
"""Lengths of long prompts; they begin and end with the same text, so that attention reaches far."""
_TEXT_TOKENS = 200
_REPEATED_WORDS = 30
_NUM_SHORT = 12
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


@dataclasses.dataclass(frozen=True)
class Behavior:
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
    rows += [_row("short", ids[:length], length - 1) for length in range(1, _NUM_SHORT + 1)]
    for length in sorted({limit + 1, *FAR}):
        if _TEXT_TOKENS < length <= limit + 1:
            num_words = max(length * len(words) // len(ids) - 50, 0)  # a few more than fit
            middle = rng.choice(words, num_words).tolist()
            repeated = words[:_REPEATED_WORDS]
            far = encode([*repeated, *middle, *repeated])[:limit]
            num_places = len(far) if limit < FAR[0] else 64
            rows.append(_row("far", far, len(far) - num_places))
    if tokenizer is None:
        return rows

    # 2) What a server makes of text, special tokens and conversations.
    plain = _row("plain text", encode(words[len(words) // 2 :])[: min(64, limit)], 1)
    rows.append(plain._replace(is_text=True))
    special = sorted(tokenizer.special_tokens.values())[:8]
    mixed = [int(id) for pair in zip(ids[1:], special, strict=False) for id in pair]
    rows.append(_row("special tokens", [int(ids[0]), *mixed][:limit], 0))
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


def observe_function(function: Callable[[np.ndarray], Any], row: Row, num_likely: int) -> Observed:
    """Return the largest log-probabilities in each place, by a function of tokens to logits."""
    result = function(np.asarray(row.ids, np.int32))
    dtype = str(getattr(result, "dtype", "")).removeprefix("torch.")
    logits = np.asarray(detached(result), np.float64)
    if logits.ndim == 3:
        logits = logits[0]
    if logits.ndim != 2 or len(logits) != len(row.ids):
        raise JllamaError(
            f"the function returns {list(logits.shape)} for {len(row.ids)} tokens; "
            "expected logits [tokens, vocab]"
        )
    probs = oracle.softmax(logits[list(row.places)])
    ids = np.argsort(-probs, axis=1)[:, :num_likely]
    return Observed(row, ids, np.log(np.take_along_axis(probs, ids, axis=1) + TINY), dtype)


def observe_decoding(server: Server, text: Row) -> list[Observed]:
    """Let the server generate after the beginning of a text, one token at a time."""
    ids = text.ids[: _NEW_TOKENS + 1]
    try:
        observed = generate(server, Row("decode", ids, (), len(ids)), _NEW_TOKENS)
    except RefusalError:
        return []
    return [observed] if observed else []


def observe_behaviors(server: Server, rows: Sequence[Row], before: Observed) -> Iterator[Behavior]:
    """Yield what changes when a request is repeated, shares a prefix or has company.

    ``before`` is what was observed of the first row.
    """
    text = rows[0]
    half = len(text.ids) // 2
    places = tuple(place for place in before.row.places if place < half)
    prefix = text._replace(ids=text.ids[:half], places=places, num_prompt=half)
    others = [row for row in rows if row.kind in ("short", "plain text")]
    requests = {
        "the same request again": [text],
        "a prefix of an earlier prompt": [prefix],
        "after a prompt with another beginning": [text],
    }
    if server.parallel > 1:
        requests[f"beside {len(others)} other prompts"] = [text, *others]
    for about, together in requests.items():
        if "another" in about:
            observe(server, [text._replace(ids=text.ids[::-1])])
        observed = observe(server, together)
        if observed and observed[0].row.kind == text.kind:
            yield _change(about, before, observed[0])


def _change(about: str, before: Observed, after: Observed) -> Behavior:
    """Compare log-probabilities of the same tokens in the same places."""
    known = _by_token(before)
    gaps = [
        0.0 if np.isnan(log_prob) else abs(log_prob - known[token])
        for token, log_prob in _by_token(after).items()
        if token in known
    ]
    num_others = len(_by_token(after)) - len(gaps)  # tokens that were not among the likely ones
    changed = np.count_nonzero(gaps) + num_others
    share = changed / max(len(gaps) + num_others, 1)
    return Behavior(about, float(share), max(gaps, default=0.0))


def _by_token(observed: Observed) -> dict[tuple[int, int], float]:
    """Return log-probabilities by place and token."""
    columns = zip(observed.row.places, observed.ids, observed.log_probs, strict=True)
    return {
        (place, int(id)): float(log_prob)
        for place, ids, log_probs in columns
        for id, log_prob in zip(ids, log_probs, strict=True)
        if id >= 0
    }
