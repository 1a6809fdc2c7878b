"""Low-rank adapters, as options. Data only; nothing here imports JAX."""

import dataclasses
from typing import Literal

from jllama.core import check_fields


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685).

    Every product ``x W`` with an adapted matrix becomes ``x W + scale (x A) B``; only ``A`` and
    ``B`` are trained.

    Args:
        rank: columns of A and rows of B; 0 trains all parameters instead.
        alpha: scale = alpha / rank.
        targets: the matrices of a layer to adapt, by their names in the table of parameters; in a
            model with experts those of attention, unless others are given.
        rank_stabilized: scale = alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).
        dora: scale each output of ``W + scale A B`` to a trained length (DoRA, arXiv:2402.09353).
        base: numbers that store the frozen weights: those of the computation (``auto``), bfloat16,
            8 or 4 bits (``nf4`` needs the package qwix).
        init_from: adapters of the weights to go on with: a run that trained them, PEFT's folder or
            a GGUF LoRA. The other options but ``base`` are then those of these adapters.

    >>> jllama.LoraConfig(rank=8, alpha=16).targets[:4]
    ('wq', 'wk', 'wv', 'wo')
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    rank_stabilized: bool = False
    dora: bool = False
    base: Literal["auto", "bfloat16", "int8", "nf4"] = "auto"
    init_from: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "lora.", "rank", lambda rank: rank >= 0, "0, for none, or more")
        check_fields(
            self,
            "lora.",
            "targets",
            lambda names: len(names) == len({*names}) > 0,
            "names, each once",
        )
        check_fields(self, "lora.", "alpha", lambda alpha: 0 < alpha < 1e9, "positive")
        vars(self)["targets"] = tuple(self.targets)  # YAML and JSON have lists

    @property
    def scale(self) -> float:
        """The factor of the product ``A B``."""
        return self.alpha / self.rank ** (0.5 if self.rank_stabilized else 1)
