"""Which attacks know a defense: a declaration alone vouches for nothing, or its author could buy a rank with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppbench.base.registry import plugins
from ppbench.metrics.modalities import NEAR, modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import BROKEN, CONTROLS, taken_share, value
from ppbench.report.frame import ROW, Frame, frame_of
from ppbench.report.worst import Measured, contenders, knows

BESIDE = 1.0
"""Decibels by which who knows the defense may rebuild less than who does not: two searches of one kind differ so."""


@dataclass(frozen=True)
class Knowledge:
    """What all records of a folder say of attacks that declare to know a defense.

    declared: those that do; generic: ours that read any defense by its server's own code; shown: (defense, attack),
    where more than the declaration says so: it is ours, which tests hold, or it breaks the undefended model and finds,
    at some setting of the defense, what no plain attack finds.
    """

    declared: frozenset[str] = frozenset()
    generic: frozenset[str] = frozenset()
    shown: frozenset[tuple[str, str]] = frozenset()

    @staticmethod
    def of(records: Iterable[Record]) -> Knowledge:
        """Return what `records` say."""
        frame, ours = frame_of(records), {n for n, p in plugins("attacks").items() if p.ours}
        told = {(r.config.defense.id, r.config.attack.id) for r in frame if r.config.attack.adaptive}
        generic = {attack for defense, attack in told if defense in CONTROLS} & ours
        others = {attack for _, attack in told} - ours
        proven = _proven(frame, others) if others else set()
        names = frozenset(attack for _, attack in told)
        return Knowledge(names, frozenset(generic), frozenset(p for p in told if p[1] in ours or p in proven))

    def adaptive(self, found: Measured) -> bool:
        """Return whether an attack declares to know the defense, itself or through the attack whose images it uses."""
        return knows(found) or found.config.attack.follows in self.declared

    def vouches(self, row: Sequence[Record]) -> bool:
        """Return whether an attack ran on a row that is shown to know the defense, and is at full strength there.

        At full strength: it finds no less than plain ones do. That is not asked of a row that is broken by anybody. Of
        a generic one it is asked that the truth explains what it reads: else clients do what it does not model.
        """
        told, defense = contenders(row), row[0].config.defense.id
        names = {name for r in told if self.adaptive(r) for name in (r.config.attack.id, r.config.attack.follows)}
        if any({r.config.attack.id, r.config.attack.follows} & self.generic and _exact(r) for r in row):
            return True
        return any((defense, name) in self.shown for name in names - self.generic) and (
            not self.weaker(row) or any(map(breaks, told))
        )

    def weaker(self, row: Sequence[Record]) -> bool:
        """Return whether every attack that knows the defense is a dB worse than a plain one (AutoAttack's flag)."""
        images = [r for r in row if question_for(r).inputs]
        knowing, plain = (
            value(best([r for r in images if self.adaptive(r) == knows], "psnr_median"), "psnr_median")
            for knows in (True, False)
        )
        if knowing is None or plain is None or not modality_of(row[0].config).decibels:
            return False
        return knowing < plain - BESIDE


def _exact(record: Record) -> bool:
    return record.status == "complete" and all(flag.code != "evidence_inexact" for flag in record.flags)


def _proven(frame: Frame, others: set[str]) -> set[tuple[str, str]]:
    """Return (defense, attack) of strangers' attacks that break `none` and find there what plain ones do not."""
    strong = {r.config.attack.id for r in frame if r.config.defense.id == "none" and breaks(r)}
    found = set()
    for key, row in frame.by(ROW).items():
        metric = question_for(row[0]).headline(row[0].config)
        plain = row.of([r for r in row if not r.config.attack.adaptive]).worst(metric)
        for name in others & strong & {r.config.attack.id for r in row if r.config.attack.adaptive}:
            own = row.of([r for r in row if r.config.attack.id == name]).worst(metric)
            if own is not None and (plain is None or _beyond(own.metric(metric), plain.metric(metric))):
                found.add((key.defense, name))
    return found


def _beyond(one: Metric | None, other: Metric | None) -> bool:
    """Return whether a figure leaks more than another one, their intervals apart."""
    if one is None or other is None or None in (one.low, one.high, other.low, other.high):
        return False
    ends = (other.low, one.high) if one.higher_is_safer else (one.low, other.high)
    return ends[0] > ends[1]  # type: ignore[operator]  # none is None


def breaks(record: Record) -> bool:
    """Return whether an attack breaks a defense: half of the victims rebuilt or found again, outputs read, or members
    above chance.
    """
    question = question_for(record)
    if record.status != "complete" or record.config.attack.oracle:
        return False
    if question.inputs:
        return taken_share(record) >= BROKEN
    metric = record.metric(question.headline(record.config))
    if metric is None or metric.value is None:
        return False
    if metric.name == "output_error":
        return metric.value <= NEAR
    return metric.low is not None and metric.low > (metric.chance or 0.0)
