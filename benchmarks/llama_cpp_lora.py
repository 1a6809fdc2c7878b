"""GGUF LoRA files that jllama writes, run by llama.cpp, against the float64 oracle.

Log-probabilities are compared. The base is a small random model whose heads share keys and values
and are together not as wide as the embedding. An adapter of every matrix is about as strong as the
base. Both run on 600 tokens, with keys and values in float32. The errors of some mistakes are
computed too. Needs a Python that has llama.cpp:

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

from jllama import LanguageModel, LlamaConfig, save
from jllama.formats import adapters
from jllama.formats.registry import open_checkpoint
from jllama.formats.tensors import Checkpoint, load_params, permuted, tensor_specs
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.models.config import LoraConfig
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
    max_seq_len=1024,
)
TOKENS = [1, *map(int, np.random.default_rng(0).integers(3, 259, 599))]
# What a Python with llama.cpp runs: it saves the logits, and prints the version.
PROGRAM = """
import json, sys
import llama_cpp, numpy
base, adapter, tokens, out = sys.argv[1:]
model = llama_cpp.Llama(base, lora_path=adapter or None, n_ctx=1024, n_batch=1024, logits_all=True,
                        type_k=0, type_v=0, flash_attn=False, verbose=False)
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
    tensors = {key: array.astype(np.float32) for key, array in tensors.items()}
    return adapters.Adapter(lora, tensors, CONFIG, Path("adapter"))


def oracle_log_probabilities(checkpoint: Checkpoint) -> np.ndarray:
    return log_softmax(oracle.forward(load_params(checkpoint), np.array([TOKENS]), CONFIG)[0])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.log(oracle.softmax(logits.astype(np.float64)))


class LlamaCpp:
    """llama.cpp with the base, in another Python.

    Attributes:
        version: of the package, once it has run.
    """

    version = ""

    def __init__(self, python: str, folder: Path) -> None:
        self.base = folder / "base.gguf"
        self._adapter = folder / "adapter.gguf"
        self._logits = folder / "logits.npy"
        self._python = python

    def log_probabilities(self, adapter: adapters.Adapter | None) -> np.ndarray:
        """Return the log-probabilities at all tokens, of the base with or without an adapter."""
        if adapter:
            adapters.write_gguf(adapter, self._adapter, None, lambda _: None)
        arguments = [
            str(self.base),
            str(self._adapter) if adapter else "",
            json.dumps(TOKENS),
            str(self._logits),
        ]
        command = [self._python, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        self.version = done.stdout.strip()
        return log_softmax(np.load(self._logits))


def main() -> None:
    """Compare the base and two kinds of adapters, also with mistakes; write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--python", default=sys.executable, help="a Python that has the package llama-cpp-python"
    )
    folder = Path(tempfile.mkdtemp())
    llama_cpp = LlamaCpp(parser.parse_args().python, folder)
    save(LanguageModel(CONFIG, random_params(CONFIG, 0), BytesTokenizer()), llama_cpp.base, "gguf")
    base = open_checkpoint(llama_cpp.base)

    results: dict[str, Any] = {"tokens": len(TOKENS)}
    difference = np.abs(llama_cpp.log_probabilities(None) - oracle_log_probabilities(base)).max()
    results["base_alone"] = {"largest_difference_from_the_oracle": float(difference)}
    for name, lora in {
        "lora": LoraConfig(6, 9.0),
        "rslora": LoraConfig(6, 3.0, rank_stabilized=True),
    }.items():
        adapter = random_adapter(lora)
        log_probs = {
            "largest_difference_from_the_oracle": llama_cpp.log_probabilities(adapter),
            "without_the_adapter": llama_cpp.log_probabilities(None),
        }
        for mistake, change in MISTAKES.items():
            wrong = dataclasses.replace(adapter, lora=change(adapter.lora))
            log_probs[mistake] = llama_cpp.log_probabilities(wrong)
        for mistake, rows in ROWS.items():
            with mock.patch.object(adapters, "permuted", rows):
                log_probs[mistake] = llama_cpp.log_probabilities(adapter)
        expected = oracle_log_probabilities(adapters.merge(base, adapter))
        results[name] = {
            case: float(np.abs(actual - expected).max()) for case, actual in log_probs.items()
        }
    shutil.rmtree(folder)
    results["llama_cpp_python"] = llama_cpp.version
    results["machine"] = f"{platform.platform()}, Python {platform.python_version()}"
    text = json.dumps(results, indent=2)
    print(text)
    (ROOT / "benchmarks" / "results" / "llama_cpp_lora.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
