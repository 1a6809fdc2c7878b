"""``python -m jllama convert``: every way there, bad files as one sentence, nothing that looks
finished and is not.
"""

import dataclasses
import json
import pickle
import shutil
import signal
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers import run_command, slow_but
from models import FILE, weights

from jllama.commands import cli
from jllama.commands.train import read_options
from jllama.core import JllamaError
from jllama.formats import registry
from jllama.formats.registry import convert, load, save
from jllama.lab.checks import random_params
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import Llama3Scaling
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece
from jllama.training.resolve import complete

CONFIG = FILE


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small model in every format."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_sentencepiece(["the quick brown fox jumps over the lazy dog\n" * 9], 300)
    model = LanguageModel(CONFIG, weights(CONFIG), tokenizer)
    for to in ("orbax", "hf", "gguf", "llama2c", "meta"):
        save(model, folder / to, to)
    return folder


@pytest.fixture
def place(tmp_path, models):
    """A copy of the models, to spoil, and an empty folder to write to."""
    shutil.copytree(models, tmp_path / "in")
    (tmp_path / "out").mkdir()
    return tmp_path


@pytest.fixture
def refused(place):
    """Convert what must not be converted; return the sentence, check that nothing was written."""

    def run(source, *options, to="hf", code=1):
        done = run_command("convert", source, place / "out" / "model", "--to", to, *options)
        assert (done.code, done.out) == (code, ""), done.err
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert list((place / "out").iterdir()) == []
        return done.err

    return run


def zip_entries(path, change):
    """Write a zip file's entries as a function changes them: a name and a content."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries:
            archive.writestr(*change(name, content))


def training(workshop, source, run, *more):
    """The options of a run of one small step that begins from a checkpoint."""
    options = {
        "init_from": source,
        "run_dir": run,
        "data.path": workshop.data["path"],
        "data.cache_dir": workshop.data["cache_dir"],
        "training.steps": 1,
        "training.batch_size": 2,
        "training.seq_len": 16,
        "training.sample_tokens": 0,
    }
    return [*(f"--{name}={value}" for name, value in options.items()), *more]


def test_training_begins_from_the_very_weights(workshop, place, capsys):
    """With a learning rate of nothing at all, they are still there at the end; and a run goes on
    without what it began from, here with the evaluation that is due.
    """
    source, run = place / "in" / "meta", place / "run"
    argv = training(workshop, source, run, "--optimizer.learning_rate=1e-30")
    assert cli.run("train", argv) == 0
    actual, expected = (load(path, layout="training") for path in (run, source))
    assert actual.config == expected.config
    np.testing.assert_array_equal(actual.params["layers"]["wq"], expected.params["layers"]["wq"])
    shutil.rmtree(source)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "validation_loss" not in line))
    capsys.readouterr()
    assert cli.run("train", ["--resume", str(run)]) == 0
    assert "step 1: validation loss " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--model.num_layers 3", 2, "model.num_layers is 3; it must be 2, as in "),
        ("--data.tokenizer bytes", 2, "is bytes; it must be left out: init_from brings its own"),
        ("--training.seq_len 65", 2, "seq_len is 65; it must be at most model.max_seq_len, 64"),
        ("--init_from nowhere", 1, "there is no checkpoint at nowhere"),
        (
            "--rope_factor 8",
            2,
            "with params.json and consolidated.*.pth, so it has no rope_factor 8",
        ),
        ("--rope_factor 8 --init_from=", 2, "is 8.0; it must be left out without init_from"),
    ],
)
def test_what_cannot_be_trained_on(workshop, models, tmp_path, capsys, options, code, said):
    argv = training(workshop, models / "hf", tmp_path / "run", *options.split())
    argv.remove("--training.seq_len=16")
    assert cli.run("train", argv) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("to", ["hf", "gguf", "llama2c", "meta"])
def test_every_file_cut_short(place, refused, to):
    """Each file of each format at half its length: one sentence that names it."""
    source = place / "in" / to
    files = [source]
    if source.is_dir():
        weights = (".safetensors", ".pth", ".bin")
        files = [path for path in sorted(source.rglob("*")) if path.suffix in weights]
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert str(path) in refused(source)
        path.write_bytes(whole)


def test_a_damaged_run(place, refused):
    source = place / "in" / "orbax"
    for path in (source / "checkpoints").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])
    assert "cannot be read" in refused(source)


class Calls:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_pickle_that_calls_something_calls_nothing(place, refused, monkeypatch):
    monkeypatch.chdir(place / "out")
    shard = place / "in" / "meta" / "consolidated.00.pth"

    def change(name, content):
        return name, pickle.dumps({"a": Calls()}) if name.endswith("data.pkl") else content

    zip_entries(shard, change)
    message = refused(place / "in" / "meta")
    assert str(shard) in message
    assert "touch" in message


def test_names_that_point_outside(place, refused):
    folder = place / "in" / "hf"
    weights = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    weights.rename(place / "outside.safetensors")
    inside = "sub/../../outside.safetensors"
    for outside in ("../outside.safetensors", str(place / "outside.safetensors"), inside):
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, outside)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert outside in refused(folder)
    shard = place / "in" / "meta" / "consolidated.00.pth"
    zip_entries(shard, lambda name, content: (name.replace("/data/0", "/../data/0"), content))
    assert "consolidated.00.pth" in refused(place / "in" / "meta")


def test_headers_that_claim_absurd_sizes(place, refused):
    weights = place / "in" / "hf" / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 2**60) + weights.read_bytes()[8:])
    assert str(weights) in refused(place / "in" / "hf")
    gguf = place / "in" / "gguf"
    whole = gguf.read_bytes()
    for start in (8, 16):  # the counts of tensors and of metadata
        gguf.write_bytes(whole[:start] + struct.pack("<Q", 2**61) + whole[start + 8 :])
        assert str(gguf) in refused(gguf)
    model = place / "in" / "llama2c" / "model.bin"
    header = struct.pack("<7i", *[2**30] * 5, -(2**30), 2**30)
    model.write_bytes(header + model.read_bytes()[28:])
    assert "llama2c" in refused(place / "in" / "llama2c")


def test_tensors_that_are_missing_extra_or_misshapen(place, refused):
    weights = place / "in" / "hf" / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    safetensors.numpy.save_file(tensors, weights)
    message = refused(place / "in" / "hf")
    assert "model.embed_tokens.weight is absent, expected [" in message
    assert "model.norm.weight is [31], expected [32]" in message
    layers = ("1.mlp.up_proj.weight is absent", "0.self_attn.q_proj.bias", "2.mlp.up_proj.weight")
    for part in layers:
        assert f"model.layers.{part}" in message


def test_a_missing_shard(place, refused):
    folder = place / "in" / "meta"
    (folder / "consolidated.00.pth").rename(folder / "consolidated.01.pth")
    assert "consolidated.00.pth" in refused(folder)


@pytest.fixture
def scaled(place):
    """A model in Meta's format, whose files leave out the factor of its RoPE."""
    scaling = {"rope_scaling": Llama3Scaling(32.0), "rope_theta": 500_000.0}
    config = dataclasses.replace(CONFIG, **scaling)
    save(LanguageModel(config, random_params(config, 0), BytesTokenizer()), place / "meta", "meta")
    path = place / "meta" / "params.json"
    fields = json.loads(path.read_text())
    assert fields.pop("rope_scaling_factor") == 32
    path.write_text(json.dumps(fields))
    return config


def test_scaled_rope_asks_for_its_factor(place, refused, scaled):
    assert "rope_factor" in refused(place / "meta")
    target = place / "out" / "model"
    done = run_command("convert", place / "meta", target, "--to", "hf", "--rope_factor", 32)
    assert done.code == 0, done.err
    assert load(target).config.rope_scaling == scaled.rope_scaling


def test_training_is_told_the_factor(place, workshop, scaled, capsys):
    argv = training(workshop, place / "meta", place / "run")
    assert cli.run("train", argv) == 1
    assert "rope_factor" in capsys.readouterr().err
    config, *_ = complete(read_options([*argv, "--rope_factor=32"], "jllama"), None)
    assert config.model == scaled


def test_doctor_knows_presets_and_every_format(models, capsys, monkeypatch):
    # It has its own test.
    monkeypatch.setattr("jllama.lab.conformance.whole_error", lambda *_: 0.0)
    monkeypatch.setattr("jllama.lab.conformance.cached_error", lambda *_: 0.0)
    assert cli.run("doctor", ["--preset", "llama3.2-1b"]) == 0
    assert "1,235,814,400" in capsys.readouterr().out
    assert cli.run("doctor", ["--checkpoint", str(models / "gguf")]) == 0
    assert "34,720" in capsys.readouterr().out
    assert cli.run("doctor", ["--preset", "llama3.2-2b"]) == 2
    assert "did you mean llama3.2-" in capsys.readouterr().err


FORMATS = "gguf, meta, llama2c, hf, orbax, peft, gguf-lora"


def test_usage(place, refused, capsys):
    hf, meta = place / "in" / "hf", place / "in" / "meta"
    assert f"to is 'onnx'; it must be one of {FORMATS}\n" in refused(hf, to="onnx", code=2)
    message = refused(hf, "--dtype", "q4_k_m", code=2, to="gguf")
    names = "float32, bfloat16, float16, q8_0, q5_1, q5_0, q4_1, q4_0"
    assert f"with gguf it must be one of {names}; for others" in message
    assert "run llama.cpp's llama-quantize on a GGUF file" in message
    shard = meta / "consolidated.00.pth"
    assert f"{shard} is no checkpoint by itself: give its folder, {meta}" in refused(shard)
    message = refused(hf, "--dtype", "q8_0", code=2)
    assert "with hf it must be one of float32, bfloat16, float16" in message
    message = refused(hf, "--rope_factor", "8", code=2)
    assert "so it has no rope_factor 8.0: leave out the rope_factor" in message
    assert "there is no checkpoint at" in refused(place / "in" / "missing")
    for argv in ([], ["somewhere"], ["somewhere", "elsewhere"]):
        assert cli.run("convert", argv) == 2
        assert capsys.readouterr().err.startswith("error: " if argv else "usage: ")


def test_the_destination_exists(place, models, capsys):
    target = place / "out" / "model"
    target.mkdir()
    (target / "mine").write_text("mine")
    argv = [str(models / "gguf"), str(target), "--to", "hf"]
    assert cli.run("convert", argv) == 1
    assert "or set overwrite to replace it" in capsys.readouterr().err
    assert cli.run("convert", [*argv, "--overwrite"]) == 1
    problem = "holds mine, more or less than a checkpoint, and stays as it is"
    assert problem in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    shutil.copytree(models / "llama2c", target, dirs_exist_ok=True)
    assert cli.run("convert", [*argv, "--overwrite"]) == 0
    assert load(target).config == CONFIG
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_all_that_a_run_holds_is_known_to_be_its_own(small_run, models, tmp_path):
    """Asked to, a conversion takes a whole run's place, but not with somebody's notes in it."""
    shutil.copytree(small_run.folder, tmp_path / "run")
    (tmp_path / "run" / "notes.md").write_text("mine")
    with pytest.raises(JllamaError, match=r"run holds notes\.md, more or less than a checkpoint"):
        convert(models / "hf", tmp_path / "run", "orbax", overwrite=True)
    (tmp_path / "run" / "notes.md").unlink()
    convert(models / "hf", tmp_path / "run", "orbax", overwrite=True)
    assert load(tmp_path / "run").config == CONFIG


def test_the_format_is_read_off_the_target(place):
    """And the report says what was converted, to what, and how to check it."""
    out, model = place / "out", "llama, 2 layers, 34,720 parameters"
    for name, format, dtype in (("x.gguf", "gguf", "bfloat16"), ("x.bin", "llama2c", "float32")):
        target = out / name
        options = ["--dtype", dtype] if format == "gguf" else []
        done = run_command("convert", place / "in" / "hf", target, *options)
        assert done.code == 0
        report, check = done.err.splitlines()
        assert report.startswith(f"{model}, {dtype}, tokenizer of 300 tokens -> {target}, ")
        assert check == f"check it: python -m jllama verify {target}"
        assert registry._format_of(target) == format
    done = run_command("convert", place / "in" / "hf", out / "x")
    assert (done.code, done.err) == (2, f"error: to is ''; it must be one of {FORMATS}\n")
    hf = place / "in" / "hf"
    for path in hf.glob("tokenizer.*"):
        path.unlink()
    done = run_command("convert", hf, out / "y", "--to", "meta")
    assert done.code == 0
    assert ", float32, no tokenizer -> " in done.err


SLOWLY = """
import itertools, signal, sys, time
from jllama.formats import safetensors_file
from jllama.commands import cli
from jllama.commands.train import read_options

blocks = safetensors_file.blocks
written = itertools.count()

def slow_blocks(*arguments):
    for block in blocks(*arguments):
        time.sleep(600 if next(written) else 0)
        yield block

safetensors_file.blocks = slow_blocks
# A shell's background jobs inherit that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL], [signal.SIGINT, signal.SIGKILL]))
def test_interrupted_it_leaves_nothing_that_looks_finished(workshop, models, tmp_path, number):
    """Caught in the middle of its writing, which would take hours here; then done once more."""
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "model"
    arguments = ["convert", models / "gguf", target, "--to", "hf"]
    process = workshop.start("-c", SLOWLY, *arguments)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not list((tmp_path / "out").rglob("*.safetensors")):
        time.sleep(0.01)
    process.send_signal(number)
    done = workshop.finish(process)
    assert done.code != 0
    assert "Traceback" not in done.err
    assert not target.exists()
    if number == signal.SIGINT:
        assert list((tmp_path / "out").iterdir()) == []
    again = run_command(*arguments)
    assert again.code == 0, again.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    found, expected = (load(path, layout="training").params for path in (target, models / "gguf"))
    np.testing.assert_array_equal(found["layers"]["wo"], expected["layers"]["wo"])
