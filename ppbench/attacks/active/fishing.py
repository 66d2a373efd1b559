"""Class fishing: a head by which the gradient of each class is that of its own examples alone.

Wen et al., "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification", ICML 2022: with logits
that do not depend on the input, and a probability near 0 for the fished class, its row of the head's gradient holds the
features of its examples. One class with a large logit lets all others be fished at once. Convolutions are made to pass
the image on, so that these features are images. To fish one example out of several of its class takes their feature
fishing over many rounds; a probe has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.attacks.active.wiring import WRONG, ActiveInversion, convolutions, passing, shown_images, silent_weights
from ppbench.base.tree import Params
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan


@dataclass(frozen=True)
class ClassFishing(ActiveInversion):
    """The image of each class with one example in a batch; the mean image of classes with several.

    For networks of convolutions (and average pools) up to the head, which have no layer for trap weights.
    """

    name: ClassVar[str] = "fishing"
    reference: ClassVar[str] = (
        "Wen et al., Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification, ICML 2022"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether the network is convolutions that can pass the whole image on, and a head with biases."""
        whole = plan.net.feature_count >= math.prod(plan.spec.shape)
        return whole and plan.spec.classes > 2 and plan.loss == "cross_entropy" and bool(convolutions(plan))

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return pass-throughs and a head that always predicts the first class; weights without gradient for others."""
        layers, like = convolutions(before.plan), before.server.params
        params = {name: value.detach().cpu() for name, value in like.items()}
        trap = {**params, **passing(layers, params, before.plan.data_range)}
        trap |= {name: torch.zeros_like(params[name]) for name in ("head.weight", "head.bias")}
        trap["head.bias"][0] = WRONG
        return Sent(trap, None if before.target is None else silent_weights(layers[-1], params, before.plan.loss_name))

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return the images behind the mean features of each fished class."""
        rows = evidence.observed.get("head.weight", torch.zeros(1, plan.net.feature_count))
        means = _means(plan, params, -plan.local.batch * rows[1:].detach().double().cpu())
        return shown_images(plan, convolutions(plan), params, means)[:count]


def _means(plan: Plan, params: Params, sums: Tensor) -> Tensor:
    """Return the mean features [K, F] of the classes in a batch, from sums [C - 1, F] over their examples.

    The number of examples is the sum over a grey image's features, as features differ little between images.
    """
    with torch.no_grad():
        grey = plan.net.flat_features(params, torch.full((1, *plan.spec.shape), sum(plan.data_range) / 2)).double()[0]
    counts = ((sums @ grey) / grey.square().sum()).round()
    present = (counts >= 1) & sums.isfinite().all(1)
    return sums[present] / counts[present, None]
