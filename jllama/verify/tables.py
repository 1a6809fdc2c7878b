"""The results of checks, and of examining a checkpoint, as tables and lines for a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from jllama.verify.checkpoint import CheckpointResult, shown
from jllama.verify.checks import VISIBLE, Check, Group

_TITLES: dict[Group, str] = {
    "conformance": "Conformance: relative error of the logits against the float64 oracle, by variant and file format",
    "mutations": f"Mutations: how far one deliberate mistake moves the logits, and how many tolerances that is "
    f"(at least {VISIBLE})",
    "equalities": "Equalities: ways of running the same model that must agree",
}
_CELL_WIDTH = 10


def matrix(checks: Sequence[Check], width: int, seconds: float) -> Iterator[RenderableType]:
    """A table for each group that fits so many characters, a line for each check that failed, and PASS or FAIL."""
    for group, title in _TITLES.items():
        if not (cells := {(check.row, check.column): check for check in checks if check.group == group}):
            continue
        tolerances = {check.tolerance for check in cells.values()}
        common = f"; tolerance {tolerances.pop():.0e}" if len(tolerances) == 1 else ""
        yield Text(f"\n{title}{common}", style="bold")
        if group != "equalities":
            yield from _grid(cells, width)
            continue
        numbers = (Column(name, justify="right") for name in ("error", "tolerance"))
        table = Table("", "", *numbers, box=None, pad_edge=False)
        for check in cells.values():
            table.add_row(check.row, check.column, _cell(check), f"{check.tolerance:.0e}")
        yield table
    yield ""
    for check in checks:
        if not check.passed:
            too_far = f"relative error {check.error:.1e}, tolerance {check.tolerance:.0e}"
            least = f"; a mistake must move the logits by {VISIBLE} tolerances" * (check.group == "mutations")
            yield Text(f"{check.name}: {check.problem or too_far + least}", style="red")
    passed = sum(check.passed for check in checks)
    parts = [f"{'PASS' if passed == len(checks) else 'FAIL'}: {passed} of {len(checks)} checks passed"]
    if errors := [check.error for check in checks if check.group == "conformance" and not math.isnan(check.error)]:
        parts.append(f"the largest error of a cell is {max(errors):.1e}")
    if seen := [check.ratio for check in checks if check.group == "mutations" and check.passed]:
        parts.append(f"the least visible mistake is {min(seen):,.0f} tolerances away")
    yield Text(f"{', '.join(parts)} ({seconds:.0f} s)", style="bold")


def _grid(cells: dict[tuple[str, str], Check], width: int) -> Iterator[Table]:
    """Rows and columns in the order of their first appearance, below each other where not all columns fit."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    label = max(map(len, rows)) + 2
    fitting = max((width - label) // _CELL_WIDTH, 1)
    for first in range(0, len(columns), fitting):
        part = columns[first : first + fitting]
        options = {"justify": "right", "width": _CELL_WIDTH - 1, "vertical": "bottom"}
        headers = (Column(column, **options) for column in part)
        table = Table(Column(width=label - 1, no_wrap=True), *headers, box=None, padding=(0, 0, 0, 1), pad_edge=False)
        for row in rows:
            table.add_row(row, *(_cell(cells.get((row, column))) for column in part))
        yield table


def _cell(check: Check | None) -> Text:
    if check is None:
        return Text("-", style="dim")
    error = "failed" if math.isnan(check.error) else f"{check.error:.1e}"
    ratio = f"\n{check.ratio:,.0f}x" * (check.group == "mutations")
    return Text(error + ratio, style="green" if check.passed else "bold red")


def matrix_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Everything, for a program; an error that could not be computed is null."""
    names = ("group", "row", "column", "tolerance", "error", "passed", "problem")
    results = [{name: getattr(check, name) for name in names} for check in checks]
    return _json(all(check.passed for check in checks), results=results)


def checkpoint_lines(result: CheckpointResult, seconds: float) -> Iterator[str]:
    """The facts, notes on what is unusual, what is wrong, and PASS or FAIL."""
    errors = result.layer_errors
    facts = {
        "checkpoint": result.path,
        "nearest release": result.preset or "none of this shape",
        "parameters": f"{result.num_parameters:,}",
        **{field.name: shown(getattr(result.config, field.name)) for field in dataclasses.fields(result.config)},
        "fingerprint": result.fingerprint,
        "text": f"{result.num_tokens} tokens",
        "layers": f"largest relative error {max(errors):.1e} (layer {errors.index(max(errors))})",
        "logits": f"relative error {result.logits_error:.1e}; tolerance {result.tolerance:.0e}",
    }
    if (own := result.transformers_error) is not None:
        facts["transformers"] = f"{own:.1e} from jllama, {result.transformers_oracle_error:.1e} from the oracle"
    if result.perplexity is not None:
        bits, baseline = result.bits_per_byte, result.baseline_bits_per_byte
        facts["perplexity"] = f"{result.perplexity:,.2f}" if result.perplexity < 1e9 else f"{result.perplexity:.0e}"
        facts["bits per byte"] = f"{bits:.2f}; {baseline:.2f} by byte frequencies alone"
    yield from (f"{name:17}{fact}" for name, fact in facts.items())
    yield from (f"note: {finding}" for finding in result.findings)
    yield from (f"problem: {problem}" for problem in result.problems)
    verdict = "PASS: jllama computes this checkpoint as the oracle does" if result.passed else "FAIL: see the problems"
    if result.first_divergent_layer is not None:
        verdict = f"FAIL: jllama and the oracle differ from layer {result.first_divergent_layer} on"
    yield f"{verdict} ({seconds:.0f} s)"


def checkpoint_json(result: CheckpointResult) -> dict[str, Any]:
    """Everything, for a program; a number that is not finite is null."""
    return _json(result.passed, **dataclasses.asdict(result))


def _json(passed: bool, **results: Any) -> dict[str, Any]:
    """Results, and the device, Python and packages that the checks ran on; null for numbers that JSON cannot hold."""
    device = jax.devices()[0]
    packages = ("jllama", "jax", "jaxlib", "flax", "numpy", "gguf", "orbax-checkpoint")
    machine = {"device": f"{device.platform} {device.device_kind}", "python": platform.python_version()}
    machine |= {name: importlib.metadata.version(name) for name in packages}
    return json.loads(json.dumps({"passed": passed, "machine": machine} | results), parse_constant=lambda _: None)
