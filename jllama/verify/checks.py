"""A check as data: what is compared, how far apart it came out, and how far it may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from jllama.config import LlamaConfig
from jllama.errors import JllamaError
from jllama.parameters import Params, matrix_shape, parameter_table, shape_of

TOLERANCE = 1e-5
"""Relative error of float32 logits against float64 ones."""
VISIBLE = 100
"""A deliberate mistake must move the logits by at least so many tolerances."""

Group = Literal["conformance", "mutations", "equalities"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One cell of the matrix: its row and column, what computes the relative error, and the most it may be.

    Once run it has its ``error`` or, if nothing could be compared, NaN and the ``problem``.
    """

    group: Group
    row: str
    column: str
    compute: Callable[[], float]
    tolerance: float = TOLERANCE
    error: float = math.nan
    problem: str = ""

    name = property(lambda self: f"{self.group}/{self.row}/{self.column}", doc="What ``--only`` selects by.")
    ratio = property(lambda self: self.error / self.tolerance, doc="The error over the tolerance.")

    @property
    def passed(self) -> bool:
        """Whether right code was within the tolerance or, of a mutation, wrong code was far outside it."""
        return self.ratio >= VISIBLE if self.group == "mutations" else self.ratio < 1


def run_checks(checks: Iterable[Check]) -> Iterator[Check]:
    """Each check with its error, as it comes. One that raises has failed, and says why."""
    for check in checks:
        try:
            with jax.default_matmul_precision("highest"):
                result = dataclasses.replace(check, error=check.compute())
        except Exception as raised:
            problem = str(raised) if isinstance(raised, JllamaError) else f"{type(raised).__name__}: {raised}"
            result = dataclasses.replace(check, problem=problem)
        yield result


def relative_error(actual: Any, expected: Any) -> float:
    """The largest absolute difference over the largest absolute expected value; NaN if the shapes differ or any is."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return math.nan
    difference, size = np.max(np.abs(actual - expected), initial=0.0), np.max(np.abs(expected), initial=0.0)
    return float(difference / size) if size else float(difference)


def worst_error(actual: Any, expected: Any) -> float:
    """The largest ``relative_error`` of any row: the large values of one do not excuse another. NaN if any is."""
    return float(np.max([relative_error(one, other) for one, other in zip(actual, expected, strict=True)]))


def random_params(config: LlamaConfig, seed: int, embed_std: float = 1.0, query_gain: float = 1.0) -> Params:
    """Float32 weights under which mistakes show: normal with fan-in scale, norm scales near one; layers stacked.

    With the usual standard deviation of 0.02 attention is all but uniform, and doubling RoPE's base moves no logit.
    A small ``embed_std`` makes the first norm's epsilon count; ``query_gain`` multiplies the queries, as sharp
    attention tells small turns apart.
    """
    rng = np.random.default_rng(seed)
    params: Params = {"layers": {}}
    stds = {"embed": embed_std, "layers/wq": query_gain / math.sqrt(config.embed_dim)}
    for path, row in parameter_table(config).items():
        normal = rng.standard_normal(shape_of(row, config))
        std = stds.get(path, 1 / math.sqrt(matrix_shape(row, config)[-1]))
        in_layers, _, name = path.rpartition("/")
        values = (std * normal if row.role == "matrix" else (row.init == "ones") + 0.1 * normal).astype(np.float32)
        (params["layers"] if in_layers else params)[name] = values
    return params
