"""``train.py`` as a user runs it: what it leaves, and that no interruption changes the outcome by a
bit.
"""

import dataclasses
import html
import io
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
import yaml

from jllama.commands import cli
from jllama.commands.cli import parse
from jllama.commands.train import read_options
from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.model import abstract_params
from jllama.core.parameters import count_parameters
from jllama.data.config import DataConfig
from jllama.formats.registry import load, save
from jllama.models.language_model import LanguageModel
from jllama.models.presets import preset
from jllama.system import files
from jllama.system.files import file_lock
from jllama.tokenizers.base import BytesTokenizer
from jllama.training import run_folder, samples, sources
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.metrics import Evaluation
from jllama.training.optimizer import learning_rate_at
from jllama.training.resolve import complete
from jllama.training.run import train

STEPS, EPOCH = 20, 6
SHORT = ("--training.steps", 2, "--training.eval_every", 2, "--training.sample_tokens", 0)
RESUMED = ("--resume", "auto", "--resume_with_changes", "true")


def one_error(err):
    """The last line, which must be the only one about an error, and no traceback anywhere."""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == err.splitlines()[-1:]
    return errors[0]


def logged_steps(run):
    """How many steps the run has logged; its last line may be half written."""
    path = run / "metrics.jsonl"
    return path.read_text().count('"grad_norm"') if path.exists() else 0


def wait_for_step(read_run, process, run, step):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if logged_steps(run) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {process.communicate()[1]}")


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def saved_config(run):
    return yaml.safe_load((run / "config.yaml").read_text())


def assert_finite(params):
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(params)))


@pytest.fixture
def refused(workshop, capsys):
    """Run what must be refused in a sentence; the exit code and the sentence."""

    def run(run, *arguments):
        code = workshop.run(run, *arguments)
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return code, one_error(err)

    return run


@pytest.fixture
def type_in(monkeypatch):
    """Type a text on the terminal, or send it through a pipe."""

    def enter(text, *, is_terminal=True):
        stdin = io.StringIO(text)
        stdin.isatty = lambda: is_terminal
        monkeypatch.setattr(sys, "stdin", stdin)

    return enter


def test_the_folder_of_a_run(small_run, read_run):
    run, lines = small_run.folder, read_run.lines(small_run.folder)
    assert small_run.out == ""  # chatter goes to stderr
    # What auto chose.
    assert re.search(r"[\d,]+ parameters on one CPU, blocked attention, ", small_run.err)
    steps = [line for line in lines if "loss" in line]
    model = parse(TrainConfig, ["--config", str(run / "config.yaml")], "train.py").model
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert set(line) >= {"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu"}
        assert line["tokens_per_s"] > 0
        # Weights, two moments, gradients.
        assert line["planned_bytes"] > 16 * count_parameters(model)
        assert line["peak_bytes"] is None  # a CPU does not say
    assert steps[0]["loss"] == pytest.approx(np.log(259), abs=0.3)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    evaluations = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in evaluations] == [5, 10, 15, 20]
    for line in evaluations:
        assert line["perplexity"] == pytest.approx(np.exp(line["validation_loss"]))
        assert line["bits_per_byte"] > 0
    best = min(evaluations, key=lambda line: line["validation_loss"])
    assert lines[-1]["final"]["validation_loss"] == pytest.approx(best["validation_loss"])
    assert lines[-1]["best_step"] == best["step"]
    samples = read_run.lines(run, "samples.jsonl")
    assert {line["prompt"] for line in samples} == {"the "}
    assert [line["step"] for line in samples] == [5, 10, 15, 20]
    report = (run / "report.html").read_text()
    bits = f"{best['bits_per_byte']:.4f}"
    for part in ("step 20", "training text", "max_seq_len: 32", bits, "ln 259", "ms a step"):
        assert part in report
    for command in (f"sample --checkpoint {run} --prompt 'the '", f"train --resume {run}"):
        assert html.escape(f"python -m jllama {command}") in report
    assert report.count("<svg") == 4  # a chart each, in the page's colors, for any screen
    assert report.count("currentColor") > 40
    assert "#000" not in report
    assert "color-scheme: light dark" in report
    assert "<meta name=viewport content='width=device-width" in report
    assert "auto-fit" in report
    assert read_run.steps(run) == [15, 20]
    assert f"--checkpoint {run}" in small_run.err.replace("\n", "")
    names = "checkpoints config.yaml metrics.jsonl receipt.json report.html samples.jsonl"
    expected = [*names.split(), "tokenizer.bytes.json"]
    assert sorted(path.name for path in run.iterdir()) == expected


def test_the_saved_configuration_starts_the_same_run_again(small_run, workshop):
    saved = parse(TrainConfig, ["--config", str(small_run.folder / "config.yaml")], "train.py")
    config = parse(TrainConfig, workshop.options(small_run.folder), "train.py")
    # Only what was left open is filled in.
    assert (saved.model.vocab_size, config.model.vocab_size) == (259, 0)
    assert config.training.seq_len == 0
    training = dataclasses.replace(config.training, seq_len=32)
    assert saved == dataclasses.replace(config, model=saved.model, training=training)


@pytest.mark.slow
def test_stopped_killed_and_continued_is_the_same_to_the_last_bit(
    small_run, workshop, read_run, tmp_path
):
    """Stopped within the first epoch by SIGTERM, killed at any moment twice, and stopped within a
    later epoch by SIGINT; each time a fresh process goes on. With a checkpoint a step, one is
    being written most of the time.
    """
    run, rng, seen = tmp_path / "run", random.Random(0), 2
    often = ("--resume", "auto", "--training.eval_every", 1, "--training.sample_tokens", 0)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
        process = workshop.train(run, *often)
        wait_for_step(read_run, process, run, seen + rng.randint(1, 3))
        if number == signal.SIGKILL:
            time.sleep(rng.random() * 0.2)
        process.send_signal(number)
        done = workshop.finish(process)
        last = read_run.steps(run)[-1]
        seen = logged_steps(run)  # a killed run may have logged a step more than it saved
        assert last < (EPOCH if number == signal.SIGTERM else STEPS)
        if number == signal.SIGKILL:
            assert done.code == -number
            continue
        assert done.code == 128 + number, done.err
        note, *_, end = [line for line in done.err.splitlines() if not line.startswith("step ")][1:]
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert re.fullmatch(rf"{name}: finishing step \d+ and saving; again to quit now", note)
        advice = f"Go on: python -m jllama train --resume {run}"
        assert end == f"stopped at step {last} of 20; saved. {advice}"
    assert last > EPOCH
    done = workshop.finish(workshop.train(run, *often))
    assert done.code == 0, done.err
    assert read_run.losses(run) == read_run.losses(small_run.folder)
    steps = [line["step"] for line in read_run.lines(run) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))
    read_run.assert_same_bits(run, small_run.folder, STEPS)
    assert not [path for path in (run / "checkpoints").iterdir() if not path.name.isdigit()]


def test_a_stop_between_two_checkpoints_is_saved(workshop, read_run, tmp_path, capsys, monkeypatch):
    """The signal comes while a step is being logged, after the loop has asked for one."""
    run, append_line = tmp_path / "run", files.append_line

    def append_and_stop(path, record):
        append_line(path, record)
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(files, "append_line", append_and_stop)
    before, interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert workshop.run(run, "--training.save_every", 2) == 128 + signal.SIGTERM
    step = read_run.steps(run)[-1]
    err = capsys.readouterr().err
    advice = f"Go on: python -m jllama train --resume {run}"
    assert err.endswith(f"stopped at step {step} of 20; saved. {advice}\n")
    assert "error" not in err
    assert step in (3, 4)
    assert read_run.steps(run)[0] == 2  # without an evaluation, as at the stop
    assert not [line for line in read_run.lines(run) if "validation_loss" in line]
    assert not (run / "samples.jsonl").read_text()
    assert read_run.losses(run).keys() == set(range(1, step + 1))
    assert signal.getsignal(signal.SIGTERM) == before
    # No traceback in the end of the process.
    assert signal.signal(signal.SIGINT, interrupt) == signal.SIG_DFL


def test_a_checkpoint_is_saved_when_the_last_one_is_old(workshop, read_run, tmp_path):
    """Here after each step, or never beside those that are due; the weights are the same."""
    options = ("--training.eval_every", 10, "--training.keep_last", 99, "--training.steps", 20)
    found, weights = {}, []
    for minutes in (0, 1e-9, 1e9):
        run = tmp_path / str(minutes)
        assert workshop.run(run, *options, "--training.save_minutes", minutes) == 0
        found[minutes] = read_run.steps(run)
        weights.append(json.loads((run / "receipt.json").read_text())["weights"]["20"])
    assert found == {0: [10, 20], 1e-9: [*range(1, 21)], 1e9: [10, 20]}
    assert weights == [weights[0]] * 3


def test_a_full_disk_ends_with_a_sentence_and_the_last_good_checkpoint(
    workshop, read_run, tmp_path
):
    """Files may no longer grow past 20 kB once the first checkpoint is whole: the parameters alone
    have 140 kB.
    """
    run = tmp_path / "run"
    process = workshop.train(run, "--training.eval_every", 1, "--training.sample_tokens", 0)
    wait_for_step(read_run, process, run, 3)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    done = workshop.finish(process)
    assert done.code == 1, done.err
    message = one_error(done.err)
    assert "could not save a checkpoint" in message
    last = read_run.steps(run)[-1]
    assert message.endswith(f"the last good checkpoint is step {last}")
    assert_finite(load(run, step=last, layout="training").params)


def test_a_loss_that_is_no_number_stops_the_run(workshop, copied, read_run, capsys):
    """The run goes on from its good checkpoint of step 20 with a ruinous learning rate."""
    best = load(copied, layout="training").step
    options = ("--training.steps", STEPS + 10, "--training.eval_every", 1)
    ruinous = ("--optimizer.learning_rate", 1e30, "--optimizer.clip_norm", 1e30)
    assert workshop.run(copied, *RESUMED, *options, *ruinous) == 1
    message = one_error(capsys.readouterr().err)
    assert "is not a finite number at step " in message
    last = read_run.steps(copied)[-1]
    advice = "try a lower optimizer.learning_rate"
    assert f"the last good checkpoint is of step {last}: {advice}" in message
    # The first ruinous step may still be followed by a finite, enormous validation loss.
    assert last <= STEPS + 1
    model = load(copied, layout="training")
    assert model.step == best
    assert_finite(model.params)


def test_what_a_run_cannot_go_on_with_is_refused_with_what_was_and_what_is(copied, refused):
    """Also where changes are asked for; the architecture by its options, not by its arrays."""
    before = everything(copied)
    for changes, problem in {
        "--model.tie_embeddings true": "model.tie_embeddings was False and is True",
        "--seed 1 --training.batch_size 4": "seed was 0 and is 1, training.batch_size was 8",
        "--training.seq_len 24": "training.seq_len was 32 and is 24",
        "--model.rope_scaling.type=linear --model.rope_scaling.factor=2": "model.rope_scaling was",
    }.items():
        for arguments in (RESUMED[:2], RESUMED):
            code, message = refused(copied, *arguments, *changes.split())
            assert code == 1
            assert message.startswith(f"error: {problem}")
            assert "start a new run with another run_dir" in message
    code, message = refused(copied)
    assert code == 2
    assert f"continue it with python -m jllama train --resume {copied}, or" in message
    assert everything(copied) == before


def test_a_run_is_overwritten_when_its_name_is_typed(workshop, copied, capsys, type_in, read_run):
    """Nothing of the old one is left, and it is removed when all else has been found in order.

    With ``yes`` nothing is typed; a run that is resumed is never removed.
    """
    before = everything(copied)
    type_in("run\n")
    assert workshop.run(copied, "--overwrite", "--data.path", "nowhere", *SHORT) == 1
    capsys.readouterr()
    assert everything(copied) == before
    type_in("run\n")
    assert workshop.run(copied, "--overwrite", *SHORT) == 0
    question = f"{copied} and its checkpoints will be removed. To go on, type its name, run:\n"
    assert question in capsys.readouterr().err
    assert read_run.steps(copied) == [2]
    assert len(read_run.losses(copied)) == 2
    assert not (copied / "samples.jsonl").read_text()
    assert not (copied / "config.history.jsonl").exists()
    written = saved_config(copied)
    assert (written["overwrite"], written["yes"]) == (False, False)  # asked once, not for good
    more = ("--overwrite", "--yes", *SHORT, "--training.steps", 24, *RESUMED)
    assert workshop.run(copied, *more) == 0
    assert read_run.steps(copied) == [22, 24]  # continued, not removed
    assert workshop.run(copied, "--overwrite", "--yes", *SHORT) == 0
    assert read_run.steps(copied) == [2]


@pytest.mark.parametrize(("text", "is_terminal"), [("other\n", True), ("", True), ("run\n", False)])
def test_without_its_name_a_run_stays(workshop, copied, capsys, type_in, text, is_terminal):
    before = everything(copied)
    type_in(text, is_terminal=is_terminal)
    assert workshop.run(copied, "--overwrite", *SHORT) == 2
    message = capsys.readouterr().err.rpartition("error: ")[2]
    advice = "its name must be typed on a terminal, or --yes be given"
    assert message == f"{copied} stays as it is: {advice}\n"
    assert everything(copied) == before


def test_only_runs_are_overwritten(copied, refused):
    """A folder with a file that no run writes stays as it is, and so does one with the text to
    train on.
    """
    before = everything(copied)
    (copied / "thesis.txt").write_text("a year of work " * 100)
    for changes, problem in [
        ([], "holds thesis.txt, more or less than a checkpoint"),
        (["--data.path", copied], "is "),
    ]:
        code, message = refused(copied, "--overwrite", "--yes", *changes)
        assert code == 1
        assert problem in message
    (copied / "thesis.txt").unlink()
    assert everything(copied) == before


def test_a_preset_is_the_architecture(workshop, tmp_path, capsys):
    """In the run's configuration, from which it is resumed; where its context is long, windows of
    1,024 tokens are the default.
    """
    data = DataConfig(workshop.data["path"], tokenizer="bytes", cache_dir=str(tmp_path))
    config, *_ = complete(TrainConfig(LlamaConfig(), preset="llama3.2-1b", data=data), None)
    assert (config.model, config.training.seq_len) == (preset("llama3.2-1b"), 1024)
    again, *_ = complete(config, None)
    assert again == config
    arguments = [f"--run_dir={tmp_path / 'run'}", f"--data.path={data.path}"]
    for changes, problem in [
        (
            ["--preset=llama3.2-1b", "--model.num_layers=2"],
            "model.num_layers is 2; it must be 16, as in llama3.2-1b, or",
        ),
        (["--preset=llama3.2-1c"], "there is no preset llama3.2-1c; did you mean llama3.2-1b?"),
    ]:
        assert cli.run("train", [*arguments, *changes]) in (1, 2)
        assert problem in one_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_another_corpus_is_refused(workshop, copied, capsys, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text((workshop.folder / "corpus.txt").read_text() + "one more line\n")
    text = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(text.replace("steps: 20", "steps: 30"))
    before = everything(copied)
    more = ("--training.steps", 30, "--data.path", other)
    assert workshop.run(copied, "--resume", "auto", *more) == 1
    noted, message = capsys.readouterr().err.splitlines()
    assert noted == f"data.path was {workshop.data['path']} and is {other}"
    assert "was saved; go on with other texts, chats or prompts by resume_with_changes" in message
    assert everything(copied) == before


def test_a_run_goes_on_with_other_data_when_asked(workshop, copied, capsys, read_run, tmp_path):
    """Steps, moments and schedule go on, the data begin; the best checkpoint is of the new data."""
    other = tmp_path / "other.txt"
    # So that validation losses are higher.
    other.write_text((workshop.folder / "corpus.txt").read_text().upper())
    more = ("--training.steps=24", "--data.path", other, "--training.eval_every=2")
    assert workshop.run(copied, *RESUMED, *more) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "the data have changed: they are read from their beginning" in err
    lines = read_run.lines(copied)
    rates = {line["step"]: line["learning_rate"] for line in lines if "loss" in line}
    assert [*rates] == [*range(1, 25)]
    steps = read_run.losses(copied)
    assert rates[24] < rates[21] < rates[15]
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert losses[24] > losses[20]
    assert load(copied, layout="training").step in (22, 24)
    assert lines[-1]["best_step"] in (22, 24)
    # Stopped before its last checkpoint and continued, the new data are those of the run.
    shutil.rmtree(copied / "checkpoints" / "24")
    assert cli.run("train", ["--resume", str(copied)]) == 0
    assert "the data have changed" not in capsys.readouterr().err
    assert read_run.losses(copied) == steps
    assert load(copied, layout="training").step in (22, 24)


def test_a_change_of_the_schedule_is_said_and_asked_for(copied, refused):
    """Pitfall 37. What it was and what it is, and the learning rate before and after; nothing is
    written.
    """
    before = everything(copied)
    code, message = refused(copied, "--resume", "auto", "--training.steps", 40)
    assert code == 1
    config = parse(TrainConfig, ["--config", str(copied / "config.yaml")], "train.py")
    rate = float(learning_rate_at(STEPS, config.optimizer, 40))
    was = "the learning rate was 1.00e-03"
    ways = "leave out what has changed, or go on so with resume_with_changes, or start a new run"
    assert message == (
        f"error: training.steps was 20 and is 40, {was} at step 20 and is {rate:.2e} at step 21: "
        f"{ways} with another run_dir"
    )
    code, message = refused(copied, "--resume", copied, "--optimizer.learning_rate", 0.05)
    assert code == 1
    assert f"optimizer.learning_rate was 0.01 and is 0.05, {was}" in message
    code, message = refused(copied, "--resume", "auto", "--training.dtype", "bfloat16")
    assert code == 1
    assert message.startswith("error: training.dtype was auto and is bfloat16: ")
    assert everything(copied) == before


def test_a_constant_rate_keeps_its_warm_up_with_more_steps(workshop, tmp_path):
    """Of the steps that it had, though they were a share of fewer steps."""
    constant = ("--optimizer.schedule", "constant", "--optimizer.warmup_fraction", 0.5)
    folder = None
    for steps in (6, 12):
        options = workshop.options(tmp_path, *constant, "--training.steps", steps)
        config, *_ = complete(parse(TrainConfig, options, "train.py"), folder)
        assert config.optimizer.warmup_steps == 3
        folder = tmp_path
        run_folder.write_config(folder, config, 0)


def test_a_finished_run_goes_on_when_asked_and_keeps_its_history(copied, capsys, read_run):
    """By the command that it prints itself, which names nothing but the run."""
    before = everything(copied)
    assert cli.run("train", ["--resume", str(copied)]) == 0
    assert everything(copied) == before
    err = capsys.readouterr().err
    start = f"{copied} is finished (step 20 of 20). To go on: python -m jllama train "
    assert err.startswith(start)
    advice = shlex.split(err.removeprefix(start))
    options = "--training.steps 40 --resume_with_changes true"
    assert advice == ["--resume", str(copied), *options.split()]
    advice[3] = "24"
    others = "--training.sample_tokens 0 --training.keep_last 1 --training.eval_every 24"
    assert cli.run("train", [*advice, *others.split()]) == 0
    noted = capsys.readouterr().err.splitlines()
    assert noted[:4] == [
        "training.eval_every was 5 and is 24",
        "training.keep_last was 2 and is 1",
        "training.sample_tokens was 16 and is 0",
        "training.steps was 20 and is 24",
    ]
    assert noted[4].startswith("the learning rate was 1.00e-03 at step 20 and is ")
    assert read_run.steps(copied)[-1] == 24
    written = saved_config(copied)
    assert written["training"]["steps"] == 24
    assert written["resume_with_changes"] is False  # asked once, not for good
    (history,) = read_run.lines(copied, "config.history.jsonl")
    assert history["until_step"] == 20
    assert history["config"] == yaml.safe_load(before[copied / "config.yaml"])


def test_a_run_in_use_is_refused_with_who_has_it(copied, refused, monkeypatch):
    # Holds nobody back.
    (copied / "in_use").write_text("process 1 on a machine that has died since\n")
    with file_lock(copied):
        before = everything(copied)
        code, message = refused(copied, "--resume", "auto")
        assert code == 1
        owner = rf"process {os.getpid()} on \S+ since [\d-]+ [\d:]+"
        advice = "wait for it, or choose another folder"
        assert re.fullmatch(rf"error: {copied} is in use by {owner}: {advice}", message)
        assert everything(copied) == before
    assert not (copied / "in_use").exists()
    monkeypatch.setattr(files, "fcntl", None)  # Windows
    with file_lock(copied), file_lock(copied):
        pass
    assert not (copied / "in_use").exists()


def test_a_run_stopped_before_its_first_checkpoint_starts_again(
    workshop, small_run, tmp_path, read_run
):
    """By the same command; what it had logged is done again."""
    run = tmp_path / "run"
    (run / "checkpoints" / "5.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(small_run.folder / name, run / name)
    # A third of an epoch, whose last step is not whole.
    part = ("--training.steps", 0, "--training.epochs", 0.3, "--training.sample_tokens", 0)
    assert workshop.run(run, *part) == 0
    assert read_run.steps(run) == [2]
    assert [line["step"] for line in read_run.lines(run) if "loss" in line] == [1, 2]
    assert not (run / "config.history.jsonl").exists()  # nothing came of it


def test_what_was_due_when_a_run_was_stopped_is_done_when_it_goes_on(workshop, copied, read_run):
    """Pitfall 43: an evaluation that a stop skipped. The run is as 0.1.0 wrote them, without its
    last one. Then it is finished: nothing is computed again, and nothing written.
    """
    meta = copied / "checkpoints" / str(STEPS) / "meta" / "metadata"
    noted = json.loads(meta.read_text())
    identity = {"the corpus or its tokenizer": noted.pop("corpus"), "seed": 0}
    meta.write_text(json.dumps(noted | {"identity": identity}))
    text = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(text.replace("epochs: 0.0", "epochs: 1.0"))
    lines = read_run.lines(copied)
    kept = [line for line in lines if not (line["step"] == STEPS and "loss" not in line)]
    assert len(kept) == len(lines) - 2  # the evaluation and the end
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert cli.run("train", ["--resume", str(copied), "--training.sample_tokens", "0"]) == 0
    evaluations = [line for line in lines if "loss" not in line]
    assert [line for line in read_run.lines(copied) if "loss" not in line] == evaluations
    before = everything(copied)
    options = workshop.options(copied, "--resume", "auto")
    final = train(parse(TrainConfig, options, "train.py"))
    assert dataclasses.asdict(final) == lines[-1]["final"]
    assert everything(copied) == before


def test_what_may_fail_and_what_may_not(workshop, tmp_path, capsys, monkeypatch, read_run):
    """A crash of an evaluation or a sample is a warning; a validation loss that is no number ends
    the run, unsaved.
    """
    nan = math.nan
    results = iter([None, Evaluation(5.0, 150.0, 7.0), Evaluation(nan, nan, nan)])

    def evaluate(*arguments, **named):
        result = next(results)
        if result is None:
            raise RuntimeError("out of luck")
        return result

    def fail(*arguments, **named):
        raise RuntimeError("no words")

    monkeypatch.setattr(sources.DataSource, "evaluate", evaluate)
    monkeypatch.setattr(samples, "generate", fail)
    run = tmp_path / "run"
    assert workshop.run(run, "--training.eval_every", 2) == 1
    err = capsys.readouterr().err
    problem = "the validation loss is not a finite number at step 4"
    assert f"{problem}; the last good checkpoint is of step 3" in one_error(err)
    words = " ".join(err.split())
    assert words.count("warning: RuntimeError: out of luck; training goes on") == 1
    assert words.count("warning: RuntimeError: no words; training goes on") == 2
    assert set(read_run.losses(run)) == {1, 2, 3, 4}
    # Tried again at once.
    assert [line["step"] for line in read_run.lines(run) if "validation_loss" in line] == [3]
    assert read_run.steps(run) == [2, 3]  # step 2 was saved although its evaluation crashed


def test_init_from_has_defaults_that_fit_and_takes_any_configuration(tmp_path, capsys):
    """What a file says of the model gives way; what it says of training counts; flags are left to
    be judged.
    """
    file = tmp_path / "file.yaml"
    file.write_text(
        "model: {embed_dim: 64}\ndata: {tokenizer: bytes, path: x}\n"
        "optimizer: {learning_rate: 0.5}\n"
    )

    def read(*arguments):
        config = read_options([*map(str, arguments)], "train.py")
        return config, (config.training.batch_size, config.optimizer.learning_rate)

    plain, _ = read("--config", file)
    assert (plain.model.embed_dim, plain.training.batch_size) == (64, 16)
    tuned, defaults = read("--init_from", "somewhere")
    assert capsys.readouterr().err == ""
    assert defaults == (4, 2e-5)
    both, values = read("--config", file, "--init_from=somewhere", "--training.batch_size", "3")
    assert (*values, both.data.path) == (3, 0.5, "x")
    assert (both.model, both.data.tokenizer) == (tuned.model, "bpe")
    assert "of the file are not used: init_from brings its own" in capsys.readouterr().err
    file.write_text(file.read_text() + "init_from: somewhere\n")
    flags = "--model.num_layers=3 --data.tokenizer mine --model.tie_embeddings --model.embed_dim 96"
    within, values = read("--config", file, *flags.split())
    assert (within.model.num_layers, within.model.embed_dim) == (3, 96)
    assert (values[0], within.data.tokenizer) == (4, "mine")


def test_epochs_stand_in_for_steps():
    """By themselves they are enough: only a number of steps that somebody chose is in their way."""
    assert LoopConfig(epochs=2.0).epochs == 2
    for changes, problem in [
        (
            {"steps": 20, "epochs": 2.0},
            "training.steps is 20; it must be 0 or left out, since training.epochs is 2.0",
        ),
        ({"epochs": math.inf}, "training.epochs is inf; it must be from 0 to below"),
        ({"steps": 2**31}, "training.steps is 2147483648; it must be from 0 to below"),
        ({"save_every": -1}, "training.save_every is -1; it must be from 0"),
        ({"save_minutes": -1.0}, "training.save_minutes is -1.0; it must be from 0"),
    ]:
        with pytest.raises(UsageError, match=re.escape(problem)):
            LoopConfig(**changes)


def test_init_from_takes_windows_of_at_most_1024_tokens(workshop, tmp_path, capsys):
    """Four of them in a batch: that is more text than there is, so nothing is trained."""
    config = LlamaConfig(vocab_size=259, num_layers=1, embed_dim=8, num_heads=2, max_seq_len=2048)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(config))
    save(LanguageModel(config, params, BytesTokenizer()), tmp_path / "long", "hf")
    data = [f"--data.{name}={workshop.data[name]}" for name in ("path", "cache_dir")]
    run = tmp_path / "run"
    words = ["--init_from", str(tmp_path / "long"), "--run_dir", str(run), *data]
    assert cli.run("train", words) == 1
    assert "one batch of 4 x 1024 needs 4097" in one_error(capsys.readouterr().err).replace(",", "")
    assert not run.exists()
