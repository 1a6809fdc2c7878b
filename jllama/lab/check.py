"""Checks of your own components: their error against the oracle, and the known mistake in them.

>>> def my_rms_norm(x, scale, eps):
...     return x / (np.sqrt((x**2).mean(-1, keepdims=True)) + eps) * scale
>>> jllama.check.rms_norm(my_rms_norm)
rms_norm: differs from the oracle by 7.1e-01 (tolerance 1e-04).
It behaves like this known mistake: eps is outside the square root.

Each check calls your function with NumPy arrays on which mistakes show. The function returns a
NumPy, JAX or PyTorch array. If it does not take the arguments, the check raises ``UsageError`` with
the form of the call; exceptions of the function itself pass through. ``jllama verify check FOLDER``
runs all checks on the files of many people; ``examples/check_your_own.ipynb`` mends three
components.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.lab.checks import detached, random_params, relative_error
from jllama.models import oracle

Component = Callable[..., Any]


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a check: true if the component is right, and printed as a sentence or two.

    Attributes:
        component: the name of the check.
        error: the largest difference over the oracle's largest value; NaN if there is none to tell.
        tolerance: what the error of right code stays below, by the dtype that was returned.
        mistake: the known mistake that gives the same values; empty if there is none.
        remark: what else is known about a wrong component.
    """

    component: str
    error: float
    tolerance: float
    mistake: str = ""
    remark: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        """Whether the component is right."""
        return self.error < self.tolerance

    def __repr__(self) -> str:
        tolerance = f"(tolerance {self.tolerance:.0e})"
        if self.ok:
            return f"{self.component}: equal to the oracle {tolerance}."
        distance = "" if np.isnan(self.error) else f" by {self.error:.1e} {tolerance}"
        reason = self.remark
        if self.mistake:
            reason = f"It behaves like this known mistake: {self.mistake}."
        return f"{self.component}: differs from the oracle{distance}.\n{reason}"


def rms_norm(function: Component) -> Verdict:
    """Check ``function(x, scale, eps)``: RMSNorm over the last axis.

    ``x`` is ``[batch, seq, embed]``, ``scale`` ``[embed]``, ``eps`` a number.
    """
    rng = np.random.default_rng(0)
    # To some rows eps is large, to others it is nothing.
    sizes = 10 ** rng.uniform(-5, 1, (3, 16, 1))
    x = sizes * (0.3 + rng.standard_normal((3, 16, 64)))
    scale = rng.uniform(0.5, 2, 64)
    return _verdict("rms_norm", function, oracle.rms_norm, x, scale, 3e-5)


def rope(function: Component) -> Verdict:
    """Check ``function(x, positions, theta)``: rotary position embedding.

    ``x`` is ``[batch, heads, seq, head_dim]``, ``positions`` are integers ``[seq]``. Channels ``i``
    and ``i + head_dim / 2`` are a pair that turns by ``position * theta ** (-2 * i / head_dim)``.
    """
    x = np.random.default_rng(0).standard_normal((2, 3, 40, 64))
    return _verdict("rope", function, _right_rope, x, np.arange(7, 47), 5e4)


def attention(function: Component) -> Verdict:
    """Check ``function(q, k, v)``: causal attention.

    ``q`` is ``[batch, heads, seq, head_dim]``; ``k`` and ``v`` have ``kv_heads``. Query head ``n``
    uses key-value head ``n // (heads / kv_heads)``; a token sees itself and those before it.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 12, 16)) for heads in (6, 2, 2))
    return _verdict("attention", function, _right_attention, q, k, v)


def swiglu(function: Component) -> Verdict:
    """Check ``function(x, w_gate, w_up, w_down)``: the MLP.

    ``x`` is ``[batch, seq, embed]``, ``w_gate`` and ``w_up`` are ``[embed, mlp]``, ``w_down`` is
    ``[mlp, embed]``.
    """
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 32), (32, 48), (32, 48), (48, 32))
    arrays = (rng.standard_normal(shape) / shape[0] ** 0.5 for shape in shapes)
    return _verdict("swiglu", function, oracle.swiglu, *arrays)


def cross_entropy(function: Component) -> Verdict:
    """Check ``function(logits, tokens, mask)``: a language model's mean loss, in nats a token.

    ``logits``, ``[batch, seq, vocab]``, were computed from ``tokens``, ``[batch, seq]``: each
    predicts the next token. ``mask``, ``[batch, seq]``, is true for tokens whose prediction counts.
    """
    rng = np.random.default_rng(0)
    logits = 800 + 2 * rng.standard_normal((3, 12, 20))
    tokens = rng.integers(0, 20, (3, 12))
    logits[:, :-1] += 3 * np.eye(20)[tokens[:, 1:]]  # they know something of the next token
    mask = rng.random((3, 12)) < [[0.3], [0.6], [0.9]]
    return _verdict("cross_entropy", function, _right_loss, logits, tokens, mask)


def block(function: Component) -> Verdict:
    """Check ``function(x, weights, config)``: a transformer layer, causal, at positions from 0.

    ``x`` is ``[batch, seq, embed]``, ``config`` a ``jllama.LlamaConfig``. ``weights`` are
    ``attn_norm``, ``wq``, ``wk``, ``wv`` (``[embed, heads, head_dim]``), ``wo``
    (``[heads, head_dim, embed]``), ``mlp_norm``, ``w_gate``, ``w_up``, ``w_down``.
    """
    params, tokens, config = _small_model()
    weights = {name: stack[0] for name, stack in params["layers"].items()}
    return _verdict("block", function, _block, params["embed"][tokens], weights, config)


def model(function: Component) -> Verdict:
    """Check ``function(params, tokens, config)``: a whole model's logits, ``[batch, seq, vocab]``.

    ``tokens`` are ``[batch, seq]``. ``params`` are ``embed`` (``[vocab, embed]``), ``layers`` (the
    weights of ``block``, stacked on a first axis), ``final_norm`` and ``lm_head``
    (``[embed, vocab]``).
    """
    return _verdict("model", function, oracle.forward, *_small_model())


def cache(function: Component) -> Verdict:
    """Check ``function(params, tokens, config, cache)``: a model that is fed in several calls.

    It returns the logits of these tokens, and the cache for the tokens that follow. ``cache`` is
    None with the first five tokens of each row. Then each row gets a token at a time, with the
    cache that the last call returned.
    """
    return _verdict("cache", function, oracle.forward, *_small_model(), None, run=_run_in_parts)


def sampler(function: Component) -> Verdict:
    """Check ``function(logits, temperature, top_k, top_p)``: a token drawn for each row.

    ``logits`` are ``[batch, vocab]``, the tokens ``[batch]``. ``top_p`` is a share of what
    ``top_k`` leaves. The rows are alike: how often each token was drawn is compared.
    """
    logits = np.tile(1.5 * np.sin(np.arange(8)), (2**16, 1))
    return _verdict("sampler", function, _shares, logits, 0.7, 6, 0.85, run=_run_for_shares)


def adamw(function: Component) -> Verdict:
    """Check ``function(w, gradients, learning_rate, beta1, beta2, eps, weight_decay)``: AdamW.

    It returns ``w`` after a step for each of the gradients.
    """
    w, *gradients = np.random.default_rng(0).standard_normal((5, 30))
    return _verdict("adamw", function, _adamw, w, np.stack(gradients), 0.1, 0.8, 0.9, 0.3, 0.2)


def _small_model() -> tuple[Any, Any, Any]:
    """Return parameters, tokens and the configuration of a model of two layers."""
    config = LlamaConfig(
        vocab_size=40, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, rope_theta=5e4
    )
    return random_params(config, 0), np.random.default_rng(0).integers(0, 40, (2, 12)), config


def _run_in_parts(function: Component, params: Any, tokens: Any, config: Any, cache: Any) -> Any:
    """Feed five tokens and then one at a time; return the logits of all."""
    logits = []
    for part in np.split(tokens, range(5, 12), axis=1):
        part_logits, cache = function(params, part, config, cache)
        logits.append(part_logits)
    return np.concatenate(logits, axis=1)


def _run_for_shares(function: Component, *inputs: Any) -> Any:
    """Return how often each token was drawn, in float16, which is as exact as draws are."""
    return np.float16(np.bincount(function(*inputs), minlength=8) / 2**16)


def _verdict(
    component: str,
    function: Component,
    right: Component,
    *inputs: Any,
    run: Component | None = None,
) -> Verdict:
    """Compare a component with the right one; if they differ, look for a known mistake.

    Args:
        component: the name of the check.
        function: the component.
        right: the right component, which takes the same ``inputs``.
        inputs: the arguments.
        run: calls ``function`` and returns what to compare; if None, that is the value of one call.
    """
    # 1) Check that the function takes the inputs.
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError as error:
        form = globals()[component].__doc__.split("``")[1]
        raise UsageError(
            f"{component} is called as ``{form}``, but your function does not take that: {error}"
        ) from error

    # 2) Compare its result with the right one.
    expected = np.asarray(right(*inputs))
    call = partial(run, function) if run else function
    result = call(*copy.deepcopy(inputs))  # the function may write on its inputs
    # Code that computes in float32 meets 1e-4 in any wider dtype too.
    is_16_bit = "16" in str(getattr(result, "dtype", ""))
    tolerance = 3e-2 if is_16_bit else 1e-4
    result = detached(result)
    if result is None or np.shape(result) != expected.shape:
        shape = "nothing" if result is None else list(np.shape(result))
        remark = f"It returns {shape} where the shape {list(expected.shape)} is expected."
        return Verdict(component, np.nan, tolerance, remark=remark)
    actual = np.asarray(result, np.float64)
    error = relative_error(actual, expected)
    if error < tolerance:
        return Verdict(component, error, tolerance)

    # 3) Look for a known mistake that gives the same result.
    mistakes = MISTAKES[component]
    with np.errstate(all="ignore"):
        distances = {name: _distance(actual, wrong(*inputs)) for name, wrong in mistakes.items()}
    distance, nearest = min((distance, name) for name, distance in distances.items())
    if distance < tolerance:
        return Verdict(component, error, tolerance, nearest)

    # 4) If there is none, report the place with the largest difference.
    place = np.unravel_index(np.argmax(np.abs(actual - expected)), actual.shape)
    remark = (
        f"It behaves like none of the {len(mistakes)} known mistakes; the largest difference is at "
        f"{list(map(int, place))}: {actual[place]:.4g} where {expected[place]:.4g} is right."
    )
    return Verdict(component, error, tolerance, remark=remark)


def _distance(actual: Any, wrong: Any) -> float:
    """Compute the relative error against a mistake's values where these are finite.

    Elsewhere the values depend on how the mistake is written. If none of them is finite, the
    distance is 0 from values that are not finite either.
    """
    is_finite = np.isfinite(wrong)
    if not is_finite.any():
        return np.inf if np.isfinite(actual).any() else 0.0
    error = relative_error(actual[is_finite], wrong[is_finite])
    return float(np.nan_to_num(error, nan=np.inf))


def _right_rope(x: Any, positions: Any, theta: float) -> Any:
    half = x.shape[-1] // 2
    return oracle.rotate(x, positions, theta ** (-np.arange(half) / half))


def _right_attention(q: Any, k: Any, v: Any) -> Any:
    mask = np.tri(q.shape[2], dtype=bool)
    return [oracle.attention(*row, mask) for row in zip(q, k, v, strict=True)]


def _right_loss(logits: Any, tokens: Any, mask: Any) -> float:
    total, count = oracle.cross_entropy(logits[:, :-1], tokens[:, 1:], mask[:, 1:])
    return total / count


# Components with arguments that make them wrong; by default they are right.


def _norm(
    x: Any,
    scale: Any,
    eps: float,
    axis: Any = -1,
    mean: Component = np.mean,
    power: float = 0.5,
    outside: int = 0,
) -> Any:
    """RMSNorm; with ``outside`` 1, eps is outside the square root."""
    inside = 1 - outside
    root = (mean(x * x, axis=axis, keepdims=True) + inside * eps) ** power
    return x / (root + outside * eps) * scale


def _rope(
    x: Any,
    at: Any,
    theta: float,
    apart: int = 32,
    table: int = 32,
    sign: int = -1,
    dtype: Any = float,
) -> Any:
    """RoPE of ``[..., 64]``, as ``x * cos + partner * sin``.

    The channels of a pair are ``apart`` from each other in ``x``, and ``table`` in the table of
    angles: half the width or, interleaved, 1.
    """
    channel = np.arange(x.shape[-1])
    partner = channel ^ apart
    pair = channel // 2 if table == 1 else channel % table
    angles = np.outer(at, theta ** (-2 / x.shape[-1] * pair))
    cos = np.cos(angles).astype(dtype)
    sin = np.sin(angles).astype(dtype)
    return x * cos + np.where(channel & apart, 1, sign) * x[..., partner] * sin


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
    """Attention; a query sees keys that are ``ahead`` of it by no less and no more than that.

    ``hide`` is the score of all others; with None, their weights are zeroed after the softmax.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (repeat(heads, group, axis=1) for heads in (k, v))
    distance = np.subtract.outer(np.arange(q.shape[2]), np.arange(q.shape[2])).T
    mask = (distance >= ahead[0]) & (distance <= ahead[1])
    scores = q @ k.swapaxes(2, 3) / scale
    if hide is not None:
        scores = np.where(mask, scores, hide)
    weights = oracle.softmax(scores.swapaxes(axis, -1)).swapaxes(axis, -1)
    if hide is None:
        weights = weights * mask
    return weights @ v


def _glu(
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    act: Component = jax.nn.silu,
    join: Component = np.multiply,
) -> Any:
    return np.asarray(join(act(x @ w_gate), x @ w_up)) @ w_down


def _loss(
    logits: Any, tokens: Any, mask: Any, shift: int = 1, mean: Component | None = None
) -> Any:
    logits = logits[:, : tokens.shape[1] - shift]
    targets = tokens[:, shift:, None]
    mask = mask[:, shift:]
    losses = -np.log(np.take_along_axis(oracle.softmax(logits), targets, -1)[..., 0])
    return mean(losses, mask) if mean else (losses * mask).sum() / mask.sum()


def _block(x: Any, weights: Any, config: Any, ahead: int = 0, turns: int = 1) -> Any:
    mask = np.tri(12, k=ahead, dtype=bool)
    frequencies = turns * oracle.rope_frequencies(config)
    rows = (oracle.block(row, weights, config, mask, np.arange(12), frequencies) for row in x)
    return np.stack([*rows])


def _shares(logits: Any, temperature: float, top_k: int, top_p: float) -> Any:
    """Return the probabilities that a sampler draws with."""
    probs = oracle.softmax(logits[0] / temperature)
    order = np.argsort(-probs)
    probs[order[top_k:]] = 0
    likelier = np.cumsum(probs[order]) - probs[order]
    is_beyond = likelier >= top_p * probs.sum()
    probs[order[is_beyond]] = 0
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


def _wrong(right: Component, changes: dict[str, Any]) -> dict[str, Component]:
    """Return known mistakes by their names, as functions of what the component takes.

    Args:
        right: the component.
        changes: for each mistake, the arguments of ``right`` that it changes, or a whole function.
    """
    return {name: partial(_run_changed, right, change) for name, change in changes.items()}


def _run_changed(right: Component, change: Any, *inputs: Any) -> Any:
    if callable(change):
        return change(*inputs)
    return right(**inspect.signature(right).bind(*inputs).arguments | change)


_POSITIONS = np.tile(np.arange(12), (2, 1))
MISTAKES: dict[str, dict[str, Component]] = {
    "rms_norm": _wrong(
        _norm,
        {
            "eps is outside the square root": {"outside": 1},
            "eps is left out": {"eps": 0},
            "eps is always 1e-5": {"eps": 1e-5},
            "eps is always 1e-6": {"eps": 1e-6},
            "the scale is left out": {"scale": 1},
            "the scale is 1 + scale, as in Gemma": lambda x, scale, eps: _norm(x, 1 + scale, eps),
            "the scale comes before the mean": lambda x, scale, eps: _norm(x * scale, 1, eps),
            "the mean is over all axes, not over the last alone": {"axis": None},
            "the mean is over the sequence, not over the last axis": {"axis": -2},
            "the sum is taken, not the mean": {"mean": np.sum},
            "the square root is left out": {"power": 1},
            "the mean of x is subtracted, as in LayerNorm": lambda x, *rest: _norm(
                x - x.mean(-1, keepdims=True), *rest
            ),
        },
    ),
    "rope": _wrong(
        _rope,
        {
            "interleaved pairs: Meta's layout, right for Meta's weights; "
            "jllama and Hugging Face use half-split": {"apart": 1, "table": 1},
            "half-split pairs, with the table of interleaved ones": {"table": 1},
            "interleaved pairs, with the table of half-split ones": {"apart": 1},
            "pairs turn backwards: the sine has the wrong sign": {"at": -np.arange(7, 47)},
            "a minus sign is missing in the turned half": {"sign": 1},
            "theta is always 10,000": {"theta": 1e4},
            "positions always count from 0": {"at": np.arange(40)},
            "positions always count from 1": {"at": np.arange(1, 41)},
            "positions are one too high": {"at": np.arange(8, 48)},
            "the exponent is -i / head_dim, not -2i / head_dim": {"theta": 5e4**0.5},
            "the exponent is -4i / head_dim, not -2i / head_dim": {"theta": 5e4**2},
            "cosines and sines are rounded to bfloat16": {"dtype": jnp.bfloat16},
        },
    ),
    "attention": _wrong(
        _attention,
        {
            "scores are not divided by sqrt(head_dim)": {"scale": 1},
            "scores are divided by head_dim, not by its square root": {"scale": 16},
            "scores are divided by sqrt(heads * head_dim)": {"scale": 96**0.5},
            "query head n uses key-value head n % kv_heads, not n // (heads / kv_heads): "
            "tiled, not repeated": {
                "repeat": lambda x, times, axis: np.concatenate([x] * times, axis)
            },
            "the softmax is over the queries, not over the keys": {"axis": -2},
            "there is no mask": {"ahead": (-99, 99)},
            "mask off by one: a token sees the one after it": {"ahead": (-99, 1)},
            "mask off by one: a token does not see itself": {"ahead": (-99, -1)},
            "the mask is inverted: a token sees only later ones": {"ahead": (1, 99)},
            "the mask is transposed: a token sees itself and later ones": {"ahead": (0, 99)},
            "the mask comes after the softmax: weights do not add up to 1": {"hide": None},
            "masked scores are 0, not minus infinity": {"hide": 0},
        },
    ),
    "swiglu": _wrong(
        _glu,
        {
            "gate and up are swapped": lambda x, gate, up, down: _glu(x, up, gate, down),
            "gelu, not silu": {"act": partial(jax.nn.gelu, approximate=False)},
            "gelu (tanh), not silu": {"act": jax.nn.gelu},
            "relu, not silu": {"act": jax.nn.relu},
            "sigmoid, not silu": {"act": jax.nn.sigmoid},
            "silu is left out": {"act": np.asarray},
            "silu of up too": {"join": lambda gate, up: gate * jax.nn.silu(up)},
            "gate and up are added, not multiplied": {"join": np.add},
            "up is left out": {"join": lambda gate, up: gate},
            "silu comes after gate times up": {
                "act": np.asarray,
                "join": lambda gate, up: jax.nn.silu(gate * up),
            },
        },
    ),
    "cross_entropy": _wrong(
        _loss,
        {
            "labels are not shifted": {"shift": 0},
            "labels are shifted the wrong way": lambda *arrays: _loss(
                *(array[:, ::-1] for array in arrays)
            ),
            "the mask is not shifted with the labels": lambda x, y, mask: _loss(
                x, y, np.roll(mask, 1, 1)
            ),
            "the mask is left out": {"mean": lambda x, mask: x.mean()},
            "the mean is over all tokens, not over those that count": {
                "mean": lambda x, mask: (x * mask).mean()
            },
            "the mean is of rows' means": {
                "mean": lambda x, mask: ((x * mask).sum(1) / mask.sum(1)).mean()
            },
            "the sum is taken, not the mean": {"mean": lambda x, mask: (x * mask).sum()},
            "the minus sign is left out": lambda *arrays: -_loss(*arrays),
            "bits, not nats": lambda *arrays: _loss(*arrays) / np.log(2),
            "the softmax is taken twice": lambda logits, *rest: _loss(
                oracle.softmax(logits), *rest
            ),
            "the largest logit is not subtracted first: exp overflows": lambda *_: np.float64(
                np.nan
            ),
        },
    ),
    "block": _wrong(
        _block,
        {
            "there is no mask": {"ahead": 12},
            "mask off by one: a token sees the one after it": {"ahead": 1},
            "there is no RoPE": {"turns": 0},
        },
    ),
    "model": _wrong(oracle.forward, {"there is no RoPE": {"positions": 0 * _POSITIONS}}),
    "cache": _wrong(
        oracle.forward,
        {
            "positions count from 0 in every call": {"positions": _POSITIONS * (_POSITIONS < 5)},
            "cached tokens are not seen": {"segments": np.maximum(_POSITIONS, 4)},
        },
    ),
    "sampler": _wrong(
        _shares,
        {
            "the temperature is left out": {"temperature": 1},
            "logits are multiplied by the temperature": {"temperature": 1 / 0.7},
            "the likeliest token is always taken": {"temperature": 0.01},
            "top_k is left out": {"top_k": 8},
            "top_p is left out": {"top_p": 1},
        },
    ),
    "adamw": _wrong(
        _adamw,
        {
            "weight decay is left out": {"decay": 0},
            "weight decay is not multiplied by the learning rate": {"decay": 2},
            "weight decay is added to the gradients, as in Adam": {"decay": 0, "l2": 0.2},
            "eps is left out": {"eps": 0},
        },
    ),
}
"""Known mistakes of each component by their names: functions that take what the component takes."""
