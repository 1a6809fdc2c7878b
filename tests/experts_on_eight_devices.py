"""Experts that are split over eight devices against one device, as JSON on stdout.

``test_experts.py`` runs it in a process of its own.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from equalities import (
    Case,
    one_and_eight_devices,
    run_three_steps,
    sharded_error,
    sharded_training_error,
    short_training,
)

import jllama
from jllama.core.parameters import EXPERT_MATRICES
from jllama.lab.checks import random_params, worst_error
from jllama.lab.conformance import compiled_jllama
from jllama.models.config import LoraConfig
from jllama.parallel.config import MeshConfig
from jllama.tokenizers.base import BytesTokenizer

CONFIG = jllama.LlamaConfig(
    264,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
    num_experts=8,
    experts_per_token=3,
    expert_dim=24,
    normalize_expert_weights=True,
)
LLAMA_4 = dataclasses.replace(
    CONFIG,
    num_layers=4,
    experts_per_token=1,
    normalize_expert_weights=False,
    router="sigmoid",
    shared_expert=True,
    dense_layers=(0, 2),
    no_rope_layers=(3,),
    attention_chunk=6,
    temperature_step=4,
)
MESHES = {
    "fsdp=8": MeshConfig(1, 8),
    "expert=8": MeshConfig(1, expert=8),
    "expert=2 fsdp=2 tensor=2": MeshConfig(1, 2, 2, expert=2),
    "data=2 expert=4": MeshConfig(2, expert=4),
    "expert=4 sequence=2": MeshConfig(1, sequence=2, expert=4),
}


def leaves(folder, mesh):
    """Each parameter in the layout for training, read onto the devices of a mesh."""
    return jax.tree.leaves(jllama.load(folder, "float32", layout="training", mesh=mesh).params)


def main():
    report = {f"{name} of experts": row for name, row in compare(CONFIG, MESHES).items()}
    names = ("fsdp=8", "expert=2 fsdp=2 tensor=2", "data=2 expert=4")
    rows = compare(LLAMA_4, {name: MESHES[name] for name in names})
    report |= {f"{name} of Llama 4": row for name, row in rows.items()}
    print(json.dumps(report))


def compare(config, meshes):
    """Return the differences between eight devices and one, by mesh."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16))
    params = random_params(config, 0)
    case = Case(compiled_jllama(), config, params, tokens)
    prompts = [tokens[row, : 5 + row].tolist() for row in range(8)]
    sampling = jllama.SamplingParams(temperature=0.0)
    folder = Path(tempfile.mkdtemp()) / "model"
    jllama.save(jllama.LanguageModel(config, params, BytesTokenizer()), folder)
    report = {}
    for name, sizes in meshes.items():
        mesh = one_and_eight_devices(sizes)[1]
        models = [jllama.load(folder, "float32", mesh=on) for on in (None, mesh)]
        answers = [
            [each.ids for each in jllama.generate(model, prompts, sampling, max_new_tokens=9)]
            for model in models
        ]
        report[name] = {
            "loaded_error": worst_error(*(leaves(folder, on) for on in (mesh, None))),
            "error": sharded_error(case, sizes),
            "training_error": sharded_training_error(case, sizes),
            "answers_are_equal": answers[0] == answers[1],
            "adapters_error": adapters_error(config, params, sizes),
        }
    return report


def adapters_error(config, params, sizes):
    """Compare losses and adapters after three steps on eight devices with those on one."""
    lora = LoraConfig(rank=3, targets=("wq", *EXPERT_MATRICES))
    results = []
    for mesh in one_and_eight_devices(sizes):
        training = short_training(config, mesh, lora=lora)
        state, losses = run_three_steps(training, config, params)
        results.append([*losses, *jax.tree.leaves(state.params)])
    return worst_error(*results[::-1])


if __name__ == "__main__":
    main()
