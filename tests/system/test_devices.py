"""What is said of this machine's devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import make_mesh
from jllama.system.machine import describe_devices, idle_accelerator
from jllama.system.memory import peak_bytes, program_bytes


def test_devices_in_words():
    assert describe_devices(make_mesh(MeshConfig(), jax.devices()[:1])) == "one CPU"


def test_the_peak_is_the_largest_of_the_devices():
    one, two, silent = (
        SimpleNamespace(memory_stats=lambda stats=stats: stats)
        for stats in ({"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 5}, None)
    )
    assert peak_bytes([one, two, silent]) == 5
    assert peak_bytes([silent]) is None


def test_what_a_program_holds_counts_donated_arguments_once():
    vector = jax.ShapeDtypeStruct((1000,), jnp.float32)
    held = {
        donated: jax.jit(jnp.sin, donate_argnums=donated).lower(vector).compile()
        for donated in ((), 0)
    }
    assert program_bytes(held[()]) == (4000, 4000)
    assert program_bytes(held[0]) == (4000, 0)


@pytest.mark.parametrize(
    ("path", "device", "extra"),
    [
        ("proc/driver/nvidia/version", "an NVIDIA GPU", "cuda"),
        ("dev/nvidia0", "an NVIDIA GPU", "cuda"),
        ("dev/accel0", "a TPU", "tpu"),
    ],
)
def test_an_accelerator_that_jax_does_not_see(tmp_path, monkeypatch, path, device, extra):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    assert idle_accelerator(tmp_path) is None
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    sentence = f"{device} but JAX sees none: pip install 'jllama[{extra}]'"
    assert sentence in idle_accelerator(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # it is meant
    assert idle_accelerator(tmp_path) is None
