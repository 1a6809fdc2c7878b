"""``jllama verify``: compare jllama, or a checkpoint, with the NumPy reference."""

import contextlib
import dataclasses
import fnmatch
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jllama.commands.cli import parse
from jllama.core import UsageError, check_fields
from jllama.system.files import atomic_write_text, check_writable, errors_as
from jllama.system.progress import progress

_OF_PEERS = ("precision", "max_tokens", "served_name", "parallel", "timeout_s", "api_key")


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Compare every feature of jllama on this machine, or a checkpoint, with the NumPy reference.

    Examples:
        --html report.html
        --only gguf,mutations/yarn
        smollm2.gguf
        smollm2.gguf --against http://127.0.0.1:8080

    Args:
        checkpoint: a training run, a model in any format, or the id of a model on the Hugging
            Face hub; if it is empty, the matrix of jllama's own checks is run.
        only: parts of the names of checks to run, separated by commas, such as
            gguf,mutations/yarn. A name is group/row/column; * matches any text.
        text: a UTF-8 file to measure a checkpoint's perplexity on, in place of the built-in text.
        against: hold another program that runs the checkpoint against the reference: the address of
            a server with OpenAI's API (llama.cpp, vLLM, SGLang, jllama), or transformers or
            llama.cpp in this process.
        precision: how the other program rounds; auto accepts float32, the dtype of the checkpoint,
            and of a quantized one 8-bit products. One of float32, float16-cache, float16,
            bfloat16, int8-products (llama.cpp's with quantized weights), int8, Q8_0, Q5_1, Q5_0,
            Q4_1, Q4_0.
        max_tokens: the longest prompt for the other program; prompts of 2,048, 8,192, 32,768 and
            100,000 tokens show mistakes at far positions.
        served_name: the name of the model on the server; the first if it is left out.
        parallel: how many requests the server gets at once.
        timeout_s: seconds that an answer of the server may take.
        api_key: a key of the server, if it requires one.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out: 8 for Llama 3.1
            and 3.3, 32 for 3.2.
        json: print the result as JSON.
        html: an HTML file, to which the printed result is written, too.
    """

    checkpoint: str = ""
    only: str = ""
    text: str = ""
    against: str = ""
    precision: str = "auto"
    max_tokens: int = 2048
    served_name: str = ""
    parallel: int = 4
    timeout_s: float = 120.0
    api_key: str = ""
    rope_factor: float | None = None
    json: bool = False
    html: str = ""


def main(argv: list[str], prog: str) -> int:
    """Run the checks and print the results with PASS or FAIL; return 1 if one failed."""
    # 1) Check the options.
    options = parse(VerifyOptions, argv, prog, positional=("checkpoint",))
    if options.checkpoint and options.only:
        raise UsageError(
            "--only chooses among the checks of the matrix: leave it out with a checkpoint"
        )
    for name in ("text", "rope_factor", "against"):
        if getattr(options, name) and not options.checkpoint:
            raise UsageError(f"--{name} is about a checkpoint: give its path too")
    if options.against and options.text:
        raise UsageError("--text is for the checkpoint alone: leave it out with --against")
    for name in _OF_PEERS:
        if getattr(options, name) != getattr(VerifyOptions, name) and not options.against:
            raise UsageError(f"--{name} is about another program: name it with --against")
    check_fields(options, "", "max_tokens", lambda size: size >= 256, "at least 256")
    check_fields(options, "", "parallel", lambda number: 1 <= number <= 64, "from 1 to 64")
    check_fields(options, "", "timeout_s", lambda seconds: seconds > 0, "positive")
    if options.html:
        check_writable(Path(options.html))  # before computing for a minute

    # 2) Choose where to print: with --json, only the JSON goes to stdout.
    console = Console(
        file=io.StringIO() if options.json else sys.stdout,
        width=None if sys.stdout.isatty() else 140,
        highlight=False,
        markup=False,
        emoji=False,
        record=True,
    )

    # 3) Run the checks: of another program, of a checkpoint, or of jllama itself.
    if options.against:
        result, lines = _verify_peer(options)
    elif options.checkpoint:
        result, lines = _verify_checkpoint(options)
    else:
        result, lines = _verify_jllama(options.only, console.width)

    # 4) Print the results.
    for line in lines:
        console.print(line, soft_wrap=not isinstance(line, Table))
    if options.json:
        print(json.dumps(result, indent=1))
    if options.html:
        atomic_write_text(Path(options.html), console.export_html())
        print(f"wrote {options.html}", file=sys.stderr)
    return 0 if result["passed"] else 1


@contextlib.contextmanager
def _stages() -> Iterator[Callable[..., None]]:
    """Yield a function that shows a stage in a progress bar, or as a line without a terminal."""
    with progress("") as move:

        def show(**state: Any) -> None:
            move(**state)
            if "description" in state and not sys.stderr.isatty():
                print(state["description"], file=sys.stderr, flush=True)

        yield show


def _verify_peer(options: VerifyOptions) -> tuple[dict[str, Any], Iterable[Any]]:
    """Return the judgment of another program as JSON, and as printable lines."""
    from jllama.lab import peers
    from jllama.lab.checks import results_json
    from jllama.lab.judge_report import judgment_lines

    start_s = time.perf_counter()
    with _stages() as on_progress:
        on_progress(description="opening")
        checkpoint = options.checkpoint
        model = peers.open_exact(checkpoint, options.precision, options.rope_factor)
        common = (model, options.precision, options.max_tokens, on_progress)
        if options.against in peers.LIBRARIES:
            result = peers.check_library(options.against, checkpoint, *common)
        else:
            result = peers.check_server(
                options.against,
                *common,
                served_name=options.served_name,
                api_key=options.api_key,
                timeout_s=options.timeout_s,
                parallel=options.parallel,
            )
    lines = judgment_lines(result, time.perf_counter() - start_s)
    return results_json(**dataclasses.asdict(result)), lines


def _verify_checkpoint(options: VerifyOptions) -> tuple[dict[str, Any], Iterable[Any]]:
    """Return the result of a checkpoint as JSON, and as printable lines."""
    from jllama.lab.checkpoint import checkpoint_lines, verify_checkpoint
    from jllama.lab.checks import results_json

    start_s = time.perf_counter()
    text = None
    if options.text:
        with errors_as(f"--text {options.text} is not UTF-8 text", UnicodeDecodeError):
            text = Path(options.text).read_text(encoding="utf-8")
    with _stages() as on_progress:
        result = verify_checkpoint(
            options.checkpoint,
            text,
            rope_factor=options.rope_factor,
            on_stage=lambda stage: on_progress(description=stage),
        )
    lines = checkpoint_lines(result, time.perf_counter() - start_s)
    return results_json(result.passed, **dataclasses.asdict(result)), lines


def _verify_jllama(only: str, width: int) -> tuple[dict[str, Any], Iterable[Any]]:
    """Return the matrix of jllama's own checks as JSON, and as printable lines."""
    from jllama.lab import attention, checks, conformance, mutations
    from jllama.system.devices import num_cores

    # Select the checks.
    start_s = time.perf_counter()
    matrix = (
        conformance.conformance_checks(conformance.compiled_jllama())
        + mutations.mutation_checks()
        + attention.attention_checks()
    )
    patterns = [f"*{part.strip().lower()}*" for part in only.split(",") if part.strip()]
    selected = [
        check
        for check in matrix
        if not patterns or any(fnmatch.fnmatch(check.name.lower(), pattern) for pattern in patterns)
    ]
    if not selected:
        parts = {part for check in matrix for part in (check.group, check.row, check.column)}
        raise UsageError(
            f"no check's name contains {only!r}; names are made of {', '.join(sorted(parts))}"
        )

    # Run them in threads, and report progress.
    total = len(selected)
    # Most of the time is compiling, which takes one core for each check.
    num_threads = min(num_cores(), 8)
    results = []
    with progress(selected[0].name) as move:
        for done, result in enumerate(checks.run_checks(selected, num_threads), 1):
            results.append(result)
            move(completed=done, total=total, description=selected[min(done, total - 1)].name)
            is_next_tenth = done * 10 // total > (done - 1) * 10 // total
            if is_next_tenth and not sys.stderr.isatty():
                print(f"{done} of {total} checks done: {result.name}", file=sys.stderr, flush=True)
    return checks.matrix_json(results), checks.matrix(results, width, time.perf_counter() - start_s)
