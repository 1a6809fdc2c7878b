"""GGUF files that jllama writes, run by llama.cpp: log-probabilities against the float64 oracle.

Small random models with every kind of RoPE scaling that GGUF holds run on 600 tokens each. For each
scaled one, the error of a reader that ignores the scaling is computed too. Needs llama.cpp as a
Python package:

    pip install xllamacpp && python benchmarks/llama_cpp.py
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path

import numpy as np
import xllamacpp

from jllama import LanguageModel, LlamaConfig, oracle, save
from jllama.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers import BytesTokenizer
from jllama.verify.checks import random_params

ROOT = Path(__file__).resolve().parent.parent
CONFIG = LlamaConfig(
    vocab_size=320,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=96,
    max_seq_len=4096,
    rope_theta=50_000.0,
    norm_eps=1e-3,
)
SCALINGS = {
    "plain": None,
    "linear": LinearScaling(4.0),
    "llama3": Llama3Scaling(8.0, original_max_seq_len=512),
    "yarn": YarnScaling(4.0, original_max_seq_len=512),
    "yarn with an attention factor": YarnScaling(
        4.0, original_max_seq_len=512, attention_factor=0.7
    ),
}


def oracle_log_probabilities(params: dict, config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """Return the oracle's log-probabilities of the token that follows."""
    return np.log(oracle.softmax(oracle.forward(params, np.array([tokens]), config)[0, -1]))


def llama_cpp_log_probabilities(path: Path, tokens: list[int]) -> np.ndarray:
    """Return llama.cpp's log-probabilities of the token that follows; NaN where it gives none."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx = 1024
    settings.n_parallel = 1
    settings.warmup = False
    request = {
        "prompt": tokens,
        "n_predict": 1,
        "n_probs": CONFIG.vocab_size,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    answer = xllamacpp.Server(settings).handle_completions(request)
    if isinstance(answer, str):
        answer = json.loads(answer)
    log_probs = np.full(CONFIG.vocab_size, np.nan)
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        log_probs[entry["id"]] = entry["logprob"]
    return log_probs


def main() -> None:
    """Compare every kind of scaling, print the differences, and write them down."""
    params = random_params(CONFIG, 0)
    tokens = [1, *map(int, np.random.default_rng(0).integers(3, 259, 599))]
    unscaled = oracle_log_probabilities(params, CONFIG, tokens)
    results = {}
    for name, scaling in SCALINGS.items():
        config = dataclasses.replace(CONFIG, rope_scaling=scaling)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            save(LanguageModel(config, params, BytesTokenizer()), path, "gguf")
            log_probs = llama_cpp_log_probabilities(path, tokens)
        expected = oracle_log_probabilities(params, config, tokens)
        results[name] = {
            "tokens_with_a_probability": int(np.isfinite(log_probs).sum()),
            "largest_difference_from_the_oracle": largest_difference(log_probs, expected),
            "if_the_scaling_were_ignored": None,
        }
        if scaling:
            ignored = largest_difference(log_probs, unscaled)
            results[name]["if_the_scaling_were_ignored"] = ignored
        print(name, results[name], flush=True)
    results["versions"] = {
        package: importlib.metadata.version(package) for package in ("xllamacpp", "jax", "gguf")
    }
    results["machine"] = f"{platform.platform()}, Python {platform.python_version()}"
    path = ROOT / "benchmarks" / "results" / "llama_cpp.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


def largest_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.nanmax(np.abs(actual - expected)))


if __name__ == "__main__":
    main()
