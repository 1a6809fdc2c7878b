"""Adapters, and runs that have trained them, without the training."""

import dataclasses
import json

import numpy as np
import yaml

from jllama.core.parameters import EXPERT_MATRICES, PARAMETERS, layers_of, map_by_path
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.models.lora import adapter_shapes


def adapter_params(config, lora, seed=0):
    """An adapter whose part of each product is about half as large as its base's."""
    rng = np.random.default_rng(seed)
    layers = {}
    for name, (inputs, outputs) in adapter_shapes(config, lora).items():
        lead = (len(layers_of(PARAMETERS[f"layers/{name}"], config)),)
        if name in EXPERT_MATRICES:
            lead += (config.num_experts,)
        a = rng.standard_normal((*lead, inputs, lora.rank)) / np.sqrt(inputs)
        b = rng.standard_normal((*lead, lora.rank, outputs)) / np.sqrt(4 * lora.rank) / lora.scale
        layers[name] = {"a": a, "b": b}
        if lora.dora:
            layers[name]["magnitude"] = rng.uniform(0.6, 1.2, (config.num_layers, outputs))
    return {"layers": map_by_path(lambda _, leaf: leaf.astype(np.float32), layers)}


def make_run(folder, base, config, lora, params, fingerprint=None, step=7, **fields):
    """The folder of a run that trained an adapter."""
    folder.mkdir()
    fields = {
        "model": dataclasses.asdict(config),
        "lora": dataclasses.asdict(lora),
        "init_from": str(base),
    } | fields
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(fields))))
    checkpoints = RunCheckpoints(folder / "checkpoints")
    checkpoints.save(
        step, params, {"step": np.int32(step)}, {"base_fingerprint": fingerprint}, None
    )
    checkpoints.wait()
    return folder
