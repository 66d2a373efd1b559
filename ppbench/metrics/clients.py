"""Epsilon of a client, estimated from canary clients of one training run (Andrew et al., ICLR 2024, Algorithm 1).

A canary is a random unit vector; its statistic is the cosine with the change of the model in training, times the square
root of the dimension. For canaries that took no part it is N(0, 1), for the others it is taken as N(mu, sigma^2), and
epsilon is that of the two Gaussians. This is an estimate for canaries of this size and this statistic, not a bound.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ppbench.metrics.audit import BISECTIONS, DELTA
from ppbench.metrics.intervals import Estimate, Interval, unsupported

FEWEST_CANARIES = 10
"""Least number of canaries from which a mean and a deviation are estimated."""
MOST_CLIENT_EPSILON = 1e4
"""The search for epsilon ends here: two laws so far apart share no outcome in practice."""
POINTS = 20_001
LAW_WIDTH = 12.0
"""The laws are integrated on `POINTS` points each, `LAW_WIDTH` deviations around the mean; the rest has mass 1e-32."""
CLIENT_METHOD = "95 % interval of the mean of {} canaries, estimate of Andrew et al. 2024, no bound, delta {:g}"


def two_gaussians(mu: float, sigma: float, delta: float = DELTA) -> float:
    """Return epsilon at `delta` between N(0, 1) and N(mu, sigma^2), the larger of both directions, capped.

    The smallest epsilon with integral max(p - e^epsilon q, 0) <= delta, at most `MOST_CLIENT_EPSILON`. Raises
    ValueError: an argument is out of range.
    """
    if not (sigma > 0 and 0 < delta < 1 and math.isfinite(mu)):
        raise ValueError(f"mean {mu}, spread {sigma}, delta {delta}: out of range")
    x = np.union1d(
        np.linspace(-LAW_WIDTH, LAW_WIDTH, POINTS), np.linspace(mu - LAW_WIDTH * sigma, mu + LAW_WIDTH * sigma, POINTS)
    )
    cell = np.gradient(x)
    out, inside = stats.norm.logpdf(x), stats.norm.logpdf(x, mu, sigma)

    def lost(p: NDArray[np.float64], q: NDArray[np.float64], epsilon: float) -> float:
        share = -np.expm1(np.minimum(epsilon - (p - q), 0.0))
        return float((np.exp(p) * share * cell).sum())

    low, high = 0.0, MOST_CLIENT_EPSILON
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if max(lost(out, inside, middle), lost(inside, out, middle)) > delta:
            low = middle
        else:
            high = middle
    return 0.0 if high < 1e-9 else high


def deviation_near_one(values: NDArray[np.float64]) -> float:
    """Return the standard deviation nearest to 1 in the 99 % interval (chi squared) from values [k].

    The plain estimate is off by a tenth for 50 values, which alone gives an epsilon above 1; only a significant
    difference from the absent canaries' deviation of 1 may count.
    """
    freedom, variance = len(values) - 1, float(values.var(ddof=1))
    low, high = (math.sqrt(freedom * variance / stats.chi2.ppf(tail, freedom)) for tail in (0.995, 0.005))
    return min(max(1.0, low), high)


def client_epsilon(values: NDArray[np.float64], delta: float = DELTA) -> Estimate:
    """Return the estimate of epsilon from statistics [k] of canaries (N(0, 1) if nothing leaks), with its interval.

    A mean below 0 counts as 0. The interval is that of the mean, at the estimated deviation. Fewer than
    `FEWEST_CANARIES` give no value.
    """
    count = len(values)
    if count < FEWEST_CANARIES:
        return unsupported(count, f"fewer than {FEWEST_CANARIES} canaries", 0.0)
    mu, sigma = max(0.0, float(values.mean())), max(deviation_near_one(values), 1e-6)
    wide = 1.96 * sigma / math.sqrt(count)
    value, high = (two_gaussians(mean, sigma, delta) for mean in (mu, mu + wide))
    low = two_gaussians(max(0.0, mu - wide), sigma, delta)
    return Estimate(value, Interval(low, high, CLIENT_METHOD.format(count, delta)), count, chance=0.0)
