"""Every known mistake is told by its name, and right components of any library pass."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jllama
from jllama import functional as F
from jllama.lab import check
from jllama.models import oracle

FLOAT32 = 1e-4
DRAWN = 3e-2


def float32(array):
    is_wide = isinstance(array, np.ndarray) and array.dtype == np.float64
    return np.float32(array) if is_wide else array


@functools.partial(jax.jit, static_argnames="theta")
def jax_rope(x, positions, theta):
    frequencies = theta ** (-np.arange(x.shape[-1] // 2) * 2 / x.shape[-1])
    return F.apply_rope(x, *F.rope_tables(positions[None], frequencies))


@jax.jit
def jax_cross_entropy(logits, tokens, mask):
    head = jnp.eye(logits.shape[-1])
    total, count = F.linear_cross_entropy(logits[:, :-1], head, tokens[:, 1:], mask[:, 1:])
    return total / count


def torch_rms_norm(x, scale, eps):
    weight = torch.from_numpy(scale).requires_grad_()
    return torch.nn.functional.rms_norm(torch.from_numpy(x), (64,), weight, eps)


def torch_attention(q, k, v):
    q, k, v = map(torch.from_numpy, (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def torch_swiglu(x, w_gate, w_up, w_down):
    x, w_gate, w_up, w_down = (
        torch.from_numpy(array).to(torch.bfloat16) for array in (x, w_gate, w_up, w_down)
    )
    return (torch.nn.functional.silu(x @ w_gate) * (x @ w_up)) @ w_down


def torch_cross_entropy(logits, tokens, mask):
    targets = torch.from_numpy(np.where(mask, tokens, -100))[:, 1:]
    return torch.nn.functional.cross_entropy(
        torch.from_numpy(logits)[:, :-1].flatten(0, 1), targets.flatten()
    )


@functools.partial(jax.jit, static_argnames="config")
def jax_block(x, weights, config):
    def rotate(heads):
        frequencies = config.rope_theta ** (-np.arange(config.head_dim // 2) * 2 / config.head_dim)
        return F.apply_rope(heads, *F.rope_tables(jnp.arange(x.shape[1])[None], frequencies))

    h = F.rms_norm(x, weights["attn_norm"], config.norm_eps)
    q, k, v = (jnp.einsum("bte,enh->bnth", h, weights[name]) for name in ("wq", "wk", "wv"))
    x = x + jnp.einsum("bnth,nhe->bte", F.attention(rotate(q), rotate(k), v), weights["wo"])
    h = F.rms_norm(x, weights["mlp_norm"], config.norm_eps)
    return x + F.swiglu(h, weights["w_gate"], weights["w_up"], weights["w_down"])


@functools.partial(jax.jit, static_argnames="config")
def jax_model(params, tokens, config):
    return jllama.build_model(config, params)(tokens)


@functools.partial(jax.jit, static_argnames="config")
def jax_cache(params, tokens, config, cache):
    """jllama's own cache, which takes a whole prompt and then a token at a time."""
    decoding = jllama.build_model(config, jllama.decode_layout(params, config))
    cache = jllama.KVCache.zeros(config, len(tokens), 16) if cache is None else cache
    counts = jnp.full(len(tokens), tokens.shape[1])
    hidden, cache = decoding.decode(tokens, cache, counts)
    return decoding.logits(hidden), cache


@jax.jit
def jax_sampler(logits, temperature, top_k, top_p):
    rows = len(logits)
    settings = {"top_k": jnp.full(rows, top_k), "top_p": jnp.full(rows, top_p)}
    keys = jax.random.split(jax.random.key(0), rows)
    return F.sample(logits, keys, jnp.full(rows, temperature), **settings)


def torch_adamw(w, gradients, learning_rate, beta1, beta2, eps, weight_decay):
    parameter = torch.nn.Parameter(torch.from_numpy(w))
    steps = torch.optim.AdamW([parameter], learning_rate, (beta1, beta2), eps, weight_decay)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        steps.step()
    return parameter


@pytest.mark.parametrize(
    ("component", "function", "tolerance"),
    [
        ("rms_norm", jax.jit(F.rms_norm, static_argnames="eps"), FLOAT32),
        ("rope", jax_rope, FLOAT32),
        ("attention", jax.jit(F.attention), FLOAT32),
        ("swiglu", jax.jit(F.swiglu), FLOAT32),
        ("cross_entropy", jax_cross_entropy, FLOAT32),
        ("rms_norm", torch_rms_norm, FLOAT32),
        ("attention", torch_attention, FLOAT32),
        ("swiglu", torch_swiglu, 3e-2),
        ("cross_entropy", torch_cross_entropy, FLOAT32),
        ("swiglu", oracle.swiglu, FLOAT32),
        ("cross_entropy", lambda *arrays: float(torch_cross_entropy(*arrays)), FLOAT32),
        ("block", jax_block, FLOAT32),
        ("model", jax_model, FLOAT32),
        ("cache", jax_cache, FLOAT32),
        ("sampler", jax_sampler, DRAWN),
        ("adamw", torch_adamw, FLOAT32),
    ],
)
def test_right_components_pass(component, function, tolerance):
    verdict = getattr(check, component)(function)
    assert verdict
    assert verdict.ok
    assert verdict.error < verdict.tolerance == tolerance
    assert str(verdict) == f"{component}: equal to the oracle (tolerance {tolerance:.0e})."


def a_part_at_a_time(forward):
    """A cache whose logits are those that ``forward`` gives for whole rows."""

    def function(params, tokens, config, seen):
        begin = seen or 0
        end = begin + tokens.shape[1]
        return forward(params, check._small_model()[1], config, None)[:, begin:end], end

    return function


def drawing(shares):
    """A sampler that draws with these probabilities."""

    def function(logits, *settings):
        probs = np.float64(shares(logits, *settings))
        return np.random.default_rng(0).choice(len(probs), len(logits), p=probs / probs.sum())

    return function


@pytest.mark.parametrize(
    ("component", "mistake"), [(c, m) for c, table in check.MISTAKES.items() for m in table]
)
def test_every_mistake_is_told_by_its_name(component, mistake):
    wrong = check.MISTAKES[component][mistake]
    written = {"cache": a_part_at_a_time, "sampler": drawing}.get(component, lambda right: right)
    with np.errstate(all="ignore"):
        for function in (wrong, lambda *arrays: np.float32(wrong(*map(float32, arrays)))):
            function = written(function)
            verdict = getattr(check, component)(function)
            assert not verdict
            assert verdict.mistake == mistake
            assert not verdict.error < 10 * FLOAT32  # NaN too
            first, second = str(verdict).splitlines()
            assert first.startswith(f"{component}: differs from the oracle")
            assert second == f"It behaves like this known mistake: {mistake}."


def test_a_row_that_sees_no_key_may_become_anything():
    def sees_no_self(q, k, v):
        k, v = (np.repeat(heads, 3, axis=1) for heads in (k, v))
        scores = np.where(np.tri(q.shape[2], k=-1), q @ k.swapaxes(2, 3) / 4, -1e9)
        return oracle.softmax(scores) @ v

    assert check.attention(sees_no_self).mistake == "mask off by one: a token does not see itself"


def test_what_is_not_known_is_shown_where_it_is_worst():
    verdict = check.swiglu(lambda x, *_: np.where(np.arange(32) == 5, 7.0, x))
    assert not verdict
    assert not verdict.mistake
    remark = "It behaves like none of the 10 known mistakes; the largest difference is at ["
    assert remark in str(verdict)
    assert ", 5]: 7 where " in str(verdict)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, scale, eps: None, "nothing"),
        (lambda x, scale, eps: x[0], "[16, 64]"),
        (lambda x, scale, eps: 1.0, "[]"),
        (lambda x, scale, eps: jnp.ones((3, 16)), "[3, 16]"),
    ],
)
def test_another_shape_is_said(function, shape):
    verdict = check.rms_norm(function)
    assert not verdict
    sentence = f"It returns {shape} where the shape [3, 16, 64] is expected."
    assert str(verdict).splitlines() == ["rms_norm: differs from the oracle.", sentence]


@pytest.mark.parametrize("component", check.MISTAKES)
def test_a_wrong_signature_shows_the_call(component):
    form = {
        "rms_norm": "function(x, scale, eps)",
        "cache": "function(params, tokens, config, cache)",
    }.get(component, "function(")
    with pytest.raises(jllama.UsageError, match=re.escape(f"{component} is called as ``{form}")):
        getattr(check, component)(lambda one: one)


def test_errors_pass_through_and_inputs_may_be_overwritten():
    with pytest.raises(ZeroDivisionError):
        check.rms_norm(lambda x, scale, eps: 1 / 0)

    def in_place(x, scale, eps):
        x /= np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        x *= scale
        return x

    assert check.rms_norm(in_place)


def test_statistics_in_float32_are_right_in_any_dtype():
    def as_metas_code(x, scale, eps):
        return np.float64(oracle.rms_norm(np.float32(x), np.float32(scale), eps))

    verdict = check.rms_norm(as_metas_code)
    assert verdict
    assert 1e-9 < verdict.error < 1e-5


def test_under_jit_and_in_64_bits():
    with jax.enable_x64(True):
        assert check.rms_norm(jax.jit(F.rms_norm, static_argnames="eps")).error < 1e-10
