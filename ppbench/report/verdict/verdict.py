"""Verdicts: one for each question about a defense, and the rules that decide them."""

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

READ_SHARE, HARDLY_READ = (
    0.9,
    0.2,
)  # shares of the true decisions, beyond chance: read from the first on, hardly any below the second
READ_ERROR, UNREAD_ERROR = (
    0.2,
    0.5,
)  # relative errors of predicted numbers: read up to the first, not read from the second on
Fate = Literal["falls", "stands", "undecided"]
ModelFate = Literal["falls", "part", "stands", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one question; sentences, terminal, page and JSON use it.

    question: "pixels", "rows", "labels", "members", "outputs", "audit", "guarantee", "usability", or of another
    package; fate: None where figures are only reported; settings: keys by `SETTING`; strongest: the source of the
    figures; metric: the one that decides, or ""; leak: for inputs, that of the strongest figure.
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
        """Return the same verdict with another sentence."""
        return replace(self, sentence=sentence)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict in types that JSON has, with its settings, cell and figure."""
        figure = None if self.strongest is None or not self.metric else self.strongest.metric(self.metric)
        return {
            "defense": self.defense,
            "question": self.question,
            "fate": self.fate,
            "level": None if self.leak is None else self.leak.level,
            "level_plain": None if self.leak is None else self.leak.plain,
            "qualifiers": [] if self.leak is None else [vars(one) for one in self.leak.qualifiers],
            "settings": [_setting(key) for key in self.settings],
            "attack": None if self.strongest is None else attack_of(self.strongest),
            "cell_id": None if self.strongest is None else cell_of(self.strongest).cell_id,
            "figure": None if figure is None else figure.model_dump(),
            "sentence": self.sentence,
        }


def _setting(key: Key) -> dict[str, Any]:
    """Return what tells a setting of one verdict from the others, in types that JSON has."""
    audit = key.audit
    return {
        **{name: getattr(key, name) for name in ("control", "value", "threat", "stage", "batch", "role")},
        **key.probing.model_dump(),
        "references": None if audit is None else audit.references,
        "canaries": None if audit is None else audit.canaries,
    }


def fate_of(level: Level) -> Fate:
    """Return the fate of inputs with a level of leak."""
    return "falls" if level in ("rebuilt", "recognizable") else "stands" if level == "blind" else "undecided"


def unless_belied(became: Fate, flags: Iterable[Flag]) -> Fate:
    """Return `became`, but "undecided" instead of "stands" where a flag belies the defense's own account."""
    return "undecided" if became == "stands" and any(flag.code in BELIED for flag in flags) else became


def members_fate(record: Figured, tried: int, undefended: Figured | None, name: str = "asr") -> Fate:
    """Return whether the strongest of `tried` cells finds members, by the metric `name`.

    "falls": it lies above chance at Bonferroni's level; "stands": it does not, and lies below `undefended`, a cell that
    finds members of the undefended model; else "undecided".
    """
    if above_chance(record, name, tried):
        return "falls"
    metric, beside = record.metric(name), value(undefended, name)
    if metric is None or metric.high is None or beside is None:
        return "undecided"
    return "stands" if metric.high < beside else "undecided"


def outputs_fate(record: Figured, tried: int) -> ModelFate:
    """Return whether an attack reads the true model's outputs: nearly all, in part, or hardly any.

    Decisions are judged by their agreement beyond chance, (a - chance) / (1 - chance); predictions of numbers,
    and those of a model that always decides alike, by their relative error. The interval is Bonferroni's for `tried`
    cells.
    """
    agreement = record.metric("agreement")
    chance = 1.0 if agreement is None else agreement.chance or 0.0
    if record.config.model.classes > 1 and chance < 1:
        ends = widened(agreement, tried)
        if ends is None:
            return "undecided"
        low, high = ((end - chance) / (1 - chance) for end in ends)
        return (
            "falls"
            if low >= READ_SHARE
            else "stands"
            if high < HARDLY_READ
            else "part"
            if low >= HARDLY_READ
            else "undecided"
        )
    ends = widened(record.metric("output_error"), tried)
    if ends is None:
        return "undecided"
    low, high = ends
    return (
        "falls"
        if high <= READ_ERROR
        else "stands"
        if low >= UNREAD_ERROR
        else "part"
        if high < UNREAD_ERROR
        else "undecided"
    )


def same_outputs(record: Figured, tried: int) -> bool:
    """Return whether a model answers as the true one, by its decisions or by its outputs."""
    ends = widened(record.metric("output_error"), tried)
    return outputs_fate(record, tried) == "falls" or (ends is not None and ends[1] <= READ_ERROR)


def joint_fate(fates: Iterable[ModelFate]) -> Fate:
    """Return the joint fate of several attacks or settings: "falls" where any does, "stands" where all do."""
    every = set(fates)
    return "falls" if every & {"falls", "part"} else "stands" if every == {"stands"} else "undecided"
