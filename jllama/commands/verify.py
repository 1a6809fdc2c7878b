"""``python -m jllama verify``."""

import contextlib
import dataclasses
import fnmatch
import functools
import io
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jllama.commands.cli import parse
from jllama.errors import UsageError
from jllama.files import check_writable, fault_of, write_text_whole
from jllama.progress import progress


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Check that this machine computes every Llama as the oracle does, or check a checkpoint of your own.

    Examples:
        --html report.html
        --only gguf,mutations/yarn
        smollm2.gguf

    Args:
        checkpoint: a training run, or a model in any format, or a Hugging Face hub id; empty for the matrix.
        only: the checks to run, by a part of their names group/row/column, such as gguf or mutations/yarn; * stands
            for anything, and a comma between several.
        text: a UTF-8 file to measure a checkpoint's perplexity on, in place of the built-in text.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out: 8 for Llama 3.1 and 3.3, 32 for 3.2.
        json: print the result as JSON.
        html: write what is printed as an HTML page to this file.
    """

    checkpoint: str = ""
    only: str = ""
    text: str = ""
    rope_factor: float | None = None
    json: bool = False
    html: str = ""


def main(argv: list[str], prog: str) -> int:
    """Check, print the results, and say PASS or FAIL; the exit code is 1 if anything failed."""
    options = parse(VerifyOptions, argv, prog, positional=("checkpoint",))
    if options.checkpoint and options.only:
        raise UsageError(
            "--only chooses among the checks of the matrix: leave it out with a checkpoint"
        )
    for name in ("text", "rope_factor"):
        if getattr(options, name) and not options.checkpoint:
            raise UsageError(f"--{name} is about a checkpoint: give its path too")
    if options.html:
        check_writable(Path(options.html))  # before computing for a minute
    file, width = (
        io.StringIO() if options.json else sys.stdout,
        None if sys.stdout.isatty() else 140,
    )
    console = Console(
        file=file, width=width, highlight=False, markup=False, emoji=False, record=True
    )
    result, lines = (_verify_checkpoint if options.checkpoint else _verify_jllama)(
        options, console.width
    )
    for line in lines:
        console.print(line, soft_wrap=not isinstance(line, Table))
    if options.json:
        print(json.dumps(result, indent=1))
    if options.html:
        write_text_whole(Path(options.html), console.export_html())
        print(f"wrote {options.html}", file=sys.stderr)
    return 0 if result["passed"] else 1


def _verify_checkpoint(options: VerifyOptions, width: int) -> tuple[dict[str, Any], Iterable[Any]]:
    from jllama.verify.checkpoint import checkpoint_lines, verify_checkpoint
    from jllama.verify.checks import results_json

    start_s, console = time.perf_counter(), Console(stderr=True)
    with fault_of(f"--text {options.text} is not UTF-8 text", UnicodeDecodeError):
        text = Path(options.text).read_text(encoding="utf-8") if options.text else None
    with console.status("opening") as status:
        on_stage = (
            status.update
            if console.is_terminal
            else functools.partial(print, file=sys.stderr, flush=True)
        )
        result = verify_checkpoint(
            options.checkpoint, text, rope_factor=options.rope_factor, on_stage=on_stage
        )
    lines = checkpoint_lines(result, time.perf_counter() - start_s)
    return results_json(result.passed, **dataclasses.asdict(result)), lines


def _verify_jllama(options: VerifyOptions, width: int) -> tuple[dict[str, Any], Iterable[Any]]:
    import jax

    from jllama.verify import checks, conformance, equalities, mutations

    with contextlib.suppress(
        RuntimeError
    ):  # JAX is in use already: the check of sharding then fails
        jax.config.update(
            "jax_num_cpu_devices", 8
        )  # to simulate a mesh; everything else runs on the first device
    start_s, right, results = time.perf_counter(), conformance.jllama_itself(), []
    every = (
        conformance.conformance_checks(right)
        + mutations.mutation_checks()
        + equalities.equality_checks(right)
    )
    patterns = [
        f"*{part.strip().lower()}*" for part in options.only.split(",") if part.strip()
    ] or ["*"]
    selected = [
        check for check in every if any(fnmatch.fnmatch(check.name.lower(), p) for p in patterns)
    ]
    if not selected:
        names = sorted({name for check in every for name in (check.group, check.row, check.column)})
        raise UsageError(
            f"no check's name contains {options.only!r}; names are made of {', '.join(names)}"
        )
    total = len(selected)
    threads = min(
        os.cpu_count() or 1, 8
    )  # most of the time is compiling, which takes one core each
    with progress(selected[0].name) as move:
        for done, result in enumerate(checks.run_checks(selected, threads), 1):
            results.append(result)
            move(completed=done, total=total, description=selected[min(done, total - 1)].name)
            if (
                not sys.stderr.isatty() and done * 10 // total > (done - 1) * 10 // total
            ):  # a line for every tenth
                print(f"{done} of {total} checks done: {result.name}", file=sys.stderr, flush=True)
    return checks.matrix_json(results), checks.matrix(results, width, time.perf_counter() - start_s)
