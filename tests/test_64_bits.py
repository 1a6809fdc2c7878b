"""With JAX_ENABLE_X64 everything works, and 32-bit parameters stay so and give the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from models import FAMILIES, SMALL, decode_params, extend, forward, params, weights

from jllama.core.model import KVCache, initial_params
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.lab.checks import relative_error
from jllama.models import oracle
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import Llama3Scaling

CONFIG = dataclasses.replace(SMALL, rope_scaling=Llama3Scaling(8.0, original_max_seq_len=32))
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-6)])
def test_forward_and_cache_equal_the_oracle(dtype, tolerance):
    """RoPE's tables are float32."""
    config = FAMILIES["all at once"]
    expected = oracle.forward(weights(config), TOKENS, config)
    with jax.enable_x64(True):
        logits = forward(config, params(config, dtype), TOKENS)
        assert logits.dtype == dtype
        assert relative_error(logits, expected) < tolerance

        layout, parts = decode_params(config, dtype), []
        cache = KVCache.zeros(config, 2, 16, jnp.dtype(dtype))
        for start, count_dtype in ((0, np.int64), (6, np.int32)):
            counts = np.full(2, 6, count_dtype)
            part, cache = extend(config, layout, TOKENS[:, start : start + 6], cache, counts)
            parts.append(part)
        assert relative_error(np.concatenate(parts, axis=1), expected) < tolerance
        assert cache.lengths.dtype == jnp.int32
        assert cache.keys[0].dtype == dtype


def test_fresh_parameters_are_float32():
    with jax.enable_x64(True):
        leaves = jax.eval_shape(lambda: initial_params(jax.random.key(0), CONFIG))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(leaves)} == {"float32"}


def generated(draft_len, temperature):
    config = dataclasses.replace(CONFIG, num_layers=1)
    model = LanguageModel(config, decode_params(config))
    sampling = SamplingParams(temperature=temperature)
    prompts = [Prompt(tuple(map(int, row)), sampling, 16) for row in TOKENS]
    results = completions(model, prompts, speculate=draft_len)
    return {index: completion.ids for index, completion in results}


@pytest.mark.parametrize(("draft_len", "temperature"), slow_but([(2, 0.7)], [(0, 0.0), (2, 0.7)]))
def test_the_same_tokens_are_generated(draft_len, temperature):
    expected = generated(draft_len, temperature)
    with jax.enable_x64(True):
        assert generated(draft_len, temperature) == expected
