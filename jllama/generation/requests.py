"""What goes into the engine, and what comes out of it."""

import dataclasses
from typing import Literal, NamedTuple

from jllama.generation.sampling_params import Prompt
from jllama.generation.text import Completion

Pooling = Literal["mean", "last"]
MOST_TOP = 20
"""How many of the likeliest tokens may be asked for beside each token, as OpenAI's API has it."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to generate. OpenAI's ``n`` texts are so many requests, each with the next seed."""

    prompt: Prompt  # as ``encode_prompt`` makes it
    model: str = ""  # the name of one of the engine's models
    top: int = (
        0  # how many of the likeliest tokens to report beside each token, at most ``MOST_TOP``
    )
    prompt_log_probs: bool = False  # report those of the prompt's tokens, too
    client: str = ""  # who asked: a server's clients take turns
    salt: str = ""  # prefixes are taken from the cache if they were kept under the same one
    pooling: Pooling | None = None  # what to report of the prompt's final activations
    caches: bool = (
        True  # whether prefixes are taken from the cache and kept there; the same bits either way
    )


class Token(NamedTuple):
    """A token of a prompt or an answer, with log-probabilities by the raw logits, in nats."""

    id: int
    log_prob: float | None  # None of a prompt's first
    top: tuple[
        tuple[int, float], ...
    ] = ()  # (id, log-probability) of the likeliest tokens there, likeliest first


class Piece(NamedTuple):
    """More of an answer: text that is certain, and the tokens that it came from; never half a character."""

    text: str
    tokens: tuple[Token, ...]


class Answer(NamedTuple):
    """The end of an answer, after its last ``Piece``: all of it again."""

    completion: Completion
    tokens: tuple[Token, ...]  # of ``completion.ids``
    prompt_tokens: tuple[Token, ...] = ()  # if asked for
    cached_tokens: int = 0  # of the prompt, that were taken from the cache
    pooled: tuple[float, ...] = ()  # the sum of its activations, or the last one, if asked for
