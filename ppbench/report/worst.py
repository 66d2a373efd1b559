"""The worst case of one setting of a defense: the portfolio of all attacks, the best of them on each victim.

The scorer chooses by the truth, as in AutoAttack (Croce and Hein 2020): the defense is judged, not one attack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.questions.image_metrics import image_metrics
from ppbench.questions.labels import LABEL_DISTANCE
from ppbench.records.figure import attack_order, best
from ppbench.records.schema import CellConfig, Metric, Privacy, Record, Score, Utility
from ppbench.report.controls import rebuilding, value

OF_ONE_ATTACK = (
    *("at_truth_median", "ratio_median", "blind_median", "oracle_median", "evaluations_per_broken"),
    *("rmse_unit_mean", "detection_auc"),
)
"""Metrics that a portfolio lacks: they describe one attack, its evidence or its number of evaluations."""
RAW = "rmse_raw_mean"
"""The metric of unclipped errors; each victim counts with its smallest."""


@dataclass(frozen=True)
class WorstCase:
    """The joint result of the attacks on one setting.

    leading: the cell whose figure leaks most; victims: for reconstructions each victim's score by the attack that
    rebuilt it best, else the leading cell's; winners: for reconstructions the cell of each of `victims`.
    """

    leading: Record
    victims: tuple[Score, ...]
    winners: tuple[Record, ...] = ()
    _known: dict[str, Metric | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def alone(self) -> bool:
        """Whether one cell is the worst case on all victims."""
        return all(record is self.leading for record in self.winners)

    @cached_property
    def places(self) -> frozenset[tuple[int, ...]]:
        """The places of the victims; for one task and seed, equal places are equal victims."""
        return frozenset(victim.place for victim in self.victims)

    @property
    def attack(self) -> str:
        """The name of the attack that is best on most victims (of equals the first by name)."""
        return self.attacks[0]

    @cached_property
    def attacks(self) -> tuple[str, ...]:
        """The names of the attacks that are best on some victim, those with most victims first."""
        if self.alone:
            return (self.leading.config.attack.id,)
        count = Counter(record.config.attack.id for record in self.winners)
        return tuple(sorted(count, key=lambda name: (-count[name], name)))

    @property
    def name(self) -> str:
        """The attack, as "portfolio (dlg)" where no single one is best on all victims."""
        return self.attack if self.alone else f"portfolio ({self.attack})"

    @cached_property
    def knows(self) -> bool:
        """Whether an attack that is best on some victim knows the defense's mechanism."""
        return any(record.config.attack.adaptive for record in self.winners or (self.leading,))

    @cached_property
    def cells(self) -> tuple[Record, ...]:
        """The leading cell, then the others that are best on some victim."""
        return tuple({record.cell_id: record for record in (self.leading, *self.winners)}.values())

    @property
    def config(self) -> CellConfig:
        """The leading cell's configuration: all but the attack is that of every cell."""
        return self.leading.config

    @property
    def status(self) -> str:
        """ "complete", as other cells are left out."""
        return "complete"

    @property
    def utility(self) -> Utility:
        """The model's utility."""
        return self.leading.utility

    @property
    def privacy(self) -> Privacy:
        """The formal guarantee."""
        return self.leading.privacy

    def metric(self, name: str) -> Metric | None:
        """Return the aggregate `name` over `victims`, or None; cached."""
        if self.alone:
            return self.leading.metric(name)
        if name not in self._known:
            make = None if name in OF_ONE_ATTACK else self._metrics.get(name)
            self._known[name] = None if make is None else make()
        return self._known[name]

    @cached_property
    def _metrics(self) -> dict[str, Callable[[], Metric]]:
        about = self.leading.config
        return image_metrics(self.victims, about.model.classes, about.seed)


Measured = Record | WorstCase
"""A source of figures: one cell, or the worst case over several."""


def worst_case(records: Sequence[Record], metric: str) -> WorstCase | None:
    """Return the worst case over cells of one setting, or None where none has a figure.

    For reconstructions, each victim counts with the attack that rebuilt it best: with one that rebuilt it if there is
    any, then by decibels of images, by the error of table rows, or by the unclipped error if `metric` is
    "rmse_raw_mean". For other kinds, and for labels, it is the cell whose `metric` leaks most.
    """
    cells = contenders(records, metric)
    if cells and metric != LABEL_DISTANCE.metric and question_for(cells[0]).inputs:
        modality = modality_of(cells[0].config)
        ordered = sorted(cells, key=lambda r: (*attack_order(r.config), r.cell_id))
        if metric == RAW:
            return _portfolio(ordered, RAW, _unclipped)
        return _portfolio(ordered, rebuilding(cells[0]), lambda s: (modality.rebuilt(s), modality.amount(s)))
    leading = best(cells, metric)
    return None if leading is None else WorstCase(leading, tuple(leading.victims))


def contenders(records: Iterable[Record], metric: str = "") -> list[Record]:
    """Return the cells of a worst case: complete, no oracles; only reconstructions where there are any.

    For labels ("label_accuracy") these are all cells that have this metric.
    """
    complete = [r for r in records if r.status == "complete" and not r.config.attack.oracle]
    if metric == LABEL_DISTANCE.metric:
        return [r for r in complete if value(r, metric) is not None]
    return [r for r in complete if question_for(r).inputs] or complete


def worst_of(cases: Iterable[WorstCase | None], metric: str) -> WorstCase | None:
    """Return the worst case whose `metric` leaks most (of equals the first by its leading cell), or None."""
    return best([case for case in cases if case is not None], metric)


def _portfolio(cells: Sequence[Record], by: str, amount: Callable[[Any], tuple[float, ...]]) -> WorstCase | None:
    first = best(cells, by)
    if first is None:
        return None
    everyone = [
        (record, {v.place: v for v in record.victims}) for record in (first, *cells)
    ]  # of equals the first one's
    winners: list[tuple[Record, Score]] = []
    for place in sorted({place for _, own in everyone for place in own}):
        some = [(record, own[place]) for record, own in everyone if place in own]
        winners.append(max(some, key=lambda pair: amount(pair[1])))
    return WorstCase(first, tuple(score for _, score in winners), tuple(record for record, _ in winners))


def _unclipped(score: Any) -> tuple[float]:
    """Return minus the unclipped error: larger is more of a victim."""
    return (-float("inf") if score.rmse_raw is None else -float(score.rmse_raw),)


def attack_of(measured: Measured | None) -> str:
    """Return the name of the attack behind a figure, "-" for None."""
    if measured is None:
        return "-"
    return measured.name if isinstance(measured, WorstCase) else measured.config.attack.id


def cell_of(measured: Measured) -> Record:
    """Return a cell as it is, or the leading cell of a worst case."""
    return measured.leading if isinstance(measured, WorstCase) else measured


def knows(measured: Measured) -> bool:
    """Return whether a cell's attack, or a winner of a worst case, knows the defense's mechanism."""
    return measured.knows if isinstance(measured, WorstCase) else measured.config.attack.adaptive
