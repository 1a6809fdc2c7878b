"""Pure functions on arrays, each with its formula and source; nothing here imports the rest of jllama."""

from typing import Any

from jllama.functional.attention import (
    cache_mask,
    causal_attention,
    causal_mask,
    grouped_query_attention,
    masked_softmax,
    padding_mask,
    segment_mask,
)
from jllama.functional.loss import cross_entropy
from jllama.functional.mlp import swiglu
from jllama.functional.norm import layer_norm, rms_norm
from jllama.functional.packed import PackedMatrix, pack, pack_int8
from jllama.functional.rope import (
    apply_rope,
    apply_rope_interleaved,
    dynamic_theta,
    half_split_from_interleaved,
    inverse_frequencies,
    rope_tables,
    scale_linear,
    scale_llama3,
    scale_yarn,
)
from jllama.functional.sampling import (
    ban,
    min_p_mask,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
    sample,
    top_k_mask,
    top_p_mask,
    truncated_logits,
)

__all__ = [
    "PackedMatrix",
    "apply_rope",
    "apply_rope_interleaved",
    "ban",
    "cache_mask",
    "causal_attention",
    "causal_mask",
    "cross_entropy",
    "dynamic_theta",
    "grouped_query_attention",
    "half_split_from_interleaved",
    "inverse_frequencies",
    "layer_norm",
    "masked_softmax",
    "min_p_mask",
    "pack",
    "pack_int8",
    "padding_mask",
    "penalize_frequency",
    "penalize_presence",
    "penalize_repetition",
    "rms_norm",
    "rope_tables",
    "sample",
    "scale_linear",
    "scale_llama3",
    "scale_yarn",
    "segment_mask",
    "swiglu",
    "top_k_mask",
    "top_p_mask",
    "truncated_logits",
]

_MEANT = {
    "attention": "take grouped_query_attention or causal_attention",
    "loss": "take cross_entropy",
    "mlp": "take swiglu",
    "norm": "take rms_norm",
    "rope": "take apply_rope",
    "sampling": "take sample",
}

for _module in _MEANT:  # can be imported all the same, and does not stand where a function is looked for
    del globals()[_module]


def __getattr__(name: str) -> Any:
    """Say which function is meant."""
    raise AttributeError(f"there is no jllama.functional.{name}: {_MEANT.get(name, 'dir() lists what there is')}")
