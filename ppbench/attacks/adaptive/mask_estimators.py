"""The additive mask that PBPFL and MP-DP put on a network's logits, estimated from public values or a party's own data.

A party computes yhat = y + alpha r at the perturbed weights, where y are the true logits, alpha the sum of the head's
inputs (which it knows) and r [C] the mask. Of r it knows the directions: r = sum_k c_k d_k, with one public direction
(PBPFL, one secret coefficient gamma) or the unit vectors (MP-DP, one secret a class). The c_k are estimated, float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS_NAME, HEAD_WEIGHT, Surrogates
from ppbench.federation.plan import Plan
from ppbench.nets.walk import channels_of

LOCATION_STEPS = 30
"""Reweightings of the location of the head's columns."""
TAIL = 2.0
"""Degrees of freedom of its t law: columns differ in scale by the hidden factor 1 / r_j."""
COVARIANCE_RIDGE = 1e-6
"""Added to a covariance, relative to its mean eigenvalue."""
COLUMN_DOUBT = 4.0
"""Factor on the variance of the head's location that its columns imply: they share an offset."""


@dataclass(frozen=True)
class MaskEstimate:
    """The mask's coefficients [m], the covariance [m, m] of their error, the largest plausible variance of a bias."""

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


def by_regression(masked: Tensor, alpha: Tensor, y: Tensor, directions: Tensor) -> MaskEstimate:
    """Regress the error of masked outputs yhat [n, C] on alpha [n], with labels y [n, C] and directions d [m, C].

    Least squares without intercept: c = sum alpha d^T (yhat - ybar) / (||d||^2 sum alpha^2) with one direction. Its
    error is the regression of the true error y - ybar on alpha: sum alpha (y - ybar) is a derivative of the loss by the
    head's weights, so that it vanishes where training is stationary, for any size of the mask.
    """
    power = alpha.square().sum()
    slope = (alpha[:, None] * (masked - y)).sum(0) / power
    left = _left(directions)
    coefficients = left @ slope
    error = (masked - y - alpha[:, None] * (coefficients @ directions)) @ left.T
    spread = error.T @ error / max(len(y) - 1, 1) / power
    return MaskEstimate(coefficients, spread, len(y) * float(spread.diagonal().mean()))


def by_rows(weight: Tensor, directions: Tensor) -> MaskEstimate:
    """Locate the columns of the head's perturbed weight [C, D]: column j is W_j / r_j + r, so r is where they lie.

    By a multivariate t law, reweighted: columns blown up by a small r_j count little, as do directions [m, C] in which
    the true columns vary. Its error is measured to be about half that of the rows' medians.
    """
    classes, width = weight.shape
    coefficients = _left(directions) @ weight.median(1).values
    scatter, share = weight.new_zeros(classes, classes), weight.new_ones(width)
    for _ in range(LOCATION_STEPS):
        rest = weight - (coefficients @ directions)[:, None]
        scatter = (rest * share) @ rest.T / width
        scatter = scatter + COVARIANCE_RIDGE * scatter.diagonal().mean() * torch.eye(classes).to(weight)
        share = (classes + TAIL) / (TAIL + (rest * solve(scatter, rest)).sum(0))
        if not bool(share.isfinite().all()):
            break
        precise = solve(scatter, directions.T) if bool(scatter.any()) else directions.T
        center = (weight * share).sum(1) / share.sum()
        coefficients = solve(directions @ precise, precise.T @ center)
    spread = torch.linalg.multi_dot([_left(directions), scatter, _left(directions).T]) / share.sum()
    return MaskEstimate(coefficients, spread)


def combined(own: MaskEstimate, rows: MaskEstimate) -> Tensor:
    """Return coefficients [m] from labelled examples (biased during training) and the head's columns (imprecise).

    Each counts by its precision, with the bias variance that explains their distance beyond their own variances.
    """
    distance, doubt = own.coefficients - rows.coefficients, COLUMN_DOUBT * rows.covariance
    excess = (distance.square() - doubt.diagonal() - own.covariance.diagonal()).mean().clamp(min=0, max=own.bias)
    total = doubt + own.covariance + excess * torch.eye(len(distance), dtype=distance.dtype)
    return rows.coefficients + doubt @ solve(total, distance)


def surprise(coefficients: Tensor, rows: MaskEstimate) -> float:
    """Return the distance of `coefficients` from the columns' estimate, in standard deviations (root mean square)."""
    distance = coefficients - rows.coefficients
    return float((distance @ solve(rows.covariance, distance) / len(distance)).clamp(min=0).sqrt())


def by_projection(masked: Tensor, direction: Tensor, y: Tensor | None = None) -> Tensor:
    """Return outputs [n, C] that are exact across the public direction; along it they are those of the labels.

    (I - d d^T / ||d||^2) yhat holds no mask, for yhat [n, C], C > 1, and the public d [C]. Along d nothing is known:
    that component is the label's in y [n, C] (the loss then counts C - 1 directions), or that of the one-hot target
    nearest in the others.
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


def homogeneous_params(plan: Plan) -> dict[str, Tensor | None]:
    """Return by name the parameters in which the features are jointly homogeneous of degree one.

    Those are weights where they read the input, biases and the affine part of norms (up to a norm's eps). None for a
    whole parameter, or [inputs] bool: which of a weight's inputs (its axis 1) are the network's.
    """
    parts: dict[str, Tensor | None] = {}
    for name, factor in channels_of(plan.spec, "affine").factors.items():
        if factor.out is None:
            continue
        raw = None if factor.inp is None else torch.from_numpy(np.asarray(factor.inp == 0))
        if raw is None or bool(raw.any()):
            parts[name] = None if raw is None or bool(raw.all()) else raw
    return parts


def homogeneous_product(plan: Plan, tree: Params, params: Params) -> Tensor:
    """Return the sum [...] over `homogeneous_params` of <gradient, parameter>; gradients `tree` are [..., *shape]."""
    total = torch.zeros(())
    for name, part in homogeneous_params(plan).items():
        value = params[name].double()
        product = tree[name].double() * value
        if part is not None:
            product = product * part.view(-1, *[1] * (value.dim() - 2))
        lead = product.dim() - value.dim()
        total = total + (product.flatten(lead).sum(-1) if value.dim() else product)
    return total


@dataclass(frozen=True)
class Moments:
    """Means over a batch, times a common factor: alpha^2, [m] alpha d_k^T (yhat - ybar), [m] alpha d_k^T ybar."""

    square: Tensor
    error: Tensor
    labels: Tensor


def exact_moments(plan: Plan, upload: Surrogates, params: Params, directions: Tensor, masked_bias: bool) -> Moments:
    """Return the moments where g is exact: the sum of its head's columns is mean (yhat - ybar) alpha, in all entries.

    `upload` is of one client, or the mean over clients, at the perturbed weights `params`. A masked head bias has
    alpha = 1 + sum of features; sigma's own head bias is d mean alpha, with directions d [m, C].
    """
    error, square = upload.g[HEAD_WEIGHT].double().sum(1), homogeneous_product(plan, upload.beta, params)
    if masked_bias and HEAD_BIAS_NAME in params:
        error = error + upload.g[HEAD_BIAS_NAME].double()
        mean = (upload.sigma[HEAD_BIAS_NAME].double() * directions).sum() / directions.square().sum()
        square = square + mean
    return Moments(square, directions @ error, torch.full((len(directions),), torch.nan, dtype=torch.float64))


def noiseless_moments(plan: Plan, upload: Surrogates, params: Params) -> Moments:
    """Return the moments from sigma and beta alone, of a network without biases: two degrees, two equations."""
    both, square = homogeneous_product(plan, upload.sigma, params), homogeneous_product(plan, upload.beta, params)
    outputs = (upload.sigma[HEAD_WEIGHT].double() * params[HEAD_WEIGHT].double()).flatten(1).sum(1)
    return Moments(square, both - outputs, 2 * outputs - both)
