"""Checks as data (what is compared, its error, its tolerance), how they run, and their tables."""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

import jllama
from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.parameters import Params, matrix_shape, parameter_table, shape_of
from jllama.functional import UnsupportedAttention

TOLERANCE = 1e-5
"""Relative error that float32 logits may have against float64 ones."""
VISIBLE = 100
"""A deliberate mistake must move the logits by at least this many tolerances."""

_TITLES = {
    "conformance": "Conformance: relative error of the logits against the float64 oracle, "
    "by variant and file format",
    "mutations": "Mutations: how far one deliberate mistake moves the logits, "
    f"and how many tolerances that is (at least {VISIBLE})",
    "attention": "Attention: relative error of each implementation against the float64 oracle, "
    "by mask and dtype",
}
_CELL_WIDTH = 10


class RefusedError(JllamaError):
    """A format cannot hold a model."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison, with its result once ``run_check`` has run it.

    ``compute`` returns a relative error, which becomes ``error``. If it raises, ``error`` is NaN.
    Then ``refusal`` says why a format cannot hold the model, or an attention implementation cannot
    serve the arguments, or ``problem`` is any other message.
    """

    group: str
    row: str
    column: str
    compute: Callable[[], float]
    tolerance: float = TOLERANCE
    error: float = math.nan
    problem: str = ""
    refusal: str = ""

    @property
    def name(self) -> str:
        """``group/row/column``, which ``jllama verify --only`` selects by."""
        return f"{self.group}/{self.row}/{self.column}"

    @property
    def ratio(self) -> float:
        """The error in tolerances."""
        return self.error / self.tolerance

    @property
    def passed(self) -> bool:
        """Whether the check found what it should.

        A mutation, which is wrong code, passes if its error is at least ``VISIBLE`` tolerances. Any
        other check passes if its error is below the tolerance or its arguments are refused.
        """
        if self.group == "mutations":
            return self.ratio >= VISIBLE
        return self.ratio < 1 or bool(self.refusal)


def run_checks(checks: Iterable[Check], threads: int = 1) -> Iterator[Check]:
    """Yield each check with its result, in order, while ``threads`` of them run side by side."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(run_check, checks)


def run_check(check: Check) -> Check:
    """Return the check with its result; products of float32 are in float32 on every platform."""
    try:
        with jax.default_matmul_precision("highest"):
            return dataclasses.replace(check, error=check.compute())
    except (UnsupportedAttention, RefusedError) as refused:
        return dataclasses.replace(check, refusal=str(refused))
    except Exception as raised:
        problem = str(raised)
        if not isinstance(raised, JllamaError):
            problem = f"{type(raised).__name__}: {problem}"
        return dataclasses.replace(check, problem=problem)


def detached(values: Any) -> Any:
    """Return an array that NumPy takes, in float64 if it was PyTorch's.

    NumPy takes no PyTorch tensor that has gradients, is on a GPU or in bfloat16.
    """
    return values.detach().cpu().double() if hasattr(values, "detach") else values


def relative_error(actual: Any, expected: Any) -> float:
    """Compute ``max(abs(actual - expected)) / max(abs(expected))`` in float64.

    NaN if the shapes differ or a value is NaN; the absolute error if ``expected`` is all zeros.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return math.nan
    difference = float(np.max(np.abs(actual - expected), initial=0.0))
    size = float(np.max(np.abs(expected), initial=0.0))
    return difference / size if size else difference


def worst_error(actual: Any, expected: Any) -> float:
    """Return the largest ``relative_error`` of any row; NaN if any is.

    Taken by row, the large values of one row do not hide the error of another.
    """
    rows = zip(actual, expected, strict=True)
    return float(np.max([relative_error(*row) for row in rows]))


def random_params(
    config: LlamaConfig, seed: int, embed_std: float = 1.0, query_gain: float = 1.0
) -> Params:
    """Draw float32 weights under which mistakes show, in the training layout (layers stacked).

    Matrices are normal with standard deviation ``1 / sqrt(inputs)``, norm scales are near one. With
    the usual standard deviation of 0.02, doubling RoPE's base would move no logit.

    Args:
        config: the architecture.
        seed: of NumPy's generator.
        embed_std: standard deviation of the embeddings; if small, the first norm's epsilon counts.
        query_gain: factor of the query weights; sharp attention shows small changes of angles.
    """
    rng = np.random.default_rng(seed)
    params: Params = {"layers": {}}
    stds = {"embed": embed_std, "layers/wq": query_gain / math.sqrt(config.embed_dim)}
    for path, row in parameter_table(config).items():
        values = rng.standard_normal(shape_of(row, config))
        if row.role == "matrix":
            values *= stds.get(path, 1 / math.sqrt(matrix_shape(row, config)[-1]))
        else:
            center = 1 if row.init == "ones" else 0
            values = center + 0.1 * values
        in_layers, _, name = path.rpartition("/")
        parent = params["layers"] if in_layers else params
        parent[name] = values.astype(np.float32)
    return params


def matrix(checks: Sequence[Check], width: int, seconds: float) -> Iterator[RenderableType]:
    """Yield what ``jllama verify`` prints about checks that were run.

    That is a table for each group, a line for each check that failed, and PASS or FAIL.

    Args:
        checks: the checks with their results.
        width: characters of a line; a table that is wider is split by columns.
        seconds: how long all checks took.
    """
    for group, title in _TITLES.items():
        members = [check for check in checks if check.group == group]
        if members:
            sizes = dict.fromkeys(check.tolerance for check in members)
            tolerances = " or ".join(f"{size:.0e}" for size in sizes)
            yield Text(f"\n{title}; tolerance {tolerances}", style="bold")
            yield from _grid(members, width)
    yield ""
    for check in checks:
        if not check.passed:
            yield Text(f"{check.name}: {_failure(check)}", style="red")
    yield Text(f"{_summary(checks)} ({seconds:.0f} s)", style="bold")
    note = precision_note(jax.default_backend())
    if note:
        yield Text(note)


def _failure(check: Check) -> str:
    """Describe why a check failed."""
    if check.problem:
        return check.problem
    message = f"relative error {check.error:.1e}, tolerance {check.tolerance:.0e}"
    if check.group == "mutations":
        message += f"; a mistake must move the logits by {VISIBLE} tolerances"
    return message


def _summary(checks: Sequence[Check]) -> str:
    """Return PASS or FAIL, the counts, the largest conformance error and the smallest mutation."""
    served = [check for check in checks if not check.refusal]
    num_passed = sum(check.passed for check in served)
    verdict = "PASS" if num_passed == len(served) else "FAIL"
    parts = [f"{verdict}: {num_passed} of {len(served)} checks passed"]
    if len(served) < len(checks):
        parts.append(f"{len(checks) - len(served)} refused by a format or an implementation")
    computed = [check for check in checks if not math.isnan(check.error)]
    errors = [check.error for check in computed if check.group == "conformance"]
    if errors:
        parts.append(f"the largest error against the oracle is {max(errors):.1e}")
    ratios = [check.ratio for check in checks if check.group == "mutations" and check.passed]
    if ratios:
        parts.append(f"the smallest effect of a mistake is {min(ratios):,.0f} tolerances")
    return ", ".join(parts)


def precision_note(platform: str) -> str:
    """Explain in which precision an accelerator multiplies float32; empty for a CPU."""
    products = {
        "gpu": "TF32, with 10 bits of mantissa",
        "tpu": "bfloat16, with 7 bits of mantissa",
    }.get(platform)
    if not products:
        return ""
    return (
        f"By default a {platform.upper()} multiplies float32 in {products}, too coarse for "
        f"checks at {TOLERANCE:.0e}. Here products have the precision 'highest', which is float32; "
        "set JAX_DEFAULT_MATMUL_PRECISION=highest for the same in your own float32 runs. "
        "Kernels for 16-bit numbers refuse float32; they are checked in bfloat16."
    )


def _grid(checks: Sequence[Check], width: int) -> Iterator[Table]:
    """Yield tables of errors by row and column, in the order of first appearance.

    There is more than one table if not all columns fit in ``width`` characters.
    """
    by_place = {(check.row, check.column): check for check in checks}
    rows = list(dict.fromkeys(check.row for check in checks))
    columns = list(dict.fromkeys(check.column for check in checks))
    label_width = max(map(len, rows)) + 2
    num_fitting = max((width - label_width) // _CELL_WIDTH, 1)
    for first in range(0, len(columns), num_fitting):
        part = columns[first : first + num_fitting]
        headers = (
            Column(column, justify="right", width=_CELL_WIDTH - 1, vertical="bottom")
            for column in part
        )
        label = Column(width=label_width - 1, no_wrap=True)
        table = Table(label, *headers, box=None, padding=(0, 0, 0, 1), pad_edge=False)
        for row in rows:
            table.add_row(row, *(_cell(by_place.get((row, column))) for column in part))
        yield table


def _cell(check: Check | None) -> Text:
    """Show an error, of a mutation with its ratio below; green if the check passed, else red."""
    if check is None:
        return Text("-", style="dim")
    text = f"{check.error:.1e}"
    if check.refusal:
        text = "refused"
    elif math.isnan(check.error):
        text = "failed"
    if check.group == "mutations":
        ratio = f"{check.ratio:,.0f}x" if check.ratio < 999_999.5 else ">999,999x"
        text += f"\n{ratio}"
    return Text(text, style="green" if check.passed else "bold red")


def matrix_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return all results as ``jllama verify --json`` prints them; a NaN error becomes null."""
    names = ("group", "row", "column", "tolerance", "error", "passed", "problem", "refusal")
    results = [{name: getattr(check, name) for name in names} for check in checks]
    return results_json(all(check.passed for check in checks), results=results)


def results_json(passed: bool, **results: Any) -> dict[str, Any]:
    """Return results with the device, Python and packages that produced them.

    Numbers that JSON cannot hold become null.
    """
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy", "gguf", "orbax-checkpoint")
    machine = {
        "device": f"{device.platform} {device.device_kind}",
        "python": platform.python_version(),
        "jllama": jllama.__version__,  # jllama need not be installed
    }
    machine |= {name: importlib.metadata.version(name) for name in packages}
    text = json.dumps({"passed": passed, "machine": machine} | results)
    return json.loads(text, parse_constant=lambda _: None)
