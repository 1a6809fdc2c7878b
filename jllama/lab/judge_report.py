"""What ``jllama verify --against`` prints and writes of a judgment."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from jllama.lab.judge import Judgment

_WIDTH = 24  # of a bar


def judgment_lines(judgment: Judgment, seconds: float) -> Iterator[RenderableType]:
    """Yield tables of errors by position, mistake and company, and the verdict."""
    yield f"peer       {judgment.peer}"
    yield f"asked by   {judgment.method}"
    yield f"precision  {judgment.precision}"
    yield f"error      {judgment.error:.1e} nats, root mean square of all log-probabilities"
    if judgment.kl is not None:
        yield f"KL         {judgment.kl:.1e} nats, mean divergence from the oracle's predictions"

    table = _table("By prompt and position, in nats", "prompt", "from position", "error", "allowed")
    for kind, start, error, allowed in judgment.groups:
        row = [kind, f"{start:,}", f"{error:.1e}", f"{allowed:.1e}", _bar(error / allowed)]
        table.add_row(*row, style="" if error <= allowed else "red")
    yield table

    if judgment.mistakes:
        table = _table("Nearest known mistakes: what each leaves, in nats", "mistake", "left")
        for mistake in judgment.mistakes:
            share = mistake.error / judgment.error
            table.add_row(mistake.about, f"{mistake.error:.1e}", _bar(share))
        yield table

    if judgment.behaviors:
        title = "What should change no answer: how many log-probabilities change, and by how much"
        table = _table(title, "what", "share", "largest, in nats")
        for one in judgment.behaviors:
            table.add_row(one.about, f"{one.share:.0%}", f"{one.largest:.1e}", _bar(one.share))
        yield table
    yield ""
    for remark in judgment.remarks:
        yield f"note: {remark}"
    style = "bold green" if judgment.passed else "bold red"
    yield Text(f"{judgment.verdict} ({seconds:.0f} s)", style=style)


def _table(title: str, first: str, *numbers: str) -> Table:
    columns = [Column(first), *(Column(name, justify="right") for name in numbers)]
    return Table(
        *columns, "", title=f"\n{title}", title_justify="left", title_style="bold", box=None
    )


def _bar(share: float) -> str:
    """Return a bar whose full width is 1; so it is for NaN."""
    return "\u2588" * round(min(1.0, share) * _WIDTH)
