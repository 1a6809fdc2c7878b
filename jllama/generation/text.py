"""From a prompt to tokens and back: encode and check it, decode tokens as they come, stop where the text says so."""

import bisect
import dataclasses
import operator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jllama.errors import ContextError, UsageError
from jllama.generation.sampling_params import Prompt
from jllama.grammar import Matcher
from jllama.language_model import LanguageModel
from jllama.tokenizers import Tokenizer

_CONTEXT_TOKENS = (
    8  # decoded again before new ones, as the first token of a text may lose its space
)


class Completion(NamedTuple):
    """What was generated from one prompt."""

    text: str  # what is new, without the prompt and the stop
    ids: list[
        int
    ]  # what ``text`` came from, without a stop id; where a stop string cut a token, it is the last one
    finish_reason: str  # stop_id, stop_string, length (max_new_tokens, a grammar's limit) or context (the model's)
    log_probs: list[float]  # of each of ``ids``, by the model's raw logits, in nats
    drafted: int = 0  # tokens guessed, with ``speculate``
    accepted: int = 0  # how many of them were right
    prompt_tokens: int = 0

    new_tokens = property(lambda self: len(self.ids), doc="How many tokens were generated.")


def encode_prompt(model: LanguageModel, prompt: Prompt) -> Prompt:
    """The prompt as token ids, with tuples of its stops: the one place where requests are checked (``UsageError``)."""
    content, tokenizer, context = prompt.content, model.text_tokenizer, model.config.max_seq_len
    try:
        ids = (
            prompt_ids(tokenizer, content)
            if isinstance(content, str)
            else [operator.index(each) for each in content]
        )
    except TypeError as error:
        raise UsageError(
            f"a prompt is {str(content)[:50]!r}; it must be text, token ids or a Prompt"
        ) from error
    stop_ids = (
        (model.stop_ids or (tokenizer.eos_id,)) if prompt.stop_ids is None else prompt.stop_ids
    )
    new, sampling = 1 if prompt.max_new_tokens is None else prompt.max_new_tokens, prompt.sampling
    stop = (prompt.stop,) if isinstance(prompt.stop, str) else tuple(prompt.stop)
    if "" in stop:
        raise UsageError("a stop string is empty: it would end every text at once")
    if new < 0:
        raise UsageError(f"max_new_tokens is {new}; it must not be negative")
    if not ids:
        raise UsageError("a prompt has no tokens: it needs at least the BOS token")
    if len(ids) + new > context:
        less = (
            f" or lower max_new_tokens to at most {context - len(ids)}"
            if context > len(ids)
            else ""
        )
        wrong = f"the prompt's {len(ids)} tokens and {new} new ones exceed the model's context of {context}"
        raise ContextError(f"{wrong}: shorten the prompt{less}")
    given = {
        "prompt": ids,
        "stop_ids": stop_ids,
        "logit_bias": sampling.logit_bias,
        "banned_ids": sampling.banned_ids,
    }
    for name, listed in given.items():
        if unknown := [id for id in listed if not 0 <= id < tokenizer.vocab_size]:
            has = "have" if name.endswith("ids") else "has"
            raise UsageError(
                f"the {name} {has} token {unknown[0]}; the ids run from 0 to {tokenizer.vocab_size - 1}"
            )
    if len(set(sampling.banned_ids)) == tokenizer.vocab_size:
        raise UsageError("banned_ids bans every token: leave at least one")
    if prompt.grammar:
        if sampling.banned_ids:
            raise UsageError(
                "banned_ids could leave nothing of what a grammar allows: use logit_bias"
            )
        Matcher(prompt.grammar, tokenizer, stop_ids)  # it can be compiled
    return dataclasses.replace(prompt, content=ids, stop=stop, stop_ids=tuple(stop_ids))


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids a model is given for a prompt: BOS, if it was trained so or there is no text, then the text."""
    ids = tokenizer.encode(prompt)
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos or not ids else ids


class TextDecoder:
    """Turns the tokens of one row into text as they come, and in the end into a ``Completion``.

    Held back are an unfinished character, which decodes to U+FFFD, and what may be the beginning of a stop string.
    Without a tokenizer the text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Prompt) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._matcher = None
        if prompt.grammar and tokenizer:
            self._matcher = Matcher(prompt.grammar, tokenizer, prompt.stop_ids or ())
        self._ids = list(prompt.ids[-_CONTEXT_TOKENS:])
        self._decoded = ""  # the text of all ``_ids`` whose text is certain
        if tokenizer:
            self._decoded = tokenizer.decode(self._ids)
        self._num_decoded = len(self._ids)  # how many those are
        self._num_shown = 0
        self._tokens: list[
            tuple[int, float, int]
        ] = []  # id, log-probability, and the length of the text before it
        self.text, self.finish_reason = "", ""  # the latter once it is stop_id or stop_string

    def push(self, token: int, log_prob: float = 0.0) -> str:
        """The text that is certain now and was not before."""
        if token in (self._prompt.stop_ids or ()):
            self.finish_reason = self.finish_reason or "stop_id"
        if self._matcher:
            self._matcher.accept(token)
            self.finish_reason = "length" if self._matcher.failed else self.finish_reason
        if self.finish_reason:
            return ""
        self._ids.append(token)
        self._tokens.append((token, log_prob, len(self.text)))
        self._decode(is_last=False)
        beginnings = (_overlap(self.text, stop) for stop in self._prompt.stop)
        return self._show(0 if self.finish_reason else max(beginnings, default=0))

    def end(self) -> str:
        """What was held back, when there are no more tokens."""
        if self.finish_reason != "stop_string":
            self._decode(is_last=True)
        return self._show(0)

    def allowed(self) -> Int32[np.ndarray, "words"] | None:
        """A bit for each token that may come next, see ``Matcher``; None if there is no grammar."""
        return self._matcher.allowed() if self._matcher else None

    @property
    def num_tokens_shown(self) -> int:
        """How many tokens begin in the text that was shown."""
        return bisect.bisect_left(self._tokens, self._num_shown, key=lambda token: token[2])

    def completion(self, drafted: int, accepted: int) -> Completion:
        """All of it, at the end."""
        reason = self.finish_reason or (
            "context" if self._prompt.max_new_tokens is None else "length"
        )
        kept = [
            token for token in self._tokens if reason != "stop_string" or token[2] < len(self.text)
        ]
        ids, log_probs = [id for id, *_ in kept], [log_prob for _, log_prob, _ in kept]
        return Completion(
            self.text, ids, reason, log_probs, drafted, accepted, len(self._prompt.ids)
        )

    def _show(self, num_held: int) -> str:
        piece = self.text[self._num_shown : len(self.text) - num_held]
        self._num_shown += len(piece)
        return piece

    def _decode(self, *, is_last: bool) -> None:
        """Add the text of new tokens, if it is certain; the text ends where a stop string begins."""
        if self._tokenizer is None:
            return
        if (
            self._num_decoded > 2 * _CONTEXT_TOKENS
        ):  # begin anew, or each token would decode the whole text again
            self._ids = self._ids[self._num_decoded - _CONTEXT_TOKENS :]
            self._num_decoded = _CONTEXT_TOKENS
            self._decoded = self._tokenizer.decode(self._ids[:_CONTEXT_TOKENS])
        searched = len(self.text)
        decoded = self._tokenizer.decode(self._ids)
        new = decoded[len(self._decoded) :]
        if not new or (new.endswith("\ufffd") and not is_last):
            return
        self._num_decoded = len(self._ids)
        self._decoded = decoded
        self.text += new
        found = (self.text.find(stop, max(searched - len(stop), 0)) for stop in self._prompt.stop)
        if ends := [index for index in found if index >= 0]:
            self.text, self.finish_reason = self.text[: min(ends)], "stop_string"


def _overlap(text: str, stop: str) -> int:
    """How long the longest end of a text is with which a stop string begins."""
    start = max(len(text) - len(stop) + 1, 0)
    while (start := text.find(stop[0], start)) >= 0 and not stop.startswith(text[start:]):
        start += 1
    return len(text) - start if start >= 0 else 0
