"""How plans grow: bytes that a device receives as devices double, compile time as layers double.

    python benchmarks/plan_scaling.py

Plans Llama 3.1 8B with 8k context, one sequence a GPU, and parameters split over all H100s. Needs
JAX's CUDA packages and no GPU. Writes benchmarks/results/plan_scaling.json and
docs/plan_scaling.svg.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
DEVICES = [1 << power for power in range(10)]
LAYERS = [4, 8, 16, 32, 64, 128]
COMMAND = [sys.executable, "-m", "jllama", "plan", "configs/llama3.1-8b_h100-8.yaml", "--json"]


def plan(*arguments: object) -> dict:
    """Return the receipt of a plan."""
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def main() -> None:
    """Plan, print and write the results, and draw the charts."""
    doubled = []
    deepened = []
    for devices in DEVICES:
        receipt = plan("--topology", f"h100:{devices}", "--batch_size", devices)
        received = Counter({"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0})
        for row in receipt["collectives"]:
            received[row["kind"]] += row["times"] * row["bytes_each"]
        needed = receipt["arguments_bytes"] + receipt["temporaries_bytes"]
        doubled.append({"devices": devices, "held_bytes": needed, "received_bytes": received})
        print(json.dumps(doubled[-1]), flush=True)
    for layers in LAYERS:
        receipt = plan("--topology", "h100:64", "--batch_size", 64, "--model.num_layers", layers)
        deepened.append({"layers": layers, "compile_s": receipt["compile_s"]})
        print(json.dumps(deepened[-1]), flush=True)
    result = {
        "model": "llama3.1-8b, 8k",
        "devices": "H100",
        "doubled": doubled,
        "deepened": deepened,
    }
    path = ROOT / "benchmarks" / "results" / "plan_scaling.json"
    path.write_text(json.dumps(result, indent=1) + "\n")

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind in ("all-gather", "reduce-scatter"):
        left.plot(DEVICES, [row["received_bytes"][kind] / 1e9 for row in doubled], "o-", label=kind)
    left.set(xscale="log", xlabel="devices", ylabel="GB received by each in a step", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(LAYERS, [row["compile_s"] for row in deepened], "o-")
    right.set(xlabel="layers", ylabel="seconds to compile", ylim=(0, None))
    figure.savefig(ROOT / "docs" / "plan_scaling.svg")


if __name__ == "__main__":
    main()
