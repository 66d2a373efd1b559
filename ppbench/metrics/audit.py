"""A lower bound on epsilon from ONE training run (Steinke, Nasr and Jagielski, NeurIPS 2023, Theorem 5.2).

m examples were in or out by fair coins; an auditor guessed on r of them which, and was right v times. Under (epsilon,
delta)-DP right guesses are stochastically dominated by those of randomized response, v ~ Binomial(r, e^epsilon / (1 +
e^epsilon)), up to a term in delta. r must be fixed before the guesses are scored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from ppbench.metrics.intervals import Estimate, Interval, refused

DELTA = 1e-5
"""The delta at which epsilon is bounded where no other is claimed."""
METHOD = "one-sided {:.0%} lower bound, Steinke et al. 2023"
STEPS = 60
"""Bisections: the bound is exact to about 1e-15 of its bracket."""


def p_value(m: int, r: int, v: int, epsilon: float, delta: float = DELTA) -> float:
    """Return a bound on the probability of v or more right ones of r guesses on m examples under (epsilon, delta)-DP.

    beta + 2 m delta alpha with beta = P(B >= v) and alpha = max over i in 1..v of P(v > B >= v - i) / i, B ~
    Binomial(r, 1 / (1 + e^-epsilon)). Raises ValueError for an argument out of range.
    """
    if not (0 <= v <= r <= m and epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"{v} right of {r} guesses on {m} examples at epsilon {epsilon}, delta {delta}: out of range")
    rate = float(special.expit(epsilon))
    beta = float(stats.binom.sf(v - 1, r, rate))
    if v == 0 or delta == 0:
        return min(beta, 1.0)
    below = stats.binom.pmf(np.arange(v - 1, -1, -1), r, rate).cumsum()
    alpha = float((below / np.arange(1, v + 1)).max())
    return min(beta + alpha * delta * 2 * m, 1.0)


def epsilon_lower(m: int, r: int, v: int, delta: float = DELTA, confidence: float = 0.95) -> float:
    """Return the largest epsilon that v right of r guesses on m examples refute, 0: none; ValueError: out of range."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence} is not between 0 and 1")
    level, low, high = 1 - confidence, 0.0, 1.0
    if p_value(m, r, v, low, delta) >= level:
        return 0.0
    while p_value(m, r, v, high, delta) < level:  # ends: the binomial's tail tends to 1 as its rate does
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        if p_value(m, r, v, middle, delta) < level:
            low = middle
        else:
            high = middle
    return low


def audited(
    member: NDArray[np.bool_], decision: NDArray[np.bool_], guessed: NDArray[np.bool_], delta: float = DELTA
) -> Estimate:
    """Return the lower bound on epsilon as a figure: value and lower end are the bound, there is no upper end.

    member [m]: which examples were in, by coin; decision [m]: which ones the auditor says were in; guessed [m]: where
    it did not abstain. Refused where it abstained on all. delta: of the guarantee that is tested.
    """
    m, r = len(member), int(guessed.sum())
    if r == 0:
        return refused(m, "the auditor guessed on no example", 0.0)
    bound = epsilon_lower(m, r, int((member == decision)[guessed].sum()), delta)
    method = f"{METHOD.format(0.95)}, delta {delta:g}, {r} guesses"
    return Estimate(bound, Interval(bound, None, method), m, chance=0.0)
