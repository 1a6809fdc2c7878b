"""Inputs and outputs of the engine, and the row that leads from one to the other."""

import dataclasses
import time
from typing import Any, Literal, NamedTuple

import numpy as np

from jllama.core import engine as core
from jllama.generation.sampling_params import Prompt
from jllama.generation.text import Completion, TextDecoder

Pooling = Literal["mean", "last"]
MAX_TOP = 20
"""How many of the most likely tokens may be requested with each token, as in OpenAI's API."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to generate. OpenAI's ``n`` texts are ``n`` requests with consecutive seeds."""

    prompt: Prompt  # as ``encode_prompt`` returns it
    model: str = ""  # the name of one of the engine's models
    top: int = 0  # how many of the most likely tokens to report beside each token, up to MAX_TOP
    prompt_log_probs: bool = False  # report log-probabilities of the prompt's tokens as well
    client: str = ""  # whom the request comes from: a server's clients take turns
    salt: str = ""  # cached prefixes are shared by requests with the same salt
    pooling: Pooling | None = None  # how to reduce the prompt's final activations for the answer
    caches: bool = True  # whether to use and fill the prefix cache; the bits are the same


class Token(NamedTuple):
    """A token of a prompt or an answer, with log-probabilities from the raw logits, in nats."""

    id: int
    log_prob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


class Piece(NamedTuple):
    """The next part of an answer: final text and its tokens; never half a character."""

    text: str
    tokens: tuple[Token, ...]


class Answer(NamedTuple):
    """The end of an answer, after its last ``Piece``: the complete answer."""

    completion: Completion
    tokens: tuple[Token, ...]  # of ``completion.ids``
    prompt_tokens: tuple[Token, ...] = ()  # if ``prompt_log_probs`` is set
    cached_tokens: int = 0  # prompt tokens that were taken from the prefix cache
    pooled: tuple[float, ...] = ()  # the sum of the activations or the last one, see ``pooling``
    end: tuple[Token, ...] = ()  # the stop id that ended the text, if one did: it is no part of it


@dataclasses.dataclass(eq=False, kw_only=True)
class Row(core.Row):
    """A request from the queue to the end of its answer, whose ``tokens`` are of type ``Token``."""

    request: Request
    text: TextDecoder
    chunk_keys: dict[int, bytes]  # prefix-cache keys, by the first token of each whole chunk
    num_prefilled: int = 0  # prompt tokens whose keys and values are computed
    num_cached: int = 0  # those of them that were taken from a cache
    pooled: Any = ()  # activations of the prompt, reduced as ``Request.pooling`` says
    prompt_tokens: list[Token] = dataclasses.field(default_factory=list)
    drafted: int = 0  # tokens that prompt lookup drafted
    accepted: int = 0  # those of them that were right
    num_emitted: int = 0  # tokens that pieces have reported
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    first_token_s: float = 0.0  # when the first token was read

    @property
    def prefill_len(self) -> int:
        """How many prompt tokens to compute.

        Decoding computes the last one, unless pooling needs it.
        """
        num_tokens = len(self.ids)
        return num_tokens if self.request.pooling else num_tokens - 1

    @property
    def is_complete(self) -> bool:
        """Whether a stop or the number of tokens ends the answer."""
        return bool(self.text.finish_reason) or len(self.tokens) >= self.max_new_tokens

    def pool(self, hidden: Any, num_tokens: int) -> None:
        """Reduce the final activations ``[1, seq, embed]`` of the prompt's next tokens."""
        states = np.asarray(hidden, np.float64)[0, :num_tokens]
        if self.request.pooling == "last":
            self.pooled = states[-1]
        else:
            self.pooled = (self.pooled if self.num_prefilled else 0) + states.sum(axis=0)

    def push(self, block: Any, count: int) -> list[Piece]:
        """Add the first ``count`` tokens of a block until one ends the text.

        Return the text and tokens that are final.
        """
        if not self.tokens:
            self.first_token_s = time.monotonic()
        record = block.record
        self.drafted = int(record.drafted[self.slot])
        self.accepted = int(record.accepted[self.slot])
        top = [array[:, self.slot] for array in record.top]
        arrays = block.tokens[self.slot], block.log_probs[self.slot], top
        text = ""
        for token in make_tokens(count, self.request.top, *arrays):
            if self.text.finish_reason:
                break
            self.tokens.append(token)
            text += self.text.push(token.id, token.log_prob or 0.0)
        return self._emit(text, self.text.num_tokens_shown)

    def finish(self) -> list[Piece | Answer]:
        """Return the rest of the text, and the answer."""
        rest = self.text.end()
        completion = self.text.completion(self.drafted, self.accepted)
        num_tokens = len(completion.ids)
        tokens = tuple(self.tokens[:num_tokens])
        end = ()
        if completion.finish_reason == "stop_id":
            end = (self.tokens[num_tokens],)
        answer = Answer(
            completion,
            tokens,
            tuple(self.prompt_tokens),
            self.num_cached,
            tuple(self.pooled),
            end,
        )
        return [*self._emit(rest, num_tokens), answer]

    def _emit(self, text: str, num_tokens: int) -> list[Piece]:
        tokens = tuple(self.tokens[self.num_emitted : num_tokens])
        self.num_emitted += len(tokens)
        return [Piece(text, tokens)] if text or tokens else []


def make_tokens(count: int, num_top: int, ids: Any, log_probs: Any, top: Any) -> list[Token]:
    """Return the first ``count`` tokens of arrays ``[seq]``, with ``num_top`` of ``[seq, top]``."""
    tokens = []
    for index in range(count):
        best = zip(*(array[index, :num_top].tolist() for array in top), strict=True)
        tokens.append(Token(int(ids[index]), float(log_probs[index]), tuple(best)))
    return tokens
