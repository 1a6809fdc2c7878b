"""A model laid out for decoding: the same logits; in eight bits, those of the rounded weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from models import FAMILIES, family_weights, forward

from jllama import oracle
from jllama.config import LlamaConfig
from jllama.decode_params import decode_layout
from jllama.functional import DecodeMatrix
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.language_model import LanguageModel
from jllama.model import build_model
from jllama.parameters import PARAMETERS, joined_groups, shape_of
from jllama.verify.checks import random_params

SIZES = {
    "vocab_size": 61,
    "num_layers": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 64,
}


def taken_apart(params, config):
    """The weights with each joined matrix as those that it is made of."""
    layers = {index: dict(layer) for index, layer in params.weights["layers"].items()}
    for layer in layers.values():
        for joined, names in joined_groups(config).items():
            if joined not in layer:
                continue
            matrix = layer.pop(joined)
            for name in names:
                shape = shape_of(PARAMETERS[f"layers/{name}"], config)[1:]
                size = math.prod(shape[1:])
                layer[name] = DecodeMatrix(matrix.values[:size], matrix.scale[:size], shape)
                matrix = DecodeMatrix(matrix.values[size:], matrix.scale[size:], matrix.shape)
    return params.weights | {"layers": layers}


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        *(
            LlamaConfig(**SIZES, head_dim=32, mlp_dim=96, tie_embeddings=tied)
            for tied in (False, True)
        ),
        FAMILIES["all at once"],
    ],
    ids=["llama", "tied", "all options"],
)
def test_logits_are_those_of_the_rounded_weights(config, joins):
    tied, layers = config.tie_embeddings, range(config.num_layers)
    weights = random_params(config, 0)
    params = decode_layout(jax.tree.map(jnp.asarray, weights), config, "int8", joins)
    apart = taken_apart(params, config)
    assert (apart["layers"]["0"].keys() == params.weights["layers"]["0"].keys()) == (not joins)
    leaves = jax.tree.leaves(apart, is_leaf=lambda leaf: isinstance(leaf, DecodeMatrix))
    assert sum(isinstance(leaf, DecodeMatrix) for leaf in leaves) == 7 * len(layers) + (
        1 if tied else 2
    )

    def rounded(leaf, number, name):
        """What the matrix stands for, in the oracle's shape."""
        matrix = apart["layers"][number][name] if number else apart[name]
        if not isinstance(matrix, DecodeMatrix):
            return leaf
        outputs_first = (
            np.asarray(matrix.values, np.float64) * np.asarray(matrix.scale, np.float64)[:, None]
        )
        return (outputs_first if name == "embed" else outputs_first.T).reshape(leaf.shape)

    tokens = np.arange(12)[None]
    expected_params = {
        name: rounded(leaf, None, name) for name, leaf in weights.items() if name != "layers"
    }
    expected_params["layers"] = {
        name: np.stack([rounded(stack[i], str(i), name) for i in layers])
        for name, stack in weights["layers"].items()
    }
    expected = oracle.forward(expected_params, tokens, config)
    found = jax.jit(lambda params: build_model(config, params)(jnp.asarray(tokens)))(params)
    assert np.abs(np.asarray(found) - expected).max() < 2e-3 * np.abs(expected).max()
    exact = oracle.forward(weights, tokens, config)
    assert 1e-3 < np.abs(np.asarray(found) - exact).max() / np.abs(exact).max() < 0.1


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_decoding(quantize, joins):
    config = LlamaConfig(**SIZES, head_dim=32, mlp_dim=96)
    weights = random_params(config, 0)
    params = decode_layout(jax.tree.map(jnp.asarray, weights), config, quantize, joins)
    model = LanguageModel(config, params)
    ((_, written),) = completions(model, [Prompt([1, 2, 3], SamplingParams(temperature=0.0), 9)])
    logits = jax.jit(lambda ids: build_model(config, params)(ids))(
        jnp.array([[1, 2, 3, *written.ids]])
    )
    assert len(written.ids) == 9
    assert written.ids == np.argmax(logits[0, 2:-1], axis=-1).tolist()
    if quantize is None:
        expected = oracle.forward(weights, np.array([[1, 2, 3, *written.ids]]), config)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", slow_but(["all at once"], FAMILIES))
def test_rounding_costs_every_family_what_it_costs_a_llama(name):
    """In logits, relative to their standard deviation."""
    config, weights = FAMILIES[name], family_weights(name)
    params = decode_layout(jax.tree.map(jnp.asarray, weights), config, "int8")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    error = forward(config, params, tokens) - oracle.forward(weights, tokens, config)
    assert 0.001 < np.std(error) / np.std(oracle.forward(weights, tokens, config)) < 0.05
