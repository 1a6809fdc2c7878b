"""What compiles for a topology, and what devices are known to reach."""

import math
import re
import types

import jax
import pytest
from helpers import run_command

from jllama.core import UsageError
from jllama.lab import plan_devices as devices
from jllama.lab import plan_receipt as receipt
from jllama.system.devices import ACCELERATORS, peak_flops

TPU, GPU = r"libtpu [\d.]+\*", r"jax-cuda13-plugin [\d.]+"


@pytest.mark.parametrize(
    ("topology", "installed", "message"),
    [
        ("v5e:4x4", "", f"needs {TPU}, found none: pip install 'jllama\\[plan-tpu\\]'"),
        ("v5e:4x4", "libtpu 0.0.1", f"needs {TPU}, found libtpu 0.0.1: pip install"),
        ("h100:8", "", f"needs {GPU}, found none: pip install 'jllama\\[cuda\\]'"),
        ("h100:8", "jax-cuda12-plugin 0.4.1", f"needs {GPU}, found jax-cuda12-plugin 0.4.1"),
    ],
)
def test_without_the_right_compiler_it_is_named(topology, installed, message, monkeypatch):
    """And in a process that has devices already, no others can take their place."""
    jax.devices()
    name, _, version = installed.partition(" ")
    packages = [types.SimpleNamespace(name=name, version=version)]
    monkeypatch.setattr(devices.importlib.metadata, "distributions", lambda: packages)
    message = f"^planning for [TG]PUs with jax {jax.__version__} {message}"
    with pytest.raises(UsageError, match=message):
        devices.topology_devices.__wrapped__(topology)


def test_without_a_compiler_memory_is_planned_by_formula(monkeypatch):
    monkeypatch.setattr(devices.importlib.metadata, "distributions", lambda: [])
    # This process has as many devices as the topology; one that has none makes them.
    monkeypatch.setattr(devices.jax.config, "update", lambda name, count: None)
    monkeypatch.setattr(receipt, "topology_devices", devices.topology_devices.__wrapped__)
    monkeypatch.setattr(devices, "topology_devices", devices.topology_devices.__wrapped__)
    words = "chat_lora --topology rtx4090:1 --preset llama3.1-8b --seq_len 2048"
    adapters = "--lora.base nf4 --lora.rank 16 --batch_size 4"
    done = run_command("plan", *words.split(), *adapters.split())
    assert done.code == 0, done.err
    message = "found none: pip install 'jllama[cuda]'; until then its memory is by formula"
    assert message in done.err
    used_gib = float(re.search(r"memory of a device +([\d.]+) of 23.50 GiB", done.out)[1])
    assert 9.5 < used_gib < 10.5  # an H100 used 10.5 for it (docs/performance.md)
    assert "tokens/s" not in done.out
    done = run_command("plan", *words.split(), "--search")
    assert done.code == 2
    assert "only training has a formula" in done.err


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("v5e", "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
        ("v6e", "2x4"),
        ("v4", "2x2x1 4x4x4"),
        ("v5p", "2x2x2 2x2x4 2x4x4 4x4x12 4x8x8 8x8x12 16x16x24"),
    ],
)
def test_a_number_of_chips_is_the_usual_slice_of_them(name, slices):
    for sides in slices.split():
        chips = math.prod(map(int, sides.split("x")))
        assert devices.usual_topology(f"{name}:{chips}") == f"{name}:{sides}"


def test_what_is_no_number_of_chips_stays():
    for topology in ("v5e:2x8", "v5e:3", "v5e:99999", "v5e:0", "v5e:", "h100:16", "h101:16"):
        assert devices.usual_topology(topology) == topology


def test_an_exchange_that_leaves_its_node_takes_the_network_cards_of_those_within():
    h100, v5p = ACCELERATORS["h100"], ACCELERATORS["v5p"]
    assert devices.interconnect_s(h100, 8, 8, 450e9) == 1
    assert devices.interconnect_s(h100, 16, 4, 200e9) == 1  # four cards of 50 GB/s
    assert devices.interconnect_s(h100, 64, 16, 450e9) == 1  # no more than links can pass on
    assert devices.interconnect_s(v5p, 64, 8, 600e9) == 1


def test_every_kind_is_found_by_the_name_that_its_devices_have():
    for kind, flops in {
        "TPU v5 lite": 197e12,
        "TPU v5": 459e12,
        "TPU v5p": 459e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12,
        "cpu": None,
    }.items():
        assert peak_flops(kind) == flops
