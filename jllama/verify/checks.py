"""A check as data: what is compared, how far apart it came out, and how far it may be; and a table of them all."""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

import jllama
from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.functional import Refused
from jllama.parameters import Params, matrix_shape, parameter_table, shape_of

TOLERANCE = 1e-5  # relative error of float32 logits against float64 ones
VISIBLE = 100  # a deliberate mistake must move the logits by at least so many tolerances

Group = Literal["conformance", "mutations", "equalities"]
_TITLES: dict[Group, str] = {
    "conformance": "Conformance: relative error of the logits against the float64 oracle, by variant and file format",
    "mutations": f"Mutations: how far one deliberate mistake moves the logits, and how many tolerances that is "
    f"(at least {VISIBLE})",
    "equalities": "Equalities: ways of running the same model that must agree",
}
_CELL_WIDTH = 10


@dataclasses.dataclass(frozen=True)
class Check:
    """One cell of the matrix: its row and column, what computes the relative error, and the most it may be.

    Once run it has its ``error``; or NaN and the ``problem``, or the ``refusal`` of attention not for such arguments.
    """

    group: Group
    row: str
    column: str
    compute: Callable[[], float]
    tolerance: float = TOLERANCE
    error: float = math.nan
    problem: str = ""
    refusal: str = ""

    name = property(
        lambda self: f"{self.group}/{self.row}/{self.column}", doc="What ``--only`` selects by."
    )
    ratio = property(lambda self: self.error / self.tolerance, doc="The error over the tolerance.")

    @property
    def passed(self) -> bool:
        """Whether right code was within the tolerance or refused or, of a mutation, wrong code was far outside it."""
        return (
            self.ratio >= VISIBLE
            if self.group == "mutations"
            else self.ratio < 1 or bool(self.refusal)
        )


def run_checks(checks: Iterable[Check], threads: int = 1) -> Iterator[Check]:
    """Each check with its error, in order, so many side by side. One that raises has failed, and says why."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(run_check, checks)


def run_check(check: Check) -> Check:
    """The check with its error, with products of float32 in float32 on every platform."""
    try:
        with jax.default_matmul_precision("highest"):
            return dataclasses.replace(check, error=check.compute())
    except Refused as refused:
        return dataclasses.replace(check, refusal=str(refused))
    except Exception as raised:
        problem = (
            str(raised) if isinstance(raised, JllamaError) else f"{type(raised).__name__}: {raised}"
        )
        return dataclasses.replace(check, problem=problem)


def relative_error(actual: Any, expected: Any) -> float:
    """The largest absolute difference over the largest absolute expected value; NaN if the shapes differ or any is."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return math.nan
    difference, size = (
        np.max(np.abs(actual - expected), initial=0.0),
        np.max(np.abs(expected), initial=0.0),
    )
    return float(difference / size) if size else float(difference)


def worst_error(actual: Any, expected: Any) -> float:
    """The largest ``relative_error`` of any row: the large values of one do not excuse another. NaN if any is."""
    return float(
        np.max([relative_error(one, other) for one, other in zip(actual, expected, strict=True)])
    )


def random_params(
    config: LlamaConfig, seed: int, embed_std: float = 1.0, query_gain: float = 1.0
) -> Params:
    """Float32 weights under which mistakes show: normal with fan-in scale, norm scales near one; layers stacked.

    Under the usual 0.02 doubling RoPE's base moves no logit. A small ``embed_std`` makes the first norm's epsilon
    count; ``query_gain`` multiplies the queries, as sharp attention tells small turns apart.
    """
    rng = np.random.default_rng(seed)
    params: Params = {"layers": {}}
    stds = {"embed": embed_std, "layers/wq": query_gain / math.sqrt(config.embed_dim)}
    for path, row in parameter_table(config).items():
        normal = rng.standard_normal(shape_of(row, config))
        std = stds.get(path, 1 / math.sqrt(matrix_shape(row, config)[-1]))
        in_layers, _, name = path.rpartition("/")
        values = (
            std * normal if row.role == "matrix" else (row.init == "ones") + 0.1 * normal
        ).astype(np.float32)
        (params["layers"] if in_layers else params)[name] = values
    return params


def matrix(checks: Sequence[Check], width: int, seconds: float) -> Iterator[RenderableType]:
    """A table for each group that fits so many characters, a line for each check that failed, and PASS or FAIL."""
    for group, title in _TITLES.items():
        if not (
            cells := {(check.row, check.column): check for check in checks if check.group == group}
        ):
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
            least = f"; a mistake must move the logits by {VISIBLE} tolerances" * (
                check.group == "mutations"
            )
            yield Text(f"{check.name}: {check.problem or too_far + least}", style="red")
    made = [check.passed for check in checks if not check.refusal]
    parts = [f"{'PASS' if all(made) else 'FAIL'}: {sum(made)} of {len(made)} checks passed"]
    parts += [f"{len(checks) - len(made)} are not for the attention they name"] * (
        len(made) < len(checks)
    )
    if errors := [
        check.error
        for check in checks
        if check.group == "conformance" and not math.isnan(check.error)
    ]:
        parts.append(f"the largest error of a cell is {max(errors):.1e}")
    if seen := [check.ratio for check in checks if check.group == "mutations" and check.passed]:
        parts.append(f"the least visible mistake is {min(seen):,.0f} tolerances away")
    yield Text(f"{', '.join(parts)} ({seconds:.0f} s)", style="bold")
    if note := precision_note(jax.default_backend()):
        yield Text(note)


def precision_note(platform: str) -> str:
    """What a platform's own arithmetic is too coarse for, and what is done about it; nothing of a CPU."""
    products = {
        "gpu": "TF32, with 10 bits of mantissa",
        "tpu": "bfloat16, with 7 bits of mantissa",
    }.get(platform)
    if not products:
        return ""
    return (
        f"By default a {platform.upper()} multiplies float32 in {products}, which no check at {TOLERANCE:.0e} could "
        'pass. Here products are at the precision "highest", which is float32; your own float32 runs have it by '
        "JAX_DEFAULT_MATMUL_PRECISION=highest. Kernels for 16-bit numbers refuse float32; they are checked in bfloat16."
    )


def _grid(cells: dict[tuple[str, str], Check], width: int) -> Iterator[Table]:
    """Rows and columns in the order of their first appearance, below each other where not all columns fit."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    label = max(map(len, rows)) + 2
    fitting = max((width - label) // _CELL_WIDTH, 1)
    for first in range(0, len(columns), fitting):
        part = columns[first : first + fitting]
        headers = (
            Column(column, justify="right", width=_CELL_WIDTH - 1, vertical="bottom")
            for column in part
        )
        table = Table(
            Column(width=label - 1, no_wrap=True),
            *headers,
            box=None,
            padding=(0, 0, 0, 1),
            pad_edge=False,
        )
        for row in rows:
            table.add_row(row, *(_cell(cells.get((row, column))) for column in part))
        yield table


def _cell(check: Check | None) -> Text:
    if check is None:
        return Text("-", style="dim")
    error = (
        "refused"
        if check.refusal
        else "failed"
        if math.isnan(check.error)
        else f"{check.error:.1e}"
    )
    ratio = f"\n{check.ratio:,.0f}x" * (check.group == "mutations")
    return Text(error + ratio, style="green" if check.passed else "bold red")


def matrix_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Everything, for a program; an error that could not be computed is null."""
    names = ("group", "row", "column", "tolerance", "error", "passed", "problem", "refusal")
    results = [{name: getattr(check, name) for name in names} for check in checks]
    return results_json(all(check.passed for check in checks), results=results)


def results_json(passed: bool, **results: Any) -> dict[str, Any]:
    """Results, and the device, Python and packages that the checks ran on; null for numbers that JSON cannot hold."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy", "gguf", "orbax-checkpoint")
    machine = {
        "device": f"{device.platform} {device.device_kind}",
        "python": platform.python_version(),
    }
    machine["jllama"] = jllama.__version__  # which need not be installed
    machine |= {name: importlib.metadata.version(name) for name in packages}
    return json.loads(
        json.dumps({"passed": passed, "machine": machine} | results), parse_constant=lambda _: None
    )
