"""Inputs read off the gradient of a first linear layer z = W x + b, by algebra instead of search.

For ANY scalar s of the network ds/dW = sum_n d_n x_n^T and ds/db = sum_n d_n with d_n = ds/dz_n. One example: row i of
ds/dW is x times entry i of ds/db (Phong et al. 2018, Sec. III). More: a ReLU unit that one example alone fires has it
alone in its row (Boenisch et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.label.recovery import read_labels
from ppbench.attacks.reconstruction.rows import FirstLayer, direction, first_layer, mean_image, recurring_rows
from ppbench.attacks.reconstruction.scale import EXPLAINED, Match, Mismatch, best_label, best_scale
from ppbench.attacks.reconstruction.search.starts import Victim, posed
from ppbench.federation.bounds import Count
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class AnalyticInversion(Attack):
    """Analytic inversion of a first `nn.Linear` on the flattened input.

    From an observation that is the gradient of some scalar of the network it finds:
    - one example, layer with biases: x by weighted least squares over all units, exact up to rounding; hidden entries
      (`Evidence.weight` 0) and those not finite are left out.
    - one example, no biases: x up to its scale is the leading right singular vector; sign from the data range, scale by
      a search for the smallest mismatch of the evidence, label by trying; `budget` limits these evaluations.
    - a batch, biases and ReLU: exactly each example that fires at least two units alone (their rows over the bias
      gradient are copies); the rest of the batch gets the mean of the remaining rows.
    Else, and where rows agree on an image no better than noise would, the answer is a start image.
    """

    name: ClassVar[str] = "analytic"
    kind: ClassVar[Kind] = "reconstruction"
    reference: ClassVar[str] = (
        "Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018; "
        "Boenisch et al., When the Curious Abandon Honesty: Federated Learning Is Not Private, EuroS&P 2023"
    )

    budget: Count = 2000

    def suits(self, plan: Plan) -> bool:
        """Return whether the network of `plan` begins with a linear layer on the flattened input."""
        return first_layer(plan) is not None

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; where the evidence tells no image, a grey start image and confidence None."""
        return self.answer(self.evidence(view), view.plan, challenges, generator)

    def answer(
        self, found: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        """Return the guesses of `run` from given evidence, such as another attack has made of a view."""
        self.check()
        layer = first_layer(plan)
        return [self._answer(victim, layer) for victim in posed(found, plan, challenges, generator)]

    def _answer(self, victim: Victim, layer: FirstLayer | None) -> Guess:
        start, labels = victim.image("grey"), guessed_labels(victim)
        rows = None if layer is None or victim.evidence is None else layer.rows(victim.evidence)
        if rows is None or victim.evidence is None:
            return Guess(x=start, y=labels, evaluations=1)
        if victim.size[0] > 1:
            exact = recurring_rows(rows, victim.size[0], victim.plan.data_range)
            rest = mean_image(rows.without(exact.members))
            images = start.flatten(1).double() if rest is None else rest.expand(len(start), -1)
            images = torch.cat([exact.images, images[len(exact.images) :]])
            return Guess(x=images.view(victim.size).float(), y=labels, evaluations=1)
        mismatch = Mismatch(victim.evidence, victim.plan, self.budget)
        image = mean_image(rows)
        found: Match | None
        if image is not None:
            found = best_label(mismatch, image, int(labels), victim.challenge.y is not None)
        else:
            found = self._scaled(victim, mismatch, direction(rows), int(labels))
        spent = max(1, mismatch.spent)  # reading the gradient counts as one
        if found is None:
            return Guess(x=start, y=labels, evaluations=spent)
        confidence = found.mismatch if math.isfinite(found.mismatch) else None
        x, y = found.image.view(victim.size).float(), torch.tensor([found.label])
        return Guess(x=x, y=y, confidence=confidence, evaluations=spent)

    def _scaled(self, victim: Victim, mismatch: Mismatch, image: Tensor | None, label: int) -> Match | None:
        """Return the best multiple of a direction: with the guessed label, with others where that explains little."""
        if image is None:
            return None
        found = best_scale(mismatch, image, [label])
        if victim.challenge.y is None and found.mismatch > EXPLAINED and victim.plan.spec.classes > 1:
            others = [c for c in range(victim.plan.spec.classes) if c != label]
            found = min(found, best_scale(mismatch, image, others), key=lambda match: match.mismatch)
        return found if math.isfinite(found.mismatch) else None


def guessed_labels(victim: Victim) -> Tensor:
    """Return labels [N] int64: granted, or read off the head's gradient, or drawn where that tells none."""
    if victim.challenge.y is not None:
        return victim.challenge.y.flatten(0, 1).argmax(-1)
    return read_labels(victim.evidence, victim.plan, victim.size[0], victim.generator)
