"""Perturbs a model so that clients can train on it but not read it, and recovers gradients from their surrogates.

Feng et al. (2020), Eq. 6-19, and Yang et al. (2024), Eq. 12-22. Hidden layers are scaled channel by channel, the head
gets a column-constant additive mask r, so that logits become y + alpha r with alpha the sum of the head's inputs. The
gradient of the true loss is a polynomial in r of gradients that a client can compute without knowing r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.autodiff import gradients
from ppbench.base.tree import Params, node
from ppbench.federation.cohort import cohorts
from ppbench.federation.plan import Batch
from ppbench.federation.view import Exchange, View
from ppbench.nets.net import Net

HEAD_BIAS_NAME = "head.bias"
HEAD_WEIGHT = "head.weight"


@node
class Perturbed:
    """Server to client, every round. params: perturbed weights; direction: r_a [C] (PBPFL, scalar gamma) or [0]."""

    params: Params
    direction: Tensor


@node
class Released:
    """Server to client at the end. params: weights with hidden scales, no additive mask: true outputs."""

    params: Params


@node
class Surrogates:
    """Client to server: gradients at the perturbed weights of the three surrogate losses, batch means.

    g: of the squared loss, like the parameters. sigma: [m, ...] of mean alpha d_k^T (yhat - ybar), one row per
    direction d_k (m = 1: r_a; m = C: the unit vectors). beta: of mean alpha^2 / 2.
    """

    g: Params
    sigma: Params
    beta: Params


def multiply(params: Params, multiplier: Params, dtype: torch.dtype) -> Params:
    """Return the weights with hidden scales, in `dtype`; parameters without a multiplier are copied."""
    scaled = {}
    for name, value in params.items():
        factor = multiplier.get(name)
        scaled[name] = value.to(dtype).clone() if factor is None else value.to(dtype) * factor.to(dtype)
    return scaled


def mask(params: Params, r: Tensor, masked_bias: bool) -> Params:
    """Return `params` with r [C] added to every column of the head's weight and, if `masked_bias`, to its bias."""
    out = dict(params)
    out[HEAD_WEIGHT] = params[HEAD_WEIGHT] + r[:, None]
    if masked_bias and HEAD_BIAS_NAME in params:
        out[HEAD_BIAS_NAME] = params[HEAD_BIAS_NAME] + r
    return out


def outputs(net: Net, params: Params, x: Tensor, masked_bias: bool) -> tuple[Tensor, Tensor]:
    """Return masked logits yhat [B, C] and alpha [B], the sum of the head's inputs (and of the bias's 1 if masked)."""
    features = net.features(params, x)
    alpha = features.sum(1)
    if masked_bias and HEAD_BIAS_NAME in params:
        alpha = alpha + 1
    return net.head(params, features), alpha


def surrogates(
    net: Net, params: Params, batch: Batch, directions: Tensor, masked_bias: bool, constants: Params | None = None
) -> Surrogates:
    """Return the gradients of the surrogate losses on one batch (without the axis T), at perturbed weights `params`.

    With yhat = y + alpha r, 1/2 ||y - ybar||^2 = 1/2 ||yhat - ybar||^2 - alpha r^T (yhat - ybar) + r^T r alpha^2 / 2,
    pointwise, so the gradient of the true loss is the same combination of the three gradients (m + 2 backward passes).
    directions: [m, C]. constants: parameters without gradients (transitional layers).
    """
    dtype = directions.dtype
    x, y, w = batch.x.to(dtype), batch.y.to(dtype), batch.w.to(dtype)
    w = w / w.sum().clamp(min=1e-12)

    def losses(p: Params) -> Tensor:
        logits, alpha = outputs(net, {**p, **(constants or {})}, x, masked_bias)
        error = logits - y
        loss = (w * 0.5 * (error**2).sum(-1)).sum()
        mixed = (w * alpha) @ (error @ directions.T)
        return torch.cat([loss[None], mixed, (w * 0.5 * alpha**2).sum()[None]])

    first, *middle, last = gradients(losses, params, len(directions) + 2)
    return Surrogates(first, {n: torch.stack([m[n] for m in middle]) for n in params}, last)


def combine(surrogates: Surrogates, coefficients: Tensor, square: Tensor) -> Params:
    """Return g - sum_k c_k sigma_k + square beta: the true loss's gradient at the perturbed weights (PBPFL, Eq. 19).

    coefficients: [m] c with r = sum_k c_k d_k of the clients' directions. square: r^T r. Of one client, or of a mean.
    """
    if len(coefficients) == 1:  # a product is ten times as fast as a contraction of one
        return {
            n: g - coefficients[0] * surrogates.sigma[n][0] + square * surrogates.beta[n]
            for n, g in surrogates.g.items()
        }
    return {
        n: g - torch.tensordot(coefficients, surrogates.sigma[n], 1) + square * surrogates.beta[n]
        for n, g in surrogates.g.items()
    }


def unscale(gradient: Params, multiplier: Params, like: Params) -> Params:
    """Return the gradient of the parameters of `like` at the true weights: the multiplier times the perturbed one.

    A bias that was expanded to one value per channel gets the sum over its channels.
    """
    out = {}
    for name, value in like.items():
        factor = multiplier.get(name)
        full = gradient[name] if factor is None else factor.to(gradient[name]) * gradient[name]
        out[name] = full.sum_to_size(value.shape)
    return out


def exchanges(view: View) -> list[Exchange]:
    """Return the view's uploads of surrogates; none for a client, which sees only its own."""
    if not view.threat.sees_uploads:
        return []
    return [e for e in view.exchanges() if isinstance(e.request, Perturbed) and isinstance(e.answer, Surrogates)]


def whole_cohorts(view: View) -> list[list[Exchange]]:
    """Return the uploads of surrogates of every probe in which all clients took part."""
    return cohorts(exchanges(view), view.plan.clients)
