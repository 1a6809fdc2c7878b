"""``python -m jllama bench``: figures of the right kind; how large they are is not a test's business."""

import json

import jax
import jax.numpy as jnp
import pytest

from jllama.checkpoints.registry import save
from jllama.commands import bench, cli
from jllama.commands.model import ModelOptions
from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.language_model import LanguageModel
from jllama.tokenizers import BytesTokenizer
from jllama.verify.checks import random_params

SMALL = LlamaConfig(vocab_size=259, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small"
    save(LanguageModel(SMALL, jax.tree.map(jnp.asarray, random_params(SMALL, 0)), BytesTokenizer()), path, "hf")
    return path


def test_figures(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(bench, "_BANDWIDTH_SHAPE", (256, 256))
    few = ["--prompt_tokens", "16", "--new_tokens", "4", "--batch_size", "8", "--repeats", "1"]
    assert cli.run("bench", ["decode", str(checkpoint), *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["speeds"]) == [
        "prefill, 16 tokens",
        "decode, 1 text",
        "decode, 8 texts",
        "8 ragged prompts, 4 tokens each",
    ]
    for title, speed in found["speeds"].items():
        assert speed["tokens_per_s"] != 0
        assert (speed["limit_tokens_per_s"] is None) == title.startswith("prefill")
    assert found["bandwidth_bytes_per_s"] > 0
    assert cli.run("bench", ["decode", str(checkpoint), *few]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "GB/s of" in table
    assert "decode, 8 texts" in table


def test_the_first_token_is_that_of_the_ordinary_command(checkpoint, monkeypatch):
    monkeypatch.setattr(bench.time, "perf_counter", iter([2.0, 5.0]).__next__)
    assert bench.first_token_s(ModelOptions(checkpoint=str(checkpoint), quantize="int8")) == 3.0


def test_the_process_of_the_first_token_fails():
    with pytest.raises(JllamaError, match="first token failed: error: there is no checkpoint at nowhere"):
        bench.first_token_s(ModelOptions(checkpoint="nowhere"))


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step(tied):
    config = LlamaConfig(vocab_size=100, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, tie_embeddings=tied)
    params = jax.tree.map(jnp.asarray, random_params(config, 0))
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) - (0 if tied else 100 * 32)
    keys_and_values = 3 * 50 * 2 * 2 * 2 * 8
    model = LanguageModel(config, params)
    assert bench.bytes_per_step(model.for_decoding(), 3, 50) == 4 * (weights + keys_and_values)
    assert bench.bytes_per_step(model.for_decoding("int8"), 3, 50) < 2 * weights + 4 * keys_and_values


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["encode", "x"], "what is 'encode'; it must be one of decode"),
        (["decode"], "give a checkpoint, or the preset whose shapes to take"),
        (["decode", "x", "--preset", "llama3.2-1b"], "give a checkpoint, or the preset whose shapes to take"),
        (["decode", "--preset", "llama3.2-1b", "--first_token"], "first_token needs a checkpoint to load"),
        (["decode", "--preset", "llama3.2-1b", "--adapter", "x"], "adapter needs a checkpoint to load"),
        (["decode", "x", "--repeats", "0"], "repeats is 0; it must be at least 1"),
        (["decode", "--preset", "no-such"], "no-such"),
    ],
)
def test_bad_usage(arguments, said, capsys):
    assert cli.run("bench", arguments) == 2
    assert said in capsys.readouterr().err


def test_a_context_that_is_too_short(checkpoint, capsys):
    assert cli.run("bench", ["decode", str(checkpoint), "--new_tokens", "200"]) == 2
    assert "the benchmark needs 513 tokens of context, and the model has 256" in capsys.readouterr().err
