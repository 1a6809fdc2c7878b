"""The demonstration of docs/rewards.md with five seeds: sums are learned from rewards alone.

    python benchmarks/rewards.py

Of each seed, a base of its own is trained by configs/sums.yaml, then learns by configs/grpo.yaml:
from the reward, and from a constant one, which must teach nothing. Held-out prompts are answered
by sampling and greedily, before and after.

Writes benchmarks/results/rewards.json, docs/results/rewards.svg and the table in docs/results.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import panels, table, write

import jllama
from jllama.data.prompts import prepare_prompts
from jllama.data.tasks import write_sums

KINDS = {
    "the reward": ["--reward", "exact"],
    "a constant": ["--reward", "expression:1"],
}


def train(folder: Path, *arguments: object) -> float:
    """Run ``jllama train`` in a process of its own; return its seconds."""
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "jllama", "train", *map(str, arguments), "--yes"]
    subprocess.run(command, cwd=folder, check=True)
    return time.perf_counter() - start_s


def share_right(checkpoint: Path, path: Path, temperature: float) -> float:
    """Return the share of the held-out prompts that are answered right."""
    model = jllama.load(checkpoint)
    config = jllama.DataConfig(path=str(path), validation_fraction=0.2)
    rows = prepare_prompts(config, model.text_tokenizer, None, 16).validation
    prompts = []
    for seed, row in enumerate(rows):
        sampling = jllama.SamplingParams(temperature=temperature, top_p=1.0, seed=seed)
        stop_ids = [model.text_tokenizer.eos_id]
        prompts.append(jllama.Prompt(row.prompt, sampling, 16, stop_ids=stop_ids))
    answers = jllama.generate(model, prompts)
    right = [answer.text == row.fields["answer"] for answer, row in zip(answers, rows, strict=True)]
    return statistics.fmean(right)


def shares(checkpoint: Path, prompts: Path) -> dict[str, float]:
    """Return the shares of right answers, sampled and greedy."""
    return {
        "sampled": share_right(checkpoint, prompts, 1.0),
        "greedy": share_right(checkpoint, prompts, 0.0),
    }


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """Return the seconds, shares of right answers and curves of one seed."""
    write_sums(folder / "my_sums")
    prompts = folder / "my_sums" / "prompts.jsonl"
    base_s = train(folder, "sums", "--seed", seed, "--run_dir", "base", "--overwrite")
    result: dict[str, Any] = {"base_s": base_s, "base": shares(folder / "base", prompts)}
    print(seed, "the base", result["base"], flush=True)
    for kind, options in KINDS.items():
        command = ["grpo", "--init_from", "base", "--run_dir", "run", "--seed", seed, "--overwrite"]
        seconds = train(folder, *command, *options)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
        steps = [line for line in lines if "reward" in line]
        result[kind] = {
            "seconds": seconds,
            **shares(folder / "run", prompts),
            "reward": [[line["step"], line["reward"]] for line in steps],
            "mismatch_max": max(line["mismatch_max"] for line in steps),
            "sampling_share": statistics.median(
                line["sampling_s"] / line["step_s"] for line in steps[1:]
            ),
            **{
                name: statistics.median(line[name] for line in steps[1:])
                for name in ("step_s", "sampling_s", "scoring_s", "training_s")
            },
        }
        print(seed, kind, {k: v for k, v in result[kind].items() if k != "reward"}, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    runs = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_seed(Path(folder), seed))
    save(runs)


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def save(runs: list[dict[str, Any]]) -> None:
    """Write the curves, and a table of the shares and speeds."""
    figure, (chart,) = panels(1)
    for color, kind in enumerate(KINDS):
        if kind == "a constant":
            continue
        curves = [run[kind]["reward"] for run in runs]
        steps = [step for step, _ in curves[0]]
        rewards = [[reward for _, reward in point] for point in zip(*curves, strict=True)]
        chart.plot(steps, [*map(statistics.fmean, rewards)], color=f"C{color}", label=kind)
        chart.fill_between(
            steps,
            [*map(min, rewards)],
            [*map(max, rewards)],
            color=f"C{color}",
            alpha=0.2,
            linewidth=0,
        )
    chart.set(title="sums from rewards", xlabel="step", ylabel="share of right answers")
    chart.legend()
    header = ["", "right when sampled, mean (each seed)", "greedily", "a run", "largest mismatch"]
    base = [run["base"] for run in runs]
    base_s = statistics.median(run["base_s"] for run in runs)
    rows = [
        [
            "the base",
            spread([share["sampled"] for share in base]),
            spread([share["greedy"] for share in base]),
            f"{base_s:.0f} s",
            "",
        ]
    ]
    for kind in KINDS:
        results = [run[kind] for run in runs]
        rows.append(
            [
                f"after 100 steps with {kind}",
                spread([result["sampled"] for result in results]),
                spread([result["greedy"] for result in results]),
                f"{statistics.median(result['seconds'] for result in results):.0f} s",
                f"{max(result['mismatch_max'] for result in results):.1e}",
            ]
        )
    phases = [
        [
            kind,
            *(
                f"{1e3 * statistics.median(run[kind][name] for run in runs):.0f} ms"
                for name in ("step_s", "sampling_s", "scoring_s", "training_s")
            ),
        ]
        for kind in KINDS
    ]
    phase_header = ["", "a step", "sampling", "scoring", "training"]
    text = f"{table(header, rows)}\n\n{table(phase_header, phases)}"
    write("rewards", {"runs": runs}, figure, text, ("jax", "flax", "optax"))


if __name__ == "__main__":
    main()
