"""The table of all cells: the first as a plain table, and all as JSON for the page's script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from ppbench.records.schema import Record
from ppbench.report.columns import Row
from ppbench.report.controls import value
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import foreign_metrics, tuned_text

PLAIN_ROWS = 200
"""Rows of the plain table, for print and pages without scripts; leaderboard.csv has them all."""
Field = str | float | None
CELL_FIGURES: tuple[tuple[str, str, int], ...] = (
    *(("accuracy", "Accuracy", 3), ("mse", "MSE", 4), ("psnr_median", "PSNR median", 1), ("psnr_p95", "p95", 1)),
    *(("psnr_worst_decile", "Worst tenth", 1), ("rmse_mean", "rMSE", 3), ("ssim_mean", "SSIM", 3)),
    *(("test_mse_mean", "Test-MSE", 4), ("lpips_mean", "LPIPS", 3), ("feat_mse_mean", "Feat-MSE", 3)),
    *(("evaluations_per_broken", "Evaluations per broken", 0), ("label_accuracy", "Labels", 3), ("asr", "ASR", 3)),
    *(("auc", "AUC", 3), ("canary_auc", "Canary AUC", 3), ("canary_tpr_at_1pct_fpr", "Canary TPR at 1 %", 3)),
    *(("epsilon_lower", "ε at least", 2), ("agreement", "Agreement", 3), ("output_error", "Output error", 3)),
    *(("tracing_accuracy", "Tracing", 3), ("tracing_accuracy_chance", "by chance", 3), ("cap", "CAP", 3)),
    *(("reconstruction_accuracy", "Columns right", 3), ("reconstruction_accuracy_chance", "by chance", 3)),
)
"""Figures of the CSV: name, title and decimals; those that no cell has are left out."""


@dataclass(frozen=True)
class PageColumn:
    """One column. kind: "text", "number" or "cell"; digits: decimals of a number, -1 for all."""

    title: str
    kind: str
    of: Callable[[Row, Record], Field]
    digits: int = -1


@dataclass(frozen=True)
class Cells:
    """All cells. plain: the first rows, each with its cell id and texts by column; data: all rows, as JSON."""

    columns: tuple[PageColumn, ...]
    plain: tuple[tuple[str, tuple[str, ...]], ...]
    data: Markup
    total: int


def cell_table(table: Sequence[Row], records: Sequence[Record], known: Knowledge) -> Cells:
    """Return the table of `records`; table: their rows in the order of the CSV; known: which attacks know a defense."""
    by_id = {record.cell_id: record for record in records}
    columns = _columns(table, records, known)
    lines = [[column.of(row, by_id[str(row["cell_id"])]) for column in columns] for row in table]
    plain = tuple(
        (str(row["cell_id"]), tuple(_text(value, column) for value, column in zip(line, columns, strict=True)))
        for row, line in list(zip(table, lines, strict=True))[:PLAIN_ROWS]
    )
    head = [{"title": c.title, "kind": c.kind, "digits": c.digits} for c in columns]
    data = htmlsafe_json_dumps({"columns": head, "rows": lines}, separators=(",", ":"), allow_nan=False)
    return Cells(columns, plain, data, len(table))


def _columns(table: Sequence[Row], records: Sequence[Record], known: Knowledge) -> tuple[PageColumn, ...]:
    """Return the columns, without constant suites and seeds, and without figures that no cell has."""

    def field(title: str, name: str, kind: str = "text") -> PageColumn:
        return PageColumn(title, kind, lambda row, _: row[name])

    def several(column: PageColumn, name: str) -> list[PageColumn]:
        return [column] if len({row[name] for row in table}) > 1 else []

    figures = [f for f in CELL_FIGURES if any(row[f[0]] is not None for row in table)]
    figures += [(name, title, 3) for name, title in foreign_metrics(records)]
    return (
        *several(field("Suite", "suite"), "suite"),
        field("Defense", "defense"),
        PageColumn("Control", "text", lambda row, _: row["control"] or ""),
        field("Value", "control_value", "number"),
        PageColumn("Attack", "text", lambda _, record: _attack(record)),
        PageColumn("Knows", "text", lambda row, record: _knows(row, known.adaptive(record))),
        field("Threat", "threat_model"),
        PageColumn("Data", "text", lambda row, _: f"{row['dataset']}, {row['model']}"),
        field("Stage", "stage"),
        field("Batch", "batch_size", "number"),
        *several(field("Seed", "seed", "number"), "seed"),
        field("n", "n", "number"),
        field("Status", "status"),
        *(PageColumn(title, "number", _figure(name), digits) for name, title, digits in figures),
        field("Claimed", "claimed"),
        PageColumn("Remarks", "text", lambda _, record: _remarks(record)),
        field("Cell", "cell_id", "cell"),
    )


def _attack(record: Record) -> str:
    attack = record.config.attack
    return attack.id if attack.follows is None else f"{attack.id} after {attack.follows}"


def _knows(row: Row, adaptive: bool) -> str:
    return "oracle" if row["oracle"] else "adaptive" if adaptive else ""


def _figure(name: str) -> Callable[[Row, Record], Field]:
    def figure(row: Row, record: Record) -> Field:
        number = row[name] if name in row else value(record, name)
        return float(f"{number:.6g}") if isinstance(number, int | float) else None

    return figure


def _remarks(record: Record) -> str:
    """Return the remarks on a cell: the victims' role, why it failed, its tuning and its flags."""
    tuned = tuned_text(record)
    words = [record.config.role, record.reason or ""]
    words.append(f"tuned on {record.config.tuning} other images: {tuned}" if tuned else "")
    words += [f"{flag.code.replace('_', ' ')}: {flag.detail}" for flag in record.flags]
    return "; ".join(word for word in words if word)


def _text(value: Field, column: PageColumn) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:g}" if column.digits < 0 else f"{value:.{column.digits}f}"
