"""Models as Meta releases them, in files of torch.save itself and in any dtype."""

import json

import torch
from reference_writers import meta_params, meta_shards, meta_tensors

from jllama.lab.checks import random_params

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def in_torch(tensors):
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def metas_matrices(config, params):
    """The whole model as Meta's code has it."""
    return in_torch(meta_tensors(config, params))


def cut(state, count, style, num_kv_heads):
    """What each of ``count`` ranks of Meta's model-parallel code holds; ``style`` is 2 or 3, the
    Llama.
    """
    state = state | {"rope.freqs": torch.ones(state["norm.weight"].shape[0] // 2)}
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    return [
        in_torch(shard) for shard in meta_shards(arrays, count, num_kv_heads, embed_axis=3 - style)
    ]


def params_json(config, **others):
    return meta_params(config) | others


def save_folder(folder, shards, params):
    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def metas_folder(folder, config, count=1, style=3, dtype="float32", seed=0, **others):
    shards = cut(
        metas_matrices(config, random_params(config, seed)), count, style, config.num_kv_heads
    )
    shards = [
        {name: tensor.to(DTYPES[dtype]) for name, tensor in shard.items()} for shard in shards
    ]
    return save_folder(folder, shards, params_json(config, **others))
