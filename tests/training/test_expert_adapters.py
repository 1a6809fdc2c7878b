"""Adapters of experts: products, files and runs."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers_adapters import adapter_params, make_run
from transformers import AutoModelForCausalLM

import jllama
from jllama.commands import cli
from jllama.core import JllamaError, UsageError
from jllama.core.parameters import EXPERT_MATRICES
from jllama.formats.registry import convert
from jllama.lab.checks import random_params, relative_error
from jllama.models.config import LoraConfig
from jllama.models.lora import adapt, adapter_shapes, merge
from jllama.tokenizers.base import BytesTokenizer

CONFIG = jllama.LlamaConfig(
    264,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
    num_experts=5,
    experts_per_token=2,
    expert_dim=24,
    normalize_expert_weights=True,
)
LORA = LoraConfig(rank=3, alpha=5.0, targets=("wq", *EXPERT_MATRICES))
TOKENS = np.random.default_rng(0).integers(0, 200, (2, 17))
FAMILIES = {
    "mixtral": {},
    "qwen3_moe": {"qk_norm": "head"},
    "olmoe": {"qk_norm": "whole", "normalize_expert_weights": False},
}


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:1, :2]], ids=["many", "few"])
def test_products_and_gradients_are_those_of_merged_matrices(tokens):
    base = jax.tree.map(jnp.asarray, random_params(CONFIG, 0))
    adapter = jax.tree.map(jnp.asarray, adapter_params(CONFIG, LORA))

    def loss(adapter, join):
        logits = jllama.build_model(CONFIG, join(base, adapter))(tokens)
        return jnp.sin(logits).sum(), logits

    losses = jax.value_and_grad(loss, has_aux=True)
    (_, actual), gradients = losses(adapter, lambda *parts: adapt(*parts, LORA))
    (_, expected), exact = losses(adapter, lambda *parts: merge(*parts, CONFIG, LORA))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert relative_error(actual, jllama.build_model(CONFIG, base)(tokens)) > 0.1
    for own, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert relative_error(own, other) < 1e-5


def make_adapted(folder, config, lora):
    """The folders of a base and of a run that trained adapters of it."""
    model = jllama.LanguageModel(config, random_params(config, 0), BytesTokenizer())
    jllama.save(model, folder / "base", "hf")
    make_run(folder / "run", folder / "base", config, lora, adapter_params(config, lora))
    return folder


@pytest.fixture(params=FAMILIES)
def adapted(request, tmp_path):
    """Of each family, one of them with another scale."""
    config = dataclasses.replace(CONFIG, **FAMILIES[request.param])
    lora = dataclasses.replace(LORA, rank_stabilized=request.param == "mixtral")
    return make_adapted(tmp_path, config, lora)


def test_peft_reads_what_is_written(adapted):
    """It joins the experts' adapters as transformers joins their matrices."""
    base = adapted / "base"
    model = jllama.load(base, "float32", adapter=adapted / "run")
    assert relative_error(model(TOKENS), jllama.load(base, "float32")(TOKENS)) > 0.1
    convert(adapted / "run", adapted / "peft", "peft")
    peft = importlib.import_module("peft")  # takes seconds
    theirs = AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, adapted / "peft").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(model(TOKENS), expected, atol=2e-5)
    again = jllama.load(base, "float32", adapter=adapted / "peft")
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))


def test_files_that_join_experts_have_no_adapters_of_them(adapted):
    with pytest.raises(JllamaError, match="adapts experts, which such files join"):
        convert(adapted / "run", adapted / "adapter.gguf", "gguf-lora")
    assert not (adapted / "adapter.gguf").exists()


@pytest.mark.parametrize("targets", [EXPERT_MATRICES, ("experts_up", "shared_down", "w_up")])
def test_llama_4_joins_experts_when_it_is_merged(targets, tmp_path):
    """In every format, also into a base of few bits."""
    config = dataclasses.replace(
        CONFIG,
        **{"num_layers": 4, "experts_per_token": 1, "normalize_expert_weights": False},
        **{"router": "sigmoid", "shared_expert": True, "dense_layers": (0, 2)},
    )
    lora = dataclasses.replace(LORA, targets=targets)
    folder = make_adapted(tmp_path, config, lora)
    adapter = {"adapter": folder / "run"}
    base = jllama.load(folder / "base", "float32", layout="training")
    stacks = jax.tree.map(jnp.asarray, adapter_params(config, lora))
    expected = jllama.build_model(config, merge(base.params, stacks, config, lora))(TOKENS)
    model = jllama.load(folder / "base", "float32", **adapter)
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)
    convert(folder / "base", folder / "merged", "hf", **adapter)
    np.testing.assert_array_equal(jllama.load(folder / "merged")(TOKENS), model(TOKENS))
    jllama.save(base, folder / "low", "hf", dtype="bfloat16")
    convert(folder / "low", folder / "merged_low", "hf", **adapter)
    low = jllama.load(folder / "low", "float32", **adapter)
    merged = jllama.load(folder / "merged_low", "float32")
    np.testing.assert_array_equal(merged(TOKENS), low(TOKENS))


def test_a_quantized_base(tmp_path):
    config = dataclasses.replace(CONFIG, expert_dim=32)
    folder = make_adapted(tmp_path, config, LORA)
    convert(folder / "base", folder / "base.gguf", "gguf", dtype="q8_0")
    merged = jllama.load(folder / "base.gguf", "float32", adapter=folder / "run")
    base = jllama.load(folder / "base.gguf", "float32", layout="training")
    stacks = jax.tree.map(jnp.asarray, adapter_params(config, LORA))
    expected = jllama.build_model(config, merge(base.params, stacks, config, LORA))(TOKENS)
    np.testing.assert_allclose(merged(TOKENS), expected, atol=1e-5)


@pytest.mark.parametrize("base", ["auto", "int8"])
def test_a_run_trains_them_and_goes_on(base, tmp_path):
    model = jllama.LanguageModel(CONFIG, random_params(CONFIG, 0), BytesTokenizer())
    jllama.save(model, tmp_path / "base", "hf")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)

    def train(name, *options):
        arguments = ["--data.path", str(tmp_path / "text.txt"), "--run_dir", str(tmp_path / name)]
        arguments += ["--init_from", str(tmp_path / "base"), "--training.seq_len", "16"]
        arguments += ["--optimizer.learning_rate", "1e-2", "--training.batch_size", "4"]
        assert cli.run("train", [*arguments, "--training.sample_tokens", "4", *options]) == 0

    options = ["--lora.rank", "2", "--lora.base", base, "--training.steps", "3"]
    train("run", *options, "--lora.targets", '["wq", "experts_gate", "experts_up", "experts_down"]')
    trained = jllama.load(tmp_path / "run", "float32", layout="training")
    for name in ("wq", *EXPERT_MATRICES):
        change = abs(trained.params["layers"][name] - model.params["layers"][name])
        assert (change.max(axis=(-1, -2)) > 0).all()
    convert(tmp_path / "run", tmp_path / "peft", "peft")
    train("more", "--lora.init_from", str(tmp_path / "peft"), "--training.steps", "2")
    more = jllama.load(tmp_path / "more", "float32", layout="training")
    change = abs(more.params["layers"]["experts_up"] - trained.params["layers"]["experts_up"])
    assert (change.max(axis=(-1, -2)) > 0).all()


def test_experts_have_no_lengths_of_their_own():
    with pytest.raises(UsageError, match=r"targets has experts_gate, and experts have no DoRA"):
        adapter_shapes(CONFIG, dataclasses.replace(LORA, dora=True))
