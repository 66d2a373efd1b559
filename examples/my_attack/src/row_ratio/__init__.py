"""An attack of your own: divide the first layer's weight gradient by its bias gradient, and there is the image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.api import Attack, Challenge, Guess, Kind, Params, Plan, View


@dataclass(frozen=True)
class RowRatio(Attack):
    """Row i of dL/dW over dL/db_i is the input, exactly, where a first linear layer saw one example.

    Takes the rows with the largest bias gradients, one for each image of a batch: of several images a row is a mixture.

    Attributes:
        smallest: bias gradients below it count as 0: there is nothing to divide by.
    """

    smallest: float = 1e-12

    name: ClassVar[str] = "row_ratio"
    contract: ClassVar[int] = 1
    kind: ClassVar[Kind] = "reconstruction"
    reference: ClassVar[str] = "Phong et al., Privacy-Preserving Deep Learning via Additively HE, IEEE TIFS 2018"

    def suits(self, plan: Plan) -> bool:
        """Return whether the network begins with a linear layer with biases on the flattened input."""
        names, width = plan.net.names, math.prod(plan.spec.shape)
        shapes = {name: tuple(value.shape) for name, value in plan.net.module.named_parameters()}
        first = shapes[names[0]]
        return plan.spec.classes > 1 and len(first) == 2 and first[1] == width and shapes[names[1]] == (first[0],)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; where nothing can be read it is drawn from `generator`."""
        updates = {frozenset(evidence.unit): evidence.observed for evidence in self.evidence(view)}
        return [self._guess(view.plan, updates.get(frozenset(c.unit)), c, generator) for c in challenges]

    def _guess(self, plan: Plan, update: Params | None, challenge: Challenge, generator: torch.Generator) -> Guess:
        count = len(challenge.unit) * challenge.batch
        x = torch.rand(count, *plan.spec.shape, generator=generator)  # always drawn: one victim must not move another's
        y = torch.randint(0, plan.spec.classes, (count,), generator=generator)
        if update is None or not self.suits(plan):
            return Guess(x=x, y=y, evaluations=1)
        weight, bias = (update[name].double() for name in plan.net.names[:2])
        rows = bias.abs().nan_to_num(0, 0, 0).topk(min(count, len(bias))).indices
        for place, row in enumerate(rows.tolist()):
            image = (weight[row] / bias[row]).float().view(plan.spec.shape)
            if abs(float(bias[row])) > self.smallest and bool(image.isfinite().all()):
                x[place] = image
        return Guess(x=x, y=labels(update, y), evaluations=1)


def labels(update: Params, otherwise: Tensor) -> Tensor:
    """Return the classes with the smallest gradients of the head's bias, `otherwise` where it says nothing.

    With one example and cross-entropy only its own class has a negative one (iDLG).
    """
    head = update.get("head.bias")
    if head is None or not bool(head.isfinite().all()) or float(head.max()) == float(head.min()):
        return otherwise
    return head.argsort()[torch.arange(len(otherwise)) % len(head)]
