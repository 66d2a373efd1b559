"""Rows and boards: what the page shows of one setting, and short remarks on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.metrics.modality import modality_of
from ppbench.records.schema import DefenseInfo, Flag, Record, Utility
from ppbench.report.controls import BELIED, CONTROLS, UNREPEATED, UNREPLAYED, Check, nothing_to_read
from ppbench.report.frame import Key
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import Leak
from ppbench.report.learning import learning_of
from ppbench.report.worst import WorstCase

UNINFORMED = ("plain attacks only", "knowledge not shown")
"""Badges of rows on which no attack is shown to know the defense."""
COLLAPSED = "training collapsed"
"""Badge of rows of which no training learned."""
AT_CHANCE = "accuracy at chance"
"""Badge of rows whose model learned nothing."""


@dataclass(frozen=True)
class Badge:
    """A short remark on a row. tone: its color; title: the remark in a sentence."""

    text: str
    tone: Literal["info", "good", "warning", "error"]
    title: str


@dataclass(frozen=True)
class Entry:
    """One row: a defense at one control value, under all attacks of its board.

    key: by `ROW`; sample: one of its records, for shared fields; records: all, including failed ones; plain, worst: the
    worst case over unaware attacks, and over all; labels: the cell with the highest label accuracy; flags: those of its
    records, each once; claimed: its paper's claim; differs: how it differs from others of its board beside the control
    value; rank_low, rank_high: its ranks, None where it is not ranked; leak: of its inputs, None without
    reconstructions.
    """

    key: Key
    sample: Record
    records: tuple[Record, ...]
    plain: WorstCase | None
    worst: WorstCase | None
    labels: Record | None
    badges: tuple[Badge, ...]
    flags: tuple[Flag, ...]
    claimed: str
    differs: str
    rank_low: int | None = None
    rank_high: int | None = None
    leak: Leak | None = None

    @property
    def rank(self) -> str:
        """The ranks in words: "1", "2-4", or "" where it is not ranked."""
        return "-".join(dict.fromkeys(str(end) for end in (self.rank_low, self.rank_high) if end is not None))

    @property
    def defense(self) -> DefenseInfo:
        """The defense as configured."""
        return self.sample.config.defense

    @property
    def role(self) -> str:
        """ "control" or "compared"."""
        return "control" if self.defense.id in CONTROLS else "compared"

    @property
    def name(self) -> str:
        """The defense, its control value and other differences: "spn alpha2 = 0.1, seed 1"."""
        about = ", ".join(word for word in (self.control, self.differs) if word)
        return f"{self.defense.id} {about}".strip()

    @property
    def control(self) -> str:
        """The control parameter, its value and the victims' role, e.g. "beta = 0.2, pilot"; "" without any."""
        control = self.defense.control
        value = "" if control is None else f"{control.name} = {control.value:g}"
        return ", ".join(word for word in (value, self.sample.config.role) if word)


@dataclass(frozen=True)
class Board:
    """Rows that may be compared.

    setting: their shared key, by `BOARD`; headline: the metric that they are ranked by; checks: those of the controls
    on this board; reliable: whether all hold, so that ranks mean something.
    """

    setting: Key
    headline: str
    entries: tuple[Entry, ...]
    checks: tuple[Check, ...]
    reliable: bool

    @property
    def images(self) -> bool:
        """Whether the data are images, not rows of a table."""
        return modality_of(self.entries[0].sample.config).decibels


def badges_of(members: Sequence[Record], known: Knowledge, leak: Leak | None = None) -> Iterable[Badge]:
    """Yield the remarks on a row with the records `members`.

    known: which attacks know a defense; leak: the leak of inputs in the whole setting, None without reconstructions.
    """
    defense = members[0].config.defense.id
    if defense in CONTROLS:
        yield Badge("control", "info", "Shows whether the attacks work at all; never ranked.")
    elif not any(known.adaptive(r) and r.status == "complete" for r in members):
        yield Badge(UNINFORMED[0], "warning", "No attack here knows this defense, so it is not ranked.")
    elif not known.vouches(members):
        title = "Attacks here declare that they know this defense, but nothing else shows it: not ranked."
        yield Badge(UNINFORMED[1], "warning", title)
    codes = {f.code for record in members for f in record.flags} & {*BELIED}
    if codes - {UNREPEATED} or (leak is not None and leak.belied and not codes):
        yield Badge("belied", "error", "Its server, or its training, contradicts what attacks are given: not ranked.")
    if UNREPEATED in codes:
        yield Badge(UNREPLAYED, "error", "Its server's code cannot be run again on what it received: not ranked.")
    if known.weaker(members):
        yield Badge(
            "knows more, finds less",
            "warning",
            "Attacks that know the defense rebuild less than those that do not: they are not at full strength here.",
        )
    for status in ("diverged", "failed"):
        number = sum(record.status == status and not nothing_to_read(record) for record in members)
        if number:
            title = f"{number} of {len(members)} cells {status}; the worst case may be worse than shown."
            yield Badge(status, "error", title)
    yield from _of_training(members[0].utility)


def _of_training(utility: Utility) -> Iterable[Badge]:
    """Yield the remarks on a training."""
    if utility.is_collapsed:
        title = (
            f"It {utility.collapse}: its accuracy may show a failed training, not the cost of the defense. Not ranked."
        )
        yield Badge(COLLAPSED, "warning", title)
    elif utility.collapse:
        title = f"It {utility.collapse}; the figures here are of another seed ({utility.retrained})."
        yield Badge("trained again", "warning", title)
    if learning_of(utility).state == "nothing" and utility.accuracy is not None:
        yield Badge(
            AT_CHANCE, "warning", "The model learned nothing: it is no better than a constant answer. Not ranked."
        )
