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
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jllama import files
from jllama.checkpoints.registry import load, save
from jllama.commands import cli
from jllama.commands.cli import parse
from jllama.commands.train import read_options
from jllama.config import LlamaConfig
from jllama.data.config import DataConfig
from jllama.errors import UsageError
from jllama.files import file_lock
from jllama.language_model import LanguageModel
from jllama.model import abstract_params
from jllama.parameters import count_parameters
from jllama.presets import preset
from jllama.tokenizers import BytesTokenizer
from jllama.training import loop
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.loop import train
from jllama.training.metrics import Evaluation
from jllama.training.optimizer import learning_rate_at
from jllama.training.resolve import resolve

STEPS, EPOCH = 20, 6


def one_error(err):
    """The last line, which must be the only one about an error, and no traceback anywhere."""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == err.splitlines()[-1:]
    return errors[0]


def wait_for_step(read_run, process, run, step):
    """Until the run has logged a step; its last line may be half written."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and path.read_text().count('"grad_norm"') >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {process.communicate()[1]}")


def test_the_folder_of_a_run(small_run, read_run):
    run, lines = small_run.folder, read_run.lines(small_run.folder)
    assert small_run.out == ""  # chatter goes to stderr
    assert re.search(
        r"[\d,]+ parameters on one CPU, blocked attention, ", small_run.err
    )  # what auto chose
    steps = [line for line in lines if "loss" in line]
    model = parse(TrainConfig, ["--config", str(run / "config.yaml")], "train.py").model
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert set(line) >= {"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu"}
        assert line["tokens_per_s"] > 0
        assert line["planned_bytes"] > 16 * count_parameters(
            model
        )  # weights, two moments, gradients
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
    assert [(line["step"], line["prompt"]) for line in samples] == [
        (step, "the ") for step in (5, 10, 15, 20)
    ]
    report = (run / "report.html").read_text()
    for part in (
        "step 20",
        "training text",
        "max_seq_len: 32",
        f"{best['bits_per_byte']:.4f}",
        "ln 259",
        "ms a step",
    ):
        assert part in report
    for command in (f"sample --checkpoint {run} --prompt 'the '", f"train --resume {run}"):
        assert html.escape(f"python -m jllama {command}") in report
    assert report.count("<svg") == 4  # a chart each, in the page's colors, for any screen
    assert report.count("currentColor") > 40
    assert "#000" not in report
    for part in (
        "color-scheme: light dark",
        "<meta name=viewport content='width=device-width",
        "auto-fit",
    ):
        assert part in report
    assert (run / "tokenizer.bytes.json").is_file()
    assert read_run.steps(run) == [15, 20]
    assert f"--checkpoint {run}" in small_run.err.replace("\n", "")
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "receipt.json",
        "report.html",
        "samples.jsonl",
        "tokenizer.bytes.json",
    ]


def test_the_saved_configuration_starts_the_same_run_again(small_run, workshop):
    saved = parse(TrainConfig, ["--config", str(small_run.folder / "config.yaml")], "train.py")
    asked = parse(
        TrainConfig,
        ["--config", str(workshop.yaml), "--run_dir", str(small_run.folder)],
        "train.py",
    )
    assert (saved.model.vocab_size, asked.model.vocab_size) == (
        259,
        0,
    )  # only what was left open is filled in
    assert (saved.training.seq_len, asked.training.seq_len) == (32, 0)
    assert (saved.optimizer, saved.data, saved.training, saved.seed) == (
        asked.optimizer,
        asked.data,
        dataclasses.replace(asked.training, seq_len=32),
        asked.seed,
    )


@pytest.mark.slow
def test_stopped_and_continued_is_the_same_to_the_last_bit(small_run, workshop, read_run, tmp_path):
    """Stopped within the first epoch by SIGTERM and within the second by SIGINT; each time a fresh
    process goes on.
    """
    run, stopped = tmp_path / "run", []
    often = ("--training.eval_every", 1, "--training.sample_tokens", 0)
    for at, number in [(3, signal.SIGTERM), (EPOCH + 3, signal.SIGINT)]:
        process = workshop.train(run, "--resume", "auto", *often)
        wait_for_step(read_run, process, run, at)
        process.send_signal(number)
        done = workshop.finish(process)
        assert done.code == 128 + number, done.err
        stopped.append(read_run.steps(run)[-1])
        name, *_, said = [line for line in done.err.splitlines() if not line.startswith("step ")][
            1:
        ]
        assert re.fullmatch(
            r"(Ctrl-C|SIGTERM): finishing step \d+ and saving; again to quit now", name
        )
        assert (
            said == f"stopped at step {stopped[-1]} of 20; saved. "
            f"Go on: python -m jllama train --resume {run}"
        )
    assert 3 <= stopped[0] < EPOCH < stopped[1] < STEPS
    done = workshop.finish(workshop.train(run, "--resume", "auto", *often))
    assert done.code == 0, done.err
    assert read_run.losses(run) == read_run.losses(small_run.folder)
    assert [line["step"] for line in read_run.lines(run) if "loss" in line] == list(
        range(1, STEPS + 1)
    )
    read_run.assert_same_bits(run, small_run.folder, STEPS)


def test_a_stop_between_two_checkpoints_is_saved(
    small_run, workshop, read_run, tmp_path, capsys, monkeypatch
):
    """The signal comes while a step is being logged, after the loop has asked for one."""
    run, append_line = tmp_path / "run", files.append_line

    def append_and_stop(path, record):
        append_line(path, record)
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(files, "append_line", append_and_stop)
    settings = options(workshop, run, "--training.save_every", 2)
    before, interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert cli.run("train", settings) == 128 + signal.SIGTERM
    step = read_run.steps(run)[-1]
    err = capsys.readouterr().err
    assert err.endswith(
        f"stopped at step {step} of 20; saved. Go on: python -m jllama train --resume {run}\n"
    )
    assert "error" not in err
    assert step in (3, 4)
    assert read_run.steps(run)[0] == 2  # without an evaluation, as at the stop
    assert not [line for line in read_run.lines(run) if "validation_loss" in line]
    assert not (run / "samples.jsonl").read_text()
    assert read_run.losses(run).keys() == set(range(1, step + 1))
    assert signal.getsignal(signal.SIGTERM) == before
    assert (
        signal.signal(signal.SIGINT, interrupt) == signal.SIG_DFL
    )  # no traceback in the end of the process


@pytest.mark.slow
def test_killed_at_any_moment_and_continued_is_the_same_to_the_last_bit(
    small_run, workshop, read_run, tmp_path
):
    run, rng, seen = tmp_path / "run", random.Random(0), 0
    often = ("--resume", "auto", "--training.eval_every", 1, "--training.sample_tokens", 0)
    for _ in range(3):  # a checkpoint a step: most of the time one is being written
        process = workshop.train(run, *often)
        wait_for_step(read_run, process, run, seen + rng.randint(1, 4))
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        seen = (
            read_run.steps(run)[-1] if (run / "checkpoints").is_dir() and read_run.steps(run) else 0
        )
        assert seen < STEPS
    done = workshop.finish(workshop.train(run, *often))
    assert done.code == 0, done.err
    assert read_run.losses(run) == read_run.losses(small_run.folder)
    read_run.assert_same_bits(run, small_run.folder, STEPS)
    assert not [path for path in (run / "checkpoints").iterdir() if not path.name.isdigit()]


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
    params = load(run, step=last, layout="training").params
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in params["layers"].values())


@pytest.fixture
def copied(small_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(small_run.folder, run)
    return run


def test_a_loss_that_is_no_number_stops_the_run(workshop, copied, read_run, capsys):
    """The run goes on from its good checkpoint of step 20 with a ruinous learning rate."""
    best = load(copied).step
    ruinous = (
        "--optimizer.learning_rate",
        1e30,
        "--optimizer.clip_norm",
        1e30,
        "--training.eval_every",
        1,
    )
    asked = ("--resume", "auto", "--resume_with_changes", "true")
    asked = options(workshop, copied, *asked, "--training.steps", STEPS + 10, *ruinous)
    assert cli.run("train", asked) == 1
    message = one_error(capsys.readouterr().err)
    assert "is not a finite number at step " in message
    last = read_run.steps(copied)[-1]
    assert (
        f"the last good checkpoint is of step {last}: try a lower optimizer.learning_rate"
        in message
    )
    assert (
        last <= STEPS + 1
    )  # the first ruinous step may still be followed by a finite, enormous validation loss
    model = load(copied, layout="training")
    assert model.step == best
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in model.params["layers"].values())


def options(workshop, run, *arguments):
    return ["--config", str(workshop.yaml), "--run_dir", str(run), *map(str, arguments)]


def refused(workshop, run, capsys, *arguments):
    code = cli.run("train", options(workshop, run, *arguments))
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return code, one_error(err)


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_existing_run_is_not_overwritten(workshop, copied, capsys):
    before = everything(copied)
    code, message = refused(workshop, copied, capsys)
    assert (code, f"continue it with python -m jllama train --resume {copied}, or" in message) == (
        2,
        True,
    )
    assert everything(copied) == before


def test_what_a_run_cannot_go_on_with_is_refused_with_what_was_and_what_is(
    workshop, copied, capsys
):
    """Also where changes are asked for; the architecture by its options, not by its arrays."""
    before = everything(copied)
    for changes, said in [
        (["--model.mlp_dim", 96], "model.mlp_dim was 64 and is 96: "),
        (["--model.tie_embeddings", "true"], "model.tie_embeddings was False and is True: "),
        (
            ["--seed", 1, "--training.batch_size", 4],
            "seed was 0 and is 1, training.batch_size was 8 and is 4: ",
        ),
        (["--training.seq_len", 24], "training.seq_len was 32 and is 24: "),
        (
            ["--model.rope_scaling.type=linear", "--model.rope_scaling.factor=2"],
            "model.rope_scaling was None and is ",
        ),
    ]:
        for asked in ("false", "true"):
            code, message = refused(
                workshop,
                copied,
                capsys,
                "--resume",
                "auto",
                *changes,
                "--resume_with_changes",
                asked,
            )
            assert code == 1
            assert message.startswith(f"error: {said}")
            assert "start a new run with another run_dir" in message
    assert everything(copied) == before


SHORT = ("--training.steps", 2, "--training.eval_every", 2, "--training.sample_tokens", 0)


def typed(monkeypatch, text, *, is_terminal=True):
    """What is typed on the terminal, or comes through a pipe."""
    stdin = io.StringIO(text)
    stdin.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def test_a_run_is_overwritten_when_its_name_is_typed(
    workshop, copied, capsys, monkeypatch, read_run
):
    """Nothing of the old one is left, and it is removed when all else has been found in order."""
    before = everything(copied)
    typed(monkeypatch, "run\n")
    assert (
        cli.run("train", options(workshop, copied, "--overwrite", "--data.path", "nowhere", *SHORT))
        == 1
    )
    capsys.readouterr()
    assert everything(copied) == before
    typed(monkeypatch, "run\n")
    assert cli.run("train", options(workshop, copied, "--overwrite", *SHORT)) == 0
    assert (
        f"{copied} and its checkpoints will be removed. To go on, type its name, run:\n"
        in capsys.readouterr().err
    )
    assert read_run.steps(copied) == [2]
    assert len(read_run.losses(copied)) == 2
    assert not (copied / "samples.jsonl").read_text()
    assert not (copied / "config.history.jsonl").exists()
    written = yaml.safe_load((copied / "config.yaml").read_text())
    assert (written["overwrite"], written["yes"]) == (False, False)  # asked once, not for good


def test_a_run_is_overwritten_without_asking_by_yes(workshop, copied, read_run):
    assert cli.run("train", options(workshop, copied, "--overwrite", "--yes", *SHORT)) == 0
    assert read_run.steps(copied) == [2]
    more = (
        "--resume",
        "auto",
        "--overwrite",
        "--yes",
        "--resume_with_changes",
        "--training.steps",
        3,
    )
    assert cli.run("train", options(workshop, copied, *SHORT, *more)) == 0
    assert read_run.steps(copied)[-1] == 3  # continued, not removed


@pytest.mark.parametrize(("text", "is_terminal"), [("other\n", True), ("", True), ("run\n", False)])
def test_without_its_name_a_run_stays(workshop, copied, capsys, monkeypatch, text, is_terminal):
    before = everything(copied)
    typed(monkeypatch, text, is_terminal=is_terminal)
    assert cli.run("train", options(workshop, copied, "--overwrite", *SHORT)) == 2
    said = capsys.readouterr().err.rpartition("error: ")[2]
    assert (
        said
        == f"{copied} stays as it is: its name must be typed on a terminal, or --yes be given\n"
    )
    assert everything(copied) == before


def test_only_runs_are_overwritten(workshop, copied, capsys):
    """A folder with a file that no run writes stays as it is, and so does one with the text to
    train on.
    """
    before = everything(copied)
    (copied / "thesis.txt").write_text("a year of work " * 100)
    for changes, what in [
        ([], "holds thesis.txt, more or less than a checkpoint"),
        (["--data.path", copied], "is "),
    ]:
        code, message = refused(workshop, copied, capsys, "--overwrite", "--yes", *changes)
        assert code == 1
        assert what in message
    (copied / "thesis.txt").unlink()
    assert everything(copied) == before


def test_a_preset_is_the_architecture(workshop, tmp_path, capsys):
    """In the run's configuration; where its context is long, windows of 1,024 tokens are the
    default.
    """
    run = tmp_path / "run"
    arguments = [
        f"--run_dir={run}",
        f"--data.path={workshop.data['path']}",
        f"--data.cache_dir={tmp_path}",
    ]
    arguments += ["--data.tokenizer=bytes", "--training.steps=1", "--training.sample_tokens=0"]
    small = ["--preset=stories-260k", "--training.batch_size=2", "--training.seq_len=16"]
    assert cli.run("train", [*arguments, *small]) == 0
    config = parse(TrainConfig, ["--config", str(run / "config.yaml")], "train.py")
    assert config.model == preset("stories-260k")
    assert cli.run("train", ["--resume", str(run)]) == 0  # it is finished
    capsys.readouterr()
    for changes, said in [
        (
            ["--preset=llama3.2-1b", "--model.num_layers=2"],
            "model.num_layers is 2; it must be 16, as in llama3.2-1b, or",
        ),
        (["--preset=llama3.2-1c"], "there is no preset llama3.2-1c; did you mean llama3.2-1b?"),
    ]:
        assert cli.run("train", [*arguments, f"--run_dir={tmp_path / 'other'}", *changes]) in (1, 2)
        assert said in one_error(capsys.readouterr().err)
    assert not (tmp_path / "other").exists()
    data = DataConfig(workshop.data["path"], tokenizer="bytes", cache_dir=str(tmp_path))
    config, *_ = resolve(TrainConfig(LlamaConfig(), preset="llama3.2-1b", data=data), None)
    assert (config.model, config.training.seq_len) == (preset("llama3.2-1b"), 1024)


def test_the_short_help_has_the_sizes(capsys):
    assert cli.run("train", ["--help"]) == 0
    page = capsys.readouterr().out
    for name in (
        "preset",
        "model.num_layers",
        "model.embed_dim",
        "training.batch_size",
        "training.seq_len",
    ):
        assert f"--{name} " in page


def test_another_corpus_is_refused(workshop, copied, capsys, tmp_path):
    before = everything(copied)
    other = tmp_path / "other.txt"
    other.write_text((workshop.folder / "corpus.txt").read_text() + "one more line\n")
    (copied / "config.yaml").write_text(
        (copied / "config.yaml").read_text().replace("steps: 20", "steps: 30")
    )
    before = everything(copied)
    more = ("--training.steps", 30)
    assert (
        cli.run("train", options(workshop, copied, "--resume", "auto", *more, "--data.path", other))
        == 1
    )
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
    change = ("--resume", copied, *more, "--resume_with_changes")
    assert cli.run("train", options(workshop, copied, *change)) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the data have changed: they are read from their beginning" in said
    lines = read_run.lines(copied)
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [*range(1, 25)]
    rates = {line["step"]: line["learning_rate"] for line in lines if "loss" in line}
    assert rates[24] < rates[21] < rates[15]
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert losses[24] > losses[20]
    assert load(copied).step in (22, 24)
    assert lines[-1]["best_step"] in (22, 24)
    # Stopped and continued, the new data are those of the run.
    assert cli.run("train", ["--resume", str(copied), "--training.steps=26"]) == 1
    again = ["--resume", str(copied), "--training.steps=26", "--resume_with_changes"]
    assert cli.run("train", again) == 0
    assert "the data have changed" not in capsys.readouterr().err
    assert load(copied).step in (22, 24, 26)


def test_a_change_of_the_schedule_is_said_and_asked_for(workshop, copied, capsys, read_run):
    """Pitfall 37. What it was and what it is, and the learning rate before and after; nothing is
    written.
    """
    before = everything(copied)
    code, message = refused(workshop, copied, capsys, "--resume", "auto", "--training.steps", 40)
    assert code == 1
    config = parse(TrainConfig, ["--config", str(copied / "config.yaml")], "train.py")
    rate = float(learning_rate_at(STEPS, config.optimizer, 40))
    assert message == (
        f"error: training.steps was 20 and is 40, the learning rate was 1.00e-03 at step 20 "
        f"and is {rate:.2e} at step "
        f"21: leave out what has changed, or go on so with resume_with_changes, or start a "
        f"new run with another "
        f"run_dir"
    )
    code, message = refused(
        workshop, copied, capsys, "--resume", copied, "--optimizer.learning_rate", 0.05
    )
    assert (
        code,
        "optimizer.learning_rate was 0.01 and is 0.05, the learning rate was 1.00e-03" in message,
    ) == (
        1,
        True,
    )
    code, message = refused(
        workshop, copied, capsys, "--resume", "auto", "--training.dtype", "bfloat16"
    )
    assert (code, message.startswith("error: training.dtype was auto and is bfloat16: ")) == (
        1,
        True,
    )
    assert everything(copied) == before


def test_a_constant_rate_goes_on_with_more_steps_as_if_it_had_had_them_from_the_start(
    workshop, tmp_path, read_run
):
    """Its warm-up keeps the steps that it had, though they were a share of fewer steps."""
    run, steps = (
        tmp_path / "run",
        ("--training.steps", 6, "--training.eval_every", 6, "--training.sample_tokens", 0),
    )
    constant = ("--optimizer.schedule", "constant", "--optimizer.warmup_fraction", 0.5)
    assert cli.run("train", options(workshop, run, *steps, *constant)) == 0
    more = (
        "--resume",
        "auto",
        "--resume_with_changes",
        "true",
        "--training.steps",
        12,
        "--training.eval_every",
        12,
    )
    assert cli.run("train", options(workshop, run, *steps, *constant, *more)) == 0
    rates = [line["learning_rate"] for line in read_run.lines(run) if "learning_rate" in line]
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3] + [0.01] * 10)
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["warmup_steps"] == 3


def test_a_finished_run_goes_on_when_asked_and_keeps_its_history(
    workshop, copied, capsys, read_run
):
    """By the command that it prints itself, which names nothing but the run."""
    before = everything(copied)
    assert cli.run("train", ["--resume", str(copied)]) == 0
    assert everything(copied) == before
    said = capsys.readouterr().err
    start = f"{copied} is finished (step 20 of 20). To go on: python -m jllama train "
    assert said.startswith(start)
    advice = shlex.split(said.removeprefix(start))
    assert advice == [
        "--resume",
        str(copied),
        "--training.steps",
        "40",
        "--resume_with_changes",
        "true",
    ]
    advice[3] = "21"
    assert (
        cli.run("train", [*advice, "--training.sample_tokens", "0", "--training.keep_last", "1"])
        == 0
    )
    noted = capsys.readouterr().err.splitlines()
    assert noted[:3] == [
        "training.keep_last was 2 and is 1",
        "training.sample_tokens was 16 and is 0",
        "training.steps was 20 and is 21",
    ]
    assert noted[3].startswith("the learning rate was 1.00e-03 at step 20 and is ")
    assert read_run.steps(copied)[-1] == 21
    assert yaml.safe_load((copied / "config.yaml").read_text())["training"]["steps"] == 21
    history = read_run.lines(copied, "config.history.jsonl")
    assert [(line["until_step"], line["config"]["training"]["steps"]) for line in history] == [
        (20, 20)
    ]
    assert history[0]["config"] == yaml.safe_load(before[copied / "config.yaml"])
    assert (
        "resume_with_changes: false" in (copied / "config.yaml").read_text()
    )  # asked once, not for good


def test_a_run_in_use_is_refused_with_who_has_it(workshop, copied, capsys, monkeypatch):
    (copied / "in_use").write_text(
        "process 1 on a machine that has died since\n"
    )  # holds nobody back
    with file_lock(copied):
        before = everything(copied)
        code, message = refused(workshop, copied, capsys, "--resume", "auto")
        assert code == 1
        assert re.fullmatch(
            rf"error: {copied} is in use by process {os.getpid()} on \S+ since [\d-]+ "
            rf"[\d:]+: wait for it, "
            rf"or choose another folder",
            message,
        )
        assert everything(copied) == before
    assert not (copied / "in_use").exists()
    monkeypatch.setattr(files, "fcntl", None)  # Windows
    with file_lock(copied), file_lock(copied):
        pass
    assert not (copied / "in_use").exists()


def test_a_run_stopped_before_its_first_checkpoint_starts_again(
    workshop, small_run, tmp_path, capsys, read_run
):
    """By the same command; what it had logged is done again."""
    run = tmp_path / "run"
    (run / "checkpoints" / "5.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(small_run.folder / name, run / name)
    one = ("--training.steps", 0, "--training.epochs", 0.1, "--training.sample_tokens", 0)
    assert cli.run("train", options(workshop, run, *one)) == 0
    assert read_run.steps(run) == [1]
    assert [line["step"] for line in read_run.lines(run) if "loss" in line] == [1]
    assert not (run / "config.history.jsonl").exists()  # nothing came of it


def test_what_was_due_when_a_run_was_stopped_is_done_when_it_goes_on(
    workshop, copied, capsys, read_run
):
    """Pitfall 43: an evaluation that a stop skipped. The run is as 0.1.0 wrote them, without its
    last one.
    """
    meta = copied / "checkpoints" / str(STEPS) / "meta" / "metadata"
    noted = json.loads(meta.read_text())
    meta.write_text(
        json.dumps(
            noted | {"identity": {"the corpus or its tokenizer": noted.pop("corpus"), "seed": 0}}
        )
    )
    (copied / "config.yaml").write_text(
        (copied / "config.yaml").read_text().replace("epochs: 0.0", "epochs: 1.0")
    )
    lines = read_run.lines(copied)
    kept = [line for line in lines if not (line["step"] == STEPS and "loss" not in line)]
    assert len(kept) == len(lines) - 2  # the evaluation and the end
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert cli.run("train", ["--resume", str(copied), "--training.sample_tokens", "0"]) == 0
    assert [line for line in read_run.lines(copied) if "loss" not in line] == [
        line for line in lines if "loss" not in line
    ]


def test_what_may_fail_and_what_may_not(workshop, tmp_path, capsys, monkeypatch, read_run):
    """A crash of an evaluation or a sample is a warning; a validation loss that is no number ends
    the run, unsaved.
    """
    results = iter(
        [
            RuntimeError("out of luck"),
            Evaluation(5.0, 150.0, 7.0),
            Evaluation(math.nan, math.nan, math.nan),
        ]
    )

    def evaluate(*arguments, **named):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    def fail(*arguments, **named):
        raise RuntimeError("no words")

    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "generate", fail)
    run = tmp_path / "run"
    arguments = [
        "--config",
        str(workshop.yaml),
        "--run_dir",
        str(run),
        "--training.eval_every",
        "2",
    ]
    assert cli.run("train", arguments) == 1
    err = capsys.readouterr().err
    said = (
        "the validation loss is not a finite number at step 4; the last good checkpoint is of "
        "step 3"
    )
    assert said in one_error(err)
    words = " ".join(err.split())
    assert words.count("warning: RuntimeError: out of luck; training goes on") == 1
    assert words.count("warning: RuntimeError: no words; training goes on") == 2
    assert set(read_run.losses(run)) == {1, 2, 3, 4}
    assert [line["step"] for line in read_run.lines(run) if "validation_loss" in line] == [
        3
    ]  # tried again at once
    assert read_run.steps(run) == [2, 3]  # step 2 was saved although its evaluation crashed


def test_a_finished_run_resumed_says_the_same_again(workshop, copied, read_run):
    """Nothing is computed again, and nothing written."""
    before = everything(copied)
    final = train(parse(TrainConfig, options(workshop, copied, "--resume", "auto"), "train.py"))
    assert dataclasses.asdict(final) == read_run.lines(copied)[-1]["final"]
    assert everything(copied) == before


def test_init_from_has_defaults_that_fit_and_takes_any_configuration(tmp_path, capsys):
    """What a file says of the model gives way; what it says of training counts; flags are left to
    be judged.
    """
    file = tmp_path / "file.yaml"
    file.write_text(
        "model: {embed_dim: 64}\ndata: {tokenizer: bytes, path: x}\noptimizer: "
        "{learning_rate: 0.5}\n"
    )
    plain = read_options(["--config", str(file)], "train.py")
    assert (plain.model.embed_dim, plain.training.batch_size) == (64, 16)
    tuned = read_options(["--init_from", "somewhere"], "train.py")
    assert capsys.readouterr().err == ""
    assert (tuned.training.batch_size, tuned.optimizer.learning_rate) == (4, 2e-5)
    both = read_options(
        ["--config", str(file), "--init_from=somewhere", "--training.batch_size", "3"], "train.py"
    )
    assert (both.training.batch_size, both.optimizer.learning_rate, both.data.path) == (3, 0.5, "x")
    assert (both.model, both.data.tokenizer) == (tuned.model, "bpe")
    assert "of the file are not used: init_from brings its own" in capsys.readouterr().err
    file.write_text(file.read_text() + "init_from: somewhere\n")
    flags = [
        "--model.num_layers=3",
        "--data.tokenizer",
        "mine",
        "--model.tie_embeddings",
        "--model.embed_dim",
        "96",
    ]
    within = read_options(["--config", str(file), *flags], "train.py")
    assert (within.training.batch_size, within.model.num_layers, within.model.embed_dim) == (
        4,
        3,
        96,
    )
    assert within.data.tokenizer == "mine"


def test_epochs_stand_in_for_steps():
    """By themselves they are enough: only a number of steps that somebody chose is in their way."""
    assert LoopConfig(epochs=2.0).epochs == 2
    for changes, said in [
        (
            {"steps": 20, "epochs": 2.0},
            "training.steps is 20; it must be 0 or left out, since training.epochs is 2.0",
        ),
        ({"epochs": math.inf}, "training.epochs is inf; it must be from 0 to below"),
        ({"steps": 2**31}, "training.steps is 2147483648; it must be from 0 to below"),
        ({"save_every": -1}, "training.save_every is -1; it must be from 0"),
    ]:
        with pytest.raises(UsageError, match=re.escape(said)):
            LoopConfig(**changes)


def test_init_from_takes_windows_of_at_most_1024_tokens(workshop, tmp_path, capsys):
    """Four of them in a batch: that is more text than there is, so nothing is trained."""
    config = LlamaConfig(vocab_size=259, num_layers=1, embed_dim=8, num_heads=2, max_seq_len=2048)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(config))
    save(LanguageModel(config, params, BytesTokenizer()), tmp_path / "long", "hf")
    data = [
        f"--data.path={workshop.data['path']}",
        f"--data.cache_dir={workshop.data['cache_dir']}",
    ]
    assert (
        cli.run(
            "train",
            ["--init_from", str(tmp_path / "long"), "--run_dir", str(tmp_path / "run"), *data],
        )
        == 1
    )
    assert "one batch of 4 x 1024 needs 4097" in one_error(capsys.readouterr().err).replace(",", "")
    assert not (tmp_path / "run").exists()
