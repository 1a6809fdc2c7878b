"""Short runs of training from rewards: a random model, prompts with a common beginning, and what
can go wrong between sampler and trainer.

Run by test_rollouts.py in processes of its own, whose compiler is a user's, and for all cases by
hand. It prints as JSON the largest mismatch of each run, and how many tokens it compared::

    python tests/rewarded.py exact
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/rewarded.py meshes
    python tests/rewarded.py mistakes
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
from models import SERVED, random_params

import jllama
from jllama import GrpoConfig, LoopConfig, OptimizerConfig, SamplingParams, TrainConfig
from jllama.config import LoraConfig
from jllama.data.config import DataConfig
from jllama.generation import engine
from jllama.generation.engine import Engine
from jllama.language_model import LanguageModel
from jllama.sharding import MeshConfig
from jllama.tokenizers import BytesTokenizer
from jllama.training import exact, objectives, rollouts, step

CONFIG = dataclasses.replace(SERVED, max_seq_len=64)
GRPO = GrpoConfig(group_size=4, max_answer_tokens=8, eval_prompts=4, mask_overlong=False)
LOOP = LoopConfig(
    objective="grpo",
    dtype="float32",
    batch_size=8,
    seq_len=47,
    steps=4,
    eval_every=2,
    log_every=1,
    grpo=GRPO,
)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0)
FEW_LETTERS = "expression:-(answer | list | unique | list | length)"
"""A reward that random answers differ in."""


def prepare(folder, seed=0):
    """Write a random model with a tokenizer, and prompts."""
    model = LanguageModel(CONFIG, random_params(CONFIG, seed), BytesTokenizer())
    jllama.save(model, folder / "base", "orbax")
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(20):
            row = {"prompt": f"What is the sum of {number:02}+{number:02}?", "number": number}
            file.write(json.dumps(row) + "\n")


def train(folder, name, *, reward=FEW_LETTERS, grpo=GRPO, loop=LOOP, sampling=SAMPLING, **options):
    """Run, and return the run's folder."""
    config = TrainConfig(
        CONFIG,
        init_from=str(folder / "base"),
        run_dir=str(folder / name),
        data=DataConfig(path=str(folder / "prompts.jsonl"), cache_dir=str(folder / "cache")),
        reward=reward,
        sampling=sampling,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.0),
        training=dataclasses.replace(loop, grpo=grpo),
        **options,
    )
    jllama.train(config)
    return folder / name


def lines(run, key, name="metrics.jsonl"):
    """The records of a run that have a key."""
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [record for record in records if key in record]


def largest_mismatch(run):
    return max(line["mismatch_max"] for line in lines(run, "mismatch_max"))


# Runs in exact mode

TRUNCATED = SamplingParams(temperature=0.7, top_p=0.9)
LONG = dataclasses.replace(GRPO, exact=True, max_answer_tokens=16)
LONG_LOOP = dataclasses.replace(LOOP, batch_size=64, steps=3, eval_every=3)
EXACT = {
    f"{dtype}, {parts} parts": {"dtype": dtype, "accumulation": parts}
    for dtype in ("float32", "bfloat16")
    for parts in (1, 2, 8)
}
EXACT |= {
    "bfloat16, 8 answers": {"dtype": "bfloat16", "batch_size": 8},
    "adapters, divergence, two updates": {
        "dtype": "float32",
        "grpo": dataclasses.replace(LONG, kl=0.1, updates=2),
        "lora": LoraConfig(rank=4, alpha=8.0),
    },
}
EIGHT_DEVICES = {
    "data=8": {"dtype": "float32", "mesh": MeshConfig(data=8)},
    "data=4 fsdp=2": {"dtype": "bfloat16", "accumulation": 2, "mesh": MeshConfig(data=4, fsdp=2)},
}


SOME = (
    "float32, 8 parts",
    "bfloat16, 2 parts",
    "bfloat16, 8 answers",
    "adapters, divergence, two updates",
)
CASES = {
    "exact": EXACT,
    "some": {case: EXACT[case] for case in SOME},
    "meshes": EIGHT_DEVICES,
    "a mesh": {"data=4 fsdp=2": EIGHT_DEVICES["data=4 fsdp=2"]},
}


def exact_run(folder, name, *, dtype, accumulation=1, batch_size=64, grpo=LONG, **options):
    """Run in exact mode, with tokens of over 1,000 answers and prompts in the prefix cache."""
    steps = 192 // batch_size
    if grpo.updates > 1:
        steps = 4
    loop = dataclasses.replace(
        LONG_LOOP,
        dtype=dtype,
        accumulation=accumulation,
        batch_size=batch_size,
        steps=steps,
        eval_every=steps,
    )
    return train(folder, name, grpo=grpo, loop=loop, sampling=TRUNCATED, **options)


# Mistakes that others met


@contextlib.contextmanager
def stale_prefixes():
    """The prefix cache stays as it was when the weights change."""
    replace_weights = Engine.replace_weights

    def replace(self, model):
        prefixes = dict(self._prefixes)
        replace_weights(self, model)
        self._prefixes.update(prefixes)

    with mock.patch.object(Engine, "replace_weights", replace):
        yield


@contextlib.contextmanager
def head_in_bfloat16():
    """The trainer's logits are rounded."""
    score = objectives.drawn_score

    def rounded(logits, drawn):
        return score(logits.astype(jnp.bfloat16).astype(logits.dtype), drawn)

    with mock.patch.object(objectives, "drawn_score", rounded):
        yield


@contextlib.contextmanager
def setting_of_the_sampler_alone(name):
    """The trainer leaves a setting out; a temperature becomes 1."""
    settings_of = rollouts.drawn_settings

    def settings(*arguments):
        found = settings_of(*arguments)
        found.pop(name)
        return {"temperature": np.ones_like(found["num_ids"], np.float32), **found}

    with mock.patch.object(rollouts, "drawn_settings", settings):
        yield


@contextlib.contextmanager
def mask_off_by_one():
    """Log-probabilities of the sampler are those of the token before."""
    assemble = rollouts.assemble

    def shifted(*arguments):
        batch = assemble(*arguments)
        sampler = np.roll(batch.sampled.sampler, -1, axis=1)
        return batch._replace(sampled=batch.sampled._replace(sampler=sampler))

    with mock.patch.object(rollouts, "assemble", shifted):
        yield


@contextlib.contextmanager
def blocks_of_another_size():
    """The trainer computes fewer tokens at once than the sampler."""
    with mock.patch.object(step, "sampler_block", return_value=3):
        yield


@contextlib.contextmanager
def rope_in_bfloat16():
    """The trainer's RoPE tables are rounded."""
    inputs_of = exact.attention_inputs

    def rounded(*arguments, **options):
        return [
            dataclasses.replace(
                inputs,
                cos=inputs.cos.astype(jnp.bfloat16).astype(inputs.cos.dtype),
                sin=inputs.sin.astype(jnp.bfloat16).astype(inputs.sin.dtype),
            )
            for inputs in inputs_of(*arguments, **options)
        ]

    with mock.patch.object(exact, "attention_inputs", rounded):
        yield


MISTAKES = {
    "stale prefix cache": stale_prefixes,
    "head in bfloat16": head_in_bfloat16,
    "top-p of the sampler alone": lambda: setting_of_the_sampler_alone("top_p"),
    "temperature of the sampler alone": lambda: setting_of_the_sampler_alone("temperature"),
    "mask off by one": mask_off_by_one,
    "blocks of another size": blocks_of_another_size,
    "RoPE tables in bfloat16": rope_in_bfloat16,
}


def main(which):
    """Print the largest mismatch of each run, and how many tokens it has sampled."""
    report = {}
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(engine.CHUNK_TOKENS, cpu=16),
        contextlib.redirect_stdout(sys.stderr),
    ):
        folder = Path(name)
        prepare(folder)
        if which == "mistakes":
            for mistake, plant in MISTAKES.items():
                with plant():
                    run = exact_run(folder, mistake, dtype="float32")
                report[mistake] = largest_mismatch(run)
        else:
            for case, options in CASES[which].items():
                run = exact_run(folder, case, **options)
                tokens = sum(line["sampled_tokens"] for line in lines(run, "sampled_tokens"))
                report[case] = [largest_mismatch(run), tokens]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
