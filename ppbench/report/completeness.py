"""Whether what was asked for is there: the exit code of evaluations and sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.exits import Exit
from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS, unread


def unjudged(records: Sequence[Record]) -> list[str]:
    """Return the defenses, controls aside, of which no cell is complete: nothing is known of them.

    Of one that sends no byte it is known that nothing can be read.
    """
    defenses = dict.fromkeys(r.config.defense.id for r in records if r.config.defense.id not in CONTROLS)
    known = {r.config.defense.id for r in records if r.status == "complete" or (unread(r) and not sent(r))}
    return [name for name in defenses if name not in known]


def sent(record: Record) -> float:
    """Return the bytes that clients sent a round, and in set-up."""
    return record.cost.bytes_up + record.cost.bytes_setup


def failures(records: Sequence[Record]) -> list[Record]:
    """Return the cells that failed; that nothing in a view can be read is an answer."""
    return [record for record in records if record.status == "failed" and not unread(record)]


def statuses_of(records: Sequence[Record]) -> dict[str, int]:
    """Return how many cells have each status; those whose attack has nothing to read are "not applicable"."""
    words = ["not applicable" if unread(record) else record.status for record in records]
    return {word: words.count(word) for word in ("complete", "diverged", "failed", "not applicable")}


def exit_of(records: Sequence[Record], reliable: bool) -> Exit:
    """Return the exit code of the cells that were asked for; reliable: whether the controls ran and held.

    Controls go first: where they do not hold, no cell says anything, be it there or not.
    """
    if not reliable:
        return Exit.CONTROLS
    complete = any(record.status == "complete" for record in records)
    return Exit.OK if complete and not failures(records) and not unjudged(records) else Exit.FOUND
