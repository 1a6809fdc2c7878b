"""Runs and models in buckets, on real servers: the same as in a folder, whatever fails."""

import glob
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import run_command
from servers import Faults, faulty_proxy, free_port, hub_server, using

import jllama
from jllama.core import JllamaError
from jllama.system import remote
from jllama.system.places import as_place
from jllama.system.remote import delete, fetch, list_files
from jllama.training import mirror
from jllama.training.mirror import Owner

STEPS = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))


def everything(files):
    return dict(files)


def copy_of(url):
    """A run as it is in the bucket, copied with all its files."""
    return fetch(as_place(url), everything)


def steps_in(url):
    names = list_files(as_place(url))
    return {int(match[1]) for match in map(re.compile(r"checkpoints/(\d+)/").match, names) if match}


def assert_same_end(read_run, url, small_run):
    run = copy_of(url)
    read_run.assert_same_bits(run, small_run.folder, STEPS)
    assert read_run.losses(run) == read_run.losses(small_run.folder)


@pytest.mark.slow
def test_a_run_in_a_bucket_has_the_bits_of_one_in_a_folder(
    bucket, workshop, small_run, read_run, capsys
):
    url = f"{bucket.url}/a run %41"
    assert workshop.run(url) == 0
    assert f"Read {url}/report.html" in capsys.readouterr().err
    assert_same_end(read_run, url, small_run)
    places = {name for name in list_files(as_place(url)) if "/" not in name}
    assert places == {path.name for path in small_run.folder.iterdir() if path.is_file()}
    assert f"run_dir: {url}\n" in (copy_of(url) / "config.yaml").read_text()
    assert steps_in(url) == {15, 20}

    # Finished, it stays as it is; then it is read, and goes on.
    before = list_files(as_place(url))
    assert workshop.run(url, "--resume", "auto") == 0
    assert f"{url} is finished" in capsys.readouterr().err
    after = list_files(as_place(url))
    assert {name for name in before if before[name] != after.get(name)} == {"owners/1"}
    ours, theirs = (jllama.load(path, step=15) for path in (url, small_run.folder))
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert (
        run_command("report", url, "--output", "page.html", place=os.environ["JLLAMA_CACHE"])[0]
        == 0
    )
    more = ("--training.steps", 24, "--resume_with_changes", "true")
    assert run_command("train", "--resume", url, *more).code == 0
    assert steps_in(url) == {20, 24}

    # Another run takes its place.
    assert workshop.run(url) == 2
    assert workshop.run(url, "--overwrite", "--yes", "--training.steps", "5") == 0
    assert steps_in(url) == {5}


def test_a_trace_of_steps_arrives_in_the_bucket(gcs, workshop):
    url = f"gs://bucket/{os.getpid()}-profile"
    with using(gcs):
        assert workshop.run(url, "--training.profile", "2:3", "--training.steps", 4) == 0
        names = [name.rpartition("/")[2] for name in list_files(as_place(f"{url}/profile/0"))]
        assert "perfetto_trace.json.gz" in names
        assert list(copy_of(url).rglob("*.xplane.pb"))


def test_models_are_converted_out_of_a_bucket_and_into_it(bucket, small_run, tmp_path):
    prompt = ("--prompt", "the ", "--temperature", 0, "--max_new_tokens", 8)
    expected = run_command("sample", "--checkpoint", small_run.folder, *prompt).out
    source = small_run.folder
    for name, to in (("a.gguf", "gguf"), ("b", "hf"), ("c", "orbax"), ("d", "meta")):
        target = f"{bucket.url}/{name}"
        done = run_command("convert", source, target, "--to", to)
        assert done.code == 0, done.err
        assert f"-> {target}, " in done.err
        assert run_command("sample", "--checkpoint", target, *prompt).out == expected
        done = run_command("convert", source, target, "--to", to)
        assert done.err.startswith(f"error: {target} exists: ")
        source = target
    target = f"{bucket.url}/b"
    done = run_command(
        "convert", source, target, "--to", "hf", "--overwrite", "--dtype", "bfloat16"
    )
    assert done.code == 0, done.err
    assert jllama.load(target).stored == "bfloat16"

    # What is no checkpoint stays as it is.
    (as_place(target) / "thesis.txt").write_text("years of work")
    done = run_command("convert", source, target, "--to", "hf", "--overwrite")
    assert "holds thesis.txt, more or less than a checkpoint" in done.err
    assert (as_place(target) / "thesis.txt").read_text() == "years of work"
    with pytest.raises(JllamaError, match=f"there is nothing at {bucket.url}/none"):
        jllama.load(f"{bucket.url}/none")


def test_the_files_that_make_a_model_or_a_checkpoint_come_last(s3, workshop, small_run):
    """And the logs up to a step are there before its checkpoint."""
    with faulty_proxy(s3) as proxy, using(proxy):
        url = f"s3://bucket/{os.getpid()}-order"
        jllama.convert(small_run.folder, f"{url}/model", to="hf")
        assert workshop.run(f"{url}/run", "--training.steps", "10") == 0
        written = [request for request in proxy.requests if request.startswith("PUT ")]
    files = [name.partition("/model/")[2] for name in written if "/model/" in name]
    assert files[-1] == "config.json"
    assert len(files) > 2
    of_ten = [index for index, name in enumerate(written) if "/checkpoints/10/" in name]
    assert written[of_ten[-1]].endswith("checkpoints/10/complete.json")
    logs = [index for index, name in enumerate(written) if name.endswith("run/metrics.jsonl")]
    assert logs[0] < of_ten[-1]


def test_a_checkpoint_that_is_not_whole_does_not_exist(gcs, workshop, small_run, read_run):
    url = f"gs://bucket/{os.getpid()}-whole"
    with using(gcs):
        assert workshop.run(url) == 0
        delete(as_place(url), ["checkpoints/20/complete.json"])
        assert jllama.load(url).step == 15
        # It is computed again.
        assert workshop.run(url, "--resume", "auto") == 0
        assert_same_end(read_run, url, small_run)


def test_models_and_texts_are_read_from_the_hub(small_run, workshop, tmp_path, monkeypatch):
    """Both train a run: a model to begin from, and a data set that is read as a stream."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    root = tmp_path / "served"
    jllama.convert(small_run.folder, root / "org/name", to="hf")
    texts = root / "datasets/org/texts/data"
    texts.mkdir(parents=True)
    lines = (workshop.folder / "corpus.txt").read_text().splitlines()
    for index in range(4):
        rows = [json.dumps({"text": line}) + "\n" for line in lines[index::4]]
        (texts / f"{index}.jsonl").write_text("".join(rows))
    with hub_server(root) as server, using(server):
        ours, theirs = (jllama.load(path) for path in ("hf://org/name", small_run.folder))
        jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
        with pytest.raises(JllamaError, match="org/none cannot be fetched from the hub"):
            jllama.load("hf://org/none")
        words = ("--init_from", "hf://org/name", "--data.path", "hf://datasets/org/texts/data/*")
        sizes = ("--training.steps", 2, "--training.batch_size", 4, "--training.seq_len", 16)
        run = tmp_path / "run"
        done = run_command("train", *words, *sizes, "--run_dir", run, "--training.sample_tokens", 0)
    assert done.code == 0, done.err
    assert "a stream of 4 shards" in done.err
    assert jllama.load(run).step == 2


# One owner


def test_a_run_has_one_owner(bucket, monkeypatch, capsys):
    monkeypatch.setattr(mirror, "BEAT_S", 0.05)
    place = as_place(bucket.url)
    first = Owner(place)
    monkeypatch.setattr(mirror, "_machine", lambda: "another")
    with pytest.raises(
        JllamaError, match=f"{re.escape(bucket.url)} is in use by process {os.getpid()} on"
    ):
        Owner(place)
    first.check()
    first.release()
    second = Owner(place)
    assert second.number == 2
    assert sorted(list_files(place / "owners")) == ["2"]
    second._ends.set()  # it dies
    second._thread.join()

    # Its machine says so at once, others wait.
    monkeypatch.setattr(mirror, "_is_alive", lambda process: False)
    third = Owner(place)
    with pytest.raises(JllamaError, match="another process has taken over"):
        second.check()
    third._ends.set()
    third._thread.join()
    monkeypatch.setattr(mirror, "_machine", lambda: "a third one")
    monkeypatch.setattr(mirror, "STALE_S", 1.5)
    capsys.readouterr()
    fourth = Owner(place)
    assert fourth.number == 4
    assert capsys.readouterr().err.count("waiting up to") == 1
    fourth.release()


def test_processes_that_claim_a_run_at_once_get_it_one_at_a_time(bucket, monkeypatch):
    place = as_place(bucket.url)
    with ThreadPoolExecutor(8) as pool:
        owners = [each.result() for each in [pool.submit(_claim, place) for _ in range(8)]]
    claimed = [owner for owner in owners if owner]
    numbers = sorted(owner.number for owner in claimed)
    assert numbers == sorted(set(numbers))
    last = max(claimed, key=lambda owner: owner.number)
    last.check()
    for owner in claimed:
        if owner is not last:
            with pytest.raises(JllamaError, match="another process has taken over"):
                owner.check()
        owner._ends.set()


def _claim(place):
    try:
        return Owner(place)
    except JllamaError:
        return None


# What fails


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_a_server_that_fails_changes_nothing(request, kind, workshop, small_run, read_run, capfd):
    scheme = {"gcs": "gs", "s3": "s3"}[kind]
    faults = Faults(rate=0.1, seed=1, slow_s=0.3)
    with faulty_proxy(request.getfixturevalue(kind), faults) as proxy, using(proxy):
        url = f"{scheme}://bucket/{os.getpid()}-faults"
        assert workshop.run(url) == 0
        assert sum(proxy.injected.values()) >= 20
        proxy.injected.clear()
        assert_same_end(read_run, url, small_run)


def go_down_after_a_checkpoint(proxy):
    while not any("complete.json" in request for request in proxy.requests):
        time.sleep(0.1)
    proxy.go_down()


@pytest.mark.slow
def test_a_server_that_is_gone_for_good_stops_the_run(s3, workshop, monkeypatch, capsys):
    monkeypatch.setattr(remote, "PATIENCE_S", 3.0)
    url = f"s3://bucket/{os.getpid()}-gone"
    with faulty_proxy(s3) as proxy, using(proxy):
        options = ("--training.steps", "100000", "--training.eval_every", "100000")
        threading.Thread(target=go_down_after_a_checkpoint, args=(proxy,)).start()
        assert workshop.run(url, *options, "--training.save_every", "5") == 1
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert re.search(
        r"error: s3://.* cannot be read or written: .*; the run stops; until it goes on, its last "
        "files are in",
        last,
    )
    folder = last.rpartition(" are in ")[2]
    assert os.path.exists(f"{folder}/config.yaml")


# Many processes


def start_processes(workshop, bucket, folder, url, count, *words):
    """Processes of one run, each with its own cache."""
    address = f"127.0.0.1:{free_port()}"
    return [
        workshop.train(
            url,
            f"--distributed.coordinator={address if count > 1 else ''}",
            f"--distributed.num_processes={count}",
            f"--distributed.process_id={index}",
            *words,
            "--resume=auto",
            "--training.eval_every=1",
            "--training.sample_tokens=0",
            JLLAMA_CACHE=str(folder / f"disk{index}"),
            **bucket.server.environment,
        )
        for index in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_processes_end_with_an_earlier_checkpoint_as_the_best(bucket, workshop, tmp_path, axis):
    """It is read again, with the parts that other processes have saved."""
    url = f"{bucket.url}/run"
    words = ("--training.steps", 3, f"--mesh.{axis}", 2)
    words += ("--optimizer.learning_rate", 2, "--optimizer.warmup_steps", 3)  # worse and worse
    started = start_processes(workshop, bucket, tmp_path, url, 2, *words)
    done = [workshop.finish(process) for process in started]
    assert [each.code for each in done] == [0, 0], done
    assert re.search(r"Best checkpoint \(step [12]\)", done[0].err), done[0].err
    assert not [path for path in tmp_path.rglob("checkpoints/*") if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_processes_with_disks_of_their_own_share_a_bucket(
    bucket, workshop, small_run, read_run, tmp_path
):
    """Two begin, one of which is killed; two go on, and get a SIGTERM; one ends the run."""
    url = f"{bucket.url}/run"

    def start(count, *words):
        return start_processes(workshop, bucket, tmp_path, url, count, *words)

    def wait_for(step, processes):
        while max(steps_in(url), default=0) < step:
            ended = [process for process in processes if process.poll() is not None]
            assert not ended, "".join(process.communicate()[1][-3000:] for process in ended)
            time.sleep(0.1)

    two = start(2, "--mesh.fsdp", 2)
    wait_for(3, two)
    two[1].kill()
    done = [workshop.finish(each) for each in two]
    assert [each.code for each in done] == [1, -signal.SIGKILL]

    two = start(2, "--mesh.fsdp", 2)
    wait_for(8, two)
    parts = [
        {
            Path(path).name
            # Unlike ``rglob``, this goes on when a folder goes away while it looks.
            for path in glob.iglob(
                "**/checkpoints/*/params/embed/*",
                root_dir=tmp_path / f"disk{index}",
                recursive=True,
            )
        }
        for index in range(2)
    ]
    assert "0.0" in parts[0] - parts[1]
    assert "0.1" in parts[1] - parts[0]
    two[1].send_signal(signal.SIGTERM)
    done = [workshop.finish(each) for each in two]
    assert [each.code for each in done] == [128 + signal.SIGTERM] * 2, done

    (one,) = start(1)
    done = workshop.finish(one)
    assert done.code == 0, done.err
    run = copy_of(url)
    actual, expected = read_run.losses(run), read_run.losses(small_run.folder)
    assert actual.keys() == expected.keys()
    for step, figures in actual.items():
        assert figures == pytest.approx(expected[step], rel=1e-5), step


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_a_killed_run_goes_on_to_the_same_bits(bucket, workshop, small_run, read_run, tmp_path):
    url = f"{bucket.url}/run"
    environment = {"JLLAMA_CACHE": str(tmp_path / "cache"), **bucket.server.environment}
    for step in (5, 10, 15):
        process = workshop.train(url, "--resume", "auto", **environment)
        while step not in steps_in(url) and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        workshop.finish(process)
    done = workshop.finish(workshop.train(url, "--resume", "auto", **environment))
    assert done.code == 0, done.err
    assert_same_end(read_run, url, small_run)
