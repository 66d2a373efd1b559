"""Inverting gradients with the features that the head's gradient gives away.

The cosine of gradients forgets their lengths, and gradients of networks with kinks change abruptly. The features of a
batch, read exactly off the head's gradient, change smoothly with the images and say what these are as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from ppbench.attacks.reconstruction.features import ACCEPT, recover_features
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.search.descent import ValueFunction, evidence_of
from ppbench.attacks.reconstruction.search.problem import Problem, RowValue
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.tree import Params
from ppbench.federation.bounds import NonNegative
from ppbench.federation.plan import Plan
from ppbench.nets.channels import has_kinks
from ppbench.nets.classifier import HEAD_NAMES
from ppbench.nets.net import Net


@dataclass(frozen=True)
class IGFeatures(IG):
    """Inverting gradients, and the distance from the features that the head's gradient shows; on kinked convolutions.

    For a victim whose features are not exact (noise, hidden entries, as many examples in a batch as classes), it is
    `ig`.

    features: weight of the squared distance from the recovered features, relative to their squared length.
    """

    name: ClassVar[str] = "ig_features"
    version: ClassVar[str] = "2"
    reference: ClassVar[str] = "Geiping et al. 2020; features as in the authors' later code (breaching, `modern`)"

    features: NonNegative = 1.0

    def suits(self, plan: Plan) -> bool:
        """Return whether a network of convolutions has kinks, and a head with a weight and a bias, both trained."""
        return super().suits(plan) and set(HEAD_NAMES) <= set(plan.net.names) and has_kinks(plan.net)

    def evaluated(self, problem: Problem, victims: Sequence[PosedVictim]) -> ValueFunction:
        """Return `problem`, plus the distance from the features of the victims where these are exact."""
        labels, params = problem.starts.y[:: problem.tries], evidence_of(victims[0]).params
        read = [None if problem.starts.joint else read_features(v, y) for v, y in zip(victims, labels, strict=True)]
        like = next((features for features in read if features is not None), None)
        if like is None or params is None:
            return problem
        goal = torch.stack([torch.zeros_like(like) if features is None else features for features in read])
        size = goal.square().flatten(1).sum(1)
        weight = torch.where(size > 0, self.features / size, 0.0)
        return WithFeatures(problem, victims[0].plan.net, params, goal, weight)


@dataclass(frozen=True)
class WithFeatures:
    """A problem plus the distance of the images' features from known ones.

    params: the weights that one block of victims shares. goal: features [V, N, D] float32. weight: [V], of the squared
    distance; 0 for victims without known features.
    """

    problem: Problem
    net: Net
    params: Params
    goal: Tensor
    weight: Tensor

    def softened(self, width: float) -> WithFeatures:
        """Return the same problem with smoothed ReLUs, see `soft_kinks`; the features are those of the network."""
        return replace(self, problem=self.problem.softened(width))

    def __call__(self, z: Tensor, index: Tensor) -> RowValue:
        """Return the value of whole rows z [S, n] of the starts `index` [S]; the score counts the distance, too."""
        value, victim = self.problem(z, index), index // self.problem.tries
        size = self.problem.space.size
        with torch.enable_grad():
            x = z[:, :size].detach().unflatten(1, self.problem.starts.x.shape[1:]).requires_grad_()
            seen = vmap(partial(self.net.features, self.params))(x)  # norms take the statistics of one victim's batch
            distance = self.weight[victim] * (seen - self.goal[victim]).square().flatten(1).sum(1)
            (slope,) = torch.autograd.grad(distance.sum(), x)
        gradient = torch.cat([value.gradient[:, :size] + slope.flatten(1), value.gradient[:, size:]], 1)
        return RowValue(value.loss + distance.detach(), gradient, value.score + distance.detach())


def read_features(victim: PosedVictim, y: Tensor) -> Tensor | None:
    """Return the features [N, D] float32 of a victim with labels y [N, C], in their order; None if not exact."""
    evidence = evidence_of(victim)
    hidden = evidence.weight is not None or evidence.noise is not None
    if hidden or evidence.params is None or not evidence.observed.keys() >= set(HEAD_NAMES):
        return None
    weight, bias = (evidence.observed[name].detach().float().cpu() for name in HEAD_NAMES)
    head = {name: evidence.params[name].detach().cpu() for name in HEAD_NAMES}
    if not bool(weight.isfinite().all() & bias.isfinite().all()):
        return None
    features = recover_features(head, weight, bias, y.argmax(-1).cpu(), victim.generator)
    usable = features.exact and features.residual <= ACCEPT and bool(features.value.isfinite().all())
    return features.value.to(y) if usable else None
