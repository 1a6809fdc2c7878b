"""The one table of parameters: each one's path in ``params``, a nested dictionary, its axes, initial values, and name
and layout in every file format. Shapes, shardings, weight decay, counts and checkpoints are all derived from it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jllama.config import LlamaConfig
from jllama.errors import UsageError

Params = dict[str, Any]

_SIZES = {
    **{"layers": "num_layers", "vocab": "vocab_size", "embed": "embed_dim", "mlp": "mlp_dim"},
    **{"heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim"},
}
"""The field of ``LlamaConfig`` that an axis takes its size from."""

NamedFormat = Literal[
    "meta", "huggingface", "gguf"
]  # in which tensors have names; llama2.c's have an order instead


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table."""

    axes: tuple[str, ...]  # the logical name of each axis; sizes come from the configuration
    inputs: tuple[
        str, ...
    ] = ()  # the axes that a product with this matrix sums over; none for a scale or a bias
    meta: str = (
        ""  # what ``name`` makes the tensor's name in files of that format of; empty if it has none
    )
    huggingface: str = ""
    gguf: str = ""
    llama2c: int = -1  # its index in the order of a llama2.c file; -1 if it has none
    role: Literal["matrix", "scale", "bias"] = (
        "matrix"  # matrices are in products: decayed, and counted in FLOPs
    )
    init: Literal["normal", "ones", "zeros"] = (
        "normal"  # of standard deviation gain / sqrt(product of input sizes)
    )
    gain: float = 1.0
    residual: bool = False  # its product is added to the residual stream: gain / sqrt(2 * num_layers) (GPT-2, sec. 2.3)
    rotary: bool = False  # its head_dim axis is turned: half-split here and in Hugging Face's files, else interleaved
    joined: str = ""  # what decoding calls the matrix of this one and the others of that name, outputs behind outputs
    when: Callable[[LlamaConfig], bool] = lambda config: (
        True
    )  # whether a model of a configuration has it

    def name(self, file_format: NamedFormat, layer: int = 0) -> str:
        """The tensor's name in files of a format, such as ``blk.3.attn_q.weight``."""
        if not (name := getattr(self, file_format)):
            raise UsageError(
                f"the format {file_format} has no tensor for a {self.role} of [{', '.join(self.axes)}]"
            )
        prefix = {"meta": "layers", "huggingface": "model.layers", "gguf": "blk"}[file_format]
        suffix = "bias" if self.role == "bias" else "weight"
        return (
            f"{prefix}.{layer}.{name}.{suffix}" if self.axes[0] == "layers" else f"{name}.{suffix}"
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The axes that are neither ``layers`` nor inputs."""
        return tuple(axis for axis in self.axes if axis not in ("layers", *self.inputs))


def _row(axes: str, names: str, llama2c: int, **others: Any) -> Parameter:
    """A matrix whose inputs are marked with a star, or without any a norm's scale."""
    inputs = tuple(axis[1:] for axis in axes.split() if axis[0] == "*")
    others = others if inputs else {"role": "scale", "init": "ones"}
    meta, huggingface, gguf = names.split()
    return Parameter(
        tuple(axes.replace("*", "").split()), inputs, meta, huggingface, gguf, llama2c, **others
    )


PARAMETERS = {
    # a row is read, not summed; the logits it gives when tied must start near zero (loss = ln vocab): hence the gain
    "embed": _row("vocab *embed", "tok_embeddings model.embed_tokens token_embd", 0, gain=0.25),
    "layers/attn_norm": _row("layers embed", "attention_norm input_layernorm attn_norm", 1),
    "layers/wq": _row(
        "layers *embed heads head_dim",
        "attention.wq self_attn.q_proj attn_q",
        2,
        rotary=True,
        joined="wqkv",
    ),
    "layers/wk": _row(
        "layers *embed kv_heads head_dim",
        "attention.wk self_attn.k_proj attn_k",
        3,
        rotary=True,
        joined="wqkv",
    ),
    "layers/wv": _row(
        "layers *embed kv_heads head_dim", "attention.wv self_attn.v_proj attn_v", 4, joined="wqkv"
    ),
    "layers/wo": _row(
        "layers *heads *head_dim embed",
        "attention.wo self_attn.o_proj attn_output",
        5,
        residual=True,
    ),
    "layers/mlp_norm": _row("layers embed", "ffn_norm post_attention_layernorm ffn_norm", 6),
    "layers/w_gate": _row(
        "layers *embed mlp", "feed_forward.w1 mlp.gate_proj ffn_gate", 7, joined="w_gate_up"
    ),
    "layers/w_up": _row(
        "layers *embed mlp", "feed_forward.w3 mlp.up_proj ffn_up", 9, joined="w_gate_up"
    ),
    "layers/w_down": _row(
        "layers *mlp embed", "feed_forward.w2 mlp.down_proj ffn_down", 8, residual=True
    ),
    "final_norm": _row("embed", "norm model.norm output_norm", 10),
    "lm_head": _row(
        "*embed vocab",
        "output lm_head output",
        11,
        gain=0.25,
        when=lambda it: not it.tie_embeddings,
    ),
}
"""The table. A row that is added here is initialized, trained, sharded, saved and laid out as all others are."""


def parameter_table(config: LlamaConfig) -> dict[str, Parameter]:
    """The rows that a model of this configuration has, by path; tied embeddings have no ``lm_head``."""
    return {path: row for path, row in PARAMETERS.items() if row.when(config)}


def joined_groups(config: LlamaConfig) -> dict[str, list[str]]:
    """The names of the matrices of a layer that decoding multiplies by at once, by the name of the joined one."""
    groups: dict[str, list[str]] = {}
    for path, row in parameter_table(config).items():
        if row.joined:
            groups.setdefault(row.joined, []).append(path.removeprefix("layers/"))
    return groups


def axis_sizes(parameter: Parameter, config: LlamaConfig) -> dict[str, int]:
    """The size of each of a parameter's axes, by its name."""
    return {axis: getattr(config, _SIZES[axis]) for axis in parameter.axes}


def shape_of(parameter: Parameter, config: LlamaConfig) -> tuple[int, ...]:
    """The sizes of a parameter's axes."""
    return tuple(axis_sizes(parameter, config).values())


class TensorSpec(NamedTuple):
    """One tensor of a file: a parameter of the whole model, or one layer's share of a parameter."""

    key: str  # its path among unstacked parameters, such as embed or layers/3/wq
    path: str  # that in the table, whose row is the parameter
    parameter: Parameter
    layer: int  # 0 outside the layers
    shape: tuple[
        int, ...
    ]  # as every file format has it: [outputs, inputs], axes flattened, or [embed] for a norm

    @property
    def joined_key(self) -> str:
        """The path among unstacked parameters of the joined matrix that it is a part of, if any: else its own."""
        joined = self.parameter.joined
        return f"layers/{self.layer}/{joined}" if joined else self.key

    def name(self, file_format: NamedFormat) -> str:
        """What files of a format call it."""
        return self.parameter.name(file_format, self.layer)


def tensor_specs(config: LlamaConfig) -> list[TensorSpec]:
    """Every tensor that a file of such a model holds: embedding first, then layer by layer, then the end."""
    table = parameter_table(config)
    first, *last = (path for path in table if not path.startswith("layers/"))
    layers = [
        (path, layer)
        for layer in range(config.num_layers)
        for path in table
        if path.startswith("layers/")
    ]
    return [
        TensorSpec(
            path.replace("/", f"/{layer}/"),
            path,
            table[path],
            layer,
            matrix_shape(table[path], config),
        )
        for path, layer in [(first, 0), *layers, *((path, 0) for path in last)]
    ]


def matrix_shape(parameter: Parameter, config: LlamaConfig) -> tuple[int, ...]:
    """One layer's share of a parameter as files have it: ``[outputs, inputs]``, or ``[embed]`` for a norm."""
    sizes = axis_sizes(parameter, config)
    return tuple(
        math.prod(sizes[axis] for axis in group)
        for group in (parameter.outputs, parameter.inputs)
        if group
    )


def as_matrix(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """A view of one layer's share of a parameter (or of a part of it) as ``[outputs, inputs]``; others are flat."""
    if not parameter.inputs:
        return array.reshape(-1)
    matrix = joined(parameter, array)
    return matrix.T if _inputs_first(parameter) else matrix


def joined(parameter: Parameter, array: Any) -> Any:
    """Join the axes of one layer's share of a matrix to two, inputs and outputs in their order."""
    first = len(parameter.inputs if _inputs_first(parameter) else parameter.outputs)
    return array.reshape(math.prod(array.shape[:first]), -1)


def _inputs_first(parameter: Parameter) -> bool:
    return parameter.axes[parameter.axes[0] == "layers"] in parameter.inputs


def initial_std(parameter: Parameter, config: LlamaConfig) -> float:
    """The standard deviation of a matrix's initial values."""
    depth = 2 * config.num_layers if parameter.residual else 1
    return parameter.gain / math.sqrt(matrix_shape(parameter, config)[-1] * depth)


def count_parameters(config: LlamaConfig) -> int:
    """How many numbers a model of this configuration holds."""
    return sum(math.prod(shape_of(row, config)) for row in parameter_table(config).values())


def training_flops_per_token(
    config: LlamaConfig, seq_len: int, trained: Mapping[str, float] | None = None
) -> float:
    """Floating-point operations of one forward and backward pass, per token.

    ``6 * (matrix parameters) + 12 * num_layers * num_heads * head_dim * seq_len``: two for each multiply-add, three
    passes, and the attention products over ``seq_len`` keys. The embedding counts where it is used as the head. With
    ``trained``, the share of each parameter that is (None: all of all), matrices that are frozen have two passes, since
    they need no gradients; what adapters add is left out.
    Source: Chowdhery et al. 2022, appendix B (arXiv:2204.02311).
    """
    flops = 12.0 * config.num_layers * config.num_heads * config.head_dim * seq_len
    for path, row in parameter_table(config).items():
        is_used = config.tie_embeddings or path != "embed"
        if row.role == "matrix" and is_used:
            share = 1.0 if trained is None else trained.get(path, 0.0)
            flops += (4 + 2 * share) * math.prod(shape_of(row, config))
    return flops


def map_by_path(function: Any, params: Any, prefix: str = "") -> Any:
    """``function(path, leaf)`` for every leaf of a nested dictionary, in the same shape."""
    if not isinstance(params, dict):
        return function(prefix[:-1], params)
    return {
        name: map_by_path(function, value, f"{prefix}{name}/") for name, value in params.items()
    }
