"""Damaged and hostile checkpoints: every one must load harmlessly or be refused with a ``JllamaError``, at once.

Small models are written in each format, a file of a copy is mutated (seeded, so a number names a mutation for ever),
and a worker process with limits of time and memory loads it, tokenizes a text and runs the oracle on a few tokens.

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
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "fuzz_files.json"
ADAPTERS = ("peft", "gguf-lora")
"""Formats of adapters, of which the base is a whole model."""

FORMATS = ("gguf", "hf", "meta", "llama2c", "orbax", *ADAPTERS)
OUTCOMES = ("refused", "loaded", "other exception", "hang", "crash", "memory", "unprintable")
"""The first two are as they should be."""

TIME_LIMIT_S = 30
MEMORY_LIMIT_BYTES = (
    1 << 30
)  # more than this on top of what the worker had is too much for models of 200 kB
ADDRESS_LIMIT_BYTES = 24 << 30  # jax and tensorstore reserve several GiB that they never touch

Random = random.Random
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e-300, 1e308, float("nan"), float("inf")),
    *(
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
    ),
    *("\x1b[2J\x1b]0;title\x07", "n" * 100_000),
    *([], {}, [[]], {"": {}}, [1, 2], ["x"] * 1000, {"content": []}, "0x10", "1e400", "(a+)+$"),
)
"""What a value in a JSON or YAML file is replaced by."""

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


def write_models(folder: Path) -> None:
    """One model in each format, and with each kind of tokenizer that the format can hold; and adapters of one."""
    from jllama.checkpoints.registry import save
    from jllama.config import LlamaConfig
    from jllama.language_model import LanguageModel
    from jllama.rope_scaling import Llama3Scaling
    from jllama.tokenizers import HuggingFaceTokenizer, train_sentencepiece
    from jllama.tokenizers.base import BYTE_CHARS, TokenType, Vocabulary, merges_of_ranks
    from jllama.verify.checks import random_params

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
        save(
            LanguageModel(plain, random_params(plain, 0), pieces, None, (2,)),
            folder / format / "pieces",
            format,
        )
        if format != "llama2c":  # which holds neither scaling nor another tokenizer
            template = "{% for message in messages %}{{ message.content }}{% endfor %}"
            model = LanguageModel(scaled, random_params(scaled, 1), byte_level, template, (2, 5))
            save(model, folder / format / "byte_level", format, "bfloat16")
    write_adapters(folder, plain)


def write_adapters(folder: Path, config: Any) -> None:
    """An adapter of the model with pieces, in each format: of rank 4, and in PEFT's with DoRA's magnitudes."""
    import numpy as np

    from jllama.checkpoints.adapters import Adapter
    from jllama.checkpoints.registry import ADAPTER_FORMATS
    from jllama.config import LoraConfig
    from jllama.parameters import tensor_specs

    rng = np.random.default_rng(0)
    for format, is_dora in (("peft", True), ("gguf-lora", False)):
        lora, tensors = LoraConfig(rank=4, targets=("wq", "wv", "w_down"), dora=is_dora), {}
        for spec in tensor_specs(config):
            if spec.path.removeprefix("layers/") in lora.targets:
                outputs, inputs = spec.shape
                sizes = {"a": (4, inputs), "b": (outputs, 4)} | (
                    {"magnitude": (outputs,)} if is_dora else {}
                )
                for name, size in sizes.items():
                    tensors[f"{spec.key}/{name}"] = rng.standard_normal(size).astype(np.float32)
        target = folder / format / "adapter"
        target.parent.mkdir()
        if not ADAPTER_FORMATS[format].is_file:
            target.mkdir()
        ADAPTER_FORMATS[format].write(
            Adapter(lora, tensors, config, target), target, None, lambda _: None
        )


# Mutations: each takes the chance to draw from and a file, and changes it.


def flip_bits(rng: Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    end = rng.choice([len(data), min(len(data), 4096), min(len(data), 64)])
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def set_number(rng: Random, path: Path) -> None:
    """A number of 4 or 8 bytes, aligned or not, near the beginning or anywhere."""
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
    first, second, count = (
        rng.randrange(len(data)),
        rng.randrange(len(data)),
        rng.choice([1, 4, 8, 100]),
    )
    match rng.randrange(3):
        case 0:
            del data[first : first + count]
        case 1:
            data[first:first] = rng.randbytes(count)
        case _:
            data[first : first + count] = data[second : second + count]
    path.write_bytes(data)


def replace_by_special(rng: Random, path: Path) -> None:
    """A pipe, a folder, a link that leads nowhere, in a circle or to a device; or nothing at all."""
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
    """JSON or YAML content with one value changed, lost, renamed or copied elsewhere."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        ):
            places.append((node, key))
            walk(value)

    walk(tree)
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


def broken_json(rng: Random, text: str) -> str:
    """Text that no writer of JSON would write: nested for ever, a key twice, a number without end."""
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
    return (
        text[:place] + new + text[place:].lstrip("0123456789.-truefalsn ")
        if rng.random() < 0.7
        else new
    )


def change_json(rng: Random, path: Path) -> None:
    text = path.read_text()
    path.write_text(
        broken_json(rng, text)
        if rng.random() < 0.2
        else json.dumps(change_tree(rng, json.loads(text)))
    )


def change_yaml(rng: Random, path: Path) -> None:
    text = path.read_text()
    odd = [
        "a: *x",
        "0001-99-99",
        "!!python/object/apply:os.getcwd []",
        "9" * 6000,
        "0x" + "f" * 9000,
        "[" * 3000,
        "&a [*a]",
    ]
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi")
    )
    if rng.random() < 0.3:
        key = rng.choice([line.split(":")[0] for line in text.splitlines() if ":" in line])
        lines = [
            f"{key}: {rng.choice(odd)}" if line.startswith(f"{key}:") else line
            for line in text.splitlines()
        ]
        path.write_text("\n".join(lines) + "\n")
    elif rng.random() < 0.1:
        path.write_text(bomb + text.replace("num_layers: 2", "num_layers: *i"))
    else:
        path.write_text(yaml.safe_dump(change_tree(rng, yaml.safe_load(text))))


def change_safetensors_header(rng: Random, path: Path) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = data[8:end].decode()
    new = (
        broken_json(rng, text.strip())
        if rng.random() < 0.2
        else json.dumps(change_tree(rng, json.loads(text)))
    ).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[end:])


def change_gguf(rng: Random, path: Path) -> None:
    """A key's type or value, or a tensor's number of axes, sizes, type or offset."""
    data = bytearray(path.read_bytes())
    names = (
        [b"general.", b"llama.", b"tokenizer.", b"jllama."]
        if rng.random() < 0.5
        else [b"blk.", b"token_embd", b"output"]
    )
    places = [at for name in names for at in range(len(data)) if data.startswith(name, at)]
    at = rng.choice(places)
    end = at + struct.unpack_from("<Q", data, at - 8)[0]
    if (
        data[at : at + 4] in (b"blk.", b"toke", b"outp")
        and b"." in data[at:end]
        and data[at:end].endswith(b"weight")
    ):
        axes = struct.unpack_from("<I", data, end)[0]
        fields = [(end, 4)] + [(end + 4 + 8 * axis, 8) for axis in range(axes)]
        fields += [(end + 4 + 8 * axes, 4)] * 3 + [(end + 8 + 8 * axes, 8)]
    else:
        fields = [(at - 8, 8), (end, 4), (end + 4, 4), (end + 4, 8), (end + 8, 8)]
    place, width = rng.choice(fields)
    old = int.from_bytes(data[place : place + width], "little")
    new = rng.choice([*NUMBERS, *range(35), old + 1, old - 1, old * 2, old // 2, old + 32])
    data[place : place + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    path.write_bytes(data)


def change_zip(rng: Random, path: Path) -> None:
    """An entry of a file of torch.save, its checksum made right again: mostly the pickle."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    index = next(i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    index = index if rng.random() < 0.8 else rng.randrange(len(entries))
    name, content = entries[index]
    place, kind = rng.randrange(max(1, len(content))), rng.randrange(5)
    if kind == 0:
        content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
    elif (
        kind == 1
    ):  # operations: a memo of 2**32, a long of 2**31 bytes, a global, a mark, a number
        ops = [
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
        content = content[:place] + rng.choice(ops) + content[place:]
    elif kind == 2:
        content = content[:place]
    elif kind == 3:
        content = content[:place] + rng.randbytes(8) + content[place + 8 :]
    else:
        name = rng.choice([name + "x", "../" + name, "/" + name, entries[0][0], ""])
    entries[index] = (name, content)
    new = io.BytesIO()
    with zipfile.ZipFile(
        new, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    ) as archive:
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
    """Mutate a model, given as a file or folder; what was done."""
    files = (
        [model] if model.is_file() else sorted(path for path in model.rglob("*") if path.is_file())
    )
    # Of a run's many files of arrays, and of files that say next to nothing, few are drawn.
    weights = [0.3 if path.parent.name == "d" or path.suffix == ".txt" else 1.0 for path in files]
    path = rng.choices(files, weights)[0]
    structured = STRUCTURED.get(path.suffix)
    if not path.suffix and path.parent.name != "d" and path.read_bytes()[:1] == b"{":
        structured = change_json
    chosen = structured if structured and rng.random() < 0.6 else rng.choice(ANY_FILE)
    if path.stat().st_size == 0:
        chosen = append
    chosen(rng, path)
    return f"{chosen.__name__} {path.name}"


def work(connection: Connection) -> None:
    """A worker process: loads what it is told to, and tells how that went."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_LIMIT_BYTES, ADDRESS_LIMIT_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # notes, and the words of a library that panics
    import numpy as np

    import jllama
    from jllama import oracle
    from jllama.errors import JllamaError

    connection.send("ready")
    while True:
        path, base = connection.recv()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            model = jllama.load(base or path, layout="training", adapter=path if base else None)
            if model.tokenizer:
                text = "The quick brown fox, 1 é\n\U0001f999" + "a" * 40 + "b"
                model.tokenizer.decode(model.tokenizer.encode(text))
                model.tokenizer.encode_with_special_tokens(text)
            tokens = np.zeros((1, 3), np.int32)
            with np.errstate(all="ignore"):
                oracle.forward(model.params, tokens, model.config)
            outcome, said = "loaded", ""
        except JllamaError as error:
            outcome, said = "refused", str(error)
            if len(said) > 10_000 or not said.isprintable():
                outcome = "unprintable"
        except MemoryError as error:
            outcome, said = "memory", repr(error)
        except BaseException as error:  # a panic of Rust's is no Exception
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if "jllama/" in f.filename
            ]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            outcome, said = (
                "other exception",
                f"{type(error).__name__} at {place}: {str(error)[:200]}",
            )
        if (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        ) * 1024 > MEMORY_LIMIT_BYTES:
            outcome = "memory"
        connection.send((outcome, said[:300].encode("utf-8", "replace").decode()))


class Worker:
    """A process that is started again whenever a model has ended it, or it had to be."""

    def __init__(self) -> None:
        self._process: Any = None

    def load(self, path: Path, base: Path | None) -> tuple[str, str]:
        """How loading a path went, an adapter's with its base: one of ``OUTCOMES``, and what was said."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._connection.recv()
        self._connection.send((str(path), base and str(base)))
        try:
            if self._connection.poll(TIME_LIMIT_S):
                return self._connection.recv()
            outcome = "hang", f"no end in {TIME_LIMIT_S} s"
        except EOFError:
            self._process.join()
            return self._ended("crash", f"exit code {self._process.exitcode}")
        return self._ended(*outcome)

    def _ended(self, outcome: str, said: str) -> tuple[str, str]:
        self._process.kill()
        self._process.join()
        self._process = None
        return outcome, said


def main() -> None:
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
    worker, rows, problems = Worker(), {}, []
    with tempfile.TemporaryDirectory() as scratch:
        write_models(Path(scratch) / "models")
        for format in options.formats:
            models = sorted((Path(scratch) / "models" / format).iterdir())
            counts, slowest_s = collections.Counter(dict.fromkeys(OUTCOMES, 0)), 0.0
            for number in range(options.first, options.first + options.mutations):
                rng = Random(f"{format} {number}")
                source, place = rng.choice(models), Path(scratch) / "mutated"
                copy = place / f"model{'.gguf' if format.startswith('gguf') else ''}"
                base = Path(scratch) / "models" / "hf" / "pieces" if format in ADAPTERS else None
                place.mkdir()
                shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
                done = mutate(rng, copy)
                began_s = time.perf_counter()
                outcome, said = worker.load(copy, base)
                slowest_s = max(slowest_s, time.perf_counter() - began_s)
                counts[outcome] += 1
                if outcome not in OUTCOMES[:2]:
                    problems.append(f"{format} {number} ({source.name}, {done}): {outcome}, {said}")
                    print(problems[-1], flush=True)
                    if options.keep:
                        shutil.copytree(
                            place,
                            options.keep / f"{format}_{number}",
                            symlinks=True,
                            dirs_exist_ok=True,
                            ignore=_pipes,
                        )
                shutil.rmtree(place)
            rows[format] = dict(counts) | {"slowest_s": round(slowest_s, 1)}
            print(format, rows[format], flush=True)
    columns = [*OUTCOMES, "slowest_s"]
    print("\n| format | " + " | ".join(columns) + " |\n|---" * 1 + "|---" * len(columns) + "|")
    for format, row in rows.items():
        print(f"| {format} | " + " | ".join(str(row[column]) for column in columns) + " |")
    if options.output:
        options.output.write_text(
            json.dumps({"formats": rows, "problems": problems}, indent=2) + "\n"
        )


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [
        name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())
    ]


if __name__ == "__main__":
    main()
