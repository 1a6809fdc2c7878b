"""Seconds, tokens and loss of configs/shakespeare_char.yaml and of nanoGPT's CPU setting.

Both train as whole processes, one after another, several times, ours with empty caches. Both
evaluate every 250 steps, on as many tokens of the validation text, and save. Final losses are those
of the best checkpoint over the whole last tenth of the text, in windows of 64 characters.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/shakespeare_char.py --nanogpt nanoGPT --data tinyshakespeare.txt --repeats 5

Writes benchmarks/results/shakespeare_char.json and docs/results/shakespeare_char.svg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, panels, table, write

PUBLISHED_LOSS = 1.886  # nanoGPT's for this setting
STEP_TOKENS = 12 * 64
SMOOTHED_STEPS = 50
SETTING = (  # from nanoGPT's README
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
    "--lr_decay_iters=2000 --dropout=0.0"
)
WHOLE_LOSS = """
import sys, numpy as np, torch
from model import GPT, GPTConfig
checkpoint = torch.load(sys.argv[1], weights_only=False)
model = GPT(GPTConfig(**checkpoint["model_args"]))
model.load_state_dict(checkpoint["model"])
ids = torch.from_numpy(np.fromfile("data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
count = (len(ids) - 1) // 64 * 64
with torch.no_grad():
    print(float(model(ids[:count].view(-1, 64), ids[1 : count + 1].view(-1, 64))[1]))
"""

Point = tuple[int, float, float]  # tokens, seconds since the process began, loss


def timed(command: list[str], folder: Path, cache: Path) -> tuple[float, str]:
    """Run a command in a folder with an empty cache; return its wall seconds and output."""
    environment = {**os.environ, "JLLAMA_CACHE": str(cache)}
    began_s = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return time.perf_counter() - began_s, done.stdout


def train_jllama(data: Path, folder: Path) -> dict[str, Any]:
    """Run ``shakespeare_char.yaml``; its clock starts when its folder's first file is written."""
    overrides = [
        f"--data.path={data}",
        f"--run_dir={folder / 'run'}",
        f"--data.cache_dir={folder / 'data'}",
    ]
    command = [sys.executable, "train.py", "--config", "configs/shakespeare_char.yaml"]
    began_s = time.time()
    wall_s, _ = timed([*command, *overrides], ROOT, folder / "cache")
    start_s = (folder / "run" / "config.yaml").stat().st_mtime - began_s
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    at_s = {line["step"]: start_s + line["elapsed_s"] for line in lines if "elapsed_s" in line}
    points = {
        key: [
            (line["step"] * STEP_TOKENS, at_s[line["step"]], line[key])
            for line in lines
            if key in line
        ]
        for key in ("loss", "validation_loss")
    }
    return _run(
        wall_s, lines[-1]["final"]["validation_loss"], points["loss"], points["validation_loss"]
    )


def train_nanogpt(clone: Path, folder: Path) -> dict[str, Any]:
    """Run nanoGPT's ``train.py``; the times it prints add up to all but its start."""
    command = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        *SETTING.split(),
        f"--out_dir={folder}",
    ]
    wall_s, output = timed(command, clone, folder)
    steps = [
        (float(loss), float(ms) / 1e3)
        for loss, ms in re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", output)
    ]
    start_s = wall_s - sum(seconds for _, seconds in steps)
    at_s = [
        start_s,
        *(start_s + passed for passed in itertools.accumulate(seconds for _, seconds in steps)),
    ]
    evaluations = [
        (int(step), float(loss))
        for step, loss in re.findall(r"step (\d+): .* val loss ([\d.]+)", output)
    ]
    validation = [(step * STEP_TOKENS, at_s[step], loss) for step, loss in evaluations if step]
    ends = range(SMOOTHED_STEPS, len(steps), SMOOTHED_STEPS)
    means = {
        end: statistics.fmean(loss for loss, _ in steps[end - SMOOTHED_STEPS : end]) for end in ends
    }
    losses = [(end * STEP_TOKENS, at_s[end], mean) for end, mean in means.items()]
    _, whole = timed([sys.executable, "-c", WHOLE_LOSS, str(folder / "ckpt.pt")], clone, folder)
    return _run(wall_s, float(whole.split()[-1]), losses, validation)


def _run(
    wall_s: float, final_loss: float, losses: list[Point], validation: list[Point]
) -> dict[str, Any]:
    reached = [at_s for _, at_s, loss in validation if loss <= PUBLISHED_LOSS]
    return {
        "wall_s": round(wall_s, 2),
        "final_validation_loss": round(final_loss, 4),
        "published_loss_reached_s": round(reached[0], 2) if reached else None,
        "loss": [(tokens, round(at_s, 2), round(loss, 4)) for tokens, at_s, loss in losses],
        "validation_loss": [
            (tokens, round(at_s, 2), round(loss, 4)) for tokens, at_s, loss in validation
        ],
    }


def middle(runs: list[dict[str, Any]], key: str) -> float | None:
    """Return the median over runs; None if a run has no value."""
    values = [run[key] for run in runs]
    return None if None in values else round(statistics.median(values), 4)


def draw(runs: dict[str, list[dict[str, Any]]]) -> Any:
    """Draw loss by seconds and by tokens, for each side's run of median wall time."""
    figure, charts = panels(2)
    for color, (name, several) in enumerate(runs.items()):
        run = sorted(several, key=lambda run: run["wall_s"])[(len(several) - 1) // 2]
        for chart, axis in zip(charts, (1, 0), strict=True):
            for kind, style in (("loss", "-"), ("validation_loss", "o--")):
                x = [point[axis] * (1 if axis else 1e-6) for point in run[kind]]
                label = f"{name}, {'training' if kind == 'loss' else 'validation'}"
                y = [point[2] for point in run[kind]]
                chart.plot(
                    x,
                    y,
                    style,
                    color=f"C{color}",
                    label=label,
                    markersize=4,
                    alpha=0.6 if style == "-" else 1,
                )
    for chart in charts:
        chart.axhline(PUBLISHED_LOSS, color="#8b8b8b", linewidth=0.8, linestyle=":")
        chart.set(ylim=(1.4, 2.7), xlim=(0, None), ylabel="nats a character")
    charts[0].set(xlabel="seconds since the process began")
    charts[1].set(xlabel="million tokens")
    charts[1].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a clone of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--data", type=Path, required=True, help="the tiny Shakespeare text")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    clone = arguments.nanogpt.resolve()
    data = arguments.data.resolve()
    shutil.copyfile(data, clone / "data" / "shakespeare_char" / "input.txt")
    subprocess.run(
        [sys.executable, "data/shakespeare_char/prepare.py"],
        cwd=clone,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    runs: dict[str, list[dict[str, Any]]] = {"jllama": [], "nanoGPT": []}
    for repeat in range(arguments.repeats):
        for name, several in runs.items():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                several.append(
                    train_jllama(data, folder) if name == "jllama" else train_nanogpt(clone, folder)
                )
            short = {
                key: value for key, value in several[-1].items() if not isinstance(value, list)
            }
            print(f"repeat {repeat}, {name}: {short}", flush=True)
    save(runs)


def save(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Write the medians, the runs, the plot and the table."""
    keys = "wall_s", "final_validation_loss", "published_loss_reached_s"
    medians = {name: {key: middle(several, key) for key in keys} for name, several in runs.items()}
    ratio = round(medians["nanoGPT"]["wall_s"] / medians["jllama"]["wall_s"], 3)
    result = {"medians": medians, "nanogpt_wall_s_over_ours": ratio, "runs": runs}
    print(
        json.dumps({key: result[key] for key in ("medians", "nanogpt_wall_s_over_ours")}, indent=1)
    )
    header = [
        "medians",
        "whole process, s",
        "validation loss, whole text",
        f"s to a validation loss of {PUBLISHED_LOSS}",
    ]
    rows = [
        [name, *(median[key] or "not reached" for key in keys)] for name, median in medians.items()
    ]
    summary = f"Runs of each: {len(runs['jllama'])}. nanoGPT's time over ours: {ratio:.2f}."
    text = f"{table(header, rows)}\n\n{summary}"
    write("shakespeare_char", result, draw(runs), text, ("jax", "flax", "optax", "torch"))


if __name__ == "__main__":
    main()
