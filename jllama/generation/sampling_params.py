"""What is asked of a model: prompts, and how their tokens are chosen. Data alone; nothing here imports JAX."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jllama.config import Grammar
from jllama.errors import check_fields

_MOST = 1e30  # the logits stay finite in float32, whatever is added to them and however often


def setting(default: float, least: float, most: float, expected: str) -> Any:
    """A field of ``SamplingParams``: its default, the least and the most that it may be, and these in words."""
    return dataclasses.field(
        default=default, metadata={"check": (lambda value: least <= value <= most, expected)}
    )


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one row's tokens are chosen, in the order of ``jllama.functional.sampling``: the only list of settings.

    A subclass may add a field, whose default changes nothing, with a function under its name in
    ``jllama.functional.TRUNCATIONS`` or ``PENALTIES``; ``setting`` gives it a range.

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

    temperature: float = setting(1.0, 0, _MOST, "0 (greedy) or a positive number, at most 1e+30")
    top_k: int = setting(0, 0, 2**31 - 1, "0 (all tokens) or a positive number below 2**31")
    top_p: float = setting(1.0, math.nextafter(0, 1), 1, "over 0 and at most 1")
    min_p: float = setting(0.0, 0, 1, "between 0 (off) and 1")
    repetition_penalty: float = setting(1.0, 1 / _MOST, _MOST, "positive (1 is off), up to 1e+30")
    presence_penalty: float = setting(
        0.0, -_MOST, _MOST, "a finite number (0 is off), at most 1e+30"
    )
    frequency_penalty: float = setting(
        0.0, -_MOST, _MOST, "a finite number (0 is off), at most 1e+30"
    )
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    seed: int = setting(0, 0, 2**32 - 1, "between 0 and 2**32 - 1")

    def __post_init__(self) -> None:
        for field in (
            *dataclasses.fields(SamplingParams),
            *dataclasses.fields(self),
        ):  # with defaults of its own, too
            if field.metadata:
                check_fields(self, "", field.name, *field.metadata["check"])
        finite = "of finite numbers, at most 1e+30: ban with banned_ids"
        check_fields(
            self,
            "",
            "logit_bias",
            lambda bias: all(abs(each) <= _MOST for each in bias.values()),
            finite,
        )


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
    grammar: Grammar | None = None  # what the text must match

    @property
    def ids(self) -> Sequence[int]:
        """``content`` where it is token ids, as ``encode_prompt`` makes it."""
        assert not isinstance(self.content, str)
        return self.content

    def limit(self, max_seq_len: int) -> int:
        """The length, prompt and new tokens together, at which the text ends."""
        return max_seq_len if self.max_new_tokens is None else len(self.ids) + self.max_new_tokens
