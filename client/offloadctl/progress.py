"""The progress bar of `generate`, on standard error and only where somebody sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload_client import Progress


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """Gives what `on_progress` wants, or None where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sent", total=None)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                description=description(progress),
                completed=progress.step,
                total=progress.steps or None,
            )

        yield show


def description(progress: Progress) -> str:
    """What happens now, in a word or two."""
    if progress.position is not None:
        return f"queued, place {progress.position}"
    return progress.state
