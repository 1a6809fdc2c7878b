"""What the writers write is read back unchanged by jllama and by the formats' own libraries."""

import ast
import dataclasses
import functools
import itertools
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import reference_writers
from helpers import assert_same_bits, slow_but
from hypothesis import given
from hypothesis import strategies as st
from models import written_variant
from reference_writers import FORMAT_WRITERS, meta_shards, meta_tensors

import jllama
from jllama.core.config import LlamaConfig
from jllama.lab.checks import TOLERANCE, random_params, relative_error
from jllama.lab.conformance import VARIANTS, compiled_jllama, file_error
from jllama.models import oracle
from jllama.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling

BASE = LlamaConfig(
    vocab_size=96,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=160,
    max_seq_len=4096,
)


def changed(**fields):
    return dataclasses.replace(BASE, **fields)


SCALED = {"native", "hf v4", "hf v5"}
PLAIN = SCALED | {"meta x1", "meta x4", "gguf"}
LLAMA3 = Llama3Scaling(32.0)
YARN = YarnScaling(8.0, original_max_seq_len=512)
KNOBS = dataclasses.replace(YARN, beta_fast=24.0, attention_factor=1.1)
FAR = DynamicScaling(4.0, original_max_seq_len=1024)
HELD = {
    "grouped": (BASE, PLAIN | {"llama2c"}),
    "multi-head": (changed(num_kv_heads=4, norm_eps=1e-6, mlp_dim=512), PLAIN),
    "multi-query": (changed(num_kv_heads=1, num_layers=1), PLAIN | {"llama2c"}),
    "tied": (changed(tie_embeddings=True), PLAIN | {"llama2c"}),
    "tied, no scaling": (
        changed(tie_embeddings=True, rope_theta=500_000.0, mlp_dim=1024),
        PLAIN,
    ),
    "head_dim": (changed(head_dim=64, rope_theta=50_000.0), SCALED | {"gguf"}),
    "llama3": (
        changed(rope_theta=500_000.0, rope_scaling=LLAMA3, max_seq_len=131_072),
        PLAIN,
    ),
    "llama3, other bounds": (
        changed(rope_scaling=Llama3Scaling(8.0, 1.0, 8.0, 1024), tie_embeddings=True),
        SCALED,
    ),
    "linear": (changed(rope_scaling=LinearScaling(4.0)), SCALED | {"gguf"}),
    "dynamic": (
        changed(rope_scaling=dataclasses.replace(FAR, original_max_seq_len=64), max_seq_len=64),
        SCALED,
    ),
    "dynamic, two lengths": (changed(rope_scaling=FAR), {"native"}),
    "yarn": (changed(rope_scaling=YARN), SCALED | {"gguf"}),
    "yarn, every knob": (changed(rope_scaling=KNOBS), SCALED),
    "three heads": (
        changed(embed_dim=96, num_heads=3, num_kv_heads=3),
        PLAIN - {"meta x4"} | {"llama2c"},
    ),
}
"""Configurations, and the routes that hold each."""
CONFIGS = {name: config for name, (config, _) in HELD.items()}
CELLS = [(name, writer) for name in CONFIGS for writer in FORMAT_WRITERS if writer in HELD[name][1]]
QUICK = {"multi-query", "tied", "llama3", "yarn, every knob", "dynamic, two lengths", "three heads"}


def written(path, name, writer, seed=0):
    """The parameters, once a writer has written them."""
    params = random_params(CONFIGS[name], seed)
    FORMAT_WRITERS[writer].write(path, CONFIGS[name], params)
    return params


def test_each_route_says_what_it_holds():
    for name, (config, routes) in HELD.items():
        held = {route for route, writer in FORMAT_WRITERS.items() if writer.holds(config)}
        assert held == routes, name


@pytest.mark.parametrize(
    ("name", "writer"), slow_but([cell for cell in CELLS if cell[0] in QUICK], CELLS)
)
def test_jllama_reads_the_same_config_and_the_same_bits(tmp_path, monkeypatch, name, writer):
    with monkeypatch.context() as patch:
        for library in ("torch", "transformers"):
            patch.setitem(sys.modules, library, None)  # writing needs neither
        params = written(tmp_path / "model", name, writer)
    config = CONFIGS[name]
    is_meta = writer.startswith("meta")
    factor = config.rope_scaling.factor if config.rope_scaling and is_meta else None
    model = jllama.load(tmp_path / "model", layout="training", rope_factor=factor)
    if is_meta:  # its files do not say how long
        config = dataclasses.replace(config, max_seq_len=model.config.max_seq_len)
    assert model.config == config
    assert_same_bits(model.params, params)


def load_meta(config, path, layout):
    """Meta's files state neither the factor of RoPE's scaling nor the context length."""
    factor = config.rope_scaling.factor if config.rope_scaling else None
    model = jllama.load(path, layout=layout, rope_factor=factor)
    known = dataclasses.replace(model.config, max_seq_len=config.max_seq_len)
    return dataclasses.replace(model, config=known)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if not VARIANTS[name].num_experts])
def test_every_variant_is_read_from_every_format(name, tmp_path):
    """Those with experts are read as transformers writes them: ``tests/models/test_experts.py``."""
    config = VARIANTS[name]
    errors = {}
    for column, writer in FORMAT_WRITERS.items():
        implementation = compiled_jllama()
        if column.startswith("meta"):
            load = functools.partial(load_meta, config)
            implementation = implementation._replace(load=load)
        if writer.holds(config):
            path = written_variant(tmp_path, name, column)
            errors[column] = file_error(implementation, path, config)
    assert len(errors) >= 3
    assert max(errors.values()) < TOLERANCE, errors


def test_they_share_nothing_with_the_readers():
    tree = ast.parse(Path(reference_writers.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    assert {ast.unparse(node) for node in imports if "jllama" in ast.unparse(node)} == {
        "from jllama.models import oracle",
        "from jllama.core.config import LlamaConfig",
        "from jllama.models.rope_scaling import Llama3Scaling, YarnScaling",
        "from jllama.core.parameters import Params",
    }


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_interleaved_rows_are_pairs_of_one_head(heads, half, embed):
    matrix = np.arange(heads * 2 * half * embed).reshape(-1, embed)
    rows = reference_writers.interleave(matrix, heads)
    for head in range(heads):
        for i in range(half):
            first = 2 * half * head
            np.testing.assert_array_equal(rows[first + 2 * i], matrix[first + i])
            np.testing.assert_array_equal(rows[first + 2 * i + 1], matrix[first + i + half])


# Meta's, by torch and by Meta's arithmetic


@pytest.mark.parametrize("name", ["multi-query", "llama3"])
def test_torch_loads_the_shards(tmp_path, name):
    import torch

    config = CONFIGS[name]
    params = written(tmp_path / "model", name, "meta x4")
    has_frequencies = config.rope_theta == 10_000
    expected = meta_shards(
        meta_tensors(config, params), 4, config.num_kv_heads, int(has_frequencies)
    )
    for (rank, shard), mmap in itertools.product(enumerate(expected), (False, True)):
        file = tmp_path / "model" / f"consolidated.{rank:02}.pth"
        found = torch.load(file, weights_only=True, mmap=mmap)
        frequencies = found.pop("rope.freqs", torch.empty(0))
        assert frequencies.shape == (16 if has_frequencies else 0,)
        assert found.keys() == shard.keys()
        for key, tensor in found.items():
            assert tensor.dtype == torch.float32
            assert tensor.is_contiguous()
            assert not mmap or tensor.data_ptr() % 64 == 0
            np.testing.assert_array_equal(tensor.numpy(), shard[key])


def metas_logits(folder, tokens, frequencies):
    """Meta's forward pass in float64: the part of each rank, summed where its ranks sum theirs."""
    import torch

    files = sorted(folder.glob("consolidated.*.pth"))
    ranks = [
        {name: part.numpy().astype(np.float64) for name, part in torch.load(file).items()}
        for file in files
    ]
    fields = json.loads((folder / "params.json").read_text())
    head_dim = fields["dim"] // fields["n_heads"]
    turns = np.exp(1j * np.outer(np.arange(len(tokens)), frequencies))[:, None]

    def norm(x, name):
        return oracle.rms_norm(x, ranks[0][f"{name}.weight"], fields["norm_eps"])

    def rotated(x):
        # Neighboring channels are one number.
        return (np.ascontiguousarray(x).view(np.complex128) * turns).view(np.float64)

    def attention(rank, x, layer):
        weights = [
            rank[f"layers.{layer}.attention.{name}.weight"] for name in ("wq", "wk", "wv", "wo")
        ]
        query, key, value = ((x @ weight.T).reshape(len(x), -1, head_dim) for weight in weights[:3])
        heads = [part.swapaxes(0, 1) for part in (rotated(query), rotated(key), value)]
        mixed = oracle.attention(*heads, np.tri(len(x), dtype=bool))
        return mixed.swapaxes(0, 1).reshape(len(x), -1) @ weights[3].T

    def feed_forward(rank, x, layer):
        w1, w2, w3 = (
            rank[f"layers.{layer}.feed_forward.{name}.weight"] for name in ("w1", "w2", "w3")
        )
        return oracle.swiglu(x, w1.T, w3.T, w2.T)

    embeds = [rank["tok_embeddings.weight"] for rank in ranks]
    x = np.concatenate(embeds, 1 if "rope.freqs" in ranks[0] else 0)[tokens]
    for layer in range(fields["n_layers"]):
        x = x + sum(
            attention(rank, norm(x, f"layers.{layer}.attention_norm"), layer) for rank in ranks
        )
        x = x + sum(
            feed_forward(rank, norm(x, f"layers.{layer}.ffn_norm"), layer) for rank in ranks
        )
    return np.concatenate([norm(x, "norm") @ rank["output.weight"].T for rank in ranks], -1)


@pytest.mark.parametrize(
    ("name", "writer"),
    slow_but(
        [("multi-query", "meta x4"), ("tied", "meta x1"), ("llama3", "meta x4")],
        [cell for cell in CELLS if cell[1].startswith("meta")],
    ),
)
def test_metas_arithmetic_gives_the_oracles_logits(tmp_path, name, writer):
    config = CONFIGS[name]
    params = written(tmp_path / "model", name, writer)
    tokens = np.random.default_rng(0).integers(0, 96, 128)
    logits = metas_logits(tmp_path / "model", tokens, oracle.rope_frequencies(config))
    assert relative_error(logits, oracle.forward(params, tokens[None], config)[0]) < 1e-9


def test_params_json_is_as_released():
    """By Llama 1's and 2's fields a model is one of theirs; what says nothing new is left out."""
    plain = reference_writers.meta_params(CONFIGS["multi-head"])
    assert plain.keys() == {"dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "norm_eps"}
    scaled = reference_writers.meta_params(CONFIGS["llama3"])
    assert scaled.keys() - plain.keys() == {
        "n_kv_heads",
        "rope_theta",
        "use_scaled_rope",
        "ffn_dim_multiplier",
    }


@given(st.integers(1, 600), st.integers(1, 2000))
def test_metas_rule_gives_the_width_of_the_mlp(half_dim, mlp_dim):
    fields = reference_writers.meta_params(
        LlamaConfig(vocab_size=1, embed_dim=2 * half_dim, num_heads=1, mlp_dim=mlp_dim)
    )
    hidden_dim = int(2 * (4 * fields["dim"]) / 3)
    hidden_dim = int(fields.get("ffn_dim_multiplier", 1) * hidden_dim)
    assert fields["multiple_of"] * -(-hidden_dim // fields["multiple_of"]) == mlp_dim


# Hugging Face's, by safetensors and transformers


@pytest.mark.parametrize("name", ["multi-head", "tied"])
def test_safetensors_loads_one_file_or_two(tmp_path, name):
    import safetensors.numpy as safetensors

    for version in (4, 5):
        written(tmp_path / str(version), name, f"hf v{version}")
    whole = safetensors.load_file(tmp_path / "4" / "model.safetensors")
    places = json.loads((tmp_path / "5" / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: safetensors.load_file(tmp_path / "5" / file) for file in set(places.values())}
    assert len(shards) == 2
    assert places.keys() == whole.keys()
    assert sum(len(shard) for shard in shards.values()) == len(whole)
    for key, tensor in whole.items():
        np.testing.assert_array_equal(tensor, shards[places[key]][key])
    assert ("lm_head.weight" in whole) == (name == "multi-head")


def test_each_version_spells_rope_its_own_way(tmp_path):
    for version in (4, 5):
        written(tmp_path / str(version), "llama3", f"hf v{version}")
    old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("4", "5"))
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    theta = {"rope_theta": 500_000.0}
    assert old.pop("torch_dtype") == new.pop("dtype") == "float32"
    assert new.pop("rope_parameters") == rope | theta
    assert old == new | theta | {"rope_scaling": rope}


@pytest.mark.parametrize(
    ("name", "writer"),
    slow_but(
        [
            ("tied", "hf v4"),
            ("head_dim", "hf v5"),
            ("llama3", "hf v4"),
            ("linear", "hf v5"),
            ("dynamic", "hf v4"),
            ("yarn, every knob", "hf v5"),
        ],
        [cell for cell in CELLS if cell[1].startswith("hf")],
    ),
)
def test_transformers_gives_the_oracles_logits(tmp_path, name, writer):
    import torch
    import transformers

    config = CONFIGS[name]
    params = written(tmp_path / "model", name, writer)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(loading.values())
    tokens = np.random.default_rng(0).integers(0, 96, (1, 128))
    # Far apart, so that slow frequencies count, but not so far that errors of float32 angles do;
    # dynamic scaling counts tokens.
    positions = (1 if name == "dynamic" else 16) * np.arange(128)[None]
    with torch.no_grad():
        logits = model(torch.tensor(tokens), position_ids=torch.tensor(positions)).logits.numpy()
    assert relative_error(logits, oracle.forward(params, tokens, config, positions)) < 1e-5


# GGUF's, by the gguf package and transformers


@pytest.mark.parametrize("name", ["tied", "llama3", "linear", "yarn"])
def test_the_gguf_package_finds_each_key_and_tensor(tmp_path, name):
    from gguf import GGUFReader

    config = CONFIGS[name]
    params = written(tmp_path / "model.gguf", name, "gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    found = {key: field.contents() for key, field in reader.fields.items()}
    assert found["general.architecture"] == "llama"
    for key, value in reference_writers.gguf_metadata(config).items():
        assert found[key] == (np.float32(value) if isinstance(value, float) else value)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    num_more = (not config.tie_embeddings) + (name == "llama3")
    assert len(tensors) == 2 + 9 * config.num_layers + num_more
    np.testing.assert_array_equal(tensors["blk.1.ffn_down.weight"], params["layers"]["w_down"][1].T)
    if name == "llama3":
        plain = oracle.rope_frequencies(changed(rope_theta=500_000.0))
        divisors = np.float32(plain / oracle.rope_frequencies(config))
        np.testing.assert_array_equal(tensors["rope_freqs.weight"], divisors)
        assert tensors["rope_freqs.weight"].max() == 32


@pytest.mark.parametrize("name", ["grouped", "head_dim"])
def test_transformers_reads_gguf_too(tmp_path, name):
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "model.gguf"
    params = written(path, name, "gguf")
    config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    model = transformers.LlamaForCausalLM(config)
    content = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    model.load_state_dict(content["tensors"])
    tokens = np.random.default_rng(0).integers(0, 96, (1, 128))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    assert relative_error(logits, oracle.forward(params, tokens, CONFIGS[name])) < 1e-5


def test_no_route_gives_the_logits_of_another_order_of_channels(tmp_path, monkeypatch):
    """The matrix's comparison shows if a writer (or a reader) leaves out the permutation."""
    monkeypatch.setattr(reference_writers, "interleave", lambda matrix, heads: matrix)
    tokens = np.random.default_rng(0).integers(0, 96, (1, 64))
    for writer in ("meta x1", "meta x4", "gguf", "llama2c"):
        params = written(tmp_path / writer, "grouped", writer)
        logits = jllama.load(tmp_path / writer)(jnp.asarray(tokens))
        assert relative_error(logits, oracle.forward(params, tokens, BASE)) > 1e-3
