"""The matrix for a terminal, a browser and a program."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jinja2
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from jllama.verify.compare import VISIBLE, Group, Result

_TITLES: dict[Group, str] = {
    "conformance": "Conformance: relative error of the logits against the float64 oracle, by variant and file format",
    "mutations": f"Mutations: how far one deliberate mistake moves the logits, and how many tolerances that is "
    f"(at least {VISIBLE})",
    "equalities": "Equalities: ways of running the same model that must agree",
}
_CELL_WIDTH = 10

_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(
    """\
<!doctype html><html lang=en><meta charset=utf-8><title>jllama verify: {{ word }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-weight: 650; } h2 { font-weight: 600; font-size: 1.1rem; margin-top: 2.2rem; }
.verdict { padding: .1rem .8rem; border-radius: .4rem; color: white; }
.pass { background: #1a7f37; } .fail, .bad { background: #c62828; color: white; } .scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 3px; font-size: 13px; }
th { font-weight: 600; text-align: left; padding: .2rem .5rem; vertical-align: bottom; } thead th { max-width: 6.5rem; }
td { padding: .25rem .6rem; border-radius: .25rem; font-variant-numeric: tabular-nums; }
small { opacity: .75; display: block; }
</style>
<h1>jllama verify <span class='verdict {{ word.lower() }}'>{{ word }}</span></h1><p>{{ rest }}</p>
<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% for title, columns, rows in sections %}
<h2>{{ title }}</h2><div class=scroll><table>
<thead><tr><th></th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
{% for label, cells in rows %}
<tr><th>{{ label }}</th>
{% for cell in cells %}
<td {% if cell.margin is none %}{% elif cell.margin > 1 -%}
style='background:hsl(135 45% {{ 88 - 9 * [log10(cell.margin), 3] | min }}%)'
{%- else %}class=bad{% endif %} title='{{ cell.title }}'>
{{- cell.text }}<small>{{ cell.ratio }}</small></td>
{% endfor %}
</tr>
{% endfor %}
</table></div>
{% endfor %}
<h2>Facts</h2><table>
{% for name, fact in facts.items() %}<tr><td>{{ name }}</td><td>{{ fact }}</td></tr>{% endfor %}
</table></html>
""",
    globals={"log10": math.log10},
)


class Cell(NamedTuple):
    """What stands in a table: a word, or an error with how many times as good as needed it is (over 1 if it passed).

    ``ratio`` is shown below it, and ``title`` under the pointer.
    """

    text: str
    margin: float | None = None
    ratio: str = ""
    title: str = ""


Section = tuple[str, list[str], list[tuple[str, list[Cell]]]]
"""A title, columns, and rows, each with its name."""


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
    passed = sum(result.passed for result in results)
    seen = [result.ratio for result in results if result.check.group == "mutations" and result.passed]
    parts = [f"{passed} of {len(results)} checks passed"]
    if worst := [r.error for r in results if r.check.group == "conformance" and not math.isnan(r.error)]:
        parts.append(f"the largest error of a cell is {max(worst):.1e}")
    if seen:
        parts.append(f"the least visible mistake is {min(seen):,.0f} tolerances away")
    return f"{'PASS' if passed == len(results) else 'FAIL'}: {', '.join(parts)}"


def failures(results: Iterable[Result]) -> list[str]:
    """One line for each check that failed."""

    def too_far(result: Result) -> str:
        least = f"; a mistake must move the logits by {VISIBLE} tolerances" * (result.check.group == "mutations")
        return f"relative error {result.error:.1e}, tolerance {result.check.tolerance:.0e}{least}"

    return [f"{result.check.name}: {result.problem or too_far(result)}" for result in results if not result.passed]


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything, for a program; an error that could not be computed is null."""
    rows = [
        {name: getattr(result.check, name) for name in ("group", "row", "column", "tolerance")}
        | {name: getattr(result, name) for name in ("error", "passed", "problem")}
        for result in results
    ]
    return finite({"passed": all(result.passed for result in results), "machine": machine(), "results": rows})


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
    for title, columns, rows in _sections(results):
        shown.append(Text(f"\n{title}", style="bold"))
        if not columns[0]:
            error, tolerance = (Column(name, justify="right") for name in columns[1:])
            shown.append(table := Table("", "", error, tolerance, box=None, pad_edge=False))
            for row, cells in rows:
                table.add_row(row, *map(_text, cells))
            continue
        label = max(len(row) for row, _ in rows) + 2
        fitting = max((width - label) // _CELL_WIDTH, 1)
        for part in (slice(first, first + fitting) for first in range(0, len(columns), fitting)):
            table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
            table.add_column("", width=label - 1, no_wrap=True)
            for column in columns[part]:
                table.add_column(column, justify="right", width=_CELL_WIDTH - 1, vertical="bottom")
            for row, cells in rows:
                table.add_row(row, *map(_text, cells[part]))
            shown.append(table)
    return shown


def page(results: Sequence[Result], seconds: float) -> str:
    """The results as one HTML page: green by how far below the tolerance (or, of mistakes, above it), red if failed."""
    return html_page(summary(results), failures(results), _sections(results), {"time": f"{seconds:.0f} s"})


def html_page(verdict: str, lines: list[str], sections: Iterable[Section], facts: dict[str, str]) -> str:
    """A page with a verdict (``PASS: ...`` or ``FAIL: ...``), what there is to say, tables, and facts by name."""
    word, _, rest = verdict.partition(": ")
    return _PAGE.render(word=word, rest=rest, lines=lines, sections=sections, facts=machine() | facts)


def error_cell(error: float, tolerance: float, title: str) -> Cell:
    """A cell that is good below a tolerance."""
    return Cell("failed" if math.isnan(error) else f"{error:.1e}", tolerance / max(error, 1e-30), title=title)


def _sections(results: Sequence[Result]) -> Iterator[Section]:
    """A table of each group: a grid of rows and columns in the order of their first appearance, or a list."""
    for group, title in _TITLES.items():
        if not (found := {(r.check.row, r.check.column): r for r in results if r.check.group == group}):
            continue
        tolerances = {result.check.tolerance for result in found.values()}
        if len(tolerances) == 1:
            title += f"; tolerance {tolerances.pop():.0e}"
        if group == "equalities":
            rows = [
                (row, [Cell(column), _cell(result), Cell(f"{result.check.tolerance:.0e}")])
                for (row, column), result in found.items()
            ]
            yield title, ["", "error", "tolerance"], rows
        else:
            names, columns = (list(dict.fromkeys(place[axis] for place in found)) for axis in (0, 1))
            yield title, columns, [(row, [_cell(found.get((row, column))) for column in columns]) for row in names]


def _cell(result: Result | None) -> Cell:
    if result is None:
        return Cell("-")
    title = f"{result.check.name}: {result.problem or f'relative error {result.error:.3e}'}"
    cell = error_cell(result.error, result.check.tolerance, title)
    if result.check.group != "mutations":
        return cell
    return cell._replace(margin=result.ratio / VISIBLE, ratio=f"{result.ratio:,.0f}x")


def _text(cell: Cell) -> Text:
    if cell.margin is None:
        return Text(cell.text, style="dim" if cell.text == "-" else "")
    style = "green" if cell.margin > 1 else "bold red"
    return Text(f"{cell.text}\n{cell.ratio}".rstrip(), style=style)
