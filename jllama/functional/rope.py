"""Rotary position embedding.

Pair ``i`` of a head's channels, read as the complex number ``a + jb``, is turned by the angle
``position * frequency[i]``. Dot products of queries and keys then depend on positions only through their difference.
Source: Su et al. 2021, section 3.2 (arXiv:2104.09864).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int

from jllama.functional.shapes import checked

Frequencies = Float64[np.ndarray, "half"]
Table = Float[Array, "*lead half"]

_DIGIT_BITS = 8
_NUM_DIGITS = 3  # positions up to 2**24


def inverse_frequencies(head_dim: int, theta: float) -> Frequencies:
    """The angle per position of each channel pair: ``theta ** (-2i / head_dim)``, ``i`` in ``0 .. head_dim/2 - 1``.

    Radians per token, in float64 on the host: they depend on the configuration alone. Source: RoFormer, eq. 15.
    """
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def scale_linear(frequencies: Frequencies, factor: float) -> Frequencies:
    """Position interpolation: every frequency divided by ``factor``. Source: Chen et al. 2023 (arXiv:2306.15595)."""
    return frequencies / factor


def dynamic_theta(theta: float, head_dim: int, factor: float, length: int, original_max_seq_len: int) -> float:
    """Dynamic NTK-aware scaling: the base for a sequence of ``length`` tokens, to make ``inverse_frequencies`` from.

    ``theta * stretch ** (head_dim / (head_dim - 2))`` with ``stretch = 1 + factor * (length / original_max_seq_len -
    1)``, or 1 up to the original length: the first channel pair keeps its frequency and the last one's is divided by
    ``stretch``. Source: Peng et al. 2023, sections 3.1 and 3.3 (arXiv:2309.00071); ``stretch`` is that of transformers,
    ``_compute_dynamic_ntk_parameters``.
    """
    stretch = 1 + factor * max(length / original_max_seq_len - 1, 0)
    return theta * stretch ** (head_dim / (head_dim - 2))


def scale_llama3(
    frequencies: Frequencies, factor: float, low_freq_factor: float, high_freq_factor: float, original_max_seq_len: int
) -> Frequencies:
    """Llama 3.1's scaling: slow channels are divided by ``factor``, fast ones kept, those between blended.

    With ``turns = original_max_seq_len * frequency / (2 pi)``, the full turns a channel makes in the original context,
    and ``keep = clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)``, the result is
    ``keep * frequency + (1 - keep) * frequency / factor``. Source: Meta's Llama 3.1 reference, ``apply_scaling``
    (arXiv:2407.21783, section 3.4.2); factor 8 for Llama 3.1 and 32 for Llama 3.2.
    """
    turns = original_max_seq_len * frequencies / (2 * np.pi)
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / factor


def scale_yarn(
    frequencies: Frequencies, theta: float, factor: float, beta_fast: float, beta_slow: float, original_max_seq_len: int
) -> Frequencies:
    """YaRN's scaling: slow channels are divided by ``factor``, fast ones kept, those between blended by their number.

    Pair ``index(beta) = head_dim ln(original_max_seq_len / (2 pi beta)) / (2 ln theta)`` makes ``beta`` full turns in
    the original context. With ``low = max(floor(index(beta_fast)), 0)``, ``high = min(ceil(index(beta_slow)),
    head_dim - 1)`` and ``divide = clip((i - low) / (high - low), 0, 1)``, the result is
    ``(1 - divide) * frequency + divide * frequency / factor``. ``frequencies`` are ``inverse_frequencies(head_dim,
    theta)``. The cosines and sines are to be multiplied by YaRN's attention factor besides. Source: Peng et al. 2023,
    section 3.2 (arXiv:2309.00071), with the ramp over ``i`` of the authors' code, which transformers and llama.cpp
    follow (the paper's is over turns).
    """
    head_dim = 2 * len(frequencies)

    def index(beta: float) -> float:
        return head_dim * math.log(original_max_seq_len / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(index(beta_fast)), 0)
    high = min(math.ceil(index(beta_slow)), head_dim - 1)
    divide = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (1 - divide) * frequencies + divide * frequencies / factor


@checked
def rope_tables(positions: Int[Array, "*lead"], frequencies: Frequencies) -> tuple[Table, Table]:
    """``cos`` and ``sin`` of ``position * frequency`` for any positions below 2**24, in float32.

    A float32 product would be off by 4e-3 radians at position 100,000. So a position is read as three base-256
    digits: the angle of each digit is looked up in a small table made in float64, and the three turns are multiplied
    as complex numbers. The error stays below 1e-6 at every position.
    """
    base = 1 << _DIGIT_BITS
    cos, sin = jnp.float32(1.0), jnp.float32(0.0)
    for digit_index in range(_NUM_DIGITS):
        angles = np.outer(np.arange(base) * float(base**digit_index), frequencies)
        digit = (positions >> (_DIGIT_BITS * digit_index)) & (base - 1)
        digit_cos = jnp.asarray(np.cos(angles), jnp.float32)[digit]
        digit_sin = jnp.asarray(np.sin(angles), jnp.float32)[digit]
        cos, sin = cos * digit_cos - sin * digit_sin, sin * digit_cos + cos * digit_sin
    return cos, sin


@checked
def apply_rope(
    x: Float[Array, "batch heads seq head_dim"],
    cos: Float[Array, "#batch seq head_dim//2"],
    sin: Float[Array, "#batch seq head_dim//2"],
) -> Float[Array, "batch heads seq head_dim"]:
    """Turn every pair of channels; pair ``i`` is channels ``i`` and ``i + head_dim/2`` (half-split, as Hugging Face).

    ``(a, b) -> (a cos - b sin, a sin + b cos)``, in float32; the result has x's dtype. ``cos`` and ``sin`` come from
    ``rope_tables``. This is jllama's own layout.
    """
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, axis=-1)
    turned = _turn(first, second, cos, sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


@checked
def apply_rope_interleaved(
    x: Float[Array, "batch heads seq head_dim"],
    cos: Float[Array, "#batch seq head_dim//2"],
    sin: Float[Array, "#batch seq head_dim//2"],
) -> Float[Array, "batch heads seq head_dim"]:
    """As ``apply_rope``, but pair ``i`` is channels ``2i`` and ``2i + 1``: the layout of the paper and of Meta's files.

    Equal to ``apply_rope`` after ``half_split_from_interleaved`` of the channels.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    turned = _turn(wide[..., 0::2], wide[..., 1::2], cos, sin)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def half_split_from_interleaved(x: Float[Array, "*lead head_dim"]) -> Float[Array, "*lead head_dim"]:
    """Reorder channels from interleaved pairs to half-split: all even channels, then all odd ones."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _turn(first: Array, second: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    cos, sin = cos[:, None], sin[:, None]  # the same for every head
    return first * cos - second * sin, first * sin + second * cos
