"""What a defense costs beside the undefended model: ratios of bytes and memory from records, times from beside them.

Nothing is ranked by any of it: a cost says nothing about privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ppbench.records.schema import Cost, Record
from ppbench.records.times import ClientTime
from ppbench.report.frame import EVALUATION, frame_of

TimesOf = Callable[[Record], ClientTime | None]
"""Finds what was measured in a record's training; `times.time_of` of a folder is one."""


def no_times(record: Record) -> ClientTime | None:
    """Return None: for tables made from records alone."""
    return None


@dataclass(frozen=True)
class Ratios:
    """A client's costs over those of `none` in the same federation; None where `none` did not run or costs nothing."""

    up: float | None = None
    down: float | None = None
    memory: float | None = None


def relative_costs(records: Iterable[Record]) -> dict[str, Ratios]:
    """Return the ratios by cell; a cell that failed has costs too, its training did not fail."""
    found: dict[str, Ratios] = {}
    for evaluation in frame_of(records).by(EVALUATION).values():
        plain = next((r.cost for r in reversed(evaluation) if r.config.defense.id == "none"), None)
        found |= {record.cell_id: ratios(record.cost, plain) for record in evaluation}
    return found


def ratios(cost: Cost, plain: Cost | None) -> Ratios:
    """Return `cost` over `plain`."""
    if plain is None:
        return Ratios()
    return Ratios(
        _over(cost.bytes_up, plain.bytes_up),
        _over(cost.bytes_down, plain.bytes_down),
        _over(cost.memory_peak, plain.memory_peak),
    )


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def cost_sentence(defense: str, records: Sequence[Record], times: TimesOf = no_times) -> str:
    """Return a client's costs in a line for the terminal, over all control values; "" where `none` is not beside.

    As in "costs: up 0.31 of none's bytes, down 1.00; memory 0.20 of none's; time 12x (11-13x)".
    """
    relative = relative_costs(records)
    mine = [r for r in records if r.config.defense.id == defense]
    up, down, memory = (
        [value for r in mine if (value := getattr(relative[r.cell_id], name)) is not None]
        for name in ("up", "down", "memory")
    )
    if not up or not down:
        return ""
    parts = [f"up {_range(up)} of none's bytes, down {_range(down)}"]
    if memory:
        parts.append(f"memory {_range(memory)} of none's")
    taken = [t for r in mine if (t := times(r)) is not None]
    if taken:
        bounds = [b for t in taken for b in (t.low, t.high) if b is not None]
        interval = f" ({min(bounds):.2g}-{max(bounds):.2g}x)" if bounds else ""
        parts.append(f"time {_range([t.ratio for t in taken], '.2g')}x{interval}")
    return "costs: " + "; ".join(parts)


def _range(values: Sequence[float], form: str = ".2f") -> str:
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values)))
    return "-".join(ends)
