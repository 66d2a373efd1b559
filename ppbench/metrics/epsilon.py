"""Epsilon: lower bounds from audits, estimates from canary clients, and what a guarantee allows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy
from numpy.typing import NDArray

from ppbench.metrics.intervals import CONFIDENCE, Estimate, Interval, unsupported

# -- Bounds on an attacker's success under (epsilon, delta)-differential privacy --

VACUOUS = 10.0
"""Largest epsilon of a guarantee worth the name: beyond e^10 = 22,026 times the odds, an attacker who was at even odds
may be right 99.995 % of the time."""
BOUNDLESS = 50.0
"""Epsilon from which no probability is bounded: at e^50 an attacker may single out one example of 10^21."""


def success_bound(chance: float, epsilon: float, delta: float) -> float:
    """Return the largest probability with which an attacker can identify an example under (epsilon, delta)-DP.

    chance: the largest prior probability of a candidate: 1 over their number, or 1/2 for membership. The guarantee is
    for adding or removing an example; replacing one takes two steps, hence (2 epsilon, (1 + e^epsilon) delta), which
    also holds for a guarantee for replacement. With P_i(S_i) <= e^eps P_j(S_i) + delta for all candidates i, j and
    priors at most p, the sum over i and j gives (1 - p) s <= e^eps p (1 - s) + delta, thus s <= (e^eps p + delta) /
    (e^eps p + 1 - p).
    """
    if epsilon >= BOUNDLESS:
        return 1.0
    odds = math.exp(2 * epsilon) * chance
    slack = (1 + math.exp(epsilon)) * delta
    return min(1.0, (odds + slack) / (odds + 1 - chance))


def epsilon_words(epsilon: float) -> str:
    """Return an epsilon for print: "1.3", above `VACUOUS` "no guarantee (epsilon 20)", "no guarantee (epsilon 4e4)"."""
    if epsilon <= VACUOUS:
        return f"{epsilon:.3g}"
    if epsilon < 1000:
        return f"no guarantee (epsilon {epsilon:.0f})"
    return f"no guarantee (epsilon {epsilon:.0e})".replace("e+0", "e").replace("e+", "e")


# -- Lower bounds on epsilon from ONE training run (Steinke, Nasr and Jagielski, NeurIPS 2023, Theorem 5.2) --
# m examples are in or out of training by fair coins; an auditor guesses the membership of r of them, and v guesses
# are right. Under (epsilon, delta)-DP right guesses are stochastically dominated by those of randomized response, v
# ~ Binomial(r, e^epsilon / (1 + e^epsilon)), up to a term in delta. r must be fixed before the guesses are scored.

DELTA = 1e-5
"""The delta at which epsilon is bounded if no other is claimed."""
LEVEL = 1 - CONFIDENCE
"""Probability with which a bound may err."""
AUDIT_METHOD = "one-sided 95% lower bound, Steinke et al. 2023"
GAUSSIAN = "one-sided 95% lower bound of a Gaussian mechanism, Mahloujifar et al. 2025"
BISECTIONS = 60
"""Number of bisections: the bound is exact to about 1e-15 of its bracket."""


def p_value(m: int, r: int, v: int, epsilon: float, delta: float = DELTA) -> float:
    """Return a bound on the probability of v or more right among r guesses on m examples under (epsilon, delta)-DP.

    beta + 2 m delta alpha with beta = P(B >= v) and alpha = max over i in 1..v of P(v > B >= v - i) / i, B ~
    Binomial(r, 1 / (1 + e^-epsilon)). Raises ValueError for an argument out of range.
    """
    if not (0 <= v <= r <= m and epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"{v} right of {r} guesses on {m} examples at epsilon {epsilon}, delta {delta}: out of range")
    rate = float(scipy.special.expit(epsilon))
    beta = float(scipy.stats.binom.sf(v - 1, r, rate))
    if v == 0 or delta == 0:
        return min(beta, 1.0)
    below = scipy.stats.binom.pmf(np.arange(v - 1, -1, -1), r, rate).cumsum()
    alpha = float((below / np.arange(1, v + 1)).max())
    return min(beta + alpha * delta * 2 * m, 1.0)


def epsilon_lower(m: int, r: int, v: int, delta: float = DELTA) -> float:
    """Return the largest epsilon refuted by v right of r guesses on m examples, 0 if none; ValueError: out of range."""
    return _largest(lambda epsilon: p_value(m, r, v, epsilon, delta) < LEVEL)


def _largest(refuted: Callable[[float], bool], most: float = math.inf) -> float:
    """Return the largest refuted value below `most`, 0 if none; every value below a refuted one is refuted."""
    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):  # ends: without privacy any guesses are possible
        low, high = high, 2 * high
        if high > most:
            return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if refuted(middle):
            low = middle
        else:
            high = middle
    return low


TradeOff = Callable[[float], float]
"""A trade-off function: from an event's probability under one of two neighbors to the least under the other."""


def gaussian_tradeoff(mu: float) -> TradeOff:
    """Return the trade-off function of mu-GDP (Dong, Roth and Su 2022); mu: sensitivity over noise."""
    return lambda p: float(scipy.special.ndtr(scipy.special.ndtri(p) - mu))


def gdp_epsilon(mu: float, delta: float = DELTA) -> float:
    """Return epsilon at `delta` of a mechanism that is mu-GDP (Dong, Roth and Su 2022, Corollary 2.13)."""
    if mu <= 0:
        return 0.0

    def above(epsilon: float) -> bool:
        tail = math.exp(epsilon + float(scipy.special.log_ndtr(-epsilon / mu - mu / 2)))
        return float(scipy.special.ndtr(-epsilon / mu + mu / 2)) - tail > delta

    return _largest(above)


def refutes(m: int, r: int, v: int, least: TradeOff, level: float = LEVEL) -> bool:
    """Return whether v right of r guesses on m examples refute a trade-off function at `level`.

    Algorithm 1 of Mahloujifar et al. 2025, whose h and r are h and p here. ValueError: out of range.
    """
    if not 0 <= v <= r <= m or r == 0:
        raise ValueError(f"{v} right of {r} guesses on {m} examples: out of range")
    p, h = level * v / m, level * (r - v) / m
    for i in range(v - 1, -1, -1):
        more = max(h, least(min(p, 1.0)))
        p, h = p + i / (r - i) * (more - h), more
    return p + h > r / m


MOST_EPSILON = 60.0
"""The search for a bound ends here: no attack makes so many right guesses."""


def epsilon_gaussian(m: int, r: int, v: int, delta: float = DELTA) -> float:
    """Return epsilon at `delta` of the largest mu for which the guesses refute mu-GDP; ValueError: out of range."""
    mu = _largest(lambda mu: refutes(m, r, v, gaussian_tradeoff(mu)), MOST_EPSILON)
    return gdp_epsilon(mu, delta)


def epsilon_bound(
    member: NDArray[np.bool_],
    decision: NDArray[np.bool_],
    guessed: NDArray[np.bool_],
    delta: float = DELTA,
    gaussian: bool = False,
) -> Estimate:
    """Return the lower bound on epsilon as an estimate: value and lower end are the bound, there is no upper end.

    member [m]: which examples were in training, by coin; decision [m]: the auditor's guesses; guessed [m]: where it
    did not abstain. Without a guess there is no value. delta: of the guarantee that is tested. gaussian: bound the
    epsilon of a Gaussian mechanism instead of any mechanism.
    """
    m, r = len(member), int(guessed.sum())
    if r == 0:
        return unsupported(m, "the auditor guessed on no example", 0.0)
    of, method = (epsilon_gaussian, GAUSSIAN) if gaussian else (epsilon_lower, AUDIT_METHOD)
    bound = of(m, r, int((member == decision)[guessed].sum()), delta)
    return Estimate(bound, Interval(bound, None, f"{method}, delta {delta:g}, {r} guesses"), m, chance=0.0)


# -- Epsilon of a client, estimated from canary clients of one training run (Andrew et al., ICLR 2024, Algorithm 1)
# --
# A canary is a random unit vector; its statistic is the cosine with the change of the model in training, times the
# square root of the dimension. For canaries that took no part it is N(0, 1), for the others it is taken as N(mu,
# sigma^2), and epsilon is that of the two Gaussians. This is an estimate for canaries of this size and this
# statistic, not a bound.

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
    out, inside = scipy.stats.norm.logpdf(x), scipy.stats.norm.logpdf(x, mu, sigma)

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
    low, high = (math.sqrt(freedom * variance / scipy.stats.chi2.ppf(tail, freedom)) for tail in (0.995, 0.005))
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
