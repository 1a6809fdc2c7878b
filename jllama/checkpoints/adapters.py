"""Adapters: in PEFT's format and in llama.cpp's, and merged into the base that they were made for.

Sources: peft 0.21's ``LoraConfig`` and ``get_peft_model_state_dict``; llama.cpp's ``convert_lora_to_gguf.py``.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from gguf import GGMLQuantizationType

from jllama.checkpoints.gguf import ARCHITECTURE
from jllama.checkpoints.gguf_file import read_gguf_file, shortest, write_gguf_file
from jllama.checkpoints.safetensors_file import read_safetensors, write_safetensors
from jllama.checkpoints.tensors import (
    Checkpoint,
    FileTensor,
    LazyTensor,
    OnProgress,
    base_fingerprint,
    differences,
    permuted,
)
from jllama.config import LlamaConfig, LoraConfig
from jllama.errors import JllamaError
from jllama.files import fault_of, read_fields, read_json_object, write_json
from jllama.parameters import PARAMETERS, NamedFormat, tensor_specs

CONFIG, WEIGHTS, FINGERPRINT = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "jllama.base_fingerprint",
)
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_KIND = {
    "general.architecture": ARCHITECTURE,
    "general.type": "adapter",
    "adapter.type": "lora",
}  # of GGUF files

_PREFIX, _F32 = "base_model.model.model.", np.dtype(np.float32)
_SUFFIXES = {
    "huggingface": {
        "a": "lora_A.weight",
        "b": "lora_B.weight",
        "magnitude": "lora_magnitude_vector",
    },
    "gguf": {"a": "weight.lora_a", "b": "weight.lora_b"},
}
_FIELDS = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8.0),
    "rank_stabilized": ("use_rslora", False),
    "dora": ("use_dora", False),
}  # the key and default of each field of ``LoraConfig``
_FIXED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_FREE = """r lora_alpha use_rslora use_dora task_type auto_mapping peft_version base_model_name_or_path revision
    inference_mode target_modules exclude_modules lora_dropout layers_to_transform layers_pattern megatron_core
    runtime_config eva_config qalora_group_size ensure_weight_tying"""  # whatever these are, tensors mean the same


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in no format's terms."""

    lora: LoraConfig
    tensors: Mapping[
        str, np.ndarray
    ]  # float32: layers/3/wq/a [rank, inputs], /b [outputs, rank], /magnitude [outputs]
    config: LlamaConfig  # of the base
    source: Path
    base: str = ""  # where the base was, if that is known
    base_fingerprint: str = ""  # empty if it was made elsewhere
    step: int | None = None


def _adapted(tensor: FileTensor, adapter: Adapter, key: str) -> LazyTensor:
    """A matrix of a file with its adapter, in float32: ``W + scale b a``, with DoRA each row of its magnitude."""
    scale, magnitude = np.float32(adapter.lora.scale), adapter.tensors.get(f"{key}/magnitude")
    a, b = adapter.tensors[f"{key}/a"], adapter.tensors[f"{key}/b"]

    def read(rows: slice) -> np.ndarray:
        whole = tensor[rows].astype(_F32) + scale * (b[rows] @ a)
        if magnitude is not None:
            whole *= (magnitude[rows] / np.linalg.norm(whole, axis=1))[:, None]
        return whole

    return LazyTensor(tensor.shape, _F32, read, getattr(tensor, "rows_at_once", 1))


def merged(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The base with an adapter in its matrices, worked out as they are read; JllamaError if it is for another base."""
    if expected := adapter.base_fingerprint:
        pairs = zip(
            base_fingerprint(base).split(":"), expected.split(":"), strict=False
        )  # one may know less
        if any(actual != wanted for actual, wanted in pairs):
            own = adapter.base or "the model that it was trained on"
            raise JllamaError(
                f"{adapter.source} is an adapter for another base, by its fingerprint: give {own}"
            )
    for key, tensor in adapter.tensors.items():
        if not np.isfinite(tensor).all():
            raise JllamaError(
                f"{adapter.source} has NaN or infinity in {key}: give another copy, or an earlier one"
            )
    tensors = dict(base.tensors)
    tensors |= {
        key: _adapted(tensors[key], adapter, key)
        for key in tensors
        if f"{key}/a" in adapter.tensors
    }
    return dataclasses.replace(
        base, tensors=tensors, step=adapter.step or base.step, adapter=adapter
    )


def _layout(
    config: LlamaConfig, lora: LoraConfig, file_format: NamedFormat
) -> dict[str, tuple[str, list[int], int]]:
    """By its name in a file, a tensor's key in ``Adapter``, its shape, and how many of its rows are turned together."""
    layout = {}
    for spec in (
        spec for spec in tensor_specs(config) if spec.path.removeprefix("layers/") in lora.targets
    ):
        outputs, inputs = spec.shape
        sizes = {"a": [lora.rank, inputs], "b": [outputs, lora.rank]} | (
            {"magnitude": [outputs]} if lora.dora else {}
        )
        stem = spec.name(file_format).removesuffix("weight").replace("model.", _PREFIX)
        for part, size in sizes.items():
            turned = (
                config.head_dim
                if file_format == "gguf" and part == "b" and spec.parameter.rotary
                else 0
            )
            layout[stem + _SUFFIXES[file_format][part]] = f"{spec.key}/{part}", size, turned
    return layout


def _read(stored: Mapping[str, FileTensor], file_format: NamedFormat, adapter: Adapter) -> Adapter:
    """The adapter that a file's tensors make; what is missing, unknown or of another shape raises ``JllamaError``."""
    whole = _layout(adapter.config, adapter.lora, file_format)
    targets = dict.fromkeys(whole[name][0].split("/")[2] for name in whole if name in stored)
    lora = dataclasses.replace(adapter.lora, targets=tuple(targets) or adapter.lora.targets)
    layout = _layout(adapter.config, lora, file_format)
    shapes = {name: list(tensor.shape) for name, tensor in stored.items()}
    if problems := differences(shapes, {name: size for name, (_, size, _) in layout.items()}):
        some = "; ".join(problems.split("; ")[:4])
        raise JllamaError(
            f"{adapter.source} does not fit this model: {some}{' and so on' * (some != problems)}"
        )
    tensors = {}
    for name, (key, _, turned) in layout.items():
        tensor = permuted(stored[name], turned, to_half_split=True) if turned else stored[name]
        tensors[key] = tensor[0 : tensor.shape[0]].astype(_F32)
    return dataclasses.replace(adapter, lora=lora, tensors=tensors)


def _to_write(
    adapter: Adapter, file_format: NamedFormat, dtype: Any
) -> list[tuple[str, FileTensor, Any]]:
    held, layout = adapter.tensors, _layout(adapter.config, adapter.lora, file_format)
    return [
        (name, permuted(held[key], turned, to_half_split=False) if turned else held[key], dtype)
        for name, (key, _, turned) in layout.items()
    ]


def is_peft(path: Path) -> bool:
    """Whether this is a folder of PEFT's."""
    return (path / CONFIG).is_file()


def read_peft(path: Path, config: LlamaConfig) -> Adapter:
    """Read an adapter of a base with this architecture; anything but LoRA, rsLoRA and DoRA raises ``JllamaError``."""
    source, free = path / CONFIG, _FREE.split()
    fields = {
        key: value
        for key, value in read_json_object(source).items()
        if value not in (None, [], {}, "")
    }
    refused = [
        key
        for key, value in fields.items()
        if key not in free and value not in (False, *_FIXED.get(key, ()))
    ]
    if refused or "peft_type" not in fields:
        asked = f"{refused[0]} {json.dumps(fields[refused[0]])[:80]}" if refused else "no peft_type"
        raise JllamaError(
            f"{source} has {asked}; jllama reads LoRA, rsLoRA and DoRA of one rank and alpha"
        )
    stored = {}
    for name, tensor in read_safetensors(path / WEIGHTS).items():
        usual = re.sub(r"\.default(?=\.|$)", "", name).replace(
            "magnitude_vector.weight", "magnitude_vector"
        )
        full = re.sub(r"^(base_model\.model\.)?(model\.)?", _PREFIX, usual)
        if full in stored:
            raise JllamaError(
                f"{path / WEIGHTS} holds {full} twice, once as {name}: remove one of them"
            )
        stored[full] = tensor
    with safetensors.safe_open(path / WEIGHTS, "np") as file:
        fingerprint = (file.metadata() or {}).get(FINGERPRINT, "")
    with fault_of(source):
        lora = LoraConfig(**read_fields(fields, _FIELDS, source))
    base = str(fields.get("base_model_name_or_path", ""))
    return _read(stored, "huggingface", Adapter(lora, {}, config, path, base, fingerprint))


def write_peft(adapter: Adapter, target: Path, dtype: None, on_progress: OnProgress) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads."""
    metadata = {FINGERPRINT: adapter.base_fingerprint} if adapter.base_fingerprint else {}
    write_safetensors(
        target / WEIGHTS, _to_write(adapter, "huggingface", _F32), on_progress, metadata
    )
    modules = [
        PARAMETERS[f"layers/{name}"].huggingface.rpartition(".")[2] for name in adapter.lora.targets
    ]
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(
        target / CONFIG,
        fields | {key: getattr(adapter.lora, name) for name, (key, _) in _FIELDS.items()},
    )


def read_gguf(path: Path, config: LlamaConfig) -> Adapter:
    """Read an adapter of a base with this architecture; one that some tokens switch on raises ``JllamaError``."""
    metadata, stored = read_gguf_file(path)
    wrong = [
        f"{key} {metadata.get(key)!r}" for key, value in _KIND.items() if metadata.get(key) != value
    ]
    if wrong or INVOCATION in metadata:
        what = (wrong or [INVOCATION])[0]
        raise JllamaError(f"{path} has {what}, so it is no plain LoRA of a Llama: give one that is")
    rank = max(
        [1, *(tensor.shape[0] for name, tensor in stored.items() if name.endswith(".lora_a"))]
    )
    with fault_of(path, TypeError):
        lora = LoraConfig(
            rank, metadata.get(ALPHA) or float(rank)
        )  # without alpha llama.cpp does not scale
    return _read(
        stored,
        "gguf",
        Adapter(lora, {}, config, path, base_fingerprint=str(metadata.get(FINGERPRINT, ""))),
    )


def write_gguf(adapter: Adapter, target: Path, dtype: None, on_progress: OnProgress) -> None:
    """Write a file that llama.cpp takes as ``--lora``. DoRA, which it does not know, raises ``JllamaError``."""
    if adapter.lora.dora:
        raise JllamaError(
            f"{adapter.source} has DoRA, which GGUF cannot carry: merge it (gguf), or take peft"
        )
    alpha = shortest(adapter.lora.scale * adapter.lora.rank)  # llama.cpp divides it by the rank
    metadata = (
        _KIND
        | {ALPHA: alpha}
        | ({FINGERPRINT: adapter.base_fingerprint} if adapter.base_fingerprint else {})
    )
    write_gguf_file(
        target, metadata, _to_write(adapter, "gguf", GGMLQuantizationType.F32), on_progress
    )
