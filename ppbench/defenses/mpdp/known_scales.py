"""What MP-DP's noise hides from a server that knows the scales R (it drew them), where the paper averages over R.

Given R the noise on a recovered coordinate is R times a uniform, not a Gaussian: its support moves with the gradient,
and outside the common part the old and the new value are told apart for certain, whatever epsilon is. The paper's
Theorems 5 and 6 hold for one coordinate of one client and R unknown. Gradients move by `shift`, in units of the sigmas.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hockey_stick_uniform(shift: Tensor, half_width: Tensor) -> Tensor:
    """Return delta(epsilon) between independent uniforms of these half-widths and the same shifted; any epsilon >= 0.

    The densities are equal on the overlap and one is 0 off it, so delta does not depend on epsilon:
    1 - prod_i (1 - min(1, |shift_i| / (2 half_width_i))).

    Args:
        shift: [..., d], float.
        half_width: [..., d], float, >= 0; 0 hides no shift but 0.

    Returns:
        float64 [...].
    """
    return -torch.expm1(_log_overlap(shift, half_width).sum(-1))


def delta_given_R(shift: Tensor, sigma_eta: float, scale: Tensor) -> Tensor:
    """Return delta, for every epsilon, of a client whose pairwise noise the server knows, given the scales R.

    The half-width of coordinate i is sqrt(2) sigma_eta R_i.

    Args:
        shift: [..., d], float.
        sigma_eta: standard deviation of the independent noise over R, >= 0.
        scale: R, [..., d], float, > 0.

    Returns:
        float64 [...].
    """
    return hockey_stick_uniform(shift, math.sqrt(2) * sigma_eta * scale.double())


def delta_averaged(shift: Tensor, sigma_eta: float) -> float:
    """Return `delta_given_R` in the mean over R of law |DN*(1)|: what a server that knows R gets, round by round.

    With R independent at every coordinate this is 1 - prod_i (1 - erf(|shift_i| / (2 sqrt(2) sigma_eta))), because
    E min(1, c/R) = erf(c): the total variation of N(0, sigma_eta^2) and its shift, so one coordinate loses by R being
    known exactly what the Gaussian loses at epsilon = 0, but loses it at every epsilon.

    Args:
        shift: [d], float.
        sigma_eta: standard deviation of the independent noise over R, > 0.
    """
    small = shift.double().abs() / (2 * math.sqrt(2) * sigma_eta)
    return float(-torch.expm1(torch.log1p(-torch.erf(small)).sum()))


def _log_overlap(shift: Tensor, half_width: Tensor) -> Tensor:
    """Return ln(1 - min(1, |shift| / (2 half_width))), float64, with 0/0 as 0."""
    moved = shift.double().abs()
    part = torch.where(moved > 0, moved / (2 * half_width.double()), 0.0)
    return torch.log1p(-part.clamp(max=1.0))


def theta_cond(scale: Tensor, clients: int, sigma_eta: float, bound: float = 1.0) -> float:
    """Return the largest squared signal-to-noise ratio of a shift of L2 norm `bound` in the sum of uploads, given R.

    max_t sum_i t_i^2 / (K sigma_eta^2 (2/3) R_i^2): the variance of a uniform is 2 sigma_eta^2 / 3, and the worst
    shift lies where R is smallest. It matches second moments only; the noise stays bounded, so that no epsilon follows.
    The mean over R of the ratio at a fixed coordinate is E[R^-2] / (2/3) = 3 times the Gaussian view's.

    Args:
        scale: R, float tensor of any shape, > 0.
        clients: K, in the sum.
        sigma_eta: standard deviation of a client's independent noise over R, > 0.
        bound: L2 norm of the shift.
    """
    smallest = float(scale.double().min())
    return bound**2 / (clients * sigma_eta**2 * (2 / 3) * smallest**2)
