"""The code under test, as a value: the checks run on jllama's own, and on copies with one thing deliberately wrong."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

import jllama.model
from jllama.checkpoints.registry import Layout, load
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.model import KVCache
from jllama.parameters import Params


class Implementation(NamedTuple):
    """What the checks call.

    Args:
        load: ``(path, rope_factor, layout) -> (config, params)``, as ``jllama.load``.
        forward: ``(config, params, tokens, segments=None, positions=None, attention="auto")``, in either layout.
        extend: ``(config, decode params, tokens, cache, counts) -> (logits, cache)``.
        loss: ``(config, params, tokens, mask, remat=False)``: the mean over all tokens but the first where ``mask``
            holds, in nats; zero if nowhere.
    """

    load: Callable[[Path, float | None, Layout], tuple[LlamaConfig, Params | DecodeParams]]
    forward: Callable[..., Array]
    extend: Callable[..., tuple[Array, KVCache]]
    loss: Callable[..., Array]


def implementation_of(model: types.ModuleType) -> Implementation:
    """The implementation that ``jllama.model``, or a copy of it, makes up; nothing in it is compiled yet."""

    def load_params(path: Path, rope_factor: float | None, layout: Layout) -> tuple[LlamaConfig, Params | DecodeParams]:
        loaded = load(path, layout=layout, rope_factor=rope_factor)
        return loaded.config, loaded.params

    def forward(config: LlamaConfig, params: Params | DecodeParams, *inputs: Any, **options: Any) -> Array:
        llama = model.build_model(config, params)
        return llama.logits(llama.hidden(*inputs, **options))

    def extend(config: LlamaConfig, params: DecodeParams, tokens: Array, cache: KVCache, counts: Array) -> tuple:
        llama = model.build_model(config, params)
        hidden, longer = llama.forward_with_cache(tokens, model.KVCache(*cache), counts)
        return llama.logits(hidden), KVCache(*longer)

    def loss(config: LlamaConfig, params: Params, tokens: Array, mask: Array, remat: bool = False) -> Array:
        llama = model.build_model(config, params)
        total, count = llama.loss(llama.hidden(tokens[:, :-1], remat=remat), tokens[:, 1:], mask)
        return total / jnp.maximum(count, 1)

    return Implementation(load_params, forward, extend, loss)


def model_with(**wrong: Any) -> types.ModuleType:
    """A copy of ``jllama.model`` in which some pure functions (such as ``rope_tables``) are replaced."""
    copy = types.ModuleType("jllama.model_copy")
    exec(compile(Path(jllama.model.__file__).read_text(), jllama.model.__file__, "exec", dont_inherit=True), vars(copy))
    vars(copy)["F"] = types.SimpleNamespace(**vars(jllama.model.F) | wrong)
    return copy


def compiled(implementation: Implementation) -> Implementation:
    """The same implementation with ``forward`` and ``extend`` under ``jit``."""
    forward = jax.jit(implementation.forward, static_argnames=("config", "attention"))
    return implementation._replace(forward=forward, extend=jax.jit(implementation.extend, static_argnames="config"))


@functools.cache
def jllama_itself() -> Implementation:
    """The code that users run, compiled."""
    return compiled(implementation_of(jllama.model))
