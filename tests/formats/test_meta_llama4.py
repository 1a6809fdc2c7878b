"""Meta's own files of Llama 4, written as the hooks of its code read them."""

import dataclasses
import io
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiktoken
import torch
from helpers import assert_same_bits
from helpers_meta import save_folder

import jllama
from jllama.core import JllamaError
from jllama.formats import meta
from jllama.formats.llama4 import META_DEFAULTS, META_SCALING
from jllama.formats.registry import open_checkpoint
from jllama.lab.checks import random_params
from jllama.models.rope_scaling import Llama3Scaling
from jllama.tokenizers.gguf import from_gguf, to_gguf
from jllama.tokenizers.loading import as_huggingface
from jllama.tokenizers.tiktoken import PATTERNS, TiktokenTokenizer, write_ranks

CONFIG = jllama.LlamaConfig(
    vocab_size=48,
    num_layers=4,
    embed_dim=32,
    num_heads=8,
    num_kv_heads=2,
    mlp_dim=64,
    max_seq_len=64,
    rope_theta=500_000.0,
    rope_scaling=Llama3Scaling(16.0, 1.0, 1.0, 8192),
    num_experts=3,
    experts_per_token=1,
    expert_dim=24,
    router="sigmoid",
    shared_expert=True,
    dense_layers=(0, 2),
    qk_norm="rotated",
    no_rope_layers=(3,),
    attention_chunk=16,
    temperature_step=8192,
)
PARAMS = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 2,
    "vocab_size": 48,
    "multiple_of": 32,
    "ffn_dim_multiplier": 0.7,
    "ffn_exp": 4.0,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
    "attention_chunk_size": 16,
    "nope_layer_interval": 4,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 8192.0,
    "attn_scale": 0.1,
    "vision_args": {"dim": 8},
    "moe_args": {"num_experts": 3, "capacity_factor": 1.0, "interleave_moe_layer_step": 2},
}


def interleaved(matrix, head_dim):
    """``[inputs, heads * head_dim]`` to ``[outputs, inputs]`` with pairs of rotary channels."""
    heads = matrix.T.reshape(-1, 2, head_dim // 2, len(matrix))
    return heads.swapaxes(1, 2).reshape(-1, len(matrix))


def shards_of(params, count):
    """What each of ``count`` ranks has, by Meta's names before the hooks of its modules."""
    layers = params["layers"]
    shards = [{} for _ in range(count)]

    def put(name, parts):
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = torch.from_numpy(np.ascontiguousarray(part, np.float32))

    def cut(array, axis):
        return np.split(array, count, axis)

    put("tok_embeddings.weight", cut(params["embed"], 0))
    put("output.weight", cut(params["lm_head"].T, 0))
    put("norm.weight", [params["final_norm"]] * count)
    put("vision_embeddings.vision_encoder.class_embedding", [np.ones(8)] * count)
    for layer in range(4):
        stem = f"layers.{layer}."
        flat = {name: layers[name][layer].reshape(32, -1) for name in ("wq", "wk", "wv")}
        heads = [cut(interleaved(flat[name], 4), 0) for name in ("wq", "wk")]
        heads.append(cut(flat["wv"].T, 0))
        put(stem + "attention.wqkv.weight", map(np.concatenate, zip(*heads, strict=True)))
        put(stem + "attention.wqkv.layer_norm_weight", [layers["attn_norm"][layer]] * count)
        put(stem + "attention.wo.weight", cut(layers["wo"][layer].reshape(-1, 32).T, 1))
        stem += "feed_forward."
        place = layer // 2
        if layer in CONFIG.dense_layers:
            gates = (cut(layers[name][place].T, 0) for name in ("w_gate", "w_up"))
            put(stem + "mlp.fc1_weight", map(np.concatenate, zip(*gates, strict=True)))
            put(stem + "mlp.fc2_weight", cut(layers["w_down"][place].T, 1))
            put(stem + "mlp.layer_norm_weight", [layers["mlp_norm"][layer]] * count)
            continue
        put(stem + "norm.weight", [layers["mlp_norm"][layer]] * count)
        put(stem + "router_DE", [layers["router"][place]] * count)
        put(stem + "global_gate_stats_3E", [np.zeros((3, 3))] * count)
        for name, own in (("shared_gate", "w_in_shared_FD"), ("shared_up", "w_swiglu_FD")):
            put(f"{stem}{own}.weight", cut(layers[name][place].T, 0))
        put(stem + "w_out_shared_DF.weight", cut(layers["shared_down"][place].T, 1))
        for name, own in (("experts_gate", "moe_w_in_eD_F"), ("experts_up", "moe_w_swiglu_eD_F")):
            parts = cut(layers[name][place].swapaxes(1, 2), 2)
            put(f"{stem}experts.{own}", [part.reshape(3 * 32, -1) for part in parts])
        parts = cut(layers["experts_down"][place].swapaxes(1, 2), 1)
        put(stem + "experts.moe_w_out_eF_D", [part.reshape(-1, 32) for part in parts])
    for shard in shards:
        shard["layers.0.attention.wo._extra_state"] = io.BytesIO(b"state")
    return shards


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_of_metas_is_read(count, nested, tmp_path, capsys):
    params = random_params(CONFIG, 0)
    fields = {"model": PARAMS} if nested else PARAMS
    folder = save_folder(tmp_path / "meta", shards_of(params, count), fields)
    model = jllama.load(folder, "float32", layout="training")
    assert model.config == dataclasses.replace(CONFIG, max_seq_len=262_144)
    assert_same_bits(model.params, jax.tree.map(np.float32, params))
    assert "also takes images; its text model alone is read" in capsys.readouterr().err


def test_a_wrong_shard_is_named(tmp_path):
    shards = shards_of(random_params(CONFIG, 0), 2)
    shards[1]["layers.1.feed_forward.router_DE"] = torch.zeros(32, 3)
    folder = save_folder(tmp_path / "meta", shards, PARAMS)
    with pytest.raises(JllamaError, match=r"another layers\.1\.feed_forward\.router\.weight in "):
        open_checkpoint(folder)
    shards[1].pop("layers.1.feed_forward.router_DE")
    shards[0].pop("layers.1.feed_forward.router_DE")
    folder = save_folder(tmp_path / "less", shards, PARAMS)
    with pytest.raises(JllamaError, match=r"layers\.1\.feed_forward\.router\.weight is absent"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_args": 3}, "has moe_args 3; it must be an object"),
        ({"moe_args": {"num_experts": 3, "top_k": 2}}, "experts_per_token must be 1"),
        ({"moe_args": {"num_experts": 3, "moe_layers": [1]}}, "does not have: moe_layers"),
        ({"moe_args": {"num_experts": 5}}, "has a tensor of another shape"),
        ({"n_layers": 10**12}, "num_layers is 1,000,000,000,000; it must be"),
        ({"n_heads": 4}, r"attention\.wq\.weight is \[24, 32\], expected \[32, 32\]"),
        ({"quantization_args": {"scheme": "int4"}}, "does not have: quantization_args"),
        ({"use_qk_norm": 1}, "has use_qk_norm 1; it must be true or false"),
    ],
)
def test_options_that_are_not_these(changes, message, tmp_path):
    folder = save_folder(
        tmp_path / "meta", shards_of(random_params(CONFIG, 0), 1), PARAMS | changes
    )
    with pytest.raises(JllamaError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama4-scout", {"use_scaled_rope": True, "use_qk_norm": True}),
        ("llama4-maverick", {"moe_args": {"num_experts": 128, "interleave_moe_layer_step": 2}}),
    ],
)
def test_meta_s_options_of_released_models_are_their_presets(name, changes):
    """What ``params.json`` leaves out has the defaults of Meta's code: no temperature, for one."""
    preset = jllama.preset(name)
    fields = {
        **{"dim": 5120, "n_layers": 48, "n_heads": 40, "n_kv_heads": 8, "vocab_size": 202_048},
        **{"head_dim": 128, "norm_eps": 1e-5, "attention_chunk_size": 8192},
        **{"nope_layer_interval": 4, "moe_args": {"num_experts": 16}},
        **{"multiple_of": 2048, "ffn_dim_multiplier": 1.2},
    }
    experts = (fields | changes)["moe_args"]
    scaling = META_SCALING if "use_scaled_rope" in changes else {}
    params = META_DEFAULTS | scaling | fields | changes | experts
    options = meta.options_of_meta(params, Path("params.json"))
    read = {key: params[name] for key, (name, _) in meta._FIELDS.items()}
    config = meta._with_sizes(
        jllama.LlamaConfig(**read, **options),
        params,
        Path("params.json"),
        {"consolidated.00.pth": {}},
    )
    scaling = meta._rope_scaling(params, Path("params.json"), None, config)
    config = dataclasses.replace(config, expert_dim=8192, rope_scaling=scaling)
    config = dataclasses.replace(config, max_seq_len=meta._family_max_seq_len(config))
    assert config == dataclasses.replace(preset, temperature_step=0)


def test_the_tokenizer():
    """With 200,000 ranks it has Llama 4's pattern and special tokens."""
    singles = [bytes([byte]) for byte in range(256)]
    letters = [bytes([letter]) for letter in range(97, 123)]
    pairs = [bytes(pair) for pair in itertools.product(range(256), repeat=2)]
    pairs.sort(key=lambda pair: not pair.isalpha())
    longer = [b"".join(part) for part in itertools.product(pairs[:2704], letters[:26])]
    longer += [b"".join(part) for part in itertools.product(pairs[:2704], letters, [b"q"])]
    learned = [*singles, *pairs, *dict.fromkeys(longer)]
    tokens = [*learned[:199_999], b"unmerged"]
    assert len(set(tokens)) == 200_000
    tokenizer = TiktokenTokenizer(write_ranks(tokens))
    assert tokenizer.vocab_size == 202_048
    names = {
        "begin_of_text": 200_000,
        "fim_suffix": 200_004,
        "header_start": 200_005,
        "eot": 200_008,
        "python_start": 200_016,
        "finetune_right_pad": 200_018,
        "text_post_train_reserved_special_token_68": 200_079,
        "image_start": 200_080,
        "image": 200_090,
        "patch": 200_092,
        "vision_reserved_special_token_1047": 201_133,
        "reasoning_thinking_end": 201_143,
        "reserved_special_token_903": 202_047,
    }
    for name, id in names.items():
        assert tokenizer.special_tokens[f"<|{name}|>"] == id
    # As in Meta's reference tokenizer.
    pattern = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert PATTERNS["llama4"] == pattern
    ranks = {token: rank for rank, token in enumerate(tokens)}
    original = tiktoken.Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    text = "CamelCase isn't 12345 words\n\n  über/ Ärger unmerged\nunmerged"
    expected = original.encode(text)
    assert expected[-1] == 199_999
    json_form = as_huggingface(tokenizer)
    gguf_form = from_gguf(to_gguf(json_form, tokenizer.vocab_size), "it")
    for form in (tokenizer, json_form, gguf_form):
        assert form.encode(text) == expected
    assert json.loads(json_form.content)["added_tokens"][0]["id"] == 200_000
    assert to_gguf(tokenizer, tokenizer.vocab_size)["tokenizer.ggml.pre"] == "llama4"
    again = TiktokenTokenizer.from_vocabulary(gguf_form.vocabulary())
    assert again.content == tokenizer.content
