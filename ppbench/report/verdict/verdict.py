"""Verdicts: one sentence for each question about a defense, with what it renders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ppbench.report.findings import Fate
from ppbench.report.frame import Key
from ppbench.report.leak import Leak
from ppbench.report.worst import Measured, attack_of, cell_of


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
