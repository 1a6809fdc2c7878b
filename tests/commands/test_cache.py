"""``jllama doctor cache``: what is made again can be seen and removed, and nothing else is."""

import numpy as np
import pytest
from helpers import run_command

from jllama.commands import cli
from jllama.system import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of every kind one entry of at least 1,000 bytes, and four things of the user's."""
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path))
    for kind in ("weights", "programs"):
        cache.store(kind, cache.key_of(kind), [np.zeros(1024, np.uint8)])
    for name in (
        *(
            "compiled/jit_f-0a-cache",
            "places/0123456789abcdef/run/checkpoints/5/params/embed/0.0",
            *(f"{kind}-0123456789abcdef/train.bin" for kind in ("tokens", "chats", "bpe")),
        ),
        *("chat_history", "tinyshakespeare.txt", "weights/mine.gguf", "tokens-of-mine/text"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000))
    return tmp_path


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_shows_all_kinds_and_clears_one_or_all(folder, capsys):
    before = names(folder)
    assert cli.run("cache", ["ls"]) == 0
    *rows, total = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [
        [kind, "1"]
        for kind in ("weights", "programs", "compiled", "tokens", "chats", "bpe", "places")
    ]
    assert total.endswith(f" kB in {folder}")
    assert names(folder) == before
    assert cli.run("cache", ["clear", "weights"]) == 0
    assert {name.partition("/")[0] for name in before - names(folder)} == {"weights"}
    assert "1.0 kB cleared" in capsys.readouterr().out
    assert cli.run("cache", ["clear"]) == 0
    assert names(folder) == {
        "chat_history",
        "tinyshakespeare.txt",
        "weights/mine.gguf",
        "tokens-of-mine/text",
    }
    assert cli.run("cache", ["ls"]) == 0
    assert capsys.readouterr().out.endswith(f"0 bytes in {folder}\n")


@pytest.mark.parametrize(
    ("words", "said"), [(["list"], "one of ls, clear"), (["clear", "all"], "one of weights")]
)
def test_what_is_no_action_or_kind_is_refused(words, said, folder):
    before = names(folder)
    done = run_command("doctor", "cache", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1
    assert names(folder) == before


def test_there_may_be_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "none"))
    assert cli.run("cache", ["clear"]) == 0
    assert "0 bytes cleared" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
