"""Peak private memory and time of loading and converting a model of 1.1 billion random parameters, in every format.

The shape is TinyLlama's, which every format can hold. Private memory is the process's anonymous pages (``RssAnon`` in
``/proc/self/status``: the interpreter and its libraries included, mapped files not), sampled every 5 ms, so Linux only.
The bound is the model's size in the target dtype plus 1 GB. Needs about 25 GB of disk.

    python benchmarks/checkpoint_memory.py --folder /some/disk
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "checkpoint_memory.json"
PRESET = "tinyllama-1.1b"
STORED = {
    "hf_bfloat16": ("hf", "bfloat16"),
    "hf_float32": ("hf", "float32"),
    "meta_bfloat16": ("meta", "bfloat16"),
    "gguf_q8_0": ("gguf", "q8_0"),
    "gguf_bfloat16": ("gguf", "bfloat16"),
    "llama2c_float32": ("llama2c", "float32"),
    "orbax_float32": ("orbax", "float32"),
    "orbax_bfloat16": ("orbax", "bfloat16"),
}
"""What is converted to (from ``hf_bfloat16``) and then loaded: a name, and the arguments ``to`` and ``dtype``."""


class RandomTensor:
    """A matrix of normal numbers that is never in memory whole."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.shape, self.dtype, self._seed = shape, np.dtype(np.float32), seed

    def __getitem__(self, rows: slice) -> np.ndarray:
        rng = np.random.default_rng((self._seed, rows.start))
        return 0.02 * rng.standard_normal((rows.stop - rows.start, *self.shape[1:]), np.float32)


def measured(action: Callable[[], Any]) -> dict[str, float]:
    """Do something; the most private memory meanwhile and the time it took."""
    peak_bytes, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak_bytes
        while not done.is_set():
            status = Path("/proc/self/status").read_text()
            peak_bytes = max(peak_bytes, 1024 * int(status.partition("RssAnon:")[2].split()[0]))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began_s = time.perf_counter()
    try:
        action()
    finally:
        wall_s = time.perf_counter() - began_s
        done.set()
        watcher.join()
    return {"peak_private_bytes": peak_bytes, "wall_s": round(wall_s, 1)}


def child(task: str, *arguments: str) -> None:
    """One measurement, in a process of its own."""
    import jax

    import jllama
    from jllama.checkpoints.huggingface import write
    from jllama.checkpoints.registry import convert
    from jllama.checkpoints.tensors import Checkpoint
    from jllama.parameters import tensor_specs

    jax.config.update("jax_platforms", "cpu")
    if task == "make":
        config = jllama.preset(PRESET)
        tensors = {stored.key: RandomTensor(stored.shape, seed) for seed, stored in enumerate(tensor_specs(config))}
        Path(arguments[0]).mkdir()
        write(Checkpoint(config, tensors), Path(arguments[0]), np.dtype(jax.numpy.bfloat16), lambda _: None)
    elif task == "convert":
        source, target, to, dtype = arguments
        print(json.dumps(measured(lambda: convert(source, target, to, dtype))))
    else:
        path, dtype = arguments
        print(json.dumps(measured(lambda: jax.block_until_ready(jllama.load(path, dtype).params))))


def in_child(*arguments: str | Path) -> str:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to put the models; a temporary folder without it")
    arguments = parser.parse_args()

    import jllama
    from jllama.parameters import count_parameters

    number = count_parameters(jllama.preset(PRESET))
    itemsize = {"float32": 4, "bfloat16": 2, "q8_0": 34 / 32}
    results: dict[str, Any] = {"convert_from_hf_bfloat16": {}, "load": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source = Path(folder) / "hf_bfloat16"
        in_child("make", source)
        for name, (to, dtype) in STORED.items():
            target = Path(folder) / name
            if target != source:
                converted = json.loads(in_child("convert", source, target, to, dtype))
                results["convert_from_hf_bfloat16"][name] = converted | bound(converted, number * itemsize[dtype])
            for wanted in ("float32", "bfloat16"):
                loaded = json.loads(in_child("load", target, wanted))
                results["load"][f"{name} as {wanted}"] = loaded | bound(loaded, number * itemsize[wanted])
            if target != source:
                shutil.rmtree(target) if target.is_dir() else target.unlink()
            print(json.dumps(results, indent=1), flush=True)
    results["parameters"] = number
    results["machine"] = f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"
    results["versions"] = {
        name: importlib.metadata.version(name) for name in ("jax", "numpy", "gguf", "orbax-checkpoint")
    }
    RESULT.write_text(json.dumps(results, indent=2) + "\n")


def bound(measurement: dict[str, float], model_bytes: float) -> dict[str, Any]:
    """The model's size in the target dtype, and whether the peak stayed within it and 1 GB."""
    return {
        "model_bytes": int(model_bytes),
        "within_bound": measurement["peak_private_bytes"] <= model_bytes + 1e9,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
