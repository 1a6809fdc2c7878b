"""Attention by kernels that never hold a row of scores in memory: JAX's own for TPUs and GPUs, into ``ATTENTION``.

Each takes ``[batch, heads, seq, head_dim]`` and a ``Mask``, forwards and backwards. Sequences are padded to whole
blocks at their end, where causality hides the padding from every real query, and head sizes to what the kernel takes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jllama.functional import ATTENTION, CACHE_ATTENTION, AttentionImplementation, Mask

_LANES = 128
_PAGE = 256  # keys of a cache
_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


def splash(query: Array, key: Array, value: Array, mask: Mask, *, interpret: bool = False) -> Array:
    """Splash attention (Pallas, TPU): grouped heads, documents kept apart, blocks that causality hides left out.

    With an offset, known only at run time, hidden blocks are computed and masked. ``interpret``: on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (_, heads, seq, head_dim), kv_seq = query.shape, key.shape[2]
    block = min(512, _up(min(seq, kv_seq), _LANES))
    padded_head = head_dim if head_dim == 64 else _up(head_dim, _LANES)
    three = query * head_dim**-0.5, key, value
    query, key, value = (_pad(each, {2: _up(each.shape[2], block), 3: padded_head}) for each in three)
    sides = query.shape[2], key.shape[2]
    kernel: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask(sides)] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(_BLOCKS, block)),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    segments = None
    if mask.query_segments is not None and mask.key_segments is not None:
        pairs = zip((mask.query_segments, mask.key_segments), sides, strict=True)
        segments = splash_attention_kernel.SegmentIds(*(_pad(each, {1: side}, -1) for each, side in pairs))
    offsets = None if mask.offset is None else jnp.broadcast_to(mask.offset, query.shape[:1])

    def one_row(query: Array, key: Array, value: Array, segments: Any, offset: Any) -> Array:
        moved: Any = kernel
        if offset is not None:
            places = jnp.arange(sides[0], dtype=jnp.int32) + offset
            infos = (
                info._replace(data_next=None, mask_next=None, block_mask=None, q_sequence=places)
                for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
            )
            moved = splash_attention_kernel.SplashAttentionKernel(*infos, **kernel.kwargs)
        return moved(query, key, value, segments)

    return jax.vmap(one_row)(query, key, value, segments, offsets)[:, :, :seq, :head_dim].astype(value.dtype)


def paged(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """JAX's paged attention (Pallas, TPU) over a cache, for one new token a row: each is read as far as its own tokens.

    To the kernel every key-value head of a row is a text of its own, whose blocks of keys are pages in their order: a
    view of the cache. It adds up page by page, so that neither other rows nor the cache's length change a bit.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    batch, kv_heads, kv_seq, head_dim = key.shape
    places = jnp.arange(batch * kv_heads * kv_seq // _PAGE, dtype=jnp.int32).reshape(batch * kv_heads, -1)
    pages = (each.reshape(1, places.size, _PAGE, head_dim) for each in (key, value))
    lengths = jnp.broadcast_to(jnp.sum(mask.dense(1, kv_seq), axis=2, dtype=jnp.int32), (batch, kv_heads))
    queries = query.astype(jnp.float32).reshape(len(places), -1, head_dim) * head_dim**-0.5
    mixed = paged_attention(queries, *pages, lengths.ravel(), places, pages_per_compute_block=1)
    return mixed.reshape(query.shape).astype(query.dtype)


def cudnn(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """CuDNN's flash attention (NVIDIA): grouped heads, causal from the start of a row."""
    head_dim = query.shape[3]
    heads_last = (_pad(each, {3: _up(head_dim, 8)}).swapaxes(1, 2) for each in (query, key, value))
    mixed = jax.nn.dot_product_attention(*heads_last, scale=head_dim**-0.5, is_causal=True, implementation="cudnn")
    return mixed.swapaxes(1, 2)[..., :head_dim]


def triton(query: Array, key: Array, value: Array, mask: Mask, *, interpret: bool = False) -> Array:
    """Pallas' flash attention in Triton (NVIDIA): keeps documents apart; keys and values are repeated for all heads."""
    from jax.experimental.pallas.ops.gpu import attention

    (_, _, seq, head_dim), groups = query.shape, query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(each, groups, axis=1) for each in (key, value))
    side = _up(seq, _LANES)
    heads_last = (_pad(each, {2: side}).swapaxes(1, 2) for each in (query, key, value))
    segments = None if mask.query_segments is None else _pad(mask.query_segments, {1: side}, -1)
    mixed: Any = attention.mha(*heads_last, segments, head_dim**-0.5, True, interpret=interpret)
    return mixed.swapaxes(1, 2)[:, :, :seq]


def _paged_refuses(query: Any, key: Any, mask: Mask) -> str:
    served = query.shape[2] == 1 and all(field is None for field in mask[1:])
    fits = key.dtype == jnp.bfloat16 and not (key.shape[3] % _LANES or key.shape[2] % _PAGE)
    return "all but one new token a row, over bfloat16 keys in blocks of 256, of heads of 128" * (not (served and fits))


def _cudnn_refuses(query: Array, key: Array, mask: Mask) -> str:
    """What cuDNN cannot serve without all scores or a bias of their size in memory, or at all."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype}: only bfloat16 and float16"
    if any(field is not None for field in mask):
        return "a mask with segments, an offset or lengths"
    return f"a head size of {query.shape[3]}: at most 128" * (query.shape[3] > 128)


def _triton_refuses(query: Array, key: Array, mask: Mask) -> str:
    served = mask.offset is None and mask.lengths is None and query.shape[2] == key.shape[2]
    return "a mask with an offset or lengths, or other numbers of keys than of queries" * (not served)


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _pad(array: Array, sizes: dict[int, int], value: int = 0) -> Array:
    """The array with zeros behind, up to a size along some axes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, constant_values=value)


ATTENTION["splash"] = AttentionImplementation(
    splash, lambda query, key, mask: "a mask with lengths" * (mask.lengths is not None), "tpu"
)
ATTENTION["cudnn"] = AttentionImplementation(cudnn, _cudnn_refuses, "gpu")
ATTENTION["triton"] = AttentionImplementation(triton, _triton_refuses, "gpu")
ATTENTION["paged"] = AttentionImplementation(paged, _paged_refuses, "tpu", backward=False)
CACHE_ATTENTION["tpu"].insert(0, "paged")
