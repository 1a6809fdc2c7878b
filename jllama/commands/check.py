"""``jllama check``: what the submissions of a class get right, each component in a process of its own."""

import dataclasses
import json
import runpy
import signal
import sys
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from jllama.commands.cli import parse
from jllama.errors import UsageError


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """Compare the components that many people wrote with the oracle's, and print a table of what is right.

    A submission is a .py file in the folder, or a folder there that holds .py files. Its functions are recognized by
    their names: rms_norm, rope, attention, swiglu, cross_entropy, block, model, cache, sampler, adamw. What each takes
    is written in help(jllama.check). Each runs in a process of its own.

    Examples:
        submissions/
        submissions/ --timeout_s 10 --json

    Args:
        folder: where the submissions are.
        timeout_s: how long a component may take before it has failed.
        json: print all results as JSON instead of a table; null is a component that a submission does not have.
    """

    folder: str
    timeout_s: float = 30.0
    json: bool = False


def main(argv: list[str], prog: str) -> int:
    """Check every submission, and print what is wrong; the exit code is 1 if anything is."""
    options = parse(CheckOptions, argv, prog, ("folder",))
    from jllama.check import MISTAKES

    results = {
        path.stem: {name: _problem(path, name, options.timeout_s) for name in MISTAKES}
        for path in sorted(Path(options.folder).iterdir())
        if path.suffix == ".py" or any(path.glob("*.py"))
    }
    if not results:
        raise UsageError(
            f"{options.folder} holds no submissions: give a folder of .py files, or of folders of them"
        )
    reasons = [
        f"{who}: {each}" for who in results for each in dict.fromkeys(results[who].values()) if each
    ]
    if options.json:
        print(json.dumps(results))
    else:
        print(f"{'submission':16}", *MISTAKES)
        for who, problems in results.items():
            marks = ({"": "pass", None: "-"}.get(each, "FAIL") for each in problems.values())
            print(f"{who:16}", *map(str.ljust, marks, map(len, MISTAKES)))
        print("", *reasons, sep="\n")
    return int(bool(reasons))


def _problem(path: Path, name: str, timeout_s: float) -> str | None:
    """What is wrong with a component of a submission: empty if nothing is, None if it has no such component."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            return pool.submit(_judge, path, name, timeout_s).result()
        except BrokenProcessPool:
            return f"{name} ended its process, or was not done after {timeout_s:g} s"
        except (Exception, SystemExit) as error:  # of any type: it is the submission's
            return f"{type(error).__name__}: {error}"


def _judge(path: Path, name: str, timeout_s: float) -> str | None:
    from jllama import check

    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # which ends the process
    sys.stdout = sys.stderr = None  # what submissions print is not shown
    functions, files = {}, sorted(path.glob("*.py")) or [path]
    sys.path.insert(0, str(files[0].parent))
    for file in files:
        functions |= runpy.run_path(str(file))
    if name not in functions:
        return None
    verdict = getattr(check, name)(functions[name])
    return "" if verdict else str(verdict)
