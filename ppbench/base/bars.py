"""Progress in the terminal: one bar per phase, with the time left and the cells that did not complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column


class Bars:
    """Progress bars on stderr, one per phase, with the time left: whoever computes cells reports here.

    phase: "training" (steps are rounds) or "attacking" (steps are cells).
    """

    def __init__(self, quiet: bool = False) -> None:
        def whole(width: int) -> Column:
            """Return a column that a narrow terminal does not cut; the last one, of details, is cut instead."""
            return Column(no_wrap=True, min_width=width)

        self._bars = Progress(
            TextColumn("{task.description}", table_column=whole(15)),
            BarColumn(bar_width=16, table_column=whole(16)),
            MofNCompleteColumn(table_column=whole(9)),
            TimeElapsedColumn(table_column=whole(7)),
            TimeRemainingColumn(table_column=whole(7)),
            TextColumn("remaining {task.fields[details]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._tasks: dict[str, TaskID] = {}
        self._ended = Counter[str]()

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._bars.stop()

    def expect(self, phase: str, steps: int) -> None:
        """Show a bar of `steps`, or add `steps` to the bar of this phase."""
        if phase in self._tasks:
            total = self._bars.tasks[self._tasks[phase]].total or 0
            self._bars.update(self._tasks[phase], total=total + steps)
        elif steps:
            unit = "rounds" if phase == "training" else "cells"
            self._tasks[phase] = self._bars.add_task(f"{phase} {unit}", total=steps, details="")

    def advance(self, phase: str, steps: int) -> None:
        """Move the bar of a phase by `steps`."""
        if phase in self._tasks:
            self._bars.advance(self._tasks[phase], steps)

    def cell(self, status: str, about: str = "") -> None:
        """Count a finished cell by its status; the bar shows how many are not complete, and `about`, the last cell."""
        self._ended[status] += 1
        counts = [f"{n} {name}" for name, n in sorted(self._ended.items()) if name != "complete"]
        details = ", ".join(word for word in (*counts, about) if word)
        self._bars.update(self._tasks["attacking"], details=f"({details})" if details else "")

    def ready(self, records: Sequence[object]) -> None:
        """Take the records of the first answer while other cells run; not called in a sweep. Nothing is shown."""

    def say(self, line: str) -> None:
        """Print a line above the bars; nothing if the bars are quiet."""
        if not self._bars.disable:
            self._bars.console.print(line, markup=False, highlight=False)
