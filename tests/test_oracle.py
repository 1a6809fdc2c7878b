"""The oracle itself: every setting moves its logits by far more than other tests tolerate."""

import dataclasses
import inspect

import numpy as np
import pytest

from jllama import oracle
from jllama.config import LlamaConfig
from jllama.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from jllama.verify.checks import random_params, relative_error

VISIBLE = 100 * 1e-5
SEQ = 512
CONFIG = LlamaConfig(
    vocab_size=97,
    num_layers=2,
    embed_dim=96,  # not num_heads * head_dim
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=160,
    rope_theta=500_000.0,
    rope_scaling=Llama3Scaling(32.0),
)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, SEQ))
POSITIONS = {"first 512": np.arange(SEQ)[None], "past 8,192": 40 * np.arange(SEQ)[None]}
PARAMS = random_params(CONFIG, 0)


def replace_layers(params, **changed):
    return params | {"layers": params["layers"] | changed}


@pytest.fixture(scope="module", params=POSITIONS, ids=POSITIONS.keys())
def positions(request):
    return POSITIONS[request.param]


@pytest.fixture(scope="module")
def logits(positions):
    return oracle.forward(PARAMS, TOKENS, CONFIG, positions)


def test_shape_dtype_and_size(logits):
    assert logits.shape == (1, SEQ, CONFIG.vocab_size)
    assert logits.dtype == np.float64
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 1_000_000.0},
        {"rope_scaling": None},
        {"rope_scaling": Llama3Scaling(8.0)},
        {"rope_scaling": LinearScaling(32.0)},
        {"rope_scaling": Llama3Scaling(32.0, high_freq_factor=8.0)},
        {"rope_scaling": Llama3Scaling(32.0, low_freq_factor=2.0)},
        {"rope_scaling": Llama3Scaling(32.0, original_max_seq_len=4096)},
    ],
    ids=str,
)
def test_rotary_knobs_move_the_logits(logits, positions, changed):
    other = oracle.forward(PARAMS, TOKENS, dataclasses.replace(CONFIG, **changed), positions)
    assert relative_error(other, logits) > VISIBLE


YARN = YarnScaling(4.0, original_max_seq_len=2048)
DYNAMIC = DynamicScaling(4.0, original_max_seq_len=128)


@pytest.mark.parametrize(
    ("scaling", "changed"),
    [
        (YARN, {"rope_theta": 20_000.0}),
        (YARN, {"rope_scaling": None}),
        (YARN, {"rope_scaling": LinearScaling(4.0)}),
        (
            YARN,
            {"rope_scaling": dataclasses.replace(YARN, factor=8.0)},
        ),  # with the attention factor of 4
        (YARN, {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.0)}),
        (YARN, {"rope_scaling": dataclasses.replace(YARN, beta_fast=16.0)}),
        (YARN, {"rope_scaling": dataclasses.replace(YARN, beta_slow=2.0)}),
        (YARN, {"rope_scaling": dataclasses.replace(YARN, original_max_seq_len=4096)}),
        (DYNAMIC, {"rope_theta": 20_000.0}),
        (DYNAMIC, {"rope_scaling": None}),
        (DYNAMIC, {"rope_scaling": LinearScaling(4.0)}),
        (DYNAMIC, {"rope_scaling": dataclasses.replace(DYNAMIC, factor=8.0)}),
        (DYNAMIC, {"rope_scaling": dataclasses.replace(DYNAMIC, original_max_seq_len=256)}),
        (DYNAMIC, {"max_seq_len": 2 * SEQ}),
    ],
    ids=str,
)
def test_yarn_and_dynamic_knobs_move_the_logits(positions, scaling, changed):
    config = dataclasses.replace(CONFIG, rope_theta=10_000.0, rope_scaling=scaling)
    expected = oracle.forward(PARAMS, TOKENS, config, positions)
    other = oracle.forward(PARAMS, TOKENS, dataclasses.replace(config, **changed), positions)
    assert relative_error(other, expected) > VISIBLE


def test_dynamic_scaling_goes_by_the_longer_of_sequence_and_context():
    config = LlamaConfig(head_dim=64, max_seq_len=256, rope_scaling=DYNAMIC)
    np.testing.assert_array_equal(
        oracle.rope_frequencies(config, 100), oracle.rope_frequencies(config, 256)
    )
    assert np.all(oracle.rope_frequencies(config, 512)[1:] < oracle.rope_frequencies(config)[1:])
    short, plain = (
        dataclasses.replace(config, max_seq_len=128, rope_scaling=scaling)
        for scaling in (DYNAMIC, None)
    )
    np.testing.assert_array_equal(
        oracle.rope_frequencies(short, 128), oracle.rope_frequencies(plain)
    )


def test_eps_moves_the_logits_at_small_activations():
    params = PARAMS | {"embed": PARAMS["embed"] * np.float32(1e-2)}
    for eps in (1e-6, 1e-5):
        expected = oracle.forward(params, TOKENS, dataclasses.replace(CONFIG, norm_eps=eps))
        other = oracle.forward(params, TOKENS, dataclasses.replace(CONFIG, norm_eps=10 * eps))
        assert relative_error(other, expected) > VISIBLE


def test_grouping_and_channel_order_move_the_logits(logits, positions):
    layers = PARAMS["layers"]
    swapped = replace_layers(PARAMS, wk=layers["wk"][:, :, ::-1], wv=layers["wv"][:, :, ::-1])
    assert relative_error(oracle.forward(swapped, TOKENS, CONFIG, positions), logits) > VISIBLE
    interleaved = {
        name: np.concatenate([layers[name][..., 0::2], layers[name][..., 1::2]], -1)
        for name in ("wq", "wk")
    }
    other = oracle.forward(replace_layers(PARAMS, **interleaved), TOKENS, CONFIG, positions)
    assert relative_error(other, logits) > VISIBLE


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


@pytest.mark.parametrize("name", ["attn_norm", "mlp_norm", "final_norm"])
def test_norm_scales_move_the_logits(logits, positions, name):
    if name == "final_norm":
        params = PARAMS | {name: np.ones_like(PARAMS[name])}
    else:
        params = replace_layers(PARAMS, **{name: np.ones_like(PARAMS["layers"][name])})
    assert relative_error(oracle.forward(params, TOKENS, CONFIG, positions), logits) > VISIBLE


def test_tied_head_is_the_embedding_transposed():
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = random_params(tied, 0)
    assert "lm_head" not in params
    expected = oracle.forward(params | {"lm_head": params["embed"].T}, TOKENS, CONFIG)
    np.testing.assert_array_equal(oracle.forward(params, TOKENS, tied), expected)
    assert relative_error(oracle.forward(PARAMS, TOKENS, CONFIG), expected) > VISIBLE


def test_segments_equal_documents_alone():
    tokens, cut = TOKENS[:, :64], 20
    segments = (np.arange(64) >= cut)[None].astype(np.int32)
    packed = oracle.forward(PARAMS, tokens, CONFIG, segments=segments)
    for part in (slice(cut), slice(cut, None)):
        alone = oracle.forward(
            PARAMS, tokens[:, part], CONFIG
        )  # positions count from 0: only differences matter
        assert relative_error(packed[:, part], alone) < 1e-12


def test_logits_are_causal_and_rows_are_independent():
    tokens = np.tile(TOKENS[:, :64], (2, 1))
    tokens[1, 40:] = (tokens[1, 40:] + 1) % CONFIG.vocab_size
    logits = oracle.forward(PARAMS, tokens, CONFIG)
    assert relative_error(logits[1, :40], logits[0, :40]) < 1e-14
    assert relative_error(logits[1, 40:], logits[0, 40:]) > VISIBLE
    assert relative_error(logits[1:], oracle.forward(PARAMS, tokens[1:], CONFIG)) < 1e-14
