"""Decoding SmolLM2-135M here and with transformers on torch: the same weights, prompts and threads, in one run.

    python tests/fetch_real_weights.py && python benchmarks/decode.py

writes benchmarks/results/decode.json. Both are measured in turn, repeat by repeat, and medians are compared.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import torch
import transformers

import jllama
from jllama.commands import bench
from jllama.commands.model import ModelOptions
from jllama.evaluation.scoring import score_texts

NEW_TOKENS, RAGGED_NEW_TOKENS, PROMPT_TOKENS, CONTEXT = 128, 64, 512, 32
THREADS = 2


def their_generate_s(model: transformers.PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of transformers' ``generate``, greedy, padded on the left, without a stop."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--text", default="", help="a text on which to compare the perplexity of int8 weights")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    folder = Path(os.environ.get("JLLAMA_REAL_WEIGHTS") or "~/.cache/jllama/real_weights").expanduser()
    checkpoint = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = jllama.load(checkpoint)
    config, small = model.config, jllama.load(checkpoint, quantize="int8")
    with tempfile.TemporaryDirectory() as exported:
        jllama.save(model, Path(exported) / "hf", format="hf")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"{exported}/hf", dtype=torch.float32).eval()
    one, many = (bench.random_prompts(lengths, config.vocab_size) for lengths in ([CONTEXT], bench.RAGGED_TOKENS))
    long = bench.random_prompts([PROMPT_TOKENS], config.vocab_size)
    makers = {
        "jllama": lambda prompts, new: bench.generate_s(model, prompts, new),
        "jllama int8": lambda prompts, new: bench.generate_s(small, prompts, new),
        "transformers": lambda prompts, new: their_generate_s(theirs, prompts, new),
    }
    kinds = {
        "decode": lambda make: (NEW_TOKENS - 1) / (make(one, NEW_TOKENS) - make(one, 1)),
        "prefill": lambda make: PROMPT_TOKENS / make(long, 1),
        "ragged": lambda make: len(many) * RAGGED_NEW_TOKENS / make(many, RAGGED_NEW_TOKENS),
    }
    figures: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in makers} for kind in kinds}
    bandwidths = []
    for repeat in range(options.repeats + 1):  # the first is not counted: it compiles
        bandwidths.append(bench.memory_bandwidth())
        for kind, measure in kinds.items():
            for name, make in makers.items():
                speed = measure(make)
                print(f"{kind:8} {name:12} {speed:8.1f} tokens/s", file=sys.stderr)
                if repeat:
                    figures[kind][name].append(speed)
    bandwidth = statistics.median(bandwidths)
    medians = {kind: {name: statistics.median(all) for name, all in each.items()} for kind, each in figures.items()}
    context = CONTEXT + NEW_TOKENS // 2
    ragged_context = sum(bench.RAGGED_TOKENS) // len(many) + RAGGED_NEW_TOKENS // 2
    limits = {
        "decode": bandwidth / bench.bytes_per_step(model, 1, context),
        "ragged": len(many) * bandwidth / bench.bytes_per_step(model, len(many), ragged_context),
    }
    result = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers")},
        "repeats": options.repeats,
        "tokens_per_s": medians,
        "ratio_to_transformers": {
            kind: {name: each[name] / each["transformers"] for name in ("jllama", "jllama int8")}
            for kind, each in medians.items()
        },
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "share_of_memory_limit": {kind: medians[kind]["jllama"] / limit for kind, limit in limits.items()},
        "first_token_s": [bench.first_token_s(ModelOptions(checkpoint=str(checkpoint))) for _ in range(2)],
    }
    if options.text:
        text = Path(options.text).read_text(encoding="utf-8")
        result["perplexity"] = {
            name: score_texts(each, [text], window=1024, stride=512).perplexity
            for name, each in (("float32", model), ("int8", small))
        }
    path = Path(__file__).parent / "results" / "decode.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
