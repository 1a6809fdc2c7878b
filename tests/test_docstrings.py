"""Every public name has an example, and examples run as they stand in docstrings and on pages."""

import doctest
import importlib
import itertools
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_adapters import adapter_params, make_run

import jllama
from jllama.models.config import LoraConfig
from jllama.tokenizers.base import BytesTokenizer

WITHOUT_EXAMPLE = """
    FORMATS OBJECTIVES OPTIMIZERS PRESETS REWARDS JllamaError UsageError check functional oracle
    BatchSource
"""
"""Registries, errors, modules, and what docs/train.md has whole; their pages show them."""
OPTIONAL = {"jllama.__main__"}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(jllama.__path__, "jllama.")
    if module.name not in OPTIONAL and not module.name.startswith("jllama.contestants")
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ROOT = Path(__file__).parent.parent
SERVER = "127.0.0.1:8000"
BLOCKS = {
    page.relative_to(ROOT).as_posix(): re.findall(
        r"```(python|bash)\n(.*?)```", page.read_text(), re.S
    )
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
}
PROGRAMS = {
    page: [code for language, code in blocks if language == "python" and SERVER not in code]
    for page, blocks in BLOCKS.items()
    if page not in ("docs/extend.md", "docs/decisions.md")  # see test_extending.py
}


def save_model(folder, **changes):
    """Save a small model with a tokenizer and a template."""
    fields = {"vocab_size": 300, "num_layers": 1, "embed_dim": 32} | changes
    config = jllama.LlamaConfig(**fields)
    params = jllama.initial_params(jax.random.key(0), config)
    template = (ROOT / "tests/templates/stock/smollm2.jinja").read_text()
    jllama.save(
        jllama.LanguageModel(config, params, BytesTokenizer(), template), folder / "smollm2", "hf"
    )
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what examples read: ``smollm2/``, a small model, a run, and ``my_texts/``."""
    folder = tmp_path_factory.mktemp("examples")
    config = save_model(folder)
    (folder / "runs").mkdir()
    lora = LoraConfig(rank=2)
    make_run(folder / "runs" / "mine", "smollm2/", config, lora, adapter_params(config, lora))
    (folder / "my_texts").mkdir()
    for number in range(40):
        text = f"The {number}th fox jumps over the lazy dog. " * 5
        (folder / "my_texts" / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def workplace(folder, tmp_path_factory):
    """A copy without the run, for the examples of all docstrings."""
    copy = tmp_path_factory.mktemp("docstrings")
    shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
    return copy


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, workplace, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("JLLAMA_CACHE", str(workplace / "cache"))
    names = {"jllama": jllama, "jax": jax, "jnp": jnp, "np": np}
    assert doctest.testmod(module, extraglobs=names, optionflags=FLAGS).failed == 0


@pytest.mark.parametrize("name", sorted({*jllama.__all__} - {*WITHOUT_EXAMPLE.split()}))
def test_public_names_have_an_example(name):
    docstring = getattr(jllama, name).__doc__
    assert docstring
    assert ">>> " in docstring


@pytest.mark.parametrize("page", [page for page, programs in PROGRAMS.items() if programs])
def test_python_code_runs(page, folder, tmp_path, monkeypatch):
    """Each block by itself, in a folder that holds a small model where they expect one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    for code in PROGRAMS[page]:
        names = {}
        exec(code, names)
        if "logits" in names:
            assert names["logits"].shape in [(1, 3, 300), (1, 16, 1000)]
        if "smollm2.gguf" in code:
            assert jllama.load("smollm2.gguf").config == jllama.load("smollm2").config


@pytest.mark.slow
def test_what_is_asked_of_a_server_is_answered(tmp_path, monkeypatch, capfd):
    """Python and curl of all pages, each block as it stands there, but for the port."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path, max_seq_len=4096)
    argv = [sys.executable, "-m", "jllama", "serve", "smollm2/", "--port", "0", "--slots", "2"]
    with open("log", "w+") as log, subprocess.Popen(argv, stderr=log) as server:
        try:
            while (
                not (ready := re.search(r"(\S+): ready", Path("log").read_text()))
                and server.poll() is None
            ):
                time.sleep(0.1)
            address = ready[1].partition("//")[2]
            for language, block in itertools.chain.from_iterable(BLOCKS.values()):
                code = block.replace(SERVER, address)
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
    printed = capfd.readouterr().out
    assert "the same answer, bit for bit" in printed
    assert re.search(r"weather \{'city': '(Rome|Paris)'\}", printed)
    assert re.search(r'"content": ?"(Yes|No)"', printed)
