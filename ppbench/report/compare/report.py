"""A comparison for people: a table in the terminal, a page in Markdown. All names are escaped."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppbench.records.schema import MODEL_METRICS
from ppbench.report.compare.judge import ComparedRow, RowStatus, printable
from ppbench.report.compare.outcome import Comparison
from ppbench.report.controls import CONTROLS

REPORT_WIDTH = 160  # columns where standard output is no terminal
TABLE_WIDTH = 120
"""Columns from which on rows are a table. On a narrower screen each is one line, which the terminal wraps."""
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
    attacked = row.where.defense == "none" and row.metric not in MODEL_METRICS
    return {"regression": "stronger", "improved": "weaker"}.get(status, status) if attacked else status


def _names(row: ComparedRow) -> tuple[str, str, str, str]:
    return row.point, row.attack, row.place, row.title


def _rows_to_show(result: Comparison) -> Iterator[ComparedRow | str]:
    """Yield the rows that are not "ok", at most `SHOWN_ROWS` of a status, and how many more there are."""
    for status, rows in rows_by_status(result.rows):
        if status != "ok":
            yield from rows[:SHOWN_ROWS]
            if len(rows) > SHOWN_ROWS:
                yield f"{status}: and {len(rows) - SHOWN_ROWS} more; --markdown and --json have all"


def _colored_status(row: ComparedRow) -> str:
    color = _COLORS.get(row.status, "yellow") if row.where.defense not in CONTROLS else "yellow"
    return f"[{color}]{status_word(row.status, row)}[/]"


def _table(shown: Sequence[ComparedRow | str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("verdict", "defense", "attack", "where", "metric", "BASELINE", "NEW", "worse by [95 %]", ""):
        table.add_column(name, no_wrap=name in ("verdict", "metric", "worse by [95 %]"), overflow="fold")
    for row in shown:
        if isinstance(row, str):
            table.add_row(*row.split(": "))
            continue
        levels = ("", "") if row.change is None else (row.change.base, row.change.new)
        figures = [level if isinstance(level, str) else row.figure(level) for level in levels]
        words = (*_names(row), *figures, worsening_words(row), row_remarks(row))
        table.add_row(_colored_status(row), *(escape(word) for word in words))
    return table


def _line(row: ComparedRow | str) -> str:
    """Return a row as one line, its verdict and what it is of first."""
    if isinstance(row, str):
        return escape(row)
    about = f"{row.point}, {row.title}: {row_summary(row)} ({', '.join(filter(None, (row.attack, row.place)))})"
    return f"{_colored_status(row)}  {escape(about)}"


def print_report(result: Comparison) -> None:
    """Print the rows that are not "ok", the remarks, and the verdict."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    shown = [*_rows_to_show(result)]
    if shown and console.width >= TABLE_WIDTH:
        console.print(_table(shown))
    elif shown:
        for row in shown:
            console.print(_line(row), highlight=False, soft_wrap=True)
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


# -- A comparison for programs: JUnit XML, annotations of GitHub Actions, JSON --

ANNOTATIONS = 10
"""How many annotations of one level GitHub shows for a step; the summary has all rows."""


def junit(result: Comparison) -> bytes:
    """Return JUnit XML: one suite per defense, one case per row; faults and doubts are errors in their own suites."""
    root = ElementTree.Element("testsuites", name="ppbench compare")
    for name, lines in (("controls", result.faults), ("undecidable", result.doubts)):
        if lines:
            suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(lines)))
            suite.set("errors", str(len(lines)))
        for line in lines:
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=printable(line))
            ElementTree.SubElement(case, "error", message=printable(line))
    for defense in sorted({row.where.defense for row in result.rows}):
        rows = [row for row in result.rows if row.where.defense == defense]
        suite = ElementTree.SubElement(root, "testsuite", name=printable(defense), tests=str(len(rows)))
        outcomes = [_case(suite, row) for row in rows]
        for outcome, total in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(total, str(outcomes.count(outcome)))
    ElementTree.indent(root, " ")
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _case(suite: ElementTree.Element, row: ComparedRow) -> str:
    """Add a row to a suite; return its outcome, "" where it passed."""
    case = ElementTree.SubElement(suite, "testcase", classname=row.point, name=row.name)
    outcome = {"regression": "failure", "missing": "failure", "incomparable": "error"}.get(row.status, "skipped")
    if row.where.defense in CONTROLS and row.status == "regression":
        outcome = "skipped"  # an attack that got stronger: a note
    if row.status in ("ok", "improved"):
        return ""
    ElementTree.SubElement(case, outcome, message=f"{row.status}: {row_summary(row)}")
    return outcome


def workflow_commands(result: Comparison) -> list[str]:
    """Return GitHub's workflow commands: errors, then warnings and notices; a row's file is its record in BASELINE."""
    errors = [_command("error", "ppbench: harness fault", line) for line in result.faults]
    errors += [_command("error", "ppbench: undecidable", line) for line in result.doubts]
    worse = [*result.regressions, *result.of("missing"), *result.of("incomparable")]
    errors += [_about(result, "error", row) for row in worse]
    notices = [_about(result, "notice", row) for row in result.of("improved") if row.where.defense not in CONTROLS]
    if undecided := result.of("inconclusive"):
        notices.insert(0, _command("notice", "ppbench: inconclusive", f"{len(undecided)} rows are undecided."))
    warnings = [_command("warning", "ppbench", line) for line in result.warnings]
    return [*_capped("error", errors), *_capped("warning", warnings), *_capped("notice", notices)]


def _capped(level: str, lines: Sequence[str]) -> list[str]:
    if len(lines) <= ANNOTATIONS:
        return list(lines)
    rest = len(lines) - ANNOTATIONS + 1
    return [*lines[: ANNOTATIONS - 1], _command(level, "ppbench", f"And {rest} more; the summary of the job has all.")]


def _about(result: Comparison, level: str, row: ComparedRow) -> str:
    file = (result.baseline / "records" / f"{row.record.cell_id}.json").as_posix()
    return _command(level, f"ppbench: {row.status}, {row.point}", f"{row.name}: {row_summary(row)}", file)


def _command(level: str, title: str, message: str, file: str = "") -> str:
    options = [f"file={_escaped(printable(file), True)}"] if file else []
    options.append(f"title={_escaped(printable(title), True)}")
    return f"::{level} {','.join(options)}::{_escaped(printable(message), False)}"


def _escaped(text: str, option: bool) -> str:
    """Return `text` escaped for a workflow command: a name can end neither the command nor an option."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if option else text


def comparison_json(result: Comparison) -> str:
    """Return the comparison as JSON: exit code, verdict, remarks, and every row with its figures."""
    names = ("metric", "subset", "status", "tolerance", "adjusted", "needed", "headline", "family", "blind", "note")
    rows = [
        {
            **dataclasses.asdict(row.where),
            **{name: getattr(row, name) for name in names},
            "cell_id": row.record.cell_id,
            "change": None if row.change is None else dataclasses.asdict(row.change),
        }
        for row in result.rows
    ]
    about = {"exit_code": result.exit_code, "verdict": result.verdict, "faults": result.faults}
    about |= {"doubts": result.doubts, "warnings": result.warnings, "notes": result.notes}
    return json.dumps({**about, "rows": rows}, indent=1, allow_nan=False)
