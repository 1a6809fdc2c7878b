"""What is seen of a run, and what it survives: loggers, failures, steps left out, patience, the
page of several.
"""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import struct

import numpy as np
import pytest
import yaml
from helpers import run_command
from tensorboardX.proto.event_pb2 import Event

from jllama.commands import cli
from jllama.system import files
from jllama.training import samples, sources, tracker
from jllama.training.loggers import LOGGERS, retrying_writer
from jllama.training.metrics import Evaluation


def train(workshop, run, *arguments, steps=4, every=2):
    options = {"training.steps": steps, "training.eval_every": every, "training.sample_tokens": 0}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return workshop.run(run, *flags, *arguments)


FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl")


def copy_pages_sources(run, folder):
    """Copy what a run's page is made of."""
    folder.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copy(run / name, folder / name)
    return folder


def events(run):
    """What TensorBoard reads: a START voids what is of its step or later."""
    found = []
    for path in sorted((run / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        rest = path.read_bytes()
        while rest:
            size = struct.unpack("Q", rest[:8])[0]
            event, rest = Event.FromString(rest[12 : 12 + size]), rest[16 + size :]
            if event.session_log.status:
                found = [each for each in found if each[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def drawn(lines):
    """The numbers of a run's lines as a logger gets them."""
    numbers = []
    for line in lines:
        final = {f"final/{name}": value for name, value in line.get("final", {}).items()}
        for name, value in (line | final).items():
            if name != "step" and isinstance(value, float | int):
                numbers.append((line["step"], name, np.float32(value)))
    return numbers


def test_records_wait_in_order_for_a_writer_that_works():
    written, warnings, opened, works = [], [], [], False

    def open_writer(step):
        opened.append(step)

        def write(step, value):
            if not works and value != "a":
                raise OSError("no space")
            written.append(value)

        return write

    give = retrying_writer(open_writer, warnings.append)
    for step, value in enumerate("abcd"):
        give(step, value)
    works = True
    give(4, "e")
    give(5, "f")
    assert written == [*"abcdef"]
    assert opened == [0, 1, 1, 1]  # from the first that waits, so what was written in part is void
    assert [str(each) for each in warnings] == ["no space"]


def test_a_restart_leaves_no_gap_in_samples_and_tensorboard(
    workshop, tmp_path, read_run, capsys, monkeypatch
):
    """TensorBoard has what metrics.jsonl has, live and replayed; samples that failed are tried
    again, then too.
    """
    run, attempts, generate = tmp_path / "run", [], samples.generate

    def fails_at_first(*arguments, **named):
        attempts.append(None)
        if len(attempts) < 4:
            raise RuntimeError("no words")
        return generate(*arguments, **named)

    monkeypatch.setattr(samples, "generate", fails_at_first)
    options = ("--logger", "tensorboard", "--training.sample_tokens", 2)
    assert train(workshop, run, *options) == 0  # sampling is due from step 2 on
    assert read_run.lines(run, "samples.jsonl") == []
    more = ("--resume", "auto", "--resume_with_changes", "true")
    assert train(workshop, run, *options, *more, steps=6) == 0
    assert [line["step"] for line in read_run.lines(run, "samples.jsonl")] == [4, 6]
    captured = capsys.readouterr()
    warning = "warning: RuntimeError: no words; training goes on"
    assert " ".join(captured.err.split()).count(warning) == 3
    lines = read_run.lines(run)
    assert len(lines) == 11  # what it is made of, six steps, three evaluations, the end
    ended = [each for each in events(run) if each[0] == 4 and each[1].startswith(("final", "best"))]
    assert [each for each in events(run) if each not in ended] == drawn(lines)
    assert cli.run("report", [str(run), "--logger", "tensorboard"]) == 0
    assert events(run) == drawn(lines)
    assert captured.out == capsys.readouterr().out == ""


@pytest.mark.slow
def test_trackio_has_it_too(workshop, small_run, tmp_path):
    """By the command itself; what trackio says is chatter."""
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    page = tmp_path / "page.html"
    arguments = ("report", small_run.folder, "--output", page, "--logger", "trackio")
    done = workshop.finish(workshop.start("-m", "jllama", *arguments, **variables))
    assert (done.code, done.out) == (0, ""), done.err
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "jllama.db")) as stored:
        rows = stored.execute("select step, metrics from metrics order by id").fetchall()
    logged = [
        (step, name, np.float32(value))
        for step, values in rows
        for name, value in json.loads(values).items()
    ]
    assert logged == drawn(files.read_lines(small_run.folder / "metrics.jsonl"))


def test_a_logger_that_fails_stops_nothing(workshop, tmp_path, read_run, capsys, monkeypatch):
    """It is said once, and all comes when it works again; a disk that is full for a while loses no
    line either.
    """
    calls, given = [], []

    def broken(folder, config, step):
        calls.append(step)
        if len(calls) < 4:
            raise ConnectionError("nobody\nthere")
        return lambda step, values: given.append((step, values))

    def append_line(path, record):
        if len(calls) < 3:
            raise OSError(28, "No space left on device")
        files_append(path, record)

    files_append = files.append_line
    monkeypatch.setattr(tracker.files, "append_line", append_line)
    monkeypatch.setitem(LOGGERS, "broken", broken)
    assert train(workshop, tmp_path / "run", "--logger", "broken") == 0
    err = " ".join(capsys.readouterr().err.split())
    assert err.count("warning: ConnectionError: nobody there; training goes on") == 1
    assert err.count("warning: OSError: [Errno 28] No space left on device; training goes on") == 1
    lines = read_run.lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 4, 4]
    assert [(step, *each) for step, values in given for each in values.items()] == [
        (step, name, pytest.approx(value)) for step, name, value in drawn(lines)
    ]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("tensorbord", 2, "there is no logger tensorbord; did you mean tensorboard?"),
        (
            "wandb",
            1,
            "the logger wandb needs a package that is not installed: pip install 'jllama[",
        ),
    ],
)
def test_a_logger_that_is_not_there_is_said_before_anything_is_written(
    workshop, tmp_path, capsys, monkeypatch, name, code, said
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train(workshop, tmp_path / "run", "--logger", name) == code
    assert cli.run("report", ["run", "--logger", name]) == code
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"error: {said}") for line in lines] == [True, True]
    assert not (tmp_path / "run").exists()


def test_steps_left_out_are_logged_with_their_batches(workshop, tmp_path, read_run, capsys):
    """A gradient that is longer than usual is a spike here; the means leave it out, and it ends a
    run that wants that.
    """
    run = tmp_path / "run"
    # Two steps have a sixth more than the others, whose norms hardly change with this model.
    spikes = ("--training.spike_factor", 1.02, "--optimizer.learning_rate", 1e-5)
    spikes = (*spikes, "--model.tie_embeddings", "true")
    assert train(workshop, run, *spikes, "--training.log_every", 4, steps=12, every=12) == 0
    lines = read_run.lines(run)
    skipped = [line for line in lines if line.get("skipped")]
    batches = read_run.lines(run, "skipped.jsonl")
    assert 0 < len(skipped) < 12
    assert [line["step"] for line in batches] == [line["step"] for line in skipped]
    assert {np.shape(line["tokens"]) for line in batches} == {(8, 33)}
    means = [line for line in lines if "tokens_per_s" in line]
    assert max(line["grad_norm"] for line in means) < min(line["grad_norm"] for line in skipped)
    step = skipped[0]["step"]
    note = f"step {step} is left out, its batch is in skipped.jsonl: the gradient's norm, "
    assert note in capsys.readouterr().err
    spikes = (*spikes, "--training.max_skipped", 1)
    assert train(workshop, tmp_path / "other", *spikes, steps=12, every=1) == 1
    problem = f"the gradient's norm, {skipped[0]['grad_norm']:.3g}, is a spike at step {step}"
    advice = "try a lower optimizer.learning_rate or optimizer.clip_norm"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {problem}; the last good checkpoint is of step {step - 1}: {advice}"
    )


def test_patience_ends_a_run_also_after_a_restart(
    workshop, tmp_path, read_run, capsys, monkeypatch
):
    """Nothing is learned: the first evaluation stays the best."""
    run = tmp_path / "run"
    result = Evaluation(5.0, 150.0, 7.0)
    monkeypatch.setattr(sources.DataSource, "evaluate", lambda *_: result)
    patient = ("--training.patience", 3)
    assert train(workshop, run, *patient, steps=6, every=1) == 0
    lines = read_run.lines(run)
    assert [line["step"] for line in lines if "validation_loss" in line] == [1, 2, 3, 4]
    assert "final" in lines[-1]
    said = "step 4: the validation loss has not fallen for 3 evaluations, so training ends here"
    assert said in capsys.readouterr().err.splitlines()
    # As if stopped there.
    kept = [line for line in lines if not (line["step"] == 4 and "loss" not in line)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert cli.run("train", ["--resume", str(run)]) == 0
    assert read_run.lines(run) == lines
    assert said in capsys.readouterr().err.splitlines()
    assert cli.run("train", ["--resume", str(run)]) == 0
    advice = f"python -m jllama train --resume {run} --training.patience 0"
    assert capsys.readouterr().err == f"{run} is finished (step 4 of 6). To go on: {advice}\n"


def test_a_page_for_several_runs(workshop, small_run, tmp_path, capsys, monkeypatch):
    for name in ("one", "two <b>"):
        copy_pages_sources(small_run.folder, tmp_path / name)
    config = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    config["model"]["norm_placement"] = "after"
    (tmp_path / "one" / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    assert cli.run("report", ["one", "two <b>"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "<th>one<th>two &lt;b&gt;" in page
    assert page.count("ms a step") == 2
    row = re.search(r"<tr><t[hd]>model.norm_placement<td>(\w+)<td>(\w+)", page)
    assert row.groups() == ("after", "before")
    assert "optimizer.learning_rate" not in page  # both have the same
    assert capsys.readouterr().err == "wrote report.html\n"
    assert "<b>two" not in page
    shutil.copy(small_run.folder / "config.yaml", tmp_path / "one" / "config.yaml")
    monkeypatch.setattr("jllama.training.report._chart", lambda *_: "<svg></svg>")
    assert cli.run("report", ["one", "--output", "other.html"]) == 0
    assert cli.run("report", ["one"]) == 0
    own = (tmp_path / "one" / "report.html").read_text()
    assert own == (tmp_path / "other.html").read_text()
    written = (small_run.folder / "report.html").read_text()
    written = re.sub(r"<svg.*?</svg>\n?", "<svg></svg>", written, flags=re.S)
    written = written.replace(str(small_run.folder), "one")
    for tag in ("<h2>", "<title>"):
        written = written.replace(f"{tag}run<", f"{tag}one<")
    assert own == written.replace("run_dir: one", f"run_dir: {small_run.folder}")
    assert capsys.readouterr().out == ""


def test_a_page_runs_nothing_of_what_a_run_holds(small_run, tmp_path):
    """Whoever made it: all is escaped, and no script is allowed."""
    run, attack = tmp_path / "run", "<script>alert(1)</script>"
    run.mkdir()
    config = yaml.safe_load((small_run.folder / "config.yaml").read_text())
    config["training"] |= {"sample_prompt": attack, "questions": [attack]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"step": 1, "loss": 2.0, "facts": {attack: attack, "devices": attack}},
        {"step": attack},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [{"step": attack, "prompt": prompt, "text": attack} for prompt in ("p", attack)]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    assert cli.run("report", [str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") > 5
    policy = "default-src 'none'; style-src 'unsafe-inline';"
    assert f'Content-Security-Policy content="{policy}' in " ".join(page.split())


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_a_runs_folder_is_no_wait(name, small_run, tmp_path, capsys):
    copy_pages_sources(small_run.folder, tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert cli.run("report", [str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")


def test_folders_that_hold_no_run_are_refused_in_a_sentence(tmp_path, small_run):
    """And no page is written."""
    run, page, none = small_run.folder, tmp_path / "page.html", tmp_path / "none"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.yaml").write_text("model: {vocab_size: 9}\n")
    odd = copy_pages_sources(run, tmp_path / "odd") / "metrics.jsonl"
    odd.write_text('3\n{"step": "x", "loss": []}\n{"step": 1, "facts": 7}\n')
    for name, problem in [
        ("none", "is not the folder of a run: it has no config.yaml"),
        ("model", "does not hold what a run logs: "),
        ("odd", "does not hold what a run logs: "),
    ]:
        done = run_command("report", run, tmp_path / name, "--output", page)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"error: {tmp_path / name} {problem}")
        assert done.err.count("\n") == 1
    assert not page.exists()
    done = run_command("report", run, "--output", none / "page.html")
    problem = f"cannot write {none / 'page.html'}: No such file or directory; choose another place"
    assert (done.code, done.err) == (2, f"error: {problem}\n")
