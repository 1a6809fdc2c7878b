"""Completing a whole file of prompts: JSON lines in, JSON lines out, and nothing lost if it is interrupted."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from jllama.errors import JllamaError, UsageError
from jllama.evaluation.scoring import token_log_probs
from jllama.files import Json, fault_of, write_text_whole
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import Completion, encode_prompt
from jllama.language_model import LanguageModel, weights_fingerprint
from jllama.progress import progress

_JSON_TYPES: dict[Any, tuple[str, set[type], set[type]]] = {  # of which true is no number
    int: ("a whole number", {int}, {int}),
    float: ("a number", {int, float}, {int, float}),
    tuple[int, ...]: ("a list of whole numbers", {list}, {int}),
    Mapping[int, float]: ("an object of numbers by token id", {dict}, {int, float}),
    str: ("a string or a list of strings", {str, list}, {str}),
}
_ENDS = {"max_new_tokens": int, "stop": str, "stop_ids": tuple[int, ...]}
OWN_SETTINGS = {
    name: _JSON_TYPES[hint] for name, hint in (get_type_hints(SamplingParams) | _ENDS).items()
}
"""What a line may set for itself: what JSON must hold, in words, and the types of it and of what is in it."""
_NOT_OF_RESULTS = (
    "checkpoint",
    "adapter",
    "prompts_file",
    "output",
    "batch_size",
)  # beside the weights


def complete_file(
    model: LanguageModel, default: Prompt, options: Any
) -> tuple[list[Completion], list[str]]:
    """Complete every line of a ``.jsonl`` file ``n`` times, the i-th with its seed plus i.

    Each line is an object with a ``prompt``; it may set what ``OWN_SETTINGS`` lists, and whatever else it holds is
    copied to its results, beside ``result``. They are gathered in ``<output>.unfinished``, which a second call goes on
    from if the prompts, weights and options are the same, and appear at ``output``, in the order of the lines, when all
    are done. Returns the completions of this call, and what is wrong with lines.
    """
    path, output, start_s = Path(options.prompts_file), Path(options.output), time.perf_counter()
    if output.exists():
        raise JllamaError(f"{output} exists already: remove it, or give another --output")
    content = path.read_bytes()
    unfinished = output.with_name(output.name + ".unfinished")
    identity = {
        "prompts": hashlib.sha256(content).hexdigest(),
        "weights": weights_fingerprint(model),
        "configuration": repr(model.config),
        "tokenizer": model.text_tokenizer.fingerprint(),
        "the model's stop ids": model.stop_ids,
        **{
            name: value
            for name, value in dataclasses.asdict(options).items()
            if name not in _NOT_OF_RESULTS
        },
    }
    done = _read_unfinished(unfinished, json.loads(json.dumps(identity)))
    num_done, remaining, made, bad = len(done), [], [], []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        fields: Json = {}
        try:
            with fault_of("it is not JSON", ValueError, RecursionError):
                read = json.loads(line)
            fields = read if isinstance(read, dict) else {}
            prompt = encode_prompt(model, _prompt(fields, default))
        except JllamaError as error:
            bad.append(fields | {"line": number, "error": str(error)})
            continue
        for sample in range(options.n):
            fields = fields | {"line": number} | ({"sample": sample} if options.n > 1 else {})
            if _key(fields) not in done:
                remaining.append((fields, with_seed(prompt, sample)))
    with (
        unfinished.open("a", encoding="utf-8") as file,
        progress("prompts", num_done + len(remaining)) as move,
    ):
        move(num_done)
        if not file.tell():
            file.write(json.dumps({"of": identity}) + "\n")
        prompts = [prompt for _, prompt in remaining]
        for index, completion in completions(model, prompts, options.speculate, options.batch_size):
            fields, prompt = remaining[index]
            done[_key(fields)] = fields | result(
                model, options, fields["prompt"], prompt, completion
            )
            file.write(_dumped(done[_key(fields)]))
            file.flush()
            move(1)
            made.append(completion)
    write_text_whole(output, "".join(map(_dumped, sorted([*done.values(), *bad], key=_key))))
    unfinished.unlink()
    seconds, tokens = (
        time.perf_counter() - start_s,
        sum(completion.new_tokens for completion in made),
    )
    print(
        f"{output}: {tokens} new tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second",
        file=sys.stderr,
    )
    return made, [f"{path}, line {each['line']}: {each['error']}" for each in bad]


def result(
    model: LanguageModel, options: Any, text: str, prompt: Prompt, completion: Completion
) -> Json:
    """What is said in JSON of a text, the prompt that it was encoded to, and its completion."""
    fields = {
        "text": (text if options.echo else "") + completion.text,
        "finish_reason": completion.finish_reason,
    }
    tokens = (
        {"tokens": log_probs(model, prompt, completion, echo=bool(options.echo))}
        if options.logprobs
        else {}
    )
    return fields | {"new_tokens": completion.new_tokens} | tokens


def log_probs(
    model: LanguageModel, prompt: Prompt, completion: Completion, *, echo: bool
) -> list[Json]:
    """Each token with its text and its log-probability; the prompt's first has none."""
    ids, values, decode = completion.ids, completion.log_probs, model.text_tokenizer.decode
    if echo:
        ids, values = (
            [*prompt.ids, *ids],
            [None, *token_log_probs(model, [prompt.ids])[0].log_probs.tolist(), *values],
        )
    return [
        {"id": id, "text": decode([id]), "log_prob": value}
        for id, value in zip(ids, values, strict=True)
    ]


def with_seed(prompt: Prompt, offset: int) -> Prompt:
    """The prompt with a later seed, for another text."""
    seed = (prompt.sampling.seed + offset) % 2**32
    return dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, seed=seed))


def _dumped(result: Json) -> str:
    """A line of JSON in UTF-8, in which a lone surrogate, which that has not, is an escape."""
    return (
        json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"
    )


def _key(result: Json) -> tuple[int, int]:
    return result["line"], result.get("sample", 0)


def _read_unfinished(unfinished: Path, identity: Json) -> dict[tuple[int, int], Json]:
    """The results of an interrupted call; a last line that was cut short is dropped from the file."""
    whole = unfinished.read_bytes() if unfinished.exists() else b""
    whole = whole[: whole.rfind(b"\n") + 1]
    remedy = "remove it, or give another --output"
    with fault_of(
        f"{unfinished} does not hold what was written there, so {remedy}",
        ValueError,
        KeyError,
        TypeError,
    ):
        first, *results = [json.loads(line) for line in whole.splitlines()] or [{"of": identity}]
        existing, done = dict(first["of"]), {_key(result): result for result in results}
    if changed := [name for name in identity if existing.get(name) != identity[name]]:
        what = f"other prompts, settings or another model ({', '.join(changed)} changed)"
        raise JllamaError(f"{unfinished} was begun with {what}: {remedy}")
    if unfinished.exists():
        os.truncate(unfinished, len(whole))
    return done


def _prompt(fields: Json, default: Prompt) -> Prompt:
    if not isinstance(fields.get("prompt"), str):
        raise UsageError('it must be an object with a "prompt", such as {"prompt": "Once"}')
    own: Json = {name: fields[name] for name in OWN_SETTINGS if name in fields}
    for name, value in own.items():
        expected, outer, inner = OWN_SETTINGS[name]
        ids, each = (
            (value, value.values())
            if type(value) is dict
            else ((), value if type(value) is list else [value])
        )
        if (
            type(value) not in outer
            or {*map(type, each)} - inner
            or not all(map(str.isdecimal, ids))
        ):
            raise UsageError(f"{name} is {json.dumps(value)}; it must be {expected}")
        if isinstance(value, list | dict):
            own[name] = (
                tuple(value) if isinstance(value, list) else {int(id): value[id] for id in value}
            )
    sampling = dataclasses.replace(
        default.sampling, **{name: own.pop(name) for name in own.keys() - _ENDS.keys()}
    )
    return dataclasses.replace(default, content=fields["prompt"], sampling=sampling, **own)
