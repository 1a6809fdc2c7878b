"""Text from a model: complete, in pieces as they come, or many texts as each is done.

The engine generates all of it.
"""

import dataclasses
import numbers
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Unpack

from jllama.core import UsageError
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request
from jllama.generation.sampler import check_batch
from jllama.generation.sampling_params import Grammar, Prompt, SamplingFields, SamplingParams
from jllama.generation.text import Completion, encode_prompt
from jllama.models.language_model import LanguageModel
from jllama.system.errors import unknown_name

BLOCK_S = 0.025
"""How long the engine may take until it shows the next tokens to a reader."""
_PREFIX_TOKENS = 8192  # of prompts, cached for others with the same beginning


def generate(
    model: LanguageModel,
    prompts: str | Sequence[int] | Prompt | Sequence[str | Sequence[int] | Prompt],
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    speculate: int = 0,
    batch_size: int = 0,
    **fields: Unpack[SamplingFields],
) -> list[Completion]:
    """Continue one prompt or several; other prompts and ``speculate`` change no text.

    In bfloat16 and float16 another batch size rounds differently, which may change the choice
    between two tokens that are nearly equally likely.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> prompts = ["Once", "Twice"]
        >>> completions = jllama.generate(model, prompts, max_new_tokens=4, temperature=0.8, seed=1)
        >>> [len(completion.ids) for completion in completions]
        [4, 4]

    Args:
        model: a model from ``jllama.load``.
        prompts: text, token ids, or a ``Prompt``, which contains all its settings; or a list of
            those.
        sampling: how tokens are chosen; None samples the model's own distribution (temperature 1,
            nothing cut off).
        max_new_tokens: the maximum number of tokens to generate from each prompt; None continues to
            the end of the model's context.
        stop: a string that ends a text, or several; they are not part of it.
        stop_ids: tokens that end a text; None is the model's own.
        grammar: what the texts must match, such as ``Grammar("regex", "[0-9]+")``; a stop id ends a
            text that matches.
        speculate: how many tokens to guess at each step from the text so far, which makes texts
            that repeat themselves faster.
        batch_size: how many texts to generate at once, longest prompts first; 0 is all of them.
        **fields: fields of ``SamplingParams`` that replace those of ``sampling``: ``temperature``
            (0 takes the most likely token), ``top_k``, ``top_p``, ``min_p``,
            ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``,
            ``banned_ids``, ``seed`` (the same seed gives the same text).

    Returns:
        A ``Completion`` of each prompt, in order.

    Raises:
        JllamaError: the model has no tokenizer, a prompt or a setting does not fit it, or the
            setting is unknown.
    """
    settings = Prompt("", sampling or SamplingParams(), max_new_tokens, stop, stop_ids, grammar)
    encoded = _encode_prompts(model, prompts, settings, fields)
    results = dict(completions(model, encoded, speculate, batch_size))
    return [results[index] for index in range(len(encoded))]


def stream(
    model: LanguageModel,
    prompt: str | Sequence[int] | Prompt,
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    speculate: int = 0,
    engine: Engine | None = None,
    **fields: Unpack[SamplingFields],
) -> Generator[str, None, Completion]:
    """Yield the continuation of one prompt in pieces as they come.

    Together they are the text of ``generate``.

    A piece is never half a character, nor the beginning of a stop string. The generator returns the
    ``Completion``; ``close()`` ends it early. Each thread may run one. Arguments and errors are
    those of ``generate``; errors are raised at the first piece. An ``engine`` of this model reuses
    what it has computed for the next prompt, and has a ``draft_len`` of its own.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> text = "".join(jllama.stream(model, "Once", max_new_tokens=4))
    """
    settings = Prompt("", sampling or SamplingParams(), max_new_tokens, stop, stop_ids, grammar)
    (encoded,) = _encode_prompts(model, [prompt], settings, fields)
    if engine is None:
        check_batch(model.config, 1, speculate)
        engine = Engine(model, 1, block_s=BLOCK_S, draft_len=speculate)
    elif engine.busy:
        raise UsageError(
            "the engine is generating other texts: wait for their end, or take another one"
        )
    row = engine.submit(Request(encoded))
    try:
        while True:
            for owner, event in engine.step():
                if owner is not row:
                    continue
                if isinstance(event, Answer):
                    return event.completion
                if event.text:
                    yield event.text
    finally:
        engine.cancel(row)


def completions(
    model: LanguageModel, prompts: Sequence[Prompt], speculate: int = 0, batch_size: int = 0
) -> Iterator[tuple[int, Completion]]:
    """Yield index and completion of each encoded prompt as it is done, longest prompts first."""
    if not prompts:
        return
    num_slots = min(batch_size or len(prompts), len(prompts))
    engine = batch_engine(model, num_slots, speculate, len(prompts) > 1)
    # Equal prompts follow each other, and are computed once.
    waiting = sorted(
        range(len(prompts)),
        key=lambda index: (len(prompts[index].ids), [*prompts[index].ids], -index),
    )
    indices = {}
    while waiting or engine.busy:
        while waiting and engine.num_free > 0:
            index = waiting.pop()
            indices[engine.submit(Request(prompts[index]))] = index
        for row, event in engine.step():
            if isinstance(event, Answer):
                yield indices.pop(row), event.completion


def batch_engine(
    model: LanguageModel, num_slots: int, speculate: int, caches_prefixes: bool
) -> Engine:
    """Return an engine for many texts at once; ``UsageError`` if they exceed the memory."""
    check_batch(model.config, num_slots, speculate)
    prefix_tokens = _PREFIX_TOKENS if caches_prefixes else 0
    return Engine(model, num_slots, draft_len=speculate, prefix_tokens=prefix_tokens)


def _encode_prompts(
    model: LanguageModel, prompts: Any, settings: Prompt, fields: SamplingFields
) -> list[Prompt]:
    """Encode a prompt or a list of them.

    ``settings`` and ``fields`` apply unless it is a ``Prompt``.
    """
    names = vars(settings.sampling)
    unknown = fields.keys() - names
    if unknown:
        known = [*names, "max_new_tokens", "stop", "stop_ids"]
        raise unknown_name("setting", min(unknown), known)
    sampling = dataclasses.replace(settings.sampling, **fields)
    settings = dataclasses.replace(settings, sampling=sampling)
    if isinstance(prompts, str | Prompt) or (
        len(prompts) and isinstance(prompts[0], numbers.Integral)
    ):
        prompts = [prompts]
    are_prompts = [isinstance(prompt, Prompt) for prompt in prompts]
    if settings != Prompt("") and are_prompts and all(are_prompts):
        raise UsageError(
            "a Prompt brings its own settings, and others are given beside it: "
            "set them in the Prompt"
        )
    encoded = []
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            prompt = dataclasses.replace(settings, content=prompt)
        encoded.append(encode_prompt(model, prompt))
    return encoded
