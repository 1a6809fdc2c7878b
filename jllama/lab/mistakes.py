"""Known mistakes of programs that run Llamas, with what each does to a model and to a prompt."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import jllama.core.model
from jllama.core import JllamaError
from jllama.core.config import LLAMA_VALUES, LlamaConfig
from jllama.core.parameters import PARAMETERS, Params, layers_of
from jllama.lab.checkpoint import shown
from jllama.lab.mutations import (
    MUTATIONS,
    Mistake,
    Model,
    model_with,
    model_with_layer,
    replace_fields,
)
from jllama.lab.precisions import WEIGHTS, round_float
from jllama.lab.rows import Row
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import LinearScaling
from jllama.templates.messages import TEMPLATES, message_ids

_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_WITH_PARAMETERS = (
    "attention_bias",
    "qk_norm",
    "norm_placement",
    "num_experts",
    "expert_dim",
    "router_bias",
    "shared_expert",
    "dense_layers",
)
"""Fields that decide which parameters there are; ``MUTATIONS`` has what is made wrong of them."""
_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
VALUES: dict[str, Sequence[Any]] = {
    "rope_theta": (1e4, 1e5, 5e5, 1e6),
    "norm_eps": (1e-8, 1e-6, 1e-5, 1e-4),
}
"""Values of fields that are taken for those of the checkpoint, as other Llamas have them."""

_MADE_BY_SERVER: dict[str, Callable[[Row], bool]] = {
    "texts": lambda row: row.is_text,
    "chats": lambda row: bool(row.messages),
    "texts and chats": lambda row: row.is_text or bool(row.messages),
}


def _normalized_residual(layer: Any, x: Array, inputs: Any, cached: Any = None) -> tuple:
    """Add what a branch computes to its normalized input."""
    x = layer.normalize(x, "attn_norm")
    x = x + layer.residual(layer.attention(x, inputs)[0])
    x = layer.normalize(x, "mlp_norm")
    return x + layer.residual(layer.feed_forward_network(x, inputs.functions)), cached


def _without_final_norm() -> types.ModuleType:
    model = model_with(rms_norm=lambda x, scale, eps: x)
    model.Layer.normalize = jllama.core.model.Layer.normalize
    model.Layer.normalize_heads = jllama.core.model.Layer.normalize_heads
    return model


_WRONG_MODELS = {
    "GELU, not SiLU": model_with(silu_gate=lambda gate, up: jax.nn.gelu(gate, False) * up),
    "GELU by tanh, not SiLU": model_with(silu_gate=lambda gate, up: jax.nn.gelu(gate) * up),
    "residuals of normalized inputs": model_with_layer(_normalized_residual),
    "no final norm": _without_final_norm(),
}


def known_mistakes(model: LanguageModel, longest: int) -> list[Mistake]:
    """Return the mistakes that can be made with a model, on prompts of up to ``longest`` tokens."""
    config = model.config
    mistakes = [*_wrong_fields(config, longest), *_wrong_weights(config)]
    mistakes += [mistake for mistake in MUTATIONS if mistake.about and mistake.applies(config)]
    mistakes += [Mistake(about, model=model) for about, model in _WRONG_MODELS.items()]
    for distance, side, other in ((1, "far", "after"), (-1, "early", "before")):
        change = functools.partial(_move_decoded, distance)
        about = f"decoded tokens one slot too {side} in the cache"
        mistakes.append(Mistake(about, change=change))
        change = functools.partial(_shift, distance)
        mistakes.append(Mistake(f"the logits of the token {other} it", change=change))
    mistakes += [
        Mistake(
            f"a context of {size:,} tokens, and what is before them dropped",
            change=functools.partial(_cut, size),
            sees_ahead=True,
        )
        for size in _CONTEXTS
        if size < longest
    ]
    if model.tokenizer is not None:
        mistakes += _wrong_prompts(model)
    return mistakes


def _wrong_fields(config: LlamaConfig, longest: int) -> Iterator[Mistake]:
    """Yield each wrong value of a field of the configuration."""
    values: dict[str, Sequence[Any]] = dict(VALUES)
    for field, usual in LLAMA_VALUES.items():
        if field not in _WITH_PARAMETERS:
            values[field] = [usual]
    values["rope_theta"] = [*VALUES["rope_theta"], 2 * config.rope_theta]
    window = config.sliding_window
    windows = [size for size in _CONTEXTS if size < longest]
    values["sliding_window"] = [*windows, *([window - 1, window + 1, 0] if window else [])]
    linear = [LinearScaling(factor) for factor in _FACTORS]
    scaling: Any = config.rope_scaling
    values["rope_scaling"] = linear[:3]
    if scaling:
        values["rope_scaling"] = [None, LinearScaling(scaling.factor)]
        values["rope_scaling"] += [dataclasses.replace(scaling, factor=one) for one in _FACTORS]
        if hasattr(scaling, "original_max_seq_len"):
            values["rope_scaling"] += [
                dataclasses.replace(scaling, original_max_seq_len=size) for size in _CONTEXTS[3:]
            ]
    if config.router == "sigmoid":
        values["experts_per_token"] = []  # it must be one
    elif config.num_experts:
        count = config.experts_per_token
        values["experts_per_token"] = [count - 1 or 1, min(count + 1, config.num_experts)]
        values["normalize_expert_weights"] = [False, True]
    for field, candidates in values.items():
        right = getattr(config, field)
        for value in dict.fromkeys(candidates):
            changes = {field: value}
            if field == "sliding_window" and not value:
                changes["full_attention_layers"] = ()
            if value != right:
                yield Mistake(
                    _about(field, value, right), functools.partial(replace_fields, **changes)
                )


def _about(name: str, wrong: Any, right: Any) -> str:
    """Say which value is taken for which, of a scaling by its fields."""
    if dataclasses.is_dataclass(wrong) and type(wrong) is type(right):
        changed = [field for field, value in vars(wrong).items() if value != getattr(right, field)]
        return _about(f"{name}.{changed[0]}", vars(wrong)[changed[0]], getattr(right, changed[0]))
    return f"{name} {shown(wrong)} for {shown(right)}"


def _wrong_weights(config: LlamaConfig) -> Iterator[Mistake]:
    """Yield each way to round, or to take one tensor for another."""
    for name, misread in WEIGHTS.items():
        yield Mistake(f"weights in {name}", misread, precision=name)
    for dtype in (jnp.bfloat16, jnp.float16):
        about = f"weights of norms in {jnp.dtype(dtype).name}"
        yield Mistake(about, functools.partial(_round_norms, dtype))
    if not config.tie_embeddings:
        yield Mistake("the embedding for the output head", _tied)
    order = [*range(config.num_layers)]
    for index in order:
        for about, times in (("left out", 0), ("run twice", 2)):
            indices = order[:index] + times * [index] + order[index + 1 :]
            if indices:
                misread = functools.partial(_choose_layers, indices)
                yield Mistake(f"layer {index} {about}", misread)


def _choose_layers(indices: list[int], config: LlamaConfig, params: Params) -> Model:
    layers = {}
    for name, stack in params["layers"].items():
        owners = layers_of(PARAMETERS[f"layers/{name}"], config)
        places = [owners.index(index) for index in indices if index in owners]
        layers[name] = stack[places]
    changed: dict[str, Any] = {"num_layers": len(indices)}
    for field in ("no_rope_layers", "full_attention_layers", "dense_layers"):
        is_named = np.isin(indices, getattr(config, field))
        changed[field] = np.flatnonzero(is_named).tolist()
    return dataclasses.replace(config, **changed), params | {"layers": layers}


def _round_norms(dtype: Any, config: LlamaConfig, params: Params) -> Model:
    layers = {
        name: round_float(dtype, np.asarray(value)) if "norm" in name else value
        for name, value in params["layers"].items()
    }
    final_norm = round_float(dtype, np.asarray(params["final_norm"]))
    return config, params | {"layers": layers, "final_norm": final_norm}


def _tied(config: LlamaConfig, params: Params) -> Model:
    tied = {name: value for name, value in params.items() if name != "lm_head"}
    return dataclasses.replace(config, tie_embeddings=True), tied


def _move_decoded(distance: int, row: Row) -> Row:
    """Move the positions of generated tokens."""
    positions = np.arange(len(row.ids))
    positions[row.num_prompt :] += distance
    return row._replace(positions=tuple(positions.tolist()))


def _shift(distance: int, row: Row) -> Row:
    """Take the logits of other tokens of the row, in a circle."""
    places = tuple((place + distance) % len(row.ids) for place in row.places)
    return row._replace(places=places)


def _cut(size: int, row: Row) -> Row:
    """Keep the last tokens, if that keeps all places."""
    num_cut = max(len(row.ids) - size, 0)
    if not num_cut or min(row.places) < num_cut:
        return row
    return _move(row, row.ids[num_cut:])


def _move(row: Row, ids: Sequence[int]) -> Row:
    """Return a row with another beginning, whose places are counted from the end."""
    shift = len(ids) - len(row.ids)
    places = tuple(place + shift for place in row.places)
    return row._replace(ids=tuple(ids), places=places, num_prompt=row.num_prompt + shift)


def _wrong_prompts(model: LanguageModel) -> Iterator[Mistake]:
    """Yield what a program does to texts and conversations before the model has them."""
    bos_id = model.text_tokenizer.bos_id
    for about, had, has in (
        ("no BOS", 1, 0),
        ("BOS twice", 1, 2),
        ("BOS, which is not due,", 0, 1),
    ):
        for prompts, is_changed in _MADE_BY_SERVER.items():
            change = functools.partial(_change_bos, bos_id, had, has, is_changed)
            yield Mistake(f"{about} before {prompts}", change=change)
    templates = dict(TEMPLATES)
    if model.chat_template:
        yield Mistake(
            "a chat template that does not begin the answer",
            change=functools.partial(_render, model, model.chat_template, False),
        )
    templates["plain"] = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    for name, template in templates.items():
        if template != model.chat_template:
            yield Mistake(
                f"the chat template {name!r} for the model's own",
                change=functools.partial(_render, model, template, True),
            )


def _change_bos(
    bos_id: int, had: int, has: int, is_changed: Callable[[Row], bool], row: Row
) -> Row:
    """Let a prompt begin with ``has`` BOS tokens, where it had ``had``."""
    if not is_changed(row) or (row.ids[0] == bos_id) != had:
        return row
    return _move(row, (bos_id,) * has + row.ids[had:])


def _render(model: LanguageModel, template: str, begins_answer: bool, row: Row) -> Row:
    """Make the prompt with another template; one that does not take these messages changes none."""
    if not row.messages:
        return row
    try:
        ids = message_ids(model.text_tokenizer, template, row.messages, begins_answer)
    except JllamaError:
        return row
    return _move(row, ids)
