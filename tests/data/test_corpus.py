"""Every kind of corpus is read in one order; a bad one is one sentence that names the place."""

import gzip
import hashlib
import importlib
import io
import itertools
import os
import tracemalloc
import urllib.error
import urllib.request
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.data import corpus
from jllama.data.corpus import corpus_files, read_corpus

try:
    from compression import zstd
except ImportError:
    from backports import zstd


def read(path, text_field="text", cache_dir=Path("unused")):
    return [
        "".join(document())
        for document in read_corpus(corpus_files(str(path), cache_dir).values(), text_field)
    ]


def test_stdlib():
    files = corpus_files("stdlib", Path("unused"))
    assert len(files) > 300
    assert list(files) == sorted(files)
    assert {"argparse.py", "json/decoder.py"} < set(files)
    assert not any({"test", "tests", "site-packages"} & set(Path(name).parts) for name in files)
    document = next(read_corpus([files["os.py"]]))
    assert "".join(document()) == files["os.py"].read_text("utf-8")


def test_file_folder_and_glob(tmp_path, monkeypatch):
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/config", "a/empty.txt", "a/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else '{"text": "line"}\n')
    (tmp_path / "b.txt").write_bytes("é\r\n".encode())
    (tmp_path / "a/z.md").write_text("z")
    names = ["a/c.jsonl", "a/empty.txt", "a/z.md", "b.txt"]
    assert list(corpus_files(str(tmp_path), tmp_path)) == names
    assert read(tmp_path) == ["line", "z", "é\r\n"]
    assert read(tmp_path / "b.txt") == ["é\r\n"]
    assert read(tmp_path / "**/*.[mt]*") == ["z", "é\r\n"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/b.txt") == read(tmp_path / "b.txt")


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n"}\n\n{"text": ""}\n{"text": "four", "body": "4"}')
    assert read(path) == ["one\n", "four"]
    path.write_text('{"text": "four", "body": "4"}')
    assert read(path, "body") == ["4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"a.jsonl line 3 is not a JSON object: "),
        (b'["text"]', r"a.jsonl line 3 is not a JSON object: 'list' object"),
        (
            b'{"body": "x", "id": 3}',
            r"line 3 has no field 'text'.*set data.text_field to one of \['body'\]",
        ),
        (b'{"text": 3}', "line 3 has a int in field 'text'"),
        (b'{"text": "\\ud83d"}', r"line 3 is not a JSON object: .*ud83d.*surrogates not allowed"),
        (b'{"a":' + b"[" * 99_999, r"a.jsonl line 3 is not a JSON object: "),
        (b'{"text": "\xff"}', r"a.jsonl line 3 is not a JSON object: .* byte 0xff in position 10"),
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
    with pytest.raises(JllamaError, match=rf"x.bin must be converted .*: {message} is not UTF-8 t"):
        read(tmp_path)


def test_missing_and_empty(tmp_path):
    message = "has no files: give stdlib, tinyshakespeare, persona, or an existing"
    for path in (tmp_path, tmp_path / "missing.txt", tmp_path / "*.txt"):
        with pytest.raises(JllamaError, match=message):
            read(path)
    (tmp_path / "empty.txt").touch()
    assert read(tmp_path) == []


@given(
    st.lists(st.sampled_from(["the", " quick", "\n", "\r\n", "\n\n", "  ", "é", "世界", "12"])),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_a_text_in_chunks_is_the_text_cut_behind_lines_or_words(words, size, step):
    text = "".join(words)
    parts = [text[start : start + step] for start in range(0, len(text), step)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", size)
        patch.setattr(corpus, "LONGEST_CHUNK", 90)
        chunks = list(corpus.cut_chunks(parts))
    assert "".join(chunks) == text
    assert all(chunks)
    for before, after in itertools.pairwise(chunks):
        is_line = before[-1] == "\n" and not before[-2].isspace() and not after[0].isspace()
        is_word = before[-1].isalpha() and after[0] == " " and after[1].isalpha()
        assert is_line or is_word or len(before) >= 90


def test_a_large_file_is_read_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 50)
    text = "é the 世界 quick\n" * 100
    (tmp_path / "a.txt").write_text(text)
    (document,) = read_corpus(corpus_files(str(tmp_path), tmp_path).values())
    assert "".join(document()) == "".join(document()) == text
    assert max(map(len, document())) < 200
    data = text.encode() + b"\xe4\xb8"  # half a character
    (tmp_path / "a.txt").write_bytes(data)
    message = rf"a.txt .*: byte 0xE4 at offset {len(data) - 2} is not UTF-8 text"
    with pytest.raises(JllamaError, match=message):
        list(document())
    (tmp_path / "a.txt").unlink()
    with pytest.raises(JllamaError, match=r"a.txt must be .*: No such file"):
        list(document())


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffé\n".encode())
    (tmp_path / "b.jsonl").write_bytes('\ufeff{"text": "b"}\r\n'.encode())
    (tmp_path / "c.txt").write_bytes("é\ufeff".encode())
    assert read(tmp_path) == ["é\n", "b", "é\ufeff"]


def test_another_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\n".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("é".encode("utf-16"))
    files = corpus_files(str(tmp_path), tmp_path)
    for name, encoding in {"a.txt": "latin-1", "b.txt": "utf-16"}.items():
        (document,) = read_corpus([files[name]], encoding=encoding)
        assert "".join(document()).strip() == "é"
    (tmp_path / "c.txt").write_bytes(b"a\0")
    for name, encoding, message in (
        ("b.txt", "ascii", "byte 0xFF at offset 0 is not ASCII text"),
        ("b.txt", "utf-9", "unknown encoding"),
        ("b.txt", "hex", "'hex' is not a text encoding"),
        ("c.txt", "latin-1", "it has a NUL character, which"),
    ):
        with pytest.raises(JllamaError, match=rf"{name} must .*data.encoding.*: {message}"):
            list(read_corpus([tmp_path / name], encoding=encoding))


def test_all_bad_files_are_named_or_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text " * 100 + b"\xe9")
    (tmp_path / "b.bin").write_bytes(b"\0")
    (tmp_path / "c.jsonl").write_text(
        '{"text": "c"}\n{"text": 3}\n{"text": "\\ud83d"}\n{"text": "d"}\n'
    )
    (tmp_path / "e.txt").write_text("e")
    for policy in ("refuse", "skip"):
        bad = corpus.Findings(policy)
        documents = read_corpus(corpus_files(str(tmp_path), tmp_path).values(), findings=bad)
        assert ["".join(document()) for document in documents] == ["c", "d", "e"]
        assert [line.removeprefix(f"{tmp_path}/").split()[:3] for line in bad.problems] == [
            ["a.txt", "must", "be"],
            ["b.bin", "must", "be"],
            ["c.jsonl", "line", "2"],
            ["c.jsonl", "line", "3"],
        ]
        first = "4 rows or files cannot be learned from: "
        if policy == "refuse":
            with pytest.raises(JllamaError, match=rf"^{first}(?s:.*)a.txt must .*\n"):
                bad.finish()
        else:
            first += "data.bad_rows skip leaves them out"
            assert bad.finish() == [first, *bad.problems]


def test_links_that_lead_out_of_a_folder(tmp_path):
    (tmp_path / "corpus" / "a").mkdir(parents=True)
    (tmp_path / "corpus" / "a" / "own.txt").write_text("own")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "corpus" / "inside.txt").symlink_to("a/own.txt")
    (tmp_path / "link").symlink_to("corpus")
    assert read(tmp_path / "corpus") == read(tmp_path / "link") == ["own", "own"]
    (tmp_path / "corpus" / "out.txt").symlink_to("../secret.txt")
    message = "out.txt is a link out of the folder, to .*secret.txt: set data.follow"
    for folder in ("corpus", "link"):
        with pytest.raises(JllamaError, match=message):
            read(tmp_path / folder)
    actual = list(corpus_files(str(tmp_path / "corpus"), tmp_path, True))
    assert actual == ["a/own.txt", "inside.txt", "out.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}, 3]', "element 2 is not a JSON object: 'int'"),
        ("[{", "is not a JSON array of at most 30 bytes: "),
        ('[\n{"text": "a"},\n{"text": "b"}]', "is not a JSON array of at most 30 bytes: "),
    ],
)
def test_an_array_that_is_bad_or_too_long(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(corpus, "LONGEST_LINE", 30)
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(JllamaError, match=f"a.jsonl {message}"):
        read(tmp_path)


# Packed files

PACK = {"gz": gzip.compress, "zst": zstd.compress}


@pytest.mark.parametrize("suffix", PACK)
def test_packed_files(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 100)
    pack = PACK[suffix]
    text, lines = "the quick é\n" * 99, b'{"text": "one"}\n\n{"text": "two"}\n'
    two_parts = pack(text.encode()[:500]) + pack(text.encode()[500:])
    (tmp_path / f"a.txt.{suffix}").write_bytes(two_parts)
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(pack(lines))
    (tmp_path / f"c.{suffix}").write_bytes(pack(b""))
    (tmp_path / "d").write_bytes(pack(b"named otherwise"))
    assert read(tmp_path) == [text, "one", "two", "named otherwise"]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_packed_files_that_are_damaged(tmp_path, suffix, name):
    data = PACK[suffix](b'{"text": "one"}\n' * 1000)
    path = tmp_path / f"{name}.{suffix}"
    for damaged in (data[:-1], data[: len(data) // 2], data[:7], data + b"garbage"):
        path.write_bytes(damaged)
        with pytest.raises(JllamaError, match=rf"{path} must be .* fetched again .*: .+") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_bytes(data[:20] + bytes([data[20] ^ 255]) + data[21:])
    with pytest.raises(JllamaError):  # Zstandard may not notice, the text does
        read(tmp_path)
    path.write_bytes(PACK[suffix](b'{"text": "\xff"}'))
    with pytest.raises(JllamaError, match=r"byte 0xFF at offset 10|byte 0xff in position 10"):
        read(tmp_path)


def test_a_line_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST_LINE", 1000)
    text = b'{"text": "x"}\n{"text": "' + b"x" * 10**7
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    message = "a.jsonl.gz line 2 has over 1,000 bytes: write its text to a file"
    tracemalloc.start()
    with pytest.raises(JllamaError, match=message):
        read(tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10**6


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (b"PK\x03\x04\x14", "ZIP"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\x93NUMPY\x01\0", "NumPy"),
        (b"%PDF-1.7\n", "PDF"),
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"GGUF\x03\0\0\0", "GGUF"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, begin, kind):
    (tmp_path / "x.dat").write_bytes(begin + b" and more")
    message = f"x.dat must be converted to UTF-8 text, .*: it is a {kind} file$"
    with pytest.raises(JllamaError, match=message):
        read(tmp_path)


# Parquet


def parquet(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 10)
    texts = [f"text {number} é\n" * (number % 5) for number in range(500)] + [None]
    expected = [text for text in texts if text]
    index = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    for kind in (pyarrow.string(), pyarrow.large_string(), index):
        columns = {"id": list(range(501)), "text": pyarrow.array(texts, kind)}
        parquet(tmp_path / "a.parquet", columns, row_group_size=90)
        assert read(tmp_path) == expected
        assert read(tmp_path / "a.parquet", "text") == expected


def test_parquet_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.parquet"

    def says(message, text_field="text"):
        with pytest.raises(JllamaError, match=message) as caught:
            read(tmp_path, text_field)
        assert "\n" not in str(caught.value)

    parquet(path, {"id": [1], "body": ["x"], "title": ["y"]})
    says(r"a.parquet has no field 'text', .*set data.text_field to one of \['body', 'title'\]")
    says(r"a.parquet has a int64 in field 'id', .* one of \['body', 'title'\]", "id")
    parquet(path, {"messages": [[{"role": "user", "content": "x"}]]})
    says("a.parquet has no field .text.*make it a chat")
    parquet(path, {"text": ["the quick"] * 1000, "n": list(range(1000))})
    data = path.read_bytes()
    overwritten = data[:40] + b"\xff" * 40 + data[80:]
    for damaged in (data[:-9], data[: len(data) // 2], data[:9], overwritten):
        path.write_bytes(damaged)
        says(r"a.parquet must be .* fetched again .*: .+")
    parquet(path, {"text": pyarrow.array([b"ok", b"\xff"]).cast(pyarrow.string(), safe=False)})
    says(r"a.parquet must .*0xff")


@pytest.mark.parametrize(("name", "extra"), [("a.parquet", "parquet"), ("a.txt.zst", "zstd")])
def test_what_an_extra_reads_without_it(tmp_path, monkeypatch, name, extra):
    parquet(tmp_path / "a.parquet", {"text": ["x"]})
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(b"x"))
    monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=ImportError(extra)))
    kind = {"parquet": "Parquet", "zstd": "Zstandard"}[extra]
    message = rf"{name} is a {kind} file, .*: pip install 'jllama\[{extra}\]'$"
    with pytest.raises(JllamaError, match=message):
        read(tmp_path / name)


def test_a_chat_is_no_text(tmp_path):
    message = "a.jsonl line 1 has .*make it a chat: set data.task to chat$"
    for line in ('{"messages": []}', '{"messages": [{"role": "user"}], "text": null}'):
        (tmp_path / "a.jsonl").write_text(line)
        for field in ("text", "messages"):
            with pytest.raises(JllamaError, match=message):
                read(tmp_path, field)
    (tmp_path / "a.jsonl").write_text('{"messages": [], "text": "x"}')
    assert read(tmp_path) == ["x"]


def test_tinyshakespeare(tmp_path, monkeypatch):
    text = b"First Citizen:\n"

    def answer(url, timeout):
        assert url == corpus.SHAKESPEARE_URL
        return io.BytesIO(text)

    cache = tmp_path / "cache"
    monkeypatch.setattr(urllib.request, "urlopen", answer)
    message = "given as data.path: these 15 bytes are not the known file"
    with pytest.raises(JllamaError, match=message):
        corpus_files("tinyshakespeare", cache)
    assert not cache.exists()

    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(text).hexdigest())
    with pytest.raises(JllamaError, match=r"cannot write .*: .*make room or set data.cache_dir"):
        corpus_files("tinyshakespeare", Path(os.devnull) / "x")
    assert read("tinyshakespeare", cache_dir=cache) == ["First Citizen:\n"]
    assert len(list(cache.iterdir())) == 1

    offline = mock.Mock(side_effect=urllib.error.URLError("no route"))
    monkeypatch.setattr(urllib.request, "urlopen", offline)
    assert len(read("tinyshakespeare", cache_dir=cache)) == 1  # from the cache
    message = "tinyshakespeare must be downloaded elsewhere, .* given as data.path: .*no route"
    with pytest.raises(JllamaError, match=message):
        corpus_files("tinyshakespeare", tmp_path)
