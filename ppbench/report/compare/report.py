"""A comparison for people: a table in the terminal, a page in Markdown. All names are escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppbench.report.compare.judge import ComparedRow, RowStatus, printable
from ppbench.report.compare.outcome import Comparison
from ppbench.report.controls import CONTROLS

REPORT_WIDTH = 160  # columns where standard output is no terminal
STATUS_ORDER = ("regression", "missing", "incomparable", "improved", "inconclusive", "unjudged", "new", "ok")
REMARK_ORDER = ("", "warning", "fault", "undecidable")  # order of the remarks before the verdict
SHOWN_ROWS = 20
"""How many rows of one status the terminal shows; Markdown and JSON have all."""
_COLORS = {"regression": "bold red", "missing": "red", "incomparable": "red", "improved": "green", "ok": "green"}
_LINKED = re.compile(r"@|\\#|\bgh(?=\\-\d)|:(?=//)|\bwww(?=\.)|\b(?:mailto|xmpp)(?=:)", re.IGNORECASE)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~-])")


def worsening_words(row: ComparedRow) -> str:
    """Return how much worse, with the interval, as "0.53 [-0.41, 1.76]"; "" where nothing was compared."""
    change = row.change
    if change is None:
        return ""
    if change.low == change.high == 0:
        return "equal"
    return f"{row.figure(change.worse)} [{row.figure(change.low)}, {row.figure(change.high)}]"


def row_remarks(row: ComparedRow) -> str:
    """Return the row's remarks: tolerance, p-value, n, the victims that would decide it, the note."""
    parts = []
    if row.change is not None and worsening_words(row) != "equal":
        parts.append(f"tolerance {row.tolerance:.3g}")
        parts += [f"p {row.adjusted:.2g}"] if row.adjusted is not None else []
        parts.append(f"n {row.change.n}")
    if row.blind:
        parts.append(f"too few victims for {row.family} rows, {row.needed} would do")
    elif row.status == "inconclusive":
        lucky = row.change is not None and row.change.luck > 0
        parts.append(f"n {row.needed} would decide" if row.needed else "more seeds" if lucky else "no n would decide")
    return ", ".join([*parts, *([printable(row.note)] if row.note else [])])


def row_summary(row: ComparedRow) -> str:
    """Return the row's figures and remarks in one line, without names."""
    change = row.change
    if change is None:
        return printable(row.note) or row.status
    how = worsening_words(row)
    return ", ".join(
        part for part in (row.levels, how if how == "equal" else f"worse by {how}", row_remarks(row)) if part
    )


def rows_by_status(rows: Sequence[ComparedRow]) -> Iterator[tuple[RowStatus, list[ComparedRow]]]:
    """Yield the rows by status, the most important first."""
    for status in STATUS_ORDER:
        if some := [row for row in rows if row.status == status]:
            yield some[0].status, some


def status_word(status: str, row: ComparedRow) -> str:
    """Return the status in a word; for the undefended model, how the attack changed."""
    attacked = row.where.defense == "none" and row.metric not in ("accuracy", "dice", "mse")
    return {"regression": "stronger", "improved": "weaker"}.get(status, status) if attacked else status


def _names(row: ComparedRow) -> tuple[str, str, str, str]:
    return row.point, row.attack, row.place, row.title


def _table(result: Comparison) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("verdict", "defense", "attack", "where", "metric", "BASELINE", "NEW", "worse by [95 %]", ""):
        shown.add_column(name, no_wrap=name in ("verdict", "metric", "worse by [95 %]"), overflow="fold")
    for status, rows in rows_by_status(result.rows):
        for row in rows[:SHOWN_ROWS] if status != "ok" else []:
            levels = ("", "") if row.change is None else (row.change.base, row.change.new)
            figures = [level if isinstance(level, str) else row.figure(level) for level in levels]
            words = (*_names(row), *figures, worsening_words(row), row_remarks(row))
            color = _COLORS.get(status, "yellow") if row.where.defense not in CONTROLS else "yellow"
            shown.add_row(f"[{color}]{status_word(status, row)}[/]", *(escape(word) for word in words))
        if status != "ok" and len(rows) > SHOWN_ROWS:
            shown.add_row(status, f"and {len(rows) - SHOWN_ROWS} more; --markdown and --json have all")
    return shown


def print_report(result: Comparison) -> None:
    """Print the rows that are not "ok", the remarks, and the verdict."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    shown = _table(result)
    if shown.row_count:
        console.print(shown)
    for word, line in sorted(result.remarks, key=lambda remark: REMARK_ORDER.index(remark[0])):
        head = f"[{'yellow' if word == 'warning' else 'bold red'}]{word}:[/] " if word else ""
        console.print(head + escape(printable(line)), highlight=False)
    color = "bold green" if result.exit_code == 0 else "bold red"
    console.print(f"[{color}]{escape(printable(result.verdict))}[/]", highlight=False)


def markdown_text(text: str) -> str:
    """Return `text` without markup, links or mentions; GitHub makes these after it has undone escapes."""
    plain = _MARKDOWN.sub(r"\\\1", html.escape(printable(text), quote=False))
    return _LINKED.sub(lambda match: f"{match[0]}<!-- -->", plain)


def markdown(result: Comparison) -> str:
    """Return the comparison as Markdown: verdict, remarks, one table per status; unchanged rows are folded."""
    lines = ["## ppbench compare", "", f"**{markdown_text(result.verdict)}**", ""]
    lines += [f"BASELINE {markdown_text(str(result.baseline))}, NEW {markdown_text(str(result.new))}", ""]
    lines += [f"- {f'{word}: ' if word else ''}{markdown_text(line)}" for word, line in result.remarks]
    for status, rows in rows_by_status(result.rows):
        folded = status in ("inconclusive", "unjudged", "new", "ok")
        head = f"{status} ({len(rows)})"
        lines += ["", f"<details><summary>{head}</summary>" if folded else f"### {head}", ""]
        lines += ["| defense | attack | where | metric | BASELINE to NEW |", "| --- | --- | --- | --- | --- |"]
        for row in rows:
            words = (*_names(row), row_summary(row))
            lines.append(f"| {' | '.join(markdown_text(word) for word in words)} |")
        lines += ["", "</details>"] if folded else []
    return "\n".join(lines) + "\n"
