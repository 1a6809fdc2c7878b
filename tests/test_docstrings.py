"""Every public name has a docstring with an example, and every example runs as it stands."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllama
from jllama.tokenizers import BytesTokenizer

WITHOUT_EXAMPLE = {
    "BatchSource",  # docs/train.md has it whole
    "FORMATS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "PRESETS",
    "REWARDS",
    "JllamaError",
    "UsageError",
    "check",
    "functional",
    "oracle",
}
"""Registries, modules and errors; their pages show them."""
OPTIONAL = {"jllama.harness", "jllama.evaluation.harness", "jllama.__main__"}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(jllama.__path__, "jllama.")
    if module.name not in OPTIONAL and not module.name.startswith("jllama.contestants")
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what examples read: ``smollm2/``, a small model, and ``my_texts/``."""
    folder = tmp_path_factory.mktemp("examples")
    config = jllama.LlamaConfig(vocab_size=300, num_layers=1, embed_dim=32)
    params = jllama.initial_params(jax.random.key(0), config)
    template = (Path(__file__).parent / "templates/stock/smollm2.jinja").read_text()
    model = jllama.LanguageModel(config, params, BytesTokenizer(), template)
    jllama.save(model, folder / "smollm2", "hf")
    (folder / "my_texts").mkdir()
    for number in range(40):
        text = f"The {number}th fox jumps over the lazy dog. " * 5
        (folder / "my_texts" / f"{number}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, folder, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JLLAMA_CACHE", str(folder / "cache"))
    names = {"jllama": jllama, "jax": jax, "jnp": jnp, "np": np}
    assert doctest.testmod(module, extraglobs=names, optionflags=FLAGS).failed == 0


@pytest.mark.parametrize("name", sorted({*jllama.__all__} - WITHOUT_EXAMPLE))
def test_public_names_have_an_example(name):
    docstring = getattr(jllama, name).__doc__
    assert docstring
    assert ">>> " in docstring
