"""The table of implementations of attention, and the choice among them."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jllama.core import ops
from jllama.core.ops import FEW_QUERIES, Keys, Mask, Queries, UnsupportedAttention
from jllama.kernels import kernels
from jllama.kernels.attention import blocked_attention, cached_attention, split_attention
from jllama.kernels.shapes import checked


class AttentionImplementation(NamedTuple):
    """One way to compute ``attention``."""

    function: Callable[[Array, Array, Array, Mask], Array]
    refuses: Callable[[Any, Any, Mask], str | None] = lambda query, key, mask: None  # and why
    platform: str = ""  # the only one that has it; empty: all do
    backward: bool = True  # whether it can be differentiated


_CAUSAL = Mask()
ATTENTION = {
    "reference": AttentionImplementation(ops.attention),
    "blocked": AttentionImplementation(blocked_attention),
    "cached": AttentionImplementation(cached_attention, backward=False),
    "split": AttentionImplementation(split_attention, backward=False),
    "splash": AttentionImplementation(kernels.splash, kernels.splash_refuses, "tpu"),
    "cudnn": AttentionImplementation(kernels.cudnn, kernels.cudnn_refuses, "gpu"),
    "tokamax": AttentionImplementation(kernels.tokamax, kernels.tokamax_refuses, "gpu"),
    "triton": AttentionImplementation(kernels.triton, kernels.triton_refuses, "gpu"),
    "paged": AttentionImplementation(kernels.paged, kernels.paged_refuses, "tpu", backward=False),
}
"""The implementations of ``attention`` by name. Add an entry for another one."""

CACHE_ATTENTION = {"gpu": ["split"], "tpu": ["paged", "split"]}
"""The choice of ``auto`` by platform for a few tokens after cached ones: the first implementation
that serves them, else ``cached``."""

SHORT_TOKENS = 128
"""Up to this length, a sequence needs no blocks if there is no backward pass."""

_MODULES = {"tokamax": "tokamax", "triton": "jax.experimental.pallas.ops.gpu.attention"}
"""The modules of GPU kernels that keep documents apart, the fastest first. JAX means to remove its
own."""


def is_installed(name: str) -> bool:
    """Return whether the module that an implementation of ``ATTENTION`` needs can be imported."""
    try:
        return name not in _MODULES or importlib.util.find_spec(_MODULES[name]) is not None
    except ModuleNotFoundError:  # of the package that has the module
        return False


def choose_attention(
    seq: int,
    kv_seq: int,
    *,
    backward: bool = True,
    platform: str = "cpu",
    dtype: Any = "float32",
    packed: bool = True,
    window: bool = False,
) -> str:
    """Return the name that ``auto`` stands for.

    That is a kernel for whole sequences where the platform has one, else plain formulas: in blocks
    for whole sequences, without a backward pass only for more than 128 tokens.

    Args:
        seq: the number of queries.
        kv_seq: the number of keys.
        backward: whether gradients are needed.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        dtype: that of the arrays; kernels for GPUs need 16 bits.
        packed: whether documents must be kept apart, which cuDNN cannot. The faster kernel that can
            needs the package ``tokamax``.
        window: whether some layer has a sliding window, which JAX's own kernel for packed documents
            does not have.

    Examples:
        >>> choose_attention(512, 512), choose_attention(1, 512)
        ('blocked', 'reference')
    """
    is_whole = 0 < seq == kv_seq
    if is_whole and seq >= SHORT_TOKENS:
        if platform == "tpu":
            return "splash"
        if platform == "gpu" and jnp.dtype(dtype).itemsize == 2:
            names = ["cudnn"]
            if packed:
                names = ["tokamax", "blocked"] if window else [*_MODULES, "blocked"]
            return next(name for name in names if is_installed(name))
    return "blocked" if is_whole and (backward or seq > SHORT_TOKENS) else "reference"


def choose_cache_attention(seq: int, key: Any, platform: str, window: int | None = None) -> str:
    """Return the name that ``auto`` stands for, for ``seq`` tokens after cached keys like ``key``.

    ``window`` is the sliding window of some layer, if any has one.

    A loop over keys costs a GPU a synchronization with the host and many small launches in each
    layer.
    """
    query = jax.ShapeDtypeStruct((*key.shape[:2], seq, key.shape[3]), key.dtype)
    mask = Mask(offset=jnp.zeros(1, jnp.int32), window=window)
    if seq < FEW_QUERIES:
        for name in CACHE_ATTENTION.get(platform, []):
            if not ATTENTION[name].refuses(query, key, mask):
                return name
    return "cached"


@checked
def attention(
    query: Queries, key: Keys, value: Keys, mask: Mask = _CAUSAL, implementation: str = "auto"
) -> Queries:
    """Compute ``grouped_query_attention`` under a ``Mask``.

    ``implementation`` is a name of ``ATTENTION``, or ``auto`` for ``choose_attention``. With
    ``heads == kv_heads``, arrays of ``[batch, seq, heads, head_dim]`` have right shapes, too, and
    are not noticed.

    Raises:
        ValueError: there is no such implementation, or it cannot serve these arguments
            (``UnsupportedAttention``); another one never takes its place.

    Examples:
        >>> x = jnp.ones((1, 2, 3, 8))
        >>> print(attention(x, x, x).shape)
        (1, 2, 3, 8)
    """
    seq = query.shape[2]
    kv_seq = key.shape[2]
    if mask.is_causal and seq > kv_seq:  # a row attends to itself
        raise ValueError(
            f"attention: query is {list(query.shape)} and key {list(key.shape)}, for "
            "[batch, heads, seq, head_dim]; it fits after swapaxes(1, 2), heads before seq"
        )
    if implementation == "auto":
        implementation = choose_attention(seq, kv_seq)
    if implementation not in ATTENTION:
        raise ValueError(
            f"there is no attention implementation {implementation!r}; "
            f"there are {', '.join(ATTENTION)}"
        )
    reason = ATTENTION[implementation].refuses(query, key, mask)
    if reason:
        raise UnsupportedAttention(
            f"the attention implementation {implementation!r} cannot serve {reason}"
        )
    return ATTENTION[implementation].function(query, key, value, mask)
