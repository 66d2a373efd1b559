"""The change between two cells of one question, with an interval and a p-value, victim by victim (docs/compare.md).

Decisions: McNemar's mid-p (Fagerland, Lydersen and Laake 2013), interval of Bonett and Price (2012). All else: the
bootstrap, whose p-value is Student's over its standard error (a share of 2000 replicates cannot outlast Holm's
correction), never below 2^(1 - units), as of an exact test of paired signs. Accuracies: MOVER (Zou and Donner 2008).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from ppbench.metrics.epsilon import DELTA, epsilon_lower
from ppbench.metrics.intervals import CONFIDENCE, REPLICATES, Floats
from ppbench.metrics.spec import Rule
from ppbench.questions.base import question_for, questions
from ppbench.records.schema import Score, Utility
from ppbench.report.worst import Measured

# -- The aligned victims of two cells, and the judged statistics over many resamples at once --

FPR = 0.01
TRAINED_STAGES = ("final", "iterate", "audit")
"""Stages at which all victims share one trained model, which is a single draw."""
ALL_RULES = tuple(rule for question in questions().values() for rule in question.all_rules)
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


_BLOCK = 4_000_000  # resampled values held in memory at a time
_TAIL = (1 - CONFIDENCE) / 2
_Z = float(-scipy.special.ndtri(_TAIL))


@dataclass(frozen=True)
class Change:
    """The change of a figure.

    base, new: the figure on both sides; worse: positive where NEW leaks more, or where its accuracy or CAP is lower,
    with its 95 % interval low, high; p: two-sided, for no change; n: victims, or test examples, of all seeds; certain:
    whether nothing was estimated, so that Holm's correction leaves it out; luck: standard deviation of `worse` over
    trainings, which low, high and p include; units: number of units behind p, 0 without such a test; floor: the
    smallest p that so many units can give.
    """

    base: float
    new: float
    worse: float
    low: float
    high: float
    p: float
    n: int
    method: str
    certain: bool = False
    luck: float = 0.0
    units: int = 0
    floor: float = 0.0


def unchanged(value: float, n: int, method: str = "equal scores, victim by victim") -> Change:
    """Return the change of a figure that is equal on both sides."""
    return Change(value, value, 0.0, 0.0, 0.0, 1.0, n, method, certain=True)


def with_luck(estimated: Change, luck: float, seeds: int) -> Change:
    """Return a change widened by the luck of training, which all victims of a model share.

    luck: standard deviation of the figure over trainings, of which each side has `seeds`; added in quadrature.
    """
    if estimated.certain or luck == 0:
        return estimated
    spread = luck * math.sqrt(2 / seeds)
    low = estimated.worse - math.hypot(estimated.worse - estimated.low, _Z * spread)
    high = estimated.worse + math.hypot(estimated.high - estimated.worse, _Z * spread)
    toward = low if estimated.worse > 0 else high
    z = _Z * abs(estimated.worse) / abs(estimated.worse - toward)
    p = max(estimated.p, float(2 * scipy.stats.norm.sf(z)))
    method = f"{estimated.method}; luck of training {luck:g}"
    return replace(estimated, low=low, high=high, p=p, luck=spread, method=method)


def generator_of(key: str) -> np.random.Generator:
    """Return the generator of a row's resampling, seeded by a hash of `key`."""
    return np.random.default_rng(zlib.crc32(key.encode()))


def change(base: Sequence[Measured], new: Sequence[Measured], rule: Rule, key: str) -> Change:
    """Return the change of one metric between cells of equal questions, one per seed; key: seeds the resampling."""
    samples = [sample_of(one, two, rule) for one, two in zip(base, new, strict=True)]
    n = sum(len(sample.base) for sample in samples)
    if all(sample.identical for sample in samples):
        one = np.ones((1, 1))
        levels = [resampled_statistic(s, s.base, rule.form, np.repeat(one, len(s.stratum), axis=1))[0] for s in samples]
        return unchanged(float(np.mean(levels)), n)
    if rule.form == "decision" and len(samples) == 1 and samples[0].single:
        return mcnemar(samples[0], rule.safer)
    return bootstrapped(samples, rule, key)


def mcnemar(sample: Sample, safer: bool) -> Change:
    """Return the change of a share of right decisions, with independent victims."""
    n = len(sample.base)
    gained, lost = (int((a > b).sum()) for a, b in ((sample.new, sample.base), (sample.base, sample.new)))
    sign = -1 if safer else 1
    b, c = (gained, lost) if sign > 0 else (lost, gained)
    up, down = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(up - down - half, -1.0), min(up - down + half, 1.0)
    base, new = float(sample.base.mean()), float(sample.new.mean())
    p, method = mid_p(gained, lost), "McNemar, mid-p; Bonett-Price"
    return Change(base, new, sign * (new - base), low, high, p, n, method, units=n, floor=mid_p(n, 0))


def mid_p(gained: int, lost: int) -> float:
    """Return McNemar's two-sided mid-p of `gained` and `lost` discordant pairs; 1 of none."""
    fewer, total = min(gained, lost), gained + lost
    if gained == lost:
        return 1 - 0.5 * float(scipy.stats.binom.pmf(fewer, total, 0.5)) if total else 1.0
    return float(2 * scipy.stats.binom.cdf(fewer, total, 0.5) - scipy.stats.binom.pmf(fewer, total, 0.5))


def replicated(sample: Sample, rule: Rule, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Return a metric on both sides, each [1 + REPLICATES]: of the sample, then of resamples that both share."""
    block = max(1, _BLOCK // len(sample.stratum))
    parts: list[tuple[Floats, Floats]] = []
    for first in range(0, REPLICATES, block):
        drawn = resampling_counts(sample, min(block, REPLICATES - first), generator)[0 if first == 0 else 1 :]
        parts.append(
            (
                resampled_statistic(sample, sample.base, rule.form, drawn),
                resampled_statistic(sample, sample.new, rule.form, drawn),
            )
        )
    return np.concatenate([one for one, _ in parts]), np.concatenate([two for _, two in parts])


def over_seeds(each: Sequence[Floats], generator: np.random.Generator) -> Floats:
    """Return the mean over seeds of [1 + REPLICATES] figures per seed; resamples also draw seeds."""
    table = np.stack(each)
    drawn = generator.integers(len(each), size=(REPLICATES, len(each)))
    picked = np.take_along_axis(table[:, 1:].T, drawn, axis=1)
    return np.concatenate([[table[:, 0].mean()], picked.mean(axis=1)])


def bootstrapped(samples: Sequence[Sample], rule: Rule, key: str) -> Change:
    """Return the change of a metric by the hierarchical bootstrap over seeds and units."""
    generator = generator_of(key)
    figures = [replicated(sample, rule, generator) for sample in samples]
    sign = -1 if rule.safer else 1
    worse = over_seeds([sign * (two - one) for one, two in figures], generator)
    base, new = (float(np.mean([pair[side][0] for pair in figures])) for side in (0, 1))
    units = sum(len(sample.stratum) for sample in samples)
    what = "victims" if all(sample.single for sample in samples) else "units"
    over = f"{len(samples)} seeds and {what}" if len(samples) > 1 else what
    n = sum(len(sample.base) for sample in samples)
    return resampled(base, new, worse, units, n, f"paired bootstrap over {over}, {REPLICATES}")


def resampled(base: float, new: float, worse: Floats, units: int, n: int, method: str) -> Change:
    """Return a change from `worse` [1 + R]: the estimate, then R resamples."""
    estimate, spread = float(worse[0]), float(worse[1:].std(ddof=1))
    low, high = np.percentile(worse[1:], (100 * _TAIL, 100 * (1 - _TAIL)))
    if estimate == 0:
        p = 1.0
    elif spread == 0 or units < 2:
        p = 0.0
    else:
        p = float(2 * scipy.stats.t.sf(abs(estimate) / spread, units - 1))
    floor = 2.0 ** (1 - units)
    p = min(1.0, max(p, floor))
    return Change(base, new, estimate, float(low), float(high), p, n, method, units=units, floor=floor)


@dataclass(frozen=True)
class ModelFigure:
    """A figure of a model with its 95 % interval, over n test examples."""

    value: float
    low: float
    high: float
    n: int


def model_figure(utility: Utility, name: str) -> ModelFigure | None:
    """Return a metric of `MODEL_METRICS` with its interval, None where either is unknown."""
    value, low, high = utility.figure(name)
    return None if value is None or low is None or high is None else ModelFigure(value, low, high, utility.n)


def unpaired(base: Sequence[ModelFigure], new: Sequence[ModelFigure], safer: bool) -> Change:
    """Return the change of a mean over seeds of independent samples, by MOVER; safer: higher is better."""
    sign = -1 if safer else 1
    left, right = (float(np.mean([level.value for level in side])) for side in (base, new))

    def reach(gain: Sequence[ModelFigure], loss: Sequence[ModelFigure]) -> float:
        ends = [(v.high - v.value) ** 2 for v in gain] + [(v.value - v.low) ** 2 for v in loss]
        return math.sqrt(math.fsum(ends)) / len(base)

    up, down = reach(new, base), reach(base, new)
    worse = sign * (right - left)
    low, high = (worse - down, worse + up) if sign > 0 else (worse - up, worse + down)
    toward = low if worse > 0 else high
    spread = abs(worse - toward) / _Z
    p = 1.0 if worse == 0 else 0.0 if spread == 0 else float(2 * scipy.stats.norm.sf(abs(worse) / spread))
    n = sum(level.n for level in base)
    return Change(left, right, worse, low, high, p, n, "independent samples, MOVER")
