"""Pure functions on arrays, each with its formula and source.

The formulas of ``jllama.core.ops``, with checks of the shapes of their arguments, and faster forms
behind the same signatures (``jllama.kernels``).

>>> import jax.numpy as jnp
>>> print(rms_norm(jnp.array([[0.0, 4.0]]), scale=jnp.ones(2), eps=8.0))
[[0. 1.]]
"""

from jllama.core import ops
from jllama.core.ops import (
    Mask as Mask,
    UnsupportedAttention as UnsupportedAttention,
    silu_gate as silu_gate,
)
from jllama.kernels.attention import ATTENDED as ATTENDED, attention_weights as _attention_weights
from jllama.kernels.embedding import embedding as embedding
from jllama.kernels.implementations import (
    ATTENTION as ATTENTION,
    CACHE_ATTENTION as CACHE_ATTENTION,
    AttentionImplementation as AttentionImplementation,
    attention as attention,
    choose_attention as choose_attention,
    choose_cache_attention as choose_cache_attention,
    is_installed as is_installed,
)
from jllama.kernels.linear import (
    DecodeMatrix as DecodeMatrix,
    choose_kernel as choose_kernel,
    decode_matrix as decode_matrix,
    project as project,
)
from jllama.kernels.loss import (
    linear_cross_entropy as linear_cross_entropy,
    score_tokens as score_tokens,
    token_log_probs as token_log_probs,
)
from jllama.kernels.sampling import (
    PENALTIES as PENALTIES,
    TRUNCATIONS as TRUNCATIONS,
    ban as ban,
    ban_unset as ban_unset,
    drawn_log_probs as drawn_log_probs,
    min_p_mask as min_p_mask,
    penalize_frequency as penalize_frequency,
    penalize_presence as penalize_presence,
    penalize_repetition as penalize_repetition,
    sample as sample,
    top_k_mask as top_k_mask,
    top_p_mask as top_p_mask,
    truncated_logits as truncated_logits,
)
from jllama.kernels.shapes import checked

apply_rope = checked(ops.apply_rope)
attention_weights = checked(_attention_weights)
grouped_query_attention = checked(ops.grouped_query_attention)
masked_softmax = checked(ops.masked_softmax)
rms_norm = checked(ops.rms_norm)
rope_tables = checked(ops.rope_tables)
swiglu = checked(ops.swiglu)
