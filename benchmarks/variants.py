"""Two comparisons of two models on tiny Shakespeare, from several seeds.

`kv_heads`: multi-head attention against grouped-query attention with half the key-value heads, as
in the BabyLlama write-up, at a size for two cores; with the table of seven sampling settings from
both. `norms`: RMSNorm against LayerNorm (with a bias) before attention and feed-forward, added from
outside as docs/extend.md has it.

    python benchmarks/variants.py kv_heads --data tinyshakespeare.txt
    python benchmarks/variants.py norms --data tinyshakespeare.txt

Writes benchmarks/results/NAME.json, run by run, and docs/results/NAME.svg. Results that are
there already are not computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import ROOT, panels, table, write

import jllama
from jllama.core.config import BLOCKS
from jllama.core.model import Layer
from jllama.core.parameters import PARAMETERS, Parameter, count_parameters
from jllama.system.memory import program_bytes
from jllama.training.sources import DataSource

SMOOTHED_STEPS = 50
EVALUATIONS = 10
TIMED_STEPS = 20


class LayerNormLayer(Layer):
    """Llama's block with LayerNorm in place of RMSNorm; the norm before the head stays."""

    def normalize(self, x: Any, name: str) -> Any:
        if not hasattr(self, name):  # of outputs, as OLMo 2 has
            return x
        bias = getattr(self, f"{name}_bias")
        return layer_norm(x, getattr(self, name)[...], bias[...], self.norm_eps)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """``(x - mean) / sqrt(variance + eps) * scale + bias`` (Ba et al. 2016, arXiv:1607.06450)."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    return (
        centered
        * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
        * scale
        + bias
    )


BLOCKS["layer_norm"] = LayerNormLayer
for _name in ("attn_norm_bias", "mlp_norm_bias"):
    PARAMETERS[f"layers/{_name}"] = Parameter(
        ("layers", "embed"),
        role="bias",
        init="zeros",
        when=lambda config: config.block == "layer_norm",
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    title: str
    variants: dict[str, jllama.LlamaConfig]
    training: jllama.LoopConfig
    optimizer: jllama.OptimizerConfig
    data: dict[str, Any]
    seeds: int
    prompt: str = ""  # what sampled texts begin with


_heads = {"num_layers": 3, "embed_dim": 256, "num_heads": 8, "max_seq_len": 128}
_char = {
    "num_layers": 3,
    "embed_dim": 128,
    "num_heads": 4,
    "mlp_dim": 256,
    "max_seq_len": 64,
    "tie_embeddings": True,
}
COMPARISONS = {
    "kv_heads": Comparison(
        "3 layers, width 256, 8 heads, BPE of 1,024 tokens",
        {
            "8 key-value heads (MHA)": jllama.LlamaConfig(**_heads, num_kv_heads=8),
            "4 key-value heads (GQA)": jllama.LlamaConfig(**_heads, num_kv_heads=4),
        },
        jllama.LoopConfig(batch_size=8, seq_len=128, steps=600),
        jllama.OptimizerConfig(learning_rate=2e-3, warmup_fraction=0.05),
        {"tokenizer": "bpe", "vocab_size": 1024},
        seeds=2,
        prompt="ROMEO:",
    ),
    "norms": Comparison(
        "shakespeare_char.yaml: 3 layers, width 128, a character a token",
        {
            "RMSNorm": jllama.LlamaConfig(**_char),
            "LayerNorm": jllama.LlamaConfig(**_char, block="layer_norm"),
        },
        jllama.LoopConfig(batch_size=12, seq_len=64, steps=2000),
        jllama.OptimizerConfig(learning_rate=4e-3, warmup_fraction=0.05),
        {"tokenizer": "bytes"},
        seeds=3,
    ),
}


def compiled(
    comparison: Comparison, model: jllama.LlamaConfig, data: Any, seed: int
) -> tuple[Any, Any, Any, Any, Any]:
    """Return a run's configuration, programs, first state, batches and compiled step."""
    model = dataclasses.replace(model, vocab_size=data.tokenizer.vocab_size)
    config = jllama.TrainConfig(
        model, training=comparison.training, optimizer=comparison.optimizer, seed=seed
    )
    training = jllama.compile_training(config)
    sizes = comparison.training
    state = training.init(jax.random.key(seed))
    batches = data.training_batches(batch_size=sizes.batch_size, seq_len=sizes.seq_len, seed=seed)
    return config, training, state, batches, training.step.lower(state, next(batches)).compile()


def train(
    comparison: Comparison, model: jllama.LlamaConfig, data: Any, seed: int
) -> tuple[dict[str, Any], Any]:
    """Train one run; return its curves, up to the loss on all validation text, and its weights."""
    _, training, state, batches, step = compiled(comparison, model, data, seed)
    source = DataSource(dataclasses.replace(training.plan, data=data))
    source.begin(training, None)
    sizes = comparison.training
    losses = []
    points = []
    validation = []
    for number in range(1, sizes.steps + 1):
        state, metrics = step(state, next(batches))
        losses.append(metrics.loss)
        tokens = number * sizes.batch_size * sizes.seq_len
        if number % SMOOTHED_STEPS == 0:
            points.append((tokens, round(float(jnp.mean(jnp.stack(losses))), 4)))
            losses = []
        if number % (sizes.steps // EVALUATIONS) == 0:
            max_tokens = 16_384 if number < sizes.steps else 0
            evaluation = source.evaluate(state, max_tokens, lambda: False)
            validation.append((tokens, round(evaluation.validation_loss, 4)))
    return {"loss": points, "validation_loss": validation}, state.params


def step_s(comparison: Comparison, data: Any) -> dict[str, float]:
    """Measure the median seconds of a step of each variant, alternately."""
    runs = {
        name: compiled(comparison, model, data, 0)[2:]
        for name, model in comparison.variants.items()
    }
    states = {name: state for name, (state, _, _) in runs.items()}
    seconds = {name: [] for name in runs}
    for _, (name, (_, batches, step)) in itertools.product(range(TIMED_STEPS), runs.items()):
        batch = next(batches)
        began_s = time.perf_counter()
        for _ in range(5):
            states[name], metrics = step(states[name], batch)
        float(metrics.loss)
        seconds[name].append((time.perf_counter() - began_s) / 5)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def facts(comparison: Comparison, model: jllama.LlamaConfig, data: Any) -> dict[str, int]:
    """Return parameters, bytes of a compiled step, and cache bytes per token."""
    config, _, _, _, step = compiled(comparison, model, data, 0)
    state_bytes, temporary_bytes = program_bytes(step)
    per_token = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    sizes = {"parameters": count_parameters(config.model), "cache_bytes_per_token": per_token}
    return {**sizes, "step_state_bytes": state_bytes, "step_temporary_bytes": temporary_bytes}


SAMPLED = {
    "greedy": jllama.SamplingParams(0.0),
    "random, T=1": jllama.SamplingParams(1.0, top_k=0, top_p=1.0, seed=1),
    "random, T=0.7": jllama.SamplingParams(0.7, top_k=0, top_p=1.0, seed=1),
    "top-k 40, T=1": jllama.SamplingParams(1.0, top_k=40, top_p=1.0, seed=1),
    "top-k 40, T=0.7": jllama.SamplingParams(0.7, top_k=40, top_p=1.0, seed=1),
    "top-p 0.9, T=1": jllama.SamplingParams(1.0, top_k=0, top_p=0.9, seed=1),
    "top-p 0.9, T=0.7": jllama.SamplingParams(0.7, top_k=0, top_p=0.9, seed=1),
}


def samples(model: jllama.LlamaConfig, params: Any, data: Any, prompt: str) -> str:
    """Return the texts by seven sampling settings, a line each."""
    model = dataclasses.replace(model, vocab_size=data.tokenizer.vocab_size)
    language_model = jllama.LanguageModel(model, params, data.tokenizer)
    prompts = [jllama.Prompt(prompt, sampling, 40) for sampling in SAMPLED.values()]
    completions = jllama.generate(language_model, prompts)
    pairs = zip(SAMPLED, completions, strict=True)
    return "".join(f"{name:18} {prompt + text.text!r}\n" for name, text in pairs)


def draw(comparison: Comparison, runs: dict[str, dict[str, Any]]) -> Any:
    """Draw training loss on the left, validation loss on the right: mean and range over seeds."""
    figure, charts = panels(2)
    for color, name in enumerate(comparison.variants):
        several = [run for key, run in runs.items() if key.startswith(name)]
        for chart, kind in zip(charts, ("loss", "validation_loss"), strict=True):
            columns = list(zip(*(run[kind] for run in several), strict=True))
            x = [column[0][0] / 1e6 for column in columns]
            y = [[loss for _, loss in column] for column in columns]
            style = "-" if kind == "loss" else "o-"
            chart.plot(
                x,
                [statistics.fmean(losses) for losses in y],
                style,
                color=f"C{color}",
                label=name,
                markersize=3,
            )
            chart.fill_between(
                x, [*map(min, y)], [*map(max, y)], color=f"C{color}", alpha=0.25, linewidth=0
            )
    charts[0].set(title="training", xlabel="million tokens", ylabel="nats a token")
    charts[1].set(title="validation", xlabel="million tokens")
    charts[0].legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=COMPARISONS)
    parser.add_argument("--data", type=Path, required=True, help="the tiny Shakespeare text")
    parser.add_argument(
        "--runs",
        type=int,
        default=100,
        help="run at most this many now, and the others in a later call",
    )
    parser.add_argument("--time", action="store_true", help="only time steps, on a quiet machine")
    options = parser.parse_args()
    comparison = COMPARISONS[options.name]
    path = ROOT / "benchmarks" / "results" / f"{options.name}.json"
    data = jllama.prepare_data(
        jllama.DataConfig(str(options.data), validation_fraction=0.1, **comparison.data)
    )
    result = {"model": comparison.title, "runs": {}}
    if path.exists():
        result = json.loads(path.read_text())
    runs = result["runs"]
    if options.time:
        seconds = step_s(comparison, data)
        result["step_s"] = {name: round(median, 5) for name, median in seconds.items()}
        print(result["step_s"])
    pairs = itertools.product(range(comparison.seeds), comparison.variants.items())
    missing = [
        (seed, name, model) for seed, (name, model) in pairs if f"{name}, seed {seed}" not in runs
    ]
    for seed, name, model in missing[: 0 if options.time else options.runs]:
        run, params = train(comparison, model, data, seed)
        runs[f"{name}, seed {seed}"] = run
        result.setdefault("sizes", {})[name] = facts(comparison, model, data)
        if comparison.prompt and seed == 0:
            result.setdefault("samples", {})[name] = samples(model, params, data, comparison.prompt)
        print(f"{name}, seed {seed}: {run['validation_loss'][-1][1]}", flush=True)
        save(options.name, comparison, result)
    save(options.name, comparison, result)


def save(name: str, comparison: Comparison, result: dict[str, Any]) -> None:
    """Write the results so far: sizes, seconds if measured, losses and their spread."""
    runs = result["runs"]
    rows = []
    losses = {}
    for variant in comparison.variants:
        final = [
            run["validation_loss"][-1][1] for key, run in runs.items() if key.startswith(variant)
        ]
        if not final:
            continue
        sizes = result["sizes"][variant]
        seconds = result.get("step_s", {}).get(variant)
        losses[variant] = statistics.fmean(final)
        spread = f"{losses[variant]:.3f} ({', '.join(f'{loss:.3f}' for loss in final)})"
        state, taken = (
            f"{sizes[key] / 2**20:.1f}" for key in ("step_state_bytes", "step_temporary_bytes")
        )
        cells = (
            f"{sizes['parameters']:,}",
            f"{sizes['cache_bytes_per_token']:,}",
            f"{state} + {taken}",
        )
        rows.append([variant, *cells, f"{1e3 * seconds:.1f} ms" if seconds else "", spread])
    step = "a step's state + temporaries, MiB"
    header = [
        "",
        "parameters",
        "cache, bytes a token",
        step,
        "a step",
        "validation loss, mean (each seed)",
    ]
    blocks = [
        f"<details><summary>Seven settings, {variant}</summary>\n\n"
        f"```text\n{text.rstrip()}\n```\n</details>"
        for variant, text in result.get("samples", {}).items()
    ]
    result["final_validation_loss"] = {variant: round(loss, 4) for variant, loss in losses.items()}
    write(name, result, draw(comparison, runs), "\n\n".join([table(header, rows), *blocks]))


if __name__ == "__main__":
    main()
