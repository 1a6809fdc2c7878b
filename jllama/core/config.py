"""The configuration of a model: all numbers that define a Llama."""

import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from jllama.core import UsageError, check_fields, check_size

MAX_SEQ_LEN = 1 << 28
"""At least 25 times that of any released Llama: a larger value is a slip or a damaged file."""

BLOCKS: dict[str, Any] = {}
"""Blocks of one's own by name: classes derived from ``jllama.core.model.Layer``."""

MAX_SIZES = {
    "vocab_size": 1 << 24,
    "num_layers": 10_000,
    "embed_dim": 1 << 20,
    "mlp_dim": 1 << 22,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_seq_len": MAX_SEQ_LEN,
    "num_experts": 1 << 14,
    "experts_per_token": 1 << 14,
    "expert_dim": 1 << 22,
}
"""Limits of a ``LlamaConfig``, at least 25 times any released Llama: more is a slip or damage."""


_EXPERTS = ("num_experts", "experts_per_token", "expert_dim")

ROPE_SCALINGS: dict[str, "type[RopeScaling]"] = {}
"""The classes by their type (``jllama.models.rope_scaling``). To derive one is to add it."""


def inverse_frequencies(head_dim: int, theta: float) -> list[float]:
    """Return the radians per token of each channel pair, unscaled.

    Pair ``i`` has ``theta ** (-2i / head_dim)``. Source: RoFormer, eq. 15 (arXiv:2104.09864).
    """
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A scaling: ``keep * frequency + (1 - keep) * frequency / factor`` for each channel pair.

    ``keep``, from 0 to 1, depends on the type and on the pair. A class may override ``keep`` or all
    of ``frequencies``.

    Examples:
        >>> jllama.LinearScaling(2.0).frequencies(head_dim=4, theta=10_000.0, length=8192)
        [0.5, 0.005]
    """

    type: str = dataclasses.field(default="", init=False)
    factor: float

    attention_factor = 1.0  # multiplies cosines and sines
    grows = False  # frequencies depend on the sequence length, which may then exceed the context
    ordered: ClassVar[tuple[str, ...]] = ()  # two fields, with 0 < first <= second
    must_exceed: ClassVar[dict[str, int]] = {}  # exclusive lower bounds of the model's fields
    huggingface_fixed: ClassVar[dict[str, tuple[Any, ...]]] = {}  # keys and their allowed values
    gguf: ClassVar[dict[str, str]] = {}  # keys after "rope.scaling."; empty if GGUF has none

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
        length = vars(self).get("original_max_seq_len", 1)
        check_size("rope_scaling.original_max_seq_len", length, MAX_SEQ_LEN)
        if self.ordered:
            low, high = (getattr(self, name) for name in self.ordered)
            if not 0 < low <= high:
                both = f"{self.ordered[0]} {low} and {self.ordered[1]} {high}"
                raise UsageError(
                    f"rope_scaling has {both}; they must be positive, the first one not larger"
                )

    def keep(self, i: int, frequency: float, head_dim: int, theta: float) -> float:
        """Return which part of pair ``i``'s frequency is kept; it is then clipped to 0 to 1."""
        return 0.0

    def frequencies(self, head_dim: int, theta: float, length: int) -> list[float]:
        """Return the radians per token of each channel pair in sequences of ``length`` tokens."""
        scaled = []
        for i, frequency in enumerate(inverse_frequencies(head_dim, theta)):
            keep = min(max(self.keep(i, frequency, head_dim, theta), 0.0), 1.0)
            scaled.append(keep * frequency + (1 - keep) * frequency / self.factor)
        return scaled

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "RopeScaling":
        """Return the scaling with these fields, ``type`` among them.

        A field of another type is accepted at its default.

        Raises:
            UsageError: the type is unknown, or a field is missing, unknown or not a number.
        """
        values = dict(fields)
        name = values.pop("type", None)
        scaling = ROPE_SCALINGS.get(str(name))
        if scaling is None:
            types = ", ".join(ROPE_SCALINGS)
            raise UsageError(
                f"rope_scaling.type is {reprlib.repr(name)}; it must be one of {types}"
            )
        defaults = {
            name: argument.default
            for name, argument in inspect.signature(scaling).parameters.items()
        }
        all_defaults = {
            field.name: field.default
            for other in ROPE_SCALINGS.values()
            for field in dataclasses.fields(other)
        }
        for name, default in defaults.items():
            if default is inspect.Parameter.empty and name not in values:
                raise UsageError(f"rope_scaling.{name} is missing")
        for name, value in values.items():
            problem = f"rope_scaling.{name} is {reprlib.repr(value)}"
            if name not in defaults:
                if name not in all_defaults or value != all_defaults[name]:
                    raise UsageError(f"{problem}; {scaling.type} has no such field")
            elif type(defaults[name]) is int:
                if type(value) is not int:
                    raise UsageError(f"{problem}; it must be a whole number")
            elif type(value) not in (int, float):
                raise UsageError(f"{problem}; it must be a number")
        return scaling(**{name: values[name] for name in defaults if name in values})


Scaling = RopeScaling | None
if not TYPE_CHECKING:
    Scaling = dict[str, Any] | Scaling  # a configuration file has a mapping


def llama_mlp_dim(
    embed_dim: int, *, multiple_of: int = 256, multiplier: float | None = None
) -> int:
    """Return the width of the feed-forward block by Llama's rule.

    Two thirds of ``4 * embed_dim``, since SwiGLU has three matrices for a plain block's two, times
    ``multiplier`` if it is set, rounded up to a multiple of ``multiple_of``.
    Source: Meta's reference ``FeedForward`` for Llama 1 to 3.
    """
    width = int(2 * (4 * embed_dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return (width + multiple_of - 1) // multiple_of * multiple_of


class LayerKind(NamedTuple):
    """What tells the attention of one layer from that of another; Llama's layers are of one kind.

    Attributes:
        rope: whether queries and keys are rotated: not at all, by plain frequencies, or by those
            of ``rope_scaling``.
        window: how many tokens a query sees, itself included; None for all before it.
        chunk: the tokens of a chunk, of whose keys alone a query sees; 0 for no chunks.
        feed_forward: whether it has experts, or a SwiGLU of width ``mlp_dim``.
    """

    rope: Literal["none", "plain", "scaled"]
    window: int | None
    chunk: int
    feed_forward: Literal["dense", "experts"]


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """All numbers that define a Llama; sizes that are 0 are derived from the others.

    The fields after ``tie_embeddings`` are those of related families, such as Mistral and Qwen;
    their defaults are Llama's.

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
        rope_scaling: stretches the rotary frequencies for long contexts: a ``RopeScaling``, or a
            mapping of ``type`` (linear, dynamic, llama3, yarn), ``factor`` and that type's other
            fields; null for none.
        tie_embeddings: the output head is the embedding table, transposed.
        attention_bias: queries, keys and values have a bias (Qwen 2).
        qk_norm: RMSNorm of queries and keys before the rotation: of each head (Qwen 3) or of all
            heads together (OLMo 2); "rotated" is of each head after the rotation, without weights,
            in layers that have one (Llama 4).
        norm_placement: where a layer's two norms are: before attention and SwiGLU, or after them,
            of what is added to the residual stream (OLMo 2).
        no_rope_layers: indices, from 0, of layers whose queries and keys are not rotated (SmolLM3,
            Llama 4).
        sliding_window: how many tokens a query sees, itself included; 0 for all (Mistral).
        full_attention_layers: indices, from 0, of layers without the sliding window (OLMo 3).
        rope_scaling_layers: layers that ``rope_scaling`` applies to: all, or those without the
            sliding window (OLMo 3).
        partial_rotary_factor: the part of each head's channels, from the first on, that is rotated
            (Phi).
        embedding_multiplier: factor of the embeddings (Granite).
        residual_multiplier: factor of what attention and SwiGLU add to the residual stream.
        attention_multiplier: factor of attention's scores; 0 means ``1 / sqrt(head_dim)``.
        logits_scaling: divisor of the logits.
        num_experts: SwiGLU blocks of each layer, among which a router chooses for each token; 0 for
            one block without a router (Mixtral).
        experts_per_token: how many of them a token has; 0 means 2, or 1 with a sigmoid.
        expert_dim: width of each of them; 0 means ``mlp_dim``.
        normalize_expert_weights: the weights of a token's experts, which are parts of a softmax
            over all experts, are divided by their sum (Mixtral; not in OLMoE).
        router: what makes weights of the router's logits. With "sigmoid" a token has one expert,
            whose input, not its output, is multiplied by the weight (Llama 4).
        router_bias: experts are chosen by weight plus a bias of each, which training moves against
            their share of tokens: balance without a loss (DeepSeek-V3; arXiv:2408.15664).
        shared_expert: every token also has an expert that is not chosen (Llama 4).
        dense_layers: indices, from 0, of layers without experts (Llama 4 Maverick).
        attention_chunk: in layers with rotation a query sees keys of its own chunk alone, which has
            so many tokens of its document; 0 for all (Llama 4).
        temperature_step: in layers without rotation, queries at position ``p`` of their document
            are multiplied by ``1 + temperature_scale * ln(1 + floor((p + 1) / temperature_step))``;
            0 for none (Llama 4; arXiv:2501.19399).
        temperature_scale: see ``temperature_step``.
        block: a block of one's own that the layers are made of, by its name in ``BLOCKS``; empty
            for Llama's (docs/extend.md).

    >>> config = LlamaConfig(vocab_size=32_000, embed_dim=512, num_heads=8)
    >>> config.head_dim, config.mlp_dim
    (64, 1536)
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
    rope_scaling: Scaling = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: Literal["none", "head", "whole", "rotated"] = "none"
    norm_placement: Literal["before", "after"] = "before"
    no_rope_layers: Sequence[int] = ()
    sliding_window: int = 0
    full_attention_layers: Sequence[int] = ()
    rope_scaling_layers: Literal["all", "full_attention"] = "all"
    partial_rotary_factor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 0.0
    logits_scaling: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    normalize_expert_weights: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    shared_expert: bool = False
    dense_layers: Sequence[int] = ()
    attention_chunk: int = 0
    temperature_step: int = 0
    temperature_scale: float = 0.1
    block: str = ""

    def __post_init__(self) -> None:
        derived = ("vocab_size", "num_kv_heads", "head_dim", "mlp_dim", *_EXPERTS)
        for name, max_size in MAX_SIZES.items():
            min_size = 0 if name in derived else 1
            check_size(name, getattr(self, name), max_size, min_size=min_size)
        check_fields(
            self, "", "norm_eps rope_theta", lambda value: 0 < value < 1e300, "positive, and finite"
        )
        switches = "tie_embeddings attention_bias normalize_expert_weights"
        switches += " router_bias shared_expert"
        check_fields(self, "", switches, lambda value: type(value) is bool, "true or false")
        _check_extensions(self)
        if not self.head_dim and self.embed_dim % self.num_heads:
            raise UsageError(
                f"embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}: "
                "change one of them or give head_dim"
            )
        vars(self).update(  # as it is frozen
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.head_dim or self.embed_dim // self.num_heads,
            mlp_dim=self.mlp_dim or self.expert_dim or llama_mlp_dim(self.embed_dim),
        )
        if self.num_experts:
            usual = 1 if self.router == "sigmoid" else 2
            vars(self).update(
                experts_per_token=self.experts_per_token or min(usual, self.num_experts),
                expert_dim=self.expert_dim or self.mlp_dim,
            )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads "
                f"{self.num_kv_heads}: every key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim {self.head_dim} is odd: rotary embedding turns pairs, so it must be even"
            )
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise UsageError(
                f"head_dim {self.head_dim} times partial_rotary_factor "
                f"{self.partial_rotary_factor} makes {self.rotary_dim} channels to rotate: "
                "choose factors that make pairs"
            )
        if isinstance(self.rope_scaling, dict):
            vars(self)["rope_scaling"] = RopeScaling.from_fields(self.rope_scaling)
        scaling = self.rope_scaling
        if not scaling or not self.sliding_window:
            vars(self)["rope_scaling_layers"] = "all"
        if not scaling:
            return
        for name, bound in scaling.must_exceed.items():
            expected = f"over {bound} with rope_scaling of type {scaling.type}"
            check_fields(self, "", name, lambda value, bound=bound: value > bound, expected)

    @property
    def rotary_dim(self) -> int:
        """How many channels of each head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return _layer_kinds(self)

    def num_visible(self, length: int) -> int:
        """Return how many keys a token sees at most in a row of ``length``, in all layers."""
        kinds = self.layer_kinds
        return sum(min(kind.window or kind.chunk or length, length) for kind in kinds)

    @property
    def extensions(self) -> list[str]:
        """The names of the fields that have another value than in a Llama."""
        return [name for name, value in LLAMA_VALUES.items() if getattr(self, name) != value]


@functools.cache
def _layer_kinds(config: LlamaConfig) -> tuple[LayerKind, ...]:
    kinds = []
    for layer in range(config.num_layers):
        has_window = config.sliding_window > 0 and layer not in config.full_attention_layers
        is_scaled = config.rope_scaling_layers == "all" or not has_window
        rope = "scaled" if is_scaled else "plain"
        if layer in config.no_rope_layers:
            rope = "none"
        window = config.sliding_window if has_window else None
        chunk = config.attention_chunk if rope != "none" else 0
        is_dense = not config.num_experts or layer in config.dense_layers
        kinds.append(LayerKind(rope, window, chunk, "dense" if is_dense else "experts"))
    return tuple(kinds)


_NAMES = [field.name for field in dataclasses.fields(LlamaConfig)]
LLAMA_VALUES = {
    field.name: field.default
    for field in dataclasses.fields(LlamaConfig)[_NAMES.index("attention_bias") :]
}
"""The fields that a Llama does not have, with the values that give a Llama."""


def _check_extensions(config: LlamaConfig) -> None:
    """Raise ``UsageError`` for a wrong value of a field that a Llama does not have."""
    for field in dataclasses.fields(LlamaConfig):
        if get_origin(field.type) is not Literal:
            continue
        values = get_args(field.type)
        check_fields(
            config,
            "",
            field.name,
            lambda value, values=values: value in values,
            "one of " + ", ".join(values),
        )
    check_fields(
        config,
        "",
        "block",
        lambda name: name in ("", *BLOCKS),
        "one that a Python file of yours defines: bring it with --import FILE.py",
    )
    factors = "embedding_multiplier residual_multiplier logits_scaling"
    check_fields(config, "", factors, lambda value: 0 < value < 1e300, "positive, and finite")
    check_fields(
        config,
        "",
        "attention_multiplier",
        lambda value: 0 <= value < 1e300,
        "positive, or 0 for 1 / sqrt(head_dim)",
    )
    check_fields(
        config, "", "partial_rotary_factor", lambda value: 0 < value <= 1, "over 0, and at most 1"
    )
    check_fields(
        config,
        "",
        "sliding_window",
        lambda size: type(size) is int and 0 <= size <= MAX_SEQ_LEN,
        "a number of tokens, or 0 for no window",
    )
    if len(config.dense_layers) == config.num_layers:
        raise UsageError("dense_layers has all layers: leave num_experts and dense_layers out")
    is_scale = lambda scale: 0 <= scale < 1e300  # noqa: E731
    check_fields(config, "", "temperature_scale", is_scale, "a number of at least 0, and finite")
    lengths = "attention_chunk temperature_step"
    is_length = lambda size: type(size) is int and 0 <= size <= MAX_SEQ_LEN  # noqa: E731
    check_fields(config, "", lengths, is_length, "a number of tokens, or 0")
    for name in ("no_rope_layers", "full_attention_layers", "dense_layers"):
        vars(config)[name] = tuple(getattr(config, name))
        check_fields(
            config,
            "",
            name,
            lambda layers: set(layers) <= set(range(config.num_layers)),
            f"indices of layers, from 0 to {config.num_layers - 1}",
        )
    for name in (
        *_EXPERTS[1:],
        "normalize_expert_weights",
        "router",
        "router_bias",
        "shared_expert",
        "dense_layers",
    ):
        if getattr(config, name) != LLAMA_VALUES[name] and not config.num_experts:
            raise UsageError(f"{name} is set without num_experts: set both")
    has_more = config.experts_per_token > 1 or config.normalize_expert_weights
    if config.router == "sigmoid" and has_more:
        raise UsageError("router is sigmoid: experts_per_token must be 1, without normalization")
    if config.experts_per_token > config.num_experts:
        raise UsageError(
            f"experts_per_token is {config.experts_per_token}; it must be at most num_experts, "
            f"{config.num_experts}"
        )
    if config.full_attention_layers and not config.sliding_window:
        raise UsageError("full_attention_layers is set without a sliding_window: set both")
