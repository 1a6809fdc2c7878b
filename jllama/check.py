"""Your own components against the oracle: how far off they are, and which known mistake they behave like.

>>> def mine(x, scale, eps):
...     return x / (np.sqrt((x**2).mean(-1, keepdims=True)) + eps) * scale
>>> jllama.check.rms_norm(mine)
rms_norm: differs from the oracle by 7.1e-01 (tolerance 1e-04).
It behaves like this known mistake: eps is outside the square root.

Yours is called with NumPy arrays on which mistakes show, and gives back a NumPy, JAX or PyTorch array of the same
layout. ``UsageError`` with the form of the call if it does not take them; what it raises itself passes through.
``jllama check FOLDER`` runs all checks on the files of many people; ``examples/check_your_own.ipynb`` mends three wrong
ones.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllama import oracle
from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.verify.checks import random_params, relative_error

Mine = Callable[..., Any]
META = "interleaved pairs: Meta's layout, right for Meta's weights; jllama and Hugging Face use half-split"
TILED = "query head n uses key-value head n % kv_heads, for n // (heads / kv_heads): tiled, not repeated"


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a check: true (``ok``) if yours is right, and printed as a sentence or two.

    ``error`` is the largest difference over the oracle's largest value (NaN: none to tell), ``tolerance`` what that of
    right code stays below, by the dtype that came back, and ``mistake`` the known one that gives the same.
    """

    component: str
    error: float
    tolerance: float
    mistake: str = ""
    remark: str = ""

    def __bool__(self) -> bool:
        return self.error < self.tolerance

    ok = property(__bool__)

    def __repr__(self) -> str:
        if self.ok:
            return f"{self.component}: equal to the oracle (tolerance {self.tolerance:.0e})."
        by = (
            "" if np.isnan(self.error) else f" by {self.error:.1e} (tolerance {self.tolerance:.0e})"
        )
        known = (
            f"It behaves like this known mistake: {self.mistake}." if self.mistake else self.remark
        )
        return f"{self.component}: differs from the oracle{by}.\n{known}"


def rms_norm(mine: Mine) -> Verdict:
    """``mine(x, scale, eps)``: ``x`` is ``[batch, seq, embed]``, ``scale`` ``[embed]``, ``eps`` a number."""
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(
        -5, 1, (3, 16, 1)
    )  # beside some rows eps is large, beside others nothing
    x, scale = sizes * (0.3 + rng.standard_normal((3, 16, 64))), rng.uniform(0.5, 2, 64)
    return _verdict("rms_norm", mine, oracle.rms_norm, x, scale, 3e-5)


def rope(mine: Mine) -> Verdict:
    """``mine(x, positions, theta)``: ``x`` is ``[batch, heads, seq, head_dim]``, ``positions`` integers, ``[seq]``.

    Channels ``i`` and ``i + head_dim / 2`` are a pair; it turns by ``position * theta ** (-2 * i / head_dim)``.
    """
    x, frequencies = (
        np.random.default_rng(0).standard_normal((2, 3, 40, 64)),
        5e4 ** (-np.arange(32) / 32),
    )
    return _verdict(
        "rope", mine, lambda x, at, _: oracle.rotate(x, at, frequencies), x, np.arange(7, 47), 5e4
    )


def attention(mine: Mine) -> Verdict:
    """``mine(q, k, v)``, causal: ``q`` is ``[batch, heads, seq, head_dim]``; ``k`` and ``v`` have ``kv_heads``.

    Query head ``n`` uses key-value head ``n // (heads / kv_heads)``; a token sees itself and those before it.
    """
    rng, mask = np.random.default_rng(0), np.tri(12, dtype=bool)
    q, k, v = (rng.standard_normal((2, heads, 12, 16)) for heads in (6, 2, 2))
    return _verdict(
        "attention", mine, lambda *qkv: [*map(oracle.attention, *qkv, [mask] * 2)], q, k, v
    )


def swiglu(mine: Mine) -> Verdict:
    """``mine(x, w_gate, w_up, w_down)``: ``[batch, seq, embed]``, ``[embed, mlp]`` twice, ``[mlp, embed]``."""
    rng, shapes = np.random.default_rng(0), ((2, 5, 32), (32, 48), (32, 48), (48, 32))
    return _verdict(
        "swiglu", mine, oracle.swiglu, *(rng.standard_normal(s) / s[0] ** 0.5 for s in shapes)
    )


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
    return _verdict("cross_entropy", mine, lambda *_: total / count, logits, tokens, mask)


def block(mine: Mine) -> Verdict:
    """``mine(x, weights, config)``: a layer, causal, at positions from 0; ``x`` is ``[batch, seq, embed]``.

    ``weights`` are ``attn_norm``, ``wq``, ``wk``, ``wv`` (``[embed, heads, head_dim]``), ``wo`` (``[heads, head_dim,
    embed]``), ``mlp_norm``, ``w_gate``, ``w_up``, ``w_down``; ``config`` is a ``jllama.LlamaConfig``.
    """
    params, tokens, config = _small_model()
    weights = {name: stacked[0] for name, stacked in params["layers"].items()}
    return _verdict("block", mine, _block, params["embed"][tokens], weights, config)


def model(mine: Mine) -> Verdict:
    """``mine(params, tokens, config)``: a whole model's logits, ``[batch, seq, vocab]``, of ``[batch, seq]``.

    ``params`` are ``embed`` (``[vocab, embed]``), ``layers`` (the weights of ``block``, stacked on a first axis),
    ``final_norm`` and ``lm_head`` (``[embed, vocab]``).
    """
    return _verdict("model", mine, oracle.forward, *_small_model())


def cache(mine: Mine) -> Verdict:
    """``mine(params, tokens, config, cache)``: the logits of these tokens, and what it keeps for those that follow.

    ``cache`` is None with the first five tokens of each row, and then, a token at a time, what the last call kept.
    """

    @wraps(mine)
    def in_calls(params: Any, tokens: Any, config: Any, kept: Any) -> Any:
        logits = []
        for part in np.split(tokens, range(5, 12), axis=1):
            some, kept = mine(params, part, config, kept)
            logits.append(some)
        return np.concatenate(logits, axis=1)

    return _verdict("cache", in_calls, oracle.forward, *_small_model(), None)


def sampler(mine: Mine) -> Verdict:
    """``mine(logits, temperature, top_k, top_p)``: a token drawn for each row of ``[batch, vocab]``, ``[batch]``.

    ``top_p`` is a share of what ``top_k`` keeps. The rows are alike: how often each token was drawn is compared.
    """

    @wraps(mine)
    def shares(*inputs: Any) -> Any:
        return np.float16(np.bincount(mine(*inputs), minlength=8) / 2**16)  # as exact as draws are

    return _verdict(
        "sampler", shares, _shares, np.tile(1.5 * np.sin(np.arange(8)), (2**16, 1)), 0.7, 6, 0.85
    )


def adamw(mine: Mine) -> Verdict:
    """``mine(w, gradients, learning_rate, beta1, beta2, eps, weight_decay)``: ``w`` after a step for each gradient."""
    w, *gradients = np.random.default_rng(0).standard_normal((5, 30))
    return _verdict("adamw", mine, _adamw, w, np.stack(gradients), 0.1, 0.8, 0.9, 0.3, 0.2)


def _small_model() -> tuple[Any, Any, Any]:
    config = LlamaConfig(
        vocab_size=40, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, rope_theta=5e4
    )
    return random_params(config, 0), np.random.default_rng(0).integers(0, 40, (2, 12)), config


def _verdict(component: str, mine: Mine, right: Mine, *inputs: Any) -> Verdict:
    try:
        inspect.signature(mine).bind(*inputs)
    except TypeError as error:
        form = globals()[component].__doc__.partition(":")[0]
        raise UsageError(
            f"{component} is called as {form}, which yours is not made for: {error}"
        ) from error
    expected, result = (
        np.asarray(right(*inputs)),
        mine(*copy.deepcopy(inputs)),
    )  # it may write on them
    tolerance = (
        3e-2 if "16" in str(getattr(result, "dtype", "")) else 1e-4
    )  # what float32 meets, also if it is inside
    if hasattr(
        result, "detach"
    ):  # PyTorch's: NumPy takes none with gradients, on a GPU or in bfloat16
        result = result.detach().cpu().double()
    if result is None or np.shape(result) != expected.shape:
        given = "nothing" if result is None else list(np.shape(result))
        remark = f"It returns {given} where the shape {list(expected.shape)} is expected."
        return Verdict(component, np.nan, tolerance, remark=remark)
    actual = np.asarray(result, np.float64)
    if (error := relative_error(actual, expected)) < tolerance:
        return Verdict(component, error, tolerance)
    with np.errstate(all="ignore"):
        distance, nearest = min(
            (_distance(actual, f(*inputs)), name) for name, f in MISTAKES[component].items()
        )
    if distance < tolerance:
        return Verdict(component, error, tolerance, nearest)
    at = np.unravel_index(np.argmax(np.abs(actual - expected)), actual.shape)
    remark = f"It behaves like none of the {len(MISTAKES[component])} known mistakes; the largest difference is at "
    remark += f"{list(map(int, at))}: {actual[at]:.4g} where {expected[at]:.4g} is right."
    return Verdict(component, error, tolerance, remark=remark)


def _distance(actual: Any, wrong: Any) -> float:
    """The relative error where the mistake gives numbers: what else comes of it depends on how it is written."""
    if not (tells := np.isfinite(wrong)).any():
        return np.inf if np.isfinite(actual).any() else 0.0
    return float(np.nan_to_num(relative_error(actual[tells], wrong[tells]), nan=np.inf))


def _mistakes(function: Mine, changes: dict[str, Any]) -> dict[str, Mine]:
    """Each known mistake as a function of what yours takes: ``function`` with some arguments changed, or another."""
    named = inspect.signature(function).bind

    def mistaken(change: Any, *inputs: Any) -> Any:
        return (
            change(*inputs) if callable(change) else function(**named(*inputs).arguments | change)
        )

    return {name: partial(mistaken, changes[name]) for name in changes}


def _norm(
    x: Any,
    scale: Any,
    eps: float,
    axis: Any = -1,
    mean: Mine = np.mean,
    power: float = 0.5,
    out: int = 0,
) -> Any:
    return (
        x / ((mean(x * x, axis=axis, keepdims=True) + (1 - out) * eps) ** power + out * eps) * scale
    )


def _rope(
    x: Any,
    at: Any,
    theta: float,
    pairs: int = 32,
    table: int = 32,
    sign: int = -1,
    dtype: Any = float,
) -> Any:
    # The channels of a pair are ``pairs`` apart, and ``table`` in the table: half the width or, interleaved, 1.
    channel = np.arange(x.shape[-1])
    angles = np.outer(
        at, theta ** (-2 / x.shape[-1] * (channel // 2 if table == 1 else channel % table))
    )
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    return x * cos + np.where(channel & pairs, 1, sign) * x[..., channel ^ pairs] * sin


def _attention(
    q: Any,
    k: Any,
    v: Any,
    ahead: Any = (-99, 0),
    hide: Any = -np.inf,
    axis: int = -1,
    scale: float = 4,
    repeat: Any = np.repeat,
) -> Any:
    k, v = (repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    distance = np.subtract.outer(np.arange(q.shape[2]), np.arange(q.shape[2])).T
    mask = (distance >= ahead[0]) & (distance <= ahead[1])
    scores = q @ k.swapaxes(2, 3) / scale
    scores = (
        scores if hide is None else np.where(mask, scores, hide)
    )  # None: the mask comes after the softmax
    weights = oracle.softmax(scores.swapaxes(axis, -1)).swapaxes(axis, -1)
    return (weights * mask if hide is None else weights) @ v


def _glu(
    x: Any, w_gate: Any, w_up: Any, w_down: Any, act: Mine = jax.nn.silu, join: Mine = np.multiply
) -> Any:
    return np.asarray(join(act(x @ w_gate), x @ w_up)) @ w_down


def _loss(logits: Any, tokens: Any, mask: Any, shift: int = 1, mean: Mine | None = None) -> Any:
    logits, targets, mask = (
        logits[:, : tokens.shape[1] - shift],
        tokens[:, shift:, None],
        mask[:, shift:],
    )
    losses = -np.log(np.take_along_axis(oracle.softmax(logits), targets, -1)[..., 0])
    return mean(losses, mask) if mean else (losses * mask).sum() / mask.sum()


def _block(x: Any, weights: Any, config: Any, ahead: int = 0, turns: int = 1) -> Any:
    rest = np.tri(12, k=ahead, dtype=bool), np.arange(12), turns * oracle.rope_frequencies(config)
    return np.stack([oracle.block(row, weights, config, *rest) for row in x])


def _shares(logits: Any, temperature: float, top_k: int, top_p: float) -> Any:
    probs = oracle.softmax(logits[0] / temperature)
    order = np.argsort(-probs)
    probs[order[top_k:]] = 0
    likelier = np.cumsum(probs[order]) - probs[order]
    probs[order[likelier >= top_p * probs.sum()]] = 0
    return probs / probs.sum()


def _adamw(
    w: Any, gradients: Any, rate: Any, beta1: Any, beta2: Any, eps: Any, decay: Any, l2: float = 0
) -> Any:
    mean = square = 0
    for step, gradient in enumerate(gradients, 1):
        gradient = gradient + l2 * w
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = np.sqrt(square / (1 - beta2**step)) + eps
        w = w - rate * (mean / (1 - beta1**step) / root + decay * w)
    return w


_AT = np.tile(np.arange(12), (2, 1))
MISTAKES: dict[str, dict[str, Mine]] = {  # each takes what yours takes
    "rms_norm": _mistakes(
        _norm,
        {
            "eps is outside the square root": {"out": 1},
            "eps is left out": {"eps": 0},
            "eps is 1e-5, whatever is given": {"eps": 1e-5},
            "eps is 1e-6, whatever is given": {"eps": 1e-6},
            "the scale is left out": {"scale": 1},
            "the scale is 1 + scale, as in Gemma": lambda x, scale, eps: _norm(x, 1 + scale, eps),
            "the scale comes before the mean": lambda x, scale, eps: _norm(x * scale, 1, eps),
            "the mean is over all axes, for the last alone": {"axis": None},
            "the mean is over the sequence, for the last axis": {"axis": -2},
            "a sum stands for the mean": {"mean": np.sum},
            "the square root is left out": {"power": 1},
            "the mean of x is taken off, as in LayerNorm": lambda x, *rest: _norm(
                x - x.mean(-1, keepdims=True), *rest
            ),
        },
    ),
    "rope": _mistakes(
        _rope,
        {
            META: {"pairs": 1, "table": 1},
            "half-split pairs, with the table of interleaved ones": {"table": 1},
            "interleaved pairs, with the table of half-split ones": {"pairs": 1},
            "pairs turn backwards: the sine has the wrong sign": {"at": -np.arange(7, 47)},
            "a minus sign is missing in the turned half": {"sign": 1},
            "theta is 10,000, whatever is given": {"theta": 1e4},
            "positions count from 0, whatever is given": {"at": np.arange(40)},
            "positions count from 1, whatever is given": {"at": np.arange(1, 41)},
            "positions are one too high": {"at": np.arange(8, 48)},
            "the exponent is -i / head_dim, for -2i / head_dim": {"theta": 5e4**0.5},
            "the exponent is -4i / head_dim, for -2i / head_dim": {"theta": 5e4**2},
            "cosines and sines are rounded to bfloat16": {"dtype": jnp.bfloat16},
        },
    ),
    "attention": _mistakes(
        _attention,
        {
            "scores are not divided by sqrt(head_dim)": {"scale": 1},
            "scores are divided by head_dim, for its square root": {"scale": 16},
            "scores are divided by sqrt(heads * head_dim)": {"scale": 96**0.5},
            TILED: {"repeat": lambda x, times, axis: np.concatenate([x] * times, axis)},
            "the softmax is over the queries, for the keys": {"axis": -2},
            "there is no mask": {"ahead": (-99, 99)},
            "mask off by one: a token sees the one after it": {"ahead": (-99, 1)},
            "mask off by one: a token does not see itself": {"ahead": (-99, -1)},
            "the mask is inverted: a token sees none but later ones": {"ahead": (1, 99)},
            "the mask is transposed: a token sees itself and later ones": {"ahead": (0, 99)},
            "the mask comes after the softmax: weights do not add up to 1": {"hide": None},
            "hidden scores are 0, for minus infinity": {"hide": 0},
        },
    ),
    "swiglu": _mistakes(
        _glu,
        {
            "gate and up are swapped": lambda x, gate, up, down: _glu(x, up, gate, down),
            "gelu for silu": {"act": partial(jax.nn.gelu, approximate=False)},
            "gelu (tanh) for silu": {"act": jax.nn.gelu},
            "relu for silu": {"act": jax.nn.relu},
            "sigmoid for silu": {"act": jax.nn.sigmoid},
            "silu is left out": {"act": np.asarray},
            "silu of up too": {"join": lambda gate, up: gate * jax.nn.silu(up)},
            "gate and up are added, for multiplied": {"join": np.add},
            "up is left out": {"join": lambda gate, up: gate},
            "silu comes after gate times up": {
                "act": np.asarray,
                "join": lambda gate, up: jax.nn.silu(gate * up),
            },
        },
    ),
    "cross_entropy": _mistakes(
        _loss,
        {
            "labels are not shifted": {"shift": 0},
            "labels are shifted the wrong way": lambda *arrays: _loss(
                *(each[:, ::-1] for each in arrays)
            ),
            "the mask is not shifted with the labels": lambda x, y, mask: _loss(
                x, y, np.roll(mask, 1, 1)
            ),
            "the mask is left out": {"mean": lambda x, mask: x.mean()},
            "the mean is over all tokens, for those that count": {
                "mean": lambda x, mask: (x * mask).mean()
            },
            "the mean is of rows' means": {
                "mean": lambda x, mask: ((x * mask).sum(1) / mask.sum(1)).mean()
            },
            "the sum stands for the mean": {"mean": lambda x, mask: (x * mask).sum()},
            "the minus sign is left out": lambda *arrays: -_loss(*arrays),
            "bits, for nats": lambda *arrays: _loss(*arrays) / np.log(2),
            "the softmax is taken twice": lambda logits, *rest: _loss(
                oracle.softmax(logits), *rest
            ),
            "the largest logit is not taken off first: exp overflows": lambda *_: np.float64(
                np.nan
            ),
        },
    ),
    "block": _mistakes(
        _block,
        {
            "there is no mask": {"ahead": 12},
            "mask off by one: a token sees the one after it": {"ahead": 1},
            "there is no RoPE": {"turns": 0},
        },
    ),
    "model": _mistakes(oracle.forward, {"there is no RoPE": {"positions": 0 * _AT}}),
    "cache": _mistakes(
        oracle.forward,
        {
            "positions count from 0 in every call": {"positions": _AT * (_AT < 5)},
            "what the cache holds is not seen": {"segments": np.maximum(_AT, 4)},
        },
    ),
    "sampler": _mistakes(
        _shares,
        {
            "the temperature is left out": {"temperature": 1},
            "logits are multiplied by the temperature": {"temperature": 1 / 0.7},
            "the likeliest token is always taken": {"temperature": 0.01},
            "top_k is left out": {"top_k": 8},
            "top_p is left out": {"top_p": 1},
        },
    ),
    "adamw": _mistakes(
        _adamw,
        {
            "weight decay is left out": {"decay": 0},
            "weight decay is not multiplied by the learning rate": {"decay": 2},
            "weight decay is added to the gradients, as in Adam": {"decay": 0, "l2": 0.2},
            "eps is left out": {"eps": 0},
        },
    ),
}
