"""``jllama verify bisect``: find where two checkpoints or runs begin to differ."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from jllama.commands.cli import parse
from jllama.system.progress import progress

if TYPE_CHECKING:
    from jllama.lab.bisect import Bisection


@dataclasses.dataclass(frozen=True)
class BisectOptions:
    """Find the first field, tensor, layer and operation in which two checkpoints differ.

    They may be of any formats. Of two training runs, the first step and parameter is found, too.

    Examples:
        smollm2/ smollm2.gguf
        runs/a runs/b --tolerance 0

    Args:
        a: a training run, a model in any format, or the id of a model on the Hugging Face hub.
        b: the other one.
        tolerance: relative differences up to this are allowed.
        json: print all comparisons as JSON.
    """

    a: str
    b: str
    tolerance: float = 1e-5
    json: bool = False


def main(argv: list[str], prog: str) -> int:
    """Print a tree of differences; return 1 if one is over the tolerance."""
    options = parse(BisectOptions, argv, prog, ("a", "b"))
    from jllama.lab.bisect import bisect

    with progress("") as move:
        result = bisect(options.a, options.b, options.tolerance, move)
    return print_bisection(result, as_json=options.json)


def print_bisection(result: "Bisection", *, as_json: bool) -> int:
    """Print what was compared, and return the exit code."""
    from jllama.lab.bisect import bisection_tree
    from jllama.lab.checks import results_json

    passed = result.first is None
    if as_json:
        compared = [difference._asdict() for difference in result.compared]
        print(json.dumps(results_json(passed, verdict=result.verdict, compared=compared)))
    else:
        console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        console.print(bisection_tree(result))
        console.print(result.verdict)
    return 0 if passed else 1
