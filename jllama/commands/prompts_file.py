"""Completion of a file of prompts: JSON lines in, JSON lines out, continued after interruptions."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from jllama.core import JllamaError, UsageError
from jllama.formats.receipt import weights_fingerprint
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import Completion, encode_prompt
from jllama.models.language_model import LanguageModel
from jllama.score.scoring import token_log_probs
from jllama.system.files import Json, atomic_write_text, errors_as
from jllama.system.places import local_path
from jllama.system.progress import progress

# The types are compared exactly, so that true is no number.
_JSON_TYPES: dict[Any, tuple[str, set[type], set[type]]] = {
    int: ("a whole number", {int}, {int}),
    float: ("a number", {int, float}, {int, float}),
    tuple[int, ...]: ("a list of whole numbers", {list}, {int}),
    Mapping[int, float]: ("an object of numbers by token id", {dict}, {int, float}),
    str: ("a string or a list of strings", {str, list}, {str}),
}
_ENDS = {"max_new_tokens": int, "stop": str, "stop_ids": tuple[int, ...]}
_SETTINGS = {
    name: _JSON_TYPES[hint] for name, hint in (get_type_hints(SamplingParams) | _ENDS).items()
}
"""The settings of a line: a description of the value, its JSON types, and those of its elements."""
# Options that do not change results; the weights' fingerprint covers checkpoint and adapter.
_NO_EFFECT = ("checkpoint", "adapter", "prompts_file", "output", "batch_size")


def complete_file(
    model: LanguageModel, default: Prompt, options: Any
) -> tuple[list[Completion], list[str]]:
    """Complete every line of a ``.jsonl`` file ``n`` times; text i has the line's seed plus i.

    A line is an object with a ``prompt``. It may change settings of ``default``; its other fields
    are copied to its results. The results are collected in ``<output>.unfinished``. A second call
    with the same prompts, weights and options continues there. The finished results are moved to
    ``output``, in the order of the lines.

    Returns:
        The completions of this call, and a problem for each line that is wrong.
    """
    path = Path(options.prompts_file)
    output = local_path(options.output)
    start_s = time.perf_counter()
    if output.exists():
        raise JllamaError(f"{output} exists already: remove it, or give another --output")

    # 1. Read what an interrupted call has done.
    content = path.read_bytes()
    identity = _identity(model, options, content)
    unfinished = output.with_name(output.name + ".unfinished")
    done = _read_unfinished(unfinished, json.loads(json.dumps(identity)))
    num_done = len(done)

    # 2. Find the lines that are wrong, and the texts that remain.
    remaining: list[tuple[Json, Prompt]] = []
    bad: list[Json] = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        fields: Json = {}
        try:
            fields = _read_line(line)
            prompt = encode_prompt(model, _prompt(fields, default))
        except JllamaError as error:
            bad.append(fields | {"line": number, "error": str(error)})
            continue
        fields["line"] = number
        for sample in range(options.n):
            if options.n > 1:
                fields = fields | {"sample": sample}
            if _key(fields) not in done:
                remaining.append((fields, with_seed(prompt, sample)))

    # 3. Complete them, and save each as soon as it is done.
    made: list[Completion] = []
    total = num_done + len(remaining)
    with unfinished.open("a", encoding="utf-8") as file, progress("prompts", total) as move:
        move(num_done)
        if not file.tell():
            file.write(json.dumps({"of": identity}) + "\n")
        prompts = [prompt for _, prompt in remaining]
        for index, completion in completions(model, prompts, options.speculate, options.batch_size):
            fields, prompt = remaining[index]
            fields = fields | result(model, options, fields["prompt"], prompt, completion)
            done[_key(fields)] = fields
            file.write(_json_line(fields))
            file.flush()
            move(1)
            made.append(completion)

    # 4. Write all results in order.
    rows = sorted([*done.values(), *bad], key=_key)
    atomic_write_text(output, "".join(map(_json_line, rows)))
    unfinished.unlink()
    seconds = time.perf_counter() - start_s
    tokens = sum(completion.new_tokens for completion in made)
    speed = f"{tokens} new tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second"
    print(f"{output}: {speed}", file=sys.stderr)
    return made, [f"{path}, line {row['line']}: {row['error']}" for row in bad]


def result(
    model: LanguageModel, options: Any, text: str, prompt: Prompt, completion: Completion
) -> Json:
    """Return the JSON fields of a completion; ``text`` is the prompt before it was encoded."""
    fields = {
        "text": (text if options.echo else "") + completion.text,
        "finish_reason": completion.finish_reason,
        "new_tokens": completion.new_tokens,
    }
    if options.logprobs:
        fields["tokens"] = log_probs(model, prompt, completion, echo=bool(options.echo))
    return fields


def log_probs(
    model: LanguageModel, prompt: Prompt, completion: Completion, *, echo: bool
) -> list[Json]:
    """Return each token with its text and log-probability, in nats; ``echo`` includes the prompt.

    The prompt's first token has no log-probability.
    """
    ids = [*completion.ids]
    values: list[float | None] = [*completion.log_probs]
    if echo:
        (score,) = token_log_probs(model, [prompt.ids])
        ids = [*prompt.ids, *ids]
        values = [None, *score.log_probs.tolist(), *values]
    decode = model.text_tokenizer.decode
    return [
        {"id": id, "text": decode([id]), "log_prob": value}
        for id, value in zip(ids, values, strict=True)
    ]


def with_seed(prompt: Prompt, offset: int) -> Prompt:
    """Return the prompt with a seed that is larger by ``offset``."""
    seed = (prompt.sampling.seed + offset) % 2**32
    return dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, seed=seed))


def _identity(model: LanguageModel, options: Any, content: bytes) -> Json:
    """Return everything that results depend on, by names for error messages."""
    settings = dataclasses.asdict(options)
    for name in _NO_EFFECT:
        del settings[name]
    return {
        "prompts": hashlib.sha256(content).hexdigest(),
        "weights": weights_fingerprint(model),
        "configuration": repr(model.config),
        "tokenizer": model.text_tokenizer.fingerprint(),
        "the model's stop ids": model.stop_ids,
        **settings,
    }


def _read_unfinished(unfinished: Path, identity: Json) -> dict[tuple[int, int], Json]:
    """Return the results of an interrupted call; drop a last line that was cut short."""
    content = unfinished.read_bytes() if unfinished.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    remedy = "remove it, or give another --output"
    problem = f"{unfinished} does not hold what was written there, so {remedy}"
    with errors_as(problem, ValueError, KeyError, TypeError):
        rows = [json.loads(line) for line in whole.splitlines()]
        before = dict(rows[0]["of"]) if rows else identity
        done = {_key(row): row for row in rows[1:]}
    changed = [name for name in identity if before.get(name) != identity[name]]
    if changed:
        reason = f"other prompts, settings or another model ({', '.join(changed)} changed)"
        raise JllamaError(f"{unfinished} was begun with {reason}: {remedy}")
    if unfinished.exists():
        os.truncate(unfinished, len(whole))
    return done


def _json_line(row: Json) -> str:
    """Return a line of JSON in UTF-8; a lone surrogate, which UTF-8 does not have, is escaped."""
    text = json.dumps(row, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def _key(row: Json) -> tuple[int, int]:
    return row["line"], row.get("sample", 0)


def _read_line(line: bytes) -> Json:
    with errors_as("it is not JSON", ValueError, RecursionError):
        fields = json.loads(line)
    return fields if isinstance(fields, dict) else {}


def _prompt(fields: Json, default: Prompt) -> Prompt:
    """Return the default prompt, changed by a line's text and settings."""
    if not isinstance(fields.get("prompt"), str):
        raise UsageError('it must be an object with a "prompt", such as {"prompt": "Once"}')
    sampling = {}
    ends = {}
    for name, (expected, types, element_types) in _SETTINGS.items():
        if name not in fields:
            continue

        # Check a setting.
        value = fields[name]
        elements = [value]
        keys = []
        if isinstance(value, list):
            elements = value
        elif isinstance(value, dict):
            elements = value.values()
            keys = value.keys()
        has_types = type(value) in types and element_types.issuperset(map(type, elements))
        if not (has_types and all(map(str.isdecimal, keys))):
            raise UsageError(f"{name} is {json.dumps(value)}; it must be {expected}")

        # Convert it from JSON.
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, dict):
            value = {int(id): number for id, number in value.items()}
        if name in _ENDS:
            ends[name] = value
        else:
            sampling[name] = value
    params = dataclasses.replace(default.sampling, **sampling)
    return dataclasses.replace(default, content=fields["prompt"], sampling=params, **ends)
