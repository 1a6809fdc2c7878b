"""Kernels for attention that never hold a row of scores in memory: JAX's own and tokamax's.

``jllama.kernels.implementations`` lists them. Each takes ``[batch, heads, seq, head_dim]`` and a
``Mask``, forward and backward. Sequences are padded to whole blocks at their end, where causality
hides the padding from every real query, and head sizes to those that the kernel takes.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from jllama.core.ops import Mask, UnsupportedAttention
from jllama.kernels.attention import ATTENDED

_LANES = 128
_PAGE = 256  # keys of a cache
_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


def splash(query: Array, key: Array, value: Array, mask: Mask, *, interpret: bool = False) -> Array:
    """Compute attention with splash attention (Pallas, TPU).

    It groups heads, keeps documents apart, and leaves out blocks that causality hides. With an
    offset, which is known at run time only, hidden blocks are computed and masked. ``interpret``
    runs on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    # 1) Pad all to whole blocks.
    batch, heads, seq, head_dim = query.shape
    block = min(512, _round_up(min(seq, key.shape[2]), _LANES))
    padded_head = head_dim if head_dim == 64 else _round_up(head_dim, _LANES)
    scaled = query * head_dim**-0.5
    query, key, value = (
        _pad(array, {2: _round_up(array.shape[2], block), 3: padded_head})
        for array in (scaled, key, value)
    )
    sizes = (query.shape[2], key.shape[2])
    segments = None
    if mask.query_segments is not None and mask.key_segments is not None:
        segments = library.SegmentIds(
            _pad(mask.query_segments, {1: sizes[0]}, -1), _pad(mask.key_segments, {1: sizes[1]}, -1)
        )
    offsets = None if mask.offset is None else jnp.broadcast_to(mask.offset, (batch,))

    # 2) Make a kernel for one row, causal from its start.
    causal: Any = library.CausalMask(sizes)
    if mask.window is not None:
        causal = library.LocalMask(sizes, window_size=(mask.window - 1, 0), offset=0)
    kernel: Any = library.make_splash_mha(
        library.MultiHeadMask([causal] * heads),
        block_sizes=library.BlockSizes(**dict.fromkeys(_BLOCKS, block)),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def attend_row(query: Array, key: Array, value: Array, segments: Any, offset: Any) -> Array:
        if offset is None:
            return kernel(query, key, value, segments)
        # The mask is computed from the indices of the queries instead of read from its blocks.
        indices = jnp.arange(sizes[0], dtype=jnp.int32) + offset
        computed = (
            info._replace(data_next=None, mask_next=None, block_mask=None, q_sequence=indices)
            for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
        )
        return type(kernel)(*computed, **kernel.kwargs)(query, key, value, segments)

    # 3) Run it for each row.
    out = jax.vmap(attend_row)(query, key, value, segments, offsets)
    return out[:, :, :seq, :head_dim].astype(value.dtype)


def paged(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute attention of one new token a row over a cache, with JAX's paged attention (TPU).

    Each row is read as far as its own tokens. To the kernel, each key-value head of a row is a text
    of its own, whose blocks of keys are pages in order: a view of the cache. The kernel adds page
    by page, so that neither other rows nor the cache's length change a bit.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    batch, kv_heads, kv_seq, head_dim = key.shape
    num_texts = batch * kv_heads
    indices = jnp.arange(num_texts * kv_seq // _PAGE, dtype=jnp.int32).reshape(num_texts, -1)
    pages = (array.reshape(1, indices.size, _PAGE, head_dim) for array in (key, value))
    lengths = jnp.sum(mask.dense(1, kv_seq), axis=2, dtype=jnp.int32)
    lengths = jnp.broadcast_to(lengths, (batch, kv_heads)).ravel()
    queries = query.astype(jnp.float32).reshape(num_texts, -1, head_dim) * head_dim**-0.5
    out = paged_attention(queries, *pages, lengths, indices, pages_per_compute_block=1)
    return out.reshape(query.shape).astype(query.dtype)


def cudnn(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute attention with cuDNN's flash attention (NVIDIA), causal from the start of a row."""
    head_dim = query.shape[3]
    padded = (_pad(array, {3: _round_up(head_dim, 8)}) for array in (query, key, value))
    out = jax.nn.dot_product_attention(
        *_swap_heads(*padded),
        scale=head_dim**-0.5,
        is_causal=True,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )
    return out.swapaxes(1, 2)[..., :head_dim]


def triton(query: Array, key: Array, value: Array, mask: Mask, *, interpret: bool = False) -> Array:
    """Compute attention with Pallas' flash attention in Triton (NVIDIA).

    It keeps documents apart; keys and values are repeated for all heads.
    """
    from jax.experimental.pallas.ops.gpu import attention

    _, heads, seq, head_dim = query.shape
    key, value = (jnp.repeat(array, heads // key.shape[1], axis=1) for array in (key, value))
    size = _round_up(seq, _LANES)
    padded = (_pad(array, {2: size}) for array in (query, key, value))
    segments = None if mask.query_segments is None else _pad(mask.query_segments, {1: size}, -1)
    out: Any = attention.mha(
        *_swap_heads(*padded), segments, head_dim**-0.5, True, interpret=interpret
    )
    return out.swapaxes(1, 2)[:, :, :seq]


def tokamax(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Compute attention with tokamax's flash attention (NVIDIA).

    It groups heads, and leaves out blocks before a document's or a window's first key. It is
    written for Hopper and Blackwell in Mosaic, for other GPUs in Triton. Its results and the sums
    of its softmax are named ``ATTENDED``, so that the backward pass need not compute them again.
    """
    batch, _, seq, _ = query.shape
    first_keys = jnp.zeros((batch, seq), jnp.int32)
    if mask.query_segments is not None:
        first_keys = first_of_segments(mask.query_segments)
    if mask.window is not None:
        first_keys = jnp.maximum(first_keys, jnp.arange(seq, dtype=jnp.int32) - mask.window + 1)
    return _tokamax(*_swap_heads(query, key, value), first_keys).swapaxes(1, 2)


def first_of_segments(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Return the index at which each token's segment begins.

    Examples:
        >>> print(first_of_segments(jnp.array([[1, 1, 2, 2, 0, 0]])))
        [[0 0 2 2 4 4]]
    """
    indices = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_first = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    return jax.lax.cummax(jnp.where(is_first, indices, 0), axis=1)


@jax.custom_vjp
def _tokamax(query: Array, key: Array, value: Array, first_keys: Array) -> Array:
    operation, mask = _tokamax_operation(first_keys)
    return operation(query, key, value, mask=mask)


def _tokamax_forward(
    query: Array, key: Array, value: Array, first_keys: Array
) -> tuple[Array, Any]:
    operation, mask = _tokamax_operation(first_keys)
    query, key, value = (checkpoint_name(array, ATTENDED) for array in (query, key, value))
    results = operation(query, key, value, mask=mask, return_residuals=True)
    out, softmax = checkpoint_name(results, ATTENDED)
    return out, (query, key, value, first_keys, out, softmax)


def _tokamax_backward(residuals: Any, d_out: Array) -> tuple[Array, Array, Array, None]:
    *arrays, first_keys, out, softmax = residuals
    operation, mask = _tokamax_operation(first_keys)
    options = operation.bind(*arrays, mask=mask).kwargs
    gradients = operation.vjp(softmax, out, d_out, *arrays, **options)
    return gradients["q"], gradients["k"], gradients["v"], None


_tokamax.defvjp(_tokamax_forward, _tokamax_backward)


def _tokamax_operation(first_keys: Array) -> tuple[Any, Any]:
    """Return tokamax's operation for this device (or ``jax.default_device``), and its mask."""
    api, base, has_mosaic = _tokamax_package()
    # Tokamax's public function takes no first keys.
    mask = base.Mask(k_start=first_keys[:, None], is_causal=True)
    return api.IMPLEMENTATIONS["mosaic_gpu" if has_mosaic() else "triton"], mask


@functools.cache
def _tokamax_package() -> tuple[Any, Any, Any]:
    try:
        from tokamax._src import gpu_utils  # pyright: ignore[reportMissingImports] - only with Python 3.12
        from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnsupportedAttention(
            f"attention is tokamax, which can't be imported ({error}): pip install 'jllama[cuda]' "
            "with Python 3.12 or later, or set another training.attention"
        ) from error
    # For each shape, tokamax logs that it has no measurements, and takes its default.
    logging.getLogger("absl").addFilter(
        lambda record: "Autotuning cache miss" not in record.getMessage()
    )
    return api, base, lambda: gpu_utils.is_sm90() or gpu_utils.is_sm100()


def _swap_heads(*arrays: Array) -> Iterator[Array]:
    """Exchange heads and sequence: most kernels take ``[batch, seq, heads, head_dim]``."""
    return (array.swapaxes(1, 2) for array in arrays)


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _pad(array: Array, sizes: dict[int, int], value: int = 0) -> Array:
    """Append ``value`` up to a size along some axes: ``{axis: size}``."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, constant_values=value)


# Why a kernel cannot serve some arguments; None if it can


def splash_refuses(query: Array, key: Array, mask: Mask) -> str | None:
    """Return what splash attention cannot serve."""
    return None if mask.lengths is None else "a mask with lengths"


def cudnn_refuses(query: Array, key: Array, mask: Mask) -> str | None:
    """Return what cuDNN cannot serve, or only with all scores or such a bias in memory."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype}: only bfloat16 and float16"
    if not mask.is_causal:
        return "a mask with segments, an offset or lengths"
    head_dim = query.shape[3]
    return f"a head size of {head_dim}: at most 128" if head_dim > 128 else None


def triton_refuses(query: Array, key: Array, mask: Mask) -> str | None:
    """Return what Pallas' Triton attention cannot serve."""
    return "a sliding window" if mask.window is not None else _row_refuses(query, key, mask)


def _row_refuses(query: Array, key: Array, mask: Mask) -> str | None:
    """Return what a kernel that attends from a row to itself cannot serve."""
    if mask.offset is None and mask.lengths is None and query.shape[2] == key.shape[2]:
        return None
    return "a mask with an offset or lengths, or other numbers of keys than of queries"


def tokamax_refuses(query: Array, key: Array, mask: Mask) -> str | None:
    """Return what tokamax's attention cannot serve."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype}: only bfloat16 and float16"
    return _row_refuses(query, key, mask)


def paged_refuses(query: Any, key: Any, mask: Mask) -> str | None:
    """Return what paged attention cannot serve."""
    has_offset_alone = dataclasses.replace(mask, offset=None).is_causal and mask.window is None
    is_one_token = query.shape[2] == 1 and has_offset_alone
    fits = key.shape[3] % _LANES == 0 and key.shape[2] % _PAGE == 0
    if is_one_token and fits and key.dtype == jnp.bfloat16:
        return None
    return "all but one new token a row, over bfloat16 keys in blocks of 256, of heads of 128"
