"""Time and memory of adapters and full fine-tuning of SmolLM2-135M, here and in torch.

    python tests/fetch_real_weights.py && python benchmarks/lora.py

writes benchmarks/results/lora.json. The torch versions are transformers and PEFT. Each way is a
process of its own that takes a step when it is told to, so that the ways alternate; medians are
compared. A row is one conversation, the second half of which counts. Adapters have rank 16, on all
seven matrices of each layer. The loss before the first step must be the same in all ways.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
RANK = 16
ALPHA = 32.0
RATE = 1e-4
WAYS = ("jllama lora", "jllama full", "peft lora", "torch full")
TORCH_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Take = Callable[[], float]
"""Takes a step and returns its loss."""


def tokens_of(options: argparse.Namespace) -> np.ndarray:
    shape = (options.batch_size, options.seq_len + 1)
    return np.random.default_rng(0).integers(20, 40_000, shape).astype(np.int32)


def counted_of(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1]) > tokens.shape[1] // 2, tokens.shape)


def jllama_steps(
    folder: Path, is_lora: bool, options: argparse.Namespace
) -> tuple[Take, dict[str, Any]]:
    """Return jllama's step, and what its program allocates."""
    import jax

    import jllama
    from jllama.core.step import Batch
    from jllama.models.config import LoraConfig
    from jllama.parallel.config import MeshConfig
    from jllama.system.memory import device_bytes, program_bytes
    from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig

    model = jllama.load(folder, layout="training")
    lora = LoraConfig(RANK if is_lora else 0, ALPHA)
    loop = LoopConfig(batch_size=options.batch_size, seq_len=options.seq_len, remat=options.remat)
    optimizer = OptimizerConfig(
        learning_rate=RATE, warmup_fraction=0.0, final_fraction=1.0, weight_decay=0.0
    )
    config = TrainConfig(model.config, str(folder), optimizer=optimizer, training=loop, lora=lora)
    mesh = jllama.make_mesh(MeshConfig(), jax.devices()[:1])
    training = jllama.compile_training(config, mesh)
    state = training.init(jax.random.key(0), model.params)
    tokens = tokens_of(options)
    del model
    rows = Batch(tokens, np.ones_like(tokens), counted_of(tokens))
    compiled = training.step.lower(state, rows).compile()
    arguments, temporaries = program_bytes(compiled)
    facts = {"arguments_bytes": arguments, "temporaries_bytes": temporaries}
    facts |= {
        "trained_bytes": device_bytes(state.params),
        "moments_bytes": device_bytes(state.opt_state),
    }

    def take() -> float:
        nonlocal state
        state, metrics = compiled(state, rows)
        return float(metrics.loss)

    return take, facts


def torch_steps(
    folder: Path, is_lora: bool, options: argparse.Namespace
) -> tuple[Take, dict[str, Any]]:
    """Return transformers' step, with PEFT or without."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if is_lora:
        adapter = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TORCH_TARGETS}
        model = peft.get_peft_model(model, peft.LoraConfig(**adapter))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = tokens_of(options)
    ids = torch.tensor(tokens[:, :-1]).long()
    labels = torch.tensor(np.where(counted_of(tokens), tokens, -100)[:, 1:]).long()

    def take() -> float:
        loss = model(input_ids=ids, shift_labels=labels, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return take, {"trained_bytes": sum(parameter.nbytes for parameter in trained)}


def work(way: str, folder: Path, options: argparse.Namespace) -> None:
    """Take a step for each line of stdin; print its seconds and loss, and at the end the totals."""
    package, kind = way.split()
    make_steps = jllama_steps if package == "jllama" else torch_steps
    take, facts = make_steps(folder, kind == "lora", options)
    facts["first_loss"] = take()  # later steps reuse what this one allocates
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for _ in sys.stdin:
        start_s = time.perf_counter()
        loss = take()
        print(json.dumps({"seconds": time.perf_counter() - start_s, "loss": loss}), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts |= {
        "peak_of_steps_bytes": 1024 * peak,
        "peak_of_process_bytes": 1024 * max(highest, peak),
    }
    print(json.dumps(facts), flush=True)


def measured(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure all ways alternately."""
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--way"]
    workers = {}
    for way in WAYS:
        workers[way] = subprocess.Popen(
            [*command, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        answer_of(workers[way], "\n")  # start one when the one before is ready
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way, worker in workers.items():
            steps[way].append(answer_of(worker, "\n"))
    results = {}
    for way, worker in workers.items():
        seconds = statistics.median(step["seconds"] for step in steps[way])
        tokens_per_s = options.batch_size * options.seq_len / seconds
        results[way] = {"s_per_step": seconds, "tokens_per_s": tokens_per_s, **answer_of(worker)}
    return results


def answer_of(worker: subprocess.Popen, line: str = "") -> dict[str, Any]:
    """Return a worker's answer to a line, or to the end of its input."""
    if line:
        worker.stdin.write(line)
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())
    return json.loads(worker.communicate()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"batch_size": 4, "seq_len": 256, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        return work(options.way, Path(options.folder), options)
    import jllama

    source = Path(
        os.environ.get("JLLAMA_REAL_WEIGHTS") or "~/.cache/jllama/real_weights"
    ).expanduser()
    with tempfile.TemporaryDirectory() as exported:
        jllama.convert(
            source / "SmolLM2-135M-Instruct.Q4_1.gguf", Path(exported) / "hf", "hf", "float32"
        )
        ways = measured(Path(exported) / "hf", options)
    losses = [way["first_loss"] for way in ways.values()]
    assert max(losses) - min(losses) < 1e-3, losses
    adapters = ways["jllama lora"]
    peft = ways["peft lora"]
    full = ways["jllama full"]
    report = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, cpu",
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "torch", "transformers", "peft")
        },
        **{name: getattr(options, name) for name in ("batch_size", "seq_len", "repeats", "remat")},
        "lora_over_full": {
            name: adapters[name] / full[name]
            for name in ("s_per_step", "peak_of_steps_bytes", "peak_of_process_bytes")
        },
        "tokens_per_s_over_peft": adapters["tokens_per_s"] / peft["tokens_per_s"],
        "ways": ways,
    }
    print(json.dumps(report, indent=2))
    (Path(__file__).parent / "results" / "lora.json").write_text(
        json.dumps(report, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
