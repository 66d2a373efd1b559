"""Which attacks know a defense: a declaration alone does not count, or its author could buy a rank with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from ppbench.base.registry import find, plugins
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import DefenseInfo, Metric, Record
from ppbench.report.controls import BROKEN_SHARE, CONTROLS, LAW_EXPLAINS, taken_share, value
from ppbench.report.frame import frame_of
from ppbench.report.worst import Measured, contenders, knows

CLOSE_OUTPUTS = 0.1
"""Relative error of outputs up to which an attack breaks a defense."""
BESIDE = 1.0
"""Decibels by which aware attacks may rebuild less than unaware ones: two searches of one kind differ by that much."""


@dataclass(frozen=True)
class Knowledge:
    """The attacks that know a defense, by all records of a folder.

    declared: those that declare it; generic: ours that read any defense by its server's own code; tested: (defense,
    attack) pairs of ours, which tests check; strong: attacks of other packages that break the undefended model.
    """

    declared: frozenset[str] = frozenset()
    generic: frozenset[str] = frozenset()
    tested: frozenset[tuple[str, str]] = frozenset()
    strong: frozenset[str] = frozenset()

    @staticmethod
    def of(records: Iterable[Record]) -> Knowledge:
        """Return the knowledge shown by `records`."""
        frame, ours = frame_of(records), {n for n, p in plugins("attacks").items() if p.ours}
        pairs = {(r.config.defense.id, r.config.attack.id) for r in frame if r.config.attack.adaptive}
        generic = {attack for defense, attack in pairs if defense in CONTROLS} & ours
        names = frozenset(attack for _, attack in pairs)
        strong = {r.config.attack.id for r in frame if r.config.defense.id == "none" and breaks(r)}
        foreign = {r.config.defense.id for r in frame if not is_ours(r.config.defense)}
        tested = frozenset(pair for pair in pairs if pair[1] in ours and pair[0] not in foreign)
        return Knowledge(names, frozenset(generic), tested, frozenset(strong & (names - ours)))

    def adaptive(self, measured: Measured) -> bool:
        """Return whether an attack, or the one that it follows, declares to know the defense."""
        return knows(measured) or measured.config.attack.follows in self.declared

    def vouches(self, row: Sequence[Record]) -> bool:
        """Return whether an attack on a row, the records of one setting, is shown to know the defense there.

        For a generic attack: the truth explains the evidence exactly; else clients do something that it does not model.
        Other attacks must be at full strength: they find no less than plain attacks, or some attack breaks the row. And
        attack and defense are ours, or the public law of noise accounts for the uploads (`LAW_EXPLAINS`), or the attack
        breaks the undefended model, and this row further than any plain attack. No other row counts.
        """
        cells, defense = contenders(row), row[0].config.defense.id
        ids = [name for r in cells if self.adaptive(r) for name in (r.config.attack.id, r.config.attack.follows)]
        if any({r.config.attack.id, r.config.attack.follows} & self.generic and _exact(r) for r in row):
            return True
        names = {name for name in ids if name} - self.generic
        if not names or (self.weaker(row) and not any(map(breaks, cells))):
            return False
        explained = any(flag.code == LAW_EXPLAINS for record in row for flag in record.flags)
        known = {name for name in names if explained or (defense, name) in self.tested}
        return bool(known) or _finds_more(row, names & self.strong)

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
    """Return whether the truth explains the evidence exactly.

    Reconstructions alone measure it. Of labels no flag means nothing, so they count where our tests check the pair:
    no author can buy a rank there, and chance alone decides which of two attacks that fail finds more.
    """
    measured = question_for(record).inputs or is_ours(record.config.defense)
    return measured and record.status == "complete" and all(flag.code != "evidence_inexact" for flag in record.flags)


def is_ours(defense: DefenseInfo) -> bool:
    """Return whether a recorded defense is part of ppbench: records of others hold their code's digest."""
    plugin = find("defenses", defense.id)
    return not defense.code and (plugin is None or plugin.ours)


def _finds_more(row: Sequence[Record], names: Set[str]) -> bool:
    """Return whether one of the attacks `names` breaks a row and finds there what no plain attack finds."""
    if not (broken := {r.config.attack.id for r in row if r.config.attack.id in names and breaks(r)}):
        return False
    frame, metric = frame_of(row), question_for(row[0]).headline(row[0].config)
    plain = frame.of([r for r in frame if not r.config.attack.adaptive]).worst(metric)
    results = [frame.of([r for r in frame if r.config.attack.id == name]).worst(metric) for name in broken]
    return any(
        own is not None and (plain is None or _beyond(own.metric(metric), plain.metric(metric))) for own in results
    )


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
