"""A comparison for people: a table in the terminal, a page in Markdown. Names are other people's: all are escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppbench.compare.judge import Row, Status
from ppbench.compare.outcome import Comparison, place
from ppbench.controls import CONTROLS

WIDTH = 160  # of what is not a terminal
FIRST = ("regression", "missing", "incomparable", "improved", "inconclusive", "unjudged", "new", "ok")
MANY = 20
"""Rows of one status that the terminal shows; Markdown and JSON have all."""
_COLORS = {"regression": "bold red", "missing": "red", "incomparable": "red", "improved": "green", "ok": "green"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~-])")


def printable(text: str) -> str:
    """Return `text` with a question mark for every character that is not to be shown: no escape sequence gets out."""
    return "".join(c if c.isprintable() else "?" for c in text)


def point(row: Row) -> str:
    """Return defense and control value, as "dp sigma=0.01"."""
    where = row.where
    value = f" {where.control}={where.value:g}" if where.value is not None else f" over {where.control}"
    return printable(f"{where.defense}{value if where.control else ''}")


def attack_of(row: Row) -> str:
    """Return the attack, with the one whose images it uses; "" where none is needed."""
    where = row.where
    return printable(f"{where.attack} after {where.follows}" if where.follows else where.attack)


def metric_of(row: Row) -> str:
    """Return the metric with its subset, as "auc (canaries)"; "all" where the whole cell is meant."""
    return f"{row.metric} (canaries)" if row.subset == "canaries" else row.metric or "all"


def named(row: Row) -> str:
    """Return the row in one line, as "dlg, init, batch 1, to server: psnr_median"."""
    about = ", ".join(part for part in (attack_of(row), printable(place(row))) if part)
    return f"{about}: {metric_of(row)}" if about else metric_of(row)


def figure(row: Row, value: float) -> str:
    """Return a figure with the digits that its metric deserves."""
    digits = 2 if row.metric in ("psnr_median", "epsilon_claimed", "epsilon_lower") else 3
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no "-0.000"


def changed(row: Row) -> str:
    """Return how much worse, with the interval, as "0.53 [-0.41, 1.76]"; "" where nothing was compared."""
    found = row.change
    if found is None:
        return ""
    if found.low == found.high == 0:
        return "equal"
    return f"{figure(row, found.worse)} [{figure(row, found.low)}, {figure(row, found.high)}]"


def remarks(row: Row) -> str:
    """Return what stands beside the figures: tolerance, p-value, n, what an undecided row would take, the note."""
    parts = []
    if row.change is not None and changed(row) != "equal":
        parts.append(f"tolerance {row.tolerance:.3g}")
        parts += [f"p {row.adjusted:.2g}"] if row.adjusted is not None else []
        parts.append(f"n {row.change.n}")
    if row.status == "inconclusive":
        lucky = row.change is not None and row.change.luck > 0
        parts.append(f"n {row.needed} would decide" if row.needed else "more seeds" if lucky else "no n would decide")
    return ", ".join([*parts, *([printable(row.note)] if row.note else [])])


def told(row: Row) -> str:
    """Return what was found, in a line without names."""
    found = row.change
    if found is None:
        return printable(row.note) or row.status
    levels = f"{figure(row, found.base)} to {figure(row, found.new)}"
    how = changed(row)
    return ", ".join(part for part in (levels, how if how == "equal" else f"worse by {how}", remarks(row)) if part)


def ordered(rows: Sequence[Row]) -> Iterator[tuple[Status, list[Row]]]:
    """Yield the rows by status, what matters most first."""
    for status in FIRST:
        if some := [row for row in rows if row.status == status]:
            yield some[0].status, some


def said(status: str, row: Row) -> str:
    """Return the verdict's word; of an undefended model what happened to the attack."""
    attacked = row.where.defense == "none" and row.metric not in ("accuracy", "dice", "mse")
    return {"regression": "stronger", "improved": "weaker"}.get(status, status) if attacked else status


def _names(row: Row) -> tuple[str, str, str, str]:
    return point(row), attack_of(row), printable(place(row)), metric_of(row)


def print_report(result: Comparison) -> None:
    """Print the verdict, the faults and the rows that are not simply as they were."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("verdict", "defense", "attack", "where", "metric", "BASELINE", "NEW", "worse by [95 %]", ""):
        shown.add_column(name, no_wrap=name in ("verdict", "metric", "worse by [95 %]"), overflow="fold")
    for status, rows in ordered(result.rows):
        for row in rows[:MANY] if status != "ok" else []:
            levels = ("", "") if row.change is None else (row.change.base, row.change.new)
            figures = [level if isinstance(level, str) else figure(row, level) for level in levels]
            words = (*_names(row), *figures, changed(row), remarks(row))
            color = _COLORS.get(status, "yellow") if row.where.defense not in CONTROLS else "yellow"
            shown.add_row(f"[{color}]{said(status, row)}[/]", *(escape(word) for word in words))
        if status != "ok" and len(rows) > MANY:
            shown.add_row(status, f"and {len(rows) - MANY} more; --markdown and --json have all")
    if shown.row_count:
        console.print(shown)
    for line in result.notes:
        console.print(escape(printable(line)), highlight=False)
    for line in result.faults:
        console.print(f"[bold red]fault:[/] {escape(printable(line))}", highlight=False)
    color = "bold green" if result.exit_code == 0 else "bold red"
    console.print(f"[{color}]{escape(printable(result.verdict))}[/]", highlight=False)


def markdown_text(text: str) -> str:
    """Return `text` so that Markdown shows it as it is: no markup, no link, no mention of anybody."""
    plain = html.escape(printable(text), quote=False).replace("@", "&#64;")
    return _MARKDOWN.sub(r"\\\1", plain)


def markdown(result: Comparison) -> str:
    """Return the comparison as Markdown: verdict, faults, a table by status; what is as it was is folded."""
    lines = ["## ppbench compare", "", f"**{markdown_text(result.verdict)}**", ""]
    lines += [f"BASELINE {markdown_text(str(result.baseline))}, NEW {markdown_text(str(result.new))}", ""]
    lines += [f"- fault: {markdown_text(line)}" for line in result.faults]
    lines += [f"- {markdown_text(line)}" for line in result.notes]
    for status, rows in ordered(result.rows):
        folded = status in ("inconclusive", "unjudged", "new", "ok")
        head = f"{status} ({len(rows)})"
        lines += ["", f"<details><summary>{head}</summary>" if folded else f"### {head}", ""]
        lines += ["| defense | attack | where | metric | BASELINE to NEW |", "| --- | --- | --- | --- | --- |"]
        for row in rows:
            words = (*_names(row), told(row))
            lines.append(f"| {' | '.join(markdown_text(word) for word in words)} |")
        lines += ["", "</details>"] if folded else []
    return "\n".join(lines) + "\n"
