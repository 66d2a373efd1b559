"""What audits say, in rows and sentences: members among canaries and among average records, owners, epsilon at least.

An audit trains anew with canaries: records that nobody would miss and that a model must memorize to fit. They show the
worst case; average records show the rest. Each is told beside the same attack's figure on the undefended model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import above_chance, value
from ppbench.report.verdict.lines import Row, figure, rows
from ppbench.report.verdict.verdict import Fate, Verdict
from ppbench.report.worst import attack_of

CANARIES = "canary_auc"


@dataclass(frozen=True)
class Audited(Row):
    """One defense at one control value, to one adversary, in one audit: its strongest cells."""

    @property
    def members(self) -> Record | None:
        """The strongest by the AUC on average records."""
        return best(self.of("membership"), "auc")

    @property
    def canaries(self) -> Record | None:
        """The strongest by the AUC on canaries."""
        return best(self.of("membership"), CANARIES)

    @property
    def owners(self) -> Record | None:
        """The strongest of tracing."""
        return best(self.of("tracing"), "tracing_accuracy")

    @property
    def epsilon(self) -> Record | None:
        """That with the largest lower bound on epsilon."""
        return best(self.of("membership"), "epsilon_lower")

    @property
    def claimed(self) -> float | None:
        """The epsilon of the formal guarantee, or None."""
        return self.records[0].privacy.epsilon

    @property
    def tried(self) -> int:
        """How many membership cells there are."""
        return len(self.of("membership"))


def audits(records: Sequence[Record]) -> list[Audited]:
    """Return the rows of all audits in `records`, controls first."""
    return rows(Audited, records, lambda r: r.config.stage == "audit")


def what_audits_tell(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the sentences on the audits of `defense`, adversary by adversary and audit by audit."""
    every = audits(records)
    said: list[Verdict] = []
    several = len({_audit(row)[1:] for row in every}) > 1
    for audit in sorted({_audit(row) for row in every if row.defense == defense}):
        threat, references, canaries = audit
        mine = [row for row in every if row.defense == defense and _audit(row) == audit]
        none = next((row for row in every if row.defense == "none" and _audit(row) == audit), None)
        none = None if defense == "none" else none
        told = [*_members(mine, none), *_owners(mine, none), *(v for row in mine for v in _epsilon(row))]
        words = f"{threat}, {canaries} canaries, {references} references" if several else threat
        said += [verdict.worded(f"[{words}] {verdict.sentence}") for verdict in told]
    return said


def _audit(row: Audited) -> tuple[str, int, int]:
    """Return what an audit's rows share: another number of canaries or references asks another question."""
    return row.threat, row.key.references or 0, row.key.canaries or 0


def _members(rows: Sequence[Audited], none: Audited | None) -> list[Verdict]:
    """Return who is found over the whole grid: the sentence names the attack and control value that find most.

    Whether it is found at all is judged at the level of all that were tried; the figures are those of the largest.
    """
    told = [row for row in rows if row.canaries is not None]
    if not told:
        return _average(rows, none)
    top = max(told, key=lambda row: value(row.canaries, CANARIES) or 0.0)
    tried = sum(row.tried for row in rows)
    found = above_chance(top.canaries, CANARIES, tried)
    verb = "Canaries are told from those left out" if found else "Canaries are not shown to be found"
    beside = "" if none is None else f"; undefended {_canaries(none.canaries)}"
    at = ", ".join(word for word in (attack_of(top.canaries), top.control) if word)
    average = max(told, key=lambda row: value(row.members, "auc") or 0.0)
    also = ", ".join(word for word in (attack_of(average.members), average.control) if word)
    few = "at most " if len(told) > 1 or tried > 1 else ""
    sentence = (
        f"In an audit: {verb} ({at}: {few}{_canaries(top.canaries)}{beside}); average records: {few}AUC "
        f"{figure(average.members, 'auc', '.2f')} ({also})."
    )
    return [_verdict(told, top.canaries, CANARIES, "falls" if found else "undecided", sentence)]


def _average(rows: Sequence[Audited], none: Audited | None) -> list[Verdict]:
    """Return who is found in an audit without canaries."""
    told = [row for row in rows if row.members is not None]
    if not told:
        return []
    top = max(told, key=lambda row: value(row.members, "auc") or 0.0)
    found = above_chance(top.members, "auc", sum(row.tried for row in rows))
    verb = "Members are told from others" if found else "Members are not shown to be found"
    at = ", ".join(word for word in (attack_of(top.members), top.control) if word)
    beside = "" if none is None else f"; undefended AUC {figure(none.members, 'auc', '.2f')}"
    sentence = f"In an audit without canaries: {verb} ({at}: AUC {figure(top.members, 'auc', '.2f')}{beside})."
    return [_verdict(told, top.members, "auc", "falls" if found else "undecided", sentence)]


def _verdict(rows: Sequence[Audited], top: Record | None, metric: str, became: Fate | None, sentence: str) -> Verdict:
    return Verdict(rows[0].defense, "audit", became, sentence, tuple(row.key for row in rows), top, metric)


def _canaries(record: Record | None) -> str:
    rate = figure(record, "canary_tpr_at_1pct_fpr", ".0%")
    return f"AUC {figure(record, CANARIES, '.2f')}" + ("" if rate == "-" else f", {rate} of members at 1% false ones")


def _owners(rows: Sequence[Audited], none: Audited | None) -> list[Verdict]:
    told = [row for row in rows if row.owners is not None]
    if not told:
        return []
    top = max(told, key=lambda row: value(row.owners, "tracing_accuracy") or 0.0)
    beside = "" if none is None else f", undefended {figure(none.owners, 'tracing_accuracy', '.0%')}"
    metric = top.owners.metric("tracing_accuracy") if top.owners is not None else None
    chance = "" if metric is None or metric.chance is None else f", chance {metric.chance:.0%}"
    few = "at most " if len(told) > 1 else ""
    share = figure(top.owners, "tracing_accuracy", ".0%")
    sentence = f"In an audit, records are traced to their owner in {few}{share} of cases{beside}{chance}."
    return [_verdict(told, top.owners, "tracing_accuracy", None, sentence)]


def _epsilon(row: Audited) -> list[Verdict]:
    """Return what one run shows of epsilon where the defense claims one, or shows a positive bound."""
    bound = value(row.epsilon, "epsilon_lower")
    if bound is None or (row.claimed is None and bound <= 0):
        return []
    at = f" at {row.control}" if row.control else ""
    claim = "" if row.claimed is None else f", {row.claimed:.3g} is guaranteed"
    above = row.claimed is not None and bound > row.claimed
    refuted = "; the guarantee is REFUTED, unless this is the one such bound in twenty that errs" if above else ""
    sentence = (
        f"One run shows that epsilon is at least {bound:.2g}{at} ({attack_of(row.epsilon)}, 95 %){claim}{refuted}."
    )
    return [_verdict([row], row.epsilon, "epsilon_lower", "falls" if above else None, sentence)]
