"""What the documentation says must hold: its code runs, its commands parse, its links lead
somewhere.
"""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import yaml
from helpers_adapters import adapter_params, make_run

from jllama.checkpoints.registry import load, save
from jllama.commands import cli
from jllama.commands.audit import AuditOptions
from jllama.commands.bench import BenchOptions
from jllama.commands.bisect import BisectOptions
from jllama.commands.chat import ChatOptions
from jllama.commands.check import CheckOptions
from jllama.commands.cli import parse
from jllama.commands.convert import ConvertOptions
from jllama.commands.data import DataOptions
from jllama.commands.doctor import DoctorOptions
from jllama.commands.eval import EvalOptions
from jllama.commands.plan import PlanOptions
from jllama.commands.replay import ReplayOptions
from jllama.commands.report import ReportOptions
from jllama.commands.sample import SampleOptions
from jllama.commands.serve import ServeOptions
from jllama.commands.verify import VerifyOptions
from jllama.config import BLOCKS, LlamaConfig, LoraConfig
from jllama.language_model import LanguageModel
from jllama.model import Layer, initial_params
from jllama.tokenizers import BytesTokenizer
from jllama.training.config import TrainConfig
from jllama.verify.checks import VISIBLE
from jllama.verify.conformance import VARIANTS
from jllama.verify.mutations import mutation_checks
from jllama.verify.reference_writers import FORMAT_WRITERS

SERVER = "127.0.0.1:8000"
ROOT = Path(__file__).parent.parent
OPTIONS = {
    "train": TrainConfig,
    "sample": SampleOptions,
    "chat": ChatOptions,
    "convert": ConvertOptions,
    "verify": VerifyOptions,
    "check": CheckOptions,
    "audit": AuditOptions,
    "bisect": BisectOptions,
    "report": ReportOptions,
    "eval": EvalOptions,
    "bench": BenchOptions,
    "plan": PlanOptions,
    "doctor": DoctorOptions,
    "data": DataOptions,
    "serve": ServeOptions,
    "replay": ReplayOptions,
}
POSITIONAL = {
    "train": ("config",),
    "sample": ("checkpoint",),
    "doctor": ("checkpoint",),
    "data": ("action", "path"),
    "chat": ("checkpoint",),
    "convert": ("source", "target"),
    "verify": ("checkpoint",),
    "check": ("folder",),
    "audit": ("run",),
    "bisect": ("a", "b"),
    "report": ("runs",),
    "eval": ("checkpoint",),
    "bench": ("what", "checkpoint"),
    "plan": ("config",),
    "serve": ("checkpoint",),
    "replay": ("answer",),
}
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


@pytest.fixture
def folder_with_a_model(tmp_path, monkeypatch):
    small = LlamaConfig(vocab_size=300, num_layers=1, embed_dim=32)
    save(
        LanguageModel(small, initial_params(jax.random.key(0), small), BytesTokenizer()),
        tmp_path / "smollm2",
        "hf",
    )
    (tmp_path / "runs").mkdir()
    lora = LoraConfig(rank=2)
    make_run(tmp_path / "runs" / "mine", "smollm2/", small, lora, adapter_params(small, lora))
    (tmp_path / "my_texts").mkdir()
    for number in range(40):
        (tmp_path / "my_texts" / f"{number}.txt").write_text(
            f"The {number}th fox jumps over the lazy dog. " * 5
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    return small


@pytest.mark.parametrize(
    "page",
    [
        page for page in TEXTS if page not in ("docs/extend.md", "docs/decisions.md")
    ],  # see test_extending.py
)
def test_python_code_runs(page, folder_with_a_model):
    """Each block by itself, in a folder that holds a small model where they expect one."""
    for code in re.findall(r"```python\n(.*?)```", TEXTS[page], re.S):
        if SERVER in code:
            continue
        names = {}
        exec(code, names)
        if "logits" in names:
            assert names["logits"].shape in [(1, 3, 300), (1, 16, 1000)]
        if "smollm2.gguf" in code:
            assert load("smollm2.gguf").config == folder_with_a_model


@pytest.mark.slow
def test_what_is_asked_of_a_server_is_answered(tmp_path, monkeypatch, capfd):
    """Python and curl of all pages, each block as it stands there, but for the port."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(vocab_size=300, num_layers=1, embed_dim=32, max_seq_len=4096)
    template = (ROOT / "tests/templates/stock/smollm2.jinja").read_text()
    save(
        LanguageModel(
            config, initial_params(jax.random.key(0), config), BytesTokenizer(), template
        ),
        "smollm2",
        "hf",
    )
    argv = [sys.executable, "-m", "jllama", "serve", "smollm2/", "--port", "0", "--slots", "2"]
    with open("log", "w+") as log, subprocess.Popen(argv, stderr=log) as server:
        try:
            while (
                not (ready := re.search(r"(\S+): ready", Path("log").read_text()))
                and server.poll() is None
            ):
                time.sleep(0.1)
            address = ready[1]
            for text in TEXTS.values():
                for language, block in re.findall(r"```(python|bash)\n(.*?)```", text, re.S):
                    code = block.replace(SERVER, address.partition("//")[2])
                    if SERVER in block and language == "python":
                        exec(code, {})
                    elif SERVER in block:
                        shown = code.replace("curl ", "curl -fsS ").replace(
                            "python -m", f"{sys.executable} -m"
                        )
                        subprocess.run(["bash", "-ec", shown], check=True)
        finally:
            server.terminate()
    assert server.returncode == 0
    said = capfd.readouterr().out
    assert "the same answer, bit for bit" in said
    assert re.search(r"weather \{'city': '(Rome|Paris)'\}", said)
    assert re.search(r'"content": ?"(Yes|No)"', said)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "_import_files", lambda paths: None)  # my_block.py, which is not there
    monkeypatch.setitem(BLOCKS, "relu_squared", Layer)
    _, script, *argv = shlex.split(command)
    if script == "-m":
        script, argv = argv[1], argv[2:]
    script = script.removesuffix(".py")
    options, positional = OPTIONS[script], POSITIONAL[script]
    if "--print_config" in argv:
        with pytest.raises(SystemExit, match="0"):
            parse(options, argv, script)
        assert yaml.safe_load(capsys.readouterr().out)["optimizer"]["learning_rate"] == 1e-3
    else:
        assert isinstance(parse(options, argv, script, positional), options)


def test_the_matrix_is_the_one_that_verify_prints():
    tables = re.findall(r"^(Conformance|Mutations): .*?^```$", TEXTS["docs/verify.md"], re.S | re.M)
    assert tables == ["Conformance", "Mutations"]
    conformance, mutations = (
        TEXTS["docs/verify.md"].partition(f"\n{name}: ")[2].partition("```")[0] for name in tables
    )
    assert re.findall(r"^(\w[\w. -]*?)  +\d", conformance, re.M) == list(VARIANTS)
    # The table is as wide as a page, so it goes on below with further mistakes.
    rows = re.findall(r"^(\w[\w. -]*?)  +[\d-]", mutations, re.M)
    assert list(dict.fromkeys(rows)) == list(VARIANTS)
    assert [name in conformance.splitlines()[1] for name in FORMAT_WRITERS] == [True] * len(
        FORMAT_WRITERS
    )
    ratios = [
        int(ratio.replace(",", ""))
        for ratio in re.findall(r"([\d,]+)x", mutations.partition("\n")[2])
    ]
    assert len([ratio for ratio in ratios if ratio >= VISIBLE]) == len(mutation_checks())
    assert min(ratios) >= VISIBLE


def test_there_are_commands():
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXTS[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_configs_parse_and_are_listed(path):
    config = parse(TrainConfig, ["--config", str(path)], "train.py")
    assert config.run_dir == f"runs/{path.stem}"
    assert f"`{path.name}`" in TEXTS["docs/train.md"]


def test_babyllama_is_as_published():
    mha, gqa = (
        parse(TrainConfig, ["--config", str(ROOT / f"configs/babyllama_{kind}.yaml")], "")
        for kind in ("mha", "gqa")
    )
    for config, kv_heads in ((mha, 8), (gqa, 4)):
        model, optimizer, training = config.model, config.optimizer, config.training
        assert (model.num_layers, model.embed_dim, model.num_heads, model.num_kv_heads) == (
            8,
            1024,
            8,
            kv_heads,
        )
        assert (model.max_seq_len, training.batch_size, training.steps, training.epochs) == (
            256,
            8,
            0,
            10,
        )
        assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2) == (3e-4, 0.9, 0.95)
        assert (optimizer.weight_decay, optimizer.warmup_fraction, optimizer.clip_norm) == (
            0.1,
            0.03,
            1.0,
        )


def test_yardstick_stays_within_its_budget():
    config = parse(TrainConfig, ["--config", str(ROOT / "configs/shakespeare_char.yaml")], "")
    assert (
        config.training.steps * config.training.batch_size * config.model.max_seq_len
        == 2000 * 12 * 64
    )
