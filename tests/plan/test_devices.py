"""What compiles for a topology, and what devices are known to reach."""

import json
import re
import subprocess
import sys

import jax
import pytest

from jllama.devices import ACCELERATORS, peak_flops
from jllama.errors import UsageError
from jllama.plan import devices


class Package:
    def __init__(self, name, version):
        self.name, self.version = name, version


@pytest.mark.parametrize(
    ("topology", "installed", "message"),
    [
        ("v5e:4x4", [], r"needs libtpu [\d.]+\*, found none: pip install 'jllama\[plan-tpu\]'"),
        (
            "v5e:4x4",
            [Package("libtpu", "0.0.1")],
            r"needs libtpu [\d.]+\*, found libtpu 0.0.1: pip install",
        ),
        ("h100:8", [], r"needs jax-cuda13-plugin [\d.]+, found none: pip install 'jllama\[cuda\]'"),
        (
            "h100:8",
            [Package("jax-cuda12-plugin", "0.4.1")],
            r"needs jax-cuda13-plugin [\d.]+, found jax-cuda12-plugin 0.4.1",
        ),
    ],
)
def test_without_the_right_compiler_it_is_named(topology, installed, message, monkeypatch):
    """And in a process that has devices already, no others can take their place."""
    jax.devices()
    monkeypatch.setattr(devices.importlib.metadata, "distributions", lambda: installed)
    with pytest.raises(
        UsageError, match=f"^planning for [TG]PUs with jax {jax.__version__} {message}"
    ):
        devices.topology_devices.__wrapped__(topology)


WITHOUT_COMPILER = """
import importlib.metadata, json, sys
from jllama.commands import cli
everything = importlib.metadata.distributions
importlib.metadata.distributions = lambda: [
    one for one in everything() if not one.name.startswith(("libtpu", "jax-cuda"))
]
codes = [cli.run("plan", words) for words in json.loads(sys.argv[1])]
assert codes == [0, 2], codes
"""


def test_without_a_compiler_memory_is_planned_by_formula():
    options = [
        "chat_lora",
        "--topology",
        "rtx4090:1",
        "--preset",
        "llama3.1-8b",
        "--seq_len",
        "2048",
    ]
    adapters = ["--lora.base", "nf4", "--lora.rank", "16", "--batch_size", "4"]
    words = json.dumps([[*options, *adapters], [*options, "--search"]])
    program = [sys.executable, "-c", WITHOUT_COMPILER, words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "found none: pip install 'jllama[cuda]'; until then its memory is by formula" in done.stderr
    )
    used_gib = float(re.search(r"memory of a device +([\d.]+) of 23.50 GiB", done.stdout)[1])
    assert 9.5 < used_gib < 10.5  # an H100 used 10.5 for it (docs/performance.md)
    assert "tokens/s" not in done.stdout
    assert "only training has a formula" in done.stderr


@pytest.mark.parametrize(
    ("topology", "usual"),
    [
        *zip(
            [f"v5e:{chips}" for chips in (1, 4, 8, 16, 32, 64, 128, 256)],
            [
                "v5e:1x1",
                "v5e:2x2",
                "v5e:2x4",
                "v5e:4x4",
                "v5e:4x8",
                "v5e:8x8",
                "v5e:8x16",
                "v5e:16x16",
            ],
            strict=True,
        ),
        ("v6e:8", "v6e:2x4"),
        ("v4:4", "v4:2x2x1"),
        ("v4:64", "v4:4x4x4"),
        ("v5p:8", "v5p:2x2x2"),
        ("v5p:16", "v5p:2x2x4"),
        ("v5p:32", "v5p:2x4x4"),
        ("v5p:192", "v5p:4x4x12"),
        ("v5p:256", "v5p:4x8x8"),
        ("v5p:768", "v5p:8x8x12"),
        ("v5p:6144", "v5p:16x16x24"),
        # as they are
        ("v5e:2x8", "v5e:2x8"),
        ("v5e:3", "v5e:3"),
        ("v5e:99999", "v5e:99999"),
        ("v5e:0", "v5e:0"),
        ("v5e:", "v5e:"),
        ("h100:16", "h100:16"),
        ("h101:16", "h101:16"),
    ],
)
def test_a_number_of_chips_is_the_usual_slice_of_them(topology, usual):
    assert devices.usual_topology(topology) == usual


def test_an_exchange_that_leaves_its_node_takes_the_network_cards_of_those_within():
    h100, v5p = ACCELERATORS["h100"], ACCELERATORS["v5p"]
    assert devices.interconnect_s(h100, 8, 8, 450e9) == 1
    assert devices.interconnect_s(h100, 16, 4, 200e9) == 1  # four cards of 50 GB/s
    assert devices.interconnect_s(h100, 64, 16, 450e9) == 1  # no more than links can pass on
    assert devices.interconnect_s(v5p, 64, 8, 600e9) == 1


def test_every_kind_is_found_by_the_name_that_its_devices_have():
    kinds = [
        "TPU v5 lite",
        "TPU v5",
        "TPU v5p",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA L40S",
        "NVIDIA L4",
    ]
    flops = [peak_flops(kind) for kind in kinds]
    assert flops == [197e12, 459e12, 459e12, 756e12, 989e12, 362e12, 121e12]
    assert peak_flops("cpu") is None
