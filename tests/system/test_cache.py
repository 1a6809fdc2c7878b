"""What is kept for later processes is what would be made without it, or is made again."""

import concurrent.futures
import os
import stat
import types
from pathlib import Path

import jax
import models
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jllama
from jllama.formats import adapters, gguf_file, registry, tensors
from jllama.formats.receipt import weights_fingerprint
from jllama.models.language_model import LanguageModel
from jllama.models.lora import LoraConfig
from jllama.system import cache

KEY = "a" * 64


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def model(scale=1.0):
    params = models.params(models.FILE)
    return LanguageModel(models.FILE, params | {"embed": scale * params["embed"]})


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Two GGUF files of one size, whose matrices are in a type without a kernel."""
    folder, files = tmp_path_factory.mktemp("gguf"), []
    for scale in (1.0, 0.5):
        path = folder / f"{scale}.gguf"
        jllama.save(model(scale), path, "gguf", "q5_1")
        files.append(path.read_bytes())
    return files


@pytest.fixture
def file(tmp_path, contents):
    path = tmp_path / "model.gguf"
    path.write_bytes(contents[0])
    return path


def without_cache(path, monkeypatch, **options):
    with monkeypatch.context() as context:
        context.setenv("JLLAMA_CACHE_GIB", "0")
        return weights_fingerprint(jllama.load(path, **options))


def no_work(monkeypatch):
    """From here on nothing can be dequantized, but for a try of each type when a file is opened."""
    real = gguf_file.dequantize
    monkeypatch.setattr(
        gguf_file, "dequantize", lambda rows, type_: real(rows, type_) if len(rows) == 1 else 1 / 0
    )


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_kept_weights_have_the_bits_of_fresh_ones(options, file, folder, monkeypatch):
    expected = without_cache(file, monkeypatch, **options)
    assert not folder.exists()
    assert weights_fingerprint(jllama.load(file, **options)) == expected
    no_work(monkeypatch)
    assert weights_fingerprint(jllama.load(file, **options)) == expected


def test_each_form_of_a_file_has_its_own_and_a_copy_has_the_same(
    file, folder, tmp_path, monkeypatch, contents
):
    (tmp_path / "copy.gguf").write_bytes(contents[0])
    for options in ({}, {"quantize": "int8"}, {"dtype": "bfloat16"}):
        jllama.load(file, **options)
    jllama.load(file, layout="training")
    no_work(monkeypatch)
    for options in ({}, {"quantize": "int8"}, {"dtype": "bfloat16"}):
        jllama.load(tmp_path / "copy.gguf", **options)
    assert len([*folder.iterdir()]) == 3


def test_a_file_that_changed_unnoticed_is_read_again(file, monkeypatch, contents):
    """Size and times are as before: the content counts."""
    jllama.load(file)
    before = file.stat()
    file.write_bytes(contents[1])
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_fingerprint(jllama.load(file)) == without_cache(file, monkeypatch)


def test_another_source_is_another_key(file, folder, monkeypatch):
    jllama.load(file)
    monkeypatch.setattr(cache, "_code", lambda: ["a later version"])
    jllama.load(file)
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
        lambda data: data[:-64],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: bytes(len(data)),
    ],
    ids=["a flipped bit", "cut", "cut in its head", "empty", "zeros"],
)
def test_a_damaged_entry_is_made_again(damage, file, folder):
    expected = weights_fingerprint(jllama.load(file))
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert weights_fingerprint(jllama.load(file)) == expected
    assert entry.read_bytes() == whole


def test_an_entry_under_the_key_of_another_is_none(folder):
    cache.store("weights", KEY, [np.arange(9)])
    (folder / KEY).rename(folder / ("b" * 64))
    assert cache.load("weights", "b" * 64) is None


def test_exact_tensors_are_not_kept(folder, tmp_path):
    for format in ("hf", "gguf"):
        jllama.save(model(), tmp_path / format, format)
        jllama.load(tmp_path / format)
    assert not folder.exists()


def test_what_an_adapter_changes_is_not_kept(file, folder):
    base, key = registry.open_checkpoint(file), "layers/0/wq"
    outputs, inputs = base.tensors[key].shape
    parts = {
        f"{key}/a": np.ones((1, inputs), np.float32),
        f"{key}/b": np.ones((outputs, 1), np.float32),
    }
    jllama.load(file)
    (entry,) = folder.iterdir()
    adapted = adapters.merge(base, adapters.Adapter(LoraConfig(rank=1), parts, base.config, file))
    plain, changed = (
        tensors.load_decode_params(each, np.dtype(np.float32)).weights["layers"]["0"]
        for each in (base, adapted)
    )
    changed_wq, plain_wq = (layer["wqkv"].values[:outputs] for layer in (changed, plain))
    assert np.abs(changed_wq - plain_wq).min() > 0.5
    assert [*folder.iterdir()] == [entry]


def test_where_nothing_can_be_written_nothing_is_kept(file, folder, monkeypatch):
    expected = without_cache(file, monkeypatch)
    with monkeypatch.context() as context:  # a full disk
        context.setattr(cache.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=0))
        assert weights_fingerprint(jllama.load(file)) == expected
    assert not [*folder.iterdir()]
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.write_text("no folder")
    assert weights_fingerprint(jllama.load(file)) == expected


def test_a_disk_that_fills_up_leaves_nothing_behind(folder, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_checksum", fail)
    cache.store("weights", KEY, [np.arange(9)])
    assert not [*folder.iterdir()]


def test_what_was_used_last_stays(folder, monkeypatch):
    keys = [letter * 64 for letter in "abcd"]
    monkeypatch.setenv("JLLAMA_CACHE_GIB", str(3 * 1032 / 2**30))
    for age, key in enumerate(keys[:3]):
        cache.store("weights", key, [np.zeros(1024, np.uint8)])
        os.utime(folder / key, (age, age))
    assert cache.load("weights", keys[0]) is not None
    cache.store("weights", keys[3], [np.zeros(1024, np.uint8)])
    assert sorted(path.name for path in folder.iterdir()) == [keys[0], keys[2], keys[3]]
    cache.store("weights", "e" * 64, [np.zeros(4096, np.uint8)])  # more than all may be
    assert len([*folder.iterdir()]) == 3


def test_many_writers_at_once(folder):
    arrays = [np.arange(100_000), np.ones(7, np.int8), np.ones((), np.float32)]

    def keep(_):
        cache.store("weights", KEY, arrays)
        found = cache.load("weights", KEY)
        return found[:800_000].view(np.int64)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for found in threads.map(keep, range(24)):
            assert np.array_equal(found, arrays[0])
    assert [path.name for path in folder.iterdir()] == [KEY]


def give_away(path, monkeypatch):
    """Let a file or folder be another user's: by root, or by being that user."""
    user = os.geteuid()
    if user == 0:
        os.chown(path, 65_534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_kept_is_for_this_user_alone(folder, umask):
    before = os.umask(umask)
    try:
        cache.store("weights", KEY, [np.arange(9)])
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / KEY)]
    assert modes == [0o700, 0o700, 0o600]
    assert cache.load("weights", KEY) is not None


@pytest.mark.parametrize(
    "mode", [0o777, 0o770, None], ids=["others_write", "group_writes", "anothers"]
)
@pytest.mark.parametrize("place", [".", "weights", f"weights/{KEY}"], ids=["cache", "kind", "file"])
def test_what_others_may_have_written_is_not_read(folder, place, mode, monkeypatch, capfd):
    cache.store("weights", KEY, [np.arange(9)])
    path = folder.parent / place
    give_away(path, monkeypatch) if mode is None else path.chmod(mode)
    for _ in range(3):
        assert cache.load("weights", KEY) is None
    (note,) = capfd.readouterr().err.splitlines()
    assert note.startswith("note: ")
    assert " is not used, since other users may have written to it" in note
    assert note.endswith("remove it, or set JLLAMA_CACHE to a folder of your own")
    cache.store("weights", "b" * 64, [np.arange(9)])  # where it would never be read
    assert len([*folder.iterdir()]) == (2 if mode and path.is_file() else 1)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_jax_has_the_folder_only_if_all_in_it_is_ours(is_foreign, folder, file, monkeypatch):
    compiled = folder.parent / "compiled"
    assert cache.private_folder("compiled") == compiled
    (compiled / "jit_f-0a-cache").touch()
    # JAX writes by the umask, in a folder that nobody else enters.
    (compiled / "jit_f-0a-cache").chmod(0o664)
    if is_foreign:
        give_away(compiled / "jit_f-0a-cache", monkeypatch)
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: jax.config.values[name] for name in names}
    jax.config.update(names[0], None)
    try:
        jllama.load(file)
        assert jax.config.values[names[0]] == (None if is_foreign else str(compiled))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_the_hash_of_the_source_is_of_all_rooms(monkeypatch):
    """Otherwise programs and weights of another version would be taken from the cache."""
    read = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    cache.source_hash.__wrapped__()
    package = Path(jllama.__file__).parent
    assert set(read) == {*package.rglob("*.py")}
