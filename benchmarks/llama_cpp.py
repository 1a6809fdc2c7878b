"""GGUF files that jllama writes, run by llama.cpp: its log-probabilities beside those of the float64 oracle.

Small random models with every kind of RoPE scaling that GGUF holds, 600 tokens each; beside each scaled one, how far
off a reader that ignored the scaling would be. Needs llama.cpp as a Python package:

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
from jllama.parameters import map_by_path, parameter_table, shape_of
from jllama.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers import BytesTokenizer

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


def random_params() -> dict:
    """Fan-in scaled weights and a unit embedding, so that every setting moves the logits."""
    rng = np.random.default_rng(0)
    params: dict = {"layers": {}}
    for path, row in parameter_table(CONFIG).items():
        sizes = dict(zip(row.axes, shape_of(row, CONFIG), strict=True))
        inputs = 1 if path == "embed" else np.prod([sizes[axis] for axis in row.inputs])
        drawn = rng.standard_normal(tuple(sizes.values())) / np.sqrt(inputs)
        *parents, name = path.split("/")
        (params[parents[0]] if parents else params)[name] = drawn if row.inputs else 1 + 0.1 * drawn
    return map_by_path(lambda _, leaf: leaf.astype(np.float32), params)


def oracle_log_probabilities(params: dict, config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    logits = oracle.forward(params, np.array([tokens]), config)[0, -1]
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def llama_cpp_log_probabilities(path: Path, tokens: list[int]) -> np.ndarray:
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = (
        str(path),
        1024,
        1,
        False,
    )
    count = CONFIG.vocab_size
    request = {
        "prompt": tokens,
        "n_predict": 1,
        "n_probs": count,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    answer = xllamacpp.Server(settings).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    found = np.full(count, np.nan)
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    return found


def main() -> None:
    params = random_params()
    tokens = [1, *map(int, np.random.default_rng(0).integers(3, 259, 599))]
    results = {}
    for name, scaling in SCALINGS.items():
        config = dataclasses.replace(CONFIG, rope_scaling=scaling)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            save(LanguageModel(config, params, BytesTokenizer()), path, "gguf")
            found = llama_cpp_log_probabilities(path, tokens)
        unscaled = oracle_log_probabilities(params, CONFIG, tokens)
        results[name] = {
            "tokens_with_a_probability": int(np.isfinite(found).sum()),
            "largest_difference_from_the_oracle": float(
                np.nanmax(np.abs(found - oracle_log_probabilities(params, config, tokens)))
            ),
            "if_the_scaling_were_ignored": float(np.nanmax(np.abs(found - unscaled)))
            if scaling
            else None,
        }
        print(name, results[name], flush=True)
    results["versions"] = {
        package: importlib.metadata.version(package) for package in ("xllamacpp", "jax", "gguf")
    }
    results["machine"] = f"{platform.platform()}, Python {platform.python_version()}"
    (ROOT / "benchmarks" / "results" / "llama_cpp.json").write_text(
        json.dumps(results, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
