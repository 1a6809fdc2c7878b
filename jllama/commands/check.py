"""``jllama verify check``: check the submissions of a class, each in a process of its own."""

import dataclasses
import json
import runpy
import signal
import sys
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from jllama.commands.cli import parse
from jllama.core import UsageError


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """Compare model components that many people wrote with the NumPy reference, and print a table.

    A submission is a .py file in the folder, or a subfolder that holds .py files. Its functions
    are recognized by their names: rms_norm, rope, attention, swiglu, cross_entropy, block, model,
    cache, sampler, adamw. help(jllama.check) documents their arguments. Each component runs in a
    process of its own.

    Examples:
        submissions/
        submissions/ --timeout_s 10 --json

    Args:
        folder: the folder of the submissions.
        timeout_s: seconds that a component may take before it counts as failed.
        json: print all results as JSON instead of a table; null marks a missing component.
    """

    folder: str
    timeout_s: float = 30.0
    json: bool = False


def main(argv: list[str], prog: str) -> int:
    """Check every submission and print its problems; return 1 if there are any."""
    options = parse(CheckOptions, argv, prog, ("folder",))
    from jllama.lab.check import MISTAKES

    results = {
        path.stem: {name: _problem(path, name, options.timeout_s) for name in MISTAKES}
        for path in sorted(Path(options.folder).iterdir())
        if path.suffix == ".py" or any(path.glob("*.py"))
    }
    if not results:
        problem = "holds no submissions: give a folder of .py files, or of folders of them"
        raise UsageError(f"{options.folder} {problem}")
    reasons = []
    for submission, problems in results.items():
        distinct = dict.fromkeys(problems.values())
        reasons += [f"{submission}: {problem}" for problem in distinct if problem]
    if options.json:
        print(json.dumps(results))
    else:
        print(f"{'submission':16}", *MISTAKES)
        for submission, problems in results.items():
            marks = {"": "pass", None: "-"}
            cells = [marks.get(problem, "FAIL") for problem in problems.values()]
            print(f"{submission:16}", *map(str.ljust, cells, map(len, MISTAKES)))
        print("", *reasons, sep="\n")
    return 1 if reasons else 0


def _problem(path: Path, name: str, timeout_s: float) -> str | None:
    """Describe what is wrong with a component: "" if it is right, None if it is missing."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            return pool.submit(_judge, path, name, timeout_s).result()
        except BrokenProcessPool:
            return f"{name} ended its process, or was not done after {timeout_s:g} s"
        except (Exception, SystemExit) as error:  # a submission may raise anything
            return f"{type(error).__name__}: {error}"


def _judge(path: Path, name: str, timeout_s: float) -> str | None:
    from jllama.lab import check

    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # its signal ends the process
    sys.stdout = sys.stderr = None  # what submissions print is not shown
    functions = {}
    files = sorted(path.glob("*.py")) or [path]
    sys.path.insert(0, str(files[0].parent))
    for file in files:
        functions |= runpy.run_path(str(file))
    if name not in functions:
        return None
    verdict = getattr(check, name)(functions[name])
    return "" if verdict else str(verdict)
