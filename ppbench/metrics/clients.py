"""Epsilon of a client, estimated from canary clients of one training run (Andrew et al., ICLR 2024, Algorithm 1).

A canary is a random unit vector; its statistic is the cosine with what training added to the model, times the root of
the dimension: of canaries that took no part it is N(0, 1). The law of the others is taken for N(mu, sigma^2), and
epsilon is that of the two Gaussians. It is an estimate, for canaries of this size and this statistic: no bound.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ppbench.metrics.audit import DELTA
from ppbench.metrics.intervals import Estimate, Interval, refused

FEWEST = 10
"""Canaries from which a mean and a spread are estimated, at least."""
MOST = 1e4
"""Epsilon is not looked for above: two laws so far apart share no outcome in practice."""
POINTS = 20_001
WIDTH = 12.0
"""The laws are summed over so many points, so many standard deviations around both: the rest has mass 1e-32."""
STEPS = 60
METHOD = "95 % interval of the mean of {} canaries, estimate of Andrew et al. 2024, no bound, delta {:g}"


def two_gaussians(mu: float, sigma: float, delta: float = DELTA) -> float:
    """Return epsilon at `delta` between N(0, 1) and N(mu, sigma^2), the larger of both directions; `MOST` at most.

    The smallest epsilon with integral max(p - e^epsilon q, 0) <= delta. Raises ValueError: sigma or delta is not above
    0.
    """
    if not (sigma > 0 and 0 < delta < 1 and math.isfinite(mu)):
        raise ValueError(f"mean {mu}, spread {sigma}, delta {delta}: out of range")
    x = np.union1d(np.linspace(-WIDTH, WIDTH, POINTS), np.linspace(mu - WIDTH * sigma, mu + WIDTH * sigma, POINTS))
    cell = np.gradient(x)
    out, inside = stats.norm.logpdf(x), stats.norm.logpdf(x, mu, sigma)

    def lost(p: NDArray[np.float64], q: NDArray[np.float64], epsilon: float) -> float:
        kept = -np.expm1(np.minimum(epsilon - (p - q), 0.0))
        return float((np.exp(p) * kept * cell).sum())

    low, high = 0.0, MOST
    for _ in range(STEPS):
        middle = (low + high) / 2
        if max(lost(out, inside, middle), lost(inside, out, middle)) > delta:
            low = middle
        else:
            high = middle
    return 0.0 if high < 1e-9 else high


def spread(values: NDArray[np.float64]) -> float:
    """Return the standard deviation nearest to 1 of those that values [k] do not refute at level .01 (chi squared).

    The plain estimate is off by a tenth for 50 values, which alone is an epsilon above 1: no more difference from the
    canaries that took no part is used than is there.
    """
    free, square = len(values) - 1, float(values.var(ddof=1))
    low, high = (math.sqrt(free * square / stats.chi2.ppf(tail, free)) for tail in (0.995, 0.005))
    return min(max(1.0, low), high)


def client_epsilon(values: NDArray[np.float64], delta: float = DELTA) -> Estimate:
    """Return the estimate from statistics [k] of canaries (N(0, 1) where nothing leaks), with its interval.

    A mean below 0 counts as 0. The ends are those of the mean's interval, with the spread as estimated. Refused: fewer
    than `FEWEST`.
    """
    count = len(values)
    if count < FEWEST:
        return refused(count, f"fewer than {FEWEST} canaries", 0.0)
    mu, sigma = max(0.0, float(values.mean())), max(spread(values), 1e-6)
    wide = 1.96 * sigma / math.sqrt(count)
    value, high = (two_gaussians(mean, sigma, delta) for mean in (mu, mu + wide))
    low = two_gaussians(max(0.0, mu - wide), sigma, delta)
    return Estimate(value, Interval(low, high, METHOD.format(count, delta)), count, chance=0.0)
