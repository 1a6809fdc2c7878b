"""The one table of parameters: each one's path, axes and initial values.

Shapes, shardings, initialisation, weight decay, parameter and FLOP counts, checkpoints and the printed summary are all
derived from it. A path is the parameter's place in the nested dictionary that every function here calls ``params``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jllama.config import LlamaConfig

Params = dict[str, Any]

Axis = Literal["layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table.

    Args:
        axes: the logical name of each axis; sizes come from the configuration.
        inputs: the axes that a product with this matrix sums over; none for a norm's scale, which starts at one.
        gain: initial values are normal with standard deviation ``gain / sqrt(product of the input sizes)``.
        residual: the product is added to the residual stream, so ``gain`` is divided by ``sqrt(2 * num_layers)``:
            the sum of all the branches then starts with the variance of one (GPT-2, section 2.3).
    """

    axes: tuple[Axis, ...]
    inputs: tuple[Axis, ...] = ()
    gain: float = 1.0
    residual: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether it takes part in matrix products (and so is decayed), the ``layers`` axis aside."""
        return len([axis for axis in self.axes if axis != "layers"]) > 1


_TABLE: dict[str, Parameter] = {
    # A row of the embedding is read, not summed; the logits it gives when tied must start near zero (loss = ln vocab).
    "embed": Parameter(("vocab", "embed"), ("embed",), gain=0.25),
    "layers/attn_norm": Parameter(("layers", "embed")),
    "layers/wq": Parameter(("layers", "embed", "heads", "head_dim"), ("embed",)),
    "layers/wk": Parameter(("layers", "embed", "kv_heads", "head_dim"), ("embed",)),
    "layers/wv": Parameter(("layers", "embed", "kv_heads", "head_dim"), ("embed",)),
    "layers/wo": Parameter(("layers", "heads", "head_dim", "embed"), ("heads", "head_dim"), residual=True),
    "layers/mlp_norm": Parameter(("layers", "embed")),
    "layers/w_gate": Parameter(("layers", "embed", "mlp"), ("embed",)),
    "layers/w_up": Parameter(("layers", "embed", "mlp"), ("embed",)),
    "layers/w_down": Parameter(("layers", "mlp", "embed"), ("mlp",), residual=True),
    "final_norm": Parameter(("embed",)),
    "lm_head": Parameter(("embed", "vocab"), ("embed",), gain=0.25),
}


def parameter_table(config: LlamaConfig) -> dict[str, Parameter]:
    """The rows that a model of this configuration has, by path; tied embeddings have no ``lm_head``."""
    return {path: row for path, row in _TABLE.items() if not (config.tie_embeddings and path == "lm_head")}


def shape_of(parameter: Parameter, config: LlamaConfig) -> tuple[int, ...]:
    """The sizes of a parameter's axes."""
    sizes: dict[Axis, int] = {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.embed_dim,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp_dim,
    }
    return tuple(sizes[axis] for axis in parameter.axes)


def initial_std(parameter: Parameter, config: LlamaConfig) -> float:
    """The standard deviation of a matrix's initial values."""
    sizes = dict(zip(parameter.axes, shape_of(parameter, config), strict=True))
    fan_in = math.prod(sizes[axis] for axis in parameter.inputs)
    depth = 2 * config.num_layers if parameter.residual else 1
    return parameter.gain / math.sqrt(fan_in * depth)


def count_parameters(config: LlamaConfig) -> int:
    """How many numbers a model of this configuration holds."""
    return sum(math.prod(shape_of(row, config)) for row in parameter_table(config).values())


def training_flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations of one forward and backward pass, per token.

    ``6 * (matrix parameters) + 12 * num_layers * num_heads * head_dim * seq_len``: two for each multiply-add, three
    passes, and the attention products over ``seq_len`` keys. The embedding counts where it is used as the head.
    Source: Chowdhery et al. 2022, appendix B (arXiv:2204.02311).
    """
    table = parameter_table(config)
    matrices = sum(math.prod(shape_of(row, config)) for row in table.values() if row.is_matrix)
    if not config.tie_embeddings:
        matrices -= math.prod(shape_of(table["embed"], config))
    return 6.0 * matrices + 12.0 * config.num_layers * config.num_heads * config.head_dim * seq_len


def map_by_path(function: Any, params: Params, prefix: str = "") -> Params:
    """``function(path, leaf)`` for every leaf of a nested dictionary, in the same shape."""
    return {
        name: map_by_path(function, value, f"{prefix}{name}/")
        if isinstance(value, dict)
        else function(prefix + name, value)
        for name, value in params.items()
    }
