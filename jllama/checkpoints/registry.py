"""Every checkpoint format behind three functions: ``load``, ``save`` and ``convert``.

What passes between formats is a ``Checkpoint``. A further format is an entry of ``FORMATS``.
"""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jllama import cache, tokenizers
from jllama.checkpoints import adapters, gguf, huggingface, llama2c, meta, run, tensors
from jllama.checkpoints.tensors import Checkpoint, OnProgress, size_bytes
from jllama.config import LlamaConfig
from jllama.decode_params import Quantization
from jllama.errors import JllamaError, UsageError, no_tokenizer
from jllama.files import fault_of, put_back, refuse_special_files, written_whole
from jllama.language_model import LanguageModel
from jllama.parameters import count_parameters
from jllama.progress import progress
from jllama.tokenizers import Tokenizer, has_tokenizer

Layout = Literal["decode", "training"]

FLOATS: dict[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = {"float32": 4.0}
_OF_CHECKPOINTS = (  # names of files that a checkpoint of some format, or a run, has in its folder
    r".*\.safetensors(\.index\.json)?|.*\.(gguf|bin|pth)|tokenizer.*\.(json|model)|(generation_|adapter_)?config\.json|"
    r"(special_tokens_map|added_tokens|vocab|params|jllama)\.json|merges\.txt|checklist\.chk|chat_template\.(jinja|json)|"
    r"config\.yaml|checkpoints|(metrics|samples|skipped|config\.history)\.jsonl|report\.html|reference\.npz|"
    r"tensorboard|wandb|autotuning|in_use.*|\.gitattributes"
)


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of checkpoints, or of adapters: then ``read`` takes the configuration of the base, too.

    Args:
        description: what a user has who has one, such as "a GGUF file".
        recognizes: whether a path is in this format, going by its files.
        read: opens it, weights unread. ``JllamaError`` for what is damaged, missing, or not a Llama that jllama has.
        write: into the empty folder ``target`` (``is_file``: that file), in ``dtype`` or (None) every tensor in its
            own; tells ``on_progress`` of the bytes of weights. ``JllamaError`` first if it cannot hold the model.
        dtypes: what ``write`` takes, each with the bytes of a number.
        option: the keyword argument of ``load`` that ``read`` takes, too, if any.
        is_file: it is written to a file, not into a folder.
        suffix: that of targets for which ``jllama convert`` needs not be told the format.
    """

    description: str
    recognizes: Callable[[Path], bool]
    read: Callable[..., Any]
    write: Callable[[Any, Path, Any, OnProgress], None]
    dtypes: Mapping[str, float] = dataclasses.field(default_factory=FLOATS.copy)
    option: str | None = None
    is_file: bool = False
    suffix: str | None = None

    def stored_dtype(self, dtype: str | None) -> str | None:
        """The dtype of the matrices when ``dtype`` is asked for; None: each one's own."""
        return next(iter(self.dtypes)) if dtype is None and len(self.dtypes) == 1 else dtype


def _format(
    description: str, room: Any, dtypes: Mapping[str, float] = FLOATS, **others: Any
) -> Format:
    return Format(description, room.recognizes, room.read, room.write, dtypes, **others)


FORMATS: dict[str, Format] = {
    "gguf": _format("a GGUF file", gguf, FLOATS | {"q8_0": 34 / 32}, is_file=True, suffix=".gguf"),
    "meta": _format("a folder with params.json and consolidated.*.pth", meta, option="rope_factor"),
    "llama2c": _format("a llama2.c file", llama2c, _FLOAT32, suffix=".bin"),
    "hf": _format("a folder with config.json and safetensors", huggingface),
    "orbax": _format("a training run", run, option="step"),
}
"""The formats by name, in the order in which they are tried."""

ADAPTER_FORMATS: dict[str, Format] = {
    "peft": Format(
        "PEFT's folder", adapters.is_peft, adapters.read_peft, adapters.write_peft, _FLOAT32
    ),
    "gguf-lora": Format(
        "a GGUF LoRA",
        gguf.recognizes,
        adapters.read_gguf,
        adapters.write_gguf,
        _FLOAT32,
        None,
        True,
    ),
}
"""Those of adapters by themselves, besides the run that trained one."""


def load(
    path: str | Path,
    dtype: Any = None,
    mesh: Mesh | None = None,
    *,
    layout: Layout = "decode",
    rope_factor: float | None = None,
    step: int | None = None,
    quantize: Quantization | None = None,
    adapter: str | Path | None = None,
) -> LanguageModel:
    """Load a checkpoint of any format, or a Hugging Face hub id, straight onto the devices.

    Raises ``JllamaError``, which says what and where: there is no such checkpoint, or something in it is wrong; and
    ``UsageError`` for an argument that does not fit it. From here on JAX keeps compiled programs for the next process
    in ``$JLLAMA_CACHE/compiled`` (``JAX_COMPILATION_CACHE_DIR``: elsewhere, ``JAX_ENABLE_COMPILATION_CACHE=0``: none).

    Args:
        path: a run's folder, a Hugging Face or Meta folder, a GGUF file, a llama2.c file, or ``org/name``.
        dtype: of the parameters; None is float32 on a CPU, where bfloat16 is slow, and elsewhere the files' own.
        mesh: splits the parameters over devices, as in training; None puts them on the first device.
        layout: ``decode``, a layer each and outputs first, for everything but training (``DecodeParams``); or
            ``training``, layers stacked and inputs first (``jllama.parameters``).
        rope_factor: the RoPE scaling factor that Meta's files leave out; None: that of the released Llama of its shape.
        step: of a training run, the checkpoint to take; None is the one with the lowest validation loss.
        quantize: ``int8`` rounds the matrices to eight bits as they are read; on a GPU or TPU that saves no time.
        adapter: what has been trained beside these weights, and is merged as they are read: PEFT's folder (or hub id),
            a GGUF LoRA file, or a run, whose ``step`` is meant then. A run that trained one is a checkpoint, too.
    """
    # Also small programs are kept, most of a model's start. JAX may have been told of another folder and rules.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue] - made at run time
        if folder := cache.private_folder("compiled"):
            jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()  # whether there is one is asked once, at the first compilation
    if dtype is None and jax.default_backend() == "cpu":
        dtype = jnp.float32
    dtype = None if dtype is None else _float_dtype(dtype)
    for name, value, kind in (("layout", layout, Layout), ("quantize", quantize, Quantization)):
        if value is not None and value not in get_args(kind):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}")
    if quantize and layout == "training":
        raise UsageError(
            f"quantize is {quantize!r}, which is for decoding: leave it out, or take layout 'decode'"
        )
    source = _local(path)
    checkpoint = open_checkpoint(source, rope_factor, step, adapter)
    if checkpoint.adapter and dtype is None:
        dtype = checkpoint.tensors["embed"].dtype  # not float32 for what has been merged
    with progress(
        f"reading {source.name}", size_bytes(checkpoint, dtype), of_bytes=True
    ) as on_progress:
        if layout == "training":
            params = tensors.load_params(checkpoint, dtype, mesh, on_progress)
        else:
            params = tensors.load_decode_params(checkpoint, dtype, mesh, on_progress, quantize)
    config, tokenizer, name = (
        checkpoint.config,
        checkpoint.tokenizer,
        Path(path).name or source.resolve().name,
    )
    stop_ids = checkpoint.stop_ids or ((tokenizer.eos_id,) if tokenizer else ())
    return LanguageModel(
        config, params, tokenizer, checkpoint.chat_template, stop_ids, checkpoint.step, name
    )


def _float_dtype(dtype: Any) -> np.dtype[Any]:
    with contextlib.suppress(TypeError):  # no dtype at all
        numeric = jnp.dtype(dtype)
        if (
            jnp.issubdtype(numeric, jnp.floating)
            and jax.dtypes.canonicalize_dtype(numeric) == numeric
        ):
            return numeric
    raise UsageError(
        f"dtype is {dtype}; it must be float32, bfloat16, float16, or with JAX_ENABLE_X64=1 float64"
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint of any format or of a hub id; or of a file or folder of a tokenizer's own."""
    source = _local(path)
    if has_tokenizer(source) or not _recognized(source):
        return tokenizers.load_tokenizer(source)
    tokenizer = open_checkpoint(source).tokenizer
    if tokenizer is None:
        raise no_tokenizer(path)
    return tokenizer


def save(
    model: LanguageModel,
    path: str | Path,
    format: str = "orbax",
    dtype: str | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a model in any format. It appears at ``path`` when it is whole, or not at all.

    Raises ``JllamaError``: the format cannot hold this model, ``path`` exists, or the disk is too small; and
    ``UsageError``: there is no such format or dtype.

    Args:
        model: what ``load`` gives; or one put together from a configuration, parameters and a tokenizer.
        path: the folder to make (for ``gguf``, the file).
        format: ``orbax`` (jllama's own), ``hf``, ``gguf``, ``llama2c``, ``meta``; a key of ``FORMATS``.
        dtype: of the matrices, one that the format has; None keeps the parameters' own.
        overwrite: replace the file or the checkpoint that is at ``path``; no other folder is replaced.
    """
    check_names("format", format, dtype)
    saved = tensors.TensorsOfParams(model.config, model.params)
    checkpoint = Checkpoint(
        model.config, saved, model.tokenizer, model.chat_template, model.stop_ids
    )
    _write(checkpoint, Path(path), format, dtype, overwrite, [])


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    dtype: str | None = None,
    *,
    overwrite: bool = False,
    rope_factor: float | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Convert a checkpoint of any format to another, block by block: the model is never in memory whole.

    With ``adapter`` it is merged (in float32, if ``dtype`` does not say), and so is a run's that trained one. ``to``
    ``peft`` or ``gguf-lora``, the adapter is written alone.

    (Writing jllama's own format does take its size in memory.) Arguments and errors are those of ``load`` and ``save``;
    without ``dtype`` every tensor keeps its own. A target that is the source, holds it or lies in it is refused.
    Returns what was converted.
    """
    check_names("to", to, dtype)
    local = _local(source)
    checkpoint = open_checkpoint(local, rope_factor, adapter=adapter)
    adapter_read = checkpoint.adapter
    content = adapter_read if to in ADAPTER_FORMATS else checkpoint
    if content is None:
        raise UsageError(
            f"{source} has no adapter to write as {to}: give one with adapter, or a run that trained one"
        )
    others = [adapter_read.source, adapter_read.base] if adapter_read else []
    _write(content, Path(target), to, dtype, overwrite, [local, *map(Path, filter(None, others))])
    return checkpoint


def open_checkpoint(
    path: str | Path,
    rope_factor: float | None = None,
    step: int | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format, without reading its weights. Arguments and errors are those of ``load``."""
    source, own_step = _local(path), None if adapter else step
    if run.recognizes(source) and (begun := run.read_config(source)).lora.rank:
        with fault_of(
            f"{source} has adapters of its init_from", JllamaError, KeyError, RecursionError
        ):
            base = open_checkpoint(
                str(begun.fields["init_from"]), rope_factor or begun.fields.get("rope_factor")
            )
        checkpoint = adapters.merged(base, run.read_adapter(source, base.config, own_step))
    else:
        format = FORMATS[_format_of(source)]
        options = {
            name: each
            for name, each in (("rope_factor", rope_factor), ("step", own_step))
            if each is not None
        }
        for name, value in options.items():
            if name != format.option:
                takers = " or ".join(
                    each.description for each in FORMATS.values() if name == each.option
                )
                raise UsageError(
                    f"{source} is not {takers}, so it has no {name} {value}: leave out the {name}"
                )
        checkpoint = format.read(source, **options)
    tokenizer, rows = checkpoint.tokenizer, checkpoint.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > rows:
        sizes = f"{tokenizer.vocab_size} tokens but the embedding has {rows} rows"
        raise JllamaError(
            f"the tokenizer of {source} has {sizes}: put the one there that the model was trained with"
        )
    if adapter:
        return adapters.merged(
            checkpoint, _read_adapter(_local(adapter, "adapter"), checkpoint.config, step)
        )
    return checkpoint


def _read_adapter(source: Path, config: LlamaConfig, step: int | None) -> adapters.Adapter:
    if run.recognizes(source):
        return run.read_adapter(source, config, step)
    if step is not None:
        raise UsageError(
            f"{source} is not a training run, so it has no step {step}: leave out the step"
        )
    for format in ADAPTER_FORMATS.values():
        if format.recognizes(source):
            return format.read(source, config)
    raise JllamaError(
        f"{source} is no adapter that jllama knows: give PEFT's folder, a GGUF LoRA, or a run"
    )


def _local(path: str | Path, kind: str = "checkpoint") -> Path:
    """The path itself, or where the hub's copy of ``org/name`` lies. Whatever is read, is read through here.

    A pipe, a socket or a device there raises ``JllamaError``.
    """
    source = Path(path)
    if source.exists():
        refuse_special_files(source, *source.glob("*"))  # of a file the latter are none
        return source
    if (
        re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path))
        and not source.parent.exists()
    ):
        return huggingface.download(str(path))
    other = {"checkpoint": "a model's", "adapter": "PEFT's"}[kind]
    raise JllamaError(
        f"there is no {kind} at {path}: give a run's folder, such as runs/quickstart, or {other}"
    )


def _recognized(source: Path) -> str | None:
    for name, format in FORMATS.items():
        with contextlib.suppress(OSError):  # what cannot be read is not of this format
            if format.recognizes(source):
                return name
    return None


def _format_of(source: Path) -> str:
    if name := _recognized(source):
        return name
    if wholes := [parent for parent in source.resolve().parents[:3] if _recognized(parent)]:
        raise JllamaError(f"{source} is no checkpoint by itself: give its folder, {wholes[0]}")
    held = (
        ", ".join(sorted(entry.name for entry in source.iterdir())[:8])
        if source.is_dir()
        else "no known header"
    )
    formats = ", or ".join(format.description for format in FORMATS.values())
    raise JllamaError(
        f"{source} is no checkpoint that jllama knows (it holds {held or 'nothing'}): give {formats}"
    )


def check_names(name: str, format: str, dtype: str | None) -> None:
    """Raise ``UsageError`` unless there is a format, given as ``name``, that holds such a dtype."""
    formats = FORMATS | (ADAPTER_FORMATS if name == "to" else {})
    if format not in formats:
        raise UsageError(f"{name} is {format!r}; it must be one of {', '.join(formats)}")
    if dtype is not None and dtype not in formats[format].dtypes:
        said = f"dtype is {dtype!r}; with {format} it must be one of {', '.join(formats[format].dtypes)}"
        raise UsageError(
            f"{said}; for others, such as Q4_K_M, run llama.cpp's llama-quantize on a GGUF file"
        )


def _write(
    content: Any, target: Path, to: str, dtype: str | None, overwrite: bool, sources: Sequence[Path]
) -> None:
    format, target = (
        (FORMATS | ADAPTER_FORMATS)[to],
        target.resolve(),
    )  # of a link, what it leads to is replaced
    check_target(target, sources, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    each, count = (
        format.dtypes.get(format.stored_dtype(dtype) or ""),
        count_parameters(content.config),
    )
    needed_bytes = (
        int(each * count) if each and isinstance(content, Checkpoint) else size_bytes(content, None)
    )
    if needed_bytes > (free_bytes := shutil.disk_usage(target.parent).free):
        space = f"{needed_bytes:,} bytes but {free_bytes:,} are free there"
        raise JllamaError(
            f"{target} needs {space}: make room, or choose another destination or a smaller dtype"
        )
    with (
        written_whole(target) as partial,
        progress(f"writing {target.name}", needed_bytes, of_bytes=True) as move,
    ):
        if not format.is_file:
            partial.mkdir()
        format.write(content, partial, jnp.dtype(dtype) if dtype in FLOATS else dtype, move)


def _lies_in(path: Path, other: Path) -> bool:
    """Whether a path is another one, which exists, or lies in it, whatever mount, link or spelling leads there."""
    path = path.resolve()
    return any(
        other.exists() and place.exists() and place.samefile(other)
        for place in (path, *path.parents)
    )


def check_target(target: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Refuse a target whose replacement would take away a source, or anything that is not a checkpoint's."""
    if target in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(
            f"the target {target} is the folder you are in, or holds it: name a file or folder to make"
        )
    put_back(target)
    refuse_special_files(target)
    for source in sources:
        for own in (source, *source.glob("*")):
            if _lies_in(target, own) or _lies_in(own, target):
                raise JllamaError(
                    f"{target} is {source} itself, or holds or lies in it: choose another destination"
                )
    if not target.exists():
        return
    if not overwrite:
        raise JllamaError(
            f"{target} exists: choose another destination, or set overwrite to replace it"
        )
    held = sorted(entry.name for entry in target.glob("*"))  # none of a file
    others = [
        name for name in held if not re.fullmatch(rf"\.?({_OF_CHECKPOINTS})(\.partial)?", name)
    ]
    if others or (held and not _recognized(target)):
        what = f"{', '.join((others or held)[:5])}, more or less than a checkpoint"
        raise JllamaError(f"{target} holds {what}, and stays as it is: choose another destination")
