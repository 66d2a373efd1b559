"""True outputs from masked ones: what the parties of PBPFL and MP-DP make of a broadcast (estimators: mask_estimators).

Feng et al. (2020), Lemma 3, and Yang et al. (2024), Theorem 7, argue that infinitely many masks explain one masked
output. That holds for one input without a label; each function here has more, and answers with outputs for any input.
A delivered model carries no mask: its outputs are returned as they are, as are those of an undefended one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.attacks.adaptive.mask_estimators import (
    Estimate,
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
from ppbench.attacks.membership.base import last_model, model_outputs, query
from ppbench.base.tree import moved, tree_map
from ppbench.defenses.mpdp.hardened import MPDPH
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation
from ppbench.defenses.pbpfl.extended import PBPFLExt
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS_NAME, HEAD_WEIGHT, Perturbed, Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation.view import View

ROUNDS = 10
"""Regressions on predicted labels, at most."""
FAR = 5.0
"""Predicted labels that lead further than this from what the head's columns say have collapsed onto one class."""


@dataclass(frozen=True)
class Broadcast:
    """A masked model in the hands of a party. message: float64, on CPU."""

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
    def rows(self) -> Estimate:
        """What the head's columns say about the mask."""
        return by_rows(self.message.params[HEAD_WEIGHT], self.directions)

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return masked outputs [Q, C] and alpha [Q] of x, float64: `predict` with the head as it is, and of ones."""
        params = dict(self.message.params)
        masked = query(self.view, self.message, x)
        params[HEAD_WEIGHT] = torch.ones_like(params[HEAD_WEIGHT])
        if HEAD_BIAS_NAME in params:
            params[HEAD_BIAS_NAME] = torch.full_like(params[HEAD_BIAS_NAME], float(self.masked_bias))
        return masked, query(self.view, replace(self.message, params=params), x)[:, 0]

    def without(self, coefficients: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [Q, C] of x less the mask sum_k c_k d_k."""
        masked, alpha = self.outputs(x)
        return masked - alpha[:, None] * (coefficients @ self.directions)


Unmask = Callable[[Broadcast, Tensor, Tensor | None], Tensor]
"""Broadcast, inputs [Q, *shape] and their labels [Q, C] (or None) to outputs [Q, C] float64, on CPU; NaN for none."""


def unmasked(view: View, x: Tensor, unmask: Unmask, labels: Tensor | None = None) -> Tensor:
    """Return what `unmask` makes of the last model received; of one without a mask its outputs as they are."""
    broadcast = received(view)
    return model_outputs(view, x) if broadcast is None else unmask(broadcast, x, labels)


def received(view: View) -> Broadcast | None:
    """Return the last model received if it is masked."""
    message = last_model(view)
    if not isinstance(message, Perturbed):
        return None
    return Broadcast(view, tree_map(lambda t: t.detach().double().cpu(), message))


def own_regression(broadcast: Broadcast, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return outputs [Q, C] less the mask that a client's own labelled data show."""
    return broadcast.without(from_own_data(broadcast), x)


def from_own_data(broadcast: Broadcast) -> Tensor:
    """Return coefficients [m] by regression on the party's own data, or by the head's columns where it has none."""
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
    """Return outputs [Q, C] less the mask that columns show, refined on predicted labels unless these collapse."""
    masked, alpha = broadcast.outputs(x)
    rows, directions, classes = broadcast.rows, broadcast.directions, masked.shape[1]
    found, before = rows.coefficients, None
    for _ in range(ROUNDS if classes > 1 else 0):
        guess = (masked - alpha[:, None] * (found @ directions)).argmax(1)
        if before is not None and torch.equal(guess, before):
            break
        found = by_regression(masked, alpha, one_hot(guess, classes).double(), directions).coefficients
        before = guess
    if not surprise(found, rows) <= FAR:  # NaN too
        found = rows.coefficients
    return masked - alpha[:, None] * (found @ directions)


def upload(broadcast: Broadcast, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return outputs [Q, C] less the mask that all surrogate gradients in the mail show, by Euler's identities."""
    found, directions = moments(broadcast), broadcast.directions
    if not found:
        return own_regression(broadcast, x)
    slope = torch.stack([m.error for m in found]).sum(0) / torch.stack([m.square for m in found]).sum()
    return broadcast.without(solve(directions @ directions.T, slope), x)


def moments(broadcast: Broadcast) -> list[Moments]:
    """Return the moments of every upload that answers the broadcast and can be read, on the CPU as the broadcast is."""
    view, params, found = broadcast.view, broadcast.message.params, []
    uploads = [
        moved(e.answer, torch.device("cpu"))
        for e in view.exchanges()
        if isinstance(e.answer, Surrogates)
        and isinstance(e.request, Perturbed)
        and torch.equal(e.request.params[HEAD_WEIGHT].double().cpu(), params[HEAD_WEIGHT])
    ]
    for one in readable(view, uploads):
        if isinstance(view.defense, ModelPerturbation):
            found.append(noiseless_moments(view.plan, one, params))
        else:
            found.append(exact_moments(view.plan, one, params, broadcast.directions, broadcast.masked_bias))
    return [m for m in found if bool(m.square > 0)]


def readable(view: View, uploads: list[Surrogates]) -> list[Surrogates]:
    """Return the surrogates that need no secret to be read: each client's, or their mean where only sums can be."""
    if not isinstance(view.defense, PBPFLExt | MPDPH):
        return uploads
    if len(uploads) != view.plan.clients:
        return []
    return [view.defense.total(uploads) if isinstance(view.defense, PBPFLExt) else view.defense.mean(uploads)]
