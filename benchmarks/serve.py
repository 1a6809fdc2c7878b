"""`jllama serve` beside llama.cpp's server and `transformers serve`: the same float32 weights,
prompts, cores and run.

    python benchmarks/serve.py smollm2/ --llama_python llama/bin/python

prints a table and writes benchmarks/results/serve.json. llama.cpp's server is that of
`llama-cpp-python[server]`, which may be in an environment of its own. The servers run one after the
other. Each client is a thread that reads a stream; prompts are random words, no two the same,
greedy; an answer that ends early counts as many tokens as came. Medians of requests; the first
answers of a server are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import itertools
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jllama

CORES, CONTEXT, START_LIMIT_S = 2, 2048, 300
WORDS = """
    river stone light garden winter music paper bridge silver forest morning window letter ocean
    candle mountain summer shadow voice village copper engine harbor island journey kitchen ladder
    market needle orange pencil
"""


class Server(NamedTuple):
    """How to start one, its port left to be filled in."""

    name: str
    command: tuple[str, ...]
    model: str
    environment: dict[str, str] = {}  # noqa: RUF012
    remark: str = ""


class Url(NamedTuple):
    """Where a model is served."""

    port: int
    model: str


class Timing(NamedTuple):
    """One answer, as a client saw it."""

    first_s: float
    gaps_s: tuple[float, ...]  # between events; one event may bring several tokens
    prompt_tokens: int | None
    tokens: int

    @property
    def between_s(self) -> float:
        """Between two tokens; the first event counts as many tokens as the others on average."""
        events = len(self.gaps_s) + 1
        return sum(self.gaps_s) / max(events - 1, 1) * events / self.tokens


class Running(NamedTuple):
    """A server that has given its first answer."""

    url: Url
    process: subprocess.Popen
    start_s: float


def words(seed: int, count: int) -> str:
    """Random words, a token each."""
    return " ".join(random.Random(seed).choices(WORDS.split(), k=count))


def answer(url: Url, prompt: str, new_tokens: int) -> Timing:
    """Stream a completion.

    ``OSError`` if the server is not ready yet, ``RuntimeError`` if it refuses.
    """
    body = {
        "model": url.model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=START_LIMIT_S)
    begun = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status == 503:
        raise ConnectionRefusedError("not ready")
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read(500)!r}")
    times, usage = [], {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        usage = event.get("usage") or usage
        if any(choice.get("text") for choice in event["choices"]):
            times.append(time.perf_counter())
    connection.close()
    if not times:
        raise RuntimeError("no text came")
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    return Timing(
        times[0] - begun,
        gaps,
        usage.get("prompt_tokens"),
        usage.get("completion_tokens", len(times)),
    )


@contextlib.contextmanager
def running(server: Server) -> Iterator[Running]:
    """Start a server, wait for its first answer, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        begun = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **server.environment}
        process = subprocess.Popen(
            [*server.command, "--port", str(port)], env=environment, stdout=log, stderr=log
        )
        try:
            while True:
                try:
                    answer(Url(port, server.model), words(0, 4), 4)
                    break
                except OSError:
                    if process.poll() is not None or time.perf_counter() - begun > START_LIMIT_S:
                        raise RuntimeError(f"{server.name} did not start") from None
                    time.sleep(0.02)
            yield Running(Url(port, server.model), process, time.perf_counter() - begun)
        except RuntimeError:
            log.seek(0)
            say(log.read()[-3000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def memory_mib(process: subprocess.Popen) -> dict[str, float]:
    """What a server holds now, and held at most, files that are mapped into memory included."""
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
    )
    return {
        name: int(lines[key].split()[0]) / 1024
        for name, key in {"rss_mib": "VmRSS", "peak_mib": "VmHWM"}.items()
    }


def summary(timings: Sequence[Timing], wall_s: float) -> dict[str, float]:
    gaps = sorted(gap for timing in timings for gap in timing.gaps_s)
    return {
        "requests": len(timings),
        "prompt_tokens": statistics.median(timing.prompt_tokens or -1 for timing in timings),
        "new_tokens": statistics.median(timing.tokens for timing in timings),
        "first_token_s": statistics.median(timing.first_s for timing in timings),
        "between_tokens_ms": 1e3 * statistics.median(timing.between_s for timing in timings),
        "between_events_p95_ms": 1e3 * gaps[int(0.95 * (len(gaps) - 1))] if gaps else float("nan"),
        "tokens_per_s": sum(timing.tokens for timing in timings) / wall_s,
    }


def under_load(url: Url, clients: int, options: argparse.Namespace) -> dict[str, float]:
    """So many clients at once, each with one request after the other."""
    count = max(clients, options.requests // clients * clients)
    prompts = [
        words(1000 * clients + request, options.prompt_tokens) for request in range(1, count + 1)
    ]
    with ThreadPoolExecutor(clients) as pool:
        begun = time.perf_counter()
        timings = list(pool.map(lambda prompt: answer(url, prompt, options.new_tokens), prompts))
        return summary(timings, time.perf_counter() - begun)


def with_prefix(url: Url, options: argparse.Namespace) -> dict[str, float]:
    """Time to the first token behind a long prefix: at first, and then with other words behind the
    same prefix.
    """
    prefix = words(-1, options.prefix_tokens)
    first, *later = (
        answer(url, f"{prefix} {words(-2 - turn, 16)}", 8).first_s
        for turn in range(options.requests + 1)
    )
    return {"first_s": first, "later_s": statistics.median(later)}


def measured(
    server: Server, clients: Sequence[int], options: argparse.Namespace, prefix: bool
) -> dict[str, Any]:
    with running(server) as (url, process, start_s):
        say(f"{server.name}: first answer after {start_s:.1f} s")
        result: dict[str, Any] = {"start_to_first_answer_s": start_s, "remark": server.remark}
        for warm_up in range(2):
            answer(url, words(-100 - warm_up, options.prompt_tokens), 8)
        for count in clients:
            result[f"clients_{count}"] = row = under_load(url, count, options)
            say(
                f"{server.name:28} {count:3} clients: first token {row['first_token_s']:7.3f} s, "
                f"between {row['between_tokens_ms']:6.1f} ms (p95 "
                f"{row['between_events_p95_ms']:6.1f}), "
                f"{row['tokens_per_s']:6.1f} tokens/s of {row['new_tokens']:.0f} each"
            )
        if prefix:
            result["prefix"] = row = with_prefix(url, options)
            say(f"{server.name:28} prefix: {row['first_s']:.3f} s, then {row['later_s']:.3f} s")
        result |= memory_mib(process)
        say(
            f"{server.name:28} memory: {result['rss_mib']:.0f} MiB, at most "
            f"{result['peak_mib']:.0f}"
        )
    return result


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def jllama_server(folder: Path, cache: Path, slots: int, *more: str, name: str = "") -> Server:
    command = (
        sys.executable,
        "-m",
        "jllama",
        "serve",
        str(folder),
        "--context",
        str(CONTEXT),
        "--slots",
        str(slots),
    )
    return Server(
        name or f"jllama, {slots} slots",
        (*command, *more),
        folder.name,
        {"JLLAMA_CACHE": str(cache)},
    )


def peers(folder: Path, gguf: Path, options: argparse.Namespace) -> Iterator[Server]:
    """The peers that are to be measured."""
    if options.llama_python:
        flags = (
            f"--n_ctx {CONTEXT} --n_threads {CORES} --n_threads_batch {CORES} --logits_all "
            f"false --verbose false"
        )
        command = (
            options.llama_python,
            "-m",
            "llama_cpp.server",
            "--model",
            str(gguf),
            *flags.split(),
        )
        remark = (
            "one request at a time (interrupt_requests off: they wait); the last prompt's "
            "prefix is kept"
        )
        yield Server(
            "llama-cpp-python", (*command, "--interrupt_requests", "false"), "any", remark=remark
        )
    if options.transformers:
        command = (sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder))
        command += ("--device", "cpu", "--dtype", "float32")
        threads = {"OMP_NUM_THREADS": str(CORES)}
        yield Server("transformers", command, str(folder), threads, "one request at a time")
        remark = "--continuous-batching, room for 16 contexts"
        command += (
            "--continuous-batching",
            "--cb-block-size",
            "32",
            "--cb-num-blocks",
            str(16 * CONTEXT // 32),
        )
        yield Server("transformers, batching", command, str(folder), threads, remark)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="any that jllama loads")
    parser.add_argument(
        "--llama_python", help="a Python that has llama-cpp-python[server]; without it, not run"
    )
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--jllama", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument(
        "--slots", type=int, nargs="*", default=[1, 8], help="beside 4 and 16, with one client each"
    )
    for name, default in {
        "requests": 4,
        "prompt_tokens": 64,
        "new_tokens": 64,
        "prefix_tokens": 1000,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--result", type=Path, default=Path(__file__).parent / "results" / "serve.json"
    )
    options = parser.parse_args()
    servers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, gguf, cache = Path(name) / "hf", Path(name) / "f32.gguf", Path(name) / "cache"
        jllama.convert(options.checkpoint, folder, "hf", "float32")
        jllama.convert(options.checkpoint, gguf, "gguf", "float32")
        if options.jllama:
            cold = jllama_server(folder, cache, 4, name="jllama, 4 slots, cold")
            four, sixteen = jllama_server(folder, cache, 4), jllama_server(folder, cache, 16)
            uncached = jllama_server(
                folder, cache, 4, "--cache_tokens", "0", name="jllama, 4 slots, no cache"
            )
            servers[cold.name] = measured(cold, (), options, prefix=False)
            servers[four.name] = measured(four, options.clients, options, prefix=True)
            servers[uncached.name] = measured(uncached, (), options, prefix=True)
            servers[sixteen.name] = measured(sixteen, options.clients, options, prefix=False)
            for slots in options.slots:
                server = jllama_server(folder, cache, slots)
                servers[server.name] = measured(server, (1,), options, prefix=False)
        for server in peers(folder, gguf, options):
            servers[server.name] = measured(server, options.clients, options, prefix=True)
    result: dict[str, Any] = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, cpu",
        "versions": {
            package: importlib.metadata.version(package)
            for package in ("jax", "transformers", "torch")
        },
        **{
            name: getattr(options, name)
            for name in ("requests", "prompt_tokens", "new_tokens", "prefix_tokens")
        },
        "servers": servers,
    }
    if options.llama_python:
        code = "import importlib.metadata as m; print(m.version('llama_cpp_python'), end='')"
        result["versions"]["llama-cpp-python"] = subprocess.check_output(
            [options.llama_python, "-c", code], text=True
        )
    options.result.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
