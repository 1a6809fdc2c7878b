"""Adapters: made for their base alone, read and written in every format, merged as they are unmerged."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
import yaml
from models import FILE, SMALL, forward, weights

from jllama.checkpoints.registry import convert, load, open_checkpoint, save
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.checkpoints.tensors import base_fingerprint
from jllama.config import LoraConfig
from jllama.language_model import LanguageModel
from jllama.lora import adapted, adapter_shapes
from jllama.parameters import map_by_path
from jllama.verify.checks import relative_error

CONFIG = dataclasses.replace(SMALL, vocab_size=97, head_dim=48, max_seq_len=80)
"""Heads that are not as wide together as the embedding, sharing keys and values."""
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 70))
KINDS = {"lora": {}, "rslora": {"rank_stabilized": True}, "dora": {"dora": True}}
TOLERANCE = 1e-5


def adapter_params(config, lora, seed=0):
    """An adapter whose part of each product is about half as large as its base's."""
    rng = np.random.default_rng(seed)
    layers = {}
    for name, (inputs, outputs) in adapter_shapes(config, lora).items():
        a = rng.standard_normal((config.num_layers, inputs, lora.rank)) / np.sqrt(inputs)
        b = rng.standard_normal((config.num_layers, lora.rank, outputs)) / np.sqrt(4 * lora.rank) / lora.scale
        layers[name] = {"a": a, "b": b}
        if lora.dora:
            layers[name]["magnitude"] = rng.uniform(0.6, 1.2, (config.num_layers, outputs))
    return {"layers": map_by_path(lambda _, leaf: leaf.astype(np.float32), layers)}


def make_run(folder, base, config, lora, params, fingerprint=None, step=7, **fields):
    """The folder of a run that trained an adapter."""
    folder.mkdir()
    fields = {"model": dataclasses.asdict(config), "lora": dataclasses.asdict(lora), "init_from": str(base)} | fields
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(fields))))
    checkpoints = RunCheckpoints(folder / "checkpoints")
    checkpoints.save(step, params, {"step": np.int32(step)}, {"base_fingerprint": fingerprint}, None)
    checkpoints.wait()
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of float32 numbers that bfloat16 holds, as most released models are."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    rounded = map_by_path(lambda _, leaf: np.float32(leaf.astype(jnp.bfloat16)), weights(CONFIG))
    save(LanguageModel(CONFIG, rounded), folder, "hf")
    return folder


@functools.cache
def run_of(base, kind):
    lora = LoraConfig(rank=6, alpha=9.0, **KINDS[kind])
    folder = base.parent / kind
    return make_run(folder, base, CONFIG, lora, adapter_params(CONFIG, lora), base_fingerprint(open_checkpoint(base)))


def logits(path, **options):
    model = load(path, layout="training", **options)
    return np.asarray(forward(model.config, model.params, TOKENS))


def transformers_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def torch_logits(model):
    return model(torch.tensor(TOKENS)).logits.numpy()


def test_a_base_has_one_fingerprint_in_every_format_and_dtype(tmp_path):
    rounded = map_by_path(lambda _, leaf: np.float32(leaf.astype(jnp.bfloat16)), weights(FILE))
    save(LanguageModel(FILE, rounded), tmp_path / "hf", "hf")
    expected = base_fingerprint(open_checkpoint(tmp_path / "hf"))
    assert len(expected) == 129
    for to, dtype in [("orbax", None), ("gguf", None), ("llama2c", None), ("meta", None), ("gguf", "bfloat16")]:
        convert(tmp_path / "hf", target := tmp_path / f"{to}-{dtype}", to, dtype)
        assert base_fingerprint(open_checkpoint(target)) == expected
    for dtype in ("float16", "q8_0"):  # rounded: the norms are left
        convert(tmp_path / "hf", target := tmp_path / f"{dtype}.gguf", "gguf", dtype)
        assert base_fingerprint(open_checkpoint(target)) == expected.split(":")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_trained_an_adapter_is_its_base_with_that(base, kind):
    run = run_of(base, kind)
    lora = open_checkpoint(run).adapter.lora
    params = load(base, layout="training").params
    expected = forward(CONFIG, adapted(params, adapter_params(CONFIG, lora), lora), TOKENS)
    assert relative_error(logits(run), expected) < 1e-6
    assert np.array_equal(logits(run), logits(base, adapter=run))
    assert relative_error(logits(base), expected) > 0.1
    assert open_checkpoint(run).step == open_checkpoint(base, adapter=run).step == 7
