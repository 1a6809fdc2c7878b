"""Plans of every configuration that names its topology, and of decoding 405B: docs/plans.md.

    python benchmarks/plans.py [--only NAME ...]

Needs libtpu and JAX's CUDA packages (docs/plan.md), but no TPU and no GPU. Takes about ten minutes
on two cores. With ``--only``, the receipts of the others stay.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plans.md"
_COPIES = "--mesh.data {} --mesh.fsdp 1 --mesh.tensor 8"
DECODING = {
    "int8, 32 rows of 8k, on 32 TPU v5p": f"v5p:4x4x2 {_COPIES.format(4)} --quantize int8",
    "bfloat16, 32 rows of 8k, on 32 TPU v5p": "v5p:4x4x2 --mesh.fsdp 4 --mesh.tensor 8",
    "int8, 32 rows of 8k, on 16 H200": f"h200:16 {_COPIES.format(2)} --quantize int8",
    "bfloat16, 32 rows of 8k, on 16 H200": f"h200:16 {_COPIES.format(2)}",
}
INTRODUCTION = """# Plans of real runs

These are the receipts that `jllama plan` prints for the configurations for TPU slices and GPUs,
without the time to compile. Each is of the real step, compiled ahead of time for absent devices
on two cores of a CPU. Documents in a row are kept apart in all of them. [docs/plan.md](plan.md)
explains the lines. Made by `python benchmarks/plans.py`.
"""


def commands() -> dict[str, str]:
    """Return the arguments of ``jllama plan`` by the titles of the page."""
    arguments = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        title, second, *_ = path.read_text().splitlines()
        plan = re.match("# Its plan: jllama plan (.*)", second)
        if plan:
            arguments[title.removeprefix("# ")] = plan[1]
    shared = "--decode --preset llama3.1-405b --batch_size 32 --seq_len 8192 --topology"
    for title, rest in DECODING.items():
        arguments[f"Llama 3.1 405B decoding, {title}"] = f"{shared} {rest}"
    return arguments


def main() -> None:
    """Run the plans one after the other, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts of titles or commands")
    only = parser.parse_args().only
    section = re.compile(r"^## ([^\n]*)\n\n(```bash\n.*?```\n\n```text\n.*?```)", re.S | re.M)
    before = dict(section.findall(PAGE.read_text())) if only else {}
    sections = {}
    for title, arguments in commands().items():
        if not only or any(word in title + arguments for word in only):
            done = subprocess.run(
                [sys.executable, "-m", "jllama", "plan", *arguments.split()],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            print(f"{title}\n{done.stdout or done.stderr}", flush=True)
            # How long it took says only how busy this machine was.
            receipt = re.sub(r"\ncompiled in .*", "", done.stdout.strip())
            before[title] = f"```bash\njllama plan {arguments}\n```\n\n```text\n{receipt}\n```"
        if title in before:
            sections[title] = before[title]
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "libtpu", "jax-cuda13-plugin")
    ]
    text = "\n\n".join(f"## {title}\n\n{section}" for title, section in sections.items())
    PAGE.write_text(f"{INTRODUCTION}Versions: {', '.join(versions)}.\n\n{text}\n")


if __name__ == "__main__":
    main()
