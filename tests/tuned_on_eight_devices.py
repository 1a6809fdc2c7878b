"""Run by test_lora.py in a process of its own: how far sharded steps and generated tokens are from
the float64 oracle's, as JSON on stdout.
"""

import functools
import json

import jax
import numpy as np
import tuning
from equalities import MESHES, one_and_eight_devices
from helpers_families import PROMPTS, answers, likeliest
from models import FAMILIES, family_weights

from jllama.core import UsageError
from jllama.generation.engine import Engine
from jllama.models.config import LoraConfig
from jllama.models.language_model import LanguageModel
from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import state_sharding

ROWS, PAIRS = tuning.packed(tuning.conversations(0)), tuning.apart(tuning.conversations(1, 16))
PAIRS = PAIRS._replace(reference=np.linspace(-30, -20, 16, dtype=np.float32))
LOSSES = {"answers": (tuning.answers_loss, ROWS), "pairs": (tuning.preference_loss, PAIRS)}
MESHES = {**MESHES, "data=2 tensor=4": MeshConfig(2, 1, 4)}  # with two key-value heads
ALL_AXES, CUBE = "fsdp=2 tensor=2 sequence=2", "data=2 fsdp=2 tensor=2"
CASES = [
    ("fsdp=8", "lora", "answers"),
    (ALL_AXES, "lora", "answers"),
    (ALL_AXES, "dora", "answers"),
    (CUBE, "lora", "pairs"),
]
FAMILY = "all at once"
FAMILY_CASES = [("data=2 tensor=4", "full"), (ALL_AXES, "full"), (CUBE, "lora")]


def wrong_tokens(mesh):
    """How many generated tokens are not the oracle's."""
    config, weights = FAMILIES[FAMILY], family_weights(FAMILY)
    params = jax.device_put(weights, state_sharding(mesh, config, weights))
    engine = Engine(LanguageModel(config, params).for_decoding(), 4, chunk_tokens=64)
    rows = [answer.completion.ids for answer in answers(engine, PROMPTS)]
    expected = map(functools.partial(likeliest, config, weights), PROMPTS, rows)
    return int(np.sum(np.array(rows) != [*expected]))


def main():
    report = []
    devices = {name: one_and_eight_devices(sizes)[1] for name, sizes in MESHES.items()}
    for mesh, kind, which in CASES:
        loss, rows = LOSSES[which]
        errors = tuning.first_errors(kind, rows, tuning.compiled(kind, devices[mesh]), loss)
        report.append({"mesh": mesh, "kind": kind, "loss": which, "errors": errors})
    with tuning.family(FAMILY):
        rows = tuning.packed(tuning.conversations(0))
        for mesh, kind in FAMILY_CASES:
            errors = tuning.first_errors(kind, rows, tuning.compiled(kind, devices[mesh]))
            report.append({"mesh": mesh, "kind": kind, "model": FAMILY, "errors": errors})
    for mesh in (CUBE, "data=2 tensor=4"):
        errors = (wrong_tokens(devices[mesh]), 0.0)
        report.append({"mesh": mesh, "kind": "decoding", "model": FAMILY, "errors": errors})
    tuning.KINDS["int8"] = LoraConfig(rank=4, base="int8")
    try:
        tuning.compiled("int8", devices[ALL_AXES])
    except UsageError as error:
        assert "whose weights are whole on each device" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a base in 8 bits was split")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
