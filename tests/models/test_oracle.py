"""The oracle itself: every setting moves its logits by far more than other tests tolerate."""

import dataclasses
import functools
import inspect

import numpy as np
import pytest
from helpers import half_split_from_interleaved

from jllama.core.config import LlamaConfig
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling

VISIBLE = 100 * 1e-5
SEQ = 128
LLAMA_3 = Llama3Scaling(32.0)
YARN = YarnScaling(4.0, original_max_seq_len=2048)
DYNAMIC = DynamicScaling(4.0, original_max_seq_len=32)
CONFIG = LlamaConfig(
    vocab_size=97,
    num_layers=2,
    embed_dim=96,  # not num_heads * head_dim
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=160,
    rope_theta=500_000.0,
    rope_scaling=LLAMA_3,
)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, SEQ))
POSITIONS = 160 * np.arange(SEQ)[None]  # past 8,192
PARAMS = random_params(CONFIG, 0)


@functools.cache
def logits(config):
    return oracle.forward(PARAMS, TOKENS, config, POSITIONS)


def test_shape_dtype_and_size():
    assert logits(CONFIG).shape == (1, SEQ, CONFIG.vocab_size)
    assert logits(CONFIG).dtype == np.float64
    assert 0.1 < logits(CONFIG).std() < 10


@pytest.mark.parametrize(
    ("scaling", "changed"),
    [
        (LLAMA_3, {"factor": 8.0}),
        (LLAMA_3, {"high_freq_factor": 8.0}),
        (LLAMA_3, {"low_freq_factor": 2.0}),
        (LLAMA_3, {"original_max_seq_len": 4096}),
        (YARN, {"factor": 8.0}),  # with the attention factor of 4
        (YARN, {"attention_factor": 1.0}),
        (YARN, {"beta_fast": 16.0}),
        (YARN, {"beta_slow": 2.0}),
        (YARN, {"original_max_seq_len": 4096}),
        (DYNAMIC, {"factor": 8.0}),
        (DYNAMIC, {"original_max_seq_len": 64}),
    ],
    ids=str,
)
def test_rotary_knobs_move_the_logits(scaling, changed):
    config = CONFIG if scaling == LLAMA_3 else moved_base(scaling)
    other = dataclasses.replace(config, rope_scaling=dataclasses.replace(scaling, **changed))
    assert relative_error(logits(other), logits(config)) > VISIBLE


def moved_base(scaling, **changed):
    return dataclasses.replace(CONFIG, rope_theta=10_000.0, rope_scaling=scaling, **changed)


@pytest.mark.parametrize("scaling", [LLAMA_3, YARN, DYNAMIC], ids=lambda scaling: scaling.type)
def test_kinds_of_scaling_and_the_base_move_the_logits(scaling):
    config = moved_base(scaling)
    others = [moved_base(None), moved_base(LinearScaling(scaling.factor))]
    others.append(dataclasses.replace(config, rope_theta=20_000.0))
    if scaling == DYNAMIC:
        others.append(moved_base(DYNAMIC, max_seq_len=4096))
    for other in others:
        assert relative_error(logits(other), logits(config)) > VISIBLE


def test_dynamic_scaling_goes_by_the_longer_of_sequence_and_context():
    config = LlamaConfig(head_dim=64, max_seq_len=256, rope_scaling=DYNAMIC)
    np.testing.assert_array_equal(
        oracle.rope_frequencies(config, 100), oracle.rope_frequencies(config, 256)
    )
    assert np.all(oracle.rope_frequencies(config, 512)[1:] < oracle.rope_frequencies(config)[1:])
    short, plain = (
        dataclasses.replace(config, max_seq_len=32, rope_scaling=scaling)
        for scaling in (DYNAMIC, None)
    )
    np.testing.assert_array_equal(
        oracle.rope_frequencies(short, 32), oracle.rope_frequencies(plain)
    )


def test_eps_moves_the_logits_at_small_activations():
    params = PARAMS | {"embed": PARAMS["embed"] * np.float32(1e-2)}
    for eps in (1e-6, 1e-5):
        expected, other = (
            oracle.forward(params, TOKENS[:, :24], dataclasses.replace(CONFIG, norm_eps=value))
            for value in (eps, 10 * eps)
        )
        assert relative_error(other, expected) > VISIBLE


LAYERS = PARAMS["layers"]


WRONG_LAYERS = {
    "grouping": {"wk": LAYERS["wk"][:, :, ::-1], "wv": LAYERS["wv"][:, :, ::-1]},
    "interleaved": {name: half_split_from_interleaved(LAYERS[name]) for name in ("wq", "wk")},
    "interleaved keys": {"wk": half_split_from_interleaved(LAYERS["wk"])},
    "attn_norm": {"attn_norm": np.ones_like(LAYERS["attn_norm"])},
    "mlp_norm": {"mlp_norm": np.ones_like(LAYERS["mlp_norm"])},
    "exchanged norms": {"attn_norm": LAYERS["mlp_norm"], "mlp_norm": LAYERS["attn_norm"]},
    "gate and up": {"w_gate": LAYERS["w_up"], "w_up": LAYERS["w_gate"]},
    "in reverse": {name: stack[::-1] for name, stack in LAYERS.items()},
}


@pytest.mark.parametrize("name", [*WRONG_LAYERS, "final_norm"])
def test_a_wrong_layout_moves_the_logits(name):
    params = PARAMS | {"layers": LAYERS | WRONG_LAYERS.get(name, {})}
    if name == "final_norm":
        params[name] = np.ones_like(PARAMS[name])
    other = oracle.forward(params, TOKENS, CONFIG, POSITIONS)
    assert relative_error(other, logits(CONFIG)) > VISIBLE


@pytest.mark.parametrize(
    ("shapes", "mask", "sentence"),
    [
        (
            [(4, 8, 6)] * 3,
            np.zeros((8, 8)),
            "mask is float64; it must be boolean, true where a query sees a key",
        ),
        ([(2, 4, 8, 6)] * 3, np.ones((8, 8), bool), "one sequence at a time"),
        ([(4, 8, 6), (3, 8, 6), (3, 8, 6)], np.ones((8, 8), bool), "heads a multiple of kv_heads"),
        (
            [(8, 4, 6)] * 3,
            np.ones((8, 8), bool),
            r"q \[8, 4, 6\], .*: they must be \[heads, seq, head_dim\]",
        ),
    ],
    ids=["additive mask", "batch", "heads", "seq before heads"],
)
def test_attention_says_what_it_takes(shapes, mask, sentence):
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(oracle.attention)(
            *map(np.ones, shapes), mask
        )  # without the types that tests check


def test_tied_head_is_the_embedding_transposed():
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = random_params(tied, 0)
    assert "lm_head" not in params
    tokens = TOKENS[:, :24]
    expected = oracle.forward(params | {"lm_head": params["embed"].T}, tokens, CONFIG)
    np.testing.assert_array_equal(oracle.forward(params, tokens, tied), expected)


def test_segments_equal_documents_alone():
    tokens, cut = TOKENS[:, :64], 20
    segments = (np.arange(64) >= cut)[None].astype(np.int32)
    packed = oracle.forward(PARAMS, tokens, CONFIG, segments=segments)
    for part in (slice(cut), slice(cut, None)):
        # Positions count from 0: only differences matter.
        alone = oracle.forward(PARAMS, tokens[:, part], CONFIG)
        assert relative_error(packed[:, part], alone) < 1e-12


def test_logits_are_causal_and_rows_are_independent():
    tokens = np.tile(TOKENS[:, :64], (2, 1))
    tokens[1, 40:] = (tokens[1, 40:] + 1) % CONFIG.vocab_size
    both = oracle.forward(PARAMS, tokens, CONFIG)
    assert relative_error(both[1, :40], both[0, :40]) < 1e-14
    assert relative_error(both[1, 40:], both[0, 40:]) > VISIBLE
    assert relative_error(both[1:], oracle.forward(PARAMS, tokens[1:], CONFIG)) < 1e-14
