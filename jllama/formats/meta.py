"""Meta's release format: ``params.json``, ``consolidated.NN.pth`` and ``tokenizer.model``.

Matrices are ``[outputs, inputs]``, rotary channels in interleaved pairs. A shard has its part of
the heads, of the MLP's width and of the vocabulary; norms are repeated in every shard. Llama 1 and
2 split the embedding along its width instead. Source: ``ModelArgs`` and ``Transformer`` of Meta's
llama (Llama 1 and 2) and llama-models (Llama 3 and 4) repositories.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig, RopeScaling, llama_mlp_dim
from jllama.core.parameters import PARAMETERS, layers_of
from jllama.formats.chat_files import read_text_files, write_chat_files
from jllama.formats.llama4 import (
    META_DEFAULTS,
    META_KEYS,
    META_NAMES,
    META_SCALING,
    options_of_meta,
    split_shard,
)
from jllama.formats.tensors import (
    Checkpoint,
    FileTensor,
    LazyTensor,
    OnProgress,
    concatenate_rows,
    differences,
    file_tensors,
    have_same_bits,
    match_tensors,
    names_of_experts,
    tensors_to_write,
)
from jllama.formats.torch_file import read_torch_file, write_torch_file
from jllama.models.presets import PRESETS, SHAPE_FIELDS, differing_fields
from jllama.models.rope_scaling import Llama3Scaling
from jllama.system.files import (
    errors_as,
    has_file,
    read_field,
    read_fields,
    read_json_object,
    read_optional_json,
    without_nulls,
    write_json,
)
from jllama.tokenizers.loading import load_tokenizer, save_meta

PARAMS = "params.json"
SHARD = "consolidated.{:02}.pth"
# Has ``max_seq_len``, if ``_family_max_seq_len`` is another; Meta has no such key.
OURS = "jllama.json"
Shards = dict[str, dict[str, np.ndarray]]  # the tensors of each shard, by the name of its file

# The key and default of each field of ``LlamaConfig``; 0 is computed from other fields or the
# weights.
_FIELDS = {
    "embed_dim": ("dim", None),
    "num_layers": ("n_layers", None),
    "num_heads": ("n_heads", None),
    "num_kv_heads": ("n_kv_heads", 0),
    "vocab_size": ("vocab_size", 0),
    "norm_eps": ("norm_eps", 1e-5),
    "rope_theta": ("rope_theta", 10_000.0),
}
_MLP = {
    "multiple_of": ("multiple_of", 256),
    "multiplier": ("ffn_dim_multiplier", 1.0),
}
# The last two limit the cache of Meta's code, and do not describe the model.
_KEYS = {
    *(key for key, _ in (_FIELDS | _MLP).values()),
    *Llama3Scaling.meta.values(),
    "use_scaled_rope",
    "max_batch_size",
    "max_seq_len",
}
_MLP_RULES = ((256, None), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2), (32, None))
"""``multiple_of`` and ``ffn_dim_multiplier`` of Llama 1 to 3.3, and of llama2.c's stories."""


def concatenate_shards(parts: list[np.ndarray], axis: int) -> FileTensor:
    """Join the parts of a tensor, one from each shard and all of one shape, along an axis."""
    if axis == 0 or len(parts) == 1:
        return concatenate_rows(parts)
    outputs, inputs = parts[0].shape

    def read(rows: slice) -> np.ndarray:
        return np.concatenate([part[rows] for part in parts], axis)

    return LazyTensor((outputs, inputs * len(parts)), parts[0].dtype, read)


def recognizes(path: Path) -> bool:
    """Return whether a folder has a ``consolidated.*.pth``."""
    return path.is_dir() and any(path.glob("consolidated.*.pth"))


def read(path: Path, rope_factor: float | None = None) -> Checkpoint:
    """Open a folder of Meta's.

    Only the tensors that shards repeat are read, and a tied head as far as it equals the embedding.

    Args:
        path: The folder.
        rope_factor: The factor of RoPE scaling, if ``params.json`` has ``use_scaled_rope`` and no
            factor. None is the factor of the released Llama with the same shape, vocabulary and
            theta, which a note on stderr names; ``JllamaError`` if there is none.
    """
    # The options, which must be ones that jllama has.
    source = path / PARAMS
    if not source.is_file():
        raise JllamaError(
            f"{path} lacks {PARAMS}: copy it there, "
            "the weights alone do not say what model they are"
        )
    params = read_json_object(source)
    nested = params.get("model")
    params = without_nulls(nested if isinstance(nested, dict) else params)
    known = set(_KEYS)
    experts = params.pop("moe_args", None)
    if experts:
        known |= {*META_KEYS.split()}
        if not isinstance(experts, dict):
            raise JllamaError(f"{source} has moe_args {str(experts)[:80]}; it must be an object")
        scaling = META_SCALING if params.get("use_scaled_rope") else {}
        params = META_DEFAULTS | scaling | params | without_nulls(experts)
    # 0 and -1 turn an option off.
    refused = [key for key, value in params.items() if key not in known and value not in (0, -1)]
    if refused:
        raise JllamaError(
            f"{source} has options that jllama's Llama does not have: {', '.join(refused)}"
        )

    if "vision_args" in params:
        print(f"note: {path} also takes images; its text model alone is read", file=sys.stderr)

    # The architecture, which is partly in the weights.
    shards = _read_shards(path)
    with errors_as(source):
        config = LlamaConfig(**read_fields(params, _FIELDS, source))
        if experts:  # only now, as the number of layers was checked
            config = dataclasses.replace(config, **options_of_meta(params, source))
    if experts:
        with errors_as(f"{path} has a tensor of another shape", ValueError, IndexError, TypeError):
            shards = {name: split_shard(shard, config) for name, shard in shards.items()}
    config = _with_sizes(config, params, source, shards)
    scaling = _rope_scaling(params, source, rope_factor, config)
    config = dataclasses.replace(config, rope_scaling=scaling)
    joined = _join_shards(path, config, shards)
    joined.pop("rope.freqs", None)  # computed, not learned; in the files of Llama 1 and 2
    embed = joined.get(PARAMETERS["embed"].name("meta"))
    head_name = PARAMETERS["lm_head"].name("meta")
    head = joined.get(head_name)
    if head is None or (embed is not None and have_same_bits(head, embed)):
        config = dataclasses.replace(config, tie_embeddings=True)
        joined.pop(head_name, None)

    # The tensors, and the context: by jllama's own file, else that of the released Llama.
    tensors = match_tensors(joined, config, source=path, **_naming(config))
    own = path / OURS
    default = _family_max_seq_len(config)
    with errors_as(own):
        max_seq_len = read_field(read_optional_json(own), "max_seq_len", default, own)
        config = dataclasses.replace(config, max_seq_len=max_seq_len)

    # The tokenizer. Llama 1 and 2 were released with it in the folder above.
    tokenizer, template, stops = read_text_files(path)
    shared = path.resolve().parent / "tokenizer.model"
    if tokenizer is None and has_file(shared):
        tokenizer = load_tokenizer(shared)
    return Checkpoint(config, tensors, tokenizer, template, stops)


def _read_shards(path: Path) -> Shards:
    """Read every shard of a folder; all must have the same names, shapes and dtypes."""
    names = sorted(file.name for file in path.glob("consolidated.[0-9][0-9].pth"))
    count = int(re.sub(r"\D", "", names[-1])) + 1 if names else 1
    missing = [name for name in map(SHARD.format, range(count)) if name not in names]
    if missing:
        raise JllamaError(f"{path} lacks {', '.join(missing)}: copy the missing shards there")
    shards = {name: read_torch_file(path / name) for name in names}
    expected = {}
    for name, tensors in shards.items():
        actual = {key: f"{tensor.dtype}{list(tensor.shape)}" for key, tensor in tensors.items()}
        expected = expected or actual
        problems = differences(actual, expected)
        if problems:
            raise JllamaError(
                f"{path} has shards of different models, {name} and {names[0]}: {problems}"
            )
    return shards


def _naming(config: LlamaConfig) -> dict[str, Any]:
    """Return the arguments of ``file_tensors`` by which tensors are named."""
    if config.num_experts:
        return {"file_format": "huggingface", "renamed": META_NAMES}
    return {"file_format": "meta"}


def _with_sizes(
    config: LlamaConfig, params: Mapping[str, Any], source: Path, shards: Shards
) -> LlamaConfig:
    """Return the architecture, not tied, and with a default ``max_seq_len``.

    The weights give the MLP's width and the vocabulary, as far as ``params.json`` does not.
    """
    count = len(shards)
    tensors = next(iter(shards.values()))
    shapes = {}
    for name, (spec,) in file_tensors(config, **_naming(config)).items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.ndim == 2:
            shapes[spec.key] = tensor.shape
    # How many shards there must be: the outputs of wq are always split.
    embed_dim = config.embed_dim
    rows, columns = shapes.get("layers/0/wq", (0, 0))
    if rows and columns == embed_dim and embed_dim % rows == 0 and embed_dim // rows != count:
        complete = embed_dim // rows
        raise JllamaError(
            f"{source.parent} has {count} of {complete} shards, expected "
            f"{SHARD.format(0)} to {SHARD.format(complete - 1)}, or another {PARAMS}"
        )
    rows, columns = shapes.get("embed", (0, 0))
    is_split_along_width = columns * count == embed_dim  # as in Llama 1 and 2
    vocab_size = rows if is_split_along_width else rows * count
    mlp_dim = shapes.get("layers/0/w_gate", (0, 0))[0] * count
    if "multiple_of" in params or "ffn_dim_multiplier" in params:
        mlp_dim = llama_mlp_dim(embed_dim, **read_fields(params, _MLP, source))
    expert_dim = 0
    if config.num_experts:
        layer = layers_of(PARAMETERS["layers/router"], config)[0]
        expert_dim = shapes.get(f"layers/{layer}/shared_gate", (0, 0))[0] * count
    with errors_as(source):
        return dataclasses.replace(
            config,
            vocab_size=config.vocab_size or vocab_size,
            mlp_dim=mlp_dim,
            expert_dim=expert_dim,
        )


def _rope_scaling(
    params: Mapping[str, Any], source: Path, factor: float | None, config: LlamaConfig
) -> RopeScaling | None:
    """Return the scaling in ``params.json``, with ``factor`` or that of a released Llama."""
    is_scaled = read_field(params, "use_scaled_rope", False, source)
    fields = {name: params[key] for name, key in Llama3Scaling.meta.items() if key in params}
    has_factor = "factor" in fields
    if fields and not is_scaled:
        raise JllamaError(
            f"{source} has numbers of RoPE scaling without use_scaled_rope: add it, or remove them"
        )
    if factor is not None and (has_factor or not is_scaled):
        reason = "has a factor of its own" if is_scaled else "has no use_scaled_rope"
        raise UsageError(f"rope_factor is {factor}, but {source} {reason}: leave it out")
    if not is_scaled:
        return None
    if factor is None and not has_factor:
        factor = _released_factor(source, config)
    with errors_as(source):
        scaling = RopeScaling.from_fields({"type": "llama3", "factor": 1.0} | fields)
    return scaling if factor is None else dataclasses.replace(scaling, factor=factor)


def _released_factor(source: Path, config: LlamaConfig) -> float:
    """Return the factor of the released Llama with the same shape, and name it on stderr."""
    for name, released in PRESETS.items():
        scaling = released.rope_scaling
        if scaling and not differing_fields(
            (*SHAPE_FIELDS, "vocab_size", "rope_theta"), config, released
        ):
            print(
                f"note: RoPE factor {scaling.factor:g} of {name}, "
                "which has this shape; rope_factor overrides",
                file=sys.stderr,
            )
            return scaling.factor
    raise JllamaError(
        f"{source} has no factor for use_scaled_rope, and no released Llama has this shape: "
        "give rope_factor, 8 for Llama 3.1 and 3.3 or 32 for Llama 3.2"
    )


def _join_shards(path: Path, config: LlamaConfig, shards: Shards) -> dict[str, FileTensor]:
    """Join every tensor of the shards.

    Raises:
        JllamaError: Shards differ in a tensor that every one must repeat.
    """
    files = list(shards)
    count = len(files)
    first = shards[files[0]]
    joined: dict[str, FileTensor] = dict(first)
    if config.num_layers > len(first):
        return joined  # the caller says so
    expected = {}
    for stem, (spec,) in file_tensors(config, **_naming(config)).items():
        names = names_of_experts(stem, config)
        rows, *columns = spec.shape
        expected |= dict.fromkeys(names, (rows // len(names), *columns))
    for name, whole in expected.items():
        if name not in first or first[name].ndim != len(whole) or 0 in whole:
            continue  # the caller lists it
        # A matrix is split along its outputs, else along its inputs. Norms are repeated, and so are
        # key-value heads if there are fewer than shards.
        shape = first[name].shape
        axis = 0
        repeats = count
        if len(shape) > 1:
            axis = int(shape[0] == whole[0])
            repeats = max(1, count * shape[axis] // whole[axis])
        parts = []
        for index, file in enumerate(files):
            tensor = shards[file][name]
            if index % repeats == 0:
                parts.append(tensor)
            elif not have_same_bits(tensor, parts[-1]):
                raise JllamaError(
                    f"{path} has another {name} in {file} than "
                    f"in {files[index // repeats * repeats]}, "
                    "which must repeat it: one is another model's"
                )
        joined[name] = concatenate_shards(parts, axis)
    return joined


def _family_max_seq_len(config: LlamaConfig) -> int:
    """Return the context length of the released Llama with this configuration, or of its family."""
    for released in PRESETS.values():
        # Files of Llama 4 leave out the temperature of queries.
        same = dataclasses.replace(
            config,
            max_seq_len=released.max_seq_len,
            temperature_step=released.temperature_step,
        )
        if same == released:
            return released.max_seq_len
    if config.num_experts:
        return 262_144  # Llama 4 before it is tuned
    if config.rope_scaling:
        return 131_072  # Llama 3.1 to 3.3
    if config.rope_theta == 500_000:
        return 8192  # Llama 3
    if config.rope_theta == 1_000_000:
        return 16_384  # Code Llama
    return 2048 if config.norm_eps == 1e-6 else 4096  # Llama 1, Llama 2


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype | None, on_progress: OnProgress
) -> None:
    """Write a folder of one shard, which Meta's code reads, too.

    That code has no tied heads, so the head is always written.
    """
    config = checkpoint.config
    params = _params_of(config)
    if checkpoint.tokenizer is not None:
        save_meta(checkpoint.tokenizer, target)
    write_json(target / PARAMS, params)
    if config.max_seq_len != _family_max_seq_len(config):
        write_json(target / OURS, {"max_seq_len": config.max_seq_len})
    write_chat_files(target, checkpoint.chat_template, checkpoint.stop_ids)
    untied = dataclasses.replace(
        checkpoint,
        config=dataclasses.replace(config, tie_embeddings=False),
        tensors={"lm_head": checkpoint.tensors["embed"], **checkpoint.tensors},
    )
    named = [
        (name, tensor, dtype or tensor.dtype)
        for name, _, tensor in tensors_to_write(untied, "meta")
    ]
    write_torch_file(target / SHARD.format(0), named, on_progress)


def _params_of(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of a ``params.json``, the inverse of ``_with_sizes``."""
    scaling = config.rope_scaling
    problem = ""
    if scaling and scaling.type != "llama3":
        problem = f"only RoPE scaling of type llama3, not {scaling.type}"
    if config.num_heads * config.head_dim != config.embed_dim:
        problem = (
            f"no head_dim, so {config.num_heads} heads of "
            f"{config.head_dim} in an embed_dim of {config.embed_dim}"
        )
    if config.extensions:
        problem = f"no {', '.join(config.extensions)}"
    if problem:
        raise JllamaError(
            f"Meta's format has {problem}, which cannot be written: "
            "save the model in another format"
        )
    params = {key: getattr(config, name) for name, (key, _) in _FIELDS.items()}
    if config.num_kv_heads == config.num_heads:
        del params["n_kv_heads"]
    # The last rule gives any width.
    exact = (config.mlp_dim + 0.5) / llama_mlp_dim(config.embed_dim, multiple_of=1)
    for multiple_of, multiplier in (*_MLP_RULES, (1, exact)):
        width = llama_mlp_dim(config.embed_dim, multiple_of=multiple_of, multiplier=multiplier)
        if width == config.mlp_dim:
            params |= {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
            break
    if scaling:
        params["use_scaled_rope"] = True
        for name, value in vars(scaling).items():
            if value != getattr(Llama3Scaling, name, None):
                params[Llama3Scaling.meta[name]] = value
    # Llama 1's code knows neither n_kv_heads nor ffn_dim_multiplier, and fails at unknown fields.
    return {key: value for key, value in params.items() if value is not None}
