"""Short runs of training from rewards: what is computed and logged, what a reward that fails or
says nothing does, and that a run is the same again, whole or resumed.
"""

import dataclasses
import math
import os
import shutil
import signal
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rewarded
from helpers import assert_same_bits, slow_but
from models import weights
from rewarded import GRPO, LOOP, largest_mismatch, lines, train

from jllama import LoopConfig, SamplingParams, TrainConfig
from jllama.core import JllamaError
from jllama.core.step import TrainState
from jllama.data.prompts import PromptRow
from jllama.generation import engine
from jllama.models.config import LoraConfig
from jllama.rl import Scorer, rollouts
from jllama.rl.rollouts import Rollouts, Sample
from jllama.system.stop import Stopped
from jllama.training import loop
from jllama.training.compiling import Training
from jllama.training.plan import decide


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    rewarded.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return train(folder, "run")


def arrays(run, step):
    """Everything that a step has saved."""
    with ocp.StandardCheckpointer() as reader:
        items = run / "checkpoints" / str(step)
        return {item: reader.restore(items / item) for item in ("params", "state")}


def test_each_step_says_what_it_was(run):
    records = lines(run, "reward")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["reward_parts"] == {rewarded.FEW_LETTERS: record["reward"]}
        assert 0 <= record["no_signal"] <= 1
        assert 0 < record["answer_tokens"] <= GRPO.max_answer_tokens
        assert record["sampled_tokens"] == record["answer_tokens"] * LOOP.batch_size
        assert 0 < record["mismatch_max"] < 1e-5
        assert record["mismatch_mean"] <= record["mismatch_max"]
        assert record["mismatch_outside"] == 0
        assert record["figures"].keys() == {"clipped", "entropy", "ratio_change"}
        assert record["figures"]["ratio_change"] < 1e-5
        assert record["overlong"] > 0.5
        assert record["grad_norm"] > 0
        phases = [record[f"{name}_s"] for name in ("sampling", "reward", "scoring", "training")]
        assert min(phases) > 0
        assert sum(phases) == pytest.approx(record["step_s"], rel=0.5)
        for name in ("sampling", "scoring", "training"):
            assert record[f"{name}_tokens_per_s"] > 0


def test_answers_are_side_by_side_over_time(run):
    """The same held-out prompts at each evaluation, in the log and on the page."""
    answers = lines(run, "text", "samples.jsonl")
    by_step = {step: [a["prompt"] for a in answers if a["step"] == step] for step in (2, 4)}
    assert by_step[2] == by_step[4]
    assert len(by_step[2]) == GRPO.eval_prompts
    page = (run / "report.html").read_text()
    for prompt in by_step[2]:
        assert page.count(prompt) >= 1
    for title in ("reward", "entropy", "largest mismatch", "tokens of an answer"):
        assert title in page


UPDATES = {
    "grpo": dataclasses.replace(GRPO, kl=0.1, updates=2),
    "lora": LoraConfig(rank=4, alpha=8.0),
}
"""Adapters, whose reference is the model before training at no cost."""
RESUMED = {
    "adapters, divergence, two updates": UPDATES,
    "weights, divergence": {"grpo": dataclasses.replace(GRPO, kl=0.5)},
}


@pytest.fixture(scope="module")
def updates(folder):
    return train(folder, "updates", **UPDATES)


def half_of(run, folder):
    """A copy of a run, as it was when its second step had been saved and its process was killed."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    return folder


@pytest.mark.parametrize("case", slow_but(["adapters, divergence, two updates"], RESUMED))
def test_a_resumed_run_is_the_same(folder, updates, case):
    """The same answers, rewards and bits."""
    options = RESUMED[case]
    run = updates if options is UPDATES else train(folder, case, **options)
    half = half_of(run, folder / f"half {case}")
    train(folder, half.name, resume="auto", **options)
    assert_same_bits(arrays(half, 4), arrays(run, 4))

    def answers(run):
        return [(a["step"], a["prompt"], a["text"]) for a in lines(run, "text", "samples.jsonl")]

    def figures(run):
        names = ("reward", "answer_tokens", "mismatch_max", "loss")
        return [[record[name] for name in names] for record in lines(run, "reward")]

    assert answers(half) == answers(run)
    assert figures(half) == figures(run)


def test_another_reference_model_is_refused(tmp_path):
    """A resumed run reads ``init_from`` again; it must be what the run began from."""
    rewarded.prepare(tmp_path)
    options = {"grpo": dataclasses.replace(GRPO, kl=0.5)}
    train(tmp_path, "run", loop=dataclasses.replace(LOOP, steps=2), **options)
    shutil.rmtree(tmp_path / "base")
    rewarded.prepare(tmp_path, seed=1)
    with pytest.raises(JllamaError, match="init_from is not the model that the run"):
        train(tmp_path, "run", resume="auto", resume_with_changes=True, **options)


def test_several_updates_are_from_the_same_answers(updates):
    """The first update has ratios of 1 and no divergence, the second has both."""
    assert [record["step"] for record in lines(updates, "reward")] == [2, 4]
    figures = [record["figures"] for record in lines(updates, "figures")]
    assert all(record["ratio_change"] > 1e-4 for record in figures)
    assert figures[0]["kl"] > 0
    assert figures[0]["kl"] < figures[1]["kl"]


def test_a_stop_waits_for_the_last_update_from_the_same_answers(updates, tmp_path, monkeypatch):
    """So a checkpoint is never between the two, and the run that goes on is the same."""
    rewarded.prepare(tmp_path)
    take_step = loop.take_step

    def take_first_step(run):
        take_step(run)
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", take_first_step)
        with pytest.raises(Stopped, match="stopped at step 2 of 4; saved"):
            train(tmp_path, "run", **UPDATES)
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    train(tmp_path, "run", resume="auto", **UPDATES)
    assert_same_bits(arrays(run, 4), arrays(updates, 4))


CHANGES = """
calls = []
def score(prompt, answers, row):
    calls.append(row)
    number = len(calls)
    if number in (10, 11, 12, 14) or number > 17:
        raise ValueError('no idea')
    if number < 6:
        return [1] * len(answers)
    return [len(set(answer)) for answer in answers]
"""
"""A reward whose first call, before anything is loaded, is 1; each step then has two, and each
evaluation four. It is constant in steps 1 and 2, fails in step 3, fails for one of two prompts in
step 4, for one of four in the second evaluation, and always from step 5 on.
"""


def test_what_rewards_that_say_nothing_or_fail_do(folder, capfd):
    """A constant changes nothing, a step whose rewards all fail is left out, and so are the answers
    to a prompt whose rewards fail; two bad steps in a row end the run, with nothing lost.
    """
    (folder / "changes.py").write_text(CHANGES)
    loop = dataclasses.replace(LOOP, steps=8, max_skipped=2, keep_last=3)
    with pytest.raises(
        JllamaError, match=r"no idea .* the last good checkpoint is of step 6: mend"
    ):
        train(folder, "changes", reward=f"{folder}/changes.py:score", loop=loop)
    run = folder / "changes"
    records = lines(run, "reward")
    assert [record["step"] for record in records] == [1, 2, 4]

    # The constant: all groups are without signal, and not a bit of the weights moves.
    assert [record["no_signal"] for record in records] == [1, 1, 0.5]
    assert [record["grad_norm"] for record in records[:2]] == [0, 0]
    unchanged = jax.tree.map(np.asarray, arrays(run, 2)["params"])
    assert_same_bits(unchanged, jax.tree.map(np.asarray, weights(rewarded.CONFIG)))

    # Failures: one sentence with the row and the line, and counts.
    err = capfd.readouterr().err.splitlines()
    line = next(line for line in err if "left out" in line)
    assert line.startswith("step 3 is left out")
    assert "changes.py:score failed for " in line
    assert "prompts.jsonl" in line
    assert line.endswith("changes.py, line 7)")
    assert "ValueError: no idea" in line
    (line,) = [line for line in err if "have no reward" in line]
    assert line.startswith("step 4: some answers have no reward: ")
    assert "ValueError: no idea" in line
    assert [record["no_reward"] for record in records] == [0, 0, 0.5]
    assert math.isfinite(records[-1]["loss"])
    evaluated = [line["validation_figures"] for line in lines(run, "validation_loss")]
    assert [figures.get("no_reward") for figures in evaluated] == [None, 0.25]


def test_rewards_that_fail_for_any_answer_end_the_run_at_once(folder):
    with pytest.raises(
        JllamaError, match=r"failed for .*prompts\.jsonl line \d+: the row has no field answer"
    ):
        train(folder, "never", reward="exact")
    assert not (folder / "never").exists()


def test_overlong_answers_and_those_without_a_reward_are_left_out(monkeypatch):
    """Of two prompts with two answers each, one is cut off and one prompt has no reward."""
    grpo = dataclasses.replace(GRPO, group_size=2, mask_overlong=True)
    training = LoopConfig(batch_size=4, seq_len=47, grpo=grpo)
    config = TrainConfig(rewarded.CONFIG, init_from="x", reward="exact", training=training)
    prompts = [PromptRow((5, 6), "", {}, str(number)) for number in range(2)]
    samples = [Sample(prompts[0], [7, 8], [-1.0, -2.0], "", number == 1) for number in range(4)]
    rewards = iter([[1.0, 2.0], [None, None]])
    source = object.__new__(Rollouts)
    source.plan, source.reference = decide(config), None
    source.data = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=60))
    source.stream, source.records, source.problems, source._num_used = iter([prompts]), [], {}, 0
    source.sampler = SimpleNamespace(load=lambda *_: None, answer=lambda *_: samples)
    source.scorer = Scorer({"mine": 1.0}, functions={"mine": lambda *_: next(rewards)})
    no_log_probs = np.zeros((4, rollouts.MIN_WIDTH))
    trainer = Training(*[None] * 9)._replace(drawn_log_probs=lambda *_: no_log_probs)
    monkeypatch.setattr(rollouts, "put_on_devices", lambda batch, sharding: batch)
    source.training = trainer
    batch = source.next(0, TrainState(0, {}, None, None))
    assert batch.counted.sum(axis=1).tolist() == [2, 0, 0, 0]
    assert (source.records[0]["overlong"], source.records[0]["no_reward"]) == (0.25, 0.5)


@pytest.mark.parametrize("mistake", rewarded.MISTAKES)
def test_the_mismatch_shows_mistakes(folder, mistake, monkeypatch):
    """Each is far above what two right programs differ by."""
    monkeypatch.setitem(engine.CHUNK_TOKENS, "cpu", 16)
    options: dict[str, Any] = {"sampling": SamplingParams(temperature=0.7, top_p=0.9)}
    if mistake in rewarded.IN_PROGRAMS:
        options["loop"] = dataclasses.replace(LOOP, z_loss=1e-9)  # and so programs of its own
    with rewarded.MISTAKES[mistake]:
        run = train(folder, f"mistaken, {mistake}", **options)
    assert largest_mismatch(run) > 1e-3


def test_a_run_that_cannot_be_opened_leaves_no_process_behind(folder, monkeypatch):
    closed = []
    close = Scorer.close
    monkeypatch.setattr(Scorer, "close", lambda scorer: (closed.append(scorer), close(scorer)))
    with pytest.raises(JllamaError, match="temperature is 0"):
        train(folder, "greedy", sampling=SamplingParams(temperature=0.0))
    assert len(closed) == 1
