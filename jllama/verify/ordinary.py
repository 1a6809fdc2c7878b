"""What of a checkpoint's configuration is out of the ordinary: told to the user, and no failure by itself."""

from __future__ import annotations

from typing import Any

from jllama.config import LlamaConfig, RopeScaling
from jllama.presets import OTHERS, PRESETS, differing, nearest_preset

_USUAL_EPS = (1e-5, 1e-6)
_USUAL_THETAS = {config.rope_theta for config in PRESETS.values()}


def config_findings(config: LlamaConfig) -> list[str]:
    """A sentence for each field that is not as the nearest released Llama has it or, without one, is unusual."""
    if name := nearest_preset(config):
        released = PRESETS[name]
        return [
            f"{field} is {_shown(getattr(config, field))}; {name}, of the same shape, has "
            f"{_shown(getattr(released, field))}"
            for field in differing(OTHERS, config, released)
        ]
    found = []
    if config.norm_eps not in _USUAL_EPS:
        found.append(f"norm_eps is {config.norm_eps:g}; released Llamas have 1e-05 or 1e-06")
    if config.rope_theta not in _USUAL_THETAS:
        usual = ", ".join(f"{theta:,.0f}" for theta in sorted(_USUAL_THETAS))
        found.append(f"rope_theta is {_shown(config.rope_theta)}; released Llamas have {usual}")
    if config.head_dim * config.num_heads != config.embed_dim:
        found.append(
            f"head_dim is {config.head_dim}; with {config.num_heads} heads and embed_dim {config.embed_dim}, released "
            f"Llamas would have {config.embed_dim / config.num_heads:g}"
        )
    return found


def vocabulary_findings(config: LlamaConfig, tokens: int) -> list[str]:
    """A sentence if the embedding has more rows than the tokenizer has tokens."""
    if tokens == config.vocab_size:
        return []
    return [
        f"the embedding has {config.vocab_size:,} rows for the tokenizer's {tokens:,} tokens: the last "
        f"{config.vocab_size - tokens:,} belong to none"
    ]


def _shown(value: Any) -> str:
    if isinstance(value, RopeScaling):
        return f"{value.type}, factor {value.factor:g}, from {value.original_max_seq_len:,} tokens"
    if value is None or isinstance(value, bool):
        return {None: "absent", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1 else f"{value:g}"
