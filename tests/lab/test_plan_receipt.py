"""A plan for the CPU, whose memory can be counted: what the receipt says is what a step holds."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.data.batches import text_batch
from jllama.lab import plan_receipt as receipt
from jllama.lab.plan_devices import MEASURED
from jllama.parallel.config import MeshConfig
from jllama.system.devices import Accelerator
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.metrics import training_flops_per_token

MODEL = LlamaConfig(200, 2, 64, 2, 1, mlp_dim=96, max_seq_len=64)
CONFIG = TrainConfig(
    MODEL, training=LoopConfig(batch_size=4, seq_len=64, remat="block", attention="reference")
)
CPU = Accelerator("cpu", 2**30, flops=1e12, bandwidth=1e11, links=1e10)


@pytest.fixture(scope="module", autouse=True)
def this_machine():
    """Its CPU stands in for every topology; a number behind the colon is its memory in bytes."""

    def devices(topology):
        memory_bytes = float(topology.partition(":")[2] or 2**30)
        return CPU._replace(memory_bytes=memory_bytes), jax.devices()[:1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receipt, "topology_devices", devices)
        yield


@pytest.fixture(scope="module")
def planned():
    return receipt.plan_training(CONFIG, "cpu")


def test_arguments_are_the_bytes_that_a_step_takes(planned):
    training = compile_training(CONFIG)
    state = training.init(jax.random.key(0))
    batch = text_batch(np.zeros((4, 65), np.int32), bos_id=1)
    leaves = jax.tree.leaves((state._replace(key=jax.random.key_data(state.key)), batch))
    assert planned.arguments_bytes == sum(leaf.nbytes for leaf in leaves)
    assert planned.parameters_bytes == planned.gradients_bytes == 4 * count_parameters(MODEL)
    assert 0 <= planned.moments_bytes - 2 * planned.parameters_bytes < 100


def test_times_are_those_of_the_rates(planned):
    flops = training_flops_per_token(MODEL, 64) * 4 * 64
    assert (planned.flops, planned.tokens, planned.interconnect_s) == (flops, 256, 0)
    head = 2 * MODEL.vocab_size * MODEL.embed_dim * 4 * 64
    # All but the head runs forward twice.
    assert planned.compute_s == pytest.approx((flops * 4 / 3 - head) / 1e12)
    assert planned.memory_s == planned.traffic_bytes / 1e11
    assert planned.traffic_bytes > 2 * planned.arguments_bytes
    assert planned.binds == ("memory" if planned.memory_s > planned.compute_s else "compute")
    steps_per_s = planned.tokens_per_s / planned.tokens
    assert planned.mfu_limit == pytest.approx(planned.flops / 1e12 * steps_per_s)


def test_expected_times_are_those_of_measured_rates(planned):
    """Attention and its second forward pass, products, and all that moves, one after the other."""
    assert planned.expected_s is planned.expected_mfu is None  # such a device was not measured
    on_h100 = dataclasses.replace(planned, device="h100:1", attention="tokamax")
    assert dataclasses.replace(on_h100, attention="").expected_s is None
    attention = 12 * MODEL.num_layers * MODEL.num_heads * MODEL.head_dim * 64 * 4 * 64
    assert planned.attention_flops == pytest.approx(attention)
    others = planned.flops * planned.recomputed - attention * 4 / 3
    forward, both = MEASURED["h100"].attention["tokamax"]
    attention_s = attention / both / 989e12 + attention / 3 / forward / 989e12
    expected_s = attention_s + others / 798e12 + planned.traffic_bytes / 3e12
    assert on_h100.expected_s == pytest.approx(expected_s, rel=1e-3)
    assert dataclasses.replace(on_h100, interconnect_s=1.0).expected_s == 1.0
    on_h100 = dataclasses.replace(on_h100, compute_s=planned.flops * planned.recomputed / 989e12)
    assert on_h100.expected_mfu == pytest.approx(planned.flops / 989e12 / expected_s, rel=1e-3)


def test_json_has_what_the_receipt_has(planned):
    result = json.loads(json.dumps(planned.as_dict()))
    keys = """fits device devices arguments_bytes temporaries_bytes device_memory_bytes compile_s
        attention collectives largest advice mfu_limit activations_bytes"""
    assert {*keys.split()} <= {*result}
    assert result["fits"] is True
    assert result["activations_bytes"] + result["gradients_bytes"] == result["temporaries_bytes"]


def test_what_does_not_fit_says_what_fills_the_memory_and_what_would_help(planned):
    needed_bytes = planned.arguments_bytes + planned.temporaries_bytes
    assert dataclasses.replace(planned, device_memory_bytes=needed_bytes).fits
    assert not dataclasses.replace(planned, device_memory_bytes=needed_bytes - 1).fits
    # What is needed before the first step counts, too.
    assert not dataclasses.replace(planned, starting_bytes=2**31).fits
    small = receipt.plan_training(CONFIG, "cpu:100000")
    assert not small.fits
    assert len(small.largest) == 10
    assert small.largest == sorted(small.largest, reverse=True)
    assert any("feed_forward" in name for _, _, name in small.largest)
    *advice, last = small.advice
    assert advice == [
        "--training.remat offload",
        "--training.accumulation 4, one row of each device at a time",
        "--training.reduce_dtype bfloat16, half of the gradients",
        "--optimizer.moment_dtype bfloat16, half of the moments",
    ]
    assert last.startswith("at least ")
    assert "devices: parameters, moments and gradients alone take" in last


def test_remat_is_the_first_that_fits(planned):
    auto = dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, remat="auto"))
    dots = receipt.plan_training(auto, "cpu")
    assert dots.settings["remat"] == "dots"
    assert dots.temporaries_bytes > planned.temporaries_bytes
    block = receipt.plan_training(auto, f"cpu:{dots.needed_bytes - 1}")
    assert block.settings["remat"] == "block"
    assert block.needed_bytes == planned.needed_bytes


def test_decoding_reads_every_block_of_the_cache():
    """Attention's loop counts as often as it runs: more tokens add at least their cache."""
    model, rows = dataclasses.replace(MODEL, max_seq_len=2048), 4
    few, many = (
        receipt.plan_decoding(model, "cpu", MeshConfig(1), rows, length, None)
        for length in (512, 2048)
    )
    # Bytes of a token, in bfloat16.
    keys_and_values = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim
    more = rows * (2048 - 512) * keys_and_values
    assert many.arguments_bytes - few.arguments_bytes == more
    assert many.traffic_bytes - few.traffic_bytes >= more
    # With a window, only the keys in it need to be read.
    windowed = dataclasses.replace(model, sliding_window=256)
    windowed = receipt.plan_decoding(windowed, "cpu", MeshConfig(1), rows, 2048, None)
    assert many.least_bytes - windowed.least_bytes == rows * (2048 - 256) * keys_and_values
    assert many.traffic_bytes > windowed.traffic_bytes > windowed.least_bytes
