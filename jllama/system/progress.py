"""Progress bars on standard error, only if it is a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from rich import progress as bars
from rich.console import Console


@contextlib.contextmanager
def progress(
    description: str,
    total: int | None = None,
    *,
    of_bytes: bool = False,
    console: Console | None = None,
) -> Iterator[Callable[..., None]]:
    """Show a bar inside the block; yield a function that moves it.

    ``move(5)`` adds 5, ``move(completed=2, total=9)`` sets a state.

    Args:
        description: the text before the bar.
        total: None if it is unknown.
        of_bytes: show the speed too.
        console: a console that prints other lines meanwhile.
    """
    console = console or Console(stderr=True)
    columns = [bars.TextColumn("{task.description}"), bars.BarColumn()]
    if of_bytes:
        columns += [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    else:
        columns.append(bars.MofNCompleteColumn())
    columns.append(bars.TimeRemainingColumn())
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda advance=None, **state: bar.update(task, advance=advance, **state)
