"""What the safetensors library writes is read bit for bit, and it reads what we write; bad files
are one sentence.
"""

import json
import math
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from helpers_checkpoints import message
from hypothesis import assume, given
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.formats import tensors
from jllama.formats.safetensors_file import DTYPES, read_safetensors, write_safetensors

# A name may be any text but the key of the metadata; lone surrogates are no text.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name != "__metadata__"
)
files = st.dictionaries(
    names,
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(1, 5), min_size=1, max_size=2)),
    max_size=6,
)


def arrays(file, seed=0):
    """Every bit pattern, NaNs of all kinds among them."""
    rng = np.random.default_rng(seed)
    return {
        name: np.frombuffer(
            rng.bytes(math.prod(shape) * DTYPES[code].itemsize), DTYPES[code]
        ).reshape(shape)
        for name, (code, shape) in file.items()
    }


def write(path, contents):
    done = []
    write_safetensors(
        path, [(name, array, array.dtype) for name, array in contents.items()], done.append
    )
    return done


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def raw(path, header, data=b"", length=None):
    """A file made by hand; ``header`` is text or what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def refusal(path):
    text = message(read_safetensors, path)
    assert str(path) in text
    return text


@given(file=files)
def test_files_go_between_the_library_and_jllama_bit_for_bit(file, tmp_path_factory):
    folder, expected = tmp_path_factory.mktemp("files"), arrays(file)
    safetensors.numpy.save_file(expected, folder / "theirs", {"any": "thing"})
    assert_same(read_safetensors(folder / "theirs"), expected)

    done = write(folder / "ours", expected)
    assert sum(done) == sum(array.nbytes for array in expected.values())
    with safetensors.safe_open(folder / "ours", "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert_same(safetensors.numpy.load_file(folder / "ours"), expected)
    again = read_safetensors(folder / "ours")
    assert_same(again, expected)
    for array in again.values():
        assert array.flags.aligned
        assert not array.flags.writeable


def test_a_header_of_any_length_is_read(tmp_path):
    """The numbers behind it may be unaligned, and are usable."""
    expected = arrays({"a": ("BF16", [3]), "b": ("F32", [2, 2]), "c": ("F64", [1])})
    write(tmp_path / "file", expected)
    content = (tmp_path / "file").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for padding in range(8):
        header = content[8:end] + b" " * padding
        found = read_safetensors(raw(tmp_path / "padded", header, content[end:]))
        assert_same(found, expected)
        for name, array in expected.items():
            assert np.array_equal(found[name] * 2, array * 2, equal_nan=True)


def test_scalars_and_empty_tensors_are_read(tmp_path):
    expected = {
        "a": np.float32(3),
        "empty": np.zeros((0, 5), np.float16),
        "b": np.ones((2, 0, 3), np.float32),
    }
    expected = {name: np.asarray(array) for name, array in expected.items()}
    safetensors.numpy.save_file(expected, tmp_path / "file")
    assert_same(read_safetensors(tmp_path / "file"), expected)


def test_writing_streams(tmp_path, monkeypatch):
    """Neither reading nor writing takes memory for more than a few blocks; the file itself is
    mapped.
    """
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1 << 16)
    source, copy = tmp_path / "source", tmp_path / "copy"
    write(source, {"a": np.arange(1 << 22, dtype=np.float32).reshape(1 << 12, -1)})
    tracemalloc.start()
    try:
        mapped = read_safetensors(source)["a"]
        write_safetensors(copy, [("a", mapped, np.dtype(jnp.bfloat16))], lambda done: None)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert_same(read_safetensors(copy), {"a": mapped.astype(jnp.bfloat16)})


def test_opening_does_not_read(tmp_path):
    rows = 1 << 20
    entry = {"dtype": "F32", "shape": [rows, 4096], "data_offsets": [0, rows * 4096 * 4]}
    path = raw(tmp_path / "file", {"a": entry})
    os.truncate(path, path.stat().st_size + rows * 4096 * 4)  # 16 GiB that are not there
    assert not read_safetensors(path)["a"][rows - 1 : rows].any()


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 16]}
GOOD = {"a": A, "b": B}
DATA = bytes(16)


def test_the_good_header_is_good(tmp_path):
    assert read_safetensors(raw(tmp_path / "file", GOOD, DATA)).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        (GOOD, bytes(15), "not fully covered"),
        (GOOD, b"", "cut short, damaged"),
        (GOOD, bytes(17), "not fully covered"),
        ({"a": A, "b": B | {"data_offsets": [4, 12]}}, bytes(12), "invalid offset"),
        ({"a": A, "b": B | {"data_offsets": [12, 20]}}, bytes(20), "invalid offset"),
        ({"a": A | {"data_offsets": [8, 0]}}, bytes(8), "invalid offset"),
        ({"a": A | {"shape": [3]}}, bytes(8), "invalid shape"),
        ({"a": A | {"shape": [2**40, 2**40]}}, bytes(8), "damaged"),
        ({"a": A | {"shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}, b"", "array is too big"),
        ({"a": A | {"shape": [10**4000] * 100}}, bytes(8), "damaged"),
        ({"a": A | {"shape": [1] * 65 + [2]}}, bytes(8), "maximum supported dimension"),
        ({"a": A | {"shape": [True, 2]}}, bytes(8), "damaged"),
        ({"a": {"dtype": "F32"}}, bytes(8), "damaged"),
        ({"w.weight": A | {"dtype": "I64", "shape": [1]}}, bytes(8), "holds w.weight as I64"),
        ({"w.weight": A | {"dtype": "f32"}}, bytes(8), "unknown variant `f32`"),
        (b'{"a":{"dtype":"F32","dtype":"F32"}}', b"", "duplicate field `dtype`"),
        (b"[]", b"", "invalid type"),
        (b"", b"", "in header"),
        (b"\xff\xfe", b"", "in header"),
        (b'{"a":' * 100_000, b"", "in header"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, header, data, problem):
    assert problem in refusal(raw(tmp_path / "file", header, data))


@pytest.mark.parametrize(
    ("length", "problem"),
    [(3, "header"), (2**63, "header"), (2**64 - 1, "header"), (100_000_001, "header too large")],
)
def test_an_absurd_header_length_is_refused(tmp_path, length, problem):
    path = raw(tmp_path / "file", b"{}", length=length)
    if length == 100_000_001:  # over the library's limit, in a file that is as long
        os.truncate(path, 1 << 30)
    assert problem in refusal(path)


def test_what_cannot_be_opened_is_one_sentence(tmp_path):
    assert "No such file" in refusal(tmp_path / "file")
    assert "directory" in refusal(tmp_path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "file"
    write(path, arrays({"a": ("F32", [3, 4]), "b": ("BF16", [5])}))
    return path.read_bytes()


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(data, small_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "file"
    path.write_bytes(small_file[: data.draw(st.integers(0, len(small_file) - 1))])
    assert "cut short" in refusal(path)


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_of_the_header_is_refused_or_harmless(
    place, byte, small_file, tmp_path_factory
):
    """Whatever our reader makes of a damaged header, it is an error of ours or what the library
    makes of it, too.
    """
    path = tmp_path_factory.mktemp("flipped") / "file"
    content = bytearray(small_file)
    header_end = 8 + int.from_bytes(content[:8], "little")
    where = int(place * header_end)
    assume(content[where] != byte)
    content[where] = byte
    path.write_bytes(content)
    try:
        found = read_safetensors(path)
    except JllamaError:
        return
    assert_same(safetensors.numpy.load_file(path), found)
