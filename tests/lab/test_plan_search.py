"""The search with a pretended compiler: memory for each row, and times by formula."""

import dataclasses
import itertools
import types

import pytest

from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import count_parameters
from jllama.lab import plan_search as search
from jllama.lab.plan_receipt import Receipt, describe, recomputed, settings
from jllama.system.devices import ACCELERATORS
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.metrics import training_flops_per_token

MODEL = LlamaConfig(32_000, 16, 2048, 16, 4, 128, 8192, max_seq_len=4096)
CONFIG = TrainConfig(MODEL, training=LoopConfig(batch_size=64, seq_len=4096))
H100 = ACCELERATORS["h100"]
KEPT = {"none": 6.0, "dots": 3.0, "block": 0.5, "offload": 0.1}  # GiB a row


@pytest.fixture
def devices(monkeypatch):
    """Eight GPUs, and what was planned for them."""
    planned = []

    def plan(config, topology):
        options, mesh = config.training, config.mesh
        ways = mesh.data * mesh.fsdp
        rows = options.batch_size / ways / options.accumulation
        parameters = count_parameters(MODEL) / mesh.fsdp / mesh.tensor
        tokens = options.batch_size * 4096
        activations = KEPT[str(options.remat)] * 2**30 * rows / mesh.sequence / mesh.tensor
        flops = training_flops_per_token(MODEL, 4096) * tokens
        counts = "devices parameters_bytes moments_bytes flops traffic_bytes"
        planned.append(config)
        return Receipt(
            **dict.fromkeys(counts.split(), 0),
            **dict.fromkeys(("memory_s", "compile_s"), 0.0),
            device=topology,
            mesh={},
            attention="",
            collectives=[],
            largest=[],
            tokens=tokens,
            arguments_bytes=int(12 * parameters),
            temporaries_bytes=int(4 * parameters + activations),
            device_memory_bytes=int(H100.memory_bytes),
            compute_s=flops * recomputed(config, options.attention) / 8 / H100.flops,
            interconnect_s=1e-9 * (mesh.tensor - 1) * tokens,
        )

    gpus = [types.SimpleNamespace(platform="gpu")] * 8
    monkeypatch.setattr(search, "topology_devices", lambda topology: (H100, gpus))
    monkeypatch.setattr(search, "plan_training", plan)
    return types.SimpleNamespace(plan=plan, planned=planned)


@pytest.mark.parametrize("fixed", [False, True])
def test_the_fastest_of_all_is_found_in_few_compilations(devices, fixed):
    messages = []
    tried = search.search(CONFIG, "h100:8", fixed, messages.append)
    configs = list(devices.planned)
    assert messages == [
        "compiling " + describe(vars(config.mesh), settings(config)) for config in configs
    ]
    assert len(configs) == len(tried) <= 16
    assert 1 <= sum(receipt.fits for _, receipt in tried) <= 4
    fits = [receipt.fits for _, receipt in tried]
    assert fits == sorted(fits, reverse=True)

    def all_of_them():
        for fsdp, rows, remat in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), KEPT):
            mesh = dataclasses.replace(CONFIG.mesh, data=8 // fsdp, fsdp=fsdp)
            size = {"batch_size": 8 * rows}
            if fixed:
                size = {"batch_size": 64, "accumulation": 8 // rows}
            if not fixed or rows <= 8:
                loop = dataclasses.replace(CONFIG.training, remat=remat, **size)
                yield devices.plan(dataclasses.replace(CONFIG, mesh=mesh, training=loop), "")

    speeds = [receipt.tokens_per_s for receipt in all_of_them() if receipt.fits]
    assert tried[0][1].tokens_per_s == max(speeds)
    for config in configs:
        assert config.mesh.data * config.mesh.fsdp * config.mesh.sequence * config.mesh.tensor == 8
        assert config.training.attention in ("tokamax", "triton")
        assert config.training.batch_size == 64 or not fixed
    assert configs[0].training.remat == "none"


def test_what_the_compiler_refuses_is_passed_over(devices, monkeypatch):
    def plan(config, topology):
        if config.mesh.fsdp == 8:
            raise JllamaError("the compiler refuses the program")
        return devices.plan(config, topology)

    monkeypatch.setattr(search, "plan_training", plan)
    messages = []
    tried = search.search(CONFIG, "h100:8", True, messages.append)
    assert tried[0][1].fits
    assert "the compiler refuses the program" in messages


def test_what_cannot_fit_is_not_compiled(devices):
    large = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, num_layers=3000))
    with pytest.raises(
        UsageError, match=r"^no step of this model and batch divides over the 8 devices of h100:8"
    ):
        search.search(large, "h100:8", False, print)
    assert devices.planned == []
