"""A judge that we did not write: transformers' LlamaForCausalLM on the same weights."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from jllama.core.config import LlamaConfig
from jllama.core.model import rope_frequencies
from jllama.lab.checks import random_params, relative_error
from jllama.models.build import build_model
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import DynamicScaling, Llama3Scaling, YarnScaling

SEQ = 512
BASE = LlamaConfig(
    vocab_size=97,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=160,
    max_seq_len=16_384,
    norm_eps=3e-5,  # neither of the usual ones, nor transformers' default
)
CONFIGS = {
    "multi-query, tied": dataclasses.replace(BASE, num_kv_heads=1, tie_embeddings=True),
    "Llama 3.2": dataclasses.replace(BASE, rope_theta=500_000.0, rope_scaling=Llama3Scaling(32.0)),
    # A larger attention factor would sharpen their attention, and the error of their angles, past
    # the tolerance.
    "yarn, every knob": dataclasses.replace(
        BASE,
        rope_theta=500_000.0,
        rope_scaling=YarnScaling(
            4.0, original_max_seq_len=4096, beta_fast=24.0, beta_slow=2.0, attention_factor=1.1
        ),
    ),
}
TOKENS = np.random.default_rng(0).integers(0, BASE.vocab_size, (2, SEQ))
# The second row reaches 8,687. Farther out their angles, float32 products, are off by more than the
# tolerance: up to 15,330 their logits differ from the float64 oracle's by up to 1e-4, and
# jllama's by 2e-6.
POSITIONS = np.stack([np.arange(SEQ), 17 * np.arange(SEQ)])


def their_config(config):
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        if scaling.type == "yarn":
            rope |= {
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
            # A factor that follows from the others is theirs to work out, too.
            if scaling != dataclasses.replace(scaling, attention_factor=0.0):
                rope["attention_factor"] = scaling.attention_factor
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.mlp_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="eager",
        dtype="float32",
    )


def their_model(config, params):
    """LlamaForCausalLM in float32 with these weights; every one of its own is overwritten."""
    other = transformers.LlamaForCausalLM(their_config(config)).eval()
    weights = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
    }
    weights["lm_head.weight"] = params["embed"] if config.tie_embeddings else params["lm_head"].T
    for index in range(config.num_layers):
        layer = {name: stack[index] for name, stack in params["layers"].items()}
        embed = config.embed_dim
        layer = {
            "input_layernorm": layer["attn_norm"],
            "self_attn.q_proj": layer["wq"].reshape(embed, -1).T,
            "self_attn.k_proj": layer["wk"].reshape(embed, -1).T,
            "self_attn.v_proj": layer["wv"].reshape(embed, -1).T,
            "self_attn.o_proj": layer["wo"].reshape(-1, embed).T,
            "post_attention_layernorm": layer["mlp_norm"],
            "mlp.gate_proj": layer["w_gate"].T,
            "mlp.up_proj": layer["w_up"].T,
            "mlp.down_proj": layer["w_down"].T,
        }
        weights |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    state = {name: torch.from_numpy(np.array(value, order="C")) for name, value in weights.items()}
    other.load_state_dict(state, strict=True)
    return other


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name):
    config = CONFIGS[name]
    params = random_params(config, 0)
    if config.tie_embeddings:
        # Logits are near one, as the others'.
        params["final_norm"] /= np.float32(np.sqrt(config.embed_dim))
    with torch.no_grad():
        expected = their_model(config, params)(
            input_ids=torch.from_numpy(TOKENS),
            position_ids=torch.from_numpy(POSITIONS),
            # Without a mask, transformers would take every gap in the positions for the start of a
            # packed document.
            attention_mask=torch.ones(TOKENS.shape, dtype=torch.int64),
            use_cache=False,
        ).logits.numpy()

    @jax.jit
    def actual(params, tokens, positions):
        llama = build_model(config, params)
        return llama.logits(llama.hidden(tokens, None, positions))

    assert 0.5 < expected.std() < 2
    errors = np.abs(np.asarray(actual(params, TOKENS, POSITIONS)) - expected).max(axis=(1, 2))
    assert errors[0] < 1e-5
    assert errors[1] < 1e-4


def test_activations_and_attention_weights_equal_transformers():
    """Their hidden states are the inputs of all layers, and the last one after the final norm."""
    params, tokens = random_params(BASE, 0), TOKENS[:, :40]
    with torch.no_grad():
        expected = their_model(BASE, params)(
            input_ids=torch.from_numpy(tokens),
            use_cache=False,
            output_hidden_states=True,
            output_attentions=True,
        )
    inputs = [
        "embedding",
        *(f"layers/{number}" for number in range(BASE.num_layers - 1)),
        "final_norm",
    ]
    shares = [f"layers/{number}/attention_weights" for number in range(BASE.num_layers)]
    captured = LanguageModel(BASE, params).capture(tokens, inputs + shares)
    for name, value in zip(
        inputs + shares, [*expected.hidden_states, *expected.attentions], strict=True
    ):
        assert relative_error(captured[name], value) < 1e-5, name


@pytest.mark.parametrize("length", [128, SEQ])
def test_dynamic_logits_equal_transformers_below_and_above_the_context(length):
    scaling = DynamicScaling(4.0, original_max_seq_len=128)
    config = dataclasses.replace(BASE, max_seq_len=128, rope_scaling=scaling)
    params, tokens = random_params(config, 0), TOKENS[:, :length]
    with torch.no_grad():
        expected = their_model(config, params)(
            input_ids=torch.from_numpy(tokens), use_cache=False
        ).logits.numpy()
    actual = jax.jit(lambda params, tokens: build_model(config, params)(tokens))(params, tokens)
    assert np.abs(np.asarray(actual) - expected).max() < 1e-5


lengths = st.sampled_from([512, 4096, 8192, 32_768])


def their_frequencies(config, seq_len=None):
    """Their formula in float64; in float32, as they run it, it is off by up to 6e-7."""
    initialize = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[config.rope_scaling.type]
    with mock.patch.multiple(torch, float=torch.float64, float32=torch.float64):
        frequencies, factor = initialize(their_config(config), None, seq_len=seq_len)
    assert frequencies.dtype == torch.float64
    return frequencies.numpy(), factor


@given(
    head_dim=st.sampled_from([16, 64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    fast=st.floats(8, 64),
    slow=st.floats(0.25, 4),
    original=lengths,
)
def test_yarn_frequencies_and_attention_factor_equal_transformers(
    head_dim, theta, factor, fast, slow, original
):
    scaling = YarnScaling(factor, original_max_seq_len=original, beta_fast=fast, beta_slow=slow)
    config = dataclasses.replace(BASE, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    frequencies, attention_factor = their_frequencies(config)
    np.testing.assert_allclose(rope_frequencies(config), frequencies, rtol=1e-12)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-14)


@given(
    head_dim=st.sampled_from([16, 64, 80, 128]),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1, 64),
    original=lengths,
    seq_len=st.integers(1, 100_000),
)
def test_dynamic_frequencies_equal_transformers(head_dim, theta, factor, original, seq_len):
    scaling = DynamicScaling(factor, original_max_seq_len=original)
    config = dataclasses.replace(
        BASE, head_dim=head_dim, rope_theta=theta, max_seq_len=original, rope_scaling=scaling
    )
    frequencies, _ = their_frequencies(config, seq_len)
    np.testing.assert_allclose(rope_frequencies(config, seq_len), frequencies, rtol=1e-12)
