"""Activations by name against the float64 oracle's parts, for both layouts."""

import dataclasses

import numpy as np
import pytest
from models import FAMILIES, LONG, SMALL, decode_params, params, weights

import jllama
from jllama.lab.checks import relative_error
from jllama.models import oracle
from jllama.models.language_model import LanguageModel

# The oracle's attention to the values of a unit matrix is its weights.
LENGTH = SMALL.head_dim
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, LENGTH))
SEGMENTS = np.array([[1] * 10 + [2] * 22, [1] * 32])
SCALED = dataclasses.replace(
    SMALL, rope_scaling=jllama.YarnScaling(factor=4.0, original_max_seq_len=16)
)
PARTS = ("", "/attention", "/feed_forward", "/attention_weights")
NAMES = [
    "embedding",
    *(f"layers/{n}{part}" for n in range(SMALL.num_layers) for part in PARTS),
    "final_norm",
]


def expected(config, tokens, segments):
    """What one row should give, in float64."""
    frequencies, positions = oracle.rope_frequencies(config, len(tokens)), np.arange(len(tokens))
    mask = np.tri(len(tokens), dtype=bool) & np.equal.outer(segments, segments)
    sharpness = config.rope_scaling.attention_factor**2 if config.rope_scaling else 1.0
    stacked = {name: np.float64(leaf) for name, leaf in weights(SMALL)["layers"].items()}
    x = np.float64(weights(SMALL)["embed"])[tokens]
    activations = {"embedding": x}
    for number in range(config.num_layers):
        w = {name: leaf[number] for name, leaf in stacked.items()}
        normed = oracle.rms_norm(x, w["attn_norm"], config.norm_eps)
        query, key, value = (
            np.tensordot(normed, w[name], axes=1).swapaxes(0, 1) for name in ("wq", "wk", "wv")
        )
        query, key = (
            oracle.rotate(array, positions, frequencies) for array in (sharpness * query, key)
        )
        unit = np.broadcast_to(np.eye(len(tokens)), key.shape)
        heads = oracle.attention(query, key, value, mask)
        activations[f"layers/{number}/attention_weights"] = oracle.attention(query, key, unit, mask)
        mixed = np.einsum("nth,nhe->te", heads, w["wo"])
        activations[f"layers/{number}/attention"] = mixed
        normed = oracle.rms_norm(x + mixed, w["mlp_norm"], config.norm_eps)
        added = oracle.swiglu(normed, w["w_gate"], w["w_up"], w["w_down"])
        activations[f"layers/{number}/feed_forward"] = added
        x = oracle.block(x, w, config, mask, positions, frequencies)
        activations[f"layers/{number}"] = x
    activations["final_norm"] = oracle.rms_norm(
        x, np.float64(weights(SMALL)["final_norm"]), config.norm_eps
    )
    return activations


@pytest.mark.parametrize(
    ("layout", "config", "segments"),
    [(params, SCALED, SEGMENTS), (decode_params, SMALL, None)],
    ids=["training, yarn, packed", "decoding, plain"],
)
def test_every_activation_is_the_oracles(layout, config, segments):
    model = LanguageModel(config, layout(SMALL))
    captured = model.capture(TOKENS, NAMES, segments)
    assert [*captured] == NAMES
    for row in range(len(TOKENS)):
        own = np.ones(LENGTH) if segments is None else segments[row]
        for name, value in expected(config, TOKENS[row], own).items():
            assert relative_error(captured[name][row], value) < 2e-6, name


def test_what_is_captured_makes_the_logits():
    """Blocks add up, a query's weights sum to one, and keys that are not seen have no weight."""
    config = FAMILIES["all at once"]
    model = LanguageModel(config, params(config))
    names = ["embedding", "final_norm"]
    names += [f"layers/{n}{part}" for n in range(config.num_layers) for part in PARTS]
    captured = {name: np.float64(value) for name, value in model.capture(TOKENS, names).items()}
    before = captured["embedding"]
    distances = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    for number, kind in enumerate(config.layer_kinds):
        added = captured[f"layers/{number}/attention"] + captured[f"layers/{number}/feed_forward"]
        assert relative_error(captured[f"layers/{number}"], before + added) < 1e-5
        before = captured[f"layers/{number}"]
        shares = captured[f"layers/{number}/attention_weights"]
        assert shares.shape == (2, config.num_heads, LENGTH, LENGTH)
        np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-6)
        is_seen = (distances >= 0) & (distances < (kind.window or LENGTH))
        assert np.all((shares > 0) == is_seen)
    logits = captured["final_norm"] @ np.float64(weights(config)["lm_head"])
    logits /= config.logits_scaling
    assert relative_error(model(TOKENS), logits) < 1e-5


def test_quantized_weights_give_activations_near_their_own():
    captured = LanguageModel(SMALL, decode_params(SMALL, quantize="int8")).capture(
        TOKENS, ["layers/1"]
    )
    for row in range(len(TOKENS)):
        value = expected(SMALL, TOKENS[row], np.ones(LENGTH))["layers/1"]
        assert 1e-5 < relative_error(captured["layers/1"][row], value) < 0.05


@pytest.mark.parametrize("name", ["layers/2", "layers/-1", "layers/0/attn", ""])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(
        jllama.UsageError,
        match=f"there is no activation {name}; there are embedding, final_norm, layers/0, "
        "layers/0/attention, layers/0/attention_weights, layers/0/feed_forward and so on",
    ):
        LanguageModel(SMALL, params(SMALL)).capture(TOKENS, ["layers/1", name])


def test_what_calling_a_model_refuses_is_refused():
    model = LanguageModel(LONG, params(LONG))
    with pytest.raises(jllama.UsageError, match="the model's context is 512"):
        model.capture(np.zeros((1, 513), int), ["layers/1"])
    with pytest.raises(jllama.UsageError, match="97; this model's are 0 to 96"):
        model.capture([[97]], ["layers/1"])
