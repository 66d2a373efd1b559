"""The worst case as a table: one row per defense, control value, stage and batch size, over all attacks."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ppbench.questions.base import question_for, question_of
from ppbench.report.columns import KEY, WORST, Row
from ppbench.report.controls import value
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.table import column_roots, csv_field, read_path

WORST_FIGURES = (
    *("psnr_median", "rmse_mean", "psnr_worst_decile", "share_above_20db", "ssim_mean", "lpips_mean"),
    *("gain_median", "reidentified", "recognized"),
)
"""Metrics of the worst case; those of the plain one are the first two."""


def worst_rows(boards: Sequence[Board]) -> list[Row]:
    """Return the rows of the reconstruction boards by the columns of worst_case.csv."""
    return [_row(board, entry) for board in boards if question_of(board.setting.kind).inputs for entry in board.entries]


def row_key(entry: Entry) -> Row:
    """Return the columns that identify a row of a board, and its ranks."""
    about = column_roots(entry.key, entry.sample, kind=entry.key.kind)
    ranks: Row = {"rank_low": entry.rank_low, "rank_high": entry.rank_high}
    return {column.name: read_path(about, column.path) for column in KEY} | ranks


def _row(board: Board, entry: Entry) -> Row:
    worst, plain = entry.worst, entry.plain
    median = None if worst is None else worst.metric("psnr_median")
    return {
        **row_key(entry),
        "reliable": board.reliable,
        "level": None if entry.leak is None else entry.leak.level,
        "level_plain": None if entry.leak is None else entry.leak.plain,
        "qualifiers": None if entry.leak is None else " ".join(one.code for one in entry.leak.qualifiers),
        "accuracy": entry.sample.utility.accuracy,
        "attacks": sum(question_for(r).inputs and r.status == "complete" for r in entry.records),
        "n": 0 if worst is None else len(worst.victims),
        "plain": None if plain is None else plain.name,
        "worst": None if worst is None else worst.name,
        "worst_psnr_median_low": None if median is None else median.low,
        "worst_psnr_median_high": None if median is None else median.high,
        **{f"plain_{name}": value(plain, name) for name in WORST_FIGURES[:2]},
        **{f"worst_{name}": value(worst, name) for name in WORST_FIGURES},
    }


def worst_csv(boards: Sequence[Board]) -> str:
    """Return worst_case.csv, floats with all their digits, without the columns that would be empty in every row.

    Which columns it has, beside those that identify rows, depends on the results.
    """
    rows = worst_rows(boards)
    shown = [c.name for c in WORST if not rows or any(row[c.name] not in (None, "") for row in rows)]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(shown)
    for row in rows:
        writer.writerow([field if isinstance(field := row[name], float) else csv_field(field) for name in shown])
    return buffer.getvalue()
