"""Pure functions on arrays, each with its formula and source.

Nothing here imports the rest of jllama.

>>> import jax.numpy as jnp
>>> print(rms_norm(jnp.array([[0.0, 4.0]]), scale=jnp.ones(2), eps=8.0))
[[0. 1.]]
"""

from jllama.functional.attention import (
    ATTENDED as ATTENDED,
    Mask as Mask,
    UnsupportedAttention as UnsupportedAttention,
    masked_softmax as masked_softmax,
    attention_weights as attention_weights,
    grouped_query_attention as grouped_query_attention,
)
from jllama.functional.block import (
    apply_rope as apply_rope,
    silu_gate as silu_gate,
    rms_norm as rms_norm,
    rope_tables as rope_tables,
    swiglu as swiglu,
)
from jllama.functional.embedding import embedding as embedding
from jllama.functional.implementations import (
    ATTENTION as ATTENTION,
    CACHE_ATTENTION as CACHE_ATTENTION,
    AttentionImplementation as AttentionImplementation,
    attention as attention,
    choose_attention as choose_attention,
    choose_cache_attention as choose_cache_attention,
    is_installed as is_installed,
)
from jllama.functional.linear import (
    DecodeMatrix as DecodeMatrix,
    decode_matrix as decode_matrix,
    project as project,
)
from jllama.functional.loss import (
    linear_cross_entropy as linear_cross_entropy,
    score_tokens as score_tokens,
    token_log_probs as token_log_probs,
)
from jllama.functional.sampling import (
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
