"""Through every format and back, the same bytes; what a format cannot hold is refused; nothing is
left half written.
"""

import dataclasses
import functools
import inspect
import math
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from helpers_checkpoints import change, in_dtype
from helpers_meta import metas_folder, metas_matrices
from models import FILE, weights

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.formats import huggingface, registry
from jllama.formats.registry import convert, load, load_tokenizer, open_checkpoint, save
from jllama.formats.tensors import TensorsOfParams, tensor_specs
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import Llama3Scaling
from jllama.parallel.sharding import MeshConfig, make_mesh
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.loading import save_huggingface
from jllama.tokenizers.sentencepiece import train_sentencepiece

CONFIG, PARAMS = FILE, weights(FILE)
TOKENIZER = train_sentencepiece(["the quick brown fox jumps over the lazy dog\n" * 9], 300)
MODEL = LanguageModel(CONFIG, PARAMS, TOKENIZER)
FORMATS = ["orbax", "hf", "gguf", "llama2c", "meta"]
SCALED = dataclasses.replace(
    CONFIG, rope_theta=500_000.0, max_seq_len=131_072, rope_scaling=Llama3Scaling(32.0)
)


def stacked(path, dtype=None, **options):
    """The parameters of a checkpoint in the training layout."""
    return load(path, dtype, layout="training", **options).params


@functools.cache
def decoded(dtype="float32", quantize=None):
    """The parameters in the layout for decoding."""
    layout = jax.jit(decode_layout, static_argnums=(1, 2))
    return layout(in_dtype(PARAMS, jnp.dtype(dtype)), CONFIG, quantize)


def tensors_of(path):
    """Every tensor of a checkpoint, read whole, in no format's terms."""
    checkpoint = open_checkpoint(path)
    return {
        key: np.array(tensor[0 : tensor.shape[0]]) for key, tensor in checkpoint.tensors.items()
    }


@pytest.mark.parametrize(
    ("shards", "kv_heads", "style", "dtype", "is_tied", "scaling"),
    [
        (1, 1, 2, "float32", False, None),
        (8, 2, 2, "float32", True, None),
        (4, 2, 3, "bfloat16", True, Llama3Scaling(32.0)),
        (2, 6, 3, "bfloat16", False, Llama3Scaling(8.0)),
    ],
)
def test_every_format_gives_the_same_bytes(
    tmp_path, shards, kv_heads, style, dtype, is_tied, scaling
):
    """Meta -> hf -> gguf -> llama2c -> orbax -> hf -> Meta; llama2.c's only in what it can hold."""
    heads = 2 * max(kv_heads, shards)
    config = LlamaConfig(
        vocab_size=5 * shards,
        num_layers=2,
        embed_dim=6 * heads,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_dim=3 * shards,
        max_seq_len=131_072 if scaling else 4096,
        rope_theta=500_000.0 if scaling else 10_000.0,
        rope_scaling=scaling,
        tie_embeddings=is_tied,
    )
    fields = {}
    if scaling:
        fields = {"use_scaled_rope": True, "rope_scaling_factor": scaling.factor}
    source = metas_folder(tmp_path / "start", config, shards, style, dtype, **fields)
    expected = tensors_of(source)
    assert set(expected) == {stored.key for stored in tensor_specs(config)}
    for number, to in enumerate(["hf", "gguf", "llama2c", "orbax", "hf", "meta"]):
        if to == "llama2c" and scaling:
            continue
        target = tmp_path / f"{number}_{to}"
        convert(source, target, to)
        assert open_checkpoint(target).config == config
        assert_same_bits(tensors_of(target), expected)
        source = target
    original = metas_matrices(config, random_params(config, 0))
    last = torch.load(source / "consolidated.00.pth")
    assert last.keys() == original.keys()
    for name, tensor in last.items():
        assert torch.equal(tensor, original[name].to(getattr(torch, dtype)))
        assert tensor.dtype == getattr(torch, dtype)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The model in every format."""
    folder = tmp_path_factory.mktemp("written")
    for to in FORMATS:
        save(MODEL, folder / to, to)
    return folder


def copied(source, target):
    """Copy a checkpoint, a folder or a file."""
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return target


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_saved_is_loaded(written, to):
    model = load(written / to)
    assert model.config == CONFIG
    assert_same_bits(stacked(written / to), PARAMS)
    assert_same_bits(model.params, decoded())
    assert model.tokenizer.decode(model.tokenizer.encode("héllo 1 <s>")) == "héllo 1 <s>"
    assert (model.tokenizer.bos_id, model.stop_ids) == (1, (2,))
    assert model.step == (0 if to == "orbax" else None)


def test_logits_are_the_references(written):
    tokens = np.random.default_rng(0).integers(0, 300, (2, 33))
    logits = load(written / "hf")(tokens)
    assert logits.dtype == jnp.float32
    assert relative_error(logits, oracle.forward(PARAMS, tokens, CONFIG)) < 1e-5


@pytest.mark.parametrize("to", FORMATS)
def test_the_dtype_asked_for(written, tmp_path, to):
    low = in_dtype(PARAMS, jnp.bfloat16)
    model = load(written / to, dtype="bfloat16")
    assert_same_bits(stacked(written / to, "bfloat16"), low)
    assert_same_bits(model.params, decoded("bfloat16"))
    if to != "llama2c":
        save(model, tmp_path / to, to)
        assert_same_bits(stacked(tmp_path / to, jnp.bfloat16), low)
        convert(written / to, tmp_path / f"{to}2", to, "float16")
        assert_same_bits(stacked(tmp_path / f"{to}2", "float16"), in_dtype(PARAMS, jnp.float16))


@pytest.mark.parametrize("to", ["gguf", "orbax"])
@pytest.mark.parametrize("layout", ["decode", "training"])
def test_what_is_loaded_is_saved_again(written, tmp_path, to, layout):
    """From either layout the same bits; the parameters themselves are written, not copies."""
    model = load(written / "hf", layout=layout)
    save(model, tmp_path / to, to)
    assert_same_bits(stacked(tmp_path / to), PARAMS)
    tensors = TensorsOfParams(CONFIG, model.params)
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model.params)}
    assert tensors["embed"].__array_interface__["data"][0] in addresses


def test_eight_bits_are_not_written(written, tmp_path):
    with pytest.raises(
        JllamaError, match="the parameters are int8, which no format holds: load the model without"
    ):
        save(load(written / "hf", quantize="int8"), tmp_path / "out", "gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float64", "q8_0", 3])
def test_a_dtype_that_is_none_or_that_jax_would_narrow(written, dtype):
    with pytest.raises(
        UsageError,
        match=f"^dtype is {dtype}; it must be float32, bfloat16, float16, or with JAX_EN",
    ):
        load(written / "hf", dtype=dtype)


def test_float64_in_the_64_bit_mode(written):
    with jax.enable_x64(True):
        assert stacked(written / "hf", "float64")["embed"].dtype == np.float64


def test_on_a_cpu_parameters_are_float32_unless_asked(written, tmp_path):
    convert(written / "hf", tmp_path / "low", "hf", "bfloat16")
    assert load(tmp_path / "low").params.dtype == jnp.float32
    assert load(tmp_path / "low", "bfloat16").params.dtype == jnp.bfloat16
    assert tensors_of(tmp_path / "low")["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_a_mesh_of_one(written, to):
    mesh = make_mesh(MeshConfig())
    params = stacked(written / to, mesh=mesh)
    assert_same_bits(params, PARAMS)
    assert params["embed"].sharding.mesh == mesh
    params = load(written / to, mesh=mesh, quantize="int8").params
    assert_same_bits(params, decoded(quantize="int8"))
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(params)} == {mesh}


def test_q8_0_is_close_and_only_gguf_has_it(written, tmp_path):
    convert(written / "hf", tmp_path / "q", "gguf", "q8_0")
    assert (tmp_path / "q").stat().st_size < 0.5 * (written / "gguf").stat().st_size
    found = stacked(tmp_path / "q")
    for path in ("wq", "w_down"):
        assert relative_error(found["layers"][path], PARAMS["layers"][path]) < 1 / 127
    with pytest.raises(
        UsageError, match="dtype is 'q8_0'; with hf it must be one of float32, bfloat16, float16;"
    ):
        convert(written / "hf", tmp_path / "no", "hf", "q8_0")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("to", ["orbax", "hf", "gguf", "meta"])
def test_scaled_rope_chat_template_and_stop_ids_go_along(tmp_path, to):
    template = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}é{% endfor %}"
    save(LanguageModel(SCALED, PARAMS, TOKENIZER, template, (2, 7)), tmp_path / to, to)
    found = open_checkpoint(tmp_path / to)
    assert (found.config, found.chat_template, found.stop_ids) == (SCALED, template, (2, 7))


def test_a_rope_factor_for_metas_files_alone(tmp_path, written):
    save(LanguageModel(SCALED, PARAMS), tmp_path / "meta", "meta")
    change(tmp_path / "meta", "params.json", rope_scaling_factor=...)
    with pytest.raises(JllamaError, match="rope_factor"):
        open_checkpoint(tmp_path / "meta")
    assert open_checkpoint(tmp_path / "meta", rope_factor=32).config == SCALED
    with pytest.raises(
        UsageError,
        match=r"/hf is not a folder with params\.json and .*, so it has no rope_factor 8",
    ):
        load(written / "hf", rope_factor=8)


def left(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


ITSELF = "itself, or holds or lies in it: choose another destination"


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_a_source_is_never_taken_away_or_written_into(tmp_path, written, to):
    """Not the source itself, nor a folder that holds it, nor a file in it, nor what it links to."""
    shutil.copytree(written, tmp_path / "all")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(tmp_path / "all" / "hf" / "model.safetensors")
    shutil.copy(written / "hf" / "config.json", linked)
    (tmp_path / "link").symlink_to("all/hf")
    (tmp_path / "one").mkdir()
    shutil.copy(written / "gguf", tmp_path / "one" / "model.gguf")
    before = left(tmp_path)
    for source, target in [
        ("all/gguf", "all/gguf"),
        ("all/hf", "all"),
        ("all/hf", "all/hf/new/deeper"),
        ("all/hf", "link/model.gguf"),
        ("all/meta", "all/meta/consolidated.00.pth"),
        ("all/llama2c/model.bin", "all/llama2c"),
        ("linked", "all/hf"),
        ("one", "one/model.gguf"),
        ("one/model.gguf", "one"),
    ]:
        for overwrite in (False, True):
            with pytest.raises(JllamaError, match=ITSELF):
                convert(tmp_path / source, tmp_path / target, to, overwrite=overwrite)
        assert left(tmp_path) == before
    convert(tmp_path / "all/hf", tmp_path / "all/hf2", to)  # beside it


def test_source_and_target_are_compared_as_files(tmp_path, written, monkeypatch):
    """And not by their paths, which under a bind mount, or in a file system without case, differ
    for one folder.

    Links that ``resolve`` does not follow look just so: another path to the same file.
    """
    shutil.copytree(written / "hf", tmp_path / "a" / "hf")
    shutil.copy(written / "gguf", tmp_path / "a" / "model.gguf")
    (tmp_path / "mount").symlink_to("a")
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path.absolute())
    for source, target in [
        ("a/hf", "mount/hf"),
        ("mount/hf", "a/hf"),
        ("a/model.gguf", "mount/model.gguf"),
        ("mount/model.gguf", "a/model.gguf"),
        ("mount/hf/config.json", "a/hf"),
        ("mount/hf", "a/hf/sub"),
        ("a/hf", "mount/hf/sub/deeper"),
        ("a", "mount/hf/sub"),
    ]:
        with pytest.raises(JllamaError, match=ITSELF):
            registry.check_target(tmp_path / target, [tmp_path / source], overwrite=True)
    convert(tmp_path / "mount" / "hf", tmp_path / "b", "gguf")


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_no_pipe_socket_or_device_is_replaced(tmp_path, written, to):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "socket"))
    (tmp_path / "device").symlink_to("/dev/null")
    for name in ("pipe", "socket", "device"):
        kind = stat.S_IFMT((tmp_path / name).stat().st_mode)
        for overwrite in (False, True):
            with pytest.raises(JllamaError, match="is a pipe, a socket or a device"):
                convert(written / "hf", tmp_path / name, to, overwrite=overwrite)
        assert stat.S_IFMT((tmp_path / name).stat().st_mode) == kind
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "socket", "device"}


def test_only_a_checkpoint_is_overwritten(tmp_path, written):
    for to in FORMATS:
        copied(written / to, tmp_path / to)
        convert(written / "hf", tmp_path / to, "gguf", overwrite=True)
        assert (tmp_path / to).is_file()
    for name in ("thesis.txt", "train.py", "checkpoints.txt"):
        shutil.copytree(written / "hf", tmp_path / f"with {name}")
        (tmp_path / f"with {name}" / name).write_text("mine")
    for number in range(2):  # a collection of models is no checkpoint
        (tmp_path / "zoo").mkdir(exist_ok=True)
        shutil.copy(written / "gguf", tmp_path / "zoo" / f"{number}.gguf")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "train.bin").write_bytes(bytes(100))
    before = left(tmp_path)
    for target in ("with thesis.txt", "with train.py", "with checkpoints.txt", "zoo", "words"):
        with pytest.raises(
            JllamaError,
            match=f"{target} holds .*, more or less than a checkpoint, and stays as it is",
        ):
            save(MODEL, tmp_path / target, "gguf", overwrite=True)
        assert left(tmp_path) == before
    (tmp_path / "empty").mkdir()
    save(MODEL, tmp_path / "empty", overwrite=True)
    assert load(tmp_path / "empty").config == CONFIG


def test_where_a_link_leads_is_replaced_and_the_folder_one_is_in_never(
    tmp_path, written, monkeypatch
):
    shutil.copytree(written / "hf", tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    convert(written / "gguf", tmp_path / "link", "meta", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "params.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}
    monkeypatch.chdir(tmp_path / "real")
    for target in (".", "", "/", "..", tmp_path / "link"):
        with pytest.raises(
            UsageError, match="is the folder you are in, or holds it: name a file or folder to make"
        ):
            convert(written / "gguf", target, "hf", overwrite=True)
    assert load(tmp_path / "real").config.embed_dim == CONFIG.embed_dim


@pytest.mark.parametrize("to", FORMATS)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path, written, to):
    """Reading one would wait for ever."""
    (tmp_path / "in").mkdir()
    model = copied(written / to, tmp_path / "in" / "m")
    for path in sorted((tmp_path / "in").rglob("*")):
        if path.is_file():
            whole = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            with pytest.raises(
                JllamaError, match=f"{re.escape(str(path))} is a pipe, a socket or a device"
            ):
                open_checkpoint(model)
            path.unlink()
            path.write_bytes(whole)
    assert open_checkpoint(model).config == CONFIG
    with pytest.raises(JllamaError, match="/dev/zero is a pipe, a socket or a device"):
        load("/dev/zero")


@pytest.mark.parametrize("to", ["orbax", "hf", "meta", "llama2c"])
def test_what_stands_in_a_tokenizers_place_is_not_taken_for_none(tmp_path, written, to):
    """A model without its tokenizer would be loaded without a word."""
    shutil.copytree(written / to, tmp_path / "m")
    model = tmp_path / "m"
    (path,) = model.glob("tokenizer.model" if to != "llama2c" else "tokenizer.bin")
    for other in model.glob("tokenizer*"):
        other.unlink()
    problem = f"{path} is a folder, or a link to nothing: put a file there, or remove"
    path.symlink_to("nowhere")
    with pytest.raises(JllamaError, match=problem):
        open_checkpoint(model)
    path.unlink()
    path.mkdir()
    with pytest.raises(JllamaError, match=problem):
        open_checkpoint(model)
    path.rmdir()
    assert open_checkpoint(model).tokenizer is None


def test_deep_json_of_a_run_never_reaches_orbax(tmp_path, written):
    """Its parser of ``_sharding`` ends the process at 200,000 lists in each other."""
    shutil.copytree(written / "orbax", tmp_path / "run")
    deep = '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"
    (tmp_path / "run/checkpoints/0/params/_sharding").write_text(deep)
    with pytest.raises(JllamaError, match="_sharding is not JSON"):
        load(tmp_path / "run")


@pytest.mark.parametrize(
    ("to", "dtype"), [("hf", "bfloat16"), *((to, "float32") for to in FORMATS)]
)
def test_quantized_as_it_is_loaded(written, to, dtype):
    actual = load(written / to, dtype, quantize="int8")
    assert_same_bits(actual.params, decoded(dtype, "int8"))


def test_what_is_unknown(tmp_path):
    # The type checker of the tests would be the first to say so.
    quantized, loaded, saved = map(inspect.unwrap, (LanguageModel.for_decoding, load, save))
    with pytest.raises(UsageError, match="quantize is 'int4'; it must be one of int8, or None"):
        quantized(MODEL, "int4")
    with pytest.raises(UsageError, match="layout is 'stacked'; it must be one of decode, training"):
        loaded("unread", layout="stacked")
    with pytest.raises(
        UsageError, match="quantize is 'int8', which is for decoding: leave it out, or set layout"
    ):
        loaded("unread", layout="training", quantize="int8")
    with pytest.raises(UsageError, match="format is 'onnx'; it must be one of gguf, meta"):
        saved(MODEL, tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_models_repr_is_one_line(written):
    start = "LanguageModel(llama, 2 layers, 34,720 parameters,"
    read = f"{start} float32, tokenizer of 300 tokens, from hf)"
    quantized = f"{start} int8, tokenizer of 300 tokens, from gguf)"
    assert repr(load(written / "hf")) == read
    assert repr(load(written / "gguf", quantize="int8")) == quantized
    assert repr(LanguageModel(CONFIG, PARAMS)) == f"{start} float32, no tokenizer)"


def test_the_tokenizer_of_any_checkpoint(tmp_path, written):
    shutil.copytree(written / "meta", tmp_path / "meta" / "7B")
    tokenizer = tmp_path / "meta/7B/tokenizer.model"
    tokenizer.rename(tmp_path / "meta/tokenizer.model")  # as Llama 1 and 2 were released
    (tmp_path / "gguf").mkdir()
    shutil.copy(written / "gguf", tmp_path / "gguf" / "m.gguf")
    for path in (
        *(written / to for to in FORMATS),
        written / "llama2c" / "model.bin",
        written / "llama2c" / "tokenizer.bin",
        written / "hf" / "tokenizer.json",
        tmp_path / "meta" / "7B",
        tmp_path / "gguf",
    ):
        assert load_tokenizer(path).encode("the lazy dög") == TOKENIZER.encode("the lazy dög")
    save(LanguageModel(CONFIG, PARAMS), tmp_path / "none.gguf", "gguf")
    with pytest.raises(
        JllamaError, match=r"none\.gguf has no tokenizer: put the one it was trained with beside"
    ):
        load_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(JllamaError, match="there is no checkpoint at"):
        load_tokenizer(tmp_path / "missing.gguf")


def test_the_destination_must_be_free(tmp_path, written):
    for to in FORMATS:
        target = tmp_path / to
        target.write_text("mine")
        with pytest.raises(
            JllamaError, match=r"exists: choose another destination, or set overwrite to replace it"
        ):
            convert(written / "hf", target, to)
        assert target.read_text() == "mine"
        convert(written / "hf", target, to, overwrite=True)
        save(MODEL, target, to, overwrite=True)
        assert_same_bits(stacked(target), PARAMS)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(FORMATS)


@pytest.mark.parametrize("to", ["gguf", "orbax"])
def test_what_fails_on_the_way_leaves_nothing(tmp_path, written, monkeypatch, to):
    whole = registry.FORMATS[to]

    def broken(checkpoint, target, dtype, on_progress):
        whole.write(checkpoint, target, dtype, on_progress)
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(registry.FORMATS, to, dataclasses.replace(whole, write=broken))
    (tmp_path / "old").write_text("mine")
    for target, overwrite in (("new", False), ("old", True)):
        with pytest.raises(OSError, match="No space left"):
            convert(written / "hf", tmp_path / target, to, overwrite=overwrite)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("old", "mine")]


def test_what_stood_there_is_put_back(tmp_path, written, monkeypatch):
    """When the last renaming fails, and when a process died just before it."""
    to, target = "hf", tmp_path / "model"
    save(MODEL, target, to)

    def fails(path, new):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="Input/output error"):
        convert(written / "hf", target, to, overwrite=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same_bits(stacked(target), PARAMS)
    target.rename(tmp_path / ".model.old")
    with pytest.raises(JllamaError, match="exists"):
        convert(written / "hf", target, to)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("to", ["gguf", "orbax"])
def test_a_disk_too_small_is_found_before_anything_is_written(tmp_path, written, monkeypatch, to):
    needed = 4 * sum(math.prod(stored.shape) for stored in tensor_specs(CONFIG))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(
        JllamaError, match=rf"needs [\d,]+ bytes but {needed - 1:,} are free there: make room"
    ):
        convert(written / "hf", tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []
    convert(written / "hf", tmp_path / "out", "hf", "bfloat16")


def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    small = dataclasses.replace(CONFIG, vocab_size=200)
    save(LanguageModel(small, random_params(small, 0)), tmp_path / "hf", "hf")
    save_huggingface(BytesTokenizer(), tmp_path / "hf")
    with pytest.raises(JllamaError, match=r"has 259 tokens but the embedding has 200 rows"):
        load(tmp_path / "hf")


def test_what_is_no_checkpoint(tmp_path, written):
    (tmp_path / "notes.txt").write_text("nothing")
    unknown = "is no checkpoint that jllama knows"
    for path, problem in [
        (tmp_path / "missing/there/at/all", "there is no checkpoint at .*/missing/there/at/all"),
        (tmp_path, f"{tmp_path} {unknown}"),
        (tmp_path / "notes.txt", f"notes.txt {unknown}"),
        (written / "meta/consolidated.00.pth", "by itself: give its folder, .*/meta$"),
        (written / "hf/model.safetensors", "is no checkpoint by itself: give its folder, .*/hf$"),
    ]:
        with pytest.raises(JllamaError, match=problem):
            load(path)


def test_a_hub_id(written, monkeypatch):
    copies = {"some-org/Some-Model.1": written / "hf"}
    monkeypatch.setattr(huggingface, "download", lambda name: copies[name])
    model = load("some-org/Some-Model.1")
    assert_same_bits(model.params, decoded())
    assert repr(model).endswith(", from Some-Model.1)")
    with pytest.raises(JllamaError, match="there is no checkpoint at tests/missing"):
        load("tests/missing")


def test_a_step_of_something_that_is_no_run(written):
    with pytest.raises(UsageError, match="/hf is not a training run, so it has no step 3: leave"):
        load(written / "hf", step=3)
    assert load(written / "orbax", step=0).step == 0


FIRST_TOKEN = """
import sys
import jllama
model = jllama.load(sys.argv[1])
jllama.generate(model, ["a"], max_new_tokens=1)
modules = {name.split(".")[0] for name in sys.modules}
print(sorted(modules & {"orbax", "torch", "grain", "matplotlib"}))
"""


@pytest.mark.slow
def test_a_first_token_keeps_its_programs_and_imports_only_what_it_needs(tmp_path):
    save(MODEL, tmp_path / "hf", "hf")
    environment = os.environ | {"JLLAMA_CACHE": str(tmp_path / "cache")}
    del environment["JAX_COMPILATION_CACHE_DIR"]  # of the tests
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN, tmp_path / "hf"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout == "[]\n", done.stderr
    assert list((tmp_path / "cache" / "compiled").iterdir())
