"""Every family's model generates what whole forward passes of the float64 oracle find likeliest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, family_weights

from jllama import oracle
from jllama.decode_params import decode_layout
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.language_model import LanguageModel

GREEDY = SamplingParams(temperature=0.0)
NEW = 110
PROMPTS = [np.random.default_rng(0).integers(0, 96, length).tolist() for length in (200, 5, 30)]
"""Several chunks and two blocks of the cache's keys, less than a chunk, and the same again."""


@functools.cache
def model_of(name, quantize=None):
    config = FAMILIES[name]
    params = jax.tree.map(jnp.asarray, family_weights(name))
    return LanguageModel(config, decode_layout(params, config, quantize))


def answers(engine, prompts):
    """The answers to these prompts, all submitted at once."""
    rows = [engine.submit(Request(Prompt(ids, GREEDY, NEW))) for ids in prompts]
    events = {}
    while engine.busy:
        events.update((row, event) for row, event in engine.step() if isinstance(event, Answer))
    return [events[row] for row in rows]


def likeliest(name, prompt, ids):
    """What the oracle finds likeliest after each token of the text but those of the prompt."""
    tokens = np.array([[*prompt, *ids]])
    logits = oracle.forward(family_weights(name), tokens, FAMILIES[name])[0]
    return np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_rows_have_the_oracles_tokens(name):
    """With prompts in chunks, a prefix that is cached, and a row that joins later."""
    engine = Engine(model_of(name), 2, chunk_tokens=64, prefix_tokens=256)
    rows = answers(engine, [*PROMPTS, PROMPTS[0]])
    for prompt, row in zip([*PROMPTS, PROMPTS[0]], rows, strict=True):
        assert len(set(row.completion.ids)) > 1
        assert list(row.completion.ids) == likeliest(name, prompt, row.completion.ids)
    assert [row.cached_tokens for row in rows] == [0, 0, 0, 192]
    assert rows[3].completion.ids == rows[0].completion.ids
    (alone,) = answers(engine, PROMPTS[1:2])
    assert alone.completion.log_probs == rows[1].completion.log_probs


@pytest.mark.parametrize("name", ["mistral", "all at once"])
def test_drafts_change_no_token(name):
    engine = Engine(model_of(name), 1, chunk_tokens=64, draft_len=3)
    prompt = PROMPTS[2] * 3
    (answer,) = answers(engine, [prompt])
    assert list(answer.completion.ids) == likeliest(name, prompt, answer.completion.ids)
    assert 0 < answer.completion.accepted < answer.completion.drafted
