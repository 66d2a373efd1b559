"""What algebra leaves open about one example, its label and its scale, from the mismatch of the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

EXPLAINED = 1e-6
"""Relative mismatch below which a guess explains the observation: no other label is tried."""
FLAT = 1e-12
"""Relative mismatch that the rounding of a float32 observation leaves: what is below cannot be told from 0."""
GRID = 16
"""Scales looked at before the search between two of them."""
STEPS = 60
"""Evaluations of that search, at most."""


@dataclass(frozen=True)
class Match:
    """A guess of one example: image [D] float64, label, and its relative mismatch (inf where it is not finite)."""

    image: Tensor
    label: int
    mismatch: float


class Mismatch:
    """The discrepancy of one example relative to that of an all-zero simulation, with a limit on the evaluations."""

    def __init__(self, evidence: Evidence, plan: Plan, budget: int) -> None:
        self.evidence = evidence
        self.plan = plan
        self.budget = budget
        self.spent = 0
        self.price = 2 if plan.spec.classes == 1 else 1
        self.scale = float(evidence.scale())
        self.nuisance = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in evidence.nuisance.items()}

    @property
    def left(self) -> int:
        """Evaluations that may still be spent."""
        return self.budget - self.spent

    def __call__(self, image: Tensor, label: int) -> float:
        """Return the mismatch of image [D] with a label; inf where it is not finite or the budget is spent.

        With one output the best target is solved for, from simulations at 0 and 1: the gradient is affine in it.
        """
        classes = self.plan.spec.classes
        if self.left < self.price:
            return math.inf
        if classes > 1:
            target = torch.nn.functional.one_hot(torch.tensor([label]), classes).double()
            value = self._relative(self._simulated(image, target))
        else:
            at0, at1 = (
                self._simulated(image, torch.full((1, 1), target, dtype=torch.float64)) for target in (0.0, 1.0)
            )
            value = self._relative(self._best_target(at0, at1))
        return value if math.isfinite(value) else math.inf

    def _simulated(self, image: Tensor, y: Tensor) -> Params:
        self.spent += 1
        x = image.double().view(1, 1, *self.plan.spec.shape)
        with torch.no_grad():
            return self.evidence.simulate(x, y[None], **self.nuisance)

    def _relative(self, simulated: Params) -> float:
        return float(self.evidence.discrepancy(simulated)) / self.scale if self.scale > 0 else math.inf

    def _best_target(self, at0: Params, at1: Params) -> Params:
        """Return at0 + t (at1 - at0) with the t that brings it nearest to the observation."""
        over = under = torch.zeros((), dtype=torch.float64)
        for name, value in at0.items():
            step = at1[name] - value
            weighted = step if self.evidence.weight is None else step * self.evidence.weight[name].double()
            over = over + (weighted * (self.evidence.observed[name].double() - value)).sum()
            under = under + (weighted * step).sum()
        t = over / under.clamp(min=1e-300)
        return {name: value + t * (at1[name] - value) for name, value in at0.items()}


def best_label(mismatch: Mismatch, image: Tensor, label: int, granted: bool) -> Match:
    """Return the match of a known image with `label`, or if that is not `granted` with the class that explains best."""
    best = Match(image, label, mismatch(image, label))
    if granted or best.mismatch <= EXPLAINED:
        return best
    others = [Match(image, c, mismatch(image, c)) for c in range(mismatch.plan.spec.classes) if c != label]
    return min([best, *others], key=lambda match: match.mismatch)


def best_scale(mismatch: Mismatch, image: Tensor, labels: Sequence[int]) -> Match:
    """Return the multiple of `image` [D], in the data range, and the label among `labels` of least mismatch.

    A grid over scales, signs and labels from the end of the range down, then a bounded scalar search around the best.
    """
    low, high = mismatch.plan.data_range
    unit = image / image.abs().max()
    end = max(abs(low), abs(high)) or 1.0
    best, step = Match(unit * 0, labels[0], math.inf), end / GRID
    place = 0.0
    for label in labels:
        for sign in _signs(unit, low, high):
            for k in range(GRID, 0, -1):
                value = mismatch(sign * k * step * unit, label)
                if value < best.mismatch and best.mismatch > FLAT:
                    place, best = sign * k * step, Match(sign * k * step * unit, label, value)
    if not FLAT < best.mismatch < math.inf or mismatch.left < mismatch.price:
        return best
    found = minimize_scalar(
        lambda scale: min(mismatch(scale * unit, best.label), 1e300),  # past the budget: no reason to go there
        bounds=(place - step, place + step),
        method="bounded",
        options={"xatol": 1e-12 * end, "maxiter": min(STEPS, mismatch.left // mismatch.price)},
    )
    if found.fun < best.mismatch:
        return Match(float(found.x) * unit, best.label, float(found.fun))
    return best


def _signs(unit: Tensor, low: float, high: float) -> tuple[float, ...]:
    """Return the signs that a direction may have: one where all data are on one side of 0."""
    up = 1.0 if float(unit.sum()) >= 0 else -1.0
    if low >= 0:
        return (up,)
    return (-up,) if high <= 0 else (up, -up)
