"""A run's ``receipt.json``: what is needed to compute its steps again, and to compare them."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import jax

import jllama
from jllama.formats.receipt import RECEIPT, read_receipt
from jllama.system.cache import source_hash
from jllama.system.files import Json, atomic_write_text
from jllama.system.machine import describe_devices, describe_driver
from jllama.training.plan import Plan
from jllama.training.run_folder import config_fields, is_written_here

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")


def begin_receipt(plan: Plan) -> Json:
    """Return the receipt of a run that begins, or goes on after ``plan.step``, and write it."""
    step = plan.step
    before = read_receipt(plan.folder)
    receipt: Json = {"config": config_fields(plan.config), "data": plan.data.fingerprint}
    for name in ("sessions", "weights"):  # both by the step after which they were
        entries = before[name].items() if step else ()
        receipt[name] = {at: value for at, value in entries if int(at) <= step}

    # Code, versions, device and flags of this session.
    receipt["sessions"][str(step)] = {
        "code": {"version": jllama.__version__, "sha256": source_hash()},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "device": describe_devices(plan.mesh),
        "driver": describe_driver(plan.mesh.devices.flat[0]),
        "processes": jax.process_count(),
        "flags": {name: os.environ[name] for name in _FLAGS if name in os.environ},
    }
    write_receipt(plan.folder, receipt)
    return receipt


def write_receipt(folder: Path, receipt: Json) -> None:
    """Write a run's receipt, in a folder that is this process's."""
    if is_written_here(folder):
        atomic_write_text(folder / RECEIPT, json.dumps(receipt, indent=1) + "\n")
