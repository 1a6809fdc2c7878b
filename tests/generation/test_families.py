"""Every family's model generates what whole forward passes of the float64 oracle find likeliest."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers_families import PROMPTS, answers, likeliest
from models import FAMILIES, family_weights

from jllama.decode_params import decode_layout
from jllama.generation.engine import Engine
from jllama.language_model import LanguageModel


@functools.cache
def model_of(name, quantize=None):
    config = FAMILIES[name]
    params = jax.tree.map(jnp.asarray, family_weights(name))
    return LanguageModel(config, decode_layout(params, config, quantize))


QUICK = ("all at once",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES],
)
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


@pytest.mark.parametrize("name", [pytest.param("mistral", marks=pytest.mark.slow), "all at once"])
def test_drafts_change_no_token(name):
    engine = Engine(model_of(name), 1, context=512, chunk_tokens=64, draft_len=3)
    prompt = PROMPTS[2] * 3
    (answer,) = answers(engine, [prompt])
    assert list(answer.completion.ids) == likeliest(name, prompt, answer.completion.ids)
    assert 0 < answer.completion.accepted < answer.completion.drafted


def test_short_prompts_are_computed_together():
    """As on accelerators, in one program without a cache."""
    engine = Engine(model_of("all at once"), 2)
    engine.together_tokens = 64
    for prompt, row in zip(PROMPTS[1:], answers(engine, PROMPTS[1:]), strict=True):
        assert row.completion.ids == likeliest("all at once", prompt, row.completion.ids)
