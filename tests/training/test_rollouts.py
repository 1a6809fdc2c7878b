"""Short runs of training from rewards: what sampler and trainer compute, what a reward that fails
or says nothing does, and that a run is the same again, whole or resumed.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import assert_same_bits
from models import SERVED, weights

import jllama
from jllama import GrpoConfig, LoopConfig, OptimizerConfig, SamplingParams, TrainConfig
from jllama.checkpoints.run_checkpoints import RunCheckpoints
from jllama.data.config import DataConfig
from jllama.language_model import LanguageModel
from jllama.tokenizers import BytesTokenizer

CONFIG = dataclasses.replace(SERVED, max_seq_len=64)
GRPO = GrpoConfig(group_size=4, max_answer_tokens=8, eval_prompts=4)
LOOP = LoopConfig(
    objective="grpo",
    dtype="float32",
    batch_size=8,
    seq_len=31,
    steps=4,
    eval_every=2,
    log_every=1,
    grpo=GRPO,
)
FEW_LETTERS = "expression:-(answer | lower | list | unique | list | length)"
"""A reward that random answers differ in."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("rollouts")
    model = LanguageModel(CONFIG, weights(CONFIG), BytesTokenizer())
    jllama.save(model, folder / "base", "orbax")
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(20):
            row = {"prompt": f"{number}+{number}=", "answer": str(2 * number), "number": number}
            file.write(json.dumps(row) + "\n")
    return folder


def train(folder, name, *, reward=FEW_LETTERS, grpo=GRPO, loop=LOOP, **options):
    """Run and return what it has written: the folder, the lines of its metrics and answers."""
    config = TrainConfig(
        CONFIG,
        init_from=str(folder / "base"),
        run_dir=str(folder / name),
        data=DataConfig(path=str(folder / "prompts.jsonl"), cache_dir=str(folder / "cache")),
        reward=reward,
        sampling=SamplingParams(temperature=1.0, top_p=1.0),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.0),
        training=dataclasses.replace(loop, grpo=grpo),
        **options,
    )
    jllama.train(config)
    return folder / name


def lines(run, key, name="metrics.jsonl"):
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [record for record in records if key in record]


def params(run, step):
    return RunCheckpoints(run / "checkpoints", read_only=True).restore(step)["params"]


@pytest.fixture(scope="module")
def run(folder):
    return train(folder, "run")


def test_try(run):
    for l in lines(run, "reward"): print(l)
