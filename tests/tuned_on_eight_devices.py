"""Run by test_lora.py in a process of its own: how far sharded steps and generated tokens are from
the float64 oracle's, as JSON on stdout.
"""

import functools
import json

import jax
import numpy as np
import tuning
from helpers_families import PROMPTS, answers, likeliest
from models import FAMILIES, family_weights

from jllama.config import LoraConfig, MeshConfig
from jllama.errors import UsageError
from jllama.generation.engine import Engine
from jllama.language_model import LanguageModel
from jllama.sharding import state_sharding
from jllama.verify.equalities import MESHES, one_and_eight_devices

ROWS, PAIRS = tuning.packed(tuning.conversations(0)), tuning.apart(tuning.conversations(1, 16))
PAIRS = PAIRS._replace(reference=np.linspace(-30, -20, 16, dtype=np.float32))
LOSSES = {"answers": (tuning.answers_loss, ROWS), "pairs": (tuning.preference_loss, PAIRS)}
ALL_AXES = "fsdp=2 tensor=2 sequence=2"
CASES = [
    *((mesh, "lora", "answers") for mesh in MESHES),
    ("data=2 fsdp=2 tensor=2", "lora", "pairs"),
]
CASES += [(ALL_AXES, "full", "answers"), (ALL_AXES, "dora", "answers")]
FAMILY = "all at once"
FAMILY_MESHES = MESHES | {"data=2 tensor=4": MeshConfig(2, 1, 4)}  # with two key-value heads
FAMILY_CASES = [(mesh, "full") for mesh in FAMILY_MESHES] + [(ALL_AXES, "lora")]


def wrong_tokens(mesh):
    """How many generated tokens are not the oracle's."""
    config, weights = FAMILIES[FAMILY], family_weights(FAMILY)
    params = jax.device_put(weights, state_sharding(mesh, config, weights))
    engine = Engine(LanguageModel(config, params).for_decoding(), 4, chunk_tokens=64)
    rows = [answer.completion.ids for answer in answers(engine, PROMPTS)]
    expected = map(functools.partial(likeliest, FAMILY), PROMPTS, rows)
    return int(np.sum(np.array(rows) != [*expected]))


def main():
    report = []
    for mesh, kind, which in CASES:
        loss, rows = LOSSES[which]
        errors = tuning.first_errors(
            kind, rows, tuning.compiled(kind, one_and_eight_devices(MESHES[mesh])[1]), loss
        )
        report.append({"mesh": mesh, "kind": kind, "loss": which, "errors": errors})
    with tuning.family(FAMILY):
        for mesh, kind in FAMILY_CASES:
            training = tuning.compiled(kind, one_and_eight_devices(FAMILY_MESHES[mesh])[1])
            errors = tuning.first_errors(kind, tuning.packed(tuning.conversations(0)), training)
            report.append({"mesh": mesh, "kind": kind, "model": FAMILY, "errors": errors})
    for mesh in ("data=2 fsdp=2 tensor=2", "data=2 tensor=4"):
        errors = (wrong_tokens(one_and_eight_devices(FAMILY_MESHES[mesh])[1]), 0.0)
        report.append({"mesh": mesh, "kind": "decoding", "model": FAMILY, "errors": errors})
    tuning.KINDS["int8"] = LoraConfig(rank=4, base="int8")
    try:
        tuning.compiled("int8", one_and_eight_devices(MESHES[ALL_AXES])[1])
    except UsageError as error:
        assert "whose weights are whole on each device" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a base in 8 bits was split")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
