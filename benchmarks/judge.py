"""`jllama verify --against` on real programs: llama.cpp's servers, `transformers serve`, our own.

SmolLM2-135M-Instruct (`tests/fetch_real_weights.py`) and a random model of Llama 3.2's shape, in
float32, Q8_0 and Q4_K. No verdict may be FAIL. Prints a line for each and writes
benchmarks/results/judge.json. Needs the packages of the programs:

    pip install 'llama-cpp-python[server]' xllamacpp accelerate && python benchmarks/judge.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jllama
from jllama.lab.checks import random_params

ROOT = Path(__file__).resolve().parent.parent
REAL = Path("~/.cache/jllama/real_weights").expanduser()
CONTEXT = 4096
QUANTIZED = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_K": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
# Programs of their own: beside this file lies another llama_cpp.
QUANTIZE = """
import ctypes, sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype = getattr(llama_cpp, sys.argv[3])
source, target = (word.encode() for word in sys.argv[1:3])
sys.exit(llama_cpp.llama_model_quantize(source, target, ctypes.byref(options)))
"""
XLLAMACPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx = sys.argv[1], int(sys.argv[2]), 4096
server = xllamacpp.Server(params)
time.sleep(1e6)
"""
SERVERS = {
    "jllama serve": ("-m", "jllama", "serve", "{folder}", "--port", "{port}"),
    "llama-cpp-python": (
        *("-m", "llama_cpp.server", "--model", "{file}", "--port", "{port}"),
        *("--n_ctx", str(CONTEXT), "--logits_all", "true"),
    ),
    "llama.cpp (xllamacpp)": ("-c", XLLAMACPP, "{file}", "{port}"),
    "transformers serve": (
        *("-m", "transformers.cli.transformers", "serve", "{folder}", "--port", "{port}"),
        *("--device", "cpu", "--dtype", "float32"),
    ),
}
IN_FILES = ("llama-cpp-python", "llama.cpp (xllamacpp)", "llama.cpp")


def make_models(folder: Path) -> dict[str, Path]:
    """Write both models as folders and GGUF files, and quantize the files."""
    smollm2 = jllama.load(REAL / "SmolLM2-135M-Instruct.Q4_1.gguf", layout="training")
    config = dataclasses.replace(
        jllama.preset("llama3.2-1b"), num_layers=4, embed_dim=512, num_heads=8, num_kv_heads=2,
        head_dim=64, mlp_dim=1024,
    )  # fmt: skip
    params = random_params(config, 0, embed_std=0.05, query_gain=2.0)
    tokenizer = jllama.load_tokenizer(REAL / "llama3_tokenizer.model")
    random = jllama.LanguageModel(config, params, tokenizer, None, (tokenizer.eos_id,))
    for name, model in (("SmolLM2", smollm2), ("random Llama 3.2", random)):
        jllama.save(model, folder / name, "hf", dtype="float32")
        jllama.save(model, folder / f"{name}.float32.gguf", "gguf", dtype="float32")
        for kind, number in QUANTIZED.items():
            files = [str(folder / f"{name}.{one}.gguf") for one in ("float32", kind)]
            command = [sys.executable, "-c", QUANTIZE, *files, number]
            subprocess.run(command, check=True, capture_output=True)
    return {name: folder / name for name in ("SmolLM2", "random Llama 3.2")}


@contextlib.contextmanager
def serving(command: tuple[str, ...], **places: object) -> Iterator[str]:
    """Start a server, and stop it at the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port, **places) if "{" in word else word for word in command]
    if command[0] == "-c":
        words[1] = command[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(120):
                time.sleep(1)
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
                    break
            yield url
        finally:
            process.terminate()
            process.wait()


def verdict(checkpoint: Path, against: str, *more: str) -> dict[str, object]:
    """Run `jllama verify --against`, and return the parts of its JSON that are reported."""
    command = ["-m", "jllama", "verify", str(checkpoint), "--against", against, "--json", *more]
    command += ["--timeout_s", "1800"] if against.startswith("http") else []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    if not done.stdout:
        return {"passed": False, "verdict": done.stderr.splitlines()[-1]}
    result = json.loads(done.stdout)
    text = (
        result["verdict"].replace(against, "the server") if "//" in against else result["verdict"]
    )
    return {"passed": result["passed"], "verdict": text}


def cases(folders: dict[str, Path]) -> Iterator[tuple[str, str, str]]:
    """Yield each model, the dtype of its weights, and the program that runs it."""
    for model in folders:
        for weights in ("float32", *QUANTIZED):
            for peer in (*SERVERS, "llama.cpp", "transformers"):
                if weights == "float32" or peer in IN_FILES:
                    yield model, weights, peer


def main() -> int:
    """Judge all cases, or those whose names have all words of the command line."""
    path = ROOT / "benchmarks/results/judge.json"
    results = {}
    if path.exists():
        results = json.loads(path.read_text())["results"]
    packages = ("jax", "llama-cpp-python", "xllamacpp", "transformers", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_models(Path(scratch))
        for model, weights, peer in cases(folders):
            name = f"{model}, {weights}, {peer}"
            if not all(word in name for word in sys.argv[1:]):
                continue
            folder = folders[model]
            file = folder.with_name(f"{model}.{weights}.gguf")
            checkpoint = file if peer in IN_FILES else folder
            if peer in SERVERS:
                is_named = peer == "transformers serve"  # its list is that of a cache
                more = ("--served_name", str(folder)) if is_named else ()
                if peer == "llama-cpp-python" and model != "SmolLM2":
                    more = ("--max_tokens", "512")  # it sorts 128,256 log-probabilities a token
                with serving(SERVERS[peer], folder=folder, file=file) as url:
                    results[name] = verdict(checkpoint, url, *more)
            else:
                results[name] = verdict(checkpoint, peer)
            print(name, results[name]["verdict"], sep=": ", flush=True)
            content = {"machine": platform.machine(), "versions": versions, "results": results}
            path.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
