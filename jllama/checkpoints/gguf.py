"""GGUF, llama.cpp's format: metadata, tokenizer and tensors, quantized or not, in one file.

``gguf_file`` reads and writes the file itself; this module knows what the keys and tensors of a Llama mean. Source:
llama.cpp's ``llama-model.cpp`` and ``convert_hf_to_gguf.py``.
"""

import collections
import contextlib
import dataclasses
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType

from jllama.checkpoints.gguf_file import (
    MAGIC,
    OURS,
    PLAIN,
    TypedTensor,
    read_gguf_file,
    shortest,
    write_gguf_file,
)
from jllama.checkpoints.tensors import (
    Checkpoint,
    FileTensor,
    OnProgress,
    matched,
    reordered,
    same_bits,
)
from jllama.config import LlamaConfig
from jllama.errors import JllamaError, UsageError
from jllama.files import fault_of
from jllama.parameters import PARAMETERS, TensorSpec, tensor_specs
from jllama.rope_scaling import (
    ROPE_SCALINGS,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from jllama.tokenizers.gguf import from_gguf, to_gguf

ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"  # no parameter but what frequencies are divided by: llama.cpp's ``llama3`` scaling
STOP_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
CHAT_TEMPLATE, TOKENIZER, NO_TOKENIZER = (
    "tokenizer.chat_template",
    "tokenizer.ggml.model",
    "no_vocab",
)
_TOLERANCE = 1e-5  # of float32 divisors that were worked out in float32
_KINDS = {name: type(value) for name, value in vars(LlamaConfig()).items()}
Dtype = np.dtype[Any] | Literal["q8_0"] | None

_TYPES = {
    dtype: type_ for type_, dtype in PLAIN.items() if type_ != GGMLQuantizationType.F64
}  # llama.cpp's
_FIELDS = {
    "num_layers": "block_count",
    "embed_dim": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "mlp_dim": "feed_forward_length",
    "max_seq_len": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}  # the key of each field of ``LlamaConfig``

_UNSCALED = LinearScaling(1.0)
_DEFAULTS = {"num_kv_heads": 0, "head_dim": 0, "rope_theta": 10_000.0}

_SAME_SIZE = ("attention.value_length", "rope.dimension_count")  # as head_dim, in jllama
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "attention.sliding_window", "attention.scale"), (0,)
    ),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (0,)),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    **dict.fromkeys(
        ("attention.causal", "rope.scaling.attn_factor"), (1,)
    ),  # the latter has one with yarn alone
    "use_parallel_residual": (False,),
}  # keys of which only these values describe a model that jllama has

_UNUSED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_UNUSED |= {
    f"rope.scaling.{key}" for kind in ROPE_SCALINGS.values() for key in kind.gguf.values()
}  # of other types


def recognizes(path: Path) -> bool:
    """Tell whether this is a GGUF file, or a folder that holds exactly one."""
    if not (file := _only_file(path)).is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _only_file(path: Path) -> Path:
    files = list(path.glob("*.gguf"))  # of a file there are none
    return files[0] if len(files) == 1 else path


def read(path: Path) -> Checkpoint:
    """Open a Llama's GGUF file, or the folder that holds it.

    With any quantized matrix, everything is float32. Otherwise a tensor has its own dtype; a norm, which every GGUF
    file stores as float32, has the one 16-bit dtype of all the matrices if that holds its values exactly.
    """
    metadata, stored = read_gguf_file(file := _only_file(path))
    if (parts := metadata.get("split.count", 1)) != 1:
        raise JllamaError(
            f"{file} is one of {parts} parts of a model: join them with llama-gguf-split --merge"
        )
    if metadata.get("general.type") == "adapter":
        raise JllamaError(
            f"{file} is an adapter: give its base as the checkpoint, and it with --adapter"
        )
    if (architecture := metadata.get("general.architecture")) != ARCHITECTURE:
        raise JllamaError(
            f"{file} has architecture {reprlib.repr(architecture)}; jllama reads {ARCHITECTURE!r}"
        )
    with fault_of(f"{file} does not describe a model that jllama has"):
        config = _read_config(metadata, stored, file)
    stored.pop(ROPE_FREQS, None)
    tensors = _narrowed(matched(stored, config, "gguf", file))
    template = metadata.get(CHAT_TEMPLATE)
    if not isinstance(template, str | None):
        raise JllamaError(f"{file} has a {CHAT_TEMPLATE} that is no string")
    stops = {key: metadata[key] for key in STOP_KEYS if key in metadata}
    for key, token in stops.items():
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise JllamaError(
                f"{file} has {key} {reprlib.repr(token)}; it must be an id below {config.vocab_size}"
            )
    if TOKENIZER not in metadata:
        print(
            f"note: {file} has no {TOKENIZER}, so the model is without a tokenizer", file=sys.stderr
        )
    tokenizer = (
        from_gguf(metadata, str(file))
        if metadata.get(TOKENIZER) not in (None, NO_TOKENIZER, "none")
        else None
    )
    return Checkpoint(config, tensors, tokenizer, template, tuple(dict.fromkeys(stops.values())))


def _narrowed(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Give norms the one 16-bit dtype of the matrices where that changes no value: a 16-bit model comes back as is."""
    dtypes = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    if len(dtypes) > 1 or (dtype := dtypes.pop()).itemsize != 2:
        return dict(tensors)
    with np.errstate(over="ignore"):
        norms = {
            key: np.asarray(tensor).astype(dtype)
            for key, tensor in tensors.items()
            if len(tensor.shape) == 1
        }
    exact = {
        key: norm for key, norm in norms.items() if same_bits(norm.astype(np.float32), tensors[key])
    }
    return {**tensors, **exact}


def _read_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, FileTensor], source: Path
) -> LlamaConfig:
    prefix = f"{ARCHITECTURE}."
    fields = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }

    def take(name: str, kind: type[Any], default: Any = None) -> Any:
        value = fields.pop(name, default)
        if value is None:
            raise JllamaError(f"{source} lacks the key {prefix}{name}")
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise JllamaError(
                f"{source} has {prefix}{name} {reprlib.repr(value)}; it must be one {kind.__name__}"
            )
        return value

    embed, lm_head = (PARAMETERS[path].name("gguf") for path in ("embed", "lm_head"))
    if embed not in tensors:
        raise JllamaError(f"{source} lacks the tensor {embed}")
    values: dict[str, Any] = {
        name: take(key, _KINDS[name], _DEFAULTS.get(name)) for name, key in _FIELDS.items()
    }
    config = LlamaConfig(
        **values, vocab_size=tensors[embed].shape[0], tie_embeddings=lm_head not in tensors
    )
    for key in _SAME_SIZE:
        if (size := take(key, int, config.head_dim)) != config.head_dim:
            heads = f"heads of {config.head_dim} channels, the one size that jllama has"
            raise JllamaError(
                f"{source} has {prefix}{key} {size} but {heads} for queries, keys, values and RoPE"
            )
    scaling = _read_rope_scaling(take, config, metadata, tensors, source)
    for name, value in fields.items():
        if name not in _UNUSED and value not in _WITHOUT_EFFECT.get(name, ()):
            raise JllamaError(
                f"{source} has {prefix}{name} {reprlib.repr(value)}, which jllama does not support"
            )
    return dataclasses.replace(config, rope_scaling=scaling)


def _read_rope_scaling(
    take: Callable[..., Any],
    config: LlamaConfig,
    metadata: Mapping[str, Any],
    tensors: Any,
    source: Path,
) -> RopeScaling | None:
    """The scaling of the file's keys and of ``ROPE_FREQS``, or as our own writer noted it, where that agrees."""
    # What llama.cpp makes of its keys.
    key = f"{ARCHITECTURE}.rope.scaling."
    kinds = {name: kind for name, kind in ROPE_SCALINGS.items() if kind.gguf}
    name = take("rope.scaling.type", str, "linear")
    if name not in ("none", *kinds):
        raise JllamaError(
            f"{source} has {key}type {reprlib.repr(name)}; jllama knows none, {' and '.join(kinds)}"
        )
    kind = kinds.get(name, LinearScaling)
    defaults = vars(kind(1.0)) | {"original_max_seq_len": config.max_seq_len}
    default_of = {theirs: defaults[ours] for ours, theirs in kind.gguf.items()}
    taken = [
        take(f"rope.scaling.{key}", type(value), value) or value
        for key, value in default_of.items()
    ]
    scaling = kind(**dict(zip(kind.gguf, taken, strict=True))) if name in kinds else _UNSCALED
    usual = scaling.attention_factor
    # The converter puts the whole factor here, llama.cpp does not look: only where both agree is the meaning clear.
    whole = take("rope.scaling.yarn_attn_factor", float, usual)
    if not math.isclose(whole, usual, rel_tol=_TOLERANCE):
        raise JllamaError(
            f"{source} has {key}yarn_attn_factor {whole}, which llama.cpp ignores: it must be {usual}"
        )
    if isinstance(scaling, YarnScaling):
        scaling = dataclasses.replace(
            scaling, attention_factor=take("rope.scaling.attn_factor", float, 1.0) * usual
        )
    # What llama.cpp divides frequencies by, whatever its keys say.
    half = config.head_dim // 2
    stored = tensors.get(ROPE_FREQS, np.ones(half, np.float32))
    if stored.shape != (half,) or stored.dtype != np.float32:
        what = f"{stored.dtype.name}{list(stored.shape)}"
        raise JllamaError(f"{source} has {ROPE_FREQS} as {what}, expected float32{[half]}")
    divisors = np.asarray(stored[0:half], np.float64)
    candidates = [scaling]
    noted = {
        name.removeprefix(OURS): value for name, value in metadata.items() if name.startswith(OURS)
    }
    with contextlib.suppress(UsageError):
        if "factor" in noted:
            candidates = [RopeScaling.from_fields({"type": "llama3"} | noted)]
        else:
            candidates.append(Llama3Scaling(shortest(float(divisors.max()))))
    expected = [*_frequencies(config, scaling), scaling.attention_factor]
    for candidate in candidates:
        actual = [*_frequencies(config, candidate) * divisors, candidate.attention_factor]
        if np.allclose(actual, expected, rtol=_TOLERANCE, atol=0):
            return None if candidate == _UNSCALED else candidate
    how = f"by {key}type {name!r} and the divisors in {ROPE_FREQS}, as no type of jllama's does"
    raise JllamaError(
        f"{source} scales rotary frequencies, {how}: convert the model again, from another format"
    )


def _frequencies(config: LlamaConfig, scaling: RopeScaling) -> np.ndarray:
    return np.array(scaling.frequencies(config.head_dim, config.rope_theta, config.max_seq_len))


def write(checkpoint: Checkpoint, target: Path, dtype: Dtype, on_progress: OnProgress) -> None:
    """Write a GGUF file (version 3) that llama.cpp runs, tokenizer and chat template included.

    Norms are always float32, as llama.cpp demands. With ``q8_0``, a matrix whose rows are no multiple of 32 long is
    float16, as llama.cpp's own converter has it.
    """
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    rope_keys, divisors = _rope_scaling_to_write(config)
    tensors: list[TypedTensor] = []
    for spec in tensor_specs(config):
        tensor = reordered(spec, checkpoint.tensors[spec.key], config, to_half_split=False)
        tensors.append((spec.name("gguf"), tensor, _type_to_write(spec, tensor, dtype)))
    matrix_types = collections.Counter(
        type_.name for _, tensor, type_ in tensors if len(tensor.shape) > 1
    )
    if divisors is not None:
        tensors.append((ROPE_FREQS, divisors.astype(np.float32), GGMLQuantizationType.F32))
    main_type = matrix_types.most_common(1)[0][0]
    file_type = LlamaFileType[f"{'ALL' if main_type == 'F32' else 'MOSTLY'}_{main_type}"]
    fields = {key: _KINDS[name](getattr(config, name)) for name, key in _FIELDS.items()}
    fields |= {"vocab_size": config.vocab_size} | dict.fromkeys(_SAME_SIZE, config.head_dim)
    metadata: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        "general.name": "Llama",
        "general.quantization_version": GGML_QUANT_VERSION,
        "general.file_type": int(file_type),
        **{f"{ARCHITECTURE}.{key}": value for key, value in fields.items()},
        **rope_keys,
        **(to_gguf(tokenizer, config.vocab_size) if tokenizer else {TOKENIZER: NO_TOKENIZER}),
    }
    if checkpoint.chat_template is not None:
        metadata[CHAT_TEMPLATE] = checkpoint.chat_template
    metadata |= _stop_ids_to_write(checkpoint, metadata.get("tokenizer.ggml.tokens", ()))
    write_gguf_file(target, metadata, tensors, on_progress)


def _type_to_write(spec: TensorSpec, tensor: FileTensor, dtype: Dtype) -> GGMLQuantizationType:
    if dtype == "q8_0":
        type_ = GGMLQuantizationType.F16 if spec.shape[-1] % 32 else GGMLQuantizationType.Q8_0
    elif (type_ := _TYPES.get(np.dtype(dtype or tensor.dtype))) is None:
        what = f"{np.dtype(dtype or tensor.dtype).name} for {spec.name('gguf')}"
        raise JllamaError(f"llama.cpp has no {what}: choose float32, float16, bfloat16 or q8_0")
    return type_ if spec.parameter.role == "matrix" else GGMLQuantizationType.F32


def _stop_ids_to_write(checkpoint: Checkpoint, tokens: Sequence[str]) -> dict[str, Any]:
    """EOS is the tokenizer's; of the others, ``<|eom_id|>`` ends a message and any other one a turn."""
    first = [checkpoint.tokenizer.eos_id] if checkpoint.tokenizer else []
    stops = list(dict.fromkeys([*first, *checkpoint.stop_ids]))
    if len(stops) > len(STOP_KEYS):
        raise JllamaError(
            f"GGUF has 3 keys for tokens that end an answer, and this model has {len(stops)}: {stops}"
        )
    keys: dict[str, Any] = {}
    for token in stops:
        is_eom = bool(keys) and token < len(tokens) and tokens[token] == "<|eom_id|>"
        keys[next(key for key in (STOP_KEYS[::-1] if is_eom else STOP_KEYS) if key not in keys)] = (
            token
        )
    return keys


def _rope_scaling_to_write(config: LlamaConfig) -> tuple[dict[str, Any], np.ndarray | None]:
    """The keys of a scaling, and what to divide frequencies by if llama.cpp has no keys for it."""
    scaling, key = config.rope_scaling, f"{ARCHITECTURE}.rope.scaling."
    if scaling is None:
        return {}, None
    keys: dict[str, Any] = {
        OURS + name: value for name, value in dataclasses.asdict(scaling).items()
    }
    if not scaling.gguf and not scaling.grows and scaling.attention_factor == 1:
        return keys, _frequencies(config, _UNSCALED) / _frequencies(config, scaling)
    if not scaling.gguf:
        raise JllamaError(
            f"GGUF has no RoPE scaling of type {scaling.type}: convert to another format (hf, orbax)"
        )
    keys |= {key + theirs: getattr(scaling, ours) for ours, theirs in scaling.gguf.items()}
    keys |= {f"{key}type": scaling.type, f"{key}factor": float(scaling.factor)}
    if isinstance(scaling, YarnScaling):
        betas, usual = (
            f"{each.beta_fast:g} and {each.beta_slow:g}" for each in (scaling, YarnScaling)
        )
        if betas != usual:
            raise JllamaError(
                f"llama.cpp takes yarn's beta_fast and beta_slow to be {usual}, this model has {betas}"
            )
        if (share := scaling.attention_factor / YarnScaling(scaling.factor).attention_factor) != 1:
            keys[f"{key}attn_factor"] = shortest(share)
    return keys, None
