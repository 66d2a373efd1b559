"""The worst case as a table: one row a defense, control value, stage and batch size, over all attacks that were run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Final

from ppbench.questions.base import question_for, question_of
from ppbench.report.controls import value
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.table import Row

COLUMNS: Final = [
    "dataset", "model", "threat_model", "stage", "batch_size", "probe", "defense", "control", "role", "rank",
    "reliable", "accuracy", "attacks", "n", "plain", "plain_psnr_median", "plain_rmse_mean", "worst",
    "worst_psnr_median", "worst_psnr_median_low", "worst_psnr_median_high", "worst_psnr_worst_decile",
    "worst_rmse_mean", "worst_share_above_20db", "worst_ssim_mean", "worst_lpips_mean",
]  # fmt: skip
"""The columns of worst_case.csv, in order."""
FIGURES = ("psnr_median", "rmse_mean", "psnr_worst_decile", "share_above_20db", "ssim_mean", "lpips_mean")
"""Metrics of the worst case; of the plain one the first two."""


def worst_rows(boards: Sequence[Board]) -> list[Row]:
    """Return the rows of the reconstruction boards by the columns of worst_case.csv; attacks: how many gave images."""
    return [_row(board, entry) for board in boards if question_of(board.setting.kind).inputs for entry in board.entries]


def _row(board: Board, entry: Entry) -> Row:
    setting, worst, plain = board.setting, entry.worst, entry.plain
    median, control = None if worst is None else worst.metric("psnr_median"), entry.defense.control
    return {
        "dataset": setting.data,
        "model": setting.network,
        "threat_model": setting.threat,
        "stage": setting.stage,
        "batch_size": setting.batch,
        "probe": setting.probe,
        "defense": entry.defense.id,
        "control": "" if control is None else f"{control.name}={control.value:g}",
        "role": entry.sample.config.role,
        "rank": entry.rank,
        "reliable": board.reliable,
        "accuracy": entry.sample.utility.accuracy,
        "attacks": sum(question_for(r).inputs and r.status == "complete" for r in entry.records),
        "n": 0 if worst is None else len(worst.victims),
        "plain": None if plain is None else plain.name,
        "worst": None if worst is None else worst.name,
        "worst_psnr_median_low": None if median is None else median.low,
        "worst_psnr_median_high": None if median is None else median.high,
        **{f"plain_{name}": value(plain, name) for name in FIGURES[:2]},
        **{f"worst_{name}": value(worst, name) for name in FIGURES},
    }


def worst_csv(boards: Sequence[Board]) -> str:
    """Return worst_case.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(worst_rows(boards))
    return text.getvalue()
