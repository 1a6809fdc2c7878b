"""GGUF, llama.cpp's format: metadata, tokenizer and tensors, quantized or not, in one file.

``gguf_file`` reads and writes the file; this module knows the keys and tensors of a Llama and of
related families (``families``). Source: llama.cpp's ``src/models`` and ``conversion``.
"""

import collections
import dataclasses
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType

from jllama.core import JllamaError, UsageError
from jllama.core.config import LLAMA_VALUES, ROPE_SCALINGS, LlamaConfig, RopeScaling
from jllama.core.parameters import PARAMETERS, layers_of, shape_of
from jllama.formats.families import (
    FAMILIES,
    GGUF_FAMILIES,
    MULTIPLIERS,
    Family,
    family_of,
    multipliers,
)
from jllama.formats.gguf_file import MAGIC, OURS, PLAIN, read_gguf_file, shortest, write_gguf_file
from jllama.formats.llama4 import LLAMA4, options_of_llama_cpp
from jllama.formats.tensors import (
    Checkpoint,
    FileTensor,
    OnProgress,
    TensorSpec,
    have_same_bits,
    match_tensors,
    tensors_to_write,
)
from jllama.models.presets import every_fourth
from jllama.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from jllama.system.files import errors_as, refuse_pointer
from jllama.tokenizers.gguf import from_gguf, to_gguf

# llama.cpp divides frequencies by this tensor, which is not a parameter: its ``llama3`` scaling.
ROPE_FREQS = "rope_freqs.weight"
STOP_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
CHAT_TEMPLATE = "tokenizer.chat_template"
TOKENIZER = "tokenizer.ggml.model"
NO_TOKENIZER = "no_vocab"
_TOLERANCE = 1e-5  # of float32 divisors that were computed in float32
_KINDS = {name: type(value) for name, value in vars(LlamaConfig()).items()}
Dtype = np.dtype | str | None  # a string is of ``QUANTIZED``
QUANTIZED = {
    name.lower(): GGMLQuantizationType[name] for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
}
"""The types in which matrices are written, besides floats."""

# llama.cpp's type for each dtype; it has no float64.
_TYPES = {dtype: type_ for type_, dtype in PLAIN.items() if type_ != GGMLQuantizationType.F64}
# The key of each field of ``LlamaConfig``.
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
}
_DEFAULTS = {"num_kv_heads": 0, "head_dim": 0, "rope_theta": 10_000.0}
_UNSCALED = LinearScaling(1.0)
_WINDOW = "attention.sliding_window"
_WINDOW_LAYERS = "attention.sliding_window_pattern"
_VALUE_SIZE = "attention.value_length"
_ROTARY_SIZE = "rope.dimension_count"
_EXPERT_STEP = "interleave_moe_layer_step"

# Keys that may only have these values, which have no effect on a Llama.
_WITHOUT_EFFECT = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.scale": (0,),
    "attention.causal": (1,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.attn_factor": (1,),  # it has an effect for yarn, which takes the key
    "rope.scale_linear": (1,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
}
# Keys that may have any value, among them those of other types of scaling.
_UNUSED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_UNUSED |= {f"rope.scaling.{key}" for kind in ROPE_SCALINGS.values() for key in kind.gguf.values()}


def recognizes(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder that holds exactly one."""
    file = _find_file(path)
    if not file.is_file():
        return False
    refuse_pointer(file)
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def _find_file(path: Path) -> Path:
    """Return the only GGUF file of a folder, else the path itself."""
    files = list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else path


def read(path: Path) -> Checkpoint:
    """Open a Llama's GGUF file, or the folder that holds it.

    If any matrix is quantized, all tensors are float32. Otherwise each has its own dtype, except
    norms, which every GGUF file stores as float32: they get the 16-bit dtype of the matrices if all
    have the same one and it holds the norms exactly.
    """
    # 1) Read the file, and check that it is a whole model of a known family.
    file = _find_file(path)
    metadata, stored = read_gguf_file(file)
    num_parts = metadata.get("split.count", 1)
    if num_parts != 1:
        raise JllamaError(
            f"{file} is one of {num_parts} parts of a model: "
            "join them with llama-gguf-split --merge"
        )
    if metadata.get("general.type") == "adapter":
        raise JllamaError(
            f"{file} is an adapter: give its base as the checkpoint, and the adapter with --adapter"
        )
    architecture = str(metadata.get("general.architecture"))
    if architecture not in GGUF_FAMILIES:
        raise JllamaError(
            f"{file} has architecture {reprlib.repr(architecture)}; "
            f"jllama reads {', '.join(GGUF_FAMILIES)}"
        )

    # 2) Read the configuration, and match the tensors with it.
    family = GGUF_FAMILIES[architecture]
    if architecture == "llama" and metadata.get("llama.expert_count"):
        family = FAMILIES["mixtral"]
    with errors_as(f"{file} does not describe a model that jllama has"):
        config = _read_config(metadata, family, stored, file)
    stored.pop(ROPE_FREQS, None)
    matched = match_tensors(
        stored,
        config,
        "gguf",
        file,
        is_fused=family.is_fused,
        is_interleaved="gguf" in family.interleaved,
    )
    tensors = _narrow_norms(matched)

    # 3) Read the chat template, the stop ids and the tokenizer.
    template = metadata.get(CHAT_TEMPLATE)
    if not isinstance(template, str | None):
        raise JllamaError(f"{file} has a {CHAT_TEMPLATE} that is not a string")
    stops = {key: metadata[key] for key in STOP_KEYS if key in metadata}
    for key, token in stops.items():
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise JllamaError(
                f"{file} has {key} {reprlib.repr(token)}; "
                f"it must be an id below {config.vocab_size}"
            )
    if TOKENIZER not in metadata:
        print(f"note: {file} has no {TOKENIZER}, so the model has no tokenizer", file=sys.stderr)
    tokenizer = None
    if metadata.get(TOKENIZER) not in (None, NO_TOKENIZER, "none"):
        tokenizer = from_gguf(metadata, str(file))
    return Checkpoint(config, tensors, tokenizer, template, tuple(dict.fromkeys(stops.values())))


def _narrow_norms(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return norms and routers in the 16-bit dtype of all other matrices, if no value changes.

    A 16-bit model that was converted to GGUF gets its own dtype back.
    """
    small = [key for key in tensors if len(tensors[key].shape) == 1 or key.endswith("/router")]
    dtypes = {tensor.dtype for key, tensor in tensors.items() if key not in small}
    dtype = dtypes.pop()
    narrowed = dict(tensors)
    if dtypes or dtype.itemsize != 2:
        return narrowed
    for key in small:
        tensor = tensors[key]
        with np.errstate(over="ignore"):
            narrow = np.asarray(tensor[0 : tensor.shape[0]]).astype(dtype)
        if have_same_bits(narrow.astype(np.float32), tensor):
            narrowed[key] = narrow
    return narrowed


class _Keys:
    """The keys of a model in a file's metadata; each is taken once, and the rest is refused."""

    def __init__(self, metadata: Mapping[str, Any], family: Family, source: Path) -> None:
        self.source = source
        self.prefix = f"{family.gguf}."
        self.rest = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }

    def take(self, name: str, kind: type[Any], default: Any = None) -> Any:
        """Remove a key and return its value or the default; ``JllamaError`` unless a ``kind``."""
        value = self.rest.pop(name, default)
        is_uniform = isinstance(value, list) and value == value[:1] * len(value) != []
        value = value[0] if is_uniform else value  # the same for each layer
        if kind is float and type(value) is int:
            value = float(value)
        if value is None:
            raise JllamaError(f"{self.source} lacks the key {self.prefix}{name}")
        # The second half is only asked of a float.
        if type(value) is not kind or (kind is float and not math.isfinite(value)):  # pyright: ignore[reportArgumentType]
            raise JllamaError(
                f"{self.source} has {self.prefix}{name} {reprlib.repr(value)}; "
                f"it must be one {kind.__name__}"
            )
        return value


def _read_config(
    metadata: Mapping[str, Any], family: Family, tensors: Mapping[str, FileTensor], source: Path
) -> LlamaConfig:
    """Return the architecture that a file describes; ``JllamaError`` if it has an unknown key."""
    keys = _Keys(metadata, family, source)
    embed = PARAMETERS["embed"].name("gguf")
    if embed not in tensors:
        raise JllamaError(f"{source} lacks the tensor {embed}")

    # 1) The sizes, which every file has.
    values: dict[str, Any] = {
        name: keys.take(key, _KINDS[name], _DEFAULTS.get(name)) for name, key in _FIELDS.items()
    }
    is_tied = PARAMETERS["lm_head"].name("gguf") not in tensors
    values |= {"vocab_size": tensors[embed].shape[0], "tie_embeddings": is_tied}
    head_dim = LlamaConfig(**values).head_dim
    value_size = keys.take(_VALUE_SIZE, int, head_dim)
    rotary_size = keys.take(_ROTARY_SIZE, int, head_dim)
    if "partial_rotary_factor" in family.optional:
        values["partial_rotary_factor"] = rotary_size / head_dim
        rotary_size = head_dim
    for key, size in {_VALUE_SIZE: value_size, _ROTARY_SIZE: rotary_size}.items():
        if size != head_dim:
            raise JllamaError(
                f"{source} has {keys.prefix}{key} {size} but heads of {head_dim} channels; "
                "jllama has one size for queries, keys, values and RoPE"
            )

    # 2) The options of a family.
    values |= family.fixed
    for name, key in MULTIPLIERS.items():
        if name in family.optional:
            values[name] = keys.take(key, float, 0.0) or LLAMA_VALUES[name]
    if "no_rope_layers" in family.optional:
        values["no_rope_layers"] = every_fourth(values["num_layers"])
    if "sliding_window" in family.optional:
        values |= _read_windows(keys, family, values["num_layers"])
    if "rope_scaling_layers" in family.optional:
        values["rope_scaling_layers"] = "full_attention"
    if family.experts:
        values |= {
            "num_experts": keys.take("expert_count", int),
            "experts_per_token": keys.take("expert_used_count", int),
            "expert_dim": keys.take(
                "expert_feed_forward_length",
                int,
                values["mlp_dim"] if family.has_one_width else None,
            ),
            "normalize_expert_weights": family.normalizes_in_gguf,
        }
    if family.model_type == LLAMA4:
        step = max(keys.take(_EXPERT_STEP, int, 1), 1)
        values |= options_of_llama_cpp(values["num_layers"], values["num_experts"], step)
    config = LlamaConfig(**values)

    # 3) The scaling, and keys that jllama does not know.
    scaling = _find_rope_scaling(keys, config, metadata, tensors)
    for name, value in keys.rest.items():
        if name not in _UNUSED and value not in _WITHOUT_EFFECT.get(name, ()):
            raise JllamaError(
                f"{source} has {keys.prefix}{name} {reprlib.repr(value)}, "
                "which jllama does not support"
            )
    # The layers that are scaled are those of the family, which a model without scaling forgets.
    return LlamaConfig(**values, rope_scaling=scaling)


def _read_windows(keys: _Keys, family: Family, num_layers: int) -> dict[str, Any]:
    """Return the sliding window and the layers without it; nothing if there is no window."""
    window = keys.take(_WINDOW, int, 0)
    full = [*every_fourth(num_layers)] if family.gguf == "olmo2" else []
    has_window = keys.rest.pop(_WINDOW_LAYERS, None)
    if has_window is not None:
        if not isinstance(has_window, list) or len(has_window) != num_layers:
            raise JllamaError(
                f"{keys.source} has {keys.prefix}{_WINDOW_LAYERS} {reprlib.repr(has_window)}; "
                f"it must be true or false for each of the {num_layers} layers"
            )
        full = [layer for layer in range(num_layers) if not has_window[layer]]
    if not window or len(full) == num_layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": full}


def _find_rope_scaling(
    keys: _Keys,
    config: LlamaConfig,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, FileTensor],
) -> RopeScaling | None:
    """Find the scaling that has the file's frequencies; ``JllamaError`` if jllama has none.

    The file's frequencies are those of its keys, divided by ``ROPE_FREQS``: llama.cpp divides by
    them whatever the keys are.
    """
    scaling = _scaling_of_keys(keys, config)
    half = config.rotary_dim // 2
    stored = tensors.get(ROPE_FREQS, np.ones(half, np.float32))
    if stored.shape != (half,) or stored.dtype != np.float32:
        raise JllamaError(
            f"{keys.source} has {ROPE_FREQS} as "
            f"{stored.dtype.name}{list(stored.shape)}, expected float32{[half]}"
        )
    divisors = np.asarray(stored[0:half], np.float64)
    # Try each candidate: times the divisors, its frequencies must be those of the keys.
    expected = [*_frequencies(config, scaling), scaling.attention_factor]
    for candidate in _possible_scalings(scaling, divisors, metadata):
        actual = [*_frequencies(config, candidate) * divisors, candidate.attention_factor]
        if np.allclose(actual, expected, rtol=_TOLERANCE, atol=0):
            return None if candidate == _UNSCALED else candidate
    key = f"{keys.prefix}rope.scaling.type"
    raise JllamaError(
        f"{keys.source} scales rotary frequencies by {key} {metadata.get(key, 'linear')!r} "
        f"and the divisors in {ROPE_FREQS}, which is no type that jllama has: "
        "convert the model again, from another format"
    )


def _scaling_of_keys(keys: _Keys, config: LlamaConfig) -> RopeScaling:
    """Return the scaling that llama.cpp applies for the keys."""
    kinds = {name: kind for name, kind in ROPE_SCALINGS.items() if kind.gguf}
    name = keys.take("rope.scaling.type", str, "linear")
    if name not in ("none", *kinds):
        raise JllamaError(
            f"{keys.source} has {keys.prefix}rope.scaling.type {reprlib.repr(name)}; "
            f"jllama knows none, {' and '.join(kinds)}"
        )
    # The keys of "none" are those of linear scaling, without effect. A value of 0 is the default.
    kind = kinds.get(name, LinearScaling)
    defaults = vars(kind(1.0)) | {"original_max_seq_len": config.max_seq_len}
    values = {}
    for field, key in kind.gguf.items():
        default = defaults[field]
        values[field] = keys.take(f"rope.scaling.{key}", type(default), default) or default
    scaling = _UNSCALED if name == "none" else kind(**values)
    # llama.cpp's converter writes the attention factor here, and llama.cpp ignores it: the meaning
    # is clear only if it is the one that llama.cpp computes.
    usual = scaling.attention_factor
    factor = keys.take("rope.scaling.yarn_attn_factor", float, usual)
    if not math.isclose(factor, usual, rel_tol=_TOLERANCE):
        raise JllamaError(
            f"{keys.source} has {keys.prefix}rope.scaling.yarn_attn_factor "
            f"{factor}, which llama.cpp ignores: it must be {usual}"
        )
    if isinstance(scaling, YarnScaling):
        factor = keys.take("rope.scaling.attn_factor", float, 1.0) * usual
        scaling = dataclasses.replace(scaling, attention_factor=factor)
    return scaling


def _possible_scalings(
    scaling: RopeScaling, divisors: np.ndarray, metadata: Mapping[str, Any]
) -> list[RopeScaling]:
    """Return the scalings that a file may mean, in the order in which to try them.

    ``scaling`` is that of the keys, right if all divisors are 1. jllama's own files name their
    scaling. In other files divisors are those of llama3 scaling, whose factor is the largest of
    them.
    """
    own = {key.removeprefix(OURS): value for key, value in metadata.items() if key.startswith(OURS)}
    try:
        if "factor" in own:
            return [RopeScaling.from_fields({"type": "llama3"} | own)]
        factor = shortest(float(divisors.max()))
        return [scaling, Llama3Scaling(factor), Llama3Scaling(factor, 1.0, 1.0)]
    except UsageError:  # they do not make a scaling
        return [scaling]


def _frequencies(config: LlamaConfig, scaling: RopeScaling) -> np.ndarray:
    return np.array(scaling.frequencies(config.rotary_dim, config.rope_theta, config.max_seq_len))


def write(checkpoint: Checkpoint, target: Path, dtype: Dtype, on_progress: OnProgress) -> None:
    """Write a GGUF file (version 3) that llama.cpp runs, with tokenizer and chat template.

    Norms are always float32, as llama.cpp requires. With a type of ``QUANTIZED``, a matrix whose
    rows are not a multiple of 32 long is float16, as in llama.cpp's own converter.
    """
    # 1) Find the family, and what llama.cpp needs for the RoPE scaling.
    config = checkpoint.config
    family = family_of(config)
    prefix = f"{family.gguf}."
    tokenizer = checkpoint.tokenizer
    rope_keys, divisors = _rope_scaling_to_write(config, prefix)

    # 2) Collect the tensors, each with the type to write it in.
    named = tensors_to_write(
        checkpoint, "gguf", is_fused=family.is_fused, is_interleaved="gguf" in family.interleaved
    )
    tensors = []
    shapes = {}
    for name, spec, tensor in named:
        tensors.append((name, tensor, _type_to_write(spec, tensor, dtype)))
        if "experts" in spec.parameter.axes:
            shapes[name] = shape_of(spec.parameter, config)[1:]
    types = collections.Counter(type_.name for _, tensor, type_ in tensors if len(tensor.shape) > 1)
    if divisors is not None:
        tensors.append((ROPE_FREQS, divisors.astype(np.float32), GGMLQuantizationType.F32))

    # 3) Describe the model, its tokenizer and its chat template, and write the file.
    main_type = types.most_common(1)[0][0]
    file_type = LlamaFileType[f"{'ALL' if main_type == 'F32' else 'MOSTLY'}_{main_type}"]
    fields = {key: _KINDS[name](getattr(config, name)) for name, key in _FIELDS.items()}
    fields["vocab_size"] = config.vocab_size
    fields |= {_VALUE_SIZE: config.head_dim, _ROTARY_SIZE: config.rotary_dim}
    fields |= _options_to_write(config, family)
    metadata: dict[str, Any] = {
        "general.architecture": family.gguf,
        "general.name": "Llama",
        "general.quantization_version": GGML_QUANT_VERSION,
        "general.file_type": int(file_type),
        **{prefix + key: value for key, value in fields.items()},
        **rope_keys,
        **(to_gguf(tokenizer, config.vocab_size) if tokenizer else {TOKENIZER: NO_TOKENIZER}),
    }
    if checkpoint.chat_template is not None:
        metadata[CHAT_TEMPLATE] = checkpoint.chat_template
    metadata |= _stop_ids_to_write(checkpoint, metadata.get("tokenizer.ggml.tokens", ()))
    write_gguf_file(target, metadata, tensors, on_progress, shapes)


def _options_to_write(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Return the keys that a Llama does not have, without the prefix.

    Raises:
        JllamaError: llama.cpp runs such a model with other layers.
    """
    factors = multipliers(config, family)
    keys: dict[str, Any] = {MULTIPLIERS[name]: value for name, value in factors.items()}
    layers_of_llama_cpp = every_fourth(config.num_layers)
    if "no_rope_layers" in family.optional and config.no_rope_layers != layers_of_llama_cpp:
        raise JllamaError(
            f"llama.cpp's {family.gguf} has no rotation in the layers {layers_of_llama_cpp}, "
            f"this model in {config.no_rope_layers}: choose another format"
        )
    if config.num_experts:
        if config.normalize_expert_weights != family.normalizes_in_gguf:
            raise JllamaError(
                f"llama.cpp's {family.gguf} has normalize_expert_weights "
                f"{family.normalizes_in_gguf}: choose another format"
            )
        keys["expert_count"] = config.num_experts
        keys["expert_used_count"] = config.experts_per_token
        keys["expert_feed_forward_length"] = config.expert_dim
        if family.has_one_width:
            keys[_FIELDS["mlp_dim"]] = config.expert_dim
    if family.model_type == LLAMA4:
        step = layers_of(PARAMETERS["layers/router"], config)[0] + 1
        keys[_EXPERT_STEP] = step
        fixed = options_of_llama_cpp(config.num_layers, config.num_experts, step)
        for name, value in fixed.items():
            if getattr(config, name) != value:
                raise JllamaError(
                    f"llama.cpp's llama4 has {name} {reprlib.repr(value)} for "
                    f"{config.num_experts} experts, this model "
                    f"{reprlib.repr(getattr(config, name))}: choose another format"
                )
    if not config.sliding_window:
        return keys
    keys[_WINDOW] = config.sliding_window
    keys[_WINDOW_LAYERS] = [kind.window is not None for kind in config.layer_kinds]
    if family.gguf != "olmo2" and config.sliding_window < config.max_seq_len:
        print(
            f"note: llama.cpp ignores the sliding window of {family.gguf}: its answers differ for "
            f"texts of over {config.sliding_window} tokens",
            file=sys.stderr,
        )
    return keys


def _type_to_write(spec: TensorSpec, tensor: FileTensor, dtype: Dtype) -> GGMLQuantizationType:
    """Return the type to write a tensor in; ``JllamaError`` if llama.cpp lacks its dtype."""
    if isinstance(dtype, str):
        is_whole = spec.shape[-1] % 32 == 0
        type_ = QUANTIZED[dtype] if is_whole else GGMLQuantizationType.F16
    else:
        number = np.dtype(dtype or tensor.dtype)
        if number not in _TYPES:
            raise JllamaError(
                f"llama.cpp has no {number.name} for {spec.name('gguf')}: "
                f"choose float32, float16, bfloat16, {', '.join(QUANTIZED)}"
            )
        type_ = _TYPES[number]
    is_matrix = spec.parameter.role == "matrix" and spec.parameter.rounds
    return type_ if is_matrix else GGMLQuantizationType.F32


def _stop_ids_to_write(checkpoint: Checkpoint, tokens: Sequence[str]) -> dict[str, Any]:
    """Return the keys of stop tokens: the tokenizer's EOS first; ``<|eom_id|>`` ends a message.

    Any other token ends a turn.
    """
    first = [checkpoint.tokenizer.eos_id] if checkpoint.tokenizer else []
    stops = list(dict.fromkeys([*first, *checkpoint.stop_ids]))
    if len(stops) > len(STOP_KEYS):
        raise JllamaError(
            "GGUF has 3 keys for tokens that end an answer, "
            f"and this model has {len(stops)}: {stops}"
        )
    keys = {}
    for token in stops:
        free = [key for key in STOP_KEYS if key not in keys]
        is_eom = keys and token < len(tokens) and tokens[token] == "<|eom_id|>"
        keys[free[-1] if is_eom else free[0]] = token
    return keys


def _rope_scaling_to_write(
    config: LlamaConfig, prefix: str
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the keys of a scaling, and divisors of frequencies if llama.cpp has no keys for it."""
    scaling = config.rope_scaling
    if scaling is None:
        return {}, None

    # jllama's own keys, which hold every field of the scaling.
    keys: dict[str, Any] = {
        OURS + name: value for name, value in dataclasses.asdict(scaling).items()
    }

    # If llama.cpp has no keys for the scaling, divisors of the frequencies may do the same.
    if not scaling.gguf:
        if not scaling.grows and scaling.attention_factor == 1:
            return keys, _frequencies(config, _UNSCALED) / _frequencies(config, scaling)
        raise JllamaError(
            f"GGUF has no RoPE scaling of type {scaling.type}: "
            "convert to another format (hf, orbax)"
        )

    # llama.cpp's keys.
    prefix += "rope.scaling."
    for field, key in scaling.gguf.items():
        keys[prefix + key] = getattr(scaling, field)
    keys[f"{prefix}type"] = scaling.type
    keys[f"{prefix}factor"] = float(scaling.factor)
    if isinstance(scaling, YarnScaling):
        betas = f"{scaling.beta_fast:g} and {scaling.beta_slow:g}"
        usual = f"{YarnScaling.beta_fast:g} and {YarnScaling.beta_slow:g}"
        if betas != usual:
            raise JllamaError(
                "llama.cpp expects yarn's beta_fast and "
                f"beta_slow to be {usual}, this model has {betas}"
            )
        share = scaling.attention_factor / YarnScaling(scaling.factor).attention_factor
        if share != 1:
            keys[f"{prefix}attn_factor"] = shortest(share)
    return keys, None
