"""Training from rewards, here and by TRL: seconds of a step and of its phases, on a CPU.

    python -m venv trl && trl/bin/pip install trl accelerate torch
    python tests/fetch_real_weights.py && python benchmarks/grpo.py --peer_python trl/bin/python

writes benchmarks/results/grpo.json. TRL's ``GRPOTrainer`` generates with transformers. Both have
the same weights (a small random model, and SmolLM2-135M-Instruct), float32, prompts, reward, number
and maximum length of answers, AdamW, token-level loss, one update a batch, and no divergence. Whole
processes are run in turns; a step is the median of those after the first two, which compile or warm
up. TRL does not score answers before the update; jllama does, to measure the mismatch.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

THREADS = 2
NUM_WARM_STEPS = 2
CASES = {
    "small": {"batch_size": 64, "group_size": 8, "answer_tokens": 64, "steps": 6},
    "smollm2": {"batch_size": 16, "group_size": 8, "answer_tokens": 64, "steps": 6},
}
WAYS = ("jllama", "trl")


def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """Reward answers of different letters, as TRL calls a reward."""
    return [float(len({*completion})) for completion in completions]


def score(prompt: Any, answers: Any, row: Any) -> list[float]:
    """Return the same reward, as jllama calls one."""
    return [float(len({*answer})) for answer in answers]


def prepare(case: str, folder: Path) -> None:
    """Write the checkpoint and the prompts."""
    import jax
    import numpy as np

    import jllama
    from jllama.core.model import initial_params

    source = Path(
        os.environ.get("JLLAMA_REAL_WEIGHTS") or "~/.cache/jllama/real_weights"
    ).expanduser()
    model = jllama.load(source / "SmolLM2-135M-Instruct.Q4_1.gguf", layout="training")
    if case == "small":
        config = jllama.LlamaConfig(
            model.config.vocab_size,
            num_layers=8,
            embed_dim=256,
            num_heads=8,
            num_kv_heads=4,
            max_seq_len=512,
        )
        params = jax.tree.map(np.asarray, initial_params(jax.random.key(0), config))
        model = dataclasses.replace(model, config=config, params=params)
    jllama.save(model, folder / "model", "hf", "float32")
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(200):
            prompt = f"The sum of {number + 100} and {number + 300} is a number that"
            file.write(json.dumps({"prompt": prompt}) + "\n")


def run_jllama(case: str, folder: Path) -> list[dict[str, float]]:
    """Return the seconds of each step and of its phases, and the sampled tokens."""
    sizes = CASES[case]
    run = folder / "run"
    options = {
        "init_from": folder / "model",
        "run_dir": run,
        "data.path": folder / "prompts.jsonl",
        "reward": f"{__file__}:score",
        "sampling.temperature": 1.0,
        "sampling.top_p": 1.0,
        "optimizer.learning_rate": 1e-6,
        "optimizer.schedule": "constant",
        "training.dtype": "float32",
        "training.batch_size": sizes["batch_size"],
        "training.seq_len": sizes["answer_tokens"] + 19,
        "training.steps": sizes["steps"],
        "training.eval_every": sizes["steps"],
        "training.log_every": 1,
        "training.grpo.group_size": sizes["group_size"],
        "training.grpo.max_answer_tokens": sizes["answer_tokens"],
        "training.grpo.mask_overlong": "false",
        "training.grpo.eval_prompts": 1,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "jllama", "train", *arguments, "--overwrite", "--yes"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    names = ("step_s", "sampling_s", "reward_s", "scoring_s", "training_s", "sampled_tokens")
    return [{name: line[name] for name in names} for line in lines if "reward" in line]


def run_trl(case: str, folder: Path) -> list[dict[str, float]]:
    """Return the same of TRL's trainer; its scoring is part of what it does before training."""
    import torch
    import transformers

    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")

    torch.set_num_threads(THREADS)
    sizes = CASES[case]
    steps: list[dict[str, float]] = []
    phases = {"sampling_s": 0.0, "reward_s": 0.0, "prepared_s": 0.0}
    tokens = 0

    class Timed(trl.GRPOTrainer):
        """Measures the phases of a step."""

        def _generate(self, *arguments: Any) -> Any:
            nonlocal tokens
            start_s = time.perf_counter()
            result = super()._generate(*arguments)
            phases["sampling_s"] += time.perf_counter() - start_s
            tokens += sum(map(len, result[1]))
            return result

        def _calculate_rewards(self, *arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = super()._calculate_rewards(*arguments)
            phases["reward_s"] += time.perf_counter() - start_s
            return result

        def _generate_and_score_completions(self, *arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = super()._generate_and_score_completions(*arguments)
            phases["prepared_s"] += time.perf_counter() - start_s
            return result

    class Clock(transformers.TrainerCallback):
        """Writes down each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal tokens
            self.start_s = time.perf_counter()
            phases.update(dict.fromkeys(phases, 0.0))
            tokens = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = time.perf_counter() - self.start_s
            others_s = phases["sampling_s"] + phases["reward_s"]
            step = {
                "step_s": step_s,
                "sampling_s": phases["sampling_s"],
                "reward_s": phases["reward_s"],
                "scoring_s": phases["prepared_s"] - others_s,
                "training_s": step_s - phases["prepared_s"],
                "sampled_tokens": tokens,
            }
            steps.append(step)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").open()]
    options = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=sizes["batch_size"],
        num_generations=sizes["group_size"],
        max_completion_length=sizes["answer_tokens"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        max_steps=sizes["steps"],
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    dataset = datasets.Dataset.from_list(rows)
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=options,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return steps


def summary(runs: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the medians of steps after the first ones, of all runs, and the share of sampling."""
    steps = [step for run in runs for step in run[NUM_WARM_STEPS:]]
    result = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    result["sampling_share"] = result["sampling_s"] / result["step_s"]
    result["answer_tokens_per_s"] = result["sampled_tokens"] / result["step_s"]
    result["first_step_s"] = statistics.median(run[0]["step_s"] for run in runs)
    return {name: round(value, 4) for name, value in result.items()}


def run(way: str, case: str, folder: Path, peer_python: str) -> list[dict[str, float]]:
    """Run one way."""
    if way != "trl":
        return run_jllama(case, folder)
    command = [peer_python, __file__, "--way", "trl", "--case", case, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer_python", help="the Python that has trl")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run_trl(options.case[0], Path(options.folder))))
        return
    path = Path(__file__).parent / "results" / "grpo.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in options.case or CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(case, folder)
            runs: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
            for _ in range(options.repeats):
                for way in WAYS:
                    runs[way].append(run(way, case, folder, options.peer_python))
        ways = {way: summary(runs[way]) for way in WAYS}
        ratios = {way: round(ways["trl"]["step_s"] / ways[way]["step_s"], 2) for way in WAYS[:2]}
        report[case] = {**CASES[case], "ways": ways, "step of trl over that of": ratios}
        print(json.dumps(report[case], indent=1), flush=True)
    versions = [sys.executable, "-c", _VERSIONS], [options.peer_python, "-c", _VERSIONS]
    report["versions"] = {}
    for command in versions:
        report["versions"] |= json.loads(subprocess.check_output(command))
    report["device"] = f"{platform.machine()}, {os.cpu_count()} cores, cpu"
    path.write_text(json.dumps(report, indent=1) + "\n")


_VERSIONS = """
import importlib.metadata, importlib.util, json
names = [p for p in ("jax", "torch", "transformers", "trl") if importlib.util.find_spec(p)]
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""


if __name__ == "__main__":
    main()
