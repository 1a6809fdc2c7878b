"""Streams: the order depends on seed and step alone, and a run goes on without reading again."""

import contextlib
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from helpers import run_command, trained_smollm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Faults, faulty_proxy, using

from jllama.core import JllamaError, UsageError
from jllama.data import corpus, streams, stretches
from jllama.data.chats import data_task, prepare_chats
from jllama.data.config import DataConfig
from jllama.data.corpus import corpus_files, hash_fraction
from jllama.data.prompts import prepare_prompts
from jllama.data.streams import StreamBatches, draw, prepare_stream
from jllama.data.token_shards import tokenize_shards
from jllama.data.tokens import file_stats
from jllama.system import line_process
from jllama.system.places import as_place
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.loading import load_tokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

BOS, EOS = 1, 2
NUMBERS = itertools.count()


def documents(shard, count=120):
    return [f"<{shard}/{number}> {'é ' * (number * 7 % 40)}" for number in range(count)]


def write_shard(path, texts, kind):
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    content = "".join(lines).encode()
    if kind == "parquet":
        table = pyarrow.table({"text": texts, "other": [1] * len(texts)})
        with fsspec.open(str(path), "wb") as file:
            pyarrow.parquet.write_table(table, file, row_group_size=25)
        return
    if kind == "array.jsonl":
        content = json.dumps([{"text": text} for text in texts]).encode()
    if kind == "jsonl.gz":
        content = gzip.compress(content)
    if kind == "jsonl.zst":
        content = b"".join(
            zstd.compress("".join(lines[start : start + 17]).encode())
            for start in range(0, len(lines), 17)
        )
    if kind.startswith("txt"):
        content = "\ufeff".encode() + "\n".join(texts).encode()
    if kind == "txt.zst":
        content = zstd.compress(content)
    if kind == "latin.txt":
        content = "\n".join(texts).encode("latin-1")
    with fsspec.open(str(path), "wb") as file:
        file.write(content)


def write_shards(folder, count=5, kind="jsonl", num_documents=120):
    """Shards in a new folder of the memory, which is read without other processes."""
    folder = f"memory://streams/{next(NUMBERS)}" if folder is None else folder
    for shard in range(count):
        write_shard(f"{folder}/{shard:05}.{kind}", documents(shard, num_documents), kind)
    return str(folder)


class ThreadProcess:
    """What ``line_process.start`` returns, of a thread: it sees the files of the memory."""

    def __init__(self):
        requests, replies = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb")
        files = os.fdopen(requests[0], "rb"), os.fdopen(replies[1], "wb")
        self.thread = threading.Thread(target=self.run, args=files, daemon=True)
        self.thread.start()

    def run(self, requests, replies):
        with contextlib.suppress(OSError, EOFError), requests, replies:
            stretches.answer(requests, replies)

    def end(self):
        for file in (self.stdout, self.stdin):
            with contextlib.suppress(OSError):
                file.close()
        self.thread.join()


PROCESSES = {"start": line_process.start, "end": line_process.end}


def use_threads(monkeypatch):
    monkeypatch.setattr(line_process, "start", lambda module: ThreadProcess())
    monkeypatch.setattr(line_process, "end", ThreadProcess.end)


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch, tmp_path):
    monkeypatch.setattr(stretches, "STRETCH_ROWS", 4)
    use_threads(monkeypatch)
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))


def prepare(path, **options):
    return prepare_stream(DataConfig(path, **{"tokenizer": "bytes", "stream": True} | options))


def batches(data, count, batch_size=4, seq_len=32, seed=0, state=None, **options):
    iterator = StreamBatches(data, batch_size=batch_size, seq_len=seq_len, seed=seed, **options)
    if state:
        iterator.set_state(json.loads(json.dumps(state)))
    result = []
    states = [iterator.get_state()]
    for batch in itertools.islice(iterator, count):
        result.append(batch.tokens)
        states.append(iterator.get_state())
    iterator.close()
    return np.array(result), states


def as_text(ids):
    return bytes((ids.ravel().clip(3) - 3).astype(np.uint8)).decode(errors="replace")


def texts_in(rows):
    """The documents that begin in rows."""
    text = as_text(np.concatenate(rows))
    return Counter(part.partition(">")[0] for part in text.split("<")[1:] if ">" in part)


# The order


KINDS = "jsonl array.jsonl jsonl.gz jsonl.zst parquet txt txt.zst latin.txt"


@pytest.mark.parametrize("kind", KINDS.split())
def test_a_position_goes_on_with_the_same_batches(kind, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 300)
    encoding = "latin-1" if kind == "latin.txt" else "utf-8"
    data = prepare(write_shards(None, 5, kind, 30), encoding=encoding)
    whole, states = batches(data, 90, seed=1)
    assert max(position[2][0] for position in states[-1]["lanes"]) > 0  # in another epoch
    assert {position[2][1] for state in states for position in state["lanes"]} == {0, 1}
    assert len(np.unique(whole.reshape(len(whole), -1), axis=0)) == len(whole)
    for step in (0, 1, 2, 3, 4, 5, 17, 41, 88):
        rest, after = batches(data, min(len(whole) - step, 9), seed=1, state=states[step])
        np.testing.assert_array_equal(rest, whole[step : step + 9])
        assert after == states[step : step + 10]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_shards=st.integers(1, 9),
    batch_size=st.integers(1, 8),
    seq_len=st.sampled_from([8, 33, 700]),
    seed=st.integers(0, 3),
    step=st.integers(0, 6),
    data=st.data(),
)
def test_processes_read_their_rows_of_the_same_batches(
    num_shards, batch_size, seq_len, seed, step, data
):
    stream = prepare(_shared(num_shards))
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "seed": seed}
    whole, states = batches(stream, step + 3, **sizes)
    rows = data.draw(st.sets(st.integers(0, batch_size - 1), min_size=1))
    parts = [sorted(rows), sorted({*range(batch_size)} - rows)]
    merged = []
    total = np.zeros_like(whole)
    for part in filter(None, parts):
        local, local_states = batches(stream, step + 3, rows=part, **sizes)
        np.testing.assert_array_equal(local[:, part], whole[:, part])
        assert not np.delete(local, part, axis=1).any()
        total += local
        merged += [lane for lane in local_states[step]["lanes"] if lane not in merged]
    np.testing.assert_array_equal(total, whole)
    assert sorted(merged) == states[step]["lanes"]
    for part in filter(None, parts):
        local, _ = batches(stream, 3, rows=part, state={**states[step], "lanes": merged}, **sizes)
        np.testing.assert_array_equal(local[:, part], whole[step:, part])


SHARED = {}


def _shared(num_shards):
    if num_shards not in SHARED:
        SHARED[num_shards] = write_shards(None, num_shards)
    return SHARED[num_shards]


def test_processes_that_read_change_nothing(tmp_path, monkeypatch):
    monkeypatch.undo()  # they have the sizes of the module
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    data = prepare(write_shards(tmp_path / "texts", 6))
    actual = []
    for num_cores in (2, 4):
        with mock.patch.object(streams, "num_cores", return_value=num_cores):
            actual.append(batches(data, 12, seq_len=64))
    use_threads(monkeypatch)
    in_memory = prepare(write_shards(None, 6))
    expected, states = batches(in_memory, 12, seq_len=64)
    for tokens, own_states in actual:
        np.testing.assert_array_equal(tokens, expected)
        assert own_states == states


def test_an_epoch_has_each_document_once_and_no_held_out_one():
    path = write_shards(None, 4)
    data = prepare(path, validation_fraction=0.2)
    held_out = texts_in([data.validation])
    all_texts = [text for shard in range(4) for text in documents(shard)]
    limit = data.sources[0].limit
    assert limit == 0.2
    expected = {text[1:].partition(">")[0] for text in all_texts if hash_fraction([text]) <= limit}
    assert {*held_out} == expected
    assert set(held_out.values()) == {1}

    # All rows of one stretch, without its tokens that two rows have.
    num_tokens = sum(
        len(text.encode()) + 2 for text in all_texts if text[1:].partition(">")[0] not in expected
    )
    rows, _ = batches(data, num_tokens // 40, batch_size=1, seq_len=40)
    assert not {*texts_in(rows[:, 0, :])} & expected
    order = [[int(line.partition("/")[0]) for line in texts_in([row])] for row in rows[:, 0, :]]
    shards = [shard for shard, _ in itertools.groupby(itertools.chain.from_iterable(order))]
    assert sorted({*shards}) == [0, 1, 2, 3]
    seen = Counter(texts_in(rows[:, 0, :-1]))
    assert set(seen.values()) == {1}  # none comes twice in an epoch
    assert len(seen) > 0.6 * (len(all_texts) - len(expected))  # a name may be cut between rows


def test_the_seed_and_the_epoch_decide_the_order():
    data = prepare(_shared(3))
    first, _ = batches(data, 6, seed=0)
    again, _ = batches(data, 6, seed=0)
    other, _ = batches(data, 6, seed=1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_each_epoch_deals_its_shards_to_the_lanes():
    data = prepare(_shared(9))
    iterator = StreamBatches(data, batch_size=4, seq_len=8, seed=5)
    (source,) = iterator.sources
    epochs = {}
    for lane in range(source.num_lanes):
        for place, ids in stretches._documents(source, lane, (0,) * 4, corpus.FAIL_FAST):
            if place[0] == 4:
                break
            shard = as_text(ids)[2:].partition("/")[0]
            order = epochs.setdefault(place[0], {}).setdefault(lane, [])
            if order[-1:] != [shard]:
                order.append(shard)
                assert len(order) == place[1] + 1
    dealt = [[*lanes.values()] for lanes in epochs.values()]
    for lanes in dealt:
        assert sorted(itertools.chain(*lanes)) == [str(shard) for shard in range(9)]
        assert sorted(map(len, lanes)) == [2, 2, 2, 3]
    assert len({str(lanes) for lanes in dealt}) == 4


def test_lanes():
    assert streams._num_lanes(8, 5) == 4
    assert streams._num_lanes(7, 5) == 1
    assert streams._num_lanes(512, 2000) == 64
    assert streams._num_lanes(96, 2000) == 48
    assert streams._num_lanes(1, 1) == 1


# What is read


def count_requests(monkeypatch):
    """The requests to the memory, and the bytes of each file that were read."""
    requests = Counter()
    ranges = []
    kind = type(fsspec.filesystem("memory"))
    for name in ("find", "ls", "info", "size", "cat_file"):
        original = getattr(kind, name)

        def counted(self, path, *args, _name=name, _original=original, **options):
            requests[_name] += 1
            if _name == "cat_file":
                ranges.append((path, options["start"], options["end"]))
            return _original(self, path, *args, **options)

        monkeypatch.setattr(kind, name, counted)
    return requests, ranges


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_no_shard_is_read_again_from_its_start(kind, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 300)
    monkeypatch.setattr(corpus, "RANGE_BYTES", 512)
    data = prepare(write_shards(None, 1, kind, 3000), validation_fraction=0.01)
    expected, states = batches(data, 60, batch_size=1, seq_len=64)
    position = states[50]["lanes"][0][2]
    assert position[:2] == [0, 0]
    assert position[2] + position[3] > 0
    _, ranges = count_requests(monkeypatch)
    actual, _ = batches(data, 8, batch_size=1, seq_len=64, state=states[50])
    np.testing.assert_array_equal(actual, expected[50:58])
    begin = 0 if kind == "parquet" else position[2]
    assert begin > 0 or kind == "parquet"
    total = data.num_bytes
    num_read = sum(end - start for _, start, end in ranges)
    for _, start, end in ranges:
        assert end - start <= 16 or start >= begin
    assert num_read < 0.7 * total


def test_two_thousand_shards_are_listed_by_one_request(monkeypatch):
    folder = write_shards(None, 2000, num_documents=1)
    with fsspec.open(f"{folder}/.hidden.jsonl", "w") as file:
        file.write("no")
    requests, _ = count_requests(monkeypatch)
    files = corpus_files(folder, Path())
    stats = file_stats(files)
    assert requests["find"] == 1
    assert sum(requests.values()) <= 3
    assert len(files) == len(stats) == 2000
    assert [*files][:2] == ["00000.jsonl", "00001.jsonl"]
    assert stats[0][1] == len(json.dumps({"text": documents(0)[0]})) + 1
    data = prepare(folder)
    assert sum(requests.values()) < 100
    assert len(data.sources[0].shards) == 2000


def test_files_folders_and_globs_at_a_url():
    folder = write_shards(None, 3)
    write_shard(f"{folder}/a/b/x.txt", ["x"], "txt")
    write_shard(f"{folder}/a/.c/x.txt", ["x"], "txt")
    names = ["00000.jsonl", "00001.jsonl", "00002.jsonl"]
    assert [*corpus_files(folder, Path())] == [*names, "a/b/x.txt"]
    assert [*corpus_files(f"{folder}/00001.jsonl", Path())] == names[1:2]
    assert [*corpus_files(f"{folder}/*.jsonl", Path())] == names
    assert [*corpus_files(f"{folder}/0000[12]*", Path())] == names[1:]
    assert [*corpus_files(f"{folder}/**/*.txt", Path())] == ["a/b/x.txt"]
    (file,) = corpus_files(f"{folder}/00001.jsonl", Path()).values()
    assert file.read_bytes().startswith(b'{"text": "<1/0>')
    with pytest.raises(JllamaError, match="has no files"):
        corpus_files(f"{folder}/none*", Path())


def test_a_failing_server_is_asked_again(monkeypatch):
    folder = write_shards(None, 2)
    expected, _ = batches(prepare(folder), 5)
    kind = type(fsspec.filesystem("memory"))
    original = kind.cat_file
    calls = itertools.count()

    def fails(self, path, **options):
        number = next(calls)
        if number % 3 == 0:
            raise ConnectionError("reset")
        data = original(self, path, **options)
        return data[:-1] if number % 3 == 1 else data

    monkeypatch.setattr(kind, "cat_file", fails)
    monkeypatch.setattr("time.sleep", lambda _: None)
    actual, _ = batches(prepare(folder), 5)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt.zst"])
def test_a_bucket_that_fails_gives_the_same_batches(kind, bucket, monkeypatch):
    folder = write_shards(None, 3, kind)
    expected, states = batches(prepare(folder), 10)
    for name, file in corpus_files(folder, Path()).items():
        target = as_place(bucket.url) / name
        target.fs.pipe_file(target.path, file.read_bytes())
    monkeypatch.setattr("jllama.system.remote._PAUSES_S", (0.01,))
    faults = Faults(["503", "reset", "cut"] * 2, only="GET .*0000")
    with faulty_proxy(bucket.server, faults) as proxy, using(proxy):
        actual, _ = batches(prepare(bucket.url), 10)
        rest, _ = batches(prepare(bucket.url), 3, state=states[6])
    assert proxy.injected == {"503": 2, "reset": 2, "cut": 2}
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(rest, expected[6:9])


# Mixtures


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
    start=st.integers(0, 2**40),
)
def test_shares_follow_the_weights(weights, start):
    bounds = np.cumsum(weights) / sum(weights)
    for count in (100, 3000):
        drawn = np.bincount(draw(bounds, start + np.arange(count)), minlength=len(weights))
        shares = np.array(weights) / sum(weights)
        assert np.abs(drawn - shares * count).max() <= 8


def test_a_mixture_of_streams():
    first = write_shards(None, 3)
    second = f"memory://streams/{next(NUMBERS)}"
    for shard in range(2):
        texts = [text.replace("é", "ö") for text in documents(f"other{shard}")]
        write_shard(f"{second}/{shard}.jsonl", texts, "jsonl")
    data = prepare("stdlib", mixture={first: 1.0, second: 3.0})
    whole, states = batches(data, 100)
    texts = [as_text(row) for rows in whole for row in rows]
    shares = [sum(letter in text for text in texts) / len(texts) for letter in "éö"]
    assert not any("é" in text and "ö" in text for text in texts)
    np.testing.assert_allclose(shares, [0.25, 0.75], atol=0.03)
    other, _ = batches(data, 10, seed=1)
    drawn = ["ö" in as_text(row) for rows in other for row in rows]
    assert drawn != ["ö" in text for text in texts[:40]]
    for step in (0, 7, 52):
        rest, after = batches(data, 5, state=states[step])
        np.testing.assert_array_equal(rest, whole[step : step + 5])
        assert after == states[step : step + 6]
    other = prepare("stdlib", mixture={first: 1.0, second: 2.0})
    assert other.fingerprint != data.fingerprint
    assert texts_in([data.validation]).keys() & {f"other0/{number}" for number in range(120)}


# What is wrong


def test_bad_rows():
    folder = write_shards(None, 2)
    path = as_place(f"{folder}/00001.jsonl")
    path.write_text(path.read_text() + '{"text": 3}\nno\n' + '{"text": "the last"}\n')
    with pytest.raises(JllamaError, match=r"00001.jsonl line 121 has a int in field 'text'"):
        prepare(folder)
    data = prepare(folder, bad_rows="skip")
    config = streams.dataclasses.replace(data.sources[0].config, bad_rows="refuse")
    strict = streams.dataclasses.replace(data.sources[0], config=config)
    iterator = StreamBatches(
        streams.dataclasses.replace(data, sources=[strict]), batch_size=2, seq_len=32, seed=0
    )
    states = [iterator.get_state()]
    with pytest.raises(JllamaError, match=r"00001.jsonl line 121 has a int in field 'text'"):
        states.extend(iterator.get_state() for _ in itertools.islice(iterator, 2000))
    assert len(states) > 9
    assert iterator.get_state() == states[-1]  # what a checkpoint after the error has
    iterator.close()

    iterator = StreamBatches(data, batch_size=2, seq_len=32, seed=0)
    for _ in range(2000):
        next(iterator)
    figures, lines = iterator.figures()
    assert figures["bad_rows"] >= 2
    assert figures["data_wait_s"] > 0
    assert any("line 121 has a int" in line for line in lines)
    assert any("line 122 is not a JSON object" in line for line in lines)
    rows = StreamBatches(data, batch_size=1, seq_len=32, seed=0, rows=[0])
    found = (part.tokens for part in stretches.read_stretches(rows.sources[0], 0, (0,) * 5))
    assert any("the last" in as_text(tokens) for tokens in itertools.islice(found, 1000))
    assert iterator.figures()[0]["data_wait_s"] == 0 == len(iterator.figures()[1])
    iterator.close()


def test_mistakes_are_one_sentence(tmp_path):
    folder = write_shards(None, 2)
    with pytest.raises(JllamaError, match=r"supports a vocabulary of \d+ tokens, not 9000"):
        prepare(folder, tokenizer="bpe", vocab_size=9000)
    one = f"memory://streams/{next(NUMBERS)}/x.jsonl"
    write_shard(one, ["only one"], "jsonl")
    with pytest.raises(JllamaError, match="1 different documents; give at least 2"):
        prepare(one)
    data = prepare(folder)
    _, states = batches(data, 2)
    with pytest.raises(UsageError, match=r"keep training.seq_len"):
        batches(data, 1, seq_len=16, state=states[1])
    with pytest.raises(UsageError, match="unknown9://x/y cannot be read"):
        DataConfig("unknown9://x/y")
    local = prepare(write_shards(tmp_path / "texts", 2))
    iterator = StreamBatches(local, batch_size=2, seq_len=2000, seed=0)
    with mock.patch.multiple(line_process, **PROCESSES):
        next(iterator)
        for worker in iterator._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(JllamaError, match="a process that reads the data has ended"):
            deque(itertools.islice(iterator, 1000))
        iterator.close()


def test_held_out_text_is_at_least_one_document():
    path = f"memory://streams/{next(NUMBERS)}/x.jsonl"
    texts = ["a b c", "d e f", "g h i"]
    write_shard(path, texts, "jsonl")
    data = prepare(path, validation_fraction=1e-9)
    lowest = min(texts, key=lambda text: hash_fraction([text]))
    assert data.tokenizer.decode(data.validation.tolist()) == lowest
    data = prepare(path, validation_fraction=1 - 1e-9)
    tokens, _ = batches(data, 4, batch_size=1, seq_len=4)
    highest = max(texts, key=lambda text: hash_fraction([text]))
    assert {*np.unique(tokens)} == {BOS, EOS, *(np.frombuffer(highest.encode(), np.uint8) + 3)}


PARENT = """
import sys, time
from jllama.data.chats import data_task, prepare_chats
from jllama.data.config import DataConfig
from jllama.data.prompts import prepare_prompts
from jllama.data.streams import StreamBatches, prepare_stream
data = prepare_stream(DataConfig(sys.argv[1], tokenizer="bytes", stream=True))
batches = StreamBatches(data, batch_size=4, seq_len=32, seed=0)
next(batches)
print(*(worker.process.pid for worker in batches._workers), flush=True)
time.sleep(60)
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_parent_leaves_no_process(tmp_path):
    folder = write_shards(tmp_path / "texts", 4)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE)
    assert parent.stdout
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert children
    for child in children:
        assert is_alive(child)
        with open(f"/proc/{child}/maps") as file:
            assert "jaxlib" not in file.read()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end_s = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert not any(map(is_alive, children))


# Shards of tokens


@pytest.mark.parametrize("target", ["memory", "local"])
def test_tokens_are_those_of_the_text(target, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    trained_smollm(["é <1/2> 3 4 5 6 7 8 9 0 / 11 12 13"] * 30, 300).save(tokenizer)
    folder = write_shards(None, 5)
    config = DataConfig(folder, tokenizer=str(tokenizer), validation_fraction=0.2)
    place = as_place(f"memory://streams/{next(NUMBERS)}" if target == "memory" else tmp_path / "t")
    tokenize_shards(config, place, 1, 2)
    tokenize_shards(config, place, 1, 2)  # the shards are there
    with pytest.raises(JllamaError, match="has 2 of 5 shards of tokens: run jllama"):
        prepare(str(place), tokenizer="bpe")
    with mock.patch("jllama.data.token_shards.read_shard", wraps=stretches.read_shard) as reads:
        tokenize_shards(config, place, 0, 2)
        assert reads.call_count == 3
        tokenize_shards(config, place, 0, 2)
        assert reads.call_count == 3
    tokens = prepare(str(place), tokenizer="bpe", stream=False)
    text = prepare_stream(config)
    assert tokens.tokenizer.fingerprint() == text.tokenizer.fingerprint()
    read = [
        np.concatenate(
            [*stretches.read_shard(tokens.sources[0], shard, corpus.Cursor(), corpus.FAIL_FAST)]
        )
        for shard in tokens.sources[0].shards
    ]
    for number, part in enumerate(read):
        expected = [
            id
            for document in documents(number)
            if hash_fraction([document]) > 0.2
            for id in corpus.tokenize(text.tokenizer, document)
        ]
        assert part.tolist() == expected
    assert sorted(tokens.validation) == sorted(text.validation)
    whole, states = batches(tokens, 40)
    rest, _ = batches(tokens, 5, state=states[33])
    np.testing.assert_array_equal(rest, whole[33:38])

    other = DataConfig(folder, tokenizer="bytes")
    with pytest.raises(UsageError, match="has tokens of other texts or options"):
        tokenize_shards(other, place, 0, 1)
    with pytest.raises(UsageError, match="has tokens of another tokenizer"):
        prepare(str(place), tokenizer="bytes")


def test_the_command(tmp_path):
    folder = write_shards(tmp_path / "texts", 3)
    run_command("data", "tokenize", folder, tmp_path / "tokens", "--data.tokenizer", "bytes")
    data = prepare(str(tmp_path / "tokens"), tokenizer="bpe")
    assert len(data.sources[0].shards) == 3
    assert texts_in([data.validation])


# A tokenizer that is learned from a stream


def learn_noting(monkeypatch, ranges):
    """How many bytes had been read, and which texts, when each tokenizer was learned."""
    noted = []

    def learn(texts, vocab_size):
        texts = [*texts]
        noted.append((sum(end - start for _, start, end in ranges), texts))
        return train_sentencepiece(texts, vocab_size)

    monkeypatch.setattr(streams, "train_sentencepiece", learn)
    return noted


@pytest.mark.parametrize("kind", KINDS.split())
def test_bpe_learns_from_the_beginning_which_is_read_once(kind, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 300)
    monkeypatch.setattr(corpus, "RANGE_BYTES", 512)
    monkeypatch.setattr(streams, "LEARNED_CHARS", 9000)
    folder = write_shards(None, 1, kind)
    write_shard(f"{folder}/00001.{kind}", [text + "ö" for text in documents(1)], kind)
    write_shard(f"{folder}/00002.{kind}", [text + "ü" for text in documents(2)], kind)
    _, ranges = count_requests(monkeypatch)
    noted = learn_noting(monkeypatch, ranges)
    options = {"encoding": "latin-1" if kind == "latin.txt" else "utf-8", "bad_rows": "skip"}
    data = prepare(folder, tokenizer="bpe", vocab_size=276, **options)
    ((num_read, learned),) = noted
    assert 9000 <= sum(map(len, learned)) < 9300
    assert "".join(learned).replace("\n", "").startswith("".join(documents(0)))
    vocabulary = "".join(data.tokenizer.vocabulary().tokens)
    assert "ö" in vocabulary
    assert "ü" not in vocabulary
    assert {path.rpartition("/")[2] for path, _, _ in ranges} >= {f"00002.{kind}"}  # to train on
    sizes = [size for _, size, _ in file_stats(corpus_files(folder, Path()))]
    if kind in ("jsonl", "txt", "latin.txt"):
        assert num_read < sizes[0] + sizes[1] * 0.9
    whole, _ = batches(data, 20)
    rest, _ = batches(prepare(folder, tokenizer="bpe", vocab_size=276, **options), 5)
    np.testing.assert_array_equal(rest, whole[:5])


def test_bpe_learns_from_each_path_of_a_mixture(monkeypatch):
    monkeypatch.setattr(streams, "LEARNED_CHARS", 4000)
    paths = []
    for letters in ("абвгд", "αβγδε"):
        texts = [f"{letters[n % 5]}{letters[n % 3]} {letters} {n}" for n in range(900)]
        paths.append(f"memory://streams/{next(NUMBERS)}/x.jsonl")
        write_shard(paths[-1], texts, "jsonl")
    noted = learn_noting(monkeypatch, [])
    options = {"tokenizer": "bpe", "vocab_size": 300}
    data = prepare("stdlib", mixture=dict.fromkeys(paths, 1.0), **options)
    learned = "".join(noted[0][1])
    pieces = data.tokenizer.vocabulary().tokens
    for letters in ("абвгд", "αβγδε"):
        assert sum(map(learned.count, letters)) > 1000
        assert any(letters in piece for piece in pieces)


def test_a_row_that_cannot_be_learned_from_is_reported_where_it_is_trained_on(monkeypatch):
    folder = write_shards(None, 1)
    path = as_place(f"{folder}/00000.jsonl")
    path.write_text(path.read_text() + '{"text": 3}\n')
    noted = learn_noting(monkeypatch, [])
    with pytest.raises(JllamaError, match=r"00000.jsonl line 121 has a int in field 'text'"):
        prepare(folder, tokenizer="bpe", vocab_size=274)
    assert noted[0][1] == documents(0)


def test_processes_that_tokenize_learn_the_same_vocabulary(tmp_path, monkeypatch):
    folder = write_shards(tmp_path / "texts", 3)
    noted = learn_noting(monkeypatch, [])
    for process in ("0/2", "1/2"):
        words = [folder, tmp_path / "tokens", "--process", process, "--data.vocab_size", 274]
        done = run_command("data", "tokenize", *words)
        assert done.code == 0, done.err
    assert len(noted) == 2
    data = prepare(str(tmp_path / "tokens"), tokenizer="bpe")
    assert len(noted) == 2  # the tokens have it
    expected = train_sentencepiece(itertools.chain(*map(documents, range(3))), 274)
    assert data.tokenizer.fingerprint() == expected.fingerprint()
    assert "é é" in data.tokenizer.decode(batches(data, 5)[0].ravel().tolist())


def test_chats_and_prompts_at_a_url(tmp_path):
    place = f"memory://streams/{next(NUMBERS)}"
    records = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(40)]
    content = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.jsonl").write_text(content)
    with fsspec.open(f"{place}/a.jsonl.zst", "wb") as file:
        file.write(zstd.compress(content.encode()))
    configs = [DataConfig(str(tmp_path / "a.jsonl")), DataConfig(place)]
    assert [data_task(config) for config in configs] == ["chat", "chat"]
    chats = [prepare_chats(config, BytesTokenizer(), None, (), 32) for config in configs]
    np.testing.assert_array_equal(chats[0].train.tokens, chats[1].train.tokens)
    assert chats[0].fingerprint == chats[1].fingerprint
    prompts = [prepare_prompts(config, BytesTokenizer(), None, 32) for config in configs]
    assert [row.ids for row in prompts[0].train] == [row.ids for row in prompts[1].train]
    assert prompts[1].train[0].place.startswith(f"{place}/a.jsonl.zst line ")


def test_a_tokenizer_at_a_url(tmp_path):
    place = f"memory://streams/{next(NUMBERS)}"
    BytesTokenizer().save(tmp_path)
    with fsspec.open(f"{place}/{BytesTokenizer.file_name}", "wb") as file:
        file.write((tmp_path / BytesTokenizer.file_name).read_bytes())
    assert prepare(_shared(2), tokenizer=place).tokenizer.vocab_size == 259


MODEL = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_seq_len": 32}


def test_a_run_logs_how_long_it_waits(tmp_path):
    folder = write_shards(None, 3)
    flags = [
        *("--run_dir", tmp_path / "run", "--data.path", folder, "--data.tokenizer", "bytes"),
        *(f"--model.{name}={value}" for name, value in MODEL.items()),
        *("--training.steps", 6, "--resume", "auto"),
        *("--training.batch_size", 4, "--training.log_every", 1, "--training.sample_tokens", 0),
    ]
    done = run_command("train", *flags, "--training.steps", 0, "--training.epochs", 1)
    assert done.code == 2
    assert "training.epochs is 1.0; it must be 0 with a stream: give training.steps" in done.err
    done = run_command("train", *flags)
    assert done.code == 0, done.err
    assert "a stream of 3 shards" in done.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["data_wait_s"] >= 0 == line["bad_rows"] for line in lines if "loss" in line)
    assert lines[-1]["final"]["bits_per_byte"] < 9
    done = run_command("train", *flags, "--data.task", "chat", "--data.stream", "true")
    assert "data.stream is True; it must be false, as only text is one" in done.err


def test_a_run_learns_a_tokenizer_once_and_goes_on_with_its_own(tmp_path, monkeypatch):
    folder = write_shards(None, 3)
    flags = [
        *("--run_dir", tmp_path / "run", "--data.path", folder, "--data.vocab_size", 274),
        *(f"--model.{name}={value}" for name, value in MODEL.items()),
        *("--training.batch_size", 4, "--training.log_every", 1, "--training.sample_tokens", 0),
    ]
    noted = learn_noting(monkeypatch, [])
    done = run_command("train", *flags, "--training.steps", 3)
    assert done.code == 0, done.err
    expected = train_sentencepiece(itertools.chain(*map(documents, range(3))), 274)
    assert load_tokenizer(tmp_path / "run").fingerprint() == expected.fingerprint()

    # A later version may learn another vocabulary from the same text.
    monkeypatch.setattr(streams, "LEARNED_CHARS", 2000)
    words = ["--resume", "auto", "--resume_with_changes", "true"]
    done = run_command("train", *flags, *words, "--training.steps", 5)
    assert done.code == 0, done.err
    assert len(noted) == 1
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3, 4, 5]
