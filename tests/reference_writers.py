"""Writers of a small model in every checkpoint format, which share no code with the readers.

Names, orders, transposes and the order of rotary channels are written down here a second time, from
the formats' own definitions and not from ``jllama.core.parameters``. So a mistake there shows as a
difference, instead of being made twice. Sources: Meta's llama and llama-models (``model.py``),
``torch.save``; transformers 4 and 5 (the models and configurations of each family,
``modeling_rope_utils.py``), safetensors; llama.cpp's ``convert_hf_to_gguf.py`` and models;
llama2.c's ``export.py``.
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

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy as safetensors
import yaml
from gguf import GGUFWriter

from jllama.core.config import LlamaConfig
from jllama.core.parameters import Params
from jllama.models import oracle
from jllama.models.rope_scaling import Llama3Scaling, YarnScaling

Tensors = dict[str, np.ndarray]


def _table(text: str) -> dict[str, list[str]]:
    """Read a table whose first column has the keys."""
    return {key: names for key, *names in map(str.split, text.strip().splitlines())}


# The name of each tensor in Meta's, Hugging Face's and GGUF's files, without the ``.weight`` or, of
# biases, ``.bias`` that ends it.
_META, _HUGGING_FACE, _GGUF = range(3)
_NAMES = _table("""
embed       tok_embeddings             model.embed_tokens                        token_embd
attn_norm   layers.{}.attention_norm   model.layers.{}.input_layernorm           blk.{}.attn_norm
wq          layers.{}.attention.wq     model.layers.{}.self_attn.q_proj          blk.{}.attn_q
wk          layers.{}.attention.wk     model.layers.{}.self_attn.k_proj          blk.{}.attn_k
wv          layers.{}.attention.wv     model.layers.{}.self_attn.v_proj          blk.{}.attn_v
wo          layers.{}.attention.wo     model.layers.{}.self_attn.o_proj          blk.{}.attn_output
mlp_norm    layers.{}.ffn_norm         model.layers.{}.post_attention_layernorm  blk.{}.ffn_norm
w_gate      layers.{}.feed_forward.w1  model.layers.{}.mlp.gate_proj             blk.{}.ffn_gate
w_down      layers.{}.feed_forward.w2  model.layers.{}.mlp.down_proj             blk.{}.ffn_down
w_up        layers.{}.feed_forward.w3  model.layers.{}.mlp.up_proj               blk.{}.ffn_up
final_norm  norm                       model.norm                                output_norm
lm_head     output                     lm_head                                   output
bq          -                          model.layers.{}.self_attn.q_proj          blk.{}.attn_q
bk          -                          model.layers.{}.self_attn.k_proj          blk.{}.attn_k
bv          -                          model.layers.{}.self_attn.v_proj          blk.{}.attn_v
q_norm      -                          model.layers.{}.self_attn.q_norm          blk.{}.attn_q_norm
k_norm      -                          model.layers.{}.self_attn.k_norm          blk.{}.attn_k_norm
""")
_NAMES |= {f"{name}_whole": _NAMES[name] for name in ("q_norm", "k_norm")}
# Names of norms after attention and after the MLP.
_NAMES |= _table("""
attn_out_norm  -  model.layers.{}.post_attention_layernorm    blk.{}.post_attention_norm
mlp_out_norm   -  model.layers.{}.post_feedforward_layernorm  blk.{}.post_ffw_norm
""")
_BIASES = ("bq", "bk", "bv")
# What Phi's files hold as one tensor.
_FUSED = {
    1: {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    2: {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
}
# The class in transformers, and the architecture in GGUF files, of each family.
_FAMILIES = _table("""
llama      LlamaForCausalLM      llama
mistral    MistralForCausalLM    llama
ministral  MinistralForCausalLM  llama
qwen2      Qwen2ForCausalLM      qwen2
qwen3      Qwen3ForCausalLM      qwen3
smollm3    SmolLM3ForCausalLM    smollm3
olmo2      Olmo2ForCausalLM      olmo2
olmo3      Olmo3ForCausalLM      olmo2
phi3       Phi3ForCausalLM       phi3
granite    GraniteForCausalLM    granite
""")
_INTERLEAVED = ("llama", "smollm3", "granite")
"""GGUF's architectures whose rotary channels are interleaved pairs."""
_MULTIPLIERS = _table("""
embedding_multiplier  embedding_scale
residual_multiplier   residual_scale
attention_multiplier  attention.scale
logits_scaling        logit_scale
""")
# The names of the fields that both Hugging Face and GGUF have.
_FIELDS = _table("""
vocab_size    vocab_size               vocab_size
num_layers    num_hidden_layers        block_count
embed_dim     hidden_size              embedding_length
mlp_dim       intermediate_size        feed_forward_length
num_heads     num_attention_heads      attention.head_count
num_kv_heads  num_key_value_heads      attention.head_count_kv
head_dim      head_dim                 attention.key_length
max_seq_len   max_position_embeddings  context_length
norm_eps      rms_norm_eps             attention.layer_norm_rms_epsilon
""")


class FormatWriter(NamedTuple):
    """A format that a model can be written in.

    Attributes:
        holds: whether the format can express a configuration; of Meta's, except for ``max_seq_len``
            and the factor of RoPE's scaling.
        write: writes float32 parameters, with layers stacked, to a new path.
    """

    holds: Callable[[LlamaConfig], bool]
    write: Callable[[Path, LlamaConfig, Params], None]


def _family(config: LlamaConfig) -> str:
    """Return the family whose files a model is written in."""
    marks = {
        # Phi-4 is a Llama but for its files; no other model has its theta.
        "phi3": config.partial_rotary_factor < 1 or config.rope_theta == 250_000,
        "qwen2": config.attention_bias,
        "qwen3": config.qk_norm == "head",
        "smollm3": config.no_rope_layers,
        "olmo3": config.norm_placement == "after" and config.sliding_window,
        "olmo2": config.norm_placement == "after",
        "granite": config.logits_scaling != 1,
        "ministral": config.full_attention_layers,
        "mistral": config.sliding_window,
    }
    return next((family for family, is_marked in marks.items() if is_marked), "llama")


def _layer_types(config: LlamaConfig) -> list[bool]:
    """Return whether each layer has the sliding window."""
    has_window = config.sliding_window > 0
    return [
        has_window and layer not in config.full_attention_layers
        for layer in range(config.num_layers)
    ]


def interleave(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from half-split to pairs: 0, half, 1, half + 1, ...

    ``matrix`` is a query or key matrix, ``[heads * head_dim, embed]``.
    """
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def _tensors(config: LlamaConfig, params: Params, file_format: int) -> Tensors:
    """Return every tensor under its name in a format, matrices as ``[outputs, inputs]``.

    Queries and keys are interleaved in Meta's format and in GGUF files of some families. A tied
    model has no head.
    """
    family = _family(config)
    is_interleaved = file_format == _META
    if file_format == _GGUF:
        is_interleaved = _FAMILIES[family][1] in _INTERLEAVED
    heads = {"wq": config.num_heads, "wk": config.num_kv_heads}
    tensors = {_NAMES["embed"][file_format]: params["embed"]}
    for name, stack in params["layers"].items():
        suffix = ".bias" if name in _BIASES else ""
        for layer, array in enumerate(stack):
            array = _outputs_first(config, name, array)
            if name in heads and is_interleaved:
                array = interleave(array, heads[name])
            tensors[_NAMES[name][file_format].format(layer) + suffix] = array
    for name, array in params.items():
        if name not in ("layers", "embed"):
            tensors[_NAMES[name][file_format]] = _outputs_first(config, name, array)
    if family == "phi3" and file_format != _META:
        tensors = _fused(config, tensors, file_format)
    named = {
        name if name.endswith(".bias") else f"{name}.weight": array
        for name, array in tensors.items()
    }
    return {name: np.ascontiguousarray(array, "<f4") for name, array in named.items()}


def _fused(config: LlamaConfig, tensors: Tensors, file_format: int) -> Tensors:
    """Return the tensors with those of ``_FUSED`` joined, rows behind rows."""
    fused = dict(tensors)
    prefix = "model.layers" if file_format == _HUGGING_FACE else "blk"
    for layer in range(config.num_layers):
        for name, parts in _FUSED[file_format].items():
            arrays = [fused.pop(f"{prefix}.{layer}.{part}") for part in parts]
            fused[f"{prefix}.{layer}.{name}"] = np.concatenate(arrays)
    return fused


def _outputs_first(config: LlamaConfig, name: str, array: np.ndarray) -> np.ndarray:
    """Return a matrix as ``[outputs, inputs]``; a vector, perhaps of several heads, is flat."""
    if array.ndim == 1 or name in _BIASES or name.endswith("_whole"):
        return array.reshape(-1)
    if name in ("wo", "w_down"):
        return array.reshape(-1, config.embed_dim).T
    return array.reshape(config.embed_dim, -1).T


def _frequencies(config: LlamaConfig) -> np.ndarray:
    """Compute unscaled rotary frequencies, in radians a token: ``[half of rotated channels]``."""
    num_pairs = round(config.head_dim * config.partial_rotary_factor) // 2
    return config.rope_theta ** -np.linspace(0, 1, num_pairs, endpoint=False)


def _is_papers_yarn(scaling: Any) -> bool:
    """Whether the factor and the original length determine the scaling."""
    return scaling == YarnScaling(scaling.factor, original_max_seq_len=scaling.original_max_seq_len)


def _write_native(path: Path, config: LlamaConfig, params: Params) -> None:
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(config)}))
    handlers = {"params": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    contents = ocp.args.Composite(params=ocp.args.PyTreeSave(params), meta=ocp.args.JsonSave({}))
    with ocp.CheckpointManager(path.resolve() / "checkpoints", item_handlers=handlers) as manager:
        manager.save(0, args=contents)


def meta_tensors(config: LlamaConfig, params: Params) -> Tensors:
    """Return the whole model as Meta's code has it: always with a head, as it knows no tying."""
    tensors = _tensors(config, params, _META)
    return {"output.weight": tensors["tok_embeddings.weight"]} | tensors


def meta_shards(tensors: Tensors, count: int, num_kv_heads: int, embed_axis: int) -> list[Tensors]:
    """Split tensors as the ranks of Meta's model-parallel code hold them.

    Column-parallel layers are cut along their outputs, the row-parallel ``wo`` and ``w2`` along
    their inputs. Vectors are repeated; so are key and value heads if there are fewer than ranks.

    Args:
        tensors: the whole model, by ``meta_tensors``.
        count: the number of ranks.
        num_kv_heads: of the model.
        embed_axis: where the embedding is cut: along its width, 1, in Llama 1 and 2; along the
            vocabulary, 0, in Llama 3.
    """
    shards: list[Tensors] = [{} for _ in range(count)]
    axes = {"wo": 1, "w2": 1, "tok_embeddings": embed_axis}
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if tensor.ndim == 1:
            parts = [tensor] * count
        elif kind in ("wk", "wv") and num_kv_heads < count:
            heads = np.split(tensor, num_kv_heads)
            parts = np.repeat(heads, count // num_kv_heads, axis=0)
        else:
            parts = np.split(tensor, count, axes.get(kind, 0))
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = np.ascontiguousarray(part)
    return shards


def meta_params(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of ``params.json``, which leaves out the factor of RoPE's scaling.

    The width of the MLP is ``int(2 * 4 * dim / 3) * ffn_dim_multiplier``, rounded up to a multiple
    of ``multiple_of``, which here is the width itself.
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
    """Write ``params.json`` and a file for each of ``count`` ranks."""
    tensors = meta_tensors(config, params)
    is_llama_3 = config.rope_theta != 10_000
    if not is_llama_3:  # their files also have this table, which is not learned
        tensors["rope.freqs"] = _frequencies(config).astype("<f4")
    shards = meta_shards(tensors, count, config.num_kv_heads, 0 if is_llama_3 else 1)
    path.mkdir()
    (path / "params.json").write_text(json.dumps(meta_params(config)))
    for rank, shard in enumerate(shards):
        _write_torch(path / f"consolidated.{rank:02}.pth", shard)


def _meta_holds(config: LlamaConfig, count: int) -> bool:
    scaling = config.rope_scaling
    kv_heads = max(config.num_kv_heads, count)
    divided = (config.num_heads, config.mlp_dim, config.vocab_size, kv_heads)
    return (
        not config.extensions
        and config.num_heads * config.head_dim == config.embed_dim
        and (scaling is None or scaling == Llama3Scaling(scaling.factor))
        and all(size % count == 0 for size in divided)
        and kv_heads % config.num_kv_heads == 0
    )


def _write_torch(path: Path, tensors: Tensors) -> None:
    """Write a dictionary as ``torch.save`` does: a zip archive of a pickle and of all numbers."""
    # Operations of a pickle: "(" begins a tuple and "t" ends it, "Q" takes it as a reference, "R"
    # calls, "s" sets an item.
    pickled = b"\x80\x02" + _literals({})
    for key, (name, tensor) in enumerate(tensors.items()):
        strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
        pickled += _literals(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        pickled += _literals("storage") + b"ctorch\nFloatStorage\n"
        pickled += _literals(str(key), "cpu", tensor.size) + b"tQ"
        pickled += _literals(0, tensor.shape, strides, False, OrderedDict()) + b"tRs"
    contents = {"data.pkl": pickled + b".", "byteorder": b"little", "version": b"3\n"}
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"archive/{name}", content)
        for key, tensor in enumerate(tensors.values()):
            entry = zipfile.ZipInfo(f"archive/data/{key}")
            # torch puts numbers at multiples of 64 bytes.
            padding = -(file.tell() + 30 + len(entry.filename) + 4) % 64
            entry.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            archive.writestr(entry, tensor.tobytes())


def _literals(*values: Any) -> bytes:
    """Pickle values, without the bytes that begin and end a pickle."""
    return b"".join(pickle.dumps(value, 2)[2:-1] for value in values)


def _write_hugging_face(path: Path, config: LlamaConfig, params: Params, version: int) -> None:
    """Write a folder as transformers 4, with the weights in one file, or 5, in two."""
    files = ["model.safetensors"]
    if version == 5:
        files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    tensors = _tensors(config, params, _HUGGING_FACE)
    file_of = {
        name: files[number * len(files) // len(tensors)] for number, name in enumerate(tensors)
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(_hugging_face_config(config, version)))
    for file in files:
        shard = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
        safetensors.save_file(shard, path / file, {"format": "pt"})
    if version == 5:
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_flax(
    folder: Path, config: LlamaConfig, params: Params, dtype: Any = "float32", count: int = 1
) -> None:
    """Write a folder as transformers' former Flax models did (``modeling_flax_utils.py``).

    Arrays lie in nested dictionaries, and kernels have inputs first. An index has the arrays'
    paths, if ``count``, the number of files, is over 1.
    """
    tensors = {}
    for name, tensor in _tensors(config, params, _HUGGING_FACE).items():
        path = name.removesuffix(".weight").split(".")
        if path[-1] == "embed_tokens":
            path.append("embedding")
        elif path[-1].endswith("norm"):
            path.append("weight")
        elif path[-1] != "bias":
            path.append("kernel")
            tensor = tensor.T
        tensors[tuple(path)] = np.ascontiguousarray(tensor.astype(dtype))
    folder.mkdir(parents=True, exist_ok=True)
    fields = _hugging_face_config(config, 4)
    (folder / "config.json").write_text(json.dumps(fields))
    names = ["flax_model.msgpack"]
    if count > 1:
        names = [f"flax_model-{number + 1:05d}-of-{count:05d}.msgpack" for number in range(count)]
        places = {"/".join(path): names[n % count] for n, path in enumerate(tensors)}
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    for number, name in enumerate(names):
        nested: dict[str, Any] = {}
        for path in [*tensors][number::count]:
            level = nested
            for part in path[:-1]:
                level = level.setdefault(part, {})
            level[path[-1]] = tensors[path]
        (folder / name).write_bytes(flax.serialization.msgpack_serialize(nested))


def _hugging_face_config(config: LlamaConfig, version: int) -> dict[str, Any]:
    """Return the fields of ``config.json``."""
    # The scaling of RoPE.
    scaling: Any = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling:
        rope = {"rope_type": scaling.type, "factor": scaling.factor}
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    }
    if scaling and scaling.type in names:
        rope["original_max_position_embeddings"] = scaling.original_max_seq_len
        if not _is_papers_yarn(scaling):
            rope |= {name: getattr(scaling, name) for name in names[scaling.type]}

    # All other fields.
    fields = {name: getattr(config, field) for field, (name, _) in _FIELDS.items()}
    family = _family(config)
    fields |= {
        "architectures": [_FAMILIES[family][0]],
        "model_type": family,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        **_hugging_face_options(config, family),
    }

    # RoPE as each version of transformers names it.
    theta = {"rope_theta": config.rope_theta}
    if version == 4:
        rope_scaling = rope if scaling else None
        return fields | theta | {"rope_scaling": rope_scaling, "torch_dtype": "float32"}
    if "partial_rotary_factor" in fields:
        rope["partial_rotary_factor"] = fields.pop("partial_rotary_factor")
    if family == "olmo3":
        plain = {"rope_type": "default"} | theta
        by_layer = {"full_attention": theta | rope, "sliding_attention": plain}
        return fields | {"rope_parameters": by_layer, "dtype": "float32"}
    return fields | {"rope_parameters": theta | rope, "dtype": "float32"}


def _hugging_face_options(config: LlamaConfig, family: str) -> dict[str, Any]:
    """Return the fields of ``config.json`` that only a family has."""
    options: dict[str, Any] = {}
    window = config.sliding_window or None
    if family in ("mistral", "phi3"):
        options["sliding_window"] = window
    if family in ("ministral", "olmo3"):
        names = ("full_attention", "sliding_attention")
        kinds = [names[has_window] for has_window in _layer_types(config)]
        options |= {"sliding_window": window, "layer_types": kinds}
    if family in ("qwen2", "qwen3"):
        num_full = len(config.full_attention_layers)
        options |= {
            "use_sliding_window": window is not None,
            "sliding_window": window or 4096,
            "max_window_layers": num_full if window else config.num_layers,
        }
    if family == "smollm3":
        rotates = [int(layer not in config.no_rope_layers) for layer in range(config.num_layers)]
        options |= {"no_rope_layers": rotates, "no_rope_layer_interval": 4}
        options |= {"use_sliding_window": False, "sliding_window": None}
    if family == "phi3":
        options["partial_rotary_factor"] = config.partial_rotary_factor
        options["original_max_position_embeddings"] = config.max_seq_len
    if family == "granite":
        options |= {name: getattr(config, name) for name in _MULTIPLIERS}
    return options


def _hugging_face_holds(config: LlamaConfig) -> bool:
    scaling: Any = config.rope_scaling
    if scaling is None or scaling.type != "dynamic":
        return True
    # transformers has one length for dynamic scaling and for the context.
    return scaling.original_max_seq_len == config.max_seq_len


def gguf_metadata(config: LlamaConfig) -> dict[str, int | float | str | list[bool]]:
    """Return the keys that llama.cpp's converter writes: integers as uint32, numbers as float32."""
    scaling: Any = config.rope_scaling
    metadata = {key: getattr(config, name) for name, (_, key) in _FIELDS.items()}
    family = _family(config)
    metadata["attention.value_length"] = config.head_dim
    metadata["rope.dimension_count"] = round(config.head_dim * config.partial_rotary_factor)
    metadata["rope.freq_base"] = config.rope_theta
    if scaling and scaling.type in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": scaling.type, "rope.scaling.factor": scaling.factor}
    if scaling and scaling.type == "yarn":
        metadata["rope.scaling.original_context_length"] = scaling.original_max_seq_len
    if config.sliding_window:
        metadata["attention.sliding_window"] = config.sliding_window
        metadata["attention.sliding_window_pattern"] = _layer_types(config)
    if family == "granite":
        metadata |= {key: getattr(config, name) for name, (key,) in _MULTIPLIERS.items()}
    return {f"{_FAMILIES[family][1]}.{key}": value for key, value in metadata.items()}


def gguf_tensors(config: LlamaConfig, params: Params) -> Tensors:
    """Return the tensors that llama.cpp's converter writes; ``llama3`` scaling has one more."""
    tensors = _tensors(config, params, _GGUF)
    if isinstance(config.rope_scaling, Llama3Scaling):
        tensors["rope_freqs.weight"] = gguf_divisors(config, config.rope_scaling)
    return tensors


def gguf_divisors(config: LlamaConfig, scaling: Llama3Scaling) -> np.ndarray:
    """Compute llama.cpp's divisors of frequencies for ``llama3`` scaling: ``[head_dim / 2]``."""
    scaled = oracle.rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    return (_frequencies(config) / scaled).astype("<f4")


def _write_gguf(path: Path, config: LlamaConfig, params: Params) -> None:
    writer = GGUFWriter(path, _FAMILIES[_family(config)][1])
    add: dict[type, Any] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in gguf_metadata(config).items():
        add[type(value)](key, value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, tensor in gguf_tensors(config, params).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_holds(config: LlamaConfig) -> bool:
    scaling: Any = config.rope_scaling
    every_fourth = [*range(3, config.num_layers, 4)]
    if config.no_rope_layers and [*config.no_rope_layers] != every_fourth:
        return False
    if scaling is None or scaling.type == "linear":
        return True
    # Readers recover the factor of Llama 3's scaling from the divisors.
    return scaling == Llama3Scaling(scaling.factor) or _is_papers_yarn(scaling)


def _write_llama2c(path: Path, config: LlamaConfig, params: Params) -> None:
    """Write seven integers, then Meta's tensors, each kind for all layers.

    Cosines and sines stand before the head. The vocabulary is negative if there is a separate head.
    """
    attention = ("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo")
    mlp = ("ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    layers = range(config.num_layers)
    names = [f"layers.{layer}.{kind}" for kind in attention + mlp for layer in layers]
    tensors = meta_tensors(config, params)
    arrays = [tensors[f"{name}.weight"] for name in ("tok_embeddings", *names, "norm")]
    angles = np.outer(np.arange(config.max_seq_len), _frequencies(config))
    arrays += [np.cos(angles), np.sin(angles)]
    vocab_size = config.vocab_size
    if not config.tie_embeddings:
        arrays.append(tensors["output.weight"])
        vocab_size = -vocab_size
    header = struct.pack(
        "<7i",
        config.embed_dim,
        config.mlp_dim,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        vocab_size,
        config.max_seq_len,
    )
    path.mkdir()
    contents = [header, *(array.astype("<f4").tobytes() for array in arrays)]
    (path / "model.bin").write_bytes(b"".join(contents))


def _llama2c_holds(config: LlamaConfig) -> bool:
    return (
        not config.extensions
        and config.rope_theta == 10_000
        and config.norm_eps == 1e-5
        and config.rope_scaling is None
        and config.num_heads * config.head_dim == config.embed_dim
    )


FORMAT_WRITERS = {
    "native": FormatWriter(lambda _: True, _write_native),
    "meta x1": FormatWriter(partial(_meta_holds, count=1), partial(_write_meta, count=1)),
    "meta x4": FormatWriter(partial(_meta_holds, count=4), partial(_write_meta, count=4)),
    "hf v4": FormatWriter(_hugging_face_holds, partial(_write_hugging_face, version=4)),
    "hf v5": FormatWriter(_hugging_face_holds, partial(_write_hugging_face, version=5)),
    "gguf": FormatWriter(_gguf_holds, _write_gguf),
    "llama2c": FormatWriter(_llama2c_holds, _write_llama2c),
}
"""The formats, and variants of them, that ``jllama.load`` reads."""
