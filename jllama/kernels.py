"""Attention by kernels that never hold a row of scores in memory: JAX's own and tokamax's, into ``ATTENTION``.

Each takes ``[batch, heads, seq, head_dim]`` and a ``Mask``, forwards and backwards. Sequences are padded to whole
blocks at their end, where causality hides the padding from every real query, and head sizes to what the kernel takes.
"""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from jllama.errors import UsageError
from jllama.functional import ATTENDED, ATTENTION, CACHE_ATTENTION, AttentionImplementation, Mask

_LANES = 128
_PAGE = 256  # keys of a cache
_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


def splash(query: Array, key: Array, value: Array, mask: Mask, *, interpret: bool = False) -> Array:
    """Splash attention (Pallas, TPU): grouped heads, documents kept apart, blocks that causality hides left out.

    With an offset, known only at run time, hidden blocks are computed and masked. ``interpret``: on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    (_, heads, seq, head_dim), kv_seq = query.shape, key.shape[2]
    block = min(512, _up(min(seq, kv_seq), _LANES))
    padded_head = head_dim if head_dim == 64 else _up(head_dim, _LANES)
    three = query * head_dim**-0.5, key, value
    query, key, value = (
        _pad(each, {2: _up(each.shape[2], block), 3: padded_head}) for each in three
    )
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
        segments = splash_attention_kernel.SegmentIds(
            *(_pad(each, {1: side}, -1) for each, side in pairs)
        )
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

    return jax.vmap(one_row)(query, key, value, segments, offsets)[:, :, :seq, :head_dim].astype(
        value.dtype
    )


def paged(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """JAX's paged attention (Pallas, TPU) over a cache, for one new token a row: each is read as far as its own tokens.

    To the kernel every key-value head of a row is a text of its own, whose blocks of keys are pages in their order: a
    view of the cache. It adds up page by page, so that neither other rows nor the cache's length change a bit.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    batch, kv_heads, kv_seq, head_dim = key.shape
    places = jnp.arange(batch * kv_heads * kv_seq // _PAGE, dtype=jnp.int32).reshape(
        batch * kv_heads, -1
    )
    pages = (each.reshape(1, places.size, _PAGE, head_dim) for each in (key, value))
    lengths = jnp.broadcast_to(
        jnp.sum(mask.dense(1, kv_seq), axis=2, dtype=jnp.int32), (batch, kv_heads)
    )
    queries = query.astype(jnp.float32).reshape(len(places), -1, head_dim) * head_dim**-0.5
    mixed = paged_attention(queries, *pages, lengths.ravel(), places, pages_per_compute_block=1)
    return mixed.reshape(query.shape).astype(query.dtype)


def cudnn(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """CuDNN's flash attention (NVIDIA): grouped heads, causal from the start of a row."""
    head_dim = query.shape[3]
    heads_last = (_pad(each, {3: _up(head_dim, 8)}).swapaxes(1, 2) for each in (query, key, value))
    mixed = jax.nn.dot_product_attention(
        *heads_last, scale=head_dim**-0.5, is_causal=True, implementation="cudnn"
    )
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


def tokamax(query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Flash attention of tokamax (NVIDIA): grouped heads, and blocks before a document's first key left out.

    Written for Hopper and Blackwell in Mosaic, for other GPUs in Triton. Its results and the sums of its softmax are
    named ``ATTENDED``, so that the backward pass need not make them again.
    """
    batch, _, seq, _ = query.shape
    first_keys = jnp.zeros((batch, seq), jnp.int32)
    if mask.query_segments is not None:
        first_keys = first_of_segments(mask.query_segments)
    heads_last = (each.swapaxes(1, 2) for each in (query, key, value))
    return _tokamax(*heads_last, first_keys).swapaxes(1, 2)


def first_of_segments(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """The index at which each token's segment begins.

    >>> print(first_of_segments(jnp.array([[1, 1, 2, 2, 0, 0]])))
    [[0 0 2 2 4 4]]
    """
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_first = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    return jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)


@jax.custom_vjp
def _tokamax(query: Array, key: Array, value: Array, first_keys: Array) -> Array:
    operation, mask = _tokamax_operation(first_keys)
    return operation(query, key, value, mask=mask)


def _tokamax_forward(
    query: Array, key: Array, value: Array, first_keys: Array
) -> tuple[Array, Any]:
    operation, mask = _tokamax_operation(first_keys)
    query, key, value = (checkpoint_name(each, ATTENDED) for each in (query, key, value))
    results = operation(query, key, value, mask=mask, return_residuals=True)
    mixed, softmax = checkpoint_name(results, ATTENDED)
    return mixed, (query, key, value, first_keys, mixed, softmax)


def _tokamax_backward(kept: Any, d_mixed: Array) -> tuple[Array, Array, Array, None]:
    *arrays, first_keys, mixed, softmax = kept
    operation, mask = _tokamax_operation(first_keys)
    options = operation.bind(*arrays, mask=mask).kwargs
    gradients = operation.vjp(softmax, mixed, d_mixed, *arrays, **options)
    return gradients["q"], gradients["k"], gradients["v"], None


_tokamax.defvjp(_tokamax_forward, _tokamax_backward)


def _tokamax_operation(first_keys: Array) -> tuple[Any, Any]:
    """Tokamax's operation for the device at hand (or ``jax.default_device``), and its mask."""
    api, base, on_mosaic = _tokamax_package()
    mask = base.Mask(
        k_start=first_keys[:, None], is_causal=True
    )  # its public function has no first keys
    return api.IMPLEMENTATIONS["mosaic_gpu" if on_mosaic() else "triton"], mask


@functools.cache
def _tokamax_package() -> tuple[Any, Any, Any]:
    try:
        from tokamax._src import gpu_utils  # pyright: ignore[reportMissingImports] - only with Python 3.12
        from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        advice = "pip install 'jllama[cuda]' with Python 3.12 or later, or take another training.attention"
        raise UsageError(
            f"attention is tokamax, which can't be imported ({error}): {advice}"
        ) from error
    # It says of each shape that it was not measured, and takes what it would take anyway.
    logging.getLogger("absl").addFilter(
        lambda record: "Autotuning cache miss" not in record.getMessage()
    )
    return api, base, lambda: gpu_utils.is_sm90() or gpu_utils.is_sm100()


def _tokamax_refuses(query: Array, key: Array, mask: Mask) -> str:
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype}: only bfloat16 and float16"
    return _triton_refuses(query, key, mask)


def _paged_refuses(query: Any, key: Any, mask: Mask) -> str:
    served = query.shape[2] == 1 and all(field is None for field in mask[1:])
    fits = key.dtype == jnp.bfloat16 and not (key.shape[3] % _LANES or key.shape[2] % _PAGE)
    return "all but one new token a row, over bfloat16 keys in blocks of 256, of heads of 128" * (
        not (served and fits)
    )


def _cudnn_refuses(query: Array, key: Array, mask: Mask) -> str:
    """What cuDNN cannot serve without all scores or a bias of their size in memory, or at all."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype}: only bfloat16 and float16"
    if any(field is not None for field in mask):
        return "a mask with segments, an offset or lengths"
    return f"a head size of {query.shape[3]}: at most 128" * (query.shape[3] > 128)


def _triton_refuses(query: Array, key: Array, mask: Mask) -> str:
    served = mask.offset is None and mask.lengths is None and query.shape[2] == key.shape[2]
    return "a mask with an offset or lengths, or other numbers of keys than of queries" * (
        not served
    )


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
ATTENTION["tokamax"] = AttentionImplementation(tokamax, _tokamax_refuses, "gpu")
ATTENTION["triton"] = AttentionImplementation(triton, _triton_refuses, "gpu")
ATTENTION["paged"] = AttentionImplementation(paged, _paged_refuses, "tpu", backward=False)
CACHE_ATTENTION["tpu"].insert(0, "paged")
