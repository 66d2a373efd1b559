"""The CAP of worst cases: over the control grid, each value under whatever attacks found most there."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.questions.base import asked
from ppbench.records.schema import Record
from ppbench.report.cap_series import Cap, series_cap
from ppbench.report.frame import GRID, SETTING, Key, frame_of
from ppbench.report.worst import Measured


def worst_caps(records: Sequence[Record]) -> list[tuple[Key, Cap, list[Measured]]]:
    """Return the CAP of each grid of worst cases, with the worst case of each control value.

    A setting that diverged counts with 0, and one without a figure makes the CAP null, as in the CAP of one attack.

    Args:
        records: cells of one kind of attack.
    """
    found = []
    for key, grid in frame_of(records).by(GRID).items():
        law = asked(grid[0]).distance()
        if law is None:
            continue
        cases: list[Measured] = []
        for row in grid.by(SETTING).values():
            diverged = next((record for record in row if record.status == "diverged"), row[0])
            cases.append(row.worst(law.metric) or diverged)
        found.append((key, series_cap(cases, None), cases))
    return found
