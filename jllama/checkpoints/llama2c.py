"""The ``.bin`` format of karpathy's llama2.c: seven integers and then float32 numbers, with no names and no metadata.

The header is ``_SIZES`` as little-endian int32, the vocabulary's size negated if the output head is not tied. The
tensors follow in the order of ``Parameter.llama2c``, each for all layers, ``[outputs, inputs]``, rotary channels in
interleaved pairs; before the output head come cosines and sines ``[max_seq_len, head_dim / 2]``, for an earlier
``run.c``. Source: llama2.c's ``export.py`` (``legacy_export``) and ``run.c``.
"""

import contextlib
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jllama.checkpoints.tensors import Checkpoint, FileTensor, OnProgress, blocks, reordered
from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.files import fault_of, has_file
from jllama.parameters import TensorSpec, count_parameters, tensor_specs
from jllama.rope_scaling import inverse_frequencies
from jllama.tokenizers.llama2c import load_llama2c_tokenizer, save_llama2c_tokenizer

MODEL, TOKENIZER = "model.bin", "tokenizer.bin"
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
_FIXED = {
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
}  # what run.c has in its code


def recognizes(path: Path) -> bool:
    """Tell whether this is a llama2.c file, of any version and even truncated, or a folder that holds exactly one."""
    return _model_file(path) is not None


def _model_file(path: Path) -> Path | None:
    files = []
    for file in filter(Path.is_file, path.glob("*.bin") if path.is_dir() else [path]):
        with contextlib.suppress(JllamaError):
            config = _config(file)
            if (
                config is None
                or file.suffix == ".bin"
                or _file_bytes(config) == file.stat().st_size
            ):
                files.append(file)
    return files[0] if len(files) == 1 else None


def _config(file: Path) -> LlamaConfig | None:
    """The architecture in a file's header; None if that is of a later version."""
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size)
    if header.startswith(b"24ka"):  # as versions 1 and 2 do
        return None
    if len(header) < _HEADER.size:
        raise JllamaError(
            f"{file} is truncated: it has {len(header)} bytes, less than a llama2.c header"
        )
    sizes = dict(zip(_SIZES, _HEADER.unpack(header), strict=True))
    if 0 in sizes.values():  # LlamaConfig would work some of them out
        raise JllamaError(
            f"{file} is no llama2.c file: its sizes are {tuple(sizes.values())}; none may be 0"
        )
    vocab_size = sizes.pop("vocab_size")
    with fault_of(f"{file} is no llama2.c file"):
        return LlamaConfig(
            **sizes, **_FIXED, vocab_size=abs(vocab_size), tie_embeddings=vocab_size > 0
        )


def _file_bytes(config: LlamaConfig) -> int:
    return _HEADER.size + 4 * (count_parameters(config) + config.max_seq_len * config.head_dim)


def _in_order(config: LlamaConfig) -> list[TensorSpec]:
    return sorted(
        tensor_specs(config), key=lambda spec: spec.parameter.llama2c
    )  # stable: layers stay in order


def read(path: Path) -> Checkpoint:
    """Open a llama2.c file, or the folder that holds it, with the ``tokenizer.bin`` beside it if there is one."""
    file = _model_file(path) if path.is_dir() else path
    if file is None:
        raise JllamaError(
            f"{path} does not hold exactly one llama2.c .bin file: give the file itself"
        )
    if (config := _config(file)) is None:
        raise JllamaError(
            f"{file} is a llama2.c file of version 1 or 2: export it with --version 0 to read it"
        )
    size, expected = file.stat().st_size, _file_bytes(config)
    if expected != size:
        what = "is truncated" if size < expected else "is too long, or no llama2.c file"
        raise JllamaError(
            f"{file} {what}: it has {size} bytes but its header describes {expected}: fetch it again"
        )
    numbers = np.memmap(file, "<f4", "r", offset=_HEADER.size)
    tensors: dict[str, FileTensor] = {}
    for spec in _in_order(config):
        if spec.path == "lm_head":
            numbers = numbers[config.max_seq_len * config.head_dim :]  # the cosines and sines
        tensor, numbers = np.split(numbers, [math.prod(spec.shape)])
        tensors[spec.key] = reordered(spec, tensor.reshape(spec.shape), config, to_half_split=True)
    tokenizer = file.parent / TOKENIZER
    return Checkpoint(
        config, tensors, load_llama2c_tokenizer(tokenizer) if has_file(tokenizer) else None
    )


def write(
    checkpoint: Checkpoint, target: Path, dtype: np.dtype[Any] | None, on_progress: OnProgress
) -> None:
    """Write ``model.bin``, and ``tokenizer.bin`` if there is a tokenizer: what ``run.c`` runs.

    bfloat16 and float16 are widened to float32, which loses nothing; ``dtype`` can be no other.
    """
    config = checkpoint.config
    if problems := "; ".join(_problems(checkpoint, dtype)):
        raise JllamaError(
            f"the llama2.c format cannot hold this model: {problems}: convert to another format"
        )
    if checkpoint.tokenizer is not None:
        save_llama2c_tokenizer(checkpoint.tokenizer, target / TOKENIZER)
    tensors = [
        reordered(spec, checkpoint.tensors[spec.key], config, to_half_split=False)
        for spec in _in_order(config)
    ]
    angles = np.outer(
        np.arange(config.max_seq_len), inverse_frequencies(config.head_dim, config.rope_theta)
    )
    tables = np.concatenate([np.cos(angles), np.sin(angles)])
    head = [] if config.tie_embeddings else [tensors.pop()]
    sizes = vars(config) | {"vocab_size": config.vocab_size * (1 if config.tie_embeddings else -1)}
    with (target / MODEL).open("wb") as file:
        file.write(_HEADER.pack(*map(sizes.__getitem__, _SIZES)))
        for tensor in (*tensors, tables, *head):
            for block in blocks(tensor, np.dtype("<f4")):
                file.write(block.data)
                on_progress(0 if tensor is tables else block.nbytes)


def _problems(checkpoint: Checkpoint, dtype: np.dtype[Any] | None) -> list[str]:
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    width = config.embed_dim / config.num_heads
    num_tokens = tokenizer.vocab_size if tokenizer else config.vocab_size
    stops = ", ".join(
        str(token)
        for token in checkpoint.stop_ids
        if tokenizer is None or token != tokenizer.eos_id
    )
    is_float64 = dtype is None and any(
        tensor.dtype.itemsize > 4 for tensor in checkpoint.tensors.values()
    )
    problems = {
        f"its head_dim is {config.head_dim}, and run.c has embed_dim / num_heads, {width:g}": width
        != config.head_dim,
        "it has float64 tensors (take dtype float32)": is_float64,
        "it has a chat template": checkpoint.chat_template is not None,
        f"tokens {stops} end its answers, and run.c knows EOS alone": stops,
        f"its tokenizer has {num_tokens} tokens, and run.c reads {config.vocab_size}": num_tokens
        != config.vocab_size,
    }
    problems |= {
        f"its {name} is {vars(config)[name]!r}, and run.c has {value!r}": vars(config)[name]
        != value
        for name, value in _FIXED.items()
    }
    return [problem for problem, is_so in problems.items() if is_so]
