"""The weights of a Hugging Face folder: safetensors, or the msgpack of its former Flax models.

Source: transformers 4.49, ``modeling_flax_utils``; and ``flax.serialization``.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flax.serialization import msgpack_restore
from flax.traverse_util import flatten_dict

from jllama.core import JllamaError
from jllama.formats.safetensors_file import DTYPES, read_safetensors
from jllama.formats.tensors import differences
from jllama.system.files import errors_as, has_file, read_json_object, refuse_pointer

WEIGHTS = "model.safetensors"
FLAX_WEIGHTS = "flax_model.msgpack"
_HEAD = "lm_head.weight"


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a folder by their names and with their axes in safetensors.

    Flax's files are read if there are no safetensors; if there are both, a note says so.

    Raises:
        JllamaError: a file is missing, damaged, or differs from the index.
    """
    has_flax = any(path.glob("flax_model*"))
    if has_flax and any(path.glob("model*.safetensors*")):
        print(f"note: {path} has {FLAX_WEIGHTS} beside {WEIGHTS}, which is read", file=sys.stderr)
        has_flax = False
    if not has_flax:
        return _read_files(path, WEIGHTS)
    tensors = {}
    for name, tensor in _read_files(path, FLAX_WEIGHTS).items():
        if name.endswith("/kernel"):  # inputs come first
            tensor = tensor.T
        tensors[re.sub("(kernel|embedding)$", "weight", name).replace("/", ".")] = tensor
    return tensors


def _read_files(path: Path, file: str) -> dict[str, np.ndarray]:
    """Read the tensors of a folder: from ``file``, else from the shards in its index.

    If both are there, the one file is read, as in transformers.
    """
    # 1) Read the one file, or the index of the shards.
    if has_file(path / file):
        return _read_file(path / file)
    index = path / f"{file}.index.json"
    if not has_file(index):
        names = ", ".join(sorted(entry.name for entry in path.glob("*.*")))
        raise JllamaError(
            f"{path} has {names} instead of {file} or {index.name}; "
            "no pickle is opened: save safetensors"
        )
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise JllamaError(
            f"{index} has no weight_map, the object that says which file each tensor is in"
        )

    # 2) Check that all shards are files of this folder.
    suffix = (path / file).suffix
    for shard in shard_of.values():
        # The file may be a link that leads elsewhere, as in the hub's cache; its name may not.
        is_name = isinstance(shard, str) and re.fullmatch(
            rf"[\w.-]{{1,200}}\{suffix}", shard, re.ASCII
        )
        if not is_name:
            raise JllamaError(
                f"{index} points to {json.dumps(shard)[:100]}; "
                f"expected a {suffix[1:]} file in the same folder"
            )
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise JllamaError(
            f"{path} lacks {', '.join(missing)}, which {index.name} names: "
            "copy what is missing there"
        )

    # 3) Read the shards, and compare their tensors with the index.
    tensors = {shard: _read_file(path / shard) for shard in shards}
    actual = {name: f"in {shard}" for shard in shards for name in tensors[shard]}
    if _HEAD not in actual:  # a tied one may be named without being there
        shard_of.pop(_HEAD, None)
    problems = differences(actual, {name: f"in {shard}" for name, shard in shard_of.items()})
    if problems:
        raise JllamaError(f"{path} has shards that differ from {index.name}: {problems}")
    return {name: tensors[shard][name] for name, shard in shard_of.items()}


def _read_file(path: Path) -> dict[str, np.ndarray]:
    """Read a file of safetensors; or of Flax's arrays, into memory, their paths joined by ``/``.

    Nothing in the file is ever run.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    refuse_pointer(path)
    # flax and msgpack do not document which errors a damaged file raises: these have been seen.
    with errors_as(
        f"{path} is cut short, damaged or not a msgpack file of Flax",
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AssertionError,
    ):
        content: Any = np.memmap(path, np.uint8, "r")
        tensors: Any = flatten_dict(msgpack_restore(content), sep="/")
    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray) or tensor.dtype not in DTYPES.values():
            raise JllamaError(
                f"{path} holds {name} as {getattr(tensor, 'dtype', type(tensor).__name__)}; "
                f"jllama reads {', '.join(DTYPES)}"
            )
    return tensors
