"""Bounds on an attacker's success under (epsilon, delta)-differential privacy."""

from __future__ import annotations

import math

VACUOUS = 50.0
"""Epsilon from which a guarantee is void: at e^50 an attacker may single out one example of 10^21."""


def success_bound(chance: float, epsilon: float, delta: float) -> float:
    """Return the largest probability with which an attacker can identify an example under (epsilon, delta)-DP.

    chance: the largest prior probability of a candidate: 1 over their number, or 1/2 for membership. The guarantee is
    for adding or removing an example; replacing one takes two steps, hence (2 epsilon, (1 + e^epsilon) delta), which
    also holds for a guarantee for replacement. With P_i(S_i) <= e^eps P_j(S_i) + delta for all candidates i, j and
    priors at most p, the sum over i and j gives (1 - p) s <= e^eps p (1 - s) + delta, thus s <= (e^eps p + delta) /
    (e^eps p + 1 - p).
    """
    if epsilon >= VACUOUS:
        return 1.0
    odds = math.exp(2 * epsilon) * chance
    slack = (1 + math.exp(epsilon)) * delta
    return min(1.0, (odds + slack) / (odds + 1 - chance))


def epsilon_words(epsilon: float) -> str:
    """Return an epsilon for print: "1.3", or "no guarantee (epsilon 4e4)" from `VACUOUS` on."""
    if epsilon < VACUOUS:
        return f"{epsilon:.3g}"
    return f"no guarantee (epsilon {epsilon:.0e})".replace("e+0", "e").replace("e+", "e")
