"""``training.profile`` writes a trace of exactly its steps, and changes nothing else."""

import gzip
import json
import signal

import jax
import pytest
import yaml

from jllama.commands import cli
from jllama.commands.cli import parse
from jllama.core import JllamaError, UsageError
from jllama.system import files
from jllama.training import loop
from jllama.training.config import LoopConfig, TrainConfig

LAST = 20


def traces_of(run):
    """The events of each of a run's traces."""
    for session in (run / "profile" / "0" / "plugins" / "profile").iterdir():
        assert [*session.glob("*.xplane.pb")], "what TensorBoard reads"
        with gzip.open(session / "perfetto_trace.json.gz", "rt") as file:
            yield json.load(file)["traceEvents"]


def events_of(run):
    (events,) = traces_of(run)
    return events


def steps_of(events):
    return [int(event["args"]["step_num"]) for event in events if event.get("name") == "train"]


def run_words(command, *words):
    return cli.run(command, [*map(str, words)])


def test_a_trace_has_the_steps_that_were_asked_for(workshop, small_run, read_run, tmp_path):
    run = tmp_path / "run"
    assert workshop.run(run, "--training.profile", "4:6") == 0
    assert steps_of(events_of(run)) == [4, 5, 6]
    assert [path.name for path in (run / "profile").iterdir()] == ["0"]
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["profile"] == "4:6"
    read_run.assert_same_bits(run, small_run.folder, LAST)
    assert read_run.losses(run) == read_run.losses(small_run.folder)


def test_a_trace_ends_before_what_follows_its_last_step(workshop, tmp_path, monkeypatch):
    """Each step is logged after the trace has ended, and evaluated after that."""
    run, begun = tmp_path / "run", []
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace
    lines = run / "metrics.jsonl"

    def note(function):
        def noted(*arguments, **options):
            begun.append(lines.read_text().count("grad_norm"))
            return function(*arguments, **options)

        return noted

    monkeypatch.setattr(jax._src.profiler, "start_trace", note(start))
    monkeypatch.setattr(jax._src.profiler, "stop_trace", note(stop))
    assert workshop.run(run, "--training.profile", f"5:{LAST}") == 0
    events = events_of(run)
    assert steps_of(events) == [*range(5, LAST + 1)]
    assert begun == [4, LAST - 1]  # the lines of the log by then: one of each step


def test_a_resumed_run_records_the_steps_that_are_left(copied, capsys):
    words = ["train", "--resume", copied, "--training.steps", 24, "--resume_with_changes", "true"]
    assert run_words(*words, "--training.profile", "15:22") == 0
    assert "training.profile was" not in capsys.readouterr().err
    assert steps_of(events_of(copied)) == [21, 22]


def test_steps_before_a_resumed_run_are_not_recorded(copied):
    words = ["train", "--resume", copied, "--training.steps", 22, "--resume_with_changes", "true"]
    assert run_words(*words, "--training.profile", "15:20") == 0
    assert not (copied / "profile").exists()


def test_a_stopped_run_writes_its_trace_and_may_go_on_with_another(
    workshop, tmp_path, monkeypatch, read_run, small_run
):
    run, append_line = tmp_path / "run", files.append_line

    def append_and_stop(path, record):
        append_line(path, record)
        if record["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(files, "append_line", append_and_stop)
        stopped = workshop.run(run, "--training.profile", "3:9")
    assert stopped == 128 + signal.SIGTERM
    step = read_run.steps(run)[-1]
    assert steps_of(events_of(run)) == [*range(3, step + 1)]
    assert run_words("train", "--resume", run, "--training.profile", "8:8") == 0
    assert [8] in [steps_of(events) for events in traces_of(run)]
    read_run.assert_same_bits(run, small_run.folder, LAST)


def test_a_profile_that_cannot_be_written_is_a_warning(workshop, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(jax._src.profiler, "_write_perfetto_trace_file", fail)
    try:
        run = tmp_path / "run"
        assert workshop.run(run, "--training.profile", "3:4", "--training.steps", 6) == 0
    finally:
        jax._src.profiler._profile_state.reset()
    assert "warning: OSError: disk full; training goes on" in capsys.readouterr().err


def test_a_trace_that_cannot_begin_is_a_warning(workshop, tmp_path, capsys, small_run, read_run):
    run = tmp_path / "run"
    with jax.profiler.trace(tmp_path / "another"):
        assert workshop.run(run, "--training.profile", "3:4") == 0
    warning = "warning: RuntimeError: Profile has already been started."
    assert capsys.readouterr().err.count(warning) == 1
    assert not (run / "profile").exists()
    read_run.assert_same_bits(run, small_run.folder, LAST)


def test_a_folder_that_cannot_be_written_is_a_warning(workshop, tmp_path, capsys, monkeypatch):
    def begin(run):
        run.mkdir(exist_ok=True)
        (run / "profile").write_text("a file, where the folder should be")

    original = jax._src.profiler.start_trace

    def start(folder, *arguments, **options):
        begin(tmp_path / "run")
        original(folder, *arguments, **options)

    monkeypatch.setattr(jax._src.profiler, "start_trace", start)
    run = tmp_path / "run"
    try:
        assert workshop.run(run, "--training.profile", "3:4", "--training.steps", 6) == 0
    finally:
        jax._src.profiler._profile_state.reset()
    err = capsys.readouterr().err
    assert err.count("; training goes on") == 1
    assert "warning: " in err


def test_an_error_of_training_is_not_replaced_by_one_of_its_trace(
    workshop, tmp_path, capsys, monkeypatch
):
    def fail(*_):
        raise OSError("disk full")

    append_line = files.append_line

    def append_and_fail(path, record):
        append_line(path, record)
        if record["step"] == 3:
            monkeypatch.setattr(loop, "next_batch", lose)

    def lose(run):
        raise JllamaError("the data are gone: fetch them again")

    monkeypatch.setattr(files, "append_line", append_and_fail)
    monkeypatch.setattr(jax._src.profiler, "_write_perfetto_trace_file", fail)
    run = tmp_path / "run"
    try:
        assert workshop.run(run, "--training.profile", "3:9") == 1
    finally:
        jax._src.profiler._profile_state.reset()
    err = capsys.readouterr().err
    assert "error: the data are gone: fetch them again" in err
    assert "warning: OSError: disk full; training goes on" in err
    assert (run / "report.html").exists()


def test_a_range_behind_the_end_of_a_run_ends_with_its_last_step(workshop, tmp_path, monkeypatch):
    run, logged = tmp_path / "run", []
    stop = jax.profiler.stop_trace

    def noted():
        logged.append((run / "metrics.jsonl").read_text())
        stop()

    monkeypatch.setattr(jax._src.profiler, "stop_trace", noted)
    assert workshop.run(run, "--training.profile", "4:15", "--training.steps", 6) == 0
    assert steps_of(events_of(run)) == [4, 5, 6]
    assert logged[0].count("grad_norm") == 5  # neither logged nor evaluated


@pytest.mark.parametrize("text", ["5", "9:3", "a:b", "0:3", "1:2:3", "3:", "1.5:2", " 1:2"])
def test_a_bad_value_is_one_sentence(text):
    with pytest.raises(UsageError) as error:
        parse(TrainConfig, ["--training.profile", text], "jllama train")
    problem = str(error.value)
    assert f"training.profile is {text!r}; it must be FIRST:LAST" in problem
    assert "\n" not in problem


def test_a_file_of_options_takes_it_quoted_and_a_single_step(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text('training: {profile: "10:15"}')
    assert parse(TrainConfig, ["--config", str(path)], "jllama train").training.profile == "10:15"
    assert LoopConfig(profile="7:7").profile == "7:7"
