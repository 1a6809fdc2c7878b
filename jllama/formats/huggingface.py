"""Hugging Face folders: ``config.json``, safetensors, tokenizer and chat template.

The weights are one file, or shards with an index.

Source: transformers 5.24, ``LlamaConfig`` and those of related families (``families``), and
``modeling_rope_utils``; every field is read as there. Version 4 is read, too: it has ``rope_theta``
and ``rope_scaling`` where 5 has ``rope_parameters``.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax.numpy as jnp
import numpy as np

from jllama.core import JllamaError
from jllama.core.config import ROPE_SCALINGS, LlamaConfig, RopeScaling
from jllama.core.parameters import PARAMETERS
from jllama.formats.chat_files import (
    GENERATION_CONFIG,
    parse_stop_ids,
    read_text_files,
    write_chat_files,
)
from jllama.formats.families import (
    FAMILIES,
    FULL,
    SLIDING,
    Family,
    family_of,
    read_options,
    written_options,
)
from jllama.formats.llama4 import LLAMA4, common_fields, join_experts, split_experts, text_fields
from jllama.formats.safetensors_file import DTYPES, write_safetensors
from jllama.formats.tensors import (
    Checkpoint,
    OnProgress,
    have_same_bits,
    match_tensors,
    tensors_to_write,
)
from jllama.system.files import (
    Json,
    errors_as,
    read_field,
    read_fields,
    read_json_object,
    read_optional_json,
    without_nulls,
    write_json,
)
from jllama.tokenizers.loading import save_huggingface

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000  # of tensors; a larger tensor has a shard of its own

# The key and default of each field of ``LlamaConfig``; 0 is computed from other fields or the
# weights.
_FIELDS = {
    "vocab_size": ("vocab_size", 0),
    "num_layers": ("num_hidden_layers", 32),
    "embed_dim": ("hidden_size", 4096),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", 0),
    "head_dim": ("head_dim", 0),
    "mlp_dim": ("intermediate_size", 11_008),
    "max_seq_len": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "rope_theta": ("rope_theta", 10_000.0),
    "tie_embeddings": ("tie_word_embeddings", False),
}

# The values of other fields in all families.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "num_local_experts": False,
    "num_experts": False,
    "quantization_config": False,
}
_ROPE_COMMON = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_EMBED = PARAMETERS["embed"].name("huggingface")
_HEAD = PARAMETERS["lm_head"].name("huggingface")
_DROPPED = {
    GENERATION_CONFIG: ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    TOKENIZER_CONFIG: ("pad_token",),
    CONFIG: ("router_aux_loss_coef", "router_jitter_noise", "vision_config"),
}
"""Fields by file that conversion leaves behind."""


def recognizes(path: Path) -> bool:
    """Return whether a folder has a ``config.json`` that names a model, or safetensors."""
    with contextlib.suppress(OSError, JllamaError):
        if any(path.glob("*.safetensors")):
            return True
        fields = read_json_object(path / CONFIG)
        return "model_type" in fields or "architectures" in fields
    return False


def config_from_huggingface(fields: Mapping[str, Any], source: Path) -> LlamaConfig:
    """Return the architecture in the fields of a ``config.json`` of transformers 4 or 5.

    Missing fields have defaults. ``vocab_size`` is 0 if the file leaves it to the weights: absent,
    null or -1.

    Raises:
        JllamaError: A field is wrong, or requests something that a Llama of jllama does not have.
    """
    fields = text_fields(fields)
    family = _find_family(fields, source)
    if family.model_type == LLAMA4:
        fields = common_fields(fields)
    defaults = {key: value for key, value in family.defaults.items() if key not in fields}
    fields = without_nulls(fields)
    _refuse_other_options(fields, family, source)
    rope = _rope_fields(fields, family, source)
    values = read_fields(defaults | fields | rope, _FIELDS, source)
    with errors_as(source):
        LlamaConfig(**values)  # refuses sizes before lists of that many layers are made
    values |= read_options(defaults | fields, family, values["num_layers"], source)
    if "partial_rotary_factor" in family.optional:
        name = "partial_rotary_factor"
        values[name] = read_field(rope, name, 1.0, source)
    with errors_as(source):
        scaling = _rope_scaling(rope, values["max_seq_len"], family, source)
        return LlamaConfig(**values, rope_scaling=scaling)


def _find_family(fields: Mapping[str, Any], source: Path) -> Family:
    """Return the family that a ``config.json`` names by its type, or else by its architecture."""
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    architectures = fields.get("architectures")
    model_type = fields.get("model_type")
    if model_type is None and isinstance(architectures, list) and len(architectures) == 1:
        family = by_architecture.get(str(architectures[0]))
        model_type = family and family.model_type
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise JllamaError(
            f"{source} has model_type {model_type!r}; jllama reads models of the types "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _refuse_other_options(fields: dict[str, Any], family: Family, source: Path) -> None:
    """Raise ``JllamaError`` for options that jllama's models of a family do not have."""
    fixed = {**_FIXED, **family.refused}
    if family.experts:
        del fixed["num_local_experts"], fixed["num_experts"]
    refused = {
        key: fields[key] for key, value in fixed.items() if (fields.get(key) or value) != value
    }
    if "sliding_window" not in family.optional:
        if fields.get("use_sliding_window"):
            refused["use_sliding_window"] = True
        if "sliding_window" in fields and fields.get("use_sliding_window", True):
            refused["sliding_window"] = fields["sliding_window"]
        layer_types = fields.get("layer_types", [])
        if not isinstance(layer_types, list) or any(kind != FULL for kind in layer_types):
            refused["layer_types"] = layer_types
    if refused:
        options = ", ".join(f"{key} {json.dumps(value)[:80]}" for key, value in refused.items())
        raise JllamaError(f"{source} has options that jllama's Llama does not have: {options}")


def _rope_fields(fields: Mapping[str, Any], family: Family, source: Path) -> Json:
    """Return all fields of RoPE, those of layers without a window if they differ.

    A file may have them in both spellings, for old and new readers, if they agree.
    """
    # 1) Take the fields of RoPE at the top level of the file.
    readings = [{key: fields[key] for key in _ROPE_COMMON if key in fields}]
    by_layer = "rope_scaling_layers" in family.optional
    theta = family.defaults.get("rope_theta")
    if by_layer and fields.get("rope_theta", theta) != theta:
        raise JllamaError(
            f"{source} has rope_theta {fields['rope_theta']!r}, which transformers' "
            f"{family.architecture} takes for some layers alone: give rope_parameters with "
            f"{FULL} and {SLIDING}"
        )

    # 2) Add the fields of both spellings.
    for spelling in ("rope_scaling", "rope_parameters"):
        value = fields.get(spelling)
        if not value:
            continue
        if not isinstance(value, dict):
            raise JllamaError(f"{source} has {spelling} {value!r}; it must be an object or null")
        if by_layer and FULL in value:
            value = _full_attention_rope(value, source)
        elif by_layer and ("type" in value or spelling == "rope_parameters"):
            raise JllamaError(
                f"{source} has {spelling} {json.dumps(value)[:80]}, which transformers' "
                f"{family.architecture} ignores: give rope_parameters with {FULL} and {SLIDING}"
            )
        reading = {key: field for key, field in value.items() if field is not None}
        readings.append({"rope_type": reading.pop("type", "default")} | reading)

    # 3) Join them; if two values of a field differ, refuse the file.
    rope: Json = {}
    for reading in readings:
        for key, value in reading.items():
            other = rope.setdefault(key, value)
            if other is not value and other != value:
                raise JllamaError(
                    f"{source} has {key} {other!r}, but {value!r} in another place: remove one"
                )
    return {"rope_type": "default"} | rope


def _full_attention_rope(by_layer: Json, source: Path) -> Json:
    """Return RoPE's fields of layers without a window; those with one must be the same unscaled."""
    full = by_layer[FULL]
    other = by_layer.get(SLIDING) or {}
    is_right = isinstance(full, dict) and isinstance(other, dict)
    if is_right:
        plain = {"rope_type": "default", "rope_theta": full.get("rope_theta")}
        is_right = other in ({}, plain)
    if not is_right:
        raise JllamaError(
            f"{source} has RoPE of {SLIDING} {json.dumps(other)[:80]}; it must be that of {FULL}, "
            "without scaling"
        )
    return full


def _rope_scaling(
    rope: Mapping[str, Any], max_seq_len: int, family: Family, source: Path
) -> RopeScaling | None:
    """Return the scaling that the fields of RoPE describe."""
    # 1) Refuse types and fields that jllama does not have.
    name = rope["rope_type"]
    kind = ROPE_SCALINGS.get(str(name), RopeScaling)
    fixed = kind.huggingface_fixed
    if "partial_rotary_factor" not in family.optional:
        fixed = {"partial_rotary_factor": (1,)} | fixed
    known = ("default", *(ROPE_SCALINGS if family.scales_rope else ()))
    if name not in known:
        raise JllamaError(
            f"{source} has RoPE of type {json.dumps(name)[:80]}; jllama's models of type "
            f"{family.model_type} have only {', '.join(known)}"
        )
    for key, values in fixed.items():
        if rope.get(key, values[0]) not in values:
            raise JllamaError(
                f"{source} has RoPE with {key} {json.dumps(rope[key])[:100]}; "
                f"jllama has only {json.dumps(values[0])}"
            )

    # 2) Read the numbers of the scaling.
    keys = [key for key in rope if key not in ("rope_type", *_ROPE_COMMON, *fixed)]
    numbers = {key: read_field(rope, key, 1.0, source) for key in keys}
    if name == "default" and not numbers:
        return None

    # 3) Read the length that the model had before it was scaled.
    length = read_field(rope, "original_max_position_embeddings", max_seq_len, source)
    if kind.grows and length != max_seq_len:
        raise JllamaError(
            f"{source} has original_max_position_embeddings {length} and "
            f"max_position_embeddings {max_seq_len}, but transformers' "
            f"{kind.type} RoPE reads only the second: make them equal"
        )
    if hasattr(kind, "original_max_seq_len"):
        numbers["original_max_seq_len"] = length
    with errors_as(source):
        return RopeScaling.from_fields({"type": name} | numbers)


def config_to_huggingface(config: LlamaConfig, dtype: str) -> Json:
    """Return a ``config.json`` that transformers 4 and 5 read as this architecture in ``dtype``.

    Raises:
        JllamaError: transformers has no such model.
    """
    # 1) Refuse sizes that transformers cannot load.
    family = family_of(config)
    if family.model_type == "llama" and config.embed_dim % config.num_heads:
        raise JllamaError(
            f"transformers loads no Llama whose embed_dim ({config.embed_dim}) is not "
            f"a multiple of num_heads ({config.num_heads}): save it in another format"
        )

    # 2) Describe the RoPE scaling.
    scaling = config.rope_scaling
    rope: Json = {"rope_type": "default"}
    if scaling:
        rope = {"rope_type": scaling.type}
        for name, value in vars(scaling).items():
            if name != "original_max_seq_len":
                rope[name] = float(value)
        length = getattr(scaling, "original_max_seq_len", None)
        if scaling.grows and length != config.max_seq_len:
            raise JllamaError(
                f"in transformers' {scaling.type} RoPE original_max_seq_len ({length}) "
                f"must be max_seq_len ({config.max_seq_len}): save it in another format"
            )
        if length and not scaling.grows:
            rope["original_max_position_embeddings"] = length

    # 3) Collect all other fields. transformers 5 reads those of RoPE from rope_parameters.
    values = {key: type(default)(getattr(config, name)) for name, (key, default) in _FIELDS.items()}
    values |= written_options(config, family)
    parameters = rope | {"rope_theta": values["rope_theta"]}
    if "partial_rotary_factor" in values:
        parameters["partial_rotary_factor"] = values["partial_rotary_factor"]
    if "rope_scaling_layers" in family.optional:
        plain = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        parameters = {FULL: parameters, SLIDING: plain}
    if family.model_type != "llama":
        values["pad_token_id"] = None  # if it were absent, it would be an id, perhaps too large
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **values,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": parameters,
    }


def read(path: Path) -> Checkpoint:
    """Open a Hugging Face folder.

    Of the weights, only the embedding is read, if there is a tied head to compare it with.
    """
    # 1) Read the configuration.
    source = path / CONFIG
    if not source.is_file():
        if (path / "adapter_config.json").is_file():
            raise JllamaError(
                f"{path} is an adapter: give its base as the "
                "checkpoint, and the adapter with --adapter"
            )
        raise JllamaError(
            f"{path} has no {CONFIG}: copy it there, "
            "the weights alone do not say what model they are"
        )
    fields = text_fields(read_json_object(source))
    config = config_from_huggingface(fields, source)

    # 2) Read the weights, and take the size of the vocabulary from them if it is not set.
    from jllama.formats.weight_files import read_weights

    weights = read_weights(path)
    family = _find_family(fields, source)
    if family.model_type == LLAMA4:
        weights = split_experts(weights)
    for name in list(weights):
        if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name):
            del weights[name]  # computed, not learned
    if not config.vocab_size and _EMBED in weights:
        # An embedding without rows is refused below.
        vocab_size = max([1, *weights[_EMBED].shape[:1]])
        config = dataclasses.replace(config, vocab_size=vocab_size)

    # 3) Check the names, and match the tensors with the configuration.
    prefix = next((name.removesuffix(_EMBED) for name in weights if name.endswith(_EMBED)), "")
    if prefix:
        raise JllamaError(
            f"{path} has {prefix}{_EMBED}: remove {prefix} from the names of its tensors"
        )
    if _HEAD not in weights and not config.tie_embeddings:
        remedy = f"a model without it needs tie_word_embeddings true in {CONFIG}"
        if "score.weight" in weights:
            remedy = "with score.weight it is a classifier, which jllama does not have"
        raise JllamaError(f"{path} has no {_HEAD}: {remedy}")
    tied_head = weights.pop(_HEAD, None) if config.tie_embeddings else None
    tensors = match_tensors(
        weights,
        config,
        "huggingface",
        path,
        is_fused=family.is_fused,
        is_interleaved="huggingface" in family.interleaved,
        renamed=family.renamed,
    )
    if tied_head is not None and not have_same_bits(tied_head, tensors["embed"]):
        raise JllamaError(
            f"{path}: {_HEAD} differs from {_EMBED}, "
            f"so tie_word_embeddings must be false in {CONFIG}"
        )

    # 4) Read the tokenizer, the chat template and the stop ids.
    tokenizer, template, stops = read_text_files(path)
    if template is None:  # in files from before 2025: text, or the ``default`` of named texts
        file = path / TOKENIZER_CONFIG
        template = read_optional_json(file).get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict)]
            default = next((entry for entry in named if entry.get("name") == "default"), {})
            template = default.get("template")
        if not isinstance(template, str | None):
            raise JllamaError(
                f"{file} has a chat_template that is neither text nor a list of named texts"
            )
    if not stops:
        stops = parse_stop_ids(fields.get("eos_token_id"), source)
    return Checkpoint(config, tensors, tokenizer, template, stops)


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype | None, on_progress: OnProgress
) -> None:
    """Write a folder that transformers loads without changes."""
    # 1) Collect the tensors, each with the dtype to write it in.
    family = family_of(checkpoint.config)
    named = tensors_to_write(
        checkpoint,
        "huggingface",
        is_fused=family.is_fused,
        is_interleaved="huggingface" in family.interleaved,
        renamed=family.renamed,
    )
    contents = {name: tensor for name, _, tensor in named}
    if family.model_type == LLAMA4:
        contents = {name: contents[name] for name in contents if ".experts." not in name}
        contents |= join_experts(checkpoint)
    tensors = {name: (name, tensor, dtype or tensor.dtype) for name, tensor in contents.items()}
    dtypes = {kind for _, _, kind in tensors.values()}
    unknown = dtypes - set(DTYPES.values())
    if unknown:
        raise JllamaError(
            "safetensors are written in "
            f"{', '.join(map(str, DTYPES.values()))}, not in {unknown.pop()}"
        )
    # transformers loads every tensor in one dtype: the one that holds all of them without rounding.
    whole = str(functools.reduce(jnp.promote_types, dtypes))
    config = config_to_huggingface(checkpoint.config, whole)

    # 2) Write the tokenizer, the chat template and the configuration.
    tokenizer = checkpoint.tokenizer
    stops = checkpoint.stop_ids
    others = {}
    if tokenizer:
        stops = tokenizer.stops_or_eos(stops)
        others["bos_token_id"] = tokenizer.bos_id
        save_huggingface(tokenizer, target)
    ids = write_chat_files(target, checkpoint.chat_template, stops, **others)
    # If these ids were absent and not null, they would be 1 and 2.
    write_json(target / CONFIG, config | {"bos_token_id": None, "eos_token_id": None} | ids)
    file = target / TOKENIZER_CONFIG
    if checkpoint.chat_template is not None and file.is_file():
        # Old programs, such as transformers 4.45, do not read chat_template.jinja.
        fields = read_json_object(file) | {"chat_template": checkpoint.chat_template}
        write_json(file, fields)

    # 3) Write the weights, in shards if they are large.
    split = huggingface_hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: math.prod(tensor[1].shape) * tensor[2].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(target / INDEX, index)
    for file, names in split.filename_to_tensors.items():
        write_safetensors(target / file, [tensors[name] for name in names], on_progress)


def dropped_fields(folder: Path) -> list[str]:
    """Name what a folder says of sampling, padding and training, which no ``Checkpoint`` holds."""
    names = []
    for file, keys in _DROPPED.items():
        fields = text_fields(read_optional_json(folder / file))
        names += [key for key in keys if fields.get(key) not in (None, 0.0)]
    return names


def download(repository: str) -> Path:
    """Fetch ``org/name`` from the Hugging Face hub or its cache, and return the folder.

    A revision may follow, as in ``org/name@v1.0``.
    """
    patterns = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
    # An error may be one of the hub's client, of its HTTP library or of the disk: all mean the
    # same.
    with errors_as(f"{repository} cannot be fetched from the hub", Exception):
        name, _, revision = repository.partition("@")
        fetch = functools.partial(
            huggingface_hub.snapshot_download, name, revision=revision or None
        )
        folder = Path(fetch(allow_patterns=patterns))
        if not any(folder.glob("*.safetensors")):
            fetch(allow_patterns="flax_model*.msgpack")
        return folder
