"""How rotary frequencies are stretched for contexts longer than the pre-training one: a class for each type.

It holds fields, formula, and names in each file format; a subclass with a ``type`` of its own can be asked for.
"""

import dataclasses
import inspect
import math
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

from jllama.errors import MAX_SEQ_LEN, UsageError, check_fields, check_size

ROPE_SCALINGS: dict[str, "type[RopeScaling]"] = {}  # by the name of their type


def inverse_frequencies(head_dim: int, theta: float) -> list[float]:
    """The radians per token of each channel pair, unscaled: ``theta ** (-2i / head_dim)`` (RoFormer, eq. 15)."""
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """``keep * frequency + (1 - keep) * frequency / factor``, where ``keep``, from 0 to 1, is a type's own."""

    type: str = dataclasses.field(default="", init=False)
    factor: float

    attention_factor = 1.0  # multiplies cosines and sines
    grows = False  # whether frequencies depend on the length of a sequence, which may then be over the context
    ordered: ClassVar[tuple[str, ...]] = ()  # two fields, both positive, the first one smaller
    least: ClassVar[dict[str, int]] = {}  # what fields of the configuration must be over
    huggingface_fixed: ClassVar[
        dict[str, tuple[Any, ...]]
    ] = {}  # keys whose values may only be these
    gguf: ClassVar[dict[str, str]] = {}  # after "rope.scaling."; empty if GGUF has no such keys

    def __init_subclass__(cls) -> None:
        ROPE_SCALINGS[cls.type] = cls

    def __post_init__(self) -> None:
        check_fields(
            self,
            "rope_scaling.",
            "factor",
            lambda factor: 1 <= factor < 1e300,
            "at least 1, and finite",
        )
        check_size(
            "rope_scaling.original_max_seq_len",
            vars(self).get("original_max_seq_len", 1),
            MAX_SEQ_LEN,
        )
        values = [getattr(self, name) for name in self.ordered]
        if values and not 0 < values[0] < values[1]:
            both = f"{self.ordered[0]} {values[0]} and {self.ordered[1]} {values[1]}"
            raise UsageError(
                f"rope_scaling has {both}; they must be positive, the first one smaller"
            )

    def keep(self, i: int, frequency: float, head_dim: int, theta: float) -> float:
        """How much of pair ``i``'s frequency is kept."""
        return 0.0

    def frequencies(self, head_dim: int, theta: float, length: int) -> list[float]:
        """The radians per token of each channel pair, in sequences of ``length`` tokens."""
        plain = inverse_frequencies(head_dim, theta)
        kept = [
            min(max(self.keep(i, frequency, head_dim, theta), 0.0), 1.0)
            for i, frequency in enumerate(plain)
        ]
        return [
            keep * each + (1 - keep) * each / self.factor
            for keep, each in zip(kept, plain, strict=True)
        ]

    def to_huggingface(self) -> dict[str, Any]:
        """What ``config.json`` says of it, besides the lengths; it names the arguments of a class as we do."""
        numbers = {
            name: float(value)
            for name, value in vars(self).items()
            if name != "original_max_seq_len"
        }
        return {"rope_type": self.type} | numbers

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "RopeScaling":
        """The scaling of these fields (other types' at defaults), or ``UsageError`` if one is wrong or missing."""
        given = dict(fields)
        kind = ROPE_SCALINGS.get(str(name := given.pop("type", None)))
        if kind is None:
            raise UsageError(
                f"rope_scaling.type is {reprlib.repr(name)}; it must be one of {', '.join(ROPE_SCALINGS)}"
            )
        own = {
            name: argument.default for name, argument in inspect.signature(kind).parameters.items()
        }
        defaults = {
            field.name: field.default
            for each in ROPE_SCALINGS.values()
            for field in dataclasses.fields(each)
        }
        for name in own:
            if own[name] is inspect.Parameter.empty and name not in given:
                raise UsageError(f"rope_scaling.{name} is missing")
        for name, value in given.items():
            said, whole = (
                f"rope_scaling.{name} is {reprlib.repr(value)}",
                type(own.get(name)) is int,
            )
            if name not in own and (name not in defaults or value != defaults[name]):
                raise UsageError(f"{said}; {kind.type} has no such field")
            if name in own and type(value) not in ([int] if whole else [int, float]):
                raise UsageError(f"{said}; it must be a {'whole ' * whole}number")
        return kind(**{name: given[name] for name in own if name in given})


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: ``keep`` is 0. Source: Chen et al. 2023 (arXiv:2306.15595)."""

    type = "linear"
    gguf: ClassVar[dict[str, str]] = {"factor": "factor"}


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """NTK-aware scaling by length: the first pair keeps its frequency, the last one's is divided by ``stretch``.

    Base ``theta * stretch ** (head_dim / (head_dim - 2))``, ``stretch = 1 + factor * max(length / original_max_seq_len
    - 1, 0)`` (as transformers). Source: Peng et al. 2023, sections 3.1 and 3.3 (arXiv:2309.00071).
    """

    original_max_seq_len: int = 8192
    type, grows = "dynamic", True
    least: ClassVar[dict[str, int]] = {
        "head_dim": 2
    }  # the first pair keeps its frequency, so there must be another

    def frequencies(self, head_dim: int, theta: float, length: int) -> list[float]:
        """Those of the stretched base."""
        stretch = 1 + self.factor * max(length / self.original_max_seq_len - 1, 0)
        return inverse_frequencies(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's: ``keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)``, clipped.

    ``turns = original_max_seq_len * frequency / (2 pi)`` are the full turns that a pair makes in the original context.
    Source: Meta's reference, ``apply_scaling`` (arXiv:2407.21783, section 3.4.2); factor 8 for Llama 3.1, 32 for 3.2.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    type, ordered = "llama3", ("low_freq_factor", "high_freq_factor")
    meta: ClassVar[dict[str, str]] = {"factor": "rope_scaling_factor"} | {
        name: f"rope_{name}"
        for name in ("low_freq_factor", "high_freq_factor", "original_max_seq_len")
    }

    def keep(self, i: int, frequency: float, head_dim: int, theta: float) -> float:
        """Those that turn often in the original context."""
        turns = self.original_max_seq_len * frequency / (2 * math.pi)
        return (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN: ``keep = (high - i) / (high - low)``, clipped, for pair ``i``.

    Pair ``index(beta) = head_dim ln(original_max_seq_len / (2 pi beta)) / (2 ln theta)`` makes ``beta`` full turns in
    the original context; ``low = max(floor(index(beta_fast)), 0)``, ``high = min(ceil(index(beta_slow)), head_dim -
    1)``. ``attention_factor`` 0 is the paper's, or DeepSeek's ``mscale`` over ``mscale_all_dim`` if both are given.
    Source: Peng et al. 2023, section 3.2 (arXiv:2309.00071), with the authors' code's ramp over ``i``, not turns.
    """

    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: dataclasses.InitVar[float] = 0.0
    mscale_all_dim: dataclasses.InitVar[float] = 0.0
    type, ordered = "yarn", ("beta_slow", "beta_fast")
    least: ClassVar[dict[str, int]] = {"rope_theta": 1}  # later pairs must turn slower
    huggingface_fixed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate": (True,),
        "finetuned": (True, False),
    }
    gguf: ClassVar[dict[str, str]] = {
        "factor": "factor",
        "original_max_seq_len": "original_context_length",
    } | {name: f"yarn_{name}" for name in ("beta_fast", "beta_slow")}

    def __post_init__(self, mscale: float, mscale_all_dim: float) -> None:
        super().__post_init__()
        check_fields(
            self,
            "rope_scaling.",
            "attention_factor",
            lambda x: x >= 0,
            "positive, or 0 to work it out",
        )
        scales = (
            (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1, 0)
        )  # the paper's, section 3.4
        up, down = (0.1 * scale * math.log(self.factor) + 1 for scale in scales)
        object.__setattr__(self, "attention_factor", self.attention_factor or up / down)

    def keep(self, i: int, frequency: float, head_dim: int, theta: float) -> float:
        """The first pairs, less and less."""

        def index(beta: float) -> float:
            return (
                head_dim
                * math.log(self.original_max_seq_len / (2 * math.pi * beta))
                / (2 * math.log(theta))
            )

        low = max(math.floor(index(self.beta_fast)), 0)
        high = max(min(math.ceil(index(self.beta_slow)), head_dim - 1), low + 1e-3)
        return 1 - (i - low) / (high - low)
