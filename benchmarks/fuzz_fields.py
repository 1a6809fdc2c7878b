"""Every field of every request that `jllama serve` documents, with values that nobody should send.

    python benchmarks/fuzz_fields.py --requests 2000

The fields are those of the server's own OpenAPI document. Each request is a valid one in which one
to three fields, at any depth, have a value of another type, size or range (seeded, so a number
names a request for ever). Each answer must be JSON, or a stream of JSON, with a status below 500;
an error must say what is wrong in a sentence. After every hundred requests the server must still
answer a valid one. Writes benchmarks/results/fuzz_fields.json.
"""

from __future__ import annotations

import argparse
import collections
import copy
import http.client
import importlib.metadata
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_files import NASTY, ROOT
from serve_load import LIMIT_S, Server, save_small_model

RESULT = ROOT / "benchmarks" / "results" / "fuzz_fields.json"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a river"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": CONVERSATION,
        "max_tokens": 4,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/completions": {
        "prompt": "a river",
        "max_tokens": 4,
        "logprobs": 2,
        "logit_bias": {"5": 1.0},
        "stop": ["zz"],
    },
    "/v1/responses": {"input": CONVERSATION, "max_output_tokens": 4},
    "/v1/embeddings": {"input": ["a river", "stone"]},
    "/tokenize": {"prompt": "a river"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": CONVERSATION},
}
"""A valid request to each path."""
EXTREME: tuple[Any, ...] = (
    *(
        2**32 - 1,
        -(2**63),
        0.1 + 0.2,
        "auto",
        "none",
        "text",
        "\ud800",
        "\u202e",
        "[[[[",
        {"type": "json_object"},
    ),
    *(
        [TOOL],
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"-1": 100, "x": "y"},
        [[1], [2**31]],
    ),
    *(
        "(a|a)*" * 50,
        "x" * 70_000,
        [0] * 5_000,
        {"role": "tool"},
        [None],
        {"a": {"b": {"c": [{}]}}},
    ),
)
"""Values beside ``NASTY`` that are almost right somewhere in this protocol."""


def properties_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of the body that a path takes, by the server's document."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]["properties"]


def places_in(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values inside a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*way, key)
            yield from places_in(inner, (*way, key))


def mutated(body: dict[str, Any], fields: list[str], rng: random.Random) -> dict[str, Any]:
    """A copy of a body in which one to three values are others."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        value = copy.deepcopy(rng.choice((*NASTY, *EXTREME)))
        if rng.random() < 0.7:
            body[rng.choice(fields)] = value
            continue
        *way, last = rng.choice([*places_in(body)])
        inside: Any = body
        for key in way:
            inside = inside[key]
        inside[last] = value
    return body


def fault_in(status: int, kind: str, text: bytes) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if status >= 500:
        return f"status {status}"
    parts = [text]
    if kind.startswith("text/event-stream"):
        lines = [line[6:] for line in text.splitlines() if line.startswith(b"data: ")]
        parts = [line for line in lines if line != b"[DONE]"]
    try:
        answers = [json.loads(part, parse_constant=refuse_constant) for part in parts]
    except ValueError as error:
        return f"not JSON: {error}"
    if status >= 400:
        message = answers[0].get("error", {}).get("message")
        return None if isinstance(message, str) and message else "an error without a message"
    failed = [answer for answer in answers if isinstance(answer, dict) and answer.get("error")]
    return f"an error inside an answer of status {status}" if failed else None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def ask(port: int, path: str, body: Any) -> tuple[int, str, bytes]:
    """The status, the content type and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read()
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    tried: set[str] = set()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_small_model(folder)
        server = Server(folder, str(folder / "small"), "--slots", "2")
        server.start()
        try:
            document = json.loads(server.get("/openapi.json") or "{}")
            paths = [path for path in BODIES if path in document["paths"]]
            fields = {path: sorted(properties_of(document, path)) for path in paths}
            for number in range(options.requests):
                rng = random.Random(f"{options.seed} {number}")
                path = paths[number % len(paths)]
                body = mutated(BODIES[path], fields[path], rng)
                tried |= {f"{path} {field}" for field in body.keys() & set(fields[path])}
                try:
                    status, kind, text = ask(server.port, path, body)
                except (OSError, http.client.HTTPException) as error:
                    faults.append(f"request {number}, {path}: {error!r}")
                    counts["no answer"] += 1
                    continue
                counts[str(status)] += 1
                if fault := fault_in(status, kind, text):
                    faults.append(
                        f"request {number}, {path}: {fault}: {json.dumps(body)[:300]}: "
                        f"{text[:300]!r}"
                    )
                if number % 100 == 99:
                    status, _, _ = ask(server.port, path, BODIES[path])
                    print(f"{number + 1} requests, {len(faults)} faults", flush=True)
                    if status != 200:
                        faults.append(f"after request {number} a valid one to {path} got {status}")
            memory_mib = round(server.rss_mib())
            if (code := server.end()) != 0:
                faults.append(f"the server ended with {code}")
            if "Traceback" in server.log.read_text():
                faults.append(f"the server's log has a traceback: {server.log.read_text()[-2000:]}")
        finally:
            server.process.kill()
    all_fields = {f"{path} {field}" for path in paths for field in fields[path]}
    result = {
        "requests": options.requests,
        "fields": len(all_fields),
        "fields not tried": sorted(all_fields - tried),
        "answers by status": dict(sorted(counts.items())),
        "faults": faults,
        "memory_mib": memory_mib,
        "seconds": round(time.monotonic() - begun),
        "device": f"{platform.machine()}, {os.cpu_count()} cores, cpu",
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "jllama")},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
