"""Every kind of corpus is read in one order, and every bad one is one sentence that names the place."""

import hashlib
import io
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jllama.data import corpus
from jllama.data.corpus import Document, corpus_files, read_corpus
from jllama.errors import JllamaError


def read(path, text_field="text", cache_dir=Path("unused")):
    return list(read_corpus(corpus_files(str(path), cache_dir), text_field))


def test_stdlib():
    files = corpus_files("stdlib", Path("unused"))
    assert len(files) > 300
    assert list(files) == sorted(files)
    assert {"argparse.py", "json/decoder.py"} < set(files)
    assert not any({"test", "tests", "site-packages"} & set(Path(name).parts) for name in files)
    assert next(read_corpus({"os.py": files["os.py"]})).text == files["os.py"].read_text("utf-8")


def test_file_folder_and_glob(tmp_path, monkeypatch):
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/config", "a/empty.txt", "a/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else '{"text": "line"}\n')
    (tmp_path / "b.txt").write_bytes("é\r\n".encode())
    names = ["a/c.jsonl:1", "a/z.md", "b.txt"]
    assert [document.name for document in read(tmp_path)] == names
    assert read(tmp_path / "b.txt") == [Document("b.txt", "é\r\n")]
    assert [Path(document.name).name for document in read(tmp_path / "**/*.[mt]*")] == ["z.md", "b.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/b.txt") == read(tmp_path / "b.txt")


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n"}\n\n{"text": ""}\n{"text": "four", "body": "4"}')
    assert read(path) == [Document("a.jsonl:1", "one\n"), Document("a.jsonl:4", "four")]
    path.write_text('{"text": "four", "body": "4"}')
    assert read(path, "body") == [Document("a.jsonl:1", "4")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"a.jsonl line 3 is not JSON \("),
        (b'["text"]', r"a.jsonl line 3 is a JSON list: each line"),
        (b'{"body": "x", "id": 3}', r"line 3 has no field 'text'.*set data.text_field to one of \['body', 'id'\]"),
        (b'{"text": 3}', "line 3 has a int in field 'text'"),
        (b'{"text": "\\ud83d"}', r"line 3 has the lone surrogate \\ud83d"),
        (b'{"text": "\xff"}', "a.jsonl has byte 0xFF at offset 24"),
    ],
)
def test_bad_jsonl(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"x"}\n\n' + line + b"\n")
    with pytest.raises(JllamaError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc\0\xff", "byte 0x00 at offset 3"),
        (b"ab\xc3(", "byte 0xC3 at offset 2"),
        (b"\xff\0", "byte 0xFF at offset 0"),
    ],
)
def test_binary_files(tmp_path, data, message):
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(JllamaError, match=rf"x.bin has {message}, which is not UTF-8 text"):
        read(tmp_path)


def test_missing_and_empty(tmp_path):
    for path in (tmp_path, tmp_path / "missing.txt", tmp_path / "*.txt"):
        with pytest.raises(JllamaError, match="has no files: give stdlib, tinyshakespeare, or an existing"):
            read(path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(JllamaError, match="holds no text: all its 1 files are empty"):
        read(tmp_path)


def test_a_file_that_goes_away(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(JllamaError, match=f"cannot read .*{name}: No such file"):
            list(read_corpus({name: tmp_path / name}))


def test_tinyshakespeare(tmp_path, monkeypatch):
    def answer(url, timeout):
        assert url == corpus.SHAKESPEARE_URL
        return io.BytesIO(b"First Citizen:\n")

    cache = tmp_path / "cache"
    monkeypatch.setattr(urllib.request, "urlopen", answer)
    with pytest.raises(JllamaError, match=r"is not the known file \(15 bytes\): download"):
        corpus_files("tinyshakespeare", cache)
    assert not cache.exists()

    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(b"First Citizen:\n").hexdigest())
    with pytest.raises(JllamaError, match=r"cannot write .*: .*give another --data.cache_dir"):
        corpus_files("tinyshakespeare", Path(os.devnull) / "x")
    assert read("tinyshakespeare", cache_dir=cache) == [Document("tinyshakespeare", "First Citizen:\n")]
    assert len(list(cache.iterdir())) == 1

    def offline(url, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    assert len(read("tinyshakespeare", cache_dir=cache)) == 1  # from the cache
    with pytest.raises(
        JllamaError, match=r"cannot download tinyshakespeare .*no route.* elsewhere and give --data.path"
    ):
        corpus_files("tinyshakespeare", tmp_path)
