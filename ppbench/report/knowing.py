"""Which attacks know a defense: a declaration alone does not count, or its author could buy a rank with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppbench.base.registry import plugins
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import BROKEN_SHARE, CONTROLS, taken_share, value
from ppbench.report.frame import ROW, Frame, frame_of
from ppbench.report.worst import Measured, contenders, knows

CLOSE_OUTPUTS = 0.1
"""Relative error of outputs up to which an attack breaks a defense."""
BESIDE = 1.0
"""Decibels by which aware attacks may rebuild less than unaware ones: two searches of one kind differ by that much."""


@dataclass(frozen=True)
class Knowledge:
    """The attacks that know a defense, by all records of a folder.

    declared: those that declare it; generic: ours that read any defense by its server's own code; shown: (defense,
    attack) pairs with more evidence: the attack is ours, so tests check it, or it breaks the undefended model and finds
    at some setting of the defense what no plain attack finds.
    """

    declared: frozenset[str] = frozenset()
    generic: frozenset[str] = frozenset()
    shown: frozenset[tuple[str, str]] = frozenset()

    @staticmethod
    def of(records: Iterable[Record]) -> Knowledge:
        """Return the knowledge shown by `records`."""
        frame, ours = frame_of(records), {n for n, p in plugins("attacks").items() if p.ours}
        pairs = {(r.config.defense.id, r.config.attack.id) for r in frame if r.config.attack.adaptive}
        generic = {attack for defense, attack in pairs if defense in CONTROLS} & ours
        others = {attack for _, attack in pairs} - ours
        proven = _proven(frame, others) if others else set()
        names = frozenset(attack for _, attack in pairs)
        return Knowledge(names, frozenset(generic), frozenset(p for p in pairs if p[1] in ours or p in proven))

    def adaptive(self, measured: Measured) -> bool:
        """Return whether an attack, or the one that it follows, declares to know the defense."""
        return knows(measured) or measured.config.attack.follows in self.declared

    def vouches(self, row: Sequence[Record]) -> bool:
        """Return whether an attack on a row is shown to know the defense and is at full strength there.

        At full strength: it finds no less than plain attacks, or some attack breaks the row. For a generic attack: the
        truth explains the evidence exactly; else clients do something that it does not model.
        """
        cells, defense = contenders(row), row[0].config.defense.id
        names = {name for r in cells if self.adaptive(r) for name in (r.config.attack.id, r.config.attack.follows)}
        if any({r.config.attack.id, r.config.attack.follows} & self.generic and _exact(r) for r in row):
            return True
        return any((defense, name) in self.shown for name in names - self.generic) and (
            not self.weaker(row) or any(map(breaks, cells))
        )

    def weaker(self, row: Sequence[Record]) -> bool:
        """Return whether all attacks that know the defense are `BESIDE` worse than a plain one (AutoAttack's flag)."""
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
    """Return (defense, attack) of `others` that break `none` and find on the defense what plain attacks do not."""
    strong = {r.config.attack.id for r in frame if r.config.defense.id == "none" and breaks(r)}
    proven = set()
    for key, row in frame.by(ROW).items():
        metric = question_for(row[0]).headline(row[0].config)
        plain = row.of([r for r in row if not r.config.attack.adaptive]).worst(metric)
        for name in others & strong & {r.config.attack.id for r in row if r.config.attack.adaptive}:
            own = row.of([r for r in row if r.config.attack.id == name]).worst(metric)
            if own is not None and (plain is None or _beyond(own.metric(metric), plain.metric(metric))):
                proven.add((key.defense, name))
    return proven


def _beyond(one: Metric | None, other: Metric | None) -> bool:
    """Return whether `one` leaks more than `other`, with disjoint intervals."""
    if one is None or other is None or None in (one.low, one.high, other.low, other.high):
        return False
    ends = (other.low, one.high) if one.higher_is_safer else (one.low, other.high)
    return ends[0] > ends[1]  # type: ignore[operator]  # none is None


def breaks(record: Record) -> bool:
    """Return whether an attack breaks a defense: half of the victims rebuilt or re-identified, outputs read, or members
    above chance.
    """
    question = question_for(record)
    if record.status != "complete" or record.config.attack.oracle:
        return False
    if question.inputs:
        return taken_share(record) >= BROKEN_SHARE
    metric = record.metric(question.headline(record.config))
    if metric is None or metric.value is None:
        return False
    if metric.name == "output_error":
        return metric.value <= CLOSE_OUTPUTS
    return metric.low is not None and metric.low > (metric.chance or 0.0)
