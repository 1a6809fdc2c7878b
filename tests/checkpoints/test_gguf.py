"""GGUF there and back, against the gguf package, transformers, llama.cpp's converter's formulas,
and damaged files.
"""

import math
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from helpers import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import oracle
from jllama.checkpoints import gguf
from jllama.checkpoints.tensors import Checkpoint, TensorsOfParams, load_params
from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.model import build_model
from jllama.parameters import tensor_specs
from jllama.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers import BytesTokenizer, train_sentencepiece
from jllama.verify.checks import random_params, relative_error
from jllama.verify.reference_writers import gguf_divisors, gguf_metadata, gguf_tensors, interleave

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
        lambda factor, original, attention: YarnScaling(
            factor, original_max_seq_len=original, attention_factor=attention
        ),
        st.sampled_from([1.0, 4.0, 40.0]),
        st.sampled_from([512, 4096]),
        st.one_of(st.just(0.0), st.floats(0.5, 2)),
    ),
)
configs = st.builds(
    lambda vocab, layers, embed, kv_heads, group, half, mlp, length, tied, theta, eps, scaling: (
        LlamaConfig(
            vocab_size=vocab,
            num_layers=layers,
            embed_dim=embed,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=2 * half,
            mlp_dim=mlp,
            max_seq_len=length,
            tie_embeddings=tied,
            rope_theta=theta,
            norm_eps=eps,
            rope_scaling=scaling,
        )
    ),
    *(st.integers(1, top) for top in (9, 3, 7, 3, 3, 4, 9, 5000)),
    st.booleans(),
    st.sampled_from([10_000.0, 500_000.0, 1e6]),
    st.sampled_from([1e-5, 1e-6]),
    scalings,
)


def written(path, config, params, dtype=None, **others):
    done = []
    gguf.write(
        Checkpoint(config, TensorsOfParams(config, params), **others), path, dtype, done.append
    )
    return sum(done)


def converted(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def write_with_package(path, metadata, tensors, architecture="llama", types=None):
    """A file made by the gguf package. ``types``: the tensors to quantize first, and how."""
    writer = GGUFWriter(path, architecture)
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    for key, value in metadata.items():
        kind = kinds.get(
            type(value), GGUFValueType.ARRAY if isinstance(value, list) else GGUFValueType.STRING
        )
        writer.add_key_value(key, value, kind)
    for name, tensor in tensors.items():
        type_ = (types or {}).get(name)
        if type_ is not None:
            writer.add_tensor(name, quantize(tensor, type_), raw_dtype=type_)
        elif tensor.dtype == jnp.bfloat16:
            writer.add_tensor(name, tensor.view(np.uint8), raw_dtype=BF16)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, 0)


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory, params):
    """A whole file made by the gguf package; never changed."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_with_package(path, gguf_metadata(CONFIG), gguf_tensors(CONFIG, params))
    return path


def edited(llama_file, path, changes, tensors=None, architecture="llama"):
    """The whole file with some keys changed or (None) left out, and tensors added."""
    reader_tensors = gguf_tensors(CONFIG, random_params(CONFIG, 0)) | (tensors or {})
    metadata = {
        key: value for key, value in (gguf_metadata(CONFIG) | changes).items() if value is not None
    }
    write_with_package(path, metadata, reader_tensors, architecture)
    return path


# There and back


@given(configs, st.sampled_from([np.float32, jnp.bfloat16, np.float16]), st.integers(0, 3))
def test_there_and_back_is_the_same_config_and_the_same_bytes(
    tmp_path_factory, config, dtype, seed
):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    params = converted(random_params(config, seed), dtype)
    num_bytes = written(path, config, params)
    checkpoint = gguf.read(path)
    assert checkpoint.config == config
    assert (checkpoint.tokenizer, checkpoint.chat_template, checkpoint.stop_ids) == (None, None, ())
    assert_same_bits(load_params(checkpoint), params)
    norms = sum(
        math.prod(stored.shape) for stored in tensor_specs(config) if len(stored.shape) == 1
    )
    extra = (
        4 * (config.head_dim // 2)
        if config.rope_scaling and config.rope_scaling.type == "llama3"
        else 0
    )
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert num_bytes == own + norms * (4 - np.dtype(dtype).itemsize) + extra


@pytest.mark.parametrize("tied", [False, True])
def test_the_package_reads_what_we_write_as_the_converter_would_have_written_it(tmp_path, tied):
    config = LlamaConfig(**(vars(CONFIG) | {"tie_embeddings": tied}))
    params = random_params(config, 1)
    written(tmp_path / "m.gguf", config, params)
    reader = GGUFReader(tmp_path / "m.gguf")
    expected = gguf_tensors(config, params)
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        assert tensor.tensor_type == F32
        np.testing.assert_array_equal(tensor.data, expected[tensor.name])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in gguf_metadata(config).items():
        assert fields[name] == pytest.approx(value, rel=1e-7)
    assert fields["general.architecture"] == "llama"
    assert fields["general.quantization_version"] == 2
    assert fields["llama.vocab_size"] == 96
    assert "rope_freqs.weight" not in expected


@pytest.mark.parametrize("version", [2, 3])
def test_we_read_what_the_package_writes(tmp_path, llama_file, params, version):
    data = bytearray(llama_file.read_bytes())
    data[4:8] = struct.pack("<I", version)
    (tmp_path / "model.gguf").write_bytes(data)
    for path in (tmp_path / "model.gguf", tmp_path):
        assert gguf.recognizes(path)
        checkpoint = gguf.read(path)
        assert checkpoint.config == CONFIG
        assert_same_bits(load_params(checkpoint), params)
    assert isinstance(checkpoint.tensors["layers/1/w_gate"], np.memmap)


def test_transformers_gives_the_same_logits(tmp_path):
    """Its GGUF loader puts q and k back into half-split order by itself."""
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    params = random_params(CONFIG, 2)
    path = tmp_path / "m.gguf"
    written(path, CONFIG, params)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    )
    theirs.load_state_dict(
        load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)["tensors"]
    )
    tokens = np.random.default_rng(0).integers(0, 96, (1, 512))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    checkpoint = gguf.read(path)
    logits = build_model(checkpoint.config, load_params(checkpoint))(jnp.asarray(tokens))
    assert relative_error(logits, expected) < 1e-5
    assert relative_error(oracle.forward(params, tokens, CONFIG), expected) < 1e-5


# Types of tensors


def valid_blocks(type_, shape, seed):
    """QuantizedTensor rows: made by the package where it can, else random bytes whose scales are
    sensible numbers.
    """
    rng = np.random.default_rng(seed)
    try:
        return quantize(rng.standard_normal(shape).astype(np.float32), type_)
    except NotImplementedError:
        pass
    block, size = GGML_QUANT_SIZES[type_]
    rows = rng.integers(0, 256, (shape[0], shape[1] // block * size), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        while (wild := ~np.isfinite(dequantize(rows, type_).reshape(-1, block)).all(-1)).any():
            rows.reshape(-1, size)[wild] = rng.integers(0, 256, (wild.sum(), size), dtype=np.uint8)
    return rows


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


def test_the_types_are_the_ones_we_think():
    """What follows would be empty if nothing could be dequantized."""
    assert {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_XS",
        "TQ2_0",
    } <= {type_.name for type_ in QUANTIZED}


@pytest.mark.parametrize("type_", QUANTIZED, ids=lambda type_: type_.name)
def test_rows_of_every_quantized_type_are_the_packages_bit_for_bit(tmp_path, type_):
    rows = valid_blocks(type_, (37, 512), 0)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("other", np.ones(5, np.float32))
    writer.add_tensor("matrix", rows, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, tensors = gguf.read_gguf_file(tmp_path / "m.gguf")
    matrix, whole = tensors["matrix"], dequantize(rows, type_)
    assert (matrix.shape, matrix.dtype) == ((37, 512), np.float32)
    for start, stop in ((0, 37), (0, 1), (36, 37), (5, 30), (16, 33)):
        part = matrix[start:stop]
        assert part.shape == (stop - start, 512)
        assert part.tobytes() == whole[start:stop].tobytes()
    np.testing.assert_array_equal(tensors["other"], np.ones(5))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.float64])
def test_plain_types_are_mapped_as_they_are(tmp_path, dtype):
    matrix = np.random.default_rng(0).standard_normal((5, 3)).astype(dtype)
    write_with_package(tmp_path / "m.gguf", {}, {"matrix": matrix})
    found = gguf.read_gguf_file(tmp_path / "m.gguf")[1]["matrix"]
    assert isinstance(found, np.memmap)
    assert found.dtype == dtype
    assert found.tobytes() == matrix.tobytes()


@pytest.mark.parametrize("type_", ["Q8_1", "Q8_K", "I8", "I32", "Q1_0"])
def test_a_type_that_cannot_be_dequantized_is_refused_by_name(tmp_path, type_):
    type_ = GGMLQuantizationType[type_]
    rows = np.zeros((2, 256 // GGML_QUANT_SIZES[type_][0] * GGML_QUANT_SIZES[type_][1]), np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("odd.weight", rows, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        JllamaError, match=rf"odd\.weight of shape .* and type {type_.name}, which cannot be read"
    ):
        gguf.read_gguf_file(tmp_path / "m.gguf")


def test_with_one_quantized_matrix_everything_is_float32(tmp_path, params):
    """As llama.cpp's mixed files are: some matrices quantized, some float16 or bfloat16, norms
    float32.
    """
    tensors = gguf_tensors(CONFIG, params)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor.astype(np.float16 if "ffn" in name else jnp.bfloat16)
    types = {"blk.1.attn_q.weight": Q8_0}
    tensors["blk.1.attn_q.weight"] = gguf_tensors(CONFIG, params)["blk.1.attn_q.weight"]
    write_with_package(tmp_path / "m.gguf", gguf_metadata(CONFIG), tensors, types=types)
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {np.dtype(np.float32)}
    loaded = load_params(checkpoint)
    assert_same_bits(loaded["embed"], params["embed"].astype(jnp.bfloat16).astype(np.float32))
    assert_same_bits(
        loaded["layers"]["w_up"], params["layers"]["w_up"].astype(np.float16).astype(np.float32)
    )
    query = dequantize(quantize(gguf_tensors(CONFIG, params)["blk.1.attn_q.weight"], Q8_0), Q8_0)
    np.testing.assert_array_equal(
        interleave(np.asarray(loaded["layers"]["wq"][1]).reshape(128, -1).T, 4), query
    )


def test_norms_that_the_matrices_dtype_cannot_hold_stay_float32(tmp_path, params):
    tensors = gguf_tensors(CONFIG, params)
    tensors = {
        name: tensor.astype(jnp.bfloat16) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }
    tensors["output_norm.weight"] = (
        tensors["output_norm.weight"].astype(jnp.bfloat16).astype(np.float32)
    )
    write_with_package(tmp_path / "m.gguf", gguf_metadata(CONFIG), tensors)
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert checkpoint.tensors["final_norm"].dtype == jnp.bfloat16
    assert checkpoint.tensors["layers/0/attn_norm"].dtype == np.float32
    assert_same_bits(load_params(checkpoint)["layers"]["attn_norm"], params["layers"]["attn_norm"])


@pytest.mark.parametrize(
    ("dtype", "type_", "file_type"),
    [
        (None, F32, 0),
        (np.dtype(np.float32), F32, 0),
        (np.dtype(np.float16), F16, 1),
        (np.dtype(jnp.bfloat16), BF16, 32),
        ("q8_0", Q8_0, 7),
    ],
)
def test_each_type_is_written_as_the_package_has_it(tmp_path, params, dtype, type_, file_type):
    num_bytes = written(tmp_path / "m.gguf", CONFIG, params, dtype)
    reader = GGUFReader(tmp_path / "m.gguf")
    assert num_bytes == sum(tensor.n_bytes for tensor in reader.tensors)
    expected = gguf_tensors(CONFIG, params)
    for tensor in reader.tensors:
        wanted = F32 if expected[tensor.name].ndim == 1 else type_
        if wanted == Q8_0 and expected[tensor.name].shape[1] % 32:
            wanted = F16
        assert tensor.tensor_type == wanted, tensor.name
        raw = quantize(expected[tensor.name], wanted)
        assert np.asarray(tensor.data).tobytes() == np.asarray(raw).tobytes()
        assert tensor.shape.tolist() == list(expected[tensor.name].shape[::-1])
    assert {tensor.tensor_type for tensor in reader.tensors} == (
        {F32, type_} | ({F16} if dtype == "q8_0" else set())
    )
    assert reader.fields["general.file_type"].contents() == file_type
    assert reader.tensors[0].data_offset % 32 == 0


def test_small_blocks_write_the_same_file(tmp_path, params, monkeypatch):
    written(tmp_path / "one.gguf", CONFIG, params, "q8_0")
    monkeypatch.setattr("jllama.checkpoints.tensors.BLOCK_BYTES", 1000)
    written(tmp_path / "two.gguf", CONFIG, params, "q8_0")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


# Metadata


def test_metadata_are_python_values(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "u8": (200, GGUFValueType.UINT8),
        "i8": (-100, GGUFValueType.INT8),
        "u16": (60000, GGUFValueType.UINT16),
        "i16": (-30000, GGUFValueType.INT16),
        "u32": (4_000_000_000, GGUFValueType.UINT32),
        "i32": (-2_000_000_000, GGUFValueType.INT32),
        "u64": (2**63 + 1, GGUFValueType.UINT64),
        "i64": (-(2**62), GGUFValueType.INT64),
        "f32": (0.1, GGUFValueType.FLOAT32),
        "eps": (1e-5, GGUFValueType.FLOAT32),
        "f64": (0.1, GGUFValueType.FLOAT64),
        "yes": (True, GGUFValueType.BOOL),
        "text": ("grüße \U0001f30d", GGUFValueType.STRING),
        "empty": ("", GGUFValueType.STRING),
    }
    for key, (value, type_) in values.items():
        writer.add_key_value(key, value, type_)
    writer.add_key_value("ints", [1, -2], GGUFValueType.ARRAY)
    writer.add_key_value("floats", [0.5, -0.25], GGUFValueType.ARRAY)
    writer.add_key_value("bools", [True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL)
    writer.add_key_value("texts", ["a", "", "é"], GGUFValueType.ARRAY)
    writer.add_key_value("bytes", [b"\xff\xfe", b"ok"], GGUFValueType.ARRAY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, tensors = gguf.read_gguf_file(tmp_path / "m.gguf")
    assert tensors == {}
    expected = {key: value for key, (value, _) in values.items()}
    expected |= {
        "ints": [1, -2],
        "floats": [0.5, -0.25],
        "bools": [True, False],
        "texts": ["a", "", "é"],
    }
    expected |= {
        "bytes": [b"\xff\xfe".decode("utf-8", "surrogateescape"), "ok"],
        "general.architecture": "llama",
    }
    assert metadata == expected
    assert {key: type(value) for key, value in metadata.items()} == {
        key: type(value) for key, value in expected.items()
    }


def test_an_alignment_other_than_the_usual_one_is_followed(tmp_path, params):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    for key, value in gguf_metadata(CONFIG).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, tensor in gguf_tensors(CONFIG, params).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_bits(load_params(gguf.read(tmp_path / "m.gguf")), params)


def test_what_a_file_leaves_out_has_llama_cpps_defaults(tmp_path, llama_file):
    left_out = {
        "llama.vocab_size": None,
        "llama.attention.head_count_kv": None,
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.rope.dimension_count": None,
        "llama.rope.freq_base": None,
    }
    config = LlamaConfig(
        vocab_size=8, num_layers=1, embed_dim=32, num_heads=4, mlp_dim=16, max_seq_len=64
    )
    params = random_params(config, 0)
    metadata = {key: value for key, value in gguf_metadata(config).items() if key not in left_out}
    write_with_package(tmp_path / "m.gguf", metadata, gguf_tensors(config, params))
    assert gguf.read(tmp_path / "m.gguf").config == config


def test_chat_template_and_stop_ids(tmp_path, params):
    written(tmp_path / "m.gguf", CONFIG, params, chat_template="{{ bos }}é", stop_ids=(5, 7, 5, 9))
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert checkpoint.chat_template == "{{ bos }}é"
    assert checkpoint.stop_ids == (5, 7, 9)
    fields = GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ bos }}é"
    assert [
        fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom")
    ] == [5, 7, 9]
    with pytest.raises(JllamaError, match=r"3 keys for tokens .* this model has 4: \[1, 2, 3, 4\]"):
        written(tmp_path / "four.gguf", CONFIG, params, stop_ids=(1, 2, 3, 4))
    assert not (tmp_path / "four.gguf").exists()


def with_tokens(monkeypatch, tokens):
    """A stand-in for the tokenizer's own keys, so that what is tested here is what this module
    adds.
    """
    written_for = []

    def to_gguf(tokenizer, vocab_size):
        written_for.append((tokenizer, vocab_size))
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.scores": [0.5, -1.25],
            "tokenizer.ggml.token_type": [1, 3],
            "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
            "tokenizer.ggml.add_bos_token": False,
        }

    monkeypatch.setattr(gguf, "to_gguf", to_gguf)
    monkeypatch.setattr(gguf, "from_gguf", lambda metadata, source: BytesTokenizer())
    return written_for


@pytest.mark.parametrize(
    ("stops", "read_back", "keys"),
    [
        ((), (2,), {"eos": 2}),
        ((2,), (2,), {"eos": 2}),
        ((2, 5), (2, 5), {"eos": 2, "eot": 5}),
        ((2, 4), (2, 4), {"eos": 2, "eom": 4}),
        ((5, 4, 2), (2, 5, 4), {"eos": 2, "eot": 5, "eom": 4}),
        ((2, 4, 5), (2, 5, 4), {"eos": 2, "eot": 5, "eom": 4}),
        ((2, 5, 6), (2, 5, 6), {"eos": 2, "eot": 5, "eom": 6}),
    ],
)
def test_eos_is_the_tokenizers_and_the_others_have_their_places(
    tmp_path, params, monkeypatch, stops, read_back, keys
):
    tokens = ["<unk>", "<s>", "</s>", "a", "<|eom_id|>", "<|eot_id|>", "\udcff", *("b" * 89)]
    written_for = with_tokens(monkeypatch, tokens)
    tokenizer = BytesTokenizer()
    written(tmp_path / "m.gguf", CONFIG, params, tokenizer=tokenizer, stop_ids=stops)
    assert written_for == [(tokenizer, 96)]
    checkpoint = gguf.read(tmp_path / "m.gguf")
    assert isinstance(checkpoint.tokenizer, BytesTokenizer)
    assert checkpoint.stop_ids == read_back
    metadata, _ = gguf.read_gguf_file(tmp_path / "m.gguf")
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    assert ids == {"eos": None, "eot": None, "eom": None} | keys
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.25]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.merges"] == []


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_the_tokenizer_comes_back(tmp_path, kind):
    corpus = ["the cat sat on the mat, and the other cats sat on the other mats\n"]
    tokenizer = BytesTokenizer() if kind == "bytes" else train_sentencepiece(corpus, 300)
    config = LlamaConfig(**(vars(CONFIG) | {"vocab_size": 310}))
    written(tmp_path / "m.gguf", config, random_params(config, 0), tokenizer=tokenizer)
    read_back = gguf.read(tmp_path / "m.gguf")
    assert read_back.stop_ids == (tokenizer.eos_id,)
    text = "The cats,  naïve 🙂\n sat"
    assert read_back.tokenizer.encode(text) == tokenizer.encode(text)
    assert read_back.tokenizer.decode(tokenizer.encode(text)) == text


# Rotary scaling


DIVISORS = gguf_divisors(CONFIG, Llama3Scaling(8.0))


@pytest.mark.parametrize("factor", [4.5, 8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path, llama_file, factor):
    """From those of Llama 3's own bounds; none of others was ever released."""
    for scaling, known in (
        (Llama3Scaling(factor), True),
        (Llama3Scaling(factor, 1.0, 2.0, 4096), False),
    ):
        path = edited(
            llama_file,
            tmp_path / "m.gguf",
            {},
            {"rope_freqs.weight": gguf_divisors(CONFIG, scaling)},
        )
        if known:
            assert gguf.read(path).config.rope_scaling == scaling
        else:
            with pytest.raises(
                JllamaError, match=r"which is no type that jllama has: convert the model again"
            ):
                gguf.read(path)


def test_llama3_scaling_is_written_as_the_converter_does(tmp_path, params):
    scaling = Llama3Scaling(32.0)
    config = LlamaConfig(**(vars(CONFIG) | {"rope_scaling": scaling, "rope_theta": 500_000.0}))
    written(tmp_path / "m.gguf", config, params)
    (tensor,) = [
        tensor
        for tensor in GGUFReader(tmp_path / "m.gguf").tensors
        if tensor.name == "rope_freqs.weight"
    ]
    expected = gguf_divisors(config, scaling)
    assert expected.min() == 1
    assert expected.max() == 32
    np.testing.assert_allclose(tensor.data, expected, rtol=1e-6)
    metadata, _ = gguf.read_gguf_file(tmp_path / "m.gguf")
    assert not [key for key in metadata if key.startswith("llama.rope.scaling")]


def test_divisors_that_say_nothing_are_no_scaling(tmp_path, llama_file):
    path = edited(
        llama_file, tmp_path / "m.gguf", {}, {"rope_freqs.weight": np.ones(32, np.float32)}
    )
    assert gguf.read(path).config == CONFIG


@pytest.mark.parametrize(
    ("changes", "divisors", "message"),
    [
        ({}, np.linspace(1, 8, 32), "which is no type that jllama has"),
        ({}, np.full(32, 4), "which is no type that jllama has"),
        ({}, np.full(32, -1), "which is no type that jllama has"),
        ({}, np.full(32, np.nan), "which is no type that jllama has"),
        ({}, np.full(32, np.inf), "which is no type that jllama has"),
        ({}, np.zeros(32), "which is no type that jllama has"),
        ({}, DIVISORS * (1 + 1e-4), "which is no type that jllama has"),
        ({}, np.ones(31), r"rope_freqs.weight as float32\[31\], expected float32\[32\]"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            DIVISORS,
            "type 'linear' and the divisors in .* which is no type",
        ),
    ],
)
def test_other_divisors_are_refused(tmp_path, llama_file, changes, divisors, message):
    path = edited(
        llama_file, tmp_path / "m.gguf", changes, {"rope_freqs.weight": divisors.astype(np.float32)}
    )
    with pytest.raises(JllamaError, match=message):
        gguf.read(path)


def test_our_own_keys_must_agree_with_the_divisors(tmp_path, llama_file):
    keys = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

    def write(original, divisors):
        writer = GGUFWriter(tmp_path / "m.gguf", "llama")
        for key, value in gguf_metadata(CONFIG).items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
        for key, value in keys.items():
            writer.add_float64(f"jllama.rope_scaling.{key}", value)
        if original:
            writer.add_uint32("jllama.rope_scaling.original_max_seq_len", original)
        for name, tensor in (gguf_tensors(CONFIG, random_params(CONFIG, 0)) | divisors).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return gguf.read(tmp_path / "m.gguf").config.rope_scaling

    divisors = {"rope_freqs.weight": DIVISORS}
    assert write(8192, divisors) == Llama3Scaling(8.0)
    with pytest.raises(JllamaError, match="which is no type that jllama has"):
        write(4096, divisors)
    with pytest.raises(JllamaError, match="which is no type that jllama has"):
        write(8192, {})
    assert write(None, divisors) == Llama3Scaling(
        8.0
    )  # of the file or of the class, a number must agree


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
def test_scaling_keys_mean_what_llama_cpp_makes_of_them(tmp_path, llama_file, changes, expected):
    changes = {f"llama.rope.scaling.{name}": value for name, value in changes.items()}
    assert (
        gguf.read(edited(llama_file, tmp_path / "m.gguf", changes)).config.rope_scaling == expected
    )


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, r"has llama\.expert_count 8, which jllama does not support"),
        (
            {"attention.sliding_window": 2**31},
            "sliding_window is 2147483648; it must be a number of",
        ),
        ({"attention.scale": 0.5}, r"has llama\.attention\.scale 0\.5"),
        ({"logit_scale": 0.5}, r"has llama\.logit_scale 0\.5"),
        ({"residual_scale": 0.5}, r"has llama\.residual_scale 0\.5"),
        ({"embedding_scale": 12.0}, r"has llama\.embedding_scale 12\.0"),
        ({"attention.causal": False}, r"has llama\.attention\.causal False"),
        (
            {"rope.scale_linear": 2.0},
            r"has llama\.rope\.scale_linear 2\.0, which jllama does not support",
        ),
        ({"something.new": 1}, r"has llama\.something\.new 1, which jllama does not support"),
        (
            {"rope.scaling.type": "longrope"},
            r"rope\.scaling\.type 'longrope'; jllama knows none, linear and yarn",
        ),
        ({"rope.scaling.alpha": 1000.0}, r"has llama\.rope\.scaling\.alpha 1000\.0"),
        ({"rope.scaling.attn_factor": 1.2}, r"attn_factor 1\.2, which jllama does not support"),
        (
            {"rope.scaling.yarn_attn_factor": 1.2},
            r"yarn_attn_factor 1\.2, which llama\.cpp ignores",
        ),
        ({"rope.scaling.factor": 0.5}, r"rope_scaling\.factor is 0\.5; it must be at least 1"),
        ({"rope.scaling.factor": math.nan}, r"rope\.scaling\.factor nan; it must be one float"),
        ({"attention.value_length": 32}, r"attention\.value_length 32 but heads of 64 channels"),
        ({"rope.dimension_count": 32}, r"rope\.dimension_count 32 but heads of 64 channels"),
        ({"attention.key_length": 63}, r"head_dim 63 is odd"),
        ({"attention.head_count": None}, r"lacks the key llama\.attention\.head_count"),
        (
            {"attention.layer_norm_rms_epsilon": None},
            r"lacks the key llama\.attention\.layer_norm_rms_epsilon",
        ),
        ({"attention.layer_norm_rms_epsilon": math.inf}, r"epsilon inf; it must be one float"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, r"norm_eps is 0\.0; it must be positive"),
        ({"context_length": 0}, r"max_seq_len is 0; it must be at least 1"),
        ({"feed_forward_length": [80, 96]}, r"feed_forward_length \[80, 96\]; it must be one int"),
        ({"block_count": True}, r"block_count True; it must be one int"),
        (
            {"block_count": 4_000_000_000},
            r"num_layers is 4,000,000,000; it must be at most 10,000",
        ),
        ({"block_count": 4000}, r"says it has 4000 layers, but holds 21 tensors in all"),
        ({"block_count": 1}, r"blk\.1\.attn_norm\.weight is \[128\], expected none"),
        (
            {"block_count": 3},
            r"blk\.2\.attn_norm\.weight is absent, .*blk\.2\.attn_q\.weight is absent",
        ),
        (
            {"attention.head_count": 8},
            r"blk\.0\.attn_q\.weight is \[256, 128\], expected \[512, 128\]",
        ),
        ({"attention.head_count": 3}, r"num_heads 3 is not divisible by num_kv_heads 2"),
        (
            {"embedding_length": 4_000_000_000},
            r"embed_dim is 4,000,000,000; it must be at most",
        ),
    ],
)
def test_what_is_not_a_llama_of_ours_is_refused_by_name(tmp_path, llama_file, changes, message):
    path = edited(
        llama_file, tmp_path / "m.gguf", {f"llama.{name}": value for name, value in changes.items()}
    )
    with pytest.raises(JllamaError, match=message) as caught:
        gguf.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_ask_for_nothing_are_let_through(tmp_path, llama_file):
    changes = {
        "expert_count": 0,
        "attention.sliding_window": 0,
        "logit_scale": 1.0,
        "attention.causal": True,
        "rope.scale_linear": 1.0,
        "nextn_predict_layers": 0,
        "rope.freq_base": int(CONFIG.rope_theta),
        "attention.head_count_kv": [CONFIG.num_kv_heads] * CONFIG.num_layers,
    }
    changes |= {"vocab_size": 96, "tensor_data_layout": "Meta AI original pth"}
    path = edited(
        llama_file, tmp_path / "m.gguf", {f"llama.{name}": value for name, value in changes.items()}
    )
    assert gguf.read(path).config == CONFIG


def test_other_architectures_parts_and_biases_are_refused(tmp_path, llama_file):
    path = tmp_path / "m.gguf"
    edited(llama_file, path, {}, architecture="gemma")
    with pytest.raises(JllamaError, match="has architecture 'gemma'; jllama reads llama, qwen2"):
        gguf.read(path)
    edited(llama_file, path, {"split.count": 3})
    with pytest.raises(
        JllamaError, match="one of 3 parts of a model: join them with llama-gguf-split --merge"
    ):
        gguf.read(path)
    edited(llama_file, path, {}, {"blk.0.attn_q.bias": np.zeros(256, np.float32)})
    with pytest.raises(JllamaError, match=r"blk\.0\.attn_q\.bias is \[256\], expected none"):
        gguf.read(path)
    write_with_package(path, gguf_metadata(CONFIG), {"output.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(JllamaError, match=r"lacks the tensor token_embd\.weight"):
        gguf.read(path)
    for stop in (96, -1, "</s>", 4.0):
        edited(
            llama_file,
            path,
            {"tokenizer.ggml.eos_token_id": stop}
            if stop != -1
            else {"tokenizer.ggml.eot_token_id": 2**32 - 1},
        )
        with pytest.raises(JllamaError, match=r"_token_id .*; it must be an id below 96"):
            gguf.read(path)
    edited(llama_file, path, {"tokenizer.chat_template": 5})
    with pytest.raises(JllamaError, match=r"has a tokenizer\.chat_template that is not a string"):
        gguf.read(path)


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({"rope_scaling": DynamicScaling(2.0)}, None, "GGUF has no RoPE scaling of type dynamic"),
        (
            {"rope_scaling": YarnScaling(2.0, beta_fast=16.0)},
            None,
            "beta_fast .* to be 32 and 1, this model has 16 and 1",
        ),
        (
            {"rope_theta": 1e6 / 3},
            None,
            r"llama\.rope\.freq_base as FLOAT32, which cannot hold 333333\.3333",
        ),
        (
            {"norm_eps": 1.23456789e-6},
            None,
            r"norm_rms_epsilon as FLOAT32, which cannot hold 1\.23456789e-06",
        ),
        ({"rope_theta": 1e299}, None, r"cannot hold 1e\+299"),
        ({"rope_scaling": LinearScaling(7 / 3)}, None, r"rope\.scaling\.factor as FLOAT32"),
        ({}, np.dtype(np.float64), r"llama\.cpp has no float64 for token_embd\.weight"),
        ({}, np.dtype(np.int8), r"llama\.cpp has no int8"),
    ],
)
def test_what_gguf_cannot_hold_is_refused_before_a_byte_is_written(
    tmp_path, params, changes, dtype, message
):
    config = LlamaConfig(**(vars(CONFIG) | changes))
    with pytest.raises(JllamaError, match=message):
        written(tmp_path / "m.gguf", config, params, dtype)
    assert not list(tmp_path.iterdir())


def test_float64_is_not_narrowed_unasked(tmp_path, params):
    with pytest.raises(JllamaError, match="no float64"):
        written(tmp_path / "m.gguf", CONFIG, converted(params, np.float64))
    written(tmp_path / "m.gguf", CONFIG, converted(params, np.float64), np.dtype(np.float32))
    assert_same_bits(load_params(gguf.read(tmp_path / "m.gguf")), params)


def test_a_missing_tokenizer_is_said(tmp_path, llama_file, params, capsys):
    written(tmp_path / "m.gguf", CONFIG, params)
    assert gguf.read(tmp_path / "m.gguf").tokenizer is None  # as its own key says
    assert capsys.readouterr().err == ""
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(
        data.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.lost!")
    )
    assert gguf.read(tmp_path / "m.gguf").tokenizer is None
    said = capsys.readouterr().err
    assert (
        said == f"note: {tmp_path / 'm.gguf'} has no tokenizer.ggml.model, "
        "so the model has no tokenizer\n"
    )


@pytest.mark.parametrize("type_", [1, 7, 30])
def test_a_tensor_of_a_wrong_type_leaves_a_gap(tmp_path, llama_file, type_):
    """Read as a narrower type than it has, it would be noise."""
    data = llama_file.read_bytes()
    for name in (tensor.name for tensor in GGUFReader(llama_file).tensors):
        place = data.index(text(name)) + len(text(name))
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


def raw_file(
    path: Path,
    *,
    keys=(),
    infos=(),
    data=b"",
    num_keys=None,
    num_infos=None,
    version=3,
    magic=b"GGUF",
):
    counts = (
        len(infos) if num_infos is None else num_infos,
        len(keys) if num_keys is None else num_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
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


HUGE = 2**64 - 1
LONG = struct.pack("<Q", HUGE)
ONE = struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"magic": b"GGML"}, "is not a GGUF file"),
        ({"version": 1}, "is GGUF version 1; versions 2 and 3, little-endian, can be read"),
        ({"version": 4}, "is GGUF version 4"),
        ({"version": 0x03000000}, "is a big-endian GGUF file"),
        ({"num_keys": HUGE}, "truncated"),
        ({"num_infos": HUGE}, "truncated"),
        ({"num_keys": HUGE, "data": b"\0" * 4000}, "has the key  twice"),
        ({"num_infos": HUGE, "data": b"\0" * 4000}, "tensor  with 0 axes"),
        ({"keys": [LONG + b"abc"]}, "truncated"),
        ({"keys": [key("a", 8, LONG)]}, "truncated"),
        ({"keys": [key("a", 9, struct.pack("<IQ", 8, 1 << 23))]}, "truncated"),
        ({"keys": [key("a", 9, struct.pack("<IQ", 10, 1 << 23))]}, "truncated"),
        ({"keys": [key("a", 9, struct.pack("<IQ", 8, HUGE))]}, f"claims {HUGE} elements of type"),
        ({"keys": [key("a", 9, struct.pack("<IQ", 0, HUGE))]}, f"claims {HUGE} elements of type"),
        (
            {"keys": [key("a", 9, struct.pack("<IQ", 9, 1) * 1000)]},
            "1 elements of type ARRAY .* no arrays within",
        ),
        ({"keys": [key("a", 13, ONE)]}, "key a of the unknown type 13"),
        ({"keys": [key("a", 9, struct.pack("<IQ", 99, 1))]}, "key a of the unknown type 99"),
        ({"keys": [key("a", 4, ONE)] * 2}, "has the key a twice"),
        ({"keys": [key(b"\xff", 4, ONE)]}, "string at byte 32 that is not UTF-8"),
        ({"keys": [key("a", 8, text(b"\xff"))]}, "that is not UTF-8"),
        (
            {"keys": [key("general.alignment", 4, struct.pack("<I", 0))]},
            "alignment 0; it must be a power of two",
        ),
        (
            {"keys": [key("general.alignment", 4, struct.pack("<I", 48))]},
            "alignment 48; it must be a power of two",
        ),
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
            "tensor u at offset 32, expected 64, right after t",
        ),
        (
            {"infos": [info("t", (2,)), info("u", (2,))], "data": b"\0" * 64},
            "tensor u at offset 0, expected 32",
        ),
        (
            {"infos": [info("t", (2,), offset=32)], "data": b"\0" * 64},
            "tensor t at offset 32, expected 0",
        ),
        (
            {"infos": [info("t", (9,), 1), info("u", (2,), offset=64)], "data": b"\0" * 96},
            "expected 32, right after t: one has a wrong type or size",
        ),
        (
            {"infos": [info("t", (2,))], "data": b"\0" * 33},
            "has 1 bytes after t, so its type or size is wrong",
        ),
        ({"infos": [info("t", ())]}, "tensor t with 0 axes"),
        ({"infos": [info("t", (1,) * 5)]}, "tensor t with 5 axes"),
        ({"infos": [text("t") + struct.pack("<I", 2**32 - 1)]}, "tensor t with 4294967295 axes"),
        ({"infos": [info("t", (2, 0))]}, r"tensor t of shape \[0, 2\]"),
        ({"infos": [info("t", (2, 3), type_=4)]}, "tensor t of the unknown type 4"),
        ({"infos": [info("t", (33, 3), type_=8)]}, "no row may be empty or end inside a block"),
        (
            {"infos": [info("t", (32,), type_=8)], "data": b"\0" * 34},
            r"tensor t of shape \[32\] and type Q8_0",
        ),
    ],
)
def test_a_damaged_file_gives_one_sentence(tmp_path, contents, message):
    path = raw_file(tmp_path / "m.gguf", **contents)
    with pytest.raises(JllamaError, match=message) as caught:
        gguf.read(path)
    assert str(path) in str(caught.value)


@settings(max_examples=60)
@given(data=st.data())
def test_a_file_cut_anywhere_is_truncated(tmp_path_factory, llama_file, data):
    whole = llama_file.read_bytes()
    header = next(tensor.data_offset for tensor in GGUFReader(llama_file).tensors)
    kept = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(whole) - 32)))
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(whole[:kept])
    with pytest.raises(JllamaError, match="is truncated"):
        gguf.read(path)
    assert gguf.recognizes(path) == (kept >= 4)


@settings(max_examples=80)
@given(data=st.data())
def test_flipped_bytes_give_a_model_or_one_sentence(tmp_path_factory, llama_file, data):
    damaged = bytearray(llama_file.read_bytes())
    header = next(tensor.data_offset for tensor in GGUFReader(llama_file).tensors)
    for place in data.draw(st.lists(st.integers(4, header - 1), min_size=1, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flipped") / "m.gguf"
    path.write_bytes(damaged)
    message = str(path)
    try:
        gguf.read(path)
    except JllamaError as error:
        message = str(error)
    assert str(path) in message


def test_only_gguf_files_are_recognized(tmp_path, llama_file):
    assert not gguf.recognizes(tmp_path)
    assert not gguf.recognizes(tmp_path / "none.gguf")
    with pytest.raises(JllamaError, match="there is no GGUF file"):
        gguf.read(tmp_path / "none.gguf")
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    assert not gguf.recognizes(tmp_path)
    (tmp_path / "a.gguf").write_bytes(llama_file.read_bytes())
    (tmp_path / "no suffix").write_bytes(llama_file.read_bytes())
    assert gguf.recognizes(tmp_path / "no suffix")
    assert gguf.recognizes(tmp_path)
    (tmp_path / "b.gguf").write_bytes(llama_file.read_bytes())
    assert not gguf.recognizes(tmp_path)
    with pytest.raises(JllamaError, match="there is no GGUF file at"):
        gguf.read(tmp_path)
