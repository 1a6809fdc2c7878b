"""What files of Llama 4 have that others do not: images, and experts joined to one tensor.

Sources: transformers 5.24, ``Llama4Config``, ``Llama4TextConfig`` and ``Llama4TextExperts``; Meta's
llama-models, ``llama4/args.py`` and the hooks by which its modules load files.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import PARAMETERS, layers_of
from jllama.formats.tensors import Checkpoint, FileTensor, LazyTensor
from jllama.system.files import Json, read_field, read_fields

LLAMA4 = "llama4_text"
_CHUNKS = {
    "attention_chunk": ("attention_chunk_size", 0),
    "temperature_step": ("floor_scale", 8192),
    "temperature_scale": ("attn_scale", 0.1),
}
LLAMA4_OPTIONS = ("no_rope_layers", "qk_norm", "dense_layers", *_CHUNKS)
_EXPERTS = re.compile(r"(model\.layers\.\d+\.feed_forward\.experts)\.(gate_up|down)_proj")
_OF_IMAGES = ("vision_model.", "multi_modal_projector.")

# Meta's own files.
META_KEYS = """vision_args head_dim ffn_exp nope_layer_interval use_qk_norm attention_chunk_size
    attn_temperature_tuning floor_scale attn_scale num_experts capacity_factor auto_scale_F top_k
    interleave_moe_layer_step"""
"""Keys of ``params.json``, and of its ``moe_args``. ``head_dim`` is not used by Meta's code."""
META_DEFAULTS = {
    "rope_theta": 500_000.0,
    "attn_temperature_tuning": False,
    "use_qk_norm": False,
    "floor_scale": 8192.0,
}
META_SCALING = {"rope_scaling_factor": 16, "rope_high_freq_factor": 1}
"""What ``use_scaled_rope`` means."""
META_NAMES = (
    ("model.norm.", "norm."),
    ("model.layers.", "layers."),
    ("model.embed_tokens.", "tok_embeddings."),
    ("lm_head.", "output."),
    ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("self_attn.", "attention."),
    ("q_proj.", "wq."),
    ("k_proj.", "wk."),
    ("v_proj.", "wv."),
    ("o_proj.", "wo."),
    ("mlp.gate.", "feed_forward.router."),
    ("mlp.", "feed_forward."),
    ("gate_proj.", "w1."),
    ("up_proj.", "w3."),
    ("down_proj.", "w2."),
)
"""Parts of Hugging Face's names of tensors, and what they are in ``split_shard``."""
_LOADED_AS = (
    ("attention.wqkv.layer_norm_weight", "attention_norm.weight"),
    ("feed_forward.mlp.layer_norm_weight", "ffn_norm.weight"),
    ("feed_forward.norm.weight", "ffn_norm.weight"),
    ("mlp.fc2_weight", "w2.weight"),
    ("w_in_shared_FD.", "shared_expert.w1."),
    ("w_swiglu_FD.", "shared_expert.w3."),
    ("w_out_shared_DF.", "shared_expert.w2."),
    ("moe_w_in_eD_F", "w1"),
    ("moe_w_swiglu_eD_F", "w3"),
    ("moe_w_out_eF_D", "w2"),
)
_NOT_WEIGHTS = re.compile(r"vision_.*|.*(_extra_state|expert_activation_DE|gate_stats_3E)")


def text_fields(fields: Mapping[str, Any]) -> Json:
    """Return the fields of the text model, which Llama 4's files may have beside that of images."""
    text = fields.get("text_config")
    if fields.get("model_type") != "llama4" or not isinstance(text, dict):
        return dict(fields)
    return {**fields, "model_type": LLAMA4, **text}


def common_fields(fields: Json) -> Json:
    """Return the fields with the names that other families have for them."""
    return fields | {
        "moe_intermediate_size": fields.get("intermediate_size", 8192),
        "intermediate_size": fields.get("intermediate_size_mlp", 16_384),
        "no_rope_layers": fields.get("no_rope_layers") or None,  # empty in published files
        "attention_chunk_size": fields.get("attention_chunk_size", 8192),  # null: no chunks
        "chunked_layers": fields.get("layer_types"),
        "layer_types": None,
    }


def llama4_options(
    fields: Json, no_rope_layers: list[int], num_layers: int, source: Path
) -> dict[str, Any]:
    """Return the fields of ``LlamaConfig`` that only files of Llama 4 set.

    Raises:
        JllamaError: A field is wrong, or layers with rotation are not those with chunks.
    """
    is_normalized = read_field(fields, "use_qk_norm", True, source)
    values = read_fields(fields, _CHUNKS, source)
    values["qk_norm"] = "rotated" if is_normalized else "none"
    if not fields.get("attn_temperature_tuning", True):  # true, or 4 in published files
        values["temperature_step"] = 0
    step = read_field(fields, "interleave_moe_layer_step", 1, source)
    layers = range(num_layers)
    of_experts = fields.get("moe_layers", [*layers[step - 1 :: step]])
    if not isinstance(of_experts, list) or not all(layer in layers for layer in of_experts):
        raise JllamaError(
            f"{source} has moe_layers {str(of_experts)[:80]}; it must be a list of layers"
        )
    values["dense_layers"] = [layer for layer in layers if layer not in of_experts]
    kinds = ["chunked_attention" if values["attention_chunk"] else "full_attention"] * num_layers
    for layer in no_rope_layers:
        kinds[layer] = "full_attention"
    if fields.get("chunked_layers", kinds) != kinds:
        raise JllamaError(
            f"{source} has other layer_types than chunked_attention in the layers that rotate, "
            "and full_attention in the others: set them to what the model was trained with"
        )
    return values


def llama4_entries(config: LlamaConfig) -> Json:
    """Return the entries of ``config.json`` that only files of Llama 4 have."""
    entries: Json = {key: getattr(config, name) for name, (key, _) in _CHUNKS.items()}
    of_experts = layers_of(PARAMETERS["layers/router"], config)
    return entries | {
        "use_qk_norm": config.qk_norm == "rotated",
        "attention_chunk_size": config.attention_chunk or None,
        "floor_scale": config.temperature_step or _CHUNKS["temperature_step"][1],
        "attn_temperature_tuning": config.temperature_step > 0,
        "moe_layers": of_experts,
        "interleave_moe_layer_step": of_experts[0] + 1,
        "intermediate_size": config.expert_dim,
        "intermediate_size_mlp": config.mlp_dim,
    }


def options_of_llama_cpp(num_layers: int, num_experts: int, step: int) -> dict[str, Any]:
    """Return the fields of ``LlamaConfig`` that llama.cpp decides itself.

    Every ``step``-th layer has experts. Source: llama.cpp, the architecture ``llama4``.
    """
    return {
        "qk_norm": "none" if num_experts == 128 else "rotated",
        "attention_chunk": 8192,
        "temperature_step": 8192,
        "temperature_scale": 0.1,
        "dense_layers": tuple(layer for layer in range(num_layers) if (layer + 1) % step),
    }


def split_experts(weights: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return tensors with one of each expert in place of joined ones, and without images."""
    parts = {}
    for full_name, tensor in weights.items():
        name = full_name.removeprefix("language_model.")
        joined = _EXPERTS.fullmatch(name)
        if joined and len(tensor.shape) == 3:
            stem, kind = joined.groups()
            names = ("gate", "up") if kind == "gate_up" else ("down",)
            for expert in range(tensor.shape[0]):
                matrices = np.array_split(np.asarray(tensor)[expert], len(names), axis=1)
                for part, matrix in zip(names, matrices, strict=True):
                    parts[f"{stem}.{expert}.{part}_proj.weight"] = matrix.T
        elif not name.startswith(_OF_IMAGES):
            parts[name] = tensor
    return parts


def join_experts(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """Return the joined tensors of each layer's experts, by their names in files."""
    config = checkpoint.config
    joined = {}
    for layer in layers_of(PARAMETERS["layers/experts_down"], config):
        stem = f"model.layers.{layer}.feed_forward.experts"
        gate, up, down = (
            checkpoint.tensors[f"layers/{layer}/experts_{name}"] for name in ("gate", "up", "down")
        )
        joined[f"{stem}.gate_up_proj"] = _joined(config, gate, up)
        joined[f"{stem}.down_proj"] = _joined(config, down)
    return joined


def _joined(config: LlamaConfig, *tensors: FileTensor) -> LazyTensor:
    """Return ``[experts, inputs, outputs]``, the outputs of the tensors one behind the other."""
    rows = tensors[0].shape[0] // config.num_experts
    inputs = tensors[0].shape[1]

    def read(experts: slice) -> np.ndarray:
        matrices = [
            np.concatenate([tensor[rows * expert : rows * (expert + 1)] for tensor in tensors]).T
            for expert in range(experts.start, experts.stop)
        ]
        return np.stack(matrices)

    shape = (config.num_experts, inputs, len(tensors) * rows)
    dtype = functools.reduce(jnp.promote_types, [tensor.dtype for tensor in tensors])
    return LazyTensor(shape, dtype, read)


def options_of_meta(params: Json, source: Path) -> dict[str, Any]:
    """Return the fields of ``LlamaConfig`` that Meta's ``params.json`` has for Llama 4 alone.

    Raises:
        JllamaError: One is wrong.
    """
    num_layers = read_field(params, "n_layers", None, source)
    interval = read_field(params, "nope_layer_interval", num_layers + 1, source)
    no_rope_layers = [*range(interval - 1, num_layers, interval)]
    fields = params | {"floor_scale": int(read_field(params, "floor_scale", 8192.0, source))}
    return {
        **llama4_options(fields, no_rope_layers, num_layers, source),
        "no_rope_layers": no_rope_layers,
        "router": "sigmoid",
        "shared_expert": True,
        "num_experts": read_field(params, "num_experts", None, source),
        "experts_per_token": read_field(params, "top_k", 1, source),
    }


def split_shard(shard: Mapping[str, np.ndarray], config: LlamaConfig) -> dict[str, np.ndarray]:
    """Return one of Meta's shards with a tensor for each matrix, and without images.

    Raises:
        ValueError: A tensor cannot be split so.
    """
    parts = {}
    for name, tensor in shard.items():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        for stored, loaded in _LOADED_AS:
            name = name.replace(stored, loaded)
        stem, _, last = name.rpartition(".")
        if name.endswith(".wqkv.weight"):
            widths = np.array([config.num_heads, config.num_kv_heads, config.num_kv_heads])
            groups = np.split(tensor, widths.sum())  # all of one size
            ends = np.cumsum(widths) * len(groups[0])
            for letter, matrix in zip("qkv", np.split(tensor, ends)[:-1], strict=True):
                parts[name.replace("qkv", letter)] = matrix
        elif last == "fc1_weight":
            for number, matrix in zip("13", np.split(tensor, 2), strict=True):
                parts[name.replace("mlp.fc1_weight", f"w{number}.weight")] = matrix
        elif last == "router_DE":
            parts[f"{stem}.router.weight"] = tensor.T
        elif stem.endswith(".experts"):
            matrices = tensor.reshape(config.num_experts, -1, tensor.shape[-1])
            for expert, matrix in enumerate(matrices):
                parts[f"{stem}.{expert}.{last}.weight"] = matrix.T
        else:
            parts[name] = tensor
    return parts
