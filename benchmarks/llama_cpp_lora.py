"""GGUF LoRA files that jllama writes, run by llama.cpp beside their base: log-probabilities against the float64 oracle.

A small random model whose heads share keys and values and are not as wide together as the embedding, 600 tokens, keys
and values kept in float32, and an adapter of every matrix, about as strong as the base; beside it, how far off mistakes
would be. Needs a Python that has llama.cpp:

    pip install llama-cpp-python && python benchmarks/llama_cpp_lora.py
    python benchmarks/llama_cpp_lora.py --python OTHER/bin/python
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jllama import LanguageModel, LlamaConfig, oracle, save
from jllama.checkpoints import adapters
from jllama.checkpoints.registry import open_checkpoint
from jllama.checkpoints.tensors import Checkpoint, load_params, permuted
from jllama.config import LoraConfig
from jllama.parameters import tensor_specs
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
    max_seq_len=1024,
)
TOKENS = [1, *map(int, np.random.default_rng(0).integers(3, 259, 599))]
PROGRAM = """
import json, sys
import llama_cpp, numpy
base, adapter, tokens, out = sys.argv[1:]
model = llama_cpp.Llama(base, lora_path=adapter or None, n_ctx=1024, n_batch=1024, logits_all=True, type_k=0, type_v=0,
                        flash_attn=False, verbose=False)
model.eval(json.loads(tokens))
numpy.save(out, model.scores[:len(json.loads(tokens))])
print(llama_cpp.__version__)
"""


MISTAKES = {
    "alpha_not_divided_by_the_rank": lambda lora: dataclasses.replace(
        lora, alpha=lora.alpha * lora.rank
    ),
    "alpha_divided_twice": lambda lora: dataclasses.replace(lora, alpha=lora.alpha / lora.rank),
}
ROWS = {
    "queries_and_keys_not_permuted": lambda tensor, head_dim, to_half_split: tensor,
    "keys_permuted_with_the_heads_of_queries": lambda tensor, head_dim, to_half_split: permuted(
        tensor, tensor.shape[0] // CONFIG.num_heads, to_half_split
    ),
}


def random_adapter(lora: LoraConfig) -> adapters.Adapter:
    rng = np.random.default_rng(1)
    tensors = {}
    for spec in tensor_specs(CONFIG):
        if spec.path.removeprefix("layers/") in lora.targets:
            outputs, inputs = spec.shape
            tensors[f"{spec.key}/a"] = rng.standard_normal((lora.rank, inputs)) / np.sqrt(inputs)
            tensors[f"{spec.key}/b"] = rng.standard_normal((outputs, lora.rank)) / np.sqrt(
                4 * lora.rank
            )
    tensors = {key: each.astype(np.float32) for key, each in tensors.items()}
    return adapters.Adapter(lora, tensors, CONFIG, Path("adapter"))


def oracle_log_probabilities(checkpoint: Checkpoint) -> np.ndarray:
    return log_softmax(oracle.forward(load_params(checkpoint), np.array([TOKENS]), CONFIG)[0])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--python", default=sys.executable, help="a Python that has the package llama-cpp-python"
    )
    python = parser.parse_args().python
    folder = Path(tempfile.mkdtemp())
    base, alone, out = folder / "base.gguf", folder / "adapter.gguf", folder / "logits.npy"
    save(LanguageModel(CONFIG, random_params(CONFIG, 0), BytesTokenizer()), base, "gguf")
    opened = open_checkpoint(base)

    def llama_cpp(adapter: adapters.Adapter | None) -> np.ndarray:
        if adapter:
            adapters.write_gguf(adapter, alone, None, lambda _: None)
        argv = [
            python,
            "-c",
            PROGRAM,
            str(base),
            str(alone) if adapter else "",
            json.dumps(TOKENS),
            str(out),
        ]
        results["llama_cpp_python"] = subprocess.run(
            argv, check=True, capture_output=True, text=True
        ).stdout.strip()
        return log_softmax(np.load(out))

    results: dict[str, Any] = {"tokens": len(TOKENS)}
    expected = oracle_log_probabilities(opened)
    results["base_alone"] = {
        "largest_difference_from_the_oracle": float(np.abs(llama_cpp(None) - expected).max())
    }
    for name, more in {"lora": {}, "rslora": {"rank_stabilized": True}}.items():
        adapter = random_adapter(LoraConfig(6, 3.0 if more else 9.0, **more))
        expected = oracle_log_probabilities(adapters.merged(opened, adapter))
        found = {
            "largest_difference_from_the_oracle": llama_cpp(adapter),
            "without_the_adapter": llama_cpp(None),
        }
        for mistake, wrong in MISTAKES.items():
            found[mistake] = llama_cpp(dataclasses.replace(adapter, lora=wrong(adapter.lora)))
        for mistake, rows in ROWS.items():
            with mock.patch.object(adapters, "permuted", rows):
                found[mistake] = llama_cpp(adapter)
        results[name] = {
            case: float(np.abs(log_probs - expected).max()) for case, log_probs in found.items()
        }
    shutil.rmtree(folder)
    results["machine"] = f"{platform.platform()}, Python {platform.python_version()}"
    print(json.dumps(results, indent=2))
    (ROOT / "benchmarks" / "results" / "llama_cpp_lora.json").write_text(
        json.dumps(results, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
