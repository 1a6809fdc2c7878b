"""A run on pairs of answers, as a user would start it: what it logs, and what it writes at each
evaluation.
"""

import json

import numpy as np
import pytest
import yaml
from helpers import trained_smollm
from models import FILE, weights

from jllama.commands import cli
from jllama.data.batches import ChatTokens
from jllama.data.datasets import ChatDataset
from jllama.formats.registry import save
from jllama.models.language_model import LanguageModel
from jllama.templates.messages import TEMPLATES
from jllama.tokenizers.base import BytesTokenizer

QUESTIONS = [f"Question {number}?" for number in range(12)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps from a random model that has a tokenizer and a chat template, and what they
    printed.
    """
    folder = tmp_path_factory.mktemp("preference")
    tokenizer = trained_smollm(["user assistant Question yes no"], FILE.vocab_size - 1)
    model = LanguageModel(FILE, weights(FILE), tokenizer, TEMPLATES["chatml"], (2,))
    save(model, folder / "model", "hf")
    with (folder / "pairs.jsonl").open("w") as file:
        for question in QUESTIONS:
            pair = {"prompt": question, "chosen": "yes, yes", "rejected": "no"}
            file.write(json.dumps(pair) + "\n")
    options = {
        "init_from": folder / "model",
        "run_dir": folder / "run",
        "data.path": folder / "pairs.jsonl",
        "data.cache_dir": folder / "cache",
        "optimizer.learning_rate": 1e-2,
        "training.batch_size": 4,
        "training.steps": 6,
        "training.eval_every": 6,
        "training.log_every": 1,
    }
    assert cli.run("train", [f"--{name}={value}" for name, value in options.items()]) == 0
    return folder


def lines_of(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / "run" / name).read_text().splitlines()]


def test_accuracy_margin_and_rewards_are_logged(run):
    """At each step and each evaluation; before the first update both rewards are 0.

    DPO's loss of one pair is ``log(1 + exp(-margin))``; of several it is above that of their mean
    margin.
    """
    steps = [line for line in lines_of(run) if "loss" in line]
    for line in steps:
        assert line["loss"] >= np.log1p(np.exp(-line["figures"]["margin"])) - 1e-6
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    evaluations = [
        line["validation_figures"] for line in lines_of(run) if "validation_loss" in line
    ]
    for means in [line["figures"] for line in steps] + evaluations:
        assert list(means) == ["accuracy", "chosen_reward", "margin", "rejected_reward"]
        assert means["margin"] == pytest.approx(means["chosen_reward"] - means["rejected_reward"])
        assert 0 <= means["accuracy"] <= 1
    first, last = steps[0]["figures"], steps[-1]["figures"]
    assert abs(first["chosen_reward"]) + abs(first["rejected_reward"]) < 1e-5
    assert last["accuracy"] == 1
    assert last["chosen_reward"] > 0 > last["rejected_reward"]
    assert lines_of(run)[-1]["final"]["validation_figures"] == evaluations[-1]


def test_the_sample_is_an_answer_to_a_question_that_is_held_out(run):
    """Through the template, up to the header of the answer, and as many tokens as the context has
    room for.
    """
    (sample,) = lines_of(run, "samples.jsonl")
    # Special tokens are no text.
    prompts = [f"user\n{question}\nassistant\n" for question in QUESTIONS]
    assert sample["prompt"] in prompts
    assert sample["text"]
    settings = yaml.safe_load((run / "run" / "config.yaml").read_text())
    assert settings["training"]["sample_tokens"] == FILE.max_seq_len - 1  # the usual 128 give way


def test_the_question_is_what_stands_before_the_first_token_that_counts():
    tokens, counted = np.arange(20), np.isin(np.arange(20), [13, 14, 18])
    held_out = ChatTokens(tokens, counted, np.array([10, 16]), np.array([5, 4]), np.zeros(2, int))
    data = ChatDataset(BytesTokenizer(), held_out, held_out, "", {})
    assert data.first_question() == [10, 11, 12]
