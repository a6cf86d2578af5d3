"""How far a long batch is, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int], None]
"""Called with (completed, all)."""


@contextmanager
def progress_bar(total: int) -> Iterator[Progress]:
    """A bar that is there while the context lasts, and gone afterwards."""
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total)

        def tell(completed: int, total: int) -> None:
            bar.update(task, completed=completed, total=total)

        yield tell
