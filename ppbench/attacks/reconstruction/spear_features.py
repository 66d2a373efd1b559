"""Exact features of a batch from the first linear layer behind convolutions, then images with these features."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.dlg import match_gradients
from ppbench.attacks.reconstruction.rows import FirstLayer, first_layer, mean_image
from ppbench.attacks.reconstruction.search.priors import TotalVariation
from ppbench.attacks.reconstruction.search.starts import Starts, Victim
from ppbench.attacks.reconstruction.spear import Spear, arranged, batch_mismatch, separated_examples, tapped
from ppbench.base.tree import Params, tree_map
from ppbench.federation.bounds import NonNegative, PositiveInt
from ppbench.federation.evidence import Evidence, Mappable
from ppbench.federation.plan import Plan

STOP = 1e-12
"""Relative mismatch at which features, or the gradient, count as explained."""
FEATURES = "features"


@dataclass(frozen=True, eq=False)
class FlatFeatures(Mappable):
    """The input of the linear layer: the flat features of a batch, named "features"."""

    plan: Plan

    def family(self) -> Hashable:
        """Return the plan."""
        return FlatFeatures, self.plan

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the flat features [U * B, F] of a batch x [U, B, *shape], in the dtype of x; labels are ignored."""
        params = {name: value.to(x.dtype) for name, value in self.params.items()}
        return {FEATURES: self.plan.net.flat_features(params, x.flatten(0, 1))}


def feature_bounds(plan: Plan) -> tuple[float, float]:
    """Return the range of the flat features: from 0 if the last layer, except for pools, is a ReLU; else unlimited."""
    pools = nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d | nn.Dropout | nn.Identity
    layers = list(plan.net.module.layers or ())[: plan.net.flat_at]
    last = next((layer for layer in reversed(layers) if not isinstance(layer, pools)), None)
    return (0.0 if isinstance(last, nn.ReLU) else -math.inf), math.inf


@dataclass(frozen=True)
class SpearFeatures(Spear):
    """SPEAR behind convolutions: the exact features of each example, then images with these features and the gradient.

    The examples' features are separated at the first linear layer, if a ReLU follows. Each image is first searched
    alone by its features with a total variation, then all together by the whole gradient.

    Attributes:
        budget: gradient evaluations per victim: half of them for the features, the rest for the gradient.
        tv: weight of the total variation while features are matched (relative mismatch is 1 at first).
    """

    name: ClassVar[str] = "spear_features"
    standard: ClassVar[bool] = False

    budget: PositiveInt = 1000
    tv: NonNegative = 1e-4

    def suits(self, plan: Plan) -> bool:
        """Return whether convolutions come before a linear layer with a ReLU."""
        return plan.spec.classes > 1 and first_layer(plan) is None and tapped(plan) is not None

    def _answer(self, victim: Victim, layer: FirstLayer | None) -> Guess:
        evidence, layer = victim.evidence, tapped(victim.plan)
        inputs = None if layer is None else self._inputs(victim, layer)
        if evidence is None or evidence.params is None or inputs is None:
            return super()._answer(victim, None)
        order, labels = arranged(victim, evidence, inputs, victim.size[0])
        x, spent = self._by_features(victim, evidence.params, inputs[order])
        mismatch = batch_mismatch(evidence, victim.plan, x, labels)
        y = one_hot(labels, victim.plan.spec.classes)[None].to(x)
        if mismatch is not None and mismatch > STOP and self.budget > spent:
            starts = Starts(x[None].to(evidence.device), y.to(evidence.device), False)
            limit, stop = torch.tensor([self.budget - spent]), torch.tensor([STOP])
            matches = match_gradients([evidence], starts, victim.plan, budget=limit, stop=stop)
            spent += int(matches.evaluations)
            if float(matches.mismatch) < mismatch:
                x, mismatch = matches.ends.x[0].cpu(), float(matches.mismatch)
        return Guess(x=x.float(), y=labels, confidence=mismatch, evaluations=spent + 1)

    def _inputs(self, victim: Victim, layer: FirstLayer) -> Tensor | None:
        """Return the flat features [k, F] float64 of the batch's examples, None if they cannot be separated."""
        if victim.size[0] > 1:
            separation = separated_examples(victim, layer, feature_bounds(victim.plan), self.draws)
            return None if separation is None else separation.inputs
        rows = None if victim.evidence is None else layer.rows(victim.evidence)
        image = None if rows is None else mean_image(rows)
        return None if image is None else image[None]

    def _by_features(self, victim: Victim, params: Params, inputs: Tensor) -> tuple[Tensor, int]:
        """Return images [N, *shape] float32 with the features `inputs` [N, F], and the most evaluations of any."""
        plan, device = victim.plan, next(iter(params.values())).device
        simulate = FlatFeatures(tree_map(lambda t: t.detach(), params), plan)
        unit = victim.challenge.unit[:1]
        targets = [Evidence(unit, {FEATURES: features[None].to(device)}, simulate) for features in inputs.nan_to_num()]
        x = victim.image("grey").to(device)[:, None]
        starts = Starts(x, x.new_zeros(len(x), 1, plan.spec.classes), False)
        limit, stop = torch.full((len(x),), max(1, self.budget // 2)), torch.full((len(x),), STOP)
        matches = match_gradients(
            targets, starts, plan, budget=limit, stop=stop, prior=TotalVariation(self.tv) if self.tv else None
        )
        return matches.ends.x[:, 0].cpu(), int(matches.evaluations.max())
