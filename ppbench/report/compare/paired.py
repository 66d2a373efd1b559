"""The change between two cells of one question, with an interval and a p-value, victim by victim (docs/compare.md).

Decisions: McNemar's mid-p (Fagerland, Lydersen and Laake 2013), interval of Bonett and Price (2012). All else: the
bootstrap, whose p-value is Student's over its standard error (a share of 2000 replicates cannot outlast Holm's
correction), never below 2^(1 - units), as of an exact test of paired signs. Accuracies: MOVER (Zou and Donner 2008).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from ppbench.metrics.intervals import CONFIDENCE
from ppbench.questions.base import Rule
from ppbench.records.outcome import Utility
from ppbench.report.compare.samples import Floats, Sample, resampled_statistic, resampling_counts, sample_of
from ppbench.report.worst import Measured

REPLICATES = 2000
_BLOCK = 4_000_000  # resampled values held in memory at a time
_TAIL = (1 - CONFIDENCE) / 2
_Z = float(stats.norm.isf(_TAIL))


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
    p = max(estimated.p, float(2 * stats.norm.sf(z)))
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
        return 1 - 0.5 * float(stats.binom.pmf(fewer, total, 0.5)) if total else 1.0
    return float(2 * stats.binom.cdf(fewer, total, 0.5) - stats.binom.pmf(fewer, total, 0.5))


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
        p = float(2 * stats.t.sf(abs(estimate) / spread, units - 1))
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
    """Return a figure of a model ("accuracy", "mse") with its interval, None where either is unknown."""
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
    p = 1.0 if worse == 0 else 0.0 if spread == 0 else float(2 * stats.norm.sf(abs(worse) / spread))
    n = sum(level.n for level in base)
    return Change(left, right, worse, low, high, p, n, "independent samples, MOVER")
