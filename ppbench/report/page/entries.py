"""Rows and boards: what the page shows of one setting."""

from __future__ import annotations

from dataclasses import dataclass

from ppbench.records.schema import DefenseInfo, Flag, Record
from ppbench.report.controls import CONTROLS, Check, is_image
from ppbench.report.frame import Key
from ppbench.report.page.badges import Badge
from ppbench.report.worst import WorstCase


@dataclass(frozen=True)
class Entry:
    """One row: a defense at one control value, under all attacks of its board.

    Attributes:
        key: what its cells share, by `ROW`.
        sample: any of its records, for accuracy, cost and epsilon: they are the same in all.
        records: all of them, failed ones too.
        plain, worst: the worst case over the attacks that do not know the defense, and over all; or None.
        labels: the cell with the highest label accuracy.
        badges: remarks, and what is missing.
        flags: those of its records, each once.
        claimed: what its paper prints.
        differs: in what else than the control value it is not like others of its board, in words.
        rank: "1", "2-4", or "" where it is not ranked.
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
    rank: str = ""

    @property
    def defense(self) -> DefenseInfo:
        """The defense as configured."""
        return self.sample.config.defense

    @property
    def role(self) -> str:
        """A control, or one of the compared."""
        return "control" if self.defense.id in CONTROLS else "compared"

    @property
    def name(self) -> str:
        """The defense, its control value and what else tells the row from others: "spn alpha2 = 0.1, seed 1"."""
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

    setting: what they share, a key by `BOARD`; headline: the metric that they are ranked by; checks: what the controls
    say of this board; reliable: whether they hold, so that ranks mean something.
    """

    setting: Key
    headline: str
    entries: tuple[Entry, ...]
    checks: tuple[Check, ...]
    reliable: bool

    @property
    def images(self) -> bool:
        """Whether the data are images: rows of tables are not judged in decibels."""
        return is_image(self.entries[0].sample)
