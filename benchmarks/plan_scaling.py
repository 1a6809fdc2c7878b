"""How plans grow: bytes that a device receives in a step as devices double, and the time to compile as layers double.

    python benchmarks/plan_scaling.py

Llama 3.1 8B, 8k context, one sequence a GPU, parameters over all H100s; needs JAX's CUDA packages and no GPU. Writes
benchmarks/results/plan_scaling.json and docs/plan_scaling.svg.
"""

import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
DEVICES, LAYERS = [1 << power for power in range(10)], [4, 8, 16, 32, 64, 128]


def plan(*arguments: object) -> dict:
    """The receipt of a plan."""
    command = [
        sys.executable,
        "-m",
        "jllama",
        "plan",
        "configs/llama3.1-8b_h100-8.yaml",
        "--json",
        *map(str, arguments),
    ]
    return json.loads(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    )


def main() -> None:
    """Plan, print, write and draw."""
    doubled, deepened = [], []
    for devices in DEVICES:
        receipt = plan("--topology", f"h100:{devices}", "--batch_size", devices)
        received = {"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0}
        for row in receipt["collectives"]:
            received[row["kind"]] = (
                received.get(row["kind"], 0.0) + row["times"] * row["bytes_each"]
            )
        held = receipt["arguments_bytes"] + receipt["temporaries_bytes"]
        doubled.append({"devices": devices, "held_bytes": held, "received_bytes": received})
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
    (ROOT / "benchmarks" / "results" / "plan_scaling.json").write_text(
        json.dumps(result, indent=1) + "\n"
    )

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
