"""Verdicts on audits: members among canaries and among average records, owners, a lower bound of epsilon.

An audit trains anew with canaries: unusual records that a model must memorize to fit. They show the worst case; average
records show the rest. Each figure stands beside the undefended model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record
from ppbench.report.controls import above_chance, value
from ppbench.report.verdict.lines import SettingRow, attack_at, audit_rows, figure
from ppbench.report.verdict.verdict import Fate, Verdict
from ppbench.report.worst import attack_of

CANARIES = "canary_auc"


def audit_verdicts(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on the audits of `defense`, by adversary and audit."""
    every = audit_rows(records)
    verdicts: list[Verdict] = []
    several = len({_audit(row)[1:] for row in every}) > 1
    for audit in sorted({_audit(row) for row in every if row.key.defense == defense}):
        threat, references, canaries = audit
        mine = [row for row in every if row.key.defense == defense and _audit(row) == audit]
        none = next((row for row in every if row.key.defense == "none" and _audit(row) == audit), None)
        none = None if defense == "none" else none
        own = [*_members(mine, none), *_owners(mine, none), *(v for row in mine for v in _epsilon(row))]
        words = f"{threat}, {canaries} canaries, {references} references" if several else threat
        verdicts += [verdict.worded(f"[{words}] {verdict.sentence}") for verdict in own]
    return verdicts


def _audit(row: SettingRow) -> tuple[str, int, int]:
    """Return the key of a row's audit: threat model, number of references, number of canaries."""
    return row.key.threat, row.key.references or 0, row.key.canaries or 0


def _strongest(rows: Sequence[SettingRow], metric: str) -> tuple[list[SettingRow], SettingRow | None, Record | None]:
    """Return the rows with a figure, the row in which it is largest, and its cell."""
    measured = [row for row in rows if row.top(metric) is not None]
    top = max(measured, key=lambda row: value(row.top(metric), metric) or 0.0, default=None)
    return measured, top, None if top is None else top.top(metric)


def _members(rows: Sequence[SettingRow], none: SettingRow | None) -> list[Verdict]:
    """Return the verdict on members over the whole grid; its sentence names the strongest attack and control value."""
    metric = CANARIES if any(row.top(CANARIES) for row in rows) else "auc"
    measured, top, cell = _strongest(rows, metric)
    if top is None:
        return []
    tried = sum(len(row.of("membership")) for row in rows)
    above = above_chance(cell, metric, tried)
    at = attack_at(attack_of(cell), top.control)
    if metric == "auc":
        verb = "Members are distinguished from others" if above else "Members are not shown to be distinguished"
        beside = "" if none is None else f"; undefended AUC {figure(none.top('auc'), 'auc', '.2f')}"
        sentence = f"In an audit without canaries: {verb} ({at}: AUC {figure(cell, 'auc', '.2f')}{beside})."
    else:
        verb = (
            "Canaries are distinguished from those left out" if above else "Canaries are not shown to be distinguished"
        )
        beside = "" if none is None else f"; undefended {_canaries(none.top(CANARIES))}"
        average = max(measured, key=lambda row: value(row.top("auc"), "auc") or 0.0)
        also = attack_at(attack_of(average.top("auc")), average.control)
        few = "at most " if len(measured) > 1 or tried > 1 else ""
        sentence = (
            f"In an audit: {verb} ({at}: {few}{_canaries(cell)}{beside}); average records: {few}AUC "
            f"{figure(average.top('auc'), 'auc', '.2f')} ({also})."
        )
    return [_verdict(measured, cell, metric, "falls" if above else "undecided", sentence)]


def _verdict(
    rows: Sequence[SettingRow], top: Record | None, metric: str, became: Fate | None, sentence: str
) -> Verdict:
    return Verdict(rows[0].key.defense, "audit", became, sentence, tuple(row.key for row in rows), top, metric)


def _canaries(record: Record | None) -> str:
    rate = figure(record, "canary_tpr_at_1pct_fpr", ".0%")
    return f"AUC {figure(record, CANARIES, '.2f')}" + ("" if rate == "-" else f", {rate} of members at 1% false ones")


def _owners(rows: Sequence[SettingRow], none: SettingRow | None) -> list[Verdict]:
    name = "tracing_accuracy"
    measured, _, cell = _strongest(rows, name)
    metric = None if cell is None else cell.metric(name)
    if metric is None:
        return []
    beside = "" if none is None else f", undefended {figure(none.top(name), name, '.0%')}"
    chance = "" if metric.chance is None else f", chance {metric.chance:.0%}"
    share = ("at most " if len(measured) > 1 else "") + figure(cell, name, ".0%")
    sentence = f"In an audit, records are traced to their owner in {share} of cases{beside}{chance}."
    return [_verdict(measured, cell, name, None, sentence)]


def _epsilon(row: SettingRow) -> list[Verdict]:
    """Return the verdict on one run's bound of epsilon, where that is positive or the defense claims an epsilon."""
    cell, claimed = row.top("epsilon_lower"), row.records[0].privacy.epsilon
    bound = value(cell, "epsilon_lower")
    if bound is None or (claimed is None and bound <= 0):
        return []
    at = f" at {row.control}" if row.control else ""
    claim = "" if claimed is None else f", {claimed:.3g} is guaranteed"
    above = claimed is not None and bound > claimed
    refuted = "; the guarantee is REFUTED, unless this is the one such bound in twenty that errs" if above else ""
    gaussian = value(cell, "epsilon_gaussian")
    also = "" if not gaussian else f"; {gaussian:.2g} if the mechanism is Gaussian"
    sentence = (
        f"One run shows that epsilon is at least {bound:.2g}{at} ({attack_of(cell)}, 95 %{also}){claim}{refuted}."
    )
    return [_verdict([row], cell, "epsilon_lower", "falls" if above else None, sentence)]
