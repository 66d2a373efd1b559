"""What may be said: one verdict for each question about a defense, and the rule by which reconstructions fall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppbench.records.figure import Figured
from ppbench.report.controls import BROKEN, is_image, rebuilt_share
from ppbench.report.frame import Key
from ppbench.report.worst import Measured, attack_of, cell_of

HIDDEN = 20.0  # dB: below it the subject of an image is not recognized
Fate = Literal["falls", "hidden", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What was found about one question; sentences, terminal, page and JSON read it.

    Attributes:
        defense: of which.
        question: what was looked for: "pixels", "rows", "labels", "members", "outputs", "audit", "guarantee", or
            the name of a question of another package.
        fate: whether it falls, stays hidden, or is undecided; None where a sentence states figures and judges nothing.
        sentence: the verdict in words, with its figures.
        settings: what it is about, keys by `SETTING`.
        strongest: what its figures are from, None where no attack gave any.
        metric: the figure that decides, "" where none does.
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
    """Return "falls" or "hidden" by where the interval of the median PSNR lies about 20 dB, else "undecided".

    Where there is no figure nothing is known: that is undecided, too.
    """
    metric = found.metric("psnr_median") if found is not None else None
    if metric is None or metric.value is None:
        return "undecided"
    low = metric.value if metric.low is None else metric.low
    high = metric.value if metric.high is None else metric.high
    return "falls" if low >= HIDDEN else "hidden" if high < HIDDEN else "undecided"


def rebuilt_fate(found: Figured | None) -> Fate:
    """Return what became of what was to be rebuilt: of images by `fate`, of table rows by whether half are rebuilt."""
    if found is None or is_image(found):
        return fate(found)
    share = rebuilt_share(found)
    if share is None or share.value is None:
        return "undecided"
    low = share.value if share.low is None else share.low
    high = share.value if share.high is None else share.high
    return "falls" if low >= BROKEN else "hidden" if high < BROKEN else "undecided"


def together(fates: Iterable[Fate]) -> Fate:
    """Return the fate of what several attacks or settings were tried on: falls where any does, hidden where all are."""
    every = set(fates)
    return "falls" if "falls" in every else "hidden" if every == {"hidden"} else "undecided"
