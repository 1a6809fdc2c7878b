"""What is said of this machine's devices."""

import jax
import pytest

from jllama.config import MeshConfig
from jllama.devices import describe_devices, idle_accelerator
from jllama.sharding import make_mesh


def test_devices_in_words():
    assert describe_devices(make_mesh(MeshConfig(), jax.devices()[:1])) == "one CPU"


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
