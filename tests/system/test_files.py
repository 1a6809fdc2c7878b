"""Files and folders appear whole or not at all, and what stood there stays until then."""

import os
import resource

import pytest

from jllama.core import JllamaError, UsageError
from jllama.system.files import (
    append_line,
    atomic_write,
    atomic_write_text,
    check_writable,
    has_file,
    read_lines,
)


def left(folder):
    """Everything in a folder: the text of files, True for folders."""
    return {path.name: path.is_dir() or path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_takes_its_name_at_the_end(tmp_path, shared):
    target = tmp_path / "target"
    for old, new in ((None, "one"), ("one", "two")):
        with atomic_write(target, shared=shared) as partial:
            partial.write_text(new)
            assert (target.read_text() if target.exists() else None) == old
        assert left(tmp_path) == {"target": new}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("is_folder", [False, True])
def test_after_an_error_all_is_as_before(tmp_path, is_folder, shared):
    target = tmp_path / "target"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(target, shared=shared) as partial:  # noqa: PT012
        partial.mkdir() if is_folder else partial.write_text("new")
        raise ZeroDivisionError
    assert left(tmp_path) == {"target": "old"}


def test_a_folder_replaces_a_folder_or_a_file_and_the_other_way_round(tmp_path):
    target = tmp_path / "target"
    for name in ("one", "two"):
        with atomic_write(target) as partial:
            partial.mkdir()
            (partial / name).touch()
        assert [path.name for path in target.iterdir()] == [name]
    atomic_write_text(target, "new")
    assert left(tmp_path) == {"target": "new"}
    with atomic_write(target) as partial:
        partial.mkdir()
    assert left(tmp_path) == {"target": True}


def test_of_two_that_write_the_same_folder_the_first_stays(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(OSError, match="not empty"), atomic_write(target, shared=True) as slow:  # noqa: PT012
        slow.mkdir()
        with atomic_write(target, shared=True) as quick:
            assert quick != slow
            quick.mkdir()
            (quick / "whole").touch()
    assert left(tmp_path) == {"target": True}
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_what_a_killed_process_left_is_put_back_or_cleared(tmp_path):
    (tmp_path / ".target.old").write_text("old")
    (tmp_path / ".target.partial").mkdir()
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "target"):
        raise ZeroDivisionError
    assert left(tmp_path) == {"target": "old"}


def test_writable_is_asked_without_writing(tmp_path):
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    for path in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(UsageError, match=r"cannot write .*; choose another place"):
            check_writable(path)
    assert left(tmp_path) == {"file": "old"}


@pytest.mark.parametrize("room_bytes", [0, 5])
def test_a_line_that_does_not_fit_is_not_begun(tmp_path, room_bytes):
    path, limits = tmp_path / "lines.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    append_line(path, {"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            append_line(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_line(path, {"step": 3})
    assert path.read_text().count("\n") == 2
    assert read_lines(path) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to(path.name),  # in a circle
    ],
)
def test_what_is_no_file_is_not_taken_for_none(tmp_path, make):
    assert not has_file(tmp_path / "file")
    (tmp_path / "file").touch()
    assert has_file(tmp_path / "file")
    path = tmp_path / "lines.jsonl"
    make(path)
    for read in (has_file, read_lines):
        with pytest.raises(JllamaError, match=r"lines\.jsonl is a .*: put a file there"):
            read(path)
