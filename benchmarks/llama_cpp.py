"""GGUF files that jllama writes, run by llama.cpp: log-probabilities against the float64 oracle.

Small random models, with every kind of RoPE scaling that GGUF holds and of every family, run on 600
tokens each. The error of a reader that ignores what is special in the configuration is computed
too. llama.cpp has the sliding window of OLMo 3 only. Needs llama.cpp as a Python package:

    pip install xllamacpp && python benchmarks/llama_cpp.py
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path

import numpy as np
import xllamacpp

from jllama import LanguageModel, LlamaConfig, save
from jllama.core.config import LLAMA_VALUES
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from jllama.tokenizers.base import BytesTokenizer

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
_with = functools.partial(dataclasses.replace, CONFIG)
_YARN = YarnScaling(4.0, original_max_seq_len=512)
_OLMO = {"norm_placement": "after", "qk_norm": "whole", "head_dim": 32}
MODELS = {
    "plain": CONFIG,
    "linear": _with(rope_scaling=LinearScaling(4.0)),
    "llama3": _with(rope_scaling=Llama3Scaling(8.0, original_max_seq_len=512)),
    "yarn": _with(rope_scaling=_YARN),
    "yarn with an attention factor": _with(
        rope_scaling=YarnScaling(4.0, original_max_seq_len=512, attention_factor=0.7)
    ),
    "Qwen 2.5": _with(attention_bias=True, tie_embeddings=True, head_dim=32),
    "Qwen 2.5 with yarn": _with(attention_bias=True, rope_scaling=_YARN, head_dim=32),
    "Qwen 3": _with(qk_norm="head"),
    "SmolLM3": _with(num_layers=4, no_rope_layers=(3,)),
    "OLMo 2": _with(**_OLMO),
    "OLMo 3": _with(
        **_OLMO,
        num_layers=4,
        sliding_window=100,
        full_attention_layers=(3,),
        rope_scaling=_YARN,
        rope_scaling_layers="full_attention",
    ),
    "Phi with partial rotation": _with(partial_rotary_factor=0.75, head_dim=32),
    "Granite 3": _with(
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=1 / 64,
        logits_scaling=8.0,
        head_dim=32,
    ),
}
_OPTIONS_WITHOUT_TENSORS = (
    "no_rope_layers",
    "sliding_window",
    "full_attention_layers",
    "partial_rotary_factor",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


def without_options(config: LlamaConfig) -> LlamaConfig:
    """Return the model as a Llama without scaling, as far as its tensors allow."""
    values = {name: LLAMA_VALUES[name] for name in _OPTIONS_WITHOUT_TENSORS}
    return dataclasses.replace(config, rope_scaling=None, **values)


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
        # It gives no log-probabilities where the sampled byte is no character. The probabilities
        # are those before this bias.
        "logit_bias": [[ord("a"), 1000.0]],
    }
    answer = xllamacpp.Server(settings).handle_completions(request)
    if isinstance(answer, str):
        answer = json.loads(answer)
    log_probs = np.full(CONFIG.vocab_size, np.nan)
    if not answer["choices"][0]["logprobs"]:
        raise SystemExit(f"llama.cpp gives no log-probabilities: {answer}")
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        log_probs[entry["id"]] = entry["logprob"]
    return log_probs


def main() -> None:
    """Compare every model, print the differences, and write them down."""
    tokens = [1, *map(int, np.random.default_rng(0).integers(3, 259, 599))]
    results = {}
    for name, config in MODELS.items():
        params = random_params(config, 0, embed_std=0.1)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            save(LanguageModel(config, params, BytesTokenizer()), path, "gguf")
            log_probs = llama_cpp_log_probabilities(path, tokens)
        expected = oracle_log_probabilities(params, config, tokens)
        results[name] = {
            "tokens_with_a_probability": int(np.isfinite(log_probs).sum()),
            "largest_difference_from_the_oracle": largest_difference(log_probs, expected),
            "if_the_options_were_ignored": None,
        }
        plain = without_options(config)
        if plain != config:
            ignored = oracle_log_probabilities(params, plain, tokens)
            results[name]["if_the_options_were_ignored"] = largest_difference(log_probs, ignored)
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
