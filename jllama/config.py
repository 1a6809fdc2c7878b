"""The architecture of one Llama, and how its work is split over devices, as data."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from typing import Literal, get_args

from jllama.errors import UsageError, check_fields

RopeType = Literal["linear", "dynamic", "llama3", "yarn"]

MAX_SIZES = {
    "vocab_size": 1 << 24,
    "num_layers": 10_000,
    "embed_dim": 1 << 20,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "mlp_dim": 1 << 22,
    "max_seq_len": 1 << 28,
}
"""Of a ``LlamaConfig``: at least 25 times any released Llama's, so what is larger is a slip or a damaged file."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many ways to split the work; the product is the number of devices.

    Args:
        data: copies of the model, each with its share of the batch; 0 takes all devices left over.
        fsdp: ways to split the parameters (and the batch), gathered where they are used.
        tensor: ways to split heads, feed-forward width and vocabulary.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.data < 0 or self.fsdp < 1 or self.tensor < 1:
            raise UsageError(
                f"the mesh {dataclasses.asdict(self)} needs positive sizes (data may be 0: all that is left)"
            )


def llama_mlp_dim(embed_dim: int, *, multiple_of: int = 256, multiplier: float | None = None) -> int:
    """Llama's rule for the width of the feed-forward block.

    Two thirds of ``4 * embed_dim`` (SwiGLU has three matrices where a plain block has two), times ``multiplier`` if
    given, rounded up to a multiple of ``multiple_of``. Source: Meta's reference ``FeedForward`` for Llama 1 to 3.
    """
    width = int(2 * (4 * embed_dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to reach contexts longer than the pre-training one.

    Args:
        type: ``linear`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv:2306.15595); ``llama3`` divides
            only the low ones, and blends in between (Llama 3.1, arXiv:2407.21783); ``yarn`` does so between other
            bounds, and sharpens attention (Peng et al. 2023, arXiv:2309.00071); ``dynamic`` raises the base once a
            sequence is longer than ``original_max_seq_len`` (NTK-aware scaling, there in section 3.3).
        factor: by how much low frequencies are divided; 8 for Llama 3.1, 32 for Llama 3.2. ``dynamic``: how fast the
            base grows with the length.
        low_freq_factor: ``llama3``: wavelengths over ``original_max_seq_len / low_freq_factor`` are divided.
        high_freq_factor: ``llama3``: wavelengths under ``original_max_seq_len / high_freq_factor`` are kept.
        original_max_seq_len: the context length of pre-training, in tokens; ``linear`` does not use it.
        beta_fast: ``yarn``: frequencies of at least so many turns in the original context are kept.
        beta_slow: ``yarn``: frequencies of at most so many turns in the original context are divided.
        attention_factor: ``yarn``: multiplies cosines and sines; 0 means the paper's ``0.1 ln(factor) + 1``.
    """

    type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self) -> None:
        low, high, slow, fast = self.low_freq_factor, self.high_freq_factor, self.beta_slow, self.beta_fast
        factor, is_yarn = self.attention_factor, self.type == "yarn"
        types = get_args(RopeType)
        if self.type not in types:
            raise UsageError(f"rope_scaling.type is {reprlib.repr(self.type)}; it must be one of {', '.join(types)}")
        check_fields(self, "rope_scaling.", "factor", lambda factor: 1 <= factor < 1e300, "at least 1, and finite")
        _check_size("rope_scaling.original_max_seq_len", self.original_max_seq_len, MAX_SIZES["max_seq_len"])
        if self.type == "llama3" and not 0 < low < high:
            raise UsageError(
                f"rope_scaling has low_freq_factor {low} and high_freq_factor {high}; "
                f"they must be positive, the low one smaller"
            )
        if is_yarn and not 0 < slow < fast:
            raise UsageError(
                f"rope_scaling has beta_slow {slow} and beta_fast {fast}; they must be positive, the slow one smaller"
            )
        if not is_yarn and factor != 0:
            raise UsageError(f"rope_scaling.attention_factor is {factor}; only yarn has one: leave it at 0")
        if not factor >= 0:
            raise UsageError(f"rope_scaling.attention_factor is {factor}; it must be positive, or 0 to work it out")
        if is_yarn:
            object.__setattr__(self, "attention_factor", factor or 0.1 * math.log(self.factor) + 1)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Every number that shapes a Llama. A size left at 0 is worked out from the others.

    Args:
        vocab_size: rows of the embedding table; in training, 0 takes the tokenizer's.
        num_layers: transformer blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; 0 means ``num_heads`` (multi-head), 1 is multi-query.
        head_dim: width of one head; 0 means ``embed_dim / num_heads``.
        mlp_dim: width of the SwiGLU block; 0 means Llama's rule, see ``llama_mlp_dim``.
        max_seq_len: the longest context, in tokens.
        norm_eps: epsilon inside RMSNorm's square root.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretches the rotary frequencies for long contexts; null for none.
        tie_embeddings: the output head is the embedding table, transposed.
    """

    vocab_size: int = 0
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 4
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 0
    max_seq_len: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        derived = ("vocab_size", "num_kv_heads", "head_dim", "mlp_dim")
        for name, most in MAX_SIZES.items():
            _check_size(name, getattr(self, name), most, least=0 if name in derived else 1)
        check_fields(self, "", "norm_eps rope_theta", lambda value: 0 < value < 1e300, "positive, and finite")
        if type(self.tie_embeddings) is not bool:
            raise UsageError(f"tie_embeddings is {reprlib.repr(self.tie_embeddings)}; it must be true or false")
        if not self.head_dim and self.embed_dim % self.num_heads:
            raise UsageError(
                f"embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}: "
                f"change one of them or give head_dim"
            )
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.embed_dim // self.num_heads)
        object.__setattr__(self, "mlp_dim", self.mlp_dim or llama_mlp_dim(self.embed_dim))
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}: "
                f"every key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs, so it must be even")
        scaling = self.rope_scaling.type if self.rope_scaling else ""
        if scaling == "dynamic" and self.head_dim == 2:
            raise UsageError("head_dim is 2; dynamic rope_scaling slows every pair but the first, so it must be over 2")
        if scaling == "yarn" and not self.rope_theta > 1:
            raise UsageError(f"rope_theta is {self.rope_theta}; for yarn it must be over 1: later pairs turn slower")


def _check_size(name: str, value: int, most: int, *, least: int = 1) -> None:
    """Raise ``UsageError`` unless a size is a whole number from ``least`` to ``most``."""
    if type(value) is not int:
        raise UsageError(f"{name} is {reprlib.repr(value)}; it must be a whole number")
    if value < least:
        raise UsageError(f"{name} is {value}; it must be {'at least 1' if least else 'positive, or 0 to work it out'}")
    if value > most:
        raise UsageError(f"{name} is {value:,}, and no Llama's is over {most:,}: it cannot be meant")
