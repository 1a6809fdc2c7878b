"""``sample.py`` and ``doctor`` on the small run, and what every command says of itself."""

import dataclasses
import itertools
import json

import pytest
import yaml

from jllama.checkpoints.formats import load
from jllama.commands import cli, doctor
from jllama.commands.cli import parse
from jllama.commands.doctor import DoctorOptions
from jllama.commands.sample import COMPARED, SampleOptions
from jllama.commands.verify import VerifyOptions
from jllama.generation.engine import SamplingConfig
from jllama.generation.text import complete
from jllama.model import unstack_layers
from jllama.training.config import TrainConfig

OPTIONS = {"train": TrainConfig, "sample": SampleOptions, "verify": VerifyOptions, "doctor": DoctorOptions}


@pytest.fixture
def sample(small_run, capfd):
    def run(*arguments):
        code = cli.run("sample", ["--checkpoint", str(small_run.folder), *map(str, arguments)])
        printed = capfd.readouterr()
        assert code == 0, printed.err
        return printed.out

    return run


def test_the_script_continues_the_prompt_on_stdout(small_run, workshop, sample):
    arguments = ["--prompt", "the quick", "--max_new_tokens", "12"]
    done = workshop.finish(workshop.start("sample.py", "--checkpoint", small_run.folder, *arguments))
    assert done.code == 0, done.err
    assert done.out.startswith("the quick")
    assert len(done.out) > len("the quick\n")
    best = json.loads((small_run.folder / "metrics.jsonl").read_text().splitlines()[-1])["best_step"]
    assert done.err == f"{small_run.folder}, step {best}\n"
    assert sample(*arguments) == done.out  # the same seed, in another process


def test_the_text_is_what_the_library_gives(small_run, sample):
    model = load(small_run.folder)
    settings = SamplingConfig(temperature=0.8, top_p=0.95, seed=5)
    expected = complete(unstack_layers(model.params), model.config, model.tokenizer, ["fox "], [settings], 20)[0].text
    assert sample("--prompt", "fox ", "--max_new_tokens", 20, "--seed", 5) == f"fox {expected}\n"


def test_every_option_changes_something(sample):
    plain = ("--prompt", "the ", "--max_new_tokens", 20)
    text = sample(*plain)
    assert sample(*plain) == text
    for change in [
        ("--seed", 1),
        ("--temperature", 3),
        ("--temperature", 0),
        ("--top_k", 1),
        ("--top_p", 0.05),
        ("--max_new_tokens", 5),
        ("--prompt", "fox "),
        ("--step", 15),
        ("--compare",),
    ]:
        assert sample(*plain, *change) != text, change
    greedy = sample(*plain, "--temperature", 0)
    assert sample(*plain, "--top_k", 1) == greedy
    assert sample(*plain, "--temperature", 0, "--seed", 1) == greedy
    assert sample(*plain, "--step", 0) == text


def test_max_new_tokens_is_honoured(sample):
    """Greedy text only grows with it; every token is a byte here, and 0 fills the context of 32."""
    texts = [sample("--prompt", "the ", "--temperature", 0, "--max_new_tokens", count) for count in (1, 7, 27)]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter.rstrip("\n"))
    assert [len(text) - len("the \n") for text in texts] == [1, 7, 27]
    assert sample("--prompt", "the ", "--temperature", 0) == texts[-1]


def test_compare_shows_all_seven_settings(sample):
    table = sample("--prompt", "the ", "--max_new_tokens", 12, "--compare")
    assert len(COMPARED) == 7
    for name in COMPARED:
        assert f"│ {name} " in table
    assert table.count("the ") >= 7
    assert sample("--prompt", "the ", "--max_new_tokens", 12, "--compare", "--seed", 2) != table


def test_doctor(small_run, capsys):
    assert cli.run("doctor", []) == 0
    out = capsys.readouterr().out
    for part in ("Python 3.", "jax ", "orbax-checkpoint ", "device 0: cpu", "GiB free", "3,082,752", "layers/w_gate"):
        assert part in out
    assert "relative error" in out
    assert cli.run("doctor", ["--checkpoint", str(small_run.folder)]) == 0
    assert "35,168" in capsys.readouterr().out


def test_doctor_fails_where_the_device_computes_wrongly(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "TOLERANCE", 1e-12)
    assert cli.run("doctor", []) == 1
    assert "this device computes a Llama wrongly" in capsys.readouterr().err


@pytest.mark.parametrize("command", OPTIONS)
def test_help_explains_every_option(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.run(command, ["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    settings = parse(OPTIONS[command], ["--checkpoint", "x"] if command == "sample" else [], command)

    def check(values, prefix):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if dataclasses.is_dataclass(value):
                check(value, f"{prefix}{field.name}.")
            else:
                name = f"{prefix}{field.name}"
                assert f"--{name} " in text or f" {name} " in text.partition("positional arguments:")[2]
                explained = type(values).__doc__.partition(f"    {field.name}: ")[2].partition("\n")[0]
                assert explained
                assert " ".join(explained.split()[:3]) in text

    check(settings, "")


def test_the_list_of_commands(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, purpose in cli.COMMANDS.items():
        assert f"{name:8} {purpose}" in out


def test_a_printed_configuration_can_be_given_back(tmp_path, capsys):
    changes = ["--model.num_layers", "3", "--optimizer.learning_rate", "1e-5", "--training.sample_prompt", "a: 'b'"]
    scaling = ["--model.rope_scaling.type", "llama3", "--model.rope_scaling.factor", "8", "--training.remat"]
    with pytest.raises(SystemExit) as stop:
        cli.run("train", [*changes, *scaling, "--print_config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["model"]["num_layers"] == 3
    (tmp_path / "printed.yaml").write_text(printed)
    again = parse(TrainConfig, ["--config", str(tmp_path / "printed.yaml")], "train")
    assert again == parse(TrainConfig, [*changes, *scaling], "train")
    assert again.training.remat
    assert again.model.rope_scaling.factor == 8


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 3\ntraining: {steps: 7, batch_size: 4}\n")
    found = parse(TrainConfig, ["--config", str(tmp_path / "a.yaml"), "--training.steps", "9"], "train")
    assert (found.seed, found.training.steps, found.training.batch_size, found.training.log_every) == (3, 9, 4, 10)


def test_as_a_module(workshop):
    done = workshop.finish(workshop.start("-m", "jllama", "--help"))
    assert (done.code, done.err) == (0, "")
    assert "usage: python -m jllama COMMAND" in done.out
