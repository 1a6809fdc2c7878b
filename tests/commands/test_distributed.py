"""Several real processes train as one does, whatever their number; what goes wrong between them is
one sentence.
"""

import re
import signal
import socket
import time

import pytest

from jllama.commands import cli
from jllama.files import file_lock

STEPS = 20
OFTEN = ("--training.eval_every", 1, "--training.sample_tokens", 0, "--resume", "auto")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def start(workshop):
    """A run of so many processes, all with the same options, or ``own`` ones of each besides."""

    def begin(run, count, *options, own=None, devices=1):
        meeting = (
            "--distributed.coordinator",
            f"127.0.0.1:{free_port()}",
            "--distributed.num_processes",
            count,
        )
        return [
            workshop.train(
                run,
                *options,
                *meeting,
                "--distributed.process_id",
                index,
                *(own or {}).get(index, ()),
                devices=devices,
            )
            for index in range(count)
        ]

    return begin


def wait_for_step(read_run, processes, run, step):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if max(read_run.losses(run), default=0) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(
        [process.communicate()[1] for process in processes if process.poll() is not None]
    )


def last_line(err):
    assert "Traceback" not in err
    return err.splitlines()[-1]


def assert_same_curve(read_run, run, other):
    mine, theirs = read_run.losses(run), read_run.losses(other)
    assert mine.keys() == theirs.keys()
    for step, found in mine.items():
        assert found == pytest.approx(theirs[step], rel=1e-5), step
    both = [read_run.lines(each)[-1]["final"]["validation_loss"] for each in (run, other)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(small_run, workshop, read_run, start, tmp_path):
    """The second holds half of the parameters and of each batch; process 0 alone writes, and both
    say the same end.
    """
    run = tmp_path / "run"
    done = [
        workshop.finish(each)
        for each in start(run, 2, "--mesh.fsdp", 2, "--training.eval_every", STEPS)
    ]
    assert [each.code for each in done] == [0, 0], done[1].err
    assert "parameters on 2 x cpu" in done[0].err.lower()
    assert done[1].err == ""
    assert_same_curve(read_run, run, small_run.folder)
    assert (
        read_run.lines(run, "samples.jsonl")
        == read_run.lines(small_run.folder, "samples.jsonl")[-1:]
    )
    assert {path.name for path in run.iterdir()} == {
        path.name for path in small_run.folder.iterdir()
    }
    assert (
        "distributed:\n  coordinator: ''" in (run / "config.yaml").read_text()
    )  # so it starts again as it likes


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
    assert last_line(left.err).startswith(
        "error: a process has died, failed, never connected or been silent for 30 s: "
    )
    assert stopped < read_run.steps(run)[-1] < STEPS

    done = workshop.finish(workshop.train(run, *OFTEN))
    assert done.code == 0, done.err
    assert_same_curve(read_run, run, small_run.folder)


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_devices(small_run, workshop, read_run, tmp_path):
    """Eight, one, four: a checkpoint is read straight into the new split."""
    run, meshes = (
        tmp_path / "run",
        {8: ("--mesh.fsdp", 4, "--mesh.sequence", 2), 1: (), 4: ("--mesh.fsdp", 2)},
    )
    for devices, mesh in meshes.items():
        process = workshop.train(run, *OFTEN, *mesh, devices=devices)
        if devices != 4:
            wait_for_step(read_run, [process], run, max(read_run.losses(run), default=0) + 4)
            process.send_signal(signal.SIGTERM)
        done = workshop.finish(process)
        assert done.code == (0 if devices == 4 else 128 + signal.SIGTERM), done.err
    assert_same_curve(read_run, run, small_run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_that_falls_silent_ends_the_others(workshop, read_run, start, tmp_path, silent):
    processes = start(tmp_path / "run", 2, *OFTEN)
    wait_for_step(read_run, processes, tmp_path / "run", 2)
    processes[silent].send_signal(signal.SIGSTOP)
    try:
        left = workshop.finish(processes[1 - silent])
    finally:
        processes[silent].kill()
        processes[silent].communicate()
    assert left.code == 1
    assert last_line(left.err).startswith(
        "error: a process has died, failed, never connected or been silent for 30 s: "
    )


@pytest.mark.parametrize(
    ("options", "own", "said"),
    [
        (
            (),
            {1: ("--optimizer.learning_rate", 0.02)},
            "optimizer.learning_rate is 0.01 in process 0 and 0.02 in ",
        ),
        pytest.param(
            ("--training.batch_size", 5),
            {},
            "training.batch_size is 5; it must be a multiple of 2 device(s) times 1 part(s)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["options", "batch"],
)
def test_processes_that_do_not_fit_together_are_refused(
    workshop, start, tmp_path, options, own, said
):
    for each in [workshop.finish(each) for each in start(tmp_path / "run", 2, *options, own=own)]:
        assert each.code == 2, each.err
        assert last_line(each.err).startswith(f"error: {said}")
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.slow
def test_processes_with_different_folders_are_refused(small_run, workshop, start, tmp_path):
    """Also if one of them holds a run, which the others would not wait for."""
    processes = start(tmp_path / "run", 2, own={1: ("--run_dir", small_run.folder)})
    for each in [workshop.finish(each) for each in processes]:
        assert each.code == 2, each.err
        assert re.match(
            r"error: run_dir is .* in process 0 and .* in process 1: start every",
            last_line(each.err),
        )


@pytest.mark.slow
def test_what_a_cluster_says_of_itself_is_enough(workshop, read_run, tmp_path):
    """As SLURM does; the job's number decides the coordinator's port."""
    slurm = {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": str(free_port()),
    }
    words = ("--distributed.coordinator", "auto", *OFTEN, "--training.steps", 2)
    started = [
        workshop.train(
            tmp_path / "run", *words, **slurm, SLURM_PROCID=str(index), SLURM_LOCALID=str(index)
        )
        for index in range(2)
    ]
    done = [workshop.finish(each) for each in started]
    assert [each.code for each in done] == [0, 0], done[0].err
    assert "on 2 x CPU" in done[0].err
    assert len(read_run.losses(tmp_path / "run")) == 2


def test_auto_where_there_is_no_cluster(workshop, tmp_path):
    done = workshop.finish(workshop.train(tmp_path / "run", "--distributed.coordinator", "auto"))
    assert done.code == 1
    assert last_line(done.err).startswith(
        "error: JAX finds no cluster here: give distributed.coordinator as HOST:"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--distributed.coordinator", "10.0.0.1"),
            "coordinator is 10.0.0.1; it must be HOST:PORT, auto or left out",
        ),
        (
            ("--distributed.num_processes", "2"),
            "num_processes is 2; it must be left out unless distributed.coordinator is",
        ),
        (("--distributed.process_id", "1"), "process_id is 1; it must be from 0 to 0"),
    ],
)
def test_what_cannot_be_meant(capsys, options, said):
    assert cli.run("train", ["quickstart", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: distributed.{said}")


def refusal(capsys, workshop, run, coordinator, process, *options):
    words = ["--config", workshop.yaml, "--run_dir", run, "--distributed.coordinator", coordinator]
    words += [
        "--distributed.num_processes",
        2,
        "--distributed.process_id",
        process,
        "--distributed.timeout_s",
        1,
    ]
    assert cli.run("train", [*map(str, words), *options]) == 1
    return capsys.readouterr().err


def test_a_coordinator_that_does_not_answer(workshop, capsys, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    err = refusal(capsys, workshop, tmp_path / "run", address, 1)
    told = (
        f"the coordinator {address} has not answered for 1 s: start process 0 there: Connection "
        f"refused"
    )
    assert err == f"error: {told}\n"


@pytest.mark.slow
def test_a_process_that_does_not_come(workshop, tmp_path):
    """The one that waits ends with a sentence that has its own limit, and no stack of the
    runtime's.
    """
    meeting = (
        "--distributed.coordinator",
        f"127.0.0.1:{free_port()}",
        "--distributed.num_processes",
        2,
    )
    done = workshop.finish(
        workshop.train(
            tmp_path / "run", *meeting, "--distributed.process_id", 0, "--distributed.timeout_s", 1
        )
    )
    assert done.code == 1
    told = (
        "not all processes have connected within 1 s: read what each one printed, then start "
        "all of them again"
    )
    assert done.err == f"error: {told}\n"


def test_a_port_in_use(workshop, capsys, tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        err = refusal(capsys, workshop, tmp_path / "run", f"127.0.0.1:{port}", 0)
    assert err.startswith(
        f"error: process 0 cannot listen on port {port}: give all processes another "
        f"distributed.coordinator: "
    )
    assert "Address already in use" in err


def test_a_second_process_with_the_same_id(workshop, capsys, tmp_path):
    with file_lock(tmp_path / "run", 1):
        err = refusal(capsys, workshop, tmp_path / "run", "127.0.0.1:9", 1)
    assert re.fullmatch(
        r"error: .*run is in use by process \d+ .* as process_id 1: wait for it, or choose .*\n",
        err,
    )
