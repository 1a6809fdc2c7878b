"""Short runs of training from rewards: a random model, prompts with a common beginning, and what
can go wrong between sampler and trainer.

Run by test_rollouts.py in processes of its own, whose compiler is a user's, and for all cases by
hand. It prints as JSON the largest mismatch of each run, and how many tokens it compared::

    python tests/rewarded.py exact
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/rewarded.py meshes
    python tests/rewarded.py some
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
from helpers import shared_programs
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
LONG_LOOP = dataclasses.replace(LOOP, batch_size=64, steps=2, eval_every=100)
EXACT = {
    f"{dtype}, {parts} parts": {"dtype": dtype, "accumulation": parts}
    for dtype in ("float32", "bfloat16")
    for parts in (1, 2, 8)
}
EIGHT = {"batch_size": 8, "steps": 12}
EXACT |= {
    "bfloat16, 8 answers, 2 parts": {"dtype": "bfloat16", "accumulation": 2} | EIGHT,
    "adapters, divergence, two updates": {
        "grpo": dataclasses.replace(LONG, kl=0.1, updates=2),
        "lora": LoraConfig(rank=4, alpha=8.0),
        "steps": 4,
    },
}
USUAL = "float32, 8 parts"
SOME = (USUAL, "bfloat16, 8 answers, 2 parts", "adapters, divergence, two updates")
IN_PARTS = {"dtype": "bfloat16", "accumulation": 2}
CASES = {
    "exact": EXACT,
    "some": {case: EXACT[case] for case in SOME},
    "meshes": {
        "data=8": {"mesh": MeshConfig(data=8)},
        "data=4 fsdp=2": {**IN_PARTS, "mesh": MeshConfig(data=4, fsdp=2)},
    },
    "a mesh": {"data=2 fsdp=2": {**IN_PARTS, "mesh": MeshConfig(data=2, fsdp=2)}},
}


def exact_run(folder, name, grpo=LONG, lora=LoraConfig(), mesh=MeshConfig(), **fields):  # noqa: B008
    """Run in exact mode, with over 1,000 tokens of answers and prompts in the prefix cache."""
    loop = dataclasses.replace(LONG_LOOP, **fields)
    return train(folder, name, grpo=grpo, loop=loop, sampling=TRUNCATED, lora=lora, mesh=mesh)


class Scored(Exception):
    """The mismatch of a run's first batch, before a step, which compiles longest."""


def raise_scored(run, *_):
    raise Scored(run.batches.records[0]["mismatch_max"])


def first_mismatch(folder, name):
    with mock.patch("jllama.training.loop.program_for", raise_scored):
        try:
            exact_run(folder, name, **EXACT[USUAL])
        except Scored as scored:
            return scored.args[0]
    raise AssertionError("the run has ended without a batch")


# Mistakes that others met


def rounded(array):
    return array.astype(jnp.bfloat16).astype(array.dtype)


def stale_prefixes(engine, model):
    """The prefix cache stays as it was when the weights change."""
    prefixes = dict(engine._prefixes)
    replace_weights(engine, model)
    engine._prefixes.update(prefixes)


def setting_of_the_sampler_alone(name):
    """The trainer leaves a setting out; a temperature becomes 1."""

    def settings(*arguments):
        others = {key: array for key, array in settings_of(*arguments).items() if key != name}
        return {"temperature": np.ones_like(others["num_ids"], np.float32), **others}

    return mock.patch.object(rollouts, "drawn_settings", settings)


def mask_off_by_one(*arguments):
    """Log-probabilities of the sampler are those of the token before."""
    batch = assemble(*arguments)
    sampler = np.roll(batch.sampled.sampler, -1, axis=1)
    return batch._replace(sampled=batch.sampled._replace(sampler=sampler))


def head_in_bfloat16(logits, drawn):
    """The trainer's logits are rounded."""
    return drawn_score(rounded(logits), drawn)


def rope_in_bfloat16(*arguments, **options):
    """The trainer's RoPE tables are rounded."""
    return [
        dataclasses.replace(inputs, cos=rounded(inputs.cos), sin=rounded(inputs.sin))
        for inputs in inputs_of(*arguments, **options)
    ]


replace_weights, settings_of = Engine.replace_weights, rollouts.drawn_settings
assemble, inputs_of = rollouts.assemble, exact.attention_inputs
drawn_score = objectives.drawn_score
MISTAKES = {
    "stale prefix cache": mock.patch.object(Engine, "replace_weights", stale_prefixes),
    "top-p of the sampler alone": setting_of_the_sampler_alone("top_p"),
    "temperature of the sampler alone": setting_of_the_sampler_alone("temperature"),
    "mask off by one": mock.patch.object(rollouts, "assemble", mask_off_by_one),
    "head in bfloat16": mock.patch.object(objectives, "drawn_score", head_in_bfloat16),
    # The trainer computes fewer tokens at once than the sampler.
    "blocks of another size": mock.patch.object(step, "sampler_block", return_value=3),
    "RoPE tables in bfloat16": mock.patch.object(exact, "attention_inputs", rope_in_bfloat16),
}
IN_PROGRAMS = ("head in bfloat16", "blocks of another size", "RoPE tables in bfloat16")
"""Mistakes of the trainer's programs; the others are of what programs are called with."""


def mistaken(folder, mistakes):
    """Return the largest mismatch with each mistake, as ``main`` has it without one."""
    report = {}
    for mistake in mistakes:
        with MISTAKES[mistake]:
            if mistake == "stale prefix cache":  # which shows after a step
                mismatch = largest_mismatch(exact_run(folder, mistake, **EXACT[USUAL]))
            else:
                mismatch = first_mismatch(folder, mistake)
        report[mistake] = [mismatch, 0]
    return report


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
        with shared_programs():
            for case, options in CASES[which].items():
                run = exact_run(folder, case, **options)
                tokens = sum(line["sampled_tokens"] for line in lines(run, "sampled_tokens"))
                report[case] = [largest_mismatch(run), tokens]
            if which == "some":
                report |= mistaken(folder, [name for name in MISTAKES if name not in IN_PROGRAMS])
        if which == "some":
            report |= mistaken(folder, IN_PROGRAMS)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
