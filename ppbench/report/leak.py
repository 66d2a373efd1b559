"""How far inputs of one setting leak: rebuilt, recognizable, no better than blind, or undecided.

Sentences, page, terminal, JSON, claims and ranks all use this judgment. The levels are relative to a blind guess on the
same victims: a threshold in decibels alone calls legible digits hidden, and noise that does not hide anything a
protection. `docs/levels.md` says how they were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ppbench.metrics.intervals import CONFIDENCE, lower_bound, upper_bound
from ppbench.metrics.modality import IMAGE, Modality, modality_of
from ppbench.questions.base import question_for
from ppbench.questions.image_metrics import IN_ANY_ORDER, Pick, median_of
from ppbench.questions.recognition import RECOGNITION_METRICS, successes_of
from ppbench.records.figure import best
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import (
    BELIED,
    BROKEN_SHARE,
    CLEAR_MARGIN,
    UNREPLAYED,
    nothing_to_read,
    rebuilding,
    rebuilt_share,
    value,
)
from ppbench.report.frame import EVALUATION, SCENE, SETTING, Frame, Key, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.learning import learning_of
from ppbench.report.words import STAGES
from ppbench.report.worst import Measured, WorstCase, contenders, knows

Level = Literal["rebuilt", "recognizable", "blind", "undecided"]
QualifierCode = Literal[
    "some_rebuilt",
    "untested",
    "undefended_stands",
    "few_victims",
    "undefended_missing",
    "unlearned",
    "belied",
    "unreplayed",
    "unmeasured",
    "failed",
]
UNSEEN_MARGIN = 0.30
"""A share is unseen where its interval ends less than this above chance (seen: begins `CLEAR_MARGIN` above it)."""
FEWEST_UNITS = 6
"""Least number of units for a mean above chance: of 5 units all lie above it by chance in 1 of 32 runs."""
GAIN_DB = 1.0
"""Decibels beyond the best blind guess: a median whose interval ends below this shows nothing more."""
SIBLING = (*EVALUATION, *SCENE)
"""The fields in which the undefended sibling of a setting is equal to it: the same training but for the defense."""
SEVERITY: dict[Level, int] = {"blind": 0, "undecided": 1, "recognizable": 2, "rebuilt": 3}
"""The order of levels: an undecided leak may be worse than one shown to be nothing."""
LEVEL_WORDS: dict[Level, str] = {
    "rebuilt": "rebuilt",
    "recognizable": "recognizable",
    "blind": "no better than blind",
    "undecided": "undecided",
}


@dataclass(frozen=True)
class Qualifier:
    """A remark that qualifies a level. code: for programs; words: a clause."""

    code: QualifierCode
    words: str


@dataclass(frozen=True)
class Side:
    """The worst case over some attackers on a setting, and their cells."""

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
        """The median of decibels beyond the best blind guess; None for table rows, and where not measured."""
        return self._median("gain_median", lambda score: score.gain) if self.modality.decibels else None

    @cached_property
    def readers(self) -> tuple[tuple[str, Measured], ...]:
        """By metric of `Modality.readers`: the worst case or the cell where it is largest; empty if not measured."""
        if self.worst is None:
            return ()
        candidates: list[Measured] = [self.worst, *self.cells]
        tops = ((name, best((c for c in candidates if _has_chance(c, name)), name)) for name in self.modality.readers)
        return tuple((name, top) for name, top in tops if top is not None)

    def amount_words(self, value: float, rebuilt: bool) -> str:
        """Return a figure of the modality's headline as words append it to a level, with a leading space.

        Texts that are recognizable by their tokens in any order alone have that share.
        """
        clear = dict(self.clear)
        if rebuilt or set(clear) != {IN_ANY_ORDER}:
            return self.modality.beside(value, rebuilt)
        metric = clear[IN_ANY_ORDER].metric(IN_ANY_ORDER)
        assert metric is not None and metric.value is not None  # it is clear
        return f" at {metric.value:.0%} of {self.modality.parts} in any order"

    @cached_property
    def clear(self) -> tuple[tuple[str, Measured], ...]:
        """Those of `readers` that lie well above chance, at Bonferroni's level."""
        return tuple((name, top) for name, top in self.readers if _ends(name, top, self._tail)[0] > CLEAR_MARGIN)

    @property
    def measured(self) -> bool:
        """Whether every victim has the figures behind `Modality.readers`, which older records lack."""
        scores = () if self.worst is None else self.worst.victims
        return bool(self.readers) and all(map(self.modality.is_measured, scores))

    @property
    def _tail(self) -> float:
        """The one-sided tail at Bonferroni's level for the largest of all readers in all cells."""
        return (1 - CONFIDENCE) / 2 / max(1, len(self.cells) * len(self.readers))

    @property
    def level(self) -> Level:
        """The level, from intervals: "undecided" where neither a leak nor its absence is shown."""
        if self.worst is None:
            return "undecided"
        if self._most_rebuilt():
            return "rebuilt"
        if self.clear:
            return "recognizable"
        return "blind" if self._nothing(self.worst) else "undecided"

    def _more(self, name: str, top: Measured) -> bool:
        """Return whether a metric of `Modality.readers` is significantly, by more than `CLEAR_MARGIN`, above chance."""
        metric = top.metric(name)
        beyond = 0.0 if metric is None else (metric.value or 0.0) - (metric.chance or 0.0)
        return beyond > CLEAR_MARGIN and _ends(name, top, self._tail)[0] > 0

    def _most_rebuilt(self) -> bool:
        """Return whether the median victim passes a threshold of the modality, with its whole interval; where it has
        none, whether half of the victims are rebuilt.
        """
        if not self.modality.thresholds:
            return _begins(self.share, BROKEN_SHARE)
        thresholds = self.modality.thresholds_of(() if self.worst is None else self.worst.victims)
        return any(_begins(self._median(one.median, one.figure), one.level) for one in thresholds)

    def _median(self, name: str, pick: Pick) -> Metric | None:
        """Return the median of a figure over the worst case, as recorded where it is a metric; None if one lacks it."""
        worst = self.worst
        if worst is None or any(pick(score) is None for score in worst.victims):  # type: ignore[arg-type]  # of images
            return None
        return worst.metric(name) or median_of(name, pick, worst.victims, worst.config.seed)

    def _nothing(self, worst: WorstCase) -> bool:
        """Return whether all these attacks are shown to give no more than a blind guess.

        Readings count in every cell, not only in the worst case: images under noise may be legible and yet score worse
        than a blur.
        """
        if self.share is None or self.share.value or not self.measured:
            return False
        if any(self._more(name, top) or _ends(name, worst)[1] >= UNSEEN_MARGIN for name, top in self.readers):
            return False
        return not self.modality.decibels or (self.gain is not None and (self.gain.high or 0.0) < GAIN_DB)


def _has_chance(record: Measured, name: str) -> bool:
    """Return whether a blind guess was measured beside a metric, which older records lack."""
    metric = record.metric(name)
    return metric is not None and metric.chance is not None


def _begins(metric: Metric | None, level: float) -> bool:
    """Return whether a metric lies at or above a level, with its interval where it has one."""
    low = None if metric is None else metric.value if metric.low is None else metric.low
    return low is not None and low >= level


def _ends(name: str, record: Measured, tail: float = (1 - CONFIDENCE) / 2) -> tuple[float, float]:
    """Return the interval of a metric of `Modality.readers` minus chance; of a share of victims at a level of `tail`.

    The share of a row's right columns is not binary: its interval is the recorded one. (-1, 1) where chance is unknown.
    """
    metric = record.metric(name)
    if metric is None or metric.chance is None:
        return -1.0, 1.0
    if name in RECOGNITION_METRICS:
        units = list(successes_of(name, record.victims).values())
        return lower_bound(units, tail) - metric.chance, upper_bound(units, tail) - metric.chance
    if len({score.unit for score in record.victims}) < FEWEST_UNITS:
        return -1.0, 1.0
    low, high = 0.0 if metric.low is None else metric.low, 1.0 if metric.high is None else metric.high
    return low - metric.chance, high - metric.chance


@dataclass(frozen=True)
class Leak:
    """How far inputs of one setting leak: to everybody, and to unaware attackers; undefended: the leak of `none` there.

    compared: whether it is of a defense, which gets no credit where the undefended model withstands too; vouched:
    whether an attack ran that is shown to know the defense; belied: flags against its own account, a clause or "";
    lacking: whether an attack on inputs failed or diverged, so that a worse leak may be unseen.
    """

    everybody: Side
    unaware: Side
    undefended: Leak | None
    compared: bool
    vouched: bool
    belied: str
    lacking: bool = False

    @property
    def worst(self) -> WorstCase | None:
        """The worst case over all attacks."""
        return self.everybody.worst

    @property
    def aware(self) -> bool:
        """Whether an attack that is best on some victim is aware of the defense."""
        plain = {cell.cell_id for cell in self.unaware.cells}
        winners = () if self.worst is None else self.worst.winners or (self.worst.leading,)
        return any(cell.cell_id not in plain for cell in winners)

    @cached_property
    def level(self) -> Level:
        """The level over all attacks; "blind" only where the undefended model leaks and no attack failed."""
        level = self.everybody.level
        if level == "blind" and self.lacking:
            return "undecided"
        return "undecided" if level == "blind" and (self.belied or self._unproven or self.unlearned) else level

    @cached_property
    def plain(self) -> Level:
        """The level over unaware attacks; "blind" where all attacks are."""
        level = "blind" if self.everybody.level == "blind" and self.unaware.worst is not None else self.unaware.level
        return "undecided" if level == "blind" and (self._unproven or self.unlearned) else level

    @cached_property
    def unlearned(self) -> str:
        """A clause where the undefended model learned too little, so that nothing withstands; else ""."""
        if not self.compared or self.undefended is None or not self.undefended.everybody.cells:
            return ""
        return learning_of(self.undefended.everybody.cells[0].utility).clause

    @property
    def falls(self) -> bool:
        """Whether something is shown to leak."""
        return self.level in ("rebuilt", "recognizable")

    @property
    def untested(self) -> bool:
        """Whether it is not rebuilt, and no attack is shown to know the defense."""
        return self.worst is not None and self.compared and not self.vouched and self.level != "rebuilt"

    @property
    def _unproven(self) -> bool:
        """Whether nothing shows that the attacks can read such uploads: no undefended model beside it falls."""
        return not self.compared or self.undefended is None or not self.undefended.falls

    @property
    def _without_proof(self) -> Qualifier:
        """The remark on an undefended model that is not shown to leak; where most inputs are rebuilt it resists not."""
        undefended = self.undefended if self.compared else self
        if undefended is None:
            return Qualifier("undefended_missing", "the undefended model was not attacked")
        share = undefended.everybody.share
        if share is not None and (share.value or 0.0) >= BROKEN_SHARE:
            return Qualifier("few_victims", "too few victims to show that the undefended model leaks")
        return Qualifier("undefended_stands", "even the undefended model resists these attacks")

    @cached_property
    def qualifiers(self) -> tuple[Qualifier, ...]:
        """The remarks that qualify the level."""
        return tuple(self._qualifiers())

    def _qualifiers(self) -> Iterable[Qualifier]:
        share = self.everybody.share
        if self.level != "rebuilt" and share is not None and share.value:
            yield Qualifier("some_rebuilt", f"{share.value:.0%} of {self.noun} are rebuilt")
        if self.lacking and not self.falls:
            yield Qualifier("failed", "attacks failed")
        if self.worst is not None and not self.falls:
            if not self.everybody.measured:
                yield Qualifier("unmeasured", f"{self.everybody.modality.unmeasured} was not measured")
            if self._unproven:
                yield self._without_proof
            elif self.unlearned:
                yield Qualifier("unlearned", self.unlearned)
        if self.untested:
            yield Qualifier("untested", "no attack here is shown to know the defense")
        if self.belied:
            yield Qualifier("unreplayed" if self.belied.startswith(UNREPLAYED) else "belied", self.belied)

    @property
    def noun(self) -> str:
        """The word for the inputs: "images" or "rows"."""
        return self.everybody.modality.noun

    @property
    def blind(self) -> float | None:
        """Median PSNR in dB of the best blind guess; None where not measured."""
        if self.worst is None:
            return None
        return next((b for r in self.everybody.cells if (b := value(r, "blind_median")) is not None), None)


def leak_of(
    row: Sequence[Record], *, vouched: bool, none: Leak | None = None, aware: Callable[[Record], bool] = knows
) -> Leak | None:
    """Return the leak of inputs in one setting, from its records of all attacks; None without reconstructions.

    vouched: whether an attack ran that is shown to know the defense (`Knowledge.vouches`); none: the undefended model's
    leak in the same scene; aware: returns whether a cell's attack is aware of the defense (`Knowledge.adaptive`).
    """
    cells = frame_of(row).about_inputs()
    if not cells:
        return None
    compared = cells[0].config.defense.id != "none"
    remarks = [flag.detail for record in row for flag in record.flags if flag.code in BELIED]
    unaware = cells.of([r for r in cells if not aware(r)])
    lacking = any(r.status != "complete" and not nothing_to_read(r) for r in cells)
    return Leak(_side(cells), _side(unaware), none, compared, vouched, "; ".join(dict.fromkeys(remarks)), lacking)


def leaks_of(records: Sequence[Record], known: Knowledge) -> dict[Key, Leak]:
    """Return the leak of inputs in each setting, by `SETTING`, beside the undefended one of the same scene.

    Flags of all cells of a setting count. The undefended sibling is that of the same evaluation and scene, and of the
    same role where there is one. known: which attacks know a defense.
    """
    leaks: dict[Key, Leak] = {}
    undefended: dict[Key, Leak] = {}
    for key, row in sorted(frame_of(records).by(SETTING).items(), key=lambda pair: pair[0].defense != "none"):
        beside = undefended.get(key.only((*SIBLING, "role")), undefended.get(key.only(SIBLING)))
        leak = leak_of(row, vouched=known.vouches(row), none=beside, aware=known.adaptive)
        if leak is not None:
            leaks[key] = leak
        if leak is not None and key.defense == "none":
            undefended[key.only((*SIBLING, "role"))] = leak
            undefended.setdefault(key.only(SIBLING), leak)
    return leaks


def _side(cells: Frame) -> Side:
    complete = cells.of(contenders(cells))
    metric = "" if not complete else question_for(complete[0]).headline(complete[0].config)
    return Side(tuple(complete), complete.worst(metric) if complete else None)


# -- Scenes in which a defense was not searched because the undefended model withstands too, from the records --
# An evaluation with a first look (`ppbench.run.schedule`) searches uploads of `none` first. Where these withstand, a
# defense that withstands would show nothing, and its cells are left out; a defense that would fall goes unseen, see
# `looks`.


def undefended_stands(records: Sequence[Record]) -> bool:
    """Return whether the searches of `none` in one scene gave figures, and nothing is shown to leak."""
    leak = leak_of(records, vouched=True)
    return leak is not None and leak.worst is not None and not leak.falls


def is_solved(record: Record) -> bool:
    """Return whether an attack computed every victim exactly (`Guess.is_exact`): no search can do better."""
    layers = [getattr(victim, "layers", ()) for victim in record.victims]
    return record.status == "complete" and bool(layers) and all(some and all(x.exact for x in some) for some in layers)


def solved_sentence(records: Sequence[Record]) -> str | None:
    """Return in how many settings unaware searches were left out, as every input was computed exactly, or None."""
    scenes = frame_of(records).by((*EVALUATION, *SCENE, "defense", "value")).values()
    count = 0
    for some in scenes:
        searches = [r for r in some if question_for(r).inputs and not r.config.attack.adaptive]
        count += any(map(is_solved, some)) and all(map(is_solved, searches))
    if not count:
        return None
    where = f"At {count} setting{'s' if count > 1 else ''} searches unaware of the defense were left out"
    return f"{where}, because every input was computed exactly; --attack standard runs them."


def skipped_sentences(defense: str, records: Sequence[Record]) -> list[str]:
    """Return a sentence for each scene in which a defense has cells but no search, while `none` was searched and
    withstands.
    """
    scenes, sentences = frame_of(records).by((*EVALUATION, *SCENE)), []
    for scene in sorted(scenes, key=lambda scene: (scene.stage, scene.batch, scene.text())):
        own = [r for r in scenes[scene] if r.config.defense.id == defense]
        searched = [r for r in scenes[scene] if r.config.defense.id == "none" and question_for(r).inputs]
        if defense == "none" or not own or not searched or any(question_for(r).inputs for r in own):
            continue
        metric = rebuilding(searched[0])
        figure = value(scenes[scene].of(searched).worst(metric), metric)
        if figure is not None and undefended_stands(searched):
            sentences.append(
                f"Batches of {scene.batch} {STAGES[scene.stage].when}: {defense} was not searched, because the "
                f"undefended model withstands there too ({modality_of(searched[0].config).stated(figure)}); --attack "
                "standard searches it."
            )
    return sentences
