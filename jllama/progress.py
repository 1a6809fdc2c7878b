"""Progress bars: on standard error, and only if that is a terminal."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextlib.contextmanager
def progress(
    what: str, total: int | None = None, *, of_bytes: bool = False, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """A bar, and what moves it: ``move(5)`` by so many, ``move(completed=2, total=9, description="x")`` to a state.

    Args:
        what: the description that stands before the bar.
        total: how many there are; None: not known.
        of_bytes: what is counted; a speed is shown, too.
        console: where else is printed meanwhile.
    """
    console = console or Console(stderr=True)
    counts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if of_bytes else [MofNCompleteColumn()]
    columns = TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def move(advance: int | None = None, **state: Any) -> None:
            bar.update(task, advance=advance, **state)

        yield move
