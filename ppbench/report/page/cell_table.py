"""The table of all cells: the first as a plain table, and all as JSON for the page's script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from ppbench.metrics.modality import modality_of
from ppbench.metrics.spec import DB
from ppbench.questions.base import question_for
from ppbench.records.schema import Record
from ppbench.report.columns import COLUMN_METRICS, Row, unit_of
from ppbench.report.controls import value
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import foreign_metrics, tuned_text

PLAIN_ROWS = 200
"""Rows of the plain table, for print and pages without scripts; leaderboard.csv has them all."""
Field = str | float | None
Figure = tuple[str, str, int]
"""Name, title and decimals."""
ACCURACY = "reconstruction_accuracy"
CELL_ORDER = (
    *("accuracy", "mse", "psnr_median", "psnr_p95", "psnr_worst_decile", "rmse_mean", "ssim_mean", "test_mse_mean"),
    *("lpips_mean", "feat_mse_mean", "evaluations_per_broken", "label_accuracy", "asr", "auc", "canary_auc"),
    *("canary_tpr_at_1pct_fpr", "epsilon_lower", "agreement", "output_error", "tracing_accuracy"),
    *("cap", ACCURACY),
)
"""Order of the figures; those of further metrics follow."""


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

    figures = [f for f in _suiting(cell_figures(), records) if any(row[f[0]] is not None for row in table)]
    figures += [(spec.name, spec.head, spec.digits) for spec in foreign_metrics(records) if spec.head]
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


def _suiting(figures: Sequence[Figure], records: Sequence[Record]) -> list[Figure]:
    """Return the figures that suit the inputs of `records`, with titles in the words of their modalities."""
    kinds = [modality_of(record.config) for record in records if question_for(record).inputs]
    titles = {ACCURACY: " / ".join(sorted({kind.parts_right for kind in kinds if ACCURACY in kind.readers}))}
    some = figures if any(kind.psnr_shown for kind in kinds) else [f for f in figures if unit_of(f[0]) != DB]
    return [(name, titles.get(name) or title, digits) for name, title, digits in some]


def cell_figures() -> list[Figure]:
    """Return name, title and decimals of the figures of the CSV that the page shows, where some cell has them."""
    shown = [("cap", "CAP", 3)]
    for spec in COLUMN_METRICS.values():
        if spec.head and "" in spec.columns:
            shown.append((spec.name, spec.head, spec.digits))
            shown += [(f"{spec.name}_chance", "by chance", spec.digits)] if "_chance" in spec.columns else []
    place = {name: number for number, name in enumerate(CELL_ORDER)}
    return sorted(shown, key=lambda figure: place.get(figure[0].removesuffix("_chance"), len(place)))


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
