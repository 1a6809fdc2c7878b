"""A checkout that is not installed, where the packages that jllama needs are there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import importlib.metadata, json, runpy, sys
from jllama.commands import cli

assert [each for each in importlib.metadata.distributions() if each.name == "jllama"] == []
tiny = {"model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1}
tiny |= {"model.max_seq_len": 32, "data.path": "corpus.txt", "data.tokenizer": "bytes"}
tiny |= {"training.batch_size": 2, "training.sample_tokens": 0}
options = [f"--{name}={value}" for name, value in tiny.items()]
assert cli.main(["train", "quickstart", *options, "--training.steps=1", "--run_dir=runs/one"]) == 0
config = ["--config", "configs/quickstart.yaml"]
sys.argv = ["train.py", *config, *options, "--training.steps=1", "--run_dir=runs/two"]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as done:
    assert done.code == 0
assert cli.main(["verify", "--only", "Llama 3.2 tied", "--json"]) == 0
"""


def packages_without_jllama(folder):
    """Links to all that is installed beside jllama, for a Python that looks nowhere else."""
    for path in map(Path, sys.path):
        if path.name in ("site-packages", "dist-packages") and path.is_dir():
            for each in path.iterdir():
                if "jllama" not in each.name and not (folder / each.name).exists():
                    (folder / each.name).symlink_to(each)


@pytest.mark.slow
def test_it_trains_and_verifies(tmp_path):
    (tmp_path / "packages").mkdir()
    packages_without_jllama(tmp_path / "packages")
    checkout = tmp_path / "checkout"
    for name in ("jllama", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", checkout)
    (checkout / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for run in ("one", "two"):
        assert "jllama " in (checkout / "runs" / run / "report.html").read_text()
