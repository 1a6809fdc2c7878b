"""Completing a whole file of prompts: JSON lines in, JSON lines out, and nothing lost if it is interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from jllama.errors import JllamaError, UsageError
from jllama.files import write_text_whole
from jllama.generation.sampling_arrays import SamplingParams
from jllama.generation.text import Completion, Prompt, generate_batches, request_of
from jllama.language_model import LanguageModel

_OF_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
OWN_SETTINGS = (*_OF_SAMPLING, "max_new_tokens", "stop", "stop_ids")
"""What a line may set for itself."""


def _all_are(values: Any, *types: type) -> bool:
    """Whether it is a list of values that JSON gave these types (where true and false are no numbers)."""
    return isinstance(values, list) and all(type(value) in types for value in values)


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and all(map(str.isdecimal, value)) and _all_are([*value.values()], int, float)


_IDS = ("a list of token ids", lambda value: _all_are(value, int))
_WHOLE_NUMBER = ("a whole number", lambda value: _all_are([value], int))
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "top_k": _WHOLE_NUMBER,
    "seed": _WHOLE_NUMBER,
    "max_new_tokens": _WHOLE_NUMBER,
    "stop_ids": _IDS,
    "banned_ids": _IDS,
    "stop": ("a string or a list of strings", lambda value: isinstance(value, str) or _all_are(value, str)),
    "logit_bias": ("an object of numbers by token id", _are_biases),
}
"""What a line must have there, in words and as a test; all others are numbers."""

_WANTED = 'it must be an object with a "prompt", such as {"prompt": "Once"}'


def complete_file(
    model: LanguageModel,
    path: Path,
    output: Path,
    default: Prompt,
    record: Callable[[Prompt, Completion], dict[str, Any]],
    *,
    samples: int = 1,
    batch_size: int = 8,
    speculate: int = 0,
    options: Mapping[str, Any] | None = None,
    report: Callable[[int, int, int], object] = lambda done, total, tokens: None,
) -> list[str]:
    """Complete every line of a ``.jsonl`` file.

    Each line is an object with a ``prompt``; it may set what ``OWN_SETTINGS`` lists, and whatever else it holds is
    copied to its results. They are gathered in ``<output>.unfinished``, which a second call goes on from, and appear at
    ``output``, in the order of the lines, when all are done.

    Args:
        model: what ``jllama.load`` gives.
        path: the prompts.
        output: the file to make.
        default: the settings where a line has none of its own; its content is not used.
        record: what to write of a completion, beside the line's own fields and its number.
        samples: completions of each line; the n-th has the line's seed plus n.
        batch_size: how many to make at once.
        speculate: as in ``generate``.
        options: what else the results depend on, such as what ``record`` writes: by name, as JSON can hold it.
        report: called with the completions done, those in all, and the tokens just made.

    Returns:
        What was wrong with the lines that could not be completed, one sentence each; their results say so, too.

    Raises:
        JllamaError: the file cannot be read, ``output`` exists, or its ``.unfinished`` is of other prompts,
            weights or options.
    """
    if output.exists():
        raise JllamaError(f"{output} exists already: remove it, or give another --output")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JllamaError(f"{path} cannot be read: {error.strerror}") from error
    unfinished = output.with_name(output.name + ".unfinished")
    identity = {
        "prompts": hashlib.sha256(content).hexdigest(),
        "weights": weights_fingerprint(model),
        "configuration": repr(model.config),
        "tokenizer": model.text_tokenizer.fingerprint(),
        "the model's stop ids": model.stop_ids,
        **{name: getattr(default, name) for name in ("max_new_tokens", "stop", "stop_ids")},
        "n": samples,
        "speculate": speculate,
    }
    identity = json.loads(json.dumps(identity | dataclasses.asdict(default.sampling) | dict(options or {})))
    done = _read_unfinished(unfinished, identity)
    waiting: list[tuple[dict[str, Any], Prompt]] = []
    bad: list[dict[str, Any]] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        fields = {}
        try:
            fields = _read_line(line)
            prompt = _prompt(fields, default)
            request_of(model, prompt)
        except JllamaError as error:
            bad.append(fields | {"line": number, "error": str(error)})
            continue
        for sample in range(samples):
            place = {"line": number} | ({"sample": sample} if samples > 1 else {})
            sampling = dataclasses.replace(prompt.sampling, seed=(prompt.sampling.seed + sample) % 2**32)
            waiting.append((fields | place, dataclasses.replace(prompt, sampling=sampling)))
    left = [item for item in waiting if _place(item[0]) not in done]
    report(len(waiting) - len(left), len(waiting), 0)
    with unfinished.open("a", encoding="utf-8") as file:
        if not file.tell():
            file.write(json.dumps({"of": identity}) + "\n")
        prompts = [prompt for _, prompt in left]
        for batch in generate_batches(model, prompts, speculate=speculate, batch_size=batch_size):
            for place, completion in batch.items():
                fields, prompt = left[place]
                result = fields | record(prompt, completion)
                done[_place(fields)] = result
                file.write(_dumped(result))
            file.flush()
            report(len(done), len(waiting), sum(len(completion.ids) for completion in batch.values()))
    results = sorted([*done.values(), *bad], key=_place)
    write_text_whole(output, "".join(map(_dumped, results)))
    unfinished.unlink()
    return [f"{path}, line {result['line']}: {result['error']}" for result in bad]


def _dumped(result: dict[str, Any]) -> str:
    """A line of JSON: of UTF-8, or if it has a lone surrogate, which that has not, of ASCII."""
    line = json.dumps(result, ensure_ascii=False)
    return (json.dumps(result) if re.search("[\ud800-\udfff]", line) else line) + "\n"


def _place(result: dict[str, Any]) -> tuple[int, int]:
    return result["line"], result.get("sample", 0)


def weights_fingerprint(model: LanguageModel) -> str:
    """SHA-256 of the parameters as they are loaded, quantized ones too, in hexadecimal.

    Every value counts, by a checksum of each array computed where the array is: nothing is read or copied again.
    (``verify``'s fingerprint is of the files, in float32: to compare formats, not to tell two loads apart.)
    """
    parts = [
        (jax.tree_util.keystr(at), str(leaf.dtype), leaf.shape, int(_checksum(leaf)))
        for at, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@jax.jit
def _checksum(leaf: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """The sum, modulo 2**32, of a hash of each value's bits and place (lowbias32 of Wellons' hash-prospector)."""
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").ravel().astype(jnp.uint32)
    mixed = bits + jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _read_unfinished(unfinished: Path, identity: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """The results of an interrupted call; a last line that was cut short is dropped from the file."""
    if not unfinished.exists():
        return {}
    whole = unfinished.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    instead = "remove it, or give another --output"
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        results = {_place(result): result for result in lines[1:]}
        begun = dict(lines[0]["of"]) if lines else identity
    except (ValueError, KeyError, TypeError) as error:
        raise JllamaError(f"{unfinished} does not hold what was written there ({error}): {instead}") from error
    if changed := [name for name in identity if begun.get(name) != identity[name]]:
        what = f"other prompts, settings or another model ({', '.join(changed)} changed)"
        raise JllamaError(f"{unfinished} was begun with {what}: {instead}")
    with unfinished.open("r+b") as file:
        file.truncate(len(whole))
    return results


def _read_line(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON ({' '.join(str(error).split())})") from error
    if not isinstance(fields, dict):
        raise UsageError(_WANTED)
    return fields


def _prompt(fields: dict[str, Any], default: Prompt) -> Prompt:
    if not isinstance(fields.get("prompt"), str):
        raise UsageError(_WANTED)
    own: dict[str, Any] = {name: fields[name] for name in OWN_SETTINGS if name in fields}
    for name, value in own.items():
        expected, fits = _KINDS.get(name, ("a number", lambda value: _all_are([value], int, float)))
        if not fits(value):
            raise UsageError(f"{name} is {json.dumps(value)}; it must be {expected}")
    if "logit_bias" in own:
        own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    if "banned_ids" in own:
        own["banned_ids"] = tuple(own["banned_ids"])
    sampling = {name: own.pop(name) for name in _OF_SAMPLING if name in own}
    changed = dataclasses.replace(default.sampling, **sampling)
    return dataclasses.replace(default, content=fields["prompt"], sampling=changed, **own)
