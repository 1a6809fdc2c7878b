"""A run's ``receipt.json``: what is needed to compute its steps again, and to compare them."""

import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, UInt32

import jllama
from jllama.devices import describe_devices, describe_driver
from jllama.distributed import process_index
from jllama.files import Json, atomic_write_text, read_json_object
from jllama.parameters import Params
from jllama.training.config import TrainConfig
from jllama.training.run_folder import config_fields

RECEIPT = "receipt.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_PRIMES = (0x9E3779B1, 0x85EBCA77)


@jax.jit
def fingerprints(params: Params) -> dict[str, UInt32[Array, "2"]]:
    """Compute two numbers of each array by its path, which change if any bit does.

    Each number is a sum, modulo 2**32, of the bits of each element times an odd number made of its
    place. It is the same in any order, and so on any mesh. It is no defense against forgery.
    """
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    return {path: _fingerprint(leaf) for path, leaf in leaves.items()}


def _fingerprint(leaf: Array) -> UInt32[Array, "2"]:
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(_PRIMES[1])
    bits = bits ^ (bits >> 13)  # so that no bit of an element is changed without a trace
    factors = (place * jnp.uint32(prime) | 1 for prime in _PRIMES)
    return jnp.stack([jnp.sum(bits * factor, dtype=jnp.uint32) for factor in factors])


def describe_weights(params: Params) -> dict[str, str]:
    """Return the fingerprint of each array as 16 hexadecimal digits, by its path."""
    values = jax.device_get(fingerprints(params))
    return {path: "".join(f"{number:08x}" for number in pair) for path, pair in values.items()}


def describe_session(mesh: jax.sharding.Mesh) -> Json:
    """Return what a session ran on: code, versions, device and flags."""
    source = hashlib.sha256()
    for path in sorted(Path(jllama.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return {
        "code": {"version": jllama.__version__, "sha256": source.hexdigest()},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "device": describe_devices(mesh),
        "driver": describe_driver(mesh.devices.flat[0]),
        "processes": jax.process_count(),
        "flags": {name: os.environ[name] for name in _FLAGS if name in os.environ},
    }


def begin_receipt(
    folder: Path, config: TrainConfig, data: str, mesh: jax.sharding.Mesh, step: int
) -> Json:
    """Return the receipt of a run that begins, or goes on after ``step``, and write it."""
    before = read_receipt(folder)
    receipt: Json = {"config": config_fields(config), "data": data}
    for name in ("sessions", "weights"):  # both by the step after which they were
        entries = before[name].items() if step else ()
        receipt[name] = {at: value for at, value in entries if int(at) <= step}
    receipt["sessions"][str(step)] = describe_session(mesh)
    write_receipt(folder, receipt)
    return receipt


def write_receipt(folder: Path, receipt: Json) -> None:
    """Write a run's receipt, in process 0 alone."""
    if process_index() == 0:
        atomic_write_text(folder / RECEIPT, json.dumps(receipt, indent=1) + "\n")


def read_receipt(folder: Path) -> Json:
    """Return a run's receipt; an empty one if it has none, as runs of version 0.2 and before."""
    path = folder / RECEIPT
    empty: Json = {"config": {}, "data": "", "sessions": {}, "weights": {}}
    return empty | (read_json_object(path) if path.is_file() else {})
