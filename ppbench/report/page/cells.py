"""The table of all cells: the first as a plain table, and all as JSON that the page draws a screenful at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from ppbench.records.schema import Record
from ppbench.report.controls import value
from ppbench.report.page.badges import adaptive
from ppbench.report.page.table import Row, further, tuned_text

PLAIN = 200
"""Rows of the plain table, which is read without scripts and in print; leaderboard.csv has them all."""
Field = str | float | None
FIGURES: tuple[tuple[str, str, int], ...] = (
    *(("accuracy", "Accuracy", 3), ("mse", "MSE", 4), ("psnr_median", "PSNR median", 1), ("psnr_p95", "p95", 1)),
    *(("psnr_worst_decile", "Worst tenth", 1), ("rmse_mean", "rMSE", 3), ("ssim_mean", "SSIM", 3)),
    *(("test_mse_mean", "Test-MSE", 4), ("lpips_mean", "LPIPS", 3), ("feat_mse_mean", "Feat-MSE", 3)),
    *(("evaluations_per_broken", "Evaluations per broken", 0), ("label_accuracy", "Labels", 3), ("asr", "ASR", 3)),
    *(("auc", "AUC", 3), ("canary_auc", "Canary AUC", 3), ("canary_tpr_at_1pct_fpr", "Canary TPR at 1 %", 3)),
    *(("epsilon_lower", "ε at least", 2), ("agreement", "Agreement", 3), ("output_error", "Output error", 3)),
    *(("tracing_accuracy", "Tracing", 3), ("cap", "CAP", 3)),
)
"""Columns of the CSV that are figures: name, title and decimals; those that no cell has are left out."""


@dataclass(frozen=True)
class Column:
    """One column. kind: "text", "number" or "cell"; digits: decimals of a number, -1 for as many as it has."""

    title: str
    kind: str
    digits: int = -1


@dataclass(frozen=True)
class Cells:
    """All cells. plain: the first rows, as text and value by column, with each row's cell; data: all, as JSON."""

    columns: tuple[Column, ...]
    plain: tuple[tuple[str, tuple[tuple[str, Field], ...]], ...]
    data: Markup
    total: int


def cells_of(table: Sequence[Row], records: Sequence[Record], known: frozenset[str]) -> Cells:
    """Return the table of `records`, whose rows `table` are in the order of the CSV; `known` as `knowing` gives it."""
    by_id = {record.cell_id: record for record in records}
    figures = [f for f in FIGURES if any(row[f[0]] is not None for row in table)]
    figures += [(name, title, 3) for name, title in further(records)]
    several = len({row["suite"] for row in table}) > 1, len({row["seed"] for row in table}) > 1
    columns = _columns(figures, *several)
    lines = [_line(row, by_id[str(row["cell_id"])], known, figures, *several) for row in table]
    plain = tuple(
        (str(row["cell_id"]), tuple((_text(value, column), value) for value, column in zip(line, columns, strict=True)))
        for row, line in list(zip(table, lines, strict=True))[:PLAIN]
    )
    head = [{"title": c.title, "kind": c.kind, "digits": c.digits} for c in columns]
    data = htmlsafe_json_dumps({"columns": head, "rows": lines}, separators=(",", ":"), allow_nan=False)
    return Cells(columns, plain, data, len(table))


def _columns(figures: Sequence[tuple[str, str, int]], suites: bool, seeds: bool) -> tuple[Column, ...]:
    first = [Column("Suite", "text")] if suites else []
    first += [Column("Defense", "text"), Column("Control", "text"), Column("Value", "number")]
    first += [Column("Attack", "text"), Column("Knows", "text"), Column("Threat", "text"), Column("Data", "text")]
    first += [Column("Stage", "text"), Column("Batch", "number")] + ([Column("Seed", "number")] if seeds else [])
    first += [Column("n", "number"), Column("Status", "text")]
    numbers = [Column(title, "number", digits) for _, title, digits in figures]
    return (*first, *numbers, Column("Claimed", "text"), Column("Remarks", "text"), Column("Cell", "cell"))


def _line(
    row: Row,
    record: Record,
    known: frozenset[str],
    figures: Sequence[tuple[str, str, int]],
    suites: bool,
    seeds: bool,
) -> list[Field]:
    follows = record.config.attack.follows
    attack = row["attack"] if follows is None else f"{row['attack']} after {follows}"
    knows = "oracle" if row["oracle"] else "adaptive" if adaptive(record, known) else ""
    where = f"{row['dataset']}, {row['model']}"
    first: list[Field] = [
        *([row["suite"]] if suites else []),
        row["defense"],
        row["control"] or "",
        row["control_value"],
    ]
    first += [
        attack,
        knows,
        row["threat_model"],
        where,
        row["stage"],
        row["batch_size"],
        *([row["seed"]] if seeds else []),
    ]
    numbers: list[Field] = [_shortened(row[name] if name in row else value(record, name)) for name, _, _ in figures]
    return [*first, row["n"], row["status"], *numbers, row["claimed"], _remarks(record), row["cell_id"]]


def _shortened(value: Field) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, int | float) else None


def _remarks(record: Record) -> str:
    """Return what a reader must know about a cell: the victims' role, why it failed, its tuning and its flags."""
    tuned = tuned_text(record)
    words = [record.config.role, record.reason or ""]
    words.append(f"tuned on {record.config.tuning} other images: {tuned}" if tuned else "")
    words += [f"{flag.code.replace('_', ' ')}: {flag.detail}" for flag in record.flags]
    return "; ".join(word for word in words if word)


def _text(value: Field, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:g}" if column.digits < 0 else f"{value:.{column.digits}f}"
