"""The guarantee that MP-DP claims, in the paper's Gaussian view (Yang et al., arXiv 2412.11737, section 5).

Telling a gradient from one at L2 distance 1 is as hard as by one Gaussian measurement of squared signal-to-noise ratio
theta; both sigmas are in units of the L2 sensitivity. The server's real view differs: it knows the scales R, given
which the noise is uniform (last part), and Psi and Phi have no noise at all. So even if a theorem's conditions hold,
MP-DP is not differentially private.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Graph = Literal["complete", "n_out"]


def theta_max(epsilon: float, delta: float) -> float:
    """Return the largest theta that Eq. [23] allows at (epsilon, delta)."""
    factor = _factor(delta)
    # Root of theta/2 + factor sqrt(theta) = epsilon, in the form that does not cancel at small epsilon.
    return (2 * epsilon / (factor + math.sqrt(factor**2 + 2 * epsilon))) ** 2


def epsilon_of(theta: float, delta: float) -> float:
    """Return the smallest epsilon that Eq. [23] allows at (theta, delta): theta/2 + factor sqrt(theta)."""
    return theta / 2 + _factor(delta) * math.sqrt(theta)


def composed_epsilon(theta: float, delta: float, rounds: int = 1) -> float:
    """Return the exact epsilon of `rounds` Gaussian measurements of squared signal-to-noise ratio theta each.

    T rounds have the ratio T theta, also when later rounds depend on earlier ones (Dong, Roth, Su 2022, Gaussian DP).
    The root of the analytic Gaussian mechanism (Balle and Wang 2018, Eq. 6) is dp_accounting's, from release 0.6.
    """
    total = theta * rounds if rounds else 0.0
    if total == 0 or math.isinf(total):
        return total
    # Here, because importing it takes a second that most runs do not need.
    from dp_accounting import get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # its bracket may pass a point where delta underflows; log(0) is correct there
        return float(get_epsilon_gaussian(1 / math.sqrt(total), delta))


def _factor(delta: float) -> float:
    """Return max(1, sqrt(2 ln(2 / (delta sqrt(2 pi))))): Eq. [23] reads epsilon >= theta/2 + factor sqrt(theta)."""
    return math.sqrt(max(1.0, 2 * math.log(2 / (delta * math.sqrt(2 * math.pi)))))


def exact_theta(adjacency: Tensor, sigma_eta: float, sigma_delta: float) -> float:
    """Return the largest theta over the clients of a graph, bool [K, K]: max_k (S^-1)_kk; infinite at sigma_eta = 0.

    S = sigma_eta^2 I + sigma_delta^2 Laplacian is the covariance of the clients' noise; on the complete graph this is
    1/(K sigma_eta^2) + (1 - 1/K)/(sigma_eta^2 + K sigma_delta^2), below Theorem 10's theta.
    """
    edges = adjacency.double()
    if sigma_eta == 0:
        return math.inf
    values, vectors = torch.linalg.eigh(torch.diag(edges.sum(1)) - edges)
    # One eigenvalue per component is 0; its rounding error must not be multiplied by a large pairwise noise.
    values = torch.where(values < 1e-12 * len(edges), 0.0, values)
    diagonal = (vectors.square() / (sigma_eta**2 + sigma_delta**2 * values)).sum(1)
    return float(diagonal.max())


def pairwise_factor(clients: int, n: int) -> float:
    """Return 1/(floor((n-1)/3) - 1) + (12 + 6 ln K)/K, the factor of 1/sigma_delta^2 in Theorem 11; inf for n <= 6."""
    denominator = (n - 1) // 3 - 1
    return math.inf if denominator < 1 else 1 / denominator + (12 + 6 * math.log(clients)) / clients


def violations(clients: int, n: int, delta: float) -> tuple[str, ...]:
    """Return the conditions of Theorem 11 that fail for K clients that pick n each; it gives (epsilon, 3 delta)."""
    least = {
        "4 ln(2K/(3 delta))": 4 * math.log(2 * clients / (3 * delta)),
        "6 ln(K/3)": 6 * math.log(clients / 3),
        "3/2 + (9/4) ln(2e/delta)": 1.5 + 2.25 * math.log(2 * math.e / delta),
    }
    failed = ["K >= 81"] if clients < 81 else []
    failed += [f"n <= K - 1 = {clients - 1}"] if n >= clients else []
    failed += [f"n >= {formula} = {bound:.1f}" for formula, bound in least.items() if n < bound]
    return tuple(f"Theorem 11 needs {condition}, but K = {clients} and n = {n}" for condition in failed)


@dataclass(frozen=True)
class Sigmas:
    """Standard deviations of a client's own noise (eta) and of one pair's (delta), in units of the L2 sensitivity.

    violated: failed conditions of the theorem; if there are any, there is no guarantee.
    """

    eta: float
    delta: float
    violated: tuple[str, ...] = ()


def calibrate(
    epsilon: float, delta: float, clients: int, graph: Graph = "complete", n: int | None = None, frac: float = 0.9
) -> Sigmas:
    """Return the sigmas with which Theorem 10 (complete graph) or 11 (n-out) claims (epsilon, delta) in one round.

    Theorem 10 needs theta = 1/(K sigma_eta^2) + 1/(K sigma_delta^2): the paper prints sigma for sigma^2 (its Theorem 11
    has the squares). Theorem 11 is used at a third of delta; outside its conditions the complete graph's sigmas are
    returned.

    n: others that each client picks, for "n_out". frac: share of Eq. [23]'s theta for the independent noise, in (0, 1).
    """
    violated: tuple[str, ...] = ()
    pairwise, theta = 1 / clients, theta_max(epsilon, delta)
    if graph == "n_out" and n is not None:
        violated = violations(clients, n, delta / 3)
        if not violated:
            pairwise, theta = pairwise_factor(clients, n), theta_max(epsilon, delta / 3)
    sigma_eta = 1 / math.sqrt(clients * frac * theta)
    return Sigmas(sigma_eta, math.sqrt(pairwise / ((1 - frac) * theta)), violated)


def delta_given_scales(sigma_eta: float) -> float:
    """Return delta, for any epsilon, of a shift of one coordinate by the sensitivity, if the scales R are known.

    It is a coalition's with all neighbours, to whom only eta hides the shift. The server alone also lacks the pairwise
    noise, which leaves it the sum over clients: with five it is certain in fewer than one draw of a hundred.

    Given R the noise is R times a uniform, whose support moves with the gradient: off the common part, 1 - min(1, 1 /
    (2 sqrt(2) sigma_eta R)), old and new are distinguished with certainty. This is the mean over R of law |DN*(1)|.
    """
    return math.erf(1 / (2 * math.sqrt(2) * sigma_eta))
