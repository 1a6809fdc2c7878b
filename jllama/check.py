"""Your own components against the oracle: how far off they are, and which known mistake they behave like.

>>> def mine(x, scale, eps):
...     return x / (np.sqrt((x**2).mean(-1, keepdims=True)) + eps) * scale
>>> jllama.check.rms_norm(mine)
rms_norm: differs from the oracle by 7.1e-01 (tolerance 1e-04).
It behaves like this known mistake: eps is outside the square root.

Yours is called once, with float64 NumPy arrays on which mistakes show, and gives back a NumPy, JAX or PyTorch array of
the same layout. What it raises passes through. ``examples/check_your_own.ipynb`` mends three wrong ones.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy import ndarray as Array

from jllama import oracle
from jllama.verify.checks import relative_error

Mine = Callable[..., Any]

INF = math.inf
META = "interleaved pairs: Meta's layout, right for Meta's weights; jllama and Hugging Face use half-split"
TILED = "query head n uses key-value head n % kv_heads, for n // (heads / kv_heads): tiled, not repeated"


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a check: true if yours is right, and printed as a sentence or two.

    ``error`` is the largest difference over the oracle's largest value (NaN: none to tell), ``tolerance`` what that of
    right code stays below, by the dtype that came back, and ``mistake`` the known one that gives the same.
    """

    component: str
    error: float
    tolerance: float
    mistake: str = ""
    remark: str = ""

    @property
    def ok(self) -> bool:
        """Whether yours is right."""
        return self.error < self.tolerance

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        if self.ok:
            return f"{self.component}: equal to the oracle (tolerance {self.tolerance:.0e})."
        by = "" if math.isnan(self.error) else f" by {self.error:.1e} (tolerance {self.tolerance:.0e})"
        known = f"It behaves like this known mistake: {self.mistake}." if self.mistake else self.remark
        return f"{self.component}: differs from the oracle{by}.\n{known}"


def rms_norm(mine: Mine) -> Verdict:
    """``mine(x, scale, eps)``: ``x`` is ``[batch, seq, embed]``, ``scale`` ``[embed]``, ``eps`` a number."""
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-5, 1, (3, 16, 1))  # beside some rows eps is large, beside others nothing
    x = sizes * (0.3 + rng.standard_normal((3, 16, 64)))
    inputs = x, rng.uniform(0.5, 2, 64), 3e-5
    return _verdict("rms_norm", mine, inputs, oracle.rms_norm(*inputs))


def rope(mine: Mine) -> Verdict:
    """``mine(x, positions, theta)``: ``x`` is ``[batch, heads, seq, head_dim]``, ``positions`` integers, ``[seq]``.

    Channels ``i`` and ``i + head_dim / 2`` are a pair; it turns by ``position * theta ** (-2 * i / head_dim)``.
    """
    x, positions, theta = np.random.default_rng(0).standard_normal((2, 3, 40, 64)), np.arange(7, 47), 50_000.0
    return _verdict("rope", mine, (x, positions, theta), oracle.rotate(x, positions, theta ** (-np.arange(32) / 32)))


def attention(mine: Mine) -> Verdict:
    """``mine(q, k, v)``, causal: ``q`` is ``[batch, heads, seq, head_dim]``; ``k`` and ``v`` have ``kv_heads``.

    Query head ``n`` uses key-value head ``n // (heads / kv_heads)``; a token sees itself and those before it.
    """
    rng, mask = np.random.default_rng(0), np.tri(12, dtype=bool)
    q, k, v = (rng.standard_normal((2, heads, 12, 16)) for heads in (6, 2, 2))
    expected = np.stack([oracle.attention(*row, mask) for row in zip(q, k, v, strict=True)])
    return _verdict("attention", mine, (q, k, v), expected)


def swiglu(mine: Mine) -> Verdict:
    """``mine(x, w_gate, w_up, w_down)``: ``[batch, seq, embed]``, ``[embed, mlp]`` twice, ``[mlp, embed]``."""
    rng = np.random.default_rng(0)
    x, *weights = (rng.standard_normal(shape) / shape[0] ** 0.5 for shape in ((2, 5, 32), (32, 48), (32, 48), (48, 32)))
    return _verdict("swiglu", mine, (x, *weights), oracle.swiglu(x, *weights))


def cross_entropy(mine: Mine) -> Verdict:
    """``mine(logits, tokens, mask)``: a language model's mean loss, in nats a token.

    ``logits``, ``[batch, seq, vocab]``, were computed from ``tokens``, ``[batch, seq]``: each predicts the next token.
    ``mask``, ``[batch, seq]``, is true for the tokens whose prediction counts.
    """
    rng = np.random.default_rng(0)
    logits, tokens = 800 + 2 * rng.standard_normal((3, 12, 20)), rng.integers(0, 20, (3, 12))
    logits[:, :-1] += 3 * np.eye(20)[tokens[:, 1:]]  # they do know something of the next token
    mask = rng.random((3, 12)) < [[0.3], [0.6], [0.9]]
    total, count = oracle.cross_entropy(logits[:, :-1], tokens[:, 1:], mask[:, 1:])
    return _verdict("cross_entropy", mine, (logits, tokens, mask), np.float64(total / count))


def _verdict(component: str, mine: Mine, inputs: tuple, expected: Any) -> Verdict:
    result = mine(*(np.copy(each) if isinstance(each, Array) else each for each in inputs))  # it may write on them
    dtype = str(getattr(result, "dtype", ""))
    if hasattr(result, "detach"):  # PyTorch's: NumPy takes none with gradients, on a GPU or in bfloat16
        result = result.detach().cpu().double()
    tolerance = 3e-2 if "16" in dtype else 1e-4  # what float32 meets, also if it is inside: a mistake is over 1e-3
    if result is None or np.shape(result) != expected.shape:
        given = "nothing" if result is None else list(np.shape(result))
        remark = f"It returns {given} where the shape {list(expected.shape)} is expected."
        return Verdict(component, math.nan, tolerance, remark=remark)
    actual = np.asarray(result, np.float64)
    error = relative_error(actual, expected)
    with np.errstate(all="ignore"):
        errors = {_distance(actual, wrong(*inputs)): name for name, wrong in MISTAKES[component].items()}
    if error < tolerance or min(errors) < tolerance:
        return Verdict(component, error, tolerance, "" if error < tolerance else errors[min(errors)])
    at = np.unravel_index(np.argmax(np.abs(actual - expected)), actual.shape)
    remark = f"It behaves like none of the {len(MISTAKES[component])} known mistakes; the largest difference is at "
    remark += f"{list(map(int, at))}: {actual[at]:.4g} where {expected[at]:.4g} is right."
    return Verdict(component, error, tolerance, remark=remark)


def _distance(actual: Any, wrong: Any) -> float:
    """The relative error where the mistake gives numbers: what else comes of it depends on how it is written."""
    tells = np.isfinite(wrong)
    if not tells.any():
        return math.inf if np.isfinite(actual).any() else 0.0
    return float(np.nan_to_num(relative_error(actual[tells], wrong[tells]), nan=math.inf))


# The mistakes: each takes what yours takes.


def _norm(x: Array, scale: Any, eps: float, axis: int | None = -1, outside: float = 0) -> Array:
    return x / (np.sqrt((x * x).mean(axis, keepdims=True) + eps) + outside) * scale


def _rope(x: Array, at: Array, theta: float, pairs: int = 32, table: int = 32, dtype: Any = float) -> Array:
    # The channels of a pair are ``pairs`` apart, and ``table`` in the table: half the width or, interleaved, 1.
    channel = np.arange(x.shape[-1])
    angles = np.outer(at, theta ** (-2 / x.shape[-1] * (channel // 2 if table == 1 else channel % table)))
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    return x * cos + np.where(channel & pairs, 1, -1) * x[..., channel ^ pairs] * sin


def _attention(q: Array, k: Array, v: Array, ahead: Any = (-INF, 0), axis: int = -1, late: bool = False) -> Array:
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    distance = np.subtract.outer(np.arange(q.shape[2]), np.arange(q.shape[2])).T
    mask = (distance >= ahead[0]) & (distance <= ahead[1])
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    weights = oracle.softmax((scores if late else np.where(mask, scores, -INF)).swapaxes(axis, -1)).swapaxes(axis, -1)
    return (weights * mask if late else weights) @ v


def _glu(act: Mine, x: Array, w_gate: Array, w_up: Array, w_down: Array) -> Array:
    return np.asarray(act(x @ w_gate)) * (x @ w_up) @ w_down


def _mean(losses: Array, mask: Array) -> Any:
    return (losses * mask).sum() / mask.sum()


def _averaged(mean: Mine, shift: int = 1) -> Mine:
    def loss(logits: Array, tokens: Array, mask: Array) -> Any:
        logits, targets = logits[:, : tokens.shape[1] - shift], tokens[:, shift:, None]
        return mean(-np.log(np.take_along_axis(oracle.softmax(logits), targets, -1)[..., 0]), mask[:, shift:])

    return loss


MISTAKES: dict[str, dict[str, Mine]] = {
    "rms_norm": {
        "eps is outside the square root": lambda x, scale, eps: _norm(x, scale, 0, outside=eps),
        "eps is left out": lambda x, scale, eps: _norm(x, scale, 0),
        "eps is 1e-5, whatever is given": lambda x, scale, eps: _norm(x, scale, 1e-5),
        "eps is 1e-6, whatever is given": lambda x, scale, eps: _norm(x, scale, 1e-6),
        "the scale is left out": lambda x, scale, eps: _norm(x, 1, eps),
        "the scale is 1 + scale, as in Gemma": lambda x, scale, eps: _norm(x, 1 + scale, eps),
        "the scale comes before the mean": lambda x, scale, eps: _norm(x * scale, 1, eps),
        "the mean is over all axes, for the last alone": partial(_norm, axis=None),
        "the mean is over the sequence, for the last axis": partial(_norm, axis=-2),
        "the mean of x is taken off, as in LayerNorm": lambda x, *rest: _norm(x - x.mean(-1, keepdims=True), *rest),
    },
    "rope": {
        META: partial(_rope, pairs=1, table=1),
        "half-split pairs, with the table of interleaved ones": partial(_rope, table=1),
        "interleaved pairs, with the table of half-split ones": partial(_rope, pairs=1),
        "pairs turn backwards: the sine has the wrong sign": lambda x, at, theta: _rope(x, -at, theta),
        "theta is 10,000, whatever is given": lambda x, at, theta: _rope(x, at, 1e4),
        "positions count from 0, whatever is given": lambda x, at, theta: _rope(x, at - at[0], theta),
        "positions are one too high": lambda x, at, theta: _rope(x, at + 1, theta),
        "the exponent is -i / head_dim, for -2i / head_dim": lambda x, at, theta: _rope(x, at, theta**0.5),
        "cosines and sines are rounded to bfloat16": partial(_rope, dtype=jnp.bfloat16),
    },
    "attention": {
        "scores are not divided by sqrt(head_dim)": lambda q, k, v: _attention(q * q.shape[3] ** 0.5, k, v),
        "scores are divided by head_dim, for its square root": lambda q, k, v: _attention(q / q.shape[3] ** 0.5, k, v),
        TILED: lambda q, k, v: _attention(q, np.tile(k, (1, 3, 1, 1)), np.tile(v, (1, 3, 1, 1))),
        "the softmax is over the queries, for the keys": partial(_attention, axis=-2),
        "there is no mask": partial(_attention, ahead=(-INF, INF)),
        "mask off by one: a token sees the one after it": partial(_attention, ahead=(-INF, 1)),
        "mask off by one: a token does not see itself": partial(_attention, ahead=(-INF, -1)),
        "the mask is transposed: a token sees itself and later ones": partial(_attention, ahead=(0, INF)),
        "the mask comes after the softmax: weights do not add up to 1": partial(_attention, late=True),
    },
    "swiglu": {
        "gate and up are swapped": lambda x, gate, up, down: _glu(jax.nn.silu, x, up, gate, down),
        "gelu for silu": partial(_glu, partial(jax.nn.gelu, approximate=False)),
        "gelu (tanh) for silu": partial(_glu, jax.nn.gelu),
        "relu for silu": partial(_glu, jax.nn.relu),
        "sigmoid for silu": partial(_glu, jax.nn.sigmoid),
        "silu is left out": partial(_glu, np.asarray),
    },
    "cross_entropy": {
        "labels are not shifted": _averaged(_mean, shift=0),
        "labels are shifted the wrong way": lambda *arrays: _averaged(_mean)(*(each[:, ::-1] for each in arrays)),
        "the mask is not shifted with the labels": lambda x, y, mask: _averaged(_mean)(x, y, np.roll(mask, 1, 1)),
        "the mask is left out": _averaged(lambda losses, mask: losses.mean()),
        "the mean is over all tokens, for those that count": _averaged(lambda losses, mask: (losses * mask).mean()),
        "the mean is of rows' means": _averaged(lambda losses, mask: ((losses * mask).sum(1) / mask.sum(1)).mean()),
        "the sum stands for the mean": _averaged(lambda losses, mask: (losses * mask).sum()),
        "bits, for nats": _averaged(lambda losses, mask: _mean(losses, mask) / math.log(2)),
        "the softmax is taken twice": lambda logits, *rest: _averaged(_mean)(oracle.softmax(logits), *rest),
        "the largest logit is not taken off first: exp overflows": lambda *_: np.float64(np.nan),
    },
}
