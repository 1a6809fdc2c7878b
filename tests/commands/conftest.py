"""One small run, made once by the real ``train.py`` in a process of its own, and the means to make
others.
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import types
from pathlib import Path

import helpers
import orbax.checkpoint as ocp
import pytest
import yaml
from helpers import assert_same_bits, pretend_devices

import jllama
from jllama.commands import cli

ROOT = Path(__file__).parents[2]
STEPS = 20  # three epochs and a bit: an epoch ends within steps 7, 13 and 19
SETTINGS = f"""
model: {{num_layers: 2, embed_dim: 32, num_heads: 4, num_kv_heads: 2, mlp_dim: 64, max_seq_len: 32}}
optimizer: {{learning_rate: 0.01}}
training:
  {{batch_size: 8, steps: {STEPS}, eval_every: 5, log_every: 1, keep_last: 2, sample_prompt: "the ",
  sample_tokens: 16}}
"""
WORDS = "the quick brown fox jumps over a lazy dog and says hello to trees"


def write_corpus(path: Path, lines: int = 30) -> None:
    rng = random.Random(0)
    words = WORDS.split()
    path.write_text(
        "".join(" ".join(rng.choice(words) for _ in range(12)) + ".\n" for _ in range(lines))
    )


@pytest.fixture(autouse=True, scope="module")
def quick_runs():
    """The page of ``small_run`` has charts."""
    with helpers.quick_runs():
        yield


@pytest.fixture(scope="module")
def loads_once():
    """Commands in this process load each model once a module, and do not store their programs."""
    models = {}
    original = jllama.load

    def load(*arguments, **options):
        key = repr((arguments, options))
        if key not in models:
            models[key] = original(*arguments, **options)
        return models[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JLLAMA_CACHE_GIB", "0")
        patch.setattr(jllama, "load", load)
        yield


@contextlib.contextmanager
def one_at_a_time(folder: Path):
    """The workers of pytest-xdist share what the first of them makes."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """A corpus, a configuration, and ``start``, which runs a script of the repository as a user
    would; ``train`` and ``run`` begin a run of that configuration, in a process of its own and in
    this one.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "workshop"
    folder.mkdir(exist_ok=True)
    data = {
        "path": str(folder / "corpus.txt"),
        "tokenizer": "bytes",
        "cache_dir": str(folder / "cache"),
    }
    with one_at_a_time(folder):
        if not (folder / "small.yaml").exists():
            write_corpus(folder / "corpus.txt")
            (folder / "small.yaml").write_text(SETTINGS + yaml.safe_dump({"data": data}))
    environment = os.environ | {"JLLAMA_CACHE_GIB": ""}  # the usual limit

    def start(*arguments, devices=1, **variables):
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment | pretend_devices(devices) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(process):
        out, err = process.communicate(timeout=900)
        return types.SimpleNamespace(code=process.returncode, out=out, err=err)

    def options(run, *arguments):
        return ["--config", str(folder / "small.yaml"), "--run_dir", str(run), *map(str, arguments)]

    def train(run, *arguments, **settings):
        return start("train.py", *options(run, *arguments), **settings)

    def run(run, *arguments):
        return cli.run("train", options(run, *arguments))

    return types.SimpleNamespace(
        folder=folder,
        data=data,
        options=options,
        start=start,
        finish=finish,
        train=train,
        run=run,
    )


@pytest.fixture(scope="session")
def small_run(workshop):
    """A finished run, for reading only: its folder, and what it printed."""
    run, printed = workshop.folder / "run", workshop.folder / "printed.json"
    with one_at_a_time(workshop.folder):
        if not printed.exists():
            done = workshop.finish(workshop.train(run))
            assert done.code == 0, done.err
            printed.write_text(json.dumps({"out": done.out, "err": done.err}))
    return types.SimpleNamespace(folder=run, **json.loads(printed.read_text()))


@pytest.fixture
def copied(small_run, tmp_path):
    """A copy of the finished run, to be changed."""
    shutil.copytree(small_run.folder, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def read_run():
    """What a run has come to: its metrics' lines, and every saved array of a step."""

    def lines(run, name="metrics.jsonl"):
        path = run / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(run):
        return {
            line["step"]: (line["loss"], line["grad_norm"]) for line in lines(run) if "loss" in line
        }

    def steps(run):
        return sorted(
            int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()
        )

    def arrays(run, step):
        with ocp.StandardCheckpointer() as reader:
            folder = run.resolve() / "checkpoints" / str(step)
            return {item: reader.restore(folder / item) for item in ("params", "state")}

    def same_bits(run, other, step):
        assert_same_bits(arrays(run, step), arrays(other, step))

    return types.SimpleNamespace(
        lines=lines, losses=losses, steps=steps, arrays=arrays, assert_same_bits=same_bits
    )
