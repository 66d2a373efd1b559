"""What one upload of surrogate gradients tells by Euler's identity: means over the batch that no one sent.

Scale the weights that read the input, and all biases, by a common factor: the features of a positively homogeneous
network are scaled by it. So the inner product of those parameters with the gradient of a function of the features is
the function's degree times the function. Gradients at the perturbed weights thus tell mean alpha^2, mean alpha yhat and
mean alpha ybar there, without the batch. (A masked head bias adds the constant 1 to alpha.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS, HEAD_WEIGHT, Surrogates
from ppbench.federation.plan import Plan
from ppbench.nets.walk import channels


def sources(plan: Plan) -> dict[str, Tensor | None]:
    """Return by name the parameters in which the features are jointly homogeneous of degree one.

    Those are weights where they read the input, biases and the affine part of norms (up to a norm's eps). None for a
    whole parameter, or [inputs] bool: which of a weight's inputs (its axis 1) are the network's.
    """
    found: dict[str, Tensor | None] = {}
    for name, factor in channels(plan.spec, "affine").factors.items():
        if factor.out is None:
            continue
        raw = None if factor.inp is None else torch.from_numpy(np.asarray(factor.inp == 0))
        if raw is None or bool(raw.any()):
            found[name] = None if raw is None or bool(raw.all()) else raw
    return found


def inner(plan: Plan, tree: Params, params: Params) -> Tensor:
    """Return sum over `sources` of <gradient, parameter>: [...] for gradients `tree` [..., *shape] at `params`."""
    total = torch.zeros(())
    for name, part in sources(plan).items():
        value = params[name].double()
        product = tree[name].double() * value
        if part is not None:
            product = product * part.view(-1, *[1] * (value.dim() - 2))
        lead = product.dim() - value.dim()
        total = total + (product.flatten(lead).sum(-1) if value.dim() else product)
    return total


@dataclass(frozen=True)
class Moments:
    """Means over a batch, in units of the upload's common factor.

    square: mean alpha^2; error: [m] mean alpha d_k^T (yhat - ybar); labels: [m] mean alpha d_k^T ybar, NaN where the
    network has biases.
    """

    square: Tensor
    error: Tensor
    labels: Tensor


def exact_moments(plan: Plan, found: Surrogates, params: Params, directions: Tensor, masked_bias: bool) -> Moments:
    """Return the moments where g is exact: the sum of its head's columns is mean (yhat - ybar) alpha, in all entries.

    `found` is of one client, or the mean over clients, taken at the perturbed weights `params`. A masked head bias has
    alpha = 1 + sum of features; sigma's own head bias is d mean alpha, with directions d [m, C].
    """
    error, square = found.g[HEAD_WEIGHT].double().sum(1), inner(plan, found.beta, params)
    if masked_bias and HEAD_BIAS in params:
        error = error + found.g[HEAD_BIAS].double()
        mean = (found.sigma[HEAD_BIAS].double() * directions).sum() / directions.square().sum()
        square = square + mean
    return Moments(square, directions @ error, torch.full((len(directions),), torch.nan, dtype=torch.float64))


def noiseless_moments(plan: Plan, found: Surrogates, params: Params) -> Moments:
    """Return the moments from sigma and beta alone, of a network without biases (MP-DP sends only g with noise).

    alpha d^T yhat is of degree two in the sources and of degree one in the head's weight, alpha d^T ybar of one and
    none: two equations.
    """
    both, square = inner(plan, found.sigma, params), inner(plan, found.beta, params)
    outputs = (found.sigma[HEAD_WEIGHT].double() * params[HEAD_WEIGHT].double()).flatten(1).sum(1)
    return Moments(square, both - outputs, 2 * outputs - both)
