"""Prefill: prompts go through the model, up to their last token, in chunks padded to a few lengths."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.generation import programs
from jllama.generation.decode_batch import DecodeBatch, make_batch
from jllama.generation.sampling_params import Prompt
from jllama.language_model import LanguageModel
from jllama.model import KVCache, build_model, power_of_two_at_least
from jllama.sharding import batch_shardings

_PREFILL_TOKENS, _SHORTEST_PREFILL = 512, 16
_ROOM_TOKENS, _SHORTEST_CACHE = 512, 128


@dataclasses.dataclass
class PrefixCache:
    """Keys and values kept from one call to the next, and taken out meanwhile: what breaks off in it leaves none."""

    ids: Sequence[int] = ()  # the tokens that the cache holds
    cache: KVCache | None = None  # one row

    def take(self, ids: Sequence[int] = ()) -> tuple[KVCache | None, int]:
        """Take out the cache; also how many of ``ids`` it holds, from the first on. Without any, None."""
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, ids, strict=False)))
        cache = self.cache if shared else None
        self.ids, self.cache = (), None
        return cache, shared


def prefill(model: LanguageModel, prompts: Sequence[Prompt], prefix: PrefixCache | None = None) -> DecodeBatch:
    """Compute the keys and values of encoded prompts; of equal ones once, of a single one what ``prefix`` has not."""
    params, config = model.decode_params, model.config
    room = max(min(prompt.limit(config.max_seq_len), len(prompt.ids) + _ROOM_TOKENS) for prompt in prompts)
    max_len = cache_len(room, config)
    if len(prompts) == 1:
        cache = _prompt_cache(params, config, prompts[0].ids[:-1], max_len, prefix)
    else:
        cache = _beside(params, _zeros(config, len(prompts), max_len, params.dtype))
        rows = [tuple(prompt.ids[:-1]) for prompt in prompts]
        for ids in filter(None, dict.fromkeys(rows)):
            row_cache = _prompt_cache(params, config, ids, cache_len(len(ids), config))
            for row, others in enumerate(rows):
                if others == ids:
                    cache = _insert(cache, row_cache, row)
    return _beside(params, make_batch(model, prompts, cache, cache.keys[0].shape[2]))


def _prompt_cache(
    params: DecodeParams, config: LlamaConfig, ids: Sequence[int], max_len: int, prefix: PrefixCache | None = None
) -> KVCache:
    """One row that holds ``ids`` and has room for ``max_len`` or more: what the prefix has, and the rest computed."""
    cache, shared = prefix.take(ids) if prefix else (None, 0)
    if cache is not None:
        cache = resized(cache, max_len) if cache.keys[0].shape[2] < max_len else cache
        cache = cache._replace(lengths=_beside(params, jnp.array([shared], jnp.int32)))
    for first in range(shared, len(ids), _PREFILL_TOKENS):
        chunk = ids[first : first + _PREFILL_TOKENS]
        padded = np.zeros((1, power_of_two_at_least(len(chunk), _SHORTEST_PREFILL)), np.int32)
        padded[0, : len(chunk)] = chunk
        longer = programs.call(_prefill, params, config, cache, padded, np.array([len(chunk)], np.int32))
        cache = resized(longer, max_len) if cache is None else longer
    return _beside(params, _zeros(config, 1, max_len, params.dtype)) if cache is None else cache


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(params: DecodeParams, config: LlamaConfig, cache: KVCache | None, tokens: Any, count: Any) -> KVCache:
    return build_model(config, params).forward_with_cache(jnp.asarray(tokens), cache, jnp.asarray(count))[1]


@functools.partial(jax.jit, donate_argnames="batch")
def _insert(batch: KVCache, row_cache: KVCache, row: Any) -> KVCache:
    """Copy a cache of one row into a batch whose rows have at least as much room."""
    copy = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda into, values: copy(into, values, row, axis=0), batch, row_cache)


@functools.partial(jax.jit, static_argnames="max_len")
def resized(cache: KVCache, max_len: int) -> KVCache:
    """The cache with room for ``max_len`` tokens a row; what is cut off, if anything, must be padding."""
    more = ((0, 0, 0), (0, 0, 0), (0, max_len - cache.keys[0].shape[2], 0), (0, 0, 0))
    return jax.tree.map(lambda leaf: jax.lax.pad(leaf, leaf.dtype.type(0), more) if leaf.ndim == 4 else leaf, cache)


_zeros = jax.jit(KVCache.zeros, static_argnums=(0, 1, 2, 3))  # one program, not one for each layer's arrays


def _beside(params: DecodeParams, tree: Any) -> Any:
    """Arrays of rows on the devices of the parameters, split: where they are is part of what is compiled."""
    where = params.weights["final_norm"].sharding
    return jax.device_put(tree, batch_shardings(where.mesh, tree) if isinstance(where, NamedSharding) else where)


def cache_len(tokens: int, config: LlamaConfig) -> int:
    """The cache length for so many tokens: one of a few, so that few programs are compiled."""
    return min(power_of_two_at_least(tokens, _SHORTEST_CACHE), config.max_seq_len)
