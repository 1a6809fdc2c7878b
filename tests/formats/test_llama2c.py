"""llama2.c files there and back, against a reader and arithmetic put down here from run.c's
description.
"""

import dataclasses
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from helpers_checkpoints import in_dtype, message, opened, small_configs
from hypothesis import given
from hypothesis import strategies as st
from reference_writers import FORMAT_WRITERS

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.formats import llama2c
from jllama.formats.tensors import load_params
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.rope_scaling import LinearScaling
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

CONFIG = LlamaConfig(
    vocab_size=50,
    num_layers=2,
    embed_dim=128,
    num_heads=2,
    num_kv_heads=1,
    mlp_dim=96,
    max_seq_len=64,
)

configs = small_configs(has_head_dim=False, max_seq_len=st.integers(1, 20))


def written(folder, config, seed=0, tensor_dtype=np.float32, dtype=None, **others):
    params = in_dtype(random_params(config, seed), tensor_dtype)
    done = []
    llama2c.write(opened(config, params, **others), folder, dtype, done.append)
    return params, sum(done)


def written_by_jllama(folder, config, params):
    folder.mkdir()
    llama2c.write(opened(config, params), folder, None, lambda _: None)


WRITERS = [written_by_jllama, FORMAT_WRITERS["llama2c"].write]


def run_c_weights(path: Path) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """``read_checkpoint`` and ``memory_map_weights`` of run.c, in NumPy."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, seq = header = struct.unpack("<7i", raw[:28])
    numbers, head_size = np.frombuffer(raw[28:], "<f4"), dim // heads
    shapes = {
        "token_embedding_table": (abs(vocab), dim),
        "rms_att_weight": (layers, dim),
        "wq": (layers, heads * head_size, dim),
        "wk": (layers, kv_heads * head_size, dim),
        "wv": (layers, kv_heads * head_size, dim),
        "wo": (layers, dim, heads * head_size),
        "rms_ffn_weight": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "rms_final_weight": (dim,),
        "freq_cis_real": (seq, head_size // 2),
        "freq_cis_imag": (seq, head_size // 2),
    } | ({"wcls": (abs(vocab), dim)} if vocab < 0 else {})
    found, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = numbers[at : at + size].reshape(shape)
        at += size
    assert at == len(numbers)
    found.setdefault("wcls", found["token_embedding_table"])
    return header, found


def run_c_forward(path: Path, tokens: list[int]) -> np.ndarray:
    """``forward`` of run.c, one position after another, in float64: adjacent channels are turned
    together.
    """
    (dim, _, layers, heads, kv_heads, _, _), w = run_c_weights(path)
    w = {name: weight.astype(np.float64) for name, weight in w.items()}
    head_size = dim // heads
    keys, values, logits = [[] for _ in range(layers)], [[] for _ in range(layers)], []

    def rmsnorm(x, weight):
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def rotated(vector, position):
        angles = position / 10000.0 ** (np.arange(0, head_size, 2) / head_size)
        turned = vector.reshape(-1, head_size // 2, 2) @ [1, 1j] * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(-1)

    for position, token in enumerate(tokens):
        x = w["token_embedding_table"][token].copy()
        for layer in range(layers):
            h = rmsnorm(x, w["rms_att_weight"][layer])
            query = rotated(w["wq"][layer] @ h, position)
            keys[layer].append(rotated(w["wk"][layer] @ h, position))
            values[layer].append(w["wv"][layer] @ h)
            out = np.zeros(heads * head_size)
            for head in range(heads):
                own, shared = head * head_size, head // (heads // kv_heads) * head_size
                scores = [
                    query[own : own + head_size] @ key[shared : shared + head_size]
                    for key in keys[layer]
                ]
                weights = np.exp(np.array(scores) / np.sqrt(head_size))
                weights /= weights.sum()
                for weight, value in zip(weights, values[layer], strict=True):
                    out[own : own + head_size] += weight * value[shared : shared + head_size]
            x += w["wo"][layer] @ out
            h = rmsnorm(x, w["rms_ffn_weight"][layer])
            gate = w["w1"][layer] @ h
            x += w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        logits.append(w["wcls"] @ rmsnorm(x, w["rms_final_weight"]))
    return np.array(logits)


@given(configs, st.integers(0, 3))
def test_there_and_back_is_the_same_bytes(tmp_path_factory, config, seed):
    folder = tmp_path_factory.mktemp("model")
    params, num_bytes = written(folder, config, seed)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == num_bytes
    for path in (folder, folder / "model.bin"):
        assert llama2c.recognizes(path)
        checkpoint = llama2c.read(path)
        assert checkpoint.config == config
        texts = checkpoint.tokenizer, checkpoint.chat_template, checkpoint.stop_ids
        assert texts == (None, None, ())
        assert_same_bits(load_params(checkpoint), params)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_is_as_run_c_reads_it(tmp_path, tied, write):
    """Header, order, logits, and the two tables of cosines and sines, which other readers of the
    format use.
    """
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params, folder = random_params(config, 0), tmp_path / "model"
    write(folder, config, params)
    header, tensors = run_c_weights(folder / "model.bin")
    assert header == (128, 96, 2, 2, 1, 50 if tied else -50, 64)
    angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(0, 64, 2) / 64))
    assert np.abs(tensors["freq_cis_real"] - np.cos(angles)).max() < 1e-6
    assert np.abs(tensors["freq_cis_imag"] - np.sin(angles)).max() < 1e-6
    tokens = np.random.default_rng(1).integers(0, 50, 64)
    expected = run_c_forward(folder / "model.bin", list(tokens))
    assert relative_error(oracle.forward(params, tokens[None], config)[0], expected) < 1e-10
    read_back = llama2c.read(folder)
    assert read_back.config == config
    assert_same_bits(load_params(read_back), params)


@pytest.mark.parametrize(
    ("tensor_dtype", "dtype"),
    [(jnp.bfloat16, None), (np.float16, None), (np.float64, np.dtype(np.float32))],
)
def test_other_weights_are_written_in_float32(tmp_path, tensor_dtype, dtype):
    params, _ = written(tmp_path, CONFIG, tensor_dtype=tensor_dtype, dtype=dtype)
    checkpoint = llama2c.read(tmp_path)
    assert isinstance(checkpoint.tensors["layers/1/w_gate"], np.memmap)
    assert_same_bits(load_params(checkpoint), in_dtype(params, np.float32))


@pytest.mark.parametrize(
    ("changes", "others", "problem"),
    [
        ({"rope_theta": 500000.0}, {}, "its rope_theta is 500000.0, and run.c has 10000.0"),
        ({"norm_eps": 1e-6}, {}, "its norm_eps is 1e-06, and run.c has 1e-05"),
        ({"rope_scaling": LinearScaling(2.0)}, {}, "its rope_scaling is LinearScaling"),
        ({"head_dim": 32}, {}, "its head_dim is 32, and run.c has embed_dim / num_heads, 64"),
        ({}, {"chat_template": "{{ messages }}"}, "it has a chat template"),
        ({}, {"stop_ids": (3, 4)}, "tokens 3, 4 end its answers"),
        # run.c reads as many tokens as the embedding has rows.
        (
            {},
            {"tokenizer": BytesTokenizer(), "stop_ids": (2,)},
            "its tokenizer has 259 tokens, and run.c reads 50",
        ),
        ({}, {"tensor_dtype": np.float64}, "it has float64 tensors (choose dtype float32)"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_a_byte_is_written(
    tmp_path, changes, others, problem
):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(JllamaError, match=r"the llama2\.c format cannot hold this model") as caught:
        written(tmp_path, config, **others)
    assert problem in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 27, 28, 4000, -4, -1])
def test_a_truncated_file_is_said_to_be(tmp_path, kept):
    written(tmp_path, CONFIG)
    file = tmp_path / "model.bin"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file} is truncated: it has" in message(llama2c.read, file)
    assert llama2c.recognizes(file) == (kept not in (0, 27))
    file.rename(tmp_path / "model.weights")
    assert not llama2c.recognizes(tmp_path / "model.weights")


def test_sizes_are_believed_only_if_the_file_has_them(tmp_path):
    written(tmp_path, CONFIG)
    file = tmp_path / "model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0" * 4)
    problem = f"it has {len(whole) + 4} bytes but its header describes {len(whole)}"
    assert f"is too long, or no llama2.c file: {problem}" in message(llama2c.read, file)
    limit = 2**31 - 1
    for sizes, problem in {
        (1 << 20, 1 << 22, 10_000, 1 << 14, 1, -(1 << 24), 1 << 28): "is truncated",
        (limit - 1, limit, limit, 1, 1, -limit, limit): "vocab_size is 2,147,483,647; it must be",
        (128, 96, limit, 2, 1, -50, 64): "num_layers is 2,147,483,647; it must be at most 10,000",
        (128, 96, 2, 2, 0, -50, 64): "none may be 0",
        (-128, 96, 2, 2, 1, 50, 64): "embed_dim is -128",
        (128, 96, 2, 3, 1, 50, 64): "not divisible by num_heads",
        (128, 96, 2, 128, 1, 50, 64): "head_dim 1 is odd",
        (128, 96, 2, 2, 1, 50, -1): "max_seq_len is -1",
    }.items():
        file.write_bytes(struct.pack("<7i", *sizes) + whole[28:])
        text = message(llama2c.read, file)
        assert problem in text
        assert str(file) in text


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_give_one_sentence(tmp_path_factory, data, magic):
    file = tmp_path_factory.mktemp("any") / "model.bin"
    file.write_bytes((struct.pack("<I", 0x616B3432) if magic else b"") + data)
    llama2c.recognizes(file)
    with pytest.raises(JllamaError, match=r"model\.bin"):
        llama2c.read(file)


@pytest.mark.parametrize("version", [1, 2])
def test_later_versions_are_refused_by_name(tmp_path, version):
    file = tmp_path / "model.bin"
    file.write_bytes(struct.pack("<Ii", 0x616B3432, version) + b"\0" * 300)
    assert llama2c.recognizes(file)
    problem = "is a llama2.c file of version 1 or 2: export it with --version 0"
    assert problem in message(llama2c.read, file)


def test_other_files_and_folders_are_not_taken_for_one(tmp_path):
    assert not llama2c.recognizes(tmp_path)
    assert not llama2c.recognizes(tmp_path / "none.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(range(200)))
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<ifi", 27, -0.0, 5) + b"<unk>" * 9)
    (tmp_path / "tokens.bin").write_bytes(np.arange(300, dtype=np.uint16).tobytes())
    assert not llama2c.recognizes(tmp_path)
    with pytest.raises(JllamaError, match=r"does not hold exactly one llama2\.c"):
        llama2c.read(tmp_path)
    written(tmp_path, CONFIG)
    assert llama2c.recognizes(tmp_path)
    (tmp_path / "second.bin").write_bytes((tmp_path / "model.bin").read_bytes())
    assert not llama2c.recognizes(tmp_path)
    assert llama2c.recognizes(tmp_path / "second.bin")


def test_a_file_of_the_size_that_its_header_gives_needs_no_suffix(tmp_path):
    written(tmp_path, CONFIG)
    file = (tmp_path / "model.bin").rename(tmp_path / "stories")
    assert llama2c.recognizes(file)
    assert llama2c.read(file).config == CONFIG


def test_the_tokenizer_comes_back(tmp_path):
    tokenizer = train_sentencepiece(
        ["the cat sat on the mat, and the other cats sat on the other mats\n"], 300
    )
    config = dataclasses.replace(CONFIG, vocab_size=300)
    written(tmp_path, config, tokenizer=tokenizer, stop_ids=(tokenizer.eos_id,))
    assert {file.name for file in tmp_path.iterdir()} == {"model.bin", "tokenizer.bin"}
    read_back = llama2c.read(tmp_path).tokenizer
    text = "The cats,  naïve 🙂\n sat"
    assert read_back.encode(text) == tokenizer.encode(text)
