"""Hugging Face folders: ``config.json``, safetensors in one file or in shards with an index, tokenizer, chat template.

Source: transformers 5.23, ``LlamaConfig`` and ``modeling_rope_utils``, whose reading of every field is followed here;
and 4, which spells RoPE ``rope_theta`` and ``rope_scaling`` where 5 has ``rope_parameters``.
"""

import contextlib
import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax.numpy as jnp
import numpy as np

from jllama.checkpoints.safetensors_file import DTYPES, read_safetensors, write_safetensors
from jllama.checkpoints.tensors import (
    Checkpoint,
    NamedTensor,
    OnProgress,
    differences,
    matched,
    same_bits,
)
from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.files import Json, fault_of, has_file, read_fields, read_json_object, write_json
from jllama.parameters import PARAMETERS, tensor_specs
from jllama.rope_scaling import ROPE_SCALINGS, RopeScaling
from jllama.tokenizers import Tokenizer, has_tokenizer, load_tokenizer, save_huggingface

CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
)
WEIGHTS, INDEX, CHAT_TEMPLATE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "chat_template.jinja",
)

MAX_SHARD_BYTES = 5_000_000_000  # of tensors; a larger one has a shard of its own

_FIELDS: dict[str, tuple[str, Any]] = {
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
}  # the key and default of each field of ``LlamaConfig``; 0 is worked out from the others or the weights

_LLAMA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
_LLAMA |= dict.fromkeys(
    ("num_local_experts", "num_experts", "quantization_config"), False
)  # as a Llama has them
_ROPE_COMMON = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def recognizes(path: Path) -> bool:
    """Tell whether a folder has a ``config.json`` that names a model, or safetensors."""
    with contextlib.suppress(OSError, JllamaError):
        names = {"model_type", "architectures"}
        return any(path.glob("*.safetensors")) or not names.isdisjoint(
            read_json_object(path / CONFIG)
        )
    return False


def config_from_huggingface(fields: Mapping[str, Any], source: Path) -> LlamaConfig:
    """Read the architecture in a ``config.json``, in transformers 4's spelling or 5's; missing fields have defaults.

    ``vocab_size`` is 0 if the file leaves it to the weights: absent, null or -1. A wrong field, or one that asks for
    something that a Llama of jllama's does not have, raises JllamaError.
    """
    fields = {
        key: value
        for key, value in fields.items()
        if value is not None and (key, value) != ("vocab_size", -1)
    }
    _refuse_other_models(fields, source)
    rope = _rope(fields, source)
    values = read_fields(fields | rope, _FIELDS, source)
    with fault_of(source):
        return LlamaConfig(
            **values, rope_scaling=_rope_scaling(rope, values["max_seq_len"], source)
        )


def _refuse_other_models(fields: Mapping[str, Any], source: Path) -> None:
    model_type = fields.get(
        "model_type", "llama" if fields.get("architectures") == ["LlamaForCausalLM"] else None
    )
    if model_type != "llama":
        raise JllamaError(
            f"{source} has model_type {model_type!r}; jllama reads models of type 'llama' alone"
        )
    refused = {
        key: fields[key] for key, value in _LLAMA.items() if (fields.get(key) or value) != value
    }
    if "sliding_window" in fields and fields.get("use_sliding_window", True):
        refused["sliding_window"] = fields["sliding_window"]
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        refused["layer_types"] = layer_types
    if refused:
        options = ", ".join(f"{key} {json.dumps(value)[:80]}" for key, value in refused.items())
        raise JllamaError(f"{source} asks for what jllama's Llama does not have: {options}")


def _rope(fields: Mapping[str, Any], source: Path) -> Json:
    """All that is said of RoPE. A file may say it in both spellings, for readers old and new, if they agree."""
    readings = [{key: fields[key] for key in _ROPE_COMMON if key in fields}]
    for spelling in [key for key in ("rope_scaling", "rope_parameters") if fields.get(key)]:
        if not isinstance(fields[spelling], dict):
            raise JllamaError(
                f"{source} has {spelling} {fields[spelling]!r}; it must be an object or null"
            )
        reading = {key: value for key, value in fields[spelling].items() if value is not None}
        readings.append({"rope_type": reading.pop("type", "default")} | reading)
    rope = functools.reduce(operator.or_, readings, {"rope_type": "default"})
    for key, value in [item for reading in readings for item in reading.items()]:
        if rope[key] is not value and rope[key] != value:
            raise JllamaError(
                f"{source} has {key} {value!r}, but {rope[key]!r} in another place: remove one"
            )
    return rope


def _rope_scaling(rope: Mapping[str, Any], max_seq_len: int, source: Path) -> RopeScaling | None:
    kind = ROPE_SCALINGS.get(str(rope["rope_type"]), RopeScaling)
    fixed = {"partial_rotary_factor": (1,)} | kind.huggingface_fixed
    for key, values in fixed.items():
        if rope.get(key, values[0]) not in values:
            raise JllamaError(
                f"{source} has RoPE with {key} other than {json.dumps(values[0])}, as jllama has it"
            )
    keys = [key for key in rope if key not in ("rope_type", *_ROPE_COMMON, *fixed)]
    numbers = read_fields(rope, {key: (key, 1.0) for key in keys}, source)
    if rope["rope_type"] == "default" and not numbers:
        return None
    original = read_fields(
        rope, {"original_max_seq_len": ("original_max_position_embeddings", max_seq_len)}, source
    )
    if kind.grows and original["original_max_seq_len"] != max_seq_len:
        lengths = (
            f"another original_max_position_embeddings than max_position_embeddings ({max_seq_len})"
        )
        raise JllamaError(
            f"{source} has {lengths}, of which transformers' {kind.type} RoPE knows only the latter"
        )
    if hasattr(kind, "original_max_seq_len"):
        numbers |= original
    with fault_of(source):
        return RopeScaling.from_fields({"type": rope["rope_type"]} | numbers)


def config_to_huggingface(config: LlamaConfig, dtype: str) -> Json:
    """A ``config.json`` that transformers 4 and 5 both read as this architecture in ``dtype``, or a JllamaError."""
    if config.embed_dim % config.num_heads:
        sizes = (
            f"embed_dim ({config.embed_dim}) is not a multiple of num_heads ({config.num_heads})"
        )
        raise JllamaError(f"transformers loads no Llama whose {sizes}: save it in another format")
    scaling = config.rope_scaling
    rope = scaling.to_huggingface() if scaling else {"rope_type": "default"}
    length = getattr(scaling, "original_max_seq_len", None)
    if scaling and length and not scaling.grows:
        rope["original_max_position_embeddings"] = length
    elif scaling and length != config.max_seq_len and scaling.grows:
        lengths = f"original_max_seq_len ({length}) must be max_seq_len ({config.max_seq_len})"
        raise JllamaError(
            f"in transformers' {scaling.type} RoPE {lengths}: save it in another format"
        )
    values = {
        theirs: type(default)(getattr(config, ours)) for ours, (theirs, default) in _FIELDS.items()
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key: _LLAMA[key] for key in ("hidden_act", "attention_bias", "mlp_bias")},
        **values,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": rope | {"rope_theta": values["rope_theta"]},
    }


def read(path: Path) -> Checkpoint:
    """Open a Hugging Face folder; of the weights only the embedding is read, if there is a tied head to compare."""
    source = path / CONFIG
    if (path / "adapter_config.json").is_file() and not source.is_file():
        raise JllamaError(
            f"{path} is an adapter: give its base as the checkpoint, and it with --adapter"
        )
    if not source.is_file():
        raise JllamaError(
            f"{path} has no {CONFIG}: copy it there, the weights alone do not say what model they are"
        )
    fields = read_json_object(source)
    config = config_from_huggingface(fields, source)
    computed = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # not learned
    weights = {
        name: tensor for name, tensor in _weights(path).items() if not computed.fullmatch(name)
    }
    embed, head = (PARAMETERS[key].name("huggingface") for key in ("embed", "lm_head"))
    if not config.vocab_size and embed in weights:
        config = dataclasses.replace(
            config, vocab_size=max([1, *weights[embed].shape[:1]])
        )  # no rows: refused below
    if head not in weights and not config.tie_embeddings:
        raise JllamaError(
            f"{path} has no {head}: a model without it needs tie_word_embeddings true in {CONFIG}"
        )
    repeated_head = weights.pop(head, None) if config.tie_embeddings else None
    tensors = matched(weights, config, "huggingface", path)
    if repeated_head is not None and not same_bits(repeated_head, tensors["embed"]):
        raise JllamaError(
            f"{path}: {head} differs from {embed}, so tie_word_embeddings must be false in {CONFIG}"
        )
    tokenizer, template, stops = read_text_files(path)
    if template is None:
        template = _old_chat_template(path / TOKENIZER_CONFIG)
    return Checkpoint(
        config, tensors, tokenizer, template, stops or _stop_ids(fields.get("eos_token_id"), source)
    )


def read_text_files(folder: Path) -> tuple[Tokenizer | None, str | None, tuple[int, ...]]:
    """Read the tokenizer, chat template and stop ids in a folder of any format; None and no ids for absent files."""
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    template, generation = folder / CHAT_TEMPLATE, folder / GENERATION_CONFIG
    with fault_of(f"{template} is not UTF-8 text", UnicodeDecodeError):
        text = template.read_text(encoding="utf-8") if has_file(template) else None
    fields = read_json_object(generation) if has_file(generation) else {}
    return tokenizer, text, _stop_ids(fields.get("eos_token_id"), generation)


def _stop_ids(value: Any, source: Path) -> tuple[int, ...]:
    """An ``eos_token_id`` of a JSON file (absent, one id or a list) as a tuple; anything else raises JllamaError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise JllamaError(
            f"{source} has eos_token_id {json.dumps(value)[:100]}; it must be a token id or several"
        )
    return tuple(ids)


def write_chat_files(
    folder: Path, chat_template: str | None, stops: tuple[int, ...], **others: Any
) -> Json:
    """Write what there is; returns the fields of ``generation_config.json``, of which ``others`` are some."""
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    fields = (
        {"eos_token_id": stops[0] if len(stops) == 1 else list(stops)} if stops else {}
    ) | others
    if fields:
        write_json(folder / GENERATION_CONFIG, fields)
    return fields


def _weights(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder: of the one file if there is one (as transformers does), else of the index's shards."""
    if has_file(path / WEIGHTS):
        return read_safetensors(path / WEIGHTS)
    index = path / INDEX
    if not has_file(index):
        names = ", ".join(sorted(file.name for file in path.glob("*.*")))
        raise JllamaError(
            f"{path} has {names} instead of {WEIGHTS} or {INDEX}; no pickle is opened: save safetensors"
        )
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise JllamaError(
            f"{index} has no weight_map, the object that says which file each tensor is in"
        )
    for shard in shard_of.values():
        # The file may be a link that leads elsewhere, as in the hub's cache; its name may not.
        if not isinstance(shard, str) or not re.fullmatch(
            r"[\w.-]{1,200}\.safetensors", shard, re.ASCII
        ):
            raise JllamaError(
                f"{index} points to {json.dumps(shard)[:100]}; expected a safetensors file beside it"
            )
    shards = sorted(set(shard_of.values()))
    if missing := [shard for shard in shards if not (path / shard).is_file()]:
        raise JllamaError(
            f"{path} lacks {', '.join(missing)}, which {INDEX} names: copy what is missing there"
        )
    tensors = {shard: read_safetensors(path / shard) for shard in shards}
    held = {name: f"in {shard}" for shard in shards for name in tensors[shard]}
    if problems := differences(held, {name: f"in {shard}" for name, shard in shard_of.items()}):
        raise JllamaError(f"{path} has shards that differ from {INDEX}: {problems}")
    return {name: tensors[shard][name] for name, shard in shard_of.items()}


def _old_chat_template(path: Path) -> str | None:
    """The template where files of before 2025 have it: a string, or a list of named ones, one of them ``default``."""
    template = read_json_object(path).get("chat_template") if has_file(path) else None
    if isinstance(template, list):
        entries = [
            entry
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        template = entries[0].get("template") if entries else None
    if template is not None and not isinstance(template, str):
        raise JllamaError(
            f"{path} has a chat_template that is neither text nor a list of named texts"
        )
    return template


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype[Any] | None, on_progress: OnProgress
) -> None:
    """Write a folder that transformers loads as it is."""
    tensors: list[NamedTensor] = [
        (
            spec.name("huggingface"),
            tensor := checkpoint.tensors[spec.key],
            tensor.dtype if dtype is None else dtype,
        )
        for spec in tensor_specs(checkpoint.config)
    ]
    dtypes = {kind for _, _, kind in tensors}
    if unknown := dtypes - set(DTYPES.values()):
        raise JllamaError(
            f"safetensors are written in {', '.join(map(str, DTYPES.values()))}, not in {unknown.pop()}"
        )
    # transformers loads every tensor in one dtype: the one that holds all of them without rounding.
    config = config_to_huggingface(
        checkpoint.config, str(functools.reduce(jnp.promote_types, dtypes))
    )
    tokenizer, template = checkpoint.tokenizer, checkpoint.chat_template
    stops = checkpoint.stop_ids or ((tokenizer.eos_id,) if tokenizer else ())
    if tokenizer:
        save_huggingface(tokenizer, target)
    ids = write_chat_files(
        target, template, stops, **({"bos_token_id": tokenizer.bos_id} if tokenizer else {})
    )
    no_ids = dict.fromkeys(
        ("bos_token_id", "eos_token_id")
    )  # not null but absent, they would be 1 and 2
    write_json(target / CONFIG, config | no_ids | ids)
    if template is not None and (target / TOKENIZER_CONFIG).is_file():
        # transformers 4.45, for one, and tools of its time know no chat_template.jinja.
        write_json(
            target / TOKENIZER_CONFIG,
            read_json_object(target / TOKENIZER_CONFIG) | {"chat_template": template},
        )
    split = huggingface_hub.split_state_dict_into_shards_factory(
        {tensor[0]: tensor for tensor in tensors},
        get_storage_size=lambda tensor: math.prod(tensor[1].shape) * tensor[2].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    if split.is_sharded:
        write_json(
            target / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        )
    for file, names in split.filename_to_tensors.items():
        write_safetensors(
            target / file, [tensor for tensor in tensors if tensor[0] in names], on_progress
        )


def download(repository: str) -> Path:
    """Fetch ``org/name`` from the Hugging Face hub, or find it in the hub's cache; returns the folder it is in."""
    patterns = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
    # Of the hub's client, with its own advice, the HTTP library beneath it, or the disk: all mean the same here.
    with fault_of(f"{repository} cannot be fetched from the hub", Exception):
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
