"""A whole checkpoint passes in every format, and each damage to its files is told by name."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.formats import tensors
from jllama.formats.registry import convert, load, save
from jllama.formats.tensors import Checkpoint, LazyTensor, TensorsOfParams, tensor_specs
from jllama.lab import layerwise
from jllama.lab.checkpoint import (
    HARD,
    PROSE,
    TOLERANCE,
    config_findings,
    tokenizer_change,
    verify_checkpoint,
)
from jllama.lab.checks import random_params, relative_error, worst_error
from jllama.lab.layerwise import run_layerwise, update_error
from jllama.models import oracle
from jllama.models.build import build_model
from jllama.models.language_model import LanguageModel
from jllama.models.presets import PRESETS, nearest_preset
from jllama.models.rope_scaling import DynamicScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

TOKENIZER = train_sentencepiece([PROSE], 400)
CONFIG = LlamaConfig(
    vocab_size=TOKENIZER.vocab_size,
    num_layers=4,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=128,
    max_seq_len=128,
)
TINY = dataclasses.replace(CONFIG, vocab_size=97, num_layers=2, max_seq_len=64)
TOKENS = [1, 60, 5, 96] * 12  # as many in all tests of TINY, which share programs


@pytest.fixture(scope="module")
def model():
    """A small Llama that knows the beginning of the built-in text by heart."""
    ids = np.array([TOKENIZER.bos_id, *TOKENIZER.encode(PROSE)])
    row = jnp.asarray(ids[None, : CONFIG.max_seq_len])
    optimizer = optax.adam(1e-2)

    def loss(params):
        llama = build_model(CONFIG, params)
        total, count = llama.loss(llama.hidden(row[:, :-1]), row[:, 1:], row[:, 1:] >= 0)
        return total / count

    def step(_, state):
        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    @jax.jit
    def train(params):
        params, _ = jax.lax.fori_loop(0, 30, step, (params, optimizer.init(params)))
        return params

    params = train(random_params(CONFIG, 0, embed_std=0.25))
    return LanguageModel(CONFIG, jax.tree.map(np.asarray, params), TOKENIZER)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "hf"
    save(model, path, "hf")
    return path


@pytest.fixture(scope="module")
def whole(folder):
    stages = []
    report = verify_checkpoint(folder, on_stage=stages.append)
    assert stages == ["opening", "embedding", *(f"layer {n} of 4" for n in (1, 2, 3, 4)), "head"]
    return report


@pytest.fixture
def damaged(model, tmp_path):
    """The report of a copy whose parameters a function changes."""

    def verify(change):
        params = jax.tree.map(np.copy, model.params)
        change(params)
        save(dataclasses.replace(model, params=params), tmp_path / "hf", "hf")
        return verify_checkpoint(tmp_path / "hf")

    return verify


def random_checkpoint(config, seed=0, **options):
    params = random_params(config, seed, **options)
    return Checkpoint(config, TensorsOfParams(config, params)), params


def test_a_whole_checkpoint_passes(whole, folder):
    assert whole.passed
    assert (whole.problems, whole.findings, whole.first_divergent_layer) == ([], [], None)
    assert (whole.path, whole.config, whole.preset) == (str(folder), CONFIG, "")
    assert whole.num_parameters == count_parameters(CONFIG)
    assert whole.num_tokens == CONFIG.max_seq_len  # the text is cut
    assert len(whole.layer_errors) == CONFIG.num_layers
    assert all(0 < error < TOLERANCE / 10 for error in (*whole.layer_errors, whole.logits_error))
    assert 1 < whole.perplexity < 2
    assert 0 < whole.bits_per_byte < 0.5
    assert json.loads(json.dumps(dataclasses.asdict(whole)))["config"]["embed_dim"] == 64


@pytest.mark.parametrize("to", ["gguf", "orbax", "llama2c", "meta"])
def test_the_same_weights_have_the_same_report_in_every_format(whole, folder, tmp_path, to):
    convert(folder, tmp_path / to, to)
    result = verify_checkpoint(tmp_path / to)
    assert result.problems == []
    assert result.fingerprint == whole.fingerprint
    assert result.perplexity == pytest.approx(whole.perplexity, rel=1e-9)


def test_a_wider_dtype_keeps_the_fingerprint_and_a_narrower_one_does_not(whole, folder, tmp_path):
    convert(folder, tmp_path / "narrow", "hf", "bfloat16")
    convert(tmp_path / "narrow", tmp_path / "wide", "hf", "float32")
    narrow, wide = (verify_checkpoint(tmp_path / name) for name in ("narrow", "wide"))
    assert narrow.fingerprint == wide.fingerprint != whole.fingerprint
    assert narrow.passed


@pytest.mark.parametrize(
    "changed",
    [
        {
            "tie_embeddings": True,
            "norm_eps": 1e-6,
            "head_dim": 24,
            "rope_scaling": Llama3Scaling(8.0, original_max_seq_len=32),
        },
        {"num_kv_heads": 1, "rope_scaling": YarnScaling(4.0, original_max_seq_len=16)},
        {"num_kv_heads": 4, "rope_scaling": DynamicScaling(2.0, original_max_seq_len=16)},
    ],
    ids=str,
)
def test_streamed_logits_are_those_of_the_whole_models(changed):
    config = dataclasses.replace(TINY, **changed)
    checkpoint, params = random_checkpoint(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, len(TOKENS)))
    with jax.default_matmul_precision("highest"):
        run = run_layerwise(checkpoint, tokens[0].tolist())
    assert relative_error(run.oracle_logits, oracle.forward(params, tokens, config)[0]) < 1e-12
    assert worst_error(run.jax_logits, run.oracle_logits) < TOLERANCE / 5
    assert max(run.layer_errors) < TOLERANCE / 5
    assert run.damage == []


def test_the_fingerprint_is_a_hash_of_keys_shapes_and_values():
    checkpoint, _ = random_checkpoint(TINY)
    content = b"".join(
        f"{key} {list(tensor.shape)}\n".encode() + np.ascontiguousarray(tensor, "<f4").tobytes()
        for key, tensor in checkpoint.tensors.items()
    )
    assert run_layerwise(checkpoint, TOKENS).fingerprint == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_of_several_blocks(monkeypatch, tied):
    checkpoint, params = random_checkpoint(dataclasses.replace(TINY, tie_embeddings=tied))
    params["embed"][90:] = 0
    params["embed"][5], params["embed"][60, 3] = np.nan, np.inf
    params["layers"]["w_up"][1][:] = 0
    params["layers"]["w_up"][1][:, 50] = 1e-30
    params["layers"]["wq"][0][:] = 0
    at_once = run_layerwise(checkpoint, TOKENS)
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 2048)
    result = run_layerwise(checkpoint, TOKENS)
    assert result.fingerprint == at_once.fingerprint
    assert result.damage == at_once.damage
    assert "embed (65 of 6,208 numbers)" in result.damage[0]
    assert "in layers/0/wq:" in result.damage[1]
    assert relative_error(result.oracle_logits, at_once.oracle_logits) < 1e-12
    assert relative_error(result.jax_logits, at_once.jax_logits) < 1e-6
    assert np.isfinite(result.oracle_logits).all()


def watched(key, tensor, reads):
    """A tensor that notes when it is read."""

    def read(rows):
        reads.append(key)
        return tensor[rows]

    return LazyTensor(tensor.shape, tensor.dtype, read)


@pytest.mark.parametrize("tied", [True, False])
def test_each_tensor_is_read_once_in_order_and_a_tied_head_at_the_end_again(tied):
    config, reads = dataclasses.replace(TINY, tie_embeddings=tied), []
    checkpoint, _ = random_checkpoint(config)
    tensors = {key: watched(key, tensor, reads) for key, tensor in checkpoint.tensors.items()}
    run_layerwise(dataclasses.replace(checkpoint, tensors=tensors), TOKENS)
    assert reads == [stored.key for stored in tensor_specs(config)] + ["embed"] * tied


# Damage


def test_numbers_that_are_not_finite_are_counted_and_spoil_nothing_else(damaged, whole):
    def change(params):
        params["layers"]["w_up"][1, 7, 3:6] = np.nan
        params["layers"]["w_up"][1, 0, 0] = -np.inf
        params["embed"][399, 5] = np.inf

    result = damaged(change)
    (problem,) = result.problems
    assert "embed (1 of 25,600 numbers)" in problem
    assert "layers/1/w_up (4 of 8,192 numbers)" in problem
    assert max(result.layer_errors) < TOLERANCE
    assert result.logits_error < TOLERANCE
    assert result.perplexity == pytest.approx(whole.perplexity, rel=0.5)


def test_a_layer_of_zeros_is_named(damaged):
    def change(params):
        for stack in params["layers"].values():
            stack[2] = 0

    zeros = damaged(change).problems[0]
    assert "nothing but zeros" in zeros
    assert all(f"layers/2/{name}" in zeros for name in ("attn_norm", "wq", "w_down"))
    assert "layers/1" not in zeros


def test_swapped_layers_show_in_the_perplexity_which_is_reported_and_not_judged(damaged, whole):
    def change(params):
        for stack in params["layers"].values():
            stack[[0, 3]] = stack[[3, 0]]

    result = damaged(change)
    assert result.passed
    assert result.first_divergent_layer is None
    assert result.perplexity > 30 * whole.perplexity
    assert result.fingerprint != whole.fingerprint


def test_another_models_tokenizer(model, tmp_path):
    other = train_sentencepiece([HARD * 9 + "zq xv jk " * 50], 380)
    save(dataclasses.replace(model, tokenizer=other), tmp_path / "hf", "hf")
    result = verify_checkpoint(tmp_path / "hf")
    assert any("20 belong to none" in finding for finding in result.findings)
    assert result.bits_per_byte > 2.25  # byte frequencies alone give at most 4.5


def test_an_untrained_model_computes_rightly(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=BytesTokenizer.vocab_size)
    save(LanguageModel(config, random_params(config, 0), BytesTokenizer()), tmp_path / "run")
    result = verify_checkpoint(tmp_path / "run")
    assert result.passed
    assert result.bits_per_byte > 8


def test_the_figures_are_sums_over_the_text(folder, whole):
    tokens = [TOKENIZER.bos_id, *TOKENIZER.encode(PROSE)][: whole.num_tokens]
    model = load(folder, layout="training")
    logits = oracle.forward(jax.tree.map(np.asarray, model.params), np.array([tokens]), CONFIG)[0]
    log_probs = np.log(oracle.softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
    text_bytes = len(TOKENIZER.decode(tokens).encode())
    assert whole.perplexity == pytest.approx(np.exp(-log_probs.mean()), rel=1e-4)
    assert whole.bits_per_byte == pytest.approx(-log_probs.sum() / np.log(2) / text_bytes, rel=0.02)


def test_an_absurd_loss_is_the_largest_perplexity(damaged):
    def change(params):
        params["lm_head"] *= -1e6

    result = damaged(change)
    assert 1e300 < result.perplexity < np.inf
    assert np.isfinite(result.bits_per_byte)


def test_too_few_rows_for_the_tokenizer(model, tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=300)
    few = dataclasses.replace(model, config=config, params=random_params(config, 0))
    save(few, tmp_path / "hf", "hf")
    with pytest.raises(JllamaError, match="400 tokens but the embedding has 300 rows"):
        verify_checkpoint(tmp_path / "hf")


# The text


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", UsageError, "the text is empty"),
        (" \n", UsageError, "the text is empty"),
        ("a\ud800b", JllamaError, "lone surrogate"),
    ],
)
def test_a_text_without_words_is_refused(folder, text, error, message):
    with pytest.raises(error, match=message):
        verify_checkpoint(folder, text)


def test_no_text_is_judged(folder, whole):
    result = verify_checkpoint(folder, "print(np.arange(10) @ np.eye(5))\n" * 9)
    assert result.passed
    assert result.perplexity > 2 * whole.perplexity


def test_without_a_tokenizer_random_tokens_are_run(model, tmp_path):
    save(dataclasses.replace(model, tokenizer=None), tmp_path / "hf", "hf")
    result = verify_checkpoint(tmp_path / "hf")
    assert result.passed
    assert any("there is no tokenizer" in finding for finding in result.findings)
    assert result.num_tokens == CONFIG.max_seq_len
    assert (result.perplexity, result.bits_per_byte) == (None, None)


def test_a_context_of_one_token_predicts_nothing(tmp_path):
    config = dataclasses.replace(TINY, vocab_size=400, max_seq_len=1)
    save(LanguageModel(config, random_params(config, 0), TOKENIZER), tmp_path / "hf", "hf")
    result = verify_checkpoint(tmp_path / "hf")
    assert result.passed
    assert result.perplexity is None
    assert any(
        "none of the text's 1 tokens can be predicted" in finding for finding in result.findings
    )


class Forgetful(BytesTokenizer):
    def __init__(self, lost):
        self.lost = lost

    def decode(self, ids):
        return super().decode(ids).replace(self.lost, "")


def test_a_tokenizer_that_changes_texts():
    for tokenizer in (TOKENIZER, BytesTokenizer()):
        assert tokenizer_change(tokenizer, PROSE) == tokenizer_change(tokenizer, HARD) == ""
    assert tokenizer_change(Forgetful("ü"), PROSE) == ""
    assert tokenizer_change(Forgetful("ü"), HARD) == "'üße, naïve —' came back as 'ße, naïve — '"
    assert tokenizer_change(Forgetful("woman"), HARD) == ""
    assert (
        tokenizer_change(Forgetful("woman"), PROSE) == "'woman who li' came back as ' who lived i'"
    )


# What a wrong computation looks like


def test_the_first_wrong_layer_is_named(folder, model, tmp_path, monkeypatch):
    marked = model.params["layers"]["attn_norm"][2, 0]
    right = layerwise.build_layer

    def wrong_in_layer_2(config, weights):
        doubled = jnp.where(weights["attn_norm"][0] == marked, 1.001, 1.0)
        return right(config, weights | {"wo": doubled * weights["wo"]})

    # Of another configuration, so that no compiled layer is used again.
    config = dataclasses.replace(CONFIG, rope_theta=10_001.0)
    save(dataclasses.replace(model, config=config), tmp_path / "hf", "hf")
    monkeypatch.setattr(layerwise, "build_layer", wrong_in_layer_2)
    result = verify_checkpoint(tmp_path / "hf")
    assert result.first_divergent_layer == 2
    assert [error < TOLERANCE for error in result.layer_errors] == [True, True, False, True]
    assert "1 of 4 layers" in result.problems[0]
    assert "first of layers/2" in result.problems[0]
    assert "the logits are not the float64 oracle's" in result.problems[1]


@pytest.mark.parametrize("changed", [{"rope_theta": 20_000.0}, {"norm_eps": 1e-4}], ids=str)
def test_a_wrong_number_shows_in_the_layers(monkeypatch, changed):
    checkpoint, _ = random_checkpoint(
        dataclasses.replace(TINY, head_dim=64), embed_std=0.05, query_gain=2.0
    )
    right = layerwise._layer

    def wrong(weights, x, config, index):
        return right(weights, x, dataclasses.replace(config, **changed), index)

    monkeypatch.setattr(layerwise, "_layer", wrong)
    assert run_layerwise(checkpoint, TOKENS).layer_errors[0] > 30 * TOLERANCE


def test_a_massive_activation_hides_no_error():
    rng = np.random.default_rng(0)
    x, update = rng.standard_normal((2, 64, 32))
    x[0, 3] = 27_000.0
    wrong = update.copy()
    wrong[:, 7] *= 1.01
    assert relative_error(x + wrong, x + update) < 1e-5
    assert update_error(wrong, update, x) == pytest.approx(0.01, rel=0.1)
    rounded = (x + update).astype(np.float32) - x
    assert update_error(rounded, update, x) < TOLERANCE / 5


def test_the_error_of_an_update():
    zeros, ones = np.zeros((4, 3)), np.ones((4, 3))
    assert update_error(ones, ones, ones) == 0
    assert update_error(zeros, zeros, zeros) == 0
    assert update_error(ones, zeros, zeros) == 1
    assert update_error(2 * ones, ones, 100 * ones) == 0.5
    spoilt = ones.copy()
    spoilt[1, 2] = np.nan
    assert np.isnan(update_error(spoilt, ones, ones))


# The configuration


def test_a_released_llama_is_ordinary():
    for config in PRESETS.values():
        assert PRESETS[nearest_preset(config)] == config
        assert config_findings(config) == []


LLAMA3 = "llama3, factor {}, from 8,192 tokens"


@pytest.mark.parametrize(
    ("name", "field", "value", "shown", "usual"),
    [
        ("llama3.2-1b", "rope_scaling", None, "absent", LLAMA3.format(32)),
        ("llama3.1-8b", "rope_scaling", None, "absent", LLAMA3.format(8)),
        ("llama2-7b", "norm_eps", 1e-6, "1e-06", "1e-05"),
        ("llama2-13b", "vocab_size", 32_001, "32,001", "32,000"),
        ("smollm2-135m", "rope_theta", 1e4, "10,000", "100,000"),
        ("llama3.2-3b", "tie_embeddings", False, "false", "true"),
        ("stories-15m", "max_seq_len", 512, "512", "256"),
    ],
)
def test_a_field_that_a_released_llama_has_otherwise(name, field, value, shown, usual):
    sentence = f"{field} is {shown}; {name}, of the same shape, has {usual}"
    assert config_findings(dataclasses.replace(PRESETS[name], **{field: value})) == [sentence]


def test_unusual_fields_of_an_own_shape():
    assert config_findings(CONFIG) == []
    odd = LlamaConfig(400, 3, 64, 4, head_dim=24, norm_eps=3e-5, rope_theta=12_345.0)
    assert nearest_preset(odd) == ""
    assert [finding.split(";")[0] for finding in config_findings(odd)] == [
        "norm_eps is 3e-05",
        "rope_theta is 12,345",
        "head_dim is 24",
    ]
    assert config_findings(odd)[0] == "norm_eps is 3e-05; released Llamas have 1e-05, 1e-06"
