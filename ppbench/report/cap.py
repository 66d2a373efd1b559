"""Calibrated averaged performance (CAP) and the privacy-preserving characteristic (PPC).

CAP = mean over the control grid of accuracy x distance (Fan et al., "Rethinking Privacy Preserving Deep
Learning", Eq. 1). It depends on the grid and rewards a useless model with a large distance, so a
chance-corrected CAP stands beside it. Distances are versioned; a CAP says which one it used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ppbench.questions.base import DistanceLaw, question_for
from ppbench.records.schema import CellConfig, Metric, Record, Utility
from ppbench.report.frame import GRID, SETTING, Key, frame_of
from ppbench.report.worst import Measured

DistanceName = str
"""The name of a distance with its version, as questions define them: "recon/1"."""


@dataclass(frozen=True)
class Distance:
    """How far an attack stayed from its goal; larger is safer. low, high: 95 % interval, or None."""

    name: DistanceName
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PpcPoint:
    """One setting of the privacy-preserving characteristic.

    Attributes:
        control: value of the control parameter.
        ratio: median ||B|| / ||E|| of gradient to perturbation, None where it is not known.
        accuracy, accuracy_low, accuracy_high: of the delivered model, with its 95 % interval.
        distance: of the attack at this setting.
    """

    control: float
    ratio: float | None
    accuracy: float
    accuracy_low: float | None
    accuracy_high: float | None
    distance: Distance

    def x(self) -> float | None:
        """Return log10(ratio + 1), the figure's x-coordinate, or None without a ratio."""
        return None if self.ratio is None else math.log10(self.ratio + 1)


@dataclass(frozen=True)
class Cap:
    """A CAP.

    Attributes:
        distance: which distance it averages.
        value: None with `reason` where it cannot be given.
        low, high: every accuracy and distance at the lower (upper) end of its own interval: a conservative
            bracket.
        corrected: with accuracy replaced by (acc - chance) / (acc_none - chance), clipped to [0, 1]; None
            without an undefended accuracy above chance.
        n: settings of the grid.
        reason: why there is no value.
    """

    distance: DistanceName
    value: float | None
    low: float | None
    high: float | None
    corrected: float | None
    n: int
    reason: str | None = None


def cap_value(accuracies: Sequence[float], distances: Sequence[float]) -> float:
    """Return the mean of accuracy x distance over a control grid (Eq. 1); unbounded where distances are.

    Raises:
        ValueError: an empty grid, or unequal lengths.
    """
    if not accuracies or len(accuracies) != len(distances):
        raise ValueError("CAP needs one distance for each accuracy, and at least one of them")
    return math.fsum(a * d for a, d in zip(accuracies, distances, strict=True)) / len(accuracies)


def corrected_accuracy(accuracy: float, chance: float, undefended: float) -> float:
    """Return (accuracy - chance) / (undefended - chance), clipped to [0, 1].

    Raises:
        ValueError: the undefended model is no better than chance, so there is nothing to calibrate with.
    """
    if undefended <= chance:
        raise ValueError(f"undefended accuracy {undefended:g} is not above chance {chance:g}")
    return min(max((accuracy - chance) / (undefended - chance), 0.0), 1.0)


def distance_of(metric: Metric, law: DistanceLaw) -> Distance | None:
    """Return the distance that `metric` (the law's) gives, or None where its value is null."""
    if metric.value is None:
        return None
    ends = [None if end is None else float(law.of(end)) for end in (metric.low, metric.high)]
    known = sorted(end for end in ends if end is not None)
    low, high = (known[0], known[1]) if len(known) == 2 else (None, None)
    return Distance(law.name, float(law.of(metric.value)), low, high)


class Point(Protocol):
    """One setting of a grid: a cell, or the worst case over several."""

    @property
    def config(self) -> CellConfig:
        """Its configuration."""
        ...

    @property
    def utility(self) -> Utility:
        """What the delivered model is good for."""
        ...

    @property
    def status(self) -> str:
        """Whether it is complete, diverged or failed."""
        ...

    def metric(self, name: str) -> Metric | None:
        """Return the aggregate called `name`."""
        ...


def record_distance(record: Point, name: DistanceName | None = None) -> Distance | None:
    """Return a record's distance, by default the main one of its question; None where it has none."""
    law = question_for(record).distance(name)
    metric = None if law is None else record.metric(law.metric)
    return None if law is None or metric is None else distance_of(metric, law)


def ppc_point(record: Point, name: DistanceName | None = None) -> PpcPoint | None:
    """Return a record's point of the PPC, or None where control, accuracy or distance is missing."""
    control, distance, utility = record.config.defense.control, record_distance(record, name), record.utility
    if record.status != "complete" or control is None or distance is None or utility.accuracy is None:
        return None
    ratio = record.metric("ratio_median")
    return PpcPoint(
        control.value,
        None if ratio is None else ratio.value,
        utility.accuracy,
        utility.low,
        utility.high,
        distance,
    )


def series_cap(records: Sequence[Point], undefended: float | None, name: DistanceName | None = None) -> Cap:
    """Return the CAP of one series: cells that differ in the control value alone.

    A diverged setting counts with product 0 (no model to use); a failed one, or one without a distance, makes the
    CAP null: it would otherwise be the mean over a grid of its own.

    Args:
        records: one a control value.
        undefended: accuracy of `none` in the same federation, for the chance-corrected CAP; None if not
            there.
        name: which distance; by default the main one of its question.
    """
    n, law = len(records), question_for(records[0]).distance(name)
    if law is None:
        return Cap("", None, None, None, None, n, f"no distance is known of {question_for(records[0]).title}")
    name = law.name
    if records[0].config.defense.control is None or n < 2:
        return Cap(name, None, None, None, None, n, "a CAP needs at least two values of a control parameter")
    points = [ppc_point(record, name) for record in records if record.status != "diverged"]
    known = [point for point in points if point is not None]
    if len(known) < len(points):
        missing = len(points) - len(known)
        return Cap(name, None, None, None, None, n, f"{missing} of {n} settings have no accuracy or no distance")
    scale, corrected = len(known) / n, None
    if not known:
        return Cap(name, 0.0, None, None, None, n)
    distances = [point.distance.value for point in known]
    chance = records[0].utility.chance
    if undefended is not None and undefended > chance:
        calibrated = [corrected_accuracy(point.accuracy, chance, undefended) for point in known]
        corrected = cap_value(calibrated, distances) * scale
    low, high = (None if end is None else end * scale for end in _bracket(known))
    return Cap(name, cap_value([p.accuracy for p in known], distances) * scale, low, high, corrected, n)


def _bracket(points: Iterable[PpcPoint]) -> tuple[float | None, float | None]:
    """Return CAP with everything at its lower, and at its upper end; None where a point has no interval."""
    lows: list[tuple[float, float]] = []
    highs: list[tuple[float, float]] = []
    for point in points:
        if point.accuracy_low is None or point.accuracy_high is None:
            return None, None
        if point.distance.low is None or point.distance.high is None:
            return None, None
        lows.append((point.accuracy_low, point.distance.low))
        highs.append((point.accuracy_high, point.distance.high))
    low, high = (cap_value([a for a, _ in side], [d for _, d in side]) for side in (lows, highs))
    return low, high


def worst_caps(records: Sequence[Record]) -> list[tuple[Key, Cap, list[Measured]]]:
    """Return the CAP of each grid of worst cases, with the worst case of each control value.

    A setting that diverged counts with 0, and one without a figure makes the CAP null, as in the CAP of one attack.

    Args:
        records: cells of one kind of attack.
    """
    found = []
    for key, grid in frame_of(records).by(GRID).items():
        law = question_for(grid[0]).distance()
        if law is None:
            continue
        cases: list[Measured] = []
        for row in grid.by(SETTING).values():
            diverged = next((record for record in row if record.status == "diverged"), row[0])
            cases.append(row.worst(law.metric) or diverged)
        found.append((key, series_cap(cases, None), cases))
    return found
