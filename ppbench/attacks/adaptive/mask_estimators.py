"""Estimators of the additive mask that PBPFL and MP-DP put on a network's logits, from what is public or one's own.

A party computes yhat = y + alpha r at the perturbed weights, where y are the true logits, alpha the sum of the head's
inputs (which it knows) and r [C] the mask. Of r it knows the directions: r = sum_k c_k d_k, with one public direction
(PBPFL, one secret coefficient gamma) or the unit vectors (MP-DP, one secret a class). The c_k are estimated, float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 30
"""Reweightings of the location of the head's columns."""
TAIL = 2.0
"""Degrees of freedom of its t law: columns differ in scale by the hidden factor 1 / r_j."""
RIDGE = 1e-6
"""Added to a covariance, relative to its mean eigenvalue."""
DOUBT = 4.0
"""How much more the variance of the head's location is trusted to be than its columns say: they share an offset."""


@dataclass(frozen=True)
class Estimate:
    """An estimate of the mask's coefficients [m], with the covariance [m, m] of their error, as the estimator sees it.

    bias: largest plausible variance of a bias that the estimator cannot see, mean over the coefficients.
    """

    coefficients: Tensor
    covariance: Tensor
    bias: float = 0.0


def solve(matrix: Tensor, value: Tensor) -> Tensor:
    """Return matrix^+ value for a symmetric matrix [m, m]; NaN where anything is not finite."""
    if not bool(matrix.isfinite().all() and value.isfinite().all()):
        return torch.full_like(value, torch.nan)
    size = matrix.abs().max().clamp(min=1e-300)
    solved: Tensor = torch.linalg.pinv(matrix / size, hermitian=True) @ (value / size)
    return solved


def by_regression(masked: Tensor, alpha: Tensor, y: Tensor, directions: Tensor) -> Estimate:
    """Regress the error of masked outputs yhat [n, C] on alpha [n], with labels y [n, C] and directions d [m, C].

    Least squares without intercept: c = sum alpha d^T (yhat - ybar) / (||d||^2 sum alpha^2) with one direction. Its
    error is the regression of the true error y - ybar on alpha: sum alpha (y - ybar) is a derivative of the loss by the
    head's weights, so that it vanishes where training is stationary, whatever the size of the mask.
    """
    power = alpha.square().sum()
    slope = (alpha[:, None] * (masked - y)).sum(0) / power
    left = _left(directions)
    coefficients = left @ slope
    error = (masked - y - alpha[:, None] * (coefficients @ directions)) @ left.T
    spread = error.T @ error / max(len(y) - 1, 1) / power
    return Estimate(coefficients, spread, len(y) * float(spread.diagonal().mean()))


def by_rows(weight: Tensor, directions: Tensor) -> Estimate:
    """Locate the columns of the head's perturbed weight [C, D]: column j is W_j / r_j + r, so r is where they lie.

    Location and scatter of a multivariate t law by iterated reweighting: it ignores columns that a small r_j blew up,
    and weighs directions [m, C] by how little the true columns vary along them. Its error is measured to be about half
    that of the medians of the rows.
    """
    classes, width = weight.shape
    coefficients = _left(directions) @ weight.median(1).values
    scatter, share = weight.new_zeros(classes, classes), weight.new_ones(width)
    for _ in range(STEPS):
        rest = weight - (coefficients @ directions)[:, None]
        scatter = (rest * share) @ rest.T / width
        scatter = scatter + RIDGE * scatter.diagonal().mean() * torch.eye(classes).to(weight)
        share = (classes + TAIL) / (TAIL + (rest * solve(scatter, rest)).sum(0))
        if not bool(share.isfinite().all()):
            break
        precise = solve(scatter, directions.T) if bool(scatter.any()) else directions.T
        center = (weight * share).sum(1) / share.sum()
        coefficients = solve(directions @ precise, precise.T @ center)
    spread = torch.linalg.multi_dot([_left(directions), scatter, _left(directions).T]) / share.sum()
    return Estimate(coefficients, spread)


def combined(own: Estimate, rows: Estimate) -> Tensor:
    """Return coefficients [m] from labelled examples and from the head's columns together.

    The first may be biased where training is not stationary, the second is imprecise. A bias variance is read off
    their distance, as far as their own variances do not explain it and the size of the errors y - ybar allows it; then
    each counts by its precision. On trained iterates that is the regression; at initialization it leans to the columns.
    """
    distance, doubt = own.coefficients - rows.coefficients, DOUBT * rows.covariance
    excess = (distance.square() - doubt.diagonal() - own.covariance.diagonal()).mean().clamp(min=0, max=own.bias)
    total = doubt + own.covariance + excess * torch.eye(len(distance), dtype=distance.dtype)
    return rows.coefficients + doubt @ solve(total, distance)


def surprise(coefficients: Tensor, rows: Estimate) -> float:
    """Return how many standard deviations (root mean square) `coefficients` lie from where the columns say."""
    distance = coefficients - rows.coefficients
    return float((distance @ solve(rows.covariance, distance) / len(distance)).clamp(min=0).sqrt())


def by_projection(masked: Tensor, direction: Tensor, y: Tensor | None = None) -> Tensor:
    """Return outputs [n, C] that are exact across the public direction; along it they are as the labels have it.

    (I - d d^T / ||d||^2) yhat holds no mask, for yhat [n, C], C > 1, and the public d [C]. Along d nothing is known, so
    that entry is taken from the label: of y [n, C] (the loss then counts C - 1 directions), or of the class whose
    one-hot target is nearest in the others.
    """
    unit: Tensor = direction / direction.norm()

    def across(rows: Tensor) -> Tensor:
        return rows - torch.outer(rows @ unit, unit)

    known = across(masked)
    if y is None:
        targets = torch.eye(len(direction), dtype=masked.dtype)
        y = targets[torch.cdist(known, across(targets)).nan_to_num(nan=torch.inf).argmin(1)]
    return known + torch.outer(y @ unit, unit)


def _left(directions: Tensor) -> Tensor:
    """Return [m, C] that gives c from r = sum_k c_k d_k."""
    return solve(directions @ directions.T, directions)
