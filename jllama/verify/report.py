"""The matrix for a terminal, a browser and a program."""

from __future__ import annotations

import html
import importlib.metadata
import math
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jllama.verify.compare import VISIBLE, Group, Result

_TITLES: dict[Group, str] = {
    "conformance": "Conformance: relative error of the logits against the float64 oracle, by variant and file format",
    "mutations": f"Mutations: how far one deliberate mistake moves the logits, and how many tolerances that is "
    f"(at least {VISIBLE})",
    "equalities": "Equalities: ways of running the same model that must agree",
}
_GRID: tuple[Group, ...] = ("conformance", "mutations")
_CELL_WIDTH = 10

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-weight: 650; } h2 { font-weight: 600; font-size: 1.1rem; margin-top: 2.2rem; }
.verdict { display: inline-block; padding: .1rem .8rem; border-radius: .4rem; color: white; }
.pass { background: #1a7f37; } .fail { background: #c62828; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 3px; font-size: 13px; }
th { font-weight: 600; text-align: left; padding: .2rem .5rem; vertical-align: bottom; } thead th { max-width: 6.5rem; }
tbody th { vertical-align: middle; }
td { padding: .25rem .6rem; border-radius: .25rem; text-align: right; font-variant-numeric: tabular-nums; }
td.none { color: #999; text-align: center; } td.text { text-align: left; } td.bad { background: #c62828; color: white; }
small { opacity: .75; display: block; } .facts td { text-align: left; padding: .1rem 1.5rem .1rem 0; }
"""


def machine() -> dict[str, str]:
    """What the checks ran on."""
    device = jax.devices()[0]
    packages = ("jllama", "jax", "jaxlib", "flax", "numpy", "gguf", "orbax-checkpoint")
    return {
        "device": f"{device.platform} {device.device_kind}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def summary(results: Sequence[Result]) -> str:
    """One line: PASS or FAIL, and how many of what."""
    failed = [result for result in results if not result.passed]
    seen = [result.ratio for result in results if result.check.group == "mutations" and result.passed]
    parts = [f"{len(results) - len(failed)} of {len(results)} checks passed"]
    if worst := [r.error for r in results if r.check.group == "conformance" and not math.isnan(r.error)]:
        parts.append(f"the largest error of a cell is {max(worst):.1e}")
    if seen:
        parts.append(f"the least visible mistake is {min(seen):,.0f} tolerances away")
    return f"{'FAIL' if failed else 'PASS'}: {', '.join(parts)}"


def failures(results: Iterable[Result]) -> list[str]:
    """One line for each check that failed."""
    return [f"{result.check.name}: {result.problem or _too_far(result)}" for result in results if not result.passed]


def _too_far(result: Result) -> str:
    found = f"relative error {result.error:.1e}, tolerance {result.check.tolerance:.0e}"
    least = f"; a mistake must move the logits by {VISIBLE} tolerances"
    return found + least if result.check.group == "mutations" else found


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything, for a program; an error that could not be computed is null."""
    found = {
        "passed": all(result.passed for result in results),
        "machine": machine(),
        "results": [
            {
                "group": result.check.group,
                "row": result.check.row,
                "column": result.check.column,
                "error": result.error,
                "tolerance": result.check.tolerance,
                "passed": result.passed,
                "problem": result.problem,
            }
            for result in results
        ],
    }
    return finite(found)


def finite(value: Any) -> Any:
    """The same data with null for numbers that are not finite: JSON has none."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(results: Sequence[Result], width: int) -> list[RenderableType]:
    """The results as tables that fit a terminal so many characters wide."""
    shown: list[RenderableType] = []
    for group, title in _TITLES.items():
        if not (found := [result for result in results if result.check.group == group]):
            continue
        shown.append(Text(f"\n{title}{_tolerance(found)}", style="bold"))
        rows, columns, cells = _cells(found)
        if group not in _GRID:
            table = Table(box=None, pad_edge=False)
            for name in ("", "", "error", "tolerance"):
                table.add_column(name, justify="right" if name else "left")
            for result in found:
                table.add_row(result.check.row, result.check.column, _cell(result), f"{result.check.tolerance:.0e}")
            shown.append(table)
            continue
        label = max(map(len, rows)) + 2
        fitting = max((width - label) // _CELL_WIDTH, 1)
        for first in range(0, len(columns), fitting):
            table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
            table.add_column("", width=label - 1, no_wrap=True)
            for column in columns[first : first + fitting]:
                table.add_column(column, justify="right", width=_CELL_WIDTH - 1, vertical="bottom")
            for row in rows:
                table.add_row(row, *(_cell(cells.get((row, column))) for column in columns[first : first + fitting]))
            shown.append(table)
    return shown


def _tolerance(found: Sequence[Result]) -> str:
    tolerances = {result.check.tolerance for result in found}
    return f"; tolerance {tolerances.pop():.0e}" if len(tolerances) == 1 else ""


def _cells(found: Iterable[Result]) -> tuple[list[str], list[str], dict[tuple[str, str], Result]]:
    """Rows and columns in the order of their first appearance, and what stands in each cell."""
    cells = {(result.check.row, result.check.column): result for result in found}
    return list(dict.fromkeys(row for row, _ in cells)), list(dict.fromkeys(column for _, column in cells)), cells


def _cell(result: Result | None) -> Text:
    if result is None:
        return Text("-", style="dim")
    error = "failed" if math.isnan(result.error) else f"{result.error:.1e}"
    ratio = f"\n{result.ratio:,.0f}x" if result.check.group == "mutations" else ""
    return Text(error + ratio, style="green" if result.passed else "bold red")


def page(results: Sequence[Result], seconds: float) -> str:
    """The results as one HTML page: green by how far below the tolerance (or, of mistakes, above it), red if failed."""
    facts = machine() | {"time": f"{seconds:.0f} s"}
    sections = []
    for group, title in _TITLES.items():
        if not (found := [result for result in results if result.check.group == group]):
            continue
        rows, columns, cells = _cells(found)
        if group in _GRID:
            head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
            body = "".join(
                f"<tr><th>{html.escape(row)}</th>{''.join(_html_cell(cells.get((row, c))) for c in columns)}</tr>"
                for row in rows
            )
        else:
            head = "<th></th><th>error</th><th>tolerance</th>"
            body = "".join(
                f"<tr><th>{html.escape(result.check.row)}</th><td class=text>{html.escape(result.check.column)}</td>"
                f"{_html_cell(result)}<td>{result.check.tolerance:.0e}</td></tr>"
                for result in found
            )
        sections.append(
            f"<h2>{html.escape(title)}{_tolerance(found)}</h2><div class=scroll><table><thead><tr><th></th>{head}</tr>"
            f"</thead><tbody>{body}</tbody></table></div>"
        )
    return html_page(summary(results), failures(results), f"{''.join(sections)}<h2>Where</h2>{facts_table(facts)}")


def facts_table(facts: dict[str, Any]) -> str:
    """Facts by name, as HTML."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(fact))}</td></tr>" for name, fact in facts.items()
    )
    return f"<table class=facts>{rows}</table>"


def html_page(verdict: str, problems: Iterable[str], body: str) -> str:
    """A page with a verdict (``PASS: ...`` or ``FAIL: ...``), problems, and a body of HTML."""
    title, (word, _, rest) = "jllama verify", verdict.partition(": ")
    listed = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}: {word}</title>"
        f"<style>{_STYLE}</style><h1>{title} <span class='verdict {word.lower()}'>{word}</span></h1>"
        f"<p>{html.escape(rest)}</p><ul>{listed}</ul>{body}</html>\n"
    )


def _html_cell(result: Result | None) -> str:
    if result is None:
        return "<td class=none>&ndash;</td>"
    title = f"{result.check.name}: {result.problem or f'relative error {result.error:.3e}'}"
    if result.check.group != "mutations":
        return error_cell(result.error, result.check.tolerance, title)
    margin = result.ratio / VISIBLE
    return _cell_of(result.passed, margin, f"{result.error:.1e}<small>{result.ratio:,.0f}x</small>", title)


def error_cell(error: float, tolerance: float, title: str) -> str:
    """A table cell, the greener the further the error is below the tolerance; red above it."""
    shown = "failed" if math.isnan(error) else f"{error:.1e}"
    return _cell_of(error < tolerance, tolerance / max(error, 1e-30), shown, title)


def _cell_of(passed: bool, margin: float, shown: str, title: str) -> str:
    """Three decades of margin go from light to full green."""
    style = f"style='background:hsl(135 45% {88 - 9 * min(math.log10(margin), 3):.0f}%)'" if passed else "class=bad"
    return f"<td {style} title='{html.escape(title, quote=True)}'>{shown}</td>"
