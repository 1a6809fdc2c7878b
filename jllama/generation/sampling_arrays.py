"""What a request may ask for, and the arrays that a batch's settings become: data, so changing one compiles nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.generation.sampling_params import SamplingParams
from jllama.sharding import device_memory_bytes

_STOP_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of a batch.

    Args:
        ids: the prompt, at least one token.
        sampling: how to choose.
        max_new_tokens: the most tokens to make; None goes on to the end of the model's context.
        stop_ids: the row ends when it draws one of these.
    """

    ids: Sequence[int]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    stop_ids: Sequence[int] = ()

    def limit(self, max_seq_len: int) -> int:
        """The length, prompt and new tokens together, at which the row ends."""
        return max_seq_len if self.max_new_tokens is None else len(self.ids) + self.max_new_tokens


class SamplingArrays(NamedTuple):
    """The settings of every row of a batch as arrays."""

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    min_p: Float[Array, "batch"]
    repetition_penalty: Float[Array, "batch"]
    presence_penalty: Float[Array, "batch"]
    frequency_penalty: Float[Array, "batch"]
    bias: Float[Array, "batch vocab"]
    banned: Bool[Array, "batch vocab"]
    keys: Key[Array, "batch"]
    stop_ids: Int[Array, "batch stops"]
    limits: Int[Array, "batch"]


def check_requests(requests: Sequence[Request], max_seq_len: int, vocab_size: int) -> None:
    """Raise ``UsageError`` unless every request can be met, before anything is computed.

    Every prompt needs a token, must fit the context with its new ones, and every id must be in the vocabulary.
    """
    if not requests:
        raise UsageError("there is no prompt: give at least one")
    for request in requests:
        if request.max_new_tokens is not None and request.max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {request.max_new_tokens}; it must not be negative")
        length = len(request.ids)
        if length < 1:
            raise UsageError("a prompt has no tokens: it needs at least the BOS token")
        new = 1 if request.max_new_tokens is None else request.max_new_tokens
        if length + new > max_seq_len:
            room = max_seq_len - length
            raise UsageError(
                f"the prompt's {length} tokens and {new} new ones exceed the model's context of {max_seq_len}: shorten "
                f"the prompt{f' or lower max_new_tokens to at most {room}' if room > 0 else ''}"
            )
        sampling = request.sampling
        for name, ids in (
            ("prompt has", request.ids),
            ("stop_ids have", request.stop_ids),
            ("logit_bias has", sampling.logit_bias),
            ("banned_ids have", sampling.banned_ids),
        ):
            if unknown := [id for id in ids if not 0 <= id < vocab_size]:
                raise UsageError(f"the {name} token {unknown[0]}; the ids run from 0 to {vocab_size - 1}")
        if len(set(sampling.banned_ids)) == vocab_size:
            raise UsageError("banned_ids bans every token: leave at least one")


def check_batch(config: LlamaConfig, rows: int, drafts: int = 0) -> None:
    """Refuse a batch that cannot fit, before any of it is made: what is counted is the least that its rows take.

    Each row has keys and values of a short text, 2 bytes a number, and for each token of the vocabulary a bias, a count
    and, of each token fed, a float32 logit.

    Raises:
        UsageError: the device, or on a CPU the machine, has less memory; or the drafts exceed the context.
    """
    if not 0 <= drafts < config.max_seq_len:
        raise UsageError(f"speculate is {drafts}; it must be from 0 to below the model's context, {config.max_seq_len}")
    cached = 4 * config.num_layers * config.num_kv_heads * config.head_dim * min(config.max_seq_len, 128)
    needed = rows * (cached + config.vocab_size * (8 + 4 * (drafts + 1)))
    have = device_memory_bytes(jax.devices()[0])
    if have and needed > have:
        raise UsageError(
            f"{rows:,} texts at once take at least {needed / 2**30:,.0f} GiB of memory, and there are "
            f"{have / 2**30:,.0f}: take fewer"
        )


def sampling_arrays(requests: Sequence[Request], max_seq_len: int, model_vocab: int, vocab_size: int) -> SamplingArrays:
    """The requests' settings as arrays.

    Ids from ``vocab_size``, the tokenizer's, up to ``model_vocab``, the rows of the embedding, are banned.
    """
    rows = [request.sampling for request in requests]
    bias = np.zeros((len(rows), model_vocab), np.float32)
    banned = np.zeros((len(rows), model_vocab), bool)
    banned[:, vocab_size:] = True
    for row, sampling in enumerate(rows):
        for id, value in sampling.logit_bias.items():
            bias[row, id] = value
        banned[row, list(sampling.banned_ids)] = True
    widest = max(len(request.stop_ids) for request in requests)
    stop_ids = np.full((len(rows), max(1, -(-widest // _STOP_MULTIPLE)) * _STOP_MULTIPLE), -1, np.int32)
    for row, request in enumerate(requests):
        stop_ids[row, : len(request.stop_ids)] = request.stop_ids

    def array(name: str) -> Array:
        dtype = {"top_k": np.int32, "seed": np.uint32}.get(name, np.float32)
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    return SamplingArrays(
        **{name: array(name) for name in SamplingArrays._fields if hasattr(rows[0], name)},
        bias=jnp.asarray(bias),
        banned=jnp.asarray(banned),
        keys=jax.vmap(jax.random.key)(array("seed")),
        stop_ids=jnp.asarray(stop_ids),
        limits=jnp.asarray(np.array([request.limit(max_seq_len) for request in requests], np.int32)),
    )


def choose(
    logits: Float[Array, "batch vocab"],
    settings: SamplingArrays,
    lengths: Int[Array, "batch"],
    seen: Bool[Array, "batch vocab"],
    counts: Int[Array, "batch vocab"],
) -> Int[Array, "batch"]:
    """The next token of each row.

    Args:
        logits: float32.
        settings: of every row.
        lengths: how many tokens come before: with the seed they decide the draw, and nothing else of the batch does.
        seen: which tokens are in the prompt.
        counts: how often each token was generated.
    """

    def penalize(logits: Array) -> Array:
        logits = F.penalize_repetition(logits, seen | (counts > 0), settings.repetition_penalty)
        logits = F.penalize_presence(logits, counts, settings.presence_penalty)
        return F.penalize_frequency(logits, counts, settings.frequency_penalty)

    no_penalty = (
        (settings.repetition_penalty == 1) & (settings.presence_penalty == 0) & (settings.frequency_penalty == 0)
    )
    logits = F.ban(logits + settings.bias, settings.banned)
    logits = jax.lax.cond(jnp.all(no_penalty), lambda logits: logits, penalize, logits)
    keys = jax.vmap(jax.random.fold_in)(settings.keys, lengths)
    return F.sample(logits, keys, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
