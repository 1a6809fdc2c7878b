"""One small run, made once by the real ``train.py`` in a process of its own, and the means to make
others.
"""

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

ROOT = Path(__file__).parents[2]
STEPS = 20  # three epochs and a bit: an epoch ends within steps 7, 13 and 19
SETTINGS = {
    "model": {
        "num_layers": 2,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 64,
        "max_seq_len": 32,
    },
    "optimizer": {"learning_rate": 0.01},
    "training": {
        "batch_size": 8,
        "steps": STEPS,
        "eval_every": 5,
        "log_every": 1,
        "keep_last": 2,
        "sample_prompt": "the ",
        "sample_tokens": 16,
    },
}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "says",
    "hello",
    "to",
    "trees",
]


def write_corpus(path: Path, lines: int = 30) -> None:
    rng = random.Random(0)
    path.write_text(
        "".join(" ".join(rng.choice(WORDS) for _ in range(12)) + ".\n" for _ in range(lines))
    )


@contextlib.contextmanager
def one_at_a_time(folder: Path):
    """The workers of pytest-xdist share what the first of them makes."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """A corpus, a configuration, and ``start``, which runs a script of the repository as a user
    would.
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
            (folder / "small.yaml").write_text(yaml.safe_dump(SETTINGS | {"data": data}))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(
            folder / "compiled"
        ),  # the processes run the same programs
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(*arguments, devices=1, **variables):
        flags = f"{environment['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=environment | {"XLA_FLAGS": flags} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(process):
        out, err = process.communicate(timeout=900)
        return types.SimpleNamespace(code=process.returncode, out=out, err=err)

    def train(run, *arguments, **settings):
        return start(
            "train.py", "--config", folder / "small.yaml", "--run_dir", run, *arguments, **settings
        )

    return types.SimpleNamespace(
        folder=folder,
        yaml=folder / "small.yaml",
        start=start,
        finish=finish,
        train=train,
        data=data,
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

    def assert_same_bits(run, other, step):
        mine, theirs = arrays(run, step), arrays(other, step)
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        for found, wanted in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert found.dtype == wanted.dtype
            assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()

    return types.SimpleNamespace(
        lines=lines, losses=losses, steps=steps, arrays=arrays, assert_same_bits=assert_same_bits
    )
