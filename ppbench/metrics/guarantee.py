"""What (epsilon, delta)-differential privacy allows an attacker to succeed at, and when it allows everything."""

from __future__ import annotations

import math

VACUOUS = 50.0
"""Epsilon from which on a guarantee is none: at e^50 an attacker may tell one example of 10^21 from all others."""


def success_bound(chance: float, epsilon: float, delta: float) -> float:
    """Return the largest probability with which an attacker can name an example under (epsilon, delta)-DP, in [0, 1].

    chance: the largest prior probability of a candidate: 1 over their number, or 1/2 for a member. The guarantee is for
    an example added or removed; to replace one takes two steps, hence (2 epsilon, (1 + e^epsilon) delta), which also
    holds where it is for replacement. With P_i(S_i) <= e^eps P_j(S_i) + delta for all candidates i, j and priors at
    most p, the sum over i and j gives (1 - p) s <= e^eps p (1 - s) + delta, thus s <= (e^eps p + delta) /
    (e^eps p + 1 - p).
    """
    if epsilon >= VACUOUS:
        return 1.0
    odds = math.exp(2 * epsilon) * chance
    slack = (1 + math.exp(epsilon)) * delta
    return min(1.0, (odds + slack) / (odds + 1 - chance))


def epsilon_words(epsilon: float) -> str:
    """Return an epsilon as it is printed: "1.3", or "no guarantee (epsilon 4e4)" where it allows everything."""
    if epsilon < VACUOUS:
        return f"{epsilon:.3g}"
    return f"no guarantee (epsilon {epsilon:.0e})".replace("e+0", "e").replace("e+", "e")
