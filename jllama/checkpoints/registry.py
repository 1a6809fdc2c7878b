"""Every checkpoint format behind three functions: ``load``, ``save`` and ``convert``.

A format is a module with three functions, and what passes between them is a ``Checkpoint``:

``recognizes(path)``: whether a path is in this format, going by its files.
``read(path)``: opens it. ``JllamaError`` for what is damaged, missing, or not a Llama that jllama has.
``write(checkpoint, target, dtype, on_progress)``: writes into the empty folder ``target`` (for ``gguf``: that file), in
``dtype`` or (None) every tensor in its own; ``on_progress`` is told of the bytes of weights. ``JllamaError`` before any
weights are written if the format cannot hold the model.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jllama import tokenizers
from jllama.checkpoints.tensors import (
    Checkpoint,
    TensorsOfParams,
    load_decode_params,
    load_params,
    progress,
    size_bytes,
)
from jllama.decode_params import Quantization
from jllama.errors import JllamaError, UsageError
from jllama.files import cache_folder, refuse_special_files
from jllama.language_model import LanguageModel
from jllama.tokenizers import Tokenizer, has_tokenizer

Format = Literal["orbax", "hf", "gguf", "llama2c", "meta"]
Layout = Literal["decode", "training"]
Dtype = Literal["float32", "bfloat16", "float16", "q8_0"]

_MODULES: dict[Format, str] = {
    "gguf": "gguf",
    "meta": "meta",
    "llama2c": "llama2c",
    "hf": "huggingface",
    "orbax": "run",
}
_OF_CHECKPOINTS = (  # names of files that a checkpoint of some format, or a run, has in its folder
    r".*\.safetensors(\.index\.json)?|.*\.(gguf|bin|pth)|tokenizer.*\.(json|model)|(generation_)?config\.json|"
    r"(special_tokens_map|added_tokens|vocab|params|jllama)\.json|merges\.txt|checklist\.chk|chat_template\.(jinja|json)|"
    r"config\.yaml|checkpoints|(metrics|samples|config\.history)\.jsonl|report\.html|in_use|\.gitattributes"
)


def _keep_compiled() -> None:
    """Keep what is compiled in the cache folder, also what takes no time: most of a small model's start is that.

    Where JAX was told of another folder (``JAX_COMPILATION_CACHE_DIR``), that one and its rules are taken.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()  # whether there is one is asked once, at the first compilation


def load(
    path: str | Path,
    dtype: Any = None,
    mesh: Mesh | None = None,
    *,
    layout: Layout = "decode",
    rope_factor: float | None = None,
    step: int | None = None,
    quantize: Quantization | None = None,
) -> LanguageModel:
    """Load a checkpoint of any format, or a Hugging Face hub id, straight onto the devices.

    From here on JAX keeps what it compiles in ``$JLLAMA_CACHE/compiled``, so that the next process need not compile
    it again (``JAX_COMPILATION_CACHE_DIR`` chooses another folder, ``JAX_ENABLE_COMPILATION_CACHE=0`` none).

    Args:
        path: a run's folder, a Hugging Face or Meta folder, a GGUF file, a llama2.c file, or ``org/name``.
        dtype: of the parameters; None is float32 on a CPU, where bfloat16 is slow, and elsewhere the files' own.
        mesh: splits the parameters over devices, as in training; None puts them on the first device.
        layout: ``decode``, a layer each and outputs first, for everything but training (``DecodeParams``); or
            ``training``, layers stacked and inputs first (``jllama.parameters``).
        rope_factor: the RoPE scaling factor that Meta's files leave out; None is that of the released Llama of the same
            shape.
        step: of a training run, the checkpoint to take; None is the one with the lowest validation loss.
        quantize: ``int8`` rounds the matrices to eight bits as they are read.

    Raises:
        JllamaError: there is no such checkpoint, or something in it is wrong; the message says what and where.
        UsageError: an argument does not fit the checkpoint.
    """
    _keep_compiled()
    if dtype is None and jax.default_backend() == "cpu":
        dtype = jnp.float32
    dtype = None if dtype is None else _float_dtype(dtype)
    for name, value, names in (("layout", layout, Layout), ("quantize", quantize, Quantization)):
        if value is not None and value not in get_args(names):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(get_args(names))}")
    if quantize and layout == "training":
        raise UsageError(f"quantize is {quantize!r}, which is for decoding: leave it out, or take layout 'decode'")
    source = _local(path)
    checkpoint = open_checkpoint(source, rope_factor, step)
    with progress(f"reading {source.name}", size_bytes(checkpoint, dtype)) as on_progress:
        if layout == "training":
            params = load_params(checkpoint, dtype, mesh, on_progress)
        else:
            params = load_decode_params(checkpoint, dtype, mesh, on_progress, quantize)
    tokenizer = checkpoint.tokenizer
    stop_ids = checkpoint.stop_ids or ((tokenizer.eos_id,) if tokenizer else ())
    name = Path(path).name or source.resolve().name
    return LanguageModel(
        checkpoint.config, params, tokenizer, checkpoint.chat_template, stop_ids, checkpoint.step, name
    )


def _float_dtype(dtype: Any) -> np.dtype[Any]:
    with contextlib.suppress(TypeError):  # no dtype at all
        found = jnp.dtype(dtype)
        if jnp.issubdtype(found, jnp.floating) and jax.dtypes.canonicalize_dtype(found) == found:
            return found
    raise UsageError(f"dtype is {dtype}; it must be float32, bfloat16, float16, or with JAX_ENABLE_X64=1 float64")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint of any format or of a hub id; or of a file or folder of a tokenizer's own.

    Raises:
        JllamaError: there is none, or it cannot be used; the message says why.
    """
    source = _local(path)
    refuse_special_files(source, *source.glob("*"))
    if has_tokenizer(source) or not (format := _recognized(source)):
        return tokenizers.load_tokenizer(source)
    tokenizer = _read(source, format).tokenizer
    if tokenizer is None:
        raise JllamaError(f"{path} has no tokenizer: put the one it was trained with beside its weights")
    return tokenizer


def save(
    model: LanguageModel,
    path: str | Path,
    format: Format = "orbax",
    dtype: Dtype | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a model in any format. It appears at ``path`` when it is whole, or not at all.

    Args:
        model: what ``load`` gives; or one put together from a configuration, parameters and a tokenizer.
        path: the folder to make (for ``gguf``, the file).
        format: one of ``Format``.
        dtype: of the matrices; None keeps the parameters' own. ``q8_0`` is for ``gguf`` alone.
        overwrite: replace the file or the checkpoint that is at ``path``; no other folder is replaced.

    Raises:
        JllamaError: the format cannot hold this model, ``path`` exists, or the disk is too small.
        UsageError: there is no such format or dtype.
    """
    check_names("format", format, dtype)
    tensors = TensorsOfParams(model.config, model.params)
    checkpoint = Checkpoint(model.config, tensors, model.tokenizer, model.chat_template, model.stop_ids)
    _write(checkpoint, Path(path), format, dtype, overwrite, None)


def convert(
    source: str | Path,
    target: str | Path,
    to: Format,
    dtype: Dtype | None = None,
    *,
    overwrite: bool = False,
    rope_factor: float | None = None,
) -> Checkpoint:
    """Convert a checkpoint of any format to another, block by block: the model is never in memory whole.

    (Reading or writing jllama's own format does take the model's size in memory.) Arguments and errors as those of
    ``load`` and ``save``; without ``dtype`` every tensor keeps its own. A target that holds the source, or lies in it
    and exists, is refused.

    Returns:
        what was converted.
    """
    check_names("to", to, dtype)
    local = _local(source)
    checkpoint = open_checkpoint(local, rope_factor)
    _write(checkpoint, Path(target), to, dtype, overwrite, local)
    return checkpoint


def open_checkpoint(path: str | Path, rope_factor: float | None = None, step: int | None = None) -> Checkpoint:
    """Open a checkpoint of any format, without reading its weights. Arguments and errors are those of ``load``."""
    source = _local(path)
    return _read(source, _format_of(source), rope_factor, step)


def _module(format: Format) -> ModuleType:
    return importlib.import_module(f"jllama.checkpoints.{_MODULES[format]}")


def _local(path: str | Path) -> Path:
    """The path itself, or where the hub's copy of ``org/name`` lies."""
    source = Path(path)
    if not source.exists():
        is_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)) and not source.parent.exists()
        if not is_id:
            raise JllamaError(
                f"there is no checkpoint at {path}: give a run's folder, such as runs/quickstart, or a model's"
            )
        return _module("hf").download(str(path))
    return source


def _recognized(source: Path) -> Format | None:
    for format in _MODULES:  # jllama's own comes last: orbax takes half a second to import
        with contextlib.suppress(OSError):  # what cannot be read is not of this format
            if _module(format).recognizes(source):
                return format
    return None


def _format_of(source: Path) -> Format:
    refuse_special_files(source, *source.glob("*"))  # of a file the latter are none
    if format := _recognized(source):
        return format
    if runs := [parent for parent in source.resolve().parents[:3] if _module("orbax").recognizes(parent)]:
        raise JllamaError(f"{source} lies inside a run: give the run's folder itself, {runs[0]}")
    if source.is_file() and _recognized(source.parent):
        raise JllamaError(f"{source} is no checkpoint by itself: give its folder, {source.parent}")
    held = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) if source.is_dir() else "no known header"
    raise JllamaError(
        f"{source} is no checkpoint that jllama knows (it holds {held or 'nothing'}): give a training run, a folder "
        f"with config.json and safetensors, one with params.json and consolidated.*.pth, or a GGUF or llama2.c file"
    )


def _read(source: Path, format: Format, rope_factor: float | None = None, step: int | None = None) -> Checkpoint:
    if rope_factor is not None and format != "meta":
        raise UsageError(
            f"rope_factor is for Meta's files alone: {source} says itself how RoPE is scaled, leave it out"
        )
    if step is not None and format != "orbax":
        raise UsageError(f"{source} is not a training run, so it has no step {step}: leave out the step")
    options = [value for value in (rope_factor, step) if value is not None]
    checkpoint = _module(format).read(source, *options)
    _check_tokenizer(checkpoint, source)
    return checkpoint


def _check_tokenizer(checkpoint: Checkpoint, source: Path) -> None:
    tokenizer, rows = checkpoint.tokenizer, checkpoint.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise JllamaError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} tokens but the embedding has {rows} rows: "
            f"put the tokenizer there that the model was trained with"
        )


def check_names(name: str, format: str, dtype: str | None) -> None:
    """Raise ``UsageError`` unless there is a format, given as ``name``, that holds such a dtype."""
    if format not in get_args(Format):
        raise UsageError(f"{name} is {format!r}; it must be one of {', '.join(get_args(Format))}")
    if dtype not in (None, *get_args(Dtype)):
        raise UsageError(
            f"dtype is {dtype!r}; it must be one of {', '.join(get_args(Dtype))}; for others, such as Q4_K_M, run "
            f"llama.cpp's llama-quantize on the GGUF file"
        )
    if dtype == "q8_0" and format != "gguf":
        raise UsageError(f"dtype q8_0 is GGUF's alone: with {format} take float32, bfloat16 or float16")


def _write(
    checkpoint: Checkpoint,
    target: Path,
    format: Format,
    dtype: Dtype | None,
    overwrite: bool,
    source: Path | None = None,
) -> None:
    target = target.resolve()  # of a link, what it leads to is replaced
    _check_target(target, source, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    needed_bytes = _size_bytes(checkpoint, format, dtype)
    free_bytes = shutil.disk_usage(target.parent).free
    if needed_bytes > free_bytes:
        raise JllamaError(
            f"{target} needs {needed_bytes:,} bytes but {free_bytes:,} are free there: "
            f"make room, or choose another destination or a smaller dtype"
        )
    numeric = dtype if dtype in (None, "q8_0") else jnp.dtype(dtype)
    with _written_whole(target) as partial, progress(f"writing {target.name}", needed_bytes) as on_progress:
        if format != "gguf":
            partial.mkdir()
        _module(format).write(checkpoint, partial, numeric, on_progress)


def _check_target(target: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse a target whose replacement would take away the source, or anything that is not a checkpoint's."""
    if target in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"the target {target} is the folder you are in, or holds it: name a file or folder to make")
    _put_back(target)
    if not target.exists():
        return
    if source is not None:
        places = {file.resolve() for file in (source, *(source.iterdir() if source.is_dir() else ()))}
        if any(target in (place, *place.parents) for place in places) or source.resolve() in target.parents:
            raise JllamaError(f"{target} is {source} itself, or holds or lies in it: choose another destination")
    if not overwrite:
        raise JllamaError(f"{target} exists: choose another destination, or replace it with --overwrite")
    held = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else []
    others = [name for name in held if not re.fullmatch(_OF_CHECKPOINTS, name.removesuffix(".partial"))]
    if others or (held and not _recognized(target)):
        raise JllamaError(
            f"{target} holds {', '.join((others or held)[:5])}, more or less than a checkpoint, and stays as it is: "
            f"choose another destination"
        )


def _size_bytes(checkpoint: Checkpoint, format: Format, dtype: Dtype | None) -> int:
    """The bytes of weights that a format takes."""
    if dtype == "q8_0":
        return size_bytes(checkpoint, np.uint8) * 34 // 32  # blocks of 32, with a float16 scale
    if format == "llama2c":  # has nothing narrower
        dtype = "float32"
    numeric = None if dtype is None else jnp.dtype(dtype)
    total_bytes = size_bytes(checkpoint, numeric)
    if format == "meta" and checkpoint.config.tie_embeddings:  # writes the head too
        embed = checkpoint.tensors["embed"]
        total_bytes += math.prod(embed.shape) * (numeric or embed.dtype).itemsize
    return total_bytes


@contextlib.contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """A place beside ``target`` to write to; it is renamed when all has gone well, and removed otherwise."""
    partial, old = _beside(target, "partial"), _beside(target, "old")
    _remove(partial)
    try:
        yield partial
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:
        _put_back(target)
        for left in (partial, old):
            _remove(left)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _put_back(target: Path) -> None:
    """Undo half a replacement: what stood at ``target`` is aside, and nothing has taken its place."""
    if _beside(target, "old").exists() and not target.exists():
        _beside(target, "old").rename(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
