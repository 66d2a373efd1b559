"""95 % intervals: Clopper-Pearson for proportions, percentile bootstrap for means, medians, percentiles and AUC.

Victims of one batch are not independent: the bootstrap resamples units (batches), and a proportion of clustered
victims uses the effective sample size of Korn and Graubard (1998).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

CONFIDENCE = 0.95
REPLICATES = 2000
CLUSTER_CORRELATION = 0.5
"""Largest correlation of the victims of one batch for which `lower_bound` keeps its level."""
_BLOCK = 4_000_000  # resampled values held in memory at a time
_KEPT = 100  # most units of which draws are cached: 1.6 MB each at most
_TAILS = (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE))

Floats = NDArray[np.float64]
Statistic = Literal["mean", "median", "p95", "worst_decile"]


@dataclass(frozen=True)
class Interval:
    """A 95 % interval and its method; low, high: None if the data cannot support one, with the reason in `method`."""

    low: float | None
    high: float | None
    method: str


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval.

    value: None, with the `reason`, if n victims (or candidates, or images) cannot support it.  chance: the value of
    blind guessing, if defined.  realized_fpr: for TPR at a false-positive rate, the rate that was reached.
    """

    value: float | None
    interval: Interval
    n: int
    reason: str | None = None
    chance: float | None = None
    realized_fpr: float | None = None


def unsupported(n: int, reason: str, chance: float | None = None) -> Estimate:
    """Return an estimate without a value, with the reason why `n` cannot support one."""
    return Estimate(None, Interval(None, None, "none"), n, reason, chance)


@lru_cache(maxsize=4096)
def clopper_pearson(successes: float, n: float, method: str = "Clopper-Pearson") -> Interval:
    """Return the exact binomial interval (Clopper and Pearson 1934) of `successes` of n > 0 trials, named `method`.

    Both may be real-valued, for an effective sample size. Raises ValueError unless 0 <= successes <= n.
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} trials is no proportion")
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if successes == 0 else float(special.betaincinv(successes, n - successes + 1, tail))
    high = 1.0 if successes == n else float(special.betaincinv(successes + 1, n - successes, 1 - tail))
    return Interval(low, high, method)


def proportion(units: Sequence[NDArray[np.bool_]], chance: float | None = None) -> Estimate:
    """Return the share of True over all victims, with its interval; units: one bool array per unit, none empty.

    Units of one victim: Clopper-Pearson. Else Clopper-Pearson on the effective sample size p (1 - p) / var, var the
    between-unit variance of the ratio estimator, times the squared ratio of t quantiles (Korn and Graubard 1998). If
    all or none succeed, var is 0 and useless; then each unit counts as one trial, which is conservative.
    """
    sizes = np.array([len(unit) for unit in units], dtype=np.float64)
    hits = np.array([unit.sum() for unit in units], dtype=np.float64)
    n, share = int(sizes.sum()), float(hits.sum() / sizes.sum())
    if n == len(units):
        return Estimate(share, clopper_pearson(float(hits.sum()), n), n, chance=chance)
    if len(units) < 2:
        return Estimate(share, Interval(None, None, "none: one batch is one independent unit"), n, chance=chance)
    count = _effective_size(hits, sizes, share)
    interval = clopper_pearson(min(share * count, count), count, "Clopper-Pearson, effective sample size of batches")
    return Estimate(share, interval, n, chance=chance)


def lower_bound(units: Sequence[NDArray[np.bool_]], tail: float = (1 - CONFIDENCE) / 2) -> float:
    """Return the lower confidence bound of a share, which exceeds the true share with probability `tail` at most.

    Clopper-Pearson on the effective sample size of clusters with correlation `CLUSTER_CORRELATION` (Kish 1965), so that
    one more hit never lowers it, as the estimated sample size of `proportion` may. 0 for a single unit.
    """
    sizes = np.array([len(unit) for unit in units], dtype=np.float64)
    n, share = float(sizes.sum()), float(sum(unit.sum() for unit in units) / sizes.sum())
    if len(units) < 2 or not share:
        return 0.0
    count = n / (1 + (float((sizes**2).sum()) / n - 1) * CLUSTER_CORRELATION)
    return float(special.betaincinv(share * count, count - share * count + 1, tail))


def upper_bound(units: Sequence[NDArray[np.bool_]], tail: float = (1 - CONFIDENCE) / 2) -> float:
    """Return the upper confidence bound of a share: 1 minus the lower bound of failures."""
    return 1.0 - lower_bound([~unit for unit in units], tail)


def _effective_size(hits: Floats, sizes: Floats, share: float) -> float:
    units, n = len(sizes), float(sizes.sum())
    if share in (0.0, 1.0):
        return float(units)
    variance = units / (units - 1) * float(((hits - share * sizes) ** 2).sum()) / n**2
    size = n if variance == 0 else share * (1 - share) / variance
    tail = (1 + CONFIDENCE) / 2
    return float(np.clip(size * (special.stdtrit(n - 1, tail) / special.stdtrit(units - 1, tail)) ** 2, 1.0, n))


def statistic(values: Floats, name: Statistic) -> Floats:
    """Return the statistic over the last axis, ignoring NaN (padding); "worst_decile": mean of the largest tenth."""
    if name == "worst_decile":
        return _largest_tenth(values)
    padded = bool(np.isnan(values).any())
    if name == "mean":
        return np.asarray(np.nanmean(values, axis=-1) if padded else values.mean(axis=-1))
    rank = 50 if name == "median" else 95
    return np.asarray(np.nanpercentile(values, rank, axis=-1)) if padded else _percentile(values, rank)


def _percentile(values: Floats, rank: float) -> Floats:
    """Return the linear np.percentile over the last axis, nine times as fast by a vectorized sort."""
    rising, position = np.sort(values, axis=-1), rank / 100 * (values.shape[-1] - 1)
    first = int(position)
    low, high = rising[..., first], rising[..., min(first + 1, values.shape[-1] - 1)]
    return np.asarray(low + (high - low) * (position - first))


def _largest_tenth(values: Floats) -> Floats:
    falling = -np.sort(-values, axis=-1)  # NaN goes last
    count = np.ceil((~np.isnan(values)).sum(axis=-1, keepdims=True) / 10).astype(np.intp)
    total = np.take_along_axis(np.nan_to_num(falling).cumsum(axis=-1), count - 1, axis=-1)
    return np.asarray((total / count)[..., 0])


def bootstrap(units: Sequence[Floats], name: Statistic, seed: int) -> Estimate:
    """Return a statistic over all victims with the percentile bootstrap over units (float64 arrays, none empty)."""
    value, n = float(statistic(np.concatenate(units), name)), sum(map(len, units))
    if len(units) < 2:
        return Estimate(value, Interval(None, None, "none: one batch is one independent unit"), n)
    table = np.full((len(units), max(map(len, units))), np.nan)
    for row, unit in zip(table, units, strict=True):
        row[: len(unit)] = unit
    # For units of one value a flat array is several times as fast.
    single = table[:, 0] if table.shape[1] == 1 else None
    replicates = [
        statistic(table[picks].reshape(len(picks), -1) if single is None else single[picks], name)
        for picks in _picks(seed, len(units), max(1, _BLOCK // table.size))
    ]
    low, high = np.percentile(np.concatenate(replicates), _TAILS)
    resampled = "victims" if table.shape[1] == 1 else "batches"
    return Estimate(value, Interval(float(low), float(high), f"percentile bootstrap over {resampled}, {REPLICATES}"), n)


def _picks(seed: int, units: int, block: int) -> Iterator[NDArray[np.int64]]:
    """Yield the units drawn for all replicates, [block, units] at a time; small draws are cached for the next cell."""
    if block >= REPLICATES and units <= _KEPT:
        yield _kept_picks(seed, units)
        return
    generator = np.random.default_rng(seed)
    for first in range(0, REPLICATES, block):
        yield generator.integers(units, size=(min(block, REPLICATES - first), units))


@lru_cache(maxsize=128)
def _kept_picks(seed: int, units: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(units, size=(REPLICATES, units))


def _counts(index: NDArray[np.intp], values: int, picks: NDArray[np.int64]) -> Floats:
    """Return how often each of `values` distinct scores was drawn in each replicate: [R, values]."""
    rows = np.arange(len(picks))[:, None] * values
    flat = np.bincount((rows + index[picks]).ravel(), minlength=len(picks) * values)
    return flat.reshape(len(picks), values).astype(np.float64)


def auc_interval(strata: Sequence[tuple[Floats, Floats]], seed: int) -> Interval:
    """Return the stratified percentile bootstrap of the mean AUC over strata (members' and non-members' scores)."""
    generator, total = np.random.default_rng(seed), np.zeros(REPLICATES)
    for members, others in strata:
        distinct, index = np.unique(np.concatenate([members, others]), return_inverse=True)
        block = max(1, _BLOCK // len(index))
        for first in range(0, REPLICATES, block):
            rows = min(block, REPLICATES - first)
            picks = [generator.integers(len(s), size=(rows, len(s))) for s in (members, others)]
            high = _counts(index[: len(members)], len(distinct), picks[0])
            low = _counts(index[len(members) :], len(distinct), picks[1])
            below = low.cumsum(axis=1) - low / 2
            total[first : first + rows] += (high * below).sum(axis=1) / (len(members) * len(others))
    low_end, high_end = np.percentile(total / len(strata), _TAILS)
    return Interval(float(low_end), float(high_end), f"stratified percentile bootstrap, {REPLICATES}")


def balanced_interval(strata: Sequence[NDArray[np.bool_]], seed: int) -> Interval:
    """Return the interval of the mean share of right decisions over strata; a bootstrap if their sizes differ."""
    if len({len(stratum) for stratum in strata}) == 1:
        return clopper_pearson(float(sum(s.sum() for s in strata)), sum(map(len, strata)))
    generator = np.random.default_rng(seed)
    shares = [generator.binomial(len(s), s.mean(), size=REPLICATES) / len(s) for s in strata]
    low, high = np.percentile(np.mean(shares, axis=0), _TAILS)
    return Interval(float(low), float(high), f"stratified percentile bootstrap, {REPLICATES}")
