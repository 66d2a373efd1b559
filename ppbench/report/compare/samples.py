"""The aligned victims of two cells, and the judged statistics over many resamples at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ppbench.metrics.audit import DELTA, epsilon_lower
from ppbench.questions.base import Rule, question_for, questions
from ppbench.records.schema import Score
from ppbench.report.worst import Measured

Floats = NDArray[np.float64]
FPR = 0.01
TRAINED_STAGES = ("final", "iterate", "audit")
"""Stages at which all victims share one trained model, which is a single draw."""
ALL_RULES = tuple(rule for question in questions().values() for rule in question.rules)
"""The judged metrics. Records hold more figures of the same victims; judging each would only cost power (Holm).

Luck was measured on ONE setting (digits, MLP, 21 trainings: `benchmarks/bench_compare.py rerun`) and rounded up; other
networks have more (docs/compare.md). For table rows, canaries, epsilon and outputs it is assumed.
"""


def rules_for(record: Measured) -> tuple[Rule, ...]:
    """Return the rules that a cell is judged by."""
    return question_for(record).rules_of(record.config)


@dataclass(frozen=True)
class Sample:
    """The n victims of one cell, in U independent units, for one metric on both sides.

    base, new: [n] figures, for membership scores; weight: [n], summing to 1; unit: [n] each victim's, 0 to U - 1;
    stratum: [U], within which units are resampled; member: [n], all False except for membership; group: [n], equal for
    victims that share a threshold; delta: that of the guarantee whose epsilon is bounded.
    """

    base: Floats
    new: Floats
    weight: Floats
    unit: NDArray[np.intp]
    stratum: NDArray[np.intp]
    member: NDArray[np.bool_]
    group: NDArray[np.intp]
    delta: float

    @property
    def identical(self) -> bool:
        """Whether both sides have the same figures, victim by victim."""
        return bool(np.array_equal(self.base, self.new))

    @property
    def single(self) -> bool:
        """Whether each victim is a unit of its own and all have equal weight."""
        return len(self.stratum) == len(self.unit) and bool(np.allclose(self.weight, self.weight[0]))


def sample_of(base: Measured, new: Measured, rule: Rule) -> Sample:
    """Return the aligned victims of two cells of one question; ValueError where these differ."""
    question, other = question_for(base), question_for(new)
    ours, theirs = (sorted(_subset(record.victims, rule), key=lambda v: v.place) for record in (base, new))
    if [v.place for v in ours] != [v.place for v in theirs]:
        raise ValueError("two cells of one question have other victims")
    one = np.array([question.judged(v, rule.metric) for v in ours], dtype=np.float64)
    two = np.array([other.judged(v, rule.metric) for v in theirs], dtype=np.float64)
    member = np.array([v.stratum[1] for v in ours], dtype=np.bool_)
    half = np.array([v.stratum[0] for v in ours], dtype=np.intp)
    groups = [question.together(v, base.config) for v in ours]
    units = {key: number for number, key in enumerate(dict.fromkeys(groups))}
    unit = np.array([units[key] for key in groups], dtype=np.intp)
    strata = np.unique(2 * half + member, return_inverse=True)[1].reshape(-1)
    weight = 1 / np.bincount(strata)[strata] if rule.metric == "asr" else np.ones(len(ours))
    delta = base.privacy.delta
    return Sample(
        one,
        two,
        weight=np.asarray(weight / weight.sum(), dtype=np.float64),
        unit=unit,
        stratum=strata if member.any() else np.zeros(len(units), dtype=np.intp),
        member=member,
        group=_groups(half, member, pooled=any(v.canary for v in base.victims) and rule.form == "tpr"),
        delta=DELTA if delta is None else delta,
    )


def _groups(half: NDArray[np.intp], member: NDArray[np.bool_], pooled: bool) -> NDArray[np.intp]:
    """Return the halves as groups; or one group where a half's non-members are too few for the rate, as in `tpr_at`."""
    fewest = min((int((~member & (half == h)).sum()) for h in np.unique(half)), default=0)
    return np.zeros_like(half) if pooled and FPR * fewest < 1 else half


def _subset(victims: Sequence[Score], rule: Rule) -> list[Score]:
    """Return a metric's victims: canaries, or average records; where there are only canaries, these for both."""
    if rule.subset == "all":
        return list(victims)
    canaries = [v for v in victims if v.canary]
    return canaries if rule.subset == "canaries" else [v for v in victims if not v.canary] or canaries


def resampling_counts(sample: Sample, replicates: int, generator: np.random.Generator) -> Floats:
    """Return how often each unit is drawn, [1 + replicates, U]; the first row, all ones, is the sample itself."""
    drawn = np.ones((1 + replicates, len(sample.stratum)))
    for stratum in np.unique(sample.stratum):
        places = np.flatnonzero(sample.stratum == stratum)
        size = len(places)
        picks = generator.integers(size, size=(replicates, size)) + size * np.arange(replicates)[:, None]
        drawn[1:, places] = np.bincount(picks.ravel(), minlength=replicates * size).reshape(replicates, size)
    return drawn


def resampled_statistic(sample: Sample, values: Floats, form: str, drawn: Floats) -> Floats:
    """Return the statistic of `values` [n] in every resample, [R], given the counts `drawn` [R, U]."""
    if form in ("mean", "decision"):
        total = np.bincount(sample.unit, sample.weight * values, minlength=drawn.shape[1])
        return np.asarray((drawn @ total) / (drawn @ np.bincount(sample.unit, sample.weight)))
    each = drawn if len(sample.stratum) == len(sample.unit) else drawn[:, sample.unit]
    if form == "median":
        return _median(values, each)
    if form == "epsilon":
        return _epsilon(sample, values, each)
    curve: Callable[[Floats, NDArray[np.bool_], Floats], Floats] = _auc if form == "auc" else _tpr
    groups = [np.flatnonzero(sample.group == g) for g in np.unique(sample.group)]
    return np.asarray(np.mean([curve(values[g], sample.member[g], each[:, g]) for g in groups], axis=0))


def _median(values: Floats, each: Floats) -> Floats:
    order = np.argsort(values, kind="stable")
    rising, upto = values[order], each[:, order].cumsum(axis=1)
    total = upto[:, -1:]
    low, high = ((upto < bound).sum(axis=1) for bound in ((total + 1) // 2, total // 2 + 1))
    return np.asarray((rising[low] + rising[high]) / 2)


def _curve(values: Floats, member: NDArray[np.bool_], each: Floats) -> tuple[Floats, Floats]:
    """Return (TPR, FPR) at the D distinct scores, from the highest threshold down, both [R, D]."""
    order = np.argsort(-values, kind="stable")
    falling, inside = values[order], member[order]
    ends = np.flatnonzero(np.append(falling[1:] != falling[:-1], True))
    drawn = each[:, order]
    true, false = ((drawn * side).cumsum(axis=1)[:, ends] for side in (inside, ~inside))
    return true / true[:, -1:], false / false[:, -1:]


def _auc(values: Floats, member: NDArray[np.bool_], each: Floats) -> Floats:
    true, false = _curve(values, member, each)
    step = np.diff(false, axis=1, prepend=0.0)
    before = np.concatenate([np.zeros((len(true), 1)), true[:, :-1]], axis=1)
    return np.asarray((step * (true + before) / 2).sum(axis=1))


def _tpr(values: Floats, member: NDArray[np.bool_], each: Floats) -> Floats:
    true, false = _curve(values, member, each)
    return np.asarray(np.where(false <= FPR, true, 0.0).max(axis=1))


def _epsilon(sample: Sample, values: Floats, each: Floats) -> Floats:
    """Return the bound that guesses the quarter with the highest scores in and the lowest out, as audits do."""
    order = np.argsort(values, kind="stable")
    drawn, inside = each[:, order], sample.member[order]
    upto = drawn.cumsum(axis=1)
    total = round(float(upto[0, -1]))
    quarter = total // 4
    below = np.clip(quarter - (upto - drawn), 0, drawn)
    above = np.clip(upto - (total - quarter), 0, drawn)
    right = np.rint(below @ ~inside + above @ inside).astype(int)
    bounds = {int(v): _bound(total, 2 * quarter, int(v), sample.delta) for v in np.unique(right)}
    return np.array([bounds[int(v)] for v in right])


@lru_cache(maxsize=4096)
def _bound(m: int, r: int, v: int, delta: float) -> float:
    return epsilon_lower(m, r, v, delta) if r else 0.0
