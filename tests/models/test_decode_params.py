"""A model laid out for decoding: the same logits; in eight bits, those of the rounded weights."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from models import FAMILIES, SMALL, decode_params, family_weights, forward, laid_out, params

from jllama.core.parameters import PARAMETERS, joined_groups, shape_of
from jllama.functional import DecodeMatrix
from jllama.generation.generate import completions
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.lab.checks import relative_error
from jllama.models import oracle
from jllama.models.language_model import LanguageModel

TIED = dataclasses.replace(SMALL, tie_embeddings=True)


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


@pytest.mark.parametrize(
    ("config", "joins"),
    [(TIED, False), (FAMILIES["all at once"], True)],
    ids=["tied, apart", "all options, joined"],
)
def test_logits_are_those_of_the_rounded_weights(config, joins):
    weights = jax.device_get(params(config))
    layout = laid_out(params(config), config, "int8", joins)
    apart = jax.device_get(taken_apart(layout, config))
    assert (apart["layers"]["0"].keys() == layout.weights["layers"]["0"].keys()) == (not joins)
    leaves = jax.tree.leaves(apart, is_leaf=lambda leaf: isinstance(leaf, DecodeMatrix))
    num_tables = 1 if config.tie_embeddings else 2
    num_matrices = sum(isinstance(leaf, DecodeMatrix) for leaf in leaves)
    assert num_matrices == 7 * config.num_layers + num_tables

    def rounded(leaf, name, matrix):
        """What the matrix stands for, in the oracle's shape."""
        if not isinstance(matrix, DecodeMatrix):
            return leaf
        outputs_first = np.float64(matrix.values) * np.float64(matrix.scale)[:, None]
        return (outputs_first if name == "embed" else outputs_first.T).reshape(leaf.shape)

    expected_params = {
        name: rounded(leaf, name, apart[name]) for name, leaf in weights.items() if name != "layers"
    }
    expected_params["layers"] = {
        name: np.stack(
            [rounded(leaf, name, apart["layers"][str(i)][name]) for i, leaf in enumerate(stack)]
        )
        for name, stack in weights["layers"].items()
    }
    tokens = np.arange(12)[None]
    logits = forward(config, layout, tokens)
    assert relative_error(logits, oracle.forward(expected_params, tokens, config)) < 2e-3
    assert 1e-3 < relative_error(logits, oracle.forward(weights, tokens, config)) < 0.1


def test_decoding_takes_the_likeliest_tokens_of_a_whole_pass():
    model = LanguageModel(SMALL, decode_params(SMALL, quantize="int8"))
    ((_, written),) = completions(model, [Prompt([1, 2, 3], SamplingParams(temperature=0.0), 9)])
    logits = np.asarray(forward(SMALL, model.params, np.array([[1, 2, 3, *written.ids]])))
    assert len(written.ids) == 9
    assert written.ids == np.argmax(logits[0, 2:-1], axis=-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_rounding_costs_every_family_what_it_costs_a_llama(name):
    """In logits, relative to their standard deviation."""
    config, weights = FAMILIES[name], family_weights(name)
    # All experts of a token, as rounding turns a choice that is nearly a tie.
    config = dataclasses.replace(config, experts_per_token=config.num_experts)
    layout = laid_out(weights, config, "int8")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    exact = oracle.forward(weights, tokens, config)
    error = np.asarray(forward(config, layout, tokens)) - exact
    assert 0.001 < np.std(error) / np.std(exact) < 0.05
