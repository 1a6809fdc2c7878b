"""The table of parameters: their axes, initial values, and names and places in all file formats.

Shapes, shardings, weight decay, counts and checkpoints are derived from it. ``params`` is a nested
dictionary: ``PARAMETERS["layers/wq"]`` describes ``params["layers"]["wq"]``.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from jllama.core import UsageError
from jllama.core.config import LlamaConfig

Params = dict[str, Any]

_SIZES = {
    "layers": "num_layers",
    "vocab": "vocab_size",
    "embed": "embed_dim",
    "mlp": "mlp_dim",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "scores": "num_experts",
    "expert_mlp": "expert_dim",
}
"""The field of ``LlamaConfig`` that holds the size of each axis."""

NamedFormat = Literal["meta", "huggingface", "gguf"]
"""The formats that name their tensors; llama2.c orders them instead."""
_LAYER_PREFIXES = {"meta": "layers", "huggingface": "model.layers", "gguf": "blk"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table.

    Args:
        axes: the name of each axis; their sizes come from the configuration.
        inputs: the axes that a product with this matrix sums over; empty for a scale or a bias.
        meta: the name in Meta's files, without ``layers.0.`` and ``.weight``; empty if they have
            none.
        huggingface: the same for Hugging Face's files; ``{}`` stands for the index of an expert.
        gguf: the same for GGUF files.
        llama2c: index in the order of a llama2.c file; -1 if it has none.
        role: a matrix takes part in products, so it is decayed and counted in FLOPs.
        init: initial values; ``normal`` has the standard deviation ``initial_std``.
        gain: factor of that standard deviation.
        residual: the product is added to the residual stream, so the standard deviation is divided
            by ``sqrt(2 * num_layers)`` (GPT-2, section 2.3).
        rotary: RoPE rotates the head_dim axis. The two channels of a pair are half of head_dim
            apart here and in Hugging Face's files, and adjacent in the other formats.
        joined: the name of the matrix that decoding makes of all matrices with the same ``joined``,
            by concatenating their outputs.
        rounds: whether decoding in int8 rounds it, if it is a matrix.
        when: whether a model with a configuration has this parameter.
        feed_forward: the kind of layers that have it, see ``LayerKind``; empty for all layers.
    """

    axes: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    meta: str = ""
    huggingface: str = ""
    gguf: str = ""
    llama2c: int = -1
    role: Literal["matrix", "scale", "bias"] = "matrix"
    init: Literal["normal", "ones", "zeros"] = "normal"
    gain: float = 1.0
    residual: bool = False
    rotary: bool = False
    joined: str = ""
    rounds: bool = True
    when: Callable[[LlamaConfig], bool] = lambda config: True
    feed_forward: Literal["", "dense", "experts"] = ""

    def name(self, file_format: NamedFormat, layer: int = 0) -> str:
        """Return the tensor's name in files of a format, such as ``blk.3.attn_q.weight``.

        Raises:
            UsageError: files of this format have no such tensor.
        """
        name = getattr(self, file_format)
        if not name:
            row = f"a {self.role} of [{', '.join(self.axes)}]"
            raise UsageError(f"the format {file_format} has no tensor for {row}")
        return self._full_name(name, file_format, layer)

    def fused_name(self, file_format: NamedFormat, layer: int = 0) -> str:
        """Return the name of the tensor, with ``joined`` matrices, in files that have them so."""
        name = FUSED[file_format].get(self.joined)
        return self._full_name(name, file_format, layer) if name else self.name(file_format, layer)

    def _full_name(self, name: str, file_format: NamedFormat, layer: int) -> str:
        suffix = "bias" if self.role == "bias" else "weight"
        if self.axes[0] != "layers":
            return f"{name}.{suffix}"
        return f"{_LAYER_PREFIXES[file_format]}.{layer}.{name}.{suffix}"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The axes that are neither ``layers`` nor inputs."""
        return tuple(axis for axis in self.axes if axis not in ("layers", *self.inputs))


def _row(axes: str, **columns: Any) -> Parameter:
    """Return a row; ``axes`` are separated by spaces, a star marks the inputs of a matrix."""
    inputs = tuple(axis[1:] for axis in axes.split() if axis.startswith("*"))
    return Parameter(tuple(axes.replace("*", "").split()), inputs, **columns)


def _norm(axes: str, **columns: Any) -> Parameter:
    """Return the row of a norm's scale."""
    return _row(axes, role="scale", init="ones", **columns)


def _bias(heads: str, **columns: Any) -> Parameter:
    """Return the row of a bias of queries, keys or values."""
    return _row(
        f"layers {heads} head_dim",
        role="bias",
        init="zeros",
        when=lambda config: config.attention_bias,
        **columns,
    )


def _qk_norm(kind: str, axes: str, huggingface: str, gguf: str) -> Parameter:
    """Return the row of a norm of queries or keys."""
    return _norm(
        f"layers {axes}",
        huggingface=huggingface,
        gguf=gguf,
        when=lambda config: config.qk_norm == kind,
    )


EXPERT_MATRICES = ("experts_gate", "experts_up", "experts_down")


def _experts(axes: str, huggingface: str, gguf: str, **columns: Any) -> Parameter:
    """Return the row of the router, or of a matrix that each expert has."""
    return _row(axes, huggingface=huggingface, gguf=gguf, feed_forward="experts", **columns)


def _shared_expert(axes: str, huggingface: str, gguf: str, **columns: Any) -> Parameter:
    """Return the row of a matrix of the expert that all tokens have."""
    return _experts(axes, huggingface, gguf, when=lambda config: config.shared_expert, **columns)


PARAMETERS = {
    # If the embedding is tied, it makes the logits, which must start near zero (loss = ln
    # vocab_size): hence the gain.
    "embed": _row(
        "vocab *embed",
        meta="tok_embeddings",
        huggingface="model.embed_tokens",
        gguf="token_embd",
        llama2c=0,
        gain=0.25,
    ),
    "layers/attn_norm": _norm(
        "layers embed",
        meta="attention_norm",
        huggingface="input_layernorm",
        gguf="attn_norm",
        llama2c=1,
        when=lambda config: config.norm_placement == "before",
    ),
    "layers/wq": _row(
        "layers *embed heads head_dim",
        meta="attention.wq",
        huggingface="self_attn.q_proj",
        gguf="attn_q",
        llama2c=2,
        rotary=True,
        joined="wqkv",
    ),
    "layers/wk": _row(
        "layers *embed kv_heads head_dim",
        meta="attention.wk",
        huggingface="self_attn.k_proj",
        gguf="attn_k",
        llama2c=3,
        rotary=True,
        joined="wqkv",
    ),
    "layers/wv": _row(
        "layers *embed kv_heads head_dim",
        meta="attention.wv",
        huggingface="self_attn.v_proj",
        gguf="attn_v",
        llama2c=4,
        joined="wqkv",
    ),
    "layers/bq": _bias("heads", huggingface="self_attn.q_proj", gguf="attn_q", rotary=True),
    "layers/bk": _bias("kv_heads", huggingface="self_attn.k_proj", gguf="attn_k", rotary=True),
    "layers/bv": _bias("kv_heads", huggingface="self_attn.v_proj", gguf="attn_v"),
    "layers/q_norm": _qk_norm("head", "head_dim", "self_attn.q_norm", "attn_q_norm"),
    "layers/k_norm": _qk_norm("head", "head_dim", "self_attn.k_norm", "attn_k_norm"),
    "layers/q_norm_whole": _qk_norm("whole", "heads head_dim", "self_attn.q_norm", "attn_q_norm"),
    "layers/k_norm_whole": _qk_norm(
        "whole", "kv_heads head_dim", "self_attn.k_norm", "attn_k_norm"
    ),
    "layers/wo": _row(
        "layers *heads *head_dim embed",
        meta="attention.wo",
        huggingface="self_attn.o_proj",
        gguf="attn_output",
        llama2c=5,
        residual=True,
    ),
    "layers/mlp_norm": _norm(
        "layers embed",
        meta="ffn_norm",
        huggingface="post_attention_layernorm",
        gguf="ffn_norm",
        llama2c=6,
        when=lambda config: config.norm_placement == "before",
    ),
    "layers/w_gate": _row(
        "layers *embed mlp",
        meta="feed_forward.w1",
        huggingface="mlp.gate_proj",
        gguf="ffn_gate",
        llama2c=7,
        joined="w_gate_up",
        feed_forward="dense",
    ),
    "layers/w_up": _row(
        "layers *embed mlp",
        meta="feed_forward.w3",
        huggingface="mlp.up_proj",
        gguf="ffn_up",
        llama2c=9,
        joined="w_gate_up",
        feed_forward="dense",
    ),
    "layers/w_down": _row(
        "layers *mlp embed",
        meta="feed_forward.w2",
        huggingface="mlp.down_proj",
        gguf="ffn_down",
        llama2c=8,
        residual=True,
        feed_forward="dense",
    ),
    # Its outputs are no axis "experts", which devices would split: each needs all scores.
    "layers/router": _experts("layers *embed scores", "mlp.gate", "ffn_gate_inp", rounds=False),
    "layers/router_bias": _row(
        "layers scores",
        role="bias",
        init="zeros",
        when=lambda config: config.router_bias,
        feed_forward="experts",
    ),
    "layers/experts_gate": _experts(
        "layers experts expert_mlp *embed", "mlp.experts.{}.gate_proj", "ffn_gate_exps"
    ),
    "layers/experts_up": _experts(
        "layers experts expert_mlp *embed", "mlp.experts.{}.up_proj", "ffn_up_exps"
    ),
    "layers/experts_down": _experts(
        "layers experts embed *expert_mlp",
        "mlp.experts.{}.down_proj",
        "ffn_down_exps",
        residual=True,
    ),
    "layers/shared_gate": _shared_expert(
        "layers *embed expert_mlp",
        "mlp.shared_expert.gate_proj",
        "ffn_gate_shexp",
        joined="shared_gate_up",
    ),
    "layers/shared_up": _shared_expert(
        "layers *embed expert_mlp",
        "mlp.shared_expert.up_proj",
        "ffn_up_shexp",
        joined="shared_gate_up",
    ),
    "layers/shared_down": _shared_expert(
        "layers *expert_mlp embed", "mlp.shared_expert.down_proj", "ffn_down_shexp", residual=True
    ),
    "layers/attn_out_norm": _norm(
        "layers embed",
        huggingface="post_attention_layernorm",
        gguf="post_attention_norm",
        when=lambda config: config.norm_placement == "after",
    ),
    "layers/mlp_out_norm": _norm(
        "layers embed",
        huggingface="post_feedforward_layernorm",
        gguf="post_ffw_norm",
        when=lambda config: config.norm_placement == "after",
    ),
    "final_norm": _norm(
        "embed",
        meta="norm",
        huggingface="model.norm",
        gguf="output_norm",
        llama2c=10,
    ),
    "lm_head": _row(
        "*embed vocab",
        meta="output",
        huggingface="lm_head",
        gguf="output",
        llama2c=11,
        gain=0.25,
        when=lambda config: not config.tie_embeddings,
    ),
}
"""The table, by path. A new row is initialized, trained, sharded, saved and decoded like all."""

FUSED = {
    "huggingface": {"wqkv": "self_attn.qkv_proj", "w_gate_up": "mlp.gate_up_proj"},
    "gguf": {"wqkv": "attn_qkv", "w_gate_up": "ffn_up"},
}
"""The names, in a format, of matrices that some models' files join, by ``Parameter.joined``."""


def parameter_table(config: LlamaConfig) -> dict[str, Parameter]:
    """Return the rows that a model has, by path; with tied embeddings there is no ``lm_head``."""
    rows = {path: row for path, row in PARAMETERS.items() if row.when(config)}
    return {path: row for path, row in rows.items() if layers_of(row, config)}


def layers_of(parameter: Parameter, config: LlamaConfig) -> list[int]:
    """Return the layers that have a parameter, in the order of its stack."""
    kinds = config.layer_kinds
    kind = parameter.feed_forward
    return [layer for layer in range(len(kinds)) if kind in ("", kinds[layer].feed_forward)]


def layer_places(config: LlamaConfig) -> list[dict[str, int]]:
    """Return, for each layer, where its weights are in the stacks, by their names."""
    places: list[dict[str, int]] = [{} for _ in config.layer_kinds]
    for path, row in parameter_table(config).items():
        if path.startswith("layers/"):
            for place, layer in enumerate(layers_of(row, config)):
                places[layer][path.removeprefix("layers/")] = place
    return places


def joined_groups(config: LlamaConfig) -> dict[str, list[str]]:
    """Return the names of a layer's matrices that decoding joins, by the joined matrix's name."""
    groups: dict[str, list[str]] = {}
    for path, row in parameter_table(config).items():
        if row.joined:
            groups.setdefault(row.joined, []).append(path.removeprefix("layers/"))
    return groups


def axis_sizes(parameter: Parameter, config: LlamaConfig) -> dict[str, int]:
    """Return the sizes of a parameter's axes, by axis."""
    sizes = {axis: getattr(config, _SIZES[axis]) for axis in parameter.axes}
    if "layers" in sizes:
        sizes["layers"] = len(layers_of(parameter, config))
    return sizes


def shape_of(parameter: Parameter, config: LlamaConfig) -> tuple[int, ...]:
    """Return the sizes of a parameter's axes.

    Raises:
        UsageError: the configuration leaves the size of the vocabulary to the tokenizer.
    """
    sizes = axis_sizes(parameter, config)
    if not sizes.get("vocab", 1):
        raise UsageError("vocab_size is 0; give the number of the tokenizer's tokens")
    return tuple(sizes.values())


def matrix_shape(parameter: Parameter, config: LlamaConfig) -> tuple[int, ...]:
    """Return the shape of one layer in a file: ``[outputs, inputs]``, or ``[embed]`` for a norm."""
    sizes = axis_sizes(parameter, config)
    groups = (parameter.outputs, parameter.inputs)
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups if group)


def flatten_matrix(parameter: Parameter, array: Any) -> Any:
    """Flatten one layer of a matrix to two axes: its inputs and its outputs, in their order."""
    first = len(parameter.inputs if inputs_first(parameter) else parameter.outputs)
    return array.reshape(math.prod(array.shape[:first]), -1)


def inputs_first(parameter: Parameter) -> bool:
    """Return whether the axes of a matrix begin with its inputs."""
    first = next(axis for axis in parameter.axes if axis != "layers")
    return first in parameter.inputs


def initial_std(parameter: Parameter, config: LlamaConfig) -> float:
    """Return the standard deviation of a matrix's initial values.

    ``gain / sqrt(number of inputs)``, divided by ``sqrt(2 * num_layers)`` for a ``residual``
    matrix. An embedding that does not make the logits has 1 after its multiplier, as its rows are
    not summed (Takase et al. 2023, arXiv:2312.16903).
    """
    if parameter is PARAMETERS["embed"] and not config.tie_embeddings:
        return 1 / config.embedding_multiplier
    depth = 2 * config.num_layers if parameter.residual else 1
    return parameter.gain / math.sqrt(matrix_shape(parameter, config)[-1] * depth)


def count_parameters(config: LlamaConfig, *, active: bool = False) -> int:
    """Return the number of parameters, or of those that a token meets: not all experts."""
    return sum(count_row(row, config, active) for row in parameter_table(config).values())


def count_row(row: Parameter, config: LlamaConfig, active: bool = False) -> int:
    """Return the number of values of a parameter, or of those that a token meets."""
    size = math.prod(shape_of(row, config))
    if active and "experts" in row.axes:
        size = size // config.num_experts * config.experts_per_token
    return size


def map_by_path(function: Any, params: Any, prefix: str = "") -> Any:
    """Return a nested dictionary of ``function(path, leaf)`` for every leaf of another one."""
    if not isinstance(params, dict):
        return function(prefix[:-1], params)
    return {
        name: map_by_path(function, value, f"{prefix}{name}/") for name, value in params.items()
    }
