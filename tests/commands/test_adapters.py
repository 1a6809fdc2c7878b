"""Adapters at the command line: merged, exported, talked with; a misfit is one sentence."""

import json
import shutil

import numpy as np
import pytest
from helpers import run_command, trained_smollm
from helpers_adapters import adapter_params, make_run
from models import FILE, weights

from jllama.commands import cli
from jllama.core import JllamaError
from jllama.core.parameters import map_by_path
from jllama.formats.registry import load, open_checkpoint, save
from jllama.formats.tensors import base_fingerprint
from jllama.models.config import LoraConfig
from jllama.models.language_model import LanguageModel
from jllama.templates.messages import TEMPLATES
from jllama.tokenizers.base import BytesTokenizer

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
        params = adapter_params(FILE, lora)
        make_run(folder / name, folder / "base", FILE, lora, params, fingerprint)
    (folder / "out").mkdir()
    return folder


def said(capsys, command, *arguments):
    """What a command prints that ends well."""
    code = cli.run(command, [str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out, printed.err


def test_an_adapter_is_exported_and_talked_with(place, capsys):
    code, out, err = run_command("convert", "run", "out/peft", "--to", "peft", place=place)
    assert (code, out) == (0, "")
    assert err.startswith("an adapter of rank 3 for llama, 2 layers, 34,720 parameters, ")
    assert " -> out/peft, " in err
    base, lora = place / "base", place / "out" / "lora.gguf"
    said(capsys, "convert", base, lora, "--to", "gguf-lora", "--adapter", place / "out" / "peft")
    text, loaded = said(capsys, "sample", place / "run", *GREEDY, "--prompt", "the")
    assert f"{place / 'run'}, step 7\n" in loaded
    for adapter in (place / "out" / "peft", lora):
        words = (*GREEDY, "--prompt", "the", "--adapter", adapter)
        same, loaded = said(capsys, "sample", base, *words)
        assert same == text
        assert f"{base} with {adapter}\n" in loaded
    assert said(capsys, "sample", base, *GREEDY, "--prompt", "the")[0] != text


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A quantized base, and a run that trained an adapter of it on chats."""
    folder = tmp_path_factory.mktemp("tuned")
    tokenizer = trained_smollm(["user assistant Question yes no"], FILE.vocab_size - 1)
    model = LanguageModel(FILE, weights(FILE), tokenizer, TEMPLATES["chatml"], (2,))
    save(model, folder / "base.gguf", "gguf", "q8_0")
    chats = [{"prompt": f"Question {number}?", "completion": "yes, yes"} for number in range(12)]
    pairs = [{"prompt": chat["prompt"], "chosen": "no", "rejected": "yes"} for chat in chats]
    for name, records in {"chats": chats, "pairs": pairs}.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    assert train(folder, "mix", "--lora.rank=4") == 0
    return folder


def train(folder, run, *options):
    """Train from the quantized base, and return the exit code."""
    usual = {
        "init_from": folder / "base.gguf",
        "run_dir": folder / run,
        "data.path": folder / "chats.jsonl",
        "data.cache_dir": folder / "cache",
        "optimizer.learning_rate": 1e-2,
        "training.batch_size": 4,
        "training.steps": 6,
        "training.eval_every": 3,
        "training.log_every": 1,
        "training.sample_tokens": 0,
    }
    words = [f"--{name}={value}" for name, value in usual.items()]
    return cli.run("train", [*words, *map(str, options)])


def logits(path, adapter=None):
    return np.asarray(load(path, adapter=adapter)(np.arange(20)[None]))


def test_a_run_talks_in_the_form_that_its_adapter_was_trained_in(tuned):
    assert train(tuned, "form", "--lora.rank=4", "--data.chat_template=llama2") == 0
    model = load(tuned / "form")
    assert model.chat_template == TEMPLATES["llama2"] != load(tuned / "base.gguf").chat_template
    assert load(tuned / "base.gguf", adapter=tuned / "form").chat_template == model.chat_template
    assert train(tuned, "form2", f"--lora.init_from={tuned / 'form'}") == 0
    assert load(tuned / "form2").chat_template == model.chat_template
    save(model, tuned / "form_hf", "hf")
    assert load(tuned / "form_hf").chat_template == model.chat_template


def test_an_adapter_of_an_adapter_is_refused_with_the_ways_to_go_on(tuned, capsys):
    capsys.readouterr()
    assert train(tuned, "refused", f"--init_from={tuned / 'mix'}", "--lora.rank=4") == 2
    base = tuned / "base.gguf"
    error = capsys.readouterr().err
    assert f"to go on with them, give init_from {base} and lora.init_from {tuned / 'mix'}" in error
    assert not (tuned / "refused").exists()
    # Nor is one merged into another, though over a quantized base only norms are compared.
    with pytest.raises(JllamaError, match="is an adapter for another base, by its fingerprint"):
        load(tuned / "mix", adapter=tuned / "mix")


def test_training_goes_on_with_an_adapter(tuned, capsys):
    """From where it stood, of any format; the result is an adapter of the same base."""
    base, mix = tuned / "base.gguf", tuned / "mix"
    start = logits(mix)
    assert np.abs(start - logits(base)).max() > 0.1
    said(capsys, "convert", mix, tuned / "peft", "--to", "peft")
    for name, adapter in (("same", mix), ("same_peft", tuned / "peft")):
        still = ("--optimizer.learning_rate=1e-12", "--training.steps=1")
        assert train(tuned, name, f"--lora.init_from={adapter}", *still) == 0
        np.testing.assert_allclose(logits(tuned / name), start, atol=1e-4)
    assert train(tuned, "mix2", f"--lora.init_from={mix}") == 0
    end = logits(tuned / "mix2")
    shutil.rmtree(tuned / "mix2" / "checkpoints" / "6")  # as if stopped before
    assert cli.run("train", ["--resume", str(tuned / "mix2")]) == 0
    capsys.readouterr()
    np.testing.assert_array_equal(logits(tuned / "mix2"), end)
    assert np.abs(end - start).max() > 0.01
    np.testing.assert_array_equal(logits(base, tuned / "mix2"), end)
    _, printed = said(capsys, "convert", tuned / "mix2", tuned / "peft2", "--to", "peft")
    assert f"its base is {base}: PEFT loads folders of Hugging Face" in printed
    fields = json.loads((tuned / "peft2" / "adapter_config.json").read_text())
    assert (fields["base_model_name_or_path"], fields["r"]) == (str(base), 4)
    np.testing.assert_allclose(logits(base, tuned / "peft2"), end, atol=1e-5)

    assert train(tuned, "refused", f"--lora.init_from={mix}", "--lora.rank=8") == 2
    error = f"lora.rank is 8; it must be 4, as in {mix}, or left out with it"
    assert error in capsys.readouterr().err
    assert train(tuned, "refused", "--init_from=", f"--lora.init_from={mix}") == 2
    assert "it must be left out without init_from" in capsys.readouterr().err


def test_preferences_are_learned_from_where_the_adapter_stood(tuned):
    """The model before training is the tuned one: its rewards are zero at the first step."""
    pairs = f"--data.path={tuned / 'pairs.jsonl'}"
    assert train(tuned, "dpo", f"--lora.init_from={tuned / 'mix'}", pairs) == 0
    lines = (tuned / "dpo" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "figures" in line]
    first, last = steps[0]["figures"], steps[-1]["figures"]
    assert abs(first["chosen_reward"]) + abs(first["rejected_reward"]) < 1e-5
    assert last["margin"] > 0.01


def test_an_adapter_is_evaluated_as_what_it_is_merged_into(place, capsys):
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 5)
    base, run, whole = place / "base", place / "run", place / "out" / "whole.gguf"
    said(capsys, "convert", base, whole, "--adapter", run)
    data = ("--data", place / "text.txt", "--window", "32")
    losses = [
        said(capsys, "eval", *model, *data)[0].split("tokens_per_s")[0]
        for model in ([whole], [base, "--adapter", run], [base])
    ]
    assert losses[0] == losses[1] != losses[2]


MISTAKES = """
1 sample other --adapter run -> run is an adapter for another base, by its fingerprint: give /
1 convert dora out/x --to gguf-lora -> dora has DoRA, which GGUF cannot carry: merge it (gguf)
2 convert base out/x --to peft -> base has no adapter to write as peft: give one with adapter
2 convert run out/x --to peft --dtype bfloat16 -> with peft it must be one of float32
1 eval base --adapter nowhere --data text.txt -> there is no adapter at nowhere: give a run's folder
1 eval base --adapter base --data text.txt -> base is no adapter that jllama knows: give PEFT's
1 eval base --adapter run --step 3 --data text.txt -> run has no checkpoint of step 3; it has 7
1 bench decode base --adapter text.txt -> text.txt is no adapter that jllama knows
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_what_does_not_fit_is_one_sentence(place, line):
    (place / "text.txt").write_text("the lazy dog\n")
    words, problem = line.split(" -> ")
    code, *arguments = words.split()
    before = sorted((place / "out").iterdir())
    done = run_command(*arguments, place=place)
    assert (done.code, done.out) == (int(code), "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert problem in done.err
    assert sorted((place / "out").iterdir()) == before
