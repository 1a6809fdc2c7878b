"""Muon and AdamW compared at equal time, on tiny Shakespeare.

The model and the batches are those of configs/shakespeare_char.yaml.

    python benchmarks/muon.py --data tinyshakespeare.txt

Blocks of steps of both are timed alternately, in one process. AdamW then takes 2,000 steps, and
Muon as many as fit in the same time by that ratio, so that other work on the machine disturbs no
result. The peak learning rate of each is the best of the same five at a quarter of the length, with
another seed.

Writes benchmarks/results/muon.json, run by run, docs/results/muon.svg and the table in
docs/results.md. Results that are there already are not computed again.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import ROOT, panels, table, write
from variants import COMPARISONS, Comparison, compiled, train

import jllama

NAMES = ("adamw", "muon")
STEPS = 2000
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = 3
OTHER_SEED = 100
BLOCKS = 40
BLOCK_STEPS = 20
PATH = ROOT / "benchmarks" / "results" / "muon.json"


def run_of(name: str, rate: float, steps: int) -> Comparison:
    """Return the comparison's model and batches with an optimizer, for ``variants.train``."""
    char = COMPARISONS["norms"]
    optimizer = dataclasses.replace(char.optimizer, name=name, learning_rate=rate)
    return dataclasses.replace(
        char, optimizer=optimizer, training=dataclasses.replace(char.training, steps=steps)
    )


def timed(model: jllama.LlamaConfig, data: Any) -> dict[str, Any]:
    """Measure the seconds of a step of each, and the median ratio of Muon's over AdamW's."""
    runs = {name: compiled(run_of(name, 1e-3, STEPS), model, data, 0)[2:] for name in NAMES}
    states = {name: state for name, (state, _, _) in runs.items()}
    seconds = {name: [] for name in NAMES}
    for _, (name, (_, batches, step)) in itertools.product(range(BLOCKS), runs.items()):
        batch = next(batches)
        began_s = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            states[name], metrics = step(states[name], batch)
        float(metrics.loss)
        seconds[name].append((time.perf_counter() - began_s) / BLOCK_STEPS)
    ratios = [muon / adamw for adamw, muon in list(zip(*seconds.values(), strict=True))[1:]]
    quartiles = statistics.quantiles(ratios)
    result = {name: round(statistics.median(times[1:]), 5) for name, times in seconds.items()}
    return {
        **result,
        "ratio": round(quartiles[1], 3),
        "ratio_quartiles": [round(quartile, 3) for quartile in quartiles[::2]],
    }


def final(run: dict[str, Any]) -> float:
    """Return the loss on all of the validation text after the last step."""
    return run["validation_loss"][-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the tiny Shakespeare text")
    options = parser.parse_args()
    model = COMPARISONS["norms"].variants["RMSNorm"]
    data = jllama.prepare_data(
        jllama.DataConfig(str(options.data), validation_fraction=0.1, tokenizer="bytes")
    )
    result = json.loads(PATH.read_text()) if PATH.exists() else {"search": {}, "runs": {}}
    result.setdefault("step_s", None)
    result["step_s"] = result["step_s"] or timed(model, data)
    times = result["step_s"]
    print(times, flush=True)
    steps = {"adamw": STEPS, "muon": round(STEPS / times["ratio"] / 50) * 50}

    # The learning rate of each, then the runs, in turn.
    for rate, name in itertools.product(RATES, NAMES):
        quarter = run_of(name, rate, steps[name] // 40 * 10)
        key = f"{name}, {rate}"
        if key not in result["search"]:
            result["search"][key] = final(train(quarter, model, data, OTHER_SEED)[0])
            PATH.write_text(json.dumps(result, indent=1) + "\n")
        print(name, rate, result["search"][key], flush=True)
    best = {
        name: min(RATES, key=lambda rate, name=name: result["search"][f"{name}, {rate}"])
        for name in NAMES
    }
    for seed, name in itertools.product(range(SEEDS), NAMES):
        whole = run_of(name, best[name], steps[name])
        key = f"{name}, seed {seed}"
        if key not in result["runs"]:
            result["runs"][key], _ = train(whole, model, data, seed)
            PATH.write_text(json.dumps(result, indent=1) + "\n")
        print(name, seed, final(result["runs"][key]), flush=True)
    save(result, steps, best)


def save(result: dict[str, Any], steps: dict[str, int], best: dict[str, float]) -> None:
    """Write the figure and two tables: the final runs, and the search for the learning rates."""
    figure, (whole_chart, zoomed) = panels(2)
    rows = []
    search_rows = []
    for color, name in enumerate(NAMES):
        runs = [result["runs"][f"{name}, seed {seed}"] for seed in range(SEEDS)]
        losses = [final(run) for run in runs]
        spread = f"{statistics.fmean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})"
        rows.append(
            [name, f"{1e3 * result['step_s'][name]:.1f} ms", f"{steps[name]:,}", best[name], spread]
        )
        search_rows.append(
            [name, *(f"{result['search'][f'{name}, {rate}']:.3f}" for rate in RATES)]
        )
        points = list(zip(*(run["validation_loss"] for run in runs), strict=True))
        x = [point[0][0] / points[-1][0][0] for point in points]
        y = [[loss for _, loss in point] for point in points]
        for chart in (whole_chart, zoomed):
            chart.plot(
                x, [*map(statistics.fmean, y)], "o-", color=f"C{color}", label=name, markersize=3
            )
            chart.fill_between(
                x, [*map(min, y)], [*map(max, y)], color=f"C{color}", alpha=0.25, linewidth=0
            )
    whole_chart.set(title="validation", xlabel="share of the time", ylabel="nats a character")
    zoomed.set(title="the last half", xlabel="share of the time", xlim=(0.5, 1.02), ylim=(1.6, 2.0))
    whole_chart.legend()
    header = [
        "",
        "a step",
        "steps in the same time",
        "peak learning rate",
        "validation loss, mean (each seed)",
    ]
    search = table(["a quarter of the time, peak rate of", *RATES], search_rows)
    write("muon", result, figure, f"{table(header, rows)}\n\n{search}", ("jax", "optax"))


if __name__ == "__main__":
    main()
