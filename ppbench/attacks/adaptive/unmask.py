"""True outputs from masked ones, for the parties of PBPFL and MP-DP (estimators: mask_estimators).

Feng et al. (2020), Lemma 3, and Yang et al. (2024), Theorem 7, argue that infinitely many masks explain one masked
output. That holds for one input without a label; each function here uses more, and returns outputs for any input.
A delivered or undefended model carries no mask: its outputs are returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.attacks.adaptive.mask_estimators import (
    MaskEstimate,
    Moments,
    by_projection,
    by_regression,
    by_rows,
    combined,
    exact_moments,
    noiseless_moments,
    solve,
    surprise,
)
from ppbench.attacks.membership.base import client_outputs, last_model, model_outputs
from ppbench.base.tree import moved, tree_map
from ppbench.defenses.mpdp.hardened import MPDPH
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation
from ppbench.defenses.pbpfl.extended import PBPFLExt
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS_NAME, HEAD_WEIGHT, Perturbed, Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation.view import View

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
