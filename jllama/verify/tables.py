"""The matrix, and what was found of a checkpoint, for a terminal, a browser and a program."""

from __future__ import annotations

import dataclasses
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

from jllama.verify.checkpoint import CheckpointReport
from jllama.verify.checks import VISIBLE, Group, Result

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
style='background:hsl(135 45% {{ (88 - 9 * [log10(cell.margin), 3] | min) | round | int }}%)'
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


def _machine() -> dict[str, str]:
    """What the checks ran on."""
    device = jax.devices()[0]
    packages = ("jllama", "jax", "jaxlib", "flax", "numpy", "gguf", "orbax-checkpoint")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"device": f"{device.platform} {device.device_kind}", "python": platform.python_version()} | versions


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
    return _finite({"passed": all(result.passed for result in results), "machine": _machine(), "results": rows})


def _finite(value: Any) -> Any:
    """The same data with null for numbers that are not finite: JSON has none."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(results: Sequence[Result], width: int) -> list[RenderableType]:
    """The results as tables that fit a terminal so many characters wide."""
    shown: list[RenderableType] = []
    for title, columns, rows in _sections(results):
        shown.append(Text(f"\n{title}", style="bold"))
        if not columns[0]:  # a list, and no grid
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
    return _html_page(summary(results), failures(results), _sections(results), {"time": f"{seconds:.0f} s"})


def _html_page(verdict: str, lines: list[str], sections: Iterable[Section], facts: dict[str, str]) -> str:
    """A page with a verdict (``PASS: ...`` or ``FAIL: ...``), what there is to say, tables, and facts by name."""
    word, _, rest = verdict.partition(": ")
    return _PAGE.render(word=word, rest=rest, lines=lines, sections=sections, facts=_machine() | facts)


def _error_cell(error: float, tolerance: float, title: str) -> Cell:
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
    cell = _error_cell(result.error, result.check.tolerance, title)
    if result.check.group != "mutations":
        return cell
    return cell._replace(margin=result.ratio / VISIBLE, ratio=f"{result.ratio:,.0f}x")


def _text(cell: Cell) -> Text:
    if cell.margin is None:
        return Text(cell.text, style="dim" if cell.text == "-" else "")
    style = "green" if cell.margin > 1 else "bold red"
    return Text(f"{cell.text}\n{cell.ratio}".rstrip(), style=style)


# A checkpoint


def _facts(found: CheckpointReport) -> dict[str, str]:
    """What a checkpoint is and how it did, each in a few words."""
    config, scaling = found.config, found.config.rope_scaling
    rope = f"theta {config.rope_theta:,.0f}" + (f", {scaling.type} x{scaling.factor:g}" if scaling else "")
    heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values"
    worst = max(found.layer_errors)
    facts = {
        "checkpoint": found.path,
        "nearest release": found.preset or "none of this shape",
        "parameters": f"{found.num_parameters:,}",
        "architecture": f"{config.num_layers} layers of width {config.embed_dim}, {heads}, MLP {config.mlp_dim}",
        "vocabulary": f"{config.vocab_size:,}, {'tied' if config.tie_embeddings else 'its own'} head",
        "RoPE": f"{rope}, context {config.max_seq_len:,}",
        "norm epsilon": f"{config.norm_eps:g}",
        "fingerprint": found.fingerprint,
        "text": f"{found.num_tokens} tokens",
        "layers": f"largest relative error {worst:.1e} (layer {found.layer_errors.index(worst)})",
        "logits": f"relative error {found.logits_error:.1e}; tolerance {found.tolerance:.0e}",
    }
    if found.transformers_error is not None:
        facts["transformers"] = (
            f"{found.transformers_error:.1e} from jllama, {found.transformers_oracle_error:.1e} from the oracle"
        )
    if found.perplexity is not None:
        facts["perplexity"] = (
            f"{found.perplexity:,.2f}; {found.bits_per_byte:.2f} bits per byte "
            f"({found.baseline_bits_per_byte:.2f} by the text's byte frequencies alone)"
        )
    return facts


def checkpoint_verdict(found: CheckpointReport) -> str:
    """One line: PASS or FAIL, and where the first layer diverges if one does."""
    if found.first_divergent_layer is not None:
        return f"FAIL: jllama and the oracle part at layer {found.first_divergent_layer}"
    return "PASS: jllama computes this checkpoint as the oracle does" if found.passed else "FAIL: see the problems"


def checkpoint_lines(found: CheckpointReport) -> list[str]:
    """The facts, what is out of the ordinary and what is wrong, for a terminal."""
    facts = _facts(found)
    lines = [f"{name:{max(map(len, facts)) + 2}}{fact}" for name, fact in facts.items()]
    lines += [f"note: {finding}" for finding in found.findings]
    return lines + [f"problem: {problem}" for problem in found.problems]


def checkpoint_json(found: CheckpointReport) -> dict[str, Any]:
    """Everything, for a program; a number that is not finite is null."""
    return _finite({"passed": found.passed, "machine": _machine(), **dataclasses.asdict(found)})


def checkpoint_page(found: CheckpointReport, seconds: float) -> str:
    """The facts and each layer's error as one HTML page."""
    cells = [_error_cell(error, found.tolerance, f"layer {i}") for i, error in enumerate(found.layer_errors)]
    rows = [(str(first), cells[first : first + 10]) for first in range(0, len(cells), 10)]
    layers = ("Layers: relative error of each against the float64 oracle", [""] * len(rows[0][1]), rows)
    said = found.problems + [f"note: {finding}" for finding in found.findings]
    return _html_page(checkpoint_verdict(found), said, [layers], _facts(found) | {"time": f"{seconds:.0f} s"})
