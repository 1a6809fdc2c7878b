"""Several real processes train as one does, whatever their number; what goes wrong between them is
one sentence.
"""

import json
import re
import signal
import socket
import time

import pytest

from jllama.commands import cli
from jllama.system.files import file_lock

STEPS = 20
OFTEN = ("--training.eval_every", 1, "--training.sample_tokens", 0, "--resume", "auto")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def meeting(count, process_id, coordinator):
    """The options by which a process meets the others."""
    values = {"coordinator": coordinator, "num_processes": count, "process_id": process_id}
    return [f"--distributed.{name}={value}" for name, value in values.items()]


@pytest.fixture
def start(workshop):
    """A run of so many processes, all with the same options, or ``own`` ones of each besides."""

    def begin(run, count, *options, own=None):
        address = f"127.0.0.1:{free_port()}"
        others = own or {}
        return [
            workshop.train(run, *options, *meeting(count, index, address), *others.get(index, ()))
            for index in range(count)
        ]

    return begin


def wait_for_step(read_run, processes, run, step):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if max(read_run.losses(run), default=0) >= step:
            return
        time.sleep(0.05)
    ended = [process for process in processes if process.poll() is not None]
    raise AssertionError([process.communicate()[1] for process in ended])


def last_line(err):
    assert "Traceback" not in err
    return err.splitlines()[-1]


def assert_same_curve(read_run, run, other):
    actual, expected = read_run.losses(run), read_run.losses(other)
    assert actual.keys() == expected.keys()
    for step, figures in actual.items():
        assert figures == pytest.approx(expected[step], rel=1e-5), step
    ends = [read_run.lines(folder)[-1]["final"]["validation_loss"] for folder in (run, other)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


GONE = "error: a process has died, failed, never connected or been silent for 30 s: "


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(small_run, workshop, read_run, tmp_path):
    """The second holds half of the parameters and of each batch; process 0 alone writes, and both
    say the same end. They meet by what a cluster says, as SLURM does; the job's number decides the
    coordinator's port.
    """
    run = tmp_path / "run"
    slurm = {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": str(free_port()),
    }
    words = ("--distributed.coordinator", "auto", "--mesh.fsdp", 2)
    words += ("--training.eval_every", STEPS)
    started = []
    for index in ("0", "1"):
        own = slurm | {"SLURM_PROCID": index, "SLURM_LOCALID": index}
        started.append(workshop.train(run, *words, **own))
    done = [workshop.finish(process) for process in started]
    assert [each.code for each in done] == [0, 0], done[1].err
    assert "parameters on 2 x cpu" in done[0].err.lower()
    assert done[1].err == ""
    assert_same_curve(read_run, run, small_run.folder)
    samples = read_run.lines(small_run.folder, "samples.jsonl")
    assert read_run.lines(run, "samples.jsonl") == samples[-1:]
    names = {path.name for path in small_run.folder.iterdir()}
    assert {path.name for path in run.iterdir()} == names
    # So it starts again as it likes.
    assert "distributed:\n  coordinator: ''" in (run / "config.yaml").read_text()


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_processes(small_run, workshop, read_run, start, tmp_path):
    """Four, one of which gets a SIGTERM; two, one of which is killed; then one. Each time within an
    epoch.
    """
    run = tmp_path / "run"
    four = start(run, 4, *OFTEN, "--mesh.fsdp", 2)
    wait_for_step(read_run, four, run, 3)
    four[2].send_signal(signal.SIGTERM)
    done = [workshop.finish(each) for each in four]
    assert [each.code for each in done] == [128 + signal.SIGTERM] * 4, [each.err for each in done]
    stopped = read_run.steps(run)[-1]
    assert f"stopped at step {stopped} of 20; saved. " in last_line(done[0].err)
    assert max(read_run.losses(run)) == stopped

    two = start(run, 2, *OFTEN, "--mesh.sequence", 2)
    wait_for_step(read_run, two, run, stopped + 3)
    two[1].kill()
    assert two[1].wait() == -signal.SIGKILL
    left = workshop.finish(two[0])
    assert left.code == 1
    assert last_line(left.err).startswith(GONE)
    assert stopped < read_run.steps(run)[-1] < STEPS

    done = workshop.finish(workshop.train(run, *OFTEN))
    assert done.code == 0, done.err
    assert_same_curve(read_run, run, small_run.folder)


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_devices(small_run, workshop, read_run, tmp_path):
    """Eight, one, four: a checkpoint is read straight into the new split."""
    run = tmp_path / "run"
    meshes = {8: ("--mesh.fsdp", 4, "--mesh.sequence", 2), 1: (), 4: ("--mesh.fsdp", 2)}
    for devices, mesh in meshes.items():
        process = workshop.train(run, *OFTEN, *mesh, devices=devices)
        if devices != 4:
            wait_for_step(read_run, [process], run, max(read_run.losses(run), default=0) + 4)
            process.send_signal(signal.SIGTERM)
        done = workshop.finish(process)
        assert done.code == (0 if devices == 4 else 128 + signal.SIGTERM), done.err
    assert_same_curve(read_run, run, small_run.folder)


@pytest.mark.slow
def test_a_process_that_falls_silent_ends_the_others(workshop, read_run, start, tmp_path):
    """The first in one run, the second in another, side by side: each waits for 30 s."""
    long = (*OFTEN, "--training.steps", 500)
    runs = {silent: start(tmp_path / f"{silent}", 2, *long) for silent in (0, 1)}
    for silent, processes in runs.items():
        wait_for_step(read_run, processes, tmp_path / f"{silent}", 2)
        processes[silent].send_signal(signal.SIGSTOP)
    for silent, processes in runs.items():
        try:
            left = workshop.finish(processes[1 - silent])
        finally:
            processes[silent].kill()
            processes[silent].communicate()
        assert left.code == 1
        assert last_line(left.err).startswith(GONE)


def test_processes_with_different_options_are_refused(workshop, start, tmp_path):
    started = start(tmp_path / "run", 2, own={1: ("--optimizer.learning_rate", 0.02)})
    for done in [workshop.finish(process) for process in started]:
        assert done.code == 2, done.err
        problem = "optimizer.learning_rate is 0.01 in process 0 and 0.02 in "
        assert last_line(done.err).startswith(f"error: {problem}")
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.slow
def test_processes_with_different_folders_are_refused(small_run, workshop, start, tmp_path):
    """Also if one of them holds a run, which the others would not wait for."""
    processes = start(tmp_path / "run", 2, own={1: ("--run_dir", small_run.folder)})
    for done in [workshop.finish(process) for process in processes]:
        assert done.code == 2, done.err
        problem = r"error: run_dir is .* in process 0 and .* in process 1: start every"
        assert re.match(problem, last_line(done.err))


def test_auto_where_there_is_no_cluster(workshop, tmp_path):
    done = workshop.finish(workshop.train(tmp_path / "run", "--distributed.coordinator", "auto"))
    assert done.code == 1
    assert last_line(done.err).startswith(
        "error: JAX finds no cluster here: give distributed.coordinator as HOST:"
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("coordinator", "10.0.0.1", "HOST:PORT, auto or left out"),
        ("num_processes", "2", "left out unless distributed.coordinator is"),
        ("process_id", "1", "from 0 to 0"),
    ],
)
def test_what_cannot_be_meant(capsys, option, value, expected):
    assert cli.run("train", ["quickstart", f"--distributed.{option}={value}"]) == 2
    problem = f"error: distributed.{option} is {value}; it must be {expected}"
    assert capsys.readouterr().err.startswith(problem)


@pytest.fixture
def refusal(workshop, capsys, tmp_path):
    """What one of two processes says that cannot meet the other."""

    def run(coordinator, process_id):
        options = [*meeting(2, process_id, coordinator), "--distributed.timeout_s=1"]
        assert workshop.run(tmp_path / "run", *options) == 1
        return capsys.readouterr().err

    return run


def test_a_coordinator_that_does_not_answer(refusal):
    address = f"127.0.0.1:{free_port()}"
    problem = f"the coordinator {address} has not answered for 1 s: start process 0 there"
    assert refusal(address, 1) == f"error: {problem}: Connection refused\n"


@pytest.mark.slow
def test_a_process_that_does_not_come(workshop, tmp_path):
    """The one that waits ends with a sentence that has its own limit, and no stack of the
    runtime's.
    """
    options = (*meeting(2, 0, f"127.0.0.1:{free_port()}"), "--distributed.timeout_s=1")
    done = workshop.finish(workshop.train(tmp_path / "run", *options))
    assert done.code == 1
    advice = "read what each one printed, then start all of them again"
    assert done.err == f"error: not all processes have connected within 1 s: {advice}\n"


def test_a_port_in_use(refusal):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        err = refusal(f"127.0.0.1:{port}", 0)
    advice = "give all processes another distributed.coordinator: "
    assert err.startswith(f"error: process 0 cannot listen on port {port}: {advice}")
    assert "Address already in use" in err


def test_a_second_process_with_the_same_id(refusal, tmp_path):
    with file_lock(tmp_path / "run", 1):
        err = refusal("127.0.0.1:9", 1)
    owner = r"process \d+ .* as process_id 1: wait for it, or choose .*"
    assert re.fullmatch(rf"error: .*run is in use by {owner}\n", err)


# Stopping between logged steps

RARELY = ("--training.log_every", 1000, "--training.eval_every", 1000, "--training.steps", 60)
RARELY += ("--training.sample_tokens", 0, "--resume", "auto")
EVALUATED = ("--training.eval_every", 5, "--training.batch_size", 2, "--training.seq_len", 16)
SIGNALLED = """
import os, signal, sys, threading, types
from jllama.commands import cli
from jllama.parallel import stopping
from jllama.training import loop, sources

def disturb(module, name, is_moment, number=signal.SIGTERM):
    original = getattr(module, name)
    def function(*arguments):
        if is_moment(*arguments):
            os.kill(os.getpid(), number)
        return original(*arguments)
    setattr(module, name, function)

class Lock:
    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            print("agreeing", file=sys.stderr, flush=True)
            os.kill(os.getpid(), number)
    def __exit__(self, *_):
        pass

moment = os.environ.get("MOMENT")
if moment == "step":
    disturb(loop, "take_step", lambda run: run.step == 30)
elif moment == "compiling":
    disturb(loop, "compile_fitting", lambda *_: True)
elif moment == "evaluation":
    calls = []
    disturb(sources, "put_on_devices", lambda *_: calls.append(1) or len(calls) == 2)
elif moment in ("SIGKILL", "SIGSTOP"):
    number = getattr(signal, moment)
    stopping.threading = types.SimpleNamespace(Lock=Lock, Thread=threading.Thread)
sys.exit(cli.run("train", sys.argv[1:]))
"""
"""A process that gets a signal at a moment, or dies or falls silent when it shall agree."""


@pytest.fixture
def signalled(workshop, tmp_path):
    """A run of two processes, each with its moment or none."""

    def begin(run, moments, *options):
        (tmp_path / "signalled.py").write_text(SIGNALLED)
        address = f"127.0.0.1:{free_port()}"
        return [
            workshop.start(
                tmp_path / "signalled.py",
                *workshop.options(run, *RARELY, *options, *meeting(2, index, address)),
                MOMENT=moment,
            )
            for index, moment in enumerate(moments)
        ]

    return begin


@pytest.fixture(scope="module")
def uninterrupted(workshop, tmp_path_factory):
    """The folder of a run of two processes that nothing has disturbed."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    address = f"127.0.0.1:{free_port()}"
    started = [workshop.train(run, *RARELY, *meeting(2, index, address)) for index in (0, 1)]
    done = [workshop.finish(process) for process in started]
    assert [process.code for process in done] == [0, 0], done[0].err
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "first", "last"),
    [
        (["", "step"], 32, 33),
        (["step", ""], 32, 33),
        (["step", "step"], 32, 32),
        (["", "compiling"], 2, 3),
        (["compiling", "compiling"], 2, 2),
    ],
)
def test_a_signal_between_logged_steps(
    uninterrupted, signalled, workshop, read_run, tmp_path, moments, first, last
):
    """Every process ends a step or two later, saved, and the run that goes on is the same."""
    run = tmp_path / "run"
    done = [workshop.finish(process) for process in signalled(run, moments)]
    assert [process.code for process in done] == [128 + signal.SIGTERM] * 2, done[0].err
    (stopped,) = read_run.steps(run)
    assert first <= stopped <= last
    for process, moment in zip(done, moments, strict=True):
        assert f"stopped at step {stopped} of 60; saved. " in last_line(process.err)
        assert ("SIGTERM: finishing step" in process.err) == (moment != "")

    done = [workshop.finish(process) for process in signalled(run, ["", ""])]
    assert [process.code for process in done] == [0, 0], done[0].err
    actual, expected = (
        json.loads((folder / "receipt.json").read_text())["weights"]["60"]
        for folder in (run, uninterrupted)
    )
    assert actual == expected  # sums of all bits
    assert read_run.lines(run)[-1] == read_run.lines(uninterrupted)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("moments", [["", "evaluation"], ["evaluation", "evaluation"]])
def test_a_signal_while_evaluating(signalled, workshop, read_run, tmp_path, moments):
    """The evaluation is left, and its step saved."""
    run = tmp_path / "run"
    done = [workshop.finish(process) for process in signalled(run, moments, *EVALUATED)]
    assert [process.code for process in done] == [128 + signal.SIGTERM] * 2, done[0].err
    assert read_run.steps(run) == [5]
    assert all("stopped at step 5 of 60; saved. " in last_line(process.err) for process in done)
    assert not [line for line in read_run.lines(run) if "validation_loss" in line]


@pytest.mark.slow
def test_a_second_signal_while_processes_agree(signalled, workshop, tmp_path):
    """The other process has fallen silent, so they never agree; the user's process ends at once."""
    silent, process = signalled(tmp_path / "run", ["SIGSTOP", "step"])
    try:
        assert any(line == "agreeing\n" for line in silent.stderr)
        time.sleep(1.1)  # an earlier signal is the same one
        process.send_signal(signal.SIGTERM)
        done = workshop.finish(process)
    finally:
        silent.kill()
        silent.communicate()
    assert done.code == 128 + signal.SIGTERM
    assert last_line(done.err) == "stopped at once; the last checkpoint stays as it was"


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_dies_while_they_agree(signalled, workshop, tmp_path, dying):
    moments = ["step", "step"]
    moments[dying] = "SIGKILL"
    done = [workshop.finish(process) for process in signalled(tmp_path / "run", moments)]
    assert done[dying].code == -signal.SIGKILL
    assert done[1 - dying].code == 1
    assert last_line(done[1 - dying].err).startswith(GONE)


@pytest.mark.slow
def test_a_stream_goes_on_with_any_number_of_processes(workshop, read_run, start, tmp_path):
    """Each of two processes reads the lanes of its rows; one goes on, reading all of them."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for shard in range(5):
        lines = [json.dumps({"text": f"{shard} and {n}, " * (n % 30)}) for n in range(500)]
        (texts / f"{shard}.jsonl").write_text("\n".join(lines))
    options = ["--data.stream", "true", "--data.tokenizer", "bytes", "--data.path", texts]
    alone = workshop.train(tmp_path / "alone", *options, *OFTEN)
    done = workshop.finish(alone)
    assert done.code == 0, done.err
    assert "a stream of 5 shards" in done.err
    run = tmp_path / "run"
    two = start(run, 2, *options, *OFTEN)
    wait_for_step(read_run, two, run, 5)
    two[1].send_signal(signal.SIGTERM)
    done = [workshop.finish(process) for process in two]
    assert [end.code for end in done] == [128 + signal.SIGTERM] * 2, [end.err for end in done]
    done = workshop.finish(workshop.train(run, *options, *OFTEN))
    assert done.code == 0, done.err
    assert_same_curve(read_run, run, tmp_path / "alone")
    lines = [line for line in read_run.lines(run) if "data_wait_s" in line]
    assert max(line["step"] for line in lines) == STEPS
