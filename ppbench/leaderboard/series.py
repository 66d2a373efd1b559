"""CAP of every series: the cells that differ in the value of the control parameter alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.metrics.cap import Cap, series_cap, series_key
from ppbench.records.schema import Record


@dataclass(frozen=True)
class SeriesCap:
    """The CAP of one series. unit: the same with "recon_unit/1", for reconstruction attacks."""

    main: Cap
    unit: Cap | None


def undefended_accuracy(record: Record, records: Sequence[Record]) -> float | None:
    """Return the accuracy of `none` in the federation of `record` (same suite, data, model and seed), if
    there.
    """
    same = ("suite", "federation", "data", "model", "seed")
    for other in records:
        plain = other.config.defense.id == "none" and other.status == "complete"
        if plain and all(getattr(other.config, key) == getattr(record.config, key) for key in same):
            return other.utility.accuracy
    return None


def caps(records: Sequence[Record]) -> dict[str, SeriesCap]:
    """Return the CAP of every series by `series_key`."""
    series: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        series[series_key(record.config)].append(record)
    found = {}
    for key, members in series.items():
        undefended = undefended_accuracy(members[0], records)
        images = members[0].config.attack.kind == "reconstruction"
        unit = series_cap(members, undefended, "recon_unit/1") if images else None
        found[key] = SeriesCap(series_cap(members, undefended), unit)
    return found
