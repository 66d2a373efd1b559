"""FedAvg inversion: images from what local training made of them, by simulating that training (Geiping et al. 2020).

Where a client's images fill several local batches, their order is unknown (Dimitrov et al. 2022): it is relaxed to
weights of the images in each step, searched with them, rounded to the nearest order, and fixed for a last search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.dlg import DLG, Matches, match_gradients
from ppbench.attacks.reconstruction.local_steps import LocalTraining, rounded, trained_evidence
from ppbench.attacks.reconstruction.search.priors import ImagePrior, Penalty
from ppbench.attacks.reconstruction.search.starts import Label, Victim
from ppbench.federation.bounds import Count, NonNegative
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

RELAXED = 0.7
"""Share of the budget for images together with their order."""


@dataclass(frozen=True)
class FedAvgInversion(DLG):
    """Images from an update of several local steps, by differentiating through a simulation of these steps.

    On gradients, and a single local step, it is iDLG. Under Adam it looks for images whose gradient has the signs seen,
    with a total variation of weight `tv`. An evaluation costs as many gradients as there are local steps.
    """

    name: ClassVar[str] = "fedavg_inversion"
    version: ClassVar[str] = "2"
    probes: ClassVar[tuple[str, ...]] = ("local",)
    reference: ClassVar[str] = "Geiping et al., Inverting Gradients, NeurIPS 2020; Dimitrov et al., TMLR 2022"

    label: Label = "inferred"
    budget: Count = 600
    restarts: int = 1
    tv: NonNegative = 0.001

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with the whole local training as its simulation, see `trained_evidence`."""
        return trained_evidence(view)

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims that `batches` put together."""
        return super().attack([prepared(victim) for victim in victims])

    def prior(self, evidence: Evidence, plan: Plan) -> Penalty | None:
        """Return a smooth image in the data range where only signs are observed."""
        if evidence.measure != "hinge" or len(plan.spec.shape) != 3:
            return None
        low, high = plan.data_range
        return ImagePrior(self.tv / (high - low), 1.0, 1e-2 * (high - low), low, high)

    def matched(self, victims: Sequence[Victim], stop: Tensor) -> Matches:
        """Return the best match of each victim; of images in an unknown order, the better of relaxed and rounded."""
        evidences = [victim.evidence for victim in victims if victim.evidence is not None]
        training = evidences[0].simulate
        if not evidences[0].nuisance or not isinstance(training, LocalTraining):
            return super().matched(victims, stop)
        best = DLG.matched(replace(self, budget=max(1, int(RELAXED * self.budget))), victims, stop)
        rows = [i for i, spent in enumerate(best.evaluations.tolist()) if spent < self.budget]
        if not rows:
            return best
        start = best.ends.at(rows)
        order = rounded(training, start.extra.view(-1, *evidences[0].nuisance["order"])).flatten(1)
        again = match_gradients(
            [evidences[i] for i in rows],
            replace(start, nuisance=order),
            victims[0].plan,
            budget=self.budget - best.evaluations[rows],
            stop=stop[rows],
            settings=self.settings,
        )
        return best.merged(rows, again, again.mismatch < best.mismatch[rows])


def prepared(victim: Victim) -> Victim:
    """Return the victim with what its evidence is about a batch of known size.

    One local step is one gradient. Otherwise labels are read off the update as if it were one, and the order of images
    that fill more than one local batch is an unknown.
    """
    evidence = victim.evidence
    if evidence is None or not isinstance(evidence.simulate, LocalTraining):
        return victim
    count, training = victim.challenge.batch, evidence.simulate
    gradient = training.as_gradient(evidence, count)
    if len(training.steps(count)) == 1 and evidence.measure == "squares":
        return replace(victim, evidence=gradient)
    if count > training.plan.local.batch:
        evidence = replace(evidence, nuisance={"order": (len(evidence.unit), len(training.steps(count)), count)})
    return replace(victim, evidence=evidence, gradient=gradient)
