"""What MP-DP's noise hides from a server that knows the scales R (it drew them), where the paper averages over R.

Given R the noise on a recovered coordinate is R times a uniform, not a Gaussian: its support moves with the gradient,
and outside the common part the old and the new value are told apart for certain, whatever epsilon is. The paper's
Theorems 5 and 6 hold for one coordinate of one client and R unknown. Gradients move by `shift`, in units of the sigmas.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.interpolate import BSpline
from scipy.special import gammaincinv
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.defenses.mpdp.laws import FOURTH_MOMENT, MEAN_INVERSE, SECOND_MOMENT

Floats = NDArray[np.float64]


# -- one client whose neighbors all collude: independent uniform noise -------------------------------------------
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


def delta_averaged(shift: Tensor, sigma_eta: float, shared: bool = False, nodes: int = 20_000) -> float:
    """Return `delta_given_R` in the mean over R of law |DN*(1)|: what a server that knows R gets, round by round.

    With R independent at every coordinate this is 1 - prod_i (1 - erf(|shift_i| / (2 sqrt(2) sigma_eta))), because
    E min(1, c/R) = erf(c): the total variation of N(0, sigma_eta^2) and its shift, so one coordinate loses by R being
    known exactly what the Gaussian loses at epsilon = 0, but loses it at every epsilon.

    Args:
        shift: [d], float.
        sigma_eta: standard deviation of the independent noise over R, > 0.
        shared: whether one R multiplies all coordinates, as in a row of the first layer; by quadrature.
        nodes: quantiles of R in the quadrature.
    """
    small = shift.double().abs() / (2 * math.sqrt(2) * sigma_eta)
    if not shared:
        return float(-torch.expm1(torch.log1p(-torch.erf(small)).sum()))
    quantiles = np.sqrt(gammaincinv(1.5, (np.arange(nodes) + 0.5) / nodes))
    values, counts = small.unique(return_counts=True)  # equal shifts are one column: a spread shift costs `nodes`
    logs = _log_overlap(2 * values, torch.as_tensor(quantiles)[:, None])
    return float(-torch.expm1((logs * counts).sum(-1)).mean())


def delta_by_l1(shift: Tensor, sigma_eta: float) -> float:
    """Return the limit of `delta_averaged` for a shift spread thin: 1 - exp(-E[1/R] ||shift||_1 / (2 sqrt(2) sigma)).

    It is the L1 norm that counts, so a bound on the L2 norm (clipping) does not bound delta in many dimensions.
    """
    return float(-math.expm1(-MEAN_INVERSE * float(shift.double().abs().sum()) / (2 * math.sqrt(2) * sigma_eta)))


def _log_overlap(shift: Tensor, half_width: Tensor) -> Tensor:
    """Return ln(1 - min(1, |shift| / (2 half_width))), float64, with 0/0 as 0."""
    moved = shift.double().abs()
    part = torch.where(moved > 0, moved / (2 * half_width.double()), 0.0)
    return torch.log1p(-part.clamp(max=1.0))


# -- honest neighbors: the server still sees the sum -------------------------------------------------------------
def delta_of_sum(
    shift: float, clients: int, sigma_eta: float, scale: float, epsilon: float, copies: int = 1, cells: int = 50_000
) -> float:
    """Return a lower bound on delta at `epsilon` given R, from the sum of all clients' uploads alone.

    Pairwise noise cancels in the sum, and what is left at a coordinate is R times the sum of K uniforms, whose density
    is a cardinal B-spline. Cells of the line, exact masses in them and privacy losses rounded down each lower delta
    (a coarser look is post-processing); the losses of `copies` coordinates are added by FFT, to about 1e-13.

    Args:
        shift: by how much one client's gradient moves at each of the coordinates.
        clients: K >= 1, in the sum.
        sigma_eta: standard deviation of a client's independent noise over R, > 0.
        scale: R > 0, shared by the coordinates.
        epsilon: >= 0.
        copies: number of coordinates, >= 1.
        cells: cells of the line.

    Raises:
        UsageError: a number out of range.
    """
    if not (clients >= 1 and copies >= 1 and sigma_eta > 0 and scale > 0 and epsilon >= 0):
        raise UsageError(
            f"MP-DP: clients={clients}, copies={copies}, sigma_eta={sigma_eta}, scale={scale}, epsilon={epsilon} "
            "cannot be used; the first two must be >= 1, the next two > 0 and the last >= 0."
        )
    loss, mass, certain = _losses(abs(shift) / (2 * math.sqrt(2) * sigma_eta * scale), clients, cells)
    if not len(loss):
        return 1.0
    low, step, histogram = _rounded_down(loss, mass, tail=1e-9 / copies)
    size = next_fast_len(copies * (len(histogram) - 1) + 1, real=True)
    total = irfft(rfft(histogram, size) ** copies, size)
    value = copies * low + step * np.arange(size)
    above = value > epsilon
    uncertain = float((total[above] * -np.expm1(epsilon - value[above])).sum())
    return max(0.0, -math.expm1(copies * math.log1p(-min(certain, 1 - 1e-16))) + uncertain)


def _losses(shift: float, clients: int, cells: int) -> tuple[Floats, Floats, float]:
    """Return privacy losses [n] and masses [n] of cells, and the mass where the shifted law has none.

    The line is measured in widths of one uniform: the sum of K lies in [0, K], `shift` is in the same units.
    """
    distribution = BSpline.basis_element(np.arange(clients + 1.0), extrapolate=False).antiderivative()
    edges = np.linspace(0.0, clients, cells + 1)

    def masses(at: Floats) -> Floats:
        left, right = np.clip(at, 0, clients), np.clip(clients - at, 0, clients)
        # By symmetry from the nearer end, so that small masses in the upper tail keep their digits.
        lower = at[:-1] + at[1:] < clients
        difference: Floats = np.where(lower, np.diff(distribution(left)), -np.diff(distribution(right)))
        return difference

    here, there = masses(edges), masses(edges - shift)
    some = (here > 0) & (there > 0)
    return np.log(here[some] / there[some]), here[some], float(here[(here > 0) & (there <= 0)].sum())


def _rounded_down(loss: Floats, mass: Floats, tail: float, bins: int = 1 << 16) -> tuple[float, float, Floats]:
    """Return (lowest loss, step, histogram [bins]) of the losses, rounded down.

    The window cuts `tail` off at both ends: mass below it is dropped, mass above it is moved down to its upper end.
    """
    order = np.argsort(loss)
    below = np.cumsum(mass[order])
    low = float(loss[order[np.searchsorted(below, tail)]])
    high = float(loss[order[min(np.searchsorted(below, below[-1] - tail), len(order) - 1)]])
    step = max(high - low, 1e-9) / (bins - 1)
    index = np.minimum(np.floor((loss - low) / step), bins - 1).astype(np.int64)
    kept = index >= 0
    return low, step, np.bincount(index[kept], weights=mass[kept], minlength=bins).astype(np.float64)


# -- moments -----------------------------------------------------------------------------------------------------
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


def aggregate_kurtosis(clients: int) -> float:
    """Return the kurtosis of R times a mean of K uniforms, 5 - 2/K (a Gaussian has 3).

    All clients share R, so the mean of many tends to R times a Gaussian and never to a Gaussian.
    """
    return FOURTH_MOMENT / SECOND_MOMENT**2 * (3 - 1.2 / clients)
