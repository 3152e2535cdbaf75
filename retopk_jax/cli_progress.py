"""Progress of a prefill on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def reading(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress callback of the prefill: a bar on a terminal, a line every tenth elsewhere."""
    if not console.is_terminal:
        yield _tenths(console)
        return
    bar = Progress(
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None)

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    bar.start()
    try:
        yield progress
    finally:
        bar.stop()


def _tenths(console: Console) -> Callable[[int, int], None]:
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if 10 * done // total > shown:
            shown = 10 * done // total
            console.print(f"read {done:,} of {total:,} prompt tokens")

    return progress
