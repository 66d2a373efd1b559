"""Why a comparison without any regression may still not be green: nobody could have seen one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ppbench.report.compare.judge import Row
from ppbench.report.compare.naming import figure, named, point, printable
from ppbench.report.controls import CONTROLS

JUDGED = ("regression", "improved", "ok", "inconclusive")
TOLD = ("missing", "incomparable")
"""Rows of these are no verdict either, and have an exit code of their own."""


def doubts_of(rows: Sequence[Row]) -> list[str]:
    """Return, defense by defense, what looks worse and cannot be decided, and what was not judged at all.

    A control that could not be compared is a doubt, too: the attacks may have got weaker.
    """
    defenses = defaultdict[str, list[Row]](list)
    for row in rows:
        if row.status != "new":
            defenses[row.where.defense].append(row)
    found = [line for name, some in sorted(defenses.items()) for line in (*_blind(some), *_unjudged(name, some))]
    if not defenses.keys() - set(CONTROLS):
        found.append("Nothing was judged: of the defense BASELINE holds no cell, or controls alone.")
    return found


def is_blind(row: Row) -> bool:
    """Return whether a row looks worse by more than its tolerance where its victims cannot tell it from chance."""
    worse = row.change is not None and row.change.worse > row.tolerance
    return row.blind and worse and row.where.defense not in CONTROLS


def _blind(rows: Sequence[Row]) -> list[str]:
    """Return a sentence about the blind rows of one defense that look worse, named after the one that does most."""
    some = [(row.change.worse / row.tolerance, row) for row in rows if row.change is not None and is_blind(row)]
    if not some:
        return []
    row = max(some, key=lambda pair: pair[0])[1]
    found = row.change
    assert found is not None
    more = f" (and {len(some) - 1} more rows)" if len(some) > 1 else ""
    needed = max(one.needed or 0 for _, one in some)
    levels = f"{figure(row, found.base)} to {figure(row, found.new)}"
    return [
        f"{point(row)}, {named(row)} looks worse, {levels}{more}, but {found.n} victims are too few to tell any "
        f"change from chance among {row.family} rows; it takes {needed}."
    ]


def _unjudged(name: str, rows: Sequence[Row]) -> list[str]:
    if any(row.status in (*JUDGED, *TOLD) for row in rows):
        return []
    return [f"{printable(name)}: none of its {len(rows)} rows was judged ({printable(rows[0].note)}); {_REMEDY}"]


_REMEDY = "accept a baseline whose cells are complete."
