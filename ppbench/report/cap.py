"""Calibrated averaged performance (CAP) and the privacy-preserving characteristic (PPC).

CAP = mean over the control grid of accuracy x distance (Fan et al., "Rethinking Privacy Preserving Deep
Learning", Eq. 1). It depends on the grid and rewards a useless model with a large distance, so a
chance-corrected CAP stands beside it. Distances are versioned; a CAP says which one it used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from ppbench.questions.base import DistanceLaw, question_for, question_of
from ppbench.records.figure import Figured
from ppbench.records.schema import Metric, Record, Utility
from ppbench.report.controls import value
from ppbench.report.frame import EVALUATION, GRID, SERIES, SETTING, TRAINED, Key, frame_of, key_of
from ppbench.report.worst import Measured

# -- Trainings whose accuracy is far from that of all other seeds: bad luck, not the defense --
# They are marked and not repeated: repeating until the seeds agree would select trainings.

STRAY_MARK = "far from other seeds"
"""Mark of such a training."""
STRAY_DISTANCE = 0.1
"""Distance between intervals of accuracy beyond which two seeds are far apart."""
ALL_BUT_SEED = tuple(name for name in TRAINED if name != "seed")


def strays(records: Sequence[Record]) -> frozenset[Key]:
    """Return the keys (`TRAINED`) of trainings whose accuracy is far from that of every other seed, of two or more.

    Far: the 95 % intervals lie more than `STRAY_DISTANCE` apart.
    """
    alike: dict[Key, dict[Key, Utility]] = {}
    for key, some in frame_of(records).by(TRAINED).items():
        alike.setdefault(key.only(ALL_BUT_SEED), {})[key] = some[0].utility
    return frozenset(
        key
        for trained in alike.values()
        if len(trained) > 2
        for key, use in trained.items()
        if all(_far(use, other) for place, other in trained.items() if place != key)
    )


def _far(one: Utility, other: Utility) -> bool:
    """Return whether the 95 % intervals of two accuracies lie far apart; False where one is unknown."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return max(one.low - other.high, other.low - one.high) > STRAY_DISTANCE


UNLEARNT = "no training learnt"
"""Mark of a point at chance because every training collapsed."""


@dataclass(frozen=True)
class Distance:
    """An attack's distance from the truth; larger is safer. name: as "recon/1"; low, high: 95 % interval."""

    name: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PpcPoint:
    """A setting of the PPC. ratio: median ||B|| / ||E|| of gradient to perturbation; accuracy: the delivered model's.

    mark: why its accuracy may not be due to the defense: `UNLEARNT`, `STRAY_MARK`, or "".
    """

    control: float
    ratio: float | None
    accuracy: float
    accuracy_low: float | None
    accuracy_high: float | None
    distance: Distance
    mark: str = ""

    def x(self) -> float | None:
        """Return log10(ratio + 1), the figure's x-coordinate, or None without a ratio."""
        return None if self.ratio is None else math.log10(self.ratio + 1)


@dataclass(frozen=True)
class Cap:
    """A CAP over n settings; value: None with a `reason` where it is undefined.

    low, high: with every accuracy and distance at the lower (upper) end of its interval: a conservative bracket.
    corrected: with accuracy replaced by `corrected_accuracy`; None without an undefended accuracy above chance.
    collapsed, strays: numbers of settings of which no training learned, and of those far from all other seeds.
    """

    distance: str
    n: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    corrected: float | None = None
    reason: str | None = None
    collapsed: int = 0
    strays: int = 0


def cap_value(accuracies: Sequence[float], distances: Sequence[float]) -> float:
    """Return the mean of accuracy x distance over a control grid (Eq. 1); ValueError where it is empty or uneven."""
    if not accuracies or len(accuracies) != len(distances):
        raise ValueError("CAP needs one distance for each accuracy, and at least one of them")
    return math.fsum(a * d for a, d in zip(accuracies, distances, strict=True)) / len(accuracies)


def corrected_accuracy(accuracy: float, chance: float, undefended: float) -> float:
    """Return (accuracy - chance) / (undefended - chance), clipped to [0, 1]; ValueError where undefended is chance."""
    if undefended <= chance:
        raise ValueError(f"undefended accuracy {undefended:g} is not above chance {chance:g}")
    return min(max((accuracy - chance) / (undefended - chance), 0.0), 1.0)


def distance_of(metric: Metric, law: DistanceLaw) -> Distance | None:
    """Return the distance of the law's `metric`, or None where that has no value."""
    if metric.value is None:
        return None
    known = sorted(float(law.of(end)) for end in (metric.low, metric.high) if end is not None)
    low, high = known if len(known) == 2 else (None, None)
    return Distance(law.name, float(law.of(metric.value)), low, high)


def record_distance(record: Figured, name: str | None = None) -> Distance | None:
    """Return a record's distance (by default the main one of its question), or None."""
    law = question_for(record).distance(name)
    metric = None if law is None else record.metric(law.metric)
    return None if law is None or metric is None else distance_of(metric, law)


def ppc_point(record: Figured, name: str | None = None, far: Set[Key] = frozenset()) -> PpcPoint | None:
    """Return a record's point of the PPC, None where control, accuracy or distance is missing; far: see `strays`."""
    control, distance, utility = record.config.defense.control, record_distance(record, name), record.utility
    if record.status != "complete" or control is None or distance is None or utility.accuracy is None:
        return None
    ratio = value(record, "ratio_median")
    ends = utility.low, utility.high
    mark = (
        UNLEARNT if utility.is_collapsed else STRAY_MARK if far and key_of(record.config).only(TRAINED) in far else ""
    )
    return PpcPoint(control.value, ratio, utility.accuracy, *ends, distance, mark)


def series_cap(
    records: Sequence[Figured], undefended: float | None, name: str | None = None, far: Set[Key] = frozenset()
) -> Cap:
    """Return the CAP of one series: cells that differ only in the control value.

    A diverged setting counts with product 0 (no usable model); a failed one, or one without a distance, makes the CAP
    undefined: it would otherwise be the mean over another grid. undefended: accuracy of `none` in the same
    federation, for the chance-corrected CAP; name: which distance, by default the main one of its question; far:
    trainings that stray from all other seeds (`strays` of all records).
    """
    n, question = len(records), question_for(records[0])
    if (law := question.distance(name)) is None:
        return Cap("", n, reason=f"no distance is known of {question.title}")
    if records[0].config.defense.control is None or n < 2:
        return Cap(law.name, n, reason="a CAP needs at least two values of a control parameter")
    points = [ppc_point(record, law.name, far) for record in records if record.status != "diverged"]
    known = [point for point in points if point is not None]
    if len(known) < len(points):
        missing = f"{len(points) - len(known)} of {n} settings"
        return Cap(law.name, n, reason=f"{missing} have no accuracy or no distance")
    if not known:
        return Cap(law.name, n, 0.0)
    scale, corrected, chance = len(known) / n, None, records[0].utility.chance
    accuracies, distances = [p.accuracy for p in known], [p.distance.value for p in known]
    if undefended is not None and undefended > chance:
        corrected = cap_value([corrected_accuracy(a, chance, undefended) for a in accuracies], distances) * scale
    low = _end(((p.accuracy_low, p.distance.low) for p in known), scale)
    high = _end(((p.accuracy_high, p.distance.high) for p in known), scale)
    low, high = (low, high) if low is not None and high is not None else (None, None)
    figures = cap_value(accuracies, distances) * scale, low, high, corrected
    marks = [point.mark for point in known]
    return Cap(law.name, n, *figures, collapsed=marks.count(UNLEARNT), strays=marks.count(STRAY_MARK))


def _end(ends: Iterable[tuple[float | None, float | None]], scale: float) -> float | None:
    """Return the CAP of accuracies and distances at one end of their intervals; None where a point has no interval."""
    known = [(a, d) for a, d in ends]
    accuracies, distances = ([a for a, _ in known if a is not None], [d for _, d in known if d is not None])
    whole = len(accuracies) == len(distances) == len(known)
    return cap_value(accuracies, distances) * scale if whole else None


def caps(records: Sequence[Record], place: int = 0) -> dict[str, Cap]:
    """Return the CAP of each record's series, by `cell_id`; place: of the distance among those of its question.

    Records of questions with fewer distances are left out, but for the main one.
    """
    by_cell: dict[str, Cap] = {}
    frame = frame_of(records)
    far = strays(frame)
    for evaluation in frame.by(EVALUATION).values():
        whole = next((r for r in evaluation if r.config.defense.id == "none" and r.status == "complete"), None)
        plain = None if whole is None else whole.utility.accuracy
        for key, members in evaluation.by(SERIES).items():
            names = [law.name for law in question_of(key.question).distances]
            if place == 0 or place < len(names):
                cap = series_cap(members, plain, names[place] if place else None, far)
                by_cell |= dict.fromkeys((r.cell_id for r in members), cap)
    return by_cell


def worst_caps(records: Sequence[Record], name: str | None = None) -> list[tuple[Key, Cap, list[Measured]]]:
    """Return for each grid of worst cases its key, its CAP (see `series_cap`) and the case at each control value.

    name: the distance, by default the main one of the first cell's question.
    """
    results = []
    for key, grid in frame_of(records).by(GRID).items():
        law = question_for(grid[0]).distance(name)
        if law is None:
            continue
        cases: list[Measured] = []
        for row in grid.by(SETTING).values():
            diverged = next((record for record in row if record.status == "diverged"), row[0])
            cases.append(row.worst(law.metric) or diverged)
        results.append((key, series_cap(cases, None, law.name), cases))
    return results
