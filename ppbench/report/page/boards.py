"""Records grouped into evaluations, and into boards: one row per defense and control value, ranked by worst case."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ppbench.base.errors import UsageError
from ppbench.metrics.modality import modality_of
from ppbench.metrics.spec import INTERVAL, MetricSpec
from ppbench.questions.base import MissingQuestion, Question, question_for, question_of, questions
from ppbench.records.figure import best, grouped, leakage_value
from ppbench.records.schema import Metric, Record, Utility
from ppbench.report.cap import STRAY_DISTANCE, STRAY_MARK, caps, record_distance, strays
from ppbench.report.columns import (
    CELLS,
    KEY,
    OTHER_HEADLINE,
    PLAIN_METRICS,
    WORST,
    WORST_METRICS,
    Column,
    ColumnValue,
    Row,
)
from ppbench.report.controls import CONTROLS, UNREPLAYED, Check, check_controls, value
from ppbench.report.costs import relative_costs
from ppbench.report.entries import AT_CHANCE, COLLAPSED, UNINFORMED, Badge, Board, Entry, badges_of
from ppbench.report.findings import Verdict
from ppbench.report.frame import BOARD, EVALUATION, ROW, SCOPE, SETTING, TRAINED, Frame, Key, frame_of
from ppbench.report.knowing import Knowledge, breaks
from ppbench.report.leak import Leak, leaks_of
from ppbench.report.learning import USABLE, is_usable, learning_of, points_lost
from ppbench.report.verdict import verdicts
from ppbench.report.words import STAGE_ORDER, capitalized, evaluation_titles, evaluation_words, key_differences

_Source = TypeVar("_Source")
_Read = TypeVar("_Read")


def tolerant(read: Callable[[_Source], _Read | None], problems: list[str]) -> Callable[[_Source], _Read | None]:
    """Return `read` with None instead of UsageError, whose sentence is added to `problems`, once."""

    def read_or_none(source: _Source) -> _Read | None:
        try:
            return read(source)
        except UsageError as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    return read_or_none


# -- The table of all cells, one row per cell, and its CSV file; columns: `report.columns` --

Claims = Callable[[Record], str]
"""Returns the claim of the defense's paper for a record, in words; "" where none is comparable."""
COLUMNS: Final = [column.name for column in CELLS]
"""The names of the columns of leaderboard.csv, in order."""


def no_claims(record: Record) -> str:
    """Return "", for tables without claims."""
    return ""


def foreign_metrics(records: Sequence[Record]) -> list[MetricSpec]:
    """Return the metrics with columns of the questions without a chapter in `records`."""
    foreign = [question for name, question in questions().items() if not question.chapter]
    kinds = {record.config.attack.kind for record in records}
    return [spec for question in foreign if question.name in kinds for spec in question.specs if spec.columns]


def table_rows(records: Sequence[Record], claims: Claims = no_claims, boards: Sequence[Board] = ()) -> list[Row]:
    """Return the table, sorted by suite, threat model, defense, control value, stage, batch, attack and name.

    boards: those of `records`, for the ranks of the cells' rows; no ranks without.
    """
    cells = frame_of(records)
    main, unit, costs, ranks = caps(cells), caps(cells, 1), relative_costs(cells), ranks_of(boards)
    described = [
        column_roots(cells.key(r), r, cap=main[r.cell_id], unit=unit.get(r.cell_id), ratios=costs[r.cell_id])
        | {"claimed": claims(r)}
        for r in cells
    ]
    return sorted((_row(about, ranks.get(about["record"].cell_id, {})) for about in described), key=_row_order)


def ranks_of(boards: Sequence[Board]) -> dict[str, Row]:
    """Return `rank_low` and `rank_high` of each cell's row on the boards, by cell id."""
    return {
        record.cell_id: {"rank_low": entry.rank_low, "rank_high": entry.rank_high}
        for board in boards
        for entry in board.entries
        for record in entry.records
    }


def _row_order(row: Row) -> tuple[object, ...]:
    value = float("-inf") if row["control_value"] is None else row["control_value"]
    where = row["suite"], row["threat_model"], row["defense"], row["control"] or "", value
    return *where, row["stage"], row["batch_size"], f"{row['role']}{row['attack']}", row["cell_id"]


def column_roots(key: Key, record: Record, **more: Any) -> dict[str, Any]:
    """Return the roots of the columns' paths, for a cell, or for a row of a board by its key and sample."""
    config = record.config
    return {
        "key": key,
        "kind": config.attack.kind,
        "parameters": json.dumps(config.defense.parameters, sort_keys=True),
        "record": record,
        "config": config,
        "utility": record.utility,
        "cost": record.cost,
        "distance": record_distance(record),
        "n": len(record.victims),
        "tuned": tuned_text(record),
        "flags": " ".join(dict.fromkeys(flag.code for flag in record.flags)),
        **more,
    }


def _row(about: Mapping[str, Any], more: Row) -> Row:
    values = dict(more)
    for metric in about["record"].metrics:
        values |= {metric.name: metric.value, f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
        values[f"{metric.name}_chance"] = metric.chance
    return {c.name: read_column(about, c) if c.path else values.get(c.name) for c in CELLS}


def read_column(about: Mapping[str, Any], column: Column) -> Any:
    """Return the value at a column's path, None where one on the way is None, or where the value is not written."""
    first, *rest = column.path.split(".")
    value = about[first]
    for name in rest:
        value = None if value is None else getattr(value, name)
    return None if value == column.unwritten else value


def tuned_text(record: Record) -> str:
    """Return the settings that an attack was run with after tuning, as "lr=0.1, tv=0.01"; "" without tuning."""
    if record.tuned is None or not record.tuned.variants:
        return ""
    return ", ".join(f"{name}={value}" for name, value in record.tuned.variants[record.tuned.chosen].items())


def csv_field(value: ColumnValue) -> str:
    """Return a field as text: floats to ten digits; an apostrophe before text that a spreadsheet would run."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if isinstance(value, int) else f"{value:.10g}"
    guarded = f"'{value}" if value.lstrip(" \n\v\f")[:1] in tuple("=+-@\t\r") else value
    return guarded.replace("\r", " ")  # Python 3.11's csv does not quote a lone carriage return


def csv_text(records: Sequence[Record], claims: Claims = no_claims, boards: Sequence[Board] = ()) -> str:
    """Return the CSV: a header and one row per cell; boards: those of `records`.

    A function of the records, the claims and whether the self-test passed, so that it can be verified.
    """
    buffer, more = io.StringIO(), [spec.name for spec in foreign_metrics(records)]
    own = {r.cell_id: {m.name: (m.value, m.low, m.high) for m in r.metrics} for r in records if more}
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"{name}{end}" for name in more for end in INTERVAL)])
    for row in table_rows(records, claims, boards):
        others = [value for name in more for value in own[str(row["cell_id"])].get(name, (None,) * 3)]
        writer.writerow([csv_field(value) for value in (*row.values(), *others)])
    return buffer.getvalue()


COSTLY = "costs accuracy"
"""Badge of rows whose model is not usable beside the undefended one."""
UNLEARNED = "undefended model learned too little"
"""Badge of rows whose undefended model learned too little for losses to mean anything."""
UNRANKED = {*UNINFORMED, COSTLY, "belied", UNREPLAYED, COLLAPSED, AT_CHANCE, UNLEARNED, "diverged", "failed", "control"}
"""Badges of rows that have no rank."""


def boards_of(records: Sequence[Record], claims: Claims, sound: bool = True) -> list[Board]:
    """Return every board of `records`, by question; sound: as in `judged_evaluations`, if False none is ranked."""
    frame = frame_of(records)
    scopes, known, far = frame.by(SCOPE), Knowledge.of(frame), strays(frame)
    leaks = leaks_of(frame, known)
    known_here = frame.of([record for record in frame if not isinstance(question_for(record), MissingQuestion)])
    groups = sorted(known_here.by(BOARD).items(), key=lambda pair: _place(pair[0]))
    return [_board(key, some, scopes[key.only(SCOPE)], known, leaks, claims, sound, far) for key, some in groups]


def _place(setting: Key) -> tuple[object, ...]:
    """Return the sort key of a board."""
    about = setting.suite, setting.data, setting.model, question_of(setting.kind).order, setting.kind, setting.threat
    return *about, STAGE_ORDER.index(setting.stage), setting.batch, setting.text()


def _board(
    setting: Key,
    members: Frame,
    scope: Sequence[Record],
    known: Knowledge,
    leaks: Mapping[Key, Leak],
    claims: Claims,
    sound: bool,
    far: Set[Key],
) -> Board:
    question = question_of(setting.kind)
    name, rows = question.headline(members[0].config), members.by(ROW)
    differs = key_differences(list(rows))
    entries = [
        _entry(key, rows[key], name, known, leaks.get(key.only(SETTING)) if question.inputs else None, claims, differs)
        for key in sorted(rows, key=Key.text)
    ]
    entries = _with_strays(_with_losses(entries), far)
    checks = _checks(question, entries, scope)
    reliable = sound and all(check.ok is True for check in checks)
    placed = _ranked(entries, name) if reliable and not setting.intended else entries
    return Board(setting, name, tuple(sorted(placed, key=lambda e: _order(e, name))), checks, reliable)


def _with_losses(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with a badge where the model is not usable beside the undefended of the same federation."""
    undefended = {e.key.only(EVALUATION): e.sample.utility for e in entries if e.defense.id == "none"}
    marked = []
    for entry in entries:
        whole = undefended.get(entry.key.only(EVALUATION))
        if whole is not None and entry.role == "compared":
            if clause := learning_of(whole).clause:
                title = f"{capitalized(clause)}, so no setting can be called usable: not ranked."
                entry = replace(entry, badges=(*entry.badges, Badge(UNLEARNED, "warning", title)))
            elif is_usable([entry.sample.utility], [whole]) is False:
                entry = replace(entry, badges=(*entry.badges, _costly(entry.sample.utility, whole)))
        marked.append(entry)
    return marked


def _costly(use: Utility, undefended: Utility) -> Badge:
    loss = points_lost(use.accuracy, undefended.accuracy)
    does = (
        f"loses more than {USABLE:g} points of what the undefended one explains, or more than half of what it learned"
    )
    if loss is not None:
        does = (
            f"loses {loss:.1f} points of accuracy" if loss > USABLE else "keeps less than half of what was learned"
        ) + " beside the undefended"
    return Badge(COSTLY, "info", f"The model {does}: not ranked.")


def _with_strays(entries: Sequence[Entry], far: Set[Key]) -> list[Entry]:
    """Return the entries with a badge where a training is far from that of every other seed."""
    title = (
        f"Accuracy is more than {STRAY_DISTANCE:.0%} from that of every other seed: one training, not the defense's."
    )
    badge = Badge(STRAY_MARK, "warning", title)
    return [replace(e, badges=(*e.badges, badge)) if e.key.only(TRAINED) in far else e for e in entries]


def _entry(
    key: Key,
    members: Frame,
    name: str,
    known: Knowledge,
    leak: Leak | None,
    claims: Claims,
    differs: Mapping[Key, str],
) -> Entry:
    flags = {(flag.code, flag.detail): flag for record in members for flag in record.flags}
    claimed = sorted({text for record in members if (text := claims(record))})
    plain = members.of([r for r in members if not known.adaptive(r)])
    worst = members.worst(name)
    return Entry(
        key=key,
        sample=min(members, key=lambda r: (r.status != "complete", r.cell_id)),
        records=tuple(sorted(members, key=lambda r: (r.config.attack.id, r.cell_id))),
        plain=worst if len(plain) == len(members) else plain.worst(name),
        worst=worst,
        labels=best([r for r in members if r.config.model.classes > 1], "label_accuracy"),
        badges=tuple(badges_of(members, known, leak)),
        flags=tuple(flags[key] for key in sorted(flags)),
        claimed="; ".join(claimed),
        differs=differs[key],
        leak=leak,
    )


def _headline(entry: Entry, name: str) -> Metric | None:
    return None if entry.worst is None else entry.worst.metric(name)


def _order(entry: Entry, name: str) -> tuple[int, float, str, float]:
    """Return the sort key: `none`, then the least leaking first, rows without a figure, `full_noise`."""
    metric = _headline(entry, name) or (None if entry.labels is None else entry.labels.metric("label_accuracy"))
    place = {"none": 0, "full_noise": 2}.get(entry.defense.id, 1)
    return place, leakage_value(metric, float("inf")), entry.defense.id, entry.key.value or 0.0


# -- ranks: the least leaking first; rows whose intervals overlap share them -----------------------------------------
Span = tuple[float, float]
"""The interval of a figure, turned such that larger leaks more."""


def leak_span(metric: Metric | None) -> Span | None:
    """Return the interval of a figure such that larger leaks more; None where it has none."""
    if metric is None or metric.low is None or metric.high is None:
        return None
    return (-metric.high, -metric.low) if metric.higher_is_safer else (metric.low, metric.high)


def rank_intervals(spans: Sequence[Span | None], blind: Sequence[bool]) -> list[tuple[int, int] | None]:
    """Return first and last rank of each row, None where it is not ranked (its span is None).

    Rows no better than a blind guess are one tie: how far they stay below it does not matter for privacy.
    """
    tied = [span for span, one in zip(spans, blind, strict=True) if one and span is not None]
    if tied:
        tie = min(low for low, _ in tied), max(high for _, high in tied)
        spans = [tie if one and span is not None else span for span, one in zip(spans, blind, strict=True)]
    known = [span for span in spans if span is not None]
    return [
        None
        if own is None
        else (1 + sum(other[1] < own[0] for other in known), len(known) - sum(other[0] > own[1] for other in known))
        for own in spans
    ]


def _ranked(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the entries with rank intervals: two rows whose intervals overlap are not separated."""
    spans = [None if UNRANKED & {b.text for b in e.badges} else leak_span(_headline(e, name)) for e in entries]
    ranks = rank_intervals(spans, [e.leak is not None and e.leak.level == "blind" for e in entries])
    return [
        entry if ends is None else replace(entry, rank_low=ends[0], rank_high=ends[1])
        for entry, ends in zip(entries, ranks, strict=True)
    ]


# -- controls: whether the ranks of a board mean something ------------------------------------------------------------
def _checks(question: Question, entries: Sequence[Entry], scope: Sequence[Record]) -> tuple[Check, ...]:
    """Return the checks of one board: over `scope`, and whether the attacks break `none` on this very board."""
    checks = {check.control: check for check in check_controls(scope, frame_of(scope).whole)}
    own = _none_falls(question, entries, checks["none"])
    # Noise in uploads does not hide the model from its recipient: extraction has only one control.
    return (own, checks["full_noise"]) if question.noise else (own,)


def _none_falls(question: Question, entries: Sequence[Entry], general: Check) -> Check:
    undefended = [e for e in entries if e.defense.id == "none"]
    if not undefended:
        return Check("board", None, "The undefended model is not on this board.")
    if question.inputs and (general.ok is False or all(e.worst is None for e in undefended)):
        return general  # it fails, or only labels were attacked
    if not all(
        any(breaks(record) for record in entry.records if question_for(record) is question) for entry in undefended
    ):
        return Check("board", False, "The attacks do not break the undefended model here: even it resists them.")
    return Check("board", True, "The attacks break the undefended model on this board.")


# -- The worst case as a table: one row per defense, control value, stage and batch size, over all attacks --


def worst_rows(boards: Sequence[Board]) -> list[Row]:
    """Return the rows of the reconstruction boards by the columns of worst_case.csv."""
    return [
        _worst_row(board, entry)
        for board in boards
        if question_of(board.setting.kind).inputs
        for entry in board.entries
    ]


def identifying_columns(entry: Entry) -> Row:
    """Return the columns that identify a row of a board, and its ranks."""
    about = column_roots(entry.key, entry.sample, kind=entry.key.kind)
    ranks: Row = {"rank_low": entry.rank_low, "rank_high": entry.rank_high}
    return {column.name: read_column(about, column) for column in KEY} | ranks


def _worst_row(board: Board, entry: Entry) -> Row:
    worst, plain = entry.worst, entry.plain
    distances = modality_of(entry.sample.config).psnr_shown
    median = worst.metric("psnr_median") if distances and worst is not None else None
    plain_metrics, worst_metrics = (PLAIN_METRICS, WORST_METRICS) if distances else ((OTHER_HEADLINE,),) * 2
    return {
        **dict.fromkeys(column.name for column in WORST),
        **identifying_columns(entry),
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
        **{f"plain_{name}": value(plain, name) for name in plain_metrics},
        **{f"worst_{name}": value(worst, name) for name in worst_metrics},
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


# -- Evaluations (suite, data, network, federation and seed), and what may be concluded from each --


@dataclass(frozen=True)
class DefenseSentence:
    """A sentence on a defense, with its verdict. about: its evaluation, "" where there is only one."""

    defense: str
    about: str
    sentence: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class JudgedEvaluation:
    """One evaluation: its key by `EVALUATION`, its words, cells and checks; sound: whether the self-test passed."""

    key: Key
    about: str
    records: Frame
    checks: tuple[Check, ...]
    sound: bool

    @property
    def reliable(self) -> bool:
        """Whether all controls ran and hold, and the self-test passed."""
        return self.sound and all(check.ok is True for check in self.checks)


def judged_evaluations(records: Sequence[Record], sound: bool = True) -> list[JudgedEvaluation]:
    """Return every evaluation with its checks, seeds in order; sound: whether the harness's self-test passed."""
    groups = frame_of(records).by(EVALUATION)
    words = evaluation_titles(groups)
    order = sorted(groups, key=lambda key: (evaluation_words(replace(key, seed=None)), key.seed or 0, key.text()))
    checks = {key: tuple(check_controls(group, group.whole)) for key, group in groups.items()}
    return [JudgedEvaluation(key, words[key], groups[key], checks[key], sound) for key in order]


def defense_sentences(evaluations: Sequence[JudgedEvaluation]) -> list[DefenseSentence]:
    """Return the sentences of `ppbench evaluate` on each defense of each evaluation; none where controls fail."""
    sentences: list[DefenseSentence] = []
    known = Knowledge.of(record for one in evaluations for record in one.records)
    for one in evaluations:
        words = one.about if len(evaluations) > 1 else ""
        by = grouped(one.records if one.reliable else (), lambda record: record.config.defense.id)
        vouching = [record for control in CONTROLS for record in by.pop(control, [])]
        for name in sorted(by):
            about_it = verdicts(name, one.records.of([*vouching, *by[name]]), known)
            sentences += [DefenseSentence(name, words, verdict.sentence, verdict) for verdict in about_it]
    return sentences


def checks_of(evaluations: Sequence[JudgedEvaluation]) -> tuple[Check, ...]:
    """Return the checks of all evaluations, each with its evaluation if there are several."""
    if len(evaluations) == 1:
        return evaluations[0].checks
    return tuple(_about(check, f"[{one.about}] ") for one in evaluations for check in one.checks)


def _about(check: Check, words: str) -> Check:
    others = tuple(_about(other, words) for other in check.others)
    return replace(check, sentence=words + check.sentence, others=others)


def standalone_sentences(sentences: Sequence[DefenseSentence]) -> list[str]:
    """Return self-contained sentences: with the evaluation and the defense where there are several."""
    defenses: dict[str, set[str]] = {}
    for one in sentences:
        defenses.setdefault(one.about, set()).add(one.defense)
    lines = []
    for one in sentences:
        named = len(defenses[one.about]) == 1 or one.sentence.startswith((f"{one.defense} ", f"{one.defense}:"))
        words = f"[{one.about}] " if one.about else ""
        lines.append(f"{words}{'' if named else f'{one.defense}: '}{one.sentence}")
    return lines
