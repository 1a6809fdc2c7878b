"""Adapters at the command line: merged, exported, talked with; a misfit is one sentence."""

import subprocess
import sys

import pytest
from helpers_adapters import adapter_params, make_run
from models import FILE, weights

from jllama.checkpoints.registry import open_checkpoint, save
from jllama.checkpoints.tensors import base_fingerprint
from jllama.commands import cli
from jllama.config import LoraConfig
from jllama.language_model import LanguageModel
from jllama.parameters import map_by_path
from jllama.tokenizers import BytesTokenizer

GREEDY = ["--temperature", "0", "--max_new_tokens", "8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, another one, a run that trained an adapter and one that trained a DoRA, and where to
    write.
    """
    folder = tmp_path_factory.mktemp("adapters")
    save(LanguageModel(FILE, weights(FILE), BytesTokenizer()), folder / "base", "hf")
    other = map_by_path(lambda _, leaf: leaf + 1, weights(FILE))
    save(LanguageModel(FILE, other, BytesTokenizer()), folder / "other", "hf")
    fingerprint = base_fingerprint(open_checkpoint(folder / "base"))
    for name, dora in {"run": False, "dora": True}.items():
        lora = LoraConfig(rank=3, alpha=2.0, dora=dora)
        make_run(
            folder / name, folder / "base", FILE, lora, adapter_params(FILE, lora), fingerprint
        )
    (folder / "out").mkdir()
    return folder


def jllama(place, *arguments):
    """A command in a process of its own: exit code, stdout, stderr."""
    argv = [sys.executable, "-m", "jllama", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=place, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def said(capsys, command, *arguments):
    """The same in this process."""
    code = cli.run(command, [str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out, printed.err


def test_an_adapter_is_exported_and_talked_with(place, capsys):
    code, out, err = jllama(place, "convert", "run", "out/peft", "--to", "peft")
    assert (code, out) == (0, "")
    assert err.startswith("an adapter of rank 3 for llama, 2 layers, 34,720 parameters, ")
    assert " -> out/peft, " in err
    base, lora = place / "base", place / "out" / "lora.gguf"
    said(capsys, "convert", base, lora, "--to", "gguf-lora", "--adapter", place / "out" / "peft")
    text, loaded = said(capsys, "sample", place / "run", *GREEDY, "--prompt", "the")
    assert f"{place / 'run'}, step 7\n" in loaded
    for adapter in (place / "out" / "peft", lora):
        same, loaded = said(
            capsys, "sample", base, *GREEDY, "--prompt", "the", "--adapter", adapter
        )
        assert same == text
        assert f"{base} with {adapter}\n" in loaded
    assert said(capsys, "sample", base, *GREEDY, "--prompt", "the")[0] != text


def test_an_adapter_is_evaluated_as_what_it_is_merged_into(place, capsys):
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 5)
    said(
        capsys, "convert", place / "base", place / "out" / "whole.gguf", "--adapter", place / "run"
    )
    data = ("--data", place / "text.txt", "--window", "32")
    losses = [
        said(capsys, "eval", *model, *data)[0].split("tokens_per_s")[0]
        for model in (
            [place / "out" / "whole.gguf"],
            [place / "base", "--adapter", place / "run"],
            [place / "base"],
        )
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "sample other --adapter run",
            1,
            "run is an adapter for another base, by its fingerprint: give /",
        ),
        (
            "convert dora out/x --to gguf-lora",
            1,
            "dora has DoRA, which GGUF cannot carry: merge it (gguf)",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(place, arguments, code, message):
    before = sorted((place / "out").iterdir())
    found, out, err = jllama(place, *arguments.split())
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted((place / "out").iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "convert base out/x --to peft",
            2,
            "base has no adapter to write as peft: give one with adapter",
        ),
        ("convert run out/x --to peft --dtype bfloat16", 2, "with peft it must be one of float32"),
        (
            "eval base --adapter nowhere --data text.txt",
            1,
            "there is no adapter at nowhere: give a run's folder",
        ),
        (
            "eval base --adapter base --data text.txt",
            1,
            "base is no adapter that jllama knows: give PEFT's folder, a",
        ),
        (
            "eval base --adapter run --step 3 --data text.txt",
            1,
            "run has no checkpoint of step 3; it has 7",
        ),
        ("bench decode base --adapter text.txt", 1, "text.txt is no adapter that jllama knows"),
    ],
)
def test_other_mistakes(place, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(place)
    (place / "text.txt").write_text("the lazy dog\n")
    before = sorted((place / "out").iterdir())
    assert cli.run(arguments.split()[0], arguments.split()[1:]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted((place / "out").iterdir()) == before
