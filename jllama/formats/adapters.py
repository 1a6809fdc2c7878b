"""Adapters: read and written in PEFT's format and in llama.cpp's, and merged into their base.

Sources: peft 0.21's ``LoraConfig`` and ``get_peft_model_state_dict``; llama.cpp's
``convert_lora_to_gguf.py``.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
from flax.traverse_util import unflatten_dict
from gguf import GGMLQuantizationType

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import (
    EXPERT_MATRICES,
    PARAMETERS,
    NamedFormat,
    Params,
    layers_of,
)
from jllama.formats.families import family_of
from jllama.formats.gguf_file import read_gguf_file, shortest, write_gguf_file
from jllama.formats.llama4 import LLAMA4
from jllama.formats.safetensors_file import read_safetensors, write_safetensors
from jllama.formats.tensors import (
    Checkpoint,
    FileTensor,
    LazyTensor,
    OnProgress,
    base_fingerprint,
    concatenate_rows,
    differences,
    file_tensors,
    names_of_experts,
    permuted,
    row_range,
)
from jllama.models.config import LoraConfig
from jllama.models.lora import adaptable_rows
from jllama.system.files import errors_as, read_fields, read_json_object, write_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FINGERPRINT = "jllama.base_fingerprint"
ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"

_PREFIX = "base_model.model.model."
_F32 = np.dtype(np.float32)
_SUFFIXES = {
    "huggingface": {
        "a": "lora_A.weight",
        "b": "lora_B.weight",
        "magnitude": "lora_magnitude_vector",
    },
    "gguf": {"a": "weight.lora_a", "b": "weight.lora_b"},
}
# PEFT's key of each field of ``LoraConfig``, and its default.
_FIELDS = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8.0),
    "rank_stabilized": ("use_rslora", False),
    "dora": ("use_dora", False),
}
# The values, besides False, that are read of a key. Other keys must be False.
_FIXED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
# Keys that may have any value, because the tensors mean the same.
_FREE = """r lora_alpha use_rslora use_dora task_type auto_mapping peft_version
    base_model_name_or_path revision inference_mode target_modules exclude_modules lora_dropout
    layers_to_transform layers_pattern megatron_core runtime_config eva_config qalora_group_size
    ensure_weight_tying"""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter, of any format."""

    lora: LoraConfig
    # float32: layers/3/wq/a [rank, inputs], /b [outputs, rank], /magnitude [outputs]; those of
    # each expert have its index: layers/3/experts_up/7/a
    tensors: Mapping[str, np.ndarray]
    config: LlamaConfig  # of the base
    source: Path
    base: str = ""  # the path or hub id of the base, if known
    base_fingerprint: str = ""  # empty if another program made the adapter
    step: int | None = None


def _adapt(tensor: FileTensor, adapter: Adapter, key: str) -> LazyTensor:
    """Add its adapter to a matrix of a file: ``W + scale b a`` in float32.

    With DoRA, each row is then scaled to the length in ``magnitude``.
    """
    scale = np.float32(adapter.lora.scale)
    a = adapter.tensors[f"{key}/a"]
    b = adapter.tensors[f"{key}/b"]
    magnitude = adapter.tensors.get(f"{key}/magnitude")

    def read(rows: slice) -> np.ndarray:
        matrix = tensor[rows].astype(_F32) + scale * (b[rows] @ a)
        if magnitude is not None:
            matrix *= (magnitude[rows] / np.linalg.norm(matrix, axis=1))[:, None]
        return matrix

    return LazyTensor(tensor.shape, _F32, read, getattr(tensor, "rows_at_once", 1))


def merge(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Merge an adapter into its base; the matrices are computed as they are read.

    Raises:
        JllamaError: The adapter is for another base, or has NaN or infinity.
    """
    if adapter.base_fingerprint:
        expected = adapter.base_fingerprint.split(":")
        actual = base_fingerprint(base).split(":")
        # One of them may lack the second hash: then only the first is compared.
        if any(one != other for one, other in zip(actual, expected, strict=False)):
            own = adapter.base or "the model that it was trained on"
            raise JllamaError(
                f"{adapter.source} is an adapter for another base, by its fingerprint: give {own}"
            )
    for key, tensor in adapter.tensors.items():
        if not np.isfinite(tensor).all():
            raise JllamaError(
                f"{adapter.source} has NaN or infinity in {key}: "
                "use another copy, or an earlier one"
            )
    tensors = dict(base.tensors)
    for key, tensor in base.tensors.items():
        if f"{key}/a" in adapter.tensors:
            tensors[key] = _adapt(tensor, adapter, key)
        if f"{key}/0/a" in adapter.tensors:
            rows = tensor.shape[0] // base.config.num_experts
            tensors[key] = concatenate_rows(
                [
                    _adapt(row_range(tensor, expert * rows, rows), adapter, f"{key}/{expert}")
                    for expert in range(base.config.num_experts)
                ]
            )
    return dataclasses.replace(
        base, tensors=tensors, step=adapter.step or base.step, adapter=adapter
    )


def stacked(adapter: Adapter) -> Params:
    """Return an adapter in the layout for training (``jllama.models.lora``)."""
    stacks: dict[str, list[np.ndarray]] = {}
    for key, tensor in adapter.tensors.items():  # layer by layer, and expert by expert
        stacks.setdefault(re.sub(r"/\d+/", "/", key), []).append(tensor.T)
    params: Any = {}
    for path, stack in stacks.items():
        params[path] = np.stack(stack)
        if path.split("/")[1] in EXPERT_MATRICES:
            lead = (-1, adapter.config.num_experts)
            params[path] = params[path].reshape(*lead, *stack[0].shape)
    return unflatten_dict(params, sep="/")


def unstacked(path: str, stack: np.ndarray, config: LlamaConfig) -> dict[str, np.ndarray]:
    """Return the tensors of an ``Adapter`` from ``wq/a`` or another stack of ``stacked``."""
    tensors = {}
    name, part = path.split("/")
    for layer, matrix in zip(layers_of(PARAMETERS[f"layers/{name}"], config), stack, strict=True):
        if name in EXPERT_MATRICES:
            for expert, own in enumerate(matrix):
                tensors[f"layers/{layer}/{name}/{expert}/{part}"] = own.T
        else:
            tensors[f"layers/{layer}/{name}/{part}"] = matrix.T
    return tensors


class _Tensor(NamedTuple):
    """A tensor of an adapter's file."""

    key: str  # in ``Adapter.tensors``
    shape: list[int]
    is_interleaved: bool  # its rows are rotary channels in interleaved pairs, here half-split


def _layout(config: LlamaConfig, lora: LoraConfig, file_format: NamedFormat) -> dict[str, _Tensor]:
    """Return the tensors of an adapter's file, by their names in it.

    Experts that are joined in files of the base are left out.

    Raises:
        JllamaError: The base's files join the adapted matrices.
    """
    family = family_of(config)
    if family.is_fused:
        raise JllamaError(
            f"files of {family.model_type} join the matrices that jllama adapts: merge the adapter"
        )
    layout = {}
    renamed = family.renamed if file_format == "huggingface" else ()
    for name, (spec,) in file_tensors(config, file_format, renamed=renamed).items():
        target = spec.path.removeprefix("layers/")
        is_of_experts = target in EXPERT_MATRICES
        is_joined = "{}" not in name or family.model_type == LLAMA4
        if target not in lora.targets or (is_of_experts and is_joined):
            continue
        matrices = {spec.key: name}
        if is_of_experts:
            names = names_of_experts(name, config)
            matrices = {f"{spec.key}/{expert}": own for expert, own in enumerate(names)}
        inputs = spec.shape[1]
        outputs = spec.shape[0] // len(matrices)
        shapes = {"a": [lora.rank, inputs], "b": [outputs, lora.rank]}
        if lora.dora:
            shapes["magnitude"] = [outputs]
        is_interleaved = file_format in family.interleaved and spec.parameter.rotary
        for key, own in matrices.items():
            stem = own.removesuffix("weight").replace("model.", _PREFIX)
            for part, shape in shapes.items():
                in_pairs = is_interleaved and part != "a"
                full = stem + _SUFFIXES[file_format][part]
                layout[full] = _Tensor(f"{key}/{part}", shape, in_pairs)
    return layout


def _read(stored: Mapping[str, FileTensor], file_format: NamedFormat, adapter: Adapter) -> Adapter:
    """Return ``adapter`` with the tensors of a file, and with the targets that they are for.

    Raises:
        JllamaError: A tensor is missing, unknown or of another shape.
    """
    lora = adapter.lora
    every = dataclasses.replace(lora, targets=tuple(adaptable_rows(adapter.config)))
    names = _layout(adapter.config, every, file_format)
    targets = dict.fromkeys(names[name].key.split("/")[2] for name in names if name in stored)
    if targets:
        lora = dataclasses.replace(lora, targets=tuple(targets))
    layout = _layout(adapter.config, lora, file_format)
    if targets and not lora.dora:
        # A matrix without a tensor is not adapted: zeros add nothing to it.
        present = {layout[name].key.rpartition("/")[0] for name in stored if name in layout}
        stored = dict(stored)
        for name, entry in layout.items():
            if entry.key.rpartition("/")[0] not in present:
                stored[name] = np.zeros(entry.shape, _F32)
    shapes = {name: list(tensor.shape) for name, tensor in stored.items()}
    problems = differences(shapes, {name: entry.shape for name, entry in layout.items()})
    if problems:
        some = "; ".join(problems.split("; ")[:4])
        more = " and so on" if some != problems else ""
        raise JllamaError(f"{adapter.source} does not fit this model: {some}{more}")
    tensors = {}
    for name, entry in layout.items():
        tensor = stored[name]
        if entry.is_interleaved:
            tensor = permuted(tensor, adapter.config.head_dim, to_half_split=True)
        tensors[entry.key] = tensor[0 : tensor.shape[0]].astype(_F32)
    return dataclasses.replace(adapter, lora=lora, tensors=tensors)


def _named_tensors(
    adapter: Adapter, file_format: NamedFormat, dtype: Any
) -> list[tuple[str, FileTensor, Any]]:
    """Return the tensors to write: name, tensor, and ``dtype``.

    Raises:
        JllamaError: It adapts experts, which files of the base join.
    """
    named = []
    layout = _layout(adapter.config, adapter.lora, file_format)
    if len(layout) < len(adapter.tensors):
        raise JllamaError(
            f"{adapter.source} adapts experts, which such files join to one matrix: merge it"
        )
    for name, entry in layout.items():
        tensor: FileTensor = adapter.tensors[entry.key]
        if entry.is_interleaved:
            tensor = permuted(tensor, adapter.config.head_dim, to_half_split=False)
        named.append((name, tensor, dtype))
    return named


def _fingerprint_entry(adapter: Adapter) -> dict[str, str]:
    """Return a file's metadata that identifies the base; empty if it is not known."""
    return {FINGERPRINT: adapter.base_fingerprint} if adapter.base_fingerprint else {}


def is_peft(path: Path) -> bool:
    """Return whether a path is a folder of PEFT's."""
    return (path / CONFIG).is_file()


def read_peft(path: Path, config: LlamaConfig) -> Adapter:
    """Read an adapter whose base has the architecture ``config``.

    Raises:
        JllamaError: It is not LoRA, rsLoRA or DoRA, or its tensors do not fit.
    """
    # 1) Read the configuration, and refuse other kinds of adapters.
    source = path / CONFIG
    fields = read_json_object(source)
    fields = {key: value for key, value in fields.items() if value not in (None, [], {}, "")}
    problems = [
        f"{key} {json.dumps(value)[:80]}"
        for key, value in fields.items()
        if key not in _FREE.split() and value not in (False, *_FIXED.get(key, ()))
    ]
    if "peft_type" not in fields:
        problems.append("no peft_type")
    if problems:
        raise JllamaError(
            f"{source} has {problems[0]}; jllama reads LoRA, rsLoRA and DoRA of one rank and alpha"
        )

    # 2) Read the tensors, with their names made uniform.
    stored = {}
    for name, tensor in read_safetensors(path / WEIGHTS).items():
        # Some programs leave out the prefix, or leave in the adapter's name, "default".
        stem = re.sub(r"\.default(?=\.|$)", "", name)
        stem = stem.replace("magnitude_vector.weight", "magnitude_vector")
        if "layers." not in stem:
            raise JllamaError(f"{path} adapts {stem}; jllama adapts matrices of layers alone")
        full = re.sub(r"^(base_model\.model\.)?(model\.)?", _PREFIX, stem)
        if full in stored:
            raise JllamaError(
                f"{path / WEIGHTS} holds {full} twice, once as {name}: remove one of them"
            )
        stored[full] = tensor

    # 3) Read the rank, the scale, and which base the adapter belongs to.
    with safetensors.safe_open(path / WEIGHTS, "np") as file:
        fingerprint = (file.metadata() or {}).get(FINGERPRINT, "")
    with errors_as(source):
        lora = LoraConfig(**read_fields(fields, _FIELDS, source))
    base = str(fields.get("base_model_name_or_path", ""))
    return _read(stored, "huggingface", Adapter(lora, {}, config, path, base, fingerprint))


def write_peft(adapter: Adapter, target: Path, dtype: None, on_progress: OnProgress) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads."""
    tensors = _named_tensors(adapter, "huggingface", _F32)
    write_safetensors(target / WEIGHTS, tensors, on_progress, _fingerprint_entry(adapter))
    family = family_of(adapter.config)
    modules = []
    for name in adapter.lora.targets:
        module = PARAMETERS[f"layers/{name}"].huggingface + "."
        for usual, own in family.renamed:
            module = module.replace(usual, own)
        module = module.removesuffix(".")
        if not family.renamed or name in EXPERT_MATRICES:
            module = module.rpartition(".")[2]
        modules.append(module)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    fields |= {key: getattr(adapter.lora, name) for name, (key, _) in _FIELDS.items()}
    if not {*EXPERT_MATRICES}.isdisjoint(adapter.lora.targets):
        # PEFT joins adapters of experts to one of twice the rank and alpha.
        fields |= {"lora_alpha": adapter.lora.scale * adapter.lora.rank, "use_rslora": False}
    write_json(target / CONFIG, fields)


def _gguf_kind(config: LlamaConfig) -> dict[str, str]:
    """Return what GGUF files of adapters for such a base have."""
    return {
        "general.architecture": family_of(config).gguf,
        "general.type": "adapter",
        "adapter.type": "lora",
    }


def read_gguf(path: Path, config: LlamaConfig) -> Adapter:
    """Read an adapter whose base has the architecture ``config``.

    Raises:
        JllamaError: It is not a LoRA of a Llama, or only some tokens switch it on (aLoRA).
    """
    metadata, stored = read_gguf_file(path)
    expected = _gguf_kind(config)
    problems = [
        f"{key} {metadata.get(key)!r}"
        for key, value in expected.items()
        if metadata.get(key) != value
    ]
    if INVOCATION in metadata:
        problems.append(INVOCATION)
    if problems:
        raise JllamaError(
            f"{path} has {problems[0]}, so it is not a plain LoRA of a Llama: give one that is"
        )
    ranks = [tensor.shape[0] for name, tensor in stored.items() if name.endswith(".lora_a")]
    rank = max(ranks, default=1)
    with errors_as(path, TypeError):
        # If alpha is missing or 0, llama.cpp does not scale.
        lora = LoraConfig(rank, metadata.get(ALPHA) or float(rank))
    fingerprint = str(metadata.get(FINGERPRINT, ""))
    return _read(stored, "gguf", Adapter(lora, {}, config, path, base_fingerprint=fingerprint))


def write_gguf(adapter: Adapter, target: Path, dtype: None, on_progress: OnProgress) -> None:
    """Write a file that llama.cpp takes as ``--lora``.

    Raises:
        JllamaError: The adapter is DoRA or of experts, which jllama cannot write so.
    """
    if adapter.lora.dora:
        raise JllamaError(
            f"{adapter.source} has DoRA, which GGUF cannot carry: merge it (gguf), or choose peft"
        )
    alpha = shortest(adapter.lora.scale * adapter.lora.rank)  # llama.cpp divides it by the rank
    metadata = {**_gguf_kind(adapter.config), ALPHA: alpha, **_fingerprint_entry(adapter)}
    tensors = _named_tensors(adapter, "gguf", GGMLQuantizationType.F32)
    write_gguf_file(target, metadata, tensors, on_progress)
