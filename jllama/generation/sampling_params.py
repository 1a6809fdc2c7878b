"""How tokens are chosen, as data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jllama.errors import UsageError, check_fields

_LARGEST = 1e30  # the logits stay finite in float32, whatever is added to them and however often


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one row's tokens are chosen; applied in the order of ``jllama.functional.sampling``.

    Args:
        temperature: divide the logits by this; 0 always takes the likeliest token, 1 draws from the model as it is.
        top_k: draw among the k likeliest tokens only; 0 is all of them.
        top_p: draw among the likeliest tokens that together reach this probability; 1 is all of them.
        min_p: leave out tokens less likely than this share of the likeliest one's probability; 0 leaves out none.
        repetition_penalty: divide by this the logit of a token seen before, also in the prompt (multiply if negative).
        presence_penalty: subtracted from the logit of a token generated before.
        frequency_penalty: subtracted from the logit of a token once for each time that it was generated.
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
        check = functools.partial(check_fields, self, "")
        most = f"at most {_LARGEST:g}"
        check("temperature", lambda value: 0 <= value <= _LARGEST, f"0 (greedy) or a positive number, {most}")
        check("top_k", lambda value: 0 <= value < 2**31, "0 (all tokens) or a positive number below 2**31")
        check("top_p", lambda value: 0 < value <= 1, "over 0 and at most 1")
        check("min_p", lambda value: 0 <= value <= 1, "between 0 (off) and 1")
        factor = f"positive (1 is off), up to {_LARGEST:g}"
        check("repetition_penalty", lambda value: 1 / _LARGEST <= value <= _LARGEST, factor)
        addend = f"a finite number (0 is off), {most}"
        check("presence_penalty frequency_penalty", lambda value: abs(value) <= _LARGEST, addend)
        if not all(abs(bias) <= _LARGEST for bias in self.logit_bias.values()):
            said = f"logit_bias is {dict(self.logit_bias)}; its values must be finite, {most}"
            raise UsageError(f"{said}: ban with banned_ids")
        check("seed", lambda seed: 0 <= seed < 2**32, "between 0 and 2**32 - 1")
