"""Run by test_lora.py in a process of its own: how far sharded steps are from the float64 oracle, as JSON on stdout."""

import json

import numpy as np
import tuning

from jllama.verify.equalities import MESHES, one_device_and

ROWS, PAIRS = tuning.packed(tuning.conversations(0)), tuning.apart(tuning.conversations(1, 16))
PAIRS = PAIRS._replace(reference=np.linspace(-30, -20, 16, dtype=np.float32))
LOSSES = {"answers": (tuning.answers_loss, ROWS), "pairs": (tuning.preference_loss, PAIRS)}


def main():
    report = []
    for name, sizes in MESHES.items():
        for kind in ("full", "lora", "dora"):
            training = tuning.compiled(kind, one_device_and(sizes)[1])
            for which in list(LOSSES)[: 1 + (kind == "lora" and sizes.sequence == 1)]:  # pairs are not split so
                loss, rows = LOSSES[which]
                errors = tuning.first_errors(kind, rows, training, loss)
                report.append({"mesh": name, "kind": kind, "loss": which, "errors": errors})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
