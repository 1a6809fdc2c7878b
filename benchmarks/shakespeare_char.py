"""configs/shakespeare_char.yaml beside nanoGPT's published CPU setting: wall time and validation loss, in one run.

Both train as whole processes, one after the other, several times; the medians go to ``benchmarks/results/``. Both
losses are over all of the last tenth of the text, in windows of 64 characters.

    python benchmarks/shakespeare_char.py --data tinyshakespeare.txt --repeats 3
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def timed(command: list[str]) -> tuple[float, str]:
    """Run a command in the project's folder; its wall time in seconds and its standard output."""
    began_s = time.perf_counter()
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return time.perf_counter() - began_s, output


def train_jllama(data: Path, folder: Path) -> tuple[float, float]:
    """Wall seconds and final validation loss of ``shakespeare_char.yaml``, with nothing prepared beforehand."""
    config = "configs/shakespeare_char.yaml"
    overrides = [f"--data.path={data}", f"--run_dir={folder / 'run'}", f"--data.cache_dir={folder / 'cache'}"]
    wall_s, _ = timed([sys.executable, "train.py", "--config", config, *overrides])
    last = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    return wall_s, json.loads(last)["final"]["validation_loss"]


def train_nanogpt(data: Path) -> tuple[float, float]:
    """Wall seconds and final validation loss of ``peer_nanogpt.py``."""
    wall_s, output = timed([sys.executable, "benchmarks/peer_nanogpt.py", "--data", str(data)])
    return wall_s, json.loads(output.splitlines()[-1])["validation_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the tiny Shakespeare text")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    data = arguments.data.resolve()
    ours, theirs = [], []
    for repeat in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            ours.append(train_jllama(data, Path(folder)))
        theirs.append(train_nanogpt(data))
        print(f"repeat {repeat}: jllama {ours[-1]}, nanoGPT's setting {theirs[-1]} (seconds, loss)", flush=True)
    medians = {
        name: [round(statistics.median(column), 4) for column in zip(*runs, strict=True)]
        for name, runs in (("jllama", ours), ("nanogpt_setting", theirs))
    }
    result = {
        "medians_of_wall_s_and_validation_loss": medians,
        "wall_time_ratio": round(medians["jllama"][0] / medians["nanogpt_setting"][0], 3),
        "runs": {"jllama": ours, "nanogpt_setting": theirs},
        "machine": f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "torch")},
    }
    print(json.dumps(result, indent=2))
    (ROOT / "benchmarks" / "results").mkdir(exist_ok=True)
    (ROOT / "benchmarks" / "results" / "shakespeare_char.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
