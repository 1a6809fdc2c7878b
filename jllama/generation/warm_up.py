"""Compile the programs of generation ahead."""

import dataclasses
import itertools
from collections.abc import Sequence

from jllama.generation.generate import batch_engine
from jllama.generation.requests import Request
from jllama.generation.sampling_params import Prompt
from jllama.generation.text import encode_prompt
from jllama.models.language_model import LanguageModel


def warm_up(
    model: LanguageModel,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    max_new_tokens: int | None = None,
    speculate: int = 0,
) -> None:
    """Compile ahead for ``generate`` and ``stream``, not for later turns of a ``Conversation``.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> jllama.warm_up(model, lengths=[16], batches=[1], max_new_tokens=4)

    Args:
        model: the model.
        lengths: of prompts, in tokens; each stands for all that are padded to the same power of
            two.
        batches: how many prompts at once.
        max_new_tokens: the maximum that will be requested; None is the end of the context.
        speculate: as in ``generate``.
    """
    model = model.for_decoding()
    prompts = [
        encode_prompt(model, Prompt([0] * length, max_new_tokens=max_new_tokens))
        for length in lengths
    ]
    max_len = max((prompt.limit(model.config.max_seq_len) for prompt in prompts), default=0)
    # One length for each size of the cache: it grows from one to the next.
    cache_lens = sorted(
        {min(128 << doublings, max_len) for doublings in range(max_len.bit_length())}
    )
    for num_slots, prompt in itertools.product(batches, prompts):
        engine = batch_engine(model, num_slots, speculate, num_slots > 1)
        for cache_len in cache_lens:
            engine.make_room(cache_len)
            engine.reset()
            max_new = int(cache_len > len(prompt.ids))
            engine.warm_up(Request(dataclasses.replace(prompt, max_new_tokens=max_new)))
