"""What is asked of a model: prompts, and how their tokens are chosen. Data alone; nothing here imports JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from jllama.errors import check_fields

_LARGEST = 1e30  # the logits stay finite in float32, whatever is added to them and however often

RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= _LARGEST, "0 (greedy) or a positive number, at most 1e+30"),
    "top_k": (lambda value: 0 <= value < 2**31, "0 (all tokens) or a positive number below 2**31"),
    "top_p": (lambda value: 0 < value <= 1, "over 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 (off) and 1"),
    "repetition_penalty": (lambda value: 1 / _LARGEST <= value <= _LARGEST, "positive (1 is off), up to 1e+30"),
    "presence_penalty": (lambda value: abs(value) <= _LARGEST, "a finite number (0 is off), at most 1e+30"),
    "frequency_penalty": (lambda value: abs(value) <= _LARGEST, "a finite number (0 is off), at most 1e+30"),
    "logit_bias": (
        lambda value: all(abs(bias) <= _LARGEST for bias in value.values()),
        "of finite numbers, at most 1e+30: ban with banned_ids",
    ),
    "seed": (lambda value: 0 <= value < 2**32, "between 0 and 2**32 - 1"),
}
"""By field: whether a value is allowed, and the same in words, for the error."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one row's tokens are chosen, in the order of ``jllama.functional.sampling``: the only list of settings.

    A subclass may add a field, whose default changes nothing, with a function under its name in
    ``jllama.functional.TRUNCATIONS`` or ``PENALTIES``; its range goes into ``RANGES``.

    Args:
        temperature: divide the logits by this; 0 always takes the likeliest token, 1 draws from the model as it is.
        top_k: draw among the k likeliest tokens only; 0 is all of them.
        top_p: draw among the likeliest tokens that together reach this probability; 1 is all of them.
        min_p: leave out tokens less likely than this share of the likeliest one's probability; 0 leaves out none.
        repetition_penalty: divide by this the logit of a token seen before, also in the prompt (multiply if negative).
        presence_penalty: subtracted from the logit of a token generated before.
        frequency_penalty: subtracted from a token's logit for each time that it was generated.
        logit_bias: numbers to add to the logits of token ids, such as {"5": 1.5}.
        banned_ids: a list of token ids that are never drawn, such as [1, 2].
        seed: the same seed, prompt and settings give the same text, in float32 and int8 whatever else is in the batch.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in RANGES:
                check_fields(self, "", field.name, *RANGES[field.name])


class SamplingFields(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keyword arguments, for type checkers; a test holds the two together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    banned_ids: tuple[int, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What to continue: text, which gets BOS where the tokenizer wants it, or ids; and how, as in ``generate``."""

    content: str | Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_new_tokens: int | None = None  # None goes on to the end of the model's context
    stop: str | Sequence[str] = ()  # strings that end the text, and are not part of it
    stop_ids: Sequence[int] | None = None  # tokens that end the text; None takes the model's own

    @property
    def ids(self) -> Sequence[int]:
        """``content`` where it is token ids, as ``encode_prompt`` makes it."""
        assert not isinstance(self.content, str)
        return self.content

    def limit(self, max_seq_len: int) -> int:
        """The length, prompt and new tokens together, at which the text ends."""
        return max_seq_len if self.max_new_tokens is None else len(self.ids) + self.max_new_tokens
