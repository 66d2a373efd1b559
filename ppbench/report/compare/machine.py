"""A comparison for programs: JUnit XML, annotations of GitHub Actions, JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from xml.etree import ElementTree

from ppbench.report.compare.judge import ComparedRow, printable
from ppbench.report.compare.outcome import Comparison
from ppbench.report.compare.report import row_summary
from ppbench.report.controls import CONTROLS

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


def as_json(result: Comparison) -> str:
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
