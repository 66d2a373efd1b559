"""The attack aware of BAFFLE's directions: images whose gradient has the observed sketch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.baffle_labels import sketched_labels
from ppbench.attacks.adaptive.baffle_sketch import sketch_evidence, sketches
from ppbench.attacks.reconstruction.dlg import DLG, IDLG
from ppbench.attacks.reconstruction.search.priors import ImagePrior, Penalty
from ppbench.attacks.reconstruction.search.starts import Label
from ppbench.federation.bounds import NonNegative
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.metrics.modalities import modality_from


@dataclass(frozen=True)
class BaffleSketch(DLG):
    """Gradient matching on sketches: minimize ||Z grad(x, y) - s||^2 / ||s||^2 over images, all rounds together.

    Labels come from the same sketch first. At epoch level an update that is a plain sum of estimates is split into its
    steps' sketches. Without sketches the attack is iDLG on the defense's evidence.

    Attributes:
        hopeless: of DLG; sketches are nearly exact, so a search that ends above it ended in a local minimum, of which
            trained networks have many.
        smoothness: weight of the total variation of images, which determines pixels that too few equations leave open.
        box: weight of the mean squared distance of pixels from the data range.
    """

    label: Label = "inferred"
    restarts: int = 6
    hopeless: float = 3e-4
    patience: int = 50
    progress: float = 0.02
    smoothness: NonNegative = 1e-4
    box: NonNegative = 1.0

    name: ClassVar[str] = "baffle_sketch"
    version: ClassVar[str] = "2"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"baffle"})
    reference: ClassVar[str] = "this project; gradient matching of Zhu, Liu and Han 2019 on Feng et al. 2023"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the sketches of the view's units; the plain evidence where there are none."""
        return sketch_evidence(view, sketches(view)) or super().evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge. The confidence is the minimized function: relative mismatch and prior."""
        known = {sketch.unit: sketch for sketch in sketches(view)}
        if not known:
            return IDLG(label=self.label, budget=self.budget).run(view, challenges, generator)
        infer, labelled = self.label == "inferred" and view.plan.spec.classes > 1, []
        for challenge in challenges:
            sketch, count = known.get(challenge.unit), len(challenge.unit) * challenge.batch
            if sketch is not None and challenge.y is None and infer:
                labels = sketched_labels(view.plan, sketch, count, generator)
                if labels is not None:
                    y = one_hot(labels, view.plan.spec.classes).float()
                    challenge = replace(challenge, y=y.unflatten(0, (len(challenge.unit), -1)))
            labelled.append(challenge)
        return super().run(view, labelled, generator)

    def prior(self, evidence: Evidence, plan: Plan) -> Penalty | None:
        """Return the prior on images."""
        if not modality_from(plan.spec.shape, plan.loss).smooth or not (self.smoothness or self.box):
            return None
        low, high = plan.data_range
        return ImagePrior(self.smoothness, self.box, low=low, high=high)
