"""Every checkpoint format behind three functions: ``load``, ``save`` and ``convert``.

Formats exchange a ``Checkpoint``. A further format is an entry of ``FORMATS``.
"""

import contextlib
import dataclasses
import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jllama.core import JllamaError, UsageError
from jllama.core.parameters import count_parameters
from jllama.formats import adapters, bucket, gguf, huggingface, llama2c, meta, run, tensors
from jllama.formats.tensors import Checkpoint, OnProgress, size_bytes
from jllama.kernels.linear import KERNELS
from jllama.models.decode_params import Quantization
from jllama.models.language_model import LanguageModel
from jllama.system import cache
from jllama.system.errors import no_tokenizer
from jllama.system.files import atomic_write, errors_as, refuse_special_files, restore_replaced
from jllama.system.places import Place, as_place
from jllama.system.progress import progress
from jllama.system.remote import fetch, list_files, overlap, publish
from jllama.templates.messages import with_date
from jllama.tokenizers import loading
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.loading import has_tokenizer

Layout = Literal["decode", "training"]

FLOATS: dict[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = {"float32": 4.0}


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of checkpoints or of adapters.

    Args:
        description: A noun phrase for a checkpoint in the format, such as "a GGUF file".
        recognizes: Whether a path is in this format, judged by its files.
        read: Open it without reading the weights. Raises ``JllamaError`` if it is damaged,
            incomplete, or not a Llama that jllama has.
        write: Write into the empty folder ``target`` (``is_file``: to that file), in ``dtype`` or
            (None) each tensor in its own; call ``on_progress`` with bytes of weights. Raises
            ``JllamaError`` before it writes if the format cannot hold the model.
        dtypes: The dtypes that ``write`` takes, each with the bytes of a number.
        option: The keyword argument of ``load`` that ``read`` takes, if any.
        is_file: The format is a file, not a folder.
        suffix: For targets with this suffix ``jllama convert`` chooses the format itself.
        base_of: The path or hub id of the base, and its ``rope_factor``, if what is at a path is
            only an adapter; None if it is a whole checkpoint.

    Examples:
        >>> sorted(jllama.FORMATS)
        ['gguf', 'hf', 'llama2c', 'meta', 'orbax'...]
    """

    description: str
    recognizes: Callable[[Path], bool]
    read: Callable[..., Any]
    write: Callable[[Any, Path, Any, OnProgress], None]
    dtypes: Mapping[str, float] = dataclasses.field(default_factory=FLOATS.copy)
    option: str | None = None
    is_file: bool = False
    suffix: str | None = None
    base_of: Callable[[Path], tuple[str, float | None] | None] = lambda path: None

    def stored_dtype(self, dtype: str | None) -> str | None:
        """Return the dtype in which ``dtype`` stores the matrices; None is each matrix's own."""
        if dtype is None and len(self.dtypes) == 1:
            return next(iter(self.dtypes))
        return dtype


FORMATS: dict[str, Format] = {
    "gguf": Format(
        "a GGUF file",
        gguf.recognizes,
        gguf.read,
        gguf.write,
        FLOATS | {name: GGML_QUANT_SIZES[type_][1] / 32 for name, type_ in gguf.QUANTIZED.items()},
        is_file=True,
        suffix=".gguf",
    ),
    "meta": Format(
        "a folder with params.json and consolidated.*.pth",
        meta.recognizes,
        meta.read,
        meta.write,
        option="rope_factor",
    ),
    "llama2c": Format(
        "a llama2.c file",
        llama2c.recognizes,
        llama2c.read,
        llama2c.write,
        _FLOAT32,
        suffix=".bin",
    ),
    "hf": Format(
        "a folder with config.json and safetensors",
        huggingface.recognizes,
        huggingface.read,
        huggingface.write,
    ),
    "orbax": Format(
        "a training run",
        run.recognizes,
        run.read,
        run.write,
        option="step",
        base_of=run.base_of,
    ),
}
"""The formats by name, in the order in which they are tried.

>>> list(FORMATS)
['gguf', 'meta', 'llama2c', 'hf', 'orbax']
"""

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
        is_file=True,
    ),
}
"""The formats of adapters alone, whose ``read`` also takes the configuration of the base."""


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

    From then on JAX caches compiled programs for later processes in ``$JLLAMA_CACHE/compiled``. Set
    ``JAX_COMPILATION_CACHE_DIR`` for another folder, ``JAX_ENABLE_COMPILATION_CACHE=0`` for no
    cache.

    Args:
        path: A run's folder, a Hugging Face or Meta folder, a GGUF file, a llama2.c file, or
            ``org/name``; also the URL of one, such as ``gs://bucket/run``, ``s3://bucket/model``
            or ``hf://org/name``.
        dtype: Dtype of the parameters. None is float32 on a CPU, where bfloat16 is slow, and
            elsewhere the dtype in the files.
        mesh: Splits the parameters over devices, as in training; None puts them on the first
            device.
        layout: ``decode``, with separate layers and outputs first, for everything but training
            (``DecodeParams``); or ``training``, with stacked layers and inputs first
            (``jllama.core.parameters``).
        rope_factor: The RoPE scaling factor that Meta's files leave out; None is that of the
            released Llama of the same shape.
        step: The checkpoint of a training run; None is the one with the lowest validation loss.
        quantize: ``int8`` rounds the matrices to eight bits as they are read; on a GPU or TPU that
            saves no time. With neither this nor ``dtype``, a CPU keeps matrices of GGUF files as
            they are stored if their type is one of ``kernels.linear.KERNELS``; that needs numba.
        adapter: An adapter for these weights, merged as they are read: PEFT's folder (or hub id), a
            GGUF LoRA file, or a run, to which ``step`` then applies. A run that trained an adapter
            is a checkpoint, too.

    Raises:
        JllamaError: There is no such checkpoint, or something in it is wrong; the message names it.
        UsageError: An argument does not fit the checkpoint.

    Examples:
        >>> model = jllama.load("smollm2/")  # or a run, "org/name", a Meta, GGUF or llama2.c file
        >>> model.config.num_layers
        1
    """
    # 1) Let JAX cache programs on disk, unless it is configured to: small ones, too, as most of a
    # model's start is compiling them. The attribute is made at run time.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        folder = cache.private_folder("compiled")
        if folder:
            jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        # JAX looks for the cache only once, at the first compilation.
        compilation_cache.reset_cache()

    # 2) Choose the dtype, and check the other arguments.
    keeps_blocks = dtype is None and not quantize
    if dtype is not None:
        dtype = _float_dtype(dtype)
    elif jax.default_backend() == "cpu":
        dtype = np.dtype(np.float32)
    for name, value, kind in (("layout", layout, Layout), ("quantize", quantize, Quantization)):
        if value is not None and value not in get_args(kind):
            raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}")
    if quantize and layout == "training":
        raise UsageError(
            f"quantize is {quantize!r}, which is for decoding: "
            "leave it out, or set layout to 'decode'"
        )

    # 3) Open the checkpoint, and read its weights onto the devices.
    source = local_copy(path)
    checkpoint = open_checkpoint(source, rope_factor, step, adapter)
    kinds = {getattr(tensor, "quantized", "") for tensor in checkpoint.tensors.values()}
    wants_kernels = quantize or (keeps_blocks and not kinds.isdisjoint(KERNELS))
    on_cpu = layout == "decode" and jax.default_backend() == "cpu"
    if wants_kernels and on_cpu and importlib.util.find_spec("numba") is None:
        print(
            "note: without numba, quantized weights of GGUF files become float32, in up to eight "
            "times the memory, and products in int8 take longer: pip install 'jllama[cpu]'",
            file=sys.stderr,
        )
    if checkpoint.adapter and dtype is None:
        dtype = checkpoint.tensors["embed"].dtype  # merged matrices are float32
    num_bytes = size_bytes(checkpoint, dtype)
    with progress(f"reading {source.name}", num_bytes, of_bytes=True) as on_progress:
        if layout == "training":
            params = tensors.load_params(checkpoint, dtype, mesh, on_progress)
        else:
            params = tensors.load_decode_params(
                checkpoint, dtype, mesh, on_progress, quantize, keeps_blocks
            )

    # 4) Add the tokenizer, the chat template and the stop ids.
    tokenizer = checkpoint.tokenizer
    stop_ids = checkpoint.stop_ids
    if tokenizer:
        stop_ids = tokenizer.stops_or_eos(stop_ids)
    down = "w_down" if "layers/0/w_down" in checkpoint.tensors else "experts_down"
    matrix = checkpoint.tensors[f"layers/0/{down}"]
    return LanguageModel(
        checkpoint.config,
        params,
        tokenizer,
        checkpoint.chat_template and with_date(checkpoint.chat_template),
        stop_ids,
        checkpoint.step,
        Path(path).name or source.resolve().name,
        getattr(matrix, "quantized", "") or matrix.dtype.name,
    )


def _float_dtype(dtype: Any) -> np.dtype:
    """Return a floating-point dtype that JAX has; ``UsageError`` for anything else."""
    with contextlib.suppress(TypeError):  # not a dtype at all
        numeric = jnp.dtype(dtype)
        is_float = jnp.issubdtype(numeric, jnp.floating)
        if is_float and jax.dtypes.canonicalize_dtype(numeric) == numeric:
            return numeric
    raise UsageError(
        f"dtype is {dtype}; it must be float32, bfloat16, float16, or with JAX_ENABLE_X64=1 float64"
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint or hub id, or of a tokenizer's own file or folder.

    Examples:
        >>> tokenizer = jllama.load_tokenizer("smollm2/")
        >>> tokenizer.decode(tokenizer.encode("Once"))
        'Once'
    """
    source = local_copy(path)
    if has_tokenizer(source) or not _recognize(source):
        return loading.load_tokenizer(source)
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
    """Write a model in any format. It appears at ``path`` when it is complete, or not at all.

    Args:
        model: A loaded model, or one made of a configuration, parameters and a tokenizer.
        path: The folder to make (for ``gguf``, the file), or its URL.
        format: ``orbax`` (jllama's own), ``hf``, ``gguf``, ``llama2c``, ``meta``; a key of
            ``FORMATS``.
        dtype: Dtype of the matrices, one of the format's; None keeps the parameters' own.
        overwrite: Replace the file or the checkpoint at ``path``. Other folders are never replaced.

    Raises:
        JllamaError: The format cannot hold this model, ``path`` exists, or the disk is too small.
        UsageError: There is no such format or dtype.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> jllama.save(model, "saved.gguf", format="gguf", overwrite=True)
    """
    target = as_place(path)
    check_names("format", format, dtype)
    saved = tensors.TensorsOfParams(model.config, model.params)
    checkpoint = Checkpoint(
        model.config, saved, model.tokenizer, model.chat_template, model.stop_ids
    )
    _write(checkpoint, target, format, dtype, overwrite, [])


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
    """Convert a checkpoint of any format to another, and return what was converted.

    The model is converted block by block, and is never in memory as a whole, except for jllama's
    own format. An ``adapter`` is merged (in float32, unless ``dtype`` is set), and so is that of a
    run that trained one. If ``to`` is ``peft`` or ``gguf-lora``, only the adapter is written.

    Arguments and errors are those of ``load`` and ``save``. If ``dtype`` is None, every tensor
    keeps its own. A target that is the source, holds it or lies in it is refused.

    Examples:
        >>> checkpoint = jllama.convert("smollm2/", "converted.gguf", to="gguf", overwrite=True)
    """
    check_names("to", to, dtype)
    path = as_place(target)
    if overlap(f"{source}", f"{target}"):
        raise JllamaError(
            f"{target} is {source} itself, or holds or lies in it: choose another destination"
        )
    local = local_copy(source)
    checkpoint = open_checkpoint(local, rope_factor, adapter=adapter)
    own_adapter = checkpoint.adapter
    content = own_adapter if to in ADAPTER_FORMATS else checkpoint
    dropped = ", ".join(huggingface.dropped_fields(local))
    if dropped and content is checkpoint:
        print(f"note: {target} will not have {source}'s {dropped}", file=sys.stderr)
    if content is None:
        raise UsageError(
            f"{source} has no adapter to write as {to}: "
            "give one with adapter, or a run that trained one"
        )
    sources = [local]
    if own_adapter:
        sources += [Path(path) for path in (own_adapter.source, own_adapter.base) if path]
    _write(content, path, to, dtype, overwrite, sources)
    return checkpoint


def open_checkpoint(
    path: str | Path,
    rope_factor: float | None = None,
    step: int | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format without reading its weights, as ``load`` does."""
    # 1) Open the source by its format. If it is an adapter, merge it into its own base.
    source = local_copy(path)
    own_step = None if adapter else step
    format = FORMATS[_format_of(source)]
    base = format.base_of(source)
    if base:
        base_path, base_factor = base
        with errors_as(f"{source} has adapters of its init_from", JllamaError, RecursionError):
            checkpoint = open_checkpoint(base_path, rope_factor or base_factor)
        checkpoint = _merge(checkpoint, source, own_step)
    else:
        checkpoint = _read(format, source, rope_factor=rope_factor, step=own_step)

    # 2) Check that the tokenizer fits the embedding.
    tokenizer = checkpoint.tokenizer
    num_rows = checkpoint.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > num_rows:
        raise JllamaError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} tokens but the embedding "
            f"has {num_rows} rows: put the one there that the model was trained with"
        )

    # 3) Merge the adapter that the caller names.
    if adapter:
        return _merge(checkpoint, local_copy(adapter, "adapter"), step)
    return checkpoint


def _merge(base: Checkpoint, source: Path, step: int | None) -> Checkpoint:
    """Merge an adapter of any format; one that a run trained talks in the run's form."""
    run_adapters = dataclasses.replace(FORMATS["orbax"], read=run.read_adapter)
    for format in (run_adapters, *ADAPTER_FORMATS.values()):
        if format.recognizes(source):
            break
    else:
        raise JllamaError(
            f"{source} is no adapter that jllama knows: give PEFT's folder, a GGUF LoRA, or a run"
        )
    merged = adapters.merge(base, _read(format, source, base.config, step=step))
    if format is not run_adapters:
        return merged
    _, template, stop_ids = run.read_text_files(source)
    return dataclasses.replace(
        merged,
        chat_template=template or merged.chat_template,
        stop_ids=stop_ids or merged.stop_ids,
    )


def _read(format: Format, source: Path, *arguments: Any, **options: Any) -> Any:
    """Read a path by its format; ``UsageError`` for an option that only other formats take."""
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if name != format.option:
            takers = [other.description for other in FORMATS.values() if name == other.option]
            raise UsageError(
                f"{source} is not {' or '.join(takers)}, "
                f"so it has no {name} {value}: leave out the {name}"
            )
    return format.read(source, *arguments, **options)


def local_copy(path: str | Path, kind: str = "checkpoint") -> Path:
    """Return the path itself, or where the copy of ``org/name`` or of a URL is.

    Everything that is read goes through here. A pipe, a socket or a device raises ``JllamaError``.
    """
    source = as_place(path)
    hub_id = re.match(r"hf://(?!(?:datasets|spaces)/)([^/]+/[^/]+)/?$", str(source))
    if hub_id:
        return huggingface.download(hub_id[1])
    if not isinstance(source, Path):
        return fetch(source, bucket.without_state)
    if source.exists():
        refuse_special_files(source, *source.glob("*"))  # a file has none
        return source
    is_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path))
    if is_id and not source.parent.exists():
        return huggingface.download(str(path))
    other = "PEFT's" if kind == "adapter" else "a model's"
    raise JllamaError(
        f"there is no {kind} at {path}: give a run's folder, such as runs/quickstart, or {other}"
    )


def _recognize(source: Path) -> str | None:
    """Return the name of the format of a path, if any."""
    for name, format in FORMATS.items():
        with contextlib.suppress(OSError):  # a file that cannot be read is not of this format
            if format.recognizes(source):
                return name
    return None


def _format_of(source: Path) -> str:
    """Return the name of the format of a path; ``JllamaError`` if it is of none."""
    name = _recognize(source)
    if name:
        return name
    for parent in source.resolve().parents[:3]:
        if _recognize(parent):
            raise JllamaError(f"{source} is no checkpoint by itself: give its folder, {parent}")
    content = "no known header"
    if source.is_dir():
        content = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) or "nothing"
    formats = ", or ".join(format.description for format in FORMATS.values())
    raise JllamaError(
        f"{source} is no checkpoint that jllama knows (it holds {content}): give {formats}"
    )


def check_names(name: str, format: str, dtype: str | None) -> None:
    """Raise ``UsageError`` unless a format (the argument ``name``) exists and has the dtype."""
    formats = FORMATS | (ADAPTER_FORMATS if name == "to" else {})
    if format not in formats:
        raise UsageError(f"{name} is {format!r}; it must be one of {', '.join(formats)}")
    dtypes = formats[format].dtypes
    if dtype is not None and dtype not in dtypes:
        raise UsageError(
            f"dtype is {dtype!r}; with {format} it must be one of {', '.join(dtypes)}; "
            "for others, such as Q4_K_M, run llama.cpp's llama-quantize on a GGUF file"
        )


def _write(
    content: Any,
    target: Place,
    to: str,
    dtype: str | None,
    overwrite: bool,
    sources: Sequence[Path],
) -> None:
    """Write a ``Checkpoint`` or an ``Adapter`` to ``target``, completely or not at all."""
    format = (FORMATS | ADAPTER_FORMATS)[to]
    if not isinstance(target, Path):
        before = list_files(target)
        names = {name.partition("/")[0] for name in before if name}
        _check_replaced(target, bool(before), names, overwrite)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / target.name
            _write(content, copy, to, dtype, False, [])
            if format.recognizes is run.recognizes:
                (copy / bucket.CHECKPOINTS / "0" / bucket.COMPLETE).write_text("{}")
            publish(copy, target, before)
        return
    target = target.resolve()  # a link stays, and the file that it leads to is replaced
    check_target(target, sources, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    needed_bytes = size_bytes(content, None)
    bytes_each = format.dtypes.get(format.stored_dtype(dtype) or "")
    if bytes_each and isinstance(content, Checkpoint):
        needed_bytes = int(bytes_each * count_parameters(content.config))
    free_bytes = shutil.disk_usage(target.parent).free
    if needed_bytes > free_bytes:
        raise JllamaError(
            f"{target} needs {needed_bytes:,} bytes but {free_bytes:,} are free there: "
            "make room, or choose another destination or a smaller dtype"
        )
    with (
        atomic_write(target) as partial,
        progress(f"writing {target.name}", needed_bytes, of_bytes=True) as on_progress,
    ):
        if not format.is_file:
            partial.mkdir()
        format.write(content, partial, jnp.dtype(dtype) if dtype in FLOATS else dtype, on_progress)


def _lies_in(path: Path, other: Path) -> bool:
    """Return whether a path is another one, which exists, or lies in it.

    Mounts, links and spellings make no difference.
    """
    path = path.resolve()
    return any(
        other.exists() and place.exists() and place.samefile(other)
        for place in (path, *path.parents)
    )


def check_target(target: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Raise an error if replacing a target would remove a source, or anything but a checkpoint."""
    if target in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(
            f"the target {target} is the folder you are in, "
            "or holds it: name a file or folder to make"
        )
    restore_replaced(target)
    refuse_special_files(target)
    for source in sources:
        for own in (source, *source.glob("*")):
            if _lies_in(target, own) or _lies_in(own, target):
                raise JllamaError(
                    f"{target} is {source} itself, or holds or lies in it: "
                    "choose another destination"
                )
    names = [entry.name for entry in target.glob("*")]  # a file has none
    _check_replaced(target, target.exists(), names, overwrite)
    if names and not _recognize(target):
        raise _is_no_checkpoint(target, names)


def _check_replaced(target: Place, exists: bool, names: Collection[str], overwrite: bool) -> None:
    """Raise an error unless a target that exists, and holds ``names``, may be replaced."""
    if exists and not overwrite:
        raise JllamaError(
            f"{target} exists: choose another destination, or set overwrite to replace it"
        )
    pattern = rf"\.?({bucket.FILES_OF_CHECKPOINTS})(\.partial)?"
    others = [name for name in names if not re.fullmatch(pattern, name)]
    if others:
        raise _is_no_checkpoint(target, others)


def _is_no_checkpoint(target: Place, names: Collection[str]) -> JllamaError:
    return JllamaError(
        f"{target} holds {', '.join(sorted(names)[:5])}, more or less "
        "than a checkpoint, and stays as it is: choose another destination"
    )
