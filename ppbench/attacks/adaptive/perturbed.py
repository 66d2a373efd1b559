"""Perturbed models (PBPFL, MP-DP): estimate the mask on the logits, then query the true outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge
from ppbench.attacks.extraction import MASKED, Query
from ppbench.attacks.membership.model_queries import client_outputs, last_model, model_outputs
from ppbench.attacks.membership.outputs import LossThreshold
from ppbench.base.tree import Params, moved, tree_map
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation
from ppbench.defenses.mpdp.protocol import MPDPH
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS_NAME, HEAD_WEIGHT, Perturbed, Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL, PBPFLExt
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.channels import channels_of

# -- The additive mask that PBPFL and MP-DP put on a network's logits, estimated from public values or a party's own
# data --
# A party computes yhat = y + alpha r at the perturbed weights, where y are the true logits, alpha the sum of the
# head's inputs (which it knows) and r [C] the mask. Of r it knows the directions: r = sum_k c_k d_k, with one public
# direction (PBPFL, one secret coefficient gamma) or the unit vectors (MP-DP, one secret a class). The c_k are
# estimated, float64.

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


def homogeneous_product(plan: Plan, tree: Params, params: Params) -> Tensor:
    """Return the sum [...] of <gradient, parameter> where features are jointly homogeneous of degree one.

    Those are weights where they read the input, biases and the affine part of norms (up to a norm's eps). Gradients
    `tree` are [..., *shape].
    """
    total = torch.zeros(())
    for name, factor in channels_of(plan.spec, "affine").factors.items():
        raw = None if factor.inp is None else torch.from_numpy(np.asarray(factor.inp == 0))  # inputs of the network
        if factor.out is None or (raw is not None and not bool(raw.any())):
            continue
        value = params[name].double()
        product = tree[name].double() * value
        if raw is not None and not bool(raw.all()):
            product = product * raw.view(-1, *[1] * (value.dim() - 2))
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


# -- True outputs from masked ones, for the parties of PBPFL and MP-DP --
# Feng et al. (2020), Lemma 3, and Yang et al. (2024), Theorem 7, argue that infinitely many masks explain one masked
# output. That holds for one input without a label; each function here uses more, and returns outputs for any input.
# A delivered or undefended model carries no mask: its outputs are returned unchanged.

REGRESSIONS = 10
"""Regressions on predicted labels, at most."""
COLLAPSE_DISTANCE = 5.0
"""Predicted labels that lead further than this from the columns' estimate have collapsed onto one class."""


@dataclass(frozen=True)
class Broadcast:
    """A masked model as a party received it. message: float64, on CPU."""

    view: View
    message: Perturbed

    @property
    def directions(self) -> Tensor:
        """The mask's directions [m, C]: the public one, or the unit vectors."""
        public = self.message.direction
        return public[None] if len(public) else torch.eye(self.view.plan.spec.classes, dtype=torch.float64)

    @property
    def masked_bias(self) -> bool:
        """Whether the head's bias carries the mask."""
        return isinstance(self.view.defense, PBPFL) and self.view.defense.bias_masked

    @property
    def rows(self) -> MaskEstimate:
        """The estimate of the mask from the head's columns."""
        return by_rows(self.message.params[HEAD_WEIGHT], self.directions)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return masked outputs [Q, C] and alpha [Q] of x, float64: `predict` with the head as it is, and of ones."""
        params = dict(self.message.params)
        masked = client_outputs(self.view, self.message, x)
        params[HEAD_WEIGHT] = torch.ones_like(params[HEAD_WEIGHT])
        if HEAD_BIAS_NAME in params:
            params[HEAD_BIAS_NAME] = torch.full_like(params[HEAD_BIAS_NAME], float(self.masked_bias))
        return masked, client_outputs(self.view, replace(self.message, params=params), x)[:, 0]

    def without(self, coefficients: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [Q, C] of x less the mask sum_k c_k d_k."""
        masked, alpha = self.outputs(x)
        return masked - alpha[:, None] * (coefficients @ self.directions)


Unmask = Callable[[Broadcast, Tensor, Tensor | None], Tensor]
"""Broadcast, inputs [Q, *shape] and their labels [Q, C] (or None) to outputs [Q, C] float64, on CPU; NaN for none."""


def unmasked_outputs(view: View, x: Tensor, unmask: Unmask, labels: Tensor | None = None) -> Tensor:
    """Return the outputs that `unmask` makes of the last model received, or the outputs of a model without a mask."""
    broadcast = received(view)
    return model_outputs(view, x) if broadcast is None else unmask(broadcast, x, labels)


def received(view: View) -> Broadcast | None:
    """Return the last model received if it is masked."""
    message = last_model(view)
    if not isinstance(message, Perturbed):
        return None
    return Broadcast(view, tree_map(lambda t: t.detach().double().cpu(), message))


def own_regression(broadcast: Broadcast, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return outputs [Q, C] less the mask estimated from a client's own labelled data."""
    return broadcast.without(from_own_data(broadcast), x)


def from_own_data(broadcast: Broadcast) -> Tensor:
    """Return coefficients [m] by regression on the party's own data, or from the head's columns if it has none."""
    data = [d for _, d in broadcast.view.data if len(d.x)]
    if not data:
        return broadcast.rows.coefficients
    masked, alpha = broadcast.outputs(torch.cat([d.x for d in data]).cpu())
    y = torch.cat([d.y for d in data]).cpu().double()
    return combined(by_regression(masked, alpha, y, broadcast.directions), broadcast.rows)


def projection(broadcast: Broadcast, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return outputs [Q, C] across the public direction, completed by labels; NaN for C = 1; secret: `data_free`."""
    public = broadcast.message.direction
    if not len(public):
        return data_free(broadcast, x)
    masked, _ = broadcast.outputs(x)
    if len(public) == 1 or not bool(public.norm() > 0):
        return torch.full_like(masked, torch.nan)
    return by_projection(masked, public, None if labels is None else labels.double().cpu())


def data_free(broadcast: Broadcast, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return outputs [Q, C] less the columns' estimate of the mask, refined on predicted labels that don't collapse."""
    masked, alpha = broadcast.outputs(x)
    rows, directions, classes = broadcast.rows, broadcast.directions, masked.shape[1]
    coefficients, before = rows.coefficients, None
    for _ in range(REGRESSIONS if classes > 1 else 0):
        guess = (masked - alpha[:, None] * (coefficients @ directions)).argmax(1)
        if before is not None and torch.equal(guess, before):
            break
        coefficients = by_regression(masked, alpha, one_hot(guess, classes).double(), directions).coefficients
        before = guess
    if not surprise(coefficients, rows) <= COLLAPSE_DISTANCE:  # NaN too
        coefficients = rows.coefficients
    return masked - alpha[:, None] * (coefficients @ directions)


def upload_identities(broadcast: Broadcast, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return outputs [Q, C] less the mask estimated from all surrogate gradients seen, by Euler's identities."""
    moments, directions = upload_moments(broadcast), broadcast.directions
    if not moments:
        return own_regression(broadcast, x)
    slope = torch.stack([m.error for m in moments]).sum(0) / torch.stack([m.square for m in moments]).sum()
    return broadcast.without(solve(directions @ directions.T, slope), x)


def upload_moments(broadcast: Broadcast) -> list[Moments]:
    """Return the moments of every readable upload that answers the broadcast, on the CPU as the broadcast is."""
    view, params, moments = broadcast.view, broadcast.message.params, []
    uploads = [
        moved(e.answer, torch.device("cpu"))
        for e in view.exchanges()
        if isinstance(e.answer, Surrogates)
        and isinstance(e.request, Perturbed)
        and torch.equal(e.request.params[HEAD_WEIGHT].double().cpu(), params[HEAD_WEIGHT])
    ]
    for one in readable_uploads(view, uploads):
        if isinstance(view.defense, ModelPerturbation):
            moments.append(noiseless_moments(view.plan, one, params))
        else:
            moments.append(exact_moments(view.plan, one, params, broadcast.directions, broadcast.masked_bias))
    return [m for m in moments if bool(m.square > 0)]


def readable_uploads(view: View, uploads: list[Surrogates]) -> list[Surrogates]:
    """Return the surrogates that can be read without a secret: each client's, or their mean where only sums can."""
    if not isinstance(view.defense, PBPFLExt | MPDPH):
        return uploads
    if len(uploads) != view.plan.clients:
        return []
    return [view.defense.total(uploads) if isinstance(view.defense, PBPFLExt) else view.defense.mean(uploads)]


# -- The true model's outputs from masked iterates --


@dataclass(frozen=True)
class UnmaskedExtraction(Query):
    """Answers with the outputs that `unmask` makes of the masked ones."""

    adaptive: ClassVar[bool] = True
    reference: ClassVar[str] = "this project; derived from the protocols of Feng et al. 2020 and Yang et al. 2024"
    unmask: ClassVar[Unmask]

    def outputs(self, view: View, x: Tensor) -> Tensor:
        """Return the un-masked outputs [Q, C] float64 of the queries."""
        return unmasked_outputs(view, x, type(self).unmask)


class ExtractRegression(UnmaskedExtraction):
    """A client fits the mask on its own labelled data and subtracts it."""

    name: ClassVar[str] = "extract_regression"
    unmask: ClassVar[Unmask] = staticmethod(own_regression)


class ExtractProjection(UnmaskedExtraction):
    """Completes the outputs across the public direction by the nearest one-hot target; see `by_projection`."""

    name: ClassVar[str] = "extract_projection"
    unmask: ClassVar[Unmask] = staticmethod(projection)


class ExtractDataFree(UnmaskedExtraction):
    """Reads the mask off the columns of the head's weight; needs no data but the queries."""

    name: ClassVar[str] = "extract_data_free"
    unmask: ClassVar[Unmask] = staticmethod(data_free)


class ExtractUpload(UnmaskedExtraction):
    """Reads the mask off surrogate gradients: those of all clients for a listener, its own for a client."""

    name: ClassVar[str] = "extract_upload"
    unmask: ClassVar[Unmask] = staticmethod(upload_identities)
    threats: ClassVar[tuple[str, ...]] = ("eavesdropper/1", "client/1")


# -- Membership inference on masked iterates by attackers that remove the mask first (PBPFL, MP-DP and variants) --


@dataclass(frozen=True)
class Unmasked(LossThreshold):
    """A record is a member if its loss is small in the outputs that `unmask` makes of the masked ones."""

    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = MASKED
    reference: ClassVar[str] = "this project; loss threshold of Yeom et al. 2018 on un-masked outputs"
    unmask: ClassVar[Unmask]

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the un-masked outputs [Q, C] float64 of the candidates."""
        assert challenge.x is not None  # `run` has checked
        return unmasked_outputs(view, challenge.x, type(self).unmask, challenge.labels)


class UnmaskRegression(Unmasked):
    """A client fits the mask on its own labelled data, by least squares, and subtracts it."""

    name: ClassVar[str] = "unmask_regression"
    unmask: ClassVar[Unmask] = staticmethod(own_regression)


class UnmaskProjection(Unmasked):
    """Uses the outputs across the mask's public direction only: nothing is estimated.

    Where the direction is secret (MP-DP with one coefficient per class), as `unmask_data_free`. With one output nothing
    remains and every decision is random.
    """

    name: ClassVar[str] = "unmask_projection"
    unmask: ClassVar[Unmask] = staticmethod(projection)


class UnmaskDataFree(Unmasked):
    """Reads the mask off the columns of the head's weight; needs no data but the inputs in question."""

    name: ClassVar[str] = "unmask_data_free"
    unmask: ClassVar[Unmask] = staticmethod(data_free)


class UnmaskUpload(Unmasked):
    """Reads the mask off surrogate gradients: those of all clients for a listener, its own for a client."""

    name: ClassVar[str] = "unmask_upload"
    unmask: ClassVar[Unmask] = staticmethod(upload_identities)
    threats: ClassVar[tuple[str, ...]] = ("eavesdropper/1", "client/1")
