"""transformers loads what we write and computes what we compute; we read what it writes; the rest
is one sentence.
"""

import copy
import dataclasses
import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from helpers import assert_same_bits
from helpers_checkpoints import change, in_dtype, message, opened
from hypothesis import given
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.formats import huggingface
from jllama.formats.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    download,
    read,
    recognizes,
    write,
)
from jllama.formats.registry import convert, load
from jllama.formats.tensors import load_params, size_bytes, tensor_specs
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

BASE = LlamaConfig(
    vocab_size=61,
    num_layers=2,
    embed_dim=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=20,
    mlp_dim=40,
    max_seq_len=128,
    norm_eps=3e-5,  # neither of the usual ones, nor transformers' default
)


def with_rope(scaling, **changes):
    return dataclasses.replace(BASE, rope_scaling=scaling, **changes)


LONG = {"rope_theta": 500_000.0, "max_seq_len": 512}
CONFIGS = {
    "multi-head": dataclasses.replace(BASE, num_kv_heads=4, head_dim=12, norm_eps=1e-5),
    "grouped, explicit head_dim": BASE,
    "multi-query, tied": dataclasses.replace(BASE, num_kv_heads=1, tie_embeddings=True),
    "linear": with_rope(LinearScaling(4.0)),
    "Llama 3.1": with_rope(Llama3Scaling(8.0, original_max_seq_len=32), **LONG),
    "Llama 3.2": with_rope(Llama3Scaling(32.0, original_max_seq_len=32), **LONG),
    "yarn": with_rope(YarnScaling(4.0, original_max_seq_len=128), **LONG),
    "yarn, every knob": with_rope(
        YarnScaling(
            4.0, original_max_seq_len=128, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3
        ),
        **LONG,
    ),
    "dynamic": with_rope(DynamicScaling(4.0, original_max_seq_len=64), max_seq_len=64),
}
TOKENS = np.random.default_rng(0).integers(0, BASE.vocab_size, (2, 100))  # longer than dynamic's 64

TINY = LlamaConfig(
    vocab_size=7, num_layers=2, embed_dim=4, num_heads=2, num_kv_heads=1, head_dim=6, mlp_dim=5
)
EMBED, INDEX = "model.embed_tokens.weight", "model.safetensors.index.json"
TIED = dataclasses.replace(TINY, tie_embeddings=True)
TINY_PARAMS, TIED_PARAMS = random_params(TINY, 1), random_params(TIED, 1)


def written(folder, checkpoint, dtype=None):
    """A folder of ours, and that each byte of it was reported."""
    folder.mkdir(exist_ok=True)
    done = []
    write(checkpoint, folder, dtype, done.append)
    assert sum(done) == size_bytes(checkpoint, dtype)
    return folder


def their_logits(folder, tokens):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float64
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model(torch.from_numpy(tokens), use_cache=False).logits.numpy()


@pytest.fixture
def tiny(tmp_path):
    """A folder of ours to damage."""
    return written(tmp_path / "tiny", opened(TINY, TINY_PARAMS))


@pytest.fixture
def tied(tmp_path):
    return written(tmp_path / "tied", opened(TIED, TIED_PARAMS))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def fields_of(folder):
    return json.loads((folder / "config.json").read_text())


# Against transformers.


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_ours_and_all_logits_agree(name, tmp_path, caplog):
    """With the float64 reference; jllama's own are compared with that elsewhere."""
    config = CONFIGS[name]
    params = random_params(config, 1)
    folder = written(tmp_path / "ours", opened(config, params))
    again = read(folder)
    assert again.config == config
    assert_same_bits(load_params(again), params)
    transformers.logging.enable_propagation()
    for length in (64, 100):  # dynamic scaling begins at 64
        tokens = TOKENS[:, :length]
        expected = oracle.forward(params, tokens, config)
        assert relative_error(their_logits(folder, tokens), expected) < 1e-5
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "shard_bytes"),
    [
        ("multi-head", 10**9),
        ("yarn, every knob", 10**9),
        ("dynamic", 10**9),
        ("linear", 20_000),
        ("multi-query, tied", 20_000),
    ],
)
def test_what_transformers_saves_is_read(name, shard_bytes, tmp_path):
    config = CONFIGS[name]
    torch.manual_seed(0)
    fields = transformers.LlamaConfig(**config_to_huggingface(config, "float32"))
    theirs = transformers.LlamaForCausalLM(fields)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_bytes)
    assert (tmp_path / INDEX).exists() == (shard_bytes < 10**9)
    assert recognizes(tmp_path)
    checkpoint = read(tmp_path)
    assert checkpoint.config == config
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    for stored in tensor_specs(config):
        tensor = checkpoint.tensors[stored.key]
        assert np.array_equal(tensor[0 : tensor.shape[0]], state[stored.name("huggingface")])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 150])
@pytest.mark.parametrize("config", [TINY, TIED], ids=["head", "tied"])
def test_there_and_back_is_the_same_bits(config, dtype, shard_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", shard_bytes)
    params = in_dtype(random_params(config, 2), dtype)
    first = written(tmp_path / "first", opened(config, params))
    second = written(tmp_path / "second", read(first))
    assert_same_bits(load_params(read(second)), params)
    fields = fields_of(second)
    assert fields["dtype"] == fields["torch_dtype"] == np.dtype(dtype).name
    assert contents(first) == contents(second)


def test_a_dtype_is_converted_to_and_mixed_ones_are_kept(tmp_path):
    checkpoint = opened(TINY, TINY_PARAMS)
    narrow = written(tmp_path / "narrow", checkpoint, np.dtype(jnp.bfloat16))
    assert_same_bits(load_params(read(narrow)), in_dtype(TINY_PARAMS, jnp.bfloat16))
    mixed = TINY_PARAMS | {
        "embed": TINY_PARAMS["embed"].astype(jnp.bfloat16),
        "lm_head": TINY_PARAMS["lm_head"].astype(np.float16),
    }
    folder = written(tmp_path / "mixed", opened(TINY, mixed))
    assert_same_bits(load_params(read(folder)), mixed)
    assert fields_of(folder)["dtype"] == "float32"  # transformers casts to it: nothing may be lost
    assert "int8" in message(write, checkpoint, tmp_path, np.dtype(np.int8), lambda done: None)


def test_shards_are_full_but_never_over(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 400)
    # An embedding of 640 bytes has a shard of its own.
    config = dataclasses.replace(TINY, vocab_size=40)
    params = random_params(config, 3)
    folder = written(tmp_path / "ours", opened(config, params))
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    sizes = []
    for file in files:
        shard = safetensors.numpy.load_file(file)
        names = {name for name, place in index["weight_map"].items() if place == file.name}
        assert names == set(shard)
        sizes.append(sum(array.nbytes for array in shard.values()))
        assert sizes[-1] <= 400 or len(shard) == 1
    assert index["metadata"]["total_size"] == sum(sizes) == size_bytes(opened(config, params), None)
    assert all(one + other > 400 for one, other in itertools.pairwise(sizes))
    assert_same_bits(load_params(read(folder)), params)
    their_logits(folder, TOKENS % 40)


def test_a_model_fits_one_file_up_to_the_limit(tmp_path, monkeypatch):
    checkpoint = opened(TINY, TINY_PARAMS)
    for over in (0, 1):
        monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", size_bytes(checkpoint, None) - over)
        folder = written(tmp_path / str(over), checkpoint)
        assert (folder / "model.safetensors").exists() == (not over)


# Configurations.


def numbers(low, high):
    return st.floats(low, high, exclude_min=True)


lengths = st.integers(1, 2**20)
scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, numbers(1, 64)),
    st.builds(DynamicScaling, numbers(1, 64)),
    st.builds(Llama3Scaling, numbers(1, 64), numbers(0.1, 2), numbers(2, 9), lengths),
    st.builds(
        YarnScaling,
        numbers(1, 64),
        original_max_seq_len=lengths,
        beta_fast=numbers(9, 64),
        beta_slow=numbers(0.1, 9),
        attention_factor=st.one_of(st.just(0.0), numbers(0.5, 2)),
    ),
)


@st.composite
def configs(draw):
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    max_seq_len, scaling = draw(lengths), draw(scalings)
    if scaling and scaling.type == "dynamic":
        scaling = dataclasses.replace(scaling, original_max_seq_len=max_seq_len)
    return LlamaConfig(
        vocab_size=draw(st.integers(1, 2**17)),
        num_layers=draw(st.integers(1, 126)),
        embed_dim=kv_heads * group * draw(st.integers(2, 9)) * 2,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([0, 4, 6, 128])),
        mlp_dim=draw(st.integers(0, 99)),
        max_seq_len=max_seq_len,
        norm_eps=draw(numbers(0, 1)),
        rope_theta=draw(st.one_of(numbers(1, 1e7), st.integers(2, 10**7))),
        rope_scaling=scaling,
        tie_embeddings=draw(st.booleans()),
    )


@given(config=configs())
def test_a_configuration_comes_back_from_either_spelling(config, tmp_path_factory):
    """And transformers reads the same from either, with all that shapes the model."""
    source = tmp_path_factory.getbasetemp() / "config.json"
    fields = json.loads(json.dumps(config_to_huggingface(config, "bfloat16")))
    four = {key: value for key, value in fields.items() if key not in ("rope_parameters", "dtype")}
    only_four = ("rope_scaling", "rope_theta", "torch_dtype")
    five = {key: value for key, value in fields.items() if key not in only_four}
    old = copy.deepcopy(four)
    if old["rope_scaling"]:
        old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
    for spelling in (fields, four, five, old):
        assert config_from_huggingface(spelling, source) == config

    both, plain = (
        transformers.LlamaConfig(**copy.deepcopy(spelling))
        for spelling in (fields, four | {"dtype": "bfloat16"})
    )
    assert both.to_dict() == plain.to_dict()
    saved = json.loads(both.to_json_string(use_diff=False))
    assert not {"rope_scaling", "rope_theta"} & saved.keys()
    same = (fields.keys() & saved.keys()) - {"rope_parameters"}
    assert {key: saved[key] for key in same} == {key: fields[key] for key in same}
    assert saved["rope_parameters"].items() >= fields["rope_parameters"].items()


def test_missing_fields_are_transformers_defaults(tmp_path):
    theirs = transformers.LlamaConfig().to_dict()
    expected = config_from_huggingface(theirs, tmp_path)
    named = {"model_type": "llama"}
    for fields in (named, {"architectures": ["LlamaForCausalLM"]}, dict.fromkeys(theirs) | named):
        assert config_from_huggingface(fields | {"vocab_size": 32_000}, tmp_path) == expected
    assert config_from_huggingface(named, tmp_path).vocab_size == 0


LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 8.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SHORT = {"original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 1e4, None),
        ({"rope_scaling": {}, "rope_theta": 7}, 7, None),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 7}, 7, None),
        ({"rope_parameters": {"rope_theta": 7, "partial_rotary_factor": 1.0}}, 7, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, LinearScaling(2.0)),
        ({"rope_scaling": LINEAR | {"type": "linear"}}, 1e4, LinearScaling(2.0)),
        ({"rope_theta": 7, "rope_parameters": LINEAR}, 7, LinearScaling(2.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1e4, DynamicScaling(2.0, 4096)),
        ({"rope_parameters": YARN}, 1e4, YarnScaling(8.0, original_max_seq_len=4096)),
        ({"rope_parameters": YARN | SHORT}, 1e4, YarnScaling(8.0, original_max_seq_len=512)),
        ({"rope_parameters": YARN} | SHORT, 1e4, YarnScaling(8.0, original_max_seq_len=512)),
        (
            {"rope_parameters": YARN | {"truncate": True, "finetuned": True, "mscale": 0.7}},
            1e4,
            YarnScaling(8.0, original_max_seq_len=4096),
        ),
    ],
)
def test_rope_is_read_as_transformers_does(fields, theta, scaling, tmp_path):
    config = config_from_huggingface(LLAMA | fields, tmp_path)
    assert (config.rope_scaling, config.rope_theta) == (scaling, theta)


@pytest.mark.parametrize(
    "attention",
    [{}, {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale": 0.7}],
)
def test_yarn_reads_as_transformers_does(attention, tmp_path):
    """Frequencies and attention factor of their own function, whatever of its fields is given."""
    rope = YARN | {"rope_theta": 5e5, "original_max_position_embeddings": 512} | attention
    config = config_from_huggingface(LLAMA | {"rope_parameters": rope}, tmp_path)
    theirs = transformers.LlamaConfig(**LLAMA, rope_parameters=rope)
    _, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, None)
    assert config.rope_scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma'; jllama reads models of the types llama, "),
        ({"model_type": ...}, None),
        ({"model_type": ..., "architectures": ["GemmaForCausalLM"]}, "model_type None"),
        ({"model_type": ..., "architectures": 7}, "model_type None"),
        ({"attention_bias": True, "mlp_bias": True}, "attention_bias true, mlp_bias true"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": None, "use_sliding_window": False}, None),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "full_attention"]}, None),
        ({"layer_types": 7}, "layer_types 7"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"num_experts": 0}, None),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False}, None),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, '"longrope"'),
        ({"rope_scaling": {"rope_type": ["linear"]}}, '["linear"]'),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": LINEAR | {"beta_fast": 2}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "type is 'default'"),
        ({"rope_scaling": LINEAR | {"rope_type": "dynamic", "alpha": 1000}}, "alpha"),
        ({"rope_scaling": LINEAR | SHORT | {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor 0"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast"),
        ({"rope_scaling": LINEAR | {"factor": "8"}}, 'factor "8"'),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": LINEAR}, None),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta 5.0, but 6.0"),
        (
            {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}},
            "factor 2.0, but 4.0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"rope_theta": "10000"}, 'rope_theta "10000"'),
        ({"rope_theta": float("nan")}, "rope_theta NaN"),
        ({"rope_theta": 10**400}, "rope_theta 1000"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05"),
        ({"rms_norm_eps": True}, "rms_norm_eps true"),
        ({"hidden_size": "48"}, 'hidden_size "48"'),
        ({"hidden_size": 48.0}, "hidden_size 48.0"),
        ({"hidden_size": -48}, "hidden_size -48"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1,000,000,000; it must be at most 10,000"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"max_position_embeddings": 2**40}, "max_seq_len is 1,099,511,627,776"),
        ({"vocab_size": -2}, "vocab_size -2"),
        ({"intermediate_size": {}}, "intermediate_size {}"),
        ({"tie_word_embeddings": "true"}, 'tie_word_embeddings "true"'),
    ],
)
def test_what_a_config_may_not_ask_for_is_named(changed, problem, tmp_path):
    fields = config_to_huggingface(BASE, "float32")
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        del fields[key]
    fields = {key: value for key, value in (fields | changed).items() if value is not ...}
    source = tmp_path / "config.json"
    if problem is None:
        config_from_huggingface(fields, source)
        return
    text = message(config_from_huggingface, fields, source)
    assert problem in text
    assert str(source) in text


scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats()
json_values = st.recursive(
    scalars | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), inner)
    ),
    max_leaves=4,
)


@given(name=st.sampled_from([*CONFIGS]), data=st.data(), value=json_values)
def test_any_value_in_any_field_is_read_or_refused(name, data, value):
    fields = config_to_huggingface(CONFIGS[name], "float32")
    others = ["quantization_config", "sliding_window", "layer_types"]
    others += ["original_max_position_embeddings"]
    fields = json.loads(json.dumps(fields | dict.fromkeys(others)))
    objects = [value for value in fields.values() if isinstance(value, dict)]
    place = data.draw(st.sampled_from([fields, *objects]))
    place[data.draw(st.sampled_from(sorted(place)))] = value
    try:
        config_from_huggingface(fields, Path("config.json"))
    except JllamaError as error:
        problem = error
    else:
        return
    assert type(problem) is JllamaError
    assert str(problem).startswith("config.json")


def test_what_transformers_cannot_hold_is_refused_before_a_byte_is_written(tmp_path):
    uneven = dataclasses.replace(TINY, embed_dim=5)
    stretched = with_rope(DynamicScaling(2.0, original_max_seq_len=32))
    for config, problem in ((uneven, "embed_dim (5)"), (stretched, "original_max_seq_len (32)")):
        checkpoint = opened(config, random_params(config, 1))
        assert problem in message(write, checkpoint, tmp_path, None, lambda done: None)
        assert not list(tmp_path.iterdir())
    with pytest.raises(Exception, match="not a multiple"):
        transformers.LlamaConfig(hidden_size=5, num_attention_heads=2, head_dim=6)


# Folders.


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("config.json", '{"model_type": "gpt2"}', True),
        ("config.json", '{"architectures": []}', True),
        ("config.json", '{"a": 1}', False),
        ("config.json", "[1", False),
        ("config.json", "[]", False),
        ("anything.safetensors", "", True),
        ("params.json", "{}", False),
    ],
)
def test_a_folder_is_recognized_by_its_files(file, text, expected, tmp_path):
    (tmp_path / file).write_text(text)
    assert recognizes(tmp_path) is expected


def test_what_is_no_folder_is_not_recognized(tiny, tmp_path):
    assert recognizes(tiny)
    (tmp_path / "config.json").mkdir()
    for path in (tiny / "config.json", tmp_path / "nowhere", tmp_path):
        assert not recognizes(path)


@pytest.mark.parametrize("vocab_size", [-1, None, ...])
def test_the_rows_come_from_the_weights(tiny, vocab_size):
    change(tiny, vocab_size=vocab_size)
    assert read(tiny).config == TINY


def rewrite(folder, function, file="model.safetensors"):
    found = safetensors.numpy.load_file(folder / file)
    safetensors.numpy.save_file(function(found), folder / file)


@pytest.mark.parametrize(
    ("function", "problems"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "norm" not in k},
            ["layers.1.input_layernorm.weight is absent", "model.norm"],
        ),
        (
            lambda t: t | {"a.bias": t["model.norm.weight"], "b": t["lm_head.weight"]},
            ["a.bias", "b"],
        ),
        (
            lambda t: t | {"model.norm.weight": np.ones(5, np.float32)},
            ["model.norm.weight", "[5]", "[4]"],
        ),
        (lambda t: t | {EMBED: np.ones((8, 4), np.float32)}, ["[8, 4]", "[7, 4]"]),
        (lambda t: t | {EMBED: np.ones((), np.float32)}, ["is []", "[7, 4]"]),
        (
            lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"},
            ["lm_head.weight", "tie_word_embeddings"],
        ),
        (lambda t: t | {"model.norm.weight": np.ones(4, np.int64)}, ["model.norm.weight", "I64"]),
        (
            lambda t: {f"module.{k}": v for k, v in t.items()},
            ["remove module. from the names of its tensors"],
        ),
        (
            lambda t: {k.replace("lm_head", "score"): v for k, v in t.items()},
            ["with score.weight it is a classifier"],
        ),
    ],
)
def test_weights_that_differ_from_the_config_are_listed(tiny, function, problems):
    rewrite(tiny, function)
    text = message(read, tiny)
    assert str(tiny) in text
    assert all(words in text for words in problems), text
    change(tiny, vocab_size=-1)
    message(read, tiny)


@pytest.mark.parametrize("shape", [(0, 4), (), (7, 0), (4,)])
def test_an_embedding_of_no_rows_is_refused(tied, shape):
    array = np.ones(shape, np.float32)
    rewrite(tied, lambda tensors: tensors | {EMBED: array, "lm_head.weight": array})
    change(tied, vocab_size=-1)
    assert f"{EMBED} is {list(shape)}" in message(read, tied)


def test_other_layer_counts_are_refused(tiny):
    for num_layers, layer in ((1, 1), (3, 2)):
        change(tiny, num_hidden_layers=num_layers)
        assert f"model.layers.{layer}.mlp.up_proj.weight" in message(read, tiny)


def test_rotary_frequencies_in_a_file_are_left_out(tiny):
    extra = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)
        for layer in (0, 1)
    }
    rewrite(tiny, lambda tensors: tensors | extra)
    assert_same_bits(load_params(read(tiny)), TINY_PARAMS)
    rewrite(tiny, lambda tensors: tensors | {"rotary_emb.inv_freq": np.ones(3, np.float32)})
    assert "rotary_emb.inv_freq" in message(read, tiny)


def test_a_repeated_head_of_a_tied_model_must_be_the_embedding(tied):
    rewrite(tied, lambda tensors: tensors | {"lm_head.weight": tensors[EMBED]})
    assert_same_bits(load_params(read(tied)), TIED_PARAMS)
    embed = TIED_PARAMS["embed"]
    one_bit = embed.copy()
    one_bit.view(np.uint32)[6, 3] ^= 1
    zeros, nans = np.zeros((7, 4), np.float32), np.full((7, 4), np.nan, np.float32)
    for rows, head, same in [
        (embed, one_bit, False),
        (zeros, -zeros, False),
        (nans, nans.astype(np.float16), False),
        (nans, nans, True),
    ]:
        rewrite(tied, lambda tensors, e=rows, h=head: tensors | {EMBED: e, "lm_head.weight": h})
        if same:
            read(tied)
        else:
            assert "differs" in message(read, tied)
            assert "tie_word_embeddings" in message(read, tied)
    change(tied, tie_word_embeddings=False)
    assert not read(tied).config.tie_embeddings


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    return contents(written(tmp_path_factory.mktemp("tiny") / "tiny", opened(TINY, TINY_PARAMS)))


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(data, tiny_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    for name, content in tiny_files.items():
        (folder / name).write_bytes(content)
    file = folder / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    kept = file.stat().st_size - (2 if file.suffix == ".json" else 1)  # its last byte ends a line
    os.truncate(file, data.draw(st.integers(0, kept)))
    assert file.name in message(read, folder)


DEEP = b'{"hidden_size":' + b"[" * 900 + b"]" * 900 + b"}"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\xff", b"[" * 200_000, DEEP])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_object_is_refused(tiny, file, content):
    (tiny / file).write_bytes(content)
    assert f"{file} is not" in message(read, tiny)


def test_an_absurdly_large_config_is_not_read(tiny):
    os.truncate(tiny / "config.json", 1 << 34)
    assert "over 100000000 bytes" in message(read, tiny)


def test_missing_files_are_named(tiny):
    (tiny / "model.safetensors").rename(tiny / "other.safetensors")
    assert "has config.json, other.safetensors instead of" in message(read, tiny)
    (tiny / "other.safetensors").unlink()
    assert "has config.json instead of" in message(read, tiny)
    (tiny / "pytorch_model.bin").touch()
    assert "pickle" in message(read, tiny)
    (tiny / "config.json").unlink()
    assert "no config.json" in message(read, tiny)


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 300)
    return written(tmp_path / "sharded", opened(TINY, TINY_PARAMS))


def places(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_missing_shards_are_named(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    for file in files[1:3]:
        file.unlink()
    text = message(read, sharded)
    assert all((file.name in text) == (file in files[1:3]) for file in files)


def test_shards_may_be_links_out_of_the_folder(sharded, tmp_path):
    """As in the hub's cache, where they lead to ``../../blobs``."""
    for number, file in enumerate(sharded.glob("*.safetensors")):
        file.rename(tmp_path / str(number))
        file.symlink_to(tmp_path / str(number))
    assert_same_bits(load_params(read(sharded)), TINY_PARAMS)


OUTSIDE = [
    f"{name}.safetensors" for name in ("../a", "/a", "b/a", "..\\a", "C:a", "a\0", 300 * "a")
]


@pytest.mark.parametrize("place", [*OUTSIDE, "", "config.json", 7])
def test_an_index_that_points_outside_its_folder_is_refused(sharded, place):
    shards = places(sharded)
    first, file = next(iter(shards.items()))
    for name in ("../a.safetensors", "b/a.safetensors"):
        (sharded / name).parent.mkdir(exist_ok=True)
        shutil.copy(sharded / file, sharded / name)
    change(sharded, INDEX, weight_map=shards | {first: place})
    assert "index.json points to" in message(read, sharded)


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map_is_refused(sharded, content):
    (sharded / INDEX).write_text(json.dumps(content))
    assert "weight_map" in message(read, sharded)


def test_an_index_that_differs_from_its_shards_is_refused(sharded):
    shards = places(sharded)
    first, second, *_ = sorted(set(shards.values()))
    norm = "model.norm.weight"
    change(sharded, INDEX, weight_map=shards | {EMBED: second, "extra": second})
    problem = f"{EMBED} is in {first}, expected in {second}; extra is absent, expected in {second}"
    assert problem in message(read, sharded)
    without_norm = {name: place for name, place in shards.items() if name != norm}
    change(sharded, INDEX, weight_map=without_norm)
    assert f"{norm} is in {shards[norm]}, expected none" in message(read, sharded)
    change(sharded, INDEX, weight_map=shards)
    file = sharded / shards[norm]
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in message(read, sharded)


def test_an_index_may_name_a_tied_head_that_no_shard_has(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 200)
    folder = written(tmp_path / "tied", opened(TIED, TIED_PARAMS))
    shards = places(folder)
    change(folder, INDEX, weight_map=shards | {"lm_head.weight": shards[EMBED]})
    assert_same_bits(load_params(read(folder)), TIED_PARAMS)


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "../model.gguf",
    ],
)
def test_a_pointer_of_git_lfs_is_named(tiny, file):
    path = tiny / file
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    source = path if path.suffix == ".gguf" else tiny
    assert f"{path.name} is a pointer of Git LFS: run git lfs pull" in message(load, source)


def test_what_a_conversion_leaves_behind_is_said(tiny, tmp_path, capsys):
    convert(tiny, tmp_path / "plain", to="hf")
    assert "note" not in capsys.readouterr().err
    (tiny / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.9, "top_k": null}'
    )
    (tiny / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    convert(tiny, tmp_path / "again", to="hf")
    note = f"note: {tmp_path / 'again'} will not have {tiny}'s temperature, top_p, pad_token\n"
    assert note in capsys.readouterr().err


# What goes with the weights.


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (..., 2, (2,)),
        (..., [2, 3], (2, 3)),
        (..., None, ()),
        (..., ..., ()),
        ([4, 5], 2, (4, 5)),
        (4, [2, 3], (4,)),
        (None, 2, (2,)),
    ],
)
def test_stop_ids_are_the_generation_configs_else_the_configs(tiny, generation, config, expected):
    change(tiny, eos_token_id=config)
    if generation is not ...:
        (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read(tiny).stop_ids == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("eos_token_id", value) for value in ("2", [2, "3"], -1, 2.0, True)),
        ("chat_template", 7),
        ("chat_template", {"default": "d"}),
        ("chat_template", [{"name": "default", "template": 7}]),
    ],
)
def test_wrong_stop_ids_and_chat_templates_are_refused(tiny, field, value):
    (tiny / "tokenizer_config.json").write_text("{}")
    file = "config.json" if field == "eos_token_id" else "tokenizer_config.json"
    change(tiny, file, **{field: value})
    assert field in message(read, tiny)


@pytest.mark.parametrize(
    ("jinja", "config", "expected"),
    [
        (None, ..., None),
        (None, None, None),
        (None, "old", "old"),
        ("new\n{{ é }}", "old", "new\n{{ é }}"),
        (None, [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        (None, [{"name": "rag", "template": "r"}], None),
        (None, [], None),
    ],
)
def test_the_chat_template_is_found_in_either_place(tiny, jinja, config, expected):
    if jinja is not None:
        (tiny / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    (tiny / "tokenizer_config.json").write_text(
        json.dumps({} if config is ... else {"chat_template": config})
    )
    assert read(tiny).chat_template == expected


@pytest.mark.parametrize(("stops", "field"), [((), None), ((3,), 3), ((3, 5), [3, 5])])
def test_stop_ids_and_template_come_back(stops, field, tmp_path):
    texts = {"stop_ids": stops, "chat_template": "{{ messages }}"}
    folder = written(tmp_path / "ours", opened(TINY, TINY_PARAMS, **texts))
    checkpoint = read(folder)
    assert checkpoint.stop_ids == stops
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.tokenizer is None
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (None, field)
    if stops:
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert generation.eos_token_id == field


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
BPE = train_sentencepiece(["the cat sat on the mat\n"] * 9, 280)


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_transformers_loads_tokenizer_template_and_ids(tokenizer, template, tmp_path):
    config = dataclasses.replace(TINY, vocab_size=300)
    checkpoint = opened(
        config, random_params(config, 1), tokenizer=tokenizer, chat_template=template
    )
    folder = written(tmp_path / "ours", checkpoint)
    fields = fields_of(folder)
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the cat, naïve  世"
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert theirs.chat_template == template
    # Old readers look for the template there; and what the tokenizer wrote must stay.
    old = json.loads((folder / "tokenizer_config.json").read_text())
    assert old.get("chat_template") == template
    assert "eos_token" in old
    again = read(folder)
    assert again.chat_template == template
    assert again.stop_ids == (tokenizer.eos_id,)
    assert again.tokenizer.encode(text) == tokenizer.encode(text)


# The hub.


def test_a_repository_is_fetched_without_its_pickles(monkeypatch, tiny):
    calls = []

    def snapshot_download(*arguments, **options):
        calls.append((arguments, options))
        return str(tiny)

    monkeypatch.setattr(huggingface.huggingface_hub, "snapshot_download", snapshot_download)
    patterns = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
    for revision in (None, "v1.0"):
        assert download(f"org/name@{revision}" if revision else "org/name") == tiny
        assert calls.pop() == (
            ("org/name",),
            {"revision": revision, "allow_patterns": patterns},
        )


@pytest.mark.parametrize(
    ("refusal", "problem"),
    [
        (OSError("offline\n\nlog in"), "org/name cannot be fetched from the hub: offline log in"),
        (ValueError(), "org/name cannot be fetched from the hub: ValueError"),
    ],
)
def test_a_repository_that_cannot_be_had_is_one_sentence(monkeypatch, refusal, problem):
    hub = mock.Mock(side_effect=refusal)
    monkeypatch.setattr(huggingface.huggingface_hub, "snapshot_download", hub)
    assert problem in message(download, "org/name")


def test_the_real_hub_client_refuses_as_the_stand_in(monkeypatch):
    monkeypatch.setattr(huggingface.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "cannot be fetched" in message(download, "jllama-tests/no-such-model")
