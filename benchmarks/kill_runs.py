"""Kill a small run repeatedly, resume it, and compare its end with an undisturbed run's.

    python benchmarks/kill_runs.py --kills 40
    python benchmarks/kill_runs.py --kills 10 --lora
    python benchmarks/kill_runs.py --kills 20 --rewards
    python benchmarks/kill_runs.py --kills 20 --bucket gs --faults 0.05

Half of the kills (``SIGKILL``) come at a random moment, half within half a second after a save
begins. Every bit of the last checkpoint's parameters and optimizer state must be equal, and every
line of the loss curve. Every checkpoint that is listed after a kill must be readable. With
``--lora``, adapters of a small random model learn from chats. With ``--rewards``, all weights of it
learn from rewards, held near the weights they began from (``kl``), with two updates a step. With
``--bucket``, the runs are in a bucket of a server on this machine (``gs`` or ``s3``), of which
``--faults`` is the share of requests that meet a 500, 503 or 429, a lost connection, or an answer
that is cut or late; needs ``pip install -e '.[dev]'``.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml

from jllama import LanguageModel, LlamaConfig, initial_params, load, save
from jllama.system.places import as_place
from jllama.system.remote import fetch, list_files
from jllama.tokenizers.base import BytesTokenizer
from jllama.training.mirror import working_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

STEPS = 60
SETTINGS: dict[str, Any] = {
    "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "max_seq_len": 64},
    "data": {"tokenizer": "bytes"},
    "training": {
        "batch_size": 8,
        "steps": STEPS,
        "eval_every": 5,
        "log_every": 1,
        "keep_last": 2,
        "sample_tokens": 0,
    },
}


WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "says",
    "hello",
    "to",
    "trees",
]


def some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def prepare_text(folder: Path, rng: random.Random) -> None:
    (folder / "corpus.txt").write_text("\n".join(some_words(rng, 12) for _ in range(400)))
    SETTINGS["data"]["path"] = str(folder / "corpus.txt")


def prepare_base(folder: Path) -> None:
    """Write a random model to begin from."""
    config = LlamaConfig(BytesTokenizer.vocab_size, **SETTINGS.pop("model"))
    save(
        LanguageModel(config, initial_params(jax.random.key(0), config), BytesTokenizer()),
        folder / "base",
        "hf",
    )
    SETTINGS["init_from"] = str(folder / "base")
    SETTINGS["training"]["seq_len"] = 63


def prepare_chats(folder: Path, rng: random.Random) -> None:
    """Write a random model to adapt, and questions with answers of many lengths."""
    prepare_base(folder)
    pairs = [
        {"prompt": some_words(rng, 2), "completion": some_words(rng, rng.randint(1, 8))}
        for _ in range(400)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    SETTINGS.update(lora={"rank": 4}, data={"path": str(folder / "chats.jsonl")})


def prepare_rewards(folder: Path, rng: random.Random) -> None:
    """Write a random model, and prompts whose answers are rewarded for few different letters."""
    prepare_base(folder)
    prompts = [{"prompt": some_words(rng, 3)} for _ in range(100)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    SETTINGS.update(
        data={"path": str(folder / "prompts.jsonl")},
        reward="expression:-(answer | list | unique | list | length)",
        optimizer={"learning_rate": 1e-2},
    )
    grpo = {"group_size": 4, "max_answer_tokens": 8, "eval_prompts": 4, "kl": 0.5, "updates": 2}
    SETTINGS["training"].update(
        objective="grpo", eval_every=6, grpo={**grpo, "mask_overlong": False}
    )


def start(folder: Path, run: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "jllama",
        "train",
        "--config",
        str(folder / "run.yaml"),
        "--run_dir",
        run,
    ]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JLLAMA_CACHE": str(folder / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [*command, "--resume", "auto"],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def result(place: str) -> tuple[str, str]:
    """Return hashes of the last checkpoint's arrays and of the loss curve."""
    run = fetch(as_place(place)).absolute()
    arrays = hashlib.sha256()
    with ocp.StandardCheckpointer() as reader:
        for item in ("params", "state"):
            for leaf in jax.tree.leaves(reader.restore(run / "checkpoints" / str(STEPS) / item)):
                arrays.update(np.asarray(leaf).tobytes())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    curve += [
        (line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line
    ]
    return arrays.hexdigest(), hashlib.sha256(json.dumps(sorted(curve)).encode()).hexdigest()


def listed(run: str) -> list[int]:
    """The steps whose checkpoints are complete."""
    names = list_files(as_place(run) / "checkpoints")
    mark = "_CHECKPOINT_METADATA" if isinstance(as_place(run), Path) else "complete.json"
    steps = [name.partition("/") for name in names]
    return sorted(int(step) for step, _, name in steps if step.isdigit() and name == mark)


def kill(process: subprocess.Popen, run: str, rng: random.Random) -> bool:
    """Kill a process at a random moment or during a save; return False if it ended before."""
    folder = working_folder(run, 0)
    patterns = ("checkpoints/*.orbax-checkpoint-tmp*", ".uploading/*")
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 12))
    else:
        while process.poll() is None and not any(map(list, map(folder.glob, patterns))):
            time.sleep(0.001)
        time.sleep(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5)]))
    process.kill()
    process.communicate()
    return process.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--rewards", action="store_true")
    parser.add_argument("--bucket", choices=("gs", "s3"))
    parser.add_argument("--faults", type=float, default=0.0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["JLLAMA_CACHE"] = str(folder / "cache")
        place, proxy = str(folder), None
        if options.bucket:
            import servers

            server = stack.enter_context(
                servers.gcs_server() if options.bucket == "gs" else servers.s3_server()
            )
            faults = servers.Faults(rate=options.faults, seed=options.seed, slow_s=0.5)
            proxy = stack.enter_context(servers.faulty_proxy(server, faults))
            stack.enter_context(servers.using(proxy))
            place = f"{options.bucket}://{servers.BUCKET}"
        prepare = prepare_text
        if options.lora:
            prepare = prepare_chats
        elif options.rewards:
            prepare = prepare_rewards
        prepare(folder, rng)
        (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
        peace = start(folder, str(folder / "peace"))
        _, err = peace.communicate()
        assert peace.returncode == 0, err
        expected = result(str(folder / "peace"))

        kills = ends = failures = unreadable = different = left = 0
        while kills < options.kills:
            ends += 1
            run = f"{place}/run{ends}"
            finished = False
            while not finished and kills < options.kills:
                finished = not kill(start(folder, run), run, rng)
                kills += not finished
                for step in listed(run):
                    try:
                        load(run, step=step)
                    except Exception as error:
                        unreadable += 1
                        print(f"kill {kills}: step {step} is listed but {error}")
            last = start(folder, run)
            _, err = last.communicate()
            failures += last.returncode != 0 or "Traceback" in err
            names = list_files(as_place(run) / "checkpoints")
            left += len({name.partition("/")[0] for name in names} - set(map(str, listed(run))))
            if result(run) != expected:
                different += 1
                print(f"run {ends}: another end: {result(run)} instead of {expected}")
            print(f"{kills} kills, {ends} runs", flush=True)
    if proxy:
        print(f"{len(proxy.requests):,} requests, faults injected: {dict(proxy.injected)}")
    print(
        f"{kills} kills in {ends} runs of {STEPS} steps: {failures} could not be resumed, "
        f"{unreadable} checkpoints listed but not readable, {left} left-overs, "
        f"{different} of {ends} ends with other bits or another curve"
    )
    return int(bool(failures or unreadable or different or left))


if __name__ == "__main__":
    sys.exit(main())
