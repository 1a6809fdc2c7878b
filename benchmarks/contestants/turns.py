"""The turns of ``jllama bench``: start the contestants, ask them in turn, and compare them."""

import contextlib
import itertools
import json
import operator
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Any, cast

import jllama
from jllama.commands.bench import PEERS, BenchOptions
from jllama.system.devices import num_cores
from jllama.system.files import Json


def measure(options: BenchOptions, argv: list[str]) -> Json:
    """Measure all contestants, which take turns.

    Returns:
        Facts about the machine, its ``machine_rates``, and as ``work`` the figures by title and
        contestant: ``seconds`` of each repeat (of a step, or of the whole if it has no steps),
        ``tokens_per_s``, ``share_of_limit`` (of what the machine's rates allow), and as ``ratio``
        how many times as fast as this contestant jllama was.
    """
    names = ["jllama", *options.against]
    asks = {}
    facts = {}
    rater = ""
    rates_of = {}
    rates = []
    rounds = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        work = {"what": options.what, "argv": argv, "threads": num_cores(), "folder": folder}
        with _contestant("prepare", work, options) as ask:
            work |= ask()
        cases = work["cases"]
        if options.what in ("train", "prefill", "decode"):
            # These processes stay; each gets ready before the next one begins.
            for name in names:
                asks[name] = running.enter_context(_contestant(name, work, options))
                facts[name] = asks[name]()
            own = facts["jllama"]
            rates_of = {"dtype": own["dtype"], "devices": own["devices"]}
            rater = "machine" if work["device"] == "cpu" else "jllama"
            if rater not in asks:
                asks[rater] = running.enter_context(_contestant(rater, work, options))
                asks[rater]()
        for repeat in range(1 + options.repeats):
            print(f"round {repeat} of {options.repeats}", file=sys.stderr)
            rates.append(asks[rater](rates_of) if asks else {})
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
        result |= shares_and_memory(figures[title], facts.get("jllama", {}))
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


def shares_and_memory(rows: Mapping[str, Json], facts: Json) -> dict[str, str]:
    """Describe the peaks of memory, beside the plan for training, and shares of a GPU's rate.

    The shares are of the published rate of a GPU or TPU that trains: each of ``rows`` gets its
    ``mfu``, which counts attention whole, and ``mfu_causal``, which counts half of it.
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
        texts["memory"] = f"peak memory: {sizes}"
        if "planned_bytes" in facts:
            texts["memory"] += f"; planned for jllama {facts['planned_bytes'] / 2**30:.2f} GiB"
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
    python = options.llama_python
    environment = {**os.environ, "OMP_NUM_THREADS": str(work["threads"])}
    if name != "llama.cpp":
        python = sys.executable
        paths = [str(Path(jllama.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if work.get("device") == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"  # as the peers
    if options.against:
        # The peers need memory of the GPU, too.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    script = Path(__file__).with_name("contestant.py")
    return [python, str(script), json.dumps({**work, "name": name})], environment


def _failure(name: str, code: int, log: str) -> jllama.JllamaError:
    """Return the error of a contestant that has ended, from the last line that it wrote."""
    last = (log.splitlines() or [f"it ended with code {code}"])[-1]
    kind, _, message = last.partition(": ")
    if kind == "ModuleNotFoundError":
        remedy = f"pip install {PEERS.get(name, name)}"
        if name == "llama.cpp":
            remedy += ", or name the Python that has it with --llama_python"
        return jllama.JllamaError(f"{name} is not installed here ({message}): {remedy}")
    is_error = kind == "error" or kind.startswith(("jllama.core.", "jllama.system.errors."))
    if is_error and (code == 2 or kind.endswith("UsageError")):
        return jllama.UsageError(message)
    return jllama.JllamaError(message if is_error else f"{name} failed: {last}")
