"""What may be said: one verdict for each question about a defense, and the rules by which what is hidden falls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppbench.records.figure import Figured
from ppbench.records.schema import Flag, Metric
from ppbench.report.controls import BELIED, BROKEN, above_chance, is_image, rebuilt_share, value, widened
from ppbench.report.frame import Key
from ppbench.report.worst import Measured, attack_of, cell_of

HIDDEN = 20.0  # dB: below it the subject of an image is not recognized
READ, LITTLE = 0.9, 0.2  # shares of the true decisions, beyond chance, from which on they are read, below which hidden
CLOSE, FAR = 0.2, 0.5  # relative errors of predicted numbers up to which they are read, from which on hidden
Fate = Literal["falls", "hidden", "undecided"]
ModelFate = Literal["falls", "part", "hidden", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What was found about one question; sentences, terminal, page and JSON read it.

    question: "pixels", "rows", "labels", "members", "outputs", "audit", "guarantee", or of another package; fate: None
    where figures are stated and nothing is judged; settings: keys by `SETTING`; strongest: what the figures are from;
    metric: the one that decides, "" where none does.
    """

    defense: str
    question: str
    fate: Fate | None
    sentence: str
    settings: tuple[Key, ...] = ()
    strongest: Measured | None = None
    metric: str = ""

    def worded(self, sentence: str) -> Verdict:
        """Return the same verdict in other words."""
        return replace(self, sentence=sentence)

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs, in types that JSON has: what, of which settings, by which cell, with which figure."""
        found = None if self.strongest is None or not self.metric else self.strongest.metric(self.metric)
        scene = ("threat", "stage", "batch", "probe", "probe_rounds", "role", "references", "canaries")
        names = ("control", "value", *scene)
        return {
            "defense": self.defense,
            "question": self.question,
            "fate": self.fate,
            "settings": [{name: getattr(key, name) for name in names} for key in self.settings],
            "attack": None if self.strongest is None else attack_of(self.strongest),
            "cell_id": None if self.strongest is None else cell_of(self.strongest).cell_id,
            "figure": None if found is None else found.model_dump(),
            "sentence": self.sentence,
        }


def fate(found: Figured | None) -> Fate:
    """Return "falls" or "hidden" by where the interval of the median PSNR lies about 20 dB, else "undecided"."""
    return _beside(None if found is None else found.metric("psnr_median"), HIDDEN)


def rebuilt_fate(found: Figured | None) -> Fate:
    """Return what became of what was to be rebuilt: of images by `fate`, of table rows by whether half are rebuilt."""
    return fate(found) if found is None or is_image(found) else _beside(rebuilt_share(found), BROKEN)


def unless_belied(became: Fate, flags: Iterable[Flag]) -> Fate:
    """Return `became`, but undecided where it is hidden by who is belied: by his server's step, or by his training."""
    return "undecided" if became == "hidden" and any(flag.code in BELIED for flag in flags) else became


def _beside(metric: Metric | None, limit: float) -> Fate:
    """Return on which side of a limit a figure lies with its interval; without a figure nothing is known."""
    if metric is None or metric.value is None:
        return "undecided"
    low = metric.value if metric.low is None else metric.low
    high = metric.value if metric.high is None else metric.high
    return "falls" if low >= limit else "hidden" if high < limit else "undecided"


def members_fate(record: Figured, tried: int, undefended: Figured | None, name: str = "asr") -> Fate:
    """Return whether the strongest of `tried` cells finds members.

    By the metric called `name`. "falls": it lies above chance at Bonferroni's level; "hidden": it does not, and lies
    below what `undefended`, a cell that finds members of the undefended model, gives away; else "undecided".
    """
    if above_chance(record, name, tried):
        return "falls"
    metric, beside = record.metric(name), value(undefended, name)
    if metric is None or metric.high is None or beside is None:
        return "undecided"
    return "hidden" if metric.high < beside else "undecided"


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
        return "falls" if low >= READ else "hidden" if high < LITTLE else "part" if low >= LITTLE else "undecided"
    ends = widened(record.metric("output_error"), tried)
    if ends is None:
        return "undecided"
    low, high = ends
    return "falls" if high <= CLOSE else "hidden" if low >= FAR else "part" if high < FAR else "undecided"


def same_outputs(record: Figured, tried: int) -> bool:
    """Return whether a model answers as the true one: by decisions or, where these tell little, by outputs."""
    ends = widened(record.metric("output_error"), tried)
    return outputs_fate(record, tried) == "falls" or (ends is not None and ends[1] <= CLOSE)


def together(fates: Iterable[ModelFate]) -> Fate:
    """Return the fate of what several attacks or settings were tried on: falls where any does, hidden where all are."""
    every = set(fates)
    return "falls" if every & {"falls", "part"} else "hidden" if every == {"hidden"} else "undecided"
