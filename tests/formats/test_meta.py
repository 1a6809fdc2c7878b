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
from helpers_checkpoints import change, in_dtype, message, opened
from helpers_meta import DTYPES, cut, metas_folder, metas_matrices, params_json, save_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.formats import meta
from jllama.formats import tensors as tensors_module
from jllama.formats.meta import read, recognizes, write
from jllama.formats.tensors import Checkpoint, load_params, tensor_specs
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.presets import PRESETS
from jllama.models.rope_scaling import Llama3Scaling, YarnScaling
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

CONFIG = LlamaConfig(
    vocab_size=48, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=64
)


PARAMS = random_params(CONFIG, 0)


def refused(folder, problem, rope_factor=None, error=JllamaError):
    with pytest.raises(error, match=problem) as caught:
        read(folder, rope_factor)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("style", [2, 3])
@pytest.mark.parametrize(
    ("count", "dtype"), [(1, "float32"), (2, "bfloat16"), (4, "float16"), (8, "float32")]
)
def test_shards_of_either_style_are_the_model_that_was_cut(tmp_path, count, style, dtype):
    folder = metas_folder(tmp_path / "model", CONFIG, count, style, dtype, vocab_size=-1)
    assert recognizes(folder)
    checkpoint = read(folder)
    assert checkpoint.config == dataclasses.replace(CONFIG, max_seq_len=4096)
    assert (checkpoint.tokenizer, checkpoint.stop_ids) == (None, ())
    expected = in_dtype(PARAMS, jnp.dtype(dtype))
    assert_same_bits(load_params(checkpoint), expected)
    with pytest.MonkeyPatch.context() as patch:
        # Blocks that begin and end inside shards and inside heads.
        patch.setattr(tensors_module, "BLOCK_BYTES", 4 * 32 * 3)
        assert_same_bits(load_params(checkpoint), expected)


EIGHT = Llama3Scaling(8.0)


@st.composite
def cut_models(draw):
    count = draw(st.sampled_from([1, 2, 4, 8]))
    divides = [heads for heads in (1, 2, 3, 4, 8) if heads % count == 0 or count % heads == 0]
    num_kv_heads = draw(st.sampled_from(divides))
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
        rope_scaling=draw(st.sampled_from([None, EIGHT, Llama3Scaling(4.0, 1.5, 3.5, 512)])),
        max_seq_len=draw(st.sampled_from([4096, 131_072, 100])),
        tie_embeddings=draw(st.booleans()),
    )
    return config, count, draw(st.sampled_from([2, 3])), draw(st.sampled_from(list(DTYPES)))


@settings(max_examples=12)
@given(cut_models())
def test_a_model_comes_back_from_shards_and_from_what_is_written(tmp_path_factory, model):
    config, count, style, dtype = model
    folder = tmp_path_factory.mktemp("meta")
    fields, factor = {}, None
    if config.rope_scaling:
        fields, factor = {"use_scaled_rope": True}, config.rope_scaling.factor
    metas_folder(folder / "cut", config, count, style, dtype, **fields)
    checkpoint = read(folder / "cut", factor)
    if config.rope_scaling in (None, EIGHT):
        assert dataclasses.replace(checkpoint.config, max_seq_len=config.max_seq_len) == config
    expected = in_dtype(random_params(config, 0), jnp.dtype(dtype))
    assert_same_bits(load_params(checkpoint), expected)

    target = folder / "written"
    target.mkdir()
    done = []
    write(dataclasses.replace(checkpoint, config=config), target, None, done.append)
    written = read(target)
    assert written.config == config
    assert_same_bits(load_params(written), expected)
    theirs = torch.load(target / "consolidated.00.pth", weights_only=True, mmap=True)
    ours = metas_matrices(config, random_params(config, 0))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor.to(DTYPES[dtype])), name
    assert sum(done) == sum(tensor.nbytes for tensor in theirs.values())
    has_length = config.max_seq_len != checkpoint.config.max_seq_len
    files = {"consolidated.00.pth", "params.json", *(["jllama.json"] if has_length else [])}
    assert {file.name for file in target.iterdir()} == files


def test_a_written_model_is_read_by_metas_rotation(tmp_path):
    """Meta's own rotary product, complex numbers over neighboring channels, on the matrices that
    are written.
    """
    config = LlamaConfig(
        vocab_size=8, num_layers=1, embed_dim=128, num_heads=2, num_kv_heads=1, mlp_dim=8
    )
    params = random_params(config, 1)
    write(opened(config, params), tmp_path, None, lambda _: None)
    state = torch.load(tmp_path / "consolidated.00.pth", weights_only=True)
    x = np.random.default_rng(0).standard_normal((200, 128))
    frequencies = oracle.rope_frequencies(config)
    theirs, ours = {}, {}
    for kind, heads in (("wq", 2), ("wk", 1)):
        weight = state[f"layers.0.attention.{kind}.weight"].numpy().astype(np.float64)
        pairs = (x @ weight.T).reshape(200, heads, 32, 2)
        turns = np.exp(1j * np.arange(200)[:, None] / 10_000 ** (np.arange(32) / 32))
        theirs[kind] = (pairs[..., 0] + 1j * pairs[..., 1]) * turns[:, None]
        matrix = params["layers"][kind][0].astype(np.float64)
        vectors = np.einsum("se,ehd->hsd", x, matrix)
        ours[kind] = oracle.rotate(vectors, np.arange(200), frequencies)
    actual = np.real(np.einsum("shp,tgp->hgst", theirs["wq"], theirs["wk"].conj()))
    expected = np.einsum("hsd,gtd->hgst", ours["wq"], ours["wk"])
    assert relative_error(actual, expected) < 1e-9


def of_no_memory(config, count=1):
    """A shard of a model in Meta's names and full size, every tensor one number repeated."""
    tensors = {}
    for spec in tensor_specs(config):
        shape = [*spec.shape]
        if len(shape) == 2:  # split along the inputs or the outputs
            shape[int(spec.path.endswith(("wo", "w_down")))] //= count
        tensors[spec.name("meta")] = np.broadcast_to(np.float16(spec.path == "lm_head"), shape)
    return tensors


def released(dim, n_layers, n_heads, multiple_of, multiplier=None, kv_heads=None, **others):
    fields = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "multiple_of": multiple_of}
    fields |= {"norm_eps": 1e-5, "ffn_dim_multiplier": multiplier, "n_kv_heads": kv_heads}
    return {key: value for key, value in (fields | others).items() if value is not None}


llama3 = {"kv_heads": 8, "rope_theta": 500_000.0, "vocab_size": 128_256}
llama31 = llama3 | {"use_scaled_rope": True}
RELEASED = {
    "llama1-7b": (1, released(4096, 32, 32, 256, norm_eps=1e-6), None),
    "llama1-65b": (8, released(8192, 80, 64, 256), None),
    "llama2-13b": (2, released(5120, 40, 40, 256), None),
    "llama2-70b": (8, released(8192, 80, 64, 4096, 1.3, 8, vocab_size=-1), None),
    "codellama-34b": (4, released(8192, 48, 64, 256, 1.0, 8, rope_theta=1_000_000), None),
    "llama3-8b": (1, released(4096, 32, 32, 1024, 1.3, **llama3), None),
    "llama3.1-405b": (8, released(16_384, 126, 128, 4096, 1.2, **llama31), 8.0),
    "llama3.2-1b": (1, released(2048, 16, 32, 256, 1.5, **llama31), 32.0),
    "llama3.2-3b": (1, released(3072, 28, 24, 256, 1.0, **llama31), 32.0),
}
"""By preset: shards, params.json, and the factor that it leaves out."""


@pytest.mark.parametrize("name", RELEASED)
def test_the_params_of_released_models_are_their_presets(tmp_path, monkeypatch, capsys, name):
    """If they leave out the factor of RoPE, it is that of the released shape, as a note says."""
    count, params, factor = RELEASED[name]
    monkeypatch.setattr(meta, "read_torch_file", lambda path: of_no_memory(PRESETS[name], count))
    for number in range(count):
        (tmp_path / f"consolidated.{number:02}.pth").touch()
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert read(tmp_path, factor).config == PRESETS[name]
    if factor:
        capsys.readouterr()
        assert read(tmp_path).config == PRESETS[name]
        note = capsys.readouterr().err
        assert note.startswith(f"note: RoPE factor {factor:g} of {name}, which has this shape")
        assert note.count("\n") == 1
    if name == "llama3.2-1b":
        assert read(tmp_path, 9.0).config.rope_scaling == Llama3Scaling(9.0)
        assert capsys.readouterr().err == ""
        (tmp_path / "params.json").write_text(json.dumps(params | {"rope_theta": 10_000}))
        refused(tmp_path, "no released Llama has this shape: give rope_factor")


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
        _, expected, _ = RELEASED[name]
        same = {"multiple_of", "ffn_dim_multiplier"} & params.keys()
        assert {key: params[key] for key in same} == {key: expected[key] for key in same}


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
    params = {"dim": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": None, "max_batch_size": 4}
    without_effect = {"quantization_args": None, "vision_chunk_size": -1, "use_scaled_rope": False}
    (folder / "params.json").write_text(json.dumps(params | without_effect))
    assert read(folder).config == dataclasses.replace(
        config, max_seq_len=4096, norm_eps=1e-5, rope_theta=10_000.0
    )


def test_tied_by_absence_or_by_equal_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "BLOCK_BYTES", 999)
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    for style in (2, 3):
        assert read(metas_folder(tmp_path / "x", config, 2, style)).config.tie_embeddings
    state = metas_matrices(config, random_params(config, 0))
    head = state["output.weight"].clone()
    head[47, 31] = torch.nextafter(head[47, 31], torch.tensor(9.0))
    shards = cut(state | {"output.weight": head}, 2, 2, 2)
    assert not read(save_folder(tmp_path / "x", shards, params_json(config))).config.tie_embeddings
    del state["output.weight"]
    folder = save_folder(tmp_path / "x", cut(state, 2, 2, 2), params_json(config))
    assert_same_bits(load_params(read(folder)), random_params(config, 0))


def test_scaled_rope_asks_for_its_factor(tmp_path):
    folder = metas_folder(tmp_path / "x", CONFIG, use_scaled_rope=True)
    refused(folder, r"use_scaled_rope.* rope_factor, 8 for Llama 3\.1 and 3\.3 or 32 for")
    assert read(folder, 32.0).config.rope_scaling == Llama3Scaling(32.0)
    with pytest.raises(UsageError, match=r"factor is 0\.5"):
        read(folder, 0.5)
    plain = metas_folder(tmp_path / "plain", CONFIG)
    refused(plain, "no use_scaled_rope: leave it out", 8.0, UsageError)
    numbers = {
        "rope_scaling_factor": 4,
        "rope_low_freq_factor": 2,
        "rope_high_freq_factor": 3.5,
        "rope_original_max_seq_len": 1024,
    }
    change(folder, "params.json", **numbers)
    assert read(folder).config.rope_scaling == Llama3Scaling(4.0, 2.0, 3.5, 1024)
    refused(folder, "has a factor of its own", 8.0, UsageError)
    for wrong in (
        {"rope_scaling_factor": 0.5},
        {"rope_low_freq_factor": 9},
        {"rope_original_max_seq_len": 8.5},
    ):
        change(folder, "params.json", **numbers | wrong)
        refused(folder, "params.json")
    change(folder, "params.json", **numbers, use_scaled_rope=...)
    refused(folder, "numbers of RoPE scaling without use_scaled_rope")


WRONG_PARAMS = [
    ({"lora_args": {"rank": 16}, "moe_arg": {}}, "does not have: lora_args, moe_arg"),
    ({"vision_chunk_size": 560}, "vision_chunk_size"),
    ({"use_qk_norm": True}, "use_qk_norm"),
    ({"dim": None}, "has dim null; it must be a positive whole number"),
    ({"dim": "32"}, 'has dim "32"'),
    ({"n_layers": 1.5}, "n_layers 1.5"),
    ({"n_layers": 0}, "n_layers 0"),
    ({"n_layers": True}, "n_layers true"),
    ({"n_layers": 10**9}, "num_layers is 1,000,000,000; it must be at most 10,000"),
    ({"n_layers": 3}, r"layers\.2\.attention_norm\.weight is absent, .*layers\.2\.feed_forward"),
    ({"n_layers": 1}, r"layers\.1\.ffn_norm\.weight is \[32\], expected none"),
    (
        {"dim": 2**30, "multiple_of": None, "ffn_dim_multiplier": None},
        "embed_dim is 1,073,741,824; it must be at most 1,048,576",
    ),
    ({"dim": 10**400}, "has dim 1000"),
    ({"n_heads": 5}, "params.json: .*not divisible by num_heads 5"),
    ({"n_kv_heads": 3}, "params.json: .*not divisible by num_kv_heads 3"),
    ({"n_kv_heads": 4}, r"wk\.weight is \[8, 32\], expected \[16, 32\]"),
    ({"norm_eps": 0}, "norm_eps 0"),
    ({"norm_eps": float("inf")}, "norm_eps Infinity"),
    ({"use_scaled_rope": "yes"}, 'use_scaled_rope "yes"; it must be true or false'),
    ({"vocab_size": 47}, r"tok_embeddings\.weight is \[48, 32\], expected \[47, 32\]"),
    ({"vocab_size": -2}, "vocab_size -2"),
    ({"multiple_of": 256}, r"w1\.weight is \[64, 32\], expected \[256, 32\]"),
    (
        {"multiple_of": 256, "ffn_dim_multiplier": 3.1},
        r"w1\.weight is \[64, 32\], expected \[512, 32\]",
    ),
    ({"multiple_of": 0}, "multiple_of 0"),
    ({"multiple_of": 8, "ffn_dim_multiplier": 1e308}, "ffn_dim_multiplier 1e\\+308"),
]


@pytest.fixture
def folder(tmp_path):
    """Of two shards, to damage."""
    return metas_folder(tmp_path / "x", CONFIG, 2)


@pytest.mark.parametrize(("changes", "problem"), WRONG_PARAMS)
def test_wrong_params_are_refused(tmp_path, changes, problem):
    refused(metas_folder(tmp_path / "x", CONFIG, 1, **changes), problem)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"dim": 1e999}', "[" * 10**5, "\xff", f'{{"dim": {"9" * 5000}}}', " " * 2**21],
)
def test_params_that_are_no_object_are_refused(folder, text):
    (folder / "params.json").write_bytes(text.encode("latin-1"))
    refused(folder, "params.json")


def test_a_folder_without_params_is_recognized_and_refused(folder, tmp_path):
    (folder / "params.json").unlink()
    assert recognizes(folder)
    refused(folder, "lacks params.json")
    for path in (tmp_path, tmp_path / "nowhere", folder / "consolidated.00.pth"):
        assert not recognizes(path)


@pytest.mark.parametrize("style", [2, 3])
def test_a_missing_shard_is_named(tmp_path, style):
    for gone, problem in {
        (0,): r"lacks consolidated\.00\.pth: copy",
        (1, 2): r"lacks consolidated\.01\.pth, consolidated\.02\.pth: copy",
        (3,): r"3 of 4 shards, .*expected consolidated\.00\.pth to consolidated\.03\.pth",
        (1, 2, 3): r"1 of 4 shards, .*expected consolidated\.00\.pth to consolidated\.03\.pth",
    }.items():
        folder = metas_folder(tmp_path / "x", CONFIG, 4, style)
        for number in gone:
            (folder / f"consolidated.{number:02}.pth").unlink()
        refused(folder, problem)
    (folder / "consolidated.00.pth").rename(folder / "consolidated.0.pth")
    refused(folder, r"lacks consolidated\.00\.pth")


def test_too_many_shards_are_refused(folder):
    shutil.copy(folder / "consolidated.01.pth", folder / "consolidated.02.pth")
    refused(folder, "3 of 2 shards")


def test_shards_of_different_models_are_refused(folder, tmp_path):
    def swapped(config, **options):
        other = metas_folder(tmp_path / "other", config, 2, **options)
        shutil.copy(other / "consolidated.01.pth", folder)
        return folder

    norm = r"layers\.0\.attention_norm\.weight"
    problem = rf"another {norm} in consolidated\.01\.pth than in consolidated\.00\.pth"
    refused(swapped(CONFIG, seed=1), problem)
    problem = r"01\.pth and .*wq\.weight is bfloat16\[16, 32\], expected float32\[16, 32\]"
    refused(swapped(CONFIG, dtype="bfloat16"), problem)
    other = dataclasses.replace(CONFIG, mlp_dim=32, num_layers=3)
    text = refused(swapped(other), "shards of different models")
    assert "layers.2.attention.wq.weight is float32[16, 32], expected none" in text
    assert "layers.1.feed_forward.w1.weight is float32[16, 32], expected float32[32, 32]" in text


def test_repeated_keys_and_values_that_differ_are_refused(tmp_path):
    shards = cut(metas_matrices(CONFIG, PARAMS), 8, 3, 2)
    shards[6]["layers.1.attention.wv.weight"][3, 1] += 1
    folder = save_folder(tmp_path / "x", shards, params_json(CONFIG))
    value = r"layers\.1\.attention\.wv\.weight"
    refused(folder, rf"another {value} in consolidated\.06\.pth than in .*04\.pth")


def test_every_missing_extra_and_misshapen_tensor_is_listed(tmp_path):
    state = metas_matrices(CONFIG, PARAMS) | {
        "layers.0.attention.wq.bias": torch.zeros(32),
        "layers.2.ffn_norm.weight": torch.zeros(32),
        "layers.1.attention.wo.weight": torch.zeros(32, 30),
        "layers.1.attention.wk.weight": torch.zeros(32),
        "norm.weight": torch.tensor(1.0),
    }
    for name in ("layers.0.attention.wq", "layers.0.feed_forward.w1", "tok_embeddings"):
        del state[f"{name}.weight"]
    folder = save_folder(tmp_path / "x", [state], params_json(CONFIG, vocab_size=-1))
    text = refused(folder, "does not hold the model")
    assert {
        "tok_embeddings.weight is absent, expected [0, 32]",
        "layers.0.attention.wq.weight is absent, expected [32, 32]",
        "layers.0.feed_forward.w1.weight is absent, expected [64, 32]",
        "layers.0.attention.wq.bias is [32], expected none",
        "layers.2.ffn_norm.weight is [32], expected none",
        "layers.1.attention.wo.weight is [32, 30], expected [32, 32]",
        "layers.1.attention.wk.weight is [32], expected [8, 32]",
        "norm.weight is [], expected [32]",
    } <= set(text.split(": ", 1)[1].split("; "))
    half = [
        shard | {"norm.weight": torch.ones(16)}
        for shard in cut(metas_matrices(CONFIG, PARAMS), 2, 3, 2)
    ]
    folder = save_folder(tmp_path / "y", half, params_json(CONFIG))
    refused(folder, r"norm\.weight is \[16\], expected \[32\]")


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_one_bad_shard_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard = folder / "consolidated.01.pth"
    os.truncate(shard, shard.stat().st_size // 2)
    refused(folder, r"consolidated\.01\.pth is cut short")
    torch.save({"norm.weight": Evil()}, shard)
    refused(folder, r"consolidated\.01\.pth asks to call '(posix|nt|os)\.system'")
    torch.save({"norm.weight": torch.ones(3, dtype=torch.int8)}, shard)
    refused(folder, r"consolidated\.01\.pth holds tensors of torch\.CharStorage")
    assert not (tmp_path / "evil").exists()


def test_texts_beside_the_weights_go_there_and_back(tmp_path):
    config = dataclasses.replace(CONFIG, max_seq_len=4096)
    params = random_params(config, 0)
    tokenizer = train_sentencepiece(["tale upon tale of a tail"] * 9, 280)
    texts = {"tokenizer": tokenizer, "chat_template": "{{ messages }}\n", "stop_ids": (7, 9)}
    write(opened(config, params, **texts), tmp_path, np.dtype(jnp.bfloat16), lambda _: None)
    found = read(tmp_path)
    assert (found.chat_template, found.stop_ids) == ("{{ messages }}\n", (7, 9))
    assert found.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert (tmp_path / "tokenizer.model").is_file()
    assert_same_bits(load_params(found), in_dtype(params, jnp.bfloat16))


def test_the_tokenizer_lies_in_the_folder_or_beside_it(tmp_path):
    folder = metas_folder(tmp_path / "models" / "7B", CONFIG)
    train_sentencepiece(["tale upon tale of a tail"] * 9, 280).save(tmp_path / "models")
    found = read(folder).tokenizer
    assert found.vocab_size == 280
    BytesTokenizer().save(folder)
    assert isinstance(read(folder).tokenizer, BytesTokenizer)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_dim": 6}, "no head_dim, so 8 heads of 6 in an embed_dim of 32"),
        ({"rope_scaling": YarnScaling(2.0)}, "only RoPE scaling of type llama3, not yarn"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, changes, problem
):
    checkpoint = Checkpoint(dataclasses.replace(CONFIG, **changes), {})
    assert problem in message(write, checkpoint, tmp_path, None, lambda _: None)
    assert not list(tmp_path.iterdir())
