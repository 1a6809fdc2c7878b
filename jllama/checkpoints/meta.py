"""Meta's release format: ``params.json``, ``consolidated.NN.pth`` in one shard or more, ``tokenizer.model``.

Matrices are ``[outputs, inputs]``, rotary channels in interleaved pairs. A shard has its part of the heads, of the
MLP's width and of the vocabulary; norms are repeated in each. Llama 1 and 2 cut the embedding along its width instead.
Source: ``ModelArgs`` and ``Transformer`` of Meta's llama (Llama 1 and 2) and llama-models (Llama 3) repositories.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jllama.checkpoints.huggingface import read_text_files, write_chat_files
from jllama.checkpoints.tensors import (
    Checkpoint,
    FileTensor,
    LazyTensor,
    OnProgress,
    differences,
    matched,
    reordered,
    rows_behind_rows,
    same_bits,
)
from jllama.checkpoints.torch_file import read_torch_file, write_torch_file
from jllama.config import LlamaConfig, llama_mlp_dim
from jllama.errors import JllamaError, UsageError
from jllama.files import fault_of, has_file, read_fields, read_json_object, write_json
from jllama.parameters import PARAMETERS, tensor_specs
from jllama.presets import PRESETS, SHAPE, differing
from jllama.rope_scaling import Llama3Scaling, RopeScaling
from jllama.tokenizers import load_tokenizer, save_meta

PARAMS, SHARD = "params.json", "consolidated.{:02}.pth"
Shards = dict[str, dict[str, np.ndarray]]  # the tensors of each shard, by the name of its file
OURS = "jllama.json"  # with ``max_seq_len``, which Meta's files have not, where ``_family_max_seq_len`` says another

_FIELDS: dict[str, tuple[str, Any]] = {
    "embed_dim": ("dim", None),
    "num_layers": ("n_layers", None),
    "num_heads": ("n_heads", None),
    "num_kv_heads": ("n_kv_heads", 0),
    "vocab_size": ("vocab_size", 0),
    "norm_eps": ("norm_eps", 1e-5),
    "rope_theta": ("rope_theta", 10_000.0),
}  # the key and default of each field of ``LlamaConfig``; 0 is worked out from the others or the weights

_MLP: dict[str, tuple[str, Any]] = {
    "multiple_of": ("multiple_of", 256),
    "multiplier": ("ffn_dim_multiplier", 1.0),
}
_KEYS = {key for key, _ in (_FIELDS | _MLP).values()} | {
    "use_scaled_rope",
    *Llama3Scaling.meta.values(),
}
_KEYS |= {
    "max_batch_size",
    "max_seq_len",
}  # how much memory Meta's code takes for its cache: nothing of the model

_MLP_RULES = ((256, None), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2), (32, None))
"""``multiple_of`` and ``ffn_dim_multiplier`` of Llama 1 to 3.3, and of llama2.c's stories."""


def sharded(parts: list[np.ndarray], axis: int) -> LazyTensor:
    """A tensor whose parts, one per shard and all of one shape, are concatenated along an axis."""
    if axis == 0:
        return rows_behind_rows(parts)
    outputs, inputs = parts[0].shape
    shape = outputs, inputs * len(parts)
    return LazyTensor(
        shape, parts[0].dtype, lambda rows: np.concatenate([part[rows] for part in parts], axis)
    )


def recognizes(path: Path) -> bool:
    """Tell whether a folder has a ``consolidated.*.pth``."""
    return path.is_dir() and any(path.glob("consolidated.*.pth"))


def read(path: Path, rope_factor: float | None = None) -> Checkpoint:
    """Open a folder of Meta's. Only what shards repeat is read, and a tied head as far as it equals the embedding.

    ``rope_factor`` is the RoPE scaling factor, where ``params.json`` has ``use_scaled_rope`` and no factor; None is
    that of the released Llamas of the same shape, vocabulary and theta, which is said on stderr, or a JllamaError.
    """
    source = path / PARAMS
    if not source.is_file():
        raise JllamaError(
            f"{path} lacks {PARAMS}: copy it there, weights alone do not say what they are of"
        )
    fields = read_json_object(source).items()
    params = {
        key: value
        for key, value in fields
        if value is not None and (key, value) != ("vocab_size", -1)
    }
    if refused := [
        key for key, value in params.items() if key not in _KEYS and value not in (0, -1)
    ]:  # off
        raise JllamaError(
            f"{source} asks for what jllama's Llama does not have: {', '.join(refused)}"
        )
    shards = _shards(path)
    config = _config(params, source, shards)
    config = dataclasses.replace(config, rope_scaling=_scaling(params, source, rope_factor, config))
    joined = _joined(path, config, shards)
    joined.pop("rope.freqs", None)  # computed, not learned; in the files of Llama 1 and 2
    names = [PARAMETERS[key].name("meta") for key in ("embed", "lm_head")]
    embed, head = map(joined.get, names)
    if head is None or (embed is not None and same_bits(head, embed)):
        config = dataclasses.replace(config, tie_embeddings=True)
        joined.pop(names[1], None)
    tensors = matched(joined, config, "meta", path)
    ours = path / OURS
    stated = read_json_object(ours) if has_file(ours) else {}
    with fault_of(ours):
        length = read_fields(
            stated, {"max_seq_len": ("max_seq_len", _family_max_seq_len(config))}, ours
        )
        config = dataclasses.replace(config, **length)
    tokenizer, template, stops = read_text_files(path)
    beside = path.resolve().parent / "tokenizer.model"  # Llama 1 and 2 were released with it there
    if tokenizer is None and has_file(beside):
        tokenizer = load_tokenizer(beside)
    return Checkpoint(config, tensors, tokenizer, template, stops)


def _shards(path: Path) -> Shards:
    """Every shard of a folder: the same names, shapes and dtypes in all of them."""
    names = sorted(file.name for file in path.glob("consolidated.[0-9][0-9].pth"))
    numbers = range(int(re.sub(r"\D", "", names[-1])) + 1 if names else 1)
    if missing := [name for name in map(SHARD.format, numbers) if name not in names]:
        raise JllamaError(f"{path} lacks {', '.join(missing)}: copy the missing shards there")
    shards = {name: read_torch_file(path / name) for name in names}
    kinds = {
        name: {key: f"{t.dtype}{list(t.shape)}" for key, t in shards[name].items()}
        for name in names
    }
    for name, kind in kinds.items():
        if problems := differences(kind, kinds[names[0]]):
            raise JllamaError(
                f"{path} has shards of different models, {name} and {names[0]}: {problems}"
            )
    return shards


def _config(params: Mapping[str, Any], source: Path, shards: Shards) -> LlamaConfig:
    """The architecture, not tied and of any ``max_seq_len``; the MLP's width and the vocabulary from the weights."""
    count, tensors = len(shards), next(iter(shards.values()))
    with fault_of(source):
        config = LlamaConfig(**read_fields(params, _FIELDS, source))
    names = {spec.key: spec.name("meta") for spec in tensor_specs(config)}
    shapes = {
        key: tensors[name].shape
        for key, name in names.items()
        if name in tensors and tensors[name].ndim == 2
    }
    rows, columns = shapes.get("layers/0/wq", (0, 0))  # its outputs are always split
    embed_dim = config.embed_dim
    complete = (
        embed_dim // rows if rows and columns == embed_dim and embed_dim % rows == 0 else count
    )
    if complete != count:
        expected = f"{SHARD.format(0)} to {SHARD.format(complete - 1)}"
        raise JllamaError(
            f"{source.parent} has {count} of {complete} shards, expected {expected}, or another {PARAMS}"
        )
    rows, columns = shapes.get("embed", (0, 0))
    vocab_size = (
        rows if columns * count == embed_dim else rows * count
    )  # Llama 1 and 2 cut it along its width
    mlp_dim = shapes.get("layers/0/w_gate", (0, 0))[0] * count
    if "multiple_of" in params or "ffn_dim_multiplier" in params:
        mlp_dim = llama_mlp_dim(embed_dim, **read_fields(params, _MLP, source))
    with fault_of(source):
        return dataclasses.replace(
            config, vocab_size=config.vocab_size or vocab_size, mlp_dim=mlp_dim
        )


def _scaling(
    params: Mapping[str, Any], source: Path, factor: float | None, config: LlamaConfig
) -> RopeScaling | None:
    scaled = read_fields(params, {"scaled": ("use_scaled_rope", False)}, source)["scaled"]
    stated = {
        ours: params[theirs] for ours, theirs in Llama3Scaling.meta.items() if theirs in params
    }
    if stated and not scaled:
        raise JllamaError(
            f"{source} has numbers of RoPE scaling without use_scaled_rope: add it, or remove them"
        )
    if factor is not None and (not scaled or "factor" in stated):
        why = "says itself what it is" if scaled else "has no use_scaled_rope"
        raise UsageError(f"rope_factor is {factor}, but {source} {why}: leave it out")
    if not scaled:
        return None
    if factor is None and "factor" not in stated:
        fields = (*SHAPE, "vocab_size", "rope_theta")
        alike = {
            name: each.rope_scaling
            for name, each in PRESETS.items()
            if not differing(fields, config, each)
        }
        factors = {name: scaling.factor for name, scaling in alike.items() if scaling}
        if not factors:
            why = "no factor for use_scaled_rope, and no released Llama is of this shape"
            raise JllamaError(
                f"{source} has {why}: give rope_factor, 8 for Llama 3.1 and 3.3 or 32 for Llama 3.2"
            )
        name, factor = next(iter(factors.items()))
        print(
            f"note: RoPE factor {factor:g} of {name}, whose shape this is; rope_factor overrides",
            file=sys.stderr,
        )
    with fault_of(source):
        scaling = RopeScaling.from_fields({"type": "llama3", "factor": 1.0} | stated)
    return scaling if factor is None else dataclasses.replace(scaling, factor=factor)


def _joined(path: Path, config: LlamaConfig, shards: Shards) -> dict[str, FileTensor]:
    """Join every tensor of the shards. Raises JllamaError if shards differ in what each must repeat."""
    first, count = next(iter(shards.values())), len(shards)
    joined: dict[str, FileTensor] = dict(first)
    for spec in tensor_specs(config):
        name, whole = spec.name("meta"), spec.shape
        if name not in first or first[name].ndim != len(whole) or 0 in whole:
            continue  # to be listed by the caller
        shape = first[name].shape
        # A matrix is cut along its outputs or else its inputs; fewer key-value heads than shards, and norms, repeat.
        axis = int(len(whole) > 1 and shape[0] == whole[0])
        repeats = max(1, count * shape[axis] // whole[axis]) if len(whole) > 1 else count
        parts: list[np.ndarray] = []
        for index, (file, tensors) in enumerate(shards.items()):
            if index % repeats == 0:
                parts.append(tensors[name])
            elif not same_bits(tensors[name], parts[-1]):
                both = f"{file} than in {list(shards)[index // repeats * repeats]}"
                raise JllamaError(
                    f"{path} has another {name} in {both}, which must repeat it: one is another model's"
                )
        joined[name] = sharded(parts, axis) if len(parts) > 1 else parts[0]
    return joined


def _family_max_seq_len(config: LlamaConfig) -> int:
    """The context length of the released Llama that a configuration is, or of the family that it looks to be of."""
    for released in PRESETS.values():
        if dataclasses.replace(config, max_seq_len=released.max_seq_len) == released:
            return released.max_seq_len
    if config.rope_scaling:
        return 131_072  # Llama 3.1 to 3.3
    by_theta = {500_000.0: 8192, 1_000_000.0: 16_384}  # Llama 3, Code Llama
    return by_theta.get(
        config.rope_theta, 2048 if config.norm_eps == 1e-6 else 4096
    )  # Llama 1, Llama 2


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype[Any] | None, on_progress: OnProgress
) -> None:
    """Write a folder of one shard, which Meta's code reads too; it knows no tying, so the head is always written."""
    config, tensors = checkpoint.config, checkpoint.tensors
    params = _params_of(config)
    if checkpoint.tokenizer is not None:
        save_meta(checkpoint.tokenizer, target)
    write_json(target / PARAMS, params)
    if config.max_seq_len != _family_max_seq_len(config):
        write_json(target / OURS, {"max_seq_len": config.max_seq_len})
    write_chat_files(target, checkpoint.chat_template, checkpoint.stop_ids)
    named = []
    for spec in tensor_specs(dataclasses.replace(config, tie_embeddings=False)):
        tensor = tensors["embed" if config.tie_embeddings and spec.key == "lm_head" else spec.key]
        named.append(
            (
                spec.name("meta"),
                reordered(spec, tensor, config, to_half_split=False),
                dtype or tensor.dtype,
            )
        )
    write_torch_file(target / SHARD.format(0), named, on_progress)


def _params_of(config: LlamaConfig) -> dict[str, Any]:
    """The fields of a ``params.json``, of which ``_config`` makes this configuration again."""
    scaling = config.rope_scaling
    problem = (
        f"RoPE scaling of type llama3 alone, not {scaling.type}"
        if scaling and scaling.type != "llama3"
        else ""
    )
    if config.num_heads * config.head_dim != config.embed_dim:
        problem = f"no head_dim, so {config.num_heads} heads of {config.head_dim} in an embed_dim of {config.embed_dim}"
    if problem:
        raise JllamaError(
            f"Meta's format has {problem}, which cannot be written: save the model in another format"
        )
    exact = (config.mlp_dim + 0.5) / llama_mlp_dim(
        config.embed_dim, multiple_of=1
    )  # gives any width
    rules = (*_MLP_RULES, (1, exact))
    widths = [
        llama_mlp_dim(config.embed_dim, multiple_of=each, multiplier=times) for each, times in rules
    ]
    multiple_of, multiplier = rules[widths.index(config.mlp_dim)]
    params = {theirs: getattr(config, ours) for ours, (theirs, _) in _FIELDS.items()}
    params |= {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
    if config.num_kv_heads == config.num_heads:
        del params["n_kv_heads"]
    if scaling:
        stated = {
            ours: value
            for ours, value in vars(scaling).items()
            if value != getattr(Llama3Scaling, ours, None)
        }
        params |= {"use_scaled_rope": True} | {
            Llama3Scaling.meta[ours]: value for ours, value in stated.items()
        }
    # The code of Llama 1 knows neither n_kv_heads nor ffn_dim_multiplier, and fails at a field that it does not know.
    return {key: value for key, value in params.items() if value is not None}
