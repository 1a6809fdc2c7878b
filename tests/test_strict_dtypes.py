"""No dtype is promoted silently.

Model, loss and generation run with ``jax_numpy_dtype_promotion=strict``.
Training's update does not: optax multiplies whole numbers by floats.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, SMALL, decode_params, params

from jllama.core.model import KVCache
from jllama.generation.engine import Engine
from jllama.generation.requests import Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.models.build import build_model
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.score.scoring import token_log_probs

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 8), np.int32))
CONFIG = FAMILIES["all at once"]
EVERYTHING = SamplingParams(
    0.7,
    5,
    0.9,
    0.05,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.3,
    logit_bias={1: 2.0},
    seed=3,
)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def shapes(dtype):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), params(CONFIG)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_pass_and_the_gradients_of_the_loss(dtype):
    def loss(weights):
        llama = build_model(CONFIG, weights)
        total, count = llama.loss(llama.hidden(TOKENS), TOKENS, TOKENS >= 0, 1e-4)
        return total / count

    gradients = jax.eval_shape(jax.grad(loss), shapes(dtype))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {dtype}


@pytest.mark.parametrize("cache_is_empty", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_pass_with_a_cache(dtype, quantize, cache_is_empty):
    def forward(weights):
        llama = build_model(CONFIG, decode_layout(weights, CONFIG, quantize))
        cache = KVCache.zeros(CONFIG, 2, 16, jnp.dtype(dtype))
        hidden, cache = llama.decode(
            TOKENS, cache, jnp.array([8, 8], jnp.int32), cache_is_empty=cache_is_empty
        )
        return llama.logits(hidden), cache.keys[0]

    logits, keys = jax.eval_shape(forward, shapes(dtype))
    assert (logits.dtype, keys.dtype) == (jnp.float32, dtype)


@pytest.mark.parametrize("draft_len", [0, 2])
def test_generation(draft_len):
    """Run every program: computed and cached chunks, rows that join, a cache that grows, scores."""
    config = dataclasses.replace(SMALL, num_layers=1, max_seq_len=256)
    model = LanguageModel(config, decode_params(config))
    engine = Engine(model, 2, draft_len=draft_len, chunk_tokens=16, prefix_tokens=64)
    top = 0 if draft_len else 3
    for ids, sampling, scores in (
        ((3,) * 20, EVERYTHING, False),
        ((1, 2, 3), SamplingParams(temperature=0.0), False),
        ((3,) * 20, EVERYTHING, False),
        ((4,) * 20, EVERYTHING, True),
    ):
        engine.submit(Request(Prompt(ids, sampling, 4), top=top, prompt_log_probs=scores))
    while engine.busy:
        engine.step()
    engine.make_room(200)


def test_scoring():
    token_log_probs(LanguageModel(SMALL, params(SMALL)), [[1, 2, 3, 4]])
