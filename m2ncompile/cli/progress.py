"""A progress bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from m2ncompile.progress import Progress

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # The front-end sends descriptors 1 and 2 elsewhere while the engine works;
    # a duplicate made before that still reaches the terminal.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(
            *columns,
            console=Console(file=terminal),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bars:
            tasks: dict[str, int] = {}

            def update(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(f"{label}: {stage}", total=total)
                bars.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

            yield update
