"""Prompts and sampling settings. Data only; nothing here imports JAX."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from jllama.core import check_fields

_MAX = 1e30  # logits stay finite in float32, however many such values are added to them


GrammarKind = Literal["json_schema", "regex", "lark"]


class Grammar(NamedTuple):
    """What a text must match from its first to its last character.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> yes_or_no = jllama.Grammar("regex", "yes|no")
        >>> jllama.generate(model, "Is it? ", grammar=yes_or_no)[0].text in ("yes", "no")
        True
    """

    kind: GrammarKind
    text: str  # the schema as JSON, the expression, or the grammar in llguidance's dialect of Lark


def setting(default: float, min_value: float, max_value: float, expected: str) -> Any:
    """Return a field of ``SamplingParams`` with a default, a range, and the range in words."""
    is_valid = lambda value: min_value <= value <= max_value  # noqa: E731
    return dataclasses.field(default=default, metadata={"check": (is_valid, expected)})


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one row are chosen: the only list of settings, in the order of application.

    ``jllama.kernels.sampling`` applies them. A subclass may add a field whose default changes
    nothing, with a function of the same name in ``jllama.functional.TRUNCATIONS`` or ``PENALTIES``;
    ``setting`` gives the field a range.

    Example:
        >>> import jllama
        >>> jllama.SamplingParams(temperature=0.8, top_p=0.95).top_k
        0

    Args:
        temperature: divide the logits by this; 0 always takes the most likely token, 1 samples the
            model's own distribution.
        top_k: draw among the k most likely tokens only; 0 is all of them.
        top_p: draw among the most likely tokens that together reach this probability; 1 is all of
            them.
        min_p: exclude tokens less likely than this share of the highest probability; 0 excludes
            none.
        repetition_penalty: divide the logit of a token seen before by this, also if it was in the
            prompt (multiply if the logit is negative).
        presence_penalty: subtracted from the logit of a token generated before.
        frequency_penalty: subtracted from a token's logit for each time that it was generated.
        logit_bias: numbers to add to the logits of token ids, such as {"5": 1.5}.
        banned_ids: a list of token ids that are never drawn, such as [1, 2].
        seed: the same seed, prompt and settings give the same text, in float32 and int8 whatever
            else is in the batch.
    """

    temperature: float = setting(1.0, 0, _MAX, "0 (greedy) or a positive number, at most 1e+30")
    top_k: int = setting(0, 0, 2**31 - 1, "0 (all tokens) or a positive number below 2**31")
    top_p: float = setting(1.0, math.nextafter(0, 1), 1, "over 0 and at most 1")
    min_p: float = setting(0.0, 0, 1, "between 0 (off) and 1")
    repetition_penalty: float = setting(1.0, 1 / _MAX, _MAX, "positive (1 is off), up to 1e+30")
    presence_penalty: float = setting(0.0, -_MAX, _MAX, "a finite number (0 is off), at most 1e+30")
    frequency_penalty: float = setting(
        0.0, -_MAX, _MAX, "a finite number (0 is off), at most 1e+30"
    )
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    seed: int = setting(0, 0, 2**32 - 1, "between 0 and 2**32 - 1")

    def __post_init__(self) -> None:
        # A subclass may give a field another default, which replaces the field and its range.
        for field in (*dataclasses.fields(SamplingParams), *dataclasses.fields(self)):
            if field.metadata:
                check_fields(self, "", field.name, *field.metadata["check"])
        expected = "of finite numbers, at most 1e+30: ban with banned_ids"
        check_fields(
            self,
            "",
            "logit_bias",
            lambda biases: all(abs(bias) <= _MAX for bias in biases.values()),
            expected,
        )


class SamplingFields(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keyword arguments, for type checkers.

    A test compares them.
    """

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
    """What to continue, and how: text or token ids, with the settings of ``generate``.

    Text gets a BOS token if the tokenizer adds one and the text does not spell it out. A string in
    ``stop`` that is a special token also ends the text by its id.

    Example:
        >>> import jllama
        >>> jllama.Prompt("Once upon", jllama.SamplingParams(seed=1), max_new_tokens=50).stop
        ()
    """

    content: str | Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_new_tokens: int | None = None  # None continues to the end of the model's context
    stop: str | Sequence[str] = ()  # strings that end the text and are not part of it
    stop_ids: Sequence[int] | None = None  # tokens that end the text; None is the model's own
    grammar: Grammar | None = None  # what the text must match
    # Whether log-probabilities are those of the distribution that tokens are drawn from, after
    # temperature and truncation, and not of the raw logits.
    drawn_log_probs: bool = False
    parse_special: bool = True  # whether special tokens that a text spells out become their ids

    @property
    def ids(self) -> Sequence[int]:
        """``content`` as token ids, after ``encode_prompt``."""
        assert not isinstance(self.content, str)
        return self.content

    def limit(self, max_seq_len: int) -> int:
        """Return the length, prompt and new tokens together, at which the text ends."""
        return max_seq_len if self.max_new_tokens is None else len(self.ids) + self.max_new_tokens
