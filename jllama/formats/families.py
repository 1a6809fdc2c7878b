"""The families of models that are a Llama but for a few options, and how their files differ.

Hugging Face's folders name the family in ``model_type``, GGUF files in ``general.architecture``.
Sources: the configurations and models of transformers 5.24; llama.cpp's ``conversion`` and
``src/models``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.formats.llama4 import LLAMA4, LLAMA4_OPTIONS, llama4_entries, llama4_options
from jllama.system.files import Json, read_field, read_fields

MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Factors, which Hugging Face's files call by the same names, and their keys in GGUF files."""
SLIDING = "sliding_attention"
FULL = "full_attention"


class Family(NamedTuple):
    """A family; what is not said here is as in a Llama.

    Attributes:
        model_type: in ``config.json``.
        architecture: the class of transformers.
        gguf: the architecture in GGUF files.
        fixed: the fields of ``LlamaConfig`` that all its models have.
        optional: the other fields, beyond a Llama's, that a model may have.
        defaults: the values of keys that a ``config.json`` lacks.
        has_window: ``(layer, fields)``: whether a layer has the sliding window, if ``config.json``
            has no ``layer_types``.
        is_fused: whether files have queries, keys and values as one matrix, and gate and up.
        interleaved: the formats in whose files rotary channels are interleaved pairs.
        scales_rope: whether a model may have ``rope_scaling``.
        experts: the key and the default in ``config.json`` of each field about experts.
        refused: keys of ``config.json`` whose other values jllama does not have.
        normalizes_in_gguf: whether llama.cpp has ``normalize_expert_weights``.
        renamed: parts of names of tensors, as in other families, and what they are here.
    """

    model_type: str
    architecture: str
    gguf: str
    fixed: Mapping[str, Any] = {}
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    has_window: Callable[[int, Mapping[str, Any]], bool] = lambda layer, fields: True
    is_fused: bool = False
    interleaved: Sequence[str] = ()
    scales_rope: bool = True
    experts: Mapping[str, tuple[str, Any]] = {}
    refused: Mapping[str, Any] = {}
    normalizes_in_gguf: bool = True
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def has_one_width(self) -> bool:
        """Whether files have one width, which is that of experts."""
        return self.experts["expert_dim"][0] == "intermediate_size"


def _after_first_layers(layer: int, fields: Mapping[str, Any]) -> bool:
    return layer >= fields["max_window_layers"]


_WINDOWS = ("sliding_window", "full_attention_layers")
_QWEN = {
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_OLMO = {"rms_norm_eps": 1e-5}
_MIXTRAL_EXPERTS = {
    "num_experts": ("num_local_experts", 8),
    "experts_per_token": ("num_experts_per_tok", 2),
    "expert_dim": ("intermediate_size", 14_336),
}
_OLMOE_EXPERTS = {
    "num_experts": ("num_experts", 64),
    "experts_per_token": ("num_experts_per_tok", 8),
    "expert_dim": ("intermediate_size", 2048),
    "normalize_expert_weights": ("norm_topk_prob", False),
}
_QWEN_EXPERTS = _OLMOE_EXPERTS | {
    "num_experts": ("num_experts", 128),
    "expert_dim": ("moe_intermediate_size", 768),
}
_LLAMA4_EXPERTS = {
    "num_experts": ("num_local_experts", 16),
    "experts_per_token": ("num_experts_per_tok", 1),
    "expert_dim": ("moe_intermediate_size", 8192),
}
_LLAMA = Family("llama", "LlamaForCausalLM", "llama", interleaved=("gguf",))
FAMILIES = {
    family.model_type: family
    for family in (
        _LLAMA,
        _LLAMA._replace(
            model_type="mistral",
            architecture="MistralForCausalLM",
            optional=("sliding_window",),
            defaults=_MISTRAL,
        ),
        _LLAMA._replace(
            model_type="ministral",
            architecture="MinistralForCausalLM",
            optional=_WINDOWS,
            defaults=_MISTRAL,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            "qwen2",
            fixed={"attention_bias": True},
            optional=_WINDOWS,
            defaults=_QWEN,
            has_window=_after_first_layers,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "qwen3",
            fixed={"qk_norm": "head"},
            optional=_WINDOWS,
            defaults=_QWEN | {"head_dim": 128},
            has_window=_after_first_layers,
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            "smollm3",
            optional=("no_rope_layers", *_WINDOWS),
            defaults={
                "num_hidden_layers": 36,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32_768,
                "rope_theta": 2_000_000.0,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
                "no_rope_layer_interval": 4,
            },
            has_window=lambda layer, fields: layer in fields["no_rope_layers"],
            interleaved=("gguf",),
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            "olmo2",
            fixed={"norm_placement": "after", "qk_norm": "whole"},
            defaults=_OLMO,
        ),
        Family(
            "olmo3",
            "Olmo3ForCausalLM",
            "olmo2",
            fixed={"norm_placement": "after", "qk_norm": "whole"},
            optional=(*_WINDOWS, "rope_scaling_layers"),
            defaults=_OLMO | {"rope_theta": 500_000.0, "sliding_window": 4096},
            has_window=lambda layer, fields: (layer + 1) % 4 != 0,
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            "phi3",
            optional=("partial_rotary_factor", "sliding_window"),
            defaults={
                "hidden_size": 3072,
                "intermediate_size": 8192,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            is_fused=True,
            scales_rope=False,
        ),
        Family(
            "granite",
            "GraniteForCausalLM",
            "granite",
            optional=tuple(MULTIPLIERS),
            defaults=dict.fromkeys(MULTIPLIERS, 1.0),
            interleaved=("gguf",),
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "llama",
            fixed={"normalize_expert_weights": True},
            optional=("sliding_window", *_MIXTRAL_EXPERTS),
            defaults={
                "intermediate_size": 14_336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
            },
            interleaved=("gguf",),
            experts=_MIXTRAL_EXPERTS,
            renamed=(
                ("mlp.gate.", "block_sparse_moe.gate."),
                ("mlp.experts.", "block_sparse_moe.experts."),
                ("gate_proj.", "w1."),
                ("up_proj.", "w3."),
                ("down_proj.", "w2."),
            ),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "qwen3moe",
            fixed={"qk_norm": "head"},
            optional=tuple(_QWEN_EXPERTS),
            defaults={
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32_768,
                "use_sliding_window": False,
            },
            experts=_QWEN_EXPERTS,
            refused={"decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            "olmoe",
            fixed={"qk_norm": "whole"},
            optional=tuple(_OLMOE_EXPERTS),
            defaults=_OLMO
            | {
                "hidden_size": 2048,
                "intermediate_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "max_position_embeddings": 4096,
            },
            experts=_OLMOE_EXPERTS,
            refused={"clip_qkv": False},
            normalizes_in_gguf=False,
        ),
        Family(
            LLAMA4,
            "Llama4ForCausalLM",
            "llama4",
            fixed={"router": "sigmoid", "shared_expert": True},
            optional=(*LLAMA4_OPTIONS, *_LLAMA4_EXPERTS),
            defaults={
                "hidden_size": 5120,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "no_rope_layer_interval": 4,
                "max_position_embeddings": 131_072,
            },
            interleaved=("gguf", "huggingface"),
            normalizes_in_gguf=False,
            experts=_LLAMA4_EXPERTS,
            renamed=(
                ("mlp.gate.", "feed_forward.router."),
                ("mlp.", "feed_forward."),
            ),
        ),
    )
}
"""The families by ``model_type``. A model is written as the first one that can hold it."""
GGUF_FAMILIES = {
    family.gguf: family for family in FAMILIES.values() if family.model_type != "mixtral"
}
"""The families by GGUF's architecture; of those that share one, the one with the most options.

Mixtral's is that of a Llama, and has a number of experts.
"""


def family_of(config: LlamaConfig) -> Family:
    """Return the first family that a model with this configuration can belong to.

    Raises:
        JllamaError: There is none.
    """
    for family in FAMILIES.values():
        has_fixed = all(getattr(config, name) == value for name, value in family.fixed.items())
        is_known = {*config.extensions} <= {*family.fixed, *family.optional}
        if has_fixed and is_known and _can_scale(config, family) and _can_normalize(config, family):
            return family
    raise JllamaError(
        f"no family of models has {', '.join(config.extensions)} together with the rest of this "
        "configuration: choose the format orbax"
    )


def _can_normalize(config: LlamaConfig, family: Family) -> bool:
    """Return whether models of a family may have the configuration's norm of queries and keys."""
    return "qk_norm" not in family.optional or config.qk_norm in ("none", "rotated")


def _can_scale(config: LlamaConfig, family: Family) -> bool:
    """Return whether models of a family may have the configuration's RoPE scaling."""
    if not config.rope_scaling:
        return True
    scales_all = config.rope_scaling_layers == "all"
    is_for_full = config.sliding_window and "rope_scaling_layers" in family.optional
    return family.scales_rope and not (is_for_full and scales_all)


def read_options(fields: Json, family: Family, num_layers: int, source: Path) -> Json:
    """Return the fields of ``LlamaConfig`` beyond a Llama's that a ``config.json`` sets.

    ``fields`` have the family's defaults, and no nulls.

    Raises:
        JllamaError: A field is wrong.
    """
    names = [name for name in MULTIPLIERS if name in family.optional]
    values = dict(family.fixed) | {name: read_field(fields, name, 1.0, source) for name in names}
    # transformers 5 writes the number of experts by either name.
    names = [key for key in ("num_experts", "num_local_experts") if fields.get(key) is not None]
    if len(names) > 1 and fields[names[0]] != fields[names[1]]:
        raise JllamaError(f"{source} has two numbers of experts, {' and '.join(names)}: remove one")
    counts = dict.fromkeys(("num_experts", "num_local_experts"), fields[names[0]]) if names else {}
    values |= read_fields(fields | counts, family.experts, source)
    if "no_rope_layers" in family.optional:
        values["no_rope_layers"] = _no_rope_layers(fields, num_layers, source)
    if family.model_type == LLAMA4:
        values |= llama4_options(fields, values["no_rope_layers"], num_layers, source)
    if "sliding_window" in family.optional:
        with_layers = fields | {"no_rope_layers": values.get("no_rope_layers")}
        values |= _windows(with_layers, family, num_layers, source)
    if "rope_scaling_layers" in family.optional:
        values["rope_scaling_layers"] = FULL
    return values


def _no_rope_layers(fields: Json, num_layers: int, source: Path) -> list[int]:
    """Return the layers without rotation, whose entries in ``no_rope_layers`` are 0."""
    interval = read_field(fields, "no_rope_layer_interval", 1, source)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotates = fields.get("no_rope_layers", default)
    is_list = isinstance(rotates, list) and len(rotates) >= num_layers
    if not is_list or any(entry not in (0, 1) for entry in rotates):
        raise JllamaError(
            f"{source} has no_rope_layers {str(rotates)[:80]}; it must be a list with 0 or 1 for "
            f"each of the {num_layers} layers"
        )
    return [layer for layer in range(num_layers) if not rotates[layer]]


def _windows(fields: Json, family: Family, num_layers: int, source: Path) -> Json:
    """Return the sliding window and the layers without it; nothing if no layer has one."""
    # 1) Read the size of the window, and whether it is in use.
    window = read_field(fields, "sliding_window", 1, source)
    has_windows = "sliding_window" in fields
    if "use_sliding_window" in family.defaults:  # transformers ignores it in the other families
        has_windows = read_field(fields, "use_sliding_window", False, source) and has_windows

    # 2) Find the layers with a window, by the file or else by the family.
    first = fields.get("max_window_layers")
    if "max_window_layers" in family.defaults and type(first) is not int:
        raise JllamaError(
            f"{source} has max_window_layers {first!r}; it must be a number of layers"
        )
    default = [
        SLIDING if has_windows and family.has_window(layer, fields) else FULL
        for layer in range(num_layers)
    ]
    kinds = fields.get("layer_types", default)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise JllamaError(
            f"{source} has layer_types {str(kinds)[:80]}; expected a list of {SLIDING} or {FULL} "
            f"for each of the {num_layers} layers"
        )

    # 3) Check that transformers uses the same layers.
    full = [layer for layer in range(num_layers) if kinds[layer] == FULL]
    if len(full) == num_layers:
        return {}
    can_have = has_windows and (not full or "full_attention_layers" in family.optional)
    if not can_have:
        raise JllamaError(
            f"{source} has layer_types {str(kinds)[:80]}, which transformers' {family.architecture}"
            " does not follow with the other fields: set them to what the model was trained with"
        )
    return {"sliding_window": window, "full_attention_layers": full}


def multipliers(config: LlamaConfig, family: Family) -> dict[str, float]:
    """Return the ``MULTIPLIERS`` of a model by name; the one of attention is never 0 in files."""
    names = [name for name in MULTIPLIERS if name in family.optional]
    return {name: getattr(config, name) or config.head_dim**-0.5 for name in names}


def written_options(config: LlamaConfig, family: Family) -> Json:
    """Return the entries of ``config.json`` that a Llama does not have."""
    layers = range(config.num_layers)
    entries: Json = multipliers(config, family)
    entries |= {key: getattr(config, name) for name, (key, _) in family.experts.items()}
    if family.model_type == LLAMA4:
        entries |= llama4_entries(config)
    if "no_rope_layers" in family.optional:
        entries["no_rope_layers"] = [int(layer not in config.no_rope_layers) for layer in layers]
    if "partial_rotary_factor" in family.optional:
        entries["partial_rotary_factor"] = config.partial_rotary_factor
        entries["original_max_position_embeddings"] = config.max_seq_len
    if "sliding_window" in family.optional:
        entries["sliding_window"] = config.sliding_window or None
    if "use_sliding_window" in family.defaults:
        entries["use_sliding_window"] = config.sliding_window > 0
    if "max_window_layers" in family.defaults:  # transformers before 4.53 has no layer_types
        num_full = len(config.full_attention_layers)
        entries["max_window_layers"] = num_full if config.sliding_window else config.num_layers
    if "full_attention_layers" in family.optional:
        kinds = config.layer_kinds
        entries["layer_types"] = [SLIDING if kind.window else FULL for kind in kinds]
    return entries
