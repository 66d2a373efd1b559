"""CAP of every series: the cells that differ in the value of the control parameter alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.questions.base import question_of
from ppbench.records.schema import Record
from ppbench.report.cap import Cap, series_cap
from ppbench.report.frame import EVALUATION, SERIES, frame_of


@dataclass(frozen=True)
class SeriesCap:
    """The CAP of one series. unit: the same with the question's second distance, if it has one: "recon_unit/1"."""

    main: Cap
    unit: Cap | None


def caps(records: Sequence[Record]) -> dict[str, SeriesCap]:
    """Return the CAP of the series of every record, by the record's `cell_id`."""
    found: dict[str, SeriesCap] = {}
    for evaluation in frame_of(records).by(EVALUATION).values():
        whole = next((r for r in evaluation if r.config.defense.id == "none" and r.status == "complete"), None)
        plain = None if whole is None else whole.utility.accuracy
        for key, members in evaluation.by(SERIES).items():
            others = question_of(key.asked).distances[1:]
            unit = series_cap(members, plain, others[0].name) if others else None
            cap = SeriesCap(series_cap(members, plain), unit)
            found |= {record.cell_id: cap for record in members}
    return found
