"""What may be said: one verdict for each question about a defense, and the rules by which what stands falls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppbench.records.figure import Figured
from ppbench.records.schema import Flag
from ppbench.report.controls import BELIED, above_chance, value, widened
from ppbench.report.frame import Key
from ppbench.report.leak import Leak, Level
from ppbench.report.worst import Measured, attack_of, cell_of

READ, LITTLE = (
    0.9,
    0.2,
)  # shares of the true decisions, beyond chance, from which on they are read, below which hardly any
CLOSE, FAR = 0.2, 0.5  # relative errors of predicted numbers up to which they are read, from which on they are not
Fate = Literal["falls", "stands", "undecided"]
ModelFate = Literal["falls", "part", "stands", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What was found about one question; sentences, terminal, page and JSON read it.

    question: "pixels", "rows", "labels", "members", "outputs", "audit", "guarantee", "usability", or of another
    package; fate: None where figures are stated and nothing is judged; settings: keys by `SETTING`; strongest: what the
    figures are from; metric: the one that decides, "" where none does; leak: of inputs, how far those of the strongest
    figure leak.
    """

    defense: str
    question: str
    fate: Fate | None
    sentence: str
    settings: tuple[Key, ...] = ()
    strongest: Measured | None = None
    metric: str = ""
    leak: Leak | None = None

    def worded(self, sentence: str) -> Verdict:
        """Return the same verdict in other words."""
        return replace(self, sentence=sentence)

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs, in types that JSON has: what, of which settings, by which cell, with which figure."""
        figure = None if self.strongest is None or not self.metric else self.strongest.metric(self.metric)
        scene = ("threat", "stage", "batch", "probe", "probe_rounds", "role", "references", "canaries")
        names = ("control", "value", *scene)
        return {
            "defense": self.defense,
            "question": self.question,
            "fate": self.fate,
            "level": None if self.leak is None else self.leak.level,
            "level_plain": None if self.leak is None else self.leak.plain,
            "qualifiers": [] if self.leak is None else [vars(one) for one in self.leak.qualifiers],
            "settings": [{name: getattr(key, name) for name in names} for key in self.settings],
            "attack": None if self.strongest is None else attack_of(self.strongest),
            "cell_id": None if self.strongest is None else cell_of(self.strongest).cell_id,
            "figure": None if figure is None else figure.model_dump(),
            "sentence": self.sentence,
        }


def fate_of(level: Level) -> Fate:
    """Return what became of inputs that leak so far."""
    return "falls" if level in ("rebuilt", "recognizable") else "stands" if level == "blind" else "undecided"


def unless_belied(became: Fate, flags: Iterable[Flag]) -> Fate:
    """Return `became`, but undecided where it is hidden by who is belied: by his server's step, or by his training."""
    return "undecided" if became == "stands" and any(flag.code in BELIED for flag in flags) else became


def members_fate(record: Figured, tried: int, undefended: Figured | None, name: str = "asr") -> Fate:
    """Return whether the strongest of `tried` cells finds members.

    By the metric called `name`. "falls": it lies above chance at Bonferroni's level; "stands": it does not, and lies
    below what `undefended`, a cell that finds members of the undefended model, gives away; else "undecided".
    """
    if above_chance(record, name, tried):
        return "falls"
    metric, beside = record.metric(name), value(undefended, name)
    if metric is None or metric.high is None or beside is None:
        return "undecided"
    return "stands" if metric.high < beside else "undecided"


def outputs_fate(record: Figured, tried: int) -> ModelFate:
    """Return whether an attack reads the true model's outputs: all but all of them, in part, or hardly any.

    Decisions are judged by their agreement beyond chance, (a - chance) / (1 - chance); predictions of numbers, which
    have no classes, and of a model that always decides alike, by their relative error. The interval is Bonferroni's for
    `tried` cells.
    """
    agreement = record.metric("agreement")
    chance = 1.0 if agreement is None else agreement.chance or 0.0
    if record.config.model.classes > 1 and chance < 1:
        ends = widened(agreement, tried)
        if ends is None:
            return "undecided"
        low, high = ((end - chance) / (1 - chance) for end in ends)
        return "falls" if low >= READ else "stands" if high < LITTLE else "part" if low >= LITTLE else "undecided"
    ends = widened(record.metric("output_error"), tried)
    if ends is None:
        return "undecided"
    low, high = ends
    return "falls" if high <= CLOSE else "stands" if low >= FAR else "part" if high < FAR else "undecided"


def same_outputs(record: Figured, tried: int) -> bool:
    """Return whether a model answers as the true one: by decisions or, where these tell little, by outputs."""
    ends = widened(record.metric("output_error"), tried)
    return outputs_fate(record, tried) == "falls" or (ends is not None and ends[1] <= CLOSE)


def together(fates: Iterable[ModelFate]) -> Fate:
    """Return the fate of what several attacks or settings were tried on: falls where any does, hidden where all are."""
    every = set(fates)
    return "falls" if every & {"falls", "part"} else "stands" if every == {"stands"} else "undecided"
