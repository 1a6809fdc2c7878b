"""torch's own files read without torch, ours read by torch; files that lie, are cut short or call
something are not.
"""

import collections
import importlib
import io
import os
import pickle
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jllama.core import JllamaError
from jllama.formats import tensors as tensors_module
from jllama.formats import torch_file
from jllama.formats.tensors import LazyTensor
from jllama.formats.torch_file import read_torch_file, write_torch_file

DTYPES = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
}
TENSORS = collections.OrderedDict(
    (name, torch.randn(4, 6, generator=torch.Generator().manual_seed(n)).to(dtype))
    for n, (name, dtype) in enumerate(
        zip(["a.weight", "b.weight", "norm", "λ"], DTYPES, strict=True)
    )
)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(found, tensors):
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), DTYPES[tensor.dtype])
        assert found[name].tobytes() == bits(tensor), name


def lives_in_a_mapped_file(array):
    while not isinstance(array, np.memmap):
        if array is None:
            return False
        array = getattr(array, "base", None)
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "saved.pth"
    torch.save(TENSORS, path)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves_is_read(tmp_path, protocol):
    base = torch.arange(60, dtype=torch.bfloat16).reshape(3, 4, 5)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.RMSNorm(4))
    tensors = module.state_dict()  # which has an attribute, _metadata
    tensors |= TENSORS | {
        "transposed": base.mT,
        "part of a shared storage": base[1:, ::2, 3],
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "number": torch.tensor(3.5),
        "one row of many": base[:, :1].as_strided((1, 5), (10**6, 1)),
    }
    assert tensors._metadata
    torch.save(tensors, tmp_path / "x.pth", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "x.pth")
    assert_same_bits(found, tensors)
    for array in found.values():
        assert lives_in_a_mapped_file(array)
        assert not array.flags.writeable


names = st.text(min_size=1, max_size=9).filter(lambda text: text.isprintable())
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=2)


@given(
    st.dictionaries(names, st.tuples(shapes, st.sampled_from(list(DTYPES))), max_size=5),
    st.integers(1, 100),
)
def test_torch_reads_what_is_written(tmp_path_factory, entries, block_bytes):
    path = tmp_path_factory.mktemp("written") / "ünicode.pth"
    tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in entries.items()}
    arrays = []
    for name, tensor in tensors.items():
        dtype = DTYPES[tensor.dtype]
        arrays.append((name, np.frombuffer(bits(tensor), dtype).reshape(tensor.shape), dtype))
    done = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors_module, "BLOCK_BYTES", block_bytes)
        write_torch_file(path, arrays, done.append)
    assert sum(done) == sum(array.nbytes for _, array, _ in arrays)
    assert_same_bits(read_torch_file(path), tensors)
    for options in ({"weights_only": True, "mmap": True}, {"weights_only": False}):
        loaded = torch.load(path, **options)
        assert list(loaded) == list(tensors)
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(loaded[name]) == bits(tensor)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_written_numbers_are_aligned_and_in_the_dtype_asked_for(tmp_path):
    matrix = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    tensors = [(name, matrix, np.dtype(jnp.bfloat16)) for name in ("a", "bb", "ccc")]
    write_torch_file(tmp_path / "x", tensors, lambda _: None)
    found = read_torch_file(tmp_path / "x")
    for array in found.values():
        assert array.tobytes() == matrix.astype(jnp.bfloat16).tobytes()
        assert array.ctypes.data % 64 == 0  # a mapping starts at a page


def test_offsets_past_4_gib(tmp_path):
    """Written as a sparse file, without the time to write 5 GiB or to take their checksum."""
    last = np.arange(6, dtype=np.float32).reshape(2, 3)
    zeros = np.zeros((8, 1 << 19), np.float16)
    big = LazyTensor((5 << 10, 1 << 19), zeros.dtype, lambda rows: zeros[: rows.stop - rows.start])

    class Sparse(io.FileIO):
        def write(self, data, /):
            view = memoryview(data).cast("B")
            if len(view) > 1 << 20:
                self.seek(len(view), os.SEEK_CUR)
                return len(view)
            return super().write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda path, mode: Sparse(path, mode))
        crc32 = zipfile.crc32
        patch.setattr(
            zipfile,
            "crc32",
            lambda data, value=0: 0 if memoryview(data).nbytes > 999 else crc32(data, value),
        )
        tensors = [("big", big, np.dtype(np.float16)), ("last", last, np.dtype(np.float32))]
        write_torch_file(tmp_path / "x", tensors, lambda _: None)
    assert (tmp_path / "x").stat().st_size > 5 << 30
    found = read_torch_file(tmp_path / "x")
    assert found["big"].shape == (5 << 10, 1 << 19)
    np.testing.assert_array_equal(found["last"], last)
    loaded = torch.load(tmp_path / "x", mmap=True, weights_only=True)
    np.testing.assert_array_equal(loaded["last"], last)


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def archive_of(path, data, entries=(), folder="x"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}/data.pkl", data)
        archive.writestr(f"{folder}/byteorder", "little")
        archive.writestr(f"{folder}/data/0", np.arange(12, dtype=np.float32).tobytes())
        for name, content in entries:
            archive.writestr(name, content)
    return path


def tensor_pickle(
    name=b"torch._utils\n_rebuild_tensor_v2",
    storage=b"torch\nFloatStorage",
    place=(12, 0, (3, 4), (4, 1)),
):
    """The dictionary of one tensor, its numbers as given."""
    count, *rest = place
    arguments = b"".join(pickle.dumps(value, 2)[2:-1] for value in rest)
    return (
        b"\x80\x02}X\1\0\0\0wc"
        + name
        + b"\n((X\7\0\0\0storagec"
        + storage
        + b"\nX\1\0\0\x000X\3\0\0\0cpu"
        + pickle.dumps(count, 2)[2:-1]
        + b"tQ"
        + arguments
        + b"\x89}tRs."
    )


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((12, 0, (3, 4), (4, 1)), np.arange(12).reshape(3, 4)),
        ((12, 3, (2, 2), (1, 5)), [[3, 8], [4, 9]]),
        ((12, 8, (1, 4), (2**99, 1)), [[8, 9, 10, 11]]),
    ],
)
def test_the_pickle_that_these_tests_vary_is_good(tmp_path, place, expected):
    found = read_torch_file(archive_of(tmp_path / "x", tensor_pickle(place=place)))
    np.testing.assert_array_equal(found["w"], expected)


CALLS = {
    "system": lambda path: Calls(os.system, f"touch {path}"),
    "eval": lambda path: Calls(eval, f"open({str(path)!r}, 'w')"),
    "getattr": lambda path: Calls(getattr, "text", "upper"),
    "import_module": lambda path: Calls(importlib.import_module, "antigravity"),
}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_calls_something_is_refused_by_name_and_nothing_runs(
    tmp_path, protocol, name
):
    witness = tmp_path / "witness"
    call = CALLS[name](witness)
    for content in (call, {"a": call}, {"a": {"b": (call,)}}):
        data = pickle.dumps(content, protocol)
        with pytest.raises(JllamaError, match=name if protocol > 1 else f"{name}|pickle operation"):
            read_torch_file(archive_of(tmp_path / "x.pth", data))
    assert not witness.exists()
    if name in ("system", "eval"):  # as they do when it is Python that unpickles
        pickle.loads(data)
        assert witness.exists()


OUTSIDE = "inside its storage of 12"
STORAGE = "48 bytes where data/0 must have"
HOSTILE = {
    "an instance": (b"\x80\x02(X\4\0\0\0exitios\nsystem\n.", "pickle operation INST"),
    "an object": (b"\x80\x02(cos\nsystem\nX\4\0\0\0exito.", "'os.system'"),
    "a new object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "no dictionary of tensors"),
    "an extension": (b"\x80\x02\x82\x01.", "pickle operation EXT1"),
    "a persistent id in text": (b"Pos.system\n.", "pickle operation PERSID"),
    "an unpickler's module": (
        b"\x80\x02cjllama.formats.torch_file\nread_torch_file\n.",
        "read_torch_file",
    ),
    "a name put together": (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04exit\x85R.",
        "'os.system'",
    ),
    "a name from the memo": (b"\x80\x04\x8c\x06system\x94\x8c\x02os\x94h\x00\x93.", "'os.system'"),
    "a dotted name": (
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
        "OrderedDict.__init__",
    ),
    "a name that is no text": (b"\x80\x04K\x01K\x02\x93.", "damaged"),
    "a name that splits elsewhere": (
        b"\x80\x02ccollections.OrderedDict os\nsystem\n.",
        "do not trust",
    ),
    "attributes of a class": (
        b"\x80\x02ccollections\nOrderedDict\n}X\1\0\0\0aK\1sb.",
        "no dictionary of tensors",
    ),
    "a gigantic memo": (b"\x80\x02}r\xff\xff\xff\x7f0.", "pickle operation POP"),
    "hashing for ever": (b"\x80\x02})" + b"q\x00h\x00\x86" * 99 + b"K\1s.", "not text"),
    "a list": (b"\x80\x02].", "pickle operation EMPTY_LIST"),
    "an ordered dictionary of one": (b"\x80\x02ccollections\nOrderedDict\n}\x85R.", "damaged"),
    "a string": (b"\x80\x02X\1\0\0\0a.", "no dictionary of tensors"),
    "no tensors": (b"\x80\x02}X\1\0\0\0aK\1s.", "no tensor under 'a'"),
    "a dictionary of itself": (b"\x80\x02}q\0X\1\0\0\0ah\0s.", "no tensor under 'a'"),
    "nothing": (b"", "damaged"),
    "no end": (b"\x80\x02}", "damaged"),
    "an unknown operation": (b"\x80\x02\xff.", "damaged"),
    "a text of 64-bit length": (
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "pickle operation BINUNICODE8",
    ),
    "a text longer than the file": (b"\x80\x02X\xff\xff\xff\xffa.", "damaged"),
    "an object of a storage": (tensor_pickle(storage=b"os\nsystem"), "'os.system'"),
    "a storage that is a call": (
        tensor_pickle(storage=b"collections\nOrderedDict"),
        "in a way that torch does not",
    ),
    "whole numbers": (
        tensor_pickle(storage=b"torch\nLongStorage"),
        "torch.LongStorage; jllama reads float64",
    ),
    "float8": (
        tensor_pickle(name=b"torch._utils\n_rebuild_tensor_v3"),
        "_rebuild_tensor_v3; jllama reads float64",
    ),
    "another width": (tensor_pickle(storage=b"torch\nHalfStorage"), f"{STORAGE} 12 numbers"),
}
PLACES = {
    "a longer storage": ((13, 0, (3, 4), (4, 1)), f"{STORAGE} 13 numbers"),
    "a shorter storage": ((11, 0, (11,), (1,)), f"{STORAGE} 11 numbers"),
    "a negative storage": ((-1, 0, (1,), (1,)), "must have -1 numbers"),
    "past the end": ((12, 1, (3, 4), (4, 1)), rf"\(3, 4\).*from number 1 .*{OUTSIDE}"),
    "strides past the end": ((12, 0, (3, 4), (5, 1)), OUTSIDE),
    "an absurd size": ((12, 0, (2**62, 2**62), (1, 1)), OUTSIDE),
    "a size made of nothing": ((12, 0, (2**62, 4), (0, 1)), OUTSIDE),
    "a negative offset": ((12, -1, (3,), (1,)), OUTSIDE),
    "a negative stride": ((12, 6, (3,), (-1,)), OUTSIDE),
    "a negative size": ((12, 6, (-3,), (1,)), OUTSIDE),
    "an empty tensor": ((12, 0, (0, 4), (4, 1)), "empty"),
    "an empty tensor of absurd size": ((12, 0, (0, 2**99), (1, 0)), "empty"),
    "more sizes than strides": ((12, 0, (3, 4), (4,)), OUTSIDE),
    "many axes": ((12, 0, (1,) * 99, (1,) * 99), OUTSIDE),
    "a size that is no number": ((12, 0, ("3",), (1,)), OUTSIDE),
}
HOSTILE |= {name: (tensor_pickle(place=place), text) for name, (place, text) in PLACES.items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(tmp_path, name):
    data, message = HOSTILE[name]
    path = archive_of(tmp_path / "x.pth", data)
    with pytest.raises(JllamaError, match=message) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@given(st.binary(max_size=60))
def test_any_pickle_is_read_or_refused(tmp_path_factory, data):
    path = archive_of(tmp_path_factory.mktemp("any") / "x.pth", b"\x80\x02" + data)
    with pytest.raises(JllamaError):
        read_torch_file(path)


@pytest.mark.parametrize("name", ["x/../../evil", "/etc/passwd", "y/data/0", "x/data/../data.pkl"])
def test_an_entry_outside_the_folder_is_refused(tmp_path, name):
    path = archive_of(tmp_path / "x.pth", tensor_pickle(), [(name, b"1")])
    with pytest.raises(JllamaError, match=r"outside its own folder|2 entries named data\.pkl"):
        read_torch_file(path)


@pytest.mark.parametrize("folder", ["/x", "x/.."])
def test_a_folder_that_is_outside_is_refused(tmp_path, folder):
    with pytest.raises(JllamaError, match="outside its own folder"):
        read_torch_file(archive_of(tmp_path / "x.pth", tensor_pickle(), folder=folder))


def test_other_archives_are_refused(tmp_path, monkeypatch):
    def refused(message):
        with pytest.raises(JllamaError, match=message) as caught:
            read_torch_file(path)
        assert str(path) in str(caught.value)

    path = tmp_path / "x.pth"
    refused("cannot be read")
    path.mkdir()
    refused("cannot be read")
    path = tmp_path / "y.pth"
    for content in (b"", b"PK", b"\0" * 999):
        path.write_bytes(content)
        refused("not a file of torch.save")
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    refused(r"before 1\.6: torch\.load it and torch\.save it again")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", tensor_pickle())
    refused("compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/model.json", "{}")
    refused("0 entries named data.pkl")
    archive_of(path, tensor_pickle(), [("x/y/data.pkl", b"")])
    refused("2 entries named data.pkl")
    with pytest.warns(UserWarning, match="Duplicate"):
        archive_of(path, tensor_pickle(), [("x/data/0", b"")])
    refused("two entries of one name")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", tensor_pickle())
        archive.writestr("x/byteorder", "big")
    refused("big-endian")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", tensor_pickle())
    refused("no such entry where data/0 must have 12 numbers in float32")
    monkeypatch.setattr(torch_file, "MAX_INDEX_BYTES", 100)
    archive_of(path, tensor_pickle() + b" " * 100)
    refused("claims .* bytes; jllama reads 100")
    monkeypatch.undo()
    archive_of(path, b"\x80\x02" + b"}" * torch_file.MAX_INDEX_BYTES)
    refused("data.pkl claims 4194306 bytes")


def test_a_damaged_pickle_is_noticed(saved, tmp_path):
    content = bytearray(saved.read_bytes())
    place = content.index(b"X\x01\x00\x00\x001") + 5  # the second tensor's storage, by its key
    content[place : place + 1] = b"0"
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(JllamaError, match="Bad CRC-32"):
        read_torch_file(tmp_path / "x.pth")


@pytest.mark.parametrize(
    "field", ["directory's size", "directory's place", "entry's size", "entry's place"]
)
@pytest.mark.parametrize("value", [1, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
def test_sizes_that_lie_are_refused(saved, tmp_path, field, value):
    content = bytearray(saved.read_bytes())
    end = content.rindex(b"PK\6\6")  # zip64's, which torch always writes
    directory = content.index(b"PK\1\2")
    place = {
        "directory's size": end + 40,
        "directory's place": end + 48,
        "entry's size": directory + 24,
        "entry's place": directory + 42,
    }[field]
    content[place : place + 4] = struct.pack("<I", value)
    if field == "entry's size":
        content[directory + 20 : directory + 24] = struct.pack("<I", value)
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(JllamaError):
        read_torch_file(tmp_path / "x.pth")


@given(st.data())
def test_a_file_cut_short_anywhere_is_refused(saved, tmp_path_factory, data):
    content = saved.read_bytes()
    path = tmp_path_factory.mktemp("short") / "x.pth"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(JllamaError, match="cut short"):
        read_torch_file(path)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bits_never_do_worse_than_a_refusal(saved, tmp_path_factory, flips):
    content = bytearray(saved.read_bytes())
    for place, change in flips:
        content[place % len(content)] ^= change
    path = tmp_path_factory.mktemp("flipped") / "x.pth"
    path.write_bytes(content)
    try:
        found = read_torch_file(path)
    except JllamaError:
        return
    assert [array.shape for array in found.values()] == [(4, 6)] * 4
    sum(float(array.astype(np.float64).sum()) for array in found.values())  # all of it can be read
