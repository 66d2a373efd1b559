"""The head of a page of several defenses: a table for each evaluation, one row a defense, a verdict in a few words.

A row tells of one control value: of the usable ones, which lose few points of accuracy, the one that leaks least.
Judged is the worst case at the smallest batch, at initialization where that was attacked, over all adversaries and
roles. Nothing is concluded where controls fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppbench.questions.base import question_of
from ppbench.records.figure import best, leak
from ppbench.records.schema import Record
from ppbench.report.controls import BROKEN, Check, probe_words, taken_share, unread
from ppbench.report.frame import EVALUATION, TRAINED, Key
from ppbench.report.leak import SEVERITY
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.evaluations import Judged
from ppbench.report.page.sections import weights
from ppbench.report.page.standing import Standing, Value, standing

Rows = list[tuple[Board, Entry]]
BATCH = "batch_asr"
AUC, ASR, TPR = "canary_auc", "asr", "canary_tpr_at_1pct_fpr"


@dataclass(frozen=True)
class Overview:
    """One evaluation. headline: metric of the worst case, "" for none; asked: where it is from; rows: `none` first."""

    about: str
    checks: tuple[Check, ...]
    reliable: bool
    headline: str
    asked: str
    rows: tuple[Standing, ...]

    def tells(self, name: str) -> bool:
        """Return whether some row has that field of `Value`, or "reidentified": the table has a column of it."""
        if name == "reidentified":
            return any(v.worst is not None and v.worst.metric(name) is not None for row in self.rows for v in row.grid)
        return any(getattr(row.value, name) is not None for row in self.rows)


def overviews(found: Sequence[Board], judged: Sequence[Judged], costs: Sequence[CostRow]) -> list[Overview]:
    """Return a table for each evaluation of `judged` that has a defense, from boards and costs of the same records."""
    rows: dict[Key, Rows] = {}
    for board in found:
        for entry in board.entries:
            rows.setdefault(entry.key.only(EVALUATION), []).append((board, entry))
    paid = {row.entry.key.only(TRAINED): row for row in costs}
    probed = ((one, *part) for one in judged if one.key in rows for part in _probed(one.about, rows[one.key]))
    tables = [_overview(one, about, some, paid) for one, about, some in probed]
    return [table for table in tables if any(row.value.entry.role == "compared" for row in table.rows)]


def _probed(about: str, rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Yield an evaluation's rows in words, one probe's uploads at a time; what asks about models goes with each."""
    probes = {id(b): (b.setting.probe, b.setting.probe_rounds) for b, _ in rows if not _of_model(b)}
    if len(set(probes.values())) < 2:
        yield about, rows
        return
    for probe in sorted(set(probes.values())):
        some = [(board, entry) for board, entry in rows if probes.get(id(board), probe) == probe]
        yield f"{about}, {probe_words(*probe)}", some


def _of_model(board: Board) -> bool:
    return question_of(board.setting.kind).source == "model"


def _overview(one: Judged, about: str, rows: Rows, paid: dict[Key, CostRow]) -> Overview:
    main, broken = _main(rows), [board for board, entry in rows if _breaks(entry)]
    settings: dict[Key, Rows] = {}
    for board, entry in rows:
        if entry.defense.id != "full_noise":
            settings.setdefault(entry.key.only(TRAINED), []).append((board, entry))
    values: dict[str, list[Value]] = {}
    for key in sorted(settings, key=Key.text):
        value = _value(settings[key], main, broken, paid.get(key))
        values.setdefault(key.defense, []).append(value)
    none = values.pop("none", [None])[0]
    told = [standing(some, none, one.reliable) for _, some in sorted(values.items())]
    undefended = [] if none is None else [Standing("undefended", "info", none, (none,), None)]
    headline = next((board.headline for board, entry in rows if board in main and entry.worst is not None), "")
    setting = main[0].setting if main and headline else None
    asked = "" if setting is None else f"batch {setting.batch}, {weights(setting)}"
    return Overview(about, one.checks, one.reliable, headline, asked, (*undefended, *told))


def _main(rows: Rows) -> list[Board]:
    """Return the boards that are judged: uploads at the smallest batch, at initialization where that was attacked."""
    uploads = [b for b, _ in rows if question_of(b.setting.kind).inputs]
    uploads = [b for b in uploads if b.setting.stage == "init"] or uploads
    smallest = min((b.setting.batch for b in uploads), default=0)
    return list({id(b): b for b in uploads if b.setting.batch == smallest}.values())


def _breaks(entry: Entry) -> bool:
    """Return whether a row is of the undefended model, and half of its victims are rebuilt or found again."""
    return entry.defense.id == "none" and entry.worst is not None and taken_share(entry.worst) >= BROKEN


def _value(rows: Rows, main: Sequence[Board], broken: Sequence[Board], cost: CostRow | None) -> Value:
    """Return what all questions gave of one setting, by its rows; `none` falls on the boards `broken`."""
    judged = [(board, entry) for board, entry in rows if any(board is one for one in main)]
    told = [(board, entry) for board, entry in judged if entry.worst is not None]
    _, entry = max(told or judged or rows, key=_severity)
    members, extracted = (
        [r for b, e in rows if b.setting.kind == kind for r in e.records] for kind in ("membership", "extraction")
    )
    outputs = [r for r in extracted if r.config.stage == "iterate"]
    everything = [r for _, e in rows for r in e.records]
    return Value(
        entry=entry,
        leak=entry.leak if judged else None,
        labels=best([e.labels for _, e in judged if e.labels is not None], "label_accuracy"),
        batch=best([r for r in everything if _beside(r, entry)], BATCH),
        members=best([r for r in members if r.config.stage != "audit"], ASR),
        canaries=best([r for r in members if r.config.stage == "audit"], TPR),
        found=tuple((name, top) for name in (ASR, AUC) if (top := best(members, name)) is not None),
        outputs=best(outputs, "agreement") or best(outputs, "output_error"),
        tried=len(members),
        reliable=all(any(b is one for one in broken) for b, _ in told),
        lacking=any(r.status != "complete" and not unread(r) for _, e in judged or rows for r in e.records),
        cost=cost,
    )


def _beside(record: Record, entry: Entry) -> bool:
    """Return whether a cell asks who was in a batch, in the scene of a row: its adversary, stage, batch and role."""
    one, other = record.config, entry.sample.config
    scenes = [(c.threat_model.id, c.stage, c.batch_size, c.probe, c.probe_rounds, c.role) for c in (one, other)]
    return record.metric(BATCH) is not None and scenes[0] == scenes[1]


def _severity(pair: tuple[Board, Entry]) -> tuple[int, float]:
    board, entry = pair
    metric = entry.worst.metric(board.headline) if entry.worst is not None else None
    level = -1 if entry.leak is None else SEVERITY[entry.leak.level]
    return level, -float("inf") if metric is None or metric.value is None else leak(metric)
