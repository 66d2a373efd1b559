"""Ranks on one board: the least leaking first, by the worst case; rows whose intervals overlap share ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ppbench.records.figure import leak
from ppbench.report.page.entries import Entry


def _span(entry: Entry, name: str) -> tuple[float, float] | None:
    """Return the interval of a row's worst case such that larger leaks more, or None where the row is not ranked."""
    refused = {"plain attacks only", "diverged", "failed", "control"}
    metric = entry.worst.metric(name) if entry.worst is not None else None
    if metric is None or metric.low is None or metric.high is None or refused & {b.text for b in entry.badges}:
        return None
    return (-metric.high, -metric.low) if metric.higher_is_safer else (metric.low, metric.high)


def ranked(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries with rank intervals: two rows whose intervals overlap are not separated."""
    spans = [span for entry in entries if (span := _span(entry, name)) is not None]
    found = []
    for entry in entries:
        own = _span(entry, name)
        if own is not None:
            first = 1 + sum(other[1] < own[0] for other in spans)
            last = len(spans) - sum(other[0] > own[1] for other in spans)
            entry = replace(entry, rank=str(first) if first == last else f"{first}-{last}")
        found.append(entry)
    return found


def order(entry: Entry, name: str) -> tuple[int, float, str, float]:
    """Return the sort key: `none`, then the least leaking first, rows without a figure, `full_noise`."""
    metric = entry.worst.metric(name) if entry.worst is not None else None
    metric = metric or (None if entry.labels is None else entry.labels.metric("label_accuracy"))
    leaked = float("inf") if metric is None or metric.value is None else leak(metric)
    place = {"none": 0, "full_noise": 2}.get(entry.defense.id, 1)
    control = entry.defense.control
    return place, leaked, entry.defense.id, 0.0 if control is None else control.value
