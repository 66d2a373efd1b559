"""How far inputs of one setting leak: rebuilt, recognizable, no better than blind, or undecided; the one judgment.

Sentence, chip, terminal, page, JSON, claims and ranks read it. The levels are relative to what who sees nothing gets,
on the same victims: a cut in decibels alone calls legible digits hidden, and takes noise that everybody looks through
for protection. `docs/levels.md` says how they were chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ppbench.metrics.intervals import LEVEL, lower_bound, upper_bound
from ppbench.metrics.modalities import BROKEN_DB, EXACT_DB, IMAGE, REBUILT_DB, modality_of
from ppbench.metrics.modality import Modality
from ppbench.questions.base import question_for
from ppbench.questions.image_metrics import gain_of
from ppbench.questions.recognition import LOOKED, seen_of
from ppbench.records.figure import best
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import BELIED, BROKEN, CLEAR, rebuilt_share, value
from ppbench.report.frame import Frame, frame_of
from ppbench.report.learning import learning_of
from ppbench.report.worst import Measured, WorstCase, contenders

Level = Literal["rebuilt", "recognizable", "blind", "undecided"]
Code = Literal[
    "some_rebuilt", "untested", "undefended_stands", "undefended_missing", "unlearned", "belied", "unmeasured"
]
CLOSE = 0.30
"""Shares beyond chance: seen, where the interval begins above `CLEAR`; not, where it ends below this."""
FEWEST = 6
"""Units of which a resampled mean can be shown to lie above chance: of 5 all lie above it by chance in 1 of 32 runs."""
GAIN_DB = 1.0
"""Decibels beyond the best blind guess below which the interval of a median ends where nothing more is seen."""
SEVERITY: dict[Level, int] = {"blind": 0, "undecided": 1, "recognizable": 2, "rebuilt": 3}
"""The order of levels: what is not known may be worse than what is shown to be nothing."""
WORDS: dict[Level, str] = {
    "rebuilt": "rebuilt",
    "recognizable": "recognizable",
    "blind": "no better than blind",
    "undecided": "undecided",
}


@dataclass(frozen=True)
class Qualifier:
    """What must be said along with a level. code: for programs; words: a clause."""

    code: Code
    words: str


@dataclass(frozen=True)
class Side:
    """What some attackers get of a setting: the worst case over them, and their cells."""

    cells: tuple[Record, ...]
    worst: WorstCase | None

    @property
    def modality(self) -> Modality:
        """What kind of data the inputs are; images where there is no worst case."""
        return IMAGE if self.worst is None else modality_of(self.worst.config)

    @cached_property
    def share(self) -> Metric | None:
        """The share of victims that are rebuilt."""
        return None if self.worst is None else rebuilt_share(self.worst)

    @cached_property
    def gain(self) -> Metric | None:
        """The median of decibels beyond the best blind guess; None of table rows, and where none was measured."""
        if self.worst is None or not self.modality.decibels:
            return None
        return gain_of(self.worst.victims, self.worst.config.seed)

    @cached_property
    def readers(self) -> tuple[tuple[str, Measured], ...]:
        """By metric of `Modality.readers`: the worst case or the cell that has most of it; empty where not measured."""
        if self.worst is None:
            return ()
        told: list[Measured] = [self.worst, *self.cells]
        tops = ((name, best(told, name)) for name in self.modality.readers)
        return tuple((name, top) for name, top in tops if top is not None)

    @cached_property
    def clear(self) -> tuple[tuple[str, Measured], ...]:
        """Those of `readers` that lie well above chance, as the largest of all of them in all cells."""
        return tuple((name, top) for name, top in self.readers if _ends(name, top, self._tail)[0] > CLEAR)

    @property
    def measured(self) -> bool:
        """Whether it is known of every victim what who looks gets; cells of older records may stand beside newer."""
        told = () if self.worst is None else self.worst.victims
        return bool(self.readers) and all(map(self.modality.is_measured, told))

    @property
    def _tail(self) -> float:
        """Bonferroni's level for the largest of all readers in all cells."""
        return (1 - LEVEL) / 2 / max(1, len(self.cells) * len(self.readers))

    @property
    def level(self) -> Level:
        """How far it leaks, from intervals: what is neither shown to leak nor shown not to is undecided."""
        if self.worst is None:
            return "undecided"
        if self._most_rebuilt(self.worst):
            return "rebuilt"
        if self.clear:
            return "recognizable"
        return "blind" if self._nothing(self.worst) else "undecided"

    def _more(self, name: str, top: Measured) -> bool:
        """Return whether a reader gets more than chance explains, and not by a little."""
        metric = top.metric(name)
        beyond = 0.0 if metric is None else (metric.value or 0.0) - (metric.chance or 0.0)
        return beyond > CLEAR and _ends(name, top, self._tail)[0] > 0

    def _most_rebuilt(self, worst: WorstCase) -> bool:
        """Return whether the median victim is rebuilt, with its whole interval; of rows, whether more than half are."""
        median = worst.metric("psnr_median")
        if not self.modality.decibels:
            return _begins(self.share, BROKEN)
        if self.gain is None:
            return _begins(median, BROKEN_DB)
        return _begins(self.gain, REBUILT_DB) or _begins(median, EXACT_DB)

    def _nothing(self, worst: WorstCase) -> bool:
        """Return whether who tries all these attacks is shown to get no more than who sees nothing.

        A reader who gets more in any cell than chance explains gets more: noise is looked through that scores worse
        than a blur.
        """
        if self.share is None or self.share.value or not self.measured:
            return False
        if any(self._more(name, top) or _ends(name, worst)[1] >= CLOSE for name, top in self.readers):
            return False
        return not self.modality.decibels or (self.gain is not None and (self.gain.high or 0.0) < GAIN_DB)


def _begins(metric: Metric | None, level: float) -> bool:
    """Return whether a metric lies at or above a level, with its interval where it has one."""
    low = None if metric is None else metric.value if metric.low is None else metric.low
    return low is not None and low >= level


def _ends(name: str, found: Measured, tail: float = (1 - LEVEL) / 2) -> tuple[float, float]:
    """Return how far beyond chance the interval of `Modality.readers` begins and ends; shares at level `tail`.

    The columns of a row that are right are no yes or no: their mean has the interval that the records state. Where
    chance is not known nothing is: (-1, 1).
    """
    metric = found.metric(name)
    if metric is None or metric.chance is None:
        return -1.0, 1.0
    if name in LOOKED:
        units = list(seen_of(name, found.victims).values())
        return lower_bound(units, tail) - metric.chance, upper_bound(units, tail) - metric.chance
    if len({score.unit for score in found.victims}) < FEWEST:
        return -1.0, 1.0
    low, high = 0.0 if metric.low is None else metric.low, 1.0 if metric.high is None else metric.high
    return low - metric.chance, high - metric.chance


@dataclass(frozen=True)
class Leak:
    """How far inputs of one setting leak: to anybody, to who does not know of the defense; undefended: of `none` there.

    compared: whether it is of a defense, which holds nothing that the undefended model holds too; vouched: whether an
    attack ran that is shown to know the defense; belied: what cells remark against its own account, a clause or "".
    """

    everybody: Side
    unaware: Side
    undefended: Leak | None
    compared: bool
    vouched: bool
    belied: str

    @property
    def worst(self) -> WorstCase | None:
        """The worst case over all attacks."""
        return self.everybody.worst

    @cached_property
    def level(self) -> Level:
        """The level to who tries all attacks; that nothing is seen counts where it is seen without the defense."""
        level = self.everybody.level
        return "undecided" if level == "blind" and (self.belied or self._unproven or self.unlearned) else level

    @cached_property
    def plain(self) -> Level:
        """The level to who does not know of the defense: where who does sees nothing, nothing."""
        level = "blind" if self.everybody.level == "blind" and self.unaware.worst is not None else self.unaware.level
        return "undecided" if level == "blind" and (self._unproven or self.unlearned) else level

    @cached_property
    def unlearned(self) -> str:
        """Why nothing is said to withstand the attacks, where the undefended model learned too little; else ""."""
        if not self.compared or self.undefended is None or not self.undefended.everybody.cells:
            return ""
        return learning_of(self.undefended.everybody.cells[0].utility).clause

    @property
    def falls(self) -> bool:
        """Whether something is shown to leak."""
        return self.level in ("rebuilt", "recognizable")

    @property
    def untested(self) -> bool:
        """Whether it is not rebuilt, by attacks none of which is shown to know of the defense."""
        return self.worst is not None and self.compared and not self.vouched and self.level != "rebuilt"

    @property
    def _unproven(self) -> bool:
        return self.compared and (self.undefended is None or not self.undefended.falls)

    @cached_property
    def qualifiers(self) -> tuple[Qualifier, ...]:
        """What must be said along with the level."""
        return tuple(self._qualifiers())

    def _qualifiers(self) -> Iterable[Qualifier]:
        share = self.everybody.share
        if self.level != "rebuilt" and share is not None and share.value:
            yield Qualifier("some_rebuilt", f"{share.value:.0%} of {self.noun} are rebuilt")
        if self.worst is not None and not self.falls:
            if not self.everybody.measured:
                yield Qualifier("unmeasured", f"{self.everybody.modality.unmeasured} was not measured")
            if self.compared and self.undefended is None:
                yield Qualifier("undefended_missing", "the undefended model was not attacked")
            elif self._unproven:
                yield Qualifier("undefended_stands", "even the undefended model resists these attacks")
            elif self.unlearned:
                yield Qualifier("unlearned", self.unlearned)
        if self.untested:
            yield Qualifier("untested", "no attack here is shown to know of it")
        if self.belied:
            yield Qualifier("belied", self.belied)

    @property
    def noun(self) -> str:
        """What the inputs are called."""
        return self.everybody.modality.noun

    @property
    def blind(self) -> float | None:
        """Median PSNR in dB of the best blind guess; None where it was not measured."""
        if self.worst is None:
            return None
        return next((b for r in self.everybody.cells if (b := value(r, "blind_median")) is not None), None)


def leak_of(row: Sequence[Record], *, vouched: bool, none: Leak | None = None) -> Leak | None:
    """Return how far inputs leak in one setting, by its records of all attacks; None where none was to be rebuilt.

    vouched: whether an attack ran that is shown to know the defense (`Knowledge.vouches`); none: of the undefended
    model in the same scene.
    """
    cells = frame_of(row).of([r for r in row if question_for(r).inputs])
    if not cells:
        return None
    compared = cells[0].config.defense.id != "none"
    found = [flag.detail for record in row for flag in record.flags if flag.code in BELIED]
    unaware = cells.of([r for r in cells if not r.config.attack.adaptive])
    return Leak(_side(cells), _side(unaware), none, compared, vouched, "; ".join(dict.fromkeys(found)))


def _side(cells: Frame) -> Side:
    told = cells.of(contenders(cells))
    metric = "" if not told else question_for(told[0]).headline(told[0].config)
    return Side(tuple(told), told.worst(metric) if told else None)
