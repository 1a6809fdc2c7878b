"""Scaling of rotary frequencies for contexts longer than in pre-training: one class for each type.

A class holds the fields, the formula with its source, and the names in each file format.
"""

import dataclasses
import math
from typing import Any, ClassVar

from jllama.core import check_fields
from jllama.core.config import RopeScaling, inverse_frequencies


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: ``keep`` is 0, so all frequencies are divided by ``factor``.

    Source: Chen et al. 2023 (arXiv:2306.15595).

    Examples:
        >>> LinearScaling(4.0).frequencies(head_dim=2, theta=10_000.0, length=8192)
        [0.25]
    """

    type = "linear"
    gguf: ClassVar[dict[str, str]] = {"factor": "factor"}


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """NTK-aware scaling by the sequence length.

    The base becomes ``theta * stretch ** (head_dim / (head_dim - 2))`` with ``stretch = 1 + factor
    * max(length / original_max_seq_len - 1, 0)`` (as in transformers): the first pair keeps its
    frequency, that of the last pair is divided by ``stretch``.
    Source: Peng et al. 2023, sections 3.1 and 3.3 (arXiv:2309.00071).

    Examples:
        >>> DynamicScaling(2.0).frequencies(head_dim=4, theta=10_000.0, length=16_384)
        [1.0, 0.0033333333333333335]
    """

    original_max_seq_len: int = 8192
    type = "dynamic"
    grows = True
    must_exceed: ClassVar[dict[str, int]] = {"head_dim": 2}  # a pair beside the first is needed

    def frequencies(self, head_dim: int, theta: float, length: int) -> list[float]:
        """Return the frequencies of the stretched base."""
        stretch = 1 + self.factor * max(length / self.original_max_seq_len - 1, 0)
        return inverse_frequencies(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """The scaling of Llama 3.1 (factor 8) and 3.2 (factor 32).

    ``keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)``, clipped, where
    ``turns = original_max_seq_len * frequency / (2 pi)`` counts the full turns of a pair in the
    original context. Pairs that turn often keep their frequency.
    Source: Meta's reference, ``apply_scaling`` (arXiv:2407.21783, section 3.4.2).

    Examples:
        >>> Llama3Scaling(8.0).frequencies(head_dim=4, theta=500_000.0, length=8192)[0]
        1.0
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    type = "llama3"
    ordered = ("low_freq_factor", "high_freq_factor")
    meta: ClassVar[dict[str, str]] = {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_seq_len": "rope_original_max_seq_len",
    }

    def keep(self, i: int, frequency: float, head_dim: int, theta: float) -> float:
        """Return a part that grows with the turns in the original context."""
        turns = self.original_max_seq_len * frequency / (2 * math.pi)
        width = max(self.high_freq_factor - self.low_freq_factor, 1e-9)  # Llama 4's are equal
        return (turns - self.low_freq_factor) / width


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN: ``keep = (high - i) / (high - low)``, clipped, for pair ``i``.

    The pair with index ``index(beta) = head_dim * ln(original_max_seq_len / (2 pi beta)) / (2 ln
    theta)`` makes ``beta`` full turns in the original context. ``low = max(floor(index(beta_fast)),
    0)``, ``high = min(ceil(index(beta_slow)), head_dim - 1)``.

    ``attention_factor`` 0 becomes the paper's ``0.1 ln(factor) + 1``, or DeepSeek's quotient of
    that with ``mscale`` and with ``mscale_all_dim`` before the logarithm if both are set.
    Source: Peng et al. 2023, sections 3.2 and 3.4 (arXiv:2309.00071); the ramp over ``i`` instead
        of
    turns is that of the authors' code.

    Examples:
        >>> YarnScaling(1.0).attention_factor
        1.0
    """

    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: dataclasses.InitVar[float] = 0.0
    mscale_all_dim: dataclasses.InitVar[float] = 0.0
    type = "yarn"
    ordered = ("beta_slow", "beta_fast")
    must_exceed: ClassVar[dict[str, int]] = {"rope_theta": 1}  # later pairs must turn slower
    huggingface_fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate": (True,),
        "finetuned": (True, False),
    }
    gguf: ClassVar[dict[str, str]] = {
        "factor": "factor",
        "original_max_seq_len": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }

    def __post_init__(self, mscale: float, mscale_all_dim: float) -> None:
        super().__post_init__()
        check_fields(
            self,
            "rope_scaling.",
            "attention_factor",
            lambda factor: factor >= 0,
            "positive, or 0 to derive it",
        )
        if not mscale or not mscale_all_dim:
            mscale, mscale_all_dim = 1, 0  # the paper's, section 3.4
        numerator = 0.1 * mscale * math.log(self.factor) + 1
        denominator = 0.1 * mscale_all_dim * math.log(self.factor) + 1
        factor = self.attention_factor or numerator / denominator
        vars(self)["attention_factor"] = factor

    def keep(self, i: int, frequency: float, head_dim: int, theta: float) -> float:
        """Return a part that falls from 1 for the first pairs to 0 for the last."""
        low = max(math.floor(self._index(self.beta_fast, head_dim, theta)), 0)
        high = math.ceil(self._index(self.beta_slow, head_dim, theta))
        high = max(min(high, head_dim - 1), low + 1e-3)
        return 1 - (i - low) / (high - low)

    def _index(self, beta: float, head_dim: int, theta: float) -> float:
        """Return the index of the pair that makes ``beta`` full turns in the original context."""
        turns = self.original_max_seq_len / (2 * math.pi * beta)
        return head_dim * math.log(turns) / (2 * math.log(theta))
