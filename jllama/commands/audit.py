"""``jllama verify audit``: compute steps of a run again, and compare them."""

import dataclasses
import re

from jllama.commands.bisect import print_bisection
from jllama.commands.cli import parse
from jllama.commands.train import read_options
from jllama.core import UsageError
from jllama.system.places import as_place
from jllama.system.progress import progress
from jllama.system.remote import fetch


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
    from jllama.formats.bucket import committed
    from jllama.formats.run import recognizes

    folder = fetch(as_place(options.run), committed)
    if not recognizes(folder):
        raise UsageError(f"{options.run} is not the folder of a run: give one, such as runs/mine")
    first, last = map(int, numbers.groups())
    config = read_options(["--resume", str(folder)], prog)
    from jllama.lab.audit import audit

    with progress("computing steps again", last - first) as move:
        result = audit(config, first, last, lambda step: move(completed=max(step - first, 0)))
    return print_bisection(result, as_json=options.json)
