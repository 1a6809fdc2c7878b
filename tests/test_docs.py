"""What the documentation says must hold: its commands parse, its links lead somewhere."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from jllama.commands import cli
from jllama.commands.cli import parse
from jllama.commands.speedrun import SpeedrunOptions
from jllama.core.config import BLOCKS
from jllama.core.model import Layer
from jllama.formats.registry import FORMATS
from jllama.lab.checks import VISIBLE
from jllama.lab.conformance import VARIANTS
from jllama.lab.mutations import mutation_checks
from jllama.training.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
ALL = "\n".join(TEXTS.values())
COMMANDS = [
    part.partition("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", ALL, re.S)
    for line in block.splitlines()
    for part in line.split("&&")
    if re.match(r"\s*python (train\.py|sample\.py|-m jllama)", part)
]


class Parsed(Exception):
    """What a command was given, in place of what it does with it."""


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_commands_parse(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "_import_files", lambda paths: None)  # my_block.py, which is not there
    monkeypatch.setitem(BLOCKS, "relu_squared", Layer)
    _, name, *argv = shlex.split(command.partition(" > ")[0])
    if name == "-m":
        name, argv = cli._split_command(argv[1:])
    module = importlib.import_module(f"jllama.commands.{name.removesuffix('.py')}")

    def parse_only(*arguments, **others):
        raise Parsed(parse(*arguments, **others))

    monkeypatch.setattr(module, "parse", parse_only)
    prints = "--print_config" in argv
    with pytest.raises(SystemExit if prints else Parsed) as stop:
        module.main(argv, name)
    if prints:
        assert stop.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["optimizer"]["learning_rate"] == 1e-3


def test_the_matrix_is_the_one_that_verify_prints():
    tables = re.findall(r"^(Conformance|Mutations): .*?^```$", TEXTS["docs/verify.md"], re.S | re.M)
    assert tables == ["Conformance", "Mutations"]
    conformance, mutations = (
        TEXTS["docs/verify.md"].partition(f"\n{name}: ")[2].partition("```")[0] for name in tables
    )
    assert re.findall(r"^(\w[\w. -]*?)  +(?:\d|refused)", conformance, re.M) == list(VARIANTS)
    # The table is as wide as a page, so it goes on below with further mistakes.
    rows = re.findall(r"^(\w[\w. -]*?)  +[\d-]", mutations, re.M)
    assert list(dict.fromkeys(rows)) == list(VARIANTS)
    assert conformance.splitlines()[1].split() == list(FORMATS)
    ratios = [
        int(ratio.replace(",", ""))
        for ratio in re.findall(r"([\d,]+)x", mutations.partition("\n")[2])
    ]
    assert len([ratio for ratio in ratios if ratio >= VISIBLE]) == len(mutation_checks())
    assert min(ratios) >= VISIBLE


def test_there_are_commands():
    assert len(COMMANDS) >= 6


def test_links_lead_somewhere():
    for page, text in TEXTS.items():
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_configs_parse_and_are_listed(path):
    options = SpeedrunOptions if path.stem == "speedrun" else TrainConfig
    config = parse(options, ["--config", str(path)], "train.py")
    assert config.run_dir == f"runs/{path.stem}"
    assert f"`{path.name}`" in TEXTS["docs/train.md"]


def config_of(name):
    return parse(TrainConfig, ["--config", str(ROOT / f"configs/{name}.yaml")], "")


def test_babyllama_is_as_published():
    for kind, kv_heads in (("mha", 8), ("gqa", 4)):
        config = config_of(f"babyllama_{kind}")
        model, optimizer, training = config.model, config.optimizer, config.training
        assert (model.num_layers, model.embed_dim, model.max_seq_len) == (8, 1024, 256)
        assert (model.num_heads, model.num_kv_heads) == (8, kv_heads)
        assert (training.batch_size, training.steps, training.epochs) == (8, 0, 10)
        assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2) == (3e-4, 0.9, 0.95)
        assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)
        assert optimizer.warmup_fraction == 0.03


def test_yardstick_stays_within_its_budget():
    config = config_of("shakespeare_char")
    tokens = config.training.steps * config.training.batch_size * config.model.max_seq_len
    assert tokens == 2000 * 12 * 64


def test_the_pages_of_the_api_name_what_is_there():
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(
        r"(?m)^::: (jllama[\w.]*)\n(?:    options:\n      members: \[(.*)\])?", text
    )
    assert len(blocks) > 20
    for name, members in blocks:
        module = importlib.import_module(name)
        missing = [
            member for member in members.split(", ") if member and not hasattr(module, member)
        ]
        assert missing == [], name
