"""Short runs of training from rewards: a random model, prompts with a common beginning, and what
can go wrong between sampler and trainer.
"""

import dataclasses
import json
from unittest import mock

import jax.numpy as jnp
import numpy as np
from models import SERVED, random_params

import jllama
from jllama import GrpoConfig, LoopConfig, OptimizerConfig, SamplingParams, TrainConfig
from jllama.data.config import DataConfig
from jllama.generation.engine import Engine
from jllama.models.language_model import LanguageModel
from jllama.rl import rollouts
from jllama.tokenizers.base import BytesTokenizer
from jllama.training import objectives

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


replace_weights, settings_of = Engine.replace_weights, rollouts.drawn_settings
assemble, drawn_score = rollouts.assemble, objectives.drawn_score
MISTAKES = {
    "stale prefix cache": mock.patch.object(Engine, "replace_weights", stale_prefixes),
    "top-p of the sampler alone": setting_of_the_sampler_alone("top_p"),
    "temperature of the sampler alone": setting_of_the_sampler_alone("temperature"),
    "mask off by one": mock.patch.object(rollouts, "assemble", mask_off_by_one),
    "head in bfloat16": mock.patch.object(objectives, "drawn_score", head_in_bfloat16),
}
IN_PROGRAMS = ("head in bfloat16",)
"""Mistakes of the trainer's programs; the others are of what programs are called with."""
