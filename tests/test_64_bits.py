"""With JAX_ENABLE_X64 everything works, and 32-bit parameters stay so and give the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from models import FAMILIES, SMALL, decode_params, params, weights

from jllama import oracle
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.language_model import LanguageModel
from jllama.model import KVCache, build_model, initial_params
from jllama.rope_scaling import Llama3Scaling
from jllama.verify.checks import relative_error

CONFIG = dataclasses.replace(SMALL, rope_scaling=Llama3Scaling(8.0, original_max_seq_len=32))
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12))


@pytest.mark.parametrize("config", [CONFIG, FAMILIES["all at once"]], ids=["llama", "all options"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_and_cache_equal_the_oracle(dtype, config):
    expected = oracle.forward(weights(config), TOKENS, config)
    with jax.enable_x64(True):
        logits = jax.jit(lambda params: LanguageModel(config, params)(TOKENS))(
            params(config, dtype)
        )
        assert logits.dtype == dtype
        assert relative_error(logits, expected) < (
            1e-5 if dtype == "float32" else 1e-6
        )  # RoPE's tables are float32

        def decode(params, tokens, cache, counts, cache_is_empty):
            llama = build_model(config, params)
            hidden, cache = llama.decode(tokens, cache, counts, cache_is_empty=cache_is_empty)
            return llama.logits(hidden), cache

        decode = jax.jit(decode, static_argnums=4)
        cache, parts = KVCache.zeros(config, 2, 16, jnp.dtype(dtype)), []
        for first, counts in ((0, jnp.array([8, 8])), (8, jnp.array([4, 4], jnp.int32))):
            tokens = TOKENS[:, first : first + counts[0]]
            weights_ = decode_params(config, dtype)
            part, cache = decode(weights_, tokens, cache, counts, first == 0)
            parts.append(part)
        assert relative_error(np.concatenate(parts, axis=1), expected) < 1e-5
        assert cache.lengths.dtype == jnp.int32
        assert cache.keys[0].dtype == dtype


def test_fresh_parameters_are_float32():
    with jax.enable_x64(True):
        assert {
            leaf.dtype.name for leaf in jax.tree.leaves(initial_params(jax.random.key(0), CONFIG))
        } == {"float32"}


@pytest.mark.parametrize(
    ("draft_len", "temperature"), slow_but([(2, 0.7)], [(0, 0.0), (2, 0.0), (0, 0.7), (2, 0.7)])
)
def test_the_same_tokens_are_generated(draft_len, temperature):
    def generated(dtype):
        prompts = [
            Prompt(tuple(map(int, row)), SamplingParams(temperature=temperature), 16)
            for row in TOKENS
        ]
        engine, results = (
            Engine(LanguageModel(CONFIG, decode_params(CONFIG, dtype)), 2, draft_len=draft_len),
            {},
        )
        rows = [engine.submit(Request(prompt)) for prompt in prompts]
        while engine.busy:
            results.update(
                (row, event.completion.ids)
                for row, event in engine.step()
                if isinstance(event, Answer)
            )
        return np.array([results[row] for row in rows])

    expected = generated("float32")
    with jax.enable_x64(True):
        np.testing.assert_array_equal(generated("float32"), expected)
        assert generated("float64").shape == expected.shape
