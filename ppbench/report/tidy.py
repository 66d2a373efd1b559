"""`ppbench.load`: the results of a folder as one tidy pandas table, for notebooks and figures.

Tables are computed from the records, as leaderboard.csv and worst_case.csv are, so older archives have all columns too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import pandas
from pydantic import BaseModel

from ppbench.base.errors import UsageError
from ppbench.questions.base import missing_sentences
from ppbench.records.run_files import soundness_of
from ppbench.records.schema import Metric, Record
from ppbench.records.store import open_results
from ppbench.report.columns import CELL_KEY, KEY, LOADED_CELLS, LOADED_VICTIMS, LOADED_WORST, LONG, Column, Row
from ppbench.report.controls import check_harness
from ppbench.report.entries import Board, Entry
from ppbench.report.frame import Frame, frame_of
from ppbench.report.page.boards import boards_of, column_roots, identifying_columns, no_claims, read_column, table_rows
from ppbench.report.worst import Measured, WorstCase, attack_of, cell_of

TableLevel = Literal["cells", "victims", "worst"]
RowGroup = tuple[Row, Sequence[Row]]
"""Fields that rows share, and each row's own fields."""
_FIELDS: Final = {"metric": "name"}
PLACE_FIELDS: Final = frozenset({"kind", "index", "probe", "client", "cohort", "half"})
"""Fields of scores that identify the victim."""
_CASES: Final[tuple[Literal["worst", "plain"], ...]] = ("worst", "plain")


def load(folder: Path | str, level: TableLevel = "cells") -> pandas.DataFrame:
    """Return the results in `folder`, or in an archive of one (`ppbench pack`), as a tidy table.

    Every row is one figure, with its name in `metric` and its value in `value`; docs/columns.md explains the other
    columns. Text is never missing but "", so that grouping by it loses no row; numbers are pandas' nullable types. A
    wide table is a pivot: `frame.pivot(index="cell_id", columns="metric", values="value")`.

    level:
        "cells": one row per cell (an attack on a defense) and metric; one with the reason for a cell without figures.
        "victims": one row per cell, victim and figure: the scores behind all other figures.
        "worst": one row per row of a board and metric, over all attacks (`case` "worst") and over unaware ones
            ("plain"); `label_accuracy` of "worst" is that of the best attack on labels.

    Raises UsageError for a folder without readable results, or an unknown level; warns of single records that cannot be
    read.
    """
    if level not in get_args(TableLevel):
        raise UsageError(f"There is no level {level!r}; give one of {', '.join(get_args(TableLevel))}.")
    store = open_results(Path(folder))
    records, problems = store.readable()
    if not records:
        raise UsageError(f"{folder} holds no record that can be read{': ' * bool(problems)}{''.join(problems[:1])}.")
    for problem in (*problems, *missing_sentences(records)):
        warnings.warn(problem, stacklevel=2)
    frame = frame_of(records)
    if level == "victims":
        return _frame(((_cell(frame, r), _scores(r)) for r in frame), LOADED_VICTIMS)
    all_boards = boards_of(frame, no_claims, check_harness(soundness_of(store)).ok is not False)
    if level == "worst":
        cases = [(board, entry, case) for board in all_boards for entry in board.entries for case in _CASES]
        return _frame((_case(*one) for one in cases), LOADED_WORST)
    by_id = {record.cell_id: record for record in frame}
    pairs = [(row, by_id[str(row["cell_id"])]) for row in table_rows(frame, no_claims, all_boards)]
    return _frame(((row | _cell(frame, r), _metrics(r.metrics, r.reason)) for row, r in pairs), LOADED_CELLS)


def _frame(groups: Iterable[RowGroup], columns: Sequence[Column]) -> pandas.DataFrame:
    """Return the rows as a table with typed columns; shared fields are converted once per group."""
    shared: list[Row] = []
    own: list[Row] = []
    places: list[int] = []
    for place, (about, some) in enumerate(groups):
        shared.append(about)
        own += some
        places += [place] * len(some)
    mine = [column for column in columns if own and column.name in own[0]]
    parts = [
        _typed(shared, [column for column in columns if column not in mine]).take(places).reset_index(drop=True),
        _typed(own, mine),
    ]
    return pandas.concat(parts, axis=1)[[column.name for column in columns]]


def _typed(rows: Sequence[Row], columns: Sequence[Column]) -> pandas.DataFrame:
    return pandas.DataFrame(
        {column.name: pandas.array([row[column.name] for row in rows], dtype=column.dtype) for column in columns}
    )


def _cell(frame: Frame, record: Record) -> Row:
    """Return a cell's values of the columns `KEY` and `OWN`."""
    about = column_roots(frame.key(record), record)
    return {c.name: read_column(about, c) for c in (*KEY, *CELL_KEY)}


def _metrics(metrics: Iterable[Metric], reason: str | None) -> list[Row]:
    """Return one row per metric; without metrics, one with the reason."""
    rows = [{column.name: getattr(m, _FIELDS.get(column.name, column.name)) for column in LONG} for m in metrics]
    return rows or [{column.name: None for column in LONG} | {"reason": reason}]


def _scores(record: Record) -> list[Row]:
    """Return one row per victim and figure; without victims, one empty row."""
    rows: list[Row] = [
        {
            "victim": ".".join(map(str, score.place)),
            "unit": ".".join(map(str, score.unit)),
            "canary": score.canary,
            "metric": name,
            "value": value,
        }
        for score in record.victims
        for name, value in _figures(score)
    ]
    return rows or [dict.fromkeys(("victim", "unit", "canary", "metric", "value"))]


def _figures(score: BaseModel, prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a score with their field names, prefixed by those of the models around them.

    Lists, text and `PLACE_FIELDS` are left out.
    """
    for name, value in score:
        if isinstance(value, BaseModel):
            yield from _figures(value, f"{prefix}{name}_")
        elif (value is None or isinstance(value, int | float)) and (prefix or name not in PLACE_FIELDS):
            yield f"{prefix}{name}", None if value is None else float(value)


def _case(board: Board, entry: Entry, case: Literal["worst", "plain"]) -> RowGroup:
    """Return a row of a board under all attacks, or under unaware ones."""
    utility, privacy = entry.sample.utility, entry.sample.privacy
    about: Row = {
        **identifying_columns(entry),
        "row": entry.name,
        "reliable": board.reliable,
        "accuracy": utility.accuracy,
        "accuracy_low": utility.low,
        "accuracy_high": utility.high,
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "case": case,
    }
    measured: WorstCase | None = getattr(entry, case)
    by_name: dict[str, tuple[Metric, Measured]] = {}
    if measured is not None:
        metrics = (measured.metric(recorded.name) for recorded in measured.leading.metrics)
        by_name = {metric.name: (metric, measured) for metric in metrics if metric is not None}
    labels = None if entry.labels is None else entry.labels.metric("label_accuracy")
    if case == "worst" and entry.labels is not None and labels is not None:
        by_name["label_accuracy"] = labels, entry.labels
    own = [
        {
            **_metrics([metric], None)[0],
            "attack": attack_of(by),
            "cell_id": cell_of(by).cell_id,
            "headline": metric.name == board.headline,
        }
        for metric, by in by_name.values()
    ]
    nothing: Row = {"attack": "", "cell_id": "", "headline": None}
    return about, own or [_metrics([], "no attack of this kind gave a figure")[0] | nothing]
