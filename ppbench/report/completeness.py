"""Whether all requested cells are there: the exit code of evaluations and sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.exits import Exit
from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS, nothing_to_read


def defenses_without_result(records: Sequence[Record]) -> list[str]:
    """Return the defenses, without controls, of which no cell is complete.

    A defense that sends no byte has a result: nothing can be read.
    """
    defenses = dict.fromkeys(r.config.defense.id for r in records if r.config.defense.id not in CONTROLS)
    known = {
        r.config.defense.id for r in records if r.status == "complete" or (nothing_to_read(r) and not bytes_sent(r))
    }
    return [name for name in defenses if name not in known]


def bytes_sent(record: Record) -> float:
    """Return the bytes that a client sends per round, plus those of the set-up."""
    return record.cost.bytes_up + record.cost.bytes_setup


def failures(records: Sequence[Record]) -> list[Record]:
    """Return the failed cells, without those whose view has nothing to read, which is a result."""
    return [record for record in records if record.status == "failed" and not nothing_to_read(record)]


def statuses_of(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of cells by status; those whose attack has nothing to read are "not applicable"."""
    words = ["not applicable" if nothing_to_read(record) else record.status for record in records]
    return {word: words.count(word) for word in ("complete", "diverged", "failed", "not applicable")}


def exit_of(records: Sequence[Record], reliable: bool) -> Exit:
    """Return the exit code for the requested cells; reliable: whether the controls ran and hold, which counts first."""
    if not reliable:
        return Exit.CONTROLS
    complete = any(record.status == "complete" for record in records)
    return Exit.OK if complete and not failures(records) and not defenses_without_result(records) else Exit.FOUND
