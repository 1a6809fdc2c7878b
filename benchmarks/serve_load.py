"""Thousands of requests to one `jllama serve`, in every company: each answer must be the one that
it gives alone.

    python benchmarks/serve_load.py --requests 10000

Distinct requests are answered alone, one after the other, by a server of a small random model and
an adapter of it, which keeps few prefixes. Then they come at random moments from up to 32 client
processes: streamed or not, some clients leave before the first byte or in the middle, some are
killed, and so is the server (SIGKILL), which is started again. Every answer that a client lived to
see must have one end and be equal, to the last bit of its log-probabilities, to the one given
alone; so must those of a server that keeps no prefixes. In the end no slot may be busy and the
server's memory no larger. Writes benchmarks/results/serve_load.json.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# jllama is imported where it is used: the clients do without, and are started again and again.

CLIENTS, CONTEXT, LIMIT_S, MOST_GROWTH_MIB = 32, 1024, 120, 8.0
WAYS = {
    "whole": 0.43,
    "stream": 0.4,
    "leaves in the middle": 0.1,
    "leaves before the first byte": 0.06,
    "killed": 0.01,
}
WORDS = (
    "a river of stone and light in the garden where winter plays music on paper bridges "
    "until morning comes"
)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor "
    "%}<assistant>"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def save_small_model(folder: Path) -> None:
    """A random model of bytes, with weights under which mistakes show, and a chat template.

    And an adapter of it.
    """
    import numpy as np

    from jllama import LanguageModel, LlamaConfig, save
    from jllama.formats.adapters import Adapter, write_peft
    from jllama.lab.checks import random_params
    from jllama.models.config import LoraConfig
    from jllama.tokenizers.base import BytesTokenizer

    sizes: dict[str, Any] = {
        "num_layers": 2,
        "embed_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 96,
    }
    config = LlamaConfig(BytesTokenizer.vocab_size, **sizes, max_seq_len=CONTEXT)
    save(
        LanguageModel(config, random_params(config, 0), BytesTokenizer(), TEMPLATE),
        folder / "small",
        "hf",
    )
    rng, lora = np.random.default_rng(1), LoraConfig(2, 2.0, targets=("w_up",))
    shapes = {"a": (lora.rank, config.embed_dim), "b": (config.mlp_dim, lora.rank)}
    tensors = {
        f"layers/{layer}/w_up/{name}": rng.standard_normal(shape).astype(np.float32) / 4
        for layer in range(config.num_layers)
        for name, shape in shapes.items()
    }
    (folder / "adapter").mkdir()
    write_peft(
        Adapter(lora, tensors, config, folder / "adapter"),
        folder / "adapter",
        None,
        lambda *_: None,
    )


def some_options(rng: random.Random) -> dict[str, Any]:
    """Settings of how tokens are drawn."""
    return {
        "top_p": 0.9,
        "top_k": rng.randint(1, 50),
        "min_p": 0.02,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {rng.randrange(256): rng.uniform(-5, 5) for _ in range(3)},
    }


def some_request(rng: random.Random, models: Sequence[str]) -> dict[str, Any]:
    """A path and a body with settings of every kind; many prompts begin with the same words."""
    shared = f"{WORDS} " * 8
    shared = shared[
        : rng.choice([0, rng.randint(1, 100), rng.randint(250, 260), rng.randint(500, 800)])
    ]
    text = shared + " ".join(rng.choices(WORDS.split(), k=rng.randint(1, 12)))
    body: dict[str, Any] = {
        "model": rng.choice(models),
        "max_tokens": rng.randint(1, 40),
        "seed": rng.randrange(2**32),
    }
    body |= {"temperature": rng.choice([0, 0.7, 1, 1.5]), "receipt": True}
    options = some_options(rng) | {
        "stop": rng.choice(["e", ["th", "\n"], ["a", "o", "zz"]]),
        "n": rng.randint(2, 3),
    }
    body |= {name: value for name, value in options.items() if rng.random() < 0.25}
    if rng.random() < 0.25:
        formed = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        body |= rng.choice(
            [{"regex": "[ab]{3,9}c"}, {"regex": "([0-9]+, )*end"}, {"response_format": formed}]
        )
    if rng.random() < 0.3:
        body["messages"] = [{"role": "user", "content": text}]
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)} if rng.random() < 0.4 else {}
        return {"path": "/v1/chat/completions", "body": body}
    body["prompt"] = text
    body |= (
        {"logprobs": rng.randint(0, 5)}
        if rng.random() < 0.4
        else {"echo": True}
        if rng.random() < 0.1
        else {}
    )
    return {"path": "/v1/completions", "body": body}


# What a client does.


class Choices:
    """An answer as far as it has come; the same whether it was streamed or not."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = collections.defaultdict(str)
        self.log_probs: dict[int, dict[str, list[Any]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        self.ends: dict[int, str] = {}
        self.rest: dict[str, Any] = {}

    def add(self, part: Mapping[str, Any]) -> None:
        """Take an event of a stream, or a whole answer.

        ``ValueError`` if a text goes on behind its end.
        """
        for choice in part["choices"]:
            index, content = choice["index"], choice.get("delta") or choice.get("message") or choice
            if index in self.ends:
                raise ValueError(f"text {index} went on behind its end")
            self.texts[index] += content.get("content") or content.get("text") or ""
            for name, values in (choice.get("logprobs") or {}).items():
                self.log_probs[index][name] += values or []
            if choice.get("finish_reason"):
                self.ends[index] = choice["finish_reason"]
        if part.get("usage"):
            self.rest["usage"] = [
                part["usage"]["prompt_tokens"],
                part["usage"]["completion_tokens"],
            ]
        if part.get("receipt"):
            self.rest |= {name: part["receipt"][name] for name in ("ids", "log_probs")}
        self.rest["system_fingerprint"] = part["system_fingerprint"]

    def whole(self) -> dict[str, Any]:
        """All of it; ``ValueError`` if a text has no end."""
        indices = sorted(self.texts.keys() | self.ends.keys())
        if set(indices) != self.ends.keys():
            raise ValueError(f"of texts {indices}, only {sorted(self.ends)} came to an end")
        texts = [[self.texts[index], self.ends[index], self.log_probs[index]] for index in indices]
        return {"texts": texts, **self.rest}


def ask(
    port: int, path: str, body: Mapping[str, Any], leaves_after: float | None = None
) -> dict[str, Any]:
    """Send a request and read its answer: ``{"answer"}``, ``{"status"}`` if refused, or ``{"left":
    true}``.

    ``leaves_after`` closes the connection: below 1, so many seconds after the request is sent;
    else, after so many lines of a stream. Raises ``OSError`` or ``HTTPException`` if the connection
    breaks, ``ValueError`` if the answer has no end, or more than one.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if leaves_after is not None and leaves_after < 1:
            time.sleep(leaves_after)
            return {"left": True}
        response, choices, is_done = connection.getresponse(), Choices(), False
        if response.status != 200:
            return {"status": response.status, "said": response.read().decode()}
        if not body.get("stream"):
            choices.add(json.loads(response.read()))
            return {"answer": choices.whole()}
        for count, line in enumerate(response):
            if count == leaves_after:
                return {"left": True}
            if is_done and line.strip():
                raise ValueError(f"{line!r} came behind the end")
            is_done = is_done or line.strip() == b"data: [DONE]"
            if line.startswith(b"data: {"):
                choices.add(json.loads(line[6:]))
        if not is_done:
            raise ConnectionError("the stream broke off")
        return {"answer": choices.whole()}
    finally:
        connection.close()


def work_as_client() -> None:
    """Ask for each line of stdin, and write what came of it."""
    for line in sys.stdin:
        try:
            actual = ask(**json.loads(line))
        except TimeoutError:
            actual = {"error": "lost: no end came"}
        except (OSError, http.client.HTTPException) as error:
            actual = {"broken": repr(error)}
        except (ValueError, KeyError) as error:
            actual = {"error": f"no answer: {error!r}"}
        print(json.dumps(actual), flush=True)


# What the clients' driver does.


def differing(alone: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs between two answers, log-probabilities to the last bit."""
    return sorted(
        name for name in alone.keys() | actual.keys() if alone.get(name) != actual.get(name)
    )


class Server:
    """A ``jllama serve`` of its own, on a port that stays the same when it is started again."""

    def __init__(self, folder: Path, checkpoint: str, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "jllama",
            "serve",
            checkpoint,
            "--name",
            "model",
            "--port",
            str(self.port),
        ]
        command += ["--context", str(CONTEXT)]
        self.command, self.log = [*command, *options], folder / f"{self.port}.log"
        self.environment = os.environ | {
            "JLLAMA_CACHE": str(folder / "cache"),
            "JAX_PLATFORMS": "cpu",
        }

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log
            )
        begun = time.monotonic()
        while self.get("/health") is None:
            if self.process.poll() is not None or time.monotonic() - begun > LIMIT_S:
                raise SystemExit(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def get(self, path: str) -> str | None:
        """What it answers there, or None if it does not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read().decode() if response.status == 200 else None

    def metric(self, name: str) -> float:
        lines = dict(
            line.rsplit(" ", 1)
            for line in (self.get("/metrics") or "").splitlines()
            if line[:1] != "#"
        )
        return float(lines.get(name, "nan"))

    def rss_mib(self) -> float:
        return (
            int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Let it end of its own accord; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


class Load:
    """The jobs, and what came of them; shared by the threads that drive a client process each."""

    def __init__(
        self, server: Server, requests: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]
    ) -> None:
        self.server, self.requests, self.alone = server, requests, alone
        self.lock, self.is_up = threading.Lock(), threading.Event()
        self.is_up.set()
        self.deaths, self.issued, self.at_once, self.total = 0, 0, CLIENTS, 0
        self.ways, self.counts = collections.Counter[str](), collections.Counter[str]()
        self.faults: list[str] = []
        self.memory: list[tuple[int, float]] = []  # (requests issued, MiB)
        self.most_at_once = self.under_way = 0

    def drive(self, number: int, seed: int) -> None:
        """Take jobs, as long as there are any, for a client process that is started again when it
        was killed.
        """
        rng, client = random.Random(seed), start_client()
        while True:
            with self.lock:
                if self.issued >= self.total:
                    break
                takes = number < self.at_once
                if takes:
                    self.issued += 1
                    if self.issued % 20 == 0:
                        self.at_once = rng.randint(1, CLIENTS)
                    self.under_way += 1
                    self.most_at_once = max(self.most_at_once, self.under_way)
            if not takes:
                time.sleep(0.01)
                continue
            time.sleep(rng.expovariate(100))
            [way] = rng.choices([*WAYS], [*WAYS.values()])
            client = self.job(client, rng.randrange(len(self.requests)), way, rng)
            with self.lock:
                self.under_way -= 1
        client.stdin.close()
        client.wait()

    def job(
        self, client: subprocess.Popen, index: int, way: str, rng: random.Random
    ) -> subprocess.Popen:
        """Ask one request in one way, again if the server dies meanwhile; count what came of it."""
        request = self.requests[index]
        body = request["body"]
        if way in ("stream", "leaves in the middle") or (way != "whole" and rng.random() < 0.5):
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
        line = {"port": self.server.port, "path": request["path"], "body": body}
        if way.startswith("leaves"):
            line["leaves_after"] = (
                rng.randint(1, 20) if way == "leaves in the middle" else rng.uniform(0, 0.03)
            )
        self.ways[way] += 1
        while True:
            self.is_up.wait()
            deaths = self.deaths
            print(json.dumps(line), file=client.stdin, flush=True)
            if way == "killed":
                time.sleep(rng.uniform(0, 0.05))
                client.kill()
                client.communicate()
                self.count("client killed")
                return start_client()
            actual = json.loads(client.stdout.readline())
            if "broken" not in actual or self.deaths == deaths:
                break
            self.count("asked again: the server was killed")
        if "answer" in actual:
            differ = differing(self.alone[index], actual["answer"])
            self.count("equal to alone") if not differ else self.fault(
                f"{way}: {', '.join(differ)} differ", index
            )
        elif "left" in actual:
            self.count("left")
        else:
            self.fault(f"{way}: {actual}", index)
        return client

    def count(self, outcome: str) -> None:
        with self.lock:
            self.counts[outcome] += 1

    def fault(self, message: str, index: int) -> None:
        self.count("faults")
        with self.lock:
            self.faults.append(f"request {index}, {message}"[:500])
        say(self.faults[-1])

    def watch(self, until: int, threads: Sequence[threading.Thread]) -> None:
        """Sample the server's memory until this many requests were taken, or nobody takes any."""
        while self.issued < until and any(thread.is_alive() for thread in threads):
            self.memory.append((self.issued, self.server.rss_mib()))
            time.sleep(0.2)


def start_client() -> subprocess.Popen:
    command = [sys.executable, "-S", "-E", __file__, "--client"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask_or_stop(server: Server, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request that must have one."""
    actual = ask(server.port, **request)
    if "answer" not in actual:
        raise SystemExit(f"{request} was not answered: {actual}\n{server.log.read_text()[-3000:]}")
    return actual["answer"]


def by_tenths(memory: Sequence[tuple[int, float]], begin: int, end: int) -> list[float]:
    """What a server holds in each tenth of its requests, in MiB.

    Tenths without a sample are left out.
    """
    tenths: dict[int, list[float]] = collections.defaultdict(list)
    for issued, mib in memory:
        tenths[min(10 * (issued - begin) // max(end - begin, 1), 9)].append(mib)
    return [statistics.median(tenths[tenth]) for tenth in sorted(tenths)]


def under_load(load: Load, total: int, seed: int) -> dict[str, Any]:
    """All requests, with the server killed after a quarter of them.

    What there is to say about the server's end.
    """
    load.total, kill_at = total, total // 4
    threads = [
        threading.Thread(target=load.drive, args=(number, seed + number))
        for number in range(CLIENTS)
    ]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    load.watch(kill_at, threads)
    load.is_up.clear()
    load.deaths += 1
    load.server.kill()
    load.server.start()
    load.is_up.set()
    load.memory.clear()
    load.watch(total, threads)
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begun
    idle = {"jllama_busy_slots": 0.0, "jllama_queued_requests": 0.0}
    for _ in range(100):
        if all(load.server.metric(name) == expected for name, expected in idle.items()):
            break
        time.sleep(0.1)
    rss_mib = by_tenths(load.memory, kill_at, total)
    grown = rss_mib[-1] - rss_mib[len(rss_mib) // 2]
    for name, expected in idle.items():
        if (actual := load.server.metric(name)) != expected:
            load.fault(f"{name} is {actual} when all is done", -1)
    if grown > MOST_GROWTH_MIB:
        load.fault(f"the server's memory grew by {grown:.1f} MiB in its second half", -1)
    return {
        "seconds": seconds,
        "most_at_once": load.most_at_once,
        "cached_tokens": load.server.metric("jllama_cached_tokens_total"),
        "rss_mib_by_tenths": rss_mib,
        "rss_growth_in_second_half_mib": grown,
    }


@contextlib.contextmanager
def started(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"requests": 10_000, "distinct": 200, "slots": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--checkpoint", help="serve this, without an adapter, instead of a small random model"
    )
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--result", type=Path, default=Path(__file__).parent / "results" / "serve_load.json"
    )
    options = parser.parse_args()
    if options.client:
        work_as_client()
        return 0
    rng = random.Random(options.seed)
    models = ["model"] if options.checkpoint else ["model", "model", "adapted"]
    requests = [some_request(rng, models) for _ in range(options.distinct)]
    with tempfile.TemporaryDirectory() as name:
        folder, served = (
            Path(name),
            (options.checkpoint or f"{name}/small", "--slots", str(options.slots)),
        )
        if not options.checkpoint:
            save_small_model(folder)
            served += ("--adapter", f"adapted={folder / 'adapter'}")
        with started(Server(folder, *served, "--cache_tokens", "1024")) as server:
            begun = time.monotonic()
            alone = [ask_or_stop(server, request) for request in requests]
            say(f"{len(alone)} requests answered alone in {time.monotonic() - begun:.0f} s")
            load = Load(server, requests, alone)
            facts = under_load(load, options.requests, options.seed)
            if (code := server.end()) != 0:
                load.fault(f"the server ended with code {code}", -1)
            if "Traceback" in server.log.read_text():
                load.fault(
                    f"the server's log has a traceback: {server.log.read_text()[-2000:]}", -1
                )
        with (
            started(Server(folder, *served, "--cache_tokens", "0")) as server,
            ThreadPoolExecutor(8) as pool,
        ):
            for index, actual in enumerate(
                pool.map(lambda request: ask_or_stop(server, request), requests)
            ):
                differ = differing(alone[index], actual)
                load.fault(
                    f"without a cache: {', '.join(differ)} differ", index
                ) if differ else load.count("no cache")
    tokens = sum(len(ids) for answer in alone for ids in answer["ids"])
    result = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, cpu",
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "jllama")},
        **{name: getattr(options, name) for name in ("requests", "distinct", "slots", "seed")},
        "tokens_of_distinct": tokens,
        "ways": dict(load.ways),
        "outcomes": dict(load.counts),
        "server_killed_and_restarted": load.deaths,
        **facts,
        "faults": load.faults[:20],
    }
    options.result.write_text(json.dumps(result, indent=2) + "\n")
    counts = load.counts
    print(
        f"{options.requests} requests, {facts['most_at_once']} at once at most, in "
        f"{facts['seconds']:.0f} s: "
        f"{counts['equal to alone']} answers equal to alone, {counts['left']} clients left, "
        f"{counts['client killed']} were killed, {counts['asked again: the server was killed']} "
        f"asked again after the "
        f"server was killed; {counts['no cache']} of {options.distinct} equal without a cache; "
        f"memory "
        f"{facts['rss_growth_in_second_half_mib']:+.1f} MiB in the second half; "
        f"{counts['faults']} faults"
    )
    ended = counts["equal to alone"] + counts["left"] + counts["client killed"] + counts["faults"]
    return int(bool(counts["faults"]) or ended < options.requests)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
