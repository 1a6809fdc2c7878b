"""Kill a small run again and again, go on with ``--resume auto``, and compare its end with that of one left in peace.

    python benchmarks/kill_runs.py --kills 40

Half of the kills (``SIGKILL``) come at a random moment, half within half a second of a save's beginning. Equal must be:
every bit of the last checkpoint's parameters and optimizer state, and every line of the loss curve. Every checkpoint
that is listed after a kill must be readable.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml

from jllama.checkpoints.registry import load

STEPS = 60
SETTINGS = {
    "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "max_seq_len": 64},
    "data": {"tokenizer": "bytes"},
    "training": {"batch_size": 8, "steps": STEPS, "eval_every": 5, "log_every": 1, "keep_last": 2, "sample_tokens": 0},
}


def start(folder: Path, run: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "jllama", "train", "--config", str(folder / "run.yaml"), "--run_dir", str(run)]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JLLAMA_CACHE": str(folder / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [*command, "--resume", "auto"], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def result(run: Path) -> tuple[str, str]:
    """Hashes of the last checkpoint's arrays, and of the loss curve."""
    arrays = hashlib.sha256()
    with ocp.StandardCheckpointer() as reader:
        for item in ("params", "state"):
            for leaf in jax.tree.leaves(reader.restore(run / "checkpoints" / str(STEPS) / item)):
                arrays.update(np.asarray(leaf).tobytes())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    curve += [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    return arrays.hexdigest(), hashlib.sha256(json.dumps(sorted(curve)).encode()).hexdigest()


def listed(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def kill(process: subprocess.Popen, run: Path, rng: random.Random) -> bool:
    """Kill it at a random moment, or just after the next save has begun; False if it ended before."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 8))
    else:
        while process.poll() is None and not list(run.glob("checkpoints/*.orbax-checkpoint-tmp*")):
            time.sleep(0.001)
        time.sleep(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)]))
    process.kill()
    process.communicate()
    return process.returncode != 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
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
        lines = (" ".join(rng.choice(words) for _ in range(12)) for _ in range(400))
        (folder / "corpus.txt").write_text("\n".join(lines))
        SETTINGS["data"]["path"] = str(folder / "corpus.txt")
        (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
        peace = start(folder, folder / "peace")
        _, err = peace.communicate()
        assert peace.returncode == 0, err
        wanted = result(folder / "peace")

        kills = ends = failures = unreadable = different = left = 0
        while kills < given.kills:
            ends += 1
            run = folder / f"run{ends}"
            finished = False
            while not finished and kills < given.kills:
                finished = not kill(start(folder, run), run, rng)
                kills += not finished
                for step in listed(run):
                    try:
                        load(run, step=step)
                    except Exception as error:
                        unreadable += 1
                        print(f"kill {kills}: step {step} is listed but {error}")
            last = start(folder, run)
            _, err = last.communicate()
            failures += last.returncode != 0 or "Traceback" in err
            left += len([path for path in (run / "checkpoints").iterdir() if not path.name.isdigit()])
            if result(run) != wanted:
                different += 1
                print(f"run {ends}: another end: {result(run)} instead of {wanted}")
            print(f"{kills} kills, {ends} runs", flush=True)
    print(
        f"{kills} kills in {ends} runs of {STEPS} steps: {failures} could not go on, {unreadable} checkpoints listed, "
        f"but not readable, {left} left-overs, {different} of {ends} ends with other bits or another curve"
    )
    return int(bool(failures or unreadable or different or left))


if __name__ == "__main__":
    sys.exit(main())
