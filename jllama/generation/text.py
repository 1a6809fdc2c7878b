"""From a prompt to tokens and back: encode and check prompts, decode new tokens, find stops."""

import bisect
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jllama.core import UsageError
from jllama.generation.sampling_params import Grammar, Prompt
from jllama.models.language_model import LanguageModel
from jllama.system.errors import ContextError
from jllama.tokenizers.base import Tokenizer

# Decoded again before new tokens, because the first token of a text may lose its space.
_CONTEXT_TOKENS = 8


class Completion(NamedTuple):
    """The text that was generated from one prompt.

    Example:
        >>> Completion("a b", [5, 6], "length", [-0.5, -1.0]).new_tokens
        2
    """

    text: str  # without the prompt and without the stop
    # The tokens of ``text``, without a stop id; a stop string may cut the last of them.
    ids: list[int]
    # stop_id, stop_string, length (max_new_tokens or a grammar's limit) or context (the model's).
    finish_reason: str
    log_probs: list[float]  # of ``ids``, from the model's raw logits, in nats
    drafted: int = 0  # tokens that ``speculate`` guessed
    accepted: int = 0  # how many of them were right
    prompt_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.ids)


def encode_prompt(model: LanguageModel, prompt: Prompt, context: int | None = None) -> Prompt:
    """Return the prompt with token ids and tuples of stops; all requests are checked here.

    ``context`` is the most tokens, if that is less than the model takes.

    Raises:
        UsageError: the prompt or a setting does not fit the model.
    """
    tokenizer = model.text_tokenizer
    content = prompt.content
    try:
        ids = (
            prompt_ids(tokenizer, content, parse_special=prompt.parse_special)
            if isinstance(content, str)
            else [*map(operator.index, content)]
        )
    except TypeError as error:
        raise UsageError(
            f"a prompt is {str(content)[:50]!r}; it must be text, token ids or a Prompt"
        ) from error
    stop_ids = prompt.stop_ids
    if stop_ids is None:
        stop_ids = tokenizer.stops_or_eos(model.stop_ids)
    stop = (prompt.stop,) if isinstance(prompt.stop, str) else tuple(prompt.stop)
    if "" in stop:
        raise UsageError("a stop string is empty: it would end every text at once")
    special = tokenizer.special_tokens  # these are no text, so only their ids can end one
    stop_ids = sorted({*stop_ids, *(special[text] for text in stop if text in special)})
    check_length(ids, prompt.max_new_tokens, context or model.config.max_seq_len)
    sampling = prompt.sampling
    vocab_size = tokenizer.vocab_size
    _check_ids("prompt has", ids, vocab_size)
    _check_ids("stop_ids have", stop_ids, vocab_size)
    _check_ids("logit_bias has", sampling.logit_bias, vocab_size)
    _check_ids("banned_ids have", sampling.banned_ids, vocab_size)
    if len(set(sampling.banned_ids)) == vocab_size:
        raise UsageError("banned_ids bans every token: leave at least one")
    if prompt.grammar:
        if sampling.banned_ids:
            raise UsageError(
                "banned_ids could leave nothing of what a grammar allows: use logit_bias"
            )
        matcher_of(prompt.grammar, tokenizer, stop_ids)  # raises if it cannot be compiled
    return dataclasses.replace(prompt, content=ids, stop=stop, stop_ids=stop_ids)


def matcher_of(grammar: Grammar, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> Any:
    """Return the ``Matcher`` of a grammar; few texts have one, so its module is imported here."""
    from jllama.generation.grammar import Matcher

    return Matcher(grammar, tokenizer, stop_ids)


def check_length(ids: Sequence[int], max_new_tokens: int | None, context: int) -> None:
    """Raise ``UsageError`` if a prompt is empty, or does not fit the context with its answer."""
    new = 1 if max_new_tokens is None else max_new_tokens
    if new < 0:
        raise UsageError(f"max_new_tokens is {new}; it must not be negative")
    if not ids:
        raise UsageError("a prompt has no tokens: it needs at least the BOS token")
    num_left = context - len(ids)
    if new > num_left:
        advice = f" or lower max_new_tokens to at most {num_left}" if num_left > 0 else ""
        raise ContextError(
            f"the prompt's {len(ids)} tokens and {new} new ones exceed the context of "
            f"{context}: shorten the prompt{advice}"
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for id in ids:
        if not 0 <= id < vocab_size:
            raise UsageError(f"the {name} token {id}; the ids run from 0 to {vocab_size - 1}")


def prompt_ids(
    tokenizer: Tokenizer, prompt: str, *, parse_special: bool = True, begin: bool = True
) -> list[int]:
    """Return a prompt's ids; it begins with BOS if the model's prompts do or there is no text.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the text. A BOS that it spells out itself is not repeated.
        parse_special: whether special tokens that the text spells out become their ids.
        begin: whether BOS may be added.
    """
    encode = tokenizer.encode_with_special_tokens if parse_special else tokenizer.encode
    ids = encode(prompt)
    bos = [tokenizer.bos_id]
    is_missing = not ids or (tokenizer.add_bos and ids[:1] != bos)
    return bos + ids if begin and is_missing else ids


class TextDecoder:
    """Turns the tokens of one row into text as they come, and finally into a ``Completion``.

    Two things are held back: an unfinished character, which decodes to U+FFFD, and what may be the
    beginning of a stop string. If there is no tokenizer, the text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._matcher = None
        if prompt.grammar and tokenizer:
            self._matcher = matcher_of(prompt.grammar, tokenizer, prompt.stop_ids or ())
        self._ids = list(prompt.ids[-_CONTEXT_TOKENS:])
        self._num_decoded = len(self._ids)  # the first of ``_ids``, whose text is final
        self._decoded = tokenizer.decode(self._ids) if tokenizer else ""  # their text
        self._num_shown = 0  # characters of ``text``
        # Of each new token: id, log-probability, and length of the text before it.
        self._new_ids = list[int]()
        self._log_probs = list[float]()
        self._starts = list[int]()
        self.text = ""
        self.finish_reason = ""  # set by a stop or a grammar's limit

    def push(self, token: int, log_prob: float = 0.0) -> str:
        """Add a token; return the text that has become final."""
        if token in (self._prompt.stop_ids or ()):
            self.finish_reason = self.finish_reason or "stop_id"
        if self._matcher:
            self._matcher.accept(token)
            if self._matcher.failed:
                self.finish_reason = "length"
        if self.finish_reason:
            return ""
        self._ids.append(token)
        self._new_ids.append(token)
        self._log_probs.append(log_prob)
        self._starts.append(len(self.text))
        self._decode(is_last=False)
        if self.finish_reason:
            return self._show(0)
        overlaps = (overlap(self.text, stop) for stop in self._prompt.stop)
        return self._show(max(overlaps, default=0))

    def end(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.finish_reason != "stop_string":
            self._decode(is_last=True)
        return self._show(0)

    def allowed(self) -> Int32[np.ndarray, "words"] | None:
        """Return one bit for each token that may come next, see ``Matcher``.

        Return None if there is no grammar.
        """
        return self._matcher.allowed() if self._matcher else None

    @property
    def num_tokens_shown(self) -> int:
        """How many tokens begin in the text that was shown."""
        return bisect.bisect_left(self._starts, self._num_shown)

    def completion(self, drafted: int, accepted: int) -> Completion:
        """Return the complete result."""
        reason = self.finish_reason
        if not reason:
            reason = "context" if self._prompt.max_new_tokens is None else "length"
        num_tokens = len(self._starts)
        if reason == "stop_string":  # which tokens may begin behind
            num_tokens = bisect.bisect_left(self._starts, len(self.text))
        ids = self._new_ids[:num_tokens]
        log_probs = self._log_probs[:num_tokens]
        num_prompt = len(self._prompt.ids)
        return Completion(self.text, ids, reason, log_probs, drafted, accepted, num_prompt)

    def _show(self, num_held: int) -> str:
        piece = self.text[self._num_shown : len(self.text) - num_held]
        self._num_shown += len(piece)
        return piece

    def _decode(self, *, is_last: bool) -> None:
        """Add the text of new tokens if it is final.

        A stop string ends the text where it begins.
        """
        if self._tokenizer is None:
            return
        # Drop old tokens, or each new one would decode the whole text again.
        if self._num_decoded > 2 * _CONTEXT_TOKENS:
            self._ids = self._ids[self._num_decoded - _CONTEXT_TOKENS :]
            self._num_decoded = _CONTEXT_TOKENS
            self._decoded = self._tokenizer.decode(self._ids[:_CONTEXT_TOKENS])
        decoded = self._tokenizer.decode(self._ids)
        new = decoded[len(self._decoded) :]
        is_unfinished = new.endswith("\ufffd") and not is_last
        if not new or is_unfinished:
            return
        self._num_decoded = len(self._ids)
        self._decoded = decoded
        num_searched = len(self.text)
        self.text += new
        indices = [
            self.text.find(stop, max(num_searched - len(stop), 0)) for stop in self._prompt.stop
        ]
        ends = [index for index in indices if index >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.finish_reason = "stop_string"


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string begins with."""
    start = max(len(text) - len(stop) + 1, 0)
    while (start := text.find(stop[0], start)) >= 0 and not stop.startswith(text[start:]):
        start += 1
    return len(text) - start if start >= 0 else 0
