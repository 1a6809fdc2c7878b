"""``python -m jllama verify``."""

import contextlib
import dataclasses
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jllama.commands.cli import parse
from jllama.commands.terminal import progress
from jllama.errors import JllamaError, UsageError
from jllama.files import check_writable, write_text_whole

if TYPE_CHECKING:  # importing JAX waits until the options are found in order
    from jllama.verify.checks import Check, Result

_WIDE = 140  # characters, where the output is no terminal


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Prove that this machine computes every Llama as the oracle does, or check a checkpoint of your own.

    Without a checkpoint: every variant through every file format against the float64 NumPy oracle, how far deliberate
    mistakes would be seen, and ways of running a model that must agree. With one: that checkpoint, layer by layer.

    Examples:
        --html tables.html
        --only gguf,mutations/yarn
        smollm2.gguf

    Args:
        path: a training run, or a model in any format, or a Hugging Face hub id; empty for the matrix.
        only: the checks to run, by a part of their names group/row/column, such as gguf or mutations/yarn; * stands
            for anything, and a comma between several.
        text: a UTF-8 file to measure a checkpoint on, in place of the built-in text.
        transformers: compare a checkpoint's logits with those of transformers too; takes the whole model's memory.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out: 8 for Llama 3.1 and 3.3, 32 for 3.2.
        json: print the result as JSON.
        html: write the result as an HTML page to this file.
    """

    path: str = ""
    only: str = ""
    text: str = ""
    transformers: bool = False
    rope_factor: float | None = None
    json: bool = False
    html: str = ""


def main(argv: Sequence[str], prog: str) -> int:
    """Check, print what was found, and say PASS or FAIL; the exit code is 1 if anything failed."""
    options = parse(VerifyOptions, argv, prog, positional=("path",))
    if options.html:
        check_writable(Path(options.html))  # before computing for a minute
    return _verify_checkpoint(options) if options.path else _verify_jllama(options)


def _verify_checkpoint(options: VerifyOptions) -> int:
    if options.only:
        raise UsageError("--only chooses among the checks of the matrix: leave it out with a checkpoint")
    text = _text(options.text) if options.text else None
    from jllama.verify import tables
    from jllama.verify.checkpoint import verify_checkpoint

    console, began_s = Console(stderr=True, highlight=False), time.perf_counter()
    with console.status("opening") as status:

        def report_stage(stage: str) -> None:
            status.update(stage)
            if not console.is_terminal:
                print(stage, file=sys.stderr, flush=True)

        found = verify_checkpoint(
            options.path,
            text,
            rope_factor=options.rope_factor,
            transformers=options.transformers,
            report=report_stage,
        )
    seconds = time.perf_counter() - began_s
    if options.json:
        print(json.dumps(tables.checkpoint_json(found), indent=1))
    else:
        for line in tables.checkpoint_lines(found):
            print(line)
        print(f"{tables.checkpoint_verdict(found)} ({seconds:.0f} s)")
    if options.html:
        _write(options.html, tables.checkpoint_page(found, seconds))
    return 0 if found.passed else 1


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JllamaError(f"--text {path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise JllamaError(f"--text {path} cannot be read: {error.strerror}") from error


def _verify_jllama(options: VerifyOptions) -> int:
    for name in ("text", "transformers", "rope_factor"):
        if getattr(options, name):
            raise UsageError(f"--{name} is about a checkpoint: give its path too")
    import jax

    from jllama.verify import tables
    from jllama.verify.conformance import conformance_checks
    from jllama.verify.equalities import equality_checks
    from jllama.verify.implementation import jllama_itself
    from jllama.verify.mutations import mutation_checks

    with contextlib.suppress(RuntimeError):  # JAX is in use already: the check of sharding then fails
        jax.config.update("jax_num_cpu_devices", 8)  # to simulate a mesh; everything else runs on the first device
    began_s = time.perf_counter()
    implementation = jllama_itself()
    checks = [*conformance_checks(implementation), *mutation_checks(), *equality_checks(implementation)]
    results = _run(_selected(checks, options.only))
    seconds = time.perf_counter() - began_s
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    if options.json:
        print(json.dumps(tables.as_json(results), indent=1))
    else:
        for table in tables.tables(results, console.width):
            console.print(table)
        console.print()
        for failure in tables.failures(results):
            console.print(failure, style="red", soft_wrap=True)
        console.print(f"{tables.summary(results)} ({seconds:.0f} s)", style="bold", soft_wrap=True)
    if options.html:
        _write(options.html, tables.page(results, seconds))
    return 0 if all(result.passed for result in results) else 1


def _selected(checks: list["Check"], only: str) -> list["Check"]:
    patterns = [pattern.strip().lower() for pattern in only.split(",") if pattern.strip()] or ["*"]
    found = [check for check in checks if any(fnmatch.fnmatch(check.name.lower(), f"*{p}*") for p in patterns)]
    if not found:
        parts = sorted({part for check in checks for part in (check.group, check.row, check.column)})
        raise UsageError(f"no check's name contains {only!r}; names are made of {', '.join(parts)}")
    return found


def _run(checks: list["Check"]) -> list["Result"]:
    """All results; on stderr what is running, as a bar or (no terminal) a line for every tenth that is done."""
    from jllama.verify.checks import run_checks

    results = []
    with progress(checks[0].name) as move:
        for number, result in enumerate(run_checks(checks), 1):
            results.append(result)
            following = checks[number].name if number < len(checks) else ""
            move(completed=number, total=len(checks), description=following)
            if not sys.stderr.isatty() and number * 10 // len(checks) > (number - 1) * 10 // len(checks):
                print(f"{number} of {len(checks)} checks done: {result.check.name}", file=sys.stderr, flush=True)
    return results


def _write(path: str, page: str) -> None:
    write_text_whole(Path(path), page)
    print(f"wrote {path}", file=sys.stderr)
