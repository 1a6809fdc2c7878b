"""What a run needs of a machine is reckoned before it is asked for."""

import dataclasses

import jax
import pytest

from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.parameters import count_parameters
from jllama.sharding import MeshConfig, make_mesh
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.opening import check_memory
from jllama.training.step import compile_training

MODEL = LlamaConfig(vocab_size=1000, num_layers=2, embed_dim=64, max_seq_len=128)
CONFIG = TrainConfig(model=MODEL, training=LoopConfig(batch_size=8, seq_len=128))
MESH = make_mesh(MeshConfig(), jax.devices()[:1])
SCALARS = 3 * 4 + 8  # the step, the optimizer's two counts, the key


def check(config, available_bytes=None):
    check_memory(config, compile_training(config, MESH), available_bytes)


def min_bytes(tokens, state_bytes=12):
    """The state of each parameter; gradients, or before them logits; and 2 bytes of each number of
    a layer's input.
    """
    count, logits = count_parameters(MODEL), 4 * tokens * MODEL.vocab_size
    return state_bytes * count + max(4 * count, logits) + 2 * 2 * tokens * 64 + SCALARS


@pytest.mark.parametrize("accumulation", [1, 16])
def test_the_least_that_a_run_takes(accumulation):
    """One byte less is too little; with parts of 128 tokens logits are smaller than gradients."""
    config = dataclasses.replace(
        CONFIG, training=LoopConfig(batch_size=16, seq_len=128, accumulation=accumulation)
    )
    needed = min_bytes(16 * 128 // accumulation)
    check(config, needed)
    with pytest.raises(
        UsageError, match=r"take 0.0 GiB .*, over the 0.0 GiB of one CPU: take a smaller"
    ):
        check(config, needed - 1)
    lion = dataclasses.replace(config, optimizer=OptimizerConfig("lion"))
    check(lion, min_bytes(16 * 128 // accumulation, state_bytes=8))


@pytest.mark.parametrize(
    "absurd",
    [
        {"training": LoopConfig(batch_size=10**8, seq_len=128)},
        {"model": dataclasses.replace(MODEL, vocab_size=10**7, embed_dim=8192)},
        {"model": dataclasses.replace(MODEL, num_layers=1000, mlp_dim=10**5, embed_dim=8192)},
    ],
)
def test_what_no_machine_has(absurd):
    with pytest.raises(UsageError, match=r"[\d,]{4,}\.\d GiB"):
        check(dataclasses.replace(CONFIG, **absurd))
