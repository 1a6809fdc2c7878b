"""Progress bars: on standard error, and only if that is a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from rich import progress as bars
from rich.console import Console


@contextlib.contextmanager
def progress(
    what: str, total: int | None = None, *, of_bytes: bool = False, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """A bar after ``what``, and what moves it: ``move(5)`` by so many, ``move(completed=2, total=9)`` to a state.

    ``total`` is None if nobody knows; ``of_bytes`` shows a speed, too; ``console`` is where else is printed meanwhile.
    """
    console = console or Console(stderr=True)
    counts = (
        [bars.DownloadColumn(), bars.TransferSpeedColumn()]
        if of_bytes
        else [bars.MofNCompleteColumn()]
    )
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        *counts,
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda advance=None, **state: bar.update(task, advance=advance, **state)
