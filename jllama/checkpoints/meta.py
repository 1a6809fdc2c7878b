"""Meta's release format: ``params.json``, ``consolidated.NN.pth`` in one shard or more, ``tokenizer.model``.

Matrices are ``[outputs, inputs]``, rotary channels in interleaved pairs. A shard has its part of the heads, of the
MLP's width and of the vocabulary; norms are repeated in each. Llama 1 and 2 cut the embedding along its width instead.
Source: ``ModelArgs`` and ``Transformer`` of Meta's llama (Llama 1 and 2) and llama-models (Llama 3) repositories.
"""

import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jllama.checkpoints.huggingface import read_text_files, write_chat_files
from jllama.checkpoints.tensors import Checkpoint, FileTensor, OnProgress, differences, matched, reordered, same_bits
from jllama.checkpoints.torch_file import read_torch_file, write_torch_file
from jllama.config import LlamaConfig, llama_mlp_dim
from jllama.errors import JllamaError, UsageError
from jllama.files import fault_of, read_fields, read_json_object, write_json
from jllama.parameters import TensorSpec, tensor_specs
from jllama.presets import PRESETS, SHAPE, differing
from jllama.rope_scaling import Llama3Scaling, RopeScaling
from jllama.tokenizers import load_tokenizer
from jllama.tokenizers.convert import save_meta

PARAMS = "params.json"
OURS = "jllama.json"
"""Holds ``max_seq_len``, which Meta's files do not, where it is not what ``_family_max_seq_len`` says."""

_FIELDS: dict[str, tuple[str, Any]] = {
    **{"embed_dim": ("dim", None), "num_layers": ("n_layers", None), "num_heads": ("n_heads", None)},
    **{"num_kv_heads": ("n_kv_heads", 0), "vocab_size": ("vocab_size", 0)},
    **{"norm_eps": ("norm_eps", 1e-5), "rope_theta": ("rope_theta", 10_000.0)},
}
"""The key and default of each field of ``LlamaConfig``; 0 is worked out from the others or the weights."""

_MLP: dict[str, tuple[str, Any]] = {"multiple_of": ("multiple_of", 256), "multiplier": ("ffn_dim_multiplier", 1.0)}
_UNUSED = ("max_batch_size", "max_seq_len")  # how much memory Meta's code takes for its cache: nothing of the model
_KEYS = {key for key, _ in (_FIELDS | _MLP).values()} | {"use_scaled_rope", *Llama3Scaling.meta.values(), *_UNUSED}
_OFF = (False, -1, 0)
"""Values of a field by which a file asks for nothing."""

_MLP_RULES: list[tuple[int, float | None]] = [
    *((256, None), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2)),  # Llama 1 to 3.3
    (32, None),  # llama2.c's stories
]
"""``multiple_of`` and ``ffn_dim_multiplier`` of known models."""


class ShardedTensor:
    """A tensor whose parts, one per shard and all of one shape, are concatenated along an axis."""

    def __init__(self, parts: list[np.ndarray], axis: int) -> None:
        self.parts, self.axis, self.dtype = parts, axis, parts[0].dtype
        self.shape = tuple(size * len(parts) if i == axis else size for i, size in enumerate(parts[0].shape))

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """The requested rows, of those parts that have them."""
        if self.axis == 1:
            return np.concatenate([part[rows] for part in self.parts], axis=1)
        size = self.parts[0].shape[0]
        return np.concatenate(
            [part[max(rows.start - i * size, 0) : max(rows.stop - i * size, 0)] for i, part in enumerate(self.parts)]
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
        raise JllamaError(f"{path} lacks {PARAMS}: copy it there, weights alone do not say what they are of")
    fields = read_json_object(source).items()
    params = {key: value for key, value in fields if value is not None and (key, value) != ("vocab_size", -1)}
    if refused := [key for key, value in params.items() if key not in _KEYS and value not in _OFF]:
        raise JllamaError(f"{source} asks for what jllama's Llama does not have: {', '.join(refused)}")
    shards = _shards(path)
    config = _config(params, source, shards, rope_factor)
    specs = {spec.key: spec for spec in tensor_specs(config)}
    joined = _joined(path, specs.values(), shards)
    ignored = ["rope.freqs"]  # computed, not learned; in the files of Llama 1 and 2
    embed, head = (joined.get(specs[key].name("meta")) for key in ("embed", "lm_head"))
    if head is None or (embed is not None and same_bits(head, embed)):
        config = dataclasses.replace(config, tie_embeddings=True)
        ignored.append(specs["lm_head"].name("meta"))
    tensors = matched(joined, config, "meta", path, ignored)
    ours = path / OURS
    length = {"max_seq_len": _family_max_seq_len(config)}
    if ours.is_file():
        length = read_fields(read_json_object(ours), {"max_seq_len": ("max_seq_len", None)}, ours)
    with fault_of(ours):
        config = dataclasses.replace(config, **length)
    tokenizer, template, stops = read_text_files(path)
    beside = path.resolve().parent / "tokenizer.model"  # Llama 1 and 2 were released with it there
    if tokenizer is None and beside.exists():
        tokenizer = load_tokenizer(beside)
    return Checkpoint(config, tensors, tokenizer, template, stops)


def _shards(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """The tensors of each shard, by the shard's file name: the same names, shapes and dtypes in all of them."""
    names = sorted(file.name for file in path.glob("consolidated.*") if re.fullmatch(r".*\.\d\d\.pth", file.name))
    last = int(names[-1].split(".")[1]) if names else 0
    if missing := [_shard_name(number) for number in range(last + 1) if _shard_name(number) not in names]:
        raise JllamaError(f"{path} lacks {', '.join(missing)}: copy the missing shards there")
    shards = {name: read_torch_file(path / name) for name in names}
    kinds = {name: {key: f"{t.dtype}{list(t.shape)}" for key, t in shards[name].items()} for name in names}
    for name, kind in kinds.items():
        if problems := differences(kind, kinds[names[0]]):
            raise JllamaError(f"{path} has shards of different models, {name} and {names[0]}: {problems}")
    return shards


def _shard_name(number: int) -> str:
    return f"consolidated.{number:02}.pth"


def _config(
    params: Mapping[str, Any], source: Path, shards: Mapping[str, Mapping[str, np.ndarray]], rope_factor: float | None
) -> LlamaConfig:
    """The architecture, not tied and of any ``max_seq_len``; the MLP's width and the vocabulary from the weights."""
    count, tensors = len(shards), next(iter(shards.values()))
    with fault_of(source):
        config = LlamaConfig(**read_fields(params, _FIELDS, source))
    names = {spec.key: spec.name("meta") for spec in tensor_specs(config)}
    shapes = {key: tensors[name].shape for key, name in names.items() if name in tensors and tensors[name].ndim == 2}

    rows, columns = shapes.get("layers/0/wq", (0, 0))  # its outputs are always split
    embed_dim = config.embed_dim
    complete = embed_dim // rows if rows and columns == embed_dim and embed_dim % rows == 0 else count
    if complete != count:
        expected = f"{_shard_name(0)} to {_shard_name(complete - 1)}"
        raise JllamaError(f"{source.parent} has {count} of {complete} shards, expected {expected}, or another {PARAMS}")
    rows, columns = shapes.get("embed", (0, 0))
    vocab_size = rows if columns * count == embed_dim else rows * count  # Llama 1 and 2 cut it along its width
    mlp_dim = shapes.get("layers/0/w_gate", (0, 0))[0] * count
    if "multiple_of" in params or "ffn_dim_multiplier" in params:
        mlp_dim = llama_mlp_dim(embed_dim, **read_fields(params, _MLP, source))
    with fault_of(source):
        config = dataclasses.replace(config, vocab_size=config.vocab_size or vocab_size, mlp_dim=mlp_dim)
    return dataclasses.replace(config, rope_scaling=_rope_scaling(params, source, rope_factor, config))


def _rope_scaling(
    params: Mapping[str, Any], source: Path, rope_factor: float | None, config: LlamaConfig
) -> RopeScaling | None:
    scaled = read_fields(params, {"scaled": ("use_scaled_rope", False)}, source)["scaled"]
    stated = {ours: params[theirs] for ours, theirs in Llama3Scaling.meta.items() if theirs in params}
    if stated and not scaled:
        raise JllamaError(f"{source} has numbers of RoPE scaling without use_scaled_rope: add it, or remove them")
    if rope_factor is not None and (not scaled or "factor" in stated):
        why = "says itself what it is" if scaled else "has no use_scaled_rope"
        raise UsageError(f"rope_factor is {rope_factor}, but {source} {why}: leave it out")
    if not scaled:
        return None
    if rope_factor is None and "factor" not in stated:
        scalings = {
            name: released.rope_scaling
            for name, released in PRESETS.items()
            if not differing((*SHAPE, "vocab_size", "rope_theta"), config, released)
        }
        factors = {name: scaling.factor for name, scaling in scalings.items() if scaling}
        if len(set(factors.values())) != 1:
            why = "no factor for use_scaled_rope, and no released Llama is of this shape"
            raise JllamaError(f"{source} has {why}: give rope_factor, 8 for Llama 3.1 and 3.3 or 32 for Llama 3.2")
        name, rope_factor = next(iter(factors.items()))
        note = f"RoPE factor {rope_factor:g} of {name}, whose shape this is; rope_factor overrides"
        print(f"note: {note}", file=sys.stderr)
    with fault_of(source):
        scaling = RopeScaling.from_fields({"type": "llama3", "factor": 1.0} | stated)
    return scaling if rope_factor is None else dataclasses.replace(scaling, factor=rope_factor)


def _joined(
    path: Path, specs: Iterable[TensorSpec], shards: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, FileTensor]:
    """Join every tensor of the shards. Raises JllamaError if shards differ in what each must repeat."""
    names, files = list(shards), list(shards.values())
    joined: dict[str, FileTensor] = dict(files[0])
    for spec in specs:
        name = spec.name("meta")
        if name not in joined or len(joined[name].shape) != len(spec.shape):
            continue  # to be listed by the caller
        parts = [file[name] for file in files]
        axis, repeats = _layout(spec, parts[0].shape, len(parts))
        for index, part in enumerate(parts):
            first = index // repeats * repeats
            if index != first and not same_bits(part, parts[first]):
                both = f"{names[index]} than in {names[first]}"
                raise JllamaError(f"{path} has another {name} in {both}, which must repeat it: one is another model's")
        parts = parts[::repeats]
        joined[name] = ShardedTensor(parts, axis) if len(parts) > 1 else parts[0]
    return joined


def _layout(spec: TensorSpec, shape: tuple[int, ...], count: int) -> tuple[int, int]:
    """The axis along which ``count`` shards of a shape split a tensor, and how many in a row repeat each part."""
    row = spec.parameter
    if not row.inputs:
        return 0, count
    if "kv_heads" in row.outputs:  # of which there may be fewer than shards
        return 0, max(1, shape[0] * count // spec.shape[0])
    if row.axes == ("vocab", "embed"):
        return int(shape[1] * count == spec.shape[1]), 1
    return int(row.inputs != ("embed",)), 1


def _family_max_seq_len(config: LlamaConfig) -> int:
    """The context length of the released Llama that a configuration is, or of the family that it looks to be of."""
    for released in PRESETS.values():
        if dataclasses.replace(config, max_seq_len=released.max_seq_len) == released:
            return released.max_seq_len
    if config.rope_scaling:
        return 131_072  # Llama 3.1 to 3.3
    by_theta = {500_000.0: 8192, 1_000_000.0: 16_384}  # Llama 3, Code Llama
    return by_theta.get(config.rope_theta, 2048 if config.norm_eps == 1e-6 else 4096)  # Llama 1, Llama 2


def write(checkpoint: Checkpoint, target: Path, dtype: np.dtype[Any] | None, on_progress: OnProgress) -> None:
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
        named.append((spec.name("meta"), reordered(spec, tensor, config, to_half_split=False), dtype or tensor.dtype))
    write_torch_file(target / _shard_name(0), named, on_progress)


def _params_of(config: LlamaConfig) -> dict[str, Any]:
    """The fields of a ``params.json``, of which ``_config`` makes this configuration again."""
    scaling = config.rope_scaling
    problem = f"RoPE scaling of type llama3 alone, not {scaling.type}" if scaling and scaling.type != "llama3" else ""
    if config.num_heads * config.head_dim != config.embed_dim:
        problem = f"no head_dim, so {config.num_heads} heads of {config.head_dim} in an embed_dim of {config.embed_dim}"
    if problem:
        raise JllamaError(f"Meta's format has {problem}, which cannot be written: save the model in another format")
    exact = (config.mlp_dim + 0.5) / llama_mlp_dim(config.embed_dim, multiple_of=1)  # gives any width
    multiple_of, multiplier = next(
        (multiple_of, multiplier)
        for multiple_of, multiplier in (*_MLP_RULES, (1, exact))
        if llama_mlp_dim(config.embed_dim, multiple_of=multiple_of, multiplier=multiplier) == config.mlp_dim
    )
    params = {theirs: getattr(config, ours) for ours, (theirs, _) in _FIELDS.items()}
    params |= {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
    if config.num_kv_heads == config.num_heads:
        del params["n_kv_heads"]
    if scaling:
        values = {ours: getattr(scaling, ours) for ours in Llama3Scaling.meta}
        stated = [ours for ours in values if ours == "factor" or values[ours] != getattr(Llama3Scaling, ours)]
        params |= {"use_scaled_rope": True} | {Llama3Scaling.meta[ours]: values[ours] for ours in stated}
    # The code of Llama 1 knows neither n_kv_heads nor ffn_dim_multiplier, and fails at a field that it does not know.
    return {key: value for key, value in params.items() if value is not None}
