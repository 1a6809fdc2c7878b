"""The code under test, as a value: the checks run on jllama's own, and on copies with one thing deliberately wrong."""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

import jllama.model
from jllama.checkpoints.registry import load
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.model import KVCache
from jllama.parameters import Params


class Implementation(NamedTuple):
    """What the checks call.

    Args:
        load: ``(path, rope_factor) -> (config, params)``, layers stacked; ``rope_factor`` as in ``jllama.load``.
        forward: ``(config, params, tokens, segments=None, positions=None, remat=False) -> logits``.
        extend: ``(config, unstacked params, tokens, cache, counts) -> (logits, cache)``.
    """

    load: Callable[[Path, float | None], tuple[LlamaConfig, Params]]
    forward: Callable[..., Array]
    extend: Callable[..., tuple[Array, KVCache]]


def implementation_of(model: types.ModuleType) -> Implementation:
    """The implementation that ``jllama.model``, or a copy of it, makes up; nothing in it is compiled yet."""

    def forward(
        config: LlamaConfig, params: Params | DecodeParams, tokens: Array, *where: Any, **options: Any
    ) -> Array:
        llama = model.build_model(config, params)
        return llama.logits(llama.hidden(tokens, *where, **options))

    def extend(
        config: LlamaConfig, params: DecodeParams, tokens: Array, cache: KVCache, counts: Array
    ) -> tuple[Array, KVCache]:
        llama = model.build_model(config, params)
        hidden, longer = llama.forward_with_cache(tokens, model.KVCache(*cache), counts)
        return llama.logits(hidden), KVCache(*longer)

    def load_params(path: Path, rope_factor: float | None) -> tuple[LlamaConfig, Params]:
        loaded = load(path, layout="training", rope_factor=rope_factor)
        params: Any = loaded.params
        return loaded.config, params

    return Implementation(load_params, forward, extend)


def model_with(**wrong: Any) -> types.ModuleType:
    """A copy of ``jllama.model`` in which some pure functions (such as ``rope_tables``) are replaced."""
    spec = importlib.util.spec_from_file_location("jllama.model_copy", jllama.model.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy)["F"] = types.SimpleNamespace(**vars(jllama.model.F) | wrong)
    return copy


def compiled(implementation: Implementation) -> Implementation:
    """The same implementation under ``jit``."""
    forward = jax.jit(implementation.forward, static_argnames=("config", "remat"))
    return implementation._replace(forward=forward, extend=jax.jit(implementation.extend, static_argnames="config"))


@functools.cache
def jllama_itself() -> Implementation:
    """The code that users run, compiled."""
    return compiled(implementation_of(jllama.model))
