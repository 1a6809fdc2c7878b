"""Text from a model: whole, in pieces as they come, or many texts as each is done. All of it by the engine."""

import dataclasses
import itertools
import numbers
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Unpack

from jllama.errors import UsageError, unknown_name
from jllama.generation.decode_batch import check_batch
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request
from jllama.generation.sampling_params import Prompt, SamplingFields, SamplingParams
from jllama.generation.text import Completion, encode_prompt
from jllama.grammar import Grammar
from jllama.language_model import LanguageModel

BLOCK_S = 0.025
"""How long somebody who reads along waits for the next tokens."""
_PREFIX_TOKENS = 8192  # kept of prompts, for others that begin alike


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
    """Continue one prompt or several, each as it would come out alone and with any ``speculate``.

    In bfloat16 and float16, which round otherwise in another batch size, a near tie may fall otherwise.

    Example::

        model = jllama.load("runs/quickstart")
        (completion,) = jllama.generate(model, "Once upon", max_new_tokens=50, temperature=0.8, top_p=0.95, seed=1)
        print(completion.text, completion.finish_reason, completion.new_tokens)
        stories = jllama.generate(model, ["Once upon", "Long ago"], max_new_tokens=200, stop="The end")

    Args:
        model: what ``jllama.load`` gives.
        prompts: text, token ids, or a ``Prompt``, which brings all its settings; or a list of those.
        sampling: how tokens are chosen; None draws from the model as it is (temperature 1, nothing cut off).
        max_new_tokens: the most tokens to generate from each prompt; None goes on to the end of the model's context.
        stop: a string that ends a text, or several; they are not part of it.
        stop_ids: tokens that end a text; None takes the model's own.
        grammar: what the texts must match, such as ``Grammar("regex", "[0-9]+")`` (a stop id ends one that does).
        speculate: how many tokens to guess at each step from the text so far: what repeats itself comes faster.
        batch_size: how many to generate at once, the longest first; 0 takes all at once.
        **fields: fields of ``SamplingParams``, which change ``sampling``: ``temperature`` (0 takes the likeliest
            token), ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``presence_penalty``,
            ``frequency_penalty``, ``logit_bias``, ``banned_ids``, ``seed`` (the same one gives the same text).

    Returns:
        A ``Completion`` of each prompt, in order.

    Raises:
        JllamaError: the model has no tokenizer, a prompt or a setting does not fit it, or there is no such setting.
    """
    settings = Prompt("", sampling or SamplingParams(), max_new_tokens, stop, stop_ids, grammar)
    encoded = _encoded(model, prompts, settings, fields)
    done = dict(completions(model, encoded, speculate, batch_size))
    return [done[index] for index in range(len(encoded))]


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
    """The continuation of one prompt in pieces as they come: together what ``generate`` gives.

    A piece is never half a character, nor the beginning of a stop string. The generator returns the ``Completion``;
    ``close()`` ends it early. Each thread may have its own. Arguments and errors (at the first piece) are those of
    ``generate``; an ``engine`` of this model may keep what the next prompt begins with (it has its own ``draft_len``).

    Example::

        for piece in jllama.stream(model, "Once upon", max_new_tokens=50, temperature=0.8):
            print(piece, end="", flush=True)
    """
    settings = Prompt("", sampling or SamplingParams(), max_new_tokens, stop, stop_ids, grammar)
    (encoded,) = _encoded(model, [prompt], settings, fields)
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
    """Each completion of encoded prompts with the prompt's index, as it is done; the longest prompts begin."""
    if not prompts:
        return
    num_slots = min(batch_size or len(prompts), len(prompts))
    check_batch(model.config, num_slots, speculate)
    kept = _PREFIX_TOKENS if len(prompts) > 1 else 0
    engine = Engine(model, num_slots, draft_len=speculate, prefix_tokens=kept)
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


def warm_up(
    model: LanguageModel,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    max_new_tokens: int | None = None,
    speculate: int = 0,
) -> None:
    """Compile ahead what ``generate`` and ``stream`` will need (not the later turns of a ``Conversation``).

    Each of the ``lengths``, in tokens, stands for those padded to the same power of two; ``batches`` are how many
    prompts at once, ``max_new_tokens`` the most asked for (None: to the end of the context).
    """
    model = model.for_decoding()
    prompts = [
        encode_prompt(model, Prompt([0] * length, max_new_tokens=max_new_tokens))
        for length in lengths
    ]
    longest = max((prompt.limit(model.config.max_seq_len) for prompt in prompts), default=0)
    ends = sorted(
        {min(128 << doubled, longest) for doubled in range(longest.bit_length())}
    )  # one for each cache
    for size, prompt in itertools.product(batches, prompts):
        engine = Engine(
            model, size, draft_len=speculate, prefix_tokens=_PREFIX_TOKENS if size > 1 else 0
        )
        for end in ends:
            engine.make_room(end)  # by growing from the one before
            engine.reset()
            keeps_chunks = size > 1 and len(prompt.ids) > engine.chunk_tokens
            for first in (
                (0, 1, 0) if keeps_chunks else (0,)
            ):  # the last one finds what the first one kept
                ids = [first, *prompt.ids[1:]]
                engine.submit(
                    Request(
                        dataclasses.replace(prompt, content=ids, max_new_tokens=int(end > len(ids)))
                    )
                )
            while engine.busy:
                engine.step()


def _encoded(
    model: LanguageModel, prompts: Any, settings: Prompt, fields: SamplingFields
) -> list[Prompt]:
    """One prompt or a list of them, encoded; those that bring no settings of their own have these."""
    if unknown := fields.keys() - vars(settings.sampling):
        raise unknown_name(
            "setting",
            min(unknown),
            [*vars(settings.sampling), "max_new_tokens", "stop", "stop_ids"],
        )
    settings = dataclasses.replace(
        settings, sampling=dataclasses.replace(settings.sampling, **fields)
    )
    if isinstance(prompts, str | Prompt) or (
        len(prompts) and isinstance(prompts[0], numbers.Integral)
    ):
        prompts = [prompts]
    if (
        settings != Prompt("")
        and len(prompts)
        and all(isinstance(prompt, Prompt) for prompt in prompts)
    ):
        raise UsageError(
            "a Prompt brings its own settings, and others are given beside it: set them in the Prompt"
        )
    each = (
        one if isinstance(one, Prompt) else dataclasses.replace(settings, content=one)
        for one in prompts
    )
    return [encode_prompt(model, prompt) for prompt in each]
