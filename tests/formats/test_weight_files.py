"""What Hugging Face's former Flax models wrote is read like safetensors; the rest is a sentence."""

import dataclasses
import itertools
import json
import os

import flax.serialization
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from helpers import assert_same_bits
from helpers_checkpoints import change, in_dtype, message, opened
from hypothesis import given
from hypothesis import strategies as st
from reference_writers import write_flax

from jllama.core.config import LlamaConfig
from jllama.formats import huggingface, weight_files
from jllama.formats.huggingface import download, read, write
from jllama.formats.registry import convert, load
from jllama.formats.tensors import base_fingerprint, load_params
from jllama.lab.checks import random_params

TINY = LlamaConfig(
    vocab_size=7, num_layers=2, embed_dim=4, num_heads=2, num_kv_heads=1, head_dim=6, mlp_dim=5
)
CONFIGS = {
    "head": TINY,
    "tied": dataclasses.replace(TINY, tie_embeddings=True),
    "mistral": dataclasses.replace(TINY, sliding_window=3),
    "qwen2, with biases": dataclasses.replace(TINY, attention_bias=True, head_dim=2),
}
FILE, INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
PARAMS = random_params(TINY, 1)


@pytest.fixture
def flax_folder(tmp_path):
    write_flax(tmp_path / "flax", TINY, PARAMS)
    return tmp_path / "flax"


@pytest.fixture
def sharded(tmp_path):
    write_flax(tmp_path / "sharded", TINY, PARAMS, count=3)
    return tmp_path / "sharded"


def rewrite(folder, function):
    """Change the nested dictionary in a folder's only file."""
    tree = flax.serialization.msgpack_restore((folder / FILE).read_bytes())
    function(tree)
    (folder / FILE).write_bytes(flax.serialization.msgpack_serialize(tree))


# What is read.


@pytest.mark.parametrize("layout", ["training", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "count"), [*itertools.product(CONFIGS, [1, 3])])
def test_logits_are_those_of_safetensors_bit_for_bit(name, count, dtype, layout, tmp_path):
    config = CONFIGS[name]
    params = random_params(config, 2)
    write_flax(tmp_path / "flax", config, params, jnp.dtype(dtype), count)
    (tmp_path / "hf").mkdir()
    rounded = opened(config, in_dtype(params, jnp.dtype(dtype)))
    write(rounded, tmp_path / "hf", None, lambda _: None)
    tokens = np.arange(5)[None] % config.vocab_size
    models = [load(tmp_path / form, jnp.float32, layout=layout) for form in ("flax", "hf")]
    assert models[0].config == models[1].config
    assert_same_bits(models[0].params, models[1].params)
    assert_same_bits(*(model(tokens) for model in models))
    checkpoints = [read(tmp_path / form) for form in ("flax", "hf")]
    assert {tensor.dtype for tensor in checkpoints[0].tensors.values()} == {jnp.dtype(dtype)}
    assert base_fingerprint(checkpoints[0]) == base_fingerprint(checkpoints[1])


def test_a_folder_is_converted(flax_folder, tmp_path):
    convert(flax_folder, tmp_path / "hf", to="hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert_same_bits(load_params(read(tmp_path / "hf")), PARAMS)


def test_arrays_in_chunks_are_joined(flax_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 40)
    write_flax(tmp_path / "chunks", TINY, PARAMS)
    assert b"__msgpack_chunked_array__" in (tmp_path / "chunks" / FILE).read_bytes()
    assert_same_bits(load_params(read(tmp_path / "chunks")), PARAMS)


def test_safetensors_are_read_where_both_are_and_it_is_said(flax_folder, sharded, capsys):
    others = random_params(TINY, 3)
    for folder in (flax_folder, sharded):
        assert capsys.readouterr().err == ""
        write(opened(TINY, others), folder, None, lambda _: None)
        assert_same_bits(load_params(read(folder)), others)
        note = f"note: {folder} has {FILE} beside model.safetensors, which is read\n"
        assert capsys.readouterr().err == note
        (folder / "model.safetensors").unlink()
        assert_same_bits(load_params(read(folder)), PARAMS)


def test_the_one_file_comes_before_the_index(sharded):
    others = random_params(TINY, 3)
    write_flax(sharded, TINY, others)
    assert_same_bits(load_params(read(sharded)), others)


def test_a_repository_without_safetensors_is_asked_for_these_files(monkeypatch, flax_folder):
    calls = []

    def snapshot_download(*arguments, **options):
        calls.append((arguments, options["revision"], options["allow_patterns"]))
        return str(flax_folder)

    monkeypatch.setattr(huggingface.huggingface_hub, "snapshot_download", snapshot_download)
    assert download("org/name@v1") == flax_folder
    (first, second) = calls
    assert first[:2] == second[:2] == (("org/name",), "v1")
    assert second[2] == "flax_model*.msgpack"


# What is refused.


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            lambda tree: tree["model"]["layers"]["1"]["mlp"].pop("up_proj"),
            "model.layers.1.mlp.up_proj.weight is absent, expected [5, 4]",
        ),
        (
            lambda tree: tree["model"].update(extra={"kernel": np.zeros((2, 3), "f4")}),
            "model.extra.weight is [3, 2], expected none",
        ),
        (
            lambda tree: tree["model"]["embed_tokens"].update(embedding=np.zeros((4, 7), "f4")),
            "model.embed_tokens.weight is [4, 7], expected [7, 4]",
        ),
        (lambda tree: tree.pop("lm_head"), "has no lm_head.weight: a model without it needs"),
        (
            lambda tree: tree.update(lm_head={"kernel": np.zeros((4, 7), "i4")}),
            "holds lm_head/kernel as int32; jllama reads F64, F32, F16, BF16",
        ),
        (
            lambda tree: tree.update(lm_head={"kernel": "os.system"}),
            "holds lm_head/kernel as str; jllama reads",
        ),
        (lambda tree: tree.update(lm_head={"kernel": 1j}), "holds lm_head/kernel as complex"),
        (
            lambda tree: tree.update(lm_head={"kernel": np.float32(1)}),
            "holds lm_head/kernel as float32",
        ),
    ],
)
def test_what_differs_from_the_config_is_named(flax_folder, function, problem):
    rewrite(flax_folder, function)
    assert problem in message(read, flax_folder)


def test_a_head_of_a_tied_model_must_be_the_embedding(flax_folder):
    """transformers' Flax Llama has a head of its own, whatever its configuration says."""
    change(flax_folder, tie_word_embeddings=True)
    assert "so tie_word_embeddings must be false" in message(read, flax_folder)
    embedding = np.asarray(PARAMS["embed"])
    rewrite(flax_folder, lambda tree: tree.update(lm_head={"kernel": embedding.T}))
    assert read(flax_folder).config.tie_embeddings


def test_a_gemma_is_refused_by_its_name(flax_folder):
    change(flax_folder, model_type="gemma", architectures=["GemmaForCausalLM"])
    assert "has model_type 'gemma'; jllama reads models of" in message(read, flax_folder)


def extension(code, content):
    return msgpack.packb({"lm_head": msgpack.ExtType(code, content)})


ARRAY = [[2, 2], "float32", bytes(16)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"[]",
        b"\x81" * 2000,
        b"\x80\x80",
        msgpack.packb([1]),
        msgpack.packb({("a", "b"): 1}),
        msgpack.packb({1: {b"\xff": 2}}),
        b"\xdf\xff\xff\xff\xff",
        extension(1, b""),
        extension(1, msgpack.packb(7)),
        extension(1, msgpack.packb([[2, 3], *ARRAY[1:]])),
        extension(1, msgpack.packb([[2, 2], "object", bytes(32)])),
        extension(1, msgpack.packb([[2, 2], "os.system('x')", bytes(16)])),
        extension(2, b"\x01"),
        msgpack.packb({"lm_head": {"__msgpack_chunked_array__": True}}),
        msgpack.packb({"lm_head": {"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}}),
    ],
)
def test_a_damaged_file_is_one_sentence(flax_folder, content):
    (flax_folder / FILE).write_bytes(content)
    assert f"{FILE} is cut short, damaged or not a msgpack file of Flax" in message(
        read, flax_folder
    )


def test_too_little_memory_is_no_damage(flax_folder, monkeypatch):
    def fail(content):
        raise MemoryError("16 GiB")

    monkeypatch.setattr(weight_files, "msgpack_restore", fail)
    with pytest.raises(MemoryError, match="16 GiB"):
        read(flax_folder)


def test_an_unknown_extension_is_refused(flax_folder):
    (flax_folder / FILE).write_bytes(extension(9, b"abc"))
    assert "holds lm_head as ExtType; jllama reads" in message(read, flax_folder)


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut") / "flax"
    write_flax(folder, TINY, PARAMS)
    file = folder / FILE
    os.truncate(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    assert FILE in message(read, folder)


def test_a_pointer_of_git_lfs_is_named(flax_folder):
    (flax_folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n")
    assert f"{FILE} is a pointer of Git LFS: run git lfs pull" in message(load, flax_folder)


def test_shards_and_index_must_agree(sharded):
    shards = json.loads((sharded / INDEX).read_text())["weight_map"]
    first, second, third = sorted(set(shards.values()))
    change(sharded, INDEX, weight_map=shards | {"lm_head/kernel": "../" + first})
    text = message(read, sharded)
    assert "index.json points to" in text
    assert text.endswith("expected a msgpack file in the same folder")
    change(sharded, INDEX, weight_map=shards | {"extra": second})
    assert f"extra is absent, expected in {second}" in message(read, sharded)
    change(sharded, INDEX, weight_map=shards)
    (sharded / third).unlink()
    text = message(read, sharded)
    assert f"lacks {third}, which {INDEX} names: copy what is missing there" in text
