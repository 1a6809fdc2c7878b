"""Thousands of texts by `jllama.generate`, in every company: each must be the one that comes out
alone.

    python benchmarks/generate_load.py --texts 2000

A small random model generates drawn batches, conversations and files of prompts, with settings of
every kind, prompts that are equal or begin alike, and batches smaller than the number of prompts,
in float32 and in bfloat16.

- **batches**: tokens and log-probabilities are, to the last bit, those of the prompt alone in as
  many slots.
- **files**: so are those of files of prompts that go through a few slots, whatever was generated in
  them before.
- **speculate**: guessing tokens changes none (float32).
- **chats**: each answer of a `Conversation`, which goes on from what it has computed, some of them
  broken off or taken
  back, is that of `chat` with the same messages (float32: the same tokens, log-probabilities to
  1e-4).

Writes benchmarks/results/generate_load.json, with each fault.
"""

import argparse
import collections
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from serve_load import WORDS, save_small_model, some_options

import jllama
from jllama.generation.engine import Engine
from jllama.generation.generate import completions
from jllama.generation.requests import Answer, Request
from jllama.generation.text import Completion, encode_prompt

RESULT = Path(__file__).resolve().parent / "results" / "generate_load.json"
MOST_TOKENS = 40
SLOTS = 3
CHUNK_TOKENS = 64
"""Prompts have several chunks, as long ones have on an accelerator."""
CLOSE = 1e-4


def some_settings(rng: random.Random) -> dict[str, Any]:
    """Fields of ``SamplingParams``."""
    chosen = {name: value for name, value in some_options(rng).items() if rng.random() < 0.2}
    return chosen | {"temperature": rng.choice([0, 0.7, 1, 1.5]), "seed": rng.randrange(2**32)}


def some_text(rng: random.Random) -> str:
    """Words; many texts begin with the same ones, some are equal."""
    if rng.random() < 0.15:
        return WORDS
    shared = (WORDS * 3)[
        : rng.choice([0, rng.randint(1, 60), rng.randint(64, 70), rng.randint(120, 250)])
    ]
    return shared + " ".join(rng.choices(WORDS.split(), k=rng.randint(0, 10)))


def some_prompt(rng: random.Random) -> jllama.Prompt:
    """A prompt with settings of its own."""
    stop = rng.choice([(), (), "e", ("th", "a")])
    return jllama.Prompt(
        some_text(rng),
        jllama.SamplingParams(**some_settings(rng)),
        rng.randint(0, MOST_TOKENS),
        stop,
    )


def alone(model: jllama.LanguageModel, prompt: jllama.Prompt) -> Completion:
    """What comes out where nothing else is generated, in as many slots."""
    engine = Engine(model, SLOTS)
    engine.submit(Request(encode_prompt(model, prompt)))
    while engine.busy:
        for _, event in engine.step():
            if isinstance(event, Answer):
                return event.completion
    raise AssertionError("an engine has nothing to do, and has given no answer")


def batches(models: dict[str, jllama.LanguageModel], rng: random.Random) -> list[tuple[str, bool]]:
    """A batch, all at once: whether each text is the one that comes out alone."""
    dtype, model = rng.choice([*models.items()])
    prompts = [some_prompt(rng) for _ in range(SLOTS)]
    actual = jllama.generate(model, prompts)
    expected = [alone(model, prompt) for prompt in prompts]
    return [(f"batch, {dtype}", pair[0] == pair[1]) for pair in zip(actual, expected, strict=True)]


def files(models: dict[str, jllama.LanguageModel], rng: random.Random) -> list[tuple[str, bool]]:
    """What a file of prompts goes through: more prompts than slots."""
    dtype, model = rng.choice([*models.items()])
    prompts = [some_prompt(rng) for _ in range(rng.randint(8, 16))]
    actual = dict(
        completions(model, [encode_prompt(model, prompt) for prompt in prompts], batch_size=SLOTS)
    )
    return [
        (f"file, {dtype}", actual[index] == alone(model, prompt))
        for index, prompt in enumerate(prompts)
    ]


def speculate(
    models: dict[str, jllama.LanguageModel], rng: random.Random
) -> list[tuple[str, bool]]:
    """A batch with guessed tokens, and without."""
    model = models["float32"]
    prompts = [some_prompt(rng) for _ in range(SLOTS)]
    guessed = jllama.generate(model, prompts, speculate=rng.choice([1, 3]))
    plain = jllama.generate(model, prompts)
    return [("speculate", same_text(*pair)) for pair in zip(guessed, plain, strict=True)]


def chats(models: dict[str, jllama.LanguageModel], rng: random.Random) -> list[tuple[str, bool]]:
    """A conversation, some of whose answers are broken off or taken back."""
    model = models["float32"]
    conversation = jllama.Conversation(model)
    outcomes = []
    for _ in range(rng.randint(2, 5)):
        before = [*conversation.messages]
        question = " ".join(rng.choices(WORDS.split(), k=rng.randint(1, 8)))
        settings = some_settings(rng)
        limit = rng.randint(1, MOST_TOKENS)
        answer = conversation.answer(question, max_new_tokens=limit, **settings)
        messages = [*before, {"role": "user", "content": question}]
        expected = jllama.chat(model, messages, max_new_tokens=limit, **settings)
        if rng.random() < 0.25:  # somebody stops listening
            heard = "".join(itertools.islice(answer, rng.randint(1, 3)))
            answer.close()
            outcomes.append(("chat, broken off", expected.text.startswith(heard)))
        else:
            outcomes.append(("chat", same_text(result_of(answer), expected)))
        if conversation.messages and rng.random() < 0.2:
            conversation.undo()
    return outcomes


def result_of(generator: Any) -> Completion:
    """What a generator returns."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def same_text(actual: Completion, expected: Completion) -> bool:
    """Whether the tokens are equal and their log-probabilities close: a prompt was computed in
    other parts.
    """
    same = actual.ids == expected.ids and actual.text == expected.text
    return same and np.allclose(actual.log_probs, expected.log_probs, rtol=CLOSE, atol=CLOSE)


def main() -> None:
    """Draw until there are enough texts, and write what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=2000, help="how many texts to compare")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from jllama.generation import engine

    engine.CHUNK_TOKENS[jax.default_backend()] = CHUNK_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        save_small_model(Path(folder))
        model = jllama.load(Path(folder) / "small")
        narrow = jllama.load(Path(folder) / "small", dtype="bfloat16")
    models = {"float32": model.for_decoding(), "bfloat16": narrow.for_decoding()}
    models = {
        name: dataclasses.replace(model, stop_ids=model.stop_ids or (2,))
        for name, model in models.items()
    }
    outcomes: collections.Counter[str] = collections.Counter()
    faults = []
    start_s = time.perf_counter()
    for seed in itertools.count(options.seed):
        rng = random.Random(seed)
        kind = rng.choice([batches, files, speculate, chats])
        for name, is_equal in kind(models, rng):
            outcomes[name] += 1
            if not is_equal:
                faults.append({"seed": seed, "kind": name})
        if seed % 10 == 0:
            print(f"{outcomes.total()} texts, {len(faults)} faults", flush=True)
        if outcomes.total() >= options.texts:
            break
    result = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "jllama")},
        "texts": outcomes.total(),
        "seed": options.seed,
        "equal_or_close": dict(outcomes),
        "seconds": time.perf_counter() - start_s,
        "faults": faults,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if faults:
        raise SystemExit(f"{len(faults)} of {outcomes.total()} texts came out otherwise")


if __name__ == "__main__":
    main()
