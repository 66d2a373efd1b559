"""A defense's costs against the undefended model: bytes and memory from records, times from files beside them.

Nothing is ranked by costs: they say nothing about privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ppbench.records.figure import best
from ppbench.records.run_files import ClientTime, EncryptionTime
from ppbench.records.schema import Cost, Metric, Record
from ppbench.report.entries import Board, Entry
from ppbench.report.findings import Refutation, refutation_of
from ppbench.report.frame import EVALUATION, TRAINED, Key, frame_of
from ppbench.report.words import evaluation_words

TimesOf = Callable[[Record], ClientTime | None]
"""Returns the times measured in a record's training, as `times.time_of` of a folder does."""


@dataclass(frozen=True)
class Ratios:
    """A client's costs over those of `none` in the same federation; None where that is missing or costs nothing."""

    up: float | None = None
    down: float | None = None
    memory: float | None = None


def relative_costs(records: Iterable[Record]) -> dict[str, Ratios]:
    """Return the ratios by cell id; failed cells have costs too, as their training did not fail."""
    by_cell: dict[str, Ratios] = {}
    for evaluation in frame_of(records).by(EVALUATION).values():
        plain = next((r.cost for r in reversed(evaluation) if r.config.defense.id == "none"), None)
        by_cell |= {record.cell_id: cost_ratios(record.cost, plain) for record in evaluation}
    return by_cell


def cost_ratios(cost: Cost, plain: Cost | None) -> Ratios:
    """Return the ratios of `cost` to `plain`."""
    names = () if plain is None else ("bytes_up", "bytes_down", "memory_peak")
    return Ratios(*(_over(getattr(cost, name), getattr(plain, name)) for name in names))


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def cost_sentence(defense: str, records: Sequence[Record], times: TimesOf = lambda _: None) -> str:
    """Return "costs: up 0.31 of none's bytes, down 1.00; time 12x (11-13x)" over all control values, or ""."""
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
        parts += [encryption_sentence(t.encryption) for t in taken[:1] if t.encryption is not None]
    return "costs: " + "; ".join(parts)


def _range(values: Sequence[float], form: str = ".2f") -> str:
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values)))
    return "-".join(ends)


def encryption_sentence(time: EncryptionTime | None) -> str:
    """Return "encryption adds 5.9 s a client and round, 2.1 s at the server (phe 1.5.0)", or the reason, or ""."""
    if time is None:
        return ""
    if time.client is None or time.server is None:
        return f"encryption {time.reason}"
    return (
        f"encryption adds {_seconds(time.client)} a client and round, {_seconds(time.server)} at the server "
        f"({time.library})"
    )


def _seconds(time: float) -> str:
    """Return "1,570 s", "5.9 s": two digits, or three from a hundred on."""
    return f"{float(f'{time:.3g}'):,.0f} s" if time >= 100 else f"{time:.2g} s"


# -- the page's table -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CostRow:
    """A setting's costs for a client, absolute and against `none`.

    bound: the largest lower bound on epsilon by its audits; refutation: that of the stated epsilon, or None.
    """

    entry: Entry
    ratios: Ratios
    time: ClientTime | None
    bound: Metric | None = None
    refutation: Refutation | None = None

    @property
    def encryption(self) -> str:
        """The cost of real encryption in words, or ""."""
        return encryption_sentence(None if self.time is None else self.time.encryption)

    @property
    def setting(self) -> str:
        """Data, network and federation in words."""
        return evaluation_words(self.entry.key)


def cost_rows(boards: Sequence[Board], records: Sequence[Record], times: TimesOf) -> list[CostRow]:
    """Return one row per defense setting and federation; in each federation `none` comes first."""
    frame, entries = frame_of(records), dict[Key, Entry]()
    relative, trained = relative_costs(frame), frame.by(TRAINED)
    for board in boards:
        for entry in board.entries:
            entries.setdefault(entry.key.only(TRAINED), entry)
    table = []
    for key, entry in entries.items():
        strongest = best(trained[key], "epsilon_lower")
        bound = None if strongest is None else strongest.metric("epsilon_lower")
        refutation = refutation_of(trained[key])
        table.append(CostRow(entry, relative[entry.sample.cell_id], times(entry.sample), bound, refutation))
    return sorted(table, key=_order)


def _order(row: CostRow) -> tuple[str, bool, str, float]:
    defense = row.entry.defense
    return row.setting, defense.id != "none", defense.id, row.entry.key.value or 0.0
