"""Meta's folders: shards of both styles joined to the model they were cut from, every field of
params.json heeded.
"""

import dataclasses
import json
import math
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from helpers_meta import DTYPES, cut, metas_folder, metas_matrices, params_json, save_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import oracle
from jllama.checkpoints import meta
from jllama.checkpoints import tensors as tensors_module
from jllama.checkpoints.meta import concatenate_shards, read, recognizes, write
from jllama.checkpoints.tensors import Checkpoint, TensorsOfParams, load_params
from jllama.config import LlamaConfig
from jllama.errors import JllamaError, UsageError
from jllama.model import build_model
from jllama.parameters import tensor_specs
from jllama.presets import PRESETS
from jllama.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers import BytesTokenizer, train_sentencepiece
from jllama.verify.checks import random_params, relative_error

CONFIG = LlamaConfig(
    vocab_size=48, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=64
)


def in_dtype(params, dtype):
    return {
        k: in_dtype(v, dtype) if isinstance(v, dict) else v.astype(dtype) for k, v in params.items()
    }


def refused(folder, message, rope_factor=None, error=JllamaError):
    with pytest.raises(error, match=message) as caught:
        read(folder, rope_factor)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("style", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_either_style_are_the_model_that_was_cut(tmp_path, count, style, dtype):
    folder = metas_folder(tmp_path / "model", CONFIG, count, style, dtype, vocab_size=-1)
    assert recognizes(folder)
    checkpoint = read(folder)
    assert checkpoint.config == dataclasses.replace(CONFIG, max_seq_len=4096)
    assert checkpoint.tokenizer is None
    assert checkpoint.stop_ids == ()
    expected = in_dtype(random_params(CONFIG, 0), jnp.dtype(dtype))
    assert_same_bits(load_params(checkpoint), expected)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # blocks that begin and end inside shards and inside heads
        patch.setattr(tensors_module, "BLOCK_BYTES", 4 * 32 * 3)
        assert_same_bits(load_params(checkpoint), expected)


@st.composite
def cut_models(draw):
    count = draw(st.sampled_from([1, 2, 4, 8]))
    num_kv_heads = draw(
        st.sampled_from(
            [heads for heads in (1, 2, 3, 4, 8) if heads % count == 0 or count % heads == 0]
        )
    )
    num_heads = math.lcm(num_kv_heads, count) * draw(st.integers(1, 2))
    head_dim = 2 * draw(st.integers(1, 3))
    config = LlamaConfig(
        vocab_size=count * draw(st.integers(1, 5)),
        num_layers=draw(st.integers(1, 2)),
        embed_dim=num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_dim=count * draw(st.integers(1, 5)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6, 2.5e-5])),
        rope_theta=draw(st.sampled_from([10_000.0, 500_000.0, 12_345.5])),
        rope_scaling=draw(
            st.sampled_from([None, Llama3Scaling(8.0), Llama3Scaling(4.0, 1.5, 3.5, 512)])
        ),
        max_seq_len=draw(st.sampled_from([4096, 131_072, 100])),
        tie_embeddings=draw(st.booleans()),
    )
    return config, count, draw(st.sampled_from([2, 3])), draw(st.sampled_from(list(DTYPES)))


@settings(max_examples=15)
@given(cut_models())
def test_a_model_comes_back_from_shards_and_from_what_is_written(tmp_path_factory, model):
    config, count, style, dtype = model
    folder = tmp_path_factory.mktemp("meta")
    scaling = {} if config.rope_scaling is None else {"use_scaled_rope": True}
    metas_folder(folder / "cut", config, count, style, dtype, **scaling)
    factor = config.rope_scaling.factor if config.rope_scaling else None
    checkpoint = read(folder / "cut", factor)
    if config.rope_scaling in (None, Llama3Scaling(8.0)):
        assert dataclasses.replace(checkpoint.config, max_seq_len=config.max_seq_len) == config
    expected = in_dtype(random_params(config, 0), jnp.dtype(dtype))
    assert_same_bits(load_params(checkpoint), expected)

    (folder / "written").mkdir()
    done = []
    write(dataclasses.replace(checkpoint, config=config), folder / "written", None, done.append)
    written = read(folder / "written")
    assert written.config == config
    assert_same_bits(load_params(written), expected)
    theirs = torch.load(folder / "written" / "consolidated.00.pth", weights_only=True, mmap=True)
    ours = metas_matrices(config, random_params(config, 0))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor.to(DTYPES[dtype])), name
    assert sum(done) == sum(tensor.nbytes for tensor in theirs.values())
    assert sorted(file.name for file in (folder / "written").iterdir()) == [
        "consolidated.00.pth",
        *(["jllama.json"] if config.max_seq_len != checkpoint.config.max_seq_len else []),
        "params.json",
    ]


LOGITS_CONFIG = LlamaConfig(
    vocab_size=96,
    num_layers=2,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=96,
    rope_theta=500_000.0,
    rope_scaling=Llama3Scaling(32.0),
)


def logits_error(checkpoint, expected, tokens):
    return relative_error(
        build_model(checkpoint.config, load_params(checkpoint))(jnp.asarray(tokens)), expected
    )


def test_logits_are_the_oracles_and_the_order_of_channels_matters(tmp_path, monkeypatch):
    params = random_params(LOGITS_CONFIG, 0)
    tokens = np.random.default_rng(0).integers(0, 96, (1, 128))
    expected = oracle.forward(params, tokens, LOGITS_CONFIG)
    folder = metas_folder(tmp_path / "model", LOGITS_CONFIG, 4, 3, use_scaled_rope=True)
    checkpoint = read(folder, 32.0)
    assert logits_error(checkpoint, expected, tokens) < 1e-5

    with monkeypatch.context() as patch:  # no permutation at all
        patch.setattr(tensors_module, "reorder_rotary", lambda spec, tensor, *_, **__: tensor)
        assert logits_error(read(folder, 32.0), expected, tokens) > 1e-3
    with monkeypatch.context() as patch:  # keys permuted as if they had as many heads as queries
        real = tensors_module.reorder_rotary

        def as_if_multi_head(spec, tensor, config, to_half_split):
            head_dim = config.head_dim // (2 if spec.path.endswith("wk") else 1)
            return real(spec, tensor, dataclasses.replace(config, head_dim=head_dim), to_half_split)

        patch.setattr(tensors_module, "reorder_rotary", as_if_multi_head)
        assert logits_error(read(folder, 32.0), expected, tokens) > 1e-3


def test_a_written_model_is_read_by_metas_rotation(tmp_path):
    """Meta's own rotary product, complex numbers over neighboring channels, on the matrices that
    are written.
    """
    config = LlamaConfig(
        vocab_size=8, num_layers=1, embed_dim=512, num_heads=8, num_kv_heads=2, mlp_dim=8
    )
    params = random_params(config, 1)
    write(Checkpoint(config, TensorsOfParams(config, params)), tmp_path, None, lambda _: None)
    state = torch.load(tmp_path / "consolidated.00.pth", weights_only=True)
    x = np.random.default_rng(0).standard_normal((200, 512))
    scores = {}
    for kind, heads in (("wq", 8), ("wk", 2)):
        pairs = (
            x @ state[f"layers.0.attention.{kind}.weight"].numpy().astype(np.float64).T
        ).reshape(200, heads, 32, 2)
        turns = np.exp(1j * np.arange(200)[:, None] / 10_000 ** (np.arange(32) / 32))
        scores[kind] = (pairs[..., 0] + 1j * pairs[..., 1]) * turns[:, None]
    theirs = np.real(np.einsum("shp,tgp->hgst", scores["wq"], scores["wk"].conj()))
    frequencies = oracle.rope_frequencies(config)
    turned = {
        kind: oracle.rotate(
            np.einsum("se,ehd->hsd", x, params["layers"][kind][0].astype(np.float64)),
            np.arange(200),
            frequencies,
        )
        for kind in ("wq", "wk")
    }
    ours = np.einsum("hsd,gtd->hgst", turned["wq"], turned["wk"])
    assert relative_error(theirs, ours) < 1e-9


def test_joined_is_the_concatenation():
    parts = [np.random.default_rng(n).standard_normal((3, 4)) for n in range(3)]
    for axis in (0, 1):
        joined, whole = concatenate_shards(parts, axis), np.concatenate(parts, axis)
        assert (joined.shape, joined.dtype) == (whole.shape, whole.dtype)
        for start in range(whole.shape[0] + 1):
            for stop in range(start, whole.shape[0] + 1):
                np.testing.assert_array_equal(joined[start:stop], whole[start:stop])


def of_no_memory(config, count=1, value=0.0):
    """A model's files in Meta's names and full size, every tensor one number repeated."""

    def tensor(*shape):
        return np.broadcast_to(np.asarray(value, np.float16), shape)

    dim, mlp, kv = (
        config.embed_dim,
        config.mlp_dim // count,
        config.num_kv_heads * config.head_dim // count,
    )
    found = {
        "tok_embeddings.weight": tensor(config.vocab_size // count, dim),
        "norm.weight": tensor(dim),
    }
    if not config.tie_embeddings:
        found["output.weight"] = np.broadcast_to(
            np.float16(1), found["tok_embeddings.weight"].shape
        )
    for i in range(config.num_layers):
        attention, feed_forward = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        found |= {
            f"{attention}.wq.weight": tensor(dim // count, dim),
            f"{attention}.wk.weight": tensor(kv, dim),
            f"{attention}.wv.weight": tensor(kv, dim),
            f"{attention}.wo.weight": tensor(dim, dim // count),
            f"{feed_forward}.w1.weight": tensor(mlp, dim),
            f"{feed_forward}.w2.weight": tensor(dim, mlp),
            f"{feed_forward}.w3.weight": tensor(mlp, dim),
            f"{attention}_norm.weight": tensor(dim),
            f"layers.{i}.ffn_norm.weight": tensor(dim),
        }
    return found


llama3 = {"rope_theta": 500_000.0, "norm_eps": 1e-5, "vocab_size": 128_256, "n_kv_heads": 8}
llama31 = llama3 | {"use_scaled_rope": True}
RELEASED = {
    "llama1-7b": (
        1,
        {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6},
        None,
    ),
    "llama1-65b": (
        8,
        {"dim": 8192, "multiple_of": 256, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-5},
        None,
    ),
    "llama2-13b": (
        2,
        {"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "norm_eps": 1e-5},
        None,
    ),
    "llama2-70b": (
        8,
        {
            "dim": 8192,
            "multiple_of": 4096,
            "ffn_dim_multiplier": 1.3,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 80,
        }
        | {"norm_eps": 1e-5, "vocab_size": -1},
        None,
    ),
    "codellama-34b": (
        4,
        {
            "dim": 8192,
            "n_layers": 48,
            "n_heads": 64,
            "n_kv_heads": 8,
            "multiple_of": 256,
            "ffn_dim_multiplier": 1.0,
        }
        | {"norm_eps": 1e-5, "rope_theta": 1_000_000},
        None,
    ),
    "llama3-8b": (
        1,
        llama3
        | {
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "ffn_dim_multiplier": 1.3,
            "multiple_of": 1024,
        },
        None,
    ),
    "llama3.1-405b": (
        8,
        llama31
        | {
            "dim": 16_384,
            "n_layers": 126,
            "n_heads": 128,
            "ffn_dim_multiplier": 1.2,
            "multiple_of": 4096,
        },
        8.0,
    ),
    "llama3.2-1b": (
        1,
        llama31
        | {
            "dim": 2048,
            "n_layers": 16,
            "n_heads": 32,
            "ffn_dim_multiplier": 1.5,
            "multiple_of": 256,
        },
        32.0,
    ),
    "llama3.2-3b": (
        1,
        llama31
        | {
            "dim": 3072,
            "n_layers": 28,
            "n_heads": 24,
            "ffn_dim_multiplier": 1.0,
            "multiple_of": 256,
        },
        32.0,
    ),
}
"""By preset: shards, params.json, and the factor that it leaves out."""


@pytest.mark.parametrize("name", RELEASED)
def test_the_params_of_released_models_are_their_presets(tmp_path, monkeypatch, name):
    count, params, factor = RELEASED[name]
    monkeypatch.setattr(meta, "read_torch_file", lambda path: of_no_memory(PRESETS[name], count))
    for number in range(count):
        (tmp_path / f"consolidated.{number:02}.pth").touch()
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert read(tmp_path, factor).config == PRESETS[name]


HELD = [
    name
    for name, config in PRESETS.items()
    if not config.extensions and config.num_heads * config.head_dim == config.embed_dim
]


@pytest.mark.parametrize("name", HELD)
def test_every_preset_goes_there_and_back(tmp_path, monkeypatch, name):
    config = PRESETS[name]
    tensors = {
        stored.key: np.broadcast_to(np.float16(0), stored.shape) for stored in tensor_specs(config)
    }
    monkeypatch.setattr(meta, "write_torch_file", lambda path, named, report: path.touch())
    monkeypatch.setattr(meta, "read_torch_file", lambda path: of_no_memory(config))
    write(Checkpoint(config, tensors), tmp_path, None, lambda _: None)
    assert read(tmp_path).config == config
    assert not (tmp_path / "jllama.json").exists()
    params = json.loads((tmp_path / "params.json").read_text())
    if name in RELEASED:
        _, released, _ = RELEASED[name]
        same = {"multiple_of", "ffn_dim_multiplier"} & params.keys()
        assert {key: params[key] for key in same} == {key: released[key] for key in same}


@given(st.integers(1, 40), st.integers(1, 999))
def test_any_width_of_mlp_goes_there_and_back(tmp_path_factory, half_dim, mlp_dim):
    folder = tmp_path_factory.mktemp("width")
    config = LlamaConfig(
        vocab_size=3, num_layers=1, embed_dim=2 * half_dim, num_heads=1, mlp_dim=mlp_dim
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta, "write_torch_file", lambda path, named, report: path.touch())
        patch.setattr(meta, "read_torch_file", lambda path: of_no_memory(config))
        tensors = {stored.key: np.zeros(1, np.float32) for stored in tensor_specs(config)}
        write(Checkpoint(config, tensors), folder, None, lambda _: None)
        assert read(folder).config == config


def test_context_lengths_of_families(tmp_path):
    def length(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        scaling = {"use_scaled_rope": True, "rope_scaling_factor": 2} if config.rope_scaling else {}
        return read(metas_folder(tmp_path / "x", config, **scaling)).config.max_seq_len

    assert length() == 4096
    assert length(norm_eps=1e-6) == 2048
    assert length(rope_theta=1_000_000) == 16_384
    assert length(rope_theta=500_000) == 8192
    assert length(rope_theta=500_000, rope_scaling=Llama3Scaling(2.0)) == 131_072
    folder = metas_folder(tmp_path / "y", CONFIG)
    (folder / "jllama.json").write_text('{"max_seq_len": 77}')
    assert read(folder).config.max_seq_len == 77
    for wrong in ('{"max_seq_len": 0}', '{"max_seq_len": 1e3}', "[]", "77"):
        (folder / "jllama.json").write_text(wrong)
        refused(folder, "jllama.json")


def test_fields_may_be_left_out(tmp_path):
    config = dataclasses.replace(CONFIG, num_kv_heads=8)
    folder = metas_folder(tmp_path / "x", config)
    params = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 8,
        "n_kv_heads": None,
        "quantization_args": None,
        "max_batch_size": 4,
    }
    (folder / "params.json").write_text(
        json.dumps(params | {"vision_chunk_size": -1, "use_scaled_rope": False})
    )
    assert read(folder).config == dataclasses.replace(
        config, max_seq_len=4096, norm_eps=1e-5, rope_theta=10_000.0
    )


def test_tied_by_absence_or_by_equal_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "BLOCK_BYTES", 999)
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    for style in (2, 3):
        assert read(metas_folder(tmp_path / "x", config, 2, style)).config.tie_embeddings
    state = metas_matrices(config, random_params(config, 0))
    state["output.weight"] = state["output.weight"].clone()
    state["output.weight"][47, 31] = torch.nextafter(
        state["output.weight"][47, 31], torch.tensor(9.0)
    )
    folder = save_folder(tmp_path / "x", cut(state, 2, 2, 2), params_json(config))
    assert not read(folder).config.tie_embeddings
    del state["output.weight"]
    folder = save_folder(tmp_path / "x", cut(state, 2, 2, 2), params_json(config))
    assert_same_bits(load_params(read(folder)), random_params(config, 0))


def test_the_factor_of_a_released_shape_is_that_models(tmp_path, monkeypatch, capsys):
    for name, (count, params, factor) in RELEASED.items():
        if factor is None:
            continue
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(
            meta,
            "read_torch_file",
            lambda path, name=name, count=count: of_no_memory(PRESETS[name], count),
        )
        for number in range(count):
            (folder / f"consolidated.{number:02}.pth").touch()
        (folder / "params.json").write_text(json.dumps(params))
        assert read(folder).config == PRESETS[name]
        said = capsys.readouterr().err
        assert said.startswith(f"note: RoPE factor {factor:g} of {name}, which has this shape")
        assert said.count("\n") == 1
        assert read(folder, 9.0).config.rope_scaling == Llama3Scaling(9.0)
        assert capsys.readouterr().err == ""
    (folder / "params.json").write_text(json.dumps(params | {"rope_theta": 10_000}))
    refused(folder, "no released Llama has this shape: give rope_factor")


def test_scaled_rope_asks_for_its_factor(tmp_path):
    folder = metas_folder(tmp_path / "x", CONFIG, use_scaled_rope=True)
    refused(
        folder, r"use_scaled_rope.* rope_factor, 8 for Llama 3\.1 and 3\.3 or 32 for Llama 3\.2"
    )
    assert read(folder, 32.0).config.rope_scaling == Llama3Scaling(32.0)
    with pytest.raises(UsageError, match=r"factor is 0\.5"):
        read(folder, 0.5)
    refused(
        metas_folder(tmp_path / "x", CONFIG), "no use_scaled_rope: leave it out", 8.0, UsageError
    )
    numbers = {"rope_scaling_factor": 4, "rope_low_freq_factor": 2, "rope_high_freq_factor": 3.5}
    numbers["rope_original_max_seq_len"] = 1024
    folder = metas_folder(tmp_path / "x", CONFIG, use_scaled_rope=True, **numbers)
    assert read(folder).config.rope_scaling == Llama3Scaling(4.0, 2.0, 3.5, 1024)
    refused(folder, "has a factor of its own", 8.0, UsageError)
    refused(
        metas_folder(tmp_path / "x", CONFIG, **numbers),
        "numbers of RoPE scaling without use_scaled_rope",
    )
    for wrong in (
        {"rope_scaling_factor": 0.5},
        {"rope_low_freq_factor": 9},
        {"rope_original_max_seq_len": 8.5},
    ):
        refused(
            metas_folder(tmp_path / "x", CONFIG, use_scaled_rope=True, **numbers | wrong),
            "params.json",
        )


WRONG_PARAMS = {
    "quantization": ({"quantization_args": {"scheme": "int4"}}, "does not have: quantization_args"),
    "adapters": ({"lora_args": {"rank": 16}, "moe_args": {}}, "does not have: lora_args, moe_args"),
    "images": (
        {"vision_chunk_size": 560, "vision_max_num_chunks": 4},
        "vision_chunk_size, vision_max_num_chunks",
    ),
    "experts": ({"num_experts": 8}, "num_experts"),
    "a sliding window": ({"sliding_window": 4096}, "sliding_window"),
    "true for a field we don't know": ({"use_qk_norm": True}, "use_qk_norm"),
    "no dim": ({"dim": None}, "has dim null; it must be a positive whole number"),
    "dim in text": ({"dim": "32"}, 'has dim "32"'),
    "a fraction of a layer": ({"n_layers": 1.5}, "n_layers 1.5"),
    "no layers": ({"n_layers": 0}, "n_layers 0"),
    "true layers": ({"n_layers": True}, "n_layers true"),
    "absurdly many layers": (
        {"n_layers": 10**9},
        "num_layers is 1,000,000,000; it must be at most 10,000",
    ),
    "one layer more": (
        {"n_layers": 3},
        r"layers\.2\.attention_norm\.weight is absent, .*layers\.2\.feed_forward\.w2",
    ),
    "one layer fewer": ({"n_layers": 1}, r"layers\.1\.ffn_norm\.weight is \[32\], expected none"),
    "absurd dim": (
        {"dim": 2**30, "multiple_of": None, "ffn_dim_multiplier": None},
        "embed_dim is 1,073,741,824; it must be at most 1,048,576",
    ),
    "a dim past all bounds": ({"dim": 10**400}, "has dim 1000"),
    "heads that do not divide": ({"n_heads": 5}, "params.json: .*not divisible by num_heads 5"),
    "kv heads that do not divide": (
        {"n_kv_heads": 3},
        "params.json: .*not divisible by num_kv_heads 3",
    ),
    "other kv heads": ({"n_kv_heads": 4}, r"wk\.weight is \[8, 32\], expected \[16, 32\]"),
    "an epsilon of nothing": ({"norm_eps": 0}, "norm_eps 0"),
    "an endless epsilon": ({"norm_eps": float("inf")}, "norm_eps Infinity"),
    "no number for theta": ({"rope_theta": float("nan")}, "rope_theta NaN"),
    "a theta in text": ({"rope_theta": "1e4"}, "rope_theta"),
    "scaling in text": (
        {"use_scaled_rope": "yes"},
        'use_scaled_rope "yes"; it must be true or false',
    ),
    "another vocabulary": (
        {"vocab_size": 47},
        r"tok_embeddings\.weight is \[48, 32\], expected \[47, 32\]",
    ),
    "a vocabulary in text": ({"vocab_size": "48"}, 'vocab_size "48"'),
    "a vocabulary of -2": ({"vocab_size": -2}, "vocab_size -2"),
    "another MLP": ({"multiple_of": 256}, r"w1\.weight is \[64, 32\], expected \[256, 32\]"),
    "another multiplier": (
        {"multiple_of": 256, "ffn_dim_multiplier": 3.1},
        r"w1\.weight is \[64, 32\], expected \[512, 32\]",
    ),
    "multiples of nothing": ({"multiple_of": 0}, "multiple_of 0"),
    "an endless multiplier": (
        {"multiple_of": 8, "ffn_dim_multiplier": 1e308},
        "ffn_dim_multiplier 1e\\+308",
    ),
}


@pytest.mark.parametrize("name", WRONG_PARAMS)
def test_wrong_params_are_refused(tmp_path, name):
    changes, message = WRONG_PARAMS[name]
    refused(metas_folder(tmp_path / "x", CONFIG, 1, **changes), message)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"dim": 1e999}',
        "[" * 10**5,
        "\xff",
        f'{{"dim": {"9" * 5000}}}',
        " " * 2**21,
    ],
)
def test_params_that_are_no_object_are_refused(tmp_path, text):
    folder = metas_folder(tmp_path / "x", CONFIG)
    (folder / "params.json").write_bytes(text.encode("latin-1"))
    refused(folder, "params.json")


def test_a_folder_without_params_is_recognized_and_refused(tmp_path):
    folder = metas_folder(tmp_path / "x", CONFIG)
    (folder / "params.json").unlink()
    assert recognizes(folder)
    refused(folder, "lacks params.json")
    assert not recognizes(tmp_path)
    assert not recognizes(tmp_path / "nowhere")
    assert not recognizes(folder / "consolidated.00.pth")


@pytest.mark.parametrize("style", [2, 3])
def test_a_missing_shard_is_named(tmp_path, style):
    for gone, message in {
        (0,): r"lacks consolidated\.00\.pth: copy",
        (1, 2): r"lacks consolidated\.01\.pth, consolidated\.02\.pth: copy",
        (3,): r"3 of 4 shards, .*expected consolidated\.00\.pth to consolidated\.03\.pth",
        (1, 2, 3): r"1 of 4 shards, .*expected consolidated\.00\.pth to consolidated\.03\.pth",
    }.items():
        folder = metas_folder(tmp_path / "x", CONFIG, 4, style)
        for number in gone:
            (folder / f"consolidated.{number:02}.pth").unlink()
        refused(folder, message)
    shutil.copy(folder / "consolidated.00.pth", folder / "consolidated.0.pth")
    (folder / "consolidated.00.pth").unlink()
    refused(folder, r"lacks consolidated\.00\.pth")


def test_too_many_shards_are_refused(tmp_path):
    folder = metas_folder(tmp_path / "x", CONFIG, 2)
    shutil.copy(folder / "consolidated.01.pth", folder / "consolidated.02.pth")
    refused(folder, "3 of 2 shards")


def test_shards_of_different_models_are_refused(tmp_path):
    folder, other = metas_folder(tmp_path / "x", CONFIG, 2), tmp_path / "other"

    def swapped(config, *arguments, **options):
        metas_folder(other, config, 2, *arguments, **options)
        shutil.copy(other / "consolidated.01.pth", folder)
        return folder

    differs = (
        r"another layers\.0\.attention_norm\.weight in consolidated\.01\.pth "
        r"than in consolidated\.00\.pth"
    )
    refused(swapped(CONFIG, seed=1), differs)
    differs = (
        r"consolidated\.01\.pth and .*wq\.weight is bfloat16\[16, 32\], expected float32\[16, 32\]"
    )
    refused(swapped(CONFIG, dtype="bfloat16"), differs)
    message = refused(
        swapped(dataclasses.replace(CONFIG, mlp_dim=32, num_layers=3)), "shards of different models"
    )
    assert "layers.2.attention.wq.weight is float32[16, 32], expected none" in message
    assert "layers.1.feed_forward.w1.weight is float32[16, 32], expected float32[32, 32]" in message


def test_repeated_keys_and_values_that_differ_are_refused(tmp_path):
    state = metas_matrices(CONFIG, random_params(CONFIG, 0))
    shards = cut(state, 8, 3, 2)
    shards[6]["layers.1.attention.wv.weight"][3, 1] += 1
    folder = save_folder(tmp_path / "x", shards, params_json(CONFIG))
    refused(
        folder,
        r"another layers\.1\.attention\.wv\.weight in consolidated\.06\.pth than in .*04\.pth",
    )


def test_every_missing_extra_and_misshapen_tensor_is_listed(tmp_path):
    state = metas_matrices(CONFIG, random_params(CONFIG, 0))
    del (
        state["layers.0.attention.wq.weight"],
        state["layers.0.feed_forward.w1.weight"],
        state["tok_embeddings.weight"],
    )
    state |= {
        "layers.0.attention.wq.bias": torch.zeros(32),
        "layers.2.ffn_norm.weight": torch.zeros(32),
    }
    state |= {
        "layers.1.attention.wo.weight": torch.zeros(32, 30),
        "layers.1.attention.wk.weight": torch.zeros(32),
    }
    state |= {"norm.weight": torch.tensor(1.0)}
    message = refused(
        save_folder(tmp_path / "x", [state], params_json(CONFIG, vocab_size=-1)),
        "does not hold the model",
    )
    problems = message.split(": ", 1)[1].split("; ")
    assert [problem for problem in problems if "absent" in problem or "none" in problem] == [
        "tok_embeddings.weight is absent, expected [0, 32]",
        "layers.0.attention.wq.weight is absent, expected [32, 32]",
        "layers.0.feed_forward.w1.weight is absent, expected [64, 32]",
        "layers.0.attention.wq.bias is [32], expected none",
        "layers.2.ffn_norm.weight is [32], expected none",
    ]
    assert "layers.1.attention.wo.weight is [32, 30], expected [32, 32]" in problems
    assert "layers.1.attention.wk.weight is [32], expected [8, 32]" in problems
    assert "norm.weight is [], expected [32]" in problems
    half = [
        {"norm.weight": torch.ones(16)} | {k: v for k, v in shard.items() if k != "norm.weight"}
        for shard in cut(metas_matrices(CONFIG, random_params(CONFIG, 0)), 2, 3, 2)
    ]
    refused(
        save_folder(tmp_path / "y", half, params_json(CONFIG)),
        r"norm\.weight is \[16\], expected \[32\]",
    )


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_one_bad_shard_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = metas_folder(tmp_path / "x", CONFIG, 2)
    shard = folder / "consolidated.01.pth"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    refused(folder, r"consolidated\.01\.pth is cut short")
    torch.save({"norm.weight": Evil()}, shard)
    refused(folder, r"consolidated\.01\.pth asks to call '(posix|nt|os)\.system'")
    torch.save({"norm.weight": torch.ones(3, dtype=torch.int8)}, shard)
    refused(folder, r"consolidated\.01\.pth holds tensors of torch\.CharStorage")
    assert not (tmp_path / "evil").exists()


@given(st.data())
def test_a_shard_cut_short_anywhere_is_refused(tmp_path_factory, data):
    folder = metas_folder(tmp_path_factory.mktemp("short") / "x", CONFIG, 2)
    shard = folder / f"consolidated.0{data.draw(st.integers(0, 1))}.pth"
    content = shard.read_bytes()
    shard.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(folder, f"{shard.name} is cut short")


def test_texts_beside_the_weights_go_there_and_back(tmp_path):
    config = dataclasses.replace(CONFIG, max_seq_len=4096)
    params = random_params(config, 0)
    tokenizer = train_sentencepiece(["tale upon tale of a tail"] * 9, 280)
    checkpoint = Checkpoint(
        config, TensorsOfParams(config, params), tokenizer, "{{ messages }}\n", (7, 9)
    )
    write(checkpoint, tmp_path, np.dtype(jnp.bfloat16), lambda _: None)
    found = read(tmp_path)
    assert (found.chat_template, found.stop_ids) == ("{{ messages }}\n", (7, 9))
    assert found.tokenizer is not None
    assert found.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert (tmp_path / "tokenizer.model").is_file()
    assert_same_bits(load_params(found), in_dtype(params, jnp.dtype(jnp.bfloat16)))


def test_the_tokenizer_lies_in_the_folder_or_beside_it(tmp_path):
    folder = metas_folder(tmp_path / "models" / "7B", CONFIG)
    train_sentencepiece(["tale upon tale of a tail"] * 9, 280).save(tmp_path / "models")
    found = read(folder).tokenizer
    assert found is not None
    assert found.vocab_size == 280
    BytesTokenizer().save(folder)
    assert isinstance(read(folder).tokenizer, BytesTokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 6}, "no head_dim, so 8 heads of 6 in an embed_dim of 32"),
        ({"rope_scaling": LinearScaling(2.0)}, "only RoPE scaling of type llama3, not linear"),
        ({"rope_scaling": DynamicScaling(2.0)}, "not dynamic"),
        ({"rope_scaling": YarnScaling(2.0)}, "not yarn"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, changes, message
):
    with pytest.raises(JllamaError, match=message):
        write(
            Checkpoint(dataclasses.replace(CONFIG, **changes), {}), tmp_path, None, lambda _: None
        )
    assert not list(tmp_path.iterdir())
