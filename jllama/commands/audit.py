"""``jllama audit``: compute steps of a run again, and compare them with what it has of them."""

import dataclasses
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jllama.commands.cli import parse
from jllama.commands.train import read_options
from jllama.errors import UsageError
from jllama.progress import progress


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """Compute steps of a run again from the checkpoint before them, and compare the two.

    The run's folder stays as it is. Losses, gradient norms and the fingerprints of weights in
    receipt.json are the same in every bit, or within what rounding allows, or not.

    Examples:
        runs/quickstart --steps 100:110

    Args:
        run: the folder of a training run.
        steps: FIRST:LAST; the steps after FIRST up to LAST are computed.
        json: print the result as JSON.
    """

    run: str
    steps: str = ""
    json: bool = False


def main(argv: list[str], prog: str) -> int:
    """Print what was compared; return 1 if the steps are not those of the run."""
    options = parse(AuditOptions, argv, prog, ("run",))
    numbers = re.fullmatch(r"(\d+):(\d+)", options.steps)
    if not numbers:
        raise UsageError(f"steps is {options.steps!r}; it must be FIRST:LAST, such as 100:110")
    if not (Path(options.run) / "config.yaml").is_file():
        raise UsageError(f"{options.run} is not the folder of a run: give one, such as runs/mine")
    first, last = map(int, numbers.groups())
    config = read_options(["--resume", options.run], prog)
    from jllama.training.audit import audit

    with progress("computing steps again", last - first) as move:
        result = audit(config, first, last, lambda step: move(completed=max(step - first, 0)))
    if options.json:
        fields = dataclasses.asdict(result)
        fields["compared"] = [one._asdict() for one in result.compared]
        print(json.dumps({"passed": result.passed, "verdict": result.verdict} | fields))
        return 0 if result.passed else 1
    table = Table("step", "figure", "then", "now", "relative difference", box=None)
    for one in result.compared:
        show = str if isinstance(one.before, str) else repr
        error = f"{one.error:.1e}" if one.error else "the same bits"
        table.add_row(f"{one.step:,}", one.name, show(one.before), show(one.after), error)
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.print(f"computed again from step {result.start:,}")
    console.print(table)
    for change in result.changes:
        console.print(f"note: {change}", soft_wrap=True)
    console.print(result.verdict, soft_wrap=True)
    return 0 if result.passed else 1
