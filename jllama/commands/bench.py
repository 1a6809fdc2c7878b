"""``python -m jllama bench``: how fast this machine trains, reads, writes and starts, and how fast it could."""

import contextlib
import dataclasses
import itertools
import json
import operator
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Any, Literal, cast

from rich import box
from rich.console import Console
from rich.table import Column, Table

import jllama
from jllama.commands.cli import parse
from jllama.commands.model import ModelOptions
from jllama.config import LlamaConfig
from jllama.errors import JllamaError, UsageError, check_fields, unknown_name
from jllama.files import Json, check_writable

PEERS = {
    "transformers": "transformers torch",
    "torch-compile": "transformers torch",
    "llama.cpp": "llama-cpp-python",
}
"""Who can be measured beside jllama, and what is to be installed for it."""
_SMALL: Any = {
    "num_layers": 8,
    "embed_dim": 512,
    "num_heads": 8,
    "num_kv_heads": 4,
    "mlp_dim": 1376,
}
_COLUMNS = ("ms (least to most)", "tokens/s", "share of limit", "times as fast")
_COMMON = ("against", "quantize", "preset", "batch_size", "repeats", "threads", "json", "html")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Measure how fast this machine trains, reads, writes and starts, beside what it could and beside others.

    Examples:
        train --against transformers,torch-compile --html train.html
        train quickstart --against transformers
        decode model.gguf --quantize int8 --against transformers
        prefill --preset llama3.2-1b

    Args:
        what: a step of train; prefill of a prompt; decode, one text, a batch, and eight prompts of different lengths;
            startup, from a new process to its first character; load, once all is imported, to a first token.
        checkpoint: a model in any format; of train a configuration, such as quickstart, or nothing.
        preset: a released Llama's name, as in jllama.PRESETS, whose shapes to take with random weights.
        model: the architecture that train has without a configuration or a preset.
        seq_len: how many tokens a row of train has.
        prompt_tokens: how long the prompt is that prefill reads.
        new_tokens: how many tokens to generate.
        batch_size: how many rows train has, and how many texts the batch of decode.
        repeats: how often to take each figure, after one that does not count; the median counts.
        threads: how many cores to take; 0 for all that this process may use.
        against: transformers, torch-compile (train) or llama.cpp, which take turns with jllama, on the GPU if all have
            it, else on the CPU.
        llama_python: the Python that has llama-cpp-python.
        json: print the figures as JSON.
        html: a page to write, with bars.
    """

    what: Literal["train", "prefill", "decode", "startup", "load"]
    checkpoint: str = ""
    preset: str = ""
    model: LlamaConfig = dataclasses.field(default_factory=lambda: LlamaConfig(4096, **_SMALL))
    seq_len: int = 256
    prompt_tokens: int = 512
    new_tokens: int = 128
    batch_size: int = 8
    repeats: int = 5
    threads: int = 0
    against: list[str] = dataclasses.field(default_factory=list)
    llama_python: str = sys.executable
    json: bool = False
    html: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "against", [name for names in self.against for name in names.split(",")]
        )
        what, trains = self.what, self.what == "train"
        if self.checkpoint and self.preset:
            raise UsageError(
                f"give a {'configuration' if trains else 'checkpoint'} or a preset, not both"
            )
        if not (trains or self.checkpoint or (self.preset and what in ("prefill", "decode"))):
            raise UsageError(
                f"{what} needs a checkpoint, or of prefill and decode the preset whose shapes to take"
            )
        unused = (
            "adapter quantize dtype" if trains else "" if self.checkpoint else "adapter against"
        )
        said = f"left out {'for train' if trains else 'without a checkpoint to load'}"
        check_fields(self, "", unused, lambda given: not given, said)
        check_fields(
            self,
            "",
            "prompt_tokens batch_size seq_len repeats",
            lambda value: value >= 1,
            "at least 1",
        )
        check_fields(self, "", "new_tokens", lambda value: value >= 2, "at least 2")
        check_fields(
            self,
            "",
            "threads",
            range(len(_cores()) + 1).__contains__,
            f"0, or up to {len(_cores())}",
        )
        for name in self.against:
            if name not in PEERS:
                raise unknown_name("peer", name, PEERS)
            if name == ("llama.cpp" if trains else "torch-compile"):
                said = (
                    "does not train"
                    if trains
                    else "is for train: it would compile anew for each length of a text"
                )
                raise UsageError(f"{name} {said}; leave it out")


def train_config(options: BenchOptions) -> "jllama.TrainConfig":
    """What is trained: the sizes of a configuration, a preset or the options, at a constant learning rate."""
    from jllama.commands.train import read_options
    from jllama.tokenizers import BytesTokenizer

    if options.checkpoint:
        config = read_options([options.checkpoint], "bench")
    else:
        model = jllama.preset(options.preset) if options.preset else options.model
        model = dataclasses.replace(model, max_seq_len=max(model.max_seq_len, options.seq_len))
        config = jllama.TrainConfig(
            model, training=jllama.LoopConfig(options.batch_size, options.seq_len)
        )
    check_fields(
        config,
        "",
        "init_from",
        lambda path: not path,
        "left out: the benchmark trains from scratch",
    )
    tokens = (
        config.data.vocab_size if config.data.tokenizer == "bpe" else BytesTokenizer().vocab_size
    )
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or tokens)
    seq_len = config.training.seq_len or model.max_seq_len
    training = dataclasses.replace(config.training, seq_len=seq_len, steps=1000, epochs=0.0)
    steady = jllama.OptimizerConfig(warmup_fraction=0.0, final_fraction=1.0)
    return dataclasses.replace(config, model=model, optimizer=steady, training=training)


def parse_options(argv: list[str], prog: str = "bench") -> BenchOptions:
    """The options, also as jllama's own contestant reads them."""
    return parse(BenchOptions, argv, prog, ("what", "checkpoint"), _COMMON)


def main(argv: list[str], prog: str) -> int:
    """Measure, print, and write the page."""
    options = parse_options(argv, prog)
    if options.html:
        check_writable(Path(options.html))
    result = {"command": shlex.join([*prog.split(), *argv]), **measure(options, argv)}
    shown = {
        f"{title}: {name}": _cells(row)
        for title, rows in result["work"].items()
        for name, row in rows.items()
    }
    facts = {name: value for name, value in result.items() if value and isinstance(value, str)}
    if options.html:
        from jllama import report  # not at the top: matplotlib takes a while

        parts = {"jllama bench": report.table([], [facts])}
        for title, rows in result["work"].items():
            parts[title] = report.bars(
                {name: row["seconds"] for name, row in rows.items()}, "seconds (less is faster)"
            )
        columns = [
            dict(zip(shown, cells, strict=True)) for cells in zip(*shown.values(), strict=True)
        ]
        report.write_page(
            Path(options.html),
            "jllama bench",
            {**parts, "Figures": report.table(_COLUMNS, columns)},
        )
    if options.json:
        print(json.dumps(result))
        return 0
    table = Table("", *(Column(name, justify="right") for name in _COLUMNS), box=box.MARKDOWN)
    for title, cells in shown.items():
        table.add_row(title, *cells)
    print(*facts.values(), sep="\n")
    Console(width=max(Console().width, 160)).print(table)
    return 0


def _cells(row: Mapping[str, Any]) -> list[str]:
    middle, least, most = (
        f"{1e3 * each(row['seconds']):,.1f}" for each in (statistics.median, min, max)
    )
    forms = {"tokens_per_s": "{:,.1f}", "share_of_limit": "{:.0%}", "ratio": "{:.2f}"}
    others = (form.format(row[name]) if row[name] else "-" for name, form in forms.items())
    return [f"{middle} ({least} to {most})", *others]


def measure(options: BenchOptions, argv: list[str]) -> Json:
    """The machine, and as ``work`` the figures by title and contestant: in each repeat the seconds of a step, or of all
    where there are none; tokens a second; the share of what the machine's rates allow; as ``ratio`` how many times as
    fast as this contestant jllama was.
    """
    names, cores, asks, facts, rates = (
        ["jllama", *options.against],
        _cores()[: options.threads or None],
        {},
        {},
        [],
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # XLA goes by it, and what starts from here has it, too
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        work = {"what": options.what, "argv": argv, "threads": len(cores), "folder": folder}
        with _contestant("prepare", work, options) as ask:
            work |= ask()
        for name in names if options.what in ("train", "prefill", "decode") else []:
            asks[name] = running.enter_context(_contestant(name, work, options))
            facts[name] = asks[name]()  # ready: the next one may begin
        turns, figures = {title: {name: [] for name in names} for title in work["cases"]}, {}
        for repeat in range(1 + options.repeats):
            print(f"round {repeat} of {options.repeats}", file=sys.stderr)
            rates += [asks["jllama"]({})] if asks else []
            for (title, case), name in itertools.product(work["cases"].items(), names):
                turns[title][name].append(
                    asks[name](case) if asks else _begin(name, work, options, case)
                )
    for (title, case), name in itertools.product(work["cases"].items(), names):
        steps, kind = max(case["steps"], 1), "bytes_per_s" if case["steps"] else "flops_per_s"
        taken, own = (
            [turn["seconds"] / steps for turn in turns[title][each][1:]]
            for each in (name, "jllama")
        )
        limits_s = [
            facts["jllama"]["needed"][title][name] / rate[kind] for rate in rates[1:]
        ]  # round 0 compiles
        figures.setdefault(title, {})[name] = {
            "seconds": taken,
            "median_s": (middle := statistics.median(taken)),
            "tokens_per_s": case["tokens"] / steps / middle,
            "share_of_limit": statistics.median(map(operator.truediv, limits_s, taken))
            if limits_s
            else 0.0,
            "ratio": statistics.median(map(operator.truediv, taken, own)),
            "loss": turns[title][name][-1].get("loss"),
            "peak_bytes": turns[title][name][-1].get("peak_bytes"),
        }
    medians = {
        name: statistics.median(rate[name] for rate in rates[1:])
        for name in (rates[0] if rates else ())
    }
    said = ", ".join(
        f"{rate / 1e9:,.1f}e9 {name.replace('_per_', '/')}" for name, rate in medians.items()
    )
    told = {**work["facts"], "rates": said}
    for rows in figures.values():
        told |= accelerator_facts(rows, facts.get("jllama", {}))
    return {**told, "machine_rates": medians, "repeats": options.repeats, "work": figures}


def accelerator_facts(rows: Mapping[str, Json], facts: Json) -> dict[str, str]:
    """What is said of training on a GPU or TPU: shares of its published rate, and memory beside the plan.

    ``rows`` get their ``mfu``, with attention counted whole, and ``mfu_causal``, with half of it. Empty on a CPU.
    """
    told = {}
    if published := facts.get("published_flops_per_s"):
        for row in rows.values():
            row["mfu"] = facts["flops"] / row["median_s"] / published
            row["mfu_causal"] = facts["causal_flops"] / row["median_s"] / published
        shares = [
            f"{name} {row['mfu']:.1%} ({row['mfu_causal']:.1%} causal)"
            for name, row in rows.items()
        ]
        told["mfu"] = f"MFU: {', '.join(shares)}"
    held = {name: row["peak_bytes"] for name, row in rows.items() if row.get("peak_bytes")}
    if held:
        peaks = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in held.items())
        told["memory"] = (
            f"peak memory: {peaks}; planned for jllama {facts['planned_bytes'] / 2**30:.2f} GiB"
        )
    return told


def _begin(name: str, work: Json, options: BenchOptions, case: Json) -> dict[str, float]:
    """A turn of a process of its own: from its start to a first character, or of loading once it has imported all."""
    start_s = time.perf_counter()
    with _contestant(name, work, options) as ask:
        ask()
        return ask(case) if options.what == "load" else {"seconds": time.perf_counter() - start_s}


@contextlib.contextmanager
def _contestant(name: str, work: Json, options: BenchOptions) -> Iterator[Callable[..., Any]]:
    """A process, and how to ask it: to take a turn, or whether it is ready. What goes wrong there is raised here."""
    streams_text = options.what == "startup" and name != "prepare"
    package, environment = (
        Path(__file__).parents[1],
        {**os.environ, "OMP_NUM_THREADS": str(work["threads"])},
    )
    homes = (
        package / "contestants",
        package.parent / "benchmarks" / "contestants",
    )  # the wheel's, the repository's
    python, script = options.llama_python, next(filter(Path.exists, homes)) / "contestant.py"
    if name != "llama.cpp":
        paths = filter(None, [str(package.parent), os.environ.get("PYTHONPATH")])
        python, environment["PYTHONPATH"] = sys.executable, os.pathsep.join(paths)
    if work.get("device") == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"  # where the peers are
    if options.against:
        environment.setdefault(
            "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
        )  # of a GPU, which peers need, too
    streams: Any = {"stdin": PIPE, "stdout": PIPE, "bufsize": 0, "env": environment}
    command = [python, str(script), json.dumps({**work, "name": name})]
    with tempfile.TemporaryFile() as log, Popen(command, stderr=log, **streams) as process:
        stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)

        def ask(turn: Any = None) -> Any:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and answers no more
                stdin.write(b"" if turn is None else json.dumps(turn).encode() + b"\n")
            if not (answer := stdout.read(1) if streams_text else stdout.readline()):
                log.seek(0)
                raise _failure(name, process.wait(), log.read().decode(errors="replace").strip())
            return None if streams_text else json.loads(answer)

        try:
            yield ask
            stdin.close()  # so it ends
            stdout.read()
        finally:
            process.kill()


def _failure(name: str, code: int, log: str) -> JllamaError:
    """The error of a contestant that has ended, by the last line that it wrote."""
    last = (log.splitlines() or [f"it ended with code {code}"])[-1]
    kind, _, said = last.partition(": ")
    if kind == "ModuleNotFoundError":
        where = ", or name the Python that has it with --llama_python" * (name == "llama.cpp")
        return JllamaError(
            f"{name} is not installed here ({said}): pip install {PEERS.get(name, name)}{where}"
        )
    if kind == "error" or kind.startswith("jllama.errors."):
        return UsageError(said) if code == 2 or kind.endswith("UsageError") else JllamaError(said)
    return JllamaError(f"{name} failed: {last}")


def _cores() -> list[int]:
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else [*range(os.cpu_count() or 1)]
    )
