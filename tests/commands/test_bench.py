"""``python -m jllama bench``: figures of the right kind; how large they are is not a test's
business.
"""

import dataclasses
import json
import re
import signal
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import run_command, slow_but

from jllama.commands import bench, cli
from jllama.core.config import LlamaConfig
from jllama.formats.registry import save
from jllama.lab.checks import random_params
from jllama.models.language_model import LanguageModel
from jllama.rl.worker import import_file
from jllama.tokenizers.base import BytesTokenizer
from jllama.training.metrics import training_flops_per_token

CONTESTANTS = Path(__file__).parents[2] / "benchmarks" / "contestants"
SMALL = LlamaConfig(vocab_size=259, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=256)
SIZES = {"num_layers": 1, "embed_dim": 32, "mlp_dim": 64, "vocab_size": 99}
SHAPE = ["--seq_len=16", *(f"--model.{name}={size}" for name, size in SIZES.items())]
FEW = ["--prompt_tokens", "16", "--new_tokens", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def contestant():
    return import_file(str(CONTESTANTS / "contestant.py"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small"
    params = jax.tree.map(jnp.asarray, random_params(SMALL, 0))
    save(LanguageModel(SMALL, params, BytesTokenizer()), path, "hf")
    return path


@pytest.mark.slow
def test_decoding(checkpoint, capsys):
    assert cli.run("bench", ["decode", str(checkpoint), *FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    decoding = ["decode, 1 text", "decode, 4 texts", "decode, 8 texts"]
    others = ["8 ragged prompts, 4 tokens each", "prefill, 16 tokens"]
    assert list(found["work"]) == [*decoding, *others]
    assert found["memory"].startswith("peak memory: jllama 0.")
    for title in found["work"]:
        own = found["work"][title]["jllama"]
        assert len(own["seconds"]) == 1
        assert own["tokens_per_s"] != 0
        assert own["share_of_limit"] != 0
        assert own["ratio"] == 1.0
    assert min(found["machine_rates"].values()) > 0
    assert found["command"].endswith("--json")
    assert "threads" in found["machine"]


@pytest.mark.slow
def test_training_beside_a_peer_is_the_same_work(workshop):
    """Both begin with the same weights and take the same rows through the same optimizer: so their
    losses say.
    """
    options = ["--batch_size=2", "--against=transformers", "--repeats=2"]
    arguments = ["train", *SHAPE, *options]
    done = workshop.finish(workshop.start("-m", "jllama", "bench", *arguments, "--json"))
    assert done.code == 0, done.err
    found = json.loads(done.out)
    own, theirs = found["work"]["training step, 2 x 16"].values()
    assert own["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    pairs = zip(own["seconds"], theirs["seconds"], strict=True)
    ratios = [other / seconds for seconds, other in pairs]
    assert theirs["ratio"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["prefill", "startup", "load"])
def test_other_work_beside_a_peer(what, checkpoint, workshop):
    arguments = [what, checkpoint, "--prompt_tokens=16", "--against=transformers", "--repeats=1"]
    done = workshop.finish(workshop.start("-m", "jllama", "bench", *arguments))
    assert done.code == 0, done.err
    assert re.search(r"\| .*: transformers +\| +[\d.,]+ \(", done.out)


def test_a_configuration_and_a_preset_to_train():

    def config_of(*words):
        return bench.train_config(bench.parse_options(["train", *words]))

    named = config_of("quickstart")
    assert (named.model.vocab_size, named.model.embed_dim) == (2048, 128)
    assert (named.training.batch_size, named.training.seq_len) == (8, 128)
    assert config_of("shakespeare_char").model.vocab_size == BytesTokenizer().vocab_size
    released = config_of("--preset", "llama3.2-1b", "--seq_len", "64")
    assert (released.model.embed_dim, released.training.seq_len) == (2048, 64)
    options = bench.parse_options(["train", "--against", "transformers,torch-compile"])
    assert options.against == ["transformers", "torch-compile"]


@pytest.mark.parametrize("tied", [False, True])
def test_what_work_needs(tied, contestant):
    sizes = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(vocab_size=100, tie_embeddings=tied, **sizes)
    params = jax.tree.map(jnp.asarray, random_params(config, 0))
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) - (0 if tied else 100 * 32)
    keys_and_values = 3 * 50 * 2 * 2 * 2 * 8
    model = LanguageModel(config, params)
    assert contestant.bytes_per_step(model.for_decoding(), 3, 50) == 4 * (weights + keys_and_values)
    window = dataclasses.replace(config, sliding_window=10, full_attention_layers=(1,))
    windowed = LanguageModel(window, params).for_decoding()
    assert contestant.bytes_per_step(windowed, 3, 50) == 4 * (weights + keys_and_values * 60 // 100)
    small = model.for_decoding("int8")
    assert contestant.bytes_per_step(small, 3, 50) < 2 * weights + 4 * keys_and_values
    options = bench.parse_options(["decode", "x", "--new_tokens", "11"])
    one = contestant.generation_facts(small, options, "cpu")["needed"]["decode, 1 text"]
    assert one["jllama"] == contestant.bytes_per_step(small, 1, 37)
    assert one["transformers"] == contestant.bytes_per_step(model.for_decoding(), 1, 37)
    on_gpu = contestant.generation_facts(small, options, "cuda")["needed"]["decode, 1 text"]
    assert one["transformers"] - on_gpu["transformers"] == 2 * weights  # there it is in bfloat16
    options = bench.parse_options(["prefill", "x", "--prompt_tokens", "11"])
    (prompt,) = contestant.generation_facts(small, options, "cpu")["needed"].values()
    assert prompt["jllama"] == 11 * (training_flops_per_token(config, 11) / 3 - 2 * 100 * 32)


def test_peers_work_where_all_can(contestant, monkeypatch):
    assert contestant.device_of([]) == contestant.device_of(["transformers"]) == "cpu"
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(contestant.importlib.util, "find_spec", lambda name: True)
    assert contestant.device_of(["transformers"]) == "cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert contestant.device_of(["transformers", "torch-compile"]) == "cuda"
    assert contestant.device_of(["transformers", "llama.cpp"]) == "cpu"


def test_training_on_a_gpu_says_its_share_of_the_published_rate_and_its_memory():
    """The figures of Llama 3.2 1B on an H100, as docs/performance.md has them."""
    config = LlamaConfig(128_256, 16, 2048, 32, 8, 64, 8192, tie_embeddings=True)
    flops, products = (4 * 4096 * training_flops_per_token(config, length) for length in (4096, 0))
    facts = {"flops": flops, "causal_flops": (flops + products) / 2}
    facts["published_flops_per_s"] = 989e12
    rows = {
        "jllama": {"median_s": 4 * 4096 / 40_600, "peak_bytes": int(31.4 * 2**30)},
        "transformers": {"median_s": 4 * 4096 / 40_800, "peak_bytes": int(71.5 * 2**30)},
    }
    turns = import_file(str(CONTESTANTS / "turns.py"))
    told = turns.shares_and_memory(rows, {**facts, "planned_bytes": 31.4 * 2**30})
    assert told["mfu"] == "MFU: jllama 37.0% (33.7% causal), transformers 37.2% (33.9% causal)"
    peaks = "jllama 31.40 GiB, transformers 71.50 GiB"
    assert told["memory"] == f"peak memory: {peaks}; planned for jllama 31.40 GiB"
    assert turns.shares_and_memory({"jllama": {"median_s": 1.0, "peak_bytes": None}}, {}) == {}


MISTAKES = """
2 encode x -> what is 'encode'; it must be one of train, prefill, decode, startup, load
2 decode -> decode needs a checkpoint
2 decode x --preset llama3.2-1b -> give a checkpoint or a preset, not both
2 decode --preset llama3.2-1b --adapter x -> adapter is x; it must be left out without a ch
2 decode x --repeats 0 -> repeats is 0; it must be at least 1
2 decode x --against transformer -> there is no peer transformer; did you mean transformers?
2 decode x --against torch-compile -> torch-compile is for train:
2 train --against llama.cpp -> llama.cpp does not train; leave it out
2 train chat_lora -> init_from is Hugging
2 train --quantize int8 -> quantize is int8; it must be left out for train
2 prefill --preset no-such -> no-such
1 startup nowhere -> error: there is no checkpoint at nowhere
"""
IN_A_CONTESTANT = """
1 load MODEL --against llama.cpp --llama_python /no -> error: No such file or directory: /no
2 decode MODEL --new_tokens 200 --prompt_tokens 9 -> needs 320 tokens of
2 decode MODEL -> has 256: choose fewer --prompt_tokens or --new_tokens
1 load MODEL --against llama.cpp -> is not installed here (No module named 'llama_cpp'): pip install
"""
SLOW = IN_A_CONTESTANT.strip().splitlines()
QUICK = MISTAKES.strip().splitlines()


@pytest.mark.parametrize("line", slow_but(QUICK, QUICK + SLOW))
def test_mistakes_are_one_sentence(line, checkpoint):
    """Also those that show only in a contestant's process."""
    words, problem = line.split(" -> ")
    code, *arguments = words.replace("MODEL", str(checkpoint)).split()
    done = run_command("bench", *arguments)
    assert done.code == int(code)
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert problem in last


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(workshop):
    started = workshop.start("-m", "jllama", "bench", "train", *SHAPE, "--repeats=100000")
    while "round 3" not in started.stderr.readline():
        assert started.poll() is None
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(children) == 2  # jllama, and what measures the machine's rates
    started.send_signal(signal.SIGINT)
    done = workshop.finish(started)
    assert done.code == 1
    assert done.err.endswith("stopped\n")
    assert not any(Path(f"/proc/{child}").exists() for child in children)
