"""A small model written in every checkpoint format, by code that shares nothing with the readers.

Names, orders, transposes and the order of rotary channels are put down here a second time, from the formats' own
definitions and not from ``jllama.parameters``: a mistake there shows as a difference, instead of being made twice.
Sources: Meta's llama and llama-models (``model.py``), ``torch.save``; transformers 4 and 5 (``modeling_llama.py``,
``modeling_rope_utils.py``), safetensors; llama.cpp's ``convert_hf_to_gguf.py``; llama2.c's ``export.py``.
"""

import dataclasses
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy as safetensors
import yaml
from gguf import GGUFWriter

from jllama import oracle
from jllama.config import LlamaConfig
from jllama.parameters import Params
from jllama.rope_scaling import Llama3Scaling, YarnScaling

Tensors = dict[str, np.ndarray]

_META, _HUGGING_FACE, _GGUF = range(3)
_NAMES = {
    "embed": ("tok_embeddings", "model.embed_tokens", "token_embd"),
    "attn_norm": (
        "layers.{}.attention_norm",
        "model.layers.{}.input_layernorm",
        "blk.{}.attn_norm",
    ),
    "wq": ("layers.{}.attention.wq", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    "wk": ("layers.{}.attention.wk", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    "wv": ("layers.{}.attention.wv", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    "wo": ("layers.{}.attention.wo", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "mlp_norm": (
        "layers.{}.ffn_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_norm",
    ),
    "w_gate": ("layers.{}.feed_forward.w1", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    "w_down": ("layers.{}.feed_forward.w2", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
    "w_up": ("layers.{}.feed_forward.w3", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "final_norm": ("norm", "model.norm", "output_norm"),
    "lm_head": ("output", "lm_head", "output"),
}  # what Meta, Hugging Face and GGUF call each tensor, without the ``.weight`` that ends them all
_FIELDS = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "num_layers": ("num_hidden_layers", "block_count"),
    "embed_dim": ("hidden_size", "embedding_length"),
    "mlp_dim": ("intermediate_size", "feed_forward_length"),
    "num_heads": ("num_attention_heads", "attention.head_count"),
    "num_kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "max_seq_len": ("max_position_embeddings", "context_length"),
    "norm_eps": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
}  # what Hugging Face and GGUF call the fields that both have


class FormatWriter(NamedTuple):
    """How a model is written in a format."""

    holds: Callable[
        [LlamaConfig], bool
    ]  # whether it can express all (Meta's: but ``max_seq_len`` and RoPE's factor)
    write: Callable[
        [Path, LlamaConfig, Params], None
    ]  # to a new path, from float32 parameters with layers stacked


def interleave(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows ``[heads * head_dim, embed]`` of a half-split query or key, in pairs: 0, half, 1, half + 1, ..."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def _tensors(config: LlamaConfig, params: Params, file_format: int) -> Tensors:
    """Every tensor under its name in a format, matrices as ``[outputs, inputs]``; no head if it is tied."""
    heads = (
        {} if file_format == _HUGGING_FACE else {"wq": config.num_heads, "wk": config.num_kv_heads}
    )
    stacked = [
        (name, layer, array)
        for name, arrays in params["layers"].items()
        for layer, array in enumerate(arrays)
    ]
    stacked += [
        (name, 0, array) for name, array in params.items() if name not in ("layers", "embed")
    ]
    tensors = {_NAMES["embed"][file_format]: params["embed"]}
    for name, layer, array in stacked:
        if array.ndim > 1:
            array = array.reshape(
                (-1, config.embed_dim) if name in ("wo", "w_down") else (config.embed_dim, -1)
            ).T
        array = interleave(array, heads[name]) if name in heads else array
        tensors[_NAMES[name][file_format].format(layer)] = array
    return {f"{name}.weight": np.ascontiguousarray(array, "<f4") for name, array in tensors.items()}


def _frequencies(config: LlamaConfig) -> np.ndarray:
    """Of rotary pairs, in radians a token: ``[head_dim / 2]``."""
    return config.rope_theta ** -np.linspace(0, 1, config.head_dim // 2, endpoint=False)


def _is_papers_yarn(scaling: Any) -> bool:
    """Whether factor and original length say all of it."""
    return scaling == YarnScaling(scaling.factor, original_max_seq_len=scaling.original_max_seq_len)


def _write_native(path: Path, config: LlamaConfig, params: Params) -> None:
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(config)}))
    handlers = {"params": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(path.resolve() / "checkpoints", item_handlers=handlers) as manager:
        manager.save(
            0,
            args=ocp.args.Composite(params=ocp.args.PyTreeSave(params), meta=ocp.args.JsonSave({})),
        )


def meta_tensors(config: LlamaConfig, params: Params) -> Tensors:
    """The whole model as Meta's code has it, which knows no tying: the head is always there."""
    tensors = _tensors(config, params, _META)
    return {"output.weight": tensors["tok_embeddings.weight"]} | tensors


def meta_shards(tensors: Tensors, count: int, num_kv_heads: int, embed_axis: int) -> list[Tensors]:
    """Split tensors as the ranks of Meta's model-parallel code hold them.

    Column-parallel layers are cut along their outputs, the row-parallel ``wo`` and ``w2`` along their inputs. Key and
    value heads fewer than ranks are repeated, and so is every vector. The embedding is cut along ``embed_axis``: its
    width, 1, in Llama 1 and 2; the vocabulary, 0, in Llama 3.
    """

    def parts(kind: str, tensor: np.ndarray) -> list[np.ndarray]:
        if tensor.ndim == 1:
            return [tensor] * count
        if kind in ("wk", "wv") and num_kv_heads < count:
            return list(np.repeat(np.split(tensor, num_kv_heads), count // num_kv_heads, axis=0))
        return np.split(
            tensor, count, {"wo": 1, "w2": 1, "tok_embeddings": embed_axis}.get(kind, 0)
        )

    cut = {name: parts(name.split(".")[-2], tensor) for name, tensor in tensors.items()}
    return [
        {name: np.ascontiguousarray(ranks[rank]) for name, ranks in cut.items()}
        for rank in range(count)
    ]


def meta_params(config: LlamaConfig) -> dict[str, Any]:
    """The fields of ``params.json``, which leaves out the RoPE scaling factor.

    The MLP's width is ``int(2 * 4 * dim / 3) * ffn_dim_multiplier``, up to a multiple of ``multiple_of``: of itself.
    """
    width = int(2 * 4 * config.embed_dim / 3)
    fields = {
        "dim": config.embed_dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.norm_eps,
        "multiple_of": config.mlp_dim,
    }
    if width > config.mlp_dim:
        fields["ffn_dim_multiplier"] = (config.mlp_dim + 0.5) / width
    if config.num_kv_heads != config.num_heads:
        fields["n_kv_heads"] = config.num_kv_heads
    if config.rope_theta != 10_000:
        fields["rope_theta"] = config.rope_theta
    if config.rope_scaling:
        fields["use_scaled_rope"] = True
    return fields


def _write_meta(path: Path, config: LlamaConfig, params: Params, count: int) -> None:
    tensors, is_llama_3 = meta_tensors(config, params), config.rope_theta != 10_000
    if not is_llama_3:  # a table that is computed, not learned
        tensors["rope.freqs"] = _frequencies(config).astype("<f4")
    path.mkdir()
    (path / "params.json").write_text(json.dumps(meta_params(config)))
    for rank, shard in enumerate(
        meta_shards(tensors, count, config.num_kv_heads, 0 if is_llama_3 else 1)
    ):
        _write_torch(path / f"consolidated.{rank:02}.pth", shard)


def _meta_holds(config: LlamaConfig, count: int) -> bool:
    kv_heads, scaling = max(config.num_kv_heads, count), config.rope_scaling
    return (
        config.num_heads * config.head_dim == config.embed_dim
        and (scaling is None or scaling == Llama3Scaling(scaling.factor))
        and not any(
            size % count for size in (config.num_heads, config.mlp_dim, config.vocab_size, kv_heads)
        )
        and kv_heads % config.num_kv_heads == 0
    )


def _write_torch(path: Path, tensors: Tensors) -> None:
    """Write a dictionary as ``torch.save`` does: a pickle in a zip archive, beside the numbers of each tensor."""

    def literals(*values: Any) -> bytes:
        return b"".join(
            pickle.dumps(value, 2)[2:-1] for value in values
        )  # without what begins and ends a pickle

    pickled = b"\x80\x02" + literals({})  # "(" begins a tuple and "t" ends it
    for key, (name, tensor) in enumerate(tensors.items()):
        strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
        storage = (
            literals("storage") + b"ctorch\nFloatStorage\n" + literals(str(key), "cpu", tensor.size)
        )
        pickled += (
            literals(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + b"tQ"
        )  # Q: by reference
        pickled += (
            literals(0, tensor.shape, strides, False, OrderedDict()) + b"tRs"
        )  # make it, and put it there
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in {
            "data.pkl": pickled + b".",
            "byteorder": b"little",
            "version": b"3\n",
        }.items():
            archive.writestr(f"archive/{name}", content)
        for key, tensor in enumerate(tensors.values()):
            entry = zipfile.ZipInfo(f"archive/data/{key}")
            padding = (
                -(file.tell() + 30 + len(entry.filename) + 4) % 64
            )  # torch has numbers at multiples of 64 bytes
            entry.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            archive.writestr(entry, tensor.tobytes())


def _write_hugging_face(path: Path, config: LlamaConfig, params: Params, version: int) -> None:
    """A folder as transformers 4 has it, the weights in one file; or 5, in two."""
    scaling: Any = config.rope_scaling
    rope = (
        {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling
        else {"rope_type": "default"}
    )
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    }
    if scaling and scaling.type in names:
        rope["original_max_position_embeddings"] = scaling.original_max_seq_len
        if not _is_papers_yarn(scaling):
            rope |= {name: getattr(scaling, name) for name in names[scaling.type]}
    fields = {name: getattr(config, field) for field, (name, _) in _FIELDS.items()}
    fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    fields["tie_word_embeddings"] = config.tie_embeddings
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    if version == 4:
        fields |= {
            "rope_theta": config.rope_theta,
            "rope_scaling": rope if scaling else None,
            "torch_dtype": "float32",
        }
        files = ["model.safetensors"]
    else:
        fields |= {"rope_parameters": {"rope_theta": config.rope_theta} | rope, "dtype": "float32"}
    tensors = _tensors(config, params, _HUGGING_FACE)
    file_of = {
        name: files[number * len(files) // len(tensors)] for number, name in enumerate(tensors)
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    for file in files:
        shard = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
        safetensors.save_file(shard, path / file, {"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(np.size, tensors.values())) * 4},
            "weight_map": file_of,
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _hugging_face_holds(config: LlamaConfig) -> bool:
    scaling: Any = (
        config.rope_scaling
    )  # transformers has one length for dynamic scaling and for the context
    return (
        scaling is None
        or scaling.type != "dynamic"
        or scaling.original_max_seq_len == config.max_seq_len
    )


def gguf_metadata(config: LlamaConfig) -> dict[str, int | float | str]:
    """The keys of a Llama as llama.cpp's converter writes them: integers as uint32, numbers as float32."""
    scaling: Any = config.rope_scaling
    metadata = {key: getattr(config, name) for name, (_, key) in _FIELDS.items()}
    metadata |= dict.fromkeys(("attention.value_length", "rope.dimension_count"), config.head_dim)
    metadata["rope.freq_base"] = config.rope_theta
    if scaling and scaling.type in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": scaling.type, "rope.scaling.factor": scaling.factor}
    if scaling and scaling.type == "yarn":
        metadata["rope.scaling.original_context_length"] = scaling.original_max_seq_len
    return {f"llama.{key}": value for key, value in metadata.items()}


def gguf_tensors(config: LlamaConfig, params: Params) -> Tensors:
    """The tensors as llama.cpp's converter writes them, with ``rope_freqs.weight`` for ``llama3`` scaling."""
    scaling = config.rope_scaling
    divisors = (
        {"rope_freqs.weight": gguf_divisors(config, scaling)}
        if isinstance(scaling, Llama3Scaling)
        else {}
    )
    return _tensors(config, params, _GGUF) | divisors


def gguf_divisors(config: LlamaConfig, scaling: Llama3Scaling) -> np.ndarray:
    """llama.cpp's divisors of rotary frequencies for ``llama3`` scaling: ``[head_dim / 2]``."""
    scaled = oracle.rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    return (_frequencies(config) / scaled).astype("<f4")


def _write_gguf(path: Path, config: LlamaConfig, params: Params) -> None:
    writer = GGUFWriter(path, "llama")
    add: dict[type, Any] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in (gguf_metadata(config) | {"tokenizer.ggml.model": "no_vocab"}).items():
        add[type(value)](key, value)
    for name, tensor in gguf_tensors(config, params).items():
        writer.add_tensor(name, tensor)
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()


def _gguf_holds(config: LlamaConfig) -> bool:
    scaling: Any = config.rope_scaling
    if scaling is None or scaling.type == "linear":
        return True
    return scaling == Llama3Scaling(scaling.factor) or _is_papers_yarn(
        scaling
    )  # readers find the factor of divisors


def _write_llama2c(path: Path, config: LlamaConfig, params: Params) -> None:
    """Write seven integers, then Meta's tensors, each kind for all layers, with cosines and sines before the head."""
    kinds = [
        "attention_norm",
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "ffn_norm",
    ]
    kinds += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    names = [f"layers.{layer}.{kind}" for kind in kinds for layer in range(config.num_layers)]
    tensors = meta_tensors(config, params)
    angles = np.outer(np.arange(config.max_seq_len), _frequencies(config))
    arrays = [tensors[f"{name}.weight"] for name in ("tok_embeddings", *names, "norm")]
    arrays += [
        np.cos(angles),
        np.sin(angles),
        *([] if config.tie_embeddings else [tensors["output.weight"]]),
    ]
    sizes = (
        config.embed_dim,
        config.mlp_dim,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
    )
    vocab_size = config.vocab_size if config.tie_embeddings else -config.vocab_size
    path.mkdir()
    header = struct.pack("<7i", *sizes, vocab_size, config.max_seq_len)
    (path / "model.bin").write_bytes(
        header + b"".join(array.astype("<f4").tobytes() for array in arrays)
    )


def _llama2c_holds(config: LlamaConfig) -> bool:
    fixed = (config.rope_theta, config.norm_eps, config.rope_scaling) == (10_000, 1e-5, None)
    return fixed and config.num_heads * config.head_dim == config.embed_dim


FORMAT_WRITERS = {
    "native": FormatWriter(lambda _: True, _write_native),
    **{
        f"meta x{n}": FormatWriter(partial(_meta_holds, count=n), partial(_write_meta, count=n))
        for n in (1, 4)
    },
    **{
        f"hf v{n}": FormatWriter(_hugging_face_holds, partial(_write_hugging_face, version=n))
        for n in (4, 5)
    },
    "gguf": FormatWriter(_gguf_holds, _write_gguf),
    "llama2c": FormatWriter(_llama2c_holds, _write_llama2c),
}  # the formats, and variants of them, that ``jllama.load`` reads: the matrix's columns
