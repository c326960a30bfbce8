"""Progress bars (rich, on stderr)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.stats import SpecStats

Advance = Callable[[int, SpecStats], None]


@contextmanager
def batch_progress(total: int) -> Iterator[Advance]:
    """A bar over requests that also shows tokens and the acceptance rate; yields advance(num_done,
    stats).
    """
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total, note="")

        def advance(num_done: int, stats: SpecStats) -> None:
            note = f"{stats.num_emitted_tokens} tokens, acceptance {stats.acceptance_rate:.2f}"
            bar.update(task, advance=num_done, note=note)

        yield advance
