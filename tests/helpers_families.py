"""What every family's model should generate, and how it is asked."""

import numpy as np

from jllama.generation.requests import Answer, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.models import oracle

NEW = 110
PROMPTS = [np.random.default_rng(0).integers(0, 96, length).tolist() for length in (200, 5, 30)]
"""Several chunks, and two that are shorter than one."""


def answers(engine, prompts):
    """The answers to these prompts, all submitted at once."""
    sampling = SamplingParams(temperature=0.0)
    rows = [engine.submit(Request(Prompt(ids, sampling, NEW))) for ids in prompts]
    events = {}
    while engine.busy:
        events.update((row, event) for row, event in engine.step() if isinstance(event, Answer))
    return [events[row] for row in rows]


def likeliest(config, weights, prompt, ids):
    """What the oracle finds likeliest after each token of the text but those of the prompt."""
    logits = oracle.forward(weights, np.array([[*prompt, *ids]]), config)[0]
    return np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()
