"""Presets: counts and feed-forward widths are exact, and other fields are as released."""

import collections
import dataclasses
import functools
import math
import re

import jax
import pytest
import torch
import transformers
from helpers import slow_but
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jllama.core import UsageError
from jllama.core.config import llama_mlp_dim
from jllama.core.model import abstract_params
from jllama.core.parameters import count_parameters, parameter_table
from jllama.formats.huggingface import config_to_huggingface
from jllama.models.presets import PRESETS, preset
from jllama.models.rope_scaling import Llama3Scaling, YarnScaling
from jllama.parallel.sharding import state_sharding
from jllama.parallel.shards import AXES
from jllama.training.config import OptimizerConfig
from jllama.training.optimizer import make_optimizer

COUNTS = {
    "llama1-7b": 6_738_415_616,
    "llama1-13b": 13_015_864_320,
    "llama1-33b": 32_528_943_616,
    "llama1-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "codellama-13b": 13_015_864_320
    + 2 * 16 * 5120,  # Llama 2's and 16 tokens more, in the embedding and the head
    "codellama-34b": 33_743_970_304,
    "codellama-70b": 68_976_648_192 + 2 * 16 * 8192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "openllama-3b": 3_426_473_600,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "ministral-8b": 8_019_808_256,
    "mistral-small-24b": 23_572_403_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm3-3b": 3_075_098_624,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "llama4-scout": 107_769_861_120,
    "llama4-maverick": 400_711_848_960,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "stories-260k": 260_032,
    "stories-15m": 15_191_712,
    "stories-42m": 41_689_600,
    "stories-110m": 109_529_856,
}
LARGE = {"multiple_of": 4096, "multiplier": 1.3}
# What Meta's params.json and llama2.c give to the rule, by how names begin; 216 is what OpenLLaMA
# 3B's width comes from.
RULES = {
    "llama1-": {},
    "llama2-70b": LARGE,
    "llama2-": {},
    "codellama-70b": LARGE,
    "codellama-": {},
    "llama3-8b": {"multiple_of": 1024, "multiplier": 1.3},
    "llama3.1-8b": {"multiple_of": 1024, "multiplier": 1.3},
    "llama3.1-405b": {"multiple_of": 4096, "multiplier": 1.2},
    "llama3.2-1b": {"multiple_of": 256, "multiplier": 1.5},
    "llama3.2-3b": {"multiple_of": 256, "multiplier": 1.0},
    "llama3": LARGE,
    "openllama-": {"multiple_of": 216},
    "tinyllama-": {},
    "stories-260k": {"multiple_of": 4},
    "stories-": {"multiple_of": 32},
}


def test_every_preset_has_its_count():
    assert COUNTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_are_exact(name):
    assert count_parameters(preset(name)) == COUNTS[name]


def test_mlp_widths_follow_the_rule():
    for name, config in PRESETS.items():
        rules = [rule for prefix, rule in RULES.items() if name.startswith(prefix)]
        if rules:
            assert config.mlp_dim == llama_mlp_dim(config.embed_dim, **rules[0]), name


def test_heads_are_as_wide_as_the_residual_stream():
    others = ("mistral-nemo-12b", "mistral-small-24b", "qwen3-0.6b", "qwen3-4b", "qwen3-32b")
    others += ("qwen3-30b-a3b", "qwen3-235b-a22b")
    for name, config in PRESETS.items():
        is_as_wide = config.num_heads * config.head_dim == config.embed_dim
        assert is_as_wide == (name not in others), name


@pytest.mark.parametrize(
    ("prefix", "max_seq_len", "theta", "eps", "factor", "tied"),
    [
        ("llama1-7b", 2048, 10_000, 1e-6, None, False),
        ("llama1-65b", 2048, 10_000, 1e-5, None, False),
        ("llama2-", 4096, 10_000, 1e-5, None, False),
        ("codellama-", 16_384, 1_000_000, 1e-5, None, False),
        ("llama3-", 8192, 500_000, 1e-5, None, False),
        ("llama3.1-", 131_072, 500_000, 1e-5, 8, False),
        ("llama3.2-", 131_072, 500_000, 1e-5, 32, True),
        ("llama3.3-", 131_072, 500_000, 1e-5, 8, False),
        ("openllama-", 2048, 10_000, 1e-6, None, False),
        ("tinyllama-", 2048, 10_000, 1e-5, None, False),
        ("smollm2-135m", 8192, 100_000, 1e-5, None, True),
        ("smollm2-1.7b", 8192, 130_000, 1e-5, None, True),
        ("stories-15m", 256, 10_000, 1e-5, None, True),
        ("mistral-7b-v0.1", 32_768, 10_000, 1e-5, None, False),
        ("mistral-7b-v0.3", 32_768, 1_000_000, 1e-5, None, False),
        ("mistral-nemo", 1_024_000, 1_000_000, 1e-5, None, False),
        ("mistral-small", 32_768, 100_000_000, 1e-5, None, False),
        ("ministral-8b", 32_768, 100_000_000, 1e-5, None, False),
        ("qwen2.5-0.5b", 32_768, 1_000_000, 1e-6, None, True),
        ("qwen2.5-7b", 32_768, 1_000_000, 1e-6, None, False),
        ("qwen3-4b", 40_960, 1_000_000, 1e-6, None, True),
        ("qwen3-8b", 40_960, 1_000_000, 1e-6, None, False),
        ("smollm3", 65_536, 5_000_000, 1e-6, None, True),
        ("olmo2-", 4096, 500_000, 1e-6, None, False),
        ("phi-3", 4096, 10_000, 1e-5, None, False),
        ("phi-4", 16_384, 250_000, 1e-5, None, False),
        ("granite-3.3", 131_072, 10_000_000, 1e-5, None, True),
    ],
)
def test_what_the_counts_do_not_show(prefix, max_seq_len, theta, eps, factor, tied):
    configs = [config for name, config in PRESETS.items() if name.startswith(prefix)]
    assert configs
    for config in configs:
        assert (config.max_seq_len, config.rope_theta, config.norm_eps) == (max_seq_len, theta, eps)
        assert config.rope_scaling == (Llama3Scaling(factor, 1.0, 4.0, 8192) if factor else None)
        assert config.tie_embeddings == tied


def test_options_are_those_of_the_families():
    every_fourth = (3, 7, 11, 15, 19, 23, 27, 31)
    olmo3 = preset("olmo3-7b")
    assert olmo3.rope_scaling == YarnScaling(8.0, 8192, 32.0, 1.0, 0.1 * math.log(8) + 1)
    expected = {
        "llama3.1-8b": {},
        "mistral-7b-v0.1": {"sliding_window": 4096},
        "mistral-7b-v0.3": {},
        "ministral-8b": {"sliding_window": 32_768},
        "qwen2.5-7b": {"attention_bias": True},
        "qwen3-8b": {"qk_norm": "head"},
        "smollm3-3b": {"no_rope_layers": (*every_fourth, 35)},
        "olmo2-7b": {"qk_norm": "whole", "norm_placement": "after"},
        "olmo3-7b": {
            "qk_norm": "whole",
            "norm_placement": "after",
            "sliding_window": 4096,
            "full_attention_layers": every_fourth,
            "rope_scaling_layers": "full_attention",
        },
        "phi-3-mini-4k": {"sliding_window": 2047},
        "phi-4": {},
        "granite-3.3-8b": {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 1 / 128,
            "logits_scaling": 16.0,
        },
    }
    for name, options in expected.items():
        config = preset(name)
        assert {field: getattr(config, field) for field in config.extensions} == options


@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            *("llama3.2-1b", "mistral-7b-v0.1", "qwen2.5-0.5b", "qwen3-0.6b", "smollm3-3b"),
            *("olmo2-1b", "olmo3-7b", "phi-4", "granite-3.3-2b"),
        ],
        [name for name in PRESETS if not name.startswith("stories")],
    ),
)
def test_transformers_has_as_many_parameters(name):
    """In the class of the model's family, of one layer, made on torch's device without memory."""
    config = dataclasses.replace(
        preset(name), num_layers=1, no_rope_layers=(), full_attention_layers=(), dense_layers=()
    )
    if config.embed_dim % config.num_heads:
        pytest.skip("transformers' Llama needs embed_dim to be a multiple of num_heads")
    fields = config_to_huggingface(config, "float32")
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**fields)
        )
    assert sum(parameter.numel() for parameter in peer.parameters()) == count_parameters(config)


@pytest.mark.parametrize(
    ("name", "nearest"), [("Llama-3.2-1B", "llama3.2-1b"), ("smollm-135m", "smollm2-135m")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    message = f"there is no preset {name}; did you mean {nearest}?"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        preset(name)


def test_a_name_like_no_other_is_refused_with_all_of_them():
    with pytest.raises(
        UsageError, match=r"^there is no preset gpt; there are llama1-7b, .*, stories-110m$"
    ):
        preset("gpt")


MESHES = {8: (2, 2, 1, 1, 2), 64: (4, 4, 1, 1, 4)}  # AXES
HEADS = "heads axis of layers/wq"
VOCAB = "vocab axis of embed"
DO_NOT_DIVIDE = {  # the axis, its size, ways to split it, and the most ways below that divide it
    ("smollm2-135m", 8): (HEADS, 9, 2, 1),
    ("smollm2-135m", 64): (HEADS, 9, 4, 3),
    ("smollm2-360m", 8): (HEADS, 15, 2, 1),
    ("smollm2-360m", 64): (HEADS, 15, 4, 3),
    ("stories-15m", 64): (HEADS, 6, 4, 3),
    ("qwen2.5-0.5b", 64): (HEADS, 14, 4, 2),
    ("phi-4", 64): ("kv_heads axis of layers/wk", 10, 4, 2),
    ("olmo3-7b", 64): (VOCAB, 100_278, 4, 3),
    ("olmo3-32b", 64): (VOCAB, 100_278, 4, 3),
    ("granite-3.3-2b", 8): (VOCAB, 49_159, 2, 1),
    ("granite-3.3-2b", 64): (VOCAB, 49_159, 4, 1),
    ("granite-3.3-8b", 8): (VOCAB, 49_159, 2, 1),
    ("granite-3.3-8b", 64): (VOCAB, 49_159, 4, 1),
}


@functools.cache
def abstract_state(name, optimizer):
    """The shapes of a preset's parameters and of its optimizer's state."""
    config = preset(name)
    params = abstract_params(config)
    chain = make_optimizer(OptimizerConfig(optimizer), 10)
    return params, jax.eval_shape(chain.init, params)


@pytest.mark.parametrize("devices", MESHES)
@pytest.mark.parametrize(
    "name", slow_but(["llama3.1-405b", "smollm2-135m", "olmo2-7b", "phi-4"], PRESETS)
)
def test_every_preset_is_split_over_8_and_64_devices(name, devices):
    """Or the error names the axis. Moments are split as their parameter; what has another shape is
    whole everywhere.
    """
    mesh = AbstractMesh(MESHES[devices], AXES, axis_types=(AxisType.Auto,) * 5)
    config, table = preset(name), parameter_table(preset(name))
    if (name, devices) in DO_NOT_DIVIDE:
        axis, size, ways, nearest = DO_NOT_DIVIDE[name, devices]
        said = f"the {axis} has size {size}, which does not divide {ways} ways"
        with pytest.raises(
            UsageError, match=f"^{said}: the nearest mesh.tensor that does is {nearest}$"
        ):
            state_sharding(mesh, config, abstract_params(config))
        return
    for optimizer in ("adamw", "adafactor", "muon"):
        params, opt_state = state = abstract_state(name, optimizer)
        of_params, of_state = state_sharding(mesh, config, state)
        shards = jax.tree.map(
            lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)), params, of_params
        )
        split_all = (
            sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) / MESHES[devices][1]
        )
        assert sum(jax.tree.leaves(shards)) < 1.01 * split_all  # norms and biases are small
        splits = collections.Counter(sharding.spec for sharding in jax.tree.leaves(of_params))
        same_shape = [leaf.shape for leaf in jax.tree.leaves(params)]
        for leaf, sharding in zip(
            jax.tree.leaves(opt_state), jax.tree.leaves(of_state), strict=True
        ):
            sharding.shard_shape(leaf.shape)  # divides
            assert leaf.shape in same_shape or sharding.spec == PartitionSpec()
        if optimizer == "adamw":
            moments = collections.Counter(sharding.spec for sharding in jax.tree.leaves(of_state))
            assert all(moments[spec] >= 2 * splits[spec] for spec in splits)
            assert len(jax.tree.leaves(opt_state)) == 2 * len(table) + 2
        if optimizer == "muon":
            leaves = zip(jax.tree.leaves(opt_state), jax.tree.leaves(of_state), strict=True)
            held = collections.Counter(of.spec for leaf, of in leaves if leaf.ndim)
            matrices = [
                of.spec
                for name, of in of_params["layers"].items()
                if table[f"layers/{name}"].inputs
            ]
            assert held == splits + splits - collections.Counter(
                matrices
            )  # which have one moment alone
