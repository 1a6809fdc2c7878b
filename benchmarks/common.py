"""What several benchmarks share: the folders, a note of the machine, and plots that read on light
and on dark pages.
"""

import importlib.metadata
import io
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
_INK = "#8b8b8b"  # seen on white and on black
_STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _INK),
    "axes.prop_cycle": matplotlib.cycler(
        color=["#2f81f7", "#e8710a", "#2da44e", "#bf3989", "#8250df"]
    ),
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters: smaller, and the same file each time
    "svg.hashsalt": "jllama",
}


def panels(columns: int, rows: int = 1) -> tuple[Figure, Any]:
    """A transparent figure of charts side by side, and the charts, ``[columns]`` or ``[rows,
    columns]``.
    """
    matplotlib.rcParams.update(_STYLE)
    size = (4 * columns, 3) if rows == 1 else (2.6 * columns, 2.4 * rows)
    figure = Figure(size, layout="constrained", facecolor="none")
    charts = figure.subplots(rows, columns, squeeze=False)
    for chart in charts.flat:
        chart.set_facecolor("none")
    return figure, charts if rows > 1 else charts[0]


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write(
    name: str, result: dict[str, Any], figure: Figure, text: str, packages: Sequence[str] = ("jax",)
) -> None:
    """``benchmarks/results/NAME.json``, with the machine and versions; ``docs/results/NAME.svg``;
    and the text between the marks of that name in docs/results.md.
    """
    machine = f"{os.cpu_count()} CPUs, {_processor()}, Python {platform.python_version()}"
    versions = {package: importlib.metadata.version(package) for package in packages}
    written = json.dumps({**result, "machine": machine, "versions": versions}, indent=1)
    (ROOT / "benchmarks" / "results" / f"{name}.json").write_text(written + "\n")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    named = re.sub('font-family: [^;"]*', "font-family: sans-serif", drawn.getvalue())
    short = re.sub(
        r"(\d\.\d\d)\d+", r"\1", re.sub(r"<!--.*?-->|^ +", "", named, flags=re.MULTILINE)
    )
    (ROOT / "docs" / "results" / f"{name}.svg").write_text(re.sub(r"\n\n+", "\n", short))
    page = ROOT / "docs" / "results.md"
    before, rest = page.read_text().split(f"<!-- {name} -->\n")
    after = rest.partition(f"<!-- end of {name} -->")[2]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    about = f"({machine}; {packages}.)"
    page.write_text(f"{before}<!-- {name} -->\n{text}\n\n{about}\n<!-- end of {name} -->{after}")


def _processor() -> str:
    """The processor's name; what Python calls it where the system keeps no list."""
    info = Path("/proc/cpuinfo")
    told = info.read_text() if info.exists() else ""
    names = [
        line.partition(":")[2].strip()
        for line in told.splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{names[0]}, {'AVX-512' if 'avx512f' in told else 'no AVX-512'}"
        if names
        else platform.platform()
    )
