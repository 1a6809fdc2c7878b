"""Short runs of training from rewards: what is computed and logged, what a reward that fails or
says nothing does, and that a run is the same again, whole or resumed.
"""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rewarded
from helpers import assert_same_bits, slow_but
from models import weights
from rewarded import GRPO, LOOP, largest_mismatch, lines, train

from jllama.config import LoraConfig
from jllama.decode_params import DecodeParams
from jllama.errors import JllamaError
from jllama.training.exact import stack_layers

ROOT = Path(__file__).parents[2]


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


ADAPTERS = LoraConfig(rank=4, alpha=8.0)
RESUMED = {
    "weights": {},
    "weights, divergence, two updates": {"grpo": dataclasses.replace(GRPO, kl=0.5, updates=2)},
    "adapters, divergence, exact": {
        "grpo": dataclasses.replace(GRPO, kl=0.5, exact=True),
        "lora": ADAPTERS,
    },
}


@pytest.mark.parametrize("case", slow_but(["weights, divergence, two updates"], RESUMED))
def test_a_resumed_run_is_the_same(folder, run, case):
    """Two steps and then two more: the same answers, rewards and bits."""
    options = RESUMED[case]
    if options:
        run = train(folder, f"whole {case}", **options)
    halves = f"halves {case}"
    half = dataclasses.replace(LOOP, steps=2)
    train(folder, halves, loop=half, **options)
    train(folder, halves, resume="auto", resume_with_changes=True, **options)
    assert_same_bits(arrays(folder / halves, 4), arrays(run, 4))

    def answers(run):
        return [(a["step"], a["prompt"], a["text"]) for a in lines(run, "text", "samples.jsonl")]

    def figures(run):
        names = ("reward", "answer_tokens", "mismatch_max", "loss")
        return [[record[name] for name in names] for record in lines(run, "reward")]

    assert answers(folder / halves) == answers(run)
    assert figures(folder / halves) == figures(run)


def test_another_reference_model_is_refused(tmp_path):
    """A resumed run reads ``init_from`` again; it must be what the run began from."""
    rewarded.prepare(tmp_path)
    options = {"grpo": dataclasses.replace(GRPO, kl=0.5)}
    train(tmp_path, "run", loop=dataclasses.replace(LOOP, steps=2), **options)
    shutil.rmtree(tmp_path / "base")
    rewarded.prepare(tmp_path, seed=1)
    with pytest.raises(JllamaError, match="init_from is not the model that the run"):
        train(tmp_path, "run", resume="auto", resume_with_changes=True, **options)


def test_a_constant_reward_changes_nothing(folder):
    """Not a bit of the weights; all groups are without signal."""
    constant = train(folder, "constant", reward="expression:1")
    assert {record["no_signal"] for record in lines(constant, "reward")} == {1.0}
    assert {record["grad_norm"] for record in lines(constant, "reward")} == {0.0}
    last = jax.tree.map(np.asarray, arrays(constant, 4)["params"])
    assert_same_bits(last, jax.tree.map(np.asarray, weights(rewarded.CONFIG)))


def test_several_updates_are_from_the_same_answers(folder):
    """Adapters, with the model before training as the reference at no cost: the first update has
    ratios of 1 and no divergence, the second has both.
    """
    grpo = dataclasses.replace(GRPO, updates=2, kl=0.1)
    run = train(folder, "updates", grpo=grpo, lora=ADAPTERS)
    assert [record["step"] for record in lines(run, "reward")] == [2, 4]
    figures = [record["figures"] for record in lines(run, "figures")]
    assert all(record["ratio_change"] > 1e-4 for record in figures)
    assert figures[0]["kl"] > 0
    assert figures[0]["kl"] < figures[1]["kl"]


def test_exact_mode_computes_later_updates_with_their_own_weights(folder):
    """Of two updates the first has ratios of 1, the second has the ratios that it has otherwise."""
    changes = []
    for exact in (False, True):
        grpo = dataclasses.replace(GRPO, updates=2, exact=exact)
        loop = dataclasses.replace(LOOP, steps=2)
        run = train(folder, f"two updates {exact}", grpo=grpo, loop=loop)
        (record,) = lines(run, "figures")
        changes.append(record["figures"]["ratio_change"])
    assert changes[0] > 1e-4
    assert changes[1] == pytest.approx(changes[0], rel=1e-3)


FAILS = """
calls = []
def score(prompt, answers, row):
    calls.append(row)
    if len(calls) in {calls}:
        raise ValueError('no idea')
    return [len(set(answer)) for answer in answers]
"""
"""A reward whose first call, before anything is loaded, is 1; each step then has two."""


def test_rewards_that_fail_for_all_prompts_leave_the_step_out(folder, capfd):
    """With the row and the line in a sentence; the next steps are taken."""
    (folder / "fails.py").write_text(FAILS.replace("{calls}", "(4, 5)"))
    run = train(folder, "fails", reward=f"{folder}/fails.py:score")
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "left out" in line]
    assert line.startswith("step 2 is left out")
    assert "fails.py:score failed for " in line
    assert "prompts.jsonl" in line
    assert line.endswith("fails.py, line 6)")
    assert "ValueError: no idea" in line
    assert [record["step"] for record in lines(run, "reward")] == [1, 3, 4]


def test_rewards_that_fail_for_a_prompt_leave_its_answers_out(folder, capfd):
    """And are counted. The other prompt's answers are learned; an evaluation goes on, too."""
    (folder / "fails_once.py").write_text(FAILS.replace("{calls}", "(5, 6, 17)"))
    run = train(folder, "fails once", reward=f"{folder}/fails_once.py:score")
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "have no reward" in line]
    assert line.startswith("step 2: some answers have no reward: ")
    assert "ValueError: no idea" in line
    records = lines(run, "reward")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["no_reward"] for record in records] == [0, 0.5, 0, 0]
    assert all(math.isfinite(record["loss"]) for record in records)
    evaluations = [
        line["validation_figures"].get("no_reward") for line in lines(run, "validation_loss")
    ]
    assert evaluations == [0.25, 0.25]


def test_rewards_that_always_fail_end_the_run(folder):
    """At once if they fail for any answer; else after some steps in a row, with nothing lost."""
    with pytest.raises(
        JllamaError, match=r"failed for .*prompts\.jsonl line \d+: the row has no field answer"
    ):
        train(folder, "never", reward="exact")
    assert not (folder / "never").exists()
    (folder / "fails_later.py").write_text(FAILS.replace("len(calls) in {calls}", "len(calls) > 3"))
    loop = dataclasses.replace(LOOP, max_skipped=2)
    with pytest.raises(
        JllamaError, match=r"no idea .* the last good checkpoint is of step 3: mend"
    ):
        train(folder, "later", reward=f"{folder}/fails_later.py:score", loop=loop)


def test_overlong_answers_are_left_out(folder, run):
    """All answers of one token are cut off, so nothing is left to learn from; ``run`` has them."""
    grpo = dataclasses.replace(GRPO, max_answer_tokens=1, mask_overlong=True)
    loop = dataclasses.replace(LOOP, steps=1)
    cut = train(folder, "cut", grpo=grpo, loop=loop, reward="expression:answer|length")
    (record,) = lines(cut, "reward")
    assert (record["overlong"], record["grad_norm"]) == (1, 0)
    first = lines(run, "reward")[0]
    assert first["overlong"] > 0.5
    assert first["grad_norm"] > 0


@pytest.fixture(scope="module")
def exact_run(folder):
    return train(folder, "exact", grpo=dataclasses.replace(GRPO, exact=True))


def test_exact_mode_has_no_mismatch(exact_run, run):
    """And is the same training but for rounding."""
    assert largest_mismatch(exact_run) == 0
    assert {record["figures"]["ratio_change"] for record in lines(exact_run, "figures")} == {0.0}
    first, usual = (lines(folder, "reward")[0] for folder in (exact_run, run))
    assert first["reward"] == usual["reward"]
    assert first["loss"] == pytest.approx(usual["loss"], rel=1e-4)
    assert first["grad_norm"] == pytest.approx(usual["grad_norm"], rel=1e-4)


def test_more_than_ten_layers_are_stacked_in_their_order():
    """JAX sorts the keys of a dictionary as texts: "10" comes before "2"."""
    layers = {str(index): {"w": np.full(2, index)} for index in range(12)}
    params = jax.tree.map(np.asarray, DecodeParams({"layers": layers}))
    stacked = stack_layers(params).weights["layers"]["w"]
    assert np.asarray(stacked)[:, 0].tolist() == [*range(12)]


def report_of(which, **variables):
    """What a process of ``rewarded`` prints, with the compiler's usual options."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    done = subprocess.run(
        [sys.executable, rewarded.__file__, which],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PATHS = [ROOT, ROOT / "tests"]


@pytest.mark.slow
def test_exact_mode_is_exact_for_other_batches():
    """In parts, with hits in the prefix cache; ``rewarded.EXACT`` has more cases."""
    for case, (mismatch, num_tokens) in report_of("some").items():
        assert (mismatch, num_tokens > 1000) == (0, True), case


@pytest.mark.slow
def test_exact_mode_is_exact_on_eight_devices():
    flags = "--xla_force_host_platform_device_count=8"
    for case, (mismatch, num_tokens) in report_of("a mesh", XLA_FLAGS=flags).items():
        assert (mismatch, num_tokens > 1000) == (0, True), case


@pytest.mark.slow
def test_mistakes_are_seen():
    """In exact mode any mistake is above what no mistake has, which is zero."""
    report = report_of("mistakes")
    assert report.keys() == rewarded.MISTAKES.keys()
    for mistake, mismatch in report.items():
        expected = 1e-7 if mistake == "blocks of another size" else 1e-3
        assert mismatch > expected, mistake
