"""A comparison as a whole: the controls first, then the defenses, one exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppbench.base.errors import Exit, UsageError, first_of
from ppbench.records.archive import files_of
from ppbench.records.figure import grouped
from ppbench.records.run_files import Soundness, soundness_of
from ppbench.records.schema import MODEL_METRICS, Record
from ppbench.records.sources import SOURCES_FILE
from ppbench.records.store import open_results
from ppbench.report.compare.alone import lone_rows, unasked_clients
from ppbench.report.compare.join import RowPair, join
from ppbench.report.compare.judge import ComparedRow, judged_rows, printable, rows_of
from ppbench.report.controls import CONTROLS, check_controls, check_harness
from ppbench.report.frame import EVALUATION, frame_of
from ppbench.report.integrity import baseline_problems, sound_records

UTILITY = (*MODEL_METRICS, "cap")
JUDGED = ("regression", "improved", "ok", "inconclusive", "missing", "incomparable")
"""Statuses of rows that were judged; the last two are no verdicts and have exit codes of their own."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    rows: all, with verdicts; those of defenses are "unjudged" where there are faults. faults, why nothing may be
    concluded, notes, and warnings, why figures are doubtful, are sentences.
    """

    baseline: Path
    new: Path
    rows: tuple[ComparedRow, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def of(self, *statuses: str) -> tuple[ComparedRow, ...]:
        """Return the rows with one of `statuses`."""
        return tuple(row for row in self.rows if row.status in statuses)

    @property
    def regressions(self) -> tuple[ComparedRow, ...]:
        """The regressions of defenses; those of controls are faults or notes."""
        return tuple(row for row in self.of("regression") if row.where.defense not in CONTROLS)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the absence of a regression means nothing, in sentences; none where there are faults."""
        return () if self.faults else tuple(doubts_of(self.rows))

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """All remarks with their labels: faults, doubts, warnings, and notes, whose label is ""."""
        lines = (("fault", self.faults), ("undecidable", self.doubts), ("warning", self.warnings), ("", self.notes))
        return [(word, line) for word, some in lines for line in some]

    @property
    def exit_code(self) -> Exit:
        """3 for a fault, else 1 for a regression, 3 for incomparable rows or a doubt, 4 for missing ones, or 0."""
        if self.faults:
            return Exit.CONTROLS
        if self.regressions:
            return Exit.FOUND
        if self.of("incomparable") or self.doubts:
            return Exit.CONTROLS
        return Exit.MISSING if self.of("missing") else Exit.OK

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        if self.faults:
            return "HARNESS FAULT: a control changed or failed; nothing is concluded about any defense."
        number = Counter(row.status for row in self.rows if row.where.defense not in CONTROLS)
        counts = [f"{number[s]} {s}" for s in ("improved", "ok", "inconclusive", "unjudged") if number[s]]
        counts += [f"{len(self.of(s))} {s}" for s in ("missing", "incomparable") if self.of(s)]
        rest = f" ({', '.join(counts)})" if counts else ""
        if regressed := self.regressions:
            defenses = sorted({row.where.defense for row in regressed})
            return f"REGRESSION: {len(regressed)} rows of {', '.join(defenses)} got worse{rest}."
        if self.of("incomparable"):
            return f"INCOMPARABLE: some rows cannot be compared{rest}."
        if self.doubts:
            return f"UNDECIDABLE: {self.doubts[0].rstrip('.')}{rest}."
        if self.of("missing"):
            return f"MISSING: NEW lacks rows that BASELINE has{rest}."
        return f"No regression was found{rest}."


def doubts_of(rows: Sequence[ComparedRow]) -> list[str]:
    """Return a sentence for each defense or control that looks worse undecidably, or of which nothing was judged."""
    defenses = grouped((row for row in rows if row.status != "new"), lambda row: row.where.defense)
    doubts = [line for name, some in sorted(defenses.items()) for line in (*_blind(some), *_unjudged(name, some))]
    if not defenses.keys() - set(CONTROLS):
        doubts.append("Nothing was judged: BASELINE holds no cell of the defense, or only controls.")
    return doubts


def _blind(rows: Sequence[ComparedRow]) -> list[str]:
    """Return a sentence on a defense's rows that look worse with too few victims to decide; it names the worst."""
    some = [(row, row.change) for row in rows if row.blind and row.change and row.change.worse > row.tolerance]
    some = [(row, change) for row, change in some if row.where.defense not in CONTROLS]
    if not some:
        return []
    row, largest = max(some, key=lambda pair: pair[1].worse / pair[0].tolerance)
    more = f" (and {len(some) - 1} more rows)" if len(some) > 1 else ""
    needed = max(one.needed or 0 for one, _ in some)
    return [
        f"{row.point}, {row.name} looks worse, {row.levels}{more}, but {largest.n} victims are too few to "
        f"distinguish any change from chance among {row.family} rows; it takes {needed}."
    ]


def _unjudged(name: str, rows: Sequence[ComparedRow]) -> list[str]:
    if any(row.status in JUDGED for row in rows):
        return []
    about = f"{printable(name)}: none of its {len(rows)} rows was judged ({printable(rows[0].note)})"
    return [f"{about}; accept a baseline whose cells are complete."]


def compare(baseline: Path, new: Path) -> Comparison:
    """Return the comparison of two folders; UsageError: no or damaged results, or a baseline changed by hand."""
    (ours, _), (theirs, outcome) = _results(baseline, "BASELINE"), _results(new, "NEW")
    joined = join(ours, theirs)
    rows = [*judged_rows(rows_of(joined)), *lone_rows(joined.pairs)]
    faults = [*(f"NEW, {line}" for line in failed_controls(theirs, outcome)), *_changed_controls(rows)]
    if faults:
        rows = [_withheld(row) for row in rows]
    remarks = *_notes(rows), *_devices(joined.pairs), *unasked_clients(joined.pairs)
    return Comparison(baseline, new, tuple(rows), tuple(faults), remarks, tuple(_mixed(new)))


def _results(folder: Path, side: str) -> tuple[list[Record], Soundness | None]:
    """Return the records of a folder, and the outcome of its self-test. Raises UsageError, see `compare`."""
    try:
        store = open_results(folder)
    except UsageError as error:
        raise UsageError(f"{side}: {error}") from error
    records, problems = sound_records(store)  # `verify` also checks images, data and tables
    problems += baseline_problems(store, records)
    if problems:
        raise UsageError(f"{side}: {first_of(problems)}; `ppbench verify {folder}` lists them all.")
    if not records:
        raise UsageError(f"{side}: {folder} holds no records; give the --out of an evaluation.")
    return records, soundness_of(store)


def _mixed(new: Path) -> list[str]:
    """Return a sentence if the cells of NEW were computed by several states of the code, as noted in the folder."""
    try:
        states = json.loads(files_of(new).read(SOURCES_FILE))
    except (OSError, ValueError):  # older folders and accepted baselines have no such note
        return []
    if not isinstance(states, list) or len(set(map(str, states))) < 2:
        return []
    return [
        f"NEW holds cells of several states of the code ({', '.join(map(str, states))}; {SOURCES_FILE}): some may "
        "be of before a change. Compute all of them again in another --out."
    ]


def _devices(pairs: Sequence[RowPair]) -> list[str]:
    """Return a sentence for each two devices on which paired cells were computed."""
    sides = {(a.config.federation.device, b.config.federation.device)
             for pair in pairs for a, b in zip(pair.base, pair.new, strict=True)}  # fmt: skip
    return [
        f"BASELINE was computed on {printable(one)}, NEW on {printable(two)}: they round differently, and are judged "
        "by the same tolerances."
        for one, two in sorted(sides)
        if one != two
    ]


def failed_controls(records: Sequence[Record], outcome: Soundness | None) -> list[str]:
    """Return sentences on the failed controls of each evaluation, and on a failed self-test, if it is known."""
    harness = check_harness(outcome)
    groups = frame_of(records).by(EVALUATION).values()
    failed = [check for some in groups for check in check_controls(some, some.whole) if check.ok is not True]
    failed += [harness] if harness.ok is False else []
    return list(dict.fromkeys(f"control {check.control}: {check.sentence}" for check in failed))


def _changed_controls(rows: Sequence[ComparedRow]) -> list[str]:
    """Return sentences where attacks on the undefended model, or its training, got worse: attack or harness changed."""
    sentences = []
    for row in rows:
        if row.where.defense != "none" or row.change is None:
            continue
        what = f"{row.metric} {row.change.base:.4g} -> {row.change.new:.4g}"
        if row.metric not in UTILITY and row.status == "improved":
            sentences.append(f"The attack got weaker on the undefended model: {row.where.attack}, {row.place}: {what}.")
        if row.metric in UTILITY and row.status == "regression":
            sentences.append(f"Training of the undefended model got worse: {what}.")
    return sentences


def _withheld(row: ComparedRow) -> ComparedRow:
    if row.where.defense in CONTROLS or (row.change is None and row.status != "regression"):
        return row
    note = "; ".join(part for part in ("no verdict: a control failed", row.note) if part)
    return replace(row, status="unjudged", note=note)


def _notes(rows: Sequence[ComparedRow]) -> list[str]:
    attacked = [row for row in rows if row.where.defense == "none" and row.metric not in UTILITY]
    notes = []
    if stronger := {row.where.attack for row in attacked if row.status == "regression"}:
        names = ", ".join(sorted(stronger))
        notes.append(
            f"The attack got stronger on the undefended model ({names}): a defense may look worse because of that."
        )
    if any(row.status == "inconclusive" for row in rows):
        notes.append("Inconclusive: a worsening beyond the tolerance is neither shown nor ruled out.")
    if new := sum(row.status == "new" for row in rows):
        notes.append(f"{new} rows are only in NEW and were not judged.")
    return notes
