"""The one table against the model it describes, the counts of published models, and a start at ln
V.
"""

import dataclasses
import functools
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jllama.commands.doctor import summary_table
from jllama.core.config import LlamaConfig
from jllama.core.model import abstract_params, initial_params
from jllama.core.parameters import (
    PARAMETERS,
    count_parameters,
    initial_std,
    map_by_path,
    parameter_table,
    shape_of,
)
from jllama.models.build import build_model
from jllama.models.presets import preset
from jllama.training.metrics import training_flops_per_token

LLAMA_32_1B = preset("llama3.2-1b")
SMALL = LlamaConfig(
    vocab_size=512,
    num_layers=3,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    mlp_dim=320,
)  # head_dim is not embed_dim / num_heads
both = pytest.mark.parametrize("tie_embeddings", [False, True], ids=["separate", "tied"])
initialized = jax.jit(initial_params, static_argnums=1)


sizes = st.integers(1, 5)
configs = st.builds(
    lambda kv_heads, group, half, **rest: LlamaConfig(
        num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=2 * half, **rest
    ),
    kv_heads=sizes,
    group=sizes,
    half=sizes,
    vocab_size=st.integers(1, 50),
    num_layers=sizes,
    embed_dim=st.integers(1, 40),
    mlp_dim=st.integers(1, 40),
    tie_embeddings=st.booleans(),
)


def by_path(tree):
    """``{path: leaf}``, not by way of ``map_by_path``."""
    return {
        "/".join(str(key.key) for key in keys): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


@given(config=configs)
def test_the_table_is_the_model(config):
    table = parameter_table(config)
    drawn = jax.eval_shape(functools.partial(initial_params, config=config), jax.random.key(0))
    assert abstract_params(config) == drawn
    leaves = by_path(drawn)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        path: shape_of(row, config) for path, row in table.items()
    }
    assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype("float32")}
    assert count_parameters(config) == sum(math.prod(leaf.shape) for leaf in leaves.values())
    assert ("lm_head" in table) != config.tie_embeddings


def test_only_norm_scales_are_no_matrices():
    not_matrices = {path for path, row in parameter_table(SMALL).items() if row.role != "matrix"}
    assert not_matrices == {"layers/attn_norm", "layers/mlp_norm", "final_norm"}


# Each of the tests below takes the same draws; a tied embedding is drawn as any other.
@pytest.fixture(scope="module")
def draws():
    """By the default generator, and as NumPy arrays by their paths."""
    return jax.device_get(by_path(initialized(jax.random.key(0), SMALL)))


def test_initial_values_of_every_leaf(draws):
    embed = 1 / math.sqrt(256)
    residual = 1 / math.sqrt(2 * 3)
    expected = dict.fromkeys(("wq", "wk", "wv", "w_gate", "w_up"), embed)
    expected |= {"embed": 1.0, "lm_head": 0.25 * embed}
    expected |= {"wo": residual / math.sqrt(4 * 48), "w_down": residual / math.sqrt(320)}
    for path, row in parameter_table(SMALL).items():
        values, std = np.float64(draws[path]), expected.get(path.rpartition("/")[2])
        if row.role != "matrix":
            np.testing.assert_array_equal(values, 1.0)
            continue
        assert initial_std(row, SMALL) == pytest.approx(std, rel=1e-12)
        # Each layer by itself, so that a wrong one cannot hide among the others.
        for layer in values if path.startswith("layers/") else values[None]:
            assert layer.std() == pytest.approx(std, rel=0.03)
            assert abs(layer.mean()) < 4 * std / math.sqrt(layer.size)
            kurtosis = np.mean((layer / layer.std()) ** 4)
            assert kurtosis == pytest.approx(3, abs=0.25)  # normal; a uniform draw has 1.8
    tied = dataclasses.replace(SMALL, tie_embeddings=True)
    assert initial_std(PARAMETERS["embed"], tied) == pytest.approx(0.25 * embed, rel=1e-12)
    multiplied = dataclasses.replace(SMALL, embedding_multiplier=4.0)
    assert initial_std(PARAMETERS["embed"], multiplied) == 0.25


def test_no_two_matrices_and_no_two_layers_share_their_draws(draws):
    standard = []
    for path, leaf in draws.items():
        if parameter_table(SMALL)[path].role == "matrix":
            num_layers = SMALL.num_layers if path.startswith("layers/") else 1
            rows = leaf.reshape(num_layers, -1)[:, :2000]
            standard += list(rows / rows.std())
    correlations = np.corrcoef(standard) - np.eye(len(standard))
    assert len(standard) == 2 + 7 * SMALL.num_layers
    assert np.abs(correlations).max() < 6 / math.sqrt(2000)


def test_another_key_draws_other_values_and_the_same_key_the_same(draws):
    same, other = (by_path(initialized(jax.random.key(seed), SMALL)) for seed in (0, 1))
    for path, row in parameter_table(SMALL).items():
        np.testing.assert_array_equal(draws[path], same[path])
        assert np.any(draws[path] != other[path]) == (row.role == "matrix")


@both
def test_first_loss_is_ln_v(tie_embeddings):
    config = dataclasses.replace(SMALL, tie_embeddings=tie_embeddings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 129))

    @jax.jit
    def mean_loss(tokens):
        # This generator compiles in a third of the time.
        llama = build_model(config, initial_params(jax.random.key(0, impl="rbg"), config))
        hidden = llama.hidden(tokens[:, :-1])
        total, count = llama.loss(hidden, tokens[:, 1:], jnp.ones((4, 128), bool))
        return total / count

    assert float(mean_loss(tokens)) == pytest.approx(math.log(config.vocab_size), abs=0.1)


def test_flops_of_a_hand_computed_example():
    config = LlamaConfig(
        vocab_size=100,
        num_layers=2,
        embed_dim=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        mlp_dim=10,
    )
    # wq 8*24, wk and wv 8*12 each, wo 24*8, three MLP matrices of 8*10, the head 8*100; norms and
    # the embedding no.
    matrices = 2 * (192 + 96 + 96 + 192 + 3 * 80) + 800
    assert matrices == 2432
    # Scores and mixing, 2*24 each a key in the forward pass; three times that with the backward
    # pass; 2 layers.
    attention = 3 * 2 * (2 * 24 + 2 * 24) * 16
    assert training_flops_per_token(config, 16) == 6 * matrices + attention == 23_808
    tied = dataclasses.replace(config, tie_embeddings=True)
    assert training_flops_per_token(tied, 16) == 23_808
    # In one of two layers a query has at most 5 keys; in a window of 99, all 16.
    window = dataclasses.replace(config, sliding_window=5, full_attention_layers=(1,))
    assert training_flops_per_token(window, 16) == 23_808 - attention * 11 / 32
    wide = dataclasses.replace(config, sliding_window=99, attention_bias=True, qk_norm="whole")
    assert training_flops_per_token(wide, 16) == 23_808


@both
def test_summary_prints_every_parameter_and_the_totals(tie_embeddings):
    config = dataclasses.replace(LLAMA_32_1B, tie_embeddings=tie_embeddings, max_seq_len=1024)
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(config))
    text = console.file.getvalue()
    for path, row in parameter_table(config).items():
        shape = shape_of(row, config)
        cells = [path, " ".join(row.axes), " x ".join(map(str, shape)), f"{math.prod(shape):,}"]
        assert cells in [
            [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()
        ]
    total, size = (
        ("1,235,814,400", "4,714.3 MiB") if tie_embeddings else ("1,498,482,688", "5,716.3 MiB")
    )
    footer = text.splitlines()[-2]
    assert "total" in footer
    assert total in footer
    assert size in footer
    # 6 * 1,235,748,864 matrix parameters + 12 * 16 layers * 2048 * 1024
    assert "7.82e+09 FLOPs per training token" in footer


def test_map_by_path_gives_each_leaf_its_path():
    params = abstract_params(SMALL)
    assert map_by_path(lambda path, leaf: path, params) == jax.tree_util.tree_map_with_path(
        lambda keys, leaf: "/".join(key.key for key in keys), params
    )
    assert by_path(map_by_path(lambda path, leaf: leaf, params)) == by_path(params)
