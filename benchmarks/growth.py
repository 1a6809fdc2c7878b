"""Seconds, FLOPs and bytes of a training step by length, batch, depth and vocabulary.

    python benchmarks/growth.py                  # all four
    python benchmarks/growth.py --only seq_len   # keep the other measurements; without names, only
    draw

One quantity is doubled at a time, starting with a small Llama (width 128). Seconds are the minimum
over several steps on this machine, FLOPs follow the formula (``training_flops_per_token``), and
bytes are what XLA plans for the compiled step. Steps that would take long are only compiled. A
slope is that of a straight line through the logarithms of the last four points (for seconds and
FLOPs, of those that were run): 1 if something doubles with the quantity, 2 if it becomes four times
as much.

Writes benchmarks/results/growth.json and docs/results/growth.svg.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from common import ROOT, panels, table, write
from matplotlib.ticker import EngFormatter

import jllama
from jllama.system.memory import program_bytes
from jllama.training.metrics import training_flops_per_token

AXES = {
    "seq_len": [256 << power for power in range(10)],
    "batch_size": [1 << power for power in range(11)],
    "num_layers": [1 << power for power in range(8)],
    "vocab_size": [1024 << power for power in range(9)],
}
RUN_UP_TO = {"seq_len": 16_384, "batch_size": 64, "num_layers": 32, "vocab_size": 131_072}
USUAL = {"seq_len": 256, "batch_size": 4, "num_layers": 2, "vocab_size": 1024}
NAMES = {
    "seq_len": "sequence length",
    "batch_size": "batch",
    "num_layers": "layers",
    "vocab_size": "vocabulary",
}
MEASURE_S = 1.0


def measure(axis: str, value: int) -> dict[str, Any]:
    """Measure one point: bytes of the compiled step, and its seconds unless it would take long."""
    sizes = USUAL | {axis: value}
    if axis == "seq_len":
        sizes["batch_size"] = 1
    seq_len = sizes["seq_len"]
    batch_size = sizes["batch_size"]
    heads = {"embed_dim": 128, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 384}
    model = jllama.LlamaConfig(
        sizes["vocab_size"], num_layers=sizes["num_layers"], max_seq_len=seq_len, **heads
    )
    config = jllama.TrainConfig(
        model, training=jllama.LoopConfig(batch_size=batch_size, seq_len=seq_len)
    )
    training = jllama.compile_training(config)
    key = jax.random.key(0)
    windows = np.random.default_rng(0).integers(2, sizes["vocab_size"], (batch_size, seq_len + 1))
    batch = jllama.text_batch(windows, bos_id=1)
    step = training.step.lower(jax.eval_shape(training.init, key), batch).compile()
    state_bytes, temporary_bytes = program_bytes(step)
    point = {
        "size": value,
        "tokens": batch_size * seq_len,
        "attention": training.plan.attention,
    }
    point["flops"] = training_flops_per_token(model, seq_len) * point["tokens"]
    point |= {"state_bytes": state_bytes, "temporary_bytes": temporary_bytes, "step_s": None}
    if value <= RUN_UP_TO[axis]:
        state = training.init(key)
        seconds = []
        began_s = time.perf_counter()
        while len(seconds) < 2 or time.perf_counter() - began_s < MEASURE_S:
            step_began_s = time.perf_counter()
            state, metrics = step(state, batch)
            float(metrics.loss)
            seconds.append(time.perf_counter() - step_began_s)
        point["step_s"] = min(seconds)
    return point


def slope(points: Sequence[dict[str, Any]], key: str) -> float:
    """Return the exponent over the last four points."""
    known = [point for point in points if point["step_s"] or key not in ("flops", "step_s")][-4:]
    logs = np.log(np.array([(point["size"], point[key]) for point in known], float))
    return round(float(np.polyfit(*logs.T, 1)[0]), 2)


def draw(curves: dict[str, list[dict[str, Any]]]) -> Any:
    """Draw seconds above, with the formula's FLOPs as a dotted line, and bytes below."""
    figure, charts = panels(len(AXES), rows=2)
    for column, (axis, points) in enumerate(curves.items()):
        run = [point for point in points if point["step_s"]]
        x = [point["size"] for point in run]
        last = run[-1]
        charts[0][column].plot(
            x, [point["step_s"] for point in run], "o-", label="measured", markersize=4
        )
        by_formula = [point["flops"] * last["step_s"] / last["flops"] for point in run]
        charts[0][column].plot(x, by_formula, ":", color="#8b8b8b", label="FLOPs by the formula")
        x = [point["size"] for point in points]
        for key, label in (("temporary_bytes", "temporaries"), ("state_bytes", "state and batch")):
            charts[1][column].plot(
                x, [point[key] / 2**20 for point in points], "o-", label=label, markersize=4
            )
        for chart in charts[:, column]:
            chart.set(xscale="log", yscale="log", xlabel=NAMES[axis])
            chart.minorticks_off()
            chart.xaxis.set_major_formatter(EngFormatter(sep=""))
            chart.yaxis.set_major_formatter("{x:g}")
    charts[0][0].set_ylabel("seconds a step")
    charts[1][0].set_ylabel("MiB")
    charts[0][0].legend(loc="lower right")
    charts[1][0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", choices=AXES, help="measure these, and keep the others"
    )
    options = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / "growth.json"
    curves = {}
    if options.only is not None and path.exists():
        curves = json.loads(path.read_text())["points"]
    axes = AXES if options.only is None else options.only
    for axis in axes:
        curves[axis] = []
        for value in AXES[axis]:
            curves[axis].append(measure(axis, value))
            print(axis, json.dumps(curves[axis][-1]), flush=True)
    curves = {axis: curves[axis] for axis in AXES if axis in curves}
    keys = "flops", "step_s", "temporary_bytes", "state_bytes"
    slopes = {axis: {key: slope(points, key) for key in keys} for axis, points in curves.items()}
    print(json.dumps(slopes, indent=1))
    model = "width 128, 4 heads, 2 key-value heads, feed-forward 384"
    result = {"model": model, "usual": USUAL, "slopes": slopes, "points": curves}
    header = [
        "doubled",
        "from",
        "to",
        "tokens/s",
        "slope of seconds",
        "of FLOPs",
        "temporaries to",
        "their slope",
    ]
    write(
        "growth",
        result,
        draw(curves),
        table(header, [_row(axis, curves[axis], slopes[axis]) for axis in curves]),
    )


def _row(axis: str, points: Sequence[dict[str, Any]], slopes: dict[str, float]) -> list[str]:
    run = [point for point in points if point["step_s"]]
    rates = [f"{point['tokens'] / point['step_s']:,.0f}" for point in (run[0], run[-1])]
    cells = [
        f"{run[0]['size']:,}",
        f"{run[-1]['size']:,}",
        f"{rates[0]} to {rates[1]}",
        slopes["step_s"],
        slopes["flops"],
    ]
    largest = f"{points[-1]['temporary_bytes'] / 2**20:,.0f} MiB at {points[-1]['size']:,}"
    return [NAMES[axis], *map(str, cells), largest, str(slopes["temporary_bytes"])]


if __name__ == "__main__":
    main()
