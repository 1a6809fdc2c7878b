"""``jllama bench``: measure training, generation and start-up, beside limits and peers."""

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
from jllama.errors import check_fields, unknown_name
from jllama.files import check_writable

Json = dict[str, Any]

PEERS = {
    "transformers": "transformers torch",
    "torch-compile": "transformers torch",
    "llama.cpp": "llama-cpp-python",
}
"""The other implementations that can be measured, and the packages to install for them."""
_COLUMNS = ("ms (least to most)", "tokens/s", "share of limit", "times as fast")
_COMMON = "against quantize preset batch_size repeats threads json html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Measure the speed of training, generation and start-up, beside limits and other libraries.

    Examples:
        train --against transformers,torch-compile --html train.html
        train quickstart --against transformers
        decode model.gguf --quantize int8 --against transformers
        prefill --preset llama3.2-1b

    Args:
        what: train measures a training step; prefill the processing of a prompt; decode the
            generation of one text, of a batch, and after eight prompts of different lengths;
            startup the time from a new process to its first character; load the time to a first
            token after all imports.
        checkpoint: a model in any format; for train a configuration, such as quickstart, or
            nothing.
        preset: a released Llama, as in jllama.PRESETS, whose shapes get random weights.
        model: the architecture for train without a configuration or a preset.
        seq_len: the tokens of a row for train.
        prompt_tokens: the length of the prompt for prefill.
        new_tokens: the number of tokens to generate.
        batch_size: the rows of a batch for train, and the texts of a batch for decode.
        repeats: the number of measurements, of which the median counts; one more before them
            does not count.
        threads: the number of cores to use; 0 takes all that this process may use.
        against: transformers, torch-compile (train) or llama.cpp, separated by commas. They take
            turns with jllama, on a GPU if all can use it, otherwise on the CPU.
        llama_python: the Python that has llama-cpp-python.
        json: print the figures as JSON.
        html: an HTML file, to which a page with bar charts is written.
    """

    what: Literal["train", "prefill", "decode", "startup", "load"]
    checkpoint: str = ""
    preset: str = ""
    model: jllama.LlamaConfig = dataclasses.field(
        default_factory=lambda: jllama.LlamaConfig(4096, 8, 512, 8, 4, mlp_dim=1376)
    )
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
        peers = [name for names in self.against for name in names.split(",")]
        object.__setattr__(self, "against", peers)
        trains = self.what == "train"
        if self.checkpoint and self.preset:
            model = "configuration" if trains else "checkpoint"
            raise jllama.UsageError(f"give a {model} or a preset, not both")
        has_shapes = self.preset and self.what in ("prefill", "decode")
        if not (trains or self.checkpoint or has_shapes):
            raise jllama.UsageError(
                f"{self.what} needs a checkpoint; prefill and decode may take a preset instead"
            )
        unused = ""
        expected = "left out for train"
        if trains:
            unused = "adapter quantize dtype"
        elif not self.checkpoint:
            unused = "adapter against"
            expected = "left out without a checkpoint to load"
        check_fields(self, "", unused, lambda value: not value, expected)
        counts = "prompt_tokens batch_size seq_len repeats"
        check_fields(self, "", counts, lambda value: value >= 1, "at least 1")
        check_fields(self, "", "new_tokens", lambda value: value >= 2, "at least 2")
        cores = len(_cores())
        check_fields(self, "", "threads", lambda value: 0 <= value <= cores, f"0, or up to {cores}")
        for name in self.against:
            if name not in PEERS:
                raise unknown_name("peer", name, PEERS)
            if trains and name == "llama.cpp":
                raise jllama.UsageError("llama.cpp does not train; leave it out")
            if not trains and name == "torch-compile":
                reason = "it would compile again for each length of a text"
                raise jllama.UsageError(f"torch-compile is for train: {reason}; leave it out")


def train_config(options: BenchOptions) -> "jllama.TrainConfig":
    """Return the training to measure: the sizes of a configuration, a preset or the options.

    The learning rate is constant.
    """
    from jllama.commands.train import read_options
    from jllama.tokenizers import BytesTokenizer

    if options.checkpoint:
        config = read_options([options.checkpoint], "bench")
    else:
        model = jllama.preset(options.preset) if options.preset else options.model
        model = dataclasses.replace(model, max_seq_len=max(model.max_seq_len, options.seq_len))
        loop = jllama.LoopConfig(options.batch_size, options.seq_len)
        config = jllama.TrainConfig(model, training=loop)
    expected = "left out: the benchmark trains from scratch"
    check_fields(config, "", "init_from", lambda path: not path, expected)
    is_bpe = config.data.tokenizer == "bpe"
    vocab_size = config.data.vocab_size if is_bpe else BytesTokenizer().vocab_size
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or vocab_size)
    seq_len = config.training.seq_len or model.max_seq_len
    training = dataclasses.replace(config.training, seq_len=seq_len, steps=1000, epochs=0.0)
    steady = jllama.OptimizerConfig(warmup_fraction=0.0, final_fraction=1.0)
    return dataclasses.replace(config, model=model, optimizer=steady, training=training)


def parse_options(argv: list[str], prog: str = "bench") -> BenchOptions:
    """Parse the options; jllama's own contestant calls this as well."""
    return parse(BenchOptions, argv, prog, ("what", "checkpoint"), _COMMON)


def main(argv: list[str], prog: str) -> int:
    """Measure, print the figures, and write the page."""
    options = parse_options(argv, prog)
    if options.html:
        check_writable(Path(options.html))
    result = {"command": shlex.join([*prog.split(), *argv]), **measure(options, argv)}
    facts = {name: value for name, value in result.items() if value and isinstance(value, str)}
    table = {}
    for title, rows in result["work"].items():
        table |= {f"{title}: {name}": _cells(row) for name, row in rows.items()}
    if options.html:
        _write_page(Path(options.html), facts, result["work"], table)
    if options.json:
        print(json.dumps(result))
        return 0
    printed = Table("", *(Column(name, justify="right") for name in _COLUMNS), box=box.MARKDOWN)
    for title, cells in table.items():
        printed.add_row(title, *cells)
    print(*facts.values(), sep="\n")
    Console(width=max(Console().width, 160)).print(printed)
    return 0


def _cells(row: Json) -> list[str]:
    """Return a contestant's figures as text, in the order of ``_COLUMNS``."""
    numbers = [row["median_s"], min(row["seconds"]), max(row["seconds"])]
    median, low, high = (f"{1e3 * seconds:,.1f}" for seconds in numbers)
    forms = {"tokens_per_s": "{:,.1f}", "share_of_limit": "{:.0%}", "ratio": "{:.2f}"}
    others = [form.format(row[name]) if row[name] else "-" for name, form in forms.items()]
    return [f"{median} ({low} to {high})", *others]


def _write_page(path: Path, facts: Json, work: Json, table: dict[str, list[str]]) -> None:
    from jllama import report  # not at the top: matplotlib takes a while

    parts = {"jllama bench": report.table([], [facts])}
    for title, rows in work.items():
        seconds = {name: row["seconds"] for name, row in rows.items()}
        parts[title] = report.bars(seconds, "seconds (less is faster)")
    columns = zip(*table.values(), strict=True)
    rows = [dict(zip(table, column, strict=True)) for column in columns]
    parts["Figures"] = report.table(_COLUMNS, rows)
    report.write_page(path, "jllama bench", parts)


def measure(options: BenchOptions, argv: list[str]) -> Json:
    """Measure all contestants, which take turns.

    Returns:
        Facts about the machine, its ``machine_rates``, and as ``work`` the figures by title and
        contestant: ``seconds`` of each repeat (of a step, or of the whole if it has no steps),
        ``tokens_per_s``, ``share_of_limit`` (of what the machine's rates allow), and as ``ratio``
        how many times as fast as this contestant jllama was.
    """
    names = ["jllama", *options.against]
    cores = _cores()[: options.threads or None]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # XLA follows it, and child processes inherit it
    asks = {}
    facts = {}
    rates = []
    rounds = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        work = {"what": options.what, "argv": argv, "threads": len(cores), "folder": folder}
        with _contestant("prepare", work, options) as ask:
            work |= ask()
        cases = work["cases"]
        if options.what in ("train", "prefill", "decode"):
            # These processes stay; each gets ready before the next one begins.
            for name in names:
                asks[name] = running.enter_context(_contestant(name, work, options))
                facts[name] = asks[name]()
        for repeat in range(1 + options.repeats):
            print(f"round {repeat} of {options.repeats}", file=sys.stderr)
            rates.append(asks["jllama"]({}) if asks else {})
            turns = {}
            for title, name in itertools.product(cases, names):
                case = cases[title]
                turn = asks[name](case) if asks else _run_once(name, work, options, case)
                turns[title, name] = turn
            rounds.append(turns)
    del rounds[0], rates[0]  # round 0 compiles, and does not count
    machine_rates = {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}
    texts = [
        f"{rate / 1e9:,.1f}e9 {name.replace('_per_', '/')}" for name, rate in machine_rates.items()
    ]
    result = {**work["facts"], "rates": ", ".join(texts)}
    figures = {}
    for title, case in cases.items():
        answers = {name: [turns[title, name] for turns in rounds] for name in names}
        needed = facts["jllama"]["needed"][title] if facts else {}
        figures[title] = _figures(case, answers, needed, rates)
        result |= accelerator_facts(figures[title], facts.get("jllama", {}))
    result |= {"machine_rates": machine_rates, "repeats": options.repeats, "work": figures}
    return result


def _figures(case: Json, answers: dict[str, list[Json]], needed: Json, rates: list[Json]) -> Json:
    """Return the figures of one title by contestant.

    Args:
        case: the ``Case`` as a dict.
        answers: each contestant's answers to all repeats.
        needed: the FLOPs or, for steps of decoding, bytes that each contestant needs at least;
            empty if they are not compared with the machine's rates.
        rates: the machine's rates at each repeat.
    """
    num_steps = max(case["steps"], 1)
    rate_name = "bytes_per_s" if case["steps"] else "flops_per_s"
    figures: Json = {}
    for name, turns in answers.items():
        seconds = [turn["seconds"] / num_steps for turn in turns]
        median_s = statistics.median(seconds)
        share = 0.0
        if needed:
            limits_s = [needed[name] / rate[rate_name] for rate in rates]
            share = statistics.median(map(operator.truediv, limits_s, seconds))
        figures[name] = {
            "seconds": seconds,
            "median_s": median_s,
            "tokens_per_s": case["tokens"] / num_steps / median_s,
            "share_of_limit": share,
            "loss": turns[-1].get("loss"),
            "peak_bytes": turns[-1].get("peak_bytes"),
        }
    for row in figures.values():
        ratios = map(operator.truediv, row["seconds"], figures["jllama"]["seconds"])
        row["ratio"] = statistics.median(ratios)
    return figures


def accelerator_facts(rows: Mapping[str, Json], facts: Json) -> dict[str, str]:
    """Describe training on a GPU or TPU: shares of its published rate, and memory beside the plan.

    Each of ``rows`` gets its ``mfu``, which counts attention whole, and ``mfu_causal``, which
    counts half of it. On a CPU the result is empty.
    """
    texts = {}
    published = facts.get("published_flops_per_s")
    if published:
        shares = []
        for name, row in rows.items():
            row["mfu"] = facts["flops"] / row["median_s"] / published
            row["mfu_causal"] = facts["causal_flops"] / row["median_s"] / published
            shares.append(f"{name} {row['mfu']:.1%} ({row['mfu_causal']:.1%} causal)")
        texts["mfu"] = f"MFU: {', '.join(shares)}"
    peaks = {name: row["peak_bytes"] for name, row in rows.items() if row.get("peak_bytes")}
    if peaks:
        sizes = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in peaks.items())
        planned = f"planned for jllama {facts['planned_bytes'] / 2**30:.2f} GiB"
        texts["memory"] = f"peak memory: {sizes}; {planned}"
    return texts


def _run_once(name: str, work: Json, options: BenchOptions, case: Json) -> Json:
    """Measure a process of its own: from its start to a first character, or only its loading."""
    start_s = time.perf_counter()
    with _contestant(name, work, options) as ask:
        ask()
        seconds = time.perf_counter() - start_s
        return ask(case) if options.what == "load" else {"seconds": seconds}


@contextlib.contextmanager
def _contestant(name: str, work: Json, options: BenchOptions) -> Iterator[Callable[..., Any]]:
    """Start a contestant's process, and yield a function that asks it.

    The function waits until the process is ready, or lets it take a turn. An error in the process
    is raised here.
    """
    streams_text = options.what == "startup" and name != "prepare"
    command, environment = _command(name, work, options)
    streams: Any = {"stdin": PIPE, "stdout": PIPE, "bufsize": 0, "env": environment}
    with tempfile.TemporaryFile() as log, Popen(command, stderr=log, **streams) as process:
        stdin = cast(IO[bytes], process.stdin)
        stdout = cast(IO[bytes], process.stdout)

        def ask(turn: Any = None) -> Any:
            if turn is not None:
                with contextlib.suppress(BrokenPipeError):  # it has ended, and answers no more
                    stdin.write(json.dumps(turn).encode() + b"\n")
            answer = stdout.read(1) if streams_text else stdout.readline()
            if not answer:
                log.seek(0)
                raise _failure(name, process.wait(), log.read().decode(errors="replace").strip())
            return None if streams_text else json.loads(answer)

        try:
            yield ask
            stdin.close()  # so that it ends
            stdout.read()
        finally:
            process.kill()
            process.wait()  # leaving Popen after Ctrl-C waits only a quarter of a second


def _command(name: str, work: Json, options: BenchOptions) -> tuple[list[str], dict[str, str]]:
    """Return a contestant's command, and its environment."""
    package = Path(__file__).parents[1]
    # In the wheel the script is part of the package.
    folder = package / "contestants"
    if not folder.exists():
        folder = package.parent / "benchmarks" / "contestants"
    python = options.llama_python
    environment = {**os.environ, "OMP_NUM_THREADS": str(work["threads"])}
    if name != "llama.cpp":
        python = sys.executable
        paths = [str(package.parent), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if work.get("device") == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"  # as the peers
    if options.against:
        # The peers need memory of the GPU, too.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return [python, str(folder / "contestant.py"), json.dumps({**work, "name": name})], environment


def _failure(name: str, code: int, log: str) -> jllama.JllamaError:
    """Return the error of a contestant that has ended, from the last line that it wrote."""
    last = (log.splitlines() or [f"it ended with code {code}"])[-1]
    kind, _, message = last.partition(": ")
    if kind == "ModuleNotFoundError":
        remedy = f"pip install {PEERS.get(name, name)}"
        if name == "llama.cpp":
            remedy += ", or name the Python that has it with --llama_python"
        return jllama.JllamaError(f"{name} is not installed here ({message}): {remedy}")
    is_error = kind == "error" or kind.startswith("jllama.errors.")
    if is_error and (code == 2 or kind.endswith("UsageError")):
        return jllama.UsageError(message)
    return jllama.JllamaError(message if is_error else f"{name} failed: {last}")


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]
