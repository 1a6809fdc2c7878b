"""Files of the families related to Llama: in and out, against transformers, and as GGUF."""

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from helpers import assert_same_bits, slow_but
from helpers_checkpoints import message
from hypothesis import given
from hypothesis import strategies as st

from jllama.core.config import LlamaConfig
from jllama.formats import registry
from jllama.formats.families import FAMILIES, family_of
from jllama.formats.gguf_file import read_gguf_file, write_gguf_file
from jllama.formats.huggingface import config_from_huggingface, config_to_huggingface
from jllama.generation.generate import generate
from jllama.lab.checks import random_params, worst_error
from jllama.models import oracle
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import YarnScaling
from jllama.tokenizers.base import BytesTokenizer

BASE = LlamaConfig(
    259, 4, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=160, max_seq_len=512
)
YARN = YarnScaling(8.0, original_max_seq_len=64)
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_dim": 160}
OLMO = {"qk_norm": "whole", "norm_placement": "after"}


def changed(**options):
    return dataclasses.replace(BASE, **options)


CONFIGS = {
    "llama": BASE,
    "mistral": changed(sliding_window=20),
    "ministral": changed(sliding_window=20, full_attention_layers=(1, 3)),
    "qwen2": changed(attention_bias=True, tie_embeddings=True, rope_scaling=YARN),
    "qwen2 with windows": changed(
        attention_bias=True, sliding_window=20, full_attention_layers=(0, 1, 2)
    ),
    "qwen3": changed(qk_norm="head", head_dim=64),
    "qwen3 with windows": changed(qk_norm="head", sliding_window=20),
    "smollm3": changed(no_rope_layers=(3,), tie_embeddings=True),
    "olmo2": changed(**OLMO),
    "olmo3": changed(
        **OLMO,
        rope_theta=500_000.0,  # transformers takes no other from files of version 4
        sliding_window=20,
        full_attention_layers=(3,),
        rope_scaling=YARN,
        rope_scaling_layers="full_attention",
    ),
    "phi3": changed(partial_rotary_factor=0.75, sliding_window=20),
    "granite": changed(
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=1 / 64,
        logits_scaling=8.0,
    ),
    "mixtral": changed(**EXPERTS, normalize_expert_weights=True),
    "mixtral with windows": changed(**EXPERTS, normalize_expert_weights=True, sliding_window=20),
    "qwen3_moe": changed(
        **EXPERTS | {"expert_dim": 48}, normalize_expert_weights=True, qk_norm="head", head_dim=64
    ),
    "olmoe": changed(**EXPERTS, qk_norm="whole"),
}


FULL = ["qwen2", "olmo3", "phi3", "granite", "qwen3_moe"]
"""Together they have every option: ties, biases, windows, fused matrices, multipliers, experts."""
TWICE = ["qwen2 with windows", "qwen3", "mixtral with windows"]
"""Another configuration of the same family is enough for what takes long."""
families = pytest.mark.parametrize("name", slow_but(FULL, CONFIGS))


@functools.cache
def model_of(name):
    params = random_params(CONFIGS[name], 0, embed_std=0.1)
    return LanguageModel(CONFIGS[name], params)


TOKENS = np.random.default_rng(0).integers(0, BASE.vocab_size, (1, 100))


def transformers_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no float64
    )


@families
def test_files_are_those_of_transformers_and_of_gguf(name, tmp_path):
    """The oracle's logits by transformers; jllama reads the same bits from either file."""
    model = model_of(name)
    registry.save(model, tmp_path / "hf", "hf")
    registry.save(model, tmp_path / "model.gguf", "gguf")
    for path in ("hf", "model.gguf"):
        read = registry.load(tmp_path / path, layout="training")
        assert read.config == model.config
        assert_same_bits(read.params, model.params)
    peer = transformers_model(tmp_path / "hf")
    family = family_of(model.config)
    assert type(peer).__name__ == family.architecture
    assert name.startswith(family.model_type)
    with torch.no_grad():
        logits = peer(torch.tensor(TOKENS)).logits.numpy()
    assert worst_error(logits, oracle.forward(model.params, TOKENS, model.config)) < 1e-5


@families
def test_what_transformers_saves_is_read(name, tmp_path):
    """Its own files, with all of its fields, give the same weights, and the same bits again."""
    config = CONFIGS[name]
    fields = config_to_huggingface(config, "float32")
    fields = transformers.AutoConfig.for_model(**fields, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    peer = transformers.AutoModelForCausalLM.from_config(fields)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape))
    peer.save_pretrained(tmp_path / "peer")
    assert registry.open_checkpoint(tmp_path / "peer").config == config
    registry.convert(tmp_path / "peer", tmp_path / "model.gguf", "gguf")
    registry.convert(tmp_path / "model.gguf", tmp_path / "again", "hf")
    actual = (tmp_path / "again" / "model.safetensors").read_bytes()
    registry.convert(tmp_path / "peer", tmp_path / "straight", "hf")
    assert actual == (tmp_path / "straight" / "model.safetensors").read_bytes()
    tensors = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    for key, tensor in peer.state_dict().items():
        assert torch.equal(tensors[key], tensor)


@st.composite
def configs(draw):
    """Configurations of any family, with other numbers and layers."""
    config = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))]
    num_layers = draw(st.integers(1, 9))
    layers = st.lists(st.integers(0, num_layers - 1), unique=True).map(sorted).map(tuple)
    options = {"num_layers": num_layers, "tie_embeddings": draw(st.booleans())}
    for field in ("no_rope_layers", "full_attention_layers"):
        options[field] = draw(layers) if getattr(config, field) else ()
    if len(options["full_attention_layers"]) == num_layers:
        options["full_attention_layers"] = ()
    for field in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        if getattr(config, field) != 1:
            options[field] = draw(st.floats(0.01, 100))
    if config.sliding_window:
        options["sliding_window"] = draw(st.integers(1, 10_000))
    return dataclasses.replace(config, **options)


@given(config=configs())
def test_a_configuration_comes_back_from_either_spelling(config, tmp_path_factory):
    source = tmp_path_factory.getbasetemp() / "config.json"
    fields = json.loads(json.dumps(config_to_huggingface(config, "bfloat16")))
    four = {key: value for key, value in fields.items() if key not in ("rope_parameters", "dtype")}
    five = {
        key: value for key, value in fields.items() if key not in ("rope_scaling", "rope_theta")
    }
    for spelling in (fields, four, five):
        assert config_from_huggingface(spelling, source) == config
        peer = transformers.AutoConfig.for_model(**copy.deepcopy(spelling))
        saved = json.loads(peer.to_json_string(use_diff=False))
        assert config_from_huggingface(saved, source) == config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_fields_are_transformers_defaults(model_type, tmp_path):
    fields = {"model_type": model_type, "vocab_size": 32_000}
    peer = transformers.AutoConfig.for_model(model_type).to_dict() | fields
    assert config_from_huggingface(fields, tmp_path) == config_from_huggingface(peer, tmp_path)


MIXED = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("mistral", {"layer_types": MIXED}, "which transformers' MistralForCausalLM does not"),
        ("qwen2", {"layer_types": MIXED}, "which transformers' Qwen2ForCausalLM does not follow"),
        ("qwen3", {"layer_types": MIXED[:3]}, "list of sliding_attention or full_attention for"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types ['chunked"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers '2'"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers Non"),
        *(
            (name, {"num_hidden_layers": 2**40}, "num_layers is 1,099,511,627,776; it must be at")
            for name in ("qwen2", "smollm3", "olmo3")
        ),
        (
            "olmo3",
            {"rope_theta": 1e6},
            "rope_theta 1000000.0, which transformers' Olmo3ForCausalLM",
        ),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "Olmo3ForCausalLM ignores"),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            "Olmo3ForCausalLM ignores",
        ),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window 1; it must be true or false"),
        ("mistral", {"sliding_window": -4}, "sliding_window -4; it must be a positive whole"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers [1, 0]; it must be a list with 0"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers [1, 0, 2, 1]"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias true"),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("olmo2", {"sliding_window": 9}, "sliding_window 9"),
        ("phi3", {"rope_scaling": {"type": "su"}}, 'RoPE of type "su"; jllama\'s models of type'),
        ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, 'RoPE of type "yarn"'),
        ("granite", {"residual_multiplier": "1"}, 'residual_multiplier "1"'),
        ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers [1]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("mixtral", {"num_local_experts": 2, "num_experts": 3}, "two numbers of experts, num_expe"),
        ("llama", {"num_local_experts": 8}, "num_local_experts 8"),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                }
            },
            "it must be that of full_attention, without scaling",
        ),
    ],
)
def test_what_a_config_may_not_ask_for_is_named(name, fields, expected, tmp_path):
    stated = config_to_huggingface(BASE, "float32")
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        del stated[key]
    text = message(config_from_huggingface, stated | {"model_type": name} | fields, tmp_path / "c")
    assert expected in text


@pytest.mark.parametrize("name", ["mistral", "ministral", "phi3", "olmo3"])
def test_only_some_families_obey_use_sliding_window(name, tmp_path):
    """The others have the window whatever it says, as in transformers."""
    fields = config_to_huggingface(CONFIGS[name], "float32") | {"use_sliding_window": False}
    assert config_from_huggingface(fields, tmp_path) == CONFIGS[name]
    assert CONFIGS[name].sliding_window


@pytest.mark.parametrize("file_format", ["meta", "llama2c"])
def test_formats_of_llamas_refuse_them_by_name(file_format, tmp_path):
    for name in CONFIGS.keys() - {"llama"}:
        text = message(registry.save, model_of(name), tmp_path / "out", file_format)
        assert CONFIGS[name].extensions[0] in text
        assert not (tmp_path / "out").exists()


def test_a_mixture_of_families_has_the_native_format_alone(tmp_path):
    config = changed(qk_norm="head", attention_bias=True)
    model = LanguageModel(config, random_params(config, 0))
    for file_format in ("hf", "gguf"):
        text = message(registry.save, model, tmp_path / "out", file_format)
        assert "no family of models has attention_bias, qk_norm together" in text
    scaled = dataclasses.replace(CONFIGS["olmo3"], rope_scaling_layers="all")
    assert "no family" in message(family_of, scaled)


def test_what_llama_cpp_runs_otherwise_is_said(tmp_path, capsys):
    """Its SmolLM3 has fixed layers without rotation, and only its OLMo 2 has a window."""
    config = changed(no_rope_layers=(1,))
    model = LanguageModel(config, random_params(config, 0))
    text = message(registry.save, model, tmp_path / "m.gguf", "gguf")
    assert "no rotation in the layers (3,), this model in (1,)" in text
    for name, is_noted in {"mistral": True, "olmo3": False, "qwen2": False}.items():
        registry.save(model_of(name), tmp_path / f"{name}.gguf", "gguf")
        assert ("llama.cpp ignores the sliding window" in capsys.readouterr().err) == is_noted


def edited(source, target, changes):
    """Copy a GGUF file with other keys; None removes one."""
    metadata, tensors = read_gguf_file(source)
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    typed = [(key, tensor, GGMLQuantizationType.F32) for key, tensor in tensors.items()]
    write_gguf_file(target, metadata, typed, lambda _: None)
    return target


def test_keys_of_gguf(tmp_path):
    """Patterns may be absent; wrong ones are refused by name."""
    registry.save(model_of("olmo3"), tmp_path / "olmo.gguf", "gguf")
    registry.save(model_of("mistral"), tmp_path / "mistral.gguf", "gguf")
    pattern = "attention.sliding_window_pattern"

    def config(source, changes):
        return registry.load(edited(tmp_path / source, tmp_path / "m.gguf", changes)).config

    assert config("olmo.gguf", {f"olmo2.{pattern}": None}) == CONFIGS["olmo3"]
    assert config("mistral.gguf", {f"llama.{pattern}": None}) == CONFIGS["mistral"]
    every_layer = {f"llama.{pattern}": [False] * 4}
    assert config("mistral.gguf", every_layer) == BASE
    assert config("mistral.gguf", {"llama.attention.sliding_window": 0}) == BASE
    text = message(config, "mistral.gguf", {f"llama.{pattern}": [True] * 3})
    assert "it must be true or false for each of the 4 layers" in text
    text = message(config, "mistral.gguf", {"general.architecture": "gemma"})
    assert "has architecture 'gemma'; jllama reads llama, qwen2, qwen3" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in TWICE])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    """Over 200 tokens, ten times the sliding window, each with its own cache."""
    registry.save(model_of(name), tmp_path / "hf", "hf")
    peer = transformers_model(tmp_path / "hf")
    prompt = TOKENS[:1, :30]
    with torch.no_grad():
        expected = peer.generate(
            torch.tensor(prompt),
            attention_mask=torch.ones(prompt.shape, dtype=torch.int64),
            do_sample=False,
            max_new_tokens=200,
            min_new_tokens=200,
            pad_token_id=0,
        )
    read = dataclasses.replace(registry.load(tmp_path / "hf"), tokenizer=BytesTokenizer())
    (answer,) = generate(read, prompt[0].tolist(), max_new_tokens=200, temperature=0, stop_ids=())
    assert answer.ids == expected[0, 30:].tolist()
