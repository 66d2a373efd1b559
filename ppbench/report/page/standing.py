"""How a defense stands over its control values, in a few words, and the value that an overview's row tells of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.records.figure import leak
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import above_chance, is_image, rebuilding
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import UNINFORMED, Entry
from ppbench.report.verdict.verdict import Fate, members_fate, outputs_fate, rebuilt_fate, unless_belied
from ppbench.report.worst import Measured, WorstCase, attack_of

Tone = Literal["info", "good", "warning", "error"]
USELESS = 0.5
"""Share of the undefended accuracy beyond chance below which a model is called useless."""
KEEPS: tuple[str, Tone] = ("hides members here", "good")


@dataclass(frozen=True)
class Value:
    """A defense at one control value.

    entry: its row of the judged boards that leaks most; asked, worst: whether something was to be rebuilt there, and
    what was; labels: the highest label accuracy; members, canaries, outputs: the strongest cells; found, tried: the
    strongest membership cells by metric, and of how many; reliable: whether the undefended model falls wherever it was
    judged; lacking: whether an attack failed or training diverged; cost: its row of the table of costs.
    """

    entry: Entry
    asked: bool
    worst: WorstCase | None
    labels: Record | None
    members: Record | None
    canaries: Record | None
    found: tuple[tuple[str, Record], ...]
    outputs: Record | None
    tried: int
    reliable: bool
    lacking: bool
    cost: CostRow | None

    @property
    def fate(self) -> Fate | None:
        """What became of what was to be rebuilt; None where nothing was."""
        return unless_belied(rebuilt_fate(self.worst), self.entry.flags) if self.asked else None

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
        none = None if self.none is None else self.none.accuracy
        return None if none is None or self.value.accuracy is None else 100 * (self.value.accuracy - none)

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
    """Return the value that is told of, the verdict and its tone; `grid` with the best model first."""
    asked = [v for v in grid if v.fate is not None]
    hidden, undecided = ([v for v in asked if v.fate == fate] for fate in ("hidden", "undecided"))
    if not asked:
        return _models(grid, none)
    if hidden:
        value = next((v for v in hidden if not v.lacking), hidden[0])
        return value, *_hidden(value, none)
    if undecided:
        return undecided[0], "undecided", "warning"
    value = min([v for v in asked if not useless(v, none)] or asked, key=_plainly)
    return value, f"falls to {winner_of(value.worst)}", "error"


def _hidden(value: Value, none: Value | None) -> tuple[str, Tone]:
    what = "images" if value.worst is not None and is_image(value.worst) else "rows"
    if value.refuted:
        return "epsilon refuted by audit", "error"
    if value.lacking:
        return "undecided, attacks failed", "warning"
    if useless(value, none):
        return f"hides {what}, useless model", "warning"
    if any(badge.text in UNINFORMED for badge in value.entry.badges):
        return f"hides {what} from plain attacks", "warning"
    given = [word for word, is_given in (("labels", value.gives_labels), ("members", value.gives_members)) if is_given]
    if given:
        return f"hides {what}, {f'not {given[0]}' if len(given) == 1 else 'nothing else'}", "warning"
    return "holds here", "good"


def _models(grid: Sequence[Value], none: Value | None) -> tuple[Value, str, Tone]:
    """Judge by members and by outputs, where nothing was to be rebuilt."""
    if (refuted := next((v for v in grid if v.refuted), None)) is not None:
        return refuted, "epsilon refuted by audit", "error"
    giving = [v for v in grid if v.gives_members]
    read = [v for v in grid if v.outputs is not None and outputs_fate(v.outputs, len(grid)) == "falls"]
    kept = [v for v in grid if v not in giving and v not in read]
    known = none.members if none is not None and none.gives_members else None
    for value in kept:
        if value.members is not None and members_fate(value.members, value.tried, known) == "hidden":
            return value, *(("hides members, useless model", "warning") if useless(value, none) else KEEPS)
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


def useless(value: Value, none: Value | None) -> bool:
    """Return whether over half of what the undefended model has learned is gone; False where that is not known."""
    whole, own = (None if v is None else v.accuracy for v in (none, value))
    chance = value.entry.sample.utility.chance
    return whole is not None and own is not None and own - chance < USELESS * (whole - chance)


def winner_of(found: Measured | None) -> str:
    """Return an attack's name, of a worst case that of its most frequent winner."""
    return found.attack if isinstance(found, WorstCase) else attack_of(found)
