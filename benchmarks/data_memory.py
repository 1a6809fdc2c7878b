"""Peak memory and time of preparing a large text file: ``python benchmarks/data_memory.py [megabytes] [tokenizer]``.

The text is synthetic: words of a made-up vocabulary with Zipf's frequencies, in lines of 12. Each kind of file and
tokenizer is prepared in a process of its own, whose peak is the kernel's (``ru_maxrss``).
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CHILD = """
import resource, sys, time
from jllama.data.config import DataConfig
from jllama.data.tokens import prepare_data
before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
data = prepare_data(DataConfig(sys.argv[1], tokenizer=sys.argv[2], cache_dir=sys.argv[3]))
peak, processor = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time())
tokens = data.train_counts.tokens + data.validation_counts.tokens
print(f"{tokens:,} tokens, {time.perf_counter() - begun:.0f} s ({processor:.0f} s of processor time), "
      f"peak {peak / 1024:,.0f} MiB, of which {before / 1024:,.0f} were there before")
"""


def write_text(path: Path, megabytes: int) -> None:
    """Write about so many megabytes of text, packed if the name says so."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvkqjxz"))
    words = np.array(["".join(rng.choice(letters[:20], rng.integers(2, 10))) for _ in range(50_000)])
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        size = 0
        while size < megabytes * 1e6:
            lines = words[np.minimum(rng.zipf(1.2, (20_000, 12)), len(words)) - 1]
            data = "".join(" ".join(line) + ".\n" for line in lines).encode()
            size += file.write(data)


def main(megabytes: int, tokenizers: list[str]) -> None:
    """Print a line for each case."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.txt", "a.txt.gz"):
            begun = time.perf_counter()
            write_text(Path(folder, name), megabytes)
            print(f"{name}: {megabytes} MB written in {time.perf_counter() - begun:.0f} s", flush=True)
            for tokenizer in tokenizers:
                cache = str(Path(folder, f"cache-{name}-{tokenizer}"))
                argv = [sys.executable, "-c", CHILD, str(Path(folder, name)), tokenizer, cache]
                print(f"  {tokenizer}: ", end="", flush=True)
                subprocess.run(argv, check=True)
            Path(folder, name).unlink()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, sys.argv[2:] or ["bytes", "bpe"])
