"""A place is a local path or a URL; files come and go between them, also while a server fails."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers import BUCKET, Faults, faulty_proxy, hub_server, using

from jllama.core import JllamaError, UsageError
from jllama.system import remote
from jllama.system.places import as_place, is_url, local_path
from jllama.system.remote import fetch, in_threads, list_files, patiently, upload

NAMES = [
    "plain",
    "a%41%2F.txt",
    "b c.txt",
    "d?e=1.txt",
    "f#g.txt",
    "ü/日本.txt",
    "back\\slash.txt",
    "[x]*.txt",
    "a+b&c;d'e.txt",
]


@pytest.fixture(autouse=True)
def a_cache_and_no_pauses(tmp_path, monkeypatch):
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSES_S", (0.0,))


# Paths and URLs


@pytest.mark.parametrize("place", ["runs/mine", "/tmp/x", "a:b", "C:\\runs", "stdlib", "", "a b?"])
def test_paths_are_local(place):
    assert as_place(place) == Path(place)
    assert as_place(Path(place)) == Path(place)
    assert local_path(place) == Path(place)
    assert not is_url(place)


def test_a_local_path_needs_nothing_of_fsspec():
    program = """
import sys
from jllama.system.places import as_place, is_url, local_path
from jllama.system.remote import fetch, list_files
place = as_place("/tmp")
assert fetch(place) == local_path("file:///tmp") == as_place("/tmp") and not is_url(place)
list_files(as_place(__file__ if "__file__" in globals() else "missing"))
assert not {"fsspec", "upath", "gcsfs", "s3fs"} & set(sys.modules), "imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("place", ["memory://b/x", Path("memory://b/x"), "memory:/b/x"])
def test_a_url_is_understood_also_shortened(place):
    assert is_url(place)
    assert str(as_place(place)) == "memory://b/x"
    assert as_place(as_place(place)) == as_place(place)
    with pytest.raises(UsageError, match=r"^memory://b/x is a URL; give a local path$"):
        local_path(place)


def test_files_in_urls_are_paths():
    assert as_place("file:///tmp/x") == as_place("FILE:/tmp/x") == Path("/tmp/x")


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("s3://key:secret@host/b/x", "s3://host/b/x"),
        ("s3://key:secret/secret+@host/b/x", "s3://host/b/x"),
        ("s3://secret@host/b/x?token=secret#secret", "s3://host/b/x"),
        ("gs://b/x?generation=secret", "gs://b/x"),
        ("HTTPS://host:80/file?secret", "https://host:80/file"),
        ("https://host/file#secret", "https://host/file"),
        (Path("s3://key:secret@host/b/x"), "s3://host/b/x"),
    ],
)
@pytest.mark.parametrize("function", [as_place, local_path])
def test_credentials_are_refused_without_showing_them(place, shown, function):
    with pytest.raises(UsageError, match="has credentials or a query") as caught:
        function(place)
    assert str(caught.value).startswith(f"{shown} has credentials")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_port_is_no_secret(tmp_path):
    assert str(as_place("http://host:8080/a@b")) == "http://host:8080/a@b"


def test_an_unknown_scheme_is_refused():
    with pytest.raises(UsageError) as caught:
        as_place("nosuch://b/x")
    advice = "install the package of fsspec for nosuch://"
    assert str(caught.value) == f"nosuch://b/x cannot be read or written here: {advice}"


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("s3", "s3fs")])
def test_a_scheme_that_is_not_installed_names_its_extra(scheme, package):
    program = f"""
import sys
sys.modules[{package!r}] = None
from jllama.system.places import as_place
as_place("{scheme}://b/x")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    problem = f"{scheme}://b/x cannot be read or written here: pip install 'jllama["
    assert done.stderr.splitlines()[-1].startswith(f"jllama.core.UsageError: {problem}")


# Files


def write_files(folder, names=NAMES):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def read_files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_names_survive_a_round_trip(bucket, tmp_path):
    write_files(tmp_path / "source")
    place = as_place(f"{bucket.url}/a folder")
    upload(tmp_path / "source", place, NAMES)
    assert list_files(place).keys() == list_files(tmp_path / "source").keys() == set(NAMES)
    assert {name: size for name, (size, _) in list_files(place).items()} == {
        name: len(name.encode()) for name in NAMES
    }
    assert read_files(fetch(place)) == {name: name for name in NAMES}
    for name in NAMES:
        assert (place / name).read_text() == name
        (only,) = list_files(place / name).values()
        assert only[0] == len(name.encode())
        assert fetch(place / name).read_text() == name
        assert fetch(place / name).name == Path(name).name
        if "?" not in name:  # which a user's URL cannot have
            assert as_place(str(place / name)).read_text() == name
            assert as_place(Path(str(place / name))).read_text() == name


def test_a_folder_is_not_what_begins_like_it(bucket):
    place = as_place(bucket.url)
    for name in ("run/x", "run10/x", "run.txt", "only10/x"):
        (place / name).write_text(name)
    assert list_files(place / "run").keys() == {"x"}
    assert list_files(as_place(f"{bucket.url}/run/")).keys() == {"x"}
    assert list_files(place / "only") == {}
    assert list_files(place / "run.txt").keys() == {""}
    assert read_files(fetch(as_place(f"{bucket.url}/run/"))) == {"x": "run/x"}


def test_nothing_there_is_one_sentence(bucket, tmp_path):
    scheme = bucket.url.partition(":")[0]
    for url in (f"{bucket.url}/missing", f"{scheme}://no-such-bucket/x"):
        assert list_files(as_place(url)) == {}
        with pytest.raises(JllamaError, match=f"^there is nothing at {url}$"):
            fetch(as_place(url))
    with pytest.raises(FileNotFoundError):
        patiently("there", as_place(f"{bucket.url}/missing").read_bytes)
    assert list_files(tmp_path / "missing") == {}


READS = {"gs": r"GET .*(?:/|%2F)(\w+)\?alt=media", "s3": r"GET [^?]*/(\w+)$"}
"""The requests that read a file."""


def test_only_changes_are_downloaded(bucket, tmp_path):
    with faulty_proxy(bucket.server) as proxy, using(proxy):
        place = as_place(bucket.url)

        def downloads():
            """The names of the files that the last fetch has read."""
            before = len(proxy.requests)
            copy = fetch(place)
            matches = [
                re.match(READS[bucket.url[:2]], request) for request in proxy.requests[before:]
            ]
            return copy, sorted(match[1] for match in matches if match)

        write_files(tmp_path, ["a", "b", "c"])
        upload(tmp_path, place, ["a", "b", "c"])
        copy, names = downloads()
        assert names == ["a", "b", "c"]
        assert downloads() == (copy, [])

        # One has another content of the same size, one is gone, one is new, and a copy is damaged.
        (tmp_path / "b").write_text("B")
        write_files(tmp_path, ["d"])
        upload(tmp_path, place, ["b", "d"])
        (place / "c").unlink()
        assert downloads() == (copy, ["b", "d"])
        assert read_files(copy) == {"a": "a", "b": "B", "d": "d"}
        (copy / "a").unlink()
        assert downloads() == (copy, ["a"])
        assert read_files(copy) == {"a": "a", "b": "B", "d": "d"}


def small_ones(files):
    return {name: facts for name, facts in files.items() if "checkpoints/" not in name}


def test_no_file_lands_outside_of_a_copy(bucket, tmp_path):
    """A bucket may hold any name, and somebody else may have written it."""
    (tmp_path / "x").write_text("x")
    place = as_place(bucket.url)
    place.fs.pipe_file(f"{place.path}/a/../../../x", b"evil")
    with pytest.raises(JllamaError, match="which would lie outside of a copy"):
        fetch(place)


def test_names_can_be_left_out(bucket, tmp_path):
    write_files(tmp_path, ["checkpoints/3/x", "config.yaml"])
    upload(tmp_path, as_place(bucket.url), ["checkpoints/3/x", "config.yaml"])
    assert [*read_files(fetch(as_place(bucket.url), small_ones))] == ["config.yaml"]
    assert len(read_files(fetch(as_place(bucket.url)))) == 2


def test_thousands_of_files_are_listed_with_few_requests(bucket):
    with faulty_proxy(bucket.server) as proxy, using(proxy):
        place = as_place(bucket.url)
        names = [f"{index:04}" for index in range(1100)]
        with using(bucket.server):
            direct = as_place(bucket.url)
            direct.fs.pipe({(direct / name).path: b"" for name in names})
        before = len(proxy.requests)
        assert [*list_files(place)] == names
        assert len(proxy.requests) - before <= 3


def test_a_hub_is_read(tmp_path):
    texts = tmp_path / "hub/datasets/me/texts"
    write_files(texts)
    with hub_server(tmp_path / "hub") as server, faulty_proxy(server) as proxy, using(proxy):
        place = as_place("hf://datasets/me/texts")
        names = [name for name in NAMES if "%" not in name and "\\" not in name]
        assert set(names) <= list_files(place).keys()
        assert fetch(place / "plain").read_text() == "plain"
        before = len(proxy.requests)
        (texts / "plain").write_text("other")
        using_again = as_place("hf://datasets/me/texts")
        assert fetch(using_again / "plain").read_text() == "other"
        assert len(proxy.requests) > before


# Servers that fail


def test_what_is_cut_is_read_again(bucket, tmp_path):
    content = bytes(range(256)) * 1000
    (tmp_path / "file").write_bytes(content)
    upload(tmp_path, as_place(bucket.url), ["file"])
    faults = Faults(["cut"], only=READS[bucket.url[:2]])
    with faulty_proxy(bucket.server, faults) as proxy, using(proxy):
        assert fetch(as_place(bucket.url) / "file").read_bytes() == content
        assert proxy.injected == {"cut": 1}


def test_what_has_another_size_is_read_again(bucket, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_bytes(b"0123456789")
    place = as_place(bucket.url)
    upload(tmp_path, place, ["file"])
    get_file = place.fs.get_file
    answers = [b"01234", b""]

    def get(source, target):
        get_file(source, target)
        if answers:
            Path(target).write_bytes(answers.pop())

    monkeypatch.setattr(place.fs, "get_file", get)
    assert fetch(place / "file").read_bytes() == b"0123456789"
    assert answers == []
    notes = capsys.readouterr().err.splitlines()
    assert [line for line in notes if line.startswith("note: ")] == [
        f"note: {place / 'file'} does not answer (OSError: 0 of 10 bytes came); "
        "trying again for up to 10 minutes"
    ]
    assert not [*(tmp_path / "cache").rglob("*.partial")]


@pytest.mark.parametrize("code", ["400", "401", "403"])
def test_a_refusal_is_final(bucket, tmp_path, code, capsys):
    (tmp_path / "file").write_text("x")
    with faulty_proxy(bucket.server, Faults(rate=1.0, kinds=[code])) as proxy, using(proxy):
        place = as_place(bucket.url)
        for action in (
            lambda: list_files(place),
            lambda: upload(tmp_path, place, ["file"]),
            lambda: patiently(place, (place / "file").read_bytes),
            lambda: patiently(place, place.fs.pipe_file, place.path, b"", mode="create"),
        ):
            with pytest.raises(JllamaError, match=f"^{place}.* cannot be read or written: "):
                action()
        assert proxy.injected.total() < 30
    assert capsys.readouterr().err == ""


def test_a_failure_is_said_once_and_the_connection_waited_for(capsys):
    errors = [
        ConnectionError("https://user:secret@host/x?token=secret\n is down"),
        OSError("Service Unavailable"),
        TimeoutError(),
    ]

    def action(value, *, more):
        if errors:
            raise errors.pop(0)
        return value + more

    assert patiently("gs://b/x", action, 1, more=2) == 3
    assert capsys.readouterr().err == (
        "note: gs://b/x does not answer (ConnectionError: https://host/x is down); trying again "
        "for up to 10 minutes\n"
    )


def test_patience_ends(monkeypatch, capsys):
    monkeypatch.setattr(remote, "PATIENCE_S", 0.0)
    monkeypatch.setattr(remote, "_PAUSES_S", (0.01,))

    def action():
        raise ConnectionError("it is down")

    with pytest.raises(JllamaError) as caught:
        patiently("gs://b/x", action)
    assert str(caught.value) == "gs://b/x cannot be read or written: ConnectionError: it is down"
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert capsys.readouterr().err == ""


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("x"), PermissionError("x"), NoCredentialsError("x"), ImportError("x")]
)
def test_what_does_not_pass_is_not_tried_again(error, capsys):
    calls = []

    def action():
        calls.append(1)
        raise error

    with pytest.raises(JllamaError, match="cannot be read or written"):
        patiently("gs://b/x", action)
    assert len(calls) == 1


@pytest.mark.parametrize("error", [FileNotFoundError("x"), FileExistsError("x"), UsageError("x")])
def test_answers_are_not_failures(error):
    def action():
        raise error

    with pytest.raises(type(error), match=r"^x$"):
        patiently("gs://b/x", action)


def test_a_server_that_is_away_for_a_moment_is_waited_for(bucket, tmp_path):
    """The libraries try for some seconds by themselves."""
    (tmp_path / "file").write_text("x")
    with faulty_proxy(bucket.server) as proxy, using(proxy):
        place = as_place(bucket.url)
        proxy.down_for(0.5)
        upload(tmp_path, place, ["file"])
        assert fetch(place / "file").read_text() == "x"


def test_a_file_is_created_by_one(bucket):
    place = as_place(f"{bucket.url}/owner")
    patiently(place, place.fs.pipe_file, place.path, b"one", mode="create")
    with pytest.raises(FileExistsError):
        patiently(place, place.fs.pipe_file, place.path, b"two", mode="create")
    assert place.read_bytes() == b"one"


def test_an_error_in_a_thread_ends_the_others():
    calls = []

    def action(item):
        calls.append(item)
        # A server's answer takes time; without it, all could fail before the first is seen.
        time.sleep(0.01)
        raise JllamaError("no")

    with pytest.raises(JllamaError, match="no"):
        list(in_threads(action, range(10_000)))
    assert len(calls) < 10_000


def test_the_bucket_of_the_tests_is_not_a_folder(bucket):
    assert f"/{BUCKET}/" in str(as_place(bucket.url))
