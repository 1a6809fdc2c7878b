"""GGUF there and back, against the gguf package, transformers, llama.cpp's converter's formulas,
and damaged files.
"""

import dataclasses
import functools
import math
import re
import shutil
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from helpers import assert_same_bits
from helpers_checkpoints import in_dtype, message, opened, small_configs
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_writers import gguf_divisors, gguf_metadata, gguf_tensors, interleave

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.formats import gguf
from jllama.formats.tensors import load_params
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

CONFIG = LlamaConfig(
    vocab_size=96,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=80,
    max_seq_len=1024,
    norm_eps=1e-6,
    rope_theta=50_000.0,
)
F32, F16, BF16, Q8_0 = (GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0"))

scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, st.sampled_from([1.5, 2.0, 8.0])),
    st.builds(
        Llama3Scaling,
        st.floats(1, 64),
        st.floats(0.5, 2),
        st.floats(2.5, 9),
        st.sampled_from([512, 8192]),
    ),
    st.builds(
        YarnScaling,
        st.sampled_from([1.0, 4.0, 40.0]),
        original_max_seq_len=st.sampled_from([512, 4096]),
        attention_factor=st.just(0.0) | st.floats(0.5, 2),
    ),
)
configs = small_configs(
    max_seq_len=st.integers(1, 5000),
    rope_theta=st.sampled_from([10_000.0, 500_000.0, 1e6]),
    norm_eps=st.sampled_from([1e-5, 1e-6]),
    rope_scaling=scalings,
)


def written(path, config, params, dtype=None, **others):
    done = []
    gguf.write(opened(config, params, **others), path, dtype, done.append)
    return sum(done)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def value_type(key, value):
    if key.startswith("jllama.") and isinstance(value, float):
        return GGUFValueType.FLOAT64
    if isinstance(value, list):
        return GGUFValueType.ARRAY
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    return kinds.get(type(value), GGUFValueType.STRING)


def write_with_package(path, metadata, tensors, architecture="llama", types=None, alignment=None):
    """A file made by the gguf package. ``types``: the tensors that are quantized, and how; those
    that are not bytes are quantized here.
    """
    writer = GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        writer.add_key_value(key, value, value_type(key, value))
    for name, tensor in tensors.items():
        type_ = (types or {}).get(name)
        if tensor.dtype == jnp.bfloat16:
            type_, tensor = BF16, tensor.view(np.uint8)
        elif type_ is not None and tensor.dtype != np.uint8:
            tensor = quantize(tensor, type_)
        writer.add_tensor(name, tensor, raw_dtype=type_)
    finish(writer)


PARAMS = random_params(CONFIG, 0)
METADATA = gguf_metadata(CONFIG)
TENSORS = gguf_tensors(CONFIG, PARAMS)


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory):
    """A whole file made by the gguf package; never changed."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_with_package(path, METADATA, TENSORS)
    return path


def edited(path, changes, tensors=None, architecture="llama"):
    """The whole file with some keys changed or (None) left out, and tensors added."""
    metadata = {key: value for key, value in (METADATA | changes).items() if value is not None}
    write_with_package(path, metadata, TENSORS | (tensors or {}), architecture)
    return path


def edited_llama(path, changes):
    return edited(path, {f"llama.{name}": value for name, value in changes.items()})


# There and back


@given(configs, st.sampled_from([np.float32, jnp.bfloat16, np.float16]), st.integers(0, 3))
def test_there_and_back_is_the_same_config_and_the_same_bytes(
    tmp_path_factory, config, dtype, seed
):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    params = in_dtype(random_params(config, seed), dtype)
    num_bytes = written(path, config, params)
    checkpoint = gguf.read(path)
    assert checkpoint.config == config
    assert (checkpoint.tokenizer, checkpoint.chat_template, checkpoint.stop_ids) == (None, None, ())
    assert_same_bits(load_params(checkpoint), params)
    assert num_bytes == sum(tensor.n_bytes for tensor in GGUFReader(path).tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_the_package_reads_what_we_write_as_the_converter_would_have_written_it(tmp_path, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = random_params(config, 1)
    written(tmp_path / "m.gguf", config, params)
    reader = GGUFReader(tmp_path / "m.gguf")
    expected = gguf_tensors(config, params)
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        np.testing.assert_array_equal(tensor.data, expected[tensor.name])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    others = {"general.quantization_version": 2, "llama.vocab_size": 96}
    for name, value in (gguf_metadata(config) | others).items():
        assert fields[name] == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("version", [2, 3])
def test_we_read_what_the_package_writes(tmp_path, llama_file, version):
    data = bytearray(llama_file.read_bytes())
    data[4:8] = struct.pack("<I", version)
    (tmp_path / "model.gguf").write_bytes(data)
    for path in (tmp_path / "model.gguf", tmp_path):
        assert gguf.recognizes(path)
        checkpoint = gguf.read(path)
        assert checkpoint.config == CONFIG
        assert_same_bits(load_params(checkpoint), PARAMS)
    assert isinstance(checkpoint.tensors["layers/1/w_gate"], np.memmap)


def test_transformers_gives_the_same_logits(tmp_path):
    """Its GGUF loader puts q and k back into half-split order by itself."""
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    params = random_params(CONFIG, 2)
    path = tmp_path / "m.gguf"
    written(path, CONFIG, params)
    config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    theirs = transformers.LlamaForCausalLM(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"])
    tokens = np.random.default_rng(0).integers(0, 96, (1, 512))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    checkpoint = gguf.read(path)
    assert_same_bits(load_params(checkpoint), params)
    assert relative_error(oracle.forward(params, tokens, CONFIG), expected) < 1e-5


# Types of tensors


def can_dequantize(type_):
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except NotImplementedError:
        return False
    return True


QUANTIZED = [
    type_
    for type_ in GGMLQuantizationType
    if GGML_QUANT_SIZES[type_][0] > 1 and can_dequantize(type_)
]


@pytest.mark.parametrize("type_", QUANTIZED, ids=lambda type_: type_.name)
def test_rows_of_every_quantized_type_are_the_packages(tmp_path, type_):
    """Any bytes are blocks, of numbers that may be NaN."""
    assert {"Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS"} <= {one.name for one in QUANTIZED}
    block, size = GGML_QUANT_SIZES[type_]
    rows = np.random.default_rng(0).integers(0, 256, (37, 512 // block * size), dtype=np.uint8)
    tensors = {"other": np.ones(5, np.float32), "matrix": rows}
    write_with_package(tmp_path / "m.gguf", {}, tensors, types={"matrix": type_})
    _, tensors = gguf.read_gguf_file(tmp_path / "m.gguf")
    matrix = tensors["matrix"]
    assert (matrix.shape, matrix.dtype) == ((37, 512), np.float32)
    with np.errstate(all="ignore"):
        whole = dequantize(rows, type_)
        for start, stop in ((0, 37), (0, 1), (36, 37), (5, 30), (16, 33)):
            np.testing.assert_array_equal(matrix[start:stop], whole[start:stop])
    assert np.isfinite(whole).any()
    np.testing.assert_array_equal(tensors["other"], np.ones(5))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.float64])
def test_plain_types_are_mapped_as_they_are(tmp_path, dtype):
    matrix = np.random.default_rng(0).standard_normal((5, 3)).astype(dtype)
    write_with_package(tmp_path / "m.gguf", {}, {"matrix": matrix})
    found = gguf.read_gguf_file(tmp_path / "m.gguf")[1]["matrix"]
    assert isinstance(found, np.memmap)
    assert found.dtype == dtype
    assert found.tobytes() == matrix.tobytes()


@pytest.mark.parametrize("type_", ["Q8_1", "I8", "Q1_0"])
def test_a_type_that_cannot_be_dequantized_is_refused_by_name(tmp_path, type_):
    type_ = GGMLQuantizationType[type_]
    block, size = GGML_QUANT_SIZES[type_]
    rows = np.zeros((2, 256 // block * size), np.uint8)
    write_with_package(tmp_path / "m.gguf", {}, {"odd.weight": rows}, types={"odd.weight": type_})
    with pytest.raises(
        JllamaError, match=rf"odd\.weight of shape .* and type {type_.name}, which cannot be read"
    ):
        gguf.read_gguf_file(tmp_path / "m.gguf")


def test_with_one_quantized_matrix_everything_is_float32(tmp_path):
    """As llama.cpp's mixed files are: some matrices quantized, some float16 or bfloat16, norms
    float32.
    """
    name = "blk.1.attn_q.weight"
    tensors = dict(TENSORS)
    for key, tensor in TENSORS.items():
        if tensor.ndim == 2 and key != name:
            tensors[key] = tensor.astype(np.float16 if "ffn" in key else jnp.bfloat16)
    write_with_package(tmp_path / "m.gguf", METADATA, tensors, types={name: Q8_0})
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {np.dtype(np.float32)}
    loaded = load_params(checkpoint)
    up, embed = PARAMS["layers"]["w_up"], PARAMS["embed"]
    assert_same_bits(loaded["embed"], embed.astype(jnp.bfloat16).astype(np.float32))
    assert_same_bits(loaded["layers"]["w_up"], up.astype(np.float16).astype(np.float32))
    query = interleave(np.asarray(loaded["layers"]["wq"])[1].reshape(128, -1).T, 4)
    np.testing.assert_array_equal(query, dequantize(quantize(TENSORS[name], Q8_0), Q8_0))


def test_norms_that_the_matrices_dtype_cannot_hold_stay_float32(tmp_path):
    tensors = {
        name: tensor.astype(jnp.bfloat16) if tensor.ndim == 2 else tensor
        for name, tensor in TENSORS.items()
    }
    norm = tensors["output_norm.weight"]
    tensors["output_norm.weight"] = norm.astype(jnp.bfloat16).astype(np.float32)
    write_with_package(tmp_path / "m.gguf", METADATA, tensors)
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert checkpoint.tensors["final_norm"].dtype == jnp.bfloat16
    assert checkpoint.tensors["layers/0/attn_norm"].dtype == np.float32
    assert_same_bits(load_params(checkpoint)["layers"]["attn_norm"], PARAMS["layers"]["attn_norm"])


@pytest.mark.parametrize(
    ("dtype", "type_", "file_type"),
    [
        (None, F32, 0),
        (np.dtype(np.float16), F16, 1),
        (np.dtype(jnp.bfloat16), BF16, 32),
        ("q8_0", Q8_0, 7),
        ("q5_1", GGMLQuantizationType.Q5_1, 9),
        ("q5_0", GGMLQuantizationType.Q5_0, 8),
        ("q4_1", GGMLQuantizationType.Q4_1, 3),
        ("q4_0", GGMLQuantizationType.Q4_0, 2),
    ],
)
def test_each_type_is_written_as_the_package_has_it(tmp_path, dtype, type_, file_type):
    num_bytes = written(tmp_path / "m.gguf", CONFIG, PARAMS, dtype)
    reader = GGUFReader(tmp_path / "m.gguf")
    assert num_bytes == sum(tensor.n_bytes for tensor in reader.tensors)
    for tensor in reader.tensors:
        expected = TENSORS[tensor.name]
        wanted = F32 if expected.ndim == 1 else type_
        if wanted not in (F32, F16, BF16) and expected.shape[1] % 32:
            wanted = F16
        assert tensor.tensor_type == wanted, tensor.name
        assert np.asarray(tensor.data).tobytes() == quantize(expected, wanted).tobytes()
        assert tensor.shape.tolist() == list(expected.shape[::-1])
    assert {tensor.tensor_type for tensor in reader.tensors} == (
        {F32, type_} | ({F16} if isinstance(dtype, str) else set())
    )
    assert reader.fields["general.file_type"].contents() == file_type
    assert reader.tensors[0].data_offset % 32 == 0


def test_small_blocks_write_the_same_file(tmp_path, monkeypatch):
    written(tmp_path / "one.gguf", CONFIG, PARAMS, "q8_0")
    monkeypatch.setattr("jllama.formats.tensors.BLOCK_BYTES", 1000)
    written(tmp_path / "two.gguf", CONFIG, PARAMS, "q8_0")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


# Metadata


def test_metadata_are_python_values(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "UINT8": 200,
        "INT8": -100,
        "UINT16": 60000,
        "INT16": -30000,
        "UINT32": 4_000_000_000,
        "INT32": -2_000_000_000,
        "UINT64": 2**63 + 1,
        "INT64": -(2**62),
        "FLOAT32": 1e-5,
        "FLOAT64": 0.1,
        "BOOL": True,
        "STRING": "grüße \U0001f30d",
    }
    for name, value in values.items():
        writer.add_key_value(name, value, GGUFValueType[name])
    arrays = {
        "ints": [1, -2],
        "floats": [0.5, -0.25],
        "bools": [True, False],
        "texts": ["a", "", "é"],
        "bytes": [b"\xff\xfe", b"ok"],
    }
    for name, array in arrays.items():
        kind = GGUFValueType.BOOL if name == "bools" else None
        writer.add_key_value(name, array, GGUFValueType.ARRAY, kind)
    finish(writer)
    metadata, tensors = gguf.read_gguf_file(tmp_path / "m.gguf")
    assert tensors == {}
    arrays["bytes"] = [b"\xff\xfe".decode("utf-8", "surrogateescape"), "ok"]
    expected = values | arrays | {"general.architecture": "llama"}
    assert metadata == expected
    assert {key: type(value) for key, value in metadata.items()} == {
        key: type(value) for key, value in expected.items()
    }


def test_an_alignment_other_than_the_usual_one_is_followed(tmp_path):
    write_with_package(tmp_path / "m.gguf", METADATA, TENSORS, alignment=256)
    assert_same_bits(load_params(gguf.read(tmp_path / "m.gguf")), PARAMS)


def test_what_a_file_leaves_out_has_llama_cpps_defaults(tmp_path):
    left_out = ["vocab_size", "attention.head_count_kv", "attention.key_length"]
    left_out += ["attention.value_length", "rope.dimension_count", "rope.freq_base"]
    config = LlamaConfig(
        vocab_size=8, num_layers=1, embed_dim=32, num_heads=4, mlp_dim=16, max_seq_len=64
    )
    metadata = gguf_metadata(config)
    for name in left_out:
        metadata.pop(f"llama.{name}", None)
    tensors = gguf_tensors(config, random_params(config, 0))
    write_with_package(tmp_path / "m.gguf", metadata, tensors)
    assert gguf.read(tmp_path / "m.gguf").config == config


def test_chat_template_and_stop_ids(tmp_path):
    written(tmp_path / "m.gguf", CONFIG, PARAMS, chat_template="{{ bos }}é", stop_ids=(5, 7, 5, 9))
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert checkpoint.chat_template == "{{ bos }}é"
    assert checkpoint.stop_ids == (5, 7, 9)
    fields = GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ bos }}é"
    assert [
        fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom")
    ] == [5, 7, 9]
    with pytest.raises(JllamaError, match=r"3 keys for tokens .* this model has 4: \[1, 2, 3, 4\]"):
        written(tmp_path / "four.gguf", CONFIG, PARAMS, stop_ids=(1, 2, 3, 4))
    assert not (tmp_path / "four.gguf").exists()


@pytest.mark.parametrize(
    ("stops", "read_back", "keys"),
    [
        ((), (2,), {"eos": 2}),
        ((2,), (2,), {"eos": 2}),
        ((2, 5), (2, 5), {"eos": 2, "eot": 5}),
        ((2, 4), (2, 4), {"eos": 2, "eom": 4}),
        ((5, 4, 2), (2, 5, 4), {"eos": 2, "eot": 5, "eom": 4}),
        ((2, 5, 6), (2, 5, 6), {"eos": 2, "eot": 5, "eom": 6}),
    ],
)
def test_eos_is_the_tokenizers_and_the_others_have_their_places(
    tmp_path, monkeypatch, stops, read_back, keys
):
    """With a stand-in for the tokenizer's own keys, to test what this module adds."""
    own = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "</s>", "c", "<|eom_id|>", "<|eot_id|>", "\udcff"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.scores": [0.5, -1.25],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = BytesTokenizer()
    monkeypatch.setattr(gguf, "to_gguf", lambda *_: dict(own))
    monkeypatch.setattr(gguf, "from_gguf", lambda metadata, source: tokenizer)
    written(tmp_path / "m.gguf", CONFIG, PARAMS, tokenizer=tokenizer, stop_ids=stops)
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert checkpoint.tokenizer is tokenizer
    assert checkpoint.stop_ids == read_back
    metadata, _ = gguf.read_gguf_file(tmp_path / "m.gguf")
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    assert ids == {"eos": None, "eot": None, "eom": None} | keys
    assert {key: metadata[key] for key in own} == own


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_the_tokenizer_comes_back(tmp_path, kind):
    corpus = ["the cat sat on the mat, and the other cats sat on the other mats\n"]
    tokenizer = BytesTokenizer() if kind == "bytes" else train_sentencepiece(corpus, 300)
    config = dataclasses.replace(CONFIG, vocab_size=310)
    written(tmp_path / "m.gguf", config, random_params(config, 0), tokenizer=tokenizer)
    read_back = gguf.read(tmp_path / "m.gguf")
    assert read_back.stop_ids == (tokenizer.eos_id,)
    text = "The cats,  naïve 🙂\n sat"
    assert read_back.tokenizer.encode(text) == tokenizer.encode(text)
    assert read_back.tokenizer.decode(tokenizer.encode(text)) == text


# Rotary scaling


DIVISORS = gguf_divisors(CONFIG, Llama3Scaling(8.0))
OTHER_DIVISORS = gguf_divisors(CONFIG, Llama3Scaling(8.0, 1.0, 2.0, 4096))


@pytest.mark.parametrize("factor", [4.5, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, factor):
    """From those of Llama 3's own bounds; none of others was ever released."""
    divisors = gguf_divisors(CONFIG, Llama3Scaling(factor))
    path = edited(tmp_path / "m.gguf", {}, {"rope_freqs.weight": divisors})
    assert gguf.read(path).config.rope_scaling == Llama3Scaling(factor)


def test_llama3_scaling_is_written_as_the_converter_does(tmp_path):
    scaling = Llama3Scaling(32.0)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, rope_theta=500_000.0)
    written(tmp_path / "m.gguf", config, PARAMS)
    metadata, tensors = gguf.read_gguf_file(tmp_path / "m.gguf")
    expected = gguf_divisors(config, scaling)
    assert (expected.min(), expected.max()) == (1, 32)
    assert relative_error(tensors["rope_freqs.weight"] / expected, np.ones(32)) < 1e-6
    assert not [key for key in metadata if key.startswith("llama.rope.scaling")]


@pytest.mark.parametrize(
    ("changes", "divisors", "message"),
    [
        ({}, np.linspace(1, 8, 32), "which is no type that jllama has"),
        ({}, np.full(32, 4), "which is no type that jllama has"),
        ({}, np.full(32, np.nan), "which is no type that jllama has"),
        ({}, np.zeros(32), "which is no type that jllama has"),
        ({}, DIVISORS * (1 + 1e-4), "which is no type that jllama has"),
        # Of other bounds than Llama 3's own, with which none was released.
        ({}, OTHER_DIVISORS, "which is no type that jllama has"),
        ({}, np.ones(31), r"rope_freqs.weight as float32\[31\], expected float32\[32\]"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            DIVISORS,
            "type 'linear' and the divisors in .* which is no type",
        ),
    ],
)
def test_other_divisors_are_refused(tmp_path, changes, divisors, message):
    tensors = {"rope_freqs.weight": divisors.astype(np.float32)}
    path = edited(tmp_path / "m.gguf", changes, tensors)
    with pytest.raises(JllamaError, match=message):
        gguf.read(path)


def test_our_own_keys_must_agree_with_the_divisors(tmp_path):
    """Of the file or of the class, a number must agree."""
    own = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    divisors = {"rope_freqs.weight": DIVISORS}

    def scaling(length, tensors):
        keys = {
            f"jllama.rope_scaling.{name}": value
            for name, value in (own | {"original_max_seq_len": length}).items()
        }
        return gguf.read(edited(tmp_path / "m.gguf", keys, tensors)).config.rope_scaling

    assert scaling(8192, divisors) == scaling(None, divisors) == Llama3Scaling(8.0)
    for length, tensors in ((4096, divisors), (8192, {})):
        with pytest.raises(JllamaError, match="which is no type that jllama has"):
            scaling(length, tensors)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear"}, None),
        ({"type": "linear", "factor": 1.0}, None),
        ({"factor": 0.0}, None),
        ({"factor": 4.0}, LinearScaling(4.0)),
        ({"type": "linear", "factor": 4.0, "finetuned": True}, LinearScaling(4.0)),
        ({"type": "yarn", "factor": 4.0}, YarnScaling(4.0, original_max_seq_len=1024)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 512, "yarn_beta_fast": 20.0},
            YarnScaling(4.0, original_max_seq_len=512, beta_fast=20.0),
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "attn_factor": 0.5,
                "yarn_ext_factor": 1.0,
                "yarn_log_multiplier": 0.0,
            },
            YarnScaling(
                4.0, original_max_seq_len=1024, attention_factor=0.5 * (0.1 * math.log(4) + 1)
            ),
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_attn_factor": 0.1 * math.log(4) + 1},
            YarnScaling(4.0, original_max_seq_len=1024),
        ),
    ],
)
def test_scaling_keys_mean_what_llama_cpp_makes_of_them(tmp_path, changes, expected):
    changes = {f"rope.scaling.{name}": value for name, value in changes.items()}
    assert gguf.read(edited_llama(tmp_path / "m.gguf", changes)).config.rope_scaling == expected


def test_divisors_that_say_nothing_are_no_scaling(tmp_path):
    path = edited(tmp_path / "m.gguf", {}, {"rope_freqs.weight": np.ones(32, np.float32)})
    assert gguf.read(path).config == CONFIG


# What is refused


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("expert_count", 8, "lacks the key llama.expert_used_count"),
        ("attention.sliding_window", 2**31, "sliding_window is 2147483648; it must be a number of"),
        ("attention.scale", 0.5, "has llama.attention.scale 0.5"),
        ("embedding_scale", 12.0, "has llama.embedding_scale 12.0"),
        ("attention.causal", False, "has llama.attention.causal False"),
        ("rope.scale_linear", 2.0, "has llama.rope.scale_linear 2.0, which jllama does not"),
        ("something.new", 1, "has llama.something.new 1, which jllama does not support"),
        ("rope.scaling.type", "longrope", "'longrope'; jllama knows none, linear and yarn"),
        ("rope.scaling.alpha", 1000.0, "has llama.rope.scaling.alpha 1000.0"),
        ("rope.scaling.attn_factor", 1.2, "attn_factor 1.2, which jllama does not support"),
        ("rope.scaling.yarn_attn_factor", 1.2, "yarn_attn_factor 1.2, which llama.cpp ignores"),
        ("rope.scaling.factor", 0.5, "rope_scaling.factor is 0.5; it must be at least 1"),
        ("rope.scaling.factor", math.nan, "rope.scaling.factor nan; it must be one float"),
        ("attention.value_length", 32, "value_length 32 but heads of 64 channels"),
        ("rope.dimension_count", 32, "rope.dimension_count 32 but heads of 64 channels"),
        ("attention.key_length", 63, "head_dim 63 is odd"),
        ("attention.head_count", None, "lacks the key llama.attention.head_count"),
        ("attention.layer_norm_rms_epsilon", math.inf, "epsilon inf; it must be one float"),
        ("attention.layer_norm_rms_epsilon", 0.0, "norm_eps is 0.0; it must be positive"),
        ("context_length", 0, "max_seq_len is 0; it must be at least 1"),
        ("feed_forward_length", [80, 96], "feed_forward_length [80, 96]; it must be one int"),
        ("block_count", True, "block_count True; it must be one int"),
        ("block_count", 4_000_000_000, "num_layers is 4,000,000,000; it must be at most 10,000"),
        ("block_count", 4000, "says it has 4000 layers, but holds 21 tensors in all"),
        ("block_count", 1, "blk.1.attn_norm.weight is [128], expected none"),
        ("block_count", 3, "blk.2.attn_norm.weight is absent, "),
        ("attention.head_count", 8, "blk.0.attn_q.weight is [256, 128], expected [512, 128]"),
        ("attention.head_count", 3, "num_heads 3 is not divisible by num_kv_heads 2"),
        ("embedding_length", 4_000_000_000, "embed_dim is 4,000,000,000; it must be at most"),
    ],
)
def test_what_is_not_a_llama_of_ours_is_refused_by_name(tmp_path, key, value, problem):
    path = edited_llama(tmp_path / "m.gguf", {key: value})
    text = message(gguf.read, path)
    assert problem in text
    assert str(path) in text


def test_keys_that_ask_for_nothing_are_let_through(tmp_path):
    changes = {
        "expert_count": 0,
        "attention.sliding_window": 0,
        "logit_scale": 1.0,
        "attention.causal": True,
        "rope.scale_linear": 1.0,
        "nextn_predict_layers": 0,
        "rope.freq_base": int(CONFIG.rope_theta),
        "attention.head_count_kv": [CONFIG.num_kv_heads] * CONFIG.num_layers,
        "vocab_size": 96,
        "tensor_data_layout": "Meta AI original pth",
    }
    assert gguf.read(edited_llama(tmp_path / "m.gguf", changes)).config == CONFIG


def test_other_architectures_parts_and_biases_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    edited(path, {}, architecture="gemma")
    assert "has architecture 'gemma'; jllama reads llama, qwen2" in message(gguf.read, path)
    edited(path, {}, {"blk.0.attn_q.bias": np.zeros(256, np.float32)})
    assert "blk.0.attn_q.bias is [256], expected none" in message(gguf.read, path)
    write_with_package(path, METADATA, {"output.weight": np.ones((2, 2), np.float32)})
    assert "lacks the tensor token_embd.weight" in message(gguf.read, path)
    template = "tokenizer.chat_template"
    for key, value, problem in [
        ("split.count", 3, "one of 3 parts of a model: join them with llama-gguf-split --merge"),
        (template, 5, f"has a {template} that is not a string"),
        ("tokenizer.ggml.eos_token_id", 96, "eos_token_id 96; it must be an id below 96"),
        ("tokenizer.ggml.eot_token_id", 2**32 - 1, "eot_token_id 4294967295; it must be an id"),
        ("tokenizer.ggml.eos_token_id", "</s>", "eos_token_id '</s>'; it must be an id below 96"),
        ("tokenizer.ggml.eos_token_id", 4.0, "eos_token_id 4.0; it must be an id below 96"),
    ]:
        edited(path, {key: value})
        assert problem in message(gguf.read, path)


@pytest.mark.parametrize(
    ("changes", "dtype", "problem"),
    [
        ({"rope_scaling": DynamicScaling(2.0)}, None, "GGUF has no RoPE scaling of type dynamic"),
        (
            {"rope_scaling": YarnScaling(2.0, beta_fast=16.0)},
            None,
            "beta_fast and beta_slow to be 32 and 1, this model has 16 and 1",
        ),
        (
            {"rope_theta": 1e6 / 3},
            None,
            "llama.rope.freq_base as FLOAT32, which cannot hold 333333.3333",
        ),
        ({"rope_theta": 1e299}, None, "cannot hold 1e+299"),
        ({"rope_scaling": LinearScaling(7 / 3)}, None, "rope.scaling.factor as FLOAT32"),
        ({}, np.dtype(np.int8), "llama.cpp has no int8"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_before_a_byte_is_written(
    tmp_path, changes, dtype, problem
):
    config = dataclasses.replace(CONFIG, **changes)
    assert problem in message(written, tmp_path / "m.gguf", config, PARAMS, dtype)
    assert not list(tmp_path.iterdir())


def test_float64_is_not_narrowed_unasked(tmp_path):
    wide = in_dtype(PARAMS, np.float64)
    problem = "llama.cpp has no float64 for token_embd.weight"
    assert problem in message(written, tmp_path / "m.gguf", CONFIG, wide)
    written(tmp_path / "m.gguf", CONFIG, wide, np.dtype(np.float32))
    assert_same_bits(load_params(gguf.read(tmp_path / "m.gguf")), PARAMS)


def test_a_missing_tokenizer_is_said(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    written(path, CONFIG, PARAMS)
    assert gguf.read(path).tokenizer is None  # as its own key says
    assert capsys.readouterr().err == ""
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.lost!"))
    assert gguf.read(path).tokenizer is None
    note = f"note: {path} has no tokenizer.ggml.model, so the model has no tokenizer\n"
    assert capsys.readouterr().err == note


@pytest.mark.parametrize("type_", [1, 7, 30])
def test_a_tensor_of_a_wrong_type_leaves_a_gap(tmp_path, llama_file, type_):
    """Read as a narrower type than it has, it would be noise."""
    data = llama_file.read_bytes()
    for tensor in GGUFReader(llama_file).tensors:
        place = data.index(text(tensor.name)) + len(text(tensor.name))
        (num_dims,) = struct.unpack_from("<I", data, place)
        place += 4 + 8 * num_dims
        changed = data[:place] + struct.pack("<I", type_) + data[place + 4 :]
        (tmp_path / "m.gguf").write_bytes(changed)
        with pytest.raises(JllamaError, match=r"wrong type|type or size is wrong|inside a block"):
            gguf.read(tmp_path / "m.gguf")


# Damaged files, put together byte by byte


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, type_: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_) + value


def info(name, dims, type_=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)


def raw_file(path, *, keys=(), infos=(), data=b"", version=3, magic=b"GGUF", **counts):
    """A file; ``num_keys`` and ``num_infos`` are what it claims to hold."""
    num_keys, num_infos = counts.get("num_keys", len(keys)), counts.get("num_infos", len(infos))
    head = magic + struct.pack("<IQQ", version, num_infos, num_keys) + b"".join([*keys, *infos])
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def test_the_raw_files_of_these_tests_are_good(tmp_path):
    path = raw_file(
        tmp_path / "m.gguf",
        keys=[key("a", 4, struct.pack("<I", 7))],
        infos=[info("t", (2, 3))],
        data=b"\1" * 24,
    )
    metadata, tensors = gguf.read_gguf_file(path)
    assert metadata == {"a": 7}
    assert tensors["t"].shape == (3, 2)
    assert tensors["t"][0:3].tobytes() == b"\1" * 24


def alignment(value):
    return key("general.alignment", 4, struct.pack("<I", value))


HUGE = 2**64 - 1
LONG = struct.pack("<Q", HUGE)
ONE = struct.pack("<I", 1)


def key_of_array(type_, count):
    return key("a", 9, struct.pack("<IQ", type_, count))


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ({"magic": b"GGML"}, "is not a GGUF file"),
        ({"version": 1}, "is GGUF version 1; versions 2 and 3, little-endian, can be read"),
        ({"version": 0x03000000}, "is a big-endian GGUF file"),
        ({"num_keys": HUGE}, "truncated"),
        ({"num_infos": HUGE}, "truncated"),
        ({"num_keys": HUGE, "data": b"\0" * 4000}, "has the key  twice"),
        ({"num_infos": HUGE, "data": b"\0" * 4000}, "tensor  with 0 axes"),
        ({"keys": [LONG + b"abc"]}, "truncated"),
        ({"keys": [key("a", 8, LONG)]}, "truncated"),
        ({"keys": [key_of_array(8, 1 << 23)]}, "truncated"),
        ({"keys": [key_of_array(10, 1 << 23)]}, "truncated"),
        ({"keys": [key_of_array(8, HUGE)]}, f"claims {HUGE} elements of type"),
        ({"keys": [key_of_array(0, HUGE)]}, f"claims {HUGE} elements of type"),
        ({"keys": [key_of_array(9, 1)]}, "1 elements of type ARRAY for a; at most"),
        ({"keys": [key("a", 13, ONE)]}, "key a of the unknown type 13"),
        ({"keys": [key_of_array(99, 1)]}, "key a of the unknown type 99"),
        ({"keys": [key("a", 4, ONE)] * 2}, "has the key a twice"),
        ({"keys": [key(b"\xff", 4, ONE)]}, "string at byte 32 that is not UTF-8"),
        ({"keys": [key("a", 8, text(b"\xff"))]}, "that is not UTF-8"),
        ({"keys": [alignment(0)]}, "alignment 0; it must be a power of two"),
        ({"keys": [alignment(48)]}, "alignment 48; it must be a power of two"),
        (
            {"keys": [key("general.alignment", 8, text("32"))]},
            "alignment '32'; it must be a power of two",
        ),
        ({"infos": [info("t", (2, 3))]}, "truncated: the tensor t ends at byte"),
        ({"infos": [info("t", (2, 3))] * 2, "data": b"\0" * 64}, "has the tensor t twice"),
        ({"infos": [info("t", (HUGE, HUGE))]}, "truncated: the tensor t ends at byte"),
        ({"infos": [info("t", (2,), offset=HUGE - 31)]}, "truncated: the tensor t ends at byte"),
        (
            {"infos": [info("t", (2,), offset=4)], "data": b"\0" * 64},
            "tensor t at offset 4, expected 0, right after the header",
        ),
        (
            {"infos": [info("t", (9,)), info("u", (2,), offset=32)], "data": b"\0" * 64},
            "tensor u at offset 32, expected 64, right after t: one has a wrong type or size",
        ),
        (
            {"infos": [info("t", (2,)), info("u", (2,))], "data": b"\0" * 64},
            "tensor u at offset 0, expected 32",
        ),
        ({"infos": [info("t", (2,))], "data": b"\0" * 33}, "has 1 bytes after t, so its type or"),
        ({"infos": [info("t", (1,) * 5)]}, "tensor t with 5 axes"),
        ({"infos": [text("t") + struct.pack("<I", 2**32 - 1)]}, "tensor t with 4294967295 axes"),
        ({"infos": [info("t", (2, 0))]}, "tensor t of shape [0, 2]"),
        ({"infos": [info("t", (2, 3), type_=4)]}, "tensor t of the unknown type 4"),
        ({"infos": [info("t", (33, 3), type_=8)]}, "no row may be empty or end inside a block"),
        (
            {"infos": [info("t", (32,), type_=8)], "data": b"\0" * 34},
            "tensor t of shape [32] and type Q8_0",
        ),
    ],
)
def test_a_damaged_file_gives_one_sentence(tmp_path, contents, problem):
    path = raw_file(tmp_path / "m.gguf", **contents)
    with pytest.raises(JllamaError, match=re.escape(problem)) as caught:
        gguf.read(path)
    assert str(path) in str(caught.value)


@functools.cache
def header_bytes(path):
    return GGUFReader(path).tensors[0].data_offset


@given(data=st.data())
def test_a_file_cut_anywhere_is_truncated(tmp_path_factory, llama_file, data):
    whole = llama_file.read_bytes()
    ends = st.one_of(st.integers(0, header_bytes(llama_file)), st.integers(0, len(whole) - 32))
    kept = data.draw(ends)
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(whole[:kept])
    assert "is truncated" in message(gguf.read, path)
    assert gguf.recognizes(path) == (kept >= 4)


@settings(max_examples=40)
@given(data=st.data())
def test_flipped_bytes_give_a_model_or_one_sentence(tmp_path_factory, llama_file, data):
    damaged = bytearray(llama_file.read_bytes())
    places = st.integers(4, header_bytes(llama_file) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flipped") / "m.gguf"
    path.write_bytes(damaged)
    try:
        gguf.read(path)
    except JllamaError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_only_gguf_files_are_recognized(tmp_path, llama_file):
    assert not gguf.recognizes(tmp_path)
    assert not gguf.recognizes(tmp_path / "none.gguf")
    assert "there is no GGUF file" in message(gguf.read, tmp_path / "none.gguf")
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    assert not gguf.recognizes(tmp_path)
    for name in ("a.gguf", "no suffix", "b.gguf"):
        shutil.copy(llama_file, tmp_path / name)
        assert gguf.recognizes(tmp_path / name)
        assert gguf.recognizes(tmp_path) == (name != "b.gguf")
    assert "there is no GGUF file at" in message(gguf.read, tmp_path)
