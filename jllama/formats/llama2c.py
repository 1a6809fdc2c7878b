"""The ``.bin`` format of karpathy's llama2.c: seven integers, then float32 numbers; no names.

The header is ``_SIZES`` as little-endian int32; the vocabulary's size is negative if the output
head is not tied. The tensors follow in the order of ``Parameter.llama2c``, each for all layers,
``[outputs, inputs]``, rotary channels in interleaved pairs. Before the output head come cosines and
sines ``[max_seq_len, head_dim / 2]``, for an earlier ``run.c``. Source: llama2.c's ``export.py``
(``legacy_export``) and ``run.c``.
"""

import contextlib
import math
import struct
from pathlib import Path

import numpy as np

from jllama.core import JllamaError
from jllama.core.config import LLAMA_VALUES, LlamaConfig, inverse_frequencies
from jllama.core.parameters import count_parameters
from jllama.formats.tensors import (
    Checkpoint,
    OnProgress,
    TensorSpec,
    blocks,
    reorder_rotary,
    tensor_specs,
)
from jllama.system.files import errors_as, has_file
from jllama.tokenizers.llama2c import load_llama2c_tokenizer, save_llama2c_tokenizer

MODEL = "model.bin"
TOKENIZER = "tokenizer.bin"
_SIZES = (
    "embed_dim",
    "mlp_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "vocab_size",
    "max_seq_len",
)
_HEADER = struct.Struct("<7i")
# The values in run.c's code.
_FIXED = {"norm_eps": 1e-5, "rope_theta": 10_000.0, "rope_scaling": None, **LLAMA_VALUES}


def recognizes(path: Path) -> bool:
    """Return whether a path is a llama2.c file, or a folder that holds exactly one.

    It may be of any version, and even truncated.
    """
    return _find_file(path) is not None


def _find_file(path: Path) -> Path | None:
    """Return the only llama2.c file at a path; None if there is none, or several.

    A file of another suffix than ``.bin`` must have the size that its header describes.
    """
    candidates = list(path.glob("*.bin")) if path.is_dir() else [path]
    files = []
    for file in filter(Path.is_file, candidates):
        with contextlib.suppress(JllamaError):
            config = _read_config(file)
            if (
                config is None
                or file.suffix == ".bin"
                or _file_bytes(config) == file.stat().st_size
            ):
                files.append(file)
    return files[0] if len(files) == 1 else None


def _read_config(file: Path) -> LlamaConfig | None:
    """Return the architecture in a file's header; None if the file is of a later version."""
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size)
    if header.startswith(b"24ka"):  # versions 1 and 2
        return None
    if len(header) < _HEADER.size:
        raise JllamaError(
            f"{file} is truncated: it has {len(header)} bytes, less than a llama2.c header"
        )
    sizes = dict(zip(_SIZES, _HEADER.unpack(header), strict=True))
    if 0 in sizes.values():  # LlamaConfig would compute some of them
        raise JllamaError(
            f"{file} is not a llama2.c file: its sizes are {tuple(sizes.values())}; none may be 0"
        )
    vocab_size = sizes.pop("vocab_size")
    with errors_as(f"{file} is not a llama2.c file"):
        return LlamaConfig(
            **sizes, **_FIXED, vocab_size=abs(vocab_size), tie_embeddings=vocab_size > 0
        )


def _file_bytes(config: LlamaConfig) -> int:
    return _HEADER.size + 4 * (count_parameters(config) + config.max_seq_len * config.head_dim)


def _specs_in_order(config: LlamaConfig) -> list[TensorSpec]:
    """Return the tensors in the order of a file. The sort is stable: layers stay in order."""
    return sorted(tensor_specs(config), key=lambda spec: spec.parameter.llama2c)


def read(path: Path) -> Checkpoint:
    """Open a llama2.c file, or the folder that holds it, with ``tokenizer.bin`` if it is there."""
    # 1) Find the file, and check its size against its header.
    file = _find_file(path) if path.is_dir() else path
    if file is None:
        raise JllamaError(
            f"{path} does not hold exactly one llama2.c .bin file: give the file itself"
        )
    config = _read_config(file)
    if config is None:
        raise JllamaError(
            f"{file} is a llama2.c file of version 1 or 2: export it with --version 0 to read it"
        )
    size = file.stat().st_size
    expected = _file_bytes(config)
    if expected != size:
        problem = "is truncated" if size < expected else "is too long, or no llama2.c file"
        raise JllamaError(
            f"{file} {problem}: it has {size} bytes but its "
            f"header describes {expected}: fetch it again"
        )

    # 2) Map the tensors, which stand in a fixed order without names.
    numbers = np.memmap(file, "<f4", "r", offset=_HEADER.size)
    tensors = {}
    start = 0
    for spec in _specs_in_order(config):
        if spec.path == "lm_head":
            start += config.max_seq_len * config.head_dim  # the cosines and sines
        stop = start + math.prod(spec.shape)
        tensor = numbers[start:stop].reshape(spec.shape)
        tensors[spec.key] = reorder_rotary(spec, tensor, config, to_half_split=True)
        start = stop

    # 3) Read the tokenizer beside the file.
    tokenizer = None
    if has_file(file.parent / TOKENIZER):
        tokenizer = load_llama2c_tokenizer(file.parent / TOKENIZER)
    return Checkpoint(config, tensors, tokenizer)


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype | None, on_progress: OnProgress
) -> None:
    """Write ``model.bin``, and ``tokenizer.bin`` if there is a tokenizer: the files of ``run.c``.

    bfloat16 and float16 become float32, which loses nothing; ``dtype`` may be no other.
    """
    config = checkpoint.config
    problems = "; ".join(_problems(checkpoint, dtype))
    if problems:
        raise JllamaError(
            f"the llama2.c format cannot hold this model: {problems}: convert to another format"
        )
    if checkpoint.tokenizer is not None:
        save_llama2c_tokenizer(checkpoint.tokenizer, target / TOKENIZER)
    tensors = [
        reorder_rotary(spec, checkpoint.tensors[spec.key], config, to_half_split=False)
        for spec in _specs_in_order(config)
    ]
    # Cosines and sines come before the output head, if there is one.
    angles = np.outer(
        np.arange(config.max_seq_len), inverse_frequencies(config.head_dim, config.rope_theta)
    )
    tables = np.concatenate([np.cos(angles), np.sin(angles)])
    sizes = dict(vars(config))
    if config.tie_embeddings:
        tensors.append(tables)
    else:
        tensors.insert(-1, tables)
        sizes["vocab_size"] *= -1
    with (target / MODEL).open("wb") as file:
        file.write(_HEADER.pack(*(sizes[name] for name in _SIZES)))
        for tensor in tensors:
            for block in blocks(tensor, np.dtype("<f4")):
                file.write(block.data)
                on_progress(0 if tensor is tables else block.nbytes)


def _problems(checkpoint: Checkpoint, dtype: np.dtype | None) -> list[str]:
    """Describe everything in a model that the format cannot hold."""
    config = checkpoint.config
    tokenizer = checkpoint.tokenizer
    problems = []
    width = config.embed_dim / config.num_heads
    if config.head_dim != width:
        problems.append(
            f"its head_dim is {config.head_dim}, and run.c has embed_dim / num_heads, {width:g}"
        )
    if dtype is None and any(tensor.dtype.itemsize > 4 for tensor in checkpoint.tensors.values()):
        problems.append("it has float64 tensors (choose dtype float32)")
    if checkpoint.chat_template is not None:
        problems.append("it has a chat template")
    stops = [str(token) for token in checkpoint.stop_ids]
    num_tokens = config.vocab_size
    if tokenizer is not None:
        stops = [token for token in stops if token != str(tokenizer.eos_id)]
        num_tokens = tokenizer.vocab_size
    if stops:
        problems.append(f"tokens {', '.join(stops)} end its answers, and run.c knows only EOS")
    if num_tokens != config.vocab_size:
        problems.append(
            f"its tokenizer has {num_tokens} tokens, and run.c reads {config.vocab_size}"
        )
    for name, value in _FIXED.items():
        actual = getattr(config, name)
        if actual != value:
            problems.append(f"its {name} is {actual!r}, and run.c has {value!r}")
    return problems
