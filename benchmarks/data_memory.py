"""Peak memory and time of preparing a large text file.

    python benchmarks/data_memory.py [megabytes] [tokenizer]

The text is synthetic: words of a made-up vocabulary with Zipf's frequencies, in lines of 12. Each
kind of file and tokenizer is prepared in its own process, whose peak memory the kernel reports
(``ru_maxrss``).
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

RESULT = Path(__file__).parent / "results" / "data_memory.json"
CHILD = """
import json, resource, sys, time
from jllama.data.config import DataConfig
from jllama.data.tokens import prepare_data
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
data = prepare_data(DataConfig(sys.argv[1], tokenizer=sys.argv[2], cache_dir=sys.argv[3]))
print(json.dumps({
    "text_bytes": data.counts["train"]["bytes"] + data.counts["validation"]["bytes"],
    "tokens": len(data.train) + len(data.validation),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "peak_bytes_before": before * 1024,
    "wall_s": round(time.perf_counter() - begun, 1),
    "processor_s": round(time.process_time(), 1),
}))
"""


def write_text(path: Path, megabytes: int) -> None:
    """Write about ``megabytes`` MB of text, compressed if the name ends in ``.gz``."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvkqjxz"))
    words = np.array(
        ["".join(rng.choice(letters[:20], rng.integers(2, 10))) for _ in range(50_000)]
    )
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        size = 0
        while size < megabytes * 1e6:
            lines = words[np.minimum(rng.zipf(1.2, (20_000, 12)), len(words)) - 1]
            data = "".join(" ".join(line) + ".\n" for line in lines).encode()
            size += file.write(data)


def main(megabytes: int, tokenizers: list[str]) -> None:
    """Measure, print the results and write them to ``RESULT``."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.txt", "a.txt.gz"):
            write_text(Path(folder, name), megabytes)
            for tokenizer in tokenizers:
                cache = str(Path(folder, f"cache-{name}-{tokenizer}"))
                argv = [sys.executable, "-c", CHILD, str(Path(folder, name)), tokenizer, cache]
                done = subprocess.run(argv, check=True, stdout=subprocess.PIPE)
                results[f"{name}, {tokenizer}"] = json.loads(done.stdout)
                print(f"{name}, {tokenizer}:", done.stdout.decode().strip(), flush=True)
            Path(folder, name).unlink()
    results["machine"] = (
        f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"
    )
    RESULT.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2:] or ["bytes", "bpe"])
