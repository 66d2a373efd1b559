"""What MP-DP claims to guarantee, in the paper's Gaussian view (Yang et al., arXiv 2412.11737, section 5).

The view: each client's recovered gradient carries independent noise N(0, sigma_eta^2) and, per neighbor, noise
N(0, sigma_delta^2) of opposite sign at the two ends. A gradient that moves by a vector of L2 norm 1 is then told from
its old value as by one Gaussian measurement of squared signal-to-noise ratio theta. Both sigmas are in units of the L2
sensitivity (B for adding a client's vector clipped to B, 2B for replacing it).

The view is not what the server sees: it knows the scales R, given which the noise is uniform (see `known_scales`),
and Psi and Phi carry no noise at all. So `guarantee` below says that a theorem's conditions hold, not that MP-DP is
differentially private. delta is the probability, sigma_delta the pairwise noise, the paper's sigma_Delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Graph = Literal["complete", "n_out"]


# -- theta and (epsilon, delta) ----------------------------------------------------------------------------------
def theta_max(epsilon: float, delta: float) -> float:
    """Return the largest theta that Eq. [23] allows at (epsilon, delta)."""
    factor = _factor(delta)
    # Root of theta/2 + factor sqrt(theta) = epsilon, in the form that does not cancel at small epsilon.
    return (2 * epsilon / (factor + math.sqrt(factor**2 + 2 * epsilon))) ** 2


def epsilon_of(theta: float, delta: float) -> float:
    """Return the smallest epsilon that Eq. [23] allows at (theta, delta): theta/2 + factor sqrt(theta)."""
    return theta / 2 + _factor(delta) * math.sqrt(theta)


def gaussian_epsilon(theta: float, delta: float, rounds: int = 1) -> float:
    """Return the exact epsilon of `rounds` Gaussian measurements of squared signal-to-noise ratio theta each.

    T rounds have the ratio T theta, also when later rounds depend on earlier ones (Dong, Roth, Su 2022, Gaussian DP).
    The root is dp_accounting's: it solves the analytic Gaussian mechanism (Balle and Wang 2018, Eq. 6) in logarithms,
    agrees with 60-digit arithmetic from theta = 1e-8 to 1e10, and is kept by others; it needs release 0.6.
    """
    total = theta * rounds if rounds else 0.0
    if total == 0 or math.isinf(total):
        return total
    # Here, because importing it takes a second that most runs do not need.
    from dp_accounting import get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # its bracket may pass a point where delta underflows; log(0) is meant there
        return float(get_epsilon_gaussian(1 / math.sqrt(total), delta))


def _factor(delta: float) -> float:
    """Return max(1, sqrt(2 ln(2 / (delta sqrt(2 pi))))): Eq. [23] reads epsilon >= theta/2 + factor sqrt(theta)."""
    return math.sqrt(max(1.0, 2 * math.log(2 / (delta * math.sqrt(2 * math.pi)))))


# -- theta of a graph --------------------------------------------------------------------------------------------
def exact_theta(adjacency: Tensor, sigma_eta: float, sigma_delta: float) -> float:
    """Return the largest theta over the clients of a given graph: max_k (S^-1)_kk.

    S = sigma_eta^2 I + sigma_delta^2 Laplacian is the covariance of the clients' noise at one coordinate. On the
    complete graph this is 1/(K sigma_eta^2) + (1 - 1/K)/(sigma_eta^2 + K sigma_delta^2), below Theorem 10's theta.

    Args:
        adjacency: client graph, bool [K, K]; clients without neighbors are allowed here.
        sigma_eta: standard deviation of the independent noise, finite, >= 0 (0 gives infinity).
        sigma_delta: standard deviation of the noise of one pair, finite, >= 0.
    """
    edges = adjacency.double()
    if sigma_eta == 0:
        return math.inf
    values, vectors = torch.linalg.eigh(torch.diag(edges.sum(1)) - edges)
    # One eigenvalue a component is 0; its rounding error must not be multiplied by a large pairwise noise.
    values = torch.where(values < 1e-12 * len(edges), 0.0, values)
    diagonal = (vectors.square() / (sigma_eta**2 + sigma_delta**2 * values)).sum(1)
    return float(diagonal.max())


def theorem10_theta(clients: int, sigma_eta: float, sigma_delta: float) -> float:
    """Return Theorem 10's theta for the complete graph, 1/(K sigma_eta^2) + 1/(K sigma_delta^2).

    The paper prints sigma where sigma^2 is meant (its Theorem 11 has the squares): the squared form is what bounds
    `exact_theta` from above on every complete graph. A sigma of 0 gives infinity.
    """
    return _inverse_square(sigma_eta) / clients + _inverse_square(sigma_delta) / clients


def theorem11_theta(clients: int, n: int, sigma_eta: float, sigma_delta: float) -> float:
    """Return Theorem 11's theta for the random n-out graph; infinite for n <= 6, where its formula has no value."""
    return _inverse_square(sigma_eta) / clients + pairwise_factor(clients, n) * _inverse_square(sigma_delta)


def pairwise_factor(clients: int, n: int) -> float:
    """Return the factor of 1/sigma_delta^2 in Theorem 11: 1/(floor((n-1)/3) - 1) + (12 + 6 ln K)/K.

    Infinite for n <= 6, where the first denominator is zero or negative: no finite pairwise noise is enough.
    """
    denominator = (n - 1) // 3 - 1
    return math.inf if denominator < 1 else 1 / denominator + (12 + 6 * math.log(clients)) / clients


@dataclass(frozen=True)
class Condition:
    """A condition of Theorem 11. name: its formula; sentence: the formula with the numbers given; holds: whether so."""

    name: str
    sentence: str
    holds: bool


def theorem11_conditions(clients: int, n: int, delta: float) -> tuple[Condition, ...]:
    """Return the five conditions of Theorem 11, each with whether it holds; its guarantee is (epsilon, 3 delta).

    Args:
        clients: K.
        n: others that each client picks.
        delta: the theorem's delta, a third of the delta that is guaranteed.
    """
    given = f"K = {clients} and n = {n}"
    rows = [("K >= 81", "", clients >= 81), ("n <= K - 1", f" = {clients - 1}", n <= clients - 1)]
    rows += [(name, f" = {bound:.1f}", n >= bound) for name, bound in n_bounds(clients, delta)]
    return tuple(
        Condition(name, f"Theorem 11 needs {name}{value}, but {given}" if not holds else f"{name}{value} holds", holds)
        for name, value, holds in rows
    )


def n_bounds(clients: int, delta: float) -> tuple[tuple[str, float], ...]:
    """Return Theorem 11's three lower bounds on n at its own delta, each with its formula."""
    return (
        ("n >= 4 ln(2K/(3 delta))", 4 * math.log(2 * clients / (3 * delta))),
        ("n >= 6 ln(K/3)", 6 * math.log(clients / 3)),
        ("n >= 3/2 + (9/4) ln(2e/delta)", 1.5 + 2.25 * math.log(2 * math.e / delta)),
    )


# -- sigmas ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sigmas:
    """Standard deviations of MP-DP's noise, in units of the L2 sensitivity.

    Attributes:
        eta: of a client's independent noise.
        delta: of the noise of one pair of neighbors.
        theta: squared signal-to-noise ratio that the sigmas spend: of the theorem that was used, or, without a
            guarantee, of the complete graph; ask `exact_theta` about the graph that was drawn.
        guarantee: whether the theorem's conditions hold, in the Gaussian view.
        conditions: sentences of the conditions that are violated.
    """

    eta: float
    delta: float
    theta: float
    guarantee: bool
    conditions: tuple[str, ...]


def calibrate(
    epsilon: float,
    delta: float,
    clients: int,
    graph: Graph = "complete",
    n: int | None = None,
    frac: float = 0.9,
) -> Sigmas:
    """Return the sigmas with which the theorems claim (epsilon, delta) in one round.

    The share `frac` of Eq. [23]'s theta goes to the independent noise, so the mean over the clients carries little. For
    what Theorem 11 does not cover the sigmas are the complete graph's, with `guarantee` False.

    Args:
        epsilon: > 0.
        delta: in (0, 1), the whole of it: Theorem 11 is used at a third.
        clients: K >= 2.
        graph: "complete" (Theorem 10) or "n_out" (Theorem 11).
        n: others that each client picks, for "n_out".
        frac: in (0, 1).
    """
    violated: tuple[str, ...] = ()
    pairwise, theta = 1 / clients, theta_max(epsilon, delta)
    if graph == "n_out" and n is not None:
        violated = tuple(c.sentence for c in theorem11_conditions(clients, n, delta / 3) if not c.holds)
        if not violated:
            pairwise, theta = pairwise_factor(clients, n), theta_max(epsilon, delta / 3)
    sigma_eta = 1 / math.sqrt(clients * frac * theta)
    return Sigmas(sigma_eta, math.sqrt(pairwise / ((1 - frac) * theta)), theta, not violated, violated)


def _inverse_square(sigma: float) -> float:
    return math.inf if sigma == 0 else sigma**-2
