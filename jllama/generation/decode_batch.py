"""A batch of rows that are being generated: what the device keeps of them, and how each gets its next token."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.devices import device_memory_bytes
from jllama.errors import UsageError
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.language_model import LanguageModel
from jllama.model import KVCache

_STOP_MULTIPLE = 8
_BUILT_IN = {"temperature", "logit_bias", "banned_ids", "seed"}


class DecodeBatch(NamedTuple):
    """The rows of a batch on the device; the last five fields change on the host alone."""

    cache: KVCache  # of all tokens but each row's last
    tokens: Int[Array, "batch max_len"]  # the prompt and what was generated
    log_probs: Float[Array, "batch max_len"]  # of the generated ones, from the raw logits, in nats
    counts: Int[Array, "batch vocab"]  # how often each token was generated
    finished: Bool[Array, "batch"]
    drafted: Int[Array, "batch"]  # tokens that prompt lookup guessed so far
    accepted: Int[Array, "batch"]  # those of them that were right
    seen: Bool[Array, "batch vocab"]  # tokens of the prompt
    settings: dict[
        str, Shaped[Array, "batch ..."]
    ]  # fields of SamplingParams; those of token ids are [batch, vocab]
    stop_ids: Int[Array, "batch stops"]  # a row ends when it draws one; padded with -1
    limits: Int[Array, "batch"]  # the lengths at which the rows end
    allowed: Int32[
        Array, "batch words"
    ]  # a bit a token: what a grammar lets come next, set before each step


def make_batch(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    cache: KVCache,
    max_len: int,
    min_stops: int = 1,
    sampling_types: frozenset[type[SamplingParams]] = frozenset(),
    context: int = 0,
) -> DecodeBatch:
    """The rows of these prompts, whose tokens but the last are in the cache; ids that no token has are banned.

    There is room for the stop ids of each prompt, and for ``min_stops`` at least; and settings of ``sampling_types``
    beside those of the prompts. Rows end at ``context`` tokens, which may be more than there is room for yet; 0: the
    model's.
    """
    config, rows, stops = model.config, len(prompts), [prompt.stop_ids or () for prompt in prompts]
    limits: Any = np.array(
        [prompt.limit(context or config.max_seq_len) for prompt in prompts], np.int32
    )
    zeros: Any = np.zeros  # as good as those of JAX, which types do not say
    tokens, log_probs = zeros((rows, max_len), np.int32), zeros((rows, max_len), np.float32)
    counts, seen = (
        zeros((rows, config.vocab_size), np.int32),
        zeros((rows, config.vocab_size), bool),
    )
    stop_ids = (
        zeros(
            (rows, -(-max(min_stops, *map(len, stops)) // _STOP_MULTIPLE) * _STOP_MULTIPLE),
            np.int32,
        )
        - 1
    )
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.ids)], seen[row, list(prompt.ids)] = prompt.ids, True
        stop_ids[row, : len(stops[row])] = stops[row]
    settings = _setting_arrays(
        [prompt.sampling for prompt in prompts], config.vocab_size, sampling_types
    )
    settings["banned_ids"][
        :, model.tokenizer.vocab_size if model.tokenizer else config.vocab_size :
    ] = True
    finished = [len(prompt.ids) for prompt in prompts] >= limits
    guessed = zeros(rows, np.int32), zeros(rows, np.int32)
    allowed = zeros((rows, -(-config.vocab_size // 32)), np.int32) - 1  # everything
    return DecodeBatch(
        cache,
        tokens,
        log_probs,
        counts,
        finished,
        *guessed,
        seen,
        settings,
        stop_ids,
        limits,
        allowed,
    )


def restricted(
    batch: DecodeBatch, masks: Sequence[Int32[np.ndarray, "words"] | None]
) -> DecodeBatch:
    """The batch in which each row may take what its mask allows next, and one without a mask anything."""
    allowed = np.full(batch.allowed.shape, -1, np.int32)
    for row, words in enumerate(masks):
        if words is not None:
            allowed[row, : len(words)] = words  # the model may have more tokens: they are banned
    return batch._replace(allowed=jax.device_put(allowed, batch.allowed.sharding))


def setting_types(params: type[SamplingParams]) -> dict[str, Any]:
    """The type of each field; ``UsageError`` if there is one that nothing applies."""
    hints = get_type_hints(params)
    for name in hints:
        if name not in {*_BUILT_IN, *F.TRUNCATIONS, *F.PENALTIES}:
            raise UsageError(
                f"nothing applies {name} of {params.__name__}: register a function under its name"
            )
    return hints


def _setting_arrays(
    rows: Sequence[SamplingParams], vocab_size: int, types: frozenset[type[SamplingParams]]
) -> dict[str, Any]:
    """Each field as an array, with its default where a row's class does not have it; token ids over the vocabulary."""
    arrays: dict[str, np.ndarray] = {}
    for params in {*types, *map(type, rows)}:
        for name, hint in setting_types(params).items():
            values = [getattr(row, name, getattr(params(), name)) for row in rows]
            if hint in (int, float):
                arrays[name] = np.array(values, np.float32 if hint is float else np.int64)
                continue
            arrays[name] = np.zeros(
                (len(rows), vocab_size), np.float32 if name == "logit_bias" else bool
            )
            for array, value in zip(arrays[name], values, strict=True):
                array[list(value)] = list(value.values()) if isinstance(value, Mapping) else True
    return arrays | {"seed": arrays["seed"].astype(np.uint32)}


def check_batch(config: LlamaConfig, rows: int, draft_len: int = 0) -> None:
    """Raise ``UsageError`` for a batch that exceeds the memory, of the device or of the machine, or the context."""
    if not 0 <= draft_len < config.max_seq_len:
        context = f"the model's context, {config.max_seq_len}"
        raise UsageError(f"speculate is {draft_len}; it must be from 0 to below {context}")
    # The least: a short text's keys and values in 2 bytes, and by token id a bias, a count and, of each fed, a logit.
    cached = (
        4 * config.num_layers * config.num_kv_heads * config.head_dim * min(config.max_seq_len, 128)
    )
    needed = rows * (cached + config.vocab_size * (8 + 4 * (draft_len + 1))) / 2**30
    have = (device_memory_bytes(jax.devices()[0]) or 0) / 2**30
    if 0 < have < needed:
        least = f"{rows:,} texts at once take at least {needed:,.0f} GiB of memory"
        raise UsageError(f"{least}, and there are {have:,.0f}: take fewer")


def sample_tokens(logits: Float[Array, "batch vocab"], batch: DecodeBatch) -> Int[Array, "batch"]:
    """The next token of each row by its settings; its own logits, seed and length decide, and no other row does."""
    settings, neutral = batch.settings, vars(SamplingParams())
    logits = F.ban(logits + settings["logit_bias"], settings["banned_ids"])
    is_free = jnp.all(
        batch.allowed == -1
    )  # as with penalties below: no pass where no row has a grammar
    logits = jax.lax.cond(
        is_free, lambda logits: logits, lambda logits: F.ban_unset(logits, batch.allowed), logits
    )
    penalties = {name: settings[name] for name in F.PENALTIES if name in settings}
    truncations = {name: settings[name] for name in F.TRUNCATIONS if name in settings}

    def penalized(logits: Array) -> Array:
        seen = batch.seen | (batch.counts > 0)
        for name, value in penalties.items():
            logits = F.PENALTIES[name](logits, value, seen, batch.counts)
        return logits

    # On a CPU a pass over [batch, vocab] takes time: none where every penalty is neutral.
    is_penalized = [
        name not in neutral or jnp.any(value != neutral[name]) for name, value in penalties.items()
    ]
    logits = jax.lax.cond(
        jnp.any(jnp.array(is_penalized)), penalized, lambda logits: logits, logits
    )
    keys = jax.vmap(jax.random.fold_in)(
        jax.vmap(jax.random.key)(settings["seed"]), batch.cache.lengths
    )
    return F.sample(logits, keys, settings["temperature"], **truncations)


def append_token(
    batch: DecodeBatch, logits: Float[Array, "batch vocab"], takes: Bool[Array, "batch"]
) -> tuple[DecodeBatch, Int[Array, "batch"]]:
    """Draw a token for each row, and write it behind those in the cache where the row takes it."""
    rows, lengths = jnp.arange(len(takes)), batch.cache.lengths
    token = sample_tokens(logits, batch)
    log_prob = (logits[rows, token] - jax.nn.logsumexp(logits, axis=-1)).astype(jnp.float32)
    ends = jnp.any(token[:, None] == batch.stop_ids, axis=1) | (lengths + 1 >= batch.limits)
    slot = jnp.where(
        takes, lengths, batch.tokens.shape[1]
    )  # out of range, hence dropped, where a row takes none
    batch = batch._replace(
        tokens=batch.tokens.at[rows, slot].set(token, mode="drop"),
        log_probs=batch.log_probs.at[rows, slot].set(log_prob, mode="drop"),
        counts=batch.counts.at[rows, token].add(takes.astype(jnp.int32)),
        finished=batch.finished | (takes & ends),
    )
    return batch, token
