"""What a run needs of a machine is reckoned before it is asked for."""

import dataclasses

import jax
import pytest

from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.parameters import count_parameters
from jllama.sharding import MeshConfig, describe_devices, idle_accelerator, make_mesh
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.metrics import check_memory

MODEL = LlamaConfig(vocab_size=1000, num_layers=2, embed_dim=64, max_seq_len=128)
CONFIG = TrainConfig(model=MODEL, training=LoopConfig(batch_size=8, seq_len=128))
MESH = make_mesh(MeshConfig(), jax.devices()[:1])


def test_the_least_that_a_run_takes():
    """16 bytes a parameter and 4 a logit: one byte less is too little."""
    needed = 16 * count_parameters(MODEL) + 4 * 8 * 128 * 1000
    check_memory(CONFIG, MESH, needed)
    with pytest.raises(UsageError, match=r"take 0.0 GiB .* one CPU with 0.0 GiB cannot hold: take a smaller"):
        check_memory(CONFIG, MESH, needed - 1)
    parts = dataclasses.replace(CONFIG, training=LoopConfig(batch_size=8, seq_len=128, accumulation=4))
    check_memory(parts, MESH, needed - 3 * 4 * 2 * 128 * 1000)


@pytest.mark.parametrize(
    "absurd",
    [
        {"training": LoopConfig(batch_size=10**8, seq_len=128)},
        {"model": dataclasses.replace(MODEL, vocab_size=10**7, embed_dim=8192)},
        {"model": dataclasses.replace(MODEL, num_layers=1000, mlp_dim=10**5, embed_dim=8192)},
    ],
)
def test_what_no_machine_has(absurd):
    with pytest.raises(UsageError, match=r"[\d,]{5,}\.\d GiB"):
        check_memory(dataclasses.replace(CONFIG, **absurd), MESH)


def test_devices_in_words():
    assert describe_devices(MESH) == "one CPU"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("proc/driver/nvidia/version", "an NVIDIA GPU but JAX sees none: pip install 'jllama[cuda]'"),
        ("dev/nvidia0", "an NVIDIA GPU but JAX sees none: pip install 'jllama[cuda]'"),
        ("dev/accel0", "a TPU but JAX sees none: pip install 'jllama[tpu]'"),
    ],
)
def test_an_accelerator_that_jax_does_not_see(tmp_path, monkeypatch, path, said):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    assert idle_accelerator(tmp_path) is None
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert said in idle_accelerator(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # it is meant
    assert idle_accelerator(tmp_path) is None
