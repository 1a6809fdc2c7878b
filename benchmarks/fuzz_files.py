"""Damaged and hostile checkpoints: each must load harmlessly or be refused with a ``JllamaError``.

Small models are written in each format, and a file of a copy is mutated. The seed is the number of
the mutation, so a number always names the same one. A worker process with limits of time and memory
loads the copy, tokenizes a text and runs the oracle on a few tokens.

    python benchmarks/fuzz_files.py --mutations 400
    python benchmarks/fuzz_files.py --formats gguf --first 17 --mutations 1 --keep /tmp/look
"""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "fuzz_files.json"
ADAPTERS = ("peft", "gguf-lora")
"""Formats of adapters, whose base is a whole model."""

FORMATS = ("gguf", "hf", "meta", "llama2c", "orbax", *ADAPTERS)
OUTCOMES = ("refused", "loaded", "other exception", "hang", "crash", "memory", "unprintable")
"""Of loading a mutated model; only the first two are right."""

TIME_LIMIT_S = 30
MEMORY_LIMIT_BYTES = 1 << 30
"""Added to what the worker had; much more than models of 200 kB need."""
ADDRESS_LIMIT_BYTES = 24 << 30
"""jax and tensorstore reserve several GiB that they never touch."""

Random = random.Random
NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    1.5,
    -0.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 2,
    2**63 - 1,
    2**64,
    10**30,
    "",
    "a",
    "\0",
    "é" * 1000,
    "../../etc/passwd",
    "\x1b[2J\x1b]0;title\x07",
    "n" * 100_000,
    [],
    {},
    [[]],
    {"": {}},
    [1, 2],
    ["x"] * 1000,
    {"content": []},
    "0x10",
    "1e400",
    "(a+)+$",
)
"""Values that replace one in a JSON or YAML file."""

NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    31,
    255,
    2**15,
    2**16 + 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
"""Numbers that replace one in a binary file."""


def write_models(folder: Path) -> None:
    """Write a model in each format, with each kind of tokenizer that it can hold, and adapters."""
    from jllama.core.config import LlamaConfig
    from jllama.formats.registry import save
    from jllama.lab.checks import random_params
    from jllama.models.language_model import LanguageModel
    from jllama.models.rope_scaling import Llama3Scaling
    from jllama.tokenizers.base import BYTE_CHARS, TokenType, Vocabulary, merges_of_ranks
    from jllama.tokenizers.huggingface import HuggingFaceTokenizer
    from jllama.tokenizers.sentencepiece import train_sentencepiece

    text = (ROOT / "README.md").read_text()
    sizes = {
        "num_layers": 2,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 48,
        "max_seq_len": 64,
    }
    plain = LlamaConfig(vocab_size=400, **sizes)
    scaled = LlamaConfig(
        vocab_size=400, **sizes, rope_theta=500_000.0, rope_scaling=Llama3Scaling(8.0)
    )
    pieces = train_sentencepiece([text], 400)
    names = ["<unk>", "<s>", "</s>"]
    tokens = [*names, *BYTE_CHARS, "th", "the", "in", "ing", "\u0120the"]
    kinds = [TokenType.CONTROL] * len(names) + [TokenType.NORMAL] * (len(tokens) - len(names))
    merges = merges_of_ranks(tokens, {token: id for id, token in enumerate(tokens)})
    vocabulary = Vocabulary(tokens, kinds, 1, 2, merges=merges, pre="llama-bpe")
    byte_level = HuggingFaceTokenizer.from_vocabulary(vocabulary)
    for format in FORMATS[: -len(ADAPTERS)]:
        model = LanguageModel(plain, random_params(plain, 0), pieces, None, (2,))
        save(model, folder / format / "pieces", format)
        if format != "llama2c":  # llama2.c holds neither scaling nor another tokenizer
            template = "{% for message in messages %}{{ message.content }}{% endfor %}"
            model = LanguageModel(scaled, random_params(scaled, 1), byte_level, template, (2, 5))
            save(model, folder / format / "byte_level", format, "bfloat16")
    write_adapters(folder, plain)


def write_adapters(folder: Path, config: Any) -> None:
    """Write an adapter of rank 4 of the model with pieces, in each format; PEFT's is a DoRA."""
    import numpy as np

    from jllama.formats.adapters import Adapter
    from jllama.formats.registry import ADAPTER_FORMATS
    from jllama.formats.tensors import tensor_specs
    from jllama.models.config import LoraConfig

    rng = np.random.default_rng(0)
    for format, is_dora in (("peft", True), ("gguf-lora", False)):
        lora = LoraConfig(rank=4, targets=("wq", "wv", "w_down"), dora=is_dora)
        tensors = {}
        for spec in tensor_specs(config):
            if spec.path.removeprefix("layers/") in lora.targets:
                outputs, inputs = spec.shape
                sizes: dict[str, tuple[int, ...]] = {"a": (4, inputs), "b": (outputs, 4)}
                if is_dora:
                    sizes["magnitude"] = (outputs,)
                for name, size in sizes.items():
                    tensors[f"{spec.key}/{name}"] = rng.standard_normal(size).astype(np.float32)
        target = folder / format / "adapter"
        target.parent.mkdir()
        if not ADAPTER_FORMATS[format].is_file:
            target.mkdir()
        adapter = Adapter(lora, tensors, config, target)
        ADAPTER_FORMATS[format].write(adapter, target, None, lambda _: None)


# Mutations: each changes a file as a random generator says.


def flip_bits(rng: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    end = rng.choice([len(data), min(len(data), 4096), min(len(data), 64)])
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def set_number(rng: Random, path: Path) -> None:
    """Overwrite a number of 4 or 8 bytes, aligned or not, near the beginning or anywhere."""
    data = bytearray(path.read_bytes())
    width = rng.choice([4, 8])
    place = rng.randrange(rng.choice([len(data), min(len(data), 512)]))
    data[place : place + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
    path.write_bytes(data)


def cut(rng: Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice([0, 1, rng.randrange(len(data)), len(data) - 1])])


def append(rng: Random, path: Path) -> None:
    with path.open("ab") as file:
        file.write(rng.choice([b"\0", b"\n", rng.randbytes(33), bytes(4096)]))


def move_bytes(rng: Random, path: Path) -> None:
    """Take bytes out, put some in, or write one part over another."""
    data = bytearray(path.read_bytes())
    first = rng.randrange(len(data))
    second = rng.randrange(len(data))
    count = rng.choice([1, 4, 8, 100])
    match rng.randrange(3):
        case 0:
            del data[first : first + count]
        case 1:
            data[first:first] = rng.randbytes(count)
        case _:
            data[first : first + count] = data[second : second + count]
    path.write_bytes(data)


def replace_by_special(rng: Random, path: Path) -> None:
    """Replace a file by a pipe, a folder, another file, nothing, or a link.

    The link leads nowhere, to itself or to a device.
    """
    kind = rng.randrange(7)
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind < 5:
        path.symlink_to(["/missing", path.name, "/dev/zero"][kind - 2])
    elif kind == 5 and others:
        shutil.copy(rng.choice(others), path)


def change_tree(rng: Random, tree: Any) -> Any:
    """Change, remove, rename or copy one value of JSON or YAML content; return the content."""
    places = list(places_of(tree))
    if not places:
        return rng.choice(NASTY)
    short = [place for place in places if len(place[0]) < 40]  # rarely one of hundreds of tokens
    node, key = rng.choice(short if short and rng.random() < 0.8 else places)
    match rng.randrange(6):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[str(key) + rng.choice(["x", " ", "_2", "\x1b[2J", "n" * 100_000])] = node.pop(key)
        case 2:
            other, name = rng.choice(places)
            node[key] = json.loads(json.dumps(other[name], default=str))
        case 3 if isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
            node[key] += rng.choice([-1, 1, 0.5])
        case _:
            node[key] = rng.choice(NASTY)
    return tree


def places_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a tree with each of its keys or indices."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, value in items:
        yield node, key
        yield from places_of(value)


def broken_json(rng: Random, text: str) -> str:
    """Return text that no writer of JSON writes: deeply nested, with a key twice, a long number."""
    deep = rng.choice([60, 1500, 200_000])
    place = rng.choice([index for index, char in enumerate(text) if char == ":"] or [0]) + 1
    new = rng.choice(
        [
            "[" * deep + "]" * deep,
            '{"a":' * deep + "1" + "}" * deep,
            "9" * 6000,
            "NaN",
            '"\\ud800"',
            "[",
        ]
    )
    if rng.random() < 0.2 and text.startswith("{"):
        return text[:-1] + "," + text[1:]  # every key twice
    if rng.random() < 0.7:
        return text[:place] + new + text[place:].lstrip("0123456789.-truefalsn ")
    return new


def changed_json(rng: Random, text: str) -> str:
    """Return changed JSON, which in one of five cases is broken."""
    if rng.random() < 0.2:
        return broken_json(rng, text)
    return json.dumps(change_tree(rng, json.loads(text)))


def change_json(rng: Random, path: Path) -> None:
    path.write_text(changed_json(rng, path.read_text()))


def change_yaml(rng: Random, path: Path) -> None:
    text = path.read_text()
    odd_values = [
        "a: *x",
        "0001-99-99",
        "!!python/object/apply:os.getcwd []",
        "9" * 6000,
        "0x" + "f" * 9000,
        "[" * 3000,
        "&a [*a]",
    ]
    # Aliases that would expand to 9**9 values.
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi")
    )
    if rng.random() < 0.3:
        key = rng.choice([line.split(":")[0] for line in text.splitlines() if ":" in line])
        lines = text.splitlines()
        for index, line in enumerate(lines):
            if line.startswith(f"{key}:"):
                lines[index] = f"{key}: {rng.choice(odd_values)}"
        path.write_text("\n".join(lines) + "\n")
    elif rng.random() < 0.1:
        path.write_text(bomb + text.replace("num_layers: 2", "num_layers: *i"))
    else:
        path.write_text(yaml.safe_dump(change_tree(rng, yaml.safe_load(text))))


def change_safetensors_header(rng: Random, path: Path) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    new = changed_json(rng, data[8:end].decode().strip()).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[end:])


def change_gguf(rng: Random, path: Path) -> None:
    """Change a key's type or value, or a tensor's number of axes, sizes, type or offset."""
    data = bytearray(path.read_bytes())
    names = [b"blk.", b"token_embd", b"output"]
    if rng.random() < 0.5:
        names = [b"general.", b"llama.", b"tokenizer.", b"jllama."]
    starts = [at for name in names for at in range(len(data)) if data.startswith(name, at)]
    start = rng.choice(starts)
    end = start + struct.unpack_from("<Q", data, start - 8)[0]
    name = data[start:end]
    if name[:4] in (b"blk.", b"toke", b"outp") and b"." in name and name.endswith(b"weight"):
        axes = struct.unpack_from("<I", data, end)[0]
        fields = [(end, 4)] + [(end + 4 + 8 * axis, 8) for axis in range(axes)]
        fields += [(end + 4 + 8 * axes, 4)] * 3 + [(end + 8 + 8 * axes, 8)]
    else:
        fields = [(start - 8, 8), (end, 4), (end + 4, 4), (end + 4, 8), (end + 8, 8)]
    place, width = rng.choice(fields)
    old = int.from_bytes(data[place : place + width], "little")
    new = rng.choice([*NUMBERS, *range(35), old + 1, old - 1, old * 2, old // 2, old + 32])
    data[place : place + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    path.write_bytes(data)


def change_zip(rng: Random, path: Path) -> None:
    """Change an entry, mostly the pickle, of a file of torch.save, with a right checksum."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    index = next(i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    if rng.random() >= 0.8:
        index = rng.randrange(len(entries))
    name, content = entries[index]
    place = rng.randrange(max(1, len(content)))
    kind = rng.randrange(5)
    if kind == 0:
        content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    elif kind == 1:
        # Operations: a memo of 2**32, a long of 2**31 bytes, a global, a mark, a number.
        operations = [
            b"r\xff\xff\xff\xff",
            b"\x8b\xff\xff\xff\x7f",
            b"cos\nsystem\n",
            b"(",
            b"R",
            b"0",
            b"2",
            b"J\xff\xff\xff\x7f",
            b"}",
        ]
        content = content[:place] + rng.choice(operations) + content[place:]
    elif kind == 2:
        content = content[:place]
    elif kind == 3:
        content = content[:place] + rng.randbytes(8) + content[place + 8 :]
    else:
        name = rng.choice([name + "x", "../" + name, "/" + name, entries[0][0], ""])
    entries[index] = (name, content)
    new = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(new, "w", method) as archive:
        for entry, data in entries:
            archive.writestr(zipfile.ZipInfo(entry or "x"), data)
    path.write_bytes(new.getvalue())


ANY_FILE = (flip_bits, set_number, cut, append, move_bytes, replace_by_special)
STRUCTURED: dict[str, Callable[[Random, Path], None]] = {
    ".json": change_json,
    ".yaml": change_yaml,
    ".safetensors": change_safetensors_header,
    ".gguf": change_gguf,
    ".pth": change_zip,
}


def mutate(rng: Random, model: Path) -> str:
    """Mutate a file of a model, which is a file or a folder; return what was done."""
    files = [model]
    if model.is_dir():
        files = sorted(path for path in model.rglob("*") if path.is_file())
    # A run's many files of arrays, and files that say next to nothing, are drawn less often.
    weights = [0.3 if path.parent.name == "d" or path.suffix == ".txt" else 1.0 for path in files]
    path = rng.choices(files, weights)[0]
    structured = STRUCTURED.get(path.suffix)
    if not path.suffix and path.parent.name != "d" and path.read_bytes()[:1] == b"{":
        structured = change_json
    is_structured = structured is not None and rng.random() < 0.6
    mutation = structured if is_structured else rng.choice(ANY_FILE)
    if path.stat().st_size == 0:
        mutation = append
    mutation(rng, path)
    return f"{mutation.__name__} {path.name}"


def work(connection: Connection) -> None:
    """Load each path that the connection sends, in a worker process, and send back the outcome."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_LIMIT_BYTES, ADDRESS_LIMIT_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides notes, and the message of a panic in Rust
    import jllama.models.oracle  # noqa: F401, so that the memory of imports is not counted

    connection.send("ready")
    while True:
        path, base = connection.recv()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, message = load(path, base)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if used * 1024 > MEMORY_LIMIT_BYTES:
            outcome = "memory"
        connection.send((outcome, message[:300].encode("utf-8", "replace").decode()))


def load(path: str, base: str | None) -> tuple[str, str]:
    """Load a model, or an adapter with its base, and use it; return the outcome and a message."""
    import numpy as np

    import jllama
    from jllama.core import JllamaError
    from jllama.models import oracle

    try:
        model = jllama.load(base or path, layout="training", adapter=path if base else None)
        if model.tokenizer:
            text = "The quick brown fox, 1 é\n\U0001f999" + "a" * 40 + "b"
            model.tokenizer.decode(model.tokenizer.encode(text))
            model.tokenizer.encode_with_special_tokens(text)
        with np.errstate(all="ignore"):
            oracle.forward(model.params, np.zeros((1, 3), np.int32), model.config)
        return "loaded", ""
    except JllamaError as error:
        message = str(error)
        is_printable = len(message) <= 10_000 and message.isprintable()
        return "refused" if is_printable else "unprintable", message
    except MemoryError as error:
        return "memory", repr(error)
    except BaseException as error:  # a panic in Rust is no Exception
        frames = traceback.extract_tb(error.__traceback__)
        places = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in frames
            if "jllama/" in frame.filename
        ]
        place = places[-1] if places else ""
        return "other exception", f"{type(error).__name__} at {place}: {str(error)[:200]}"


class Worker:
    """A process that loads models; a new one starts after a model has ended it, or it hung."""

    def __init__(self) -> None:
        self._process: Any = None

    def load(self, path: Path, base: Path | None) -> tuple[str, str]:
        """Load a path, an adapter's with its base; return one of ``OUTCOMES`` and a message."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, remote = context.Pipe()
            self._process = context.Process(target=work, args=(remote,), daemon=True)
            self._process.start()
            remote.close()
            self._connection.recv()
        self._connection.send((str(path), base and str(base)))
        try:
            if self._connection.poll(TIME_LIMIT_S):
                return self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._end()
            return "crash", f"exit code {code}"
        self._end()
        return "hang", f"no end in {TIME_LIMIT_S} s"

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process = None


def main() -> None:
    """Mutate and load, and print a table of outcomes by format."""
    from common import table  # here, as workers need none of its imports

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=400, help="of each format")
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutation")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the mutated models that were not handled well"
    )
    parser.add_argument(
        "--output", type=Path, help=f"write the table here, such as {RESULT.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # this tree's jllama, in the workers too
    worker = Worker()
    rows = {}
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "models"
        place = Path(scratch) / "mutated"
        write_models(folder)
        for format in options.formats:
            models = sorted((folder / format).iterdir())
            base = folder / "hf" / "pieces" if format in ADAPTERS else None
            counts = collections.Counter(dict.fromkeys(OUTCOMES, 0))
            slowest_s = 0.0
            for number in range(options.first, options.first + options.mutations):
                # A copy of a random model, mutated.
                rng = Random(f"{format} {number}")
                source = rng.choice(models)
                copy = place / f"model{'.gguf' if format.startswith('gguf') else ''}"
                place.mkdir()
                if source.is_dir():
                    shutil.copytree(source, copy)
                else:
                    shutil.copy(source, copy)
                mutation = mutate(rng, copy)
                # How it loads.
                start_s = time.perf_counter()
                outcome, message = worker.load(copy, base)
                slowest_s = max(slowest_s, time.perf_counter() - start_s)
                counts[outcome] += 1
                if outcome not in OUTCOMES[:2]:
                    case = f"{format} {number} ({source.name}, {mutation})"
                    problems.append(f"{case}: {outcome}, {message}")
                    print(problems[-1], flush=True)
                    if options.keep:
                        keep(place, options.keep / f"{format}_{number}")
                shutil.rmtree(place)
            rows[format] = dict(counts) | {"slowest_s": round(slowest_s, 1)}
            print(format, rows[format], flush=True)
    columns = [*OUTCOMES, "slowest_s"]
    print()
    print(
        table(["format", *columns], ([name, *map(row.get, columns)] for name, row in rows.items()))
    )
    if options.output:
        result = {"formats": rows, "problems": problems}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def keep(mutated: Path, target: Path) -> None:
    """Copy a mutated model, without its pipes and broken links."""
    shutil.copytree(mutated, target, symlinks=True, dirs_exist_ok=True, ignore=_special_files)


def _special_files(folder: str, names: list[str]) -> list[str]:
    paths = {name: Path(folder, name) for name in names}
    return [name for name, path in paths.items() if not (path.is_file() or path.is_dir())]


if __name__ == "__main__":
    main()
