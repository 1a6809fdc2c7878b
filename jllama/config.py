"""The architecture of one Llama, how its work is split over devices, what a text must match: as data."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jllama.errors import MAX_SEQ_LEN, UsageError, check_fields, check_size
from jllama.rope_scaling import RopeScaling

Scaling = RopeScaling | None
if not TYPE_CHECKING:
    Scaling = dict[str, Any] | Scaling  # as a configuration gives it, by its options

MAX_SIZES = {
    **{"vocab_size": 1 << 24, "num_layers": 10_000, "embed_dim": 1 << 20, "mlp_dim": 1 << 22},
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), 1 << 14),
    "max_seq_len": MAX_SEQ_LEN,
}  # of a ``LlamaConfig``: at least 25 times any released Llama's, so what is larger is a slip or a damaged file


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many ways to split the work; the product is the number of devices.

    Args:
        data: copies of the model, each with its share of the batch.
        fsdp: ways to split the parameters (and the batch), gathered where they are used.
        tensor: ways to split heads, feed-forward width and vocabulary.
        sequence: ways to split the tokens of each row, for long contexts.
        rules: mesh axes that split logical axes, in place of ``jllama.sharding.RULES``: ``{"mlp": ["tensor"]}``.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    rules: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.data == 0:
            object.__setattr__(self, "data", -1)  # as runs of 0.1 have it
        sizes = {name: size for name, size in vars(self).items() if name != "rules"}
        if list(sizes.values()).count(-1) > 1 or any(
            size < 1 and size != -1 for size in sizes.values()
        ):
            raise UsageError(
                f"the mesh {sizes} needs positive sizes; one of them may be -1: all that is left"
            )


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The processes that train one model together: all get the same options, each its own ``process_id``.

    Args:
        coordinator: ``HOST:PORT`` where process 0 listens; ``auto`` asks Cloud TPU, SLURM, Open MPI or Kubernetes.
        num_processes: how many there are.
        process_id: which of them this is, from 0.
        timeout_s: how long to wait until all have come.
    """

    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0
    timeout_s: int = 300

    def __post_init__(self) -> None:
        check, (host, _, port) = (
            functools.partial(check_fields, self, "distributed."),
            self.coordinator.rpartition(":"),
        )
        by_hand = bool(host) and port.isdigit()
        check(
            "coordinator",
            lambda text: by_hand or text in ("", "auto"),
            "HOST:PORT, auto or left out",
        )
        said = "at least 1" if by_hand else "left out without a coordinator as HOST:PORT"
        check("num_processes", lambda number: number >= 1 if by_hand else number == 1, said)
        check(
            "process_id",
            lambda index: 0 <= index < self.num_processes,
            f"from 0 to {self.num_processes - 1}",
        )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: every product ``x W`` with an adapted matrix becomes ``x W + scale (x A) B``, and only ``A``
    and ``B`` are trained (Hu et al. 2021, arXiv:2106.09685).

    Args:
        rank: columns of A and rows of B; 0 trains all parameters instead.
        alpha: scale = alpha / rank.
        targets: the matrices of a layer that are adapted, by their names in the table of parameters.
        rank_stabilized: scale = alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).
        dora: each output of ``W + scale A B`` is brought to a trained length (DoRA, arXiv:2402.09353).
        base: how the frozen weights are held: as they are computed with (``auto``), in bfloat16, or in 8 or 4 bits
            (``nf4`` needs the package qwix).
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    rank_stabilized: bool = False
    dora: bool = False
    base: Literal["auto", "bfloat16", "int8", "nf4"] = "auto"

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
        object.__setattr__(self, "targets", tuple(self.targets))  # YAML and JSON have lists

    scale = property(
        lambda self: self.alpha / self.rank ** (0.5 if self.rank_stabilized else 1),
        doc="Multiplies A B.",
    )


def llama_mlp_dim(
    embed_dim: int, *, multiple_of: int = 256, multiplier: float | None = None
) -> int:
    """Llama's rule for the width of the feed-forward block: two thirds of ``4 * embed_dim`` (SwiGLU has three matrices
    for a plain block's two), times ``multiplier`` if given, rounded up to a multiple of ``multiple_of``.

    Source: Meta's reference ``FeedForward`` for Llama 1 to 3.
    """
    width = int(2 * (4 * embed_dim) / 3)
    return multiple_of * -(
        -(width if multiplier is None else int(multiplier * width)) // multiple_of
    )


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
        rope_scaling: stretches the rotary frequencies for long contexts: a ``RopeScaling``, or a mapping of ``type``
            (linear, dynamic, llama3, yarn), ``factor`` and that type's other fields; null for none.
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
    rope_scaling: Scaling = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        derived = ("vocab_size", "num_kv_heads", "head_dim", "mlp_dim")
        for name, most in MAX_SIZES.items():
            check_size(name, getattr(self, name), most, least=0 if name in derived else 1)
        check_fields(
            self, "", "norm_eps rope_theta", lambda value: 0 < value < 1e300, "positive, and finite"
        )
        check_fields(self, "", "tie_embeddings", lambda value: type(value) is bool, "true or false")
        if not self.head_dim and self.embed_dim % self.num_heads:
            given = f"embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}"
            raise UsageError(f"{given}: change one of them or give head_dim")
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.embed_dim // self.num_heads)
        object.__setattr__(self, "mlp_dim", self.mlp_dim or llama_mlp_dim(self.embed_dim))
        if self.num_heads % self.num_kv_heads:
            given = (
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}"
            )
            raise UsageError(f"{given}: every key-value head serves the same number of query heads")
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim {self.head_dim} is odd: rotary embedding turns pairs, so it must be even"
            )
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling.from_fields(self.rope_scaling))
        if scaling := self.rope_scaling:
            for name, least in scaling.least.items():
                said = f"over {least} with rope_scaling of type {scaling.type}"
                check_fields(self, "", name, lambda value, least=least: value > least, said)


GrammarKind = Literal["json_schema", "regex", "lark"]


class Grammar(NamedTuple):
    """What a text must match, from its first character to its end."""

    kind: GrammarKind
    text: str  # the schema as JSON, the regular expression, or the grammar in llguidance's dialect of Lark
