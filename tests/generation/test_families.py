"""Every family's model generates what whole forward passes of the float64 oracle find likeliest."""

import dataclasses

import jax
import pytest
from helpers import slow_but
from helpers_families import PROMPTS, answers, likeliest
from models import FAMILIES

from jllama.generation.engine import Engine
from jllama.lab.checks import random_params
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel

ALL = "all at once"


def config_of(name):
    """The family's model with two layers, one of each kind: decoding compiles each layer."""
    kinds = {"full_attention_layers": (1,), "no_rope_layers": (0,)} if name == ALL else {}
    return dataclasses.replace(FAMILIES[name], num_layers=2, **kinds)


def weights_of(config):
    # A tied embedding is small, since it is the head.
    return random_params(config, 0, embed_std=0.2 if config.tie_embeddings else 1.0)


def model_of(config):
    params = jax.jit(decode_layout, static_argnums=1)(weights_of(config), config)
    return LanguageModel(config, params)


def assert_likeliest(config, prompt, ids):
    """Each token of the text is the one that the oracle finds likeliest after those before it."""
    assert likeliest(config, weights_of(config), prompt, ids) == ids
    assert len(set(ids)) > 1


# The others have no option that neither "all at once" nor the model of test_engine.py has.
@pytest.mark.parametrize("name", slow_but([ALL], [ALL, "mistral", "qwen2", "qwen3", "phi"]))
def test_ragged_rows_have_the_oracles_tokens(name):
    """With prompts in chunks, a prefix that is cached, and a row that joins later.

    Short ones are computed together, as on accelerators, in one program without a cache.
    """
    config = config_of(name)
    engine = Engine(model_of(config), 2, chunk_tokens=64, prefix_tokens=256)
    engine.together_tokens = 64
    rows = answers(engine, [*PROMPTS, PROMPTS[0]])
    for prompt, row in zip([*PROMPTS, PROMPTS[0]], rows, strict=True):
        assert_likeliest(config, prompt, row.completion.ids)
    assert [row.cached_tokens for row in rows] == [0, 0, 0, 192]
    (alone,) = answers(engine, PROMPTS[1:2])
    assert alone.completion == rows[1].completion


def test_drafts_change_no_token():
    config = config_of(ALL)
    engine = Engine(model_of(config), 1, context=512, chunk_tokens=64, draft_len=3)
    prompt = PROMPTS[2] * 3
    (answer,) = answers(engine, [prompt])
    assert_likeliest(config, prompt, answer.completion.ids)
    assert 0 < answer.completion.accepted < answer.completion.drafted
