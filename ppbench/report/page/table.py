"""The table of all cells, one row per cell, and its CSV file; columns: `report.columns`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ppbench.base.files import write_atomic
from ppbench.questions.base import questions
from ppbench.records.schema import Record
from ppbench.report.cap import caps, record_distance
from ppbench.report.columns import CELLS, ENDS, ColumnValue, Row
from ppbench.report.frame import Key, frame_of
from ppbench.report.page.costs import relative_costs
from ppbench.report.page.entries import Board

Claims = Callable[[Record], str]
"""Returns the claim of the defense's paper for a record, in words; "" where none is comparable."""
COLUMNS: Final = [column.name for column in CELLS]
"""The names of the columns of leaderboard.csv, in order."""


def no_claims(record: Record) -> str:
    """Return "", for tables without claims."""
    return ""


def foreign_metrics(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return (name, title) of the metrics of other packages' questions in `records`."""
    foreign = [question for name, question in questions().items() if not question.chapter]
    kinds = {record.config.attack.kind for record in records}
    return [figure for question in foreign if question.name in kinds for figure in question.figures]


def table_rows(records: Sequence[Record], claims: Claims = no_claims, boards: Sequence[Board] = ()) -> list[Row]:
    """Return the table, sorted by suite, threat model, defense, control value, stage, batch, attack and name.

    boards: those of `records`, for the ranks of the cells' rows; no ranks without.
    """
    cells = frame_of(records)
    series, costs, ranks = caps(cells), relative_costs(cells), ranks_of(boards)
    described = [
        column_roots(cells.key(r), r, cap=series[r.cell_id].main, unit=series[r.cell_id].unit, ratios=costs[r.cell_id])
        | {"claimed": claims(r)}
        for r in cells
    ]
    return sorted((_row(about, ranks.get(about["record"].cell_id, {})) for about in described), key=_order)


def ranks_of(boards: Sequence[Board]) -> dict[str, Row]:
    """Return `rank_low` and `rank_high` of each cell's row on the boards, by cell id."""
    return {
        record.cell_id: {"rank_low": entry.rank_low, "rank_high": entry.rank_high}
        for board in boards
        for entry in board.entries
        for record in entry.records
    }


def _order(row: Row) -> tuple[object, ...]:
    value = float("-inf") if row["control_value"] is None else row["control_value"]
    where = row["suite"], row["threat_model"], row["defense"], row["control"] or "", value
    return *where, row["stage"], row["batch_size"], f"{row['role']}{row['attack']}", row["cell_id"]


def column_roots(key: Key, record: Record, **more: Any) -> dict[str, Any]:
    """Return the roots of the columns' paths, for a cell, or for a row of a board by its key and sample."""
    config = record.config
    return {
        "key": key,
        "kind": config.attack.kind,
        "parameters": json.dumps(config.defense.parameters, sort_keys=True),
        "record": record,
        "config": config,
        "utility": record.utility,
        "cost": record.cost,
        "distance": record_distance(record),
        "n": len(record.victims),
        "tuned": tuned_text(record),
        "flags": " ".join(dict.fromkeys(flag.code for flag in record.flags)),
        **more,
    }


def _row(about: Mapping[str, Any], more: Row) -> Row:
    values = dict(more)
    for metric in about["record"].metrics:
        values |= {metric.name: metric.value, f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
        values[f"{metric.name}_chance"] = metric.chance
    return {c.name: read_path(about, c.path) if c.path else values.get(c.name) for c in CELLS}


def read_path(about: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of attributes, None where one on the way is None."""
    first, *rest = path.split(".")
    value = about[first]
    for name in rest:
        value = None if value is None else getattr(value, name)
    return value


def tuned_text(record: Record) -> str:
    """Return the settings that an attack was run with after tuning, as "lr=0.1, tv=0.01"; "" without tuning."""
    if record.tuned is None or not record.tuned.variants:
        return ""
    return ", ".join(f"{name}={value}" for name, value in record.tuned.variants[record.tuned.chosen].items())


def csv_field(value: ColumnValue) -> str:
    """Return a field as text: floats to ten digits; an apostrophe before text that a spreadsheet would run."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if isinstance(value, int) else f"{value:.10g}"
    guarded = f"'{value}" if value.lstrip(" \n\v\f")[:1] in tuple("=+-@\t\r") else value
    return guarded.replace("\r", " ")  # Python 3.11's csv does not quote a lone carriage return


def csv_text(records: Sequence[Record], claims: Claims = no_claims, boards: Sequence[Board] = ()) -> str:
    """Return the CSV: a header and one row per cell; boards: those of `records`.

    A function of the records, the claims and whether the self-test passed, so that it can be verified.
    """
    buffer, more = io.StringIO(), [name for name, _ in foreign_metrics(records)]
    own = {r.cell_id: {m.name: (m.value, m.low, m.high) for m in r.metrics} for r in records if more}
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"{name}{end}" for name in more for end in ("", *ENDS))])
    for row in table_rows(records, claims, boards):
        others = [value for name in more for value in own[str(row["cell_id"])].get(name, (None,) * 3)]
        writer.writerow([csv_field(value) for value in (*row.values(), *others)])
    return buffer.getvalue()


def write_csv(
    records: Sequence[Record], path: Path, *, claims: Claims = no_claims, boards: Sequence[Board] = ()
) -> None:
    """Write the CSV to `path`, completely or not at all. Raises UsageError where it cannot be written."""
    write_atomic(path, csv_text(records, claims, boards).encode())
