"""Peak memory and speed of reading text as a stream, and whether a slow step waits for it.

    python benchmarks/data_stream.py [gigabytes] [tokenizer] [folder]

The text is synthetic, as in ``data_memory.py``: documents of about 20 lines, in 40 ``.jsonl``
shards. It is written to a folder that is removed at the end, unless one is given that has it. All
of it is read with the tokenizer of bytes, and as much as a minute takes with the other one. Then
steps of 3 s take batches of 8 rows of 1,024 tokens. Memory is that of this process and of those
that read, together, looked at five times a second.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from jllama.data.config import DataConfig
from jllama.data.streams import prepare_stream

RESULT = Path(__file__).parent / "results" / "data_stream.json"
NUM_SHARDS = 40


def write_shards(folder: Path, gigabytes: float) -> None:
    """Write the shards, if the folder is empty; each repeats its own 2,000 documents, shuffled."""
    if any(folder.iterdir()):
        return
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvkqjxz"))
    words = np.array(
        ["".join(rng.choice(letters[:20], rng.integers(2, 10))) for _ in range(50_000)]
    )
    for shard in range(NUM_SHARDS):
        table = words[np.minimum(rng.zipf(1.2, (40_000, 12)), len(words)) - 1]
        lines = [" ".join(line) + ".\n" for line in table]
        documents = [
            json.dumps({"text": "".join(lines[start : start + 20])}) + "\n"
            for start in range(0, len(lines), 20)
        ]
        size = 0
        with (folder / f"{shard:05}.jsonl").open("w") as file:
            while size < gigabytes * 1e9 / NUM_SHARDS:
                rng.shuffle(documents)
                size += file.write("".join(documents))


class PeakMemory(threading.Thread):
    """The largest sum of the resident memory of this process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.has_ended = threading.Event()
        self.start()

    def run(self) -> None:
        this = psutil.Process()
        while not self.has_ended.wait(0.2):
            total = 0
            for process in (this, *this.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def measure(
    folder: Path, tokenizer: str, batch_size: int, max_tokens: float, limit_s: float, step_s: float
) -> dict[str, Any]:
    """Read batches up to a number of tokens or a time; wait ``step_s`` after each."""
    memory = PeakMemory()
    begun_s = time.perf_counter()
    config = DataConfig(str(folder), tokenizer=tokenizer, stream=True)
    data = prepare_stream(config)
    prepared_s = time.perf_counter() - begun_s
    batches = data.training_batches(batch_size=batch_size, seq_len=1024, seed=0)
    begun_s = time.perf_counter()
    next(batches)
    first_s = time.perf_counter() - begun_s
    batches.figures()
    num_tokens = 0
    while num_tokens < max_tokens and time.perf_counter() - begun_s < limit_s:
        num_tokens += next(batches).tokens[:, 1:].size
        time.sleep(step_s)
    wall_s = time.perf_counter() - begun_s
    figures, _ = batches.figures()
    batches.close()
    memory.has_ended.set()
    result = {
        "shard_bytes": data.num_bytes,
        "batch_size": batch_size,
        "tokens": num_tokens,
        "prepared_s": round(prepared_s, 2),
        "first_batch_s": round(first_s, 2),
        "wall_s": round(wall_s, 1),
        "tokens_per_s": round(num_tokens / wall_s),
        "wait_s_after_first": round(figures["data_wait_s"], 3),
        "peak_bytes_of_all": memory.peak_bytes,
    }
    print(tokenizer, json.dumps(result), flush=True)
    return result


def main(gigabytes: float, tokenizer: str, place: str) -> None:
    """Measure, print the results and write them to ``RESULT``."""
    with tempfile.TemporaryDirectory() as new:
        folder = Path(place or new)
        write_shards(folder, gigabytes)
        results: dict[str, Any] = {
            "all, bytes": measure(folder, "bytes", 256, gigabytes * 0.9e9, 3600, 0),
            f"a minute, {Path(tokenizer).name}": measure(folder, tokenizer, 256, 1e18, 60, 0),
            "steps of 3 s": measure(folder, tokenizer, 8, 1e18, 60, 3),
        }
    results["machine"] = (
        f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"
    )
    RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    arguments = dict(enumerate(sys.argv[1:]))
    main(float(arguments.get(0, 10)), arguments.get(1, "bytes"), arguments.get(2, ""))
