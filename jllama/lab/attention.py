"""Each attention implementation of this platform against the float64 oracle, under every mask."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jllama import functional as F
from jllama.lab.checks import TOLERANCE, Check, worst_error
from jllama.models import oracle

DTYPES = ((jnp.float32, "", TOLERANCE), (jnp.bfloat16, " in bfloat16", 1e-2))
"""Dtypes that attention is checked in, what they add to the row's name, and the tolerance."""
HEADS = 8
HEAD_DIM = 64
WINDOW = 70
KV_HEADS = (8, 2, 1)
"""Multi-head, grouped-query and multi-query attention."""

Attention = Callable[[Array, Array, Array, F.Mask], Array]
"""``(query, key, value, mask)`` to the mixed values, shaped as in ``functional.attention``."""
Dense = Bool[np.ndarray, "rows seq kv_seq"]


def attention_checks() -> list[Check]:
    """Return a check of each implementation under each mask and in each dtype."""
    return [
        Check(
            "attention",
            kind + suffix,
            name,
            functools.partial(attention_error, attention, *masks, dtype),
            tolerance,
        )
        for dtype, suffix, tolerance in DTYPES
        for kind, masks in attention_masks().items()
        for name, attention in attentions().items()
    ]


def attentions() -> dict[str, Attention]:
    """Return the registered attention implementations of this platform."""
    platforms = ("", jax.default_backend())
    return {
        name: functools.partial(F.attention, implementation=name)
        for name, entry in F.ATTENTION.items()
        if entry.platform in platforms
    }


def attention_masks(seq: int = 160) -> dict[str, tuple[F.Mask, Dense]]:
    """Return masks of two rows by their kind, each also as a dense mask.

    In the last one, the queries of one row see nothing.
    """
    keys = np.arange(seq)
    causal = np.tri(seq, dtype=bool)
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (2, seq)))
    same_document = segments[:, :, None] == segments[:, None]
    in_window = np.subtract.outer(keys, keys) < WINDOW
    offset = np.array([5, 70])
    lengths = np.array([seq // 3, 0])
    make: Any = F.Mask  # takes NumPy arrays until they are converted below
    masks = {
        "causal": (make(), causal),
        "packed documents": (make(None, segments, segments), causal & same_document),
        "sliding window": (make(window=WINDOW), causal & in_window),
        "packed documents in a window": (
            make(None, segments, segments, window=WINDOW),
            causal & in_window & same_document,
        ),
        "after other tokens": (make(offset), keys <= offset[:, None, None] + keys[:, None]),
        "ragged lengths": (
            make(np.array([seq]), lengths=lengths),
            (keys < lengths[:, None])[:, None],
        ),
    }
    return {
        kind: (jax.tree.map(jnp.asarray, mask), np.broadcast_to(dense, (2, seq, seq)))
        for kind, (mask, dense) in masks.items()
    }


def attention_error(
    attention: Attention, mask: F.Mask, dense: Dense, dtype: Any = jnp.float32, seed: int = 0
) -> float:
    """Compare attention with the float64 oracle's on the same random inputs, for all ``KV_HEADS``.

    ``dense`` is ``mask`` written out for the oracle.
    """
    rng = np.random.default_rng(seed)
    rows, seq, kv_seq = dense.shape
    inputs = []
    for kv_heads in KV_HEADS:
        shapes = ((HEADS, seq), (kv_heads, kv_seq), (kv_heads, kv_seq))
        normal = (rng.standard_normal((rows, *shape, HEAD_DIM)) for shape in shapes)
        inputs.append([jnp.asarray(array, dtype) for array in normal])
    compute = jax.jit(lambda inputs, mask: [attention(q, k, v, mask) for q, k, v in inputs])
    actual = compute(inputs, mask)
    expected = []
    for arrays in inputs:
        exact = (np.asarray(array, np.float64) for array in arrays)
        expected.append([oracle.attention(*row) for row in zip(*exact, dense, strict=True)])
    return worst_error(np.concatenate(actual), np.concatenate(expected))
