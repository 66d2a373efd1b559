"""Gradient matching for many victims: find the batch whose simulated update is the observed one.

Every attack that "makes simulate match observed" runs through `match_gradients`: it takes Evidence, chooses the fast
chain where the network allows and autograd elsewhere, adds a prior where there is one, and minimizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.search.lbfgs import Function, Reason, Settings, minimize
from ppbench.attacks.reconstruction.search.objectives import Mappable, Objective, objective
from ppbench.attacks.reconstruction.search.objectives import SimulatedObjective as SimulatedObjective
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

Prior = Callable[[Tensor], Tensor]
"""Images [S, N, *shape] to a differentiable penalty [S]."""

LOGIT = 4.0
"""Unit in which unknown logits are searched: they travel about ten times as far as pixels do. Saves a quarter of the
evaluations on the LeNet of the DLG release (eight CIFAR-10 images, joint label, stop 1e-5)."""


@dataclass(frozen=True)
class Starts:
    """Points in the space of unknowns of V victims: where a search begins, or where it ended.

    Attributes:
        x: images [V, N, *shape], N examples each, all slots of a unit together. Its dtype is that of the search.
        y: fixed labels [V, N, C] (soft ones too), or logits of unknown labels when `joint`.
        joint: whether labels are unknowns: softmax of the logits, or (C = 1) the number itself.
        nuisance: [V, E] the evidence's nuisance unknowns, flat, in its order; None for no such unknowns, or, in a
            start, for zeros.
    """

    x: Tensor
    y: Tensor
    joint: bool
    nuisance: Tensor | None = None

    @property
    def extra(self) -> Tensor:
        """The nuisance unknowns [V, E], E = 0 for none."""
        return self.x.new_zeros(len(self.x), 0) if self.nuisance is None else self.nuisance

    def at(self, rows: Sequence[int]) -> Starts:
        """Return the points of the victims `rows`."""
        keep = torch.tensor(rows, dtype=torch.int64)
        return Starts(self.x[keep], self.y[keep], self.joint, self.extra[keep])

    def to(self, dtype: torch.dtype) -> Starts:
        """Return the points in `dtype`."""
        return Starts(self.x.to(dtype), self.y.to(dtype), self.joint, self.extra.to(dtype))

    def flat(self) -> Tensor:
        """Return the unknowns [V, n]: images, nuisance, logits in units of `LOGIT`."""
        return self.joined(self.x, self.extra.to(self.x), self.y.to(self.x) / LOGIT)

    def joined(self, x: Tensor, extra: Tensor, logits: Tensor) -> Tensor:
        """Return the parts of a point, or of a gradient, in one row a victim; `logits` only where they are unknown."""
        return torch.cat([x.flatten(1), extra, *([logits.flatten(1)] if self.joint else [])], 1)

    def moved(self, z: Tensor, index: Tensor) -> Starts:
        """Return the victims `index` [S] at z [S, n], the inverse of `flat`."""
        pixels, extra = self.x[0].numel(), self.extra.shape[1]
        x = z[:, :pixels].view(-1, *self.x.shape[1:])
        y = LOGIT * z[:, pixels + extra :].view(-1, *self.y.shape[1:]) if self.joint else self.y[index].to(z)
        return Starts(x, y, self.joint, z[:, pixels : pixels + extra])

    @property
    def labels(self) -> Tensor:
        """The labels [V, N, C], soft where unknown; a single output's unknown target as it is."""
        return torch.softmax(self.y, -1) if self.joint and self.y.shape[-1] > 1 else self.y


@dataclass(frozen=True)
class Matches:
    """What was found.

    Attributes:
        ends: images (not clipped), labels and nuisance unknowns where the searches ended.
        mismatch: [V] float64, the minimized function: by default the discrepancy relative to that of an all-zero
            simulation; plus the prior, if any.
        evaluations: [V] int64 gradient evaluations.
        reasons: why each search ended.
    """

    ends: Starts
    mismatch: Tensor
    evaluations: Tensor
    reasons: tuple[Reason, ...]

    @property
    def x(self) -> Tensor:
        """The images [V, N, *shape]."""
        return self.ends.x

    @property
    def y(self) -> Tensor:
        """The labels [V, N, C], soft where they were unknown."""
        return self.ends.labels


@dataclass(frozen=True)
class ImagePrior:
    """Smoothed total variation and a soft box, for images [S, N, channels, height, width].

    Attributes:
        tv: weight of the mean over pixels of sqrt(dx^2 + dy^2 + eps^2), summed over a victim's batch.
        box: weight of the mean squared distance of pixels to [low, high].
        eps: where total variation turns from quadratic to linear, in units of the data.
    """

    tv: float = 0.0
    box: float = 0.0
    eps: float = 1e-2
    low: float = 0.0
    high: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the penalty [S]."""
        total = x.new_zeros(len(x))
        if self.tv:
            down, right = x[..., 1:, :-1] - x[..., :-1, :-1], x[..., :-1, 1:] - x[..., :-1, :-1]
            rough = (down**2 + right**2 + self.eps**2).sqrt()
            total = total + self.tv * rough.flatten(2).mean(2).sum(1)
        if self.box:
            outside = torch.relu(x - self.high) + torch.relu(self.low - x)
            total = total + self.box * (outside**2).flatten(2).mean(2).sum(1)
        return total


def usable(evidence: Evidence) -> bool:
    """Return whether the observation is finite and not zero: whether there is anything to match."""
    finite = all(bool(torch.isfinite(value).all()) for value in evidence.observed.values())
    return finite and float(evidence.scale()) > 0


def groups(evidences: Sequence[Evidence]) -> list[list[int]]:
    """Return the indices of evidence that can be attacked in one batch, in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for i, e in enumerate(evidences):
        alike = e.simulate.family() if isinstance(e.simulate, Mappable) else id(e.simulate)
        found.setdefault((alike, id(e.params), e.weight is None, e.measure, len(e.unit)), []).append(i)
    return list(found.values())


def match_gradients(
    evidences: Sequence[Evidence],
    starts: Starts,
    plan: Plan,
    *,
    budget: Tensor,
    stop: Tensor,
    unit: Tensor | None = None,
    prior: Prior | None = None,
    settings: Settings | None = None,
) -> Matches:
    """Minimize D / unit + prior for V victims from given starts.

    Args:
        evidences: V usable pieces of evidence (see `usable`); those that share `simulate` run in one batch.
        starts: where to begin, and whether labels are unknown.
        plan: the public plan.
        budget: [V] gradient evaluations allowed.
        stop: [V] value of the minimized function at which a victim is done.
        unit: [V] what D is divided by: None for `Evidence.scale()` (the function is the relative mismatch);
            2 std^2 makes it the negative log-likelihood under Gaussian noise.
        prior: penalty on the images, added as it is.
        settings: of the optimizer.
    """
    if unit is None:
        unit = torch.stack([e.scale().double() for e in evidences])
    starts = _with_nuisance(starts, evidences[0])
    z, counts = starts.flat(), torch.zeros(len(evidences), dtype=torch.int64)
    loss = torch.zeros(len(evidences), dtype=torch.float64)
    reasons: list[Reason] = ["stalled"] * len(evidences)
    for rows in groups(evidences):
        some = objective([evidences[i] for i in rows], plan, starts.x.shape[1], z.dtype)
        function = _function(some, starts.at(rows), unit[rows].to(z), prior)
        found = minimize(function, z[rows], budget=budget[rows], stop=stop[rows].double(), settings=settings)
        z[rows], loss[rows], counts[rows] = found.z, found.loss, found.evaluations
        for i, reason in zip(rows, found.reasons, strict=True):
            reasons[i] = reason
    return Matches(starts.moved(z, torch.arange(len(z), device=z.device)), loss, counts, tuple(reasons))


def _with_nuisance(starts: Starts, evidence: Evidence) -> Starts:
    """Return `starts` with zeros for nuisance unknowns that it leaves out."""
    size = sum(math.prod(shape) for shape in evidence.nuisance.values())
    if starts.extra.shape[1] == size:
        return starts
    return replace(starts, nuisance=starts.x.new_zeros(len(starts.x), size))


def _function(objective: Objective, starts: Starts, unit: Tensor, prior: Prior | None) -> Function:
    """Return the flat function that the optimizer sees: unpacks z, adds the prior, packs the gradient."""

    def function(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        point = starts.moved(z, index)
        y = point.labels
        loss, gx, gy, gn = objective(point.x, y, point.extra, index)
        if starts.joint:  # through the softmax; a single output's target is a number
            gy = LOGIT * (y * (gy - (y * gy).sum(-1, keepdim=True)) if y.shape[-1] > 1 else gy)
        gradient = starts.joined(gx, gn, gy) / unit[index][:, None]
        loss = loss / unit[index]
        if prior is not None:
            with torch.enable_grad():
                leaf = point.x.detach().requires_grad_()
                value = prior(leaf)
                (slope,) = torch.autograd.grad(value.sum(), leaf)
            loss = loss + value.detach()
            gradient[:, : slope[0].numel()] += slope.flatten(1)
        return loss, gradient

    return function
