"""Peak private memory and time of converting, loading and sampling from 1.1 billion random parameters, in every format.

The shape is TinyLlama's, which every format can hold. Private memory is a process's anonymous pages (``RssAnon`` in
``/proc/PID/status``: the interpreter and its libraries included, mapped files not), sampled every 5 ms, so Linux only.
The bound is the model's size in the target dtype plus 1 GB. Needs about 10 GB of disk.

    python benchmarks/checkpoint_memory.py --folder /some/disk
    python benchmarks/checkpoint_memory.py --versions before=/its/checkout after=. --repeats 5 --only gguf_q8_0

With several versions each measurement is taken of one after the other, and again; the medians count.
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
"""What is converted to (from ``hf_bfloat16``) and then loaded: a name, and the arguments ``to`` and ``dtype``."""
BYTES = {"float32": 4, "bfloat16": 2, "q8_0": 34 / 32, "int8": 1}

LOAD = """
import sys, time, jax, jllama
start_s = time.perf_counter()
jax.block_until_ready(jllama.load(sys.argv[1], sys.argv[2]).for_decoding().params)
print(time.perf_counter() - start_s)
"""
"""What a text is decoded with, from a file; prints the seconds that this took."""


class RandomTensor:
    """A matrix of normal numbers that is never in memory whole."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        self.shape, self.dtype, self._seed = shape, np.dtype(np.float32), seed

    def __getitem__(self, rows: slice) -> np.ndarray:
        rng = np.random.default_rng((self._seed, rows.start))
        return 0.02 * rng.standard_normal((rows.stop - rows.start, *self.shape[1:]), np.float32)


def make(folder: Path) -> None:
    """The model as Hugging Face has it, with a tokenizer of as many tokens as its embedding has rows."""
    import jllama
    from jllama.checkpoints.huggingface import write
    from jllama.checkpoints.tensors import Checkpoint
    from jllama.parameters import tensor_specs
    from jllama.tokenizers import train_sentencepiece

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
    """Run Python with a version's package: its peak private memory and its time, of a script the one that it prints."""
    environment = os.environ | {"PYTHONPATH": str(version), "JAX_PLATFORMS": "cpu"}
    start_s, peak_bytes = time.perf_counter(), 0
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


def main() -> None:
    """Make the model, measure every format in every version, and write the figures down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="where to put the models; a temporary folder without it")
    parser.add_argument("--versions", nargs="+", default=[f"now={ROOT}"], metavar="NAME=CHECKOUT")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=STORED, default=list(STORED))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()

    import jllama
    from jllama.parameters import count_parameters

    versions = {
        name: Path(path).resolve()
        for name, _, path in (each.partition("=") for each in arguments.versions)
    }
    number = count_parameters(jllama.preset(PRESET))
    results: dict[str, Any] = {"convert_from_hf_bfloat16": {}, "load": {}, "sample": {}}

    def measure(
        kind: str, name: str, dtype: str, *command: str | Path, target: Path | None = None
    ) -> None:
        times: dict[str, list[dict[str, float]]] = {version: [] for version in versions}
        for _ in range(arguments.repeats):
            for version, path in versions.items():
                if target is not None and target.exists():
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
                times[version].append(measured(path, *command))
        results[kind][name] = {"model_bytes": int(number * BYTES[dtype])}
        for version, each in times.items():
            found = {key: statistics.median(one[key] for one in each) for key in each[0]}
            within = found["peak_private_bytes"] <= number * BYTES[dtype] + 1e9
            results[kind][name][version] = found | {"within_bound": within}
        print(kind, name, json.dumps(results[kind][name]), flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source = Path(folder) / "hf_bfloat16"
        make(source)
        for name in arguments.only:
            to, dtype = STORED[name]
            target = Path(folder) / name
            if target != source:
                command = ("-m", "jllama", "convert", source, target, "--to", to, "--dtype", dtype)
                measure("convert_from_hf_bfloat16", name, dtype, *command, target=target)
            for dtype in ("float32", "bfloat16"):
                measure("load", f"{name} as {dtype}", dtype, "-c", LOAD, target, dtype)
            command = ("sample.py", target, "--prompt", "a", "--max_new_tokens", "2")
            for dtype in ("float32", "bfloat16"):
                measure("sample", f"{name} as {dtype}", dtype, *command, "--dtype", dtype)
            measure("sample", f"{name} as int8", "int8", *command, "--quantize", "int8")
            if target != source:
                shutil.rmtree(target) if target.is_dir() else target.unlink()
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
