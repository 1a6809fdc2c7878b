"""A batch of rows that are being generated: what the device keeps of them, and how each gets its next token."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.devices import device_memory_bytes
from jllama.errors import UsageError
from jllama.generation.sampling_params import Prompt
from jllama.model import KVCache

_STOP_MULTIPLE = 8
_BUILT_IN = {"temperature", "logit_bias", "banned_ids", "seed"}


class DecodeBatch(NamedTuple):
    """The rows of a batch on the device; the last four fields never change."""

    cache: KVCache  # of all tokens but each row's last
    tokens: Int[Array, "batch max_len"]  # the prompt and what was generated
    log_probs: Float[Array, "batch max_len"]  # of the generated ones, from the raw logits, in nats
    counts: Int[Array, "batch vocab"]  # how often each token was generated
    finished: Bool[Array, "batch"]
    drafted: Int[Array, "batch"]  # tokens that prompt lookup guessed so far
    accepted: Int[Array, "batch"]  # those of them that were right
    seen: Bool[Array, "batch vocab"]  # tokens of the prompt
    settings: dict[str, Shaped[Array, "batch ..."]]  # fields of SamplingParams; those of token ids are [batch, vocab]
    stop_ids: Int[Array, "batch stops"]  # a row ends when it draws one; padded with -1
    limits: Int[Array, "batch"]  # the lengths at which the rows end


def make_batch(prompts: Sequence[Prompt], cache: KVCache, config: LlamaConfig, vocab_size: int) -> DecodeBatch:
    """The rows of these prompts, whose tokens but the last are in the cache; ids from ``vocab_size`` on are banned."""
    num_rows, max_len = len(prompts), cache.keys[0].shape[2]
    tokens, seen = np.zeros((num_rows, max_len), np.int32), np.zeros((num_rows, config.vocab_size), bool)
    most_stops = max(len(prompt.stop_ids or ()) for prompt in prompts)
    stop_ids = np.full((num_rows, max(-(-most_stops // _STOP_MULTIPLE), 1) * _STOP_MULTIPLE), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.ids)] = prompt.ids
        seen[row, list(prompt.ids)] = True
        stop_ids[row, : len(prompt.stop_ids or ())] = prompt.stop_ids or ()
    limits = np.array([prompt.limit(config.max_seq_len) for prompt in prompts], np.int32)
    settings = _setting_arrays(prompts, config.vocab_size)
    settings["banned_ids"][:, vocab_size:] = True
    return DecodeBatch(
        cache,
        jnp.asarray(tokens),
        jnp.zeros(tokens.shape, jnp.float32),
        counts=jnp.zeros(seen.shape, jnp.int32),
        finished=jnp.asarray(np.array([len(prompt.ids) for prompt in prompts]) >= limits),
        drafted=jnp.zeros(num_rows, jnp.int32),
        accepted=jnp.zeros(num_rows, jnp.int32),
        seen=jnp.asarray(seen),
        settings={name: jnp.asarray(values) for name, values in settings.items()},
        stop_ids=jnp.asarray(stop_ids),
        limits=jnp.asarray(limits),
    )


def _setting_arrays(prompts: Sequence[Prompt], vocab_size: int) -> dict[str, np.ndarray]:
    """Each field of the rows' ``SamplingParams`` as an array, with its default where a row's class does not have it."""
    arrays: dict[str, np.ndarray] = {}
    for params in {type(prompt.sampling) for prompt in prompts}:
        for name, hint in typing.get_type_hints(params).items():
            if name not in {*_BUILT_IN, *F.TRUNCATIONS, *F.PENALTIES}:
                raise UsageError(f"nothing applies {name} of {params.__name__}: register a function under its name")
            values = [getattr(prompt.sampling, name, getattr(params(), name)) for prompt in prompts]
            arrays[name] = _array(hint, values, vocab_size)
    return arrays | {"seed": arrays["seed"].astype(np.uint32)}


def _array(hint: Any, values: Sequence[Any], vocab_size: int) -> np.ndarray:
    """A field of all rows: a number each, or of token ids one for each id of the vocabulary (true, of mere ids)."""
    if hint in (int, float):
        return np.array(values, np.float32 if hint is float else np.int64)
    array = np.zeros((len(values), vocab_size), np.float32 if typing.get_origin(hint) is Mapping else bool)
    for row, value in enumerate(values):
        array[row, list(value)] = list(value.values()) if isinstance(value, Mapping) else True
    return array


def check_batch(config: LlamaConfig, rows: int, draft_len: int = 0) -> None:
    """Raise ``UsageError`` for a batch that exceeds the memory, of the device or of the machine, or the context."""
    if not 0 <= draft_len < config.max_seq_len:
        below = f"below the model's context, {config.max_seq_len}"
        raise UsageError(f"speculate is {draft_len}; it must be from 0 to {below}")
    # The least that a row takes: a short text's keys and values in 2 bytes a number, and for each token of the
    # vocabulary a bias, a count and, of each token fed, a float32 logit.
    cached = 4 * config.num_layers * config.num_kv_heads * config.head_dim * min(config.max_seq_len, 128)
    needed = rows * (cached + config.vocab_size * (8 + 4 * (draft_len + 1))) / 2**30
    have = (device_memory_bytes(jax.devices()[0]) or 0) / 2**30
    if 0 < have < needed:
        least = f"{rows:,} texts at once take at least {needed:,.0f} GiB of memory"
        raise UsageError(f"{least}, and there are {have:,.0f}: take fewer")


def sample_tokens(logits: Float[Array, "batch vocab"], batch: DecodeBatch) -> Int[Array, "batch"]:
    """The next token of each row, from its last token's logits, as its settings say.

    A row's seed and length decide its draw, and nothing else of the batch does.
    """
    settings, seen = batch.settings, batch.seen | (batch.counts > 0)
    logits = F.ban(logits + settings["logit_bias"], settings["banned_ids"])
    for name, penalty in F.PENALTIES.items():
        if name in settings:
            logits = penalty(logits, settings[name], seen, batch.counts)
    keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(settings["seed"]), batch.cache.lengths + 1)
    truncations = {name: settings[name] for name in F.TRUNCATIONS if name in settings}
    return F.sample(logits, keys, settings["temperature"], **truncations)


def append_token(
    batch: DecodeBatch, logits: Float[Array, "batch vocab"], takes: Bool[Array, "batch"]
) -> tuple[DecodeBatch, Int[Array, "batch"]]:
    """Draw a token for each row, and write it behind the others of the rows that take it."""
    rows, lengths = jnp.arange(len(takes)), batch.cache.lengths + 1
    token = sample_tokens(logits, batch)
    log_prob = (logits[rows, token] - jax.nn.logsumexp(logits, axis=-1)).astype(jnp.float32)
    ends = jnp.any(token[:, None] == batch.stop_ids, axis=1) | (lengths + 1 >= batch.limits)
    slot = jnp.where(takes, lengths, batch.tokens.shape[1])  # out of range, hence dropped, where a row takes none
    batch = batch._replace(
        cache=batch.cache._replace(lengths=batch.cache.lengths + takes.astype(jnp.int32)),
        tokens=batch.tokens.at[rows, slot].set(token, mode="drop"),
        log_probs=batch.log_probs.at[rows, slot].set(log_prob, mode="drop"),
        counts=batch.counts.at[rows, token].add(takes.astype(jnp.int32)),
        finished=batch.finished | (takes & ends),
    )
    return batch, token
