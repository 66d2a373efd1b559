"""CAP of every series: the cells that differ in the value of the control parameter alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.questions.base import asked
from ppbench.records.schema import CellConfig, Record
from ppbench.report.cap_series import Cap, series_cap, series_key


@dataclass(frozen=True)
class SeriesCap:
    """The CAP of one series. unit: the same with the question's second distance, if it has one: "recon_unit/1"."""

    main: Cap
    unit: Cap | None


def federation_key(config: CellConfig) -> str:
    """Return what the cells of one federation share, under whatever defense: suite, federation, data, model, seed."""
    model = config.model.model_copy(update={"options": dict(sorted(config.model.options.items()))})
    parts = (config.federation, config.data, model)
    return "\n".join([config.suite, str(config.seed), *(part.model_dump_json() for part in parts)])


def undefended_accuracies(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the accuracy of `none` by `federation_key`, of the first of its complete cells."""
    found: dict[str, float | None] = {}
    for record in records:
        if record.config.defense.id == "none" and record.status == "complete":
            found.setdefault(federation_key(record.config), record.utility.accuracy)
    return found


def caps(records: Sequence[Record]) -> dict[str, SeriesCap]:
    """Return the CAP of the series of every record, by the record's `cell_id`."""
    series: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        series[series_key(record.config)].append(record)
    undefended, found = undefended_accuracies(records), dict[str, SeriesCap]()
    for members in series.values():
        plain = undefended.get(federation_key(members[0].config))
        others = asked(members[0]).distances[1:]
        unit = series_cap(members, plain, others[0].name) if others else None
        cap = SeriesCap(series_cap(members, plain), unit)
        found |= {record.cell_id: cap for record in members}
    return found
