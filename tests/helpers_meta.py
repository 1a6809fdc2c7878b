"""Models as Meta releases them: its layout and names, written from its code and not from the table."""

import json

import numpy as np
import torch

from jllama.verify.compare import random_params

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def metas_matrices(config, params):
    """The whole model as Meta's code has it: every matrix [outputs, inputs], rotary channels in interleaved pairs."""

    def rotary(weight):  # [embed, heads, head_dim]: channel i and channel i + half become neighbours
        embed, heads, head_dim = weight.shape
        interleaved = np.empty_like(weight)
        interleaved[:, :, 0::2] = weight[:, :, : head_dim // 2]
        interleaved[:, :, 1::2] = weight[:, :, head_dim // 2 :]
        return interleaved.reshape(embed, heads * head_dim).T

    layers = params["layers"]
    state = {"tok_embeddings.weight": params["embed"], "norm.weight": params["final_norm"]}
    for i in range(config.num_layers):
        state |= {
            f"layers.{i}.attention.wq.weight": rotary(layers["wq"][i]),
            f"layers.{i}.attention.wk.weight": rotary(layers["wk"][i]),
            f"layers.{i}.attention.wv.weight": layers["wv"][i].reshape(config.embed_dim, -1).T,
            f"layers.{i}.attention.wo.weight": layers["wo"][i].reshape(-1, config.embed_dim).T,
            f"layers.{i}.feed_forward.w1.weight": layers["w_gate"][i].T,
            f"layers.{i}.feed_forward.w2.weight": layers["w_down"][i].T,
            f"layers.{i}.feed_forward.w3.weight": layers["w_up"][i].T,
            f"layers.{i}.attention_norm.weight": layers["attn_norm"][i],
            f"layers.{i}.ffn_norm.weight": layers["mlp_norm"][i],
        }
    state["output.weight"] = params["embed"] if config.tie_embeddings else params["lm_head"].T
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}


def cut(state, count, style, num_kv_heads):
    """What each of ``count`` ranks of Meta's model-parallel code holds; ``style`` is 2 or 3, the Llama."""
    shards = [{} for _ in range(count)]
    for name, tensor in state.items():
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            parts = [tensor] * count
        elif kind in ("wk", "wv") and num_kv_heads < count:
            heads = tensor.chunk(num_kv_heads)
            parts = [heads[rank * num_kv_heads // count] for rank in range(count)]
        elif kind in ("wo", "w2") or (kind == "tok_embeddings" and style == 2):
            parts = tensor.chunk(count, 1)
        else:
            parts = tensor.chunk(count, 0)
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    for shard in shards:
        shard["rope.freqs"] = torch.ones(state["norm.weight"].shape[0] // 2)
    return shards


def params_json(config, **others):
    return {
        "dim": config.embed_dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_kv_heads,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
    } | others


def save_folder(folder, shards, params):
    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def metas_folder(folder, config, count=1, style=3, dtype="float32", seed=0, **others):
    state = metas_matrices(config, random_params(config, seed))
    state = {name: tensor.to(DTYPES[dtype]) for name, tensor in state.items()}
    return save_folder(folder, cut(state, count, style, config.num_kv_heads), params_json(config, **others))
