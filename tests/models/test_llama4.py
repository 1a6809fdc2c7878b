"""Llama 4's text model beside transformers: files, chunks of attention, temperatures, decoding."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers_checkpoints import message
from jax.sharding import AbstractMesh
from safetensors.torch import load_file, save_file
from transformers import Llama4ForCausalLM, Llama4TextConfig

import jllama
from jllama.commands import cli
from jllama.core import UsageError
from jllama.core.model import KVCache
from jllama.formats.families import family_of
from jllama.formats.huggingface import config_from_huggingface
from jllama.formats.registry import convert
from jllama.models import oracle
from jllama.parallel.sharding import check_divides
from jllama.parallel.shards import AXES
from jllama.tokenizers.base import BytesTokenizer

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 70))
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 5,
    "max_position_embeddings": 256,
    "attention_chunk_size": 16,
    "floor_scale": 11,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
CASES = {
    "as in Scout": {},
    "without norms": {"use_qk_norm": False},
    "without chunks": {"attention_chunk_size": None},
    "without temperatures": {"attn_temperature_tuning": False},
    "more experts than rows": {"num_local_experts": 40},
    "as in Maverick": {"interleave_moe_layer_step": 2, "use_qk_norm": False},
    "one dense layer": {"moe_layers": [1, 2, 3]},
}


@pytest.fixture(scope="module", params=CASES)
def peer(request, tmp_path_factory):
    """A model of transformers in float64, and its folder."""
    config = Llama4TextConfig(**SIZES | CASES[request.param])
    torch.manual_seed(0)
    model = Llama4ForCausalLM._from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("llama4") / "peer"
    model.save_pretrained(folder)
    return model, folder


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def test_files_in_and_out(peer, tmp_path):
    theirs, folder = peer
    expected = logits_of(theirs)
    model = jllama.load(folder, "float32", layout="training")
    np.testing.assert_allclose(
        oracle.forward(model.params, TOKENS, model.config), expected, atol=1e-5
    )
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)
    jllama.save(model, tmp_path / "hf", "hf")
    again = Llama4ForCausalLM.from_pretrained(tmp_path / "hf").double()
    np.testing.assert_allclose(logits_of(again), expected, atol=1e-5)
    copy = jllama.load(tmp_path / "hf", "float32")
    assert copy.config == model.config
    np.testing.assert_allclose(copy(TOKENS), expected, atol=1e-5)


@pytest.mark.parametrize("case", [{}, CASES["as in Maverick"] | {"num_local_experts": 128}])
def test_gguf_in_and_out(case, tmp_path):
    """What llama.cpp decides itself must be as in this model."""
    sizes = SIZES | {"attention_chunk_size": 8192, "floor_scale": 8192} | case
    torch.manual_seed(0)
    Llama4ForCausalLM._from_config(Llama4TextConfig(**sizes)).save_pretrained(tmp_path / "hf")
    model = jllama.load(tmp_path / "hf", "float32")
    jllama.save(model, tmp_path / "m.gguf", "gguf")
    copy = jllama.load(tmp_path / "m.gguf", "float32")
    assert copy.config == model.config
    np.testing.assert_array_equal(copy(TOKENS), model(TOKENS))
    with_chunks = dataclasses.replace(model.config, attention_chunk=16)
    wrong = jllama.LanguageModel(with_chunks, model.params)
    expected = "llama.cpp's llama4 has attention_chunk 8192 for"
    assert expected in message(jllama.save, wrong, tmp_path / "w.gguf", "gguf")


@pytest.mark.parametrize("cuts", [[70], [7, 30, 31, 32, 70], [16, 32, 64, 65, 70]])
def test_decoding_at_splits(peer, cuts):
    theirs, folder = peer
    model = jllama.load(folder, "float32")
    llama = jllama.build_model(model.config, model.params)
    cache = KVCache.zeros(model.config, 2, 80)
    logits = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        part = TOKENS[:, start:stop]
        counts = jnp.full(2, stop - start)
        hidden, cache = llama.decode(part, cache, counts, cache_is_empty=start == 0)
        logits.append(llama.logits(hidden))
    np.testing.assert_allclose(np.concatenate(logits, 1), logits_of(theirs), atol=1e-5)


def test_rows_of_one_cache_are_in_chunks_of_their_own(peer):
    """Prompts of other lengths, and greedy answers over borders of chunks, also in int8."""
    theirs, folder = peer
    model = dataclasses.replace(jllama.load(folder, "float32"), tokenizer=BytesTokenizer())
    prompts = [TOKENS[0, :length].tolist() for length in (3, 15, 16, 30)]
    options = {"max_new_tokens": 20, "temperature": 0, "stop_ids": ()}
    completions = jllama.generate(model, prompts, **options)
    for prompt, completion in zip(prompts, completions, strict=True):
        # Not by transformers' ``generate``: behind the first chunk its cache gives other tokens.
        whole = logits_of(theirs, np.array([prompt + completion.ids]))[0]
        assert completion.ids == whole[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
    rounded = jllama.load(folder, "float32", quantize="int8")
    rounded = dataclasses.replace(rounded, tokenizer=BytesTokenizer())
    alone = [jllama.generate(rounded, [prompt], **options) for prompt in prompts]
    together = jllama.generate(rounded, prompts, **options)
    assert [each.ids for each in together] == [one.ids for (one,) in alone]


def test_chunks_count_tokens_and_not_positions(scout):
    """Positions only turn queries and keys."""
    model = jllama.load(scout, "float32", layout="training")
    positions = jnp.arange(70)[None] + 1000
    shifted = jllama.build_model(model.config, model.params).hidden(TOKENS, None, positions)
    whole = jllama.build_model(model.config, model.params).hidden(TOKENS)
    np.testing.assert_allclose(shifted, whole, atol=1e-4)


def test_packed_documents_are_as_alone(peer):
    """Chunks and temperatures count from the first token of a document."""
    theirs, folder = peer
    model = jllama.load(folder, "float32", layout="training")
    segments = jnp.array([[1] * 20 + [2] * 50, [1] * 45 + [2] * 25])
    packed = jllama.build_model(model.config, model.params)(TOKENS, segments)
    np.testing.assert_allclose(packed[0, 20:], logits_of(theirs, TOKENS[:1, 20:])[0], atol=1e-5)
    np.testing.assert_allclose(packed[1, :45], logits_of(theirs, TOKENS[1:, :45])[0], atol=1e-5)


@pytest.fixture(scope="module")
def scout(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("scout") / "peer"
    Llama4ForCausalLM._from_config(Llama4TextConfig(**SIZES)).save_pretrained(folder)
    return folder


def test_a_checkpoint_with_images_is_read_as_text(scout, tmp_path):
    """The published files have the text model inside, and a vision tower beside it."""
    expected = jllama.load(scout, "float32")
    fields = json.loads((scout / "config.json").read_text())
    whole = {"model_type": "llama4", "text_config": fields, "vision_config": {}}
    whole["architectures"] = ["Llama4ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(scout / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_model.class_embedding"] = torch.zeros(3)
    save_file(renamed, tmp_path / "model.safetensors")
    model = jllama.load(tmp_path, "float32")
    assert model.config == expected.config
    np.testing.assert_array_equal(model(TOKENS), expected(TOKENS))


def test_fields_as_published_and_wrong_ones(scout, tmp_path):
    fields = json.loads((scout / "config.json").read_text())

    def read(**changes):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        return jllama.load(tmp_path, "float32").config

    defaults = {"model_type": "llama4_text", "vocab_size": 202_048}
    assert dataclasses.asdict(config_from_huggingface(defaults, tmp_path)) == dataclasses.asdict(
        config_from_huggingface(Llama4TextConfig().to_dict(), tmp_path)
    )
    expected = jllama.load(scout, "float32").config
    (tmp_path / "model.safetensors").symlink_to(scout / "model.safetensors")
    assert read(attn_temperature_tuning=4, no_rope_layers=[], layer_types=None) == expected
    assert "has moe_layers [1, 4]; it must be a list" in message(lambda: read(moe_layers=[1, 4]))
    kinds = ["full_attention"] * 4
    assert "has other layer_types than chunked_attention" in message(
        lambda: read(layer_types=kinds)
    )
    assert "does not hold the model" in message(lambda: read(moe_layers=[1, 3]))


def test_what_does_not_go_together(scout):
    config = jllama.load(scout, "float32").config
    with pytest.raises(UsageError, match="router is sigmoid: experts_per_token must be 1"):
        dataclasses.replace(config, experts_per_token=2)
    with pytest.raises(UsageError, match="shared_expert is set without num_experts"):
        jllama.LlamaConfig(shared_expert=True)
    with pytest.raises(UsageError, match="dense_layers has all layers"):
        dataclasses.replace(config, dense_layers=(0, 1, 2, 3))
    with pytest.raises(UsageError, match="temperature_scale is nan"):
        dataclasses.replace(config, temperature_scale=float("nan"))
    with_weights = dataclasses.replace(config, qk_norm="head")
    assert "no family of models has" in message(family_of, with_weights)
    mesh = dict.fromkeys(AXES, 1) | {"sequence": 2}
    with pytest.raises(UsageError, match=r"mesh\.sequence is over 1"):
        check_divides(AbstractMesh(tuple(mesh.values()), AXES), config)


def test_gradients_are_those_of_torch(scout):
    theirs = Llama4ForCausalLM.from_pretrained(scout).double()
    targets = torch.tensor(TOKENS[:, 1:])
    logits = theirs(torch.tensor(TOKENS[:, :-1])).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 61), targets.reshape(-1)).backward()
    model = jllama.load(scout, "float32", layout="training")

    def loss(params):
        log_probs = jax.nn.log_softmax(jllama.build_model(model.config, params)(TOKENS[:, :-1]))
        return -jnp.take_along_axis(log_probs, jnp.array(TOKENS[:, 1:])[..., None], 2).mean()

    gradients = jax.grad(loss)(model.params)["layers"]
    block = theirs.model.layers[1].feed_forward
    router = block.router.weight.grad.numpy().T
    np.testing.assert_allclose(gradients["router"][1], router, atol=1e-6)
    down = block.experts.down_proj.grad.numpy().swapaxes(1, 2)
    np.testing.assert_allclose(gradients["experts_down"][1], down, atol=1e-6)
    shared = block.shared_expert.up_proj.weight.grad.numpy().T
    np.testing.assert_allclose(gradients["shared_up"][1], shared, atol=1e-6)


MAVERICK = """
data:
  tokenizer: bytes
model:
  num_layers: 4
  embed_dim: 32
  num_heads: 4
  num_kv_heads: 2
  head_dim: 8
  mlp_dim: 40
  max_seq_len: 128
  num_experts: 5
  expert_dim: 24
  dense_layers: [0, 2]
  no_rope_layers: [3]
  attention_chunk: 12
  temperature_step: 5
  experts_per_token: 1
  router: sigmoid
  shared_expert: true
training:
  steps: 3
  seq_len: 32
  batch_size: 4
  sample_tokens: 0
"""


@pytest.fixture(scope="module")
def maverick(tmp_path_factory):
    """The folder of a run, whose stacks differ in the number of layers."""
    folder = tmp_path_factory.mktemp("maverick")
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    (folder / "config.yaml").write_text(MAVERICK)
    train(folder, "base")
    return folder


def train(folder, name, *options):
    words = ["--data.path", str(folder / "text.txt"), "--run_dir", str(folder / name), *options]
    assert cli.run("train", [str(folder / "config.yaml"), *words]) == 0
    return jllama.load(folder / name, "float32", layout="training")


def test_a_trained_maverick_is_what_transformers_loads(maverick, tmp_path):
    model = jllama.load(maverick / "base", "float32", layout="training")
    stacks = model.params["layers"]
    assert [len(stacks[name]) for name in ("wq", "w_up", "shared_up", "router")] == [4, 2, 2, 2]
    tokens = TOKENS % model.config.vocab_size
    expected = oracle.forward(model.params, tokens, model.config)
    np.testing.assert_allclose(model(tokens), expected, atol=1e-5)
    jllama.save(model, tmp_path / "hf", "hf")
    theirs = Llama4ForCausalLM.from_pretrained(tmp_path / "hf").double()
    np.testing.assert_allclose(logits_of(theirs, tokens), expected, atol=1e-5)
    seen = model.capture(tokens, ["layers/3/experts", "layers/2/feed_forward"])
    assert seen["layers/3/experts"].shape == (2, 70, 1)
    with pytest.raises(UsageError, match="there is no activation layers/2/experts"):
        model.capture(tokens, ["layers/2/experts"])


def test_a_maverick_goes_on_and_answers(maverick):
    assert train(maverick, "base", "--resume", "auto", "--training.steps", "3").config
    model = jllama.load(maverick / "base")
    (completion,) = jllama.generate(model, ["to be"], max_new_tokens=5)
    assert len(completion.ids) == 5


@pytest.mark.parametrize("kind", ["lora", "dora", "int8"])
def test_adapters_of_layers_of_both_kinds(maverick, kind, tmp_path):
    base = jllama.load(maverick / "base", "float32", layout="training")
    options = ["--init_from", str(maverick / "base"), "--lora.rank", "2"]
    options += ["--lora.targets", '["wq", "w_up", "shared_down"]']
    options += {"lora": [], "dora": ["--lora.dora", "true"], "int8": ["--lora.base", "int8"]}[kind]
    model = train(maverick, f"adapters_{kind}", *options)
    for name in ("wq", "w_up", "shared_down"):
        change = abs(model.params["layers"][name] - base.params["layers"][name]).max(axis=(1, 2))
        assert (change > 0).all()
    merged = jllama.load(maverick / "base", "float32", adapter=maverick / f"adapters_{kind}")
    tokens = TOKENS % base.config.vocab_size
    np.testing.assert_allclose(merged(tokens), model(tokens), atol=0.2 if kind == "int8" else 1e-5)

    # PEFT adapts the same matrices of transformers' model.
    peft = importlib.import_module("peft")  # takes seconds
    jllama.save(base, tmp_path / "hf", "hf")
    source = maverick / f"adapters_{kind}"
    convert(tmp_path / "hf", tmp_path / "peft", "peft", adapter=source)
    theirs = peft.PeftModel.from_pretrained(
        Llama4ForCausalLM.from_pretrained(tmp_path / "hf"), tmp_path / "peft"
    )
    np.testing.assert_allclose(logits_of(theirs, tokens), merged(tokens), atol=1e-5)
    again = jllama.load(tmp_path / "hf", "float32", adapter=tmp_path / "peft")
    np.testing.assert_allclose(again(tokens), merged(tokens), atol=1e-5)


def test_some_layers_are_trained(maverick):
    options = ["--init_from", str(maverick / "base"), "--training.trainable", "layers/2/w_up"]
    base = jllama.load(maverick / "base", "float32", layout="training")
    model = train(maverick, "selected", *options)
    changed = {
        name: np.flatnonzero(
            (np.asarray(stack) != base.params["layers"][name]).reshape(len(stack), -1).any(1)
        )
        for name, stack in model.params["layers"].items()
    }
    assert {name: places.tolist() for name, places in changed.items() if len(places)} == {
        "w_up": [1]
    }
