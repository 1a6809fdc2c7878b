"""Peak private memory and time of converting, loading and sampling 1.1 billion random parameters.

The shape is TinyLlama's, which every format can hold. Private memory is anonymous pages,
``RssAnon`` in ``/proc/PID/status`` (of Linux), sampled every 5 ms. It includes the interpreter and
its libraries, but not mapped files. The bound is the model's size in the target dtype plus 1 GB.
Needs about 10 GB of disk.

    python benchmarks/checkpoint_memory.py --folder /some/disk
    python benchmarks/checkpoint_memory.py --versions before=/its/checkout after=. --repeats 5

With several versions, each measurement is made in one after the other, and repeated; the result is
the median.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
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
"""What ``hf_bfloat16`` is converted to, and what is then loaded: arguments ``to`` and ``dtype``."""
BYTES = {"float32": 4, "bfloat16": 2, "q8_0": 34 / 32, "int8": 1}

LOAD = """
import sys, time, jax, jllama
start_s = time.perf_counter()
jax.block_until_ready(jllama.load(sys.argv[1], sys.argv[2]).for_decoding().params)
print(time.perf_counter() - start_s)
"""
"""Loads weights for decoding, and prints the seconds that this took."""


class RandomTensor:
    """A matrix of random normal numbers, of which only the rows that are read are in memory."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.float32)
        self._seed = seed

    def __getitem__(self, rows: slice) -> np.ndarray:
        rng = np.random.default_rng((self._seed, rows.start))
        return 0.02 * rng.standard_normal((rows.stop - rows.start, *self.shape[1:]), np.float32)


def make(folder: Path) -> None:
    """Write the model in Hugging Face's format, with a tokenizer for all rows of its embedding."""
    import jllama
    from jllama.formats.huggingface import write
    from jllama.formats.tensors import Checkpoint, tensor_specs
    from jllama.tokenizers.sentencepiece import train_sentencepiece

    config = jllama.preset(PRESET)
    rng = np.random.default_rng(0)
    words = [
        "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(2, 9)))
        for _ in range(60_000)
    ]
    texts = [" ".join(words[start : start + 100]) for start in range(0, len(words), 100)]
    tensors = {
        spec.key: RandomTensor(spec.shape, seed) for seed, spec in enumerate(tensor_specs(config))
    }
    folder.mkdir()
    checkpoint = Checkpoint(config, tensors, train_sentencepiece(texts, config.vocab_size))
    write(checkpoint, folder, np.dtype("bfloat16"), lambda _: None)


def measured(version: Path, *command: str | Path) -> dict[str, float]:
    """Run Python with a version's package, and return its peak private memory and its time.

    The time of a script (``-c``) is the one that it prints.
    """
    environment = os.environ | {"PYTHONPATH": str(version), "JAX_PLATFORMS": "cpu"}
    start_s = time.perf_counter()
    peak_bytes = 0
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        cwd=version,
        env=environment,
        text=True,
    )
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if "RssAnon:" in status:
            peak_bytes = max(peak_bytes, 1024 * int(status.partition("RssAnon:")[2].split()[0]))
        time.sleep(0.005)
    assert process.stdout is not None
    printed = process.stdout.read().split()
    if process.returncode:
        raise SystemExit(f"{command} of {version} failed")
    wall_s = float(printed[0]) if command[0] == "-c" else time.perf_counter() - start_s
    return {"peak_private_bytes": peak_bytes, "wall_s": round(wall_s, 2)}


def measure(
    versions: dict[str, Path], repeats: int, model_bytes: int, *command: str | Path, target: Path
) -> dict[str, Any]:
    """Run a command with each version, and return the medians of what it takes.

    Args:
        versions: their checkouts by name.
        repeats: how often each runs.
        model_bytes: the size of the model in the target dtype.
        command: arguments of Python.
        target: removed before each run.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    for _ in range(repeats):
        for name, checkout in versions.items():
            remove(target)
            runs[name].append(measured(checkout, *command))
    result: dict[str, Any] = {"model_bytes": model_bytes}
    for name, figures in runs.items():
        medians = {key: statistics.median(run[key] for run in figures) for key in figures[0]}
        within_bound = medians["peak_private_bytes"] <= model_bytes + 1e9
        result[name] = {**medians, "within_bound": within_bound}
    return result


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    """Make the model, measure every format in every version, and write down the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="where to put the models; by default a temporary folder")
    parser.add_argument("--versions", nargs="+", default=[f"now={ROOT}"], metavar="NAME=CHECKOUT")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=STORED, default=list(STORED))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()

    import jllama
    from jllama.core.parameters import count_parameters

    versions = {}
    for version in arguments.versions:
        name, _, path = version.partition("=")
        versions[name] = Path(path).resolve()
    number = count_parameters(jllama.preset(PRESET))
    results: dict[str, Any] = {"convert_from_hf_bfloat16": {}, "load": {}, "sample": {}}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source = Path(folder) / "hf_bfloat16"
        nothing = Path(folder) / "nothing"
        make(source)
        for name in arguments.only:
            to, dtype = STORED[name]
            target = Path(folder) / name
            convert = ("-m", "jllama", "convert", source, target, "--to", to, "--dtype", dtype)
            sample = ("sample.py", target, "--prompt", "a", "--max_new_tokens", "2")
            jobs = [("convert_from_hf_bfloat16", name, dtype, convert, target)]
            if target == source:
                jobs = []
            for dtype in ("float32", "bfloat16"):
                load = ("-c", LOAD, target, dtype)
                jobs.append(("load", f"{name} as {dtype}", dtype, load, nothing))
            for dtype in ("float32", "bfloat16"):
                command = (*sample, "--dtype", dtype)
                jobs.append(("sample", f"{name} as {dtype}", dtype, command, nothing))
            command = (*sample, "--quantize", "int8")
            jobs.append(("sample", f"{name} as int8", "int8", command, nothing))
            for kind, case, dtype, command, removed in jobs:
                model_bytes = int(number * BYTES[dtype])
                result = measure(versions, arguments.repeats, model_bytes, *command, target=removed)
                results[kind][case] = result
                print(kind, case, json.dumps(result), flush=True)
            if target != source:
                remove(target)
    results["parameters"] = number
    results["machine"] = (
        f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"
    )
    results["packages"] = {
        name: importlib.metadata.version(name)
        for name in ("jax", "numpy", "gguf", "orbax-checkpoint")
    }
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
