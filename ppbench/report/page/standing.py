"""How a defense stands over its control values, in a few words, and the value that an overview's row tells of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.records.figure import leak
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import above_chance, rebuilding
from ppbench.report.leak import SEVERITY, WORDS, Leak
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import USABLE, Entry, points_lost
from ppbench.report.verdict.verdict import members_fate, outputs_fate
from ppbench.report.worst import Measured, WorstCase, attack_of

Tone = Literal["info", "good", "warning", "error"]
REFUTED = "epsilon refuted by audit"
KEEPS: tuple[str, Tone] = ("members not found", "good")


@dataclass(frozen=True)
class Value:
    """A defense at one control value.

    entry: its row of the judged boards that leaks most, `leak` how far; labels: the highest label accuracy; batch: the
    strongest cell that tells who was in a batch, of that row's scene; members, canaries, outputs: the strongest cells;
    found, tried: the strongest membership cells by metric, and of how many; reliable: whether the undefended model
    falls wherever it was judged; lacking: whether an attack failed or training diverged; cost: its row of the costs.
    """

    entry: Entry
    leak: Leak | None
    labels: Record | None
    batch: Record | None
    members: Record | None
    canaries: Record | None
    found: tuple[tuple[str, Record], ...]
    outputs: Record | None
    tried: int
    reliable: bool
    lacking: bool
    cost: CostRow | None

    @property
    def worst(self) -> WorstCase | None:
        """The worst case of what was to be rebuilt; None where nothing was, or no attack gave a figure."""
        return None if self.leak is None else self.leak.worst

    @property
    def metric(self) -> Metric | None:
        """What the worst case is measured by."""
        return None if self.worst is None else self.worst.metric(rebuilding(self.worst))

    @property
    def accuracy(self) -> float | None:
        """The delivered model's accuracy."""
        return self.entry.sample.utility.accuracy

    @property
    def use(self) -> float:
        """How good the model is, larger being better: by accuracy, or where there is none by its error."""
        utility = self.entry.sample.utility
        if utility.accuracy is not None:
            return utility.accuracy
        return -float("inf") if utility.mse is None else -utility.mse

    @property
    def refuted(self) -> bool:
        """Whether an audit refutes the claimed epsilon."""
        return self.cost is not None and self.cost.refuted

    @property
    def gives_members(self) -> bool:
        """Whether members or canaries are found above chance, at the level of all cells tried."""
        return any(above_chance(record, name, self.tried) for name, record in self.found)

    @property
    def gives_labels(self) -> bool:
        """Whether labels are recovered above chance, at the level of all attacks on the row."""
        return above_chance(self.labels, "label_accuracy", len(self.entry.records))

    @property
    def given(self) -> tuple[str, ...]:
        """What is found beside inputs: "labels", "members"."""
        told = (("labels", self.gives_labels), ("members", self.gives_members))
        return tuple(word for word, is_given in told if is_given)


@dataclass(frozen=True)
class Standing:
    """One row. value: the control value that it tells of; grid: all; none: the undefended, or None."""

    verdict: str
    tone: Tone
    value: Value
    grid: tuple[Value, ...]
    none: Value | None

    @property
    def loss(self) -> float | None:
        """Accuracy beside the undefended model's, in points; None where either is not known."""
        return self.loss_of(self.value)

    def loss_of(self, value: Value) -> float | None:
        """The same of one setting."""
        loss = points_lost(value.accuracy, None if self.none is None else self.none.accuracy)
        return None if loss is None else -loss

    @property
    def by_control(self) -> tuple[Value, ...]:
        """All settings, by role and control value."""
        return tuple(sorted(self.grid, key=lambda v: (v.entry.differs, v.entry.key.role, v.entry.key.value or 0.0)))

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """The lowest and the highest accuracy over the grid; None of a single value."""
        return _ends([v.accuracy for v in self.grid])

    @property
    def leaks(self) -> tuple[float, float] | None:
        """The same of the worst case."""
        return _ends([None if v.metric is None else v.metric.value for v in self.grid])


def _ends(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [v for v in values if v is not None]
    return (min(known), max(known)) if len(values) > 1 and known else None


def standing(grid: Sequence[Value], none: Value | None, reliable: bool) -> Standing:
    """Return a defense's row beside the undefended; reliable: whether the controls of the evaluation hold."""
    ordered = sorted(grid, key=lambda v: (-v.use, v.entry.name))
    value, verdict, tone = _judged(ordered, none)
    if not reliable or not all(v.reliable for v in ordered):
        verdict, tone = "nothing concluded", "info"
    return Standing(verdict, tone, value, tuple(ordered), none)


def _judged(grid: Sequence[Value], none: Value | None) -> tuple[Value, str, Tone]:
    """Return the value that is told of, the verdict and its tone; `grid` with the best model first.

    Told of is, of the usable settings, the one that leaks least; where all leak alike, the one that hides most from who
    does not know of the defense: there it looks best, and its fall says most.
    """
    asked = [v for v in grid if v.leak is not None]
    if not asked:
        return _models(grid, none)
    usable = [v for v in asked if is_usable(v, none)]
    value = min(usable or asked, key=_leaking)
    verdict, tone = chip(value)
    if not usable:
        return value, f"no usable setting; {verdict}", "warning"
    return value, verdict, tone


def _leaking(value: Value) -> tuple[int, bool, float]:
    assert value.leak is not None
    level = value.leak.level
    return SEVERITY[level], value.lacking, 0.0 if level == "blind" else _plainly(value)


SHORT = {
    "undefended_stands": "undecided, undefended stands too",
    "undefended_missing": "undecided, undefended not attacked",
    "belied": "undecided, belied",
    "unmeasured": "undecided, recognition not measured",
}
"""Why a level is undecided, by the code of its qualifier."""


def reason_of(leak: Leak) -> str:
    """Return why a level is undecided, in words."""
    return next(
        (q.words for q in leak.qualifiers if q.code in SHORT), "what is seen is neither shown to leak nor not to"
    )


def chip(value: Value) -> tuple[str, Tone]:
    """Return how far a setting leaks, with what must be said along, and whether that is good."""
    leak = value.leak
    if leak is None:
        return "not attacked", "info"
    if leak.falls or value.refuted:
        seen = [f"{WORDS[leak.level]} by {winner_of(leak.worst)}"] if leak.falls else []
        return ", ".join([*seen, *([REFUTED] if value.refuted else ())]), "error"
    if value.lacking:
        return "undecided, attacks failed", "warning"
    if leak.level == "undecided":
        return next((SHORT[q.code] for q in leak.qualifiers if q.code in SHORT), WORDS["undecided"]), "warning"
    words = [WORDS["blind"], *(["untested"] if leak.untested else ()), *(f"gives {word}" for word in value.given)]
    return ", ".join(words), "warning" if len(words) > 1 else "good"


def _models(grid: Sequence[Value], none: Value | None) -> tuple[Value, str, Tone]:
    """Judge by members and by outputs, where nothing was to be rebuilt."""
    if (refuted := next((v for v in grid if v.refuted), None)) is not None:
        return refuted, REFUTED, "error"
    giving = [v for v in grid if v.gives_members]
    read = [v for v in grid if v.outputs is not None and outputs_fate(v.outputs, len(grid)) == "falls"]
    kept = [v for v in grid if v not in giving and v not in read]
    known = none.members if none is not None and none.gives_members else None
    for value in kept:
        if value.members is not None and members_fate(value.members, value.tried, known) == "stands":
            return value, *(KEEPS if is_usable(value, none) else ("members not found, model not usable", "warning"))
    if kept:  # that nothing is found of members says little: chance is where weak attacks end
        return kept[0], "undecided", "warning"
    if giving:
        return giving[0], f"gives members to {winner_of(giving[0].found[0][1])}", "error"
    return read[0], f"falls to {winner_of(read[0].outputs)}", "error"


def _plainly(value: Value) -> float:
    """Return how much attackers who do not know the defense find: where it looks best, its fall says most."""
    plain = value.entry.plain
    metric = None if plain is None else plain.metric(rebuilding(plain))
    return float("inf") if metric is None or metric.value is None else leak(metric)


def is_usable(value: Value, none: Value | None) -> bool:
    """Return whether a setting loses at most `USABLE` points of accuracy; True where that is not known."""
    loss = points_lost(value.accuracy, None if none is None else none.accuracy)
    return loss is None or loss <= USABLE


def winner_of(found: Measured | None) -> str:
    """Return an attack's name, of a worst case that of its most frequent winner."""
    return found.attack if isinstance(found, WorstCase) else attack_of(found)
