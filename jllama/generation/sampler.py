"""The sampler of the engine: the settings of each row, and how it gets its next token."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from jllama import functional as F
from jllama.core import UsageError, ops
from jllama.core.config import LlamaConfig
from jllama.core.engine import DecodeBatch
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.models.language_model import LanguageModel
from jllama.system.devices import device_memory_bytes

_BUILT_IN = {"temperature", "logit_bias", "banned_ids", "seed"}


class SamplerState(NamedTuple):
    """The settings of the rows of a batch, and what their samplers remember.

    Only the host changes the last four fields.
    """

    counts: Int[Array, "batch vocab"]  # how often each token was generated
    drafted: Int[Array, "batch"]  # tokens that prompt lookup drafted so far
    accepted: Int[Array, "batch"]  # those of them that were right
    seen: Bool[Array, "batch vocab"]  # tokens of the prompt
    settings: dict[str, Shaped[Array, "batch ..."]]  # SamplingParams; [batch, vocab] for token ids
    # Whether log-probabilities are of the distribution drawn from, and not of the raw logits.
    drawn: Bool[Array, "batch"]
    allowed: Int32[Array, "batch words"]  # one bit a token: what a grammar allows at the next step


def make_sampler_state(
    model: LanguageModel, prompts: Sequence[Prompt], sampling_types: Iterable[type[SamplingParams]]
) -> SamplerState:
    """Return the state of new rows; ids that the tokenizer does not have are banned.

    ``sampling_types`` are the classes whose fields become ``settings``; a row has the defaults of
    those that its own class lacks.
    """
    vocab_size = model.config.vocab_size
    rows = len(prompts)
    zeros: Any = np.zeros  # accepted in place of JAX arrays, unlike what their types say
    seen = zeros((rows, vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, list(prompt.ids)] = True
    drawn: Any = np.array([prompt.drawn_log_probs for prompt in prompts])
    settings = _setting_arrays([prompt.sampling for prompt in prompts], vocab_size, sampling_types)
    num_known = model.tokenizer.vocab_size if model.tokenizer else vocab_size
    settings["banned_ids"][:, num_known:] = True
    return SamplerState(
        counts=zeros((rows, vocab_size), np.int32),
        drafted=zeros(rows, np.int32),
        accepted=zeros(rows, np.int32),
        seen=seen,
        settings=settings,
        drawn=drawn,
        allowed=zeros((rows, -(-vocab_size // 32)), np.int32) - 1,  # every token
    )


def set_allowed(
    batch: DecodeBatch, masks: Mapping[int, Int32[np.ndarray, "words"] | None]
) -> DecodeBatch:
    """Return the batch with rows limited to the tokens of their masks; None allows every token."""
    state: SamplerState = batch.sampling
    allowed = np.full(state.allowed.shape, -1, np.int32)
    for row, words in masks.items():
        if words is not None:
            # A model may have more tokens than the mask: they are banned in any case.
            allowed[row, : len(words)] = words
    state = state._replace(allowed=jax.device_put(allowed, state.allowed.sharding))
    return batch._replace(sampling=state)


def setting_types(params: type[SamplingParams]) -> dict[str, Any]:
    """Return the type of each field; raise ``UsageError`` if no function applies a field."""
    hints = get_type_hints(params)
    for name in hints:
        if name not in {*_BUILT_IN, *F.TRUNCATIONS, *F.PENALTIES}:
            raise UsageError(
                f"nothing applies {name} of {params.__name__}: register a function under its name"
            )
    return hints


def _setting_arrays(
    rows: Sequence[SamplingParams], vocab_size: int, types: Iterable[type[SamplingParams]]
) -> dict[str, Any]:
    """Return each field of ``types`` as an array ``[rows]``, or ``[rows, vocab]`` for token ids."""
    arrays: dict[str, np.ndarray] = {}
    for params in types:
        for name, hint in setting_types(params).items():
            values = [getattr(row, name, getattr(params(), name)) for row in rows]
            if hint in (int, float):
                arrays[name] = np.array(values, np.float32 if hint is float else np.int64)
                continue
            dtype = np.float32 if name == "logit_bias" else bool
            arrays[name] = np.zeros((len(rows), vocab_size), dtype)
            for array, value in zip(arrays[name], values, strict=True):
                array[list(value)] = list(value.values()) if isinstance(value, Mapping) else True
    return arrays | {"seed": arrays["seed"].astype(np.uint32)}


def check_batch(config: LlamaConfig, rows: int, draft_len: int = 0) -> None:
    """Raise ``UsageError`` if a batch exceeds the memory, or ``draft_len`` the context."""
    max_seq_len = config.max_seq_len
    if not 0 <= draft_len < max_seq_len:
        raise UsageError(
            f"speculate is {draft_len}; it must be from 0 to below the model's context, "
            f"{max_seq_len}"
        )
    # At least the keys and values of a short text in 2 bytes each, and for each token id a bias, a
    # count and a logit of each input token.
    key_value_bytes = 4 * config.num_layers * config.num_kv_heads * config.head_dim
    row_bytes = key_value_bytes * min(max_seq_len, 128) + config.vocab_size * (12 + 4 * draft_len)
    needed = rows * row_bytes / 2**30
    available = (device_memory_bytes(jax.devices()[0]) or 0) / 2**30
    if 0 < available < needed:
        raise UsageError(
            f"{rows:,} texts at once take at least {needed:,.0f} GiB of memory, and there are "
            f"{available:,.0f}: take fewer"
        )


def draw_tokens(
    logits: Float[Array, "batch vocab"], batch: DecodeBatch, takes: Bool[Array, "batch"]
) -> tuple[Int[Array, "batch"], Float[Array, "batch"], SamplerState]:
    """Draw the next token of each row; return its log-probability and the next state as well.

    Only the row's own logits, settings, seed and length matter.
    """
    state: SamplerState = batch.sampling
    settings = state.settings
    token = _sample(logits, state, batch.cache.lengths)
    raw = ops.target_log_probs(logits, token)[0].astype(jnp.float32)

    def log_prob_drawn() -> Array:
        truncations = {name: settings[name] for name in F.TRUNCATIONS if name in settings}
        allowed = F.ban(logits, settings["banned_ids"])
        drawn, _ = F.drawn_log_probs(allowed, token, settings["temperature"], **truncations)
        return jnp.where(state.drawn, drawn, raw)

    log_prob = jax.lax.cond(jnp.any(state.drawn), log_prob_drawn, lambda: raw)
    counts = state.counts.at[jnp.arange(len(takes)), token].add(takes.astype(jnp.int32))
    return token, log_prob, state._replace(counts=counts)


def _sample(
    logits: Float[Array, "batch vocab"], state: SamplerState, lengths: Int[Array, "batch"]
) -> Int[Array, "batch"]:
    """Apply the settings of each row to its logits, and draw."""
    settings = state.settings
    neutral = vars(SamplingParams())
    logits = F.ban(logits + settings["logit_bias"], settings["banned_ids"])
    # On a CPU a pass over [batch, vocab] takes time: skip those that change no row.
    is_free = jnp.all(state.allowed == -1)
    logits = jax.lax.cond(
        is_free, lambda logits: logits, lambda logits: F.ban_unset(logits, state.allowed), logits
    )
    penalties = {name: settings[name] for name in F.PENALTIES if name in settings}
    truncations = {name: settings[name] for name in F.TRUNCATIONS if name in settings}

    def penalize(logits: Array) -> Array:
        seen = state.seen | (state.counts > 0)
        for name, value in penalties.items():
            logits = F.PENALTIES[name](logits, value, seen, state.counts)
        return logits

    is_penalized = [
        name not in neutral or jnp.any(value != neutral[name]) for name, value in penalties.items()
    ]
    logits = jax.lax.cond(jnp.any(jnp.array(is_penalized)), penalize, lambda logits: logits, logits)
    keys = jax.vmap(jax.random.key)(settings["seed"])
    keys = jax.vmap(jax.random.fold_in)(keys, lengths)
    return F.sample(logits, keys, settings["temperature"], **truncations)
